"""kept.parquet against the shards: what is in and where it stands; --when against a loader that reads."""
import hashlib
import json
import os

import numpy as np
import pytest

import tokenizer
from conftest import refused, script
from corpus import kept
from stages import StagedDataset
from schedule import steps_in

BYTE = tokenizer.load("byte")
ADDRESS = "Write to jo@example.org or from 10.1.2.3, and to al@example.org."


def document(i):
    # Words of its own, so that no window of 65 bytes stands anywhere else.
    words = " ".join(f"w{i}x{j}" for j in range(20 + i % 40))
    return f"Document {i} says to all of them:  {words}." + ADDRESS * (i == 3)


def rows(n, first=0):
    return [dict(id=f"d{i}", url=f"https://h{i % 7}.example/p/{i}", lang=("eng", "deu")[i % 2], license="mit",
                 text=document(i)) for i in range(first, first + n)]


def write(path, records):
    path.write_text("".join(json.dumps(row) + "\n" for row in records), encoding="utf-8")
    return path


def prepared(out, *args):
    done = script("prepare.py", *args, f"--out={out}", "--tokenizer=byte")
    assert done.returncode == 0, done.stderr
    return out


def kept_rows(folder):
    return [row for _, table in kept.tables(folder) for row in table.to_pylist()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """120 documents and two that go, in shards of 3,000 tokens, so that documents lie across their borders."""
    root = tmp_path_factory.mktemp("kept")
    docs = write(root / "d.jsonl", [*rows(120), dict(rows(1)[0], id="copy"), dict(id="void", text=" ")])
    probes = write(root / "probes.jsonl", [dict(text=f"A letter of {i} words to be planted.") for i in range(4)])
    return prepared(root / "data", docs, "--shard_tokens=3000", f"--probes={probes}", "--repetitions=0,3",
                    "--source_by=lang")


# ----------------------------------------------------------------------------------------------------------------------
# what is in


def test_each_row_names_the_tokens_of_its_document_and_the_hash_of_the_text_as_it_came(folder):
    texts = {f"d.jsonl:{row['id']}": row for row in rows(120)}
    tokens = kept.Tokens(folder)
    found = [row for row in kept_rows(folder) if row["source"] != "probes"]
    assert sorted(row["id"] for row in found) == sorted(texts)
    for row in found:
        came = texts[row["id"]]
        assert row["sha256"] == hashlib.sha256(came["text"].encode()).hexdigest()
        assert (row["url"], row["language"], row["license"]) == (came["url"], came["lang"], "mit")
        ids = tokens.of(row).tolist()
        assert (ids[0], ids[-1], len(ids)) == (BYTE.bos, BYTE.eos, row["tokens"])
        scrubbed = "3 says" in came["text"] and row["email"] == 2
        assert (BYTE.decode(ids[1:-1]) == came["text"]) != scrubbed
        assert row["bytes"] == len(came["text"])
    (scrubbed,) = [row for row in found if row["id"].endswith(":d3")]
    assert (scrubbed["email"], scrubbed["ip"], scrubbed["iban"]) == (2, 1, 0)
    assert "<email-pii>" in BYTE.decode(tokens.of(scrubbed).tolist())
    shards = {row["shard"] for row in found}
    assert len(shards) > 4
    crossing = [row for row in found if len(list(tokens.pieces(row))) == 2]
    assert len(crossing) >= 2


def ask(folder, *args):
    done = script("corpus.audit", folder, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_id_a_url_a_text_and_a_file_are_found_and_what_is_not_is_said_with_what_is_near(folder, tmp_path):
    (tmp_path / "letter.txt").write_text(document(5))
    for how, wanted in (("this id", "d.jsonl:d5"), ("this URL", "https://h5.example/p/5"),
                        ("this text:", tmp_path / "letter.txt"),
                        ("this text but for white space", document(5).replace("  ", "\n"))):
        said = ask(folder, f"--find={wanted}")
        assert said.startswith("d.jsonl:d5 is in") and f"by {how}" in said, said
    assert "near it is 'https://h5.example/p/5'" in ask(folder, "--find=https://h5.exmple/p/5")
    assert "d.jsonl:copy came in and was removed: duplicate" in ask(folder, "--find=d.jsonl:copy")


def shingles(text):
    words = text.replace(".", " ").replace(":", " ").lower().split()
    return {tuple(words[i:i + 5]) for i in range(len(words) - 4)}


def test_a_text_is_found_that_is_nearly_the_same(folder):
    """The Jaccard similarity of the 5-word shingles, counted plainly, is the one that is told, within 3 sigma."""
    changed = document(19) + " And more of it."
    one, other = shingles(document(19)), shingles(changed)
    jaccard = len(one & other) / len(one | other)
    said = ask(folder, f"--find={changed}")
    assert said.count("\n") == 1 and said.startswith("d.jsonl:d19 is in") and "by nearly this text" in said
    told = float(said.partition("similarity ")[2][:4])
    assert abs(told - jaccard) < 3 * (jaccard * (1 - jaccard) / 112) ** 0.5 + 0.005
    assert "is not in" in ask(folder, f"--find={changed}", "--similarity=0.999")


def test_data_that_cannot_be_asked_are_named_in_one_line(folder, tmp_path):
    old = prepared(tmp_path / "old", write(tmp_path / "d.jsonl", rows(9)))
    raw = (old / "kept.parquet").read_bytes()
    (old / "kept.parquet").write_bytes(raw[:-9] + bytes(9))
    refused(script("corpus.audit", old), "another sha256")
    refused(script("corpus.audit", old, "--find=x"), "damaged")
    os.remove(old / "kept.parquet")
    refused(script("corpus.audit", old, "--find=x"), "older format", "prepare.py")
    refused(script("corpus.audit", tmp_path, "--find=x"), "has no meta.json")
    refused(script("corpus.audit", folder, "--when=x"), "say which document")
    refused(script("corpus.audit", folder, "--find=d.jsonl:d5", "--when=x"), "not a run of train.py")


def test_a_version_is_one_hash_of_all_that_meta_says(folder):
    meta = json.loads((folder / "meta.json").read_text())
    said = {name: value for name, value in meta.items() if name != "version"}
    plain = json.dumps(said, sort_keys=True)
    assert meta["version"] == hashlib.sha256(plain.encode()).hexdigest()
    assert meta["version"] in (folder / "report.md").read_text(encoding="utf-8")


# ----------------------------------------------------------------------------------------------------------------------
# joined


def join(both, *parts):
    done = script("data.py", *parts, f"--join={both}", "--block_size=64")
    assert done.returncode == 0, done.stderr
    return done.stdout


def val_hashes(folder):
    return {row["text_hash"] for row in kept_rows(folder) if row["split"] == "val"}


def test_joined_folders_share_what_a_count_by_hand_says_and_each_text_is_on_one_side(tmp_path):
    """100 documents are in both of two folders."""
    one, two = (prepared(tmp_path / name, write(tmp_path / f"{name}.jsonl", records), "--val_share=0.1")
                for name, records in (("one", rows(150)), ("two", rows(150, 50))))
    both = tmp_path / "both"
    said = join(both, one, two)
    report = json.loads((both / "report.json").read_text())
    # The document with addresses is not among the shared: its tokens are the letters and two more.
    shared = sum(len(document(i)) + 2 for i in range(50, 150))
    assert report["twice"] == dict(documents=100, tokens=shared, on_both_sides=0)
    assert f"100 documents ({shared:,} tokens)" in said and list(report["parts"]) == ["../one", "../two"]
    # The questions go to the parts, and so does the check.
    assert script("corpus.audit", both).stdout.count("all hashes as written") == 2
    assert ask(both, "--find=https://h6.example/p/111").count(" is in ") == 2
    # Split by id they leak, and that is told.
    three = prepared(tmp_path / "three", tmp_path / "two.jsonl", "--val_share=0.1", "--split_by=id")
    leaks = len(val_hashes(two) ^ val_hashes(three))
    assert f"{leaks} of the texts for training and for validation: prepare" in join(both, both, three) and leaks > 10
    os.remove(three / "kept.parquet")
    assert "of the older format: whether its texts stand" in join(tmp_path / "new", one, three)


def documents(folder):
    readers = {place: kept.Tokens(place) for place in kept.folders_of(folder)}
    return sorted((row["id"], row["split"], readers[place].of(row).tolist())
                  for place, table in kept.tables(folder) for row in table.to_pylist())


def test_what_comes_to_known_data_and_is_joined_are_the_documents_and_splits_of_a_whole_run(tmp_path):
    """New files cost themselves alone: what is known already goes, at the same line as if all files had been read."""
    old = write(tmp_path / "old.jsonl", rows(60))
    new = write(tmp_path / "new.jsonl", [dict(row, id=f"new {row['id']}") for row in rows(80, 30)])
    flags = "--val_share=0.2", "--shard_tokens=2000"
    mine = prepared(tmp_path / "mine", old, *flags)
    more = prepared(tmp_path / "more", new, *flags, f"--known={mine}")
    whole = prepared(tmp_path / "whole", old, new, *flags)
    both = tmp_path / "both"
    assert join(both, mine, more).startswith("0 documents (0 tokens) have a text that stood there already")
    assert documents(both) == documents(whole) and len(documents(both)) == 110
    gone = [next(kept.removed_of(more, f"new.jsonl:new d{i}"))["reason"] for i in range(30, 60)]
    assert gone == ["duplicate"] * 30


# ----------------------------------------------------------------------------------------------------------------------
# when it was read


def test_when_says_the_steps_at_which_a_run_that_was_stopped_and_resumed_has_read_it(folder, tmp_path, monkeypatch):
    """A run of train.py in two stages, with a mixture, whose batches are written down as it reads them."""
    read, true = {}, StagedDataset.batch

    def batch(self, first, n):
        idx, targets, *rest = true(self, first, n)
        # Before the first step it looks at single windows.
        if n > 1:
            windows = np.concatenate([idx.numpy(), targets.numpy()[:, -1:]], 1)
            read[steps_in(first, 8)] = [window.astype(np.uint16).tobytes() for window in windows]
        return idx, targets, *rest
    monkeypatch.setattr(StagedDataset, "batch", batch)
    table, out = tmp_path / "table.py", tmp_path / "run"
    table.write_text('stages = (("one", ("eng",), 40, 28), ("two", {"eng": 1, "deu": 3}, 9999, 29))')
    args = ["configs/tiny.py", table, f"--data={folder}", f"--out={out}", "--stage=all", "--n_layer=1",
            "--eval_every=0", "--checkpoint_every=2", "--warmup_samples=8", "--decay_samples=8"]
    assert script("train.py", *args, "--total_samples=40").returncode == 0
    assert script("train.py", *args, "--total_samples=80", "--resume").returncode == 0
    streams = {name: b"".join(np.load(file).tobytes() for file in sorted(folder.glob(f"{name}_train_*.npy")))
               for name in ("eng", "deu")}
    at, counts = dict(eng=0, deu=0), []
    for row in kept_rows(folder):
        if row["split"] != "train" or row["source"] == "probes":
            continue
        source, begin = row["source"], at[row["source"]]
        at[source] = end = begin + row["tokens"]
        if int(row["id"].partition(":d")[2]) % 8:
            continue
        # A window of 65 tokens is of the place where its bytes stand in one of the streams.
        places = {step: [streams[source].find(window) // 2 for window in windows if window in streams[source]]
                  for step, windows in read.items() if step < 10}
        want = [step for step in sorted(places) if any(p < end and p + 65 > begin for p in places[step])]
        said = ask(folder, f"--find={row['id']}", f"--when={out}")
        assert [int(part.split()[-1]) for part in said.split(" (tokens")[:-1]] == want, said
        assert f"read at {len(want)} of the 10 steps" in said or not want and "none of the 10 steps" in said
        counts.append(len(want))
    assert len(counts) > 10 and len(set(counts)) > 2
    val = next(row["id"] for row in kept_rows(folder) if row["split"] == "val")
    assert "for validation" in ask(folder, f"--find={val}", f"--when={out}")
