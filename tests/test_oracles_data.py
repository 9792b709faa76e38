"""Random corpora counted in plain lists, config.json as transformers reads it, and what else files decide."""

import hashlib
import math
import os
import re
import shutil
from collections import Counter
from itertools import product

import torch
from corpora import fill, ledger, put, report, streams, write_form
from draws import drawn
from hypothesis import assume
from hypothesis.strategies import integers, lists, none, permutations, sampled_from, tuples
from lab import run
from pytest import approx, raises
from test_oracles import models
from tiny import GOLDEN, ids, small
from torch.testing import assert_close
from trained import data  # noqa: F401
from transformers import ApertusForCausalLM

import convert
import prepare
import scoring
from configurator import settings
from corpus import build
from engine.files import read_json, write_json
from studies import ablate, kit
from weights import lora
from weights.write import remove_old_weights

TEXTS = sampled_from([" \n", "one two", "one  two", "Dürfen wir?", "mail a@b.org", "mail c@d.org"]) | integers(
    13, 24
).map("word ".__mul__)
CORPUS = lists(
    tuples(
        TEXTS,
        sampled_from(["de", "de", "fr", "fr", "it", None]),
        sampled_from(["cc0", "mit", "mit", None]),
        none() | integers(-4, 0),
        none() | sampled_from([0.1, 0.3, 0.6]),
    ),
    min_size=6,
    max_size=20,
)


# Ids of the rows. Those with colons, spaces and slashes are found by all that follows the name of the file.
IDS = [None, None, None, "", "urn:uuid:7-a", "https://a.example/x:1?y", "a: b", "line 3", "Ü", "c.d", ":e:"]


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


def tokens_of(row):
    """The bytes of a text as tokens; an e-mail address is one token, 9."""
    first, *others = re.split(r"\S+@\S+", row["text"])
    return [1, *(64 + b for b in first.encode()), *([9] * len(others)), 2]


def reasons_of(rows, licenses, languages, top, below, most):
    """Why each of the rows is removed; "" if it stays."""
    scores = {}
    for row in rows:
        if row["score"] is not None:
            scores.setdefault(row["language"], []).append(row["score"])
    limits = {language: sorted(found)[-math.ceil(top * len(found))] for language, found in scores.items() if top}
    reasons, seen = [], set()
    for row in rows:
        limit = below.get(row["language"], below.get("*"))
        rules = {
            "empty": not row["text"].strip(),
            "license": licenses and row["license"] not in licenses,
            "language": languages and row["language"] not in languages,
            "score": top and (row["score"] is None or row["score"] < limits[row["language"]]),
            "above": None not in (limit, row["toxic"]) and row["toxic"] >= limit,
            "tokens": most and len(tokens_of(row)) > most,
            "duplicate": number(row["text"]) in seen,
        }
        reasons.append(next((name for name, breaks in rules.items() if breaks), ""))
        if not reasons[-1]:
            seen.add(number(row["text"]))
    return reasons


def parts_of(row, kept, source_by, share):
    """The row; its two parts if its source keeps no other. Only the texts of 13 and more words are long enough."""
    of_source = [other for other in kept if not source_by or other["language"] == row["language"]]
    if len(of_source) > 1 or not share or not row["text"].startswith("word "):
        return [row]
    begin = round(len(row["text"]) * (1 - share)) // 5 * 5
    return [dict(row, text=text) for text in (row["text"][:begin], row["text"][begin:])]


@drawn(
    9,
    corpus=CORPUS,
    licenses=sampled_from([(), (), ("cc0", "mit")]),
    languages=sampled_from([(), (), ("de", "fr")]),
    top=sampled_from([0, 0.5, 0.7]),
    below=sampled_from([{}, {"de": 0.3}, {"de": 0.2, "*": 0.5}]),
    most=sampled_from([0, 0, 91]),
    source_by=sampled_from(["", "language"]),
    share=sampled_from([0.0, 0.2, 0.5]),
    shard=integers(5, 200),
    form=sampled_from(["csv", "jsonl", "parquet", "jsonl.gz", "json", "csv"]),
    own_ids=permutations([*IDS, *range(8)]),
)
def test_a_data_folder_holds_the_documents_of_plain_lists(
    tmp_path_factory, corpus, licenses, languages, top, below, most, source_by, share, shard, form, own_ids
):
    """Reasons, split, order and sums; then --remove takes half of the longest stream out, first ids with a colon."""
    folder = tmp_path_factory.mktemp("corpus")
    columns = "text", "language", "license", "score", "toxic"
    rows = [dict(zip(columns, row)) | dict(id=own) for row, own in zip(corpus, own_ids)]
    if form in ("csv", "parquet"):
        rows = [row | dict(id=None if row["id"] is None else str(row["id"])) for row in rows]
    places = places_of(rows, form)
    reasons = reasons_of(rows, licenses, languages, top, below, most)
    how = [write_form(folder / f"in.{form}", rows), f"--val_share={share}", f"--shard_tokens={shard}"]
    how += [f"--keep_licenses={','.join(licenses)}", f"--keep_languages={','.join(languages)}"]
    how += ["--score_field=score", f"--keep_top={top}"] * (top > 0) + [f"--max_tokens={most}"]
    limits = ",".join(f"{language}:{limit}" for language, limit in below.items())
    how += ["--max_field=toxic", f"--max_value={limits}"] * bool(below) + [f"--source_by={source_by}"]
    out = folder / "out"
    kept = [row for row, reason in zip(rows, reasons) if not reason]
    assume(kept)
    fill(out, *how)
    parts = {id(row): parts_of(row, kept, source_by, share) for row in kept}
    cut = sum(len(texts) - 1 for texts in parts.values())
    first = 0 if cut or len(kept) == 1 else math.nextafter(min(number(row["text"]) for row in kept), 1)
    wanted = {}
    for row in sorted(kept, key=lambda row: hashlib.sha256(places[id(row)][1].encode()).digest()[:8]):
        val = len(kept) > 1 and number(row["text"]) < max(share, first)
        splits = ["train", "val"] if len(parts[id(row)]) > 1 else ["val"] if val else ["train"]
        for part, split in zip(parts[id(row)], splits):
            wanted.setdefault(((row["language"] or "none") if source_by else "out", split), []).append(part)

    def compare():
        found = {stream: tokens.tolist() for stream, tokens in streams(out).items() if len(tokens)}
        assert found == {
            stream: sum(map(tokens_of, of_stream), []) for stream, of_stream in wanted.items() if of_stream
        }
        total = report(out)["total"]
        found = [(entry["id"], entry["reason"].partition(":")[0], entry["email"]) for entry in ledger(out)]
        emails = ["@" in row["text"] and reason in ("", "withdrawn") for row, reason in zip(rows, reasons)]
        # A cut document has a second row.
        assert found == [
            (places[id(row)][0], *of_row)
            for row, *of_row in zip(rows, reasons, emails)
            for _ in parts.get(id(row), [row])
        ]
        assert {name: n for name, (n, _) in total["removed"].items()} == Counter(filter(None, reasons))
        stay = [row["text"].encode() for row, reason in zip(rows, reasons) if not reason]
        sums = [len(rows), sum(len(row["text"].encode()) for row in rows), len(stay), sum(map(len, stay))]
        assert [total[name] for name in ("documents_in", "bytes_in", "documents", "bytes")] == sums
        assert total["tokens"] == 2 * cut + sum(len(tokens_of(row)) for row, why in zip(rows, reasons) if not why)
        splits = [part for source in read_json(f"{out}/meta.json")["sources"].values() for part in source.values()]
        # "<email-pii>" has 4 bytes more than each address.
        assert sum(part["bytes"] for part in splits) == sums[3] + 4 * sum(b"@" in text for text in stay)
        return total

    compare()
    longest = max(wanted.values(), key=len)
    if len(longest) > 1:
        gone = sorted(longest, key=lambda row: ":" not in str(row["id"]))[: len(longest) // 2]
        for row in gone:
            longest.remove(row)
            reasons[rows.index(row)] = "withdrawn"
        own = [places[id(row)][0] if row["id"] in (None, "") else str(row["id"]) for row in gone]
        assert " is in " in run("corpus.audit", out, f"--find={own[0]}").stdout
        fill(out, f"--remove={put(folder, {'list.txt': chr(10).join(own)})}/list.txt")
        assert all("removed: withdrawn:id" in run("corpus.audit", out, f"--find={name}").stdout for name in own)
        removed = sum(len(tokens_of(row)) for row in gone)
        assert compare()["tokens_removed_about"]["withdrawn"] == removed


def test_a_run_resumes_only_with_the_same_content_of_each_file_that_a_setting_names(tmp_path):
    put(tmp_path, {"store/list": "", "list": ""})
    plan, own = settings(vars(prepare)), f"{tmp_path}/list"
    names = "robots", "reservations", "blocked", "agents", "decontaminate", "probes", "tokenizer"
    for name, path in [*product(names, (own, f"{tmp_path}/store")), ("tokenizer", f"bpe:{own}")]:
        before = build.key_of(plan | {name: path}, [])
        for file in (tmp_path / "list", tmp_path / "store" / "list"):
            file.write_text(file.read_text() + "x")
        assert build.key_of(plan | {name: path}, []) != before, (name, path)


# ----------------------------------------------------------------------------------------------------------------------
# models


ROPES = [
    dict(rope_type="default"),
    dict(rope_type="linear", factor=3.0),
    dict(
        rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
]


@drawn(14, rope=none() | sampled_from(ROPES), theta=none() | sampled_from([1e4, 5e5]), form=sampled_from(["v4", "v5"]))
@torch.no_grad()
def test_a_config_has_the_logits_that_transformers_reads_from_it(tmp_path_factory, rope, theta, form):
    """In the forms of transformers 4 and 5, with and without a RoPE, a theta, and keys that have a default."""
    folder = tmp_path_factory.mktemp("hf")
    shutil.copy(f"{GOLDEN}/hf_tiny_a/model.safetensors", folder)
    config = read_json(f"{GOLDEN}/hf_tiny_a/config.json")
    for name in ("rope_parameters", "rms_norm_eps", "initializer_range", "tie_word_embeddings"):
        del config[name]
    base = dict(rope_theta=theta) if rope and theta else {}
    if form == "v5" and rope:
        config["rope_parameters"] = rope | base
    elif rope:
        config |= base | dict(rope_scaling=rope)
    write_json(folder / "config.json", config)
    idx = ids(2, 90, high=512)
    theirs = ApertusForCausalLM.from_pretrained(folder)
    assert_close(convert.load_hf(str(folder))(idx), theirs(idx).logits, rtol=1e-4, atol=1e-4)


def test_an_older_end_leaves_no_weights_and_no_index(tmp_path):
    pieces = "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"
    put(tmp_path, dict.fromkeys([*pieces, "notes.txt", "config.json"], ""))
    remove_old_weights(tmp_path)
    assert {*os.listdir(tmp_path)} == {"notes.txt", "config.json"}


def test_adapters_are_merged_in_fp32_and_rounded_once():
    merged = []
    for dtype in (torch.float32, torch.bfloat16):
        model = lora.add_lora(small(), dict(r=2, lora_alpha=4, target_modules=lora.MATRICES))
        lora.init_lora(model, 1)
        for layer in lora.lora_layers(model).values():
            torch.nn.init.normal_(layer.lora_B.weight, generator=torch.Generator().manual_seed(2))
        lora.merge_adapters(model, dtype)
        merged.append([layer.weight for layer in model.modules() if hasattr(layer, "in_features")])
    for exact, rounded in zip(*merged, strict=True):
        assert rounded.to(torch.bfloat16).equal(exact.bfloat16())


# ----------------------------------------------------------------------------------------------------------------------
# scores and studies


@drawn(20, sizes=lists(tuples(integers(2, 30), integers(1, 29)), min_size=1, max_size=4))
@torch.no_grad()
def test_tokens_have_the_log_probabilities_of_transformers_in_any_batch(sizes):
    """sizes: tokens of a window, and the first of them that is scored."""
    ours, theirs = models()
    windows = [(ids(n, high=512, seed=n).tolist(), min(first, n - 1)) for n, first in sizes]
    for (row, first), found in zip(windows, scoring.token_nats(ours, windows)):
        logp = theirs(torch.tensor([row[:-1]])).logits[0].log_softmax(-1)[range(len(row) - 1), row[1:]]
        assert found == approx(-logp[first - 1 :].numpy(), rel=1e-3, abs=1e-4)


def test_a_run_of_a_study_is_named_after_its_settings_its_data_and_its_sources_alone(tmp_path, monkeypatch, data):
    meta, arms = f"{shutil.copytree(data, tmp_path / 'data')}/meta.json", dict(one="--alpha=3.0", same="--alpha=3.0")
    monkeypatch.setattr(ablate, "data", f"{tmp_path}/data")
    study, sources = ablate.STUDY | dict(arms=arms), {script: dict(model="1") for script in ablate.SCRIPTS}

    def folder(arm="one", lr=0.5, seed=1, **changes):
        return ablate.plan_run(study | changes, sources, arm, lr, seed).folder

    first = folder()
    assert first == folder(arm="same") == folder(question="?", seeds=9, reading="", lrs=[1], out="x", name="y")
    size = dict(size=f"{study['size']} --batch_size=7")
    names = {first, folder(lr=0.25), folder(seed=2), folder(**size), folder(arms=dict(one="--alpha=2.0"))}
    whole = read_json(meta)
    # One byte of a shard, whose hash is there, and the vocabulary.
    for part, key in ((whole["sources"]["a.jsonl"]["train"]["shards"][0], "sha256"), (whole, "tokenizer_hash")):
        part[key] = f"0{part[key][1:]}1"
        write_json(meta, whole)
        names.add(folder())
    # The part before the last "-" finds the runs of other sources.
    sources["train"] = dict(model="2")
    names.add(folder())
    assert len(names) == 8 and folder().rpartition("-")[0] in {name.rpartition("-")[0] for name in names - {folder()}}


def test_a_study_keeps_the_threads_of_the_user_and_a_tenth_of_each_rate(tmp_path, monkeypatch, data):
    monkeypatch.setattr(ablate, "data", data)
    plan = ablate.plan_run(ablate.STUDY | dict(arms=dict(one="")), dict.fromkeys(ablate.SCRIPTS), "one", 0.5, 1)
    assert "--min_lr=0.05" in plan.command
    asked = []

    def fail(command, file, env, folder):
        asked.append(env["OMP_NUM_THREADS"])
        return 1, 0.0

    monkeypatch.setattr(kit, "run_process", fail)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with raises(ValueError, match="ended with code 1"):
        kit.call(f"{tmp_path}/run", f"{tmp_path}/done", "train")
    assert asked == ["7"]
