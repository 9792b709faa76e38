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

paths = []           # text files
scrub = False        # standard input to standard output, without personal data

TAGS = {"email": "<email-pii>", "ip": "<ip-pii>", "iban": "<iban-pii>"}


def scrub_pii(text):
    """
    (text with TAGS in place of personal data, {"email": n, "ip": n, "iban": n}). str of any length; linear time.

    Private, loopback and documentation addresses go too, as in the official pipeline; :: and ::1 stay. Section numbers
    of four parts read like addresses and go as well: "Ziffer 6.3.1.1", 167 times in 6 MB of German law.
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

_TLD = rf"(?:xn--[A-Za-z0-9-]{{2,59}}|[A-Za-z{_LATIN}]{{2,24}})"
_DOMAIN = re.compile(rf"@(?:[A-Za-z0-9{_LATIN}-]{{1,63}}\.){{1,9}}{_TLD}")


def _emails(text):
    # RFC 5321 allows 64 characters before the @, as many as _runs looks at.
    for m, start, at in _runs(text, _DOMAIN, _ALNUM + _LATIN + "._%+-"):
        name = text[start:at].lstrip(".")
        # Without a name it is a handle like @name.com.
        if name:
            yield at - len(name), m.end(), "email"


# ----------------------------------------------------------------------------------------------------------------------
# IP addresses

_QUAD = re.compile(r"\.\d{1,3}\.\d{1,3}\.\d{1,3}", re.A)
_VERSION = re.compile(r"\b(?:v|ver|version[a-z]*|release|rev|build|firmware)\W{0,3}\Z", re.I)
# Two colons inside of an address, or 2001:: at its end. Code is full of std::abs and "Example::": these do not match.
_COLONS = re.compile(r":(?:[0-9A-Fa-f]{1,4}:(?=[0-9A-Fa-f:.])"
                     r"|:(?<![G-Zg-z_]::)(?:(?=[0-9A-Fa-f:.])|(?<=[0-9A-Fa-f]{4}::)))")


def _ipv4s(text):
    # The whole word must be an address: v1.2.3.4 and 1.2.3.4.5 are none.
    for _, start, end in _runs(text, _QUAD, _ALNUM + "_."):
        word = text[start:end].strip(".")
        start = text.index(word, start)
        before = text[max(0, start - 16):start]
        if _is_address(ipaddress.IPv4Address, word) and not _VERSION.search(before):
            yield start, start + len(word), "ip"


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
_SEPARATORS = frozenset(" -\u00a0\u202f")
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
        # Written without spaces, or in groups of four.
        for width in (length, length + (length - 1) // 4):
            end = start + width
            number = text[start:end]
            if width > length and set(number[4::5]) <= _SEPARATORS:
                number = "".join(number[i:i + 4] for i in range(0, width, 5))
            whole = len(number) == length and text[end:end + 1] not in _WORD
            if whole and _mod97(number) == 1:
                yield start, end, "iban"
                break


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
    with open(path, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            for start, end, kind in find_pii(line):
                counts[kind] += 1
                print(f"{path}:{number}:{start + 1}: {TAGS[kind]:12s} {line[start:end]}")
    summary = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    print(f"{path}: {summary}")


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
    from configurator import run
    run(main, globals())
