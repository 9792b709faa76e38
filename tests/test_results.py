"""What is committed under results/: each table is what its study writes from the rows beside it."""

import os

import pytest

from conftest import ROOT
from studies import extend, forget, kit, memorize
from tools import nanogpt

TABLES = [
    ("memorize", "rows.jsonl", memorize.table_md),
    ("forget", "rows.jsonl", forget.table_md),
    ("extend", "rows.jsonl", extend.table_md),
    ("nanogpt", "rows.jsonl", nanogpt.table_md),
]


@pytest.mark.parametrize("study, rows, table", TABLES, ids=[study for study, *_ in TABLES])
def test_a_committed_table_is_what_the_committed_rows_give(study, rows, table):
    folder = os.path.join(ROOT, "results", study)
    with open(f"{folder}/table.md", encoding="utf-8") as f:
        assert table(kit.read_rows(f"{folder}/{rows}")) == f.read()
