"""
What can go wrong with a line: one small mistake at a time, planted in the text of a file.

    a < b     ->  a <= b          not x     ->  x               min(a, b)     ->  max(a, b)
    a + b     ->  a - b           -x        ->  x               f(a, b)       ->  f(b, a)
    a and b   ->  a or b          3         ->  4               f(a, key=b)   ->  f(a)
    a is b    ->  a is not b      True      ->  False           if a: x       ->  if not (a): x       (with an else)
    x += 1    ->  x -= 1          0.1       ->  0.2             f(x)          ->  pass                (a statement)

The syntax tree says where; the edit is made in the text, so that every other line stays as it is, with its number. What no test
claims is left alone: messages, progress bars, pictures, type hints, the defaults of a script's settings, and what a module prints
when it is run by hand.
"""

import ast
import functools
import hashlib
import os
import re
from dataclasses import dataclass

SEED = 28
CORE = {"model", "generate", "goldfish", "ademamix", "schedule", "data", "train", "checkpoint", "files", "runs", "parallel", "sft", "qrpo",
        "common", "losses", "references", "evaluate"}
LINES_A_MUTANT = {True: 20, False: 60}         # of the core, of the rest: one generated mutant for so many lines


def stem(file):
    return os.path.basename(file).removesuffix(".py")


@dataclass
class Mutant:
    file: str
    lines: range        # of the file, from 1
    old: str            # these lines, their white space joined, without comments: what names a mutant when the file around it changes
    new: str
    source: bytes       # the whole file with the mistake


SWAPS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is", "in": "not in",
         "not in": "in", "and": "or", "or": "and", "+": "-", "-": "+", "*": "/", "/": "*", "//": "/", "%": "*", "**": "*",
         "<<": ">>", ">>": "<<", "&": "|", "|": "&", "^": "&"}
OPERATOR = re.compile(rb"not\s+in|is\s+not|\b(?:is|in|and|or)\b|[-+*/%<>=!&|^@]+")
QUIET = {"print", "tqdm", "bar", "warn", "sleep", "plt", "ax", "axes", "fig", "figure", "isinstance", "getattr", "hasattr", "setattr"}
SYMMETRIC = {b"min", b"max", b"transpose"}     # their arguments may be swapped
PICTURE = {"plt", "ax", "axes", "fig", "matplotlib"}
UNCLAIMED_KEYWORDS = {"device", "desc", "unit", "disable", "file", "flush", "encoding", "help", "label", "color", "non_blocking", "daemon"}


def root_name(node):
    """`a` of a.b[c].d(...), else None."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def nobody_claims(node, depth):
    """Texts, pictures, type hints, the settings' defaults and what a module prints when it is run by hand."""
    if isinstance(node, (ast.Raise, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return True
    if isinstance(node, ast.Expr):
        return nobody_claims(node.value, depth + 1)
    if isinstance(node, ast.Call):
        return root_name(node.func) in QUIET or isinstance(node.func, ast.Attribute) and node.func.attr in QUIET
    if isinstance(node, (ast.FunctionDef, ast.With)):
        return any(isinstance(n, ast.Name) and n.id in PICTURE for n in ast.walk(node))
    if depth == 1 and isinstance(node, ast.If):
        return "__main__" in ast.unparse(node.test)
    if depth == 1 and isinstance(node, ast.Assign):
        setting = isinstance(node.targets[0], ast.Name) and node.targets[0].id.islower()
        return setting and isinstance(node.value, (ast.Constant, ast.UnaryOp))
    return False


def claimed(node, depth=0):
    """The nodes below `node` whose mistakes a test should notice."""
    if nobody_claims(node, depth):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from claimed(child, depth + 1)


def edits(tree, source):
    """Every (start, end, new text): replace these bytes of the source and one thing is wrong."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node):
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset

    def text(node):
        return source[slice(*span(node))]

    def other_operator(left, right):
        start, end = span(left)[1], span(right)[0]
        found = OPERATOR.search(source, start, end)
        word = b" ".join(found[0].split()).decode() if found else ""
        if word in SWAPS:
            yield *found.span(), SWAPS[word].encode()
        elif word[:-1] in SWAPS:               # += and the like
            yield *found.span(), SWAPS[word[:-1]].encode() + b"="

    def of(node):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from other_operator(node.left, node.comparators[0])
        if isinstance(node, ast.BoolOp):
            yield from other_operator(*node.values[:2])
        if isinstance(node, ast.BinOp):
            texts = (ast.JoinedStr, ast.Constant)
            if not any(isinstance(x, texts) and not isinstance(getattr(x, "value", 0), (int, float)) for x in (node.left, node.right)):
                yield from other_operator(node.left, node.right)
        if isinstance(node, ast.AugAssign):
            yield from other_operator(node.target, node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            yield *span(node), text(node.operand)
        if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
            yield *span(node), other_constant(node.value)
        if isinstance(node, ast.Call):
            yield from other_call(node)
        if isinstance(node, (ast.If, ast.IfExp, ast.While)) and not isinstance(node.test, ast.Constant):
            if isinstance(node, ast.IfExp) or node.orelse:
                yield *span(node.test), b"not (" + text(node.test) + b")"
        if isinstance(node, (ast.AugAssign, ast.Continue, ast.Break)) or isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield *span(node), b"pass"
        if isinstance(node, ast.Assign) and not all(isinstance(target, (ast.Name, ast.Tuple)) for target in node.targets):
            yield *span(node), b"pass"

    def other_call(node):
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            yield *span(node.func), b"max" if node.func.id == "min" else b"min"
        first, second = (node.args + [None, None])[:2]
        if second is not None and text(node.func).split(b".")[-1] not in SYMMETRIC and not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
            between = source[span(first)[1]:span(second)[0]]
            yield span(first)[0], span(second)[1], text(second) + between + text(first)
        for keyword in node.keywords:
            if keyword.arg not in UNCLAIMED_KEYWORDS | {None}:
                start, end = span(keyword)
                before = re.search(rb",\s*$", source[:start])
                after = re.match(rb"\s*,\s*", source[end:])
                yield (before.start(), end, b"") if before else (start, end + (after.end() if after else 0), b"")

    for node in claimed(tree):
        if hasattr(node, "lineno"):
            for start, end, new in of(node):
                yield start, end, new


def other_constant(value):
    if isinstance(value, bool):
        return str(not value).encode()
    if isinstance(value, int):
        return str({0: 1, 1: 0}.get(value, value + 1)).encode()
    return repr(value * 2 or 1.0).encode()


def planted(file, source, start, end, new):
    """The Mutant with these bytes of the source replaced."""
    first = source.rfind(b"\n", 0, start) + 1
    last = source.find(b"\n", end) % (len(source) + 1)
    lines = range(source.count(b"\n", 0, start) + 1, source.count(b"\n", 0, end) + 2)
    changed = source[first:start] + new + source[end:last]
    old, new_line = (" ".join(re.sub(r"\s\s+#.*", "", x.decode()).split()) for x in (source[first:last], changed))
    return Mutant(file, lines, old, new_line, source[:start] + new + source[end:])


@functools.lru_cache(maxsize=1)
def dumped(source):
    return ast.dump(ast.parse(source))


def is_mistake(source, mutated):
    """Whether it is Python, and another program than before."""
    try:
        compile(mutated, "mutant", "exec")
        return ast.dump(ast.parse(mutated)) != dumped(source)
    except SyntaxError:
        return False


def generated(file, source, rate=1.0):
    """
    So many mutants of a file: all edits in the order of a hash of what they say, at most one a line. A pure function of the text,
    and a line that moves or a neighbour that changes alters nothing about the others.
    """
    wanted = round(rate * source.count(b"\n") / LINES_A_MUTANT[stem(file) in CORE])
    found = [planted(file, source, start, end, new) for start, end, new in edits(ast.parse(source), source)]
    found.sort(key=lambda m: hashlib.sha256(f"{SEED} {m.old} {m.new}".encode()).digest())
    chosen, taken = [], set()
    for m in found:
        if len(chosen) < wanted and not taken & set(m.lines) and is_mistake(source, m.source):
            chosen.append(m)
            taken |= set(m.lines)
    return chosen


def by_hand(file, source, mistakes):
    """The Mutants of (file, old, new, what a tired person got wrong), and the stale ones: `old` must stand there exactly once."""
    found, stale = [], []
    for name, old, new, _ in mistakes:
        if name == file:
            start = source.find(old.encode())
            if source.count(old.encode()) == 1:
                found.append(planted(file, source, start, start + len(old.encode()), new.encode()))
            else:
                stale.append((file, old))
    return found, stale
