"""
Read a model: of a run, of a Hugging Face folder or repository, or adapters on their start model.

    load_hf               an Apertus, from a folder with all its weights
    load_any              (model, Tokenizer), also with adapters
    load_for_inference    the same on a device and in a dtype that are given by name

Safetensors and JSON are read, and no code of a repository is run.
"""

# Before torch: it sets environment variables that torch reads when it loads.
from engine.hardware import pick_device, pick_dtype

# isort: split
import sys

import torch

from engine import restore
from engine.files import in_one_line
from engine.runs import is_unfinished, settings_of
from tokenizer import load_for
from weights.folders import folder_of, has_adapter, shape_in, weights_in
from weights.hashes import check_start, weights_hash
from weights.lora import add_lora, load_adapter, lora_config, read_peft_config
from weights.quantised import block_matrices, quantise_matrix
from weights.stored import StoredWeights, meta_model


def load_hf(path_or_repo, device="cpu", dtype=None, base=""):
    """
    The Apertus in a Hugging Face folder or repository, or of a run that trained all weights. dtype: None = that of each
    stored tensor. base: int8 or nf4, of the matrices of its blocks, which are quantised one by one as they are read.

    Peak memory is the model plus one tensor. ValueError, one line, if the folder does not hold the model that its
    config.json describes.
    """
    folder = folder_of(path_or_repo)
    path = weights_in(folder)
    model = meta_model(shape_in(folder))
    quantised = block_matrices(model).keys() if base else ()
    stored = StoredWeights(path, model)
    for name in stored.parameters:
        owner, _, leaf = name.rpartition(".")
        tensor = stored.read(name, dtype, device)
        if owner in quantised:
            quantise_matrix(model, owner, tensor, base)
        else:
            setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(tensor))
    if model.config.tie_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.requires_grad_(not base)


def load_any(name, device="cpu", dtype=None, base=""):
    """
    (model, Tokenizer) of a run folder, a Hugging Face folder or name, or a folder of adapters, which are put on their
    start model. dtype, base: as in load_hf(). ValueError, one line, for anything else, or if adapters were trained on
    other weights than their start model has today.
    """
    folder = folder_of(name)
    with in_one_line(folder, ValueError, OSError, torch.OutOfMemoryError):
        if has_adapter(folder):
            _, start = read_peft_config(folder)
            model, tok = load_any(start, device, dtype, base)
            load_adapter(model, folder, weights_hash(model))
            return model, tok
        adapters = lora_config(settings_of(folder))
        # The vocabulary comes before the weights, which take minutes: an error comes early.
        tok = padded_tokenizer(folder)
        if adapters:
            return load_adapted(folder, adapters, device, dtype, base), tok
        return load_hf(folder, device, dtype, base), tok


def padded_tokenizer(folder):
    """The Tokenizer of a model's folder, with an id for each row of the embedding. ValueError if they do not fit."""
    rows, tok = shape_in(folder).vocab_size, load_for(folder)
    if not tok.vocab_size <= rows < tok.vocab_size + 1024:
        raise ValueError(f"{folder}: the model has {rows} ids and its tokenizer {tok.vocab_size}: they do not belong "
                         "together")
    tok.vocab_size = rows                                  # rows that pad the embedding decode to nothing
    return tok


def load_adapted(folder, adapters, device, dtype, base):
    """The model of a run with adapters: its start model, and the adapters of its newest checkpoint."""
    settings = settings_of(folder)
    start = settings["init_from"]
    model, _ = load_any(start, device, dtype, base)
    check_start(folder, settings.get("start_sha256"), weights_hash(model), start)
    add_lora(model, adapters)
    restore.load_checkpoint(weights_in(folder), model)
    model.config = shape_in(folder)                        # the run may have changed its window and RoPE
    return model


def load_for_inference(name, device, dtype, base=""):
    """
    load_any() to generate or evaluate; a line on stderr says that a run has not ended. device, dtype: by name, or
    "auto", the dtype of the weights, bf16 on CUDA.
    """
    device = pick_device(device)
    weight_dtype = torch.bfloat16 if "cuda" in device else None
    if dtype != "auto":
        weight_dtype = pick_dtype(dtype, device)
    model, tok = load_any(name, device, weight_dtype, base)
    if is_unfinished(name):
        print(f"{name} has not ended: its newest checkpoint is read", file=sys.stderr)
    return model.eval(), tok
