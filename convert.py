"""
Hugging Face in and out. The parameters carry the published names, so there is no mapping table: only config.json is translated.

$ python convert.py --load=swiss-ai/Apertus-8B-2509                       # is it what the model does? names, shapes, parameters
$ python convert.py --load=out/laptop --save=out/laptop-hf                # then AutoModelForCausalLM.from_pretrained("out/laptop-hf")

A repository is read as safetensors and JSON, nothing in it is run; a config that asks for something that model.py does not do is
refused by name.
"""

import dataclasses
import itertools
import json
import os

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import checkpoint
import structured
import tokenizer as tokenizers
from model import HF_NAMES, XIELU, Apertus, ApertusConfig

load = ""             # a Hugging Face folder or name, or a run folder of train.py
save = ""             # the folder to write as Hugging Face has it
dtype = "float32"     # of the tensors written: float32 | bfloat16
merge = False         # write a model with structured feed-forward layers as the dense one that it equals

# What may stand in a config.json besides HF_NAMES and RoPE without changing the logits; any other key must have the value given here.
NEUTRAL = {"architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache", "bos_token_id", "eos_token_id",
           "pad_token_id", "_name_or_path", "rope_theta", "rope_scaling", "rope_parameters", "head_dim", "output_attentions",
           "output_hidden_states", "id2label", "label2id", "problem_type", "chunk_size_feed_forward", "return_dict", "tokenizer_class"}
REQUIRED = dict(hidden_act="xielu", attention_bias=False, attention_dropout=0.0, mlp_bias=False, qk_norm=True, post_norm=False,
                is_encoder_decoder=False, quantization_config=None)


def config_from_hf(hf):
    """config.json (dict) -> ApertusConfig. RoPE in either spelling: rope_theta + rope_scaling (transformers 4) or rope_parameters (5)."""
    if hf.get("model_type") != "apertus":
        raise ValueError(f"the config is of a {hf.get('model_type')!r} model; this is Apertus only (model_type 'apertus')")
    rope = {**{"rope_theta": hf.get("rope_theta")}, **(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    given = {ours: hf[theirs] for ours, theirs in HF_NAMES.items() if hf.get(theirs) is not None}
    given.setdefault("n_kv_head", hf["num_attention_heads"])                # transformers: absent means multi-head
    theta = rope.pop("rope_theta", None) or 12_000_000.0                    # transformers' default for Apertus
    if kind == "llama3":
        names = dict(rope_scaling="factor", rope_original="original_max_position_embeddings", rope_low="low_freq_factor", rope_high="high_freq_factor")
        given.update({ours: rope.pop(theirs) for ours, theirs in names.items()})
    elif kind == "default":
        given["rope_scaling"] = 0.0
    unknown = {k: v for k, v in hf.items() if k not in NEUTRAL and k not in HF_NAMES.values() and REQUIRED.get(k, "?") != v}
    unknown.update({f"rope {k}": v for k, v in rope.items()} | ({} if kind in ("llama3", "default") else {"rope_type": kind}))
    if unknown:
        raise ValueError(f"config.json asks for what model.py does not do: {', '.join(f'{k}={v!r}' for k, v in unknown.items())}")
    config = ApertusConfig(rope_theta=float(theta), **given)
    if hf.get("head_dim", config.head_dim) != config.head_dim:
        raise ValueError(f"config.json asks for what model.py does not do: head_dim={hf['head_dim']} is not {config.n_embd}/{config.n_head}")
    return config


def config_to_hf(config, tokenizer=None, dtype="float32"):
    """ApertusConfig -> config.json (dict), RoPE in both spellings. ValueError if transformers' Apertus cannot express it."""
    if config.activation != "xielu" or not config.qk_norm:
        raise ValueError(f"transformers' Apertus has xIELU and QK-norm only, this model has activation={config.activation!r}, qk_norm={config.qk_norm}")
    rope = dict(rope_type="default", rope_theta=config.rope_theta)
    if config.rope_scaling:
        rope.update(rope_type="llama3", factor=config.rope_scaling, original_max_position_embeddings=config.rope_original,
                    low_freq_factor=config.rope_low, high_freq_factor=config.rope_high)
    hf = {theirs: getattr(config, ours) for ours, theirs in HF_NAMES.items()}
    hf.update(architectures=["ApertusForCausalLM"], model_type="apertus", hidden_act="xielu", attention_bias=False, attention_dropout=0.0,
              dtype=dtype, torch_dtype=dtype, use_cache=True, rope_parameters=rope, rope_theta=config.rope_theta,
              rope_scaling={k: v for k, v in rope.items() if k != "rope_theta"} if config.rope_scaling else None)
    if tokenizer:
        hf.update(bos_token_id=tokenizer.bos, eos_token_id=tokenizer.eos, pad_token_id=tokenizer.pad)
    return hf


def local(path_or_repo, revision=None):
    """The folder of a Hugging Face model: the path itself, or a download of its safetensors and JSON files, and of nothing else."""
    if os.path.isdir(path_or_repo):
        return path_or_repo
    if path_or_repo.count("/") != 1 or path_or_repo.startswith((".", "/", "out/")):
        raise ValueError(f"{path_or_repo!r} is neither a folder here nor the name of a hub repository (organisation/model)")
    import huggingface_hub
    try:
        return huggingface_hub.snapshot_download(path_or_repo, revision=revision, allow_patterns=["*.safetensors", "*.json"])
    except Exception as e:                                                  # network, name, permission: the library has a dozen kinds
        raise OSError(f"{path_or_repo} could not be downloaded ({type(e).__name__}): check the name and the network, or give a local "
                      "folder") from None


def load_hf(path_or_repo, device="cpu", dtype=None, revision=None, spread=None):
    """
    A Hugging Face Apertus (folder or hub name) as our model, with its weights. dtype: None keeps that of the file.

    The model is built without memory and takes the tensors from the memory-mapped files one by one: never twice in memory. spread(model)
    may shard it before (FSDP2) and give the shards memory: each rank then keeps its part of every tensor, and never holds the model.
    ValueError: another architecture, unknown config keys, missing, extra or misshapen tensors.
    """
    folder = local(path_or_repo, revision)
    config_file = os.path.join(folder, "config.json")
    if not os.path.isfile(config_file):
        raise ValueError(f"{folder} has no config.json: want a Hugging Face model folder")
    with open(config_file, encoding="utf-8") as f:
        config = config_from_hf(json.load(f))
    with torch.device("meta"):
        model = Apertus(config)
    if spread:
        spread(model)
    want = dict(model.named_parameters())
    for name, file in tensor_files(folder).items():
        if name.endswith(("act_fn.beta", "act_fn.eps")):                    # buffers of transformers' xIELU; ours are constants
            value = file.get_tensor(name).item()
            if abs(value - (XIELU.BETA if name.endswith("beta") else XIELU.EPS)) > 1e-8:
                raise ValueError(f"{folder}: {name} is {value}, and model.py has {XIELU.BETA} and {XIELU.EPS}")
            continue
        if name == "lm_head.weight" and config.tie_embeddings:
            continue
        shape = tuple(file.get_slice(name).get_shape())
        if name not in want or shape != want[name].shape:
            here = list(want[name].shape) if name in want else "no such tensor"
            raise ValueError(f"{folder}: tensor {name} {list(shape)} is not what config.json describes: {here}")
        p = want.pop(name)
        if hasattr(p, "to_local"):                                         # a DTensor
            fill_shard(p, file.get_slice(name))
            continue
        owner, _, leaf = name.rpartition(".")
        tensor = file.get_tensor(name).to(device=device, dtype=dtype)
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(tensor))
    if want:
        raise ValueError(f"{folder}: {len(want)} tensors are missing, {next(iter(want))} among them")
    if config.tie_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


@torch.no_grad()
def fill_shard(p, rows):
    """This rank's part of a parameter that FSDP2 has cut along its first dimension, from a slice of a safetensors file: no other row is read."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    if shape[0]:
        p.to_local().copy_(rows[offset[0]:offset[0] + shape[0]])


def tensor_files(folder):
    """{tensor name: open safetensors file} of one file or of shards with an index."""
    index = os.path.join(folder, "model.safetensors.index.json")
    names = ["model.safetensors"]
    if os.path.isfile(index):
        with open(index, encoding="utf-8") as f:
            names = sorted(set(json.load(f)["weight_map"].values()))
        if any(name != os.path.basename(name) for name in names):
            raise ValueError(f"{index} names files outside of its folder: {names}")
    found = {}
    for name in names:
        try:
            file = safe_open(os.path.join(folder, name), "pt")
        except (OSError, SafetensorError) as e:
            raise ValueError(f"{os.path.join(folder, name)} is not a readable safetensors file: {e}") from None
        found.update({key: file for key in file.keys()})
    return found


def save_hf(model, path, tokenizer=None, dtype="float32", shard_bytes=5e9, merge=False):
    """
    Write a model as transformers reads it: safetensors (shards of 5 GB), config.json, generation_config.json, tokenizer files.

    dtype of the tensors: float32 or bfloat16. merge: structured layers (structured.py) as the dense matrices they equal. ValueError if
    transformers' Apertus cannot express the model. Source of the layout: transformers 5 (ApertusForCausalLM); its xIELU buffers are
    written too.
    """
    if model.config.ffn != "dense" and not merge:
        raise ValueError(f"transformers' Apertus has no ffn={model.config.ffn!r}: --merge writes the dense model that it equals")
    hf = config_to_hf(model.config, tokenizer, dtype)
    os.makedirs(path, exist_ok=True)
    shards, size = [{}], 0
    buffers = {f"model.layers.{i}.mlp.act_fn.{name}": torch.tensor(value) for i in range(model.config.n_layer)
               for name, value in (("beta", XIELU.BETA), ("eps", XIELU.EPS))}
    for name, p in itertools.chain(structured.dense_parameters(model), buffers.items()):
        tensor = p.to("cpu", getattr(torch, dtype)).contiguous()
        if size and size + tensor.nbytes > shard_bytes:
            shards, size = [*shards, {}], 0
        shards[-1][name], size = tensor, size + tensor.nbytes
    files = ["model.safetensors"] if len(shards) == 1 else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards):
        save_file(shard, os.path.join(path, file), metadata={"format": "pt"})
    jsons = {"config.json": hf, "generation_config.json": {k: hf[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in hf}}
    if len(shards) > 1:
        total = sum(t.nbytes for shard in shards for t in shard.values())
        where = {name: file for file, shard in zip(files, shards) for name in shard}
        jsons["model.safetensors.index.json"] = dict(metadata=dict(total_size=total), weight_map=where)
    if tokenizer:
        jsons.update(tokenizers.hf_files(tokenizer, chat=tokenizer.eos == tokenizer.special.get("<|assistant_end|>")))
    for file, content in jsons.items():
        with open(os.path.join(path, file), "w", encoding="utf-8") as f:
            json.dump(content, f, indent=1, ensure_ascii=False)


def load_run(folder, device="cpu", spread=None):
    """The model of a run folder of train.py, from its newest intact checkpoint; (model, Tokenizer). spread: as in load_hf."""
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        raise ValueError(f"no run in {folder!r} (no config.json there): train one with `python train.py configs/laptop.py`, or name a "
                         "Hugging Face model")
    with open(path, encoding="utf-8") as f:
        config = json.load(f)
    found = checkpoint.newest_intact(os.path.join(folder, "ckpt"))
    if not found:
        raise ValueError(f"{folder} has no checkpoint yet: it writes the first after {config['checkpoint_every']} steps")
    with torch.device("meta" if spread else device):
        model = Apertus(ApertusConfig(**{f.name: config[f.name] for f in dataclasses.fields(ApertusConfig) if f.name in config}))
        if found[1]["step"] < structured.guided_steps(found[1]["config"]):
            structured.add_guides(model)                                    # written while training was guided
    if spread:
        spread(model)
    checkpoint.load(found[0], model)
    structured.drop_guides(model)
    tok = tokenizers.load_for(folder)
    if config.get("chat"):
        tok.eos = tok.special["<|assistant_end|>"]                          # of sft.py and qrpo.py: a turn's end ends the text
    return model, tok


def load_any(name, device="cpu", dtype=None, spread=None):
    """(model, Tokenizer) of a run folder, a Hugging Face folder or a hub name. The published models all have the vocabulary 'apertus'."""
    if os.path.isdir(os.path.join(name, "ckpt")) or not os.path.exists(os.path.join(name, "config.json")) and name.startswith("out"):
        return load_run(name, device, spread)
    folder = local(name)
    return load_hf(folder, device, dtype, spread=spread), tokenizers.load_hf(folder)


def main():
    if not load:
        raise ValueError("say what to read: --load=out/laptop, a Hugging Face folder or a hub name; and --save=FOLDER to write it")
    model, tokenizer = load_any(load)
    print(f"{load}: {model.num_params():,} parameters; {model.config}")
    if save:
        save_hf(model, save, tokenizer, dtype, merge=merge)
        print(f"wrote {save}: transformers.AutoModelForCausalLM.from_pretrained({save!r}) reads it")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
