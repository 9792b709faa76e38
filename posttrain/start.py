"""
The start model of a run, and adapters next to its weights: for train.py --init_from, SFT and QRPO.

`settings`, a dict, has all settings of a run; of these init_from, lora_r, lora_alpha and base.
"""

import torch

import convert
from engine import restore
from model import Apertus
from posttrain import lora
from posttrain.quantised import quantise

# The dtype in which a base model is loaded; None: that of its file, before its matrices are quantised.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": None, "nf4": None}


def start_config(name, shape, requested, data):
    """
    (ApertusConfig, path of the weights) of a run of train.py that starts with the model `name`. shape: what the user
    has; of the settings that he has set, `requested`, only the window, RoPE and the document mask may differ.
    """
    config, tok, path = convert.start_of(name)
    convert.check_same_vocabulary(tok, data, name)
    for key, value in vars(shape).items():
        if key not in requested:
            continue
        if key in ("block_size", "doc_mask") or key.startswith("rope_"):
            setattr(config, key, value)
        elif value != getattr(config, key) and (value or key != "vocab_size"):
            raise ValueError(f"{key}={value!r}, but {name} has {getattr(config, key)!r}: leave it out, the start model "
                             "decides it")
    return config, path


def check_base(settings, sharded=False):
    """ValueError for an unknown base, trained weights below fp32, or quantised weights that would be sharded."""
    base = settings["base"]
    if base not in DTYPES:
        raise ValueError(f"base={base!r}: there is {', '.join(DTYPES)}")
    if base != "fp32" and not settings["lora_r"]:
        raise ValueError(f"base={base}: weights that are trained are held in fp32; "
                         f"--lora_r=16 trains adapters next to frozen weights in {base}")
    if sharded and not DTYPES[base]:
        raise ValueError(f"base={base} keeps bits and scales apart, which cannot be sharded: "
                         "--parallel=ddp holds them whole on each rank, or take --base=bf16")


def build_lora_model(shape, settings, ranks, device, on_meta):
    """
    The frozen start model with adapters beside its matrices. init_lora_model() gives the adapters their values.

    on_meta: build the modules alone, without memory; the caller is in this device context. If not, the frozen weights
    are read here.
    """
    check_base(settings, ranks.sharded)
    base = settings["base"]
    if on_meta:
        model = Apertus(shape, seed=None)
        if base != "fp32":
            model.bfloat16()
        if not DTYPES[base]:
            quantise(model, base)
    else:
        model = load_whole(settings, device)
        model.config = shape                               # the run may have changed its window and RoPE
    return lora.add_lora(model, lora.lora_config(settings))


def load_whole(settings, device):
    """The start model without adapters, whole, stored as `base` says."""
    base = settings["base"]
    dtype = DTYPES[base]
    # Matrices are quantised one by one as they are read, so that the whole model is never in memory in bf16.
    model, _ = convert.load_any(settings["init_from"], device, dtype, base="" if dtype else base)
    return model


def init_lora_model(model, path, seed, ranks):
    """
    Set the initial values of the adapters. Before that, read the frozen weights at `path` if the model is sharded;
    build_lora_model() has read those of a whole one.
    """
    if ranks.sharded:
        convert.fill(model, path)
    lora.init_lora(model, seed)


def frozen_hash(model, checkpoint):
    """A hash of the frozen weights, for config.json. ValueError if the checkpoint (path, manifest) has another."""
    start_hash = convert.fingerprint(model)[:16]
    if checkpoint:
        path, manifest = checkpoint
        restore.refuse_another(path, manifest["config"], dict(start_hash=start_hash))
    return start_hash


def save_adapter(run, model):
    """The adapters of a finished run in PEFT's format."""
    lora.save(model, lora.lora_config(run.settings), f"{run.out}/adapter", run.settings["init_from"],
              convert.fingerprint(model), run.ranks.is_main)
