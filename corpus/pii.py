r"""
Personal data: find e-mail addresses, IP addresses and IBANs, and replace them before a model can recite them.

    e-mail    name@domain                                                                       <email-pii>
    IPv4      four numbers up to 255 with dots between them, unless they are a version          <ip-pii>
    IPv6      what ipaddress reads as an address                                                <ip-pii>
    IBAN      length by country, check digits by ISO 13616                                      <iban-pii>

These are rules and err: of 66 held-out lines 52 come out exact (tests/test_pii.py). prepare.py does not scrub code, nor
the ids and URLs in the ledger. The tags are tokens 37, 38 and 36 of the Apertus vocabulary. Source: Apertus report
(arXiv 2509.14233) sec. 3.

The time is linear in the length of any text. Each search begins at a rare sign (@, dots between digits, two colons, two
letters with two digits) and looks at most 80 characters around it.
"""

import ipaddress
import re
import unicodedata
from functools import lru_cache

from stdnum import numdb
from stdnum.iso7064 import mod_97_10

TAGS = {"email": "<email-pii>", "ip": "<ip-pii>", "iban": "<iban-pii>"}


def scrub_pii(text):
    """
    (text with TAGS in place of personal data, {"email": n, "ip": n, "iban": n}). str of any length; linear time.

    Private, loopback and documentation addresses are replaced too, as in the official pipeline; :: and ::1 stay.
    Versions and section numbers of four parts stay if the text before them names them: "Oracle 11.2.0.4", "Ziffer
    6.3.1.1". In doubt a number is replaced: that loses text, but leaks no address.
    """
    spans = [*find_emails(text), *find_ipv4(text), *find_ipv6(text), *find_ibans(text)]
    pieces, at = [], 0
    counts = dict.fromkeys(TAGS, 0)
    # The first of two overlapping spans counts. If both have the same start, "email" sorts first and is the longer one.
    for start, kind, end in sorted(spans):
        if start >= at:
            pieces += text[at:start], TAGS[kind]
            counts[kind] += 1
            at = end
    return "".join(pieces) + text[at:], counts


# ----------------------------------------------------------------------------------------------------------------------
# e-mail addresses

# Characters of names and domains, in square brackets: accented Latin letters; letters and vowel signs of the other
# alphabets that write spaces, from Greek to Telugu; scripts without spaces, and Korean, which adds endings to a word.
LATIN = "\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f"
SPACED = "".join(c for c in map(chr, range(0x370, 0xE00)) if unicodedata.category(c)[0] in "LM")
UNSPACED = "\u0e01-\u0e4e\u1000-\u109f\u1780-\u17d3\u3041-\u30ff\u3400-\u9fff\uac00-\ud7a3"

# RFC 1035 sec. 2.3.1 and RFC 5890: labels of at most 63 characters; the last has letters.    @example.org  @почта.рф
DOMAIN = re.compile(rf"""(?x)
    @ (?>
        # A label is in one alphabet: "a@b.com或" ends where the Latin letters do.
        (?: (?: [A-Za-z0-9{LATIN}-]{{1,63}} | [0-9{SPACED}{UNSPACED}-]{{1,63}} ) \. ){{1,9}}
        (?: xn--[A-Za-z0-9-]{{2,59}}
          | [A-Za-z{LATIN}]{{2,24}}
            # A last label in another alphabet follows one in it: after "a@b.ru." a sentence may begin without a space.
          | (?<=[{SPACED}{UNSPACED}]\.) [{SPACED}{UNSPACED}]{{2,24}} ) )
    # No file: icon@2x.png is an image for high resolutions, jquery@3.7.1.min.js a package.
    (?i: (?<! \. (?: png | jpg | gif | svg | bmp | ico | css | mjs | htm | xml | txt | pdf | tgz | jar | whl ) )
         (?<! \. (?: jpeg | webp | avif | json | html ) )
         (?<! \. (?: js | gz ) ) )""")

# RFC 5322 sec. 3.4.1 and RFC 6532, before the @.    jane.doe+news  "jane doe"
NAME = re.compile(rf"""(?x)
    (?: " (?: [^"\\\r\n] | \\. ){{1,62}} "
      | (?![.'])
        # All in letters of scripts with spaces, or in any letters that do not end like these. "@name.com" has no name.
        (?: [A-Za-z0-9{LATIN}{SPACED}._%+'-]+
          | [\w{UNSPACED}.%+'-]+ (?<![A-Za-z0-9{LATIN}{SPACED}._%+'-]) ) ) \Z""")
# RFC 5321 sec. 4.5.3.1.1
LONGEST_NAME = 64
# The login at a server, as in git@github.com, is the same for everybody.
LOGINS = ("git", "hg")


def find_emails(text):
    """Yield (start, "email", end) of each e-mail address in a text."""
    for domain in DOMAIN.finditer(text):
        at = domain.start()
        name = NAME.search(text, max(0, at - LONGEST_NAME), at)
        if name and name[0] not in LOGINS:
            yield name.start(), "email", domain.end()


# ----------------------------------------------------------------------------------------------------------------------
# IPv4

# Three dots with a number each, the sign at which a search begins.    .0.0.1  .168.1.20
THREE_PARTS = re.compile(r"(?a) \.\d{1,3} \.\d{1,3} \.\d{1,3}", re.VERBOSE)
# All before the word around a sign, at most LOOK_BACK characters. ASCII alone decides where a word ends, since Chinese
# has no spaces around an address.
BEFORE_IPV4 = re.compile(r"(?as) (?: .* [^\w.] )?", re.VERBOSE)
LOOK_BACK = 64
# RFC 3986 sec. 3.2.2, dec-octet; the whole word is the address, but for full stops.    10.0.0.1  192.0.2.235.
IPV4 = re.compile(r"""(?ax)
    \.{0,64}
    ( (?: 25[0-5] | 2[0-4]\d | 1\d\d | [1-9]?\d ) (?: \. (?: 25[0-5] | 2[0-4]\d | 1\d\d | [1-9]?\d ) ){3} )
    \.{0,64} (?![\w.])""")

# The texts before and around a version or a section. Source of these four: lines of tests/golden/pii_own.txt.
#
# A word for versions, or a name with a sign.    version 1.2.3.4  Chrome/90.0.1.2
NAMED = re.compile(r"""(?xs)
    (?: .* \b (?i: v | ver | version[a-z]* | release | rev | build | firmware ) \W{0,3}
      | .*? (?<![\w./:@-]) ([^\W\d_][\w.+\#-]*) ["')\]]{0,2} ,?[ ]?["'(]?
            # numpy==1.2.3.4, rails (>= 5.2.4.1), libfoo-1.2.3.4
            (?: (?: [=~<>!]= | ~> | (?<=\()= ) [ ]?"? | [/-] ) ) \Z""")
# A word and a space.    Oracle 11.2.0.4  § 1.2.3.4
WORD = re.compile(r"(§|\w[\w+#-]*\.?)\s{1,20}\Z")
# That word, if it names a section.    Ziffer 6.3.1.1  Art. 2.1.3.4
SECTION = re.compile(r"""(?ix)
    § | art\w*\.? | n[or]s?\.? | nrn?\. | numm?er\w* | num[eé]ro\w* | ziff(?:er)?n?\.?
    | absatz | abs\. | abschnitt\w*
    | sect?\. | sections? | se[cz]\w*i[oó]ne?s? | clauses? | klausel\w* | para(?:graph\w*|s|\.)? | rules? | regel\w*
    | kapitel\w* | chap(?:ters?|itres?|\.) | cap[ií]tul\w* | anlage\w* | anhang\w* | annexe?s? | appendix | items?
    | tab(?:le|elle)?s?\.? | fig(?:ure)?s?\.? | punk?te?n? | points? | пункт\w* | раздел\w* | стать\w*
    | ст\. | п\.""")
# A name after which a number is an address.    Server 10.0.0.1  ip.addr==10.0.0.1
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
# A number, whose place NUL marks, alone in its line or as a heading, or after one with too few parts for an address.
# "\n 1.2.3.4 Scope"  "3.1, 3.1.2.1"
IN_A_LIST = re.compile(r"""(?x)
    (?: ^ | \n ) [\s*\#>|]* \0 (?: [ \t|]*\n | \.?[ \t]+ [^\W\d_a-z] )
    | (?<![\d.]) \d{1,3} (?: \\?\.\d{1,3} ){1,2} [,;]? \s{1,20} (?: [a-z]{1,4}\s{1,20} )? \0""")


NEAR = 12           # characters between two numbers of a list


def find_ipv4(text):
    """Yield (start, "ip", end) of each IPv4 address in a text."""
    last_number = -100
    for sign in THREE_PARTS.finditer(text):
        word = IPV4.match(text, word_start(BEFORE_IPV4, sign))
        if not word:
            continue
        start, end = word.span(1)
        # "Nummern 7.1.1.1, 7.1.2.1 oder 7.1.3.1": the next number of a list is of the same kind as the one before.
        if is_version_or_section(text, start, end, start - last_number < NEAR):
            last_number = end
        else:
            yield start, "ip", end


def word_start(before, sign):
    """The start of the word around a match, at most LOOK_BACK characters before it. before: matches all up to it."""
    return before.match(sign.string, max(0, sign.start() - LOOK_BACK), sign.start()).end()


def is_version_or_section(text, start, end, follows_one):
    """
    Are the four numbers text[start:end] a version or the number of a section? The 48 characters before and the 24 after
    them decide, in this order:

        after a word for versions: a version; after a name with a sign: a version, unless the name is of a network
        two numbers or more above 31: an address
        after a name or a word for sections: a version or a section
        in a list of such numbers, with the smallest above 0 and none above 31: a section

    follows_one: they are next to others that are.
    """
    before, after = text[max(0, start - 48):start], text[end:end + 24]
    if named := NAMED.match(before):
        return not NETWORK.search(named[1] or "")          # named[1]: the name with a sign, if there is one
    parts = sorted(map(int, text[start:end].split(".")))
    # A capital letter or the line alone is weak evidence: 0.6 % of all addresses have at most one part above 31,
    # and 0.02 % have none.
    if parts[2] > 31:
        return False
    if (word := WORD.search(before)) and is_name_or_section(word[1]):
        return True
    in_a_list = follows_one or IN_A_LIST.search(f"{before}\0{after}")
    return bool(parts[0] > 0 and parts[3] <= 31 and in_a_list)


def is_name_or_section(word):
    """Whether a word before a number names a section, or a product by a capital letter: "Oracle", but not "Server"."""
    return bool(SECTION.fullmatch(word)) or word != word.lower() and not NETWORK.search(word)


# ----------------------------------------------------------------------------------------------------------------------
# IPv6

# Two colons of an address, the sign at which a search begins. Code is full of std::abs and "Example::", which have
# other letters or nothing after them.    2001:db8:  fe80::1
TWO_COLONS = re.compile(r"""(?x)
    : (?: [0-9A-Fa-f]{1,4} : (?=[0-9A-Fa-f:.])
        | : (?<![G-Zg-z_]::) (?: (?=[0-9A-Fa-f:.]) | (?<=[0-9A-Fa-f]{4}::) ) )""")
BEFORE_IPV6 = re.compile(r"(?s) (?: .* [^0-9A-Fa-f.:] )?", re.VERBOSE)
# RFC 4291 sec. 2.2, as a word, which ipaddress judges.    2001:db8::1  ::ffff:192.0.2.1
IPV6 = re.compile(r"""(?ax)
    # A colon before it belongs to the sentence, "IP:2001:db8::1"; two after a word make a name, std::vector.
    (?: : (?!:) | (?<!\w) )
    ( [\da-fA-F.:]{1,64}? )
    # A single colon and full stops after it belong to the sentence too.
    (?: (?<!:) : )? \.{0,64} (?![\w.:])""")
# ipaddress reads a[::2] and 12::30 as well: want a digit, and four digits in a row or three colons.    2001::  1:2::3
PLAUSIBLE_IPV6 = re.compile(r"(?=.*\d) (?: .*\w{4} | .*:.*:.*: )", re.VERBOSE)


def find_ipv6(text):
    """Yield (start, "ip", end) of each IPv6 address in a text."""
    for sign in TWO_COLONS.finditer(text):
        word = IPV6.match(text, word_start(BEFORE_IPV6, sign))
        if word and PLAUSIBLE_IPV6.match(word[1]) and is_ipv6(word[1]):
            yield word.start(1), "ip", word.end(1)


def is_ipv6(word):
    """Whether ipaddress reads a word as an IPv6 address."""
    try:
        ipaddress.IPv6Address(word)
    except ValueError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------------------
# IBANs

# ISO 13616: a country and two check digits, the sign at which a search begins.    GB82  de89
COUNTRY = re.compile(r"(?a) \b [A-Za-z]{2} \d\d", re.VERBOSE)
# A line break inside a number, perhaps of a quoted mail.    "GB82 WEST\n1234"  "GB82 WEST \r\n> 1234"
LINE_BREAK = re.compile(r"[ \t]{0,8} \r?\n [ \t>]{0,16} (?![\s>])", re.VERBOSE)
# Characters that are looked at, and those beyond the length of a number in which a line break counts.
WINDOW, SLACK = 80, 10


@lru_cache(1024)
def iban_pattern(country):
    """
    (length, pattern) of the IBANs of a country, two capital letters; None if it has none. GB82WEST12345698765432, or in
    groups of four, GB82 WEST 1234 5698 7654 32. The length is that of SWIFT's registry, which python-stdnum carries,
    since the text does not show where a number ends.
    """
    structure = numdb.get("iban").info(country)[0][1].get("bban")
    if not structure:
        return None
    # GB: "4!a6!n8!n", 18 characters after the first four.
    length = 4 + sum(map(int, re.findall(r"(\d+)!", structure)))
    groups, rest = divmod(length - 1, 4)
    return length, re.compile(rf"""(?ax)
        (?: [^\W_]{{{length}}}
          | (?: [^\W_]{{4}} [\ \u00a0\u2009\u202f-] ){{{groups}}} [^\W_]{{{rest + 1}}} ) \b""")


def find_ibans(text):
    """Yield (start, "iban", end) of each IBAN in a text."""
    for sign in COUNTRY.finditer(text):
        known = iban_pattern(sign[0][:2].upper())
        if known and (size := iban_size(text[sign.start():sign.start() + WINDOW], *known)):
            yield sign.start(), "iban", sign.start() + size


def iban_size(near, length, pattern):
    """
    The number of characters of the IBAN with which a text begins, or None: as the text is, with a space for its line
    break, or without the break. length, pattern: of iban_pattern().
    """
    for join in (r"\g<0>", " ", ""):
        form = LINE_BREAK.sub(join, near[:length + SLACK], 1) + near[length + SLACK:]
        number = pattern.match(form)
        if number and has_check_digits(number[0]):
            return number.end() + len(near) - len(form)
    return None


def has_check_digits(number):
    """ISO 13616 and ISO 7064: with its first four characters at the end and A = 10 ... Z = 35, modulo 97 gives 1."""
    compact = re.sub(r"\W", "", number)
    return mod_97_10.is_valid(compact[4:] + compact[:4])
