"""
Hugging Face in and out. The parameters carry the published names, so there is no mapping table: only config.json is translated.

$ python convert.py --load=swiss-ai/Apertus-8B-2509                       # is it what the model does? names, shapes, parameters
$ python convert.py --load=out/laptop --save=out/laptop-hf                # then AutoModelForCausalLM.from_pretrained("out/laptop-hf")

A repository is read as safetensors and JSON, nothing in it is run; a config that asks for something that model.py does not do is
refused by name.
"""

import dataclasses
import functools
import itertools
import json
import math
import os

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

import tokenizer as tokenizers
from configurator import checked, run
from engine import checkpoint
from studies import structured
from model import HF_NAMES, XIELU, Apertus, ApertusConfig
from tokenizer import IN_TEXT, PATTERN, SPECIAL, Tokenizer, read_json

load = ""             # a Hugging Face folder or name, or a run folder of train.py
save = ""             # the folder to write as Hugging Face has it
dtype = "float32"     # of the tensors written: float32 | bfloat16
merge = False         # write a model with structured feed-forward layers as the dense one that it equals

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
LIST = ".export.json"  # which files save_hf wrote into a folder: these, and no others, a later export there may replace

# What a config.json may say besides HF_NAMES and RoPE. No logit depends on the first group, whatever stands there.
FREE = {
    "architectures", "model_type", "auto_map", "custom_pipelines", "_name_or_path", "name_or_path",
    "_commit_hash", "transformers_version", "unsloth_version", "unsloth_fixed", "tokenizer_class", "model_max_length",
    "dtype", "torch_dtype", "use_cache", "use_return_dict", "return_dict", "output_attentions", "output_hidden_states",
    "bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "num_labels", "problem_type",
    "finetuning_task", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
    "chunk_size_feed_forward", "keys_to_ignore_at_inference", "torchscript", "gradient_checkpointing"}
# The second group would change the logits or the training: it must say what model.py does. Null asks for nothing.
REQUIRED = dict(
    hidden_act="xielu", hidden_activation="xielu", attention_bias=False, mlp_bias=False, qk_norm=True, post_norm=False,
    attention_dropout=0.0, hidden_dropout=0.0, embd_pdrop=0.0, resid_pdrop=0.0, pretraining_tp=1, is_causal=True,
    is_decoder=False, is_encoder_decoder=False, add_cross_attention=False, tie_encoder_decoder=False, pruned_heads={},
    use_sliding_window=False, use_bidirectional_attention=False, partial_rotary_factor=1.0, logit_scale=1.0,
    rope_traditional=False)
ROPE = {"rope_theta", "rope_scaling", "rope_parameters"}
LLAMA3 = dict(rope_scaling="factor", rope_original="original_max_position_embeddings", rope_low="low_freq_factor",
              rope_high="high_freq_factor")                                 # our names: those of RoPE type llama3


def config_from_hf(hf):
    """
    config.json (dict) -> ApertusConfig. ValueError, one line, names what model.py does not do.

    Source: transformers' ApertusConfig, 4.56 to 5.23, and the configs of published Apertus models (tests/test_published.py).
    """
    kind = hf.get("model_type")
    if kind != "apertus":
        raise ValueError(f"the config is of a {kind!r} model; this is Apertus only (model_type 'apertus')")
    absent = [theirs for ours, theirs in HF_NAMES.items() if hf.get(theirs) is None
              and ours not in ("n_kv_head", "tie_embeddings", "norm_eps", "init_std")]
    if absent:
        raise ValueError(f"config.json does not say {', '.join(absent)}")
    given = {ours: hf[theirs] for ours, theirs in HF_NAMES.items() if hf.get(theirs) is not None}
    given.setdefault("n_kv_head", hf["num_attention_heads"])                # transformers: absent means multi-head
    given.update(rope_from_hf(hf))
    given = {ours: checked(HF_NAMES.get(ours, ours), value, getattr(ApertusConfig, ours), "config.json") for ours, value in given.items()}

    # These three say of a smaller model what other keys say already.
    usual = dict(head_dim=given["n_embd"] // given["n_head"], output_vocab_size=given["vocab_size"],
                 layer_types=["full_attention"] * given["n_layer"], **REQUIRED)
    known = FREE | ROPE | {*HF_NAMES.values()}
    unknown = {key: value for key, value in hf.items()
               if key not in known and value is not None and (key not in usual or usual[key] != value)}
    if unknown:
        raise ValueError(f"config.json asks for what model.py does not do: {in_words(unknown)}")
    return ApertusConfig(**given)


def rope_from_hf(hf):
    """
    The RoPE settings of a config.json under our names, in either spelling: rope_theta and rope_scaling (transformers 4, where
    null means plain RoPE), or rope_parameters (5). Both at once must agree. Neither: Apertus' own, theta 12e6 and llama3.
    """
    old, new = hf.get("rope_scaling") or {}, hf.get("rope_parameters") or {}
    theta = {} if hf.get("rope_theta") is None else dict(rope_theta=hf["rope_theta"])
    if not new and "rope_scaling" not in hf:
        if theta.get("rope_theta", 12e6) != 12e6:
            raise ValueError(f"config.json has rope_theta={theta['rope_theta']} and neither rope_scaling nor rope_parameters, which "
                             "transformers 4 and 5 read differently: add \"rope_scaling\": null for plain RoPE")
        return dict(rope_theta=12e6, rope_scaling=8.0, rope_original=8192, rope_low=1.0, rope_high=4.0)
    for a, b in (old, new), (theta, new), (theta, old):
        unlike = {key: (a[key], b[key]) for key in a.keys() & b.keys() if a[key] != b[key]}
        if unlike:
            raise ValueError(f"config.json says two things about RoPE: {in_words(unlike)}")
    rope = {"rope_theta": 12e6, **theta, **old, **new}                      # 12e6: transformers' default for Apertus
    kind = rope.pop("rope_type", rope.get("type", "default"))
    if kind not in ("llama3", "default"):
        raise ValueError(f"config.json asks for what model.py does not do: rope_type={kind!r}")
    ours = dict(rope_theta=rope.pop("rope_theta"), rope_scaling=0.0)
    if kind == "llama3":
        absent = [theirs for theirs in LLAMA3.values() if theirs not in rope]
        if absent:
            raise ValueError(f"config.json: RoPE of type llama3 does not say {', '.join(absent)}")
        ours.update({name: rope.pop(theirs) for name, theirs in LLAMA3.items()})
    usual = dict(type=kind, partial_rotary_factor=1.0)
    unknown = {f"rope {key}": value for key, value in rope.items() if value is not None and usual.get(key) != value}
    if unknown:
        raise ValueError(f"config.json asks for what model.py does not do: {in_words(unknown)}")
    return ours


def in_words(settings):
    """{'a': 1} -> 'a=1', a long value cut: a quantization_config fills a screen."""
    return ", ".join(f"{key}={value!r}"[:120] for key, value in settings.items())


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
    config = config_from_hf(read_json(config_file))
    with torch.device("meta"):
        model = Apertus(config)
    if spread:
        spread(model)
    want = dict(model.named_parameters())
    for name, file in tensor_files(folder).items():
        if name.endswith(("act_fn.beta", "act_fn.eps")):                    # buffers of transformers' xIELU; ours are constants
            value, want_value = file.get_tensor(name).item(), XIELU.BETA if name.endswith("beta") else XIELU.EPS
            if not math.isclose(value, want_value, rel_tol=0.02):           # fp16 has -1e-6 as -1.013e-6
                raise ValueError(f"{folder}: {name} is {value}, and model.py has {want_value}")
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
    """{tensor name: open safetensors file} of one file or of shards with an index; of one file if there are both, as in transformers."""
    names, index = [WEIGHTS], os.path.join(folder, INDEX)
    if not os.path.exists(os.path.join(folder, WEIGHTS)) and os.path.isfile(index):
        weight_map = read_json(index).get("weight_map")
        names = sorted(set(weight_map.values())) if isinstance(weight_map, dict) else []
        if not names:
            raise ValueError(f"{index} has no weight_map: fetch or write it again")
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

    dtype of the tensors: float32 or bfloat16. merge: structured layers (studies/structured.py) as the dense matrices they equal. An export
    replaces an older one (see publish). ValueError if transformers' Apertus cannot express the model, or if the folder holds what no
    export wrote. Source of the layout: transformers 5 (ApertusForCausalLM); its xIELU buffers are written too.
    """
    if model.config.ffn != "dense" and not merge:
        raise ValueError(f"transformers' Apertus has no ffn={model.config.ffn!r}: --merge writes the dense model that it equals")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype={dtype!r}: an export has float32 or bfloat16")
    hf = config_to_hf(model.config, tokenizer, dtype)
    shards, size = [{}], 0
    buffers = {f"model.layers.{i}.mlp.act_fn.{name}": torch.tensor(value) for i in range(model.config.n_layer)
               for name, value in (("beta", XIELU.BETA), ("eps", XIELU.EPS))}
    for name, p in itertools.chain(structured.dense_parameters(model), buffers.items()):
        tensor = p.to("cpu", getattr(torch, dtype)).contiguous()
        if size and size + tensor.nbytes > shard_bytes:
            shards, size = [*shards, {}], 0
        shards[-1][name], size = tensor, size + tensor.nbytes
    names = [WEIGHTS] if len(shards) == 1 else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    jsons = {"config.json": hf, "generation_config.json": {k: hf[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in hf}}
    if len(shards) > 1:
        total = sum(t.nbytes for shard in shards for t in shard.values())
        where = {name: file for file, shard in zip(names, shards) for name in shard}
        jsons[INDEX] = dict(metadata=dict(total_size=total), weight_map=where)
    if tokenizer:
        jsons.update(hf_files(tokenizer))
    publish(path, dict(zip(names, shards)), jsons)


def publish(path, tensors, jsons):
    """
    Write {file: tensors} and {file: JSON} into the folder `path`, in place of what the last export wrote there. No other file is touched.

    All is written under temporary names first. From the moment that the first old file goes until the last new one stands there is no
    config.json, without which no loader takes the folder: killed at any moment, it holds the old model, the new one, or none.
    """
    before, names = written_before(path, [*tensors, *jsons]), {*tensors, *jsons}
    place = functools.partial(os.path.join, path)
    try:
        os.makedirs(path, exist_ok=True)
        write_list(path, before | names)                   # first, so that what is left behind by a kill counts as ours
        for file, shard in tensors.items():
            save_file(shard, place(f"{file}.tmp"), metadata={"format": "pt"})
            checkpoint.flush(place(f"{file}.tmp"))
        for file, content in jsons.items():
            write_json(place(f"{file}.tmp"), content)
    except (OSError, SafetensorError) as e:                # the disk is full, or a file has the folder's name
        remove(place(f"{file}.tmp") for file in names)
        raise OSError(f"{path} could not be written ({e}); what was there before is untouched") from None
    remove([place("config.json")])
    checkpoint.flush(path)
    remove(place(file) for file in before - names)
    remove(place(f"{file}.tmp") for file in before - names)
    for file in names - {"config.json"}:
        os.replace(place(f"{file}.tmp"), place(file))
    write_list(path, names)
    checkpoint.flush(path)
    os.replace(place("config.json.tmp"), place("config.json"))
    checkpoint.flush(path)


def written_before(path, names=()):
    """
    The names of the files that the last export wrote into `path`. ValueError if a file there that a new one would replace, or that
    transformers would read beside it, is not among them: a run folder, a downloaded model.
    """
    before, listed = set(), os.path.join(path, LIST)
    if os.path.isfile(listed):
        before = set(read_json(listed).get("files", []))
        if any(name != os.path.basename(name) for name in before):
            raise ValueError(f"{listed} names files outside of its folder")
    for file in sorted(os.listdir(path)) if os.path.isdir(path) else []:
        model = file.endswith((".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json"))
        if file not in before and (model or file in names or file in ALSO_READ):
            raise ValueError(f"{path} holds {file}, which no export wrote: choose another folder, or move that file away")
    return before


ALSO_READ = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
             "added_tokens.json", "chat_template.jinja", "chat_template.json", "adapter_config.json"}


def write_list(path, names):
    checkpoint.write_flushed(os.path.join(path, LIST), json.dumps(dict(files=sorted(names))))


def write_json(path, content):
    with open(path, "w", encoding="utf-8") as f:
        json.dump(content, f, indent=1, ensure_ascii=False)
    checkpoint.flush(path)


def remove(files):
    for file in files:
        if os.path.exists(file):
            os.remove(file)


def load_run(folder, device="cpu", dtype=None, spread=None):
    """The model of a run folder of train.py, from its newest intact checkpoint; (model, Tokenizer). dtype, spread: as in load_hf."""
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        raise ValueError(f"no run in {folder!r} (no config.json there): train one with `python train.py configs/laptop.py`, or name a "
                         "Hugging Face model")
    config = read_json(path)
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
    tok = fitting(tokenizers.load_for(folder), model, folder)
    if config.get("chat"):
        tok.eos = tok.id_of("<|assistant_end|>")                            # of posttrain/sft.py and qrpo.py: a turn's end ends the text
    return (model if dtype is None else model.to(dtype)), tok


def load_any(name, device="cpu", dtype=None, spread=None):
    """(model, Tokenizer) of a run folder, a Hugging Face folder or a hub name. dtype: None keeps that of the files."""
    if os.path.isdir(os.path.join(name, "ckpt")) or not os.path.exists(os.path.join(name, "config.json")) and name.startswith("out"):
        return load_run(name, device, dtype, spread)
    folder = local(name)
    tok = tokenizer_from_hf(folder)                                        # 2 s: before the weights, which take minutes
    model = load_hf(folder, device, dtype, spread=spread)
    return model, fitting(tok, model, folder)


def fitting(tok, model, folder):
    """
    The tokenizer, if it is the model's: an embedding has a row for each id, and at most 1,023 more, which pad it to a round number;
    they have no token and decode to nothing. ValueError otherwise.
    """
    ids, rows = tok.vocab_size, model.config.vocab_size
    if not ids <= rows < ids + 1024:
        raise ValueError(f"{folder}: the model has {rows} ids and its tokenizer {ids}: they do not belong together")
    tok.vocab_size = rows
    return tok


def main():
    if not load:
        raise ValueError("say what to read: --load=out/laptop, a Hugging Face folder or a hub name; and --save=FOLDER to write it")
    if save:
        written_before(save)                                                # refuses a folder before a large model is read
    model, tokenizer = load_any(load)
    print(f"{load}: {model.num_params():,} parameters; {model.config}")
    if save:
        save_hf(model, save, tokenizer, dtype, merge=merge)
        print(f"wrote {save}: transformers.AutoModelForCausalLM.from_pretrained({save!r}) reads it")


def hf_files(tokenizer, chat=False):
    """
    {file name: what to write into it as JSON}, from which transformers.AutoTokenizer makes the same ids. It puts <s> in
    front, as the published tokenizer does; add_special_tokens=False leaves it out. chat: eos is <|assistant_end|>.

    transformers turns a control token spelled in a text into that token, unless called with split_special_tokens=True.
    """
    with open(os.path.join(os.path.dirname(__file__), "chat_template.jinja"), encoding="utf-8") as f:
        template = f.read()                                              # chat.py once more, in Jinja
    letter = letters()
    spelled = ["".join(letter[b] for b in piece) for piece in tokenizer.pieces]
    name = {i: s for s, i in tokenizer.special.items()}
    bos = name[tokenizer.bos]
    exact = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    first, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = [{"SpecialToken": {"id": bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [{"id": i, "content": s, **exact, "special": s not in tokenizer.in_text}
                             for s, i in tokenizer.special.items()],
            "normalizer": None,
            "pre_tokenizer": PRE_TOKENIZER,
            "post_processor": {
                "type": "TemplateProcessing", "single": [first, text], "pair": [first, text, *second],
                "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos], "tokens": [bos]}}},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "ignore_merges": True, "merges": merges_of(spelled),
                      "vocab": tokenizer.special | dict(zip(spelled, tokenizer.ids))}},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "padding_side": "left",
            "bos_token": bos, "eos_token": "<|assistant_end|>" if chat else name[tokenizer.eos],
            "pad_token": name[tokenizer.pad], "unk_token": "<unk>" if "<unk>" in tokenizer.special else None,
            "chat_template": template},
    }


PRE_TOKENIZER = {"type": "Sequence", "pretokenizers": [
    {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}


def merges_of(spelled):
    """
    The list of merges that a byte-level BPE of these pieces (str, by rank) has in Hugging Face's format: all pairs of
    pieces whose union is a piece, by the union's rank, then by their own (Apertus: 269,443, in the published order).
    """
    rank = {s: i for i, s in enumerate(spelled)}
    merges = []
    for s in spelled:
        pairs = [(s[:i], s[i:]) for i in range(1, len(s)) if s[:i] in rank and s[i:] in rank]
        merges += sorted(pairs, key=lambda pair: (rank[pair[0]], rank[pair[1]]))
    return merges


def tokenizer_from_hf(folder):
    """
    The Tokenizer of a Hugging Face folder, from its tokenizer.json and tokenizer_config.json: the inverse of hf_files.

    Every id is the stored one, also of tokens that were added behind the vocabulary. ValueError, one line, for what would
    give other ids than transformers does: another kind of tokenizer, other merges, an added token that is a word too.
    """
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.isfile(path):
        raise ValueError(f"{folder} has no tokenizer.json: export one with convert.py, or copy it from the model's repository")
    saved, settings = read_json(path), os.path.join(folder, "tokenizer_config.json")
    settings = read_json(settings) if os.path.isfile(settings) else {}
    byte = {c: bytes([b]) for b, c in letters().items()}
    try:
        model, added = saved["model"], {token["content"]: token for token in saved["added_tokens"]}
        id_of = check_ids(path, model["vocab"], added, settings)
        spelled = sorted(model["vocab"].keys() - added.keys(), key=id_of.get)
        pieces = [b"".join(byte[c] for c in s) for s in spelled]
        merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
        same = (saved["pre_tokenizer"] == PRE_TOKENIZER and saved.get("normalizer") is None and model["ignore_merges"]
                and not any(model.get(key) for key in ("dropout", "byte_fallback", "end_of_word_suffix"))
                and {bytes([b]) for b in range(256)} <= {*pieces})
    except (KeyError, TypeError, AttributeError):
        same = False
    if not same:
        raise ValueError(f"{path} is not a byte-level BPE that cuts text as Apertus' does")
    if merges != merges_of(spelled):
        raise ValueError(f"{path}: its merges are not all pairs of its pieces in the order of their ids, as Apertus' are: "
                         "this program would make other ids of a text")
    special = {s: id_of[s] for s in sorted(added, key=id_of.get)}
    # What a file calls not special, a text may become; but not the names that the chat format is made of.
    in_text = {s for s, token in added.items() if s in IN_TEXT or not token.get("special") and s not in {*SPECIAL}}
    check_words(path, in_text, added)
    ends = [named(settings, key, path, added) for key in ("bos_token", "eos_token", "pad_token")]
    return Tokenizer(folder, pieces, special, [id_of[s] for s in spelled], in_text, ends)


def check_ids(path, vocab, added, settings):
    """
    {token: id} of a tokenizer.json. What is added but not in the vocabulary is numbered by the library, on from the
    vocabulary's size; a file that says otherwise, or says it twice, is refused: it has no ids to be honoured.
    """
    id_of, behind = dict(vocab), len(vocab)
    for s, token in added.items():
        expected = id_of.setdefault(s, behind)
        behind += expected == behind
        if token["id"] != expected:
            raise ValueError(f"{path}: the added token {s!r} has the id {token['id']}, but transformers would number it "
                             f"{expected}: save the tokenizer again with the version that trained the model")
    if len(set(id_of.values())) < len(id_of):
        raise ValueError(f"{path}: two tokens have the same id")
    for i, token in settings.get("added_tokens_decoder", {}).items():
        if id_of.get(token["content"]) != int(i):
            raise ValueError(f"{path}: tokenizer_config.json adds {token['content']!r} as {i}, this file has "
                             f"{id_of.get(token['content'])} for it: save the tokenizer again")
    return id_of


def check_words(path, in_text, added):
    """Refuse added tokens of ordinary text which the one regular expression that finds them would not find as transformers does."""
    for s in sorted(in_text):
        if any(added[s].get(key) for key in ("single_word", "lstrip", "rstrip")):
            raise ValueError(f"{path}: the added token {s!r} takes white space with it or wants to stand alone: not done here")
        other = next((t for t in added if t != s and (t.startswith(s) or s.startswith(t))), None)
        if other:
            raise ValueError(f"{path}: the added tokens {s!r} and {other!r} begin alike: which one a text holds is not clear")


def named(settings, key, path, added):
    """The name of bos, eos or pad: tokenizer_config.json says it, as a str or with attributes; else as Apertus has it."""
    usual = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}[key]
    name = settings.get(key) or usual
    name = name["content"] if isinstance(name, dict) else name
    if name not in added:
        raise ValueError(f"{path} has no control token {name!r} to be the {key}")
    return name


def letters():
    """GPT-2's alphabet, byte -> character: printable bytes are themselves, the others the characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted({*range(256)} - {*printable})
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}


if __name__ == "__main__":
    run(main, globals())
