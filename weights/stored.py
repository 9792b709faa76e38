"""
Stored weights, read tensor by tensor: a checkpoint of a run, or safetensors under the published names.
"""

import math
import os

import torch

from engine import restore
from model import XIELU, Apertus

# The numbers of xIELU that are stored as tensors, although all models have the same.
CONSTANTS = dict(beta=XIELU.BETA, eps=XIELU.EPS)

def meta_model(shape):
    """An Apertus on the meta device: names and shapes without memory."""
    with torch.device("meta"):
        return Apertus(shape, seed=None)


def published_parameters(model):
    """{published name: parameter} of a model without its adapters. (LoRALinear holds its matrix as `base`.)"""
    return {name.replace(".base.", "."): p for name, p in model.named_parameters() if ".lora_" not in name}


class StoredWeights:
    """
    The weights of a model at a path of weights_in(): a checkpoint, or safetensors under the published names.

    The model may be on the meta device, and have adapters, which are left out. ValueError, one line, if the names or
    shapes are not those of the model.
    """

    def __init__(self, path, model):
        self.path = path
        self.parameters = published_parameters(model)
        self.keys = {name: f"model/{name}" for name in self.parameters}      # {name: its key in the files}
        of_run = os.path.isfile(f"{path}/manifest.json")
        expected = {self.keys[name]: p for name, p in self.parameters.items()} if of_run else {}
        self.reader, self.entries = restore.reader_for(path, expected)       # entries: {key: metadata}
        if not of_run:
            # Apertus 1.5 also stores the tokenizers of images and sound.
            self.keys = {key.replace("model.language_model.", "model.", 1): key
                         for key in self.entries if "_tokenizer." not in key}
        if model.config.tie_embeddings:
            self.keys.pop("lm_head.weight", None)          # the 0.5B stores it all the same
        constants = [name for name in self.keys if name.endswith(("act_fn.beta", "act_fn.eps"))]
        self.check_names(constants)
        shapes = {name: p.shape for name, p in self.parameters.items()} | dict.fromkeys(constants, (1,))
        for name in shapes:
            self.check_whole(name)
        self.select_text_rows()
        for name, shape in shapes.items():
            self.check_shape(name, shape)
        for name in constants:
            self.check_constant(name)

    def check_names(self, constants):
        """ValueError if the stored tensors, other than constants, are not the parameters of the model."""
        if unmatched := (self.keys.keys() - set(constants)) ^ self.parameters.keys():
            raise ValueError(f"{self.path}: {len(unmatched)} tensors are missing, or not of the model that config.json "
                             f"describes, {min(unmatched)} among them; a run has its first weights after "
                             "checkpoint_every steps")

    def check_whole(self, name):
        """ValueError if a tensor is not stored once and whole."""
        entry = self.entries[self.keys[name]]
        # A header may say where a part of a tensor lies in it: all parts together must be the whole tensor, once.
        if sum(part.sizes.numel() for part in entry.chunks) != entry.size.numel():
            raise ValueError(f"{self.path}: {name} is stored in part only, or twice")

    def select_text_rows(self):
        """Of the embedding of Apertus 1.5 take the rows of text, which come before those of images and sound."""
        entry = self.entries.get("model.language_model.embed_tokens.weight")
        if entry:
            n_text = self.parameters["model.embed_tokens.weight"].shape[0]
            entry.size = torch.Size([min(n_text, entry.size[0]), *entry.size[1:]])

    def check_shape(self, name, shape):
        """ValueError if a tensor has another shape than in the model."""
        size = self.entries[self.keys[name]].size
        if (size or (1,)) != shape:
            raise ValueError(f"{self.path}: {name} is {[*size]}, and config.json describes {[*shape]}")

    def check_constant(self, name):
        """ValueError if a constant of xIELU has another value than in model.py."""
        value, constant = self.read(name).item(), CONSTANTS[name.rpartition(".")[2]]
        if not math.isclose(value, constant, rel_tol=0.02):          # fp16 rounds -1e-6 to -1.013e-6
            raise ValueError(f"{self.path}: {name} is {value}, and model.py has {constant}")

    def read(self, name, dtype=None, device="cpu"):
        """A tensor. dtype: None = as it is stored."""
        entry = self.entries[self.keys[name]]
        # Not empty(): if parts overlap, some rows are never written.
        tensor = torch.zeros(entry.size, dtype=dtype or entry.properties.dtype, device=device)
        self.load_into(name, tensor)
        return tensor if entry.size else tensor.view(1)    # Apertus 1.5 stores scalars without a dimension

    def fill(self, name, p):
        """Read a tensor into a parameter, whole or this rank's shard of it."""
        if self.entries[self.keys[name]].size:
            self.load_into(name, p)
        else:
            restore.copy_into(p, self.read(name))

    def load_into(self, name, tensor):
        import torch.distributed.checkpoint as dcp  # here, since it takes a second

        dcp.load({self.keys[name]: tensor}, storage_reader=self.reader, no_dist=True)


@torch.no_grad()
def read_weights(model, path):
    """Read the weights of a model, whole or in shards, except adapters. path: as start_of() returns it."""
    stored = StoredWeights(path, model)
    for name, p in stored.parameters.items():
        stored.fill(name, p)
