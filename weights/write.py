"""
Write a model for Hugging Face: in a run folder, or in a folder of its own, an export.

    write_config           config.json and the vocabulary, when a run begins
    write_final_weights    model.safetensors, when it has ended
    save_hf                an export: all of these, in place of an older export or not at all
"""

import copy
import os
import re
import shutil

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from chat import stop_ids
from data import first_folder
from engine.files import flush, make_folder, read_json, replace_folder, restore_folder, write_json
from engine.hardware import pick_dtype
from tokenizer import load_for
from tokenizer_json import hf_files
from weights.config import config_to_hf
from weights.folders import shape_in, weights_in
from weights.hashes import WRITTEN, record_files
from weights.lora import merge_adapters
from weights.stored import CONSTANTS, StoredWeights, meta_model

LIST = ".export.json"       # in an export, the names of its files and that of the model

# -----------------------------------------------------------------------------
# a run folder


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
    """Delete the final weights that a run wrote before it resumed: they are not those of its newest checkpoint."""
    for file in os.listdir(folder):
        if file == WRITTEN or re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?", file):
            os.remove(f"{folder}/{file}")


def write_final_weights(folder):
    """
    Write the weights of a finished run, from its last checkpoint, next to its config.json, and the hashes of the files;
    nothing if transformers cannot load the model.
    """
    if read_json(f"{folder}/config.json")["model_type"] == "apertus":
        model = meta_model(shape_in(folder))
        stored = StoredWeights(weights_in(folder), model)
        record_files(folder, write_weights(model, stored.read, folder, torch.float32, 5e9))


# -----------------------------------------------------------------------------
# an export


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
    torch_dtype = pick_dtype(dtype, "cpu")
    files = json_files(config_to_hf(model.config, str(torch_dtype)[6:]), tokenizer)
    if merge:
        merge_adapters(model, torch_dtype)
    tensors, outline = dict(model.named_parameters()), meta_model(model.config)
    if tensors.keys() != dict(outline.named_parameters()).keys():
        raise ValueError("an export holds a whole model: --merge adds the adapters to its matrices")

    new, old = f"{folder}.export-new", f"{folder}.export-old"
    restore_folder(folder, old)
    shutil.rmtree(new, ignore_errors=True)                 # of an export that was killed
    make_folder(new)
    try:
        for file, content in files.items():
            write_json(f"{new}/{file}", content)
        write_weights(outline, tensors.get, new, torch_dtype, shard_bytes)
        write_json(f"{new}/{LIST}", dict(files=sorted(os.listdir(new)), source=source))
    except (OSError, SafetensorError) as e:                # the disk is full
        shutil.rmtree(new, ignore_errors=True)
        raise OSError(f"{folder} could not be written ({e}); the older export is untouched") from None
    replace_folder(folder, new, old)


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


# -----------------------------------------------------------------------------
# the files


def json_files(config, tok):
    """{file name: content, for JSON} of all files but the weights. config: of config.json; tok: Tokenizer or None."""
    if not tok:
        return {"config.json": config}
    ids = dict(bos_token_id=tok.bos, eos_token_id=tok.eos, pad_token_id=tok.pad)
    stop = sorted(stop_ids(tok)) if tok.eos == tok.special.get("<|assistant_end|>") else tok.eos
    return {"config.json": config | ids, "generation_config.json": ids | dict(eos_token_id=stop)} | hf_files(tok)


def write_weights(model, value_of, folder, dtype, shard_bytes):
    """
    Write weights next to a config.json as safetensors: a file, or if they have more than shard_bytes several and an
    index. Each file is whole or absent. Peak memory is one file. Returns the names of the files.

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
    return list(split.filename_to_tensors)
