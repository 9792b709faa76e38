"""docs/filter.py: datatrove's filters and trafilatura turn raw pages into files for prepare.py (where installed)."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from corpora import fill, ledger, write_lines

for package in ("datatrove", "trafilatura", "orjson", "spacy"):
    pytest.importorskip(package)

PROSE = """
In the spring of that year the river rose above the old bridge, and nobody in the valley could remember such a flood.
My grandfather carried the books of the school up to the attic, one basket after another, and the teacher counted them.
When the water had gone, the fields were grey and the cellars full of sand, but the attic was dry.
We dug for three weeks before the road to the station was open again, and on the first train came a letter.
It was from the town where the river ends, and it said that a door with our number on it had been found on the beach.
"""
HOME = "<nav><a href='/'>Home</a></nav>"


def page(*paragraphs, head=""):
    return (
        f"<html><head>{head}</head><body>{HOME}<article>{''.join(f'<p>{p}</p>' for p in paragraphs)}</article></body>"
    )


PAGES = {
    "good": page(*PROSE.strip().splitlines()),
    "opts out": page(*PROSE.strip().splitlines()[::-1], head="<meta name='robots' content='noai'>"),
    "repeats": page(*["Buy the best shoes of the town now and be happy with them."] * 40),
    "short": page("Not much is said here."),
}


def test_the_filters_of_the_page_leave_good_pages_and_prepare_obeys_their_opt_outs(tmp_path):
    (tmp_path / "pages").mkdir()
    rows = [dict(id=name, url=f"https://host.example/{name[0]}", text=html) for name, html in PAGES.items()]
    write_lines(tmp_path / "pages" / "a.jsonl", rows)
    subprocess.run([sys.executable, f"{ROOT}/docs/filter.py"], cwd=tmp_path, check=True, capture_output=True)
    fill(tmp_path / "data", tmp_path / "filtered")
    reasons = {row["id"].partition(":")[2]: row["reason"] for row in ledger(tmp_path / "data")}
    assert reasons == {"good": "", "opts out": "noai"}
    # Links of the page around the text are gone.
    assert all("Home" not in text for text in Path(tmp_path, "filtered", "00000.jsonl").read_text().splitlines())
