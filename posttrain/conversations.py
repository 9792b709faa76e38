"""
The conversations of SFT: from files of any form to ids on disk, and which of them a step takes.

    --data=chats.jsonl | chats.json | chats.parquet | FOLDER | "GLOB" | hf://datasets/OWNER/NAME[/FOLDER | /FILES]
    --data="{'a.jsonl': 2, 'hf://datasets/OWNER/NAME': 1}"        two of three conversations of the run are of a.jsonl

Rows become ids once, in out/<run>/tokens: each rank takes its share of the parts, and what a killed run has left is
used again. Each source of a mixture is shuffled and repeated by itself, and which source a conversation of the run is
taken from follows from its number alone (chosen), so that it is the same on any number of ranks and after a stop.

Licences and evaluation prompts are judged as those of documents are (corpus/rules.py, corpus/dedup.py).
"""

import functools
import hashlib
import itertools
import json
import os

import numpy as np
from tqdm import tqdm

import chat
import tokenizer
from chat import count, learnable, left_out
from configurator import attached, literal
from data import by_epoch
from engine import checkpoint, readers
from engine.files import sha256, write_flushed
from engine.mixture import SLOTS, mix_weights

dedup, selection = attached("corpus.dedup"), attached("corpus.rules")

SAID = np.uint32(1 << 31)       # the top bit of an id: the assistant must produce it itself
# The columns of parquet files that are read.
COLUMNS = {"input", "system", "tools", "thinking", "license"}.union(*chat.FORMS)
WANT = f"a JSON object with {chat.CONVERSATION}, or with another form that --help lists"


# -----------------------------------------------------------------------------
# what --data names


def weights_of(data):
    """The setting `data` as {source: weight}; a path alone has the weight 1. ValueError: a dict of something else."""
    weights = literal(data)
    if not isinstance(weights, dict):
        return {data: 1}
    for source, weight in weights.items():
        is_number = type(weight) in (int, float)
        if not isinstance(source, str) or not is_number:
            raise ValueError(f"data={data}: want a path, or weights by path like {{'a.jsonl': 2, 'b.parquet': 1}}")
    mix_weights(weights)
    return weights


def files_of(source):
    """[{"name", "path"}] of the files of conversations that a source names. ValueError: there is none."""
    found, _ = readers.find([source])
    files = [file for file in found if readers.kind_of(file["path"]) in ("lines", "json", "parquet")]
    if not files:
        raise ValueError(f"{source}: want .jsonl, .json or .parquet")
    return files


def survey(data, ranks):
    """
    For each source of `data` its files as readers.check says. The first rank reads each of them to its end.

    ValueError, on all ranks, names a file that cannot be read.
    """
    sources = []
    if ranks.first:
        for source in weights_of(data):
            files = [readers.check(file, text_field="") for file in files_of(source)]
            sources.append(files)
    sources = checkpoint.everyone(sources, ranks.files)[0]
    for file in itertools.chain(*sources):
        if file["problem"]:
            raise ValueError(f"{file['path']}: {file['problem']}")
    return sources


# -----------------------------------------------------------------------------
# rows


def numbered(file, part):
    """
    Yield (place, row) of each row of a part of a file; place: "line 3" or "row 3".

    ValueError: a line is no JSON object, or the file is damaged. A null in parquet is a key that the row does not have.
    """
    path = file["path"]
    parquet = readers.kind_of(path) == "parquet"
    for n, record in readers.rows(file, part, COLUMNS):
        place = f"{'row' if parquet else 'line'} {n + 1}"
        if isinstance(record, str):
            raise ValueError(f"{path}, {place}: want {WANT}, got {record}")
        row = without_nulls(record) if parquet else record
        # A null licence is none of the allowed ones; a row without the column is an error.
        if "license" in record:
            row["license"] = record["license"]
        yield place, row


def without_nulls(value):
    """Parquet gives each struct of a column the keys of all others, with null in them: these keys go, at any depth."""
    if isinstance(value, list):
        return list(map(without_nulls, value))
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return value


def first_rows(source, n):
    """(place, row) of the first n rows of a source."""
    rows = (
        row
        for file in files_of(source)
        for part in readers.parts_of(file)
        for row in numbered(file, part)
    )
    return itertools.islice(rows, n)


def look(data):
    """ValueError if the first row of a source on this machine is no conversation. The hub is asked later, and once."""
    for source in weights_of(data):
        if source.startswith("hf://"):
            continue
        for place, row in first_rows(source, 1):
            if not chat.has_form(row):
                got = chat.as_json(row)
                raise ValueError(f"{source}, {place}: want {WANT}, got {got[:60]!r}")


def verdict(tok, max_length, date, licenses, contamination, row):
    """
    A row -> (ids, said), or why it is left out: its licence, what learnable() says, or an evaluation prompt in it.

    licenses: a set, or None; contamination: dedup.Contamination, or None. ValueError: licences are asked for, and the
    row has none.
    """
    if reason := selection.broken(row, selection.column_rules(licenses)):
        return reason
    found = learnable(tok, row, max_length, date)
    if isinstance(found, str) or not contamination:
        return found
    ids, _ = found
    texts = [tok.decode(ids)]
    return "contaminated" if contamination.find(texts, *dedup.words(texts)) else found


# -----------------------------------------------------------------------------
# ids on disk, four bytes a token, mapped by every rank


class Conversations:
    """
    conversations[k] -> (ids, said), two arrays (T,), int64 and bool; sizes: how many there are of each source; tokens,
    learnt: of all of them. parts: for each source what tokenize() has written.

    Ranks share the pages of the files; what each of them holds itself is 8 bytes a conversation.
    """

    def __init__(self, parts):
        self.sizes = []
        for of_source in parts:
            size = sum(len(part["lengths"]) for part in of_source)
            self.sizes.append(size)
        parts = list(itertools.chain(*parts))
        lengths = [part["lengths"] for part in parts]
        self.files = [part["file"] for part in parts]
        self.learnt = sum(part["learnt"] for part in parts)
        # Tokens before each file, and before each conversation.
        self.borders = np.cumsum([0, *map(sum, lengths)])
        self.starts = np.cumsum([0, *itertools.chain(*lengths)])
        self.tokens = int(self.starts[-1])

    def __len__(self):
        return len(self.starts) - 1

    def __getitem__(self, k):
        begin, end = self.starts[k:k + 2]
        file = np.searchsorted(self.borders, begin, "right") - 1
        before = self.borders[file]
        tokens = mapped(self.files[file])[begin - before:end - before]
        ids = tokens & ~SAID
        return ids.astype(np.int64), tokens >= SAID


@functools.lru_cache(64)        # files open at a time
def mapped(file):
    return np.memmap(file, "<u4", "r")


def tokenized(folder, tok, data, max_length, date, ranks, keep_licenses="", decontaminate=""):
    """
    What --data names, as Conversations; {reason: (count, first place)} of the rows that are left out; a hash of all
    that decides which conversations there are: the sha256 of the file, if it is one and no rule leaves any out.

    ValueError: a line that is no JSON object, a file that cannot be read, or a source with nothing to learn from.
    """
    sources = survey(data, ranks)
    rules = [keep_licenses]
    licenses = contamination = None
    if keep_licenses:
        licenses = {name.strip() for name in keep_licenses.split(",")}
    if decontaminate:
        rules.append(sha256(decontaminate))
        contamination = dedup.Contamination(dedup.read_prompts(decontaminate))
    judge = functools.partial(verdict, tok, max_length, date, licenses, contamination)
    # The code that decides the format, and which turns are learnt, is part of a file's name.
    modules = (chat, tokenizer, readers, dedup, selection)
    code = [sha256(module.__file__) for module in modules]
    code.append(sha256(__file__))
    decisive = [tok.hash, max_length, date, rules, code]
    os.makedirs(folder, exist_ok=True)
    written = write_parts(folder, sources, decisive, judge, ranks)
    ranks.add(0)        # Barrier: no rank reads before every rank has written.

    weights = weights_of(data)
    parts, bad = [], {}
    for source, names in zip(weights, written):
        of_source, bad_here = read_parts(names)
        if not any(part["lengths"] for part in of_source):
            why = left_out(bad_here, 0, "conversations")
            raise ValueError(f"{source}: {why}" if bad_here else f"{source} is empty")
        parts.append(of_source)
        for why, (times, place) in bad_here.items():
            count(bad, why, place, times)
    content = [list(map(identity, files)) for files in sources]
    one_file = len(content) == len(content[0]) == 1
    sha = content[0][0]
    if not one_file or any(rules):
        content += [list(weights.values()), rules]
        sha = digest(content)
    return Conversations(parts), bad, sha


def read_parts(names):
    """What tokenize() has written under these names, and {reason: (count, first place)} of what it left out."""
    parts, bad = [], {}
    for name in names:
        part = tokenizer.read_json(name + ".json")
        parts.append(dict(part, file=name + ".ids"))
        for why, (times, place) in part["bad"].items():
            count(bad, why, place, times)
    return parts, bad


def digest(content):
    text = repr(content)
    return hashlib.sha256(text.encode()).hexdigest()


def identity(file):
    """What says which content a file has. The hub has no sha256 of small files, but their path names the commit."""
    return file["sha256"] or file["path"]


def write_parts(folder, sources, decisive, judge, ranks):
    """
    For each source the names of what holds its ids: NAME.ids and NAME.json in `folder`, as tokenize() writes them.

    Each rank takes its share of the parts. A name is a hash of the file's content and of `decisive`: so a killed run
    finds what is done, and nothing stale is read.
    """
    sizes = [part[-1] for files in sources for file in files for part in file["parts"]]
    turns = itertools.cycle(range(ranks.size))
    names = []
    with tqdm(
        total=sum(sizes),
        desc="tokenizing",
        unit="B",
        unit_scale=True,
        delay=2,
        leave=False,
        disable=not ranks.first,
    ) as bar:
        for files in sources:
            names.append([])
            for file in files:
                key = digest([identity(file), file["name"], decisive])
                for n, part in enumerate(file["parts"]):
                    name = os.path.join(folder, f"{key[:16]}-{n:05d}")
                    names[-1].append(name)
                    mine = next(turns) == ranks.rank
                    if mine and not os.path.exists(name + ".json"):
                        tokenize(name, file, part, judge)
                    # A part that another rank takes counts as done.
                    bar.update(part[-1])
    return names


def tokenize(name, file, part, judge):
    """
    Write name.ids, then name.json: the conversations in a part of a file.

    ValueError names a line that is no JSON object.
    """
    tokens = [np.zeros(0, np.uint32)]
    lengths, bad = [], {}
    for place, row in numbered(file, part):
        found = judge(row)
        if isinstance(found, str):
            count(bad, found, f"{place} of {file['name']}")
        else:
            ids, said = np.array(found, np.uint32)
            marked = ids | SAID * said
            tokens.append(marked)
            lengths.append(len(ids))
    tokens = np.concatenate(tokens)
    learnt = int((tokens >= SAID).sum())
    stored = tokens.astype("<u4").tobytes()
    write_flushed(name + ".ids", stored, shared=True)
    written = dict(
        lengths=lengths,
        learnt=learnt,
        bad=bad,
    )
    write_flushed(name + ".json", json.dumps(written), shared=True)


# -----------------------------------------------------------------------------
# which conversations a step takes


@functools.lru_cache(1)
def spread(slots):
    """
    SLOTS samples of sources that have so many slots of them, spread evenly: the source of each, and how many of that
    source came before it, both (SLOTS,).

    Sample k of a source with n slots stands at (k + 1/2) / n of the way, as packets do in fair queueing. So each source
    has its share not only of all slots but, to a sample or two, of the first few.
    """
    source = np.repeat(np.arange(len(slots)), slots)
    before = np.concatenate(list(map(np.arange, slots)))
    place = (before + 0.5) / np.repeat(slots, slots)
    order = np.argsort(place, kind="stable")
    return source[order], before[order]


def chosen(step, batch_size, sizes, weights, epochs, seed):
    """
    Which conversations a step takes: (at most batch_size,) numbers, those of the first source from 0 on, and so on.

    sizes, weights: of each source. A run takes epochs * sum(sizes) conversations. A source gives its share of them, and
    is taken again and again, each time in an order of its own: of one source each epoch takes every conversation once.
    A pure function of the step, so that a resumed run and any number of ranks see the same batches.
    """
    slots = mix_weights(dict(enumerate(weights)))
    source, before = spread(tuple(slots.values()))
    begin = step * batch_size
    end = min(begin + batch_size, epochs * sum(sizes))
    position = np.arange(begin, end)
    block, j = np.divmod(position, SLOTS)
    numbers = np.empty_like(position)
    for s, n in enumerate(sizes):
        mine = source[j] == s
        taken = block[mine] * slots[s] + before[j[mine]]
        epoch, i = np.divmod(taken, n)
        first = sum(sizes[:s])
        numbers[mine] = first + by_epoch(epoch, i, n, seed)
    return numbers


def described(conversations, bad, weights, epochs):
    """Lines for the user: what was left out; each source's share of a mixture, and how often it is seen; tokens."""
    n = len(conversations)
    lines = [left_out(bad, n, "conversations")] if bad else []
    for (source, weight), size in zip(weights.items(), conversations.sizes):
        share = weight / sum(weights.values())
        times = share * epochs * n / size
        if len(weights) > 1:
            lines.append(f"{source}: {size} conversations, {share:.1%} of the run, each seen {times:.2f} times")
    lines.append(f"{conversations.tokens:,} tokens, {conversations.learnt:,} of them learnt")
    return lines
