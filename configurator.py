"""
Configuration without a framework: the plain globals at the top of a script are its settings.

    python train.py configs/8b.py configs/ablations/swiglu.py --lr=3e-4 --compile

    1. `name = value  # what it is` at the top of the script: the default, its kind, and its line in --help
    2. every config file on the command line overrides them, later files win; configs/8b.py, config/8b.py and 8b are the same file
    3. --key=value (or --key value) overrides the files; --flag alone means True

A name that does not exist is an error with a suggestion, in a file as on the command line (nanoGPT accepts a typo in a file), and
so is a value of the wrong kind. Command-line values are literals, never code. A config file is Python and is run: name only files
that you would run.
"""

import ast, difflib, os, runpy, sys

ROOT = os.path.dirname(os.path.abspath(__file__))
KINDS = (bool, int, float, str, tuple, list, dict, type(None))


def settings(namespace):
    """The settings among a script's globals: lower-case names of plain values. Returns a dict; it goes into config.json."""
    return {k: v for k, v in namespace.items() if k[0] != "_" and k == k.lower() and type(v) in KINDS}


# What other trainers (nanoGPT, transformers, torchtitan) call a setting, and what it is here.
ALIASES = dict(learning_rate="lr", min_lr="lr_floor", warmup="warmup_samples", decay="decay_samples", warmup_iters="warmup_samples",
               warmup_steps="warmup_samples", lr_decay_iters="decay_samples", decay_steps="decay_samples", batch="batch_size",
               bs="batch_size", gradient_accumulation_steps="micro_batch", micro_batch_size="micro_batch", max_norm="grad_clip",
               clip="grad_clip", out_dir="out", output_dir="out", dataset="data", eval_interval="eval_every", eval_iters="eval_windows",
               save_every="checkpoint_every", save_interval="checkpoint_every", seq_len="block_size", context="block_size",
               layers="n_layer", heads="n_head", hidden_size="n_embd", temp="temperature", max_tokens="max_new_tokens")
LENGTHS = ("steps", "max_steps", "num_steps", "train_steps", "total_steps", "max_iters", "iters", "iterations")


def lengths(total):
    """The three flags of a pretraining run of so many samples: 5 % warm-up, and the last 30 % decay, as in configs/laptop.py."""
    return f"--total_samples={total} --warmup_samples={total // 20} --decay_samples={3 * total // 10}"


def suggestion(key, value, defaults, now):
    """What the user of an unknown setting may have meant: the rest of a sentence. now: the settings with all that was understood."""
    if key in LENGTHS and "total_samples" in defaults and "batch_size" in defaults:
        if type(value) is not int:
            return "a run's length is counted in samples: total_samples = steps * batch_size"
        return (f"a run's length is counted in samples: {value} steps of batch_size={now['batch_size']} are "
                f"{lengths(value * now['batch_size'])}")
    if key in ("epochs", "num_epochs", "max_epochs") and "total_samples" in defaults and "epochs" not in defaults:
        return "a run's length is counted in samples: total_samples = epochs * windows of the data, which `python data.py DATA` prints"
    known = ALIASES.get(key)
    near = [known] if known in defaults else difflib.get_close_matches(key, defaults, 1, 0.78)
    words = {word for word in key.split("_") if len(word) > 2}
    near = near or [name for name in defaults if words & set(name.split("_"))][:3]         # eval: eval_every, eval_windows
    return f"did you mean {' or '.join(map(repr, near))}?" if near else "--help lists them"


def checked(key, value, default, where):
    """`value` as the kind of `default`: int becomes float, list becomes tuple, a default of None takes anything."""
    if default is None or type(value) is type(default):
        return value
    if type(default) is float and type(value) is int:
        return float(value)
    if type(default) in (tuple, list) and type(value) in (tuple, list):
        return type(default)(value)
    hint = " (True or False)" if type(default) is bool else ""
    raise ValueError(f"{where}: {key} wants {type(default).__name__}{hint} like {default!r}, got {value!r}")


def config_file(arg):
    """The path of the config file that an argument names, or None."""
    name = arg.removeprefix("configs/").removeprefix("config/").removesuffix(".py")
    candidates = [arg] if arg.endswith(".py") else []
    return next((p for p in candidates + [os.path.join(ROOT, "configs", name + ".py")] if os.path.isfile(p)), None)


def configure(namespace, argv=None):
    """
    Override a script's globals by config files and --key=value. argv: default sys.argv[1:]. Returns the settings (dict).

    A script that has a global `paths` takes every other argument there. Raises ValueError, one line, for what it cannot use.
    """
    defaults = settings(namespace)

    def override(key, value, where):
        if key not in defaults:
            hint = suggestion(key, value, defaults, settings(namespace))
            raise ValueError(f"{where}: there is no setting {key!r}{',' if hint.startswith('did') else ';'} {hint}")
        namespace[key] = checked(key, value, defaults[key], where)

    flags, rest = [], list(sys.argv[1:] if argv is None else argv)
    while rest:
        arg = rest.pop(0)
        if arg in ("-h", "--help"):
            print_help(namespace, defaults)
            raise SystemExit(0)
        if arg.startswith("--"):
            takes_value = type(defaults[arg[2:]]) is not bool if arg[2:] in defaults else bool(rest) and not config_file(rest[0])
            if "=" not in arg and takes_value and rest and not rest[0].startswith("--"):
                arg += "=" + rest.pop(0)                    # --key value
            flags.append(arg)
            continue
        file = config_file(arg) if "paths" not in defaults or not os.path.exists(arg) or arg.startswith("config") else None
        if file:
            try:
                found = runpy.run_path(file)
            except SyntaxError as e:
                raise ValueError(f"{file}, line {e.lineno}: not Python: {e.msg}") from None
            for key, value in settings(found).items():
                override(key, value, arg)
        elif "paths" in defaults:
            namespace["paths"] = [*namespace["paths"], arg]
        else:
            have = ", ".join(sorted(f[:-3] for f in os.listdir(os.path.join(ROOT, "configs")) if f.endswith(".py")))
            raise ValueError(f"no config file {arg!r} here or in configs/ (there: {have})")
    flags.sort(key=lambda arg: arg[2:].partition("=")[0] not in defaults)      # what is unknown last: its hint knows all the rest
    for arg in flags:                                       # after the files, wherever they stood
        key, equals, text = arg[2:].partition("=")          # only the first '=': --start=a=b sets start to 'a=b'
        if type(defaults.get(key)) is str:
            value = text
        else:
            try:
                value = ast.literal_eval(text) if equals else True
            except (ValueError, SyntaxError):
                value = text
        override(key, value, f"--{key}")
    return settings(namespace)


def print_help(namespace, defaults):
    """The script's docstring and one line for each setting: value and the comment behind it."""
    with open(namespace["__file__"], encoding="utf-8") as f:
        comments = {line.split(" = ")[0]: line.partition("  # ")[2].strip() for line in f if " = " in line and line[0] != " "}
    print((namespace.get("__doc__") or "").strip() + "\n\nsettings:")
    for key, value in defaults.items():
        print(f"  --{key}={value!r}".ljust(38), comments.get(key, ""))


def ours(traceback):
    """Was the error raised by a file of this project (a message for its user) or below it (a bug: keep the traceback)?"""
    while traceback.tb_next:
        traceback = traceback.tb_next
    file = os.path.abspath(traceback.tb_frame.f_code.co_filename)
    return file.startswith(ROOT) and "site-packages" not in file


def run(main, namespace):
    """Configure a script and run it. A ValueError or OSError that our own code raises: one line on stderr, exit code 2."""
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
