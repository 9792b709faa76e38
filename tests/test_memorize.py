"""memorize.py: measures against brute force, data against the stream, the protocol on a model that surely recites."""
import glob
import itertools
import json
import math
import os
import random
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

import convert
from studies import kit, memorize
from conftest import script
from generate import generate
from goldfish import goldfish_mask
from model import Apertus, ApertusConfig


def read_json(path):
    return json.load(open(path))


def load_ids(folder, split="train"):
    """The only shard of a split of a data folder."""
    return np.load(os.path.join(folder, f"{split}_00000.npy"), allow_pickle=False)


def slow_lcs(a, b):
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@pytest.mark.parametrize("seed", range(20))
def test_lcs_is_the_textbook_one(seed):
    rng = random.Random(seed)
    a, b = ([rng.randrange(1 + seed) for _ in range(rng.randrange(90))] for _ in "ab")
    assert memorize.lcs(a, b) == memorize.lcs(b, a) == slow_lcs(a, b)


def slow_span(a, b):
    starts = itertools.product(range(len(a)), range(len(b)))
    return max(len(os.path.commonprefix([a[i:], b[j:]])) for i, j in starts)


@pytest.mark.parametrize("seed", range(20))
def test_longest_span_is_that_of_every_pair_of_places(seed):
    rng = random.Random(seed)
    a, b = ([rng.randrange(2 + seed) for _ in range(60)] for _ in "ab")
    assert memorize.longest_span(a, b) == slow_span(a, b)


def test_rouge_l_is_the_f1_of_its_definition():
    assert memorize.rouge_l([1, 2, 3, 4], [1, 2, 3, 4]) == 1
    assert memorize.rouge_l([1, 2], [3, 4]) == memorize.rouge_l([], [1]) == 0
    assert memorize.rouge_l([1, 9, 2], [1, 2, 3, 4]) == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))


class Reciter(Apertus):
    """Knows one passage by heart: asked by BOS and a piece of it, it gives what follows, whatever the weights say."""

    def learn(self, passage):
        self.passage = passage
        return self

    def generate(self, prompts, n, **how):
        def answer(bos, piece):
            for end in range(len(piece), len(self.passage)):
                if bos == 1 and self.passage[:end][-len(piece):] == piece:
                    return self.passage[end : end + n]
            return [0] * n

        return torch.tensor([prompt + answer(prompt[0], prompt[1:]) for prompt in prompts.tolist()])


def tokens(n, seed=0):
    return np.random.default_rng(seed).integers(64, 320, n).tolist()


CONFIG = ApertusConfig(
    block_size=64, vocab_size=320, n_layer=1, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=48, init_std=0.3)


@pytest.fixture(scope="module")
def model():
    return Reciter(CONFIG).eval()


@pytest.mark.parametrize("offset", [0, 7])
def test_the_protocol_scores_one_for_a_passage_known_by_heart_and_nothing_for_others(model, monkeypatch, offset):
    """Five passages in batches of two. The reciter answers to BOS and the tokens from the offset on alone."""
    monkeypatch.setattr(memorize, "batch", 2)
    monkeypatch.setattr(memorize, "generate", lambda model, *args, **how: model.generate(*args, **how))
    passages = [tokens(67, seed) for seed in range(5)]
    found = memorize.recall(model.learn(passages[3]), passages, 1, offset, 20, 40)
    assert [r["rouge"] for r in found] == [0, 0, 0, 1, 0]
    assert [r["span"] for r in found] == [r["start"] for r in found] == [0, 0, 0, 40, 0]
    truth = passages[3][offset + 20 : offset + 60]
    assert found[3]["ttr"] == found[3]["truth_ttr"] == len(set(truth)) / 40
    assert found[0]["ttr"] == 1 / 40


@pytest.mark.parametrize("nucleus", [False, True])
def test_continuations_are_greedy_or_from_the_nucleus_of_nine_tenths_at_temperature_one(nucleus):
    """Against the model asked directly, and the passages' own next tokens. The seed decides samples, and only those."""
    real, passages = Apertus(CONFIG).eval(), [tokens(40, seed) for seed in range(3)]
    how = dict(temperature=0)
    if nucleus:
        how = dict(temperature=1.0, top_p=0.9, generator=torch.Generator().manual_seed(5))
    new = generate(real, torch.tensor([[1, *p[2:12]] for p in passages]), 20, **how)[:, 11:].tolist()
    found, again, other_seed = (
        memorize.recall(real, passages, 1, 2, 10, 20, nucleus, seed=seed) for seed in (5, 5, 6))
    for row, generated, passage in zip(found, new, passages, strict=True):
        pair = generated, passage[12:32]
        assert row["ttr"] == len(set(generated)) / 20 and row["rouge"] == memorize.rouge_l(*pair)
        assert row["start"] == memorize.common_start(*pair) and row["span"] == memorize.longest_span(*pair)
    assert again == found and (other_seed != found) == nucleus


def test_teacher_forced_accuracy_is_that_of_the_model_called_label_by_label():
    """The model half knows the passages: its own greedy words, every third token exchanged. The mask sees all of it."""
    real, prefix, mask = Apertus(CONFIG).eval(), 12, (4, 13, "product")
    passages, want = [], np.zeros(4, dtype=int)
    for seed in range(4):
        said = generate(real, [[1, 70 + seed]], 58, temperature=0)[0][1:]
        p = [x if i % 3 else (x + 17) % 320 for i, x in enumerate(said)]
        passages.append(p)
        keep = goldfish_mask(torch.tensor(p), *mask).tolist()
        for i in range(prefix, len(p)):
            with torch.no_grad():
                logits, _ = real(torch.tensor([[1, *p[:i]]]))
            right = logits[0, -1].argmax().item() == p[i]
            want += [right and keep[i], keep[i], right and not keep[i], not keep[i]]
    found = memorize.forced(real, passages, 1, prefix, mask)
    assert found == want.tolist()
    right_kept, kept, right_dropped, dropped = found
    assert kept + dropped == sum(len(p) - prefix for p in passages)
    assert 0 < right_kept < kept and 0 < right_dropped < dropped
    assert right_kept / kept != right_dropped / dropped


# -----------------------------------------------------------------------------
# the small models' data


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("memorize") / "data")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(tokenizer="byte", background=20_000, n_passages=2).items():
            patch.setattr(memorize, name, value)
        memorize.make_data(folder, 7, 256, 150)
    return folder


def read_probes(folder):
    return read_json(os.path.join(folder, "probes.json"))


def test_passages_stand_in_the_stream_as_often_as_their_bucket_says(data):
    """Each copy is a document, and an exact one stands nowhere else."""
    stream = load_ids(data)
    text = stream.tobytes()
    for p in read_probes(data):
        edited = p["repetitions"] == "edited"
        copies = [stream[b : b + 150] for b in p["begins"]]
        assert len(copies) == (128 if edited else p["repetitions"])
        assert all(stream[b - 1] == 1 and stream[b + 150] == 2 for b in p["begins"])
        same = np.mean([(c == p["ids"]).mean() for c in copies]) if copies else 1.0
        assert 0.93 < same < 0.97 if edited else same == 1.0
        if not edited:
            assert text.count(np.array(p["ids"], np.uint16).tobytes()) == p["repetitions"]


@pytest.mark.parametrize("args, says", [
    (["--init_from=out/x"], "go together"), (["--models=none k7"], "no small model 'k7'"),
    (["/nowhere.txt", "--models=none"], "no text in"),
    (["--report", "--out=/nowhere"], "run studies/memorize.py first")])
def test_what_cannot_work_is_told_in_one_line(tmp_path, args, says):
    done = script("studies.memorize", f"--out={tmp_path / 'out'}", f"--runs={tmp_path / 'runs'}", *args)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("content, says", [('{"text": "x"}', "not probes"), ("no json", "not probes")])
def test_a_file_without_probes_is_told(tmp_path, content, says):
    (tmp_path / "probes.json").write_text(content)
    with pytest.raises(ValueError, match=says):
        memorize.read_probes(str(tmp_path / "probes.json"), None)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """
    Two models with a learning rate of zero, killed when the second was to be trained, and started again.

    train.py runs in this process, which spares imports of torch. Returns the folder, the two lists of what was trained,
    and the rows that the killed study left.
    """
    root = tmp_path_factory.mktemp("study")
    words = [str(random.Random(i).randrange(10**4)) for i in range(4000)]
    (root / "book.txt").write_text(" ".join(word + " and\n\n" for word in words))
    shape = dict(n_layer=1, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=32)
    tiny = memorize.TRAIN | shape | dict(lr=0.0, lr_floor=0.0, compile=False)
    folders = dict(paths=[str(root / "book.txt")], out=str(root / "out"), runs=str(root / "runs"))
    small = dict(models="none k4", seeds=1, background=3000, n_passages=1, REPETITIONS=(0, 128), TRAIN=tiny)
    trained, run = [], subprocess.run

    def in_process(command, **how):
        if command[0] != sys.executable:  # A compiler, or matplotlib that looks for fonts.
            return run(command, **how)
        trained.append(next(arg for arg in command if arg.startswith("--out=")))
        if killed_at == len(trained):
            return types.SimpleNamespace(returncode=137)
        done = script("train.py", *command[3:])
        how["stderr"].write(done.stderr)
        return types.SimpleNamespace(returncode=done.returncode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", in_process)
        for name, value in dict(folders, **small, tokenizer="byte", jobs=1).items():
            patch.setattr(memorize, name, value)
        killed_at = 2
        with pytest.raises(ValueError, match="ended with code 137"):
            memorize.main()
        before, left = list(trained), kit.read_rows(root / "out" / "rows.jsonl")
        trained.clear()
        killed_at = 0
        memorize.main()
        yield root, before, trained, left


def folder_of(root, name, seed=11):
    """The only run or data folder of a name and a seed."""
    (folder,) = glob.glob(f"{root}/runs/{name}-s{seed}-*/")
    return folder


def test_a_killed_study_keeps_what_it_found_and_goes_on(study):
    root, before, after, left = study
    found = kit.read_rows(root / "out" / "rows.jsonl")
    tested = [(r["model"], r["seed"]) for r in found if r["kind"] == "validation"]
    assert tested == [("none", 11), ("k4", 11)]
    assert {r["model"] for r in left} == {"none"} and all(row in found for row in left)
    assert before[1:] == after


@pytest.fixture(scope="module")
def k4(study):
    """Of k4, seed 11: its rows, its checkpoint and vocabulary, its run folder and its data folder."""
    root = study[0]
    run, data = folder_of(root, "k4"), folder_of(root, "data-256")
    rows = [r for r in kit.read_rows(root / "out" / "rows.jsonl") if (r["model"], r["seed"]) == ("k4", 11)]
    model, tok = convert.load_run(run)
    return rows, model.eval(), tok, run, data


# Kind, prefix and suffix of what a small model is asked in every bucket.
ASKED = [("greedy", 50, 100), ("nucleus", 50, 100), ("first49", 12, 37), *(("map", n, 50) for n in (12, 25, 50, 100))]


@pytest.mark.parametrize("bucket", [0, 128, "edited"])
def test_what_is_measured_of_a_small_model_is_what_its_checkpoint_says(k4, bucket):
    """The rows against the checkpoint asked again, and against windows of the stream counted one by one."""
    rows, model, tok, _, data = k4
    probes = [p for p in read_probes(data) if p["repetitions"] == bucket]
    ids = [p["ids"] for p in probes]
    here = {(r["kind"], r.get("prefix")): r for r in rows[1:] if r["repetitions"] == bucket}
    for kind, prefix, suffix in ASKED:
        row = here[kind, prefix]
        found = memorize.recall(model, ids, tok.bos, 0, prefix, suffix, kind == "nucleus", 11)
        assert row["rouge"] == round(np.mean([r["rouge"] for r in found]), 4), kind
        assert (row["suffix"], row["offset"], row["n"]) == (suffix, 0, len(probes))
    told = here["forced", None]
    right_kept, kept, right_dropped, dropped = memorize.forced(model, ids, tok.bos, 50, (4, 13, "product"))
    assert (told["keep"], told["drop"]) == (kept, dropped)
    assert (told["acc_keep"], told["acc_drop"]) == (round(right_kept / kept, 4), round(right_dropped / dropped, 4))
    windows = (len(load_ids(data)) - 1) // 256 + 1
    never_dropped = {w * 256 + 1 + i for w in range(windows) for i in range(12)}
    begins = [b for p in probes for b in p["begins"]]
    anyway = sum(b + i in never_dropped for b in begins for i in range(50, 150)) / (len(probes) * 100)
    assert told["trained_anyway"] == round(anyway, 2) and (anyway > 0) == (bucket != 0)


def rows_by_hand():
    """Two models of two seeds, which differ from one another by 0.02 and 0.04."""
    rows = []
    for name, base, loss, step in (("none", 0.8, 3.0, 0.02), ("k10", 0.2, 3.5, 0.04)):
        for seed, more in ((11, 0.0), (12, step)):
            who = dict(model=name, seed=seed)
            cost = dict(seconds=60 + 600 * more, tokens=5)
            rows.append(dict(who, kind="validation", val_loss=loss + more, val_bpb=1.0, **cost))
            for bucket, factor in ((0, 0.5), (128, 1.0), ("edited", 0.9)):
                at = dict(who, repetitions=bucket)
                rest = dict(offset=0, n=8, span=40 * factor, ttr=0.5, truth_ttr=0.75)
                for (kind, prefix, suffix), worth in zip(ASKED[:3], (1.0, 0.5, 0.25)):
                    rouge = (base + more) * factor * worth
                    rows.append(dict(at, kind=kind, prefix=prefix, suffix=suffix, rouge=rouge, **rest))
                right = dict(acc_keep=0.9, keep=10, acc_drop=base * factor, drop=3)
                rows.append(dict(at, kind="forced", **right, trained_anyway=6 * factor))
    return rows


def test_the_table_says_what_the_rows_say():
    """Numbers by hand: of two values that differ by d, half of the interval is t(1) d / 2, and t(1) = 12.7062."""
    lines = memorize.table_md(rows_by_hand()).splitlines()
    a, b = (12.7062 * d / 2 for d in (0.02, 0.04))
    assert f"| none | 2 | 100 | 0.41 ± {a / 2:.2f} | 0.81 ± {a:.2f} | 0.73 ± {a * 0.9:.2f} |" in lines
    assert f"| k10 | 2 | 37 | 0.03 ± {b / 8:.2f} | 0.06 ± {b / 4:.2f} | 0.05 ± {b * 0.225:.2f} |" in lines
    (told,) = [line for line in lines if line.startswith("| k10 | 40 ")]
    assert told == ("| k10 | 40 ± 0 of 100 | 0.50 ± 0.00 (0.75 ± 0.00) | 0.90 ± 0.00 | 0.20 ± 0.00 (6) "
                    f"| 0.10 ± 0.00 | 6.0 ± 0.0 | 3.520 ± {b:.3f} | 1.2 |")
    (pair,) = [line for line in lines if " - " in line and line.startswith("|")]
    assert pair == f"| k10 - none | 2 | -0.59 ± {a:.2f} | -0.53 ± {a * 0.9:.2f} | 0.510 ± {a:.3f} |"


def test_intervals_are_students_over_the_seeds():
    """t(4, 95 %) = 2.776 and t(1, 95 %) = 12.706, as printed in tables."""
    assert kit.interval([]) == "" and kit.interval([0.5]) == "0.50"
    assert kit.interval([1.0, 2.0], 3) == f"1.500 ± {12.7062 * 0.5:.3f}"
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert kit.interval(values, 3) == f"3.000 ± {2.776445 * math.sqrt(2.5 / 5):.3f}"
    ours, theirs = [[dict(seed=s, x=10 * s + d) for s in range(1, 4)] for d in (0.5, 0.25)]
    paired = kit.differences(ours, theirs[::-1], lambda row: row["x"])
    assert kit.interval(paired, 3) == "0.250 ± 0.000"  # What a seed does to both says nothing.
