"""
Personal data against ISO 13616, the registry of IBANs, ipaddress, and labelled lines.

golden/pii_own.txt: 408 lines that the rules were written on, half of them traps. golden/pii_held_out.txt: 66 others,
the examples of Wikipedia's article on e-mail addresses, and lines of Python packages with four numbers. Personal data
is in \u27e6kind:text\u27e7; \\n and \\r are line breaks.
"""
import ipaddress
import os
import random
import re

import pytest

from conftest import ROOT
from corpus.pii import IBAN_LENGTH, TAGS, scrub_pii

MARK = re.compile(r"\u27e6(email|ip|iban):(.*?)\u27e7", re.S)
NOTHING = dict(email=0, ip=0, iban=0)


def labelled(name):
    """[(text, the text as it must become)] of a file."""
    with open(os.path.join(ROOT, "tests", "golden", name), encoding="utf-8") as f:
        lines = [line.rstrip("\n").replace("\\r", "\r").replace("\\n", "\n") for line in f]
    return [(MARK.sub(r"\2", line), MARK.sub(lambda m: TAGS[m[1]], line)) for line in lines]


def test_own_lines_are_scrubbed_to_the_character():
    rows = labelled("pii_own.txt")
    assert [text for text, clean in rows if scrub_pii(text)[0] != clean] == []
    assert [sum(clean.count(tag) for _, clean in rows) for tag in TAGS.values()] == [79, 110, 74]


def test_lines_that_no_rule_was_written_on():
    """Most of the wrong ones are a/b@c, and versions that look like addresses."""
    rows = labelled("pii_held_out.txt")
    assert sum(scrub_pii(text)[0] == clean for text, clean in rows) == 52


# The example numbers of the SWIFT registry, one per country: the authority for lengths and check digits.
IBANS = """
    AD1400080001001234567890 AE460090000000123456789 AL35202111090000000001234567 AT483200000012345864
    AZ77VTBA00000000001234567890 BA393385804800211234 BE71096123456769 BG18RZBB91550123456789 BH02CITI00001077181611
    BR1500000000000010932840814P2 BY86AKBB10100000002966000000 CH5604835012345678009 CR23015108410026012345
    CY21002001950000357001234567 CZ5508000000001234567899 DE75512108001245126199 DK9520000123456789
    DO22ACAU00000000000123456789 EE471000001020145685 EG800002000156789012345180002 ES7921000813610123456789
    FI1410093000123458 FO9264600123456789 FR1420041010050500013M02606 GB82WEST12345698765432 GE60NB0000000123456789
    GI04BARC000001234567890 GL8964710123456789 GR9608100010000001234567890 GT20AGRO00000000001234567890
    HR1723600001101234565 HU93116000060000000012345676 IE64IRCE92050112345678 IL170108000000012612345
    IQ20CBIQ861800101010500 IS750001121234563108962099 IT60X0542811101000000123456 JO71CBJO0000000000001234567890
    KW81CBKU0000000000001234560101 KZ563190000012344567 LB92000700000000123123456123
    LC14BOSL123456789012345678901234 LI7408806123456789012 LT601010012345678901 LU120010001234567891
    LV97HABA0012345678910 LY83002048000020100120361 MC5810096180790123456789085 MD21EX000000000001234567
    ME25505000012345678951 MK07200002785123453 MR1300020001010000123456753 MT31MALT01100000000000000000123
    MU43BOMM0101123456789101000MUR NL02ABNA0123456789 NO8330001234567 PK36SCBL0000001123456702
    PL10105000997603123456789123 PS92PALS000000000400123456702 PT50002700000001234567833
    QA54QNBA000000000000693123456 RO09BCYP0000001234567890 RS35105008123123123173 SA4420000001234567891234
    SC52BAHL01031234567890123456USD SE7280000810340009783242 SI56192001234567892 SK8975000000000012345671
    SM76P0854009812123456789123 ST23000200000289355710148 SV43ACAT00000000000000123123 TL380010012345678910106
    TN5904018104004942712345 TR320010009999901234567890 UA903052992990004149123456789 VA59001123000012345678
    VG07ABVI0000000123456789 XK051212012345678906""".split()
FORMS = [
    lambda n: n,
    lambda n: " ".join(n[i:i + 4] for i in range(0, len(n), 4)),
    lambda n: "\u00a0".join(n.lower()[i:i + 4] for i in range(0, len(n), 4)),
]


@pytest.mark.parametrize("form", FORMS)
def test_published_ibans_are_scrubbed_whole_in_every_form(form):
    assert len({n[:2] for n in IBANS}) == len(IBANS) >= 75
    text = "".join(f"{form(n)} to {form(n)}, 12 a.\n\u53f7{form(n)}\u306f\n" for n in IBANS)
    clean, counts = scrub_pii(text)
    assert clean == "<iban-pii> to <iban-pii>, 12 a.\n\u53f7<iban-pii>\u306f\n" * len(IBANS)
    assert counts == dict(NOTHING, iban=3 * len(IBANS))


def test_ibans_of_every_country_by_iso_13616():
    for country, length in IBAN_LENGTH.items():
        bban = ("1234567890" * 4)[:int(length) - 4]
        digits = "".join(str(int(c, 36)) for c in bban + country + "00")
        check = 98 - int(digits) % 97
        assert scrub_pii(f"({country}{check:02d}{bban})")[0] == "(<iban-pii>)"
        # One off is no IBAN.
        assert scrub_pii(f"({country}{check % 97 + 1:02d}{bban})")[1]["iban"] == 0


# A text and its scrubbed form; then versions, times, code and near-IBANs, which stay.
SCRUBBED = """
a@b.co a@b.co.uk | <email-pii> <email-pii>
mailto:john.doe+tag@mail.example.org. | mailto:<email-pii>.
<o_neil-99%x@a-b.museum> | <<email-pii>>
m\u00fcller@gr\u00fcn.de | <email-pii>
\u8054\u7cfbinfo@example.com\u3002 | \u8054\u7cfb<email-pii>\u3002
user@xn--bcher-kva.xn--p1ai | <email-pii>
1.2.3.4@host.org | <email-pii>
2\u00d7a@b.org | 2\u00d7<email-pii>
at 192.168.1.255. | at <ip-pii>.
http://8.8.8.8:53/ | http://<ip-pii>:53/
1.1.1.1,2.2.2.2/24 | <ip-pii>,<ip-pii>/24
http://[2001:DB8:0:0:8:800:200C:417A]:80/ | http://[<ip-pii>]:80/
fe80::1%eth0 | <ip-pii>%eth0
::ffff:192.0.2.128 | <ip-pii>
\u57402001:db8::1\u306f | \u5740<ip-pii>\u306f
is 2001:db8::. | is <ip-pii>.
2001:db8::1: up | <ip-pii>: up
Oracle 10.99.88.1 | Oracle <ip-pii>
"""
STAYS = """
@handle.com | a@b | a@b.c | a @ b.com | x@ | f@g.h() | XGB82WEST12345698765432 | be12 pages of text
GB82 WEST 1234 5698 7654 33 | ZZ82WEST12345698765432 | GB82.WEST.1234.5698.7654.32
GB82  WEST  1234  5698  7654  32 | 300.1.1.1 | 1.2.3.456 | v1.2.3.4 | 1.2.3.4.5 | version 1.2.3.4 | build 10.0.19.1
1.2.3.4a | 01.02.03.04 | 12:30:45 | 2024-01-01T12:30:45 | std::vector | :: | x[::2] | 00:1A:2B:3C:4D:5E
face::cafe | ::1 | 1:2:3:4:5:6:7:8:9 | gggg::1 | 2001:db8::1x | 2001:db8::1_
"""


def test_addresses_are_scrubbed_and_versions_times_and_code_stay():
    pairs = [line.split(" | ") for line in SCRUBBED.strip().splitlines()]
    assert [text for text, clean in pairs if scrub_pii(text)[0] != clean] == []
    stays = re.split(r" \| |\n", STAYS.strip())
    assert [text for text in stays if scrub_pii(text) != (text, NOTHING)] == []


def test_every_form_of_ipv6_is_scrubbed():
    rng = random.Random(0)
    for _ in range(300):
        # No zeros, the lower half, all but the ends.
        zeros = rng.choice([-1, -2**64, 2**16 - 1])
        address = ipaddress.IPv6Address(rng.getrandbits(112) & zeros & 2**112 - 1 | 0x2001 << 112)
        for form in (address.compressed, address.exploded, address.compressed.upper()):
            assert scrub_pii(f"from {form} to")[0] == "from <ip-pii> to", form


HOSTILE = ("a/|a@|a@a.|a|@|1|1.|1.1.1.1.|:|12:|a:|2001:|GB82|GB82 WEST |a.a@a-|\u00fc|" + "x" * 64 +
           "@|\"|\"a\"|\u044f@|GB82\n|GB82 WEST\n|o'|\u00a7 1.2.3.4, ").split("|")


def test_repeated_patterns_are_returned_unchanged():
    for unit in HOSTILE:
        assert scrub_pii(unit * 2_000) == (unit * 2_000, NOTHING)


def test_scrubbing_twice_is_scrubbing_once():
    text = f"a@b.org 1.2.3.4 {IBANS[24]} 2001:db8::1 c@d.ch,e@f.ch " * 50
    clean, counts = scrub_pii(text)
    assert counts == dict(email=150, ip=100, iban=50)
    assert scrub_pii(clean) == (clean, NOTHING)
