"""
The statements of a page about its use: its headers, <meta> and <link>, in the shapes that crawlers give them.

    headers, http_headers, response_headers    all headers        metas    all <meta>        links    all <link>

    {"X-Robots-Tag": "noai"}                   a dict, whose values may be lists
    [["X-Robots-Tag", "noai"]]                 pairs
    [{"name": "X-Robots-Tag", "value": ...}]   objects, as in HAR and Playwright; for <meta> with name and content
    X-Robots-Tag: noai                         lines of text
    "[[...]]", b"..."                          any of these as JSON or as bytes

Single headers and <meta> may have columns of their own (COLUMNS), in upper or lower case, with _ or -. A statement in
another shape is "unread": prepare.py counts it, and removes the document with --missing=deny.
"""

import json
import re
from functools import lru_cache
from typing import NamedTuple

# {column: (where it stands, the name of its header or <meta>; None: it holds names and values)}.
# Columns are found in upper case and with "-" too.
COLUMNS = {
    "headers": ("header", None),
    "http_headers": ("header", None),
    "response_headers": ("header", None),
    "x_robots_tag": ("header", "x-robots-tag"),
    "content_usage": ("header", "content-usage"),
    "content_signal": ("header", "content-signal"),
    "content_signals": ("header", "content-signals"),
    "usage_pref": ("header", "usage-pref"),
    "tdm_reservation": ("header", "tdm-reservation"),
    "link": ("header", "link"),
    "links": ("link", None),
    "meta_robots": ("meta", "robots"),
    "meta_tdm_reservation": ("meta", "tdm-reservation"),
    "metas": ("meta", None),
}
# Columns that say nothing about whether the headers are known, if they can be read.
OTHERS = ("link", "links")
# Headers and <meta> that speak of use, in words: a number, true or false says nothing there.
IN_WORDS = {name for _, name in COLUMNS.values() if name} - {"tdm-reservation"}
# The keys of objects.
NAMES = ("name", "key", "header", "property", "http-equiv", "httpequiv", "itemprop")
VALUES = ("value", "content", "values")
# RFC 9110 sec. 5.1: the name of a header (":status" in HTTP/2), but for the quote of Python's b'...'. RFC 9112 sec. 4:
# the line before headers.
_FIELD = re.compile(r":?([!#$%&*+.^_`|~0-9A-Za-z-]+)[ \t]*:(.*)", re.S)
_STATUS = re.compile(r"HTTP/[\d.]+ \d{3}[^:\\]*")
# RFC 8288: <URL>; rel="license"; type="application/rsl+xml"
_LINK = re.compile(r"<([^<>]*)>([^<]*)")
# The same without the brackets.
_BARE_LINK = re.compile(r"(?:(?<=,)|^)\s*((?:\w+:)?/[^\s<>;,\"]*)(?=\s*;)")
_PARAMETER = re.compile(r";\s*(\w+)\s*=\s*\"?([^\";,]*)")


class Page(NamedTuple):
    """pairs: [(header or meta, name, value)]; links: URLs of RSL licences; state: none, known, or unread (in part)."""

    pairs: list
    links: list
    state: str


def statements(doc):
    """
    The headers, <meta> and <link> of a document, a Page: doc has any of COLUMNS. headers and metas are pairs, a dict, a
    list of objects with name (or key) and value (or content), lines of text, or any of these as JSON or bytes.
    """
    pairs, links, state, readable = [], [], "none", True
    for column, value in cells_of(doc):
        place, name = COLUMNS[column]
        entries, is_whole = ([(name, as_text(value))], is_plain(name, value)) if name else read_pairs(value)
        if place == "link":
            entries, (urls, is_whole) = [], links_in(value)
        else:
            urls = [] if name else links_in(value)[0]
        pairs += [(place, *entry) for entry in entries]
        links += urls
        readable &= is_whole
        if column not in OTHERS:
            state = "known"
    for _, name, value in pairs:
        if name == "link":
            urls, is_whole = links_of_header(value)
            links += urls
            readable &= is_whole
    return Page(pairs, links, state if readable else "unread")


def cells_of(doc):
    """[(column, value)] of the columns of a document that are not empty, in the order of COLUMNS."""
    # With --url_field=link this column is no header.
    cells = [(column_of(name), value) for name, value in doc.items() if name != "link" or value != doc.get("url")]
    cells = [(column, value) for column, value in cells if column in COLUMNS and not is_empty(value)]
    return sorted(cells, key=lambda cell: list(COLUMNS).index(cell[0]))


def has_statements(doc):
    """Whether headers or <meta> came with a document and were read, an empty list too: else it may have opted out."""
    return statements(doc).state == "known"


# ----------------------------------------------------------------------------------------------------------------------
# names and values


@lru_cache(maxsize=4096)
def column_of(name):
    """The name of a column as in COLUMNS."""
    return spelled(name).replace("-", "_")


def spelled(name):
    """A name in lower case, with - for _."""
    return decoded(name).strip().lower().replace("_", "-")


def decoded(value):
    """A value as text."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def is_empty(value):
    """Whether the cell of a table is empty: None, "", b"", NaN."""
    return value is None or value != value or isinstance(value, (str, bytes)) and not value.strip()


def is_plain(name, value):
    """
    Whether the value of a header or <meta> of this name is a text, a number, or a list of these, so that as_text()
    loses nothing of it; of those IN_WORDS a text.
    """
    wrong = (dict, list, tuple, int, float) if name in IN_WORDS else (dict, list, tuple)
    return not any(isinstance(part, wrong) for part in nested(value))


def nested(value):
    """The parts of a list; another value as a list of one."""
    return value if isinstance(value, (list, tuple)) else [value]


def as_text(value):
    """A value of a header or <meta> as text; those of a list with commas between them."""
    # A column of numbers with missing values holds floats: 1.0 for 1.
    return ", ".join(decoded(int(part) if part in (0, 1) else part).strip() for part in nested(value))


# ----------------------------------------------------------------------------------------------------------------------
# headers and <meta>


def read_pairs(value):
    """([(name, text)], whether all of it was read) of headers or <meta>."""
    value = opened(value)
    if isinstance(value, dict):
        keys = set(map(spelled, value))
        value = list(value.items()) if keys.isdisjoint(NAMES) or keys.isdisjoint(VALUES) else [value]
    if not isinstance(value, (list, tuple)):
        return [], value is None
    entries = [pair_of(entry) for entry in value]
    return [pair for pair in entries if pair], None not in entries


def opened(value):
    """The value of a JSON text; another text as its lines, for headers."""
    if not isinstance(value, (str, bytes)):
        return value
    text = decoded(value)
    try:
        return opened(json.loads(text))
    except Exception:                                      # no JSON, or too deep
        # RFC 9112 sec. 5.2: a line that begins with white space continues the one before.
        return re.sub(r"\n[ \t]+(?=\S)", " ", re.sub(r"\r\n?", "\n", text)).split("\n")


def pair_of(entry):
    """(name, text) of an entry of headers or <meta>; () if it has none; None if it cannot be read."""
    if entry is None:
        return ()
    if isinstance(entry, (str, bytes)):
        return pair_of_line(decoded(entry).strip())
    if isinstance(entry, dict):
        return pair_of_object({spelled(key): value for key, value in entry.items() if value is not None})
    if isinstance(entry, (list, tuple)) and len(entry) == 2 and is_name(entry[0]):
        name, value = spelled(entry[0]), entry[1]
        return (name, as_text(value)) if is_plain(name, value) else None
    return None


def is_name(name):
    """Whether a value may be the name of a header or <meta>: a text, and not bytes as Python prints them, b'...'."""
    return isinstance(name, (str, bytes)) and not decoded(name).strip().startswith(("b'", 'b"'))


def pair_of_line(line):
    """pair_of() of a line: X-Robots-Tag: noai."""
    if not line or _STATUS.fullmatch(line):
        return ()
    m = _FIELD.fullmatch(line)
    return m and (spelled(m[1]), m[2].strip())


def pair_of_object(entry):
    """pair_of() of an object without nulls: {"name": ..., "value": ...}, {"x-robots-tag": ...}; () for a <link>."""
    name = next((entry[key] for key in NAMES if key in entry), None)
    value = next((entry[key] for key in VALUES if key in entry), None)
    if name is not None and value is not None:
        return pair_of((name, value))
    if len(entry) == 1 and name is None and value is None:
        return pair_of(next(iter(entry.items())))
    return () if len(entry) < 2 or "rel" in entry else None


# ----------------------------------------------------------------------------------------------------------------------
# links to licences


def links_in(value):
    """
    (the URLs of RSL licences among <link>, whether all of it was read): objects with rel, href and type, or pairs of
    rel and href.
    """
    links, is_whole = [], True
    for entry in nested(opened(value)):
        if isinstance(entry, (list, tuple)) and 2 <= len(entry) <= 3:
            entry = dict(zip(("rel", "href", "type"), entry))
        if isinstance(entry, dict):
            entry = {spelled(key): part for key, part in entry.items() if part is not None}
            is_whole &= not entry.keys().isdisjoint(("rel", "href"))
            rel, href, kind = (as_text(entry.get(key, "")) for key in ("rel", "href", "type"))
            links += [href] * is_rsl(rel, href, kind)
        else:
            is_whole &= is_empty(entry)
    return links, is_whole


def links_of_header(value):
    """(the URLs of RSL licences in a header Link, whether it is one). A URL may lack <> if a parameter follows."""
    urls, value = [], _BARE_LINK.sub(r"<\1>", value)
    for url, rest in _LINK.findall(value):
        parameters = dict(_PARAMETER.findall(rest.lower()))
        urls += [url] * is_rsl(parameters.get("rel", ""), url, parameters.get("type", ""))
    return urls, not value.strip() or bool(_LINK.match(value.lstrip(" ,")))


def is_rsl(rel, href, kind):
    """Whether a link is to an RSL licence: not to one of Creative Commons, which is text for people."""
    if "license" not in rel.lower().split():
        return False
    return "rsl" in kind.lower() or not kind.strip() and bool(re.search(r"(?i)rsl|\.xml(?:[?#]|$)", href))
