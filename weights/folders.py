"""
The folder of a model: where it lies, the shape in its config.json, the path of its weights. Reads no weights.

A model is named by a run folder, a Hugging Face folder, or the name of a repository on the hub.
"""

import os

from data import first_folder
from engine import restore
from engine.files import in_one_line
from engine.runs import config_of, settings_of
from model import ApertusConfig
from tokenizer import load_for
from tokenizer_json import TEMPLATE
from weights.config import config_from_hf
from weights.hashes import edited_file


def folder_of(name, patterns=("*.safetensors", "*.json", TEMPLATE)):
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
        return huggingface_hub.snapshot_download(name, allow_patterns=list(patterns))
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
    """
    The path of the weights of a folder: its newest intact checkpoint, or the folder itself. Of a finished run, which
    has both, print a line if the weights in the folder are not those that the run has written.
    """
    checkpoint = restore.newest_intact(f"{folder}/ckpt")
    if not checkpoint:
        return folder
    path, _ = checkpoint
    if edited := edited_file(folder):
        print(f"{folder}/{edited} is not as the run has written it (sha256): the weights are read from {path}. To use "
              "the edited ones, copy the folder without ckpt/")
    return path


def has_adapter(folder):
    """Whether this is a folder of adapters as PEFT writes it, which holds no other weights."""
    return os.path.isfile(f"{folder}/adapter_config.json")


def start_of(name):
    """
    (ApertusConfig, Tokenizer, path of its weights) of a model that a run starts with; read_weights() takes the path.
    ValueError, one line, also if the folder holds adapters.
    """
    folder = folder_of(name)
    with in_one_line(folder, ValueError, OSError):
        if has_adapter(folder) or settings_of(folder).get("lora_r"):
            raise ValueError(f"{name} holds adapters: merge them into their model first, "
                             f"python convert.py --load={name} --save=FOLDER --merge")
        return shape_in(folder), load_for(folder), weights_in(folder)


def check_same_vocabulary(tok, data, name):
    """ValueError if a data folder was made with another tokenizer than `tok`, that of the model `name`."""
    if load_for(first_folder(data)).hash != tok.hash:
        raise ValueError(f"{data} was made with another vocabulary than that of {name}: prepare the data with "
                         f"the model's, python convert.py --load={name} --save=vocabulary.json and "
                         "python prepare.py TEXTS --tokenizer=vocabulary.json")
