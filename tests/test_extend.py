"""
More tokens (tokenizer.py --extend, train.py --init_from, studies/extend.py): against tokenizers and transformers,
against a count from scratch, and against the start model.
"""

import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import types
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

import convert
import tokenizer
from conftest import ROOT, refused, script
from data import TokenDataset
from engine import plot
from model import Apertus, ApertusConfig
from studies import extend, kit
from test_tokenizer import STRINGS

SHAPE = dict(n_layer=1, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=24, block_size=64)
RUN = ["--total_samples=8", "--warmup_samples=0", "--decay_samples=4", "--batch_size=4", "--micro_batch=4",
       "--lr=1e-3", "--lr_floor=1e-4", "--dtype=float32", "--sample_every=0", "--eval_every=1", "--eval_windows=8",
       "--compile=False", "--goldfish_k=0"]
# The Universal Declaration of Human Rights, article 1.
GREEK = ("Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα. Είναι προικισμένοι με "
         "λογική και συνείδηση, και οφείλουν να συμπεριφέρονται μεταξύ τους με πνεύμα αδελφοσύνης. ")


def shuffled(text, n, seed=0):
    """n words of a text in an order of their own: more of its kind."""
    return " ".join(random.Random(seed).choices(text.split(), k=n))


def texts():
    """Greek, code with its rules and runs, and all that test_tokenizer.py has."""
    with open(tokenizer.__file__, encoding="utf-8") as f:
        return [shuffled(GREEK, 400), f.read()[:20_000], *STRINGS]


def nasty(n, letters="aab-=  \n.(ιο"):
    """Short random texts of few letters, where the same union has several splits and runs overlap."""
    rng = random.Random(1)
    return ["".join(rng.choices(letters, k=rng.randint(1, 40))) for _ in range(n)]


def more_of(base, n):
    words, _ = tokenizer.words_of([("x", text) for text in [*texts(), *nasty(400)]], base)
    return tokenizer.extended(base, tokenizer.continue_bpe(base, words, n))


@pytest.fixture(scope="module", params=["byte", "apertus:4096", "apertus"])
def pair(request):
    """A vocabulary, and the same with 300 pieces more."""
    base = tokenizer.load(request.param)
    return base, more_of(base, 300)


# --- the vocabulary -----------------------------------------------------------------------------------------------


def test_old_ids_keep_their_tokens_and_new_ones_come_behind(pair):
    base, more = pair
    assert more.vocab_size == base.vocab_size + 300
    for i in [0, 3, 40, *range(base.n_special, base.vocab_size, 7)]:
        assert more.decode_bytes([i]) == base.decode_bytes([i])
    assert tokenizer.first_difference(more, base)[0] == base.vocab_size
    assert (more.special, more.in_text, more.ends()) == (base.special, base.in_text, base.ends())


def test_a_text_is_cut_as_before_and_then_joined(pair):
    """Each new token spelled by its old ones gives the old ids: nothing else of any text has changed."""
    base, more = pair
    spelled = tokenizer.new_tokens(more, base)
    assert spelled.keys() == set(range(base.vocab_size, more.vocab_size))
    changed = 0
    for text in [*texts(), *nasty(500), "Nothing new: x y."]:
        ids = more.encode(text)
        old = base.encode(text)
        assert [j for i in ids for j in spelled.get(i, [i])] == old and more.decode(ids) == text
        changed += ids != old
    assert changed > 20


def test_tokenizers_makes_our_ids_by_the_merges_that_we_export(pair):
    """Hugging Face's own library; also by the merges alone, without its short cut for whole words."""
    tokenizers = pytest.importorskip("tokenizers")
    _, more = pair
    content = convert.hf_files(more)["tokenizer.json"]
    for shortcut in (True, False):
        content["model"]["ignore_merges"] = shortcut
        theirs = tokenizers.Tokenizer.from_str(json.dumps(content))
        theirs.encode_special_tokens = True
        for text in [*texts(), *nasty(1500)]:
            assert theirs.encode(text, add_special_tokens=False).ids == more.encode(text), text


def from_scratch(base, words, n):
    """The same pieces by a count of everything at every step, of words as tiktoken joins them with all so far."""
    found = []
    for _ in range(n):
        tok = tokenizer.extended(base, found)
        count = Counter()
        for word, times in words.items():
            pieces = [tok.decode_bytes([i]) for i in tok.spell(word.encode())]
            for a, b in itertools.pairwise(pieces):
                count[a + b] += times
        best = max(count.values(), default=0)
        if best < 2:
            break
        found.append(min(union for union, times in count.items() if times == best))
    return found


@pytest.mark.parametrize("name", ["byte", "apertus:300"])
def test_what_is_learnt_is_the_most_frequent_union_at_every_step(name):
    base = tokenizer.load(name)
    words = Counter(nasty(60, "aab-οι"))
    want = from_scratch(base, words, 60)
    assert list(tokenizer.continue_bpe(base, words, 60)) == want and len(want) == 60


def test_it_ends_where_nothing_comes_twice():
    base = tokenizer.load("byte")
    assert tokenizer.continue_bpe(base, Counter(["abc", "xy"]), 9) == {}
    assert tokenizer.continue_bpe(base, Counter({"ab": 1, "cab": 2, "xy": 1}), 9) == {b"ab": 3, b"cab": 2}


def test_names_of_control_tokens_are_not_learnt():
    """Neither from a text that has them, nor as a piece of the same spelling, which would be the same in vocab."""
    base = tokenizer.load("byte")
    words, _ = tokenizer.words_of([("x", "a"), ("x", r"<email-pii>\begin{" * 50)], base)
    assert not words
    own = tokenizer.Tokenizer("x", base.pieces, [*base.special, "abab"])
    learnt = tokenizer.continue_bpe(own, Counter({"abab": 9}), 9)
    assert list(learnt) == [b"ab"]


def test_one_part_in_twenty_of_each_language_is_kept_apart():
    texts = [("a", "x" * 100_000), ("b", "y" * 2000), ("a", "z" * 2000)]
    words, apart = tokenizer.words_of(texts, tokenizer.load("byte"))
    assert [lang for lang, _ in apart] == ["a", "a", "a", "b"]
    assert sum(len(word) * times for word, times in words.items()) == 104_000 - 4 * 2000
    assert "y" not in "".join(words)


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """
    A run and its export on bytes, Greek among its data; more pieces, learnt from these data; the data in them; and a
    run that goes on with both.
    """
    root = tmp_path_factory.mktemp("extend")
    for i in range(8):
        (root / f"{i}.txt").write_text(shuffled(GREEK, 400, seed=i) + f" only{i}here" * 60, encoding="utf-8")
    files = [root / f"{i}.txt" for i in range(8)]
    ok(script("prepare.py", *files, f"--out={root / 'data'}", "--tokenizer=byte", "--val_share=0.2"))
    shape = kit.flags(SHAPE)
    ok(script("train.py", f"--data={root / 'data'}", f"--out={root / 'start'}", *shape, *RUN))
    ok(script("convert.py", f"--load={root / 'start'}", f"--save={root / 'hf'}"))
    vocabulary = [f"--name={root / 'start'}", f"--extend={root / 'data'}", f"--out={root / 'more.json'}"]
    done = script("tokenizer.py", *vocabulary, "--size=400", "δικαιώματα")
    ok(done)
    (root / "said.txt").write_text(done.stdout, encoding="utf-8")
    again = ["--val_share=0.2", f"--tokenizer={root / 'more.json'}"]
    ok(script("prepare.py", *files, f"--out={root / 'data2'}", *again))
    done = go_on(root, root / "more")
    ok(done)
    (root / "trained.txt").write_text(done.stdout, encoding="utf-8")
    return root


def ok(done):
    assert done.returncode == 0, done.stderr


def go_on(lab, out, *args, start="start", data="data2"):
    return script("train.py", f"--data={lab / data}", f"--init_from={lab / start}", f"--out={out}", *RUN, *args)


def vocabularies(lab):
    return tokenizer.load("byte"), tokenizer.load(str(lab / "more.json"))


def test_what_is_validated_on_was_not_learnt_from(lab):
    """Each of the eight texts has a word of its own: the new pieces hold those of the training split alone."""
    _, more = vocabularies(lab)
    meta = json.loads((lab / "data" / "meta.json").read_text())
    split = {}
    for name in ("train", "val"):
        file = meta["sources"]["data"][name]["shards"][0]["file"]
        text = tokenizer.load("byte").decode(np.load(lab / "data" / file))
        split[name] = {i for i in range(8) if f"only{i}here" in text}
    pieces = b" ".join(more.pieces)
    assert split["train"] and split["val"] and not split["train"] & split["val"]
    numbers = set(map(int, re.findall(rb"\d", pieces)))
    assert numbers >= set(range(10))
    learnt, _ = tokenizer.words_of(tokenizer.prepared_texts(str(lab / "data")), more)
    assert set(map(int, "".join(filter(str.isdecimal, learnt)))) == split["train"]


def test_the_command_says_how_many_bytes_a_token_has_before_and_after(tmp_path):
    """By hand: 28 letters of two bytes in 4 tokens each, where all the text of a language is kept apart."""
    rows = [dict(lang="ell", text="λόγος " * 300), dict(lang="eng", text="word"), dict(lang="ell", text="λόγος " * 900)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = script("tokenizer.py", "--name=byte", f"--extend={tmp_path / 't.jsonl'}", f"--out={tmp_path / 'm.json'}",
                  "--size=326")
    ok(done)
    table = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()[1:4]}
    after = tokenizer.load(str(tmp_path / "m.json"))
    text = "λόγος " * 300
    size = len(text.encode())
    n = len(after.encode(text))
    assert table["ell"] == ["1.000", f"{size / n:.3f}", f"{1 - n / size:.1%}"] and n < size / 2
    assert table["eng"] == ["1.000", "1.000", "0.0%"]
    assert table["together"] == ["1.000", f"{(size + 4) / (n + 4):.3f}", f"{1 - (n + 4) / (size + 4):.1%}"]


def test_the_size_is_a_multiple_of_256_unless_it_is_named(tmp_path):
    args = ["--name=byte", f"--extend={os.path.join(ROOT, 'model.py')}"]
    ok(script("tokenizer.py", *args, f"--out={tmp_path / 'a.json'}"))
    assert tokenizer.load(str(tmp_path / "a.json")).vocab_size == 512
    done = script("tokenizer.py", *args, f"--out={tmp_path / 'b.json'}", "--size=333")
    assert tokenizer.load(str(tmp_path / "b.json")).vocab_size == 333
    assert "333 ids, 13 of them new" in done.stdout


def test_the_texts_on_the_command_line_are_shown_in_the_new_pieces(lab):
    shown = (lab / "said.txt").read_text(encoding="utf-8").splitlines()[-1]
    _, more = vocabularies(lab)
    ids = more.encode("δικαιώματα")
    assert max(ids) >= 320 and shown.startswith(f"{ids[0]}:") and f"({len(ids)} tokens, 20 bytes)" in shown


@pytest.mark.parametrize("args, says", [
    (["--size=320"], ["size=320", "has 320 ids already"]),
    (["--out=new.txt"], ["ends in .json"]),
    (["--out={lab}/more.json"], ["more.json", "new file"]),
    (["--extend={lab}/few.txt"], ["0 pieces to learn"]),
    (["--extend={lab}/empty.txt"], ["no text"]),
    (["--extend={lab}/latin.txt"], ["is not UTF-8"]),
    (["--extend={lab}/nolang.jsonl"], ["text and lang"]),
    (["--extend={lab}/nowhere.txt"], ["nowhere.txt"]),
    (["--extend={lab}/start"], ["meta.json"]),
    (["--name={lab}/hf"], ["is a Hugging Face model", "convert.py --load="])])
def test_what_cannot_be_extended_is_told_in_one_line_and_nothing_is_written(lab, args, says):
    (lab / "few.txt").write_text("few")
    (lab / "empty.txt").write_text("")
    (lab / "latin.txt").write_bytes(b"Gr\xfcezi")
    (lab / "nolang.jsonl").write_text('{"text": "a"}')
    before = (lab / "more.json").read_bytes()
    usual = ["--name=byte", f"--extend={lab / '0.txt'}", f"--out={lab / 'never.json'}"]
    refused(script("tokenizer.py", *usual, *(arg.format(lab=lab) for arg in args)), *says)
    assert not (lab / "never.json").exists() and (lab / "more.json").read_bytes() == before


# --- the model ----------------------------------------------------------------------------------------------------


def filled(lab, folder, new):
    config, tok, path = convert.start_of(str(lab / folder))
    model = Apertus(replace(config, vocab_size=tok.vocab_size + len(new)), seed=5)
    convert.fill(model, path, config.vocab_size, new)
    return model


def rows_of(model):
    return [model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()]


@pytest.mark.parametrize("start", ["start", "hf", "tied"])
def test_old_rows_keep_their_bits_and_new_ones_are_means(lab, start):
    """What spelled a token, transformers says, with the old vocabulary. Tied or not, of a run or of an export."""
    transformers = pytest.importorskip("transformers")
    base, more = vocabularies(lab)
    if start == "tied":
        model = Apertus(ApertusConfig(**SHAPE, vocab_size=320, tie_embeddings=True, init_std=0.1))
        convert.save_hf(model, str(lab / "tied"), base)
    theirs = transformers.AutoTokenizer.from_pretrained(str(lab / "hf"))
    old = convert.load_any(str(lab / start))[0]
    model = filled(lab, start, tokenizer.new_tokens(more, base))
    for before, after in zip(rows_of(old), rows_of(model)):
        assert torch.equal(after[:320], before) and len(after) == 400
        for i in range(320, 400):
            text = more.decode_bytes([i])
            try:
                spelled = theirs.encode(text.decode(), add_special_tokens=False)
            except UnicodeDecodeError:      # a part of a letter is no text
                spelled = base.spell(text)
            mean = before[spelled].double().mean(0)
            torch.testing.assert_close(after[i].double(), mean, rtol=1e-6, atol=1e-8)
    rest = dict(model.named_parameters())
    for name, p in old.named_parameters():
        assert torch.equal(rest[name][:len(p)], p)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (start == "tied")


def test_rows_that_only_padded_the_start_become_means_too(lab, tmp_path):
    """The embedding of a start may have more rows than ids: what stands there means nothing."""
    base, _ = vocabularies(lab)
    model = Apertus(ApertusConfig(**SHAPE, vocab_size=384))
    convert.save_hf(model, str(tmp_path / "padded"), base)
    _, _, path = convert.start_of(str(tmp_path / "padded"))
    after = Apertus(replace(model.config, vocab_size=384))
    convert.fill(after, path, 384, {320: [65, 66]})
    want = model.lm_head.weight[[65, 66]].mean(0)
    assert torch.equal(after.lm_head.weight[320], want)
    assert torch.equal(after.lm_head.weight[321:], model.lm_head.weight[321:])


def test_a_run_with_more_tokens_begins_with_these_rows_and_says_so(lab):
    """The loss before the first step is that of the model above, on the new data."""
    base, more = vocabularies(lab)
    new = tokenizer.new_tokens(more, base)
    model = filled(lab, "start", new)
    idx, targets, keep, doc = TokenDataset(str(lab / "data2"), "val", 64, 28).batch(0, 8)
    with torch.no_grad():
        _, nll = model(idx, targets, keep, doc, per_token=True)
    first = plot.read_log(str(lab / "more"))[0]
    assert first["step"] == first["tokens"] == 0
    assert first["val_loss"] == pytest.approx(((nll * keep).sum() / keep.sum()).item(), rel=1e-6)
    mean = np.mean([len(spelled) for spelled in new.values()])
    said = (lab / "trained.txt").read_text()
    assert "80 tokens are new, from id 320 on: each begins as the mean of the old ones" in said
    assert f"{mean:.1f} on average" in said
    assert json.loads((lab / "more" / "config.json").read_text())["vocab_size"] == 400


def test_stopped_and_resumed_it_ends_in_the_same_bits(lab, tmp_path):
    """The means are not taken again: the new rows come from the checkpoint, where a step has changed them."""
    run = tmp_path / "run"
    ok(go_on(lab, run, "--checkpoint_every=1", "--keep_checkpoints=9"))
    os.remove(run / "summary.json")
    shutil.rmtree(run / "ckpt" / "step-00000002")
    done = go_on(lab, run, "--resume")
    ok(done)
    assert "resumed from" in done.stdout and "tokens are new" not in done.stdout
    ours, theirs = (rows_of(convert.load_run(str(folder))[0]) for folder in (run, lab / "more"))
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("start", ["start", "hf"])
def test_two_sharded_processes_begin_and_end_as_one(launch, lab, tmp_path, start):
    args = [f"--data={lab / 'data2'}", f"--init_from={lab / start}", f"--out={tmp_path / 'run'}", *RUN]
    codes, text = launch(2, *args, "--parallel=fsdp", script="train", logs=tmp_path / "log")
    assert codes == [0, 0] and text.count("80 tokens are new") == 1, text[-2000:]
    ours, theirs = ([e["val_loss"] for e in plot.read_log(str(run)) if "val_loss" in e]
                    for run in (tmp_path / "run", lab / "more"))
    assert ours == pytest.approx(theirs, abs=2e-5)


def test_transformers_reads_it_and_so_do_we_again_with_the_same_ids(lab, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = str(tmp_path / "hf")
    ok(script("convert.py", f"--load={lab / 'more'}", f"--save={folder}"))
    _, more = vocabularies(lab)
    ours, back = convert.load_any(folder)
    assert back.hash == more.hash and back.ids == more.ids
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert len(theirs) == 400
    for text in [*texts(), *nasty(300)]:
        ids = more.encode(text)
        kept = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert kept == ids == back.encode(text) and theirs.decode(ids) == text
    idx = torch.tensor([more.encode(shuffled(GREEK, 30))[:64]])
    assert idx.max() >= 320
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(folder)(idx).logits
        torch.testing.assert_close(logits, ours(idx)[0], rtol=1e-5, atol=1e-6)


def test_an_extended_model_is_a_start_like_any(lab, tmp_path):
    """No token is new to it; and data without its new tokens are those of another vocabulary."""
    done = go_on(lab, tmp_path / "run", start="more")
    ok(done)
    assert "tokens are new" not in done.stdout
    refused(go_on(lab, tmp_path / "no", start="more", data="data"), "id 320", "another vocabulary")


def test_a_control_token_behind_the_old_ids_is_refused(lab, tmp_path):
    """Nothing has spelled it, so that there is no row to begin with."""
    saved = json.loads((lab / "data2" / "tokenizer.json").read_text())
    _, more = vocabularies(lab)
    saved.update(special=more.special | {"<|new|>": 400}, ids=more.ids, in_text=sorted(more.in_text), ends=more.ends())
    os.makedirs(tmp_path / "data")
    for file in os.listdir(lab / "data2"):
        (tmp_path / "data" / file).write_bytes((lab / "data2" / file).read_bytes())
    (tmp_path / "data" / "tokenizer.json").write_text(json.dumps(saved))
    refused(go_on(tmp_path, tmp_path / "run", start=lab / "start", data="data"), "id 320", "another vocabulary")


def test_convert_writes_the_vocabulary_of_a_model_alone(lab, tmp_path):
    """Of a Hugging Face folder, for prepare.py and tokenizer.py, which read no such folder; and never over a file."""
    path = str(tmp_path / "v.json")
    ok(script("convert.py", f"--load={lab / 'hf'}", f"--save={path}"))
    assert tokenizer.load(path).hash == tokenizer.load("byte").hash
    before = open(path, "rb").read()
    refused(script("convert.py", f"--load={lab / 'hf'}", f"--save={path}"), "is there already")
    assert open(path, "rb").read() == before


# --- does it pay --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def study(lab):
    """The whole study, small, on a text; its scripts run in this process. Returns the folder of its results."""
    calls, run = [], subprocess.run

    def in_process(command, **how):
        if command[0] != sys.executable:
            return run(command, **how)
        calls.append(command[2:])
        done = script(f"{command[2]}.py", *command[3:])
        how["stdout"].write(done.stderr)
        return types.SimpleNamespace(returncode=done.returncode)

    args = [lab / "0.txt", f"--data={lab / 'data'}", "--config=configs/tiny.py", "--samples=32", "--seeds=1",
            "--size=400", f"--out={lab / 'study'}", f"--results={lab / 'results'}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "run", in_process)
        ok(script("studies.extend", *args))
        n = len(calls)
        ok(script("studies.extend", *args))
    assert n == 8 and len(calls) == n      # a start, its vocabulary, one extended, two of data, three runs; then none
    return lab / "results"


def test_the_study_compares_the_same_bytes_and_the_same_tokens(study):
    rows = kit.read_rows(study / "rows.jsonl")
    groups = extend.by_arm(rows)
    assert [len(group) for group in groups.values()] == [1, 1, 1]
    old, same_bytes, same_tokens = (group[0] for group in groups.values())
    assert (old["ids"], same_bytes["ids"], same_tokens["ids"]) == (320, 400, 400)
    assert same_tokens["tokens"] == old["tokens"] == 32 * 64
    assert same_bytes["tokens"] < old["tokens"]
    # A step is eight windows: the number of bytes is met to within one.
    assert same_bytes["megabytes"][-1] == pytest.approx(old["megabytes"][-1], abs=8 * 64 * 3 / 1e6)
    # Before any step the two with new tokens are one model.
    assert same_bytes["bpb"][0] == pytest.approx(same_tokens["bpb"][0], rel=1e-6) != old["bpb"][0]
    assert len({row["bpb"][-1] for row in rows}) == 3


def test_bits_per_byte_of_the_study_are_of_the_same_bytes(study, lab):
    """From the folders: the nats of all tokens but the first of each document, over the bytes of the text itself."""
    row = kit.read_rows(study / "rows.jsonl")[-1]
    folders = [path.parent for path in (lab / "study").glob("*/new/meta.json")]
    folders += [path.parent for path in (lab / "study").glob("*/old/meta.json")]
    sizes = {json.loads((folder / "meta.json").read_text())["sources"]["new"]["val"]["bytes"] for folder in folders[:1]}
    other = {json.loads((folder / "meta.json").read_text())["sources"]["old"]["val"]["bytes"] for folder in folders[1:]}
    assert sizes == other and len(folders) == 2
    run = next(path for path in (lab / "study").glob("*/summary.json")
               if json.loads(path.read_text())["val_bpb"] == row["bpb"][-1])
    summary = json.loads(run.read_text())
    val = json.loads((folders[0] / "meta.json").read_text())["sources"]["new"]["val"]
    bits = summary["val_loss"] / math.log(2) * (val["tokens"] - val["documents"])
    assert summary["val_bpb"] == pytest.approx(bits / val["bytes"], rel=1e-9)


def row(arm, seed, last):
    return dict(arm=arm, seed=seed, ids=9, bytes_per_token=2.0, megabytes=[0, 2], tokens=1e6, bpb=[4.0, last])


def test_the_table_takes_differences_seed_by_seed():
    """By hand: -.1 and -.3 differ from -.2 by .1, and half the interval of two values is 12.706 * .1."""
    rows = [row("old", 1, 2.0), row("old", 2, 3.0)]
    rows += [row("same_bytes", 1, 1.9), row("same_bytes", 2, 2.7)]
    rows += [row("same_tokens", 1, 2.0), row("same_tokens", 2, 3.0)]
    lines = extend.table_md(rows).splitlines()
    assert lines[3] == "| same bytes | 9 | 2.00 | 1,000 | 2.00 | 4.000 | 2.3000 ± 5.0825 | -0.2000 ± 1.2706 |"
    assert "| 0.0000 ± 0.0000 |" in lines[4] and lines[2].endswith("|  |")
    assert lines[-1].startswith("2 seeds of the order of the windows")


def test_the_study_without_a_text_says_what_to_type():
    refused(script("studies.extend"), "python -m studies.extend book.txt")
