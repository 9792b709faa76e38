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
here than in transformers, an error names it. A run that transformers' Apertus cannot compute (SwiGLU, adapters) has
model_type "nanoapertus", which transformers does not load.

The published models are the 8B and the 70B (2509), the Minis of 0.5B, 1.5B and 4B (v1.1), and 1.5, whose text model is
read here:

                 control tokens                      conversations                 embedding and head
    1.0          ids 0 to 999: tokenizer.py, NAMED   chat.py                       two
    v1.1         Mistral-Nemo's; <pad> is 10         the same ids, without names   0.5B: one, for both
    v1.5         thoughts at 32 and 33, not 69, 70   chat.py, but tools            ids of media in the embedding only
"""

import copy
import functools
import hashlib
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
from data import first_folder
from engine import restore
from engine.files import flush, in_one_line, make_folder, read_json, replace_folder, restore_folder, write_json
from engine.runs import config_of, settings_of
from model import XIELU, Apertus, ApertusConfig
from tokenizer import TEMPLATE, hf_files, load_for, write_bpe

load = ""              # a run folder, a Hugging Face folder or name, or a folder of adapters
save = ""              # the folder to write in Hugging Face's format; FILE.json: the vocabulary alone, for prepare.py
dtype = "float32"      # of the written tensors: float32 | bfloat16
merge = False          # add adapters to their matrices
trace = ""             # print what each module computes for this text, as trace_modules() does

# -----------------------------------------------------------------------------
# config.json

# Our names of settings, and Hugging Face's.
HF_NAMES = {
    "block_size": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "ffn_dim": "intermediate_size",
    "tie_embeddings": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
}
# The same for each type of RoPE.
ROPE_NAMES = {
    "default": {"rope_theta": "rope_theta"},
    "linear": {"rope_theta": "rope_theta", "rope_scaling": "factor"},
    "llama3": {
        "rope_theta": "rope_theta",
        "rope_scaling": "factor",
        "rope_original": "original_max_position_embeddings",
        "rope_low": "low_freq_factor",
        "rope_high": "high_freq_factor",
    },
}
# The RoPE of a config.json that does not mention it, in transformers 4 and 5.
PUBLISHED_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
# Keys of every export, because model.py computes nothing else.
EXPORTED = {
    "architectures": ["ApertusForCausalLM"],
    "model_type": "apertus",
    "hidden_act": "xielu",
    "qk_norm": True,
    "post_norm": False,
    "mlp_bias": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "float32",
    "torch_dtype": "float32",
    "use_cache": True,
}
# Keys of other programs that may have this value only.
NEUTRAL = {
    "hidden_activation": "xielu", "is_causal": True, "pretraining_tp": 1, "partial_rotary_factor": 1.0,
    "logit_scale": 1.0, "pruned_heads": {}, "hidden_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    "is_decoder": False, "is_encoder_decoder": False, "add_cross_attention": False, "tie_encoder_decoder": False,
    "use_sliding_window": False, "use_bidirectional_attention": False, "rope_traditional": False,
}
# Keys that change no logit, whatever their value.
FREE = {
    "architectures", "model_type", "auto_map", "custom_pipelines", "_name_or_path", "name_or_path", "_commit_hash",
    "transformers_version", "unsloth_version", "unsloth_fixed", "tokenizer_class", "model_max_length", "dtype",
    "torch_dtype", "use_cache", "use_return_dict", "return_dict", "output_attentions", "output_hidden_states",
    "bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "num_labels", "problem_type",
    "finetuning_task", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
    "chunk_size_feed_forward", "keys_to_ignore_at_inference", "torchscript", "gradient_checkpointing", "nanoapertus",
    "text_config", "vision_config", "audio_config", "vision_tokenizer_config", "audio_tokenizer_config",
    "image_token_id", "audio_token_id", "image_token_offset", "audio_token_offset",
}


def config_from_hf(hf):
    """
    The ApertusConfig of a config.json, a dict; for Apertus 1.5, that of its text model. ValueError, one line, if it
    lacks a size or asks for anything that model.py does not compute.
    """
    given = with_flat_rope(text_model_of(hf))
    rope_type = given.pop("type", "default")
    rope_type = given.pop("rope_type", rope_type)
    if rope_type not in ROPE_NAMES:
        given["rope_type"] = rope_type                     # check_unused_keys() names it
    values = {
        "tie_word_embeddings": False,
        "num_key_value_heads": given.get("num_attention_heads"),
        "rms_norm_eps": ApertusConfig.norm_eps,
        "initializer_range": ApertusConfig.init_std,
        "rope_theta": PUBLISHED_ROPE["rope_theta"],
    } | given
    config = ApertusConfig(**{
        name: checked(hf_name, values.pop(hf_name, None), getattr(ApertusConfig, name), "config.json")
        for name, hf_name in (HF_NAMES | ROPE_NAMES.get(rope_type, {})).items()})
    # Linear RoPE divides every frequency, as llama3 does if the original window is 0.
    if rope_type == "default":
        config.rope_scaling = 0.0
    elif rope_type == "linear":
        config.rope_original = 0
    check_unused_keys(values, config)
    return config


def text_model_of(hf):
    """A config.json with the keys of an Apertus; for 1.5, those of its text model. ValueError for another model."""
    model_type = hf.get("model_type")
    if model_type == "apertus":
        return hf
    if model_type != "apertus1p5":
        raise ValueError(f"config.json is of a {model_type!r} model: want model_type 'apertus'")
    text = hf.get("text_config") or {}
    tied = hf.get("tie_word_embeddings") or text.get("tie_word_embeddings")
    # A head that is not tied has rows for ids of text only, and we read only these rows of the embedding.
    ids = not tied and text.get("output_vocab_size") or text.get("vocab_size")
    return hf | text | dict(vocab_size=ids, tie_word_embeddings=tied)


def with_flat_rope(hf):
    """
    The keys of a config.json that have a value, with those of RoPE next to the others. ValueError if two differ.

    transformers 5 writes rope_parameters, 4 rope_theta and rope_scaling, which is null for plain RoPE.
    """
    given = {key: value for key, value in hf.items() if value is not None}
    ropes = [given.pop(key, None) or {} for key in ("rope_parameters", "rope_scaling")]
    if not any(ropes) and "rope_scaling" not in hf:
        ropes = [PUBLISHED_ROPE]
    for rope in ropes:
        for key, value in rope.items():
            if given.setdefault(key, value) != value:
                raise ValueError(f"config.json says two things about RoPE: {key}={given[key]} and {value}")
    return given


def check_unused_keys(values, config):
    """ValueError if one of the other keys of a config.json asks for a computation that model.py lacks."""
    allowed = EXPORTED | NEUTRAL | dict(
        head_dim=config.head_dim,
        layer_types=["full_attention"] * config.n_layer,
        output_vocab_size=config.vocab_size)
    unsupported = [f"{key}={value!r}" for key, value in values.items()
                   if key not in FREE and allowed.get(key) != value]
    if unsupported:
        raise ValueError(f"config.json asks for settings that model.py lacks: {', '.join(unsupported):.200}")


def config_to_hf(config, dtype="float32"):
    """The content of a config.json for transformers 4 and 5. ValueError if their Apertus cannot compute the model."""
    if config.activation != "xielu" or not config.qk_norm:
        raise ValueError("transformers' Apertus has xIELU and QK-norm only, this model has "
                         f"activation={config.activation!r}, qk_norm={config.qk_norm}")

    def renamed(names):
        return {hf_name: getattr(config, name) for name, hf_name in names.items()}

    rope_type = "llama3" if config.rope_original else "linear"
    if not config.rope_scaling:
        rope_type = "default"
    rope = dict(rope_type=rope_type) | renamed(ROPE_NAMES[rope_type])
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return renamed(HF_NAMES) | EXPORTED | dict(
        dtype=dtype,
        torch_dtype=dtype,
        rope_theta=config.rope_theta,
        rope_scaling=scaling if config.rope_scaling else None,
        rope_parameters=rope)


# -----------------------------------------------------------------------------
# folders


def folder_of(name, files=("*.safetensors", "*.json", TEMPLATE)):
    """
    The folder of a run or a model, given its path or a hub name; of the latter, download the files of these patterns.
    ValueError or OSError, one line, if there is neither.
    """
    if os.path.isdir(name):
        return name
    if name.count("/") != 1 or name.startswith((".", "/", "out/")):
        raise ValueError(f"no run in {name!r}: it is neither a folder here nor the name of a hub repository "
                         "(organisation/model); train one with `python train.py configs/laptop.py`")
    import huggingface_hub  # here, since local folders do not need it

    try:
        return huggingface_hub.snapshot_download(name, allow_patterns=list(files))
    except Exception as e:                                 # the library raises a dozen kinds
        raise OSError(f"{name} could not be downloaded ({type(e).__name__}): check the name and the network, "
                      "or give a local folder") from None


def shape_in(folder):
    """The ApertusConfig of a run folder, or of another Hugging Face folder."""
    hf = config_of(folder)
    # transformers keeps our settings in the files that it saves, but may have changed the model.
    if os.path.isdir(f"{folder}/ckpt") or hf.get("model_type") == "nanoapertus":
        return ApertusConfig.from_settings(settings_of(folder))
    return config_from_hf(hf)


def shape_of(name):
    """The ApertusConfig of a run or a model. For a hub name, download only its config.json."""
    return shape_in(folder_of(name, ["config.json"]))


def weights_in(folder):
    """The path of the weights of a folder: its newest intact checkpoint, or the folder itself."""
    checkpoint = restore.newest_intact(f"{folder}/ckpt")
    return checkpoint[0] if checkpoint else folder


def has_adapter(folder):
    """Whether this is a folder of adapters as PEFT writes it, which holds no other weights."""
    return os.path.isfile(f"{folder}/adapter_config.json")


def start_of(name):
    """
    (ApertusConfig, Tokenizer, path of its weights) of a model that a run starts with. fill() reads the weights.
    ValueError, one line, also if the folder holds adapters.
    """
    folder = folder_of(name)
    with in_one_line(folder, ValueError, OSError):
        if has_adapter(folder) or settings_of(folder).get("lora_r"):
            raise ValueError(f"{name} holds adapters: merge them into their model first, "
                             f"python convert.py --load={name} --save=FOLDER --merge")
        return shape_in(folder), load_for(folder), weights_in(folder)


# -----------------------------------------------------------------------------
# read

# The numbers of xIELU that are stored as tensors, although all models have the same.
CONSTANTS = dict(beta=XIELU.BETA, eps=XIELU.EPS)


def meta_model(shape):
    """An Apertus on the meta device: names and shapes without memory."""
    with torch.device("meta"):
        return Apertus(shape, seed=None)


def published_parameters(model):
    """{published name: parameter} of a model without its adapters. (LoRALinear holds its matrix as `base`.)"""
    return {name.replace(".base.", "."): p for name, p in model.named_parameters() if ".lora_" not in name}


class StoredWeights:
    """
    The weights of a model at a path of weights_in(): a checkpoint, or safetensors under the published names.

    The model may be on the meta device, and have adapters, which are left out. ValueError, one line, if the names or
    shapes are not those of the model.
    """

    def __init__(self, path, model):
        self.path = path
        self.parameters = published_parameters(model)
        self.keys = {name: f"model/{name}" for name in self.parameters}      # {name: its key in the files}
        of_run = os.path.isfile(f"{path}/manifest.json")
        expected = {self.keys[name]: p for name, p in self.parameters.items()} if of_run else {}
        self.reader, self.entries = restore.reader_for(path, expected)       # entries: {key: metadata}
        if not of_run:
            # Apertus 1.5 also stores the tokenizers of images and sound.
            self.keys = {key.replace("model.language_model.", "model.", 1): key
                         for key in self.entries if "_tokenizer." not in key}
        if model.config.tie_embeddings:
            self.keys.pop("lm_head.weight", None)          # the 0.5B stores it all the same
        constants = [name for name in self.keys if name.endswith(("act_fn.beta", "act_fn.eps"))]
        self.check_names(constants)
        shapes = {name: p.shape for name, p in self.parameters.items()} | dict.fromkeys(constants, (1,))
        for name in shapes:
            self.check_whole(name)
        self.select_text_rows()
        for name, shape in shapes.items():
            self.check_shape(name, shape)
        for name in constants:
            self.check_constant(name)

    def check_names(self, constants):
        """ValueError if the stored tensors, other than constants, are not the parameters of the model."""
        if unmatched := (self.keys.keys() - set(constants)) ^ self.parameters.keys():
            raise ValueError(f"{self.path}: {len(unmatched)} tensors are missing, or not of the model that config.json "
                             f"describes, {min(unmatched)} among them; a run has its first weights after "
                             "checkpoint_every steps")

    def check_whole(self, name):
        """ValueError if a tensor is not stored once and whole."""
        entry = self.entries[self.keys[name]]
        # A header may say where a part of a tensor lies in it: all parts together must be the whole tensor, once.
        if sum(part.sizes.numel() for part in entry.chunks) != entry.size.numel():
            raise ValueError(f"{self.path}: {name} is stored in part only, or twice")

    def select_text_rows(self):
        """Of the embedding of Apertus 1.5 take the rows of text, which come before those of images and sound."""
        entry = self.entries.get("model.language_model.embed_tokens.weight")
        if entry:
            n_text = self.parameters["model.embed_tokens.weight"].shape[0]
            entry.size = torch.Size([min(n_text, entry.size[0]), *entry.size[1:]])

    def check_shape(self, name, shape):
        """ValueError if a tensor has another shape than in the model."""
        size = self.entries[self.keys[name]].size
        if (size or (1,)) != shape:
            raise ValueError(f"{self.path}: {name} is {[*size]}, and config.json describes {[*shape]}")

    def check_constant(self, name):
        """ValueError if a constant of xIELU has another value than in model.py."""
        value, constant = self.read(name).item(), CONSTANTS[name.rpartition(".")[2]]
        if not math.isclose(value, constant, rel_tol=0.02):          # fp16 rounds -1e-6 to -1.013e-6
            raise ValueError(f"{self.path}: {name} is {value}, and model.py has {constant}")

    def read(self, name, dtype=None, device="cpu"):
        """A tensor. dtype: None = as it is stored."""
        entry = self.entries[self.keys[name]]
        # Not empty(): if parts overlap, some rows are never written.
        tensor = torch.zeros(entry.size, dtype=dtype or entry.properties.dtype, device=device)
        self.load_into(name, tensor)
        return tensor if entry.size else tensor.view(1)    # Apertus 1.5 stores scalars without a dimension

    def fill(self, name, p):
        """Read a tensor into a parameter, whole or this rank's shard of it."""
        if self.entries[self.keys[name]].size:
            self.load_into(name, p)
        else:
            restore.copy_into(p, self.read(name))

    def load_into(self, name, tensor):
        import torch.distributed.checkpoint as dcp  # here, since it takes a second

        dcp.load({self.keys[name]: tensor}, storage_reader=self.reader, no_dist=True)


@torch.no_grad()
def fill(model, path):
    """Read the weights of a model, whole or in shards, except adapters. path: as start_of() returns it."""
    stored = StoredWeights(path, model)
    for name, p in stored.parameters.items():
        stored.fill(name, p)


def load_hf(path_or_repo, device="cpu", dtype=None, base=""):
    """
    The Apertus in a Hugging Face folder or repository, or of a run that trained all weights. dtype: None = that of each
    stored tensor. base: int8 or nf4, of the matrices of its blocks, which are quantised one by one as they are read.

    Peak memory is the model plus one tensor. ValueError, one line, if the folder does not hold the model that its
    config.json describes.
    """
    folder = folder_of(path_or_repo)
    path = weights_in(folder)
    model = meta_model(shape_in(folder))
    matrices = ()
    if base:
        from posttrain import quantised  # here, since only a quantised base needs it
        matrices = quantised.matrices(model)
    stored = StoredWeights(path, model)
    for name in stored.parameters:
        owner, _, leaf = name.rpartition(".")
        if owner in matrices:
            quantised.replace(model, owner, stored.read(name, dtype, device), base)
        else:
            setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(stored.read(name, dtype, device)))
    if model.config.tie_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model.requires_grad_(not base)


def load_any(name, device="cpu", dtype=None, base=""):
    """
    (model, Tokenizer) of a run folder, a Hugging Face folder or name, or a folder of adapters, which are put on their
    base model. dtype, base: as in load_hf(). ValueError, one line, for anything else, or if adapters were trained on
    other weights than their base model has today.
    """
    from posttrain import lora  # here, since exports and runs of train.py do not need it

    folder = folder_of(name)
    with in_one_line(folder, ValueError, OSError, torch.OutOfMemoryError):
        if has_adapter(folder):
            _, start = lora.read_peft_config(folder)
            model, tok = load_any(start, device, dtype, base)
            lora.load(model, folder, fingerprint(model))
            return model, tok
        settings = settings_of(folder)
        adapters = lora.lora_config(settings)
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
            lora.add_lora(model, adapters)
            restore.load(weights_in(folder), model)
            model.config = shape                           # the run may have changed its window and RoPE
            return model, tok
        return load_hf(folder, device, dtype, base), tok


def load_for_inference(name, device, dtype, base=""):
    """load_any() to generate or evaluate. device, dtype: by name, or "auto", the dtype of the weights, bf16 on CUDA."""
    device = pick_device(device)
    weight_dtype = torch.bfloat16 if "cuda" in device else None
    if dtype != "auto":
        weight_dtype = pick_dtype(dtype, device)
    model, tok = load_any(name, device, weight_dtype, base)
    return model.eval(), tok


def check_same_vocabulary(tok, data, name):
    """ValueError if a data folder was made with another tokenizer than `tok`, that of the model `name`."""
    if load_for(first_folder(data)).hash != tok.hash:
        raise ValueError(f"{data} was made with another vocabulary than that of {name}: prepare the data with "
                         f"the model's, python convert.py --load={name} --save=vocabulary.json and "
                         "python prepare.py TEXTS --tokenizer=vocabulary.json")


def fingerprint(model):
    """
    A sha256 of the first 64 values of each weight, rounded to bf16: equal for a model in fp32 and in bf16, quantised or
    not. Adapters do not count.
    """
    digest = hashlib.sha256()
    for path, module in model.named_modules():
        # A quantised matrix keeps its first original values.
        tensors = {"weight": module.first} if hasattr(module, "first") else dict(module.named_parameters(recurse=False))
        if path == "lm_head" and model.config.tie_embeddings or ".lora_" in path:
            continue                                       # a tied head is the embedding, which counts once
        for leaf, p in tensors.items():
            p = p.full_tensor() if hasattr(p, "full_tensor") else p     # shards are gathered, one tensor at a time
            digest.update(f"{path.removesuffix('.base')}.{leaf}".encode())
            digest.update(p.detach().flatten()[:64].bfloat16().float().cpu().numpy())
    return digest.hexdigest()


# -----------------------------------------------------------------------------
# write

LIST = ".export.json"       # in an export, the names of its files and that of the model


def json_files(config, tok):
    """{file name: content, for JSON} of all files but the weights. config: of config.json; tok: or None."""
    if not tok:
        return {"config.json": config}
    ids = dict(bos_token_id=tok.bos, eos_token_id=tok.eos, pad_token_id=tok.pad)
    stop = sorted(stop_ids(tok)) if tok.eos == tok.special.get("<|assistant_end|>") else tok.eos
    return {"config.json": config | ids, "generation_config.json": ids | dict(eos_token_id=stop)} | hf_files(tok)


def write_config(folder, settings, shape, tok, is_apertus=True):
    """
    Write config.json and the vocabulary of a run. settings: all of them, a dict; with chat, a text ends where the
    assistant's turn does. is_apertus: whether all weights of the run are those of an Apertus of this shape.
    """
    if settings.get("chat"):
        tok = copy.copy(tok)
        tok.eos = tok.id_of("<|assistant_end|>")
    if is_apertus and not settings.get("lora_r") and shape.activation == "xielu" and shape.qk_norm:
        config = config_to_hf(shape)
    else:
        config = dict(model_type="nanoapertus")
    files = json_files(config, tok)
    files["config.json"]["nanoapertus"] = settings
    for file, content in files.items():
        write_json(f"{folder}/{file}", content)


def write_run_config(folder, settings, shape, data):
    """write_config() with the vocabulary of a data folder."""
    write_config(folder, settings, shape, load_for(first_folder(data)))


def remove_old_weights(folder):
    """Delete the weights of an earlier end of a run, which are not those of its newest checkpoint."""
    for file in os.listdir(folder):
        if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?", file):
            os.remove(f"{folder}/{file}")


def complete(folder):
    """Write the weights of a finished run next to its config.json, if it is an Apertus that transformers can load."""
    if read_json(f"{folder}/config.json")["model_type"] == "apertus":
        model = meta_model(shape_in(folder))
        stored = StoredWeights(weights_in(folder), model)
        write_weights(model, stored.read, folder, torch.float32, 5e9)


def write_weights(model, value_of, folder, dtype, shard_bytes):
    """
    Write weights next to a config.json as safetensors: a file, or if they have more than shard_bytes several and an
    index. Each file is whole or absent. Peak memory is one file.

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
        shutil.copymode(f"{folder}/config.json", f"{path}.tmp")     # safetensors makes its files unreadable for others
        flush(f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
    if split.is_sharded:
        index = dict(metadata=split.metadata, weight_map=split.tensor_to_filename)
        write_json(f"{folder}/model.safetensors.index.json", index)


def check_replaceable(folder, source):
    """
    ValueError if a folder holds anything that no export wrote, or an export of another model than `source`; "" = any.
    """
    files = {*os.listdir(folder)} if os.path.exists(folder) else set()
    export = read_json(f"{folder}/{LIST}") if LIST in files else dict(files=[], source=source)
    foreign = sorted(files - {LIST, *export["files"]})
    if foreign:
        raise ValueError(f"{folder} holds {foreign[0]}, which no export wrote: choose another folder, or move it away")
    older = export.get("source") or "an unknown model"
    if source and older != source:
        raise ValueError(f"{folder} is an export of {older}: choose another folder, or remove that one first")


def save_hf(model, path, tokenizer=None, dtype="float32", shard_bytes=5e9, merge=False, source=""):
    """
    Write a Hugging Face folder that transformers loads, and that may replace an older export.

    It is written under another name and then renamed: whenever this is killed, the folder is the old export, the new
    one, or absent. merge: add the adapters to their matrices, which changes the model. source: the model's name; then
    only an export of the same name is replaced. ValueError, one line, if transformers cannot compute the model, or the
    folder must not be replaced.
    """
    folder = os.path.realpath(path)
    check_replaceable(folder, source)
    numbers = pick_dtype(dtype, "cpu")
    files = json_files(config_to_hf(model.config, str(numbers)[6:]), tokenizer)
    if merge:
        from posttrain.lora import merge as merge_adapters  # here, since most models have no adapters
        merge_adapters(model, numbers)
    tensors = dict(model.named_parameters())
    names_and_shapes = meta_model(model.config)
    if tensors.keys() != dict(names_and_shapes.named_parameters()).keys():
        raise ValueError("an export holds a whole model: --merge adds the adapters to its matrices")

    new, old = f"{folder}.export-new", f"{folder}.export-old"
    restore_folder(folder, old)
    shutil.rmtree(new, ignore_errors=True)                 # of an export that was killed
    make_folder(new)
    try:
        for file, content in files.items():
            write_json(f"{new}/{file}", content)
        write_weights(names_and_shapes, tensors.get, new, numbers, shard_bytes)
        write_json(f"{new}/{LIST}", dict(files=sorted(os.listdir(new)), source=source))
    except (OSError, SafetensorError) as e:                # the disk is full
        shutil.rmtree(new, ignore_errors=True)
        raise OSError(f"{folder} could not be written ({e}); the older export is untouched") from None
    replace_folder(folder, new, old)


# -----------------------------------------------------------------------------
# what each module computes, to debug another engine


@torch.no_grad()
def trace_modules(model, tok, text):
    """
    Print the ids of a text, and a line for each module of a model in the order of computation: its name, the shape,
    mean, norm, and eight digits of the sha256 of its values in fp32. Later calls of the model print too.

    Names and values are those of transformers' modules, so the first line that differs names the faulty module. RoPE
    and the product of attention have no line: if q_norm, k_norm and v_proj agree and o_proj does not, look there. Mean
    and norm agree up to rounding, the hash only if every bit does.
    """
    ids = [tok.bos, *tok.encode(text)]
    for name, module in model.named_modules():
        module.register_forward_hook(functools.partial(print_output, name))
    print(f"ids {ids}")
    model(torch.tensor([ids]))


def print_output(name, module, inputs, output):
    """Print the line of a module. output: (1, ...). The model itself, whose name is "", has no line."""
    if name:
        x = output[0].float()
        digest = hashlib.sha256(x.numpy().tobytes()).hexdigest()
        print(f"{name:45} {list(x.shape)!s:16} {x.mean():+.6e} {x.norm():.6e} {digest:.8}")


# -----------------------------------------------------------------------------
# the command


def main():
    if save.endswith(".json"):
        if os.path.exists(save):
            raise ValueError(f"{save} is there already: choose another name")
        tok = load_for(folder_of(load, ["*.json", TEMPLATE]))  # not the weights
        write_bpe(tok, save)
        print(f"wrote {save}: {tok.vocab_size:,} ids; python prepare.py TEXTS --tokenizer={save}")
        return
    source = os.path.normpath(load)
    if save:
        check_replaceable(save, source)
    model, tok = load_any(load)
    print(f"{load}: {model.num_params():,} parameters; {model.config}")
    if trace:
        trace_modules(model, tok, trace)
    if save:
        save_hf(model, save, tok, dtype, merge=merge, source=source)
        print(f"wrote {save}: transformers.AutoModelForCausalLM.from_pretrained({save!r}) reads it")


if __name__ == "__main__":
    run(main, globals())
