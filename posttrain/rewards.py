"""
--rewards of posttrain/qrpo.py and evaluate.py: a function of the user, or a judge with a charter.

    FILE.py[:name]           reward(prompt, completion) -> a number. prompt: the text of the last user message; a third
                             argument gets the whole row of the data, which may hold a gold answer; **columns get its
                             columns by name.
                             Or rewards(row, completions) -> a list, which sees all completions of a prompt; it is
                             recognised by its second argument, `completions`.
                             Or TRL's reward(prompts, completions, **columns) -> a list: as_trl().
    charter:MODEL[,FILE]     posttrain/judge.py: the ranks that MODEL gives by the principles in FILE

load_reward() makes one function of either: score(row, completions) -> a number for each completion of one prompt.
"""

import ast
import glob
import inspect
import math
import os
import runpy
import sys

from chat import as_prompt, content_of
from configurator import ROOT
from engine.files import in_one_line, read_text
from posttrain.judge import Charter, charter_hash, hash_of, parse_spec


def load_reward(spec, device):
    """--rewards -> score(row, completions), as above. device: of a judge. ValueError: no such file or function."""
    path, _, name = spec.partition(":")
    if path == "charter":
        return Charter(*parse_spec(name), device)
    function = load_function(path, name, spec)
    signature = inspect.signature(function)
    if is_trls(signature.parameters):
        return as_trl(function)
    if "completions" in signature.parameters:
        if [*signature.parameters].index("completions") != 1:
            raise ValueError(f"--rewards={spec}: {signature}: want (row, completions), or TRL's (prompts, completions, "
                             "**columns)")
        return function
    try:
        signature.bind("prompt", "completion", "row")
        takes_row = True
    except TypeError:
        takes_row = False

    def score_one_by_one(row, completions):
        prompt = content_of(row["messages"][-1])
        last = [row] if takes_row else []
        columns = columns_of(row) if takes_columns(signature.parameters) else {}
        return [function(prompt, completion, *last, **columns) for completion in completions]
    return score_one_by_one


def is_trls(parameters):
    """Whether a function has the arguments of a reward of TRL: `completions`, and `prompts` or columns by name."""
    others = "prompts" in parameters or takes_columns(parameters)
    return "completions" in parameters and others and "row" not in parameters


def takes_columns(parameters):
    """Whether a function takes any argument by name: **kwargs."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def columns_of(row):
    """The columns of a row but for the prompt and the completions, which have arguments of their own."""
    own = {"prompt", "prompts", "messages", "completion", "completions"}
    return {key: value for key, value in row.items() if key not in own}


def as_trl(function):
    """
    score(row, completions) of a reward of TRL, which gets lists of one entry per completion, by name: prompts and
    completions, and each other column of the data. They are texts if the row's prompt is one, else lists of messages.
    Source: TRL's documentation, GRPO Trainer, "Using a custom reward function". completion_ids, trainer_state and what
    else only a trainer has are not given: a function that reads them raises an error.
    """
    def score(row, completions):
        columns = {key: [value] * len(completions) for key, value in columns_of(row).items()}
        prompt = row["messages"]
        if prompt == as_prompt(dict(prompt=row.get("prompt")))["messages"]:
            prompt = row["prompt"]
        if not isinstance(prompt, str):
            completions = [[dict(role="assistant", content=text)] for text in completions]
        return function(prompts=[prompt] * len(completions), completions=completions, **columns)
    return score


def load_function(path, name, spec):
    """The function `name` of a user's file; without a name reward or rewards, whichever it has."""
    advice = "want FILE.py with reward(prompt, completion), or charter:MODEL,FILE"
    try:
        add_folder(path)
        script = runpy.run_path(path)
    except Exception as error:      # anything may come from the user's code
        raise ValueError(f"--rewards={spec}: {path} cannot be read ({describe(error)}); {advice}") from None
    names = [name] if name else ["reward", "rewards"]
    functions = [script[name] for name in names if callable(script.get(name))]
    if len(functions) != 1:
        raise ValueError(f"--rewards={spec}: {path} has {len(functions)} functions named {' or '.join(names)}: want "
                         "one, reward(prompt, completion) or rewards(row, completions); FILE.py:NAME picks it")
    return functions[0]


def add_folder(path):
    """
    Let a script import the modules next to it. ValueError if one of them has the name of a module of this project,
    which would be imported instead.
    """
    folder = os.path.dirname(os.path.abspath(path))
    if folder == ROOT:
        return
    for file in with_imports(path)[1:]:
        name = os.path.relpath(file, folder).split(os.sep)[0]
        if os.path.exists(f"{ROOT}/{name}"):
            raise ValueError(f"it would import {name} of this project in place of the one next to it: rename yours")
    # At the end, so that no module next to the script takes the place of another.
    sys.path.append(folder)


def score_texts(score, row, texts, where, advice=""):
    """
    The rewards of completions (str) of the prompt of a row. where, advice: beginning and end of the ValueError if the
    function raises, or does not return one finite number for each.
    """
    try:
        values = [float(value) for value in score(row, texts)]
    except Exception as error:      # anything may come from the user's code
        raise ValueError(f"{where} failed ({describe(error)}){advice}") from None
    if len(values) != len(texts) or not all(map(math.isfinite, values)):
        raise ValueError(f"{where} rewards={str(values)[:60]}: want {len(texts)} finite numbers")
    return values


def describe(error):
    """An error of any class in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


# -----------------------------------------------------------------------------
# what identifies a reward


def reward_hash(spec):
    """
    A hash that identifies the rewards of --rewards, wherever its files are; "" for none.

    For a function: of its name, its file and the modules next to it that this one imports, but not of data that they
    read. For a judge: charter_hash().
    """
    if not spec:
        return ""
    path, _, name = spec.partition(":")
    if path == "charter":
        return charter_hash(name)
    return hash_of(with_imports(path), name or "reward")


def with_imports(path):
    """
    A script and the modules of its own folder that it imports, and that these import: a list of paths.

    Of an imported package, all its files. ValueError, one line: one of them is not Python.
    """
    files = [path]
    for file in files:                                     # it grows
        for name in imported_names(file):
            module = os.path.join(os.path.dirname(path), name.partition(".")[0])
            candidates = [f"{module}.py", *sorted(glob.glob(f"{glob.escape(module)}/**/*.py", recursive=True))]
            files += [each for each in candidates if os.path.isfile(each) and each not in files]
    return files


def imported_names(file):
    """The modules that a file of Python imports, also inside of functions. ValueError, one line: it is not Python."""
    with in_one_line(file):
        tree = ast.parse(read_text(file))
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return names
