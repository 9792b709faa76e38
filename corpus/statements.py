"""
What a page says about its use: its headers, <meta> and <link>, in the shapes that crawlers give them.

    headers, http_headers, response_headers    all headers        metas    all <meta>        links    all <link>

    {"X-Robots-Tag": "noai"}                   a dict, whose values may be lists
    [["X-Robots-Tag", "noai"]]                 pairs
    [{"name": "X-Robots-Tag", "value": ...}]   objects, as in HAR and Playwright; for <meta> with name and content
    X-Robots-Tag: noai                         lines of text
    "[[...]]", b"..."                          any of these as JSON or as bytes

Single headers and <meta> may have columns of their own (COLUMNS), in upper or lower case, with _ or -. What has another
shape is "unread": prepare.py counts it, and removes the document with --missing=deny.
"""

import json
import re
from functools import lru_cache
from typing import NamedTuple

# {column: (where it stands, the name of its header or <meta>; None: it holds names and values)}. A later one is more
# specific. Columns are found in upper case and with "-" too.
COLUMNS = {
    "headers": ("header", None),
    "http_headers": ("header", None),
    "response_headers": ("header", None),
    "x_robots_tag": ("header", "x-robots-tag"),
    "content_usage": ("header", "content-usage"),
    "content_signal": ("header", "content-signal"),
    "tdm_reservation": ("header", "tdm-reservation"),
    "link": ("header", "link"),
    "links": (None, None),
    "meta_robots": ("meta", "robots"),
    "meta_tdm_reservation": ("meta", "tdm-reservation"),
    "metas": ("meta", None),
}
NAMES = ("name", "key", "header", "property", "http-equiv", "httpequiv", "itemprop")
VALUES = ("value", "content", "values")
# RFC 9110 sec. 5.1 and 4: the name of a header (":status" in HTTP/2), and the line before headers.
_FIELD = re.compile(r":?([!#$%&'*+.^_`|~0-9A-Za-z-]+)[ \t]*:(.*)", re.S)
_STATUS = re.compile(r"HTTP/[\d.]+ \d{3}[^:\\]*")
# RFC 8288: <URL>; rel="license"; type="application/rsl+xml"
_LINK = re.compile(r"<([^<>]*)>([^<]*)")


class Page(NamedTuple):
    """pairs: [(header or meta, name, value)]; links: URLs of RSL licences; state: none, known, or unread (in part)."""

    pairs: list
    links: list
    state: str


def has_statements(doc):
    """Whether headers or <meta> came with a document and were read, an empty list too: else it may have opted out."""
    return statements(doc).state == "known"


def statements(doc):
    """
    The headers, <meta> and <link> of a document, a Page: doc has any of COLUMNS. headers and metas are pairs, a dict, a
    list of objects with name (or key) and value (or content), lines of text, or any of these as JSON or bytes.
    """
    cells = [(column_of(name), value) for name, value in doc.items()]
    cells = [(column, value) for column, value in cells if column in COLUMNS and not is_empty(value)]
    pairs, links, states = [], [], {"none"}
    for column, (place, name) in COLUMNS.items():
        for value in [value for cell, value in cells if cell == column]:
            if name:
                entries, is_whole = [(name, as_text(value))], is_plain(value)
            else:
                links += links_in(opened(value))
                entries, is_whole = read_pairs(value) if place else ([], True)
            pairs += [(place, *entry) for entry in entries]
            # Columns of these names may hold other links.
            if column not in ("link", "links"):
                states.add("known" if is_whole else "unread")
    links += [url for _, name, value in pairs if name == "link" for url in links_of_header(value)]
    state = next(state for state in ("unread", "known", "none") if state in states)
    return Page(pairs, links, state)


@lru_cache(maxsize=4096)
def column_of(name):
    """The name of a column as in COLUMNS."""
    return spelled(name).replace("-", "_")


def spelled(name):
    """A name in lower case, with - for _."""
    return str(name).strip().lower().replace("_", "-")


def is_plain(value):
    """Whether a value is a text, a number, or a list of these, so that as_text() loses nothing of it."""
    parts = value if isinstance(value, (list, tuple)) else [value]
    return not any(isinstance(part, (dict, list, tuple)) for part in parts)


def is_empty(value):
    """Whether the cell of a table is empty: None, "", b"", NaN."""
    return isinstance(value, (str, bytes)) and not value.strip() or value is None or value != value


def opened(value):
    """The value of bytes or of a JSON text; other text as its lines, for headers."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if not isinstance(value, str):
        return value
    try:
        return opened(json.loads(value))
    except Exception:                                      # no JSON, or too deep
        pass
    # RFC 9112 sec. 5.2: a line that begins with white space continues the one before.
    return re.sub(r"\n[ \t]+(?=\S)", " ", re.sub(r"\r\n?", "\n", value)).split("\n")


def read_pairs(value):
    """([(name, text)], whether all of it was read) of headers or <meta>."""
    value = opened(value)
    if isinstance(value, dict):
        keys = {*map(spelled, value)}
        value = [value] if keys & {*NAMES} and keys & {*VALUES} else [*value.items()]
    if not isinstance(value, (list, tuple)):
        return [], value is None
    entries = [pair_of(entry) for entry in value]
    return [pair for pair in entries if pair], None not in entries


def pair_of(entry):
    """(name, text) of an entry of headers or <meta>; () if it has none; None if it cannot be read."""
    if isinstance(entry, bytes):
        entry = entry.decode("utf-8", "replace")
    if entry is None or isinstance(entry, str) and (not entry.strip() or _STATUS.fullmatch(entry.strip())):
        return ()
    if isinstance(entry, str):
        m = _FIELD.fullmatch(entry.strip())
        return m and (spelled(m[1]), m[2].strip())
    if isinstance(entry, dict):
        entry = {spelled(key): value for key, value in entry.items() if value is not None}
        names, values = ([entry[key] for key in keys if key in entry] for keys in (NAMES, VALUES))
        if "rel" in entry or not entry or len(entry) == 1 and (names or values):
            return ()
        # {"charset": "utf-8"}
        entry = [*zip(names, values)][0] if names and values else [*entry.items()][0] if len(entry) == 1 else None
    if isinstance(entry, (list, tuple)) and len(entry) == 2 and is_plain(entry[1]):
        name = entry[0]
        return spelled(name.decode("utf-8", "replace") if isinstance(name, bytes) else name), as_text(entry[1])
    return None


def as_text(value):
    """A value of a header or <meta> as text; those of a list with commas between them."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, (list, tuple)):
        return ", ".join(as_text(part) for part in value if is_plain(part) and not isinstance(part, (list, tuple)))
    # A column of numbers with missing values holds floats: 1.0 for 1.
    return str(int(value) if value in (0, 1) else value).strip()


def links_in(entries):
    """The URLs of RSL licences in a list of <link>: objects with rel, href and type, or pairs of rel and href."""
    links = []
    for entry in entries if isinstance(entries, (list, tuple)) else [entries]:
        if isinstance(entry, (list, tuple)) and 2 <= len(entry) <= 3:
            entry = dict(zip(("rel", "href", "type"), entry))
        if isinstance(entry, dict):
            rel, href, kind = (as_text(entry.get(key) or "") for key in ("rel", "href", "type"))
            links += [href] * is_rsl(rel, href, kind)
    return links


def links_of_header(value):
    """The URLs of RSL licences in a header Link."""
    urls = []
    for url, parameters in _LINK.findall(value):
        of = dict(re.findall(r";\s*(\w+)\s*=\s*\"?([^\";,]*)", parameters.lower()))
        urls += [url] * is_rsl(of.get("rel", ""), url, of.get("type", ""))
    return urls


def is_rsl(rel, href, kind):
    """Whether a link is to an RSL licence: not to one of Creative Commons, which is text for people."""
    if "license" not in rel.lower().split():
        return False
    return "rsl" in kind.lower() or not kind.strip() and bool(re.search(r"(?i)rsl|\.xml(?:[?#]|$)", href))
