"""
Stored weights, read tensor by tensor: a checkpoint of a run, or safetensors under the published names.

The parameters of model.py have the published names, so no table of names is needed. Peak memory is the model plus one
tensor. engine/restore.py has verified a checkpoint; files of others are checked here before a value is used.
"""

import math
import os

import torch

from engine import restore
from model import XIELU, Apertus

# The numbers of xIELU that are stored as tensors, although all models have the same.
CONSTANTS = dict(beta=XIELU.BETA, eps=XIELU.EPS)
OMNI = "model.language_model."      # before the names of Apertus 1.5's text model, in place of "model."


@torch.no_grad()
def read_weights(model, path):
    """Read the weights of a model, whole or in shards, except adapters. path: as start_of() returns it."""
    stored = StoredWeights(path, model)
    for name, p in stored.parameters.items():
        stored.read_into(name, p)


def meta_model(shape):
    """An Apertus on the meta device: names and shapes without memory."""
    with torch.device("meta"):
        return Apertus(shape, seed=None)


class StoredWeights:
    """
    The weights of a model at a path of weights_in(). Their attributes:

        parameters    {published name: parameter} of the model, which may be on the meta device; without adapters
        keys          {published name: key in the files}
        entries       {key in the files: its metadata, of torch.distributed.checkpoint}

    ValueError, one line, if the names or shapes are not those of the model.
    """

    def __init__(self, path, model):
        # An adapted matrix is the `base` of its LoRALinear.
        self.parameters = {name.replace(".base.", "."): p
                           for name, p in model.named_parameters() if ".lora_" not in name}
        if os.path.isfile(f"{path}/manifest.json"):
            self.keys = {name: f"model/{name}" for name in self.parameters}
            expected = {self.keys[name]: p for name, p in self.parameters.items()}
            self.reader, self.entries = restore.reader_for(path, expected)
            return
        self.reader, self.entries = restore.reader_for(path, {})
        # Apertus 1.5 also stores the tokenizers of images and sound.
        self.keys = {key.replace(OMNI, "model.", 1): key for key in self.entries if "_tokenizer." not in key}
        if model.config.tie_embeddings:
            self.keys.pop("lm_head.weight", None)          # the 0.5B stores it all the same
        constants = {name for name in self.keys if name.endswith(("act_fn.beta", "act_fn.eps"))}
        check_names(path, self.keys.keys() - constants, self.parameters.keys())
        check_whole(path, self.keys, self.entries)
        leave_out_media(self.entries, self.parameters)
        self.check_shapes(path, constants)
        self.check_constants(path, constants)

    def check_shapes(self, path, constants):
        """ValueError if a tensor has another shape than in the model. constants: names of those of xIELU, (1,)."""
        shapes = {name: p.shape for name, p in self.parameters.items()} | dict.fromkeys(constants, (1,))
        for name, shape in shapes.items():
            size = self.entries[self.keys[name]].size
            if (size or (1,)) != shape:
                raise ValueError(f"{path}: {name} is {[*size]}, and config.json describes {[*shape]}")

    def check_constants(self, path, constants):
        """ValueError if a constant of xIELU has another value than in model.py."""
        for name in constants:
            value, ours = self.read(name).item(), CONSTANTS[name.rpartition(".")[2]]
            if not math.isclose(value, ours, rel_tol=0.02):          # fp16 rounds -1e-6 to -1.013e-6
                raise ValueError(f"{path}: {name} is {value}, and model.py has {ours}")

    def read(self, name, dtype=None, device="cpu"):
        """A tensor. dtype: None = as it is stored."""
        entry = self.entries[self.keys[name]]
        # Not empty(): if parts overlap, some rows are never written.
        tensor = torch.zeros(entry.size, dtype=dtype or entry.properties.dtype, device=device)
        self.copy_stored(name, tensor)
        return tensor if entry.size else tensor.view(1)    # Apertus 1.5 stores scalars without a dimension

    def read_into(self, name, p):
        """Read a tensor into a parameter, whole or this rank's shard of it."""
        if self.entries[self.keys[name]].size:
            self.copy_stored(name, p)
        else:
            restore.copy_into(p, self.read(name))

    def copy_stored(self, name, tensor):
        """Copy stored values into a tensor of the stored shape, or into this rank's shard of it."""
        import torch.distributed.checkpoint as dcp  # here, since it takes a second

        dcp.load({self.keys[name]: tensor}, storage_reader=self.reader, no_dist=True)


def check_names(path, stored, parameters):
    """ValueError if the names of the stored tensors are not those of the model's parameters."""
    if unmatched := stored ^ parameters:
        raise ValueError(f"{path}: {len(unmatched)} tensors are missing, or not of the model that config.json "
                         f"describes, {min(unmatched)} among them; a run has its first weights after checkpoint_every "
                         "steps")


def check_whole(path, keys, entries):
    """ValueError if a tensor is not stored once and whole."""
    for name, key in keys.items():
        # A header may say where a part of a tensor lies in it: all parts together must be the whole tensor, once.
        if sum(part.sizes.numel() for part in entries[key].chunks) != entries[key].size.numel():
            raise ValueError(f"{path}: {name} is stored in part only, or twice")


def leave_out_media(entries, parameters):
    """Of the embedding of Apertus 1.5 take the rows of text, which come before those of images and sound."""
    entry = entries.get(f"{OMNI}embed_tokens.weight")
    if entry:
        n_text = parameters["model.embed_tokens.weight"].shape[0]
        # DCP fills the tensor into which it reads, if the entry has the same number of rows.
        entry.size = torch.Size([min(n_text, entry.size[0]), *entry.size[1:]])
