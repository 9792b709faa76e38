"""
LoRA, low-rank adaptation (arXiv 2106.09685): fine-tune a model by small matrices beside its frozen ones.

    y = W x + s B (A x)         W (out, in) frozen,  A (r, in),  B (out, r)
    s = alpha / r               or alpha / sqrt(r), rank-stabilised (arXiv 2312.03732)

B begins as zero, so that step 0 is the base model exactly. At r = 16 on all six matrices of a block, A and B of the 8B
have 39.8M numbers, 0.49 % of it: gradients and optimizer states take 0.8 GB and not 161, and the base needs no fp32
copy because nothing of it changes. Its gradient is not computed either, so a step costs 4 FLOPs per weight and token,
and not 6.

    adapt(model, settings, seed)     freeze the model and put adapters on its matrices; draw(model, seed): their values
    off(model)                       a context without them: the base itself, the reference of posttrain/qrpo.py
    merge(model)                     W + s B A in their place: a dense model again
    save(...), load(...)             PEFT's two files, adapter_model.safetensors and adapter_config.json

Learning rates: AdEMAMix 5e-5, ten times that of full fine-tuning; what a rate means depends on s. An adapter does not
protect what the base knows, the learning rate does.

$ python -m posttrain.sft --init_from=out/laptop --data=conversations.jsonl --lora_r=16
$ python train.py configs/continue_8b.py --data=data/mine --lora_r=64 --base=bf16
$ python sample.py --chat --init_from=out/sft/adapter
$ python convert.py --merge out/sft/adapter out/merged
"""

import contextlib
import json
import math
import os
import re

import torch
import torch.nn as nn
from safetensors import safe_open
from safetensors.torch import save as safetensors_bytes

from engine.files import write_flushed
from engine.restore import place
from model import Linear, generator_of

# All matrices of a block. PEFT's "all-linear" picks the same six.
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."    # of every name in PEFT's file


class Adapted(Linear):
    """
    A frozen matrix and its adapter. It takes over the matrix under its old name, so that a base model is loaded and
    hashed as ever; lora_A.weight and lora_B.weight come below that name, as in PEFT's files.

    Adapters are fp32, and cast to the dtype of the activations where they are used, as Linear does.
    """

    def __init__(self, base, r, scale):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = base.in_features, base.out_features, None
        # The base may be dense or quantised: its own forward knows what to do with its weights.
        self.base_class = type(base)
        self._parameters.update(base._parameters)
        self._buffers.update(base._buffers)
        self.lora_A = Linear(base.in_features, r)
        self.lora_B = Linear(r, base.out_features)
        self.scale = scale
        self.on = True

    def forward(self, x):
        y = self.base_class.forward(self, x)
        if not self.on:
            return y
        return y + self.lora_B(self.lora_A(x)) * self.scale

    def frozen(self):
        """W (out, in) in its dtype; of a quantised base what its bits stand for, in fp32."""
        if "weight" in self._parameters:
            return self.weight
        return self.base_class.dense(self)


def adapted(model):
    """{name: Adapted} of a model, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}


def settings_of(r, alpha, on, rank_stabilised=False):
    """
    The adapter's settings under PEFT's names. on: names of matrices with commas, or "all". ValueError for unknown ones.
    """
    wanted = list(MATRICES) if on == "all" else on.split(",")
    unknown = set(wanted) - {*MATRICES, "gate_proj"}
    if unknown or r < 1:
        raise ValueError(f"lora_r={r}, lora_on={on!r}: want a rank from 1 on, and all or some of {','.join(MATRICES)}")
    return dict(r=r, lora_alpha=alpha, target_modules=wanted, use_rslora=rank_stabilised)


@torch.no_grad()
def adapt(model, settings, seed=28):
    """
    Freeze a model, and give the matrices that settings name their adapters. Changes the model; returns it.

    On the meta device the adapters have no values yet: call draw() when they have memory. ValueError: settings that hit
    no matrix, or a rank above the smaller side of one.
    """
    r, alpha = settings["r"], settings["lora_alpha"]
    scale = alpha / (math.sqrt(r) if settings.get("use_rslora") else r)
    model.requires_grad_(False)
    bases = {name: m for name, m in model.named_modules() if isinstance(m, Linear) and targeted(name, settings)}
    if not bases:
        raise ValueError(f"target_modules={settings['target_modules']!r} names no matrix of this model")
    for name, base in bases.items():
        if r > min(base.in_features, base.out_features):
            raise ValueError(f"lora_r={r} is larger than {name}, {base.out_features} x {base.in_features}: "
                             "full fine-tuning has fewer numbers")
        device = next(iter(base.state_dict().values())).device
        layer = Adapted(base, r, scale).to(device)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, layer)
    draw(model, seed)
    return model


@torch.no_grad()
def draw(model, seed):
    """
    The initial values of adapters, also of sharded ones: A uniform in +-1/sqrt(in), as PEFT draws it, B zero.

    Each A has a generator of its own for (seed, name), so that every number of ranks starts alike.
    """
    for name, layer in adapted(model).items():
        A = layer.lora_A.weight
        bound = 1 / math.sqrt(layer.in_features)
        values = torch.rand(A.shape, generator=generator_of(f"{name}.lora_A", seed))
        place(A, (2 * values - 1) * bound)
        layer.lora_B.weight.zero_()


def targeted(name, settings):
    """Does PEFT put an adapter on the matrix `name`?"""
    if name == "lm_head" and settings["target_modules"] == "all-linear":
        return False
    wanted = settings["target_modules"] == "all-linear" or named(name, settings["target_modules"])
    return wanted and not named(name, settings.get("exclude_modules") or [])


def named(name, pattern):
    """A string is a regular expression for the whole name; of a list each entry is a name, or its end after a dot."""
    if isinstance(pattern, str):
        return re.fullmatch(pattern, name) is not None
    return any(name == entry or name.endswith("." + entry) for entry in pattern)


@contextlib.contextmanager
def off(model):
    """A context in which a model is its base: the same weights, and no second model."""
    layers = adapted(model).values()
    for layer in layers:
        layer.on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.on = True


@torch.no_grad()
def merge(model, dtype=torch.float32):
    """
    Replace each adapted matrix by W + (B A) s, computed in fp32 and kept in dtype. Changes the model.

    Returns the share of the update that the rounding into that dtype has left: 1 in fp32; of an update a thousandth as
    large as W, bf16 keeps half. It is what the change has in common with the wanted one, projected on it.
    """
    kept = wanted = 0.0
    for name, layer in adapted(model).items():
        update = (layer.lora_B.weight @ layer.lora_A.weight) * layer.scale         # (out, in)
        before = layer.frozen().to(update.dtype)
        after = (before + update).to(dtype)
        kept += ((after.to(update.dtype) - before) * update).sum().item()
        wanted += update.square().sum().item()
        dense = Linear(layer.in_features, layer.out_features)
        dense.weight = nn.Parameter(after)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, dense)
    return kept / wanted if wanted else 1.0


# -----------------------------------------------------------------------------
# PEFT's files

# What else PEFT and the servers that read its files expect in adapter_config.json.
USUAL = dict(
    peft_type="LORA",
    task_type="CAUSAL_LM",
    bias="none",
    lora_dropout=0.0,
    fan_in_fan_out=False,
    use_dora=False,
    inference_mode=True,
    modules_to_save=None,
)
OURS = {"r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora"}
# These change no logit of an adapter that is made already, whatever their value.
NOTHING = {
    "alora_invocation_tokens", "auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights",
    "layers_pattern", "loftq_config", "lora_dropout", "megatron_config", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
}
# These draw W itself anew before training, so that the file's adapter belongs to another base.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "eva", "orthogonal")


def save(model, settings, folder, base, base_hash, write=True):
    """
    Write the adapters of a model as PEFT does. base: where its frozen part came from; base_hash: its fingerprint.

    Each file is whole or absent, and the configuration, which says that the folder is an adapter, comes last. Shards
    are gathered: every rank calls this, and one of them writes.
    """
    tensors = {}
    for name, layer in adapted(model).items():
        for part in ("lora_A", "lora_B"):
            weight = getattr(layer, part).weight.detach()
            weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            tensors[f"{PREFIX}{name}.{part}.weight"] = weight.float().cpu().contiguous()
    if not write:
        return
    os.makedirs(folder, exist_ok=True)
    content = safetensors_bytes(tensors, metadata={"format": "pt", "base": base_hash})
    write_flushed(os.path.join(folder, "adapter_model.safetensors"), content)
    config = {**USUAL, **settings, "base_model_name_or_path": base}
    write_flushed(os.path.join(folder, "adapter_config.json"), json.dumps(config, indent=1))


def read_settings(folder):
    """
    The settings of an adapter that PEFT or we have written, and the name of its base.

    ValueError names the first setting that would change a logit and that we do not have.
    """
    path = os.path.join(folder, "adapter_config.json")
    with open(path, encoding="utf-8") as f:
        config = json.load(f)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise ValueError(f"{path} is not of a LoRA adapter: its peft_type is {dict(config).get('peft_type')!r}")
    missing = {"r", "lora_alpha", "target_modules"} - config.keys()
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}")
    if str(config.get("init_lora_weights")).lower().startswith(CHANGES_BASE):
        raise ValueError(f"{path}: init_lora_weights={config['init_lora_weights']!r} is not supported: "
                         "it changes the base")
    for key, value in config.items():
        neutral = not value or value == "none"
        if key not in OURS | NOTHING | {"peft_type"} and not neutral:
            raise ValueError(f"{path}: {key}={value!r} is not supported")
    return {key: config[key] for key in OURS & config.keys()}, config.get("base_model_name_or_path") or ""


@torch.no_grad()
def load(model, folder, base_hash=""):
    """
    Put the adapter of a folder on its base model: what adapt() does, with the file's values. Returns the settings.

    base_hash: the fingerprint of that model, if it is known; a file that names another one was not trained on it.
    ValueError names a tensor that is missing, too many or of another shape; the model is of no use then.
    """
    settings, base = read_settings(folder)
    adapt(model, settings)
    path = os.path.join(folder, "adapter_model.safetensors")
    own = {PREFIX + name: p for name, p in model.named_parameters() if ".lora_" in name}
    with safe_open(path, "pt") as file:
        trained_on = (file.metadata() or {}).get("base", "")
        if base_hash and trained_on not in ("", base_hash):
            raise ValueError(f"{path} was trained on other weights than those of {base} today: their hashes are "
                             f"{trained_on[:16]} and {base_hash[:16]}")
        names = set(file.keys())
        for name in sorted(names ^ own.keys()):
            state = "lacks" if name in own else "holds, and this model has no,"
            raise ValueError(f"{path} {state} {name}: it is an adapter of another model")
        for name, p in own.items():
            tensor = file.get_tensor(name)
            if tensor.shape != p.shape:
                raise ValueError(f"{path}: {name} has shape {tuple(tensor.shape)}, and this model wants "
                                 f"{tuple(p.shape)}: it is an adapter of another model")
            p.copy_(tensor)
    return settings
