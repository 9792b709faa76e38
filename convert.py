"""
Hugging Face in and out. A run folder is a Hugging Face folder: a finished run loads in transformers as it is.

    config.json                            Hugging Face's keys; a run's settings under the key "nanoapertus"
    tokenizer.json, tokenizer_config.json  the vocabulary (tokenizer.py) and the chat template
    model.safetensors                      the weights of a finished run; above 5 GB several files and an index
    ckpt/                                  a run's checkpoints (engine/checkpoint.py): the newest intact one is read

$ python convert.py --load=swiss-ai/Apertus-8B-2509             # names, shapes, parameters of a published model
$ python convert.py --load=out/laptop --save=out/laptop-hf --dtype=bfloat16                # a copy to publish
$ python convert.py --load=out/chat --save=out/chat-merged --merge                         # adapters become matrices
$ python convert.py --load=swiss-ai/Apertus-v1.1-1.5B --save=mini.json                     # the vocabulary alone
$ python convert.py --load=out/laptop --trace="Hello"     # print what each module computes, to debug another engine

The parameters have the published names, so weights need no table of names. A repository is read as safetensors and
JSON, and no code in it is run. If a config asks for something that model.py lacks, or a tokenizer would give other ids
here than in transformers, an error names it. A run that is not an Apertus (SwiGLU, structured layers, adapters) has
model_type "nanoapertus", which transformers does not load.

The published models are the 8B and the 70B (2509), the Minis of 0.5B, 1.5B and 4B (v1.1), and 1.5, whose text model is
read here:

                 control tokens                      conversations                 embedding and head
    1.0          ids 0 to 999: tokenizer.py, NAMED   chat.py                       two
    v1.1         Mistral-Nemo's; <pad> is 10         the same ids, without names   0.5B: one, for both
    v1.5         thoughts at 32 and 33, not 69, 70   chat.py, but tools            ids of media in the embedding only
"""

import copy
import hashlib
import json
import math
import os
import re
import shutil

# Before torch: it sets an environment variable that torch reads when it loads.
from engine.hardware import pick_device, pick_dtype

# isort: split
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from chat import stop_ids
from configurator import checked, run
from engine import restore
from engine.files import flush, make_folder, read_json, write_json
from engine.readers import in_one_line
from engine.runs import settings_of
from model import XIELU, Apertus, ApertusConfig
from tokenizer import TEMPLATE, hf_files, load_for, write_bpe

load = ""              # a run folder, a Hugging Face folder or name, or a folder of adapters
save = ""              # the folder to write in Hugging Face's format; FILE.json: the vocabulary alone, for prepare.py
dtype = "float32"      # of the written tensors: float32 | bfloat16
merge = False          # merge adapters and structured layers into the equivalent dense matrices
trace = ""             # print what each module computes for this text (studies/trace.py)

# -----------------------------------------------------------------------------
# config.json

# Our names of settings, and Hugging Face's.
HF_NAMES = json.loads("""{
    "block_size": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "ffn_dim": "intermediate_size",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range"
}""")
# The same for each type of RoPE.
ROPE_NAMES = json.loads("""{
    "default": {"rope_theta": "rope_theta"},
    "linear": {"rope_theta": "rope_theta", "rope_scaling": "factor"},
    "llama3": {
        "rope_theta": "rope_theta",
        "rope_scaling": "factor",
        "rope_original": "original_max_position_embeddings",
        "rope_low": "low_freq_factor",
        "rope_high": "high_freq_factor"}
}""")
# The RoPE of a config.json without a word on it, in transformers 4 and 5.
PUBLISHED_ROPE = json.loads("""{
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0
}""")
# What each export says, because model.py computes nothing else.
EXPORTED = json.loads("""{
    "architectures": ["ApertusForCausalLM"],
    "model_type": "apertus",
    "hidden_act": "xielu",
    "qk_norm": true,
    "post_norm": false,
    "mlp_bias": false,
    "attention_bias": false,
    "attention_dropout": 0.0,
    "dtype": "float32",
    "torch_dtype": "float32",
    "use_cache": true
}""")
# Keys of other programs that may have this value only.
NEUTRAL = json.loads("""{
    "hidden_activation": "xielu", "is_causal": true, "pretraining_tp": 1, "partial_rotary_factor": 1.0,
    "logit_scale": 1.0, "pruned_heads": {}, "hidden_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    "is_decoder": false, "is_encoder_decoder": false, "add_cross_attention": false, "tie_encoder_decoder": false,
    "use_sliding_window": false, "use_bidirectional_attention": false, "rope_traditional": false
}""")
# Keys that change no logit, whatever their value.
FREE = """
architectures model_type auto_map custom_pipelines _name_or_path name_or_path _commit_hash transformers_version
unsloth_version unsloth_fixed tokenizer_class model_max_length dtype torch_dtype use_cache use_return_dict
return_dict output_attentions output_hidden_states bos_token_id eos_token_id pad_token_id id2label label2id
num_labels problem_type finetuning_task attn_implementation _attn_implementation _attn_implementation_autoset
chunk_size_feed_forward keys_to_ignore_at_inference torchscript gradient_checkpointing nanoapertus
text_config vision_config audio_config vision_tokenizer_config audio_tokenizer_config image_token_id audio_token_id
image_token_offset audio_token_offset
""".split()


def config_from_hf(hf):
    """
    The ApertusConfig of the content of a config.json, of 1.5 that of its text model. ValueError, one line, if it lacks
    a size or asks for anything that model.py does not compute.

    transformers 5 writes rope_parameters, 4 rope_theta and rope_scaling, which is null for plain RoPE.
    """
    kind = hf.get("model_type")
    if kind == "apertus1p5":
        text = hf.get("text_config") or {}
        tied = hf.get("tie_word_embeddings") or text.get("tie_word_embeddings")
        # Without a tied head, it has rows for ids of text only, and of the embedding we read these rows only.
        ids = not tied and text.get("output_vocab_size") or text.get("vocab_size")
        hf = hf | text | dict(vocab_size=ids, tie_word_embeddings=tied)
    elif kind != "apertus":
        raise ValueError(f"config.json is of a {kind!r} model: want model_type 'apertus'")
    given = {key: value for key, value in hf.items() if value is not None}
    ropes = [given.pop(key, None) or {} for key in ("rope_parameters", "rope_scaling")]
    if not any(ropes) and "rope_scaling" not in hf:
        ropes = [PUBLISHED_ROPE]
    for key, value in [pair for rope in ropes for pair in rope.items()]:
        if given.setdefault(key, value) != value:
            raise ValueError(f"config.json says two things about RoPE: {key}={given[key]} and {value}")
    rope = given.pop("type", "default")
    rope = given.pop("rope_type", rope)
    if rope not in ROPE_NAMES:
        given["rope_type"] = rope
    found = dict(
        tie_word_embeddings=False,
        num_key_value_heads=given.get("num_attention_heads"),
        rms_norm_eps=ApertusConfig.norm_eps,
        initializer_range=ApertusConfig.init_std,
        rope_theta=PUBLISHED_ROPE["rope_theta"]) | given
    config = ApertusConfig(**{
        ours: checked(theirs, found.pop(theirs, None), getattr(ApertusConfig, ours), "config.json")
        for ours, theirs in (HF_NAMES | ROPE_NAMES.get(rope, {})).items()})
    # Linear RoPE divides every frequency, as llama3 does if the original window is 0.
    if rope == "default":
        config.rope_scaling = 0.0
    elif rope == "linear":
        config.rope_original = 0
    may = EXPORTED | NEUTRAL | dict(
        head_dim=config.head_dim,
        layer_types=["full_attention"] * config.n_layer,
        output_vocab_size=config.vocab_size)
    odd = [f"{key}={value!r}" for key, value in found.items() if key not in FREE and may.get(key) != value]
    if odd:
        raise ValueError(f"config.json asks for settings that model.py lacks: {', '.join(odd):.200}")
    return config


def config_to_hf(config, dtype="float32"):
    """The content of a config.json for transformers 4 and 5. ValueError if their Apertus cannot compute the model."""
    if config.activation != "xielu" or not config.qk_norm:
        raise ValueError("transformers' Apertus has xIELU and QK-norm only, this model has "
                         f"activation={config.activation!r}, qk_norm={config.qk_norm}")

    def named(names):
        return {theirs: getattr(config, ours) for ours, theirs in names.items()}
    kind = "llama3" if config.rope_original else "linear"
    if not config.rope_scaling:
        kind = "default"
    rope = dict(rope_type=kind) | named(ROPE_NAMES[kind])
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return named(HF_NAMES) | EXPORTED | dict(
        dtype=dtype,
        torch_dtype=dtype,
        rope_theta=config.rope_theta,
        rope_scaling=scaling if config.rope_scaling else None,
        rope_parameters=rope)


# -----------------------------------------------------------------------------
# folders


def local(name, files=("*.safetensors", "*.json", TEMPLATE)):
    """
    The folder of a run or a model; that of a hub name is downloaded, the files of these patterns only. ValueError or
    OSError, one line, if there is neither.
    """
    if os.path.isdir(name):
        return name
    if name.count("/") != 1 or name.startswith((".", "/", "out/")):
        raise ValueError(f"no run in {name!r}: it is neither a folder here nor the name of a hub repository "
                         "(organisation/model); train one with `python train.py configs/laptop.py`")
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(name, allow_patterns=list(files))
    except Exception as e:                                 # of any kind: the library has a dozen
        raise OSError(f"{name} could not be downloaded ({type(e).__name__}): check the name and the network, "
                      "or give a local folder") from None


def shape_in(folder):
    """The ApertusConfig of a run folder, or of another Hugging Face folder."""
    hf = read_json(f"{folder}/config.json")
    # transformers keeps our settings in the files that it saves, but may have changed the model.
    if os.path.isdir(f"{folder}/ckpt") or hf.get("model_type") == "nanoapertus":
        return ApertusConfig.from_settings(settings_of(folder))
    return config_from_hf(hf)


def shape_of(name):
    """The ApertusConfig of a run or a model. Of a hub name only its config.json is downloaded."""
    return shape_in(local(name, ["config.json"]))


def weights_in(folder):
    """Where the weights of a folder are: its newest intact checkpoint, or the folder itself."""
    found = restore.newest_intact(f"{folder}/ckpt")
    return found[0] if found else folder


def has_adapter(folder):
    """Whether this is a folder of adapters as PEFT writes it, which holds no other weights."""
    return os.path.isfile(f"{folder}/adapter_config.json")


def start_of(name):
    """
    (ApertusConfig, Tokenizer, where its weights are) of a model that a run starts with. fill() reads them. ValueError,
    one line, also if the folder holds adapters.
    """
    folder = local(name)
    with in_one_line(folder, ValueError, OSError):
        if has_adapter(folder) or settings_of(folder).get("lora_r"):
            raise ValueError(f"{name} holds adapters: merge them into their model first, "
                             f"python convert.py --load={name} --save=FOLDER --merge")
        return shape_in(folder), load_for(folder), weights_in(folder)


# -----------------------------------------------------------------------------
# read

# The numbers of xIELU that are stored as tensors, although all models have the same.
CONSTANTS = dict(beta=XIELU.BETA, eps=XIELU.EPS)


def unfilled(shape):
    """An Apertus on the meta device: names and shapes without memory."""
    with torch.device("meta"):
        return Apertus(shape, seed=None)


def published(model):
    """{published name: parameter} of a model, adapters left out. (LoRALinear holds its matrix as `base`.)"""
    return {name.replace(".base.", "."): p for name, p in model.named_parameters() if ".lora_" not in name}


def stored(path, model):
    """
    (names, read) of the weights of a model at a path of weights_in(): a checkpoint, or safetensors under the published
    names. The model may be on the meta device, and have adapters, which are left out.

    read(name, dtype, device) returns a tensor, dtype None: as it is stored. read(name, into=tensor) fills one, or this
    rank's shard of one. ValueError, one line, if the names or shapes are not those of the model.
    """
    import torch.distributed.checkpoint as dcp

    own = published(model)
    keys = {name: f"model/{name}" for name in own}
    of_run = os.path.isfile(f"{path}/manifest.json")
    reader, saved = restore.reader_for(path, {keys[name]: p for name, p in own.items()} if of_run else {})
    if not of_run:
        # Apertus 1.5 also stores the tokenizers of images and sound.
        keys = {key.replace("model.language_model.", "model.", 1): key for key in saved if "_tokenizer." not in key}
    if model.config.tie_embeddings:
        keys.pop("lm_head.weight", None)                   # the 0.5B stores it all the same
    constants = {name: torch.empty(1) for name in keys if name.endswith(("act_fn.beta", "act_fn.eps"))}
    if wrong := (keys.keys() - constants.keys()) ^ own.keys():
        raise ValueError(f"{path}: {len(wrong)} tensors are missing, or not of the model that config.json describes, "
                         f"{min(wrong)} among them; a run has its first weights after checkpoint_every steps")
    for name, p in (own | constants).items():
        entry = saved[keys[name]]
        # A header may say where a part of a tensor lies in it: the file must hold as many numbers as the tensor.
        if sum(part.sizes.numel() for part in entry.chunks) != entry.size.numel():
            raise ValueError(f"{path}: {name} is stored in part only, or twice")
        if keys[name] == "model.language_model.embed_tokens.weight":
            # Behind the ids of text are those of images and sound.
            entry.size = torch.Size([min(len(p), entry.size[0]), entry.size[1]])
        if (entry.size or (1,)) != p.shape:
            raise ValueError(f"{path}: {name} is {[*entry.size]}, and config.json describes {[*p.shape]}")

    def read(name, dtype=None, device="cpu", into=None):
        entry = saved[keys[name]]
        if into is not None and not entry.size:
            restore.place(into, read(name))                # Apertus 1.5 stores scalars without a dimension
            return into
        if into is None:
            # Not empty(): of parts that overlap, some rows would be what was in memory before.
            into = torch.zeros(entry.size, dtype=dtype or entry.properties.dtype, device=device)
        dcp.load({keys[name]: into}, storage_reader=reader, no_dist=True)
        return into if entry.size else into.view(1)

    for name in constants:
        found, want = read(name).item(), CONSTANTS[name.rpartition(".")[2]]
        if not math.isclose(found, want, rel_tol=0.02):    # fp16 rounds -1e-6 to -1.013e-6
            raise ValueError(f"{path}: {name} is {found}, and model.py has {want}")
    return [*own], read


@torch.no_grad()
def fill(model, path):
    """Read the weights of a model, whole or in shards, except adapters. path: as start_of() returns it."""
    _, read = stored(path, model)
    for name, p in published(model).items():
        read(name, into=p)


def load_hf(path_or_repo, device="cpu", dtype=None, base=""):
    """
    The Apertus in a Hugging Face folder or repository, or of a run that trained all weights. dtype: None = that of each
    stored tensor. base: int8 or nf4, of the matrices of its blocks, which are quantised one by one as they are read.

    Memory holds the model and one tensor. ValueError, one line, if the folder does not hold the model that its
    config.json describes.
    """
    folder = local(path_or_repo)
    path, settings = weights_in(folder), settings_of(folder)
    model = unfilled(shape_in(folder))
    structured = settings.get("ffn", "dense") != "dense"
    if structured:
        from papers.structured_ffn import drop_guides, restore as with_structured_layers
        with torch.device("meta"):
            with_structured_layers(model, settings, restore.read_manifest(path)["step"])
    matrices = ()
    if base:
        from posttrain import quantised
        matrices = quantised.matrices(model)
    names, read = stored(path, model)
    for name in names:
        owner, _, leaf = name.rpartition(".")
        if owner in matrices:
            quantised.replace(model, owner, read(name, dtype, device), base)
        else:
            setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(read(name, dtype, device)))
    if model.config.tie_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    if structured:
        drop_guides(model)
    return model.requires_grad_(not base)


def load_any(name, device="cpu", dtype=None, base=""):
    """
    (model, Tokenizer) of a run folder, a Hugging Face folder or name, or a folder of adapters, next to whose model they
    are put. dtype, base: as in load_hf(). ValueError, one line, for anything else, or if adapters were trained on other
    weights than their model has today.
    """
    folder = local(name)
    from posttrain import lora

    with in_one_line(folder, ValueError, OSError, torch.OutOfMemoryError):
        if has_adapter(folder):
            _, start = lora.read_settings(folder)
            model, tok = load_any(start, device, dtype, base)
            lora.load(model, folder, fingerprint(model))
            return model, tok
        settings = settings_of(folder)
        adapters = lora.adapters_of(settings)
        # The vocabulary comes before the weights, which take minutes: an error comes early.
        shape, tok = shape_in(folder), load_for(folder)
        ids, rows = tok.vocab_size, shape.vocab_size
        if not ids <= rows < ids + 1024:
            raise ValueError(f"{folder}: the model has {rows} ids and its tokenizer {ids}: they do not belong together")
        tok.vocab_size = rows                              # rows that pad the embedding decode to nothing
        if adapters:
            start = settings["init_from"]
            model, _ = load_any(start, device, dtype, base)
            if fingerprint(model)[:16] != settings["start_hash"]:
                raise ValueError(f"{folder} was trained on other weights than those of {start} today")
            lora.adapt(model, adapters, None)
            restore.load(weights_in(folder), model)
            model.config = shape                           # the run may have changed its window and RoPE
            return model, tok
        return load_hf(folder, device, dtype, base), tok


def load_ready(name, device, dtype, base=""):
    """load_any() to generate or evaluate. device, dtype: by name, or "auto", the dtype of the weights, bf16 on CUDA."""
    device = pick_device(device)
    wanted = torch.bfloat16 if "cuda" in device else None
    if dtype != "auto":
        wanted = pick_dtype(dtype, device)
    model, tok = load_any(name, device, wanted, base)
    return model.eval(), tok


def fingerprint(model):
    """
    A sha256 of the first 64 values of each weight, rounded to bf16: equal for a model in fp32 and in bf16, quantised or
    not. Adapters do not count.
    """
    digest = hashlib.sha256()
    for path, module in model.named_modules():
        # A quantised matrix keeps its first original values.
        own = {"weight": module.first} if hasattr(module, "first") else dict(module.named_parameters(recurse=False))
        if path == "lm_head" and model.config.tie_embeddings or ".lora_" in path:
            continue                                       # a tied head is the embedding, which counts once
        for leaf, p in own.items():
            p = p.full_tensor() if hasattr(p, "full_tensor") else p     # shards are gathered, one tensor at a time
            digest.update(f"{path.removesuffix('.base')}.{leaf}".encode())
            digest.update(p.detach().flatten()[:64].bfloat16().float().cpu().numpy())
    return digest.hexdigest()


# -----------------------------------------------------------------------------
# write

LIST = ".export.json"       # in an export, the names of its files


def texts(config, tok):
    """{file name: content, for JSON} of all files but the weights. config: of config.json; tok: or None."""
    if not tok:
        return {"config.json": config}
    ids = dict(bos_token_id=tok.bos, eos_token_id=tok.eos, pad_token_id=tok.pad)
    stop = sorted(stop_ids(tok)) if tok.eos == tok.special.get("<|assistant_end|>") else tok.eos
    return {"config.json": config | ids, "generation_config.json": ids | dict(eos_token_id=stop)} | hf_files(tok)


def describe(folder, settings, shape, tok):
    """
    Write config.json and the vocabulary of a run. settings: all of them, a dict; with chat, a text ends where the
    assistant's turn does.
    """
    if settings.get("chat"):
        tok = copy.copy(tok)
        tok.eos = tok.id_of("<|assistant_end|>")
    is_dense = settings.get("ffn", "dense") == "dense" and not settings.get("lora_r")
    if is_dense and shape.activation == "xielu" and shape.qk_norm:
        config = config_to_hf(shape)
    else:
        config = dict(model_type="nanoapertus")
    files = texts(config, tok)
    files["config.json"]["nanoapertus"] = settings
    # Weights of an earlier end of this run are not those of its newest checkpoint.
    for file in os.listdir(folder):
        if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?", file):
            os.remove(f"{folder}/{file}")
    for file, content in files.items():
        write_json(f"{folder}/{file}", content)


def describe_run(folder, settings, shape, data):
    """describe() with the vocabulary of a data folder."""
    describe(folder, settings, shape, load_for(data))


def complete(folder):
    """Write the weights of a finished run next to its config.json, if it is an Apertus that transformers can load."""
    if read_json(f"{folder}/config.json")["model_type"] == "apertus":
        model = unfilled(shape_in(folder))
        _, read = stored(weights_in(folder), model)
        write_weights(model, read, folder, torch.float32, 5e9)


def write_weights(model, value_of, folder, dtype, shard_bytes):
    """
    Write weights next to a config.json as safetensors: a file, or if they have more than shard_bytes several and an
    index. Each file is whole or absent. Memory holds one of them.

    model: on the meta device, for names and shapes; value_of(name): the tensor.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    constants = {
        f"model.layers.{i}.mlp.act_fn.{name}": torch.tensor(value)
        for i in range(model.config.n_layer)
        for name, value in CONSTANTS.items()}
    sizes = dict(model.to(dtype).named_parameters()) | constants
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=int(shard_bytes))
    for file, names in split.filename_to_tensors.items():
        path = f"{folder}/{file}"
        part = {}
        for name in names:
            value = constants[name] if name in constants else value_of(name).detach()
            part[name] = value.to("cpu", dtype).contiguous()
        save_file(part, f"{path}.tmp", metadata={"format": "pt"})
        shutil.copymode(f"{folder}/config.json", f"{path}.tmp")     # safetensors lets nobody else read its files
        flush(f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
    if split.is_sharded:
        index = dict(metadata=split.metadata, weight_map=split.tensor_to_filename)
        write_json(f"{folder}/model.safetensors.index.json", index)


def check_replaceable(folder):
    """ValueError if a folder holds anything that no export wrote."""
    there = {*os.listdir(folder)} if os.path.exists(folder) else set()
    ours = read_json(f"{folder}/{LIST}")["files"] if LIST in there else []
    foreign = sorted(there - {LIST, *ours})
    if foreign:
        raise ValueError(f"{folder} holds {foreign[0]}, which no export wrote: choose another folder, or move it away")


def save_hf(model, path, tokenizer=None, dtype="float32", shard_bytes=5e9, merge=False):
    """
    Write a Hugging Face folder that transformers loads, and that may replace an older export.

    It is written under another name and then renamed: whenever this is killed, the folder is the old export, the new
    one, or absent. merge: adapters and structured layers become dense matrices; changes the model. ValueError, one
    line, if transformers cannot compute the model, or the folder holds files that no export wrote.
    """
    folder = os.path.realpath(path)
    check_replaceable(folder)
    numbers = pick_dtype(dtype, "cpu")
    files = texts(config_to_hf(model.config, str(numbers)[6:]), tokenizer)
    tensors = dict(model.named_parameters())
    if merge:
        from papers.structured_ffn import dense_parameters
        from posttrain.lora import merge as merge_adapters

        merge_adapters(model, numbers)
        tensors = dict(dense_parameters(model))
    whole = unfilled(model.config)
    if tensors.keys() != dict(whole.named_parameters()).keys():
        raise ValueError("an export holds a whole model: --merge adds the adapters to its matrices, "
                         "and multiplies structured layers")

    new, old = f"{folder}.export-new", f"{folder}.export-old"
    shutil.rmtree(new, ignore_errors=True)                 # of an export that was killed
    make_folder(new)
    try:
        for file, content in files.items():
            write_json(f"{new}/{file}", content)
        write_weights(whole, tensors.get, new, numbers, shard_bytes)
        write_json(f"{new}/{LIST}", dict(files=sorted(os.listdir(new))))
    except (OSError, SafetensorError) as e:                # the disk is full
        shutil.rmtree(new, ignore_errors=True)
        raise OSError(f"{folder} could not be written ({e}); the older export is untouched") from None
    if os.path.exists(folder):
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    os.rename(new, folder)
    flush(os.path.dirname(folder))
    shutil.rmtree(old, ignore_errors=True)


# -----------------------------------------------------------------------------
# the command


def main():
    if save.endswith(".json"):
        if os.path.exists(save):
            raise ValueError(f"{save} is there already: choose another name")
        tok = load_for(local(load, ["*.json", TEMPLATE]))  # not the weights
        write_bpe(tok, save)
        print(f"wrote {save}: {tok.vocab_size:,} ids; python prepare.py TEXTS --tokenizer={save}")
        return
    if save:
        check_replaceable(save)
    model, tok = load_any(load)
    print(f"{load}: {model.num_params():,} parameters; {model.config}")
    if trace:
        from studies.trace import trace as trace_modules
        trace_modules(model, tok, trace)
    if save:
        save_hf(model, save, tok, dtype, merge=merge)
        print(f"wrote {save}: transformers.AutoModelForCausalLM.from_pretrained({save!r}) reads it")


if __name__ == "__main__":
    run(main, globals())
