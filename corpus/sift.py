"""
The rules about single documents. walk() leads a document through all of them, from top to bottom; sift() does it for a
group of documents, in any process (corpus/stages.py).

    in     the documents of a group, from the files of the user (corpus/readers.py)
    out    GROUP.text, the texts that pass, without personal data, one after the other
           GROUP.parquet, a row of the ledger for each document, with the place of its text in GROUP.text and its keys
           for near-duplicates

corpus/report.py lists all reasons for which a document is removed.
"""

import re
from dataclasses import dataclass, field

import pyarrow
from pyarrow.parquet import write_table

import tokenizer as tokenizers
from corpus import dedup, ledger
from corpus.pii import TAGS, scrub_pii
from corpus.readers import documents, id_hash, writable
from corpus.reservations import judge_document
from corpus.robots import agents_of
from corpus.rules import TOXICITY, as_number, broken, by_language, listed, top_thresholds
from corpus.statements import COLUMNS
from corpus.stores import blocked_domains, open_reservations, open_robots

# Characters of documents whose words are hashed together: one page at a time takes four times as long.
BATCH = 300_000
# Where the text of a row is: `written` bytes of GROUP.text from `offset` on; id_hash gives its place in training.
PLACE = ("group", "offset", "written", "id_hash")
# The number of the group of the planted passages, which did not come in.
PLANTED = -1
# The day at the start of a date as ISO 8601 writes it, or nothing.
DAY = re.compile(r"(?:\d{4}-\d\d-\d\d)?")


class Rules:
    """
    The settings of prepare.py about single documents, with the files that they name in memory.

    plan: these settings as attributes. ValueError for one that is not valid.
    """

    def __init__(self, plan):
        top_thresholds([], plan.keep_top)                  # an error if keep_top is no share
        self.plan = plan
        toxicity = TOXICITY if plan.max_value == "apertus" else by_language("max_value", plan.max_value)
        self.below = (plan.max_field, toxicity) if plan.max_field else None
        self.licenses = listed(plan.keep_licenses)
        self.languages = listed(plan.keep_languages)
        n_bands, n_places = dedup.bands_of(plan.near_dedup) if plan.near_dedup else (0, 0)
        self.bands = [f"band {i}" for i in range(n_bands)]  # columns, one for each key for near-duplicates
        self.places_per_band = n_places
        self.robots = dict(                                # the arguments of robots.verdict()
            store=open_robots(plan.robots, plan.snapshots) if plan.robots else None,
            agents=agents_of(plan.agents),
            missing=plan.missing,
            blocked=blocked_domains(plan.blocked) if plan.blocked else (),
        )
        self.reservations = open_reservations(plan.reservations, plan.snapshots) if plan.reservations else None
        prompts = dedup.read_passages(plan.decontaminate) if plan.decontaminate else None
        self.contamination = dedup.Contamination(prompts) if plan.decontaminate else None
        self.tok = tokenizers.load(plan.tokenizer) if plan.tokenizer else None


@dataclass
class Document:
    """A document in walk(). columns: as readers.documents() gives them, unchanged, with the text as it came in."""
    columns: dict
    text: str                                              # "" if it cannot be read; at the end as it is written
    reason: str = ""                                       # why it is removed; "": it passes
    marks: set = field(default_factory=set)                # what judge_document() has seen
    bands: dict = field(default_factory=dict)              # {band: key}, equal for near-duplicates
    replaced: dict = field(default_factory=dict)           # {tag: number of pieces of personal data that it replaces}


def walk(docs, rules, top):
    """
    Send a batch of documents through the rules, from top to bottom. The first rule that a document breaks is the reason
    of its removal, and no later rule looks at it. Duplicates are found later, among all documents (corpus/judge.py).

    top: (field, {language: lowest score of its best share}), or None.
    """
    for doc in docs:
        if doc.columns["text"] is None:
            doc.reason = f"unreadable:{doc.columns['problem']}"
        elif not doc.text.strip():
            doc.reason = "empty"
    for doc in passing(docs):                              # opt-outs of the page and of its host
        opt_out, doc.marks = judge_document(doc.columns, rules.robots, rules.reservations)
        doc.reason = opt_out or ""
    for doc in passing(docs):                              # licence, language, scores
        doc.reason = broken(doc.columns, rules.licenses, rules.languages, top, rules.below) or ""
    compare_words(passing(docs), rules)                    # evaluation prompts; keys for near-duplicates
    for doc in passing(docs):                              # code keeps its addresses, as in Apertus
        if rules.plan.pii and doc.columns.get("language") != "code":
            doc.text, doc.replaced = scrub_pii(doc.text)
    for doc in passing(docs):
        if not has_allowed_length(doc.text, rules):
            doc.reason = "tokens"


def passing(docs):
    """The documents that no rule has removed yet."""
    return [doc for doc in docs if not doc.reason]


def compare_words(docs, rules):
    """Set the keys for near-duplicates of documents, and the reason of those that contain an evaluation prompt."""
    if not docs or not (rules.bands or rules.contamination):
        return
    texts = [doc.text for doc in docs]
    ids, ends = dedup.words([text[:dedup.LONG] for text in texts])
    if rules.bands:
        keys = dedup.band_keys(dedup.signatures(ids, ends), len(rules.bands), rules.places_per_band)
        for doc, keys_of_doc in zip(docs, keys):
            doc.bands = dict(zip(rules.bands, keys_of_doc))
    if rules.contamination:
        for i, prompt in rules.contamination.find(texts, ids, ends).items():
            docs[i].reason = f"contaminated:prompt {prompt}"


def has_allowed_length(text, rules):
    """Whether a text has --min_tokens to --max_tokens tokens, <s> and </s> included."""
    least, most = rules.plan.min_tokens, rules.plan.max_tokens
    if not least and not most:
        return True
    tokens = 2 + len(rules.tok.encode_array(text))
    return least <= tokens <= (most or tokens)


# ----------------------------------------------------------------------------------------------------------------------
# a group of documents


def sift(number, parts, rules, top, path):
    """
    Write the group of this number to path, a .parquet, and its texts next to it. parts: as in documents_of(). Returns
    an empty result, which says that the group is done.
    """
    tables = []
    with open(path.with_suffix(".text"), "wb") as texts:
        for docs in batches(documents_of(parts, rules.plan)):
            walk(docs, rules, top)
            tables.append(table_of([dict(row_of(doc, texts, rules.plan), group=number) for doc in docs], rules.bands))
    write_table(pyarrow.concat_tables(tables), path)
    return {}


def documents_of(parts, plan):
    """Yield the documents of parts of files, [(file, part)], as readers.documents() gives them."""
    columns = [*COLUMNS, "date", plan.score_field, plan.max_field, plan.source_by, plan.url_field]
    for file, part in parts:
        for doc in documents(file, part, plan.text_field, columns):
            if plan.url_field != "url":
                doc["url"] = doc.get(plan.url_field)
            # The default corpus has a licence and a language for all of its files.
            yield file.get("columns", {}) | doc


def scores_of(parts, plan):
    """[(language, score)] of the documents of parts of files, for --score_field; without those that have no score."""
    scores = []
    for doc in documents_of(parts, plan):
        score = None if doc["text"] is None else as_number(doc, plan.score_field)
        # NaN would be sorted as the best score.
        if score is not None and score == score:
            scores.append((doc.get("language") or "", score))
    return scores


def batches(docs):
    """Documents as lists of about BATCH characters, the last one perhaps empty."""
    batch, n = [], 0
    for doc in docs:
        batch.append(Document(doc, doc["text"] or ""))
        n += len(batch[-1].text)
        if n >= BATCH:
            yield batch
            batch, n = [], 0
    yield batch


def row_of(doc, texts, plan):
    """The row of a document in the ledger. If the document passes, its text is written to the file `texts`."""
    columns, original = doc.columns, doc.columns["text"] or ""
    url, offset = columns.get("url"), texts.tell()
    return dict(
        id=columns["id"],
        source=source_of(columns, plan),
        url=writable(url) if isinstance(url, str) else None,
        language=columns.get("language") or "",
        license=columns.get("license") or "",
        reason=doc.reason,
        bytes=len(original.encode()),
        written=0 if doc.reason else texts.write(doc.text.encode()),
        **{tag: doc.replaced.get(tag, 0) for tag in TAGS},
        offset=offset,
        # Of the text before personal data is replaced: two texts that differ only in an address are no duplicates.
        text=dedup.fingerprint(original),
        id_hash=id_hash(columns["order_id"]),
        marks=" ".join(sorted(doc.marks)),
        day=DAY.match(str(columns.get("date")))[0],
        **doc.bands,
    )


def source_of(columns, plan):
    """The source of a document: its column --source_by, "none" if that is empty; without --source_by the folder."""
    source = columns.get(plan.source_by) if plan.source_by else plan.name
    return "none" if source in (None, "") else writable(str(source))


def table_of(rows, bands):
    """Rows as a table: the columns of the ledger, null where a later stage fills in, and those that judge() needs."""
    columns = [("group", pyarrow.int32()), ("marks", pyarrow.string()), ("day", pyarrow.string())]
    columns += [(name, pyarrow.uint64()) for name in ("id_hash", *bands)]
    return pyarrow.Table.from_pylist(rows, pyarrow.schema([*ledger.schema(), *columns]))
