"""What is committed under results/: each table is what its study writes from the rows beside it."""

import os

from conftest import ROOT
from studies import kit, memorize


def test_a_committed_table_is_what_the_committed_rows_give():
    folder = os.path.join(ROOT, "results", "memorize")
    with open(f"{folder}/table.md", encoding="utf-8") as f:
        assert memorize.table_md(kit.read_rows(f"{folder}/rows.jsonl")) == f.read()
