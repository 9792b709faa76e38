"""
Opt-outs other than robots.txt: statements about training in a page, its headers and the other files of its host.

corpus/robots.py has the table of all signals. Each removes a document under its own name:

    noai, noimageai, noml   X-Robots-Tag or <meta name="robots">, for all or for one of our agents (DeviantArt 2022,
                            Mojeek; `agent: directive` as in Google's reference). A page with noimageai loses its text
                            too, as in Spawning's library datadiligence
    usage-header            Content-Usage, Content-Signal or Usage-Pref as a header (corpus/robots.py: forbids_training)
    tdm-file                tdmrep.json: the first rule whose location matches (TDMRep, W3C community group, report)
    tdm-header, tdm-meta    tdm-reservation: 1 in a header or <meta>; each overrides the ones before it, so a page with
                            tdm-reservation: 0 is exempt from its host's file. Of several in one place any 1 counts
    ai-txt                  ai.txt (Spawning): robots.txt rules about kinds of files (*.html); a URL without a file
                            extension counts as HTML
    rsl                     a licence prohibits a use for a <content url> that matches (RSL 1.0, sec. 3.1.1: a
                            prohibition wins over any permission, so all licences of a page count)

MARKS are counted: facts about kept documents that a steward should know, and reasons why some are removed.
"""

import json
import re
from functools import lru_cache
from urllib.parse import urljoin
from xml.etree import ElementTree

from corpus.robots import (
    AGENTS,
    dated_verdict,
    first_refusal,
    forbids_training,
    has_unread_rules,
    parse_robots,
    product_token,
)
from corpus.statements import as_text, spelled, statements
from corpus.stores import FILES, lacks_licence, licence_key, versions_of, was_not_fetched
from corpus.urls import compiled, disallowing, pattern_of, site_key, split_url

# {reason: its text in the report}.
RESERVED = {
    "noai": "the page or its headers forbid AI training",
    "noimageai": "the page or its headers forbid AI training on images",
    "noml": "the page or its headers forbid AI training, in Mojeek's word",
    "tdm-file": "reserved by the host's tdmrep.json",
    "tdm-header": "reserved by the header tdm-reservation",
    "tdm-meta": "reserved by the page's <meta> tdm-reservation",
    "usage-header": "the header Content-Usage or Content-Signal forbids training",
    "usage-file": "a Content-Usage or Content-Signal line of the host's robots.txt forbids training",
    "ai-txt": "disallowed by the host's ai.txt",
    "rsl": "an RSL licence prohibits training",
}
# Headers with preferences about training.
USAGE = ("content-usage", "content-signal", "content-signals", "usage-pref")
# Open questions about a page that no signal forbids; --missing=deny removes the page.
UNKNOWN = {
    "cut": "the host's robots.txt has rules behind its first 500 KiB, which are not read",
    "unread": "headers, <meta> or <link> that cannot be read",
    "tdm-unread": "the host's tdmrep.json cannot be read",
    "tdm-unknown": "the host's tdmrep.json was not fetched",
    "ai-unread": "the host's ai.txt cannot be read",
    "ai-unknown": "the host's ai.txt was not fetched",
    "rsl-unknown": "an RSL licence of the page or host is not in the store, was not fetched or cannot be read",
}
# {mark: its text after a number of documents}.
MARKS = {
    **UNKNOWN,
    "rsl-terms": "an RSL licence permits other uses alone, or asks for payment: not judged",
    "older": "refused by an older file of the host alone",
}


def refusal(doc, robots=None, reservations=None):
    """
    Why a document may not be used for training, as the ledger has it ("robots:AGENT:RULE", "noai"); None if it may.

    doc: dict with url and the columns of statements(). robots: keyword arguments of verdict(), whose agents count for
    all opt-outs and whose missing="deny" removes UNKNOWN; None skips robots.txt. reservations:
    open_reservations(path) or None. The statements of the document itself always count.
    """
    return judge_document(doc, robots, reservations)[0]


def judge_document(doc, robots=None, reservations=None):
    """(refusal(), the set of MARKS and of "known" headers or <meta> of the document)."""
    settings, url, page = dict(robots or {}), doc.get("url"), statements(doc)
    files = versions_of(settings.pop("store", None), site_key(url))
    marks = {page.state} - {"none"}
    if any(map(has_unread_rules, files)):
        marks.add("cut")
    kept, reason, by_older = dated_verdict(url, files, **settings)
    if not kept:
        return reason, marks | {"older"} if by_older else marks
    reason, others = reserved(url, page, reservations, settings.get("agents", AGENTS), files)
    marks |= others
    if not reason and settings.get("missing") == "deny":
        reason = next((mark for mark in UNKNOWN if mark in marks), None)
    return reason, marks


def reservation(doc, store=None, agents=AGENTS):
    """
    Why a document may not be used for training: a key of RESERVED, with a file's rule after a colon. None if it may.

    doc: as in refusal(). store: open_reservations(path), or {file of FILES: anything with .get(site)}.
    """
    return reserved(doc.get("url"), statements(doc), store, agents, [])[0]


def reserved(url, page, store, agents, robots_files):
    """(reservation() of a URL, set of MARKS). page: its statements(). robots_files: those of its site, newest first."""
    names = tokens_of(tuple(agents))
    if directive := first_directive(page, names):
        return directive, set()
    # One preference does not withdraw the opt-out of another (draft-ietf-aipref-vocab-08 sec. 5.1).
    if any(name in USAGE and forbids_training(value) for _, name, value in page.pairs):
        return "usage-header", set()
    store = store or {}
    tdmrep, ai_txt, licences = (store.get(file) for file in FILES)
    reason, marks = mining_reservation(url, page, tdmrep)
    if not reason:
        reason, others = ai_txt_reservation(url, ai_txt, agents)
        marks |= others
    if not reason:
        reason, others = licence_refusal(url, page, licences, robots_files)
        marks |= others
    return reason, marks


def first_of(reasons):
    """(the first reason, "older" if it is not that of the first file, else ""); (None, "") without a reason."""
    return next(((reason, "older" * (n > 0)) for n, reason in enumerate(reasons) if reason), (None, ""))


# ----------------------------------------------------------------------------------------------------------------------
# noai


# noai, no-ai, NO AI (values are in lower case).
DIRECTIVE = re.compile(r"(?<![\w-])no[ _-]?(ai|imageai|ml)(?![\w-])")


@lru_cache
def tokens_of(agents):
    """The names by which these agents, a tuple, are addressed. Rules for `*` are for all."""
    return {product_token(agent) or "*" for agent in [*agents, "*"]}


def first_directive(page, names):
    """noai, noimageai or noml, the first in X-Robots-Tag or <meta> for all or for an agent of these names; or None."""
    for place, name, value in page.pairs:
        if name in ("x-robots-tag", "robots") or place == "meta" and product_token(name) in names:
            # "directive, agent: directive directive"; two lines of a header may be one value, with the name in between.
            for part in re.split("[,\n]", value.lower()):
                agent, _, directives = part.rpartition(":")
                if not agent.strip() or product_token(agent) in {*names, name}:
                    if m := DIRECTIVE.search(directives):
                        return f"no{m[1]}"
    return None


# ----------------------------------------------------------------------------------------------------------------------
# TDMRep


def mining_reservation(url, page, store):
    """
    (reason, marks): the last statement about text and data mining that counts, of tdmrep.json in a store, headers and
    <meta>. Each overrides the ones before it, as TDMRep has it. If one place says both, 1 counts; a value other than 0
    and 1 is unread.
    """
    (host, path), site = split_url(url), site_key(url)
    files = versions_of(store, site)
    locations = (host and disallowing(parse_tdmrep(file, host)[0], path) for file in files)
    location, by_older = first_of(locations)
    reason, marks = location and f"tdm-file:{location}", {by_older} - {""}
    if not location and not all(parse_tdmrep(file, host)[1] for file in files):
        marks.add("tdm-unread")
    if was_not_fetched(store, site):
        marks.add("tdm-unknown")
    for place in ("header", "meta"):
        flags = [flag_of(value) for at, name, value in page.pairs if (at, name) == (place, "tdm-reservation")]
        if True in flags:
            reason, marks = f"tdm-{place}", set()
        elif None in flags:
            marks.add("unread")
        elif flags:
            reason, marks = None, set()
    return reason, marks


def flag_of(value):
    """Whether a value of tdm-reservation reserves: 1 or true; False for 0 or false; None for others."""
    # A column of numbers with missing values holds floats, in a table as text.
    words = re.findall(r"\w+", re.sub(r"\.0*\b", "", as_text(value).lower()))
    return True if {"1", "true"} & {*words} else False if {"0", "false"} & {*words} else None


# Cached because the documents of a host come in clusters.
@lru_cache(maxsize=4096)
def parse_tdmrep(content, host):
    """
    ([rule of compiled()] of a tdmrep.json, in the file's order, whether all of it can be read). One object means a list
    of one, true means 1, and a missing location means the whole host.
    """
    if not content.strip():
        return [], True
    try:
        rows = json.loads(content if isinstance(content, bytes) else content.removeprefix("\ufeff"))
    except Exception:                                      # the file may hold anything
        return [], False
    rules, is_whole = [], isinstance(rows, (list, dict))
    for row in [rows] if isinstance(rows, dict) else rows if is_whole else []:
        row = {spelled(key): value for key, value in row.items()} if isinstance(row, dict) else {}
        flag, location = flag_of(row.get("tdm-reservation")), row.get("location") or "/"
        if flag is None or not isinstance(location, str):
            is_whole = False
        elif pattern := pattern_of(location, host):
            rules.append(compiled(flag, pattern))
    return rules, is_whole


# ----------------------------------------------------------------------------------------------------------------------
# ai.txt


def ai_txt_reservation(url, store, agents):
    """(reason, marks) of a URL by the versions of its host's ai.txt in a store."""
    site, (_, path) = site_key(url), split_url(url)
    files = versions_of(store, site)
    reason, by_older = first_of(ai_txt_refusal(file, path, agents) for file in files)
    if reason:
        return reason, {by_older} - {""}
    is_whole = not any(parse_robots(file) is None or has_unread_rules(file) for file in files)
    unknown = {"ai-unread": not is_whole, "ai-unknown": was_not_fetched(store, site)}
    return None, {mark for mark, applies in unknown.items() if applies}


def ai_txt_refusal(ai_txt, path, agents):
    """"ai-txt:AGENT:RULE" if a host's ai.txt disallows the path for one of the agents, else None."""
    file = parse_robots(ai_txt)
    if not file or not path:
        return None
    # /a/page counts as /a/page.html.
    html = re.sub(r"^([^?]*/[^?/.]*)(\?.*)?$", r"\1.html", path)
    return (first_refusal("ai-txt", path, file.reading, agents) or first_refusal("ai-txt", html, file.reading, agents)
            or first_refusal("ai-txt", path, file.training, agents))


# ----------------------------------------------------------------------------------------------------------------------
# RSL

# The uses that include training: those of RSL 1.0 (sec. 3.4.1), and those of its drafts, which sites still serve.
TRAINING_USES = {"all", "ai-all", "ai-train", "train-ai", "train-genai", "ai", "genai"}


def licence_refusal(url, page, store, robots_files):
    """
    (reason, marks) of the RSL licences of a page: those that its robots.txt, its header Link and its <link> name, and
    those that the store has of its site.
    """
    host, path = split_url(url)
    if not host:
        return None, {"rsl-unknown"} if page.links else set()
    site = site_key(url)
    keys = {key_of_link(f"//{site}/robots.txt", line) for line in licence_lines(robots_files)}
    keys |= {key_of_link(url, link) for link in page.links}
    named = [versions_of(store, key) for key in sorted(keys)]
    # A named licence exists somewhere: neither an empty file nor another licence of the site replaces it.
    is_known = all(any(file.strip() for file in files) for files in named) and not lacks_licence(store, site)
    marks = set() if is_known else {"rsl-unknown"}
    # The licences of a site are several files, not snapshots of one.
    for files in [*named, *([file] for file in versions_of(store, site))]:
        (reason, by_older), others = terms_of(files, host, path)
        if reason:
            return reason, {by_older} - {""}
        marks |= others
    return None, marks


def licence_lines(robots_files):
    """The values of the License lines in the versions of a robots.txt."""
    parsed = filter(None, map(parse_robots, robots_files))
    return [line for file in parsed for line in file.licences]


def terms_of(files, host, path):
    """(first_of() the places at which the versions of a licence prohibit training of a path, marks)."""
    licences = [parse_licence(file, host) for file in files]
    marks = {"rsl-unknown"} if None in licences else set()
    licences = [licence or [] for licence in licences]
    if any(disallowing([rule for rule, _, has_terms in licence if has_terms], path) for licence in licences):
        marks.add("rsl-terms")
    places = [disallowing([rule for rule, prohibits, _ in licence if prohibits], path) for licence in licences]
    return first_of(place and f"rsl:{place}" for place in places), marks


def key_of_link(base, link):
    """The key in a store of the licence that a page or robots.txt at this URL links to; the link if it is no URL."""
    try:
        return licence_key(urljoin(base if "//" in base else f"//{base}", link)) or link
    except ValueError:
        return link


@lru_cache(maxsize=4096)
def parse_licence(content, host):
    """
    [(rule of compiled() for a <content url>, whether it prohibits training, whether it permits other uses alone or asks
    for payment)] of a licence (bytes or str); None if it is something else. Namespaces and case do not matter.
    """
    text = content.decode("utf-8-sig", "replace") if isinstance(content, bytes) else content
    if not text.strip():
        return []
    try:
        # RSL's guide was printed with curly quotes, and is copied with them.
        root = ElementTree.fromstring(re.sub("[\u201c\u201d]", '"', text.strip().removeprefix("\ufeff")).encode())
    except Exception:                                      # the file may hold anything
        return None
    contents = [element for element in root.iter() if tag_of(element) == "content"]
    if tag_of(root) != "rsl" and not contents:
        return None
    terms = []
    for element in contents or [root]:
        pattern = pattern_of(attribute(element, "url"), host)
        if not pattern:
            continue
        prohibits, permits = uses_of(element, "prohibits"), uses_of(element, "permits")
        payments = {attribute(part, "type").lower() for part in element.iter() if tag_of(part) == "payment"}
        is_free = payments <= {"free", "attribution"} and (not permits or permits & TRAINING_USES)
        # A place is written as the licence has it. Both rules "disallow", so that disallowing() finds them.
        terms.append((compiled(True, pattern), bool(prohibits & TRAINING_USES), not is_free))
    return terms


def tag_of(element):
    """The name of an XML element, without its namespace, in lower case."""
    return str(element.tag).rpartition("}")[2].lower()


def attribute(element, name):
    """An attribute of an XML element; "" without it."""
    return next((value for key, value in element.attrib.items() if key.rpartition("}")[2].lower() == name), "")


def uses_of(element, name):
    """The uses that the elements `prohibits` or `permits` inside of an element list, with spaces or commas."""
    return {use for part in element.iter() if tag_of(part) == name and attribute(part, "type").lower() in ("usage", "")
            for use in re.findall(r"[\w-]+", "".join(part.itertext()).lower())}
