"""
Pairs of features of prepare.py: whole runs against plain lists, with the files that they leave and their output.

Each corpus is drawn anew. Half of the runs are killed after a stage and resumed; then half of the longest stream is
removed.
"""

import hashlib
import math
import os
import re
from collections import Counter
from random import Random
from unittest.mock import patch

import pytest
from conftest import script
from corpora import fill, ledger, put, report, streams, write_form
from lab import run
from pairs import covering
from test_pairs import names_in

import prepare
from configurator import settings
from corpus import stages
from engine.files import read_json

PREPARE = dict(
    form=["csv", "jsonl.gz", "parquet"],
    keep_licenses=["", "cc0,mit"],
    keep_languages=["", "de,fr"],
    keep_top=[0, 0.5],
    max_value=["", "de:0.2,*:0.5"],
    max_tokens=[0, 91],
    min_tokens=[0, 10],
    source_by=["", "language"],
    val_share=[0.0, 0.3],
    shard_tokens=[30, 150],
    pii=[True, False],
    blocked=[False, True],
    decontaminate=[False, True],
    near_dedup=[0.0, 0.72],
    probes=[False, True],
    text_field=["text", "body"],
    url_field=["url", "link"],
    dry_run=[False, True],
    killed=["", "sift", "tokens"],
)
STANDS_FOR = dict(
    form="paths",
    keep_top="keep_top score_field",
    max_value="max_value max_field",
    probes="probes repetitions",
    killed="out",
)
WITHOUT_PAIRS = {
    "opt-outs: test_oracles_corpus.py": "robots snapshots missing agents reservations",
    "the files alone: test_readers.py": "encoding",
    "tokens are bytes here; vocabularies: test_prepare.py, test_tokenizer.py": "tokenizer train_bpe",
    "the order in which groups are read: test_prepare.py": "max_bytes workers",
    "each run ends with a removal": "remove",
}
PROMPT = "How many legs does a healthy spider have?"
PASSAGE = "the passage to plant"
FIXED = ["one two", "one  two", "Dürfen wir?", "mail a@b.org", "mail c@d.org", " \n", f"Quiz! {PROMPT.lower()} Eight."]
# Ids of the rows. Those with colons, spaces and slashes are found by all that follows the name of the file.
IDS = [None, None, None, "", "urn:uuid:7-a", "https://a.example/x:1?y", "a: b", "line 3", "Ü", "c.d", ":e:"]


def test_each_setting_of_prepare_is_a_feature_or_has_a_reason_to_be_none():
    assert names_in(PREPARE, STANDS_FOR, WITHOUT_PAIRS) == settings(vars(prepare)).keys()


def number(text):
    """The number in [0, 1) that sends a text to validation: of its words, one space apart."""
    digest = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little") / 2**64


def places_of(rows, form):
    """{id of a row: the id of its document, and the text whose hash is its place}"""
    places = {}
    for n, row in enumerate(rows):
        # A row without an id has the number of its line or row; its place is that of the number from 0.
        line = n + 1 + sum(row["text"].count("\n") for row in rows[:n]) if form == "csv" else n
        number_of = f"in.{form} {'row' if form in ('json', 'parquet') else 'line'} {line + 1}", f"in.{form}:{line}"
        places[id(row)] = number_of if row["id"] in (None, "") else [f"in.{form}:{row['id']}"] * 2
    return places


def tokens_of(row, pii=True):
    """The bytes of a text as tokens; with pii an e-mail address is one token, 9."""
    first, *others = re.split(r"\S+@\S+" if pii else "(?!)", row["text"])
    return [1, *(64 + b for b in first.encode()), *([9] * len(others)), 2]


def reasons_of(rows, row):
    """Why each of the rows is removed; "" if it stays. row: the features of the run."""
    scores, top = {}, row["keep_top"]
    for one in rows:
        if one["score"] is not None:
            scores.setdefault(one["language"], []).append(one["score"])
    limits = {language: sorted(found)[-math.ceil(top * len(found))] for language, found in scores.items() if top}
    below = {"de": 0.2, "*": 0.5} if row["max_value"] else {}
    reasons, seen, words_before = [], set(), False
    for one in rows:
        limit = below.get(one["language"], below.get("*"))
        size = len(tokens_of(one, row["pii"]))
        rules = {
            "empty": not one["text"].strip(),
            "blocked-domain": row["blocked"] and "c.example" in one["url"],
            "license": row["keep_licenses"] and one["license"] not in ("cc0", "mit"),
            "language": row["keep_languages"] and one["language"] not in ("de", "fr"),
            "score": top and (one["score"] is None or one["score"] < limits[one["language"]]),
            "above": None not in (limit, one["toxic"]) and one["toxic"] >= limit,
            "contaminated": row["decontaminate"] and one["text"].startswith("Quiz!"),
            "tokens": size < row["min_tokens"] or row["max_tokens"] and size > row["max_tokens"],
            "duplicate": number(one["text"]) in seen,
            # All runs of five words are equal.
            "near-duplicate": row["near_dedup"] and one["text"].startswith("word ") and words_before,
        }
        reasons.append(next((name for name, breaks in rules.items() if breaks), ""))
        if not reasons[-1] or reasons[-1] == "near-duplicate":
            seen.add(number(one["text"]))
            words_before |= one["text"].startswith("word ")
    return reasons


def parts_of(row, kept, source_by, share):
    """The row; its two parts if its source keeps no other. Only the texts of 13 and more words are long enough."""
    of_source = [other for other in kept if not source_by or other["language"] == row["language"]]
    if len(of_source) > 1 or not share or not row["text"].startswith("word "):
        return [row]
    begin = round(len(row["text"]) * (1 - share)) // 5 * 5
    return [dict(row, text=text) for text in (row["text"][:begin], row["text"][begin:])]


def draw_corpus(rng, form):
    """Rows with columns for all rules; two of them are always kept."""
    rows, own = [], rng.sample([*IDS, *range(8)], 19)
    for n in range(rng.randint(8, 18)):
        text = rng.choice([*FIXED, *["word " * rng.randint(13, 24)] * 7])
        row = dict(text=text, language=rng.choice(["de", "de", "fr", "fr", "it", None]))
        row |= dict(license=rng.choice(["cc0", "mit", "mit", None]), score=rng.choice([None, -4, -3, -2, -1, 0]))
        row |= dict(toxic=rng.choice([None, 0.1, 0.3, 0.6]), url=f"https://{rng.choice('aabc')}.example/{n}")
        rows.append(row | dict(id=own[n]))
    for n, words in enumerate(["seven words that no rule will remove", "and seven more that nobody can remove"]):
        rows[n] |= dict(text=words, language="de", license="mit", score=0, toxic=0.1, url="https://b.example/")
    if form in ("csv", "parquet"):
        rows = [row | dict(id=None if row["id"] is None else str(row["id"])) for row in rows]
    return rows


def flags_of(row, folder):
    """The settings of a row, as flags of prepare.py."""
    flags = {name: value for name, value in row.items() if name not in ("form", "killed", "dry_run", "keep_top")}
    if row["keep_top"]:
        flags |= dict(score_field="score", keep_top=row["keep_top"])
    if row["max_value"]:
        flags["max_field"] = "toxic"
    else:
        del flags["max_value"]
    lists = dict(blocked="c.example", decontaminate=PROMPT, probes=PASSAGE)
    for name, content in lists.items():
        put(folder, {name: content + "\n"})
        flags[name] = f"{folder}/{name}" if row[name] else ""
    return [f"--{name}={value}" for name, value in flags.items()] + ["--repetitions=(2,)"]


def kill_and_mistype(row, folder, source, flags):
    """Kill a run after a stage. A command with a mistyped path is an error, and the killed run is resumed after it."""
    do_stage, out = stages.do, folder / "out"

    def do(name, *args):
        do_stage(name, *args)
        if name == row["killed"]:
            raise KeyboardInterrupt

    with patch.object(stages, "do", do):
        assert script("prepare.py", "--tokenizer=byte", source, *flags, f"--out={out}").returncode
    assert not out.exists() and (folder / "out.tmp" / "work" / row["killed"] / "0.json").exists()
    assert script("prepare.py", "--tokenizer=byte", f"{source}.x", *flags, f"--out={out}").returncode == 2
    printed = fill(out, source, *flags)
    assert f"resuming from {out}.tmp/work" in printed
    return printed


def layout_of(row, rows, places, reasons):
    """({id of a kept row: its parts}, {stream: its documents, in order})"""
    kept = [one for one, reason in zip(rows, reasons) if not reason]
    source_by, share = row["source_by"], row["val_share"]
    parts = {id(one): parts_of(one, kept, source_by, share) for one in kept}
    cut = sum(len(texts) - 1 for texts in parts.values())
    first = 0 if cut or len(kept) == 1 else math.nextafter(min(number(one["text"]) for one in kept), 1)
    wanted = {}
    for one in sorted(kept, key=lambda one: hashlib.sha256(places[id(one)][1].encode()).digest()[:8]):
        val = len(kept) > 1 and number(one["text"]) < max(share, first)
        splits = ["train", "val"] if len(parts[id(one)]) > 1 else ["val"] if val else ["train"]
        for part, split in zip(parts[id(one)], splits):
            wanted.setdefault(((one["language"] or "none") if source_by else "out", split), []).append(part)
    return parts, wanted


def compare(row, rows, places, reasons, parts, wanted, out):
    """The folder `out` is that of plain lists. Returns the sums of its report."""
    cut = sum(len(texts) - 1 for texts in parts.values())
    found = {stream: tokens.tolist() for stream, tokens in streams(out).items() if len(tokens)}
    assert found == {
        stream: sum((tokens_of(one, row["pii"]) for one in of_stream), [])
        for stream, of_stream in wanted.items()
        if of_stream
    }
    total = report(out)["total"]
    found = [(entry["id"], entry["reason"].partition(":")[0], entry["email"]) for entry in ledger(out)]
    emails = ["@" in one["text"] and row["pii"] and why in ("", "withdrawn") for one, why in zip(rows, reasons)]
    # A cut document has a second row.
    assert found[: len(found) - 2 * row["probes"]] == [
        (places[id(one)][0], *of_row) for one, *of_row in zip(rows, reasons, emails) for _ in parts.get(id(one), [one])
    ]
    assert {name: n for name, (n, _) in total["removed"].items()} == Counter(filter(None, reasons))
    stay = [one["text"].encode() for one, reason in zip(rows, reasons) if not reason]
    sums = [len(rows), sum(len(one["text"].encode()) for one in rows), len(stay), sum(map(len, stay))]
    assert [total[name] for name in ("documents_in", "bytes_in", "documents", "bytes")] == sums
    tokens = sum(len(tokens_of(one, row["pii"])) for one, why in zip(rows, reasons) if not why)
    assert total["tokens"] == 2 * cut + tokens + 2 * row["probes"] * len(tokens_of(dict(text=PASSAGE)))
    splits = [part for source in read_json(f"{out}/meta.json")["sources"].values() for part in source.values()]
    # "<email-pii>" has 4 bytes more than each address.
    size = sums[3] + 4 * sum(b"@" in text for text in stay) * row["pii"] + 2 * row["probes"] * len(PASSAGE)
    assert sum(part["bytes"] for part in splits) == size
    shards = [shard for part in splits for shard in part["shards"]]
    assert max(shard["tokens"] for shard in shards) <= row["shard_tokens"]
    files = {
        "meta.json",
        "documents.parquet",
        "report.json",
        "report.md",
        "domains.csv",
        *(shard["file"] for shard in shards),
    }
    assert {*os.listdir(out)} == (files | {"probes.json"} if row["probes"] else files)
    assert not os.path.exists(f"{out}.tmp")
    return total


@pytest.mark.parametrize("number_of_row, row", list(enumerate(covering(PREPARE))))
def test_a_data_folder_holds_the_documents_of_plain_lists(tmp_path, number_of_row, row):
    """Reasons, split, order, sums and files. Then --remove takes half of the longest stream, ids with colons first."""
    form, folder, out = row["form"], tmp_path, tmp_path / "out"
    rows = draw_corpus(Random(number_of_row), form)
    places = places_of(rows, form)
    reasons = reasons_of(rows, row)
    renamed = dict(text=row["text_field"], url=row["url_field"])
    stored = [{renamed.get(name, name): value for name, value in one.items()} for one in rows]
    source, flags = write_form(folder / f"in.{form}", stored), flags_of(row, folder)
    if row["dry_run"]:
        before = {*os.listdir(folder)}
        assert f"| {len(rows)} |" in fill(out, source, *flags, "--dry_run")
        assert {*os.listdir(folder)} == before
    if row["killed"]:
        printed = kill_and_mistype(row, folder, source, flags)
    else:
        printed = fill(out, source, *flags)
    parts, wanted = layout_of(row, rows, places, reasons)
    if row["probes"]:
        wanted["probes", "train"] = [dict(text=PASSAGE)] * 2

    total = compare(row, rows, places, reasons, parts, wanted, out)
    removed = "".join(f" + {n} {why}" for why, n in Counter(filter(None, reasons)).most_common())
    n_shards = sum(name.endswith(".npy") for name in os.listdir(out))
    sums = printed.partition(" documents in = ")[2].partition("\n")[0]
    assert sorted(sums.split(" + ")) == sorted(f"{reasons.count('')} kept{removed}".split(" + "))
    assert f"{len(rows)} documents in = " in printed and f"{out}: {total['tokens']:,} tokens of " in printed
    assert f"vocabulary byte, in {n_shards} shard{'s' * (n_shards != 1)}; " in printed
    longest = max((of_stream for (name, _), of_stream in wanted.items() if name != "probes"), key=len)
    if len(longest) > 1:
        gone = sorted(longest, key=lambda one: ":" not in str(one["id"]))[: len(longest) // 2]
        for one in gone:
            longest.remove(one)
            reasons[rows.index(one)] = "withdrawn"
        own = [places[id(one)][0] if one["id"] in (None, "") else str(one["id"]) for one in gone]
        assert " is in " in run("corpus.audit", out, f"--find={own[0]}").stdout
        put(folder, {"list.txt": chr(10).join(own)})
        if row["dry_run"]:
            before = streams(out)
            fill(out, f"--remove={folder}/list.txt", "--dry_run")
            assert all(streams(out)[stream].tolist() == before[stream].tolist() for stream in before)
        fill(out, f"--remove={folder}/list.txt")
        assert all("removed: withdrawn:id" in run("corpus.audit", out, f"--find={name}").stdout for name in own)
        removed = sum(len(tokens_of(one, row["pii"])) for one in gone)
        total = compare(row, rows, places, reasons, parts, wanted, out)
        assert total["tokens_removed_about"]["withdrawn"] == removed
