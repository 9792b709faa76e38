"""
What can go wrong with a line: one small mistake at a time, planted in the text of a file.

    a < b     ->  a <= b          not x     ->  x               min(a, b)     ->  max(a, b)
    a + b     ->  a - b           -x        ->  x               f(a, b)       ->  f(b, a)
    a and b   ->  a or b          3         ->  4               f(a, key=b)   ->  f(a)
    a is b    ->  a is not b      True      ->  False           if a: x       ->  if not (a): x       (with an else)
    x += 1    ->  x -= 1          0.1       ->  0.2             f(x)          ->  pass                (a statement)

The syntax tree says where; the edit is made in the text, so that every other line stays as it is, with its number. What
no test claims is left alone: messages, progress bars, pictures, type hints, the defaults of a script's settings, and
what a module prints when it is run by hand.
"""

import ast
import functools
import hashlib
import os
import re
from dataclasses import dataclass


def words(text):
    return set(text.split())


SEED = 28
CORE = words(
    """
    model generate goldfish ademamix schedule data train checkpoint files runs parallel sft qrpo common losses
    references evaluate
    """
)
# One generated mutant for so many lines: of the core (True), of the rest (False).
LINES_A_MUTANT = {True: 20, False: 60}


def stem(file):
    return os.path.basename(file).removesuffix(".py")


@dataclass
class Mutant:
    """
    One mistake in one file.

    `old` is the text of the lines that it changes, their white space joined, without comments: it names a mutant when
    the file around it changes. `new` is the same text with the mistake.
    """

    file: str
    lines: range  # of the file, from 1
    old: str
    new: str
    source: bytes  # the whole file with the mistake


SWAPS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
    "and": "or",
    "or": "and",
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "//": "/",
    "%": "*",
    "**": "*",
    "<<": ">>",
    ">>": "<<",
    "&": "|",
    "|": "&",
    "^": "&",
}
OPERATOR = re.compile(rb"not\s+in|is\s+not|\b(?:is|in|and|or)\b|[-+*/%<>=!&|^@]+")


# Calls that say or show something, or that ask for a kind.
QUIET = words("print tqdm bar warn sleep plt ax axes fig figure isinstance getattr hasattr setattr")
PICTURE = words("plt ax axes fig matplotlib")
UNCLAIMED_KEYWORDS = words("device desc unit disable file flush encoding help label color non_blocking daemon")
NUMBERS = (bool, int, float)
# The arguments of these may be swapped.
SYMMETRIC = {b"min", b"max", b"transpose"}


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
        called = node.func
        quiet_method = isinstance(called, ast.Attribute) and called.attr in QUIET
        return quiet_method or root_name(called) in QUIET
    if isinstance(node, (ast.FunctionDef, ast.With)):
        names = (n.id for n in ast.walk(node) if isinstance(n, ast.Name))
        return any(name in PICTURE for name in names)
    at_the_top = depth == 1
    if at_the_top and isinstance(node, ast.If):
        return "__main__" in ast.unparse(node.test)
    if at_the_top and isinstance(node, ast.Assign):
        target = node.targets[0]
        setting = isinstance(target, ast.Name) and target.id.islower()
        return setting and isinstance(node.value, (ast.Constant, ast.UnaryOp))
    return False


def claimed(node, depth=0):
    """The nodes below `node` whose mistakes a test should notice."""
    if nobody_claims(node, depth):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        children = value if isinstance(value, list) else [value]
        for child in children:
            if isinstance(child, ast.AST):
                yield from claimed(child, depth + 1)


class Text:
    """A file's bytes, and where its nodes stand in them."""

    def __init__(self, source):
        self.source = source
        self.starts = [0]  # of each line
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node):
        """(start, end) of a node in bytes."""
        start = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[node.end_lineno - 1] + node.end_col_offset
        return start, end

    def of(self, node):
        start, end = self.span(node)
        return self.source[start:end]


def edits(tree, source):
    """Every (start, end, new text): replace these bytes of the source and one thing is wrong."""
    text = Text(source)
    for node in claimed(tree):
        if hasattr(node, "lineno"):
            yield from edits_of(node, text)


def edits_of(node, text):
    """The mistakes of one node, those of its children aside."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from other_operator(node.left, node.comparators[0], text)
    if isinstance(node, ast.BoolOp):
        left, right, *_ = node.values
        yield from other_operator(left, right, text)
    if isinstance(node, ast.BinOp) and not (is_words(node.left) or is_words(node.right)):
        yield from other_operator(node.left, node.right, text)
    if isinstance(node, ast.AugAssign):
        yield from other_operator(node.target, node.value, text)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield *text.span(node), text.of(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, NUMBERS):
        yield *text.span(node), other_constant(node.value)
    if isinstance(node, ast.Call):
        yield from other_call(node, text)
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        test = node.test
        has_else = isinstance(node, ast.IfExp) or node.orelse
        if has_else and not isinstance(test, ast.Constant):
            yield *text.span(test), b"not (" + text.of(test) + b")"
    if may_be_left_out(node):
        yield *text.span(node), b"pass"


def is_words(node):
    """Whether it is a constant and no number: the operators of text only format."""
    return isinstance(node, ast.Constant) and not isinstance(node.value, NUMBERS)


def may_be_left_out(node):
    """Statements without which the program still has all its names."""
    if isinstance(node, ast.Assign):
        return not all(isinstance(target, (ast.Name, ast.Tuple)) for target in node.targets)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, (ast.AugAssign, ast.Continue, ast.Break))


def other_operator(left, right, text):
    """The operator between two nodes swapped for its neighbour."""
    _, start = text.span(left)
    end, _ = text.span(right)
    found = OPERATOR.search(text.source, start, end)
    if not found:
        return
    operator = b" ".join(found[0].split()).decode()
    first = operator[:-1]  # + of +=
    if operator in SWAPS:
        yield *found.span(), SWAPS[operator].encode()
    elif first in SWAPS:
        yield *found.span(), SWAPS[first].encode() + b"="


def other_call(node, text):
    """max for min, the first two arguments swapped, a keyword argument left out."""
    called = text.of(node.func)
    other = {b"min": b"max", b"max": b"min"}.get(called)
    if other:
        yield *text.span(node.func), other
    first_two = node.args[:2]
    starred = any(isinstance(argument, ast.Starred) for argument in first_two)
    symmetric = called.split(b".")[-1] in SYMMETRIC
    if len(first_two) == 2 and not starred and not symmetric:
        (start, first_end), (second_start, end) = map(text.span, first_two)
        between = text.source[first_end:second_start]
        first, second = map(text.of, first_two)
        yield start, end, second + between + first
    for keyword in node.keywords:
        if keyword.arg not in UNCLAIMED_KEYWORDS | {None}:
            yield *span_with_comma(keyword, text), b""


def span_with_comma(keyword, text):
    """(start, end) of a keyword argument with the comma before it, or with the one behind it if it is the first."""
    start, end = text.span(keyword)
    before = re.search(rb",\s*$", text.source[:start])
    if before:
        return before.start(), end
    after = re.match(rb"\s*,\s*", text.source[end:])
    if after:
        return start, end + after.end()
    return start, end


def other_constant(value):
    """A bool turned, 0 and 1 exchanged, another whole number plus 1, any other number doubled."""
    if isinstance(value, bool):
        return str(not value).encode()
    if isinstance(value, int):
        other = {0: 1, 1: 0}.get(value, value + 1)
        return str(other).encode()
    return repr(value * 2 or 1.0).encode()


def planted(file, source, start, end, new):
    """The Mutant with these bytes of the source replaced."""
    first_line = source.count(b"\n", 0, start) + 1
    last_line = source.count(b"\n", 0, end) + 1
    from_byte = source.rfind(b"\n", 0, start) + 1
    # Where no line break follows, find says -1, which stands for the end of the file.
    to_byte = source.find(b"\n", end) % (len(source) + 1)
    old = source[from_byte:to_byte]
    changed = source[from_byte:start] + new + source[end:to_byte]
    mutated = source[:start] + new + source[end:]
    lines = range(first_line, last_line + 1)
    return Mutant(file, lines, one_line(old), one_line(changed), mutated)


def one_line(code):
    """Code without its comments, its white space joined."""
    without = re.sub(r"\s\s+#.*", "", code.decode())
    return " ".join(without.split())


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
    So many mutants of a file: all edits in the order of a hash of what they say, at most one a line.

    A pure function of the text, and a line that moves or a neighbour that changes alters nothing about the others.
    """
    lines_a_mutant = LINES_A_MUTANT[stem(file) in CORE]
    wanted = round(rate * source.count(b"\n") / lines_a_mutant)
    tree = ast.parse(source)
    found = [planted(file, source, *edit) for edit in edits(tree, source)]
    found.sort(key=place_in_the_queue)
    chosen, taken = [], set()
    for m in found:
        if len(chosen) == wanted:
            break
        if taken.isdisjoint(m.lines) and is_mistake(source, m.source):
            chosen.append(m)
            taken.update(m.lines)
    return chosen


def place_in_the_queue(mutant):
    said = f"{SEED} {mutant.old} {mutant.new}"
    return hashlib.sha256(said.encode()).digest()


def by_hand(file, source, mistakes):
    """
    The Mutants of (file, old, new, what a tired person got wrong), and the stale ones.

    Stale is (file, old) where `old` does not stand in the file exactly once.
    """
    found, stale = [], []
    for name, old, new, _ in mistakes:
        if name != file:
            continue
        if source.count(old.encode()) != 1:
            stale.append((file, old))
            continue
        start = source.find(old.encode())
        end = start + len(old.encode())
        found.append(planted(file, source, start, end, new.encode()))
    return found, stale
