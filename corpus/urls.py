"""
URLs: whose page is it, and does a rule of a file of its host match? RFC 9309, sec. 2.2.2, 2.2.3 and 2.3.

    host    example.com         lower case, no user, no port, IDN in punycode: split_url, host_key
    site    example.com:8443    the host, with a port that is not the one of the scheme: site_key. A file of a host is
                                about its port alone
    path    /a?b=%C3%A9         with the query, encoded so that equivalent paths are equal: split_url
    rule    /private/*.pdf$     * is anything, $ the end: compiled, disallowing, pattern_of
"""

import ipaddress
import re
import unicodedata
from urllib.parse import quote, unquote, unquote_to_bytes

# URLs may be hostile: these expressions are unambiguous, so each takes linear time.
# With a scheme, or without one before example.com/a (not mailto:x@example.com); then user:password@, [IPv6]:port or
# host:port, and the path.
_URL = re.compile(r"(?i)(?:(?:(?:https?|ftp):)?//|(?=[^/?#:@\s.]+\.[^/?#:@\s]+(?::\d*)?(?:[/?#]|$)))"
                  r"(?:[^/?#]*@)?(?:\[([^\]@/?#]*)\][:0-9]*|([^:@/?#]*)(?::[0-9]*)?)(?![^/?#])([^#]*)")
_HOST = re.compile(r"(?=.{1,253}$)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
# A whole label that is not ASCII. Longer ones are no host, and to encode them would take quadratic time.
_FOREIGN = re.compile(r"(?<![^.])(?=[^.]{1,63}(?![^.]))[^.]*[^.\0-\x7f][^.]*")
_NOT_PLAIN = re.compile(r"(?:%[0-9A-Fa-f]{2}|[^!-~])+")
# The scheme and the port of a URL.
_PORT = re.compile(r"(?i)\s*(?:(?:(https?|ftp):)?//)?(?:[^/?#]*@)?(?:\[[^/?#]*\]|[^:/?#]*):?0*(\d*)")
# A URL without a scheme may be of either port.
PORTS = {"http": ["80"], "https": ["443"], None: ["80", "443"], "ftp": ["21"]}
# Marks the start and end of a path, and of a pattern anchored there. No URL contains a line break: it is written %0A.
EDGE = "\n"


def host_key(url):
    """The host of a URL, as split_url() writes it. None if it has no host."""
    return split_url(url)[0]


def site_key(url):
    """The key of a URL in a store of files of hosts: its host, or host:port for a port that is not the scheme's."""
    host = host_key(url)
    if not host:
        return None
    scheme, port = _PORT.match(url).groups()
    if not port or port in PORTS[scheme and scheme.lower()]:
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_url(url):
    """(host, path with query) of a URL, normalised so that equivalent URLs are equal. None, None if it is no URL."""
    m = isinstance(url, str) and _URL.match(url.strip())
    if not m:
        return None, None
    address, host, path = m.groups()
    if address is None:
        # The time of normalize() is quadratic in a run of accents. A longer host is invalid after it as well.
        host = unicodedata.normalize("NFKC", unquote(host)[:2_000]).lower()
        host = host.replace("\u3002", ".").removesuffix(".")
        # Encoded label by label, because Python's "idna" codec (IDNA 2003) maps straße.de to strasse.de.
        if not host.isascii():
            host = _FOREIGN.sub(lambda label: "xn--" + label[0].encode("punycode").decode(), host)
        if not _HOST.fullmatch(host):
            return None, None
    else:
        try:
            host = ipaddress.IPv6Address(address).compressed
        except ValueError:
            return None, None
    path = percent("/" + path.removeprefix("/"))
    # Rules write * and $ as %2A and %24 if they mean the characters themselves.
    return host, path.replace("*", "%2A").replace("$", "%24")


def percent(text):
    """RFC 9309 sec. 2.2.2: %7E becomes ~, %c3 becomes %C3, and e-acute becomes %C3%A9."""
    return _NOT_PLAIN.sub(lambda m: quote(unquote_to_bytes(m[0].encode("utf-8", "replace")), safe=""), text)


def compiled(disallows, written, strict=False):
    """
    (rank, disallows, written, parts) of a rule: paths that match contain the parts, in this order.

    Rules are sorted by rank, the longest first. Of equally long ones, those that allow come first, with strict those
    that disallow.
    """
    pattern = percent(written)
    # The space marks the end of the pattern, in which percent() writes a space as %20.
    bound = f"{EDGE}{pattern} ".replace("$ ", EDGE).rstrip(" ")
    rank = (disallows != strict) - 2 * len(pattern)
    return rank, disallows, written, bound.replace("$", "%24").split("*")


def disallowing(rules, path):
    """The first of the rules (from compiled) that matches path, as written, if it disallows; otherwise ""."""
    path = EDGE + path + EDGE
    for _, disallows, written, parts in rules:
        at = 0
        # The leftmost match of each part needs no backtracking: /*a*a*a*a*b takes linear time, like any pattern.
        for part in parts:
            at = path.find(part, at)
            if at < 0:
                break
            at += len(part)
        else:
            return written if disallows else ""
    return ""


def pattern_of(place, host):
    """
    The pattern of a place on a host, which is a path or a whole URL; None if the URL is of another host.

    "" and a missing slash are completed: a writer who names no place means all of the host.
    """
    place = str(place or "").strip()
    m = re.match(r"(?i)(?:https?:)?//[^/?#]*", place)
    if m:
        named = host_key(m[0])
        # A host that cannot be read, such as *.example.com, is taken for this one.
        if named and host and named.removeprefix("www.") != host.removeprefix("www."):
            return None
        place = place[m.end():]
    return place if place.startswith(("/", "*")) else f"/{place}"
