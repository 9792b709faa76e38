"""
The ledger, documents.parquet: a row for each document that came in, without its text.

    id, source, url, language, license    as the document came in; no url = no opt-out of a host was consulted
    bytes, written                        UTF-8 bytes of its text, before and after personal data was replaced
    email, ip, iban                       how many of each were replaced
    text                                  64 bits of a hash of its text (corpus/dedup.py: fingerprint)
    reason                                why it is not in the shards, such as "robots:GPTBot:/x"; "" = it is in them
    split, shard, offset, tokens          where its tokens are: they begin at `offset` and may run into the next shards
    withdrawn                             the time (UTC) at which --remove took it out

    in = kept + removed, in documents and in bytes, by source, language, license and reason

Two kinds of rows have tokens and 0 bytes, because they count no document that came in:

    a copy of a planted passage           its text is 0
    the last part of a cut document       its row follows that of the first part, with the same id, url and text

Rows are in the order of the input. All numbers of a report are sums over them (corpus/report.py).
"""

import os
import re

import pyarrow
import pyarrow.parquet

from corpus.readers import kind_of
from corpus.urls import host_key, split_url
from engine.files import in_one_line

FILE = "documents.parquet"
# Rows that are in memory at a time: a few megabytes.
ROWS = 5_000
PII = ("email", "ip", "iban")
TEXTS = ("id", "source", "url", "language", "license", "reason", "split", "shard", "withdrawn")
NUMBERS = ("bytes", "written", *PII, "tokens", "offset")


def schema():
    """The columns of the ledger, in order."""
    columns = dict.fromkeys(TEXTS, pyarrow.string()) | dict.fromkeys(NUMBERS, pyarrow.int64())
    return pyarrow.schema(columns | dict(text=pyarrow.uint64()))


def write_ledger(path, tables):
    """Write an iterable of tables of rows, each as a row group."""
    with pyarrow.parquet.ParquetWriter(path, schema(), compression="zstd") as writer:
        for table in tables:
            writer.write_table(table.select(schema().names).cast(schema()))


def ledger(folder, columns=None):
    """Yield the rows of a data folder as pyarrow tables of at most ROWS. ValueError for a folder without a ledger."""
    path = f"{folder}/{FILE}"
    if not os.path.isfile(path):
        raise ValueError(f"{folder} has no {FILE}: it is not a data folder, or an older prepare.py wrote it. Prepare "
                         f"its files again: python prepare.py FILES --out={folder}")
    with in_one_line(path), pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(ROWS, columns=columns):
            yield pyarrow.Table.from_batches([batch])


def ledger_rows(folder, columns=None):
    """Yield the rows of a data folder as dicts."""
    for table in ledger(folder, columns):
        yield from table.to_pylist()


def was_kept(row):
    """Whether a document is in the shards, or was until --remove."""
    return not row["reason"] or bool(row["withdrawn"])


def came_in(row):
    """Whether a row counts a document that came in."""
    return row["bytes"] > 0 or row["tokens"] == 0


def is_last_part(row):
    """Whether a row is the last part of a cut document, whose first part has the row before."""
    return not came_in(row) and row["text"] != 0


# ----------------------------------------------------------------------------------------------------------------------
# names of documents

# The kinds of names. The first kind that a document and a list share is the reason of its removal.
KINDS = ("id", "url", "path", "text", "host")


def names_of(row):
    """
    The names of a row, {(kind, name)}:

        id      its id; the own id of a row in a file, without the name of the file
        url     its URL, as normalized_url() has it
        path    the same, and each part of it that ends before a slash
        host    its host and the domains that this is part of
        text    the fingerprint of its text
    """
    file, _, own_id = row["id"].partition(":")
    names = {("id", row["id"]), ("text", row["text"])}
    if own_id and kind_of(file) not in (None, "text"):
        names.add(("id", own_id))
    if row["url"]:
        url = normalized_url(row["url"])
        names |= {("url", url), ("path", url)}
        names |= {("path", url[:slash.start()]) for slash in re.finditer("/", url)}
    host = host_key(row["url"])
    labels = host.split(".") if host else []
    return names | {("host", ".".join(labels[n:])) for n in range(len(labels))}


def names_in(line):
    """
    The meanings of a line of a list: one set of names as names_of() has them, or two, of which the second counts if no
    document has a name of the first. Each line may be an id. Otherwise

        uni.example                 this host and its subdomains
        uni.example/~jane/          all pages below, and the page itself
        uni.example/~jane           this page
        https://uni.example/a       this page
        https://uni.example         this page; without such a page, the host
        https://uni.example/~jane/  this page; without such a page, all pages below
        jane@uni.example            nothing: an e-mail address names no host
        /, https://                 nothing
    """
    as_id, address = ("id", line), re.sub(r"^(?:\w+:)?//", "", line)
    if not address.strip("/"):
        return [{as_id}]
    authority, slash, path = address.partition("/")
    url = normalized_url(line)
    if "@" in authority:
        # A user's name in a URL does not matter, but "jane@uni.example" is no page either.
        return [{as_id} if address == line else {as_id, ("url", url)}]
    below = ("path", url) if path else ("host", normalized_host(authority))
    if address != line:
        return [{as_id, ("url", url)}, *[{below}] * (line.endswith("/") or not path)]
    if slash:
        return [{as_id, below if line.endswith("/") else ("url", url)}]
    return [{as_id, below} if re.fullmatch(r"[^: ]*\.[^: ]*", line) else {as_id}]


def first_kind(names):
    """The kind of a set of names that comes first in KINDS; None if the set is empty."""
    return min((kind for kind, _ in names), key=KINDS.index, default=None)


def is_email(line):
    """Whether a line of a list is an e-mail address."""
    return bool(re.fullmatch(r"[^@/\s]+@[^@/\s]+\.[^@/\s]+", line))


def normalized_url(url):
    """A URL without scheme, user, port, www., fragment and final slash: a server gives the same page for all these."""
    host, path = split_url(url)
    return f"{host.removeprefix('www.')}{path}".rstrip("/") if host else url.rstrip("/")


def normalized_host(host):
    """A host as split_url() writes it, without www. An e-mail address stays one, which is no host."""
    if "@" in host:
        return host
    return (host_key(f"//{host}") or host).removeprefix("www.")


def changed(folder, change):
    """Yield the rows of a data folder as tables, after change(row) has changed each row, a dict, in place."""
    for table in ledger(folder):
        rows = table.to_pylist()
        for row in rows:
            change(row)
        yield pyarrow.Table.from_pylist(rows, table.schema)
