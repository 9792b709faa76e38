r"""
Personal data against ISO 13616, the registry of IBANs, ipaddress, and labelled lines.

golden/pii_own.txt: 408 lines that the rules were written on, half of them traps. golden/pii_forms.txt: addresses and
near misses; the example numbers of SWIFT's registry, one per country, in three forms; a number of each country with
ISO 13616 check digits, and the same with wrong ones; random addresses as ipaddress writes them.
golden/pii_held_out.txt: 66 other lines, from Wikipedia's article on e-mail addresses and from Python packages
(four numbers in a row). Personal data is marked ⟦kind:text⟧; \n and \r are line breaks.
"""

import re
from pathlib import Path

import pytest
from conftest import ROOT

from corpus.pii import TAGS, scrub_pii

MARK = re.compile(r"⟦(email|ip|iban):(.*?)⟧", re.S)


def labelled(name):
    """[(text, expected text)] of a file."""
    raw = Path(ROOT, "tests", "golden", name).read_text("utf-8").replace(r"\r", "\r")
    lines = [line.replace(r"\n", "\n") for line in raw.split("\n")]
    return [(MARK.sub(r"\2", line), MARK.sub(lambda m: TAGS[m[1]], line)) for line in lines]


@pytest.mark.parametrize("name", ["pii_own.txt", "pii_forms.txt"])
def test_labelled_lines_are_scrubbed_to_the_character_and_counted(name):
    for text, clean in labelled(name):
        assert scrub_pii(text) == (clean, {kind: clean.count(tag) for kind, tag in TAGS.items()})
        assert scrub_pii(clean)[0] == clean


def test_lines_that_no_rule_was_written_on():
    """Most of the 14 errors are a/b@c, and versions that look like IP addresses."""
    assert sum(scrub_pii(text)[0] != clean for text, clean in labelled("pii_held_out.txt")) == 14


HOSTILE = (
    "a/|a@|a@a.|a|@|1|1.|1.1.1.1.|:|12:|a:|2001:|GB82|GB82 WEST |a.a@a-|\u00fc|"
    + "x" * 64
    + '@|"|"a"|\u044f@|GB82\n|GB82 WEST\n|o\'|\u00a7 1.2.3.4, '
).split("|")


@pytest.mark.parametrize("unit", HOSTILE)
def test_repeated_patterns_are_returned_unchanged(unit):
    """Each takes 0.1 s. A rule that rereads the whole text before every match would take 38 s."""
    assert scrub_pii(unit * 20_000)[0] == unit * 20_000
