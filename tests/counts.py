"""
Is the code on the screen the code that runs, and do imports have one direction? Counts, by the syntax trees of the
product, constructs that hide the flow of a program.

    patched      an attribute of a module is set from another module (train.lr_at = ..., setattr(train, ...))
    class swap   x.__class__ = ...
    by string    a module is imported by a name in a string
    global       `global x`, or globals() other than as the settings of a script
    foreign      an attribute of an object is set outside of its class, by a function that did not make the object
    text data    a table hidden in a text: json.loads("..."), "a b c".split() of more than four words
    long         a function of more than 60 lines without its docstring
    branchy      a function with more than 12 branches

Of imports, those inside functions counted, but not those of a file's own command under `__main__`:

    circles      pairs of files that import each other, directly or by others
    both ways    pairs of rooms that import each other: a folder is a room, and so is a file of the root; any file may
                 import engine/files.py
    scripts      files that import a script
    method       imports of the files of the method that are not of the method: one can copy these files elsewhere
    lazy         imports of project files inside functions of train.py

    $ python tests/counts.py      # each place
"""

import ast
import collections
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension, ast.BoolOp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SETTINGS = ("run(", "run_script(", "settings(globals()")  # how a script hands over its settings


def product_files():
    """The Python files outside of tests/ and configs/, tracked or new; without git, all that are there."""
    command = ["git", "ls-files", "-co", "--exclude-standard", "*.py"]
    names = subprocess.run(command, text=True, cwd=ROOT, capture_output=True).stdout.split()
    names = names or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")]
    elsewhere = ("tests/", "configs/", "out/", "data/", "lessons/", ".")
    return [name for name in names if not name.startswith(elsewhere) and (ROOT / name).exists()]


def imported_modules(tree, modules):
    """The names under which a file knows modules of the project."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name for alias in node.names if alias.name in modules}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names if f"{node.module}.{alias.name}" in modules}
    return names


def own_nodes(function):
    """The nodes of a function without those of functions inside it."""
    todo = list(ast.iter_child_nodes(function))
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.Lambda)):
            todo += ast.iter_child_nodes(node)


def count_lines(function):
    """The lines of a function's body without its docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def assigned_attributes(node):
    """The attributes that a statement sets."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    while targets:
        target = targets.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            targets = targets + target.elts
        elif isinstance(target, ast.Attribute):
            yield target


def judge_assignments(function, modules):
    """(kind, node) of the attributes that a function sets on objects of others."""
    nodes = list(own_nodes(function))
    makes = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)} | {"self", "cls", "ctx"}
    for node in nodes:
        if isinstance(node, ast.Global):
            yield "global", node
        for target in assigned_attributes(node):
            if target.attr == "__class__":
                yield "class swap", target
            elif isinstance(target.value, ast.Name) and target.value.id in modules:
                yield "patched", target
            elif isinstance(target.value, ast.Name) and target.value.id not in makes:
                yield "foreign", target


def judge_call(node, modules, line):
    """The kind of a call that hides something, or None. line: of the source."""
    name, first = ast.unparse(node.func), node.args[0] if node.args else None
    if name == "setattr" and isinstance(first, ast.Name) and first.id in modules:
        return "patched"
    if name.split(".")[-1] in ("import_module", "__import__"):
        return "by string"
    if name == "globals" and not any(text in line for text in SETTINGS):
        return "global"
    if name == "json.loads" and isinstance(first, ast.Constant):
        return "text data"
    text = node.func.value if isinstance(node.func, ast.Attribute) and node.func.attr == "split" else None
    if isinstance(text, ast.Constant) and isinstance(text.value, str) and len(text.value.split()) > 4:
        return "text data"


def hidden_places():
    """[(kind, "file:line", statement)] of the product."""
    files = product_files()
    modules = {name.removesuffix(".py").replace("/", ".") for name in files}
    places = []
    for file in files:
        source = (ROOT / file).read_text()
        tree, lines = ast.parse(source), source.splitlines()
        names = imported_modules(tree, modules)
        for node in ast.walk(tree):
            kinds = []
            if isinstance(node, ast.Call):
                kinds = [(judge_call(node, names, lines[node.lineno - 1]), node)]
            elif isinstance(node, FUNCTIONS):
                kinds = list(judge_assignments(node, names))
                kinds += [("long", node)] * (count_lines(node) > 60)
                kinds += [("branchy", node)] * (sum(isinstance(n, BRANCHES) for n in own_nodes(node)) > 12)
            places += [(kind, f"{file}:{at.lineno}", lines[at.lineno - 1].strip()) for kind, at in kinds if kind]
    return places


def count_hidden():
    """{kind: how many places}."""
    kinds = ["patched", "class swap", "by string", "global", "foreign", "text data", "long", "branchy"]
    counts = collections.Counter(kind for kind, *_ in hidden_places())
    return {kind: counts[kind] for kind in kinds}


# ----------------------------------------------------------------------------------------------------------------------
# imports

METHOD = {"plain.py", "model.py", "attention.py", "loss.py", "goldfish.py", "ademamix.py", "schedule.py"}
SCRIPTS = {"train.py", "posttrain/sft.py", "posttrain/qrpo.py", "prepare.py", "sample.py", "loop.py"}
FLOOR = "engine/files.py"


def read_imports():
    """{file: {file that it imports: whether at the top}}."""
    files = product_files()
    modules = {file.removesuffix(".py").replace("/", "."): file for file in files}
    graph = {file: {} for file in files}
    for file in files:
        body = ast.parse((ROOT / file).read_text()).body
        nodes = [node for node in body if not (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test))]
        for top in nodes:
            for node in ast.walk(top):
                names = []
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
                for used in {modules[name] for name in names if name in modules} - {file}:
                    graph[file][used] = graph[file].get(used, False) or node is top
    return graph


def reachable(graph, file):
    """All files that a file imports, directly or by others."""
    reached, todo = set(), [file]
    while todo:
        new = graph[todo.pop()].keys() - reached
        reached |= new
        todo += new
    return reached


def import_places():
    """{kind: [places]}, as the docstring above says."""
    graph = read_imports()
    reached = {file: reachable(graph, file) for file in graph}
    arrows = [(file, used) for file in graph for used in graph[file]]
    rooms = {(a.split("/")[0], b.split("/")[0]) for a, b in arrows if b != FLOOR}
    return {
        "circles": [f"{a} {b}" for a in graph for b in reached[a] if a < b and a in reached[b]],
        "both ways": [f"{a} {b}" for a, b in rooms if a < b and (b, a) in rooms],
        "scripts": [f"{a} {b}" for a, b in arrows if b in SCRIPTS],
        "method": [f"{a} {b}" for a, b in arrows if a in METHOD and b not in METHOD],
        "lazy": [used for used, is_at_the_top in graph["train.py"].items() if not is_at_the_top],
    }


if __name__ == "__main__":
    for place in sorted(hidden_places()):
        print("{:10} {:32} {}".format(*place))
    print(count_hidden())
    for kind, places in import_places().items():
        print(f"{kind:10} {len(places)} {places}")
