"""
Configuration without a framework: the plain globals at the top of a script are its settings.

    python train.py configs/8b.py configs/long/8k.py --lr=3e-4 --compile

    1. `name = value  # meaning` at the top of the script: the default, its type, and its line in --help
    2. every config file on the command line overrides them, later files win; configs/8b.py and 8b are the same file. A
       file may read the settings so far from the dict `_before` (configs/long)
    3. --key=value (or --key value) overrides the files; --flag alone means True

A name that does not exist is an error with a suggestion, in a file as on the command line (nanoGPT accepts a typo in a
file), and so is a value of another type. Values on the command line are literals, never code. A config file is Python,
which is executed: name only files that you would run.
"""

import ast
import importlib
import os
import re
import runpy
import sys
import traceback

ROOT = os.path.dirname(os.path.abspath(__file__))
# The types of settings, in the words of an error message.
TYPES = {
    bool: "True or False", int: "a whole number", float: "a number", str: "a text", tuple: "a list", list: "a list",
    dict: "a dict", type(None): "anything"
}


def settings(*spaces):
    """The settings among the globals of scripts or the attributes of objects: lower-case names with plain values."""
    return {key: value for space in spaces for key, value in names(space).items()
            if key[0] != "_" and key.islower() and type(value) in TYPES}


def names(space):
    """The globals of a script, a dict already, or the attributes of an object as a dict."""
    return space if isinstance(space, dict) else vars(space)


def checked(key, value, default, where=""):
    """
    `value` in the type of `default`: int becomes float, list becomes tuple. A default of None takes anything.

    where: the file that sets it; "" = the command line. ValueError: a value of another type.
    """
    kind = type(default)
    if default is None or type(value) is kind:
        return value
    if (kind is float and type(value) is int) or {kind, type(value)} == {tuple, list}:
        return kind(value)
    name = f"{where}: {key}" if where else f"--{key}"
    raise ValueError(f"{name}={value}: want {TYPES[kind]}, such as {default}")


def config_file(arg):
    """The path of the config file that an argument names, or None."""
    name = arg.removeprefix("configs/").removesuffix(".py")
    for path in (arg, f"{ROOT}/configs/{name}.py"):
        if path.endswith(".py") and os.path.isfile(path):
            return path


def read_config(file, before=()):
    """The settings of a config file, which is executed. before: the settings so far."""
    found = runpy.run_path(file, dict(_before=before))
    return settings(found) | {key: found[key] for key in found.keys() & {*before}}


def literal(text):
    """The value of a text that is a Python literal, without running code; else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return text


def configure(namespace, argv=None, *more):
    """
    Override the settings of a script by config files and --key=value. Returns all settings (dict).

    namespace: the script's globals. argv: default sys.argv[1:]. more: other globals or objects whose settings are set
    by the same files and flags. A script that has a global `paths` gets every other argument there. `_asked` in its
    globals has the names that the user has set, the latest last. ValueError, one line, for an argument that cannot
    be used; if a setting does not exist, its name is the error's attribute `unknown`.
    """
    spaces = [names(space) for space in (namespace, *more)]
    defaults = settings(*spaces)
    asked = {}

    def override(key, value, where=""):
        if key not in defaults:
            hint = attached("engine.help").suggestion(key, defaults)
            error = ValueError(f"{where or '--' + key}: there is no setting {key!r}{hint}")
            error.unknown = key
            raise error
        for space in spaces:
            if key in space:
                space[key] = checked(key, value, defaults[key], where)
        asked.pop(key, None)
        asked[key] = True

    flags = []
    rest = list(sys.argv[1:] if argv is None else argv)
    while rest:
        arg = rest.pop(0)
        if arg.startswith("--"):
            key, equals, text = arg[2:].partition("=")  # at the first '=' only: --start=a=b sets start to 'a=b'
            kind = type(defaults.get(key))
            if not equals:
                follows = rest and not rest[0].startswith("--") and kind is not bool
                text = rest.pop(0) if follows else True
            flags.append((key, text if kind is str else literal(text)))
        elif "paths" in defaults and not re.match(r"config.*\.py$", arg):
            namespace["paths"] = [*namespace["paths"], arg]
        elif file := config_file(arg):
            for key, value in read_config(file, settings(*spaces)).items():
                override(key, value, arg)
        else:
            raise ValueError(f"no config file {arg!r} here or in configs/")
    # Flags win over files wherever they stand.
    for key, value in flags:
        override(key, value)
    for space in spaces:
        space["_asked"] = asked
    return settings(*spaces)


# -----------------------------------------------------------------------------
# run


def attached(name):
    """
    The module of this name. Scripts of the root import from other folders than engine/ by this function alone, except
    prepare.py, which imports corpus/ directly.
    """
    return importlib.import_module(name)


def ours(error):
    """
    Whether a file of this project raised the error, or it names a file: it has a message for the user. An error inside
    of a library is a bug.
    """
    file = os.path.abspath(traceback.extract_tb(error.__traceback__)[-1].filename)
    return file.startswith(ROOT) and "site-packages" not in file or getattr(error, "filename", None)


def run(main, *namespaces, beyond=""):
    """
    Configure a script and run it.

    namespaces: the globals of the script, and of other scripts, or objects, whose settings it has too; the last globals
    are the script's own. beyond: a module whose take_over() replaces main() if the command line has a setting that
    only this module has. A ValueError or OSError that our own code raises, or a missing package, is for the user: one
    line on stderr, exit code 2. Any other error is a bug and keeps its traceback.
    """
    script = [space for space in namespaces if isinstance(space, dict)][-1]
    try:
        if {"-h", "--help"} & {*sys.argv}:
            more = (vars(attached(beyond)),) if beyond else ()
            return attached("engine.help").print_help(script, namespaces + more, settings)
        try:
            configure(namespaces[0], None, *namespaces[1:])
        except ValueError as error:
            unknown = beyond and getattr(error, "unknown", "")
            if not unknown or unknown not in settings(vars(attached(beyond))):
                raise
            main = attached(beyond).take_over
        main()
    except BrokenPipeError:
        # The reader of stdout has left, as in `--help | head`. Python would report it again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if not ours(error):
            raise
        install = attached("engine.help").how_to_install(error)
        print(f"{os.path.basename(script['__file__'])}: {error}{install}", file=sys.stderr)
        raise SystemExit(2)
    except KeyboardInterrupt:
        raise SystemExit(130)
