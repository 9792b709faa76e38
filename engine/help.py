"""The text of --help, and hints in configurator.py's error messages: the intended setting, the missing package."""

import difflib
import inspect
import re
import sys
from pathlib import Path

# Names that other trainers (nanoGPT, transformers, torchtitan) give our settings.
OTHERS = """
learning_rate=lr min_lr=min_lr warmup=warmup_samples warmup_iters=warmup_samples warmup_steps=warmup_samples
decay=decay_samples lr_decay_iters=decay_samples decay_steps=decay_samples batch=batch_size bs=batch_size
gradient_accumulation_steps=micro_batch micro_batch_size=micro_batch max_norm=grad_clip clip=grad_clip out_dir=out
output_dir=out dataset=data eval_interval=eval_every eval_iters=eval_windows save_every=checkpoint_every
save_interval=checkpoint_every seq_len=block_size context=block_size layers=n_layer heads=n_head hidden_size=n_embd
temp=temperature max_tokens=max_new_tokens steps=total_samples max_steps=total_samples num_steps=total_samples
train_steps=total_samples total_steps=total_samples max_iters=total_samples iters=total_samples
iterations=total_samples epochs=total_samples num_epochs=total_samples
"""


def suggestion(key, known):
    """The settings that an unknown name may mean, as the end of a sentence. known: the names of all settings."""
    others = dict(pair.split("=") for pair in OTHERS.split())
    near = [others[key]] if others.get(key) in known else difflib.get_close_matches(key, known)
    return f", did you mean {' or '.join(map(repr, near))}?" if near else "; --help lists them"


def print_help(script, namespaces, settings):
    """
    Print the script's docstring, and a line for each setting: its value and the comment behind it.

    settings(namespace): the settings in it.
    """
    print(script["__doc__"].strip(), "\n\nsettings:", sep="")
    shown = set()
    for space in namespaces:
        file = space["__file__"] if isinstance(space, dict) else inspect.getfile(type(space))
        text = Path(file).read_text(encoding="utf-8")
        # Lines without a comment do not count: a local variable may have the name of a setting.
        comments = dict(re.findall(r"(?m)^ *(\w+).* = .*?  # *(.*)", text))
        for key, value in settings(space).items():
            if key not in shown:
                # PATHS are the arguments without a flag.
                name = "PATHS" if key == "paths" else f"--{key}={value!r}"
                print(f"  {name}".ljust(38), comments.get(key, ""))
                shown.add(key)
    sys.stdout.flush()


def how_to_install(error):
    """The command that installs a missing package, as the end of a sentence; "" for another error."""
    if not isinstance(error, ModuleNotFoundError):
        return ""
    return f": pip install {dict(yaml='pyyaml').get(error.name, error.name)}"
