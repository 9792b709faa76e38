"""
Configuration without a framework: the plain globals at the top of a script are its settings.

    python train.py configs/8b.py configs/ablations/swiglu.py --lr=3e-4 --compile

    1. `name = value  # what it is` at the top of the script: the default, its kind, and its line in --help
    2. every config file on the command line overrides them, later files win; configs/8b.py, config/8b.py and 8b are the
       same file. `_before`, a dict, tells it the settings so far (configs/long)
    3. --key=value (or --key value) overrides the files; --flag alone means True

A name that does not exist is an error with a suggestion, in a file as on the command line (nanoGPT accepts a typo in a
file), and so is a value of the wrong kind. Command-line values are literals, never code. A config file is Python and is
run: name only files that you would run.
"""

import ast
import difflib
import os
import runpy
import sys

ROOT = os.path.dirname(os.path.abspath(__file__))
KINDS = (bool, int, float, str, tuple, list, dict, type(None))


def settings(namespace):
    """The settings among a script's globals: a dict of the lower-case names that have plain values."""
    return {k: v for k, v in namespace.items() if k[0] != "_" and k == k.lower() and type(v) in KINDS}


# -----------------------------------------------------------------------------
# what a user may have meant

# Our names, each with what other trainers (nanoGPT, transformers, torchtitan) call the same setting.
NAMES = """
    lr               learning_rate
    lr_floor         min_lr
    warmup_samples   warmup warmup_iters warmup_steps
    decay_samples    decay lr_decay_iters decay_steps
    batch_size       batch bs
    micro_batch      gradient_accumulation_steps micro_batch_size
    grad_clip        max_norm clip
    out              out_dir output_dir
    data             dataset
    eval_every       eval_interval
    eval_windows     eval_iters
    checkpoint_every save_every save_interval
    block_size       seq_len context
    n_layer          layers
    n_head           heads
    n_embd           hidden_size
    temperature      temp
    max_new_tokens   max_tokens
"""
LENGTHS = "steps max_steps num_steps train_steps total_steps max_iters iters iterations".split()


def lengths(total):
    """The three flags of a pretraining run of `total` samples: 5 % warm-up, 30 % decay, as in configs/laptop.py."""
    return f"--total_samples={total} --warmup_samples={total // 20} --decay_samples={3 * total // 10}"


def our_name(key):
    """What we call the setting that others call `key`; None if nobody does."""
    for line in NAMES.strip().splitlines():
        ours, *others = line.split()
        if key in others:
            return ours
    return None


def suggestion(key, value, defaults, now):
    """
    What the user of an unknown setting may have meant, as the rest of a sentence.

    now: the settings with all that was understood so far; its batch size turns a number of steps into samples.
    """
    if "total_samples" in defaults:
        counted = "a run's length is counted in samples"
        if key in ("epochs", "num_epochs", "max_epochs"):
            return f"{counted}: total_samples = epochs * windows of the data, which `python data.py DATA` prints"
        if key in LENGTHS and type(value) is int:
            batch = now["batch_size"]
            return f"{counted}: {value} steps of batch_size={batch} are {lengths(value * batch)}"
        if key in LENGTHS:
            return f"{counted}: total_samples = steps * batch_size"
    near = [our_name(key)]
    if near[0] not in defaults:
        near = difflib.get_close_matches(key, defaults, 1, 0.78)
    if not near:
        # Those that share a whole word: `eval` is answered with eval_every, eval_windows.
        words = {word for word in key.split("_") if len(word) > 2}
        near = [name for name in defaults if words & set(name.split("_"))][:3]
    return f"did you mean {' or '.join(map(repr, near))}?" if near else "--help lists them"


# -----------------------------------------------------------------------------
# from the command line to the globals


def checked(key, value, default, where):
    """`value` as the kind of `default`: int becomes float, list becomes tuple. A default of None takes anything."""
    kind = type(default)
    if default is None or type(value) is kind:
        return value
    if (kind is float and type(value) is int) or {kind, type(value)} == {tuple, list}:
        return kind(value)
    hint = " (True or False)" if kind is bool else ""
    raise ValueError(f"{where}: {key} wants {kind.__name__}{hint} like {default!r}, got {value!r}")


def config_file(arg):
    """The path of the config file that an argument names, or None."""
    if arg.endswith(".py") and os.path.isfile(arg):
        return arg
    name = arg.removeprefix("configs/").removeprefix("config/").removesuffix(".py")
    path = os.path.join(ROOT, "configs", f"{name}.py")
    return path if os.path.isfile(path) else None


def read_config(file, before=None):
    """The settings that a config file makes. It is run. before: the settings so far."""
    try:
        return settings(runpy.run_path(file, dict(_before=before)))
    except SyntaxError as e:
        raise ValueError(f"{file}, line {e.lineno}: not Python: {e.msg}") from None


def literal(text):
    """The value that a text spells in Python, without running it. What spells none is itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def takes_next(flag, rest, defaults):
    """Whether the next argument, the first of `rest`, is the value of `flag`."""
    if "=" in flag or not rest or rest[0].startswith("--"):
        return False
    if flag in defaults:
        return type(defaults[flag]) is not bool
    return not config_file(rest[0])


def configure(namespace, argv=None):
    """
    Override a script's globals by config files and --key=value. Returns the settings (dict).

    argv: default sys.argv[1:]. A script that has a global `paths` gets every other argument there. ValueError, one
    line, for what cannot be used.
    """
    defaults = settings(namespace)
    asked = namespace["_asked"] = {}        # the names that the user has set, whatever their value, the latest last

    def override(key, value, where):
        if key not in defaults:
            hint = suggestion(key, value, defaults, settings(namespace))
            stop = "," if hint.startswith("did") else ";"
            raise ValueError(f"{where}: there is no setting {key!r}{stop} {hint}")
        namespace[key] = checked(key, value, defaults[key], where)
        asked.pop(key, None)
        asked[key] = True

    flags = []
    rest = list(sys.argv[1:] if argv is None else argv)
    while rest:
        arg = rest.pop(0)
        if arg in ("-h", "--help"):
            print_help(namespace, defaults)
            raise SystemExit(0)
        if arg.startswith("--"):
            if takes_next(arg[2:], rest, defaults):
                arg += "=" + rest.pop(0)
            flags.append(arg[2:].partition("="))  # at the first '=' only: --start=a=b sets start to 'a=b'
            continue
        # Where a script takes paths, a file that exists is one of them, unless it lies in configs/.
        is_path = "paths" in defaults and os.path.exists(arg) and not arg.startswith("config")
        file = None if is_path else config_file(arg)
        if file:
            for key, value in read_config(file, settings(namespace)).items():
                override(key, value, arg)
        elif "paths" in defaults:
            namespace["paths"] = [*namespace["paths"], arg]
        else:
            configs = sorted(f[:-3] for f in os.listdir(os.path.join(ROOT, "configs")) if f.endswith(".py"))
            raise ValueError(f"no config file {arg!r} here or in configs/ (there: {', '.join(configs)})")
    # Flags win over files wherever they stand. Unknown ones come last, so that their hints know all the others.
    flags.sort(key=lambda flag: flag[0] not in defaults)
    for key, equals, text in flags:
        value = text
        if type(defaults.get(key)) is not str:
            value = literal(text) if equals else True
        override(key, value, f"--{key}")
    return settings(namespace)


def print_help(namespace, defaults):
    """The script's docstring and one line for each setting: value and the comment behind it."""
    comments = {}
    with open(namespace["__file__"], encoding="utf-8") as f:
        for line in f:
            key, _, rest = line.partition(" = ")
            comments[key] = rest.partition("  # ")[2].strip()
    print(f"{(namespace.get('__doc__') or '').strip()}\n\nsettings:")
    for key, value in defaults.items():
        print(f"  --{key}={value!r}".ljust(38), comments.get(key, ""))


# -----------------------------------------------------------------------------
# run


def ours(traceback):
    """Whether a file of this project raised the error (it has a message for the user) or one below it (it is a bug)."""
    while traceback.tb_next:
        traceback = traceback.tb_next
    file = os.path.abspath(traceback.tb_frame.f_code.co_filename)
    return file.startswith(ROOT) and "site-packages" not in file


def run(main, namespace):
    """
    Configure a script and run it.

    A ValueError or OSError that our own code raises is for the user: one line on stderr, exit code 2. Any other error
    is a bug and keeps its traceback.
    """
    try:
        configure(namespace)
        main()
    except (ValueError, OSError) as error:
        if not ours(error.__traceback__):
            raise
        print(f"{os.path.basename(namespace['__file__'])}: {error}", file=sys.stderr)
        raise SystemExit(2)
    except KeyboardInterrupt:
        raise SystemExit(130)
