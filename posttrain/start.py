"""
Shared by all fine-tuning: the start model, adapters next to its weights, and a second validation text. train.py
--init_from (posttrain/attach.py), SFT and QRPO use this file and the loop of train.py.

Each of them has the settings init_from, lora_r, lora_alpha, lora_on, lora_rs, base and old. Functions here read them
from `config`, a dict of all settings of a run.
"""

import torch

import convert
import train
from engine.attention import attend_on
from engine.parallel import distribute
from engine.restore import refuse_another
from model import Apertus
from posttrain import forgetting, lora
from posttrain.lora import adapters_of
from posttrain.quantised import quantise

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


def shapes_of(shape, adapters, base):
    """
    A model on the meta device: shapes, dtypes and which weights are trained.

    shape: ApertusConfig; adapters: as adapters_of returns them; base: fp32, bf16, int8 or nf4, of frozen weights.
    """
    with torch.device("meta"):
        model = Apertus(shape, seed=None)
    if base != "fp32":
        model.bfloat16()
    if not DTYPES[base]:
        quantise(model, base)
    if adapters:
        lora.adapt(model, adapters)
    return model


def load_whole(run):
    """The start model of a run, whole, in the dtype of `base`."""
    base = run.config["base"]
    model, _ = convert.load_any(run.config["init_from"], run.device, DTYPES[base], base="" if DTYPES[base] else base)
    model.dtype = run.dtype
    return model


def build(run):
    """
    The start model of a run on the current device. On meta it has no values yet: init_weights() reads or draws them.

    run.path: where its weights are, as convert.start_of returns it; init_weights() reads it and, with adapters, sets
    run.start_hash, the hash of the frozen weights. After ready(), this returns the model that the run already has.
    """
    if hasattr(run, "policy"):
        return run.policy
    adapters = adapters_of(run.config)
    base = run.config["base"]
    check_base(base, adapters, run.ranks.sharded)
    whole = adapters and not torch.empty(0).is_meta
    if whole:
        model = lora.adapt(load_whole(run), adapters)
        model.config = run.shape                           # the same, but train.py may change its window and RoPE
    else:
        model = shapes_of(run.shape, adapters, base) if adapters else Apertus(run.shape, seed=None)

    def init_weights(seed):
        if not whole:
            convert.fill(model, run.path)
        if adapters:
            run.start_hash = convert.fingerprint(model)
            lora.draw(model, seed)
    model.init_weights = init_weights
    return model


def ready(run):
    """Load the start model of a run before train.py builds its optimizer, as run.policy."""
    with torch.device("meta" if run.ranks.sharded else run.device):
        model = build(run)
    model.dtype = run.dtype
    distribute(model, run.ranks, run.device)
    model.init_weights(train.seed)
    model.init_weights = lambda seed: None
    attend_on(model, run.device)
    run.policy = model


# -----------------------------------------------------------------------------
# additions to functions of train.py


def wrap(old, windows, tok):
    """
    Let the loop of train.py save adapters, compare their base when it resumes, and validate on the text `old` too.

    old, windows: `path` and `most` of forgetting.Old; old="": no such text; tok: the tokenizer of the model.
    """
    build_all, validate, finish = train.build_all, train.validate, train.finish
    text = forgetting.Old(old, tok, train.shape.block_size, windows, train.out) if old else None

    def build_and_compare(run, builder, found):
        build_all(run, builder, found)
        if hasattr(run, "start_hash"):
            own = dict(start_hash=run.start_hash[:16])
            if found:
                refuse_another(found[0], found[1]["config"], own)
            run.config |= own
        if text and found:
            text.recall()

    def validate_old(run, windows):
        entry = validate(run, windows)
        return entry | text.measure(run.model, run.ranks) if text else entry

    def finish_adapters(run, last):
        finish(run, last)
        if text:
            run.summary |= text.summary(run.ranks.first)
        if adapters := adapters_of(run.config):
            lora.save(run.model, adapters, f"{train.out}/adapter", run.config["init_from"], run.start_hash,
                      run.ranks.first)

    train.build_all, train.validate, train.finish = build_and_compare, validate_old, finish_adapters
