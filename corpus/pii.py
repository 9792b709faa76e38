"""
Personal data: e-mail addresses, IP addresses and IBANs, found and replaced before a model can recite them.

    e-mail    an @ with a domain behind it and a name in front                              <email-pii>
    IPv4      a dot and three more numbers, in a word that is an address                    <ip-pii>
    IPv6      two colons, in a run of hexadecimal digits that is an address                 <ip-pii>
    IBAN      two letters and two digits; length by country, check digits by ISO 13616      <iban-pii>

The three tags are words of the Apertus vocabulary (37, 38, 36). Every search starts at what is rare in prose (@, dots
between digits, two colons, two digits) and looks at a bounded window around it, so the time is linear in the text,
whatever the text is. Source: Apertus report (arXiv 2509.14233) sec. 3.

$ python -m corpus.pii page.txt docs.jsonl                    # what would be scrubbed from them
$ echo "mail me: a@b.org" | python -m corpus.pii --scrub      # the text without it
"""

import sys

if __name__ == "__main__" and not __package__:
    print("pii.py: start it from the project's root, python -m corpus.pii", file=sys.stderr)
    sys.exit(2)

import ipaddress
import re
import string
import unicodedata

paths = []           # text files
scrub = False        # standard input to standard output, without personal data

TAGS = {"email": "<email-pii>", "ip": "<ip-pii>", "iban": "<iban-pii>"}


def scrub_pii(text):
    """
    (text with TAGS in place of personal data, {"email": n, "ip": n, "iban": n}). str of any length; linear time.

    Private, loopback and documentation addresses go too, as in the official pipeline; :: and ::1 stay. So do versions
    and section numbers of four parts where what stands before says so: "Oracle 11.2.0.4", "Ziffer 6.3.1.1". A doubtful
    one goes: text is lost, but no address.
    """
    pieces = []
    counts = dict.fromkeys(TAGS, 0)
    at = 0
    for start, end, kind in find_pii(text):
        pieces += text[at:start], TAGS[kind]
        counts[kind] += 1
        at = end
    pieces.append(text[at:])
    return "".join(pieces), counts


def find_pii(text):
    """[(start, end, kind), ...] in order and without overlap: the one that starts first, then the longer."""
    found = []
    for find in (_emails, _ipv4s, _ipv6s, _ibans):
        found += find(text)
    found.sort(key=lambda span: (span[0], -span[1]))
    spans = []
    last_end = 0
    for start, end, kind in found:
        if start >= last_end:
            spans.append((start, end, kind))
            last_end = end
    return spans


# ----------------------------------------------------------------------------------------------------------------------
# characters

_ALNUM = string.ascii_letters + string.digits
# ASCII alone decides where a word ends, not str.isalnum(): Chinese text has no spaces around an address.
_WORD = frozenset(_ALNUM + "_")
# Accented Latin letters, so that müller@ is one name.
_LATIN = "".join(filter(str.isalpha, map(chr, range(0xC0, 0x250))))
# Letters and vowel signs of the other alphabets that write spaces, from Greek to Telugu; and those that write none, or
# glue endings to an address, as Korean does.
_OTHER = "".join(c for c in map(chr, range(0x370, 0xE00)) if unicodedata.category(c)[0] in "LM")
_UNSPACED = "\u0e01-\u0e4e\u1000-\u109f\u1780-\u17d3\u3041-\u30ff\u3400-\u9fff\uac00-\ud7a3"


def _runs(text, pattern, chars):
    """
    (match, start, end) for each match of a pattern: the run of chars around its begin, at most 64 to each side.

    The search goes on behind the run, so that a long run is looked at in pieces and not once for each match in it.
    """
    at = 0
    while m := pattern.search(text, at):
        i = m.start()
        left = text[max(0, i - 64):i]
        right = text[i:i + 64]
        start = i - len(left) + len(left.rstrip(chars))
        end = i + len(right) - len(right.lstrip(chars))
        yield m, start, end
        at = max(end, m.end())


# ----------------------------------------------------------------------------------------------------------------------
# e-mail addresses

# A label is of one alphabet, so that "a@b.com或" ends where the Latin letters do; and an end in another alphabet stands
# behind a label in it, since after "a@b.ru." a sentence may begin without a space.
_LABEL = rf"(?:[A-Za-z0-9{_LATIN}-]{{1,63}}|[0-9{_OTHER}{_UNSPACED}-]{{1,63}})"
_TLD = (rf"(?:xn--[A-Za-z0-9-]{{2,59}}|[A-Za-z{_LATIN}]{{2,24}}"
        rf"|(?<=[{_OTHER}{_UNSPACED}]\.)[{_OTHER}{_UNSPACED}]{{2,24}})")
_DOMAIN = re.compile(rf"@(?:{_LABEL}\.){{1,9}}{_TLD}")
# The name, read backwards from the @. RFC 5321 allows 64 characters.
_NAME = re.compile(rf"[A-Za-z0-9{_LATIN}{_OTHER}._%+'-]{{1,64}}|[\w{_UNSPACED}.%+'-]{{1,64}}")
_QUOTED = re.compile(r'"(?:[^"\\\r\n]|\\.){1,62}"\Z')
# name@2x.png is an image for a fine screen, and jquery@3.7.1.min.js a package. None of these ends is a domain's.
_FILE = re.compile(r"\.(?:png|jpe?g|gif|svg|webp|avif|bmp|ico|css|m?js|json|html?|xml|txt|pdf|t?gz|jar|whl)\Z", re.I)


def _emails(text):
    for m in _DOMAIN.finditer(text):
        at = m.start()
        left = text[max(0, at - 64):at]
        if quoted := _QUOTED.search(left):
            name = quoted[0]
        elif backwards := _NAME.match(left[::-1]):
            name = backwards[0][::-1].lstrip(".'")
        else:
            continue
        # Without a name it is a handle like @name.com. git@host is how everybody logs in there.
        if name and name not in ("git", "hg") and not _FILE.search(m[0]):
            yield at - len(name), m.end(), "email"


# ----------------------------------------------------------------------------------------------------------------------
# IP addresses

_QUAD = re.compile(r"\.\d{1,3}\.\d{1,3}\.\d{1,3}", re.A)
_VERSION = re.compile(r"\b(?:v|ver|version[a-z]*|release|rev|build|firmware)\W{0,3}\Z", re.I)
# What stands before a version or a section: Chrome/, libfoo-, numpy==, rails (>=; Oracle and a space; §, Art.
_NAMED = re.compile(r"""(?<![\w./:@-])([^\W\d_][\w.+#-]*)"""
                    r"""(?:["')\]]{0,2},? ?["'(]?(?:[=~<>!]=|~>|(?<=\()=) ?"?|[/-])\Z""")
_SPACED = re.compile(r"(§|\w[\w+#-]*\.?)\s{1,20}\Z")
_SECTION = re.compile(r"""
    § | art\w*\.? | n[or]s?\.? | nrn?\. | numm?er\w* | num[eé]ro\w* | ziff(?:er)?n?\.?
    | absatz | abs\. | abschnitt\w*
    | sect?\. | sections? | se[cz]\w*i[oó]ne?s? | clauses? | klausel\w* | para(?:graph\w*|s|\.)? | rules? | regel\w*
    | kapitel\w* | chap(?:ters?|itres?|\.) | cap[ií]tul\w* | anlage\w* | anhang\w* | annexe?s? | appendix | items?
    | tab(?:le|elle)?s?\.? | fig(?:ure)?s?\.? | punk?te?n? | points? | пункт\w* | раздел\w* | стать\w* | ст\. | п\.
    """, re.I | re.X)
# A name with one of these words in front is that of an address: "Server 10.0.0.1", ip.addr==10.0.0.1.
_NETWORK = re.compile(r"""(?<![^\W_])(?:
    ip(?:v4|s)? | add?r\w* | indirizz\w* | direcci\w* | (?:name|web)?servers? | serveur | servidor
    | host(?:s|name)? | src
    | dst | dest\w* | sources? | clients? | kunde | users? | benutzer | node | peer | router | rechner | gateway | proxy
    | dns
    | resolver | (?:sub)?net(?:z|s|work\w*|mask|zwerk)? | [lw]an | vpn | inet | eth\d | remote | localhost
    | from | to | by
    | via | at | and | or | und | on | of | for | in | is | von | an | auf | bei
    | ping\w* | ssh | telnet | curl | dig | whois
    | nmap
    | try\w* | connect\w* | https? | ftp | tcp | udp | listen\w* | bind | range | anonym\w* | block\w* | bann\w*
   
    | visit\w* | contact\w* | received | cidr | x-forwarded-for
    )(?![^\W_])""", re.I | re.X)
# A heading or a cell of a table: alone in its line behind marks, or with a word behind it. Or the next of a list, whose
# one before has too few parts for an address.
_LINE = re.compile(r"(?:^|\n)[\s*#>|]*\Z")
_TITLE = re.compile(r"[ \t|]*\n|\.?[ \t]+[^\W\d_a-z]")
_LIST = re.compile(r"(?<![\d.])\d{1,3}(?:\\?\.\d{1,3}){1,2}[,;]?\s{1,20}(?:[a-z]{1,4}\s{1,20})?\Z")
# Two colons inside of an address, or 2001:: at its end. Code is full of std::abs and "Example::": these do not match.
_COLONS = re.compile(r":(?:[0-9A-Fa-f]{1,4}:(?=[0-9A-Fa-f:.])"
                     r"|:(?<![G-Zg-z_]::)(?:(?=[0-9A-Fa-f:.])|(?<=[0-9A-Fa-f]{4}::)))")


def _ipv4s(text):
    last = -100
    # The whole word must be an address: v1.2.3.4 and 1.2.3.4.5 are none.
    for _, start, end in _runs(text, _QUAD, _ALNUM + "_."):
        word = text[start:end].strip(".")
        start = text.index(word, start)
        end = start + len(word)
        if not _is_address(ipaddress.IPv4Address, word):
            continue
        # "Nummern 7.1.1.1, 7.1.2.1 oder 7.1.3.1": the next of such a list is what the one before is.
        before = text[max(0, start - 48):start]
        if _is_number(word, before, text[end:end + 24], start - last < 12):
            last = end
        else:
            yield start, end, "ip"


def _is_number(word, before, after, listed):
    """
    Is a word of four numbers a version or a section, by 48 characters before and 24 after it? listed: follows another.

    Where only a capital letter or a line speaks for it, its parts must be small too: of all addresses 0.6 % have at
    most one part above 31, and 0.02 % none.
    """
    if _VERSION.search(before):
        return True
    if named := _NAMED.search(before):
        return not _NETWORK.search(named[1])
    parts = [int(part) for part in word.split(".")]
    if sum(part > 31 for part in parts) > 1:
        return False
    name = _SPACED.search(before)
    if name and (_SECTION.fullmatch(name[1]) or name[1] != name[1].lower() and not _NETWORK.search(name[1])):
        return True
    heading = _LINE.search(before) and _TITLE.match(after)
    return 0 < min(parts) and max(parts) <= 31 and bool(heading or listed or _LIST.search(before))


def _ipv6s(text):
    for _, start, end in _runs(text, _COLONS, string.hexdigits + ".:"):
        # "IP:2001:db8::1": a single colon in front belongs to the sentence. Two behind a word make a name: std::vector.
        if text[start] == ":" != text[start + 1:start + 2]:
            start += 1
        elif text[max(0, start - 1):start] in _WORD:
            continue
        # A full stop and a single colon behind it belong to the sentence too.
        word = text[start:end].rstrip(".")
        if not word.endswith("::"):
            word = word.removesuffix(":")
        # a[::2] and 12::30 parse as addresses: ask for four digits in a row or three colons, and for a decimal digit.
        plausible = re.search(r"\w{4}|:.*:.*:", word) and re.search(r"\d", word)
        whole = text[end:end + 1] not in _WORD
        if whole and plausible and _is_address(ipaddress.IPv6Address, word):
            yield start, start + len(word), "ip"


def _is_address(kind, word):
    try:
        kind(word)
    except ValueError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------------------
# IBANs

# Two letters at the begin of a word, two digits. The lookbehinds come last because digits are rarer than letters, which
# makes the search three times faster.
_CHECK_DIGITS = re.compile(r"\d\d(?<=[A-Za-z]{2}\d\d)(?<!\w[A-Za-z]{2}\d\d)", re.A)
_SEPARATORS = frozenset(" -\u00a0\u2009\u202f")
_LINE_BREAK = re.compile(r"[ \t]{0,8}\r?\n[ \t>]{0,16}(?![\s>])")
# Length by country (SWIFT IBAN registry): where a number ends cannot be told from the text.
IBAN_LENGTH = {
    entry[:2]: int(entry[2:])
    for entry in """
    AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 DK18 DO28 EE20 EG29 ES24
    FI18 FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HN28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32
    LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MN20 MR27 MT31 MU30 NI28 NL18 NO15 OM23 PK24 PL28 PS29 PT25 QA29 RO24
    RS22 RU33 SA24 SC31 SD18 SE24 SI19 SK24 SM27 SO23 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20 YE30""".split()
}


def _ibans(text):
    for m in _CHECK_DIGITS.finditer(text):
        start = m.start() - 2
        country = text[start:start + 2].upper()
        length = IBAN_LENGTH.get(country)
        if length is None:
            continue
        near = text[start:start + 80]
        width = _iban_width(near, length) or _iban_over_lines(near, length)
        if width:
            yield start, start + width, "iban"


def _iban_width(text, length):
    """How many characters at the begin of a text are an IBAN of a country's length; 0 if there is none."""
    # Written without spaces, or in groups of four.
    for width in (length, length + (length - 1) // 4):
        number = text[:width]
        if width > length and set(number[4::5]) <= _SEPARATORS:
            number = "".join(number[i:i + 4] for i in range(0, width, 5))
        whole = len(number) == length and text[width:width + 1] not in _WORD
        if whole and _mod97(number) == 1:
            return width
    return 0


def _iban_over_lines(text, length):
    """The same for an IBAN with a line break in it: as with a space in the place of the break, or with nothing."""
    gap = _LINE_BREAK.search(text, 0, length + 10)
    if gap:
        for join in (" ", ""):
            width = _iban_width(text[:gap.start()] + join + text[gap.end():], length)
            if width > gap.start():
                return width + len(gap[0]) - len(join)
    return 0


def _mod97(number):
    """ISO 13616: first four to the end, A = 10 ... Z = 35, modulo 97: 1 if valid. 0 if not letters and digits."""
    if not (number.isascii() and number.isalnum()):
        return 0
    turned = number[4:] + number[:4]
    digits = "".join(str(int(c, 36)) for c in turned)
    return int(digits) % 97


# ----------------------------------------------------------------------------------------------------------------------
# the command


def show(path):
    """Print each piece of personal data of a file with its line and column, then the counts."""
    counts = dict.fromkeys(TAGS, 0)
    number = 1
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in blocks(file):
            at = 0
            for start, end, kind in find_pii(text):
                counts[kind] += 1
                number += text.count("\n", at, start)
                at = start
                column = start - text.rfind("\n", 0, start)
                found = " ".join(text[start:end].split("\n"))
                print(f"{path}:{number}:{column}: {TAGS[kind]:12s} {found}")
            number += text.count("\n", at)
    summary = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    print(f"{path}: {summary}")


def blocks(file):
    """Yield whole lines of a file, about a megabyte at a time: an IBAN may go over a line break."""
    while lines := file.readlines(1 << 20):
        yield "".join(lines)


def main():
    if scrub:
        sys.stdin.reconfigure(errors="replace")
        for text in blocks(sys.stdin):
            sys.stdout.write(scrub_pii(text)[0])
    elif not paths:
        raise ValueError("name one or more text files: python -m corpus.pii page.txt; or --scrub what comes in")
    for path in paths:
        show(path)


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
