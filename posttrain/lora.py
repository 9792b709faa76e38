"""
LoRA, low-rank adaptation (arXiv 2106.09685): fine-tune two small matrices for each large, frozen one.

    y = W x + s B (A x)         W (out, in) frozen,  A (r, in),  B (out, r)
    s = alpha / r               or alpha / sqrt(r), rank-stabilised (arXiv 2312.03732)

B starts at zero, so step 0 is the base model exactly. At r = 16 on all six matrices of a block, the adapters of the 8B
have 39.8M numbers, 0.49 % of the model: gradients and optimizer states take 0.8 GB instead of 161. The base needs no
fp32 copy, because it never changes, and no gradient, so a step costs 4 FLOPs per weight and token instead of 6.

Files are read and written in PEFT's format: adapter_model.safetensors and adapter_config.json.

A good learning rate is ten times that of full fine-tuning: AdEMAMix 5e-5 at s = 2. A larger s needs a smaller rate.
Adapters do not prevent forgetting; a low learning rate does.

$ python -m posttrain.sft --init_from=out/laptop --data=conversations.jsonl --lora_r=16
$ python train.py configs/continue_8b.py --data=data/mine --lora_r=64 --base=bf16
$ python sample.py --chat --init_from=out/sft/adapter
$ python convert.py --load=out/sft --save=out/merged --merge
"""

import contextlib
import math
import os

import torch
import torch.nn as nn
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes

from engine.files import read_json, write_flushed, write_json
from engine.restore import place
from model import Linear, generator_of
from posttrain.quantised import matrices

# All matrices of a block. PEFT's "all-linear" picks the same six.
MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
PREFIX = "base_model.model."    # of all names in PEFT's file


class Adapted(Linear):
    """
    A frozen matrix with an adapter. adapt() makes one of an existing matrix, dense or quantised, by changing its class,
    so that the matrix keeps its name and values. base_class computes the product with W.

    Adapters are fp32. Linear casts them to the dtype of the activations.
    """
    on = True

    def forward(self, x):
        y = self.base_class.forward(self, x)
        if not self.on:
            return y
        return y + self.lora_B(self.lora_A(x)) * self.scale


def adapted(model):
    """{name: Adapted} of a model, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}


def adapters_of(config):
    """
    The settings of a run's adapters under PEFT's names, from all settings of the run (dict); None if all weights are
    trained. ValueError for unknown matrices.
    """
    if not config.get("lora_r"):
        return None
    r, on = config["lora_r"], config["lora_on"]
    wanted = MATRICES if on == "all" else on.split(",")
    if r < 1 or not {*wanted} <= {*MATRICES}:
        raise ValueError(f"lora_r={r}, lora_on={on!r}: want a rank from 1 on, and all or some of {','.join(MATRICES)}")
    return dict(r=r, lora_alpha=config["lora_alpha"], target_modules=wanted, use_rslora=config["lora_rs"])


def adapt(model, settings, seed=28):
    """
    Freeze a model and add adapters to the matrices of its blocks whose names end in one of the target_modules. Changes
    the model; returns it.

    seed: of draw(); None: the adapters have no values yet. On the meta device they have none either: call draw() when
    they have memory.
    """
    r, targets = settings["r"], tuple(settings["target_modules"])
    share = math.sqrt(r) if settings.get("use_rslora") else r
    device = model.lm_head.weight.device
    model.requires_grad_(False)
    for name, layer in matrices(model).items():
        if not name.endswith(targets):
            continue
        layer.base_class, layer.__class__ = type(layer), Adapted
        layer.lora_A = Linear(layer.in_features, r).to(device)
        layer.lora_B = Linear(r, layer.out_features).to(device)
        layer.scale = settings["lora_alpha"] / share
    if seed is not None:
        draw(model, seed)
    return model


@torch.no_grad()
def draw(model, seed):
    """
    Set the initial values of adapters, also of sharded ones: A uniform in +-1/sqrt(in), as in PEFT, and B zero.

    Each A has its own generator, seeded by (seed, name), so that the number of ranks changes no value.
    """
    for name, layer in adapted(model).items():
        A = layer.lora_A.weight
        values = torch.rand(A.shape, generator=generator_of(f"{name}.lora_A", seed), device="cpu")
        bound = 1 / math.sqrt(layer.in_features)
        place(A, (2 * values - 1) * bound)
        layer.lora_B.weight.zero_()


@contextlib.contextmanager
def off():
    """A context in which all adapters are off: a model computes what its base does, for the reference of QRPO."""
    Adapted.on = False
    try:
        yield
    finally:
        Adapted.on = True


@torch.no_grad()
def merge(model, dtype=torch.float32):
    """
    Replace each adapted matrix by W + (B A) s, computed in fp32 and stored in dtype. Changes the model.

    Rounding to bf16 loses half of an update that is a thousandth as large as W.
    """
    for name, layer in adapted(model).items():
        before = layer.weight.float() if hasattr(layer, "weight") else layer.base_class.dense(layer)     # (out, in)
        update = layer.lora_B.weight @ layer.lora_A.weight * layer.scale
        after = Linear(layer.in_features, layer.out_features)
        after.weight = nn.Parameter((before + update).to(dtype))
        model.set_submodule(name, after)


# -----------------------------------------------------------------------------
# PEFT's files

# Keys that we apply, or that change no logit of a finished adapter: its tensors show which matrices have one.
HARMLESS = set("""
r lora_alpha use_rslora target_modules exclude_modules layers_to_transform layers_pattern
auto_mapping base_model_name_or_path inference_mode init_lora_weights loftq_config lora_dropout
megatron_config megatron_core peft_type peft_version qalora_group_size runtime_config task_type
""".split())
# These initialisations change W before training, so the adapter does not fit the published base.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "eva", "orthogonal")


def tensors_of(model):
    """{name in PEFT's file: parameter} of the adapters."""
    return {PREFIX + name: p for name, p in model.named_parameters() if ".lora_" in name}


def save(model, settings, folder, base, base_hash, write=True):
    """
    Write the adapters of a model as PEFT does. base: the name of its base model; base_hash: that model's fingerprint.

    The configuration, which makes the folder an adapter, is written last. Gathers shards: every rank calls this, and
    the one with write=True writes.
    """
    tensors = {}
    for name, p in tensors_of(model).items():
        p = p.full_tensor() if hasattr(p, "full_tensor") else p
        tensors[name] = p.detach().float().cpu().contiguous()
    if not write:
        return
    os.makedirs(folder, exist_ok=True)
    content = safetensors_bytes(tensors, metadata={"format": "pt", "base": base_hash})
    write_flushed(f"{folder}/adapter_model.safetensors", content)
    config = settings | dict(peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=base)
    write_json(f"{folder}/adapter_config.json", config)


def read_settings(folder):
    """
    The settings of an adapter that PEFT or save() has written, and the name of its base model ("": unknown).

    ValueError names the first setting that changes a logit and is not supported.
    """
    path = f"{folder}/adapter_config.json"
    config = read_json(path)
    if config.get("peft_type") != "LORA" or not {"r", "lora_alpha"} <= config.keys():
        raise ValueError(f"{path}: want peft_type='LORA', r and lora_alpha, got {config.get('peft_type')!r}")
    for key, value in config.items():
        changes_base = key == "init_lora_weights" and str(value).lower().startswith(CHANGES_BASE)
        if changes_base or key not in HARMLESS and value and value not in ("none", "main"):
            raise ValueError(f"{path}: {key}={value!r} is not supported: it changes the base or the adapter")
    return config, config.get("base_model_name_or_path") or ""


@torch.no_grad()
def load(model, folder, base_hash=""):
    """
    Put the adapter of a folder on its base model. Returns the settings.

    base_hash: the fingerprint of that model, if known, to compare with the fingerprint in the file. ValueError names a
    tensor that is missing, extra or misshapen; do not use the model after that.
    """
    settings, base = read_settings(folder)
    path = f"{folder}/adapter_model.safetensors"
    try:
        with safe_open(path, "pt") as file:
            trained_on = (file.metadata() or {}).get("base")
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as e:
        raise ValueError(f"{path} is damaged ({e}): copy it again") from None
    if base_hash and trained_on and trained_on != base_hash:
        raise ValueError(f"{path} was trained on other weights than those of {base} today: their hashes are "
                         f"{trained_on[:16]} and {base_hash[:16]}")
    matrices = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in tensors}
    # Without values the adapters take no memory yet, however large the file says that they are.
    adapt(model, settings | dict(target_modules=sorted(matrices)), None)
    own = tensors_of(model)
    for name in sorted(own | tensors):
        theirs, ours = (list(some[name].shape) if name in some else None for some in (tensors, own))
        if theirs != ours:
            raise ValueError(f"{path} is an adapter of another model: {name} has shape {theirs} there and {ours} in "
                             f"this model (None: no such tensor)")
        own[name].copy_(tensors[name])
    return settings
