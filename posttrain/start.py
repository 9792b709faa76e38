"""
The start model of a run, and adapters next to its weights: for train.py --init_from, SFT and QRPO.

`settings`, a dict, has all settings of a run; of these init_from, lora_r, lora_alpha, lora_on, lora_rs and base.
"""

import torch

import convert
from data import read_meta
from engine import restore
from engine.memory import fit_to_memory
from engine.parallel import distribute
from model import Apertus
from posttrain import lora
from posttrain.lora import adapters_of
from posttrain.quantised import quantise
from tokenizer import load_for

# The settings of adapters.
ADAPTERS = ["lora_r", "lora_alpha", "lora_on", "lora_rs", "base"]
# The dtype in which a base model is loaded; None: that of its file, before its matrices are quantised.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": None, "nf4": None}


def check_base(base, adapters, sharded=False):
    """ValueError for an unknown base, trained weights below fp32, or quantised weights that would be sharded."""
    if base not in DTYPES:
        raise ValueError(f"base={base!r}: there is {', '.join(DTYPES)}")
    if base != "fp32" and not adapters:
        raise ValueError(f"base={base}: weights that are trained are held in fp32; "
                         f"--lora_r=16 trains adapters next to frozen weights in {base}")
    if sharded and not DTYPES[base]:
        raise ValueError(f"base={base} keeps bits and scales apart, which cannot be sharded: "
                         "--parallel=ddp holds them whole on each rank, or take --base=bf16")


def start_with(name, shape, asked, data):
    """
    (ApertusConfig, path of the weights) of a run of train.py that starts with the model `name`. shape: what the user
    has; `asked`, the settings that he has set, may change the window, RoPE and the document mask.
    """
    found, theirs, path = convert.start_of(name)
    check_vocabulary(theirs, data, name)
    for key, own in vars(shape).items():
        free = key in ("block_size", "doc_mask") or key.startswith("rope_")
        if key in asked and not free and own != getattr(found, key) and (own or key != "vocab_size"):
            raise ValueError(f"{key}={own!r}, but {name} has {getattr(found, key)!r}: leave it out, the start model "
                             "decides it")
        if key in asked and free:
            setattr(found, key, own)
    found.vocab_size = max(found.vocab_size, read_meta(data)["vocab_size"])
    return found, path


def check_vocabulary(theirs, data, name):
    """ValueError if the tokenizers of a data folder and of the model `name` (theirs) differ."""
    if load_for(data).hash != theirs.hash:
        raise ValueError(f"{data} was made with another vocabulary than that of {name}: prepare the data with "
                         f"the model's, python convert.py --load={name} --save=vocabulary.json and "
                         "python prepare.py TEXTS --tokenizer=vocabulary.json")


def outline(shape, settings):
    """A start model on the current device without values: shapes, dtypes, adapters, and which weights are trained."""
    adapters, base = adapters_of(settings), settings["base"]
    model = Apertus(shape, seed=None)
    if base != "fp32":
        model.bfloat16()
    if not DTYPES[base]:
        quantise(model, base)
    if adapters:
        lora.adapt(model, adapters, None)
    return model


def load_whole(settings, device):
    """The start model, whole, in the dtype of `base`. Matrices are quantised one by one as they are read."""
    base = settings["base"]
    return convert.load_any(settings["init_from"], device, DTYPES[base], base="" if DTYPES[base] else base)[0]


def adapted(shape, settings, ranks, device):
    """
    The model that adapters train, on the current device. Its frozen weights are there already, unless it is on meta:
    then fill_adapted() reads them.
    """
    adapters, base = adapters_of(settings), settings["base"]
    check_base(base, adapters, ranks.sharded)
    if torch.empty(0).is_meta:
        return outline(shape, settings)
    model = load_whole(settings, device)
    model.config = shape                                   # the same, but the run may have changed its window and RoPE
    return lora.adapt(model, adapters, None)


def fill_adapted(model, path, seed, ranks):
    """The frozen weights of a sharded model, and initial adapters."""
    if ranks.sharded:
        convert.fill(model, path)
    lora.draw(model, seed)


def build(shape, settings, ranks, device, dtype, path, compiled=False, fresh=True):
    """What SFT and QRPO train: the start model with its weights, and adapters with --lora_r, on this rank's device."""
    check_base(settings["base"], adapters_of(settings), ranks.sharded)
    with torch.device("meta" if ranks.sharded else device):
        model = adapted(shape, settings, ranks, device) if settings["lora_r"] else Apertus(shape, seed=None)
    model.dtype = dtype
    distribute(model, ranks, device, settings["recompute"], compiled)
    if settings["lora_r"]:
        fill_adapted(model, path, settings["seed"], ranks)
    elif fresh:
        convert.fill(model, path)
    return model


def save_adapter(run, model, settings):
    """The adapters of a finished run in PEFT's format."""
    lora.save(model, adapters_of(settings), f"{run.out}/adapter", settings["init_from"], convert.fingerprint(model),
              run.ranks.is_main)


# -----------------------------------------------------------------------------
# for SFT and QRPO


def check_memory(shape, settings, ranks, device, dtype, window):
    """Items in memory at once (engine/memory.py), now that the tokens of the longest one, `window`, are known."""
    with torch.device("meta"):
        model = outline(shape, settings)
    micro_batch, _ = fit_to_memory(model, settings, ranks, device, dtype, window, settings["micro_batch"], True)
    return micro_batch


def hash_of(model, settings, found):
    """{"start_hash": hash of the frozen weights}, if there are adapters. ValueError if it is not the checkpoint's."""
    if not settings["lora_r"]:
        return {}
    own = dict(start_hash=convert.fingerprint(model)[:16])
    if found:
        restore.refuse_another(found[0], found[1]["config"], own)
    return own


def finish(run, model, settings, text):
    """After the last save: what was forgotten, the adapters, and a word to the user. text: forgetting.Old, or None."""
    run.summary = dict(steps=run.done)
    if text:
        run.log(step=run.done - 1, **text.measure(model, run.ranks))
        run.summary |= text.summary(run.ranks.is_main)
    if settings["lora_r"]:
        save_adapter(run, model, settings)
    if run.ranks.is_main:
        print(f"{run.out}: talk to it with python sample.py --chat --init_from={run.out}")
