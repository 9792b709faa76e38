"""
Hugging Face in and out. The parameters carry the published names, so weights need no table: only config.json and the
tokenizer are translated.

$ python convert.py --load=swiss-ai/Apertus-8B-2509             # is it what the model does? names, shapes, parameters
$ python convert.py --load=out/laptop --save=out/laptop-hf      # AutoModelForCausalLM.from_pretrained("out/laptop-hf")

A repository is read as safetensors and JSON, and nothing in it is run. A config that asks for something that model.py
does not do is refused by name, and so is a tokenizer that would give other ids than transformers does. Published are
the 8B and the 70B (2509), the Minis of 0.5B, 1.5B and 4B (v1.1), and 1.5, of which this is the text part:

                 control tokens                      conversations                 embedding and head
    1.0          ids 0 to 999: tokenizer.py, NAMED   chat.py                       two
    v1.1         Mistral-Nemo's; <pad> is 10         the same ids, without names   0.5B: one, for both
    v1.5         thoughts at 32 and 33, not 69, 70   others: refused               ids of media in the embedding only
"""

import hashlib
import itertools
import json
import math
import os
import sys

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import chat
import tokenizer as tokenizers
from configurator import ROOT, attached, checked, run
from engine import restore
from engine.attention import attend_on
from engine.files import flush, read_json, write_flushed
from engine.hardware import pick_device, pick_dtype
from engine.restore import place
from model import XIELU, Apertus, ApertusConfig
from tokenizer import BYTES, IN_TEXT, NAMED, PATTERN, SPECIAL, Tokenizer

load = ""             # a Hugging Face folder or name, or a run folder of train.py
save = ""             # the folder to write as Hugging Face has it; FILE.json: the vocabulary alone, for prepare.py
dtype = "float32"     # of the tensors written: float32 | bfloat16
merge = False         # write a model with adapters, or with structured layers, as the dense one that it equals

TEMPLATE = "chat_template.jinja"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONSTANTS = dict(beta=XIELU.BETA, eps=XIELU.EPS)  # buffers of xIELU in transformers, constants in model.py


# -----------------------------------------------------------------------------
# config.json

# Our name of a setting: its name in Hugging Face's config.json (RoPE's are below).
HF_NAMES = dict(
    block_size="max_position_embeddings",
    vocab_size="vocab_size",
    n_layer="num_hidden_layers",
    n_head="num_attention_heads",
    n_kv_head="num_key_value_heads",
    n_embd="hidden_size",
    ffn_dim="intermediate_size",
    tie_embeddings="tie_word_embeddings",
    norm_eps="rms_norm_eps",
    init_std="initializer_range",
)

# A config.json has more keys than those of HF_NAMES and RoPE. No logit depends on these: they may have any value.
FREE = """
    architectures model_type auto_map custom_pipelines _name_or_path name_or_path _commit_hash transformers_version
    unsloth_version unsloth_fixed tokenizer_class model_max_length dtype torch_dtype use_cache use_return_dict
    return_dict output_attentions output_hidden_states bos_token_id eos_token_id pad_token_id id2label label2id
    num_labels problem_type finetuning_task attn_implementation _attn_implementation _attn_implementation_autoset
    chunk_size_feed_forward keys_to_ignore_at_inference torchscript gradient_checkpointing
""".split()
# These would change the logits or the training, so they must have the value that model.py implements: off, for most of
# them. Null asks for nothing and is accepted.
OFF = """
    attention_bias mlp_bias post_norm attention_dropout hidden_dropout embd_pdrop resid_pdrop is_decoder
    is_encoder_decoder add_cross_attention tie_encoder_decoder use_sliding_window use_bidirectional_attention
    rope_traditional
""".split()
REQUIRED = dict.fromkeys(OFF, False) | dict(
    hidden_act="xielu",
    hidden_activation="xielu",
    qk_norm=True,
    pretraining_tp=1,
    is_causal=True,
    pruned_heads={},
    partial_rotary_factor=1.0,
    logit_scale=1.0)
ROPE = {"rope_theta", "rope_scaling", "rope_parameters"}
# What an Apertus 1.5 says beside its text_config: how pictures and sound become ids, of which nothing is loaded.
MEDIA = """
    text_config vision_config audio_config vision_tokenizer_config audio_tokenizer_config image_token_id audio_token_id
    image_token_offset audio_token_offset tie_word_embeddings
""".split()
# Our names for the settings of RoPE type llama3.
LLAMA3 = dict(
    rope_scaling="factor",
    rope_original="original_max_position_embeddings",
    rope_low="low_freq_factor",
    rope_high="high_freq_factor")


def config_from_hf(hf):
    """
    config.json (dict) -> ApertusConfig. ValueError, one line, names what model.py does not do.

    Source: transformers' ApertusConfig, 4.56 to 5.23, and the configs of published Apertus models
    (tests/test_published.py).
    """
    hf = text_part(hf)
    kind = hf.get("model_type")
    if kind != "apertus":
        raise ValueError(f"the config is of a {kind!r} model; this is Apertus only (model_type 'apertus')")
    given = {ours: hf[theirs] for ours, theirs in HF_NAMES.items() if hf.get(theirs) is not None}
    optional = {"n_kv_head", "tie_embeddings", "norm_eps", "init_std"}
    absent = [theirs for ours, theirs in HF_NAMES.items() if ours not in given.keys() | optional]
    if absent:
        raise ValueError(f"config.json does not say {', '.join(absent)}")
    given.setdefault("n_kv_head", given["n_head"])  # absent means multi-head attention in transformers
    given.update(rope_from_hf(hf))
    for ours, value in given.items():
        given[ours] = checked(HF_NAMES.get(ours, ours), value, getattr(ApertusConfig, ours), "config.json")

    # The first three repeat what other keys say.
    usual = dict(
        head_dim=given["n_embd"] // given["n_head"],
        output_vocab_size=given["vocab_size"],
        layer_types=["full_attention"] * given["n_layer"],
        **REQUIRED)
    known = {*FREE, *ROPE, *HF_NAMES.values()}
    refuse_unusual({key: value for key, value in hf.items() if key not in known}, usual)
    return ApertusConfig(**given)


def text_part(hf):
    """
    What a config.json (dict) says of the text model: of an Apertus 1.5 its text_config, of any other all of it.

    1.5 reads ids of pictures and sound, which it never writes: its head has fewer rows than its embedding, one for each
    id of text. Of these alone the text model is made, and it is an Apertus. ValueError names what it does not do.
    """
    if hf.get("model_type") != "apertus1p5":
        return hf
    text = hf.get("text_config")
    if not isinstance(text, dict) or text.get("model_type") != "apertus1p5_text":
        raise ValueError("config.json of an Apertus 1.5 has no text_config of model_type 'apertus1p5_text'")
    refuse_unusual({key: value for key, value in hf.items() if key not in {*FREE, *MEDIA}}, {})
    ids = text.get("output_vocab_size") or text.get("vocab_size")
    tied = hf.get("tie_word_embeddings") or text.get("tie_word_embeddings")
    if tied and ids != text.get("vocab_size"):
        refuse_unusual(dict(tie_word_embeddings=tied, output_vocab_size=ids), {})
    text_alone = dict(
        model_type="apertus",
        vocab_size=ids,
        output_vocab_size=ids,
        tie_word_embeddings=tied)
    return text | text_alone


def rope_from_hf(hf):
    """
    The RoPE settings of a config.json under our names.

    transformers 4 wrote rope_theta and rope_scaling, where null means plain RoPE; 5 writes rope_parameters. If a file
    has both they must agree. If it has neither it means Apertus' own: theta 12e6 and llama3.
    """
    theta = hf.get("rope_theta")
    old = hf.get("rope_scaling") or {}
    new = hf.get("rope_parameters") or {}
    if not new and "rope_scaling" not in hf:
        if theta not in (None, 12e6):
            raise ValueError(f"config.json has rope_theta={theta} and neither rope_scaling nor rope_parameters, which "
                             "transformers 4 and 5 read differently: add \"rope_scaling\": null for plain RoPE")
        return dict(rope_theta=12e6, rope_scaling=8.0, rope_original=8192, rope_low=1.0, rope_high=4.0)
    rope = {} if theta is None else dict(rope_theta=theta)
    for said in (old, new):
        unlike = {key: (rope[key], value) for key, value in said.items() if rope.get(key, value) != value}
        if unlike:
            raise ValueError(f"config.json says two things about RoPE: {in_words(unlike)}")
        rope.update(said)
    kind = rope.pop("rope_type", rope.get("type", "default"))
    ours = dict(rope_theta=rope.pop("rope_theta", 12e6), rope_scaling=0.0)
    if kind == "llama3":
        absent = [theirs for theirs in LLAMA3.values() if theirs not in rope]
        if absent:
            raise ValueError(f"config.json: RoPE of type llama3 does not say {', '.join(absent)}")
        ours.update({name: rope.pop(theirs) for name, theirs in LLAMA3.items()})
    elif kind == "linear" and "factor" in rope:
        # All frequencies are divided: what llama3 does beyond its original context, if that is nothing.
        ours.update(rope_scaling=rope.pop("factor"), rope_original=0)
    elif kind != "default":
        refuse_unusual(dict(rope_type=kind), {})
    usual = {"rope type": kind, "rope partial_rotary_factor": 1.0}
    refuse_unusual({f"rope {key}": value for key, value in rope.items()}, usual)
    return ours


def refuse_unusual(given, usual):
    """ValueError names the settings of `given` that are neither null nor what `usual` has for them."""
    unknown = {key: value for key, value in given.items()
               if value is not None and (key not in usual or usual[key] != value)}
    if unknown:
        raise ValueError(f"config.json asks for what model.py does not do: {in_words(unknown)}")


def in_words(settings):
    """{'a': 1} -> 'a=1'. A long value is cut: a quantization_config fills a screen."""
    return ", ".join(f"{key}={value!r}"[:120] for key, value in settings.items())


def config_to_hf(config, dtype="float32"):
    """ApertusConfig -> config.json (dict), RoPE in both spellings. ValueError if transformers has no such Apertus."""
    if config.activation != "xielu" or not config.qk_norm:
        raise ValueError("transformers' Apertus has xIELU and QK-norm only, this model has "
                         f"activation={config.activation!r}, qk_norm={config.qk_norm}")
    theta = config.rope_theta
    kind = "default"
    scaling = {}
    if config.rope_scaling:
        kind = "llama3" if config.rope_original else "linear"
        scaling = {theirs: getattr(config, ours) for ours, theirs in LLAMA3.items()}
        if kind == "linear":
            scaling = dict(factor=config.rope_scaling)
    hf = {theirs: getattr(config, ours) for ours, theirs in HF_NAMES.items()}
    hf.update(
        architectures=["ApertusForCausalLM"],
        model_type="apertus",
        hidden_act="xielu",
        attention_bias=False,
        attention_dropout=0.0,
        dtype=dtype,
        torch_dtype=dtype,
        use_cache=True,
        rope_parameters=dict(rope_type=kind, rope_theta=theta, **scaling),
        rope_theta=theta,
        rope_scaling=dict(rope_type=kind, **scaling) if scaling else None)
    return hf


# -----------------------------------------------------------------------------
# weights in


def local(path_or_repo, files=("*.safetensors", "*.json", TEMPLATE)):
    """The folder of a Hugging Face model: the path itself, or a download of safetensors, JSON and the chat template."""
    if os.path.isdir(path_or_repo):
        return path_or_repo
    if path_or_repo.count("/") != 1 or path_or_repo.startswith((".", "/", "out/")):
        raise ValueError(f"{path_or_repo!r} is neither a folder here nor the name of a hub repository "
                         "(organisation/model)")
    import huggingface_hub

    try:
        return huggingface_hub.snapshot_download(path_or_repo, allow_patterns=list(files))
    except Exception as e:  # network, name, permission: the library has a dozen kinds
        raise OSError(f"{path_or_repo} could not be downloaded ({type(e).__name__}): check the name and the network, "
                      "or give a local folder") from None


def load_hf(path_or_repo, device="cpu", dtype=None, spread=None, base=""):
    """
    A Hugging Face Apertus (folder or hub name) as our model, with its weights.

    dtype: None keeps that of the file. base: int8 or nf4 quantises the matrices of the blocks (posttrain/quantised.py).
    The model is built without memory, and each tensor is read, turned into what it becomes, and let go: at the peak
    there are the model and one tensor. On a CPU, tensors that stay as they are are views of the mapped files.
    spread(model), if given, shards the model before (FSDP2) and gives the shards memory: each rank then reads its rows
    of every tensor, and never holds the model. ValueError: another architecture, unknown config keys, missing, extra or
    misshapen tensors.
    """
    folder = local(path_or_repo)
    config_file = f"{folder}/config.json"
    if not os.path.isfile(config_file):
        raise ValueError(f"{folder} has no config.json: want a Hugging Face model folder")
    config = config_from_hf(read_json(config_file))
    with torch.device("meta"):
        model = Apertus(config, seed=None)
    if spread:
        spread(model)
    stays = dtype is None and not base and str(device) == "cpu"
    return settle(model, stored(folder, model, views=stays), device, dtype, base, copy=not stays)


def settle(model, tensors, device, dtype, base, copy=False):
    """
    Give a model without memory its weights, each as soon as it is read. tensors: yields (name, parameter, tensor).

    device, dtype, base: as in load_hf, each tensor turned at once. Of a sharded parameter the rank's own rows are
    filled. copy: the tensors are views of files that are let go. Returns the model.
    """
    in_bits = {}
    if base:
        quantised = attached("posttrain.quantised")
        in_bits = quantised.matrices(model)
    for name, p, tensor in tensors:
        owner, _, leaf = name.rpartition(".")
        if hasattr(p, "to_local"):
            place(p, tensor)
            continue
        tensor = tensor.to(device=device, dtype=dtype, copy=copy)
        if owner in in_bits:
            quantised.replace(model, owner, tensor, base)
        else:
            setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(tensor))
    if model.config.tie_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    if base:
        model.requires_grad_(False)
    attend_on(model, device)
    return model


def stored(folder, model, views=False):
    """
    The values of each parameter: yields (name, parameter, tensor), the tensor a view of its file.

    A file is mapped for each tensor anew, so that what was read of it leaves memory with the tensor. views: for tensors
    that stay, each file is mapped once. An Apertus 1.5 has its text model below model.language_model, and the rows of
    its embedding that are not text, the last ones, are left out.

    ValueError: missing, extra or misshapen tensors; the missing ones are named last.
    """
    empty = base_of(model)
    mapped = {}
    for key, path in tensor_files(folder).items():
        name = key.replace("model.language_model.", "model.", 1)
        file = mapped.get(path) or safe_open(path, "pt")
        if views:
            mapped[path] = file
        owner, _, leaf = name.rpartition(".")
        if owner.endswith("act_fn") and leaf in CONSTANTS:
            value = file.get_tensor(key).item()
            if not math.isclose(value, CONSTANTS[leaf], rel_tol=0.02):  # fp16 rounds -1e-6 to -1.013e-6
                raise ValueError(f"{folder}: {name} is {value}, and model.py has {CONSTANTS[leaf]}")
            continue
        if name == "lm_head.weight" and model.config.tie_embeddings:
            continue
        shape = file.get_slice(key).get_shape() or [1]  # a scalar of xIELU may be stored without a dimension
        p = empty.pop(name, None)
        want = "no such tensor" if p is None else list(p.shape)
        rows = shape
        if key != name and name == "model.embed_tokens.weight" and p is not None:
            rows = [min(shape[0], want[0]), *shape[1:]]
        if rows != want:
            raise ValueError(f"{folder}: tensor {key} {shape} is not what config.json describes: {want}")
        yield name, p, file.get_tensor(key).view(shape)[:rows[0]]
    if empty:
        raise ValueError(f"{folder}: {len(empty)} tensors are missing, {next(iter(empty))} among them")


def tensor_files(folder):
    """
    {tensor name: the safetensors file that holds it}, of one file or of shards with an index. If there are both, the
    one file counts, as in transformers. The tokenizers of pictures and sound in an Apertus 1.5 are passed over.
    """
    names = [WEIGHTS]
    index = f"{folder}/{INDEX}"
    if not os.path.exists(f"{folder}/{WEIGHTS}") and os.path.isfile(index):
        weight_map = read_json(index).get("weight_map")
        if not weight_map or not isinstance(weight_map, dict):
            raise ValueError(f"{index} has no weight_map: fetch or write it again")
        names = sorted(set(weight_map.values()))
        if any(name != os.path.basename(name) for name in names):
            raise ValueError(f"{index} names files outside of its folder: {names}")
    found = {}
    for path in (f"{folder}/{name}" for name in names):
        try:
            with safe_open(path, "pt") as file:
                found.update(dict.fromkeys(file.keys(), path))
        except (OSError, SafetensorError) as e:
            raise ValueError(f"{path} is not a readable safetensors file: {e}") from None
    media = ("model.vision_tokenizer.", "model.audio_tokenizer.")
    return {name: path for name, path in found.items() if not name.startswith(media)}


# -----------------------------------------------------------------------------
# weights out


def save_hf(model, path, tokenizer=None, dtype="float32", shard_bytes=5e9, merge=False):
    """
    Write a model as transformers reads it: safetensors, config.json, generation_config.json, tokenizer files.

    dtype: of the tensors, float32 or bfloat16. shard_bytes: the most that one file holds. merge: structured layers
    (papers/structured_ffn.py) become the dense matrices they equal. An export replaces an older one (see publish).
    ValueError if transformers' Apertus cannot express the model, or if the folder holds what no export wrote. Source of
    the layout: transformers 5 (ApertusForCausalLM).
    """
    parameters = model.named_parameters()
    if any(".lora_" in name for name, _ in model.named_parameters()):
        raise ValueError("an export holds a whole model: --merge adds the adapters to its matrices")
    if hasattr(model, "structured"):
        if not merge:
            raise ValueError(f"transformers' Apertus has no ffn={model.structured!r}: "
                             "--merge writes the dense model that it equals")
        parameters = attached("papers.structured_ffn").dense_parameters(model)
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r}: an export has float32 or bfloat16")
    hf = config_to_hf(model.config, dtype)
    ends = {}
    if tokenizer:
        ends = dict(bos_token_id=tokenizer.bos, eos_token_id=tokenizer.eos, pad_token_id=tokenizer.pad)
    generation = ends
    # A chat model stops at the end of its turn, and at that of a call of tools.
    if tokenizer and tokenizer.eos == tokenizer.special.get("<|assistant_end|>"):
        generation = dict(ends, eos_token_id=sorted(chat.ends(tokenizer)))
    buffers = [
        (f"model.layers.{i}.mlp.act_fn.{name}", torch.tensor(value))
        for i in range(model.config.n_layer)
        for name, value in CONSTANTS.items()]
    itemsize = getattr(torch, dtype).itemsize
    files = in_files(itertools.chain(parameters, buffers), shard_bytes, itemsize)

    jsons = {"config.json": hf | ends, "generation_config.json": generation}
    if len(files) > 1:
        weight_map = {name: file for file, shard in files.items() for name in shard}
        total = sum(tensor.numel() for shard in files.values() for tensor in shard.values())
        jsons[INDEX] = dict(metadata=dict(total_size=total * itemsize), weight_map=weight_map)
    if tokenizer:
        jsons.update(hf_files(tokenizer))
    publish(path, files, jsons, getattr(torch, dtype))


def in_files(tensors, shard_bytes, itemsize=4):
    """
    (name, tensor) pairs -> {file: {name: tensor}}, in this order. A file has at most shard_bytes, or a single tensor,
    of numbers that take itemsize bytes there.
    """
    shards = [{}]
    size = 0
    for name, tensor in tensors:
        more = tensor.numel() * itemsize
        if size and size + more > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += more
    n = len(shards)
    if n == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{i:05d}-of-{n:05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


# Which files save_hf wrote into a folder: these, and no others, a later export there may replace.
LIST = ".export.json"


def publish(path, tensors, jsons, dtype):
    """
    Write {file: tensors} and {file: JSON} into the folder `path`, in place of what the last export wrote there. No
    other file is touched. Tensors are turned into dtype file by file.

    Everything is written under temporary names first. Then config.json goes first and comes last, and no loader takes a
    folder without one: killed at any moment, the folder holds the old model, the new one, or none.
    """
    names = tensors.keys() | jsons.keys()
    before = written_before(path, names)
    try:
        os.makedirs(path, exist_ok=True)
        write_list(path, before | names)  # first, so that what a kill leaves behind counts as ours
        for file, shard in tensors.items():
            shard = {name: p.detach().to("cpu", dtype).contiguous() for name, p in shard.items()}
            save_file(shard, f"{path}/{file}.tmp", metadata={"format": "pt"})
            flush(f"{path}/{file}.tmp")
        for file, content in jsons.items():
            write_json(f"{path}/{file}.tmp", content)
    except (OSError, SafetensorError) as e:  # the disk is full, or a file has the folder's name
        remove(path, [f"{file}.tmp" for file in names])
        raise OSError(f"{path} could not be written ({e}); what was there before is untouched") from None
    remove(path, ["config.json"])
    flush(path)
    for file in before - names:
        remove(path, [file, f"{file}.tmp"])
    for file in names - {"config.json"}:
        os.replace(f"{path}/{file}.tmp", f"{path}/{file}")
    write_list(path, names)
    flush(path)
    os.replace(f"{path}/config.json.tmp", f"{path}/config.json")
    flush(path)


# What transformers would read beside the weights.
ALSO_READ = """config.json generation_config.json tokenizer.json tokenizer_config.json special_tokens_map.json
added_tokens.json chat_template.jinja chat_template.json adapter_config.json""".split()


def written_before(path, names=()):
    """
    The names of the files that the last export wrote into `path`.

    ValueError if another file is there (a run folder, a downloaded model) which a new export of `names` would replace,
    or which transformers would read beside it.
    """
    before = set()
    listed = f"{path}/{LIST}"
    if os.path.isfile(listed):
        before.update(read_json(listed).get("files", []))
        if any(name != os.path.basename(name) for name in before):
            raise ValueError(f"{listed} names files outside of its folder")
    weights = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")
    others = sorted({*os.listdir(path)} - before) if os.path.isdir(path) else []
    for file in others:
        if file.endswith(weights) or file in names or file in ALSO_READ:
            raise ValueError(f"{path} holds {file}, which no export wrote: "
                             "choose another folder, or move that file away")
    return before


def write_list(path, names):
    """Remember in the folder `path` which files there are ours."""
    write_flushed(f"{path}/{LIST}", json.dumps(dict(files=sorted(names))))


def write_json(path, content):
    """Write and flush one file of an export."""
    with open(path, "w", encoding="utf-8") as f:
        json.dump(content, f, indent=1, ensure_ascii=False)
    flush(path)


def remove(folder, files):
    """Delete those of the files that are there."""
    for file in files:
        if os.path.exists(f"{folder}/{file}"):
            os.remove(f"{folder}/{file}")


# -----------------------------------------------------------------------------
# the tokenizer, out


def byte_level(on):
    """What Hugging Face calls ByteLevel, which spells bytes as characters; on: with a regular expression of its own."""
    return dict(type="ByteLevel", add_prefix_space=on, trim_offsets=True, use_regex=on)


SPLIT = dict(type="Split", pattern=dict(Regex=PATTERN), behavior="Isolated", invert=False)
PRE_TOKENIZER = dict(type="Sequence", pretokenizers=[SPLIT, byte_level(False)])


def hf_files(tokenizer):
    """
    {file name: what to write into it as JSON}, from which transformers.AutoTokenizer makes the same ids.

    It puts <s> in front, as the published tokenizer does; add_special_tokens=False leaves it out. It also turns a
    control token that is spelled out in a text into that token, unless called with split_special_tokens=True.
    """
    with open(f"{ROOT}/chat_template.jinja", encoding="utf-8") as f:
        template = f.read()  # what chat.py does, in Jinja
    letter = letters()
    spelled = ["".join(letter[b] for b in piece) for piece in tokenizer.pieces]
    bos, eos, pad = tokenizer.ends()
    exact = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = []
    for s, i in tokenizer.special.items():
        added.append(dict(id=i, content=s, **exact, special=s not in tokenizer.in_text))
    vocab = tokenizer.special | dict(zip(spelled, tokenizer.ids))
    model = dict(type="BPE", ignore_merges=True, merges=merges_of(spelled), vocab=vocab)
    content = dict(
        version="1.0",
        added_tokens=added,
        normalizer=None,
        pre_tokenizer=PRE_TOKENIZER,
        post_processor=begins_with(bos, tokenizer.bos),
        decoder=byte_level(True),
        model=model)
    settings = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        clean_up_tokenization_spaces=False,
        padding_side="left",
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        unk_token="<unk>" if "<unk>" in tokenizer.special else None,
        chat_template=template if tokenizer.can_chat() else None)
    return {"tokenizer.json": content, "tokenizer_config.json": settings}


def begins_with(name, i):
    """Hugging Face's post-processor that puts a token, of this name and id, in front of each of up to two texts."""
    both = []
    for number, text in enumerate("AB"):
        both.append(dict(SpecialToken=dict(id=name, type_id=number)))
        both.append(dict(Sequence=dict(id=text, type_id=number)))
    token = dict(id=name, ids=[i], tokens=[name])
    return dict(type="TemplateProcessing", single=both[:2], pair=both, special_tokens={name: token})


def letters():
    """GPT-2's alphabet, {byte: character}: printable bytes are themselves, the others the characters from 256 on."""
    free = itertools.count(256)
    letter = {}
    for b in range(256):
        printable = chr(b).isprintable() and chr(b) != " "
        letter[b] = chr(b if printable else next(free))
    return letter


def merges_of(spelled):
    """
    The list of merges that a byte-level BPE of these pieces (str, by rank) has in Hugging Face's format: all pairs of
    pieces whose union is a piece, by the union's rank, then by their own (Apertus: 269,443, in the published order).
    """
    rank = {s: i for i, s in enumerate(spelled)}
    merges = []
    for s in spelled:
        pairs = []
        for i in range(1, len(s)):
            if s[:i] in rank and s[i:] in rank:
                pairs.append((s[:i], s[i:]))
        merges += sorted(pairs, key=lambda pair: (rank[pair[0]], rank[pair[1]]))
    return merges


# -----------------------------------------------------------------------------
# the tokenizer, in


def tokenizer_from_hf(folder):
    """
    The Tokenizer of a Hugging Face folder, from its tokenizer.json and tokenizer_config.json: the inverse of hf_files.

    Every id is the stored one, also of tokens that were added behind the vocabulary. ValueError, one line, for what
    would give other ids than transformers does: another kind of tokenizer, other merges, an added token that is a word
    too.
    """
    path = f"{folder}/tokenizer.json"
    if not os.path.isfile(path):
        raise ValueError(f"{folder} has no tokenizer.json: "
                         "export one with convert.py, or copy it from the model's repository")
    saved = read_json(path)
    settings = f"{folder}/tokenizer_config.json"
    settings = read_json(settings) if os.path.isfile(settings) else {}
    most = ids_of_text(folder)
    byte = {c: bytes([b]) for b, c in letters().items()}
    try:
        model = saved["model"]
        added = {token["content"]: token for token in saved["added_tokens"]}
        id_of = check_ids(path, model["vocab"], added, settings)
        id_of = {s: i for s, i in id_of.items() if i < most}
        # Apertus 1.5 has given the names of these two to others, and keeps their ids.
        control = id_of.keys() & (added.keys() | {"<think>", "</think>"})
        spelled = sorted(id_of.keys() - control, key=id_of.get)
        pieces = [b"".join(byte[c] for c in s) for s in spelled]
        merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
        alike = cuts_alike(saved, pieces)
    except (KeyError, TypeError, AttributeError):
        alike = False
    if not alike:
        raise ValueError(f"{path} is not a byte-level BPE that cuts text as Apertus' does")
    if merges != merges_of(spelled):
        raise ValueError(f"{path}: its merges are not all pairs of its pieces in the order of their ids, as Apertus' "
                         "are: this program would make other ids of a text")
    # A text may become what a file does not call special; but never the names that the chat format is made of.
    ordinary = {s for s in control & added.keys() if not added[s].get("special")}
    in_text = (ordinary - {*SPECIAL}) | (control & {*IN_TEXT})
    check_words(path, in_text, added)
    chat = names_for_chat(id_of, folder)
    special = {chat.get(s, s): id_of[s] for s in sorted(control, key=id_of.get)}
    ends = []
    for key in ("bos_token", "eos_token", "pad_token"):
        name = named(settings, key, path, control)
        ends.append(chat.get(name, name))
    ids = [id_of[s] for s in spelled]
    tok = Tokenizer(folder, pieces, special, ids, in_text, ends)
    tok.system, tok.foreign = chat_format(folder, settings)
    return tok


def ids_of_text(folder):
    """How many ids of a Hugging Face folder are text: of an Apertus 1.5 those below pictures and sound, else all."""
    config = f"{folder}/config.json"
    config = read_json(config) if os.path.isfile(config) else {}
    if config.get("model_type") != "apertus1p5":
        return math.inf
    return config_from_hf(config).vocab_size


CHAT = NAMED[61:73]                                     # <|system_start|> to <|tools_suffix|>
RESERVED = [f"<SPECIAL_{i}>" for i in range(61, 73)]    # the same ids in the Minis


def names_for_chat(id_of, folder):
    """
    {a token's name: Apertus' name for it}, for a tokenizer that has the ids of a conversation as reserved ones.

    The Minis (Apertus-v1.1-0.5B, 1.5B, 4B) have Mistral-Nemo's control tokens: id 3 is [INST], id 10 <pad>. Their
    Instruct models write a conversation with <SPECIAL_61> to <SPECIAL_72>, whose ids are those of Apertus' own tokens.
    """
    reserved = dict(zip(RESERVED, range(61, 73)))
    chat = dict(zip(reserved, CHAT))
    if not reserved.items() <= id_of.items() or id_of.keys() & {*chat.values()}:
        return {}
    print(f"{folder}: <SPECIAL_61> to <SPECIAL_72> are Apertus' chat tokens <|system_start|> to <|tools_suffix|> here, "
          "with the same ids", file=sys.stderr)
    return chat


# The published chat templates that write what chat.py writes, by their sha256, and the system message of a conversation
# that has none; None: that of chat.py.
TEMPLATES = {
    "56f72c27fa2e565312a830b7315a455c79fb452fdbe7a5b7595d8a094f282b07": None,  # Apertus-8B-Instruct-2509
    "4afab8361a4bd0c2994404e0b0851dbaad461a06e56bdfdb635aae3977473c19": "",    # Apertus-v1.1-1.5B-Instruct
}
# The first comment of chat_template.jinja, today and in folders that older versions exported.
OURS = ("{#- Apertus' chat format: the only template that chat.py",
        "{#- chat_pieces, turns, describe_tool and ts_type of ")


def chat_format(folder, settings):
    """
    (the system message of a conversation that has none, or None for that of chat.py; why chat.py cannot write this
    model's conversations, or ""), by the text of the chat template. It is not rendered: a template is a program.

    One that is not known here, and has all twelve tokens of a published one, is named and taken for that.
    """
    text = settings.get("chat_template")
    if not text and os.path.isfile(f"{folder}/{TEMPLATE}"):
        with open(f"{folder}/{TEMPLATE}", encoding="utf-8", newline="") as f:
            text = f.read()
    if not text or any(comment in text for comment in OURS):
        return None, ""
    sha = hashlib.sha256(str(text).encode()).hexdigest()
    if sha in TEMPLATES:
        return TEMPLATES[sha], ""
    for tokens, system in (CHAT, None), (RESERVED, ""):
        if all(token in text for token in tokens):
            print(f"{folder}: the chat template (sha256 {sha[:16]}) is none that is known here; it has Apertus' "
                  "tokens, and a conversation will have the published form", file=sys.stderr)
            return system, ""
    return None, (f"{folder} has a chat template that is not Apertus' (sha256 {sha[:16]}): its conversations may have "
                  f"another form. If you know that they have Apertus', take a copy of the folder without it")


def cuts_alike(saved, pieces):
    """Whether a tokenizer.json cuts text as hf_files does. Then its pieces alone decide the ids of a text."""
    model = saved["model"]
    if saved["pre_tokenizer"] != PRE_TOKENIZER or not only_names(saved.get("normalizer")):
        return False
    if any(map(model.get, ("dropout", "byte_fallback", "end_of_word_suffix"))):
        return False
    return model["ignore_merges"] and {*pieces}.issuperset(BYTES)


def only_names(normalizer):
    """
    Whether a normalizer (a dict, or None) does nothing but exchange names in angle brackets, as that of Apertus 1.5
    does: <think> in a text becomes a control token, <answer> disappears. Here both stay the text that they are.
    """
    if normalizer is None:
        return True
    for rule in normalizer.get("normalizers", [normalizer]):
        [pattern] = rule.get("pattern", {"": ""}).values()
        if rule["type"] != "Replace" or not pattern.startswith("<"):
            return False
    return True


def check_ids(path, vocab, added, settings):
    """
    {token: id} of a tokenizer.json.

    A token that is added but not in the vocabulary gets its number from the library: on from the vocabulary's size. A
    file that says otherwise, or says it twice, is refused, since transformers would not give the ids that it names.
    """
    id_of = dict(vocab)
    behind = len(vocab)
    for s, token in added.items():
        expected = id_of.setdefault(s, behind)
        behind += expected == behind
        if token["id"] != expected:
            raise ValueError(f"{path}: the added token {s!r} has the id {token['id']}, but transformers would number "
                             f"it {expected}: save the tokenizer again with the version that trained the model")
    if len({*id_of.values()}) < len(id_of):
        raise ValueError(f"{path}: two tokens have the same id")
    for i, token in settings.get("added_tokens_decoder", {}).items():
        s = token["content"]
        if id_of.get(s) != int(i):
            raise ValueError(f"{path}: tokenizer_config.json adds {s!r} as {i}, this file has {id_of.get(s)} for it: "
                             "save the tokenizer again")
    return id_of


def check_words(path, in_text, added):
    """
    Refuse added tokens of ordinary text which our regular expression would not find where transformers finds them.
    """
    for s in sorted(in_text):
        if any(map(added[s].get, ("single_word", "lstrip", "rstrip"))):
            raise ValueError(f"{path}: the added token {s!r} takes white space with it or wants to stand alone: "
                             "not done here")
        other = next((t for t in added if t != s and (t.startswith(s) or s.startswith(t))), None)
        if other:
            raise ValueError(f"{path}: the added tokens {s!r} and {other!r} begin alike: "
                             "which one a text holds is not clear")


def named(settings, key, path, control):
    """
    The name of bos, eos or pad: what tokenizer_config.json says (a str, or a dict with attributes), or Apertus'. Never
    by a number of config.json: those of the Minis say pad_token_id 3, which is [INST] there.
    """
    usual = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    name = settings.get(key) or usual[key]
    name = name["content"] if isinstance(name, dict) else name
    if name not in control:
        raise ValueError(f"{path} has no control token {name!r} to be the {key}")
    return name


# -----------------------------------------------------------------------------
# any model by its name


def base_of(model):
    """{name: parameter} of a model without its adapters (posttrain/lora.py): what a file of the whole model holds."""
    return {name: p for name, p in model.named_parameters() if ".lora_" not in name}


def fingerprint(model):
    """
    Which weights these are, on any device and in fp32, bf16, 8 or 4 bits: sha256 over the first 64 values of every
    tensor, rounded to bf16. Adapters are not part of it.

    A matrix in 8 or 4 bits has kept its first values, so that the hash is the same.
    """
    digest = hashlib.sha256()
    seen = set()                                           # a tied head is the embedding, and counts once
    for path, module in model.named_modules():
        if ".lora_" in path:
            continue
        own = {"weight": module.first} if hasattr(module, "first") else dict(module.named_parameters(recurse=False))
        for leaf, p in own.items():
            if p in seen:
                continue
            seen.add(p)
            # A sharded tensor is gathered, one at a time.
            p = p.full_tensor() if hasattr(p, "full_tensor") else p
            digest.update(f"{path}.{leaf}".removeprefix(".").encode())
            digest.update(p.detach().flatten()[:64].bfloat16().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def stored_in_checkpoint(path, model):
    """
    The values of each parameter in a verified checkpoint: yields (name, parameter, a new tensor on the CPU). The model
    may be on the meta device: no more than one tensor is held here.
    """
    import torch.distributed.checkpoint as dcp

    params = base_of(model)
    reader, _ = restore.reader_for(path, {f"model/{name}": p for name, p in params.items()})
    for name, p in params.items():
        tensor = torch.empty(p.shape, dtype=p.dtype, device="cpu")
        dcp.load({f"model/{name}": tensor}, storage_reader=reader, no_dist=True)
        yield name, p, tensor


def load_run(folder, device="cpu", dtype=None, spread=None, base=""):
    """
    (model, Tokenizer) of a run folder, from its newest intact checkpoint. dtype, spread, base: as in load_any.

    At the peak there are the model as it will be and one tensor in fp32, as in load_hf.
    """
    config_file = f"{folder}/config.json"
    if not os.path.isfile(config_file):
        raise ValueError(f"no run in {folder!r} (no config.json there): "
                         "train one with `python train.py configs/laptop.py`, or name a Hugging Face model")
    config = read_json(config_file)
    found = restore.newest_intact(f"{folder}/ckpt")
    if not found:
        raise ValueError(f"{folder} has no checkpoint yet: "
                         f"it writes the first after {config['checkpoint_every']} steps")
    path, manifest = found
    if config.get("lora_r"):
        return load_adapters_of_run(config, path, device, dtype, base)
    structured = attached("papers.structured_ffn") if config.get("ffn", "dense") != "dense" else None
    with torch.device("meta"):
        model = Apertus(ApertusConfig.of(config), seed=None)
        if structured:
            structured.restore(model, config, manifest["step"])
    if spread:
        spread(model)
        restore.load(path, model)
        attend_on(model, device)
    else:
        settle(model, stored_in_checkpoint(path, model), device, dtype, base)
    if structured:
        structured.drop_guides(model)
    tok = fitting(tokenizers.load_for(folder), model, folder)
    if config.get("chat"):  # a run of posttrain/sft.py or qrpo.py: the end of a turn ends the text
        tok.eos = tok.id_of("<|assistant_end|>")
    return model, tok


def load_any(name, device="cpu", dtype=None, spread=None, base="", chat=False):
    """
    (model, Tokenizer) of a run folder, a Hugging Face folder, a hub name, or of the adapters in one of these, which are
    put on the model that they name.

    dtype: None keeps that of the files. spread: as in load_hf. base: int8 or nf4 quantises the matrices
    (posttrain/quantised.py), the adapters excepted. chat: ValueError at once if it has no conversations.
    """
    if os.path.isfile(f"{name}/adapter_config.json"):
        return load_adapter(name, device, dtype, base)
    missing_run = name.startswith("out") and not os.path.exists(f"{name}/config.json")
    if os.path.isdir(f"{name}/ckpt") or missing_run:
        return load_run(name, device, dtype, spread, base)
    folder = local(name)
    if os.path.isfile(f"{folder}/adapter_config.json"):
        return load_adapter(folder, device, dtype, base)
    tok = tokenizer_from_hf(folder)  # before the weights, which take minutes: an error comes early
    if chat:
        tok.check_chat()
    model = load_hf(folder, device, dtype, spread, base)
    return model, fitting(tok, model, folder)


def load_adapter(folder, device, dtype, base):
    """(model, Tokenizer) of a folder that PEFT or posttrain/ has written, on the base model that it names."""
    lora = attached("posttrain.lora")
    _, name = lora.read_settings(folder)
    model, tok, start = load_base(name, folder, device, dtype, base)
    lora.load(model, folder, start)
    return model, tok


def load_adapters_of_run(config, path, device, dtype, base):
    """The same from the checkpoint `path` of a run of posttrain/ or train.py, whose settings are config."""
    lora = attached("posttrain.lora")
    settings = lora.settings_of(config["lora_r"], config["lora_alpha"], config["lora_on"], config["lora_rs"])
    model, tok, start = load_base(config["init_from"], path, device, dtype, base)
    if start[:16] != config["start_hash"]:
        raise ValueError(f"{path} was trained on other weights than those of {config['init_from']} today")
    lora.adapt(model, settings)
    restore.load(path, model)
    model.config = ApertusConfig.of(config)     # train.py may have changed window and RoPE
    if config.get("chat"):
        tok.eos = tok.id_of("<|assistant_end|>")
    return model, tok


def load_base(name, adapter, device, dtype, base):
    """The model that adapters were trained on, its tokenizer, and the hash of the weights that its files hold."""
    if not name:
        raise ValueError(f"{adapter} does not say which model it belongs to: write its folder or hub name as "
                         "base_model_name_or_path into adapter_config.json")
    try:
        model, tok = load_any(name, device, dtype, base=base)
    except (OSError, ValueError) as e:
        raise ValueError(f"{adapter} is an adapter of {name}: {e}") from None
    return model, tok, fingerprint(model)


def shape_of(name):
    """
    The ApertusConfig of a run folder, a Hugging Face folder or a hub name, of which nothing but config.json is read.
    None for a folder without one, like that of adapters.
    """
    folder = name if os.path.exists(name) or name.startswith("out") else local(name, ["config.json"])
    config_file = f"{folder}/config.json"
    if not os.path.isfile(config_file):
        return None
    config = read_json(config_file)
    return config_from_hf(config) if "model_type" in config else ApertusConfig.of(config)


def start_of(name):
    """
    What train.py --init_from needs to know of a model before it reads its weights: (ApertusConfig, Tokenizer, path).

    path: of a checkpoint or of a Hugging Face folder, for fill(). ValueError for adapters, which are no whole model.
    """
    adapters = ValueError(f"{name} holds adapters: make one model of them first, "
                          f"python convert.py --load={name} --save=FOLDER --merge")
    if os.path.isdir(f"{name}/ckpt"):
        config = read_json(f"{name}/config.json")
        found = restore.newest_intact(f"{name}/ckpt")
        if not found:
            raise ValueError(f"{name} has no checkpoint yet")
        if config.get("lora_r"):
            raise adapters
        return ApertusConfig.of(config), tokenizers.load_for(name), found[0]
    if os.path.isfile(f"{name}/adapter_config.json"):
        raise adapters
    folder = local(name)
    config_file = f"{folder}/config.json"
    if not os.path.isfile(config_file):
        raise ValueError(f"{folder} is no model: it has no config.json and no checkpoints")
    return config_from_hf(read_json(config_file)), tokenizer_from_hf(folder), folder


@torch.no_grad()
def fill(model, path):
    """Give a model, whole or sharded, the weights that start_of has found. Each rank reads its own rows."""
    if not os.path.isfile(f"{path}/manifest.json"):
        for _, p, tensor in stored(path, model):
            place(p, tensor)
        return
    import torch.distributed.checkpoint as dcp

    tensors = {f"model/{name}": p.detach() for name, p in base_of(model).items()}
    reader, _ = restore.reader_for(path, tensors)
    dcp.load(tensors, storage_reader=reader, no_dist=True)


def load_ready(name, device, dtype, base="", chat=False):
    """
    (model, Tokenizer) of load_any, ready to be asked. device, dtype: by name, as the settings of a script have them.

    dtype "auto" keeps that of the files, except on CUDA, where it is bf16: half the bytes to read per token. base,
    chat: as in load_any.
    """
    device = pick_device(device)
    if dtype == "auto":
        wanted = torch.bfloat16 if device == "cuda" else None
    else:
        wanted = pick_dtype(dtype, device)
    model, tok = load_any(name, device, wanted, base=base, chat=chat)
    return model.eval(), tok


def fitting(tok, model, folder):
    """
    The tokenizer, if it is the model's. ValueError otherwise.

    An embedding has a row for each id, and at most 1,023 more, which pad it to a round number. They have no token and
    decode to nothing.
    """
    ids = tok.vocab_size
    rows = model.config.vocab_size
    if not ids <= rows < ids + 1024:
        raise ValueError(f"{folder}: the model has {rows} ids and its tokenizer {ids}: they do not belong together")
    tok.vocab_size = rows
    return tok


def merge_adapters(model):
    """Adapters, if there are any, become part of the matrices in `dtype`; says what its rounding has left of them."""
    lora = attached("posttrain.lora")
    if not lora.adapted(model):
        return
    kept = lora.merge(model, getattr(torch, dtype))
    print(f"merged: {kept:.1%} of the adapters' update survives the rounding to {dtype}")


def save_vocabulary():
    """The vocabulary of a model as the file that prepare.py --tokenizer= and tokenizer.py --name= read."""
    if os.path.exists(save):
        raise ValueError(f"{save} is there already: choose another name")
    _, tok, _ = start_of(load)
    tokenizers.write_bpe(tok, save)
    print(f"wrote {save}: {tok.vocab_size:,} ids; python prepare.py TEXTS --tokenizer={save}")


def main():
    if not load:
        raise ValueError("say what to read: --load=out/laptop, a Hugging Face folder or a hub name; "
                         "and --save=FOLDER to write it")
    if save.endswith(".json"):
        save_vocabulary()
        return
    if save:
        written_before(save)  # refuses a folder before a large model is read
    model, tokenizer = load_any(load)
    print(f"{load}: {model.num_params():,} parameters; {model.config}")
    if save and merge:
        merge_adapters(model)
    if save:
        save_hf(model, save, tokenizer, dtype, merge=merge)
        print(f"wrote {save}: transformers.AutoModelForCausalLM.from_pretrained({save!r}) reads it")


if __name__ == "__main__":
    run(main, globals())
