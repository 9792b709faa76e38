"""
Personal data: what must be removed from a document.

E-mail, IP and IBAN become <email-pii>, <ip-pii>, <iban-pii>: three words of the Apertus vocabulary (37,
38, 36). Every search starts at what is rare in prose (@, dots between digits, two colons, two digits) and looks at a
bounded window around it, so the time is linear in the text, whatever the text is.

$ python -m corpus.pii page.txt docs.jsonl                    # what would be scrubbed from them
$ echo "mail me: a@b.org" | python -m corpus.pii --scrub      # the text without it
"""

import sys

if __name__ == "__main__" and not __package__:
    print("pii.py: start it from the project's root, python -m corpus.pii", file=sys.stderr)
    sys.exit(2)

import ipaddress
import re

from configurator import run

paths = []           # text files
scrub = False        # standard input to standard output, without personal data

TAGS = {"email": "<email-pii>", "ip": "<ip-pii>", "iban": "<iban-pii>"}
_LATIN = "".join(map(chr, [*range(0xC0, 0xD7), *range(0xD8, 0xF7), *range(0xF8, 0x250)]))   # müller@ is one name
_ALNUM = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_WORD = frozenset(_ALNUM + "_")                                           # not isalnum(): Chinese has no spaces
_HEX = "0123456789abcdefABCDEF"
_TLD = rf"(?:xn--[A-Za-z0-9-]{{2,59}}|[A-Za-z{_LATIN}]{{2,24}})"
_DOMAIN = re.compile(rf"@(?:[A-Za-z0-9{_LATIN}-]{{1,63}}\.){{1,9}}{_TLD}")
_QUAD = re.compile(r"\.\d{1,3}\.\d{1,3}\.\d{1,3}", re.A)
# Two colons inside of an address, or 2001:: at its end. "Example::" and std::abs, of which code is full, are not looked at any closer.
_COLONS = re.compile(r":(?:[0-9A-Fa-f]{1,4}:(?=[0-9A-Fa-f:.])|:(?<![G-Zg-z_]::)(?:(?=[0-9A-Fa-f:.])|(?<=[0-9A-Fa-f]{4}::)))")
_CHECK_DIGITS = re.compile(r"\d\d(?<=[A-Za-z]{2}\d\d)", re.A)             # 140 MB/s; letters first: 45 MB/s
_VERSION = re.compile(r"\b(?:v|ver|version[a-z]*|release|rev|build|firmware)\W{0,3}\Z", re.I)
_BASE36 = str.maketrans({c: str(int(c, 36)) for c in "ABCDEFGHIJKLMNOPQRSTUVWXYZ"})
_SEPARATORS = frozenset(" -\u00a0\u202f")
# Length by country (SWIFT IBAN registry): where a number ends cannot be told from the text.
IBAN_LENGTH = {entry[:2]: int(entry[2:]) for entry in """
    AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 DK18 DO28 EE20 EG29 ES24
    FI18 FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HN28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32
    LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MN20 MR27 MT31 MU30 NI28 NL18 NO15 OM23 PK24 PL28 PS29 PT25 QA29 RO24
    RS22 RU33 SA24 SC31 SD18 SE24 SI19 SK24 SM27 SO23 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20 YE30""".split()}


def scrub_pii(text):
    """
    (text with TAGS in place of personal data, {"email": n, "ip": n, "iban": n}). str of any length; linear time.

    Private, loopback and documentation addresses go too, as in the official pipeline; :: and ::1 stay. Section numbers
    of four parts read like addresses and go as well: "Ziffer 6.3.1.1", 167 times in 6 MB of German law.
    """
    pieces, counts, at = [], dict.fromkeys(TAGS, 0), 0
    for start, end, kind in find_pii(text):
        pieces += text[at:start], TAGS[kind]
        counts[kind] += 1
        at = end
    return "".join([*pieces, text[at:]]) if pieces else text, counts


def find_pii(text):
    """[(start, end, kind), ...] in order and without overlap: the one that starts first, then the longer."""
    spans, last = [], 0
    found = [*_emails(text), *_ipv4s(text), *_ipv6s(text), *_ibans(text)]
    for start, end, kind in sorted(found, key=lambda span: (span[0], -span[1])):
        if start >= last:
            spans.append((start, end, kind))
            last = end
    return spans


def _run(text, i, chars):
    """(start, end) of the run of chars around position i, at most 64 to each side."""
    left, right = text[max(0, i - 64):i], text[i:i + 64]
    return i - len(left) + len(left.rstrip(chars)), i + len(right) - len(right.lstrip(chars))


def _emails(text):
    for m in _DOMAIN.finditer(text):
        start, _ = _run(text, m.start(), _ALNUM + _LATIN + "._%+-")       # RFC 5321: a local part has at most 64
        start = m.start() - len(text[start:m.start()].lstrip("."))
        if start < m.start():                                             # @name.com is a handle, not an address
            yield start, m.end(), "email"


def _ipv4s(text):
    at = 0
    while m := _QUAD.search(text, at):
        start, end = _run(text, m.start(), _ALNUM + "_.")                 # a whole word: not v1.2.3.4, 1.2.3.4.5
        word = text[start:end].strip(".")
        start = text.index(word, start)
        if _is_address(ipaddress.IPv4Address, word) and not _VERSION.search(text[max(0, start - 16):start]):
            yield start, start + len(word), "ip"
        at = max(end, m.end())


def _ipv6s(text):
    at = 0
    while m := _COLONS.search(text, at):
        start, end = _run(text, m.start(), _HEX + ":.")
        at = max(end, m.end())
        lone = text[start] == ":" != text[start + 1:start + 2]            # "IP:2001:db8::1"
        if not lone and text[max(0, start - 1):start] in _WORD or text[end:end + 1] in _WORD:
            continue                                                      # std::vector, a::b
        word = text[start + lone:end].rstrip(".")
        word = word[:-1] if word.endswith(":") and not word.endswith("::") else word
        # a[::2] and 12::30 read as addresses too: want a group of four digits, or more than two colons.
        plausible = word.count(":") > 2 or any(len(group) == 4 for group in word.split(":"))
        if plausible and any(c.isdigit() for c in word) and _is_address(ipaddress.IPv6Address, word):
            yield start + lone, start + lone + len(word), "ip"


def _is_address(kind, word):
    try:
        kind(word)
    except ValueError:
        return False
    return True


def _ibans(text):
    for m in _CHECK_DIGITS.finditer(text):
        start = m.start() - 2
        length = IBAN_LENGTH.get(text[start:start + 2].upper())
        if length is None or text[max(0, start - 1):start] in _WORD:
            continue
        for width in (length, length + (length - 1) // 4):                # compact, or groups of four
            number = text[start:start + width]
            if width > length and set(number[4::5]) <= _SEPARATORS:
                number = "".join(number[i:i + 4] for i in range(0, width, 5))
            if len(number) == length and _mod97(number) == 1 and text[start + width:start + width + 1] not in _WORD:
                yield start, start + width, "iban"
                break


def _mod97(number):
    """ISO 13616: first four to the end, A = 10 ... Z = 35, modulo 97: 1 if valid. 0 if not letters and digits."""
    if not (number.isascii() and number.isalnum()):
        return 0
    return int((number[4:] + number[:4]).upper().translate(_BASE36)) % 97


def show(path):
    total = dict.fromkeys(TAGS, 0)
    with open(path, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            for start, end, kind in find_pii(line):
                total[kind] += 1
                print(f"{path}:{number}:{start + 1}: {TAGS[kind]:12s} {line[start:end]}")
    print(f"{path}: " + ", ".join(f"{n} {kind}" for kind, n in total.items()))


def main():
    if scrub:
        sys.stdin.reconfigure(errors="replace")
        for line in sys.stdin:
            sys.stdout.write(scrub_pii(line)[0])
    elif not paths:
        raise ValueError("name one or more text files: python -m corpus.pii page.txt; or --scrub what comes in")
    for path in paths:
        show(path)


if __name__ == "__main__":
    run(main, globals())
