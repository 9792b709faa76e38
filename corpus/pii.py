"""
Personal data: find e-mail addresses, IP addresses and IBANs, and replace them before a model can recite them.

These are rules and err: of 66 held-out lines 52 come out exact (tests/test_pii.py). prepare.py does not scrub code, nor
the ids and URLs in the ledger.

    e-mail    an @ with a domain after it and a name before it                                  <email-pii>
    IPv4      a dot and a number, three times, in a word that is an address                     <ip-pii>
    IPv6      two colons, in a run of hexadecimal digits that is an address                     <ip-pii>
    IBAN      two letters, two digits; length by country, check digits by ISO 13616             <iban-pii>

The tags are tokens 37, 38 and 36 of the Apertus vocabulary. Every search starts at a rare pattern (@, dots between
digits, two colons, two digits) and looks at a bounded window around it, so the time is linear in the length of any
text. Source: Apertus report (arXiv 2509.14233) sec. 3.
"""

import ipaddress
import re
import unicodedata

TAGS = {"email": "<email-pii>", "ip": "<ip-pii>", "iban": "<iban-pii>"}


def scrub_pii(text):
    """
    (text with TAGS in place of personal data, {"email": n, "ip": n, "iban": n}). str of any length; linear time.

    Private, loopback and documentation addresses are replaced too, as in the official pipeline; :: and ::1 stay.
    Versions and section numbers of four parts stay if the text before them names them: "Oracle 11.2.0.4", "Ziffer
    6.3.1.1". In doubt a number is replaced: that loses text, but leaks no address.
    """
    pieces, at = [], 0
    counts = dict.fromkeys(TAGS, 0)
    # The first of two overlapping spans counts. If both have the same start, "email" sorts first and is the longer one.
    for start, kind, end in sorted([*emails(text), *ipv4s(text), *ipv6s(text), *ibans(text)]):
        if start >= at:
            pieces += text[at:start], TAGS[kind]
            counts[kind] += 1
            at = end
    return "".join(pieces) + text[at:], counts


# Accented Latin letters, so that müller@ is one name.
LATIN = "\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f"
# Letters and vowel signs of the other alphabets that write spaces, from Greek to Telugu.
OTHER = "".join(c for c in map(chr, range(0x370, 0xE00)) if unicodedata.category(c)[0] in "LM")
# Scripts without spaces, or which attach endings to an address, as Korean does.
UNSPACED = "\u0e01-\u0e4e\u1000-\u109f\u1780-\u17d3\u3041-\u30ff\u3400-\u9fff\uac00-\ud7a3"


def run_start(m, before):
    """The start of the run of characters around a match, at most 64 before it. before: matches all up to the run."""
    return before.match(m.string, max(0, m.start() - 64), m.start()).end()


# ----------------------------------------------------------------------------------------------------------------------
# e-mail addresses

# A label is in one alphabet, so that "a@b.com或" ends where the Latin letters do. A last label that is not Latin must
# follow another that is not, since after "a@b.ru." a sentence may begin without a space. name@2x.png is an image for
# high resolutions, and jquery@3.7.1.min.js a package: no domain ends like the name of such a file.
DOMAIN = re.compile(rf"""(?x)
    @ (?> (?: (?: [A-Za-z0-9{LATIN}-]{{1,63}} | [0-9{OTHER}{UNSPACED}-]{{1,63}} ) \. ){{1,9}}
        (?: xn--[A-Za-z0-9-]{{2,59}} | [A-Za-z{LATIN}]{{2,24}}
            | (?<=[{OTHER}{UNSPACED}]\.) [{OTHER}{UNSPACED}]{{2,24}} ) )
    (?i: (?<!\.(?:png|jpg|gif|svg|bmp|ico|css|mjs|htm|xml|txt|pdf|tgz|jar|whl))
        (?<!\.(?:jpeg|webp|avif|json|html)) (?<!\.(?:js|gz)) )""")
# A name is in quotes, in letters of scripts with spaces, or in letters of any script. @name.com has none: a handle.
ATOM = rf"[A-Za-z0-9{LATIN}{OTHER}._%+'-]"
NAME = re.compile(rf"""(?:"(?:[^"\\\r\n]|\\.){{1,62}}"|(?![.'])(?:{ATOM}+|[\w{UNSPACED}.%+'-]+(?<!{ATOM})))\Z""")


def emails(text):
    for m in DOMAIN.finditer(text):
        at = m.start()
        # RFC 5321 allows names of 64 characters.
        name = NAME.search(text, max(0, at - 64), at)
        # git@host is the same login for everybody.
        if name and name[0] not in ("git", "hg"):
            yield name.start(), "email", m.end()


# ----------------------------------------------------------------------------------------------------------------------
# IP addresses

# The whole word must be an address: v1.2.3.4 and 1.2.3.4.5 are not. ASCII alone decides where a word ends, since
# Chinese has no spaces around an address.
BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
NOT_IPV4 = re.compile(r"(?as)(?:.*[^\w.])?")
IPV4 = re.compile(rf"(?a)\.{{0,64}}({BYTE}(?:\.{BYTE}){{3}})\.{{0,64}}(?![\w.])")
QUAD = re.compile(r"(?a)\.\d{1,3}\.\d{1,3}\.\d{1,3}")
# Text before a version: a word like "version" or "build", or a name with a sign: Chrome/, libfoo-, numpy==, rails (>=.
NAMED = re.compile(r"""(?xs)
    (?: .* \b (?i: v|ver|version[a-z]*|release|rev|build|firmware ) \W{0,3}
    | .*? (?<![\w./:@-]) ([^\W\d_][\w.+\#-]*) ["')\]]{0,2} ,?[ ]?["'(]? (?: (?:[=~<>!]=|~>|(?<=\()=)[ ]?"? | [/-] )
    )\Z""")
# A word and a space before a version or a section: Oracle, §, Art.
SPACED = re.compile(r"(§|\w[\w+#-]*\.?)\s{1,20}\Z")
SECTION = re.compile(r"""(?ix)
    § | art\w*\.? | n[or]s?\.? | nrn?\. | numm?er\w* | num[eé]ro\w* | ziff(?:er)?n?\.?
    | absatz | abs\. | abschnitt\w*
    | sect?\. | sections? | se[cz]\w*i[oó]ne?s? | clauses? | klausel\w* | para(?:graph\w*|s|\.)? | rules? | regel\w*
    | kapitel\w* | chap(?:ters?|itres?|\.) | cap[ií]tul\w* | anlage\w* | anhang\w* | annexe?s? | appendix | items?
    | tab(?:le|elle)?s?\.? | fig(?:ure)?s?\.? | punk?te?n? | points? | пункт\w* | раздел\w* | стать\w*
    | ст\. | п\.""")
# After a name with one of these words a number is an address: "Server 10.0.0.1", ip.addr==10.0.0.1.
NETWORK = re.compile(r"""(?ix) (?<![^\W_])(?:
    ip(?:v4|s)? | add?r\w* | indirizz\w* | direcci\w* | (?:name|web)?servers? | serveur | servidor
    | host(?:s|name)?
    | src | dst | dest\w*
    | sources? | clients? | kunde | users? | benutzer | node | peer | router | rechner | gateway | proxy
    | dns | resolver | (?:sub)?net(?:z|s|work\w*|mask|zwerk)? | [lw]an | vpn | inet | eth\d | remote | localhost
    | from | to | by | via | at | and | or | und | on | of | for | in | is | von | an | auf | bei
    | ping\w* | ssh | telnet | curl | dig | whois | nmap
    | try\w* | connect\w* | https? | ftp | tcp | udp | listen\w* | bind | range | anonym\w* | block\w* | bann\w*
    | visit\w* | contact\w* | received | cidr | x-forwarded-for
    )(?![^\W_])""")
# The number (NUL marks its place) is a heading or a cell of a table: in its line only marks precede it, and nothing or
# a capital letter follows. Or it continues a list whose number before has too few parts for an address.
LINE = re.compile(r"""(?x)
    (?:^|\n) [\s*\#>|]* \0 (?: [ \t|]*\n | \.?[ \t]+[^\W\d_a-z] )
    | (?<![\d.]) \d{1,3} (?:\\?\.\d{1,3}){1,2} [,;]? \s{1,20} (?:[a-z]{1,4}\s{1,20})? \0""")
# Two colons inside an address, or 2001:: at its end. Code is full of std::abs and "Example::": these do not match.
COLONS = re.compile(r"""(?x)
    : (?: [0-9A-Fa-f]{1,4} : (?=[0-9A-Fa-f:.])
        | : (?<![G-Zg-z_]::) (?: (?=[0-9A-Fa-f:.]) | (?<=[0-9A-Fa-f]{4}::) ) )""")
# A single colon before an address belongs to the sentence: "IP:2001:db8::1". Two after a word make a name: std::vector.
# A single colon and full stops after it belong to the sentence too.
NOT_IPV6 = re.compile(r"(?s)(?:.*[^0-9A-Fa-f.:])?")
IPV6 = re.compile(r"(?a)(?::(?!:)|(?<!\w))([\da-fA-F.:]{1,64}?)(?:(?<!:):)?\.{0,64}(?![\w.:])")
# a[::2] and 12::30 parse as addresses: require a decimal digit, and four digits in a row or three colons.
PLAUSIBLE = re.compile(r"(?=.*\d)(?:.*\w{4}|.*:.*:.*:)")


def ipv4s(text):
    last = -100
    for m in QUAD.finditer(text):
        if word := IPV4.match(text, run_start(m, NOT_IPV4)):
            start, end = word.span(1)
            # "Nummern 7.1.1.1, 7.1.2.1 oder 7.1.3.1": the next number of a list is of the same kind as the one before.
            if is_number(text, start, end, start - last < 12):
                last = end
            else:
                yield start, "ip", end


def is_number(text, start, end, listed):
    """
    Is a word of four numbers a version or a section? The 48 characters before it and 24 after it decide. listed: it
    follows another version or section.

    If the only evidence is a capital letter or the line, the parts must be small too: of all addresses 0.6 % have at
    most one part above 31, and 0.02 % have none.
    """
    before = text[max(0, start - 48):start]
    if named := NAMED.match(before):
        return not NETWORK.search(named[1] or "")
    parts = sorted(map(int, text[start:end].split(".")))
    if parts[2] > 31:
        return False
    if spaced := SPACED.search(before):
        name = spaced[1]
        if SECTION.fullmatch(name) or name != name.lower() and not NETWORK.search(name):
            return True
    return 0 < parts[0] and parts[3] <= 31 and (listed or LINE.search(f"{before}\0{text[end:end + 24]}"))


def ipv6s(text):
    for m in COLONS.finditer(text):
        word = IPV6.match(text, run_start(m, NOT_IPV6))
        if word and PLAUSIBLE.match(word[1]):
            try:
                ipaddress.IPv6Address(word[1])
            except ValueError:
                continue
            yield word.start(1), "ip", word.end(1)


# ----------------------------------------------------------------------------------------------------------------------
# IBANs

LINE_BREAK = re.compile(r"[ \t]{0,8}\r?\n[ \t>]{0,16}(?![\s>])")
# Length by country (SWIFT IBAN registry): the text does not show where a number ends.
IBAN_LENGTH = dict(re.findall(r"(..)(\d\d)", """
    AD24 AE23 AL28 AT20 AZ28 BA20 BE16 BG22 BH22 BI27 BR29 BY28 CH21 CR22 CY28 CZ24 DE22 DJ27 DK18 DO28 EE20 EG29 ES24
    FI18 FK18 FO18 FR27 GB22 GE22 GI23 GL18 GR27 GT28 HN28 HR21 HU28 IE22 IL23 IQ23 IS26 IT27 JO30 KW30 KZ20 LB28 LC32
    LI21 LT20 LU20 LV21 LY25 MC27 MD24 ME22 MK19 MN20 MR27 MT31 MU30 NI28 NL18 NO15 OM23 PK24 PL28 PS29 PT25 QA29 RO24
    RS22 RU33 SA24 SC31 SD18 SE24 SI19 SK24 SM27 SO23 ST25 SV28 TL23 TN24 TR26 UA29 VA22 VG24 XK20 YE30"""))
# A country's two letters at the start of a word, then two digits. The lookbehinds come last because digits are rarer
# than letters, which makes the search three times faster.
CHECK_DIGITS = re.compile(rf"""(?ax)
    \d\d (?<=[A-Za-z]{{2}}\d\d) (?<!\w[A-Za-z]{{2}}\d\d) (?<=(?i:{'|'.join(IBAN_LENGTH)})\d\d)""")


def ibans(text):
    for m in CHECK_DIGITS.finditer(text):
        start = m.start() - 2
        near = text[start:start + 80]
        length = int(IBAN_LENGTH[near[:2].upper()])
        # Without spaces, or in groups of four.
        pattern = rf"""(?ax) (?: [^\W_]{{{length}}}
            | (?: [^\W_]{{4}} [\ \u00a0\u2009\u202f-] ){{{(length - 1) // 4}}} [^\W_]{{{(length - 1) % 4 + 1}}} ) \b"""
        # Try the text as it is, with a space for its line break, and without the break.
        for join in (r"\g<0>", " ", ""):
            form = LINE_BREAK.sub(join, near[:length + 10], 1) + near[length + 10:]
            if number := re.match(pattern, form):
                # ISO 13616: move the first four characters to the end; with A = 10 ... Z = 35, modulo 97 must give 1.
                digits = "".join(str(int(c, 36)) for c in number[0][4:] + near[:4] if c.isalnum())
                if int(digits) % 97 == 1:
                    yield start, "iban", start + len(near) - len(form) + number.end()
                    break
