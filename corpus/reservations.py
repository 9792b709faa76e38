"""
Opt-outs beyond robots.txt: what a page, its server or its host says about training and mining, whoever reads it.

    noai, noimageai, noml      in the header X-Robots-Tag or in <meta name="robots">, for all or for an agent of ours
    tdm-file                   /.well-known/tdmrep.json: of its rules the first whose location matches reserves the page
    tdm-header, tdm-meta       tdm-reservation: 1 in a header, and in a <meta>; each supersedes what came before it, so
                               that tdm-reservation: 0 of a page takes it out of the file's reservation
    usage-header, usage-file   train-ai=n in the header Content-Usage (or ai-train=no in Content-Signal); in a line of
                               robots.txt, which corpus/robots.py reads with the rest of that file
    ai-txt                     /ai.txt: rules as in robots.txt about kinds of files (*.html); a page without an ending
                               is HTML

A page that says one of these is removed under that name. The European code of practice for general-purpose models asks
for robots.txt and for "other appropriate machine-readable protocols" (copyright chapter, measure 1.3); the directive
behind it reserves a text by "machine-readable means" (2019/790, art. 4(3)). Training text on a page that says
`noimageai` would be arguable: it is removed, as by the library of those who keep the largest list of opt-outs,
Spawning's datadiligence.

Sources: TDMRep, W3C community group, final report (file, header, HTML, processing priority); Google's reference of
X-Robots-Tag for `agent: directive`; noai and noimageai: DeviantArt 2022; noml: Mojeek; ai.txt: Spawning; Content-Usage:
IETF, draft-ietf-aipref-attach-05 sec. 2, of which no statement takes another's refusal back (draft-ietf-aipref-vocab-07
sec. 5.1; no RFC yet, but train-ai is its word since July 2025). Not read: metadata in EPUB and PDF.

Columns of a document that are read: headers (text, pairs, or a dict), x_robots_tag, content_usage, tdm_reservation,
meta_robots, meta_tdm_reservation; of .html files their own <meta>. Files of hosts come from a store:

$ python prepare.py pages.jsonl --reservations=store.jsonl.gz     # rows of domain, file (tdmrep.json, ai.txt), content
$ python prepare.py pages.jsonl --reservations=mirror/            # HOST/ai.txt, HOST/.well-known/tdmrep.json
"""

import json
from functools import lru_cache
from pathlib import Path

from tqdm import tqdm

from corpus.robots import AGENTS, RobotsStore, compiled, host_key, matching, named_first, parse_robots
from corpus.robots import forbids_training, product_token, refusals, split_url, store_rows

# The outcomes, as an audit counts them.
RESERVED = {
    "noai": "the page or its headers say that no AI may learn from it",
    "noimageai": "the same, said of images",
    "noml": "the same, in Mojeek's word",
    "tdm-file": "reserved by the host's tdmrep.json",
    "tdm-header": "reserved by the header tdm-reservation",
    "tdm-meta": "reserved by the page's <meta> tdm-reservation",
    "usage-header": "the header Content-Usage or Content-Signal says that no model may be trained on it",
    "usage-file": "the same, said by the host's robots.txt",
    "ai-txt": "refused by the host's ai.txt",
}
FILES = ("tdmrep.json", "ai.txt")
COLUMNS = ("headers", "x_robots_tag", "content_usage", "tdm_reservation", "meta_robots", "meta_tdm_reservation")
# For whom a directive may be meant that names an agent.
OURS = frozenset(filter(None, map(product_token, AGENTS)))


def reservation(doc, store=None, agents=AGENTS):
    """
    Why a document may not be trained on, one of RESERVED, a file's with the rule behind a colon; None if it may.

    doc: url and what there is of COLUMNS. store: {file: anything with .get(host) -> str, bytes or None}, from
    open_reservations(). agents: those that ai.txt is asked about.
    """
    headers = headers_of(doc.get("headers"))
    columns = {name: joined(doc.get(name)) for name in COLUMNS[1:]}
    robots, mining = metas_of(doc.get("metas") or ())
    directives = [
        headers.get("x-robots-tag"),
        columns["x_robots_tag"],
        robots,
        columns["meta_robots"],
    ]
    for said in directives:
        directive = robots_directive(said)
        if directive:
            return directive
    preferences = [
        headers.get("content-usage"),
        headers.get("content-signal"),
        columns["content_usage"],
    ]
    if any(map(forbids_training, preferences)):
        return "usage-header"
    parts = split_url(doc.get("url"))
    has_files = store and parts
    reserved = by_rules(parts, store["tdmrep.json"]) if has_files else None
    said_later = [
        ("tdm-header", headers.get("tdm-reservation")),
        ("tdm-header", columns["tdm_reservation"]),
        ("tdm-meta", mining),
        ("tdm-meta", columns["meta_tdm_reservation"]),
    ]
    # Each supersedes what came before; what says nothing, or no 0 or 1, changes nothing.
    for name, said in said_later:
        # A column of numbers in which some are missing holds 1.0.
        value = str(int(said) if said in (0, 1) else said).strip()
        if value in ("0", "1"):
            reserved = name if value == "1" else None
    if not reserved and has_files:
        reserved = by_ai_txt(parts, store["ai.txt"], agents)
    return reserved


# ----------------------------------------------------------------------------------------------------------------------
# what the page says


def joined(said):
    """A list of values with commas between, as HTTP joins those of a header; everything else as it is."""
    return ", ".join(map(str, said)) if isinstance(said, (list, tuple)) else said


def headers_of(said):
    """{name in small letters: value} of HTTP headers: lines of text, JSON, pairs, or a dict. Equal names are joined."""
    if isinstance(said, str) and said.lstrip()[:1] in ("{", "["):
        try:
            said = json.loads(said)
        except ValueError:
            return {}
    if isinstance(said, str):
        said = [line.partition(":")[::2] for line in said.splitlines()]
    pairs = said.items() if isinstance(said, dict) else said or ()
    found = {}
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            continue
        name, value = (str(joined(part)).strip() for part in pair)
        before = found.get(name.lower())
        found[name.lower()] = f"{before}, {value}" if before else value
    return found


def robots_directive(said):
    """
    noai, noimageai or noml, if X-Robots-Tag or a <meta> of robots says so to everybody or to an agent of ours; or None.

    said: directives with commas between, each for all or behind "agent:".
    """
    for part in str(said or "").lower().split(","):
        agent, _, directive = part.rpartition(":")
        if directive.strip() in ("noai", "noimageai", "noml") and (not agent.strip() or agent.strip() in OURS):
            return directive.strip()
    return None


def metas_of(pairs):
    """(what <meta> of robots say, in one line as in X-Robots-Tag; tdm-reservation) of [(name, content)] of a page."""
    robots, mining = [], None
    for name, content in pairs:
        name = name.strip().lower()
        if name == "robots":
            robots.append(content)
        elif name in OURS:
            robots += [f"{name}: {part}" for part in content.split(",")]
        elif name == "tdm-reservation":
            mining = content
    return ", ".join(robots), mining


# ----------------------------------------------------------------------------------------------------------------------
# what the host says


def by_rules(parts, files):
    """"tdm-file:LOCATION" if the first rule of the host's tdmrep.json that matches reserves the page, or None."""
    host, path = parts
    content = files.get(host)
    for location, value, rule in parse_tdmrep(content) if content else ():
        if matching(path, rule):
            return f"tdm-file:{location}" if value == "1" else None
    return None


# Cached because the documents of a host come in clusters.
@lru_cache(maxsize=4096)
def parse_tdmrep(content):
    """[(location, value, rule as robots.compiled makes it)] of a tdmrep.json; [] of what is none."""
    try:
        rows = json.loads(content)
    except (ValueError, RecursionError):
        return []
    rules = []
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and isinstance(row.get("location"), str):
            value = str(row.get("tdm-reservation")).strip()
            (rule,) = compiled([(False, row["location"])])
            if value in ("0", "1"):
                rules.append((row["location"], value, rule))
    return rules


def by_ai_txt(parts, files, agents):
    """"ai-txt:AGENT:RULE" if the host's ai.txt refuses the page to an agent, or None."""
    host, path = parts
    content = files.get(host)
    groups = parse_robots(content) if content else None
    if not groups:
        return None
    bare = path.partition("?")[0]
    # Rules are about kinds of files, and /a/page is one of HTML.
    paths = [path] if "." in bare.rpartition("/")[2] else [path, bare + ".html"]
    for one in paths:
        refused = refusals(one, groups, agents)
        if refused:
            agent = named_first(refused, groups)
            return f"ai-txt:{agent}:{refused[agent]}"
    return None


def open_reservations(path):
    """
    {file: RobotsStore} from a .jsonl(.gz, .zst) or .parquet of domain, file, content, or a folder of these, or of
    HOST/ai.txt and HOST/.well-known/tdmrep.json. ValueError if there is none in it, or something else.
    """
    path = Path(path)
    rows = {name: [] for name in FILES}
    progress = tqdm(host_files(path), f"opt-outs from {path.name}", unit=" files", disable=None, leave=False)
    for host, name, content in progress:
        name = str(name).rpartition("/")[2]
        if name not in rows:
            raise ValueError(f"{path}: {name!r} in the column file; want {' or '.join(FILES)}")
        rows[name].append((host, content))
    if not any(rows.values()):
        raise ValueError(f"{path}: no opt-outs in it; want rows of domain, file ({', '.join(FILES)}), content")
    return {name: RobotsStore(found) for name, found in rows.items()}


def host_files(path):
    """Yield (host, file, content) from whatever open_reservations takes."""
    if path.is_dir():
        for file in sorted([*path.glob("*/ai.txt"), *path.glob("*/.well-known/tdmrep.json")]):
            host = host_key(f"//{file.relative_to(path).parts[0]}")
            if host:
                yield host, file.name, file.read_bytes()
    yield from store_rows(path, ("file",), ("content",))
