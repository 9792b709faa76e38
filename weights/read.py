"""
Read a model: of a run, of a Hugging Face folder or repository, or adapters on their base model.
"""

# Before torch: it sets environment variables that torch reads when it loads.
from engine.hardware import pick_device, pick_dtype

# isort: split
import torch

from engine import restore
from engine.files import in_one_line
from engine.runs import settings_of
from tokenizer import load_for
from weights import lora
from weights.folders import folder_of, has_adapter, shape_in, weights_in
from weights.hashes import check_start, weights_hash
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
    matrices = ()
    if base:
        matrices = block_matrices(model)
    stored = StoredWeights(path, model)
    for name in stored.parameters:
        owner, _, leaf = name.rpartition(".")
        if owner in matrices:
            quantise_matrix(model, owner, stored.read(name, dtype, device), base)
        else:
            setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(stored.read(name, dtype, device)))
    if model.config.tie_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.requires_grad_(not base)


def load_any(name, device="cpu", dtype=None, base=""):
    """
    (model, Tokenizer) of a run folder, a Hugging Face folder or name, or a folder of adapters, which are put on their
    base model. dtype, base: as in load_hf(). ValueError, one line, for anything else, or if adapters were trained on
    other weights than their base model has today.
    """
    folder = folder_of(name)
    with in_one_line(folder, ValueError, OSError, torch.OutOfMemoryError):
        if has_adapter(folder):
            _, start = lora.read_peft_config(folder)
            model, tok = load_any(start, device, dtype, base)
            lora.load_adapter(model, folder, weights_hash(model))
            return model, tok
        settings = settings_of(folder)
        adapters = lora.lora_config(settings)
        # The vocabulary comes before the weights, which take minutes: an error comes early.
        shape, tok = shape_in(folder), load_for(folder)
        ids, rows = tok.vocab_size, shape.vocab_size
        if not ids <= rows < ids + 1024:
            raise ValueError(f"{folder}: the model has {rows} ids and its tokenizer {ids}: they do not belong together")
        tok.vocab_size = rows                              # rows that pad the embedding decode to nothing
        if adapters:
            start = settings["init_from"]
            model, _ = load_any(start, device, dtype, base)
            check_start(folder, settings.get("start_sha256"), weights_hash(model), start)
            lora.add_lora(model, adapters)
            restore.load(weights_in(folder), model)
            model.config = shape                           # the run may have changed its window and RoPE
            return model, tok
        return load_hf(folder, device, dtype, base), tok


def load_for_inference(name, device, dtype, base=""):
    """load_any() to generate or evaluate. device, dtype: by name, or "auto", the dtype of the weights, bf16 on CUDA."""
    device = pick_device(device)
    weight_dtype = torch.bfloat16 if "cuda" in device else None
    if dtype != "auto":
        weight_dtype = pick_dtype(dtype, device)
    model, tok = load_any(name, device, weight_dtype, base)
    return model.eval(), tok
