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
import itertools
import json
import math
import os
import re
import shutil

# Before torch: it sets an environment variable that torch reads when it loads.
from engine.hardware import pick_device, pick_dtype
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

import chat
from configurator import attached, checked, run
from engine import restore
from engine.attention import attend_on
from engine.files import flush, make_folder, read_json, write_json
from engine.readers import in_one_line
from engine.runs import settings_of
from model import XIELU, Apertus, ApertusConfig
from tokenizer import TEMPLATE, hf_files, load_for, write_bpe

load = ""             # a run folder, a Hugging Face folder or name, or a folder of adapters
save = ""             # the folder to write in Hugging Face's format; FILE.json: the vocabulary alone, for prepare.py
dtype = "float32"     # of the written tensors: float32 | bfloat16
merge = False         # merge adapters and structured layers into the equivalent dense matrices
trace = ""            # print what each module computes for this text (studies/trace.py)

OWN = "nanoapertus"


# -----------------------------------------------------------------------------
# config.json

# Our name of a setting, and its name in Hugging Face's config.json. The settings of RoPE follow.
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
OPTIONAL = "n_kv_head tie_embeddings norm_eps init_std rope_theta".split()
# The same for the settings that each type of RoPE has in addition to theta.
ROPE = json.loads("""{
    "default": {},
    "linear": {"rope_scaling": "factor"},
    "llama3": {
        "rope_scaling": "factor",
        "rope_original": "original_max_position_embeddings",
        "rope_low": "low_freq_factor",
        "rope_high": "high_freq_factor"}
}""")
# The keys that are the same for all Apertus models.
FIXED = json.loads("""{
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

# No logit depends on these keys of a config.json: they may have any value.
FREE = """
    architectures model_type auto_map custom_pipelines _name_or_path name_or_path _commit_hash transformers_version
    unsloth_version unsloth_fixed tokenizer_class model_max_length dtype torch_dtype use_cache use_return_dict
    return_dict output_attentions output_hidden_states bos_token_id eos_token_id pad_token_id id2label label2id
    num_labels problem_type finetuning_task attn_implementation _attn_implementation _attn_implementation_autoset
    chunk_size_feed_forward keys_to_ignore_at_inference torchscript gradient_checkpointing nanoapertus
    rope_scaling rope_parameters
""".split()
# These would change the logits or the training, so they must have the value that model.py implements: off, for most of
# them. Null asks for nothing and is accepted.
OFF = """
    attention_bias mlp_bias post_norm attention_dropout hidden_dropout embd_pdrop resid_pdrop is_decoder
    is_encoder_decoder add_cross_attention tie_encoder_decoder use_sliding_window use_bidirectional_attention
    rope_traditional
""".split()
REQUIRED = dict.fromkeys(OFF, False) | json.loads("""{
    "hidden_act": "xielu",
    "hidden_activation": "xielu",
    "qk_norm": true,
    "pretraining_tp": 1,
    "is_causal": true,
    "pruned_heads": {},
    "partial_rotary_factor": 1.0,
    "logit_scale": 1.0
}""")
# The other keys of an Apertus 1.5 describe how pictures and sound become ids, and are ignored; text_part() reads
# text_config and tie_word_embeddings.
MEDIA = """
    text_config vision_config audio_config vision_tokenizer_config audio_tokenizer_config image_token_id audio_token_id
    image_token_offset audio_token_offset tie_word_embeddings
""".split()


def config_from_hf(hf):
    """
    config.json (dict) -> ApertusConfig. ValueError, one line, names the settings that model.py lacks.

    transformers 4 wrote rope_theta and rope_scaling, where null means plain RoPE; 5 writes rope_parameters. If a file
    has both they must agree. If it has neither it means Apertus' own: theta 12e6 and llama3. Source: transformers'
    ApertusConfig, 4.56 to 5.24, and the configs of published Apertus models (tests/test_published.py).
    """
    hf = text_part(hf)
    if hf.get("model_type") != "apertus":
        raise ValueError(f"config.json is of a {hf.get('model_type')!r} model: want model_type 'apertus'")
    theta, old, new = map(hf.get, ("rope_theta", "rope_scaling", "rope_parameters"))
    if not new and "rope_scaling" not in hf:
        new = rope_to_hf(ApertusConfig(rope_theta=12e6))
    rope = {}
    for key, value in itertools.chain([("rope_theta", theta)], (old or {}).items(), (new or {}).items()):
        if value is not None and rope.setdefault(key, value) != value:
            raise ValueError(f"config.json says two things about RoPE: {key}={rope[key]!r} and {value!r}")
    kind = rope.setdefault("rope_type", rope.get("type", "default"))

    said = hf | rope
    given = dict(n_kv_head=hf.get("num_attention_heads"), rope_theta=12e6, rope_scaling=0.0)
    for ours, theirs in (HF_NAMES | dict(rope_theta="rope_theta") | ROPE.get(kind, {})).items():
        if said.get(theirs) is not None or ours not in OPTIONAL:
            given[ours] = checked(theirs, said.get(theirs), getattr(ApertusConfig, ours), "config.json")
    if kind == "linear":
        given["rope_original"] = 0      # all frequencies are divided: llama3 without an original context
    config = ApertusConfig(**given)
    refuse_unusual(said, REQUIRED | config_to_hf(config) | rope_to_hf(config) | dict(
        type=kind,
        head_dim=config.head_dim,
        output_vocab_size=config.vocab_size,
        layer_types=["full_attention"] * config.n_layer))
    return config


def text_part(hf):
    """
    The part of a config.json (dict) that describes the text model: the text_config of an Apertus 1.5, else all of it.

    1.5 reads ids of pictures and sound, but never writes them: unless it is tied, its head has fewer rows than its
    embedding, one for each id of text. The text model has only these ids, and is an Apertus.
    """
    if hf.get("model_type") != "apertus1p5":
        return hf
    text = hf.get("text_config") or {}
    refuse_unusual({key: value for key, value in hf.items() if key not in MEDIA}, {})
    tied = hf.get("tie_word_embeddings") or text.get("tie_word_embeddings")
    ids = not tied and text.get("output_vocab_size") or text.get("vocab_size")
    return text | dict(model_type="apertus", vocab_size=ids, tie_word_embeddings=tied)


def refuse_unusual(given, usual):
    """Raise a ValueError that names settings of `given` that change a logit and are neither null nor as in `usual`."""
    # A long value is cut: a quantization_config fills a screen.
    unusual = [f"{key}={value!r}"[:120] for key, value in given.items()
               if key not in FREE and value not in (None, usual.get(key))]
    if unusual:
        raise ValueError(f"config.json asks for settings that model.py lacks: {', '.join(unusual)}")


def rope_to_hf(config):
    """The RoPE settings of an ApertusConfig in the spelling of transformers 5."""
    kind = ("llama3" if config.rope_original else "linear") if config.rope_scaling else "default"
    scaling = {theirs: getattr(config, ours) for ours, theirs in ROPE[kind].items()}
    return dict(rope_type=kind, rope_theta=config.rope_theta) | scaling


def config_to_hf(config, dtype="float32"):
    """ApertusConfig -> config.json (dict), RoPE in both spellings. ValueError if transformers has no such Apertus."""
    if config.activation != "xielu" or not config.qk_norm:
        raise ValueError("transformers' Apertus has xIELU and QK-norm only, this model has "
                         f"activation={config.activation!r}, qk_norm={config.qk_norm}")
    rope = rope_to_hf(config)
    scaling = dict(rope)
    theta = scaling.pop("rope_theta")
    return {theirs: getattr(config, ours) for ours, theirs in HF_NAMES.items()} | FIXED | dict(
        dtype=dtype,
        torch_dtype=dtype,
        rope_theta=theta,
        rope_scaling=scaling if config.rope_scaling else None,
        rope_parameters=rope)


# -----------------------------------------------------------------------------
# weights in


def unfilled(config):
    """An Apertus on the meta device, without memory, for its names and shapes."""
    with torch.device("meta"):
        return Apertus(config, seed=None)


def local(name, files=("*.safetensors", "*.json", TEMPLATE)):
    """The folder of a model: the path itself, or a download of safetensors, JSON and the chat template from the hub."""
    if os.path.isdir(name):
        return name
    if name.count("/") != 1 or name.startswith((".", "/", "out/")):
        raise ValueError(f"no run in {name!r}: it is neither a folder here nor the name of a hub repository "
                         "(organisation/model); train one with `python train.py configs/laptop.py`")
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(name, allow_patterns=list(files))
    except Exception as e:  # network, name, permission: the library has a dozen kinds
        raise OSError(f"{name} could not be downloaded ({type(e).__name__}): check the name and the network, "
                      "or give a local folder") from None


def shape_in(folder):
    """The ApertusConfig of a folder: from the settings of a run, otherwise from Hugging Face's keys."""
    hf = read_json(f"{folder}/config.json")
    if os.path.isdir(f"{folder}/ckpt") or hf.get("model_type") == OWN:
        return ApertusConfig.of(settings_of(folder))
    return config_from_hf(hf)


def weights_in(folder):
    """Where the weights of a folder are: its newest intact checkpoint, or else the folder itself."""
    found = restore.newest_intact(f"{folder}/ckpt")
    return found[0] if found else folder


@torch.no_grad()
def stored(path, model, device="cpu", dtype=None):
    """
    Read the weights at `path` (from weights_in) one tensor at a time. A parameter that has memory is filled in place;
    each rank reads its own rows. A parameter on the meta device is yielded as (name, tensor), on `device`, in `dtype`
    (None: that of the file).

    ValueError: missing, extra or misshapen tensors, or other constants of xIELU.
    """
    import torch.distributed.checkpoint as dcp

    params = {name: p for name, p in model.named_parameters() if ".lora_" not in name}
    keys = {name: f"model/{name}" for name in params}
    of_run = os.path.isfile(f"{path}/manifest.json")
    reader, saved = restore.reader_for(path, {keys[name]: p for name, p in params.items()} if of_run else {})
    if not of_run:
        keys = keys_in(path, saved, params, model.config.tie_embeddings)
    constants = {name: torch.empty(()) for name in keys.keys() - params.keys()}
    for name, p in (params | constants).items():
        entry = saved[keys[name]]
        # A header may say where a part of a tensor lies in it: the file must hold as many numbers as the tensor.
        if sum(part.sizes.numel() for part in entry.chunks) != entry.size.numel():
            raise ValueError(f"{path}: {keys[name]} is stored in part only, or twice")
        same = entry.size == p.shape
        tensor = p.detach()
        if p.is_meta or not same:
            # Zeros and not empty(): of parts that overlap, some rows would be what was in memory before.
            tensor = torch.zeros(entry.size, dtype=dtype or entry.properties.dtype, device=device)
        dcp.load({keys[name]: tensor}, storage_reader=reader, no_dist=True)
        if not same:
            tensor = tensor.flatten()[:p.numel()].clone().view(p.shape)
        if p.is_meta:
            yield name, tensor
        elif not same:
            restore.place(p, tensor)
    for name, value in constants.items():
        want = getattr(XIELU, name.rpartition(".")[2].upper())
        if not math.isclose(value, want, rel_tol=0.02):    # fp16 rounds -1e-6 to -1.013e-6
            raise ValueError(f"{path}: {name} is {value.item()}, and model.py has {want}")


def keys_in(path, saved, params, tied):
    """
    {our name: its key} of the tensors in a Hugging Face folder, with xIELU's constants, which are buffers there.

    An Apertus 1.5 has its text model below model.language_model. The last rows of its embedding, which are not text,
    and the tokenizers of pictures and sound are left out. A scalar may be stored without a dimension.
    """
    media = "model.vision_tokenizer.", "model.audio_tokenizer."
    keys = {key.replace("model.language_model.", "model.", 1): key for key in saved if not key.startswith(media)}
    if tied:
        keys.pop("lm_head.weight", None)
    wrong = {name for name in keys if not name.endswith(("act_fn.beta", "act_fn.eps"))} ^ params.keys()
    if wrong:
        raise ValueError(f"{path}: {len(wrong)} tensors are missing, or not of the model that config.json describes, "
                         f"{min(wrong)} among them; a run has its first weights after checkpoint_every steps")
    for name, p in params.items():
        entry, want = saved[keys[name]], list(p.shape)
        have = list(entry.size) or [1]
        if keys[name] == "model.language_model.embed_tokens.weight":
            have[0] = min(have[0], want[0])
        if have != want:
            raise ValueError(f"{path}: {keys[name]} is {have}, and config.json describes {want}")
    return keys


def fill(model, path):
    """Load the weights at `path` (from start_of) into a model, whole or sharded. Each rank reads its own rows."""
    for _ in stored(path, model):
        pass


def load_hf(path_or_repo, device="cpu", dtype=None, base=""):
    """
    The model of a folder or hub name, with its weights and without adapters.

    dtype: None keeps that of the file. base: int8 or nf4 quantises the matrices of the blocks (posttrain/quantised.py).
    The model is built without memory, and tensors are read and converted one by one: peak memory is the model plus one
    tensor. ValueError: another architecture, unknown config keys, missing, extra or misshapen tensors.
    """
    folder = local(path_or_repo)
    settings = settings_of(folder)
    path = weights_in(folder)
    structured = attached("papers.structured_ffn") if settings.get("ffn", "dense") != "dense" else None
    model = unfilled(shape_in(folder))
    if structured:
        with torch.device("meta"):
            structured.restore(model, settings, restore.read_manifest(path)["step"])
    quantised = attached("posttrain.quantised") if base else None
    matrices = quantised.matrices(model) if base else ()
    for name, tensor in stored(path, model, device, dtype):
        owner, _, leaf = name.rpartition(".")
        if owner in matrices:
            quantised.replace(model, owner, tensor, base)
        else:
            setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(tensor))
    if model.config.tie_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    if base:
        model.requires_grad_(False)
    if structured:
        structured.drop_guides(model)
    attend_on(model, device)
    return model


# -----------------------------------------------------------------------------
# any model by its name


def load_any(name, device="cpu", dtype=None, base=""):
    """
    (model, Tokenizer) of a run folder, a Hugging Face folder or a hub name. Adapters in one of these are attached to
    the base model that they name.

    dtype, base: as in load_hf; adapters keep their dtype.
    """
    folder = local(name)
    with in_one_line(folder, OSError, ValueError, torch.OutOfMemoryError):
        if is_adapters(folder):
            return load_adapters(folder, device, dtype, base)
        tok = load_for(folder)  # before the weights, which take minutes: an error comes early
        model = load_hf(folder, device, dtype, base)
        ids, rows = tok.vocab_size, model.config.vocab_size
        if not ids <= rows < ids + 1024:
            raise ValueError(f"{folder}: the model has {rows} ids and its tokenizer {ids}: they do not belong together")
        tok.vocab_size = rows  # rows that pad the embedding to a round number decode to nothing
        return model, tok


def is_adapters(folder):
    """Whether a folder holds adapters: PEFT's two files, or a run of posttrain/ or train.py that trained some."""
    return os.path.isfile(f"{folder}/adapter_config.json") or settings_of(folder).get("lora_r")


def load_adapters(folder, device, dtype, base):
    """(model, Tokenizer) of adapters and the base model that they name. ValueError: its weights have changed."""
    lora = attached("posttrain.lora")
    settings = {} if os.path.isfile(f"{folder}/adapter_config.json") else settings_of(folder)
    name = settings["init_from"] if settings else lora.read_settings(folder)[1]
    model, tok = load_any(name, device, dtype, base)
    start = fingerprint(model)
    if not settings:
        lora.load(model, folder, start)
        return model, tok
    if start[:16] != settings["start_hash"]:
        raise ValueError(f"{folder} was trained on other weights than those of {name} today")
    lora.adapt(model, lora.adapters_of(settings))
    restore.load(weights_in(folder), model)
    model.config = shape_in(folder)  # train.py may have changed window and RoPE
    return model, load_for(folder)


def load_ready(name, device, dtype, base=""):
    """
    (model, Tokenizer) of load_any, in eval mode. device, dtype: by name, as the settings of a script have them.

    dtype "auto" keeps that of the files, except on CUDA, where it is bf16: half the bytes to read per token. base: as
    in load_any.
    """
    device = pick_device(device)
    wanted = torch.bfloat16 if "cuda" in device else None
    if dtype != "auto":
        wanted = pick_dtype(dtype, device)
    model, tok = load_any(name, device, wanted, base)
    return model.eval(), tok


def shape_of(name):
    """The ApertusConfig of a model by its name, from config.json alone. OSError for a folder without it (adapters)."""
    return shape_in(local(name, ["config.json"]))


def start_of(name):
    """
    (ApertusConfig, Tokenizer, path) of a model, which train.py --init_from needs before it reads the weights.

    path: a checkpoint or a Hugging Face folder, for fill(). ValueError for adapters, which are no whole model.
    """
    folder = local(name)
    with in_one_line(folder, OSError, ValueError):
        if is_adapters(folder):
            raise ValueError(f"{name} holds adapters: merge them into their model first, "
                             f"python convert.py --load={name} --save=FOLDER --merge")
        return shape_in(folder), load_for(folder), weights_in(folder)


def fingerprint(model):
    """
    Identify weights, on any device and in fp32, bf16, 8 or 4 bits: the sha256 of the first 64 values of every tensor,
    rounded to bf16. Adapters are not part of it.

    A matrix in 8 or 4 bits keeps its first values unquantised, so that the hash is the same.
    """
    digest = hashlib.sha256()
    for path, module in model.named_modules():
        own = {"weight": module.first} if hasattr(module, "first") else dict(module.named_parameters(recurse=False))
        if path == "lm_head" and model.config.tie_embeddings or ".lora_" in path:
            continue    # a tied head is the embedding, which counts once
        for leaf, p in own.items():
            p = p.full_tensor() if hasattr(p, "full_tensor") else p  # shards are gathered, one tensor at a time
            digest.update(f"{path}.{leaf}".encode())
            digest.update(p.detach().flatten()[:64].bfloat16().float().cpu().numpy().tobytes())
    return digest.hexdigest()


# -----------------------------------------------------------------------------
# out

# The names of the files that an export wrote. A later export into the same folder replaces these.
LIST = ".export.json"


def write_texts(folder, tok):
    """Write tokenizer.json, tokenizer_config.json and generation_config.json. Returns the ids of bos, eos and pad."""
    ends = dict(bos_token_id=tok.bos, eos_token_id=tok.eos, pad_token_id=tok.pad)
    # A chat model stops at the end of its turn, and at the end of a call of tools.
    stops = sorted(chat.stop_ids(tok)) if tok.eos == tok.special.get("<|assistant_end|>") else tok.eos
    for file, content in (hf_files(tok) | {"generation_config.json": ends | dict(eos_token_id=stops)}).items():
        write_json(f"{folder}/{file}", content)
    return ends


def describe(folder, settings, shape, tok):
    """
    Write config.json and the vocabulary of a run folder, with Hugging Face's keys if transformers has such an Apertus.

    settings: the run's, kept under the key "nanoapertus". shape: its ApertusConfig. If settings["chat"] is true, the
    end of the assistant's turn is the end of a text.
    """
    tok = copy.copy(tok)
    if settings.get("chat"):
        tok.eos = tok.id_of("<|assistant_end|>")
    variant = settings.get("lora_r") or settings.get("ffn", "dense") != "dense"
    plain = not variant and shape.activation == "xielu" and shape.qk_norm
    hf = config_to_hf(shape) if plain else dict(model_type=OWN)
    # Remove the exported weights of an earlier, shorter run: they are not those of the newest checkpoint.
    for stale in os.listdir(folder):
        if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?", stale):
            os.remove(f"{folder}/{stale}")
    write_json(f"{folder}/config.json", hf | write_texts(folder, tok) | {OWN: settings})


def complete(folder):
    """
    Write model.safetensors (fp32) of a finished run, from its newest intact checkpoint, so that transformers loads the
    folder. Nothing is written for a run that transformers cannot load.
    """
    if read_json(f"{folder}/config.json")["model_type"] == OWN:
        return
    model = unfilled(shape_in(folder))
    write_weights(folder, stored(weights_in(folder), model), model.config)


def save_hf(model, path, tokenizer=None, dtype="float32", shard_bytes=5e9, merge=False):
    """
    Write a model as transformers reads it: safetensors, config.json, generation_config.json, tokenizer files.

    dtype: of the tensors, float32 or bfloat16. shard_bytes: maximum size of a file. merge: write adapters (which are
    merged in `model` itself) and structured layers (papers/structured_ffn.py) as the equivalent dense matrices. An
    export replaces an older one as a whole: after a kill at any moment, the folder holds the old model, the new one, or
    none. ValueError if transformers' Apertus cannot express the model, or if the folder holds other files than an
    export's. Source of the layout: transformers 5.
    """
    number = pick_dtype(dtype, "cpu")
    if merge:
        attached("posttrain.lora").merge(model, number)
    parameters = model.named_parameters()
    if any(".lora_" in name for name, _ in model.named_parameters()):
        raise ValueError("an export holds a whole model: --merge adds the adapters to its matrices")
    if hasattr(model, "structured"):
        if not merge:
            raise ValueError(f"transformers' Apertus has no ffn={model.structured!r}: "
                             "--merge writes the dense model that it equals")
        parameters = attached("papers.structured_ffn").dense_parameters(model)
    hf = config_to_hf(model.config, dtype)
    path = os.path.realpath(path)                          # the folder behind a link is replaced, the link stays
    check_replaceable(path)
    new, old = (f"{path}.export-{end}" for end in ("new", "old"))
    try:
        for left in new, old:
            shutil.rmtree(left, ignore_errors=True)
        make_folder(new)
        ends = write_texts(new, tokenizer) if tokenizer else {}
        write_json(f"{new}/config.json", hf | ends)
        write_weights(new, parameters, model.config, number, shard_bytes)
        write_json(f"{new}/{LIST}", dict(files=os.listdir(new)))
    except (OSError, SafetensorError) as e:                # the disk is full
        shutil.rmtree(new, ignore_errors=True)
        raise OSError(f"{path} could not be written ({e}); the older export is untouched") from None
    if os.path.exists(path):
        os.rename(path, old)
    os.rename(new, path)
    shutil.rmtree(old, ignore_errors=True)
    flush(os.path.dirname(new))


def check_replaceable(path):
    """ValueError if a folder holds a file that no export wrote, as a run folder or a downloaded model does."""
    there = {*os.listdir(path)} if os.path.exists(path) else set()
    ours = read_json(f"{path}/{LIST}")["files"] if LIST in there else []
    foreign = sorted(there - {LIST, *ours})
    if foreign:
        raise ValueError(f"{path} holds {foreign[0]}, which no export wrote: choose another folder, or move it away")


def write_weights(folder, parameters, config, dtype=torch.float32, shard_bytes=5e9):
    """
    Write the parameters of an Apertus, (name, tensor), as safetensors next to config.json: one file, or several with an
    index. Memory holds the tensors of at most two files.
    """
    from huggingface_hub import split_torch_state_dict_into_shards

    constants = {                                          # buffers in transformers
        f"model.layers.{i}.mlp.act_fn.{name.lower()}": torch.tensor(getattr(XIELU, name))
        for i in range(config.n_layer)
        for name in ("BETA", "EPS")}
    sizes = dict(unfilled(config).to(dtype).named_parameters()) | constants
    plan = split_torch_state_dict_into_shards(sizes, max_shard_size=int(shard_bytes))
    tensors = itertools.chain(parameters, constants.items())
    weight_map = {}
    for file, names in plan.filename_to_tensors.items():
        shard = {name: t.detach().to("cpu", dtype).contiguous() for _, (name, t) in zip(names, tensors)}
        save_file(shard, f"{folder}/{file}.tmp", metadata=dict(format="pt"))
        shutil.copymode(f"{folder}/config.json", f"{folder}/{file}.tmp")   # save_file's own mode is 0600
        flush(f"{folder}/{file}.tmp")
        os.replace(f"{folder}/{file}.tmp", f"{folder}/{file}")
        weight_map |= dict.fromkeys(shard, file)
    if plan.is_sharded:
        write_json(f"{folder}/model.safetensors.index.json", dict(metadata=plan.metadata, weight_map=weight_map))


# -----------------------------------------------------------------------------
# the command


def main():
    if save.endswith(".json"):
        if os.path.exists(save):
            raise ValueError(f"{save} is there already: choose another name")
        tok = load_for(local(load))
        write_bpe(tok, save)
        print(f"wrote {save}: {tok.vocab_size:,} ids; python prepare.py TEXTS --tokenizer={save}")
        return
    if save:
        check_replaceable(save)  # refuses a folder before a large model is read
    model, tok = load_any(load)
    print(f"{load}: {model.num_params():,} parameters; {model.config}")
    if trace:
        attached("studies.trace").trace(model, tok, trace)
    if save:
        save_hf(model, save, tok, dtype, merge=merge)
        print(f"wrote {save}: transformers.AutoModelForCausalLM.from_pretrained({save!r}) reads it")


if __name__ == "__main__":
    run(main, globals())
