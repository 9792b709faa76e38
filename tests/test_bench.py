"""
tools/bench.py: every mode at tiny size reaches agreement and writes what it promises; its arithmetic against brute
force. No timings.
"""
import itertools
import json
import math
import os

import numpy as np
import pytest
import torch

from tools import bench
from tools import peers
from conftest import script
from generate import generate
from model import Apertus, ApertusConfig


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """Compiling costs half a minute and changes no claim here: the contestants that need a compiler stay out."""
    monkeypatch.setenv("CXX", "no-such-compiler")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(bench, "preset", "tiny")
    monkeypatch.setattr(bench, "device", "cpu")
    monkeypatch.setattr(bench, "dtype", "float32")
    monkeypatch.setattr(bench, "rounds", 4)


def run(tmp_path, *args):
    """A mode as a user runs it, small: what it said, and the record that it wrote."""
    small = ["--preset=tiny", "--device=cpu", "--rounds=2", "--warmup=1", f"--out={tmp_path}"]
    done = script("tools.bench", args[0], *small, *args[1:])
    assert done.returncode == 0, done.stderr
    path, = tmp_path.glob("*.json")
    return done, json.loads(path.read_text())


# A contestant that is started as a process takes seconds: one of them, and one round, show as much as all.
SLOW = dict(memory=["--impls=ours full logits", "--rounds=1"], prepare=["--impls=ours", "--rounds=1"])


@pytest.mark.parametrize("mode, others, rates", [
    ("train", {"ours plain", "hf"}, {"tok/s", "TFLOP/s", "of GEMM peak"}),
    ("finetune", {"LoRA 16"}, {"tok/s", "TFLOP/s", "of GEMM peak"}),
    ("optim", {"AdamW fused", "per-tensor loop"}, {"GB/s", "of bandwidth"}),
    ("goldfish", {"published", "ours, hash=mix"}, {"ns/token"}),
    ("loader", {"ours, Goldfish", "nanoGPT", "train step"}, {"ms/M tokens", "of a step"}),
    ("tokenize", {"hf", "hf batch"}, {"MB/s"}),
    ("prepare", set(), {"MB/s"}),
    ("decode", {"hf", "int8 eager", "nf4 eager"}, {"tok/s", "of weight-read bound"}),
    ("memory", {"ours full logits"}, {"peak MiB"})])
def test_every_mode_agrees_with_its_peers_and_leaves_a_record(tmp_path, mode, others, rates):
    """A disagreement of losses, masks, ids or parameters is exit code 2, which run() would not let pass."""
    done, record = run(tmp_path, mode, "--tokens=8", *SLOW.get(mode, []))
    rows = record["rows"]
    assert {"ours"} | others <= rows.keys()
    assert rates <= rows["ours"].keys()
    assert {"command", "cpu", "torch", "transformers", "commit", "load", "threads", "clock"} <= record.keys()
    assert all(len(row["seconds"]) == record["rounds"] for row in rows.values() if "seconds" in row)
    assert os.path.exists(tmp_path / f"{mode}-tiny-float32.png") and "| ours" in done.stdout
    assert "no compiler found for cpu" in done.stdout
    if mode == "tokenize":
        assert record["facts"]["tokens"] > record["facts"]["bytes"] / 20        # all of the text, not none of it


def test_structured_forms_are_timed_against_dense_at_the_published_shares_of_its_parameters(tmp_path):
    done, record = run(tmp_path, "ffn")
    forms = {"dense"}
    for kind in ("lowrank", "blockdense", "blockshuffle"):
        forms |= {f"{kind} 62%", f"{kind} 31%"}
    assert record["rows"].keys() == {f"{what} 48, {form}" for what in ("training", "decoding") for form in forms}
    assert record["rows"]["training 48, dense"]["ratio"] == [1, 1, 1] and "against dense" in done.stdout
    assert "dense decoding at 48" in bench.summary([record])


def test_a_cold_start_is_a_run_of_train_py_up_to_its_first_step(tmp_path):
    text, data = tmp_path / "text.txt", tmp_path / "data"
    text.write_text("".join(f"number {i}\n" for i in range(3000)))
    assert script("prepare.py", text, f"--out={data}", "--tokenizer=byte", "--val_share=0.2").returncode == 0
    _, record = run(tmp_path, "cold", "--rounds=1", "--impls=ours", f"--data={data}")
    assert record["clock"] == "wall"
    assert record["rows"]["ours"]["s to the first step"] > 0.1     # importing torch takes longer


def test_the_whole_model_is_the_third_step_of_a_run_of_train_py(tmp_path):
    """Its speed is that which the run has logged, and nothing of it is left."""
    _, record = run(tmp_path, "whole")
    assert record["preset"] == "tiny" and record["facts"]["windows"] == 16
    assert len(record["facts"]["losses"]) == 3
    # Random ids of 131,072 words, of which the model knows nothing.
    assert record["facts"]["losses"][0] == pytest.approx(math.log(131072), rel=0.01)
    assert record["rows"]["ours"]["tok/s"] > 0


def test_probes_are_rates_of_the_machine_and_no_line_of_the_readme(tmp_path):
    done, record = run(tmp_path, "probes")
    work = 4 * 2 * 256**3 / 1e12, 2 * 2**22 / 1e9, 2**22 / 1e9
    for row, amount, unit in zip(record["rows"].values(), work, ("TFLOP/s", "GB/s", "GB/s")):
        assert row[unit] == pytest.approx(amount / row["median"])
    assert "and .png" not in done.stdout and "probes" not in bench.summary([record])


@pytest.mark.parametrize("tied", [False, True])
def test_weights_drawn_on_a_device_have_the_size_that_is_asked_for(tiny, monkeypatch, tied):
    """On "cpu:0", which takes the way of a GPU. Gains are 1 and xIELU's alphas begin at .8, as the report has them."""
    monkeypatch.setattr(bench, "device", "cpu:0")
    config, _, _ = bench.shape(tie_embeddings=tied)
    model = bench.new_model(config)
    for name, p in model.named_parameters():
        if p.ndim > 1:
            assert p.detach().std().item() == pytest.approx(0.02, rel=0.05), name
    first = model.model.layers[0]
    assert (first.attention_layernorm.weight == 1).all()
    assert torch.nn.functional.softplus(first.mlp.act_fn.alpha_p).item() == pytest.approx(0.8)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_windows_of_a_step_are_those_that_are_asked_for(tiny, monkeypatch):
    assert bench.shape()[1] == bench.PRESETS["tiny"]["batch"] == 2
    monkeypatch.setattr(bench, "micro_batch", 3)
    assert bench.shape()[1] == 3 and bench.make_batches()[0].idx.shape == (3, 64)


def test_a_run_that_ends_before_its_first_step_is_told_with_its_own_last_line(tmp_path):
    done = script("tools.bench", "cold", "--preset=tiny", "--device=cpu", "--rounds=1", "--impls=ours",
                  f"--data={tmp_path / 'nowhere'}", f"--out={tmp_path}")
    assert done.returncode == 2
    assert "ended before its first step" in done.stderr and "no data in" in done.stderr


def test_a_step_of_adapters_counts_four_flops_a_frozen_weight_and_moves_no_other(tmp_path, tiny, monkeypatch):
    """By hand: rank 16 beside six matrices of 64 x 64, 32 x 64 and 160 x 64, two layers, a head of 320 x 64."""
    made = []
    step = bench.train_step
    monkeypatch.setattr(bench, "train_step", lambda model, *rest: made.append(model) or step(model, *rest))
    _, facts = bench.finetune()
    frozen = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 2 * 160 * 64) + 320 * 64
    trained = 2 * 16 * (2 * (64 + 64) + 2 * (32 + 64) + 2 * (160 + 64))
    attention = 6 * 2 * 64 * 64
    assert facts["FLOPs of LoRA 16"] == (4 * frozen + 6 * trained + attention) / (6 * frozen + attention)
    whole, adapted = made
    start = bench.new_model(bench.shape()[0]).state_dict()
    after = adapted.state_dict()
    assert all(torch.equal(start[name], after[name]) for name in start)
    assert not any(torch.equal(p, start[name]) for name, p in whole.named_parameters() if p.ndim > 1)


def test_bf16_agrees_too(tmp_path):
    _, record = run(tmp_path, "train", "--dtype=bfloat16", "--impls=hf")
    assert record["rows"].keys() == {"ours", "hf", "GEMM probe"}


def test_who_computes_something_else_does_not_race(tiny, monkeypatch):
    right = bench.contestant

    def wrong(name, ours):
        model, loss = right(name, ours)
        return model, lambda batch: loss(batch) * (1.001 if name == "hf" else 1)
    monkeypatch.setattr(bench, "contestant", wrong)
    with pytest.raises(ValueError, match="loss of the first batch: hf has .* they do not compute the same"):
        bench.train()


def test_a_nan_agrees_with_nothing():
    bench.agree("loss", dict(ours=2.0, hf=2.0001), 1e-3)
    with pytest.raises(ValueError, match="hf has nan"):
        bench.agree("loss", dict(ours=2.0, hf=math.nan), 1e-3)


@pytest.mark.parametrize("room, asked, kept", [
    (70, "", "ours a b"), (69, "", "ours a"), (59, "", "ours b"), (44, "", "ours"), (45, "b", "ours b"),
    (59, "a", None), (29, "", None)])
def test_who_fits_is_chosen_in_order_and_who_does_not_is_said(monkeypatch, capsys, room, asked, kept):
    """What they hold, and the largest turn: 20 + 10 alone, 30 + 15 with b, 35 + 25 with a, 45 + 25 with both."""
    takes = dict(ours=(20, 10), a=(15, 25), b=(10, 15))
    monkeypatch.setattr(bench, "memory_of", lambda device: (room + 0.1) / bench.SHARE)
    monkeypatch.setattr(bench, "impls", asked)
    names = [name for name in takes if not asked or name in ("ours", asked)]
    if kept is None:
        with pytest.raises(ValueError, match="would take about .* GB, and .* has"):
            bench.fitting(names, takes)
        return
    assert bench.fitting(names, takes) == kept.split()
    said = capsys.readouterr().out
    left = [name for name in names if name not in kept.split()]
    assert bool(said) == bool(left) and all(name in said for name in left)


def test_a_race_that_does_not_fit_is_run_by_those_that_do(tiny, monkeypatch, capsys):
    config, batch, _ = bench.shape()
    held, step = bench.bytes_of("ours", config, batch)
    monkeypatch.setattr(bench, "memory_of", lambda device: (2 * held + step) / bench.SHARE)
    rows, _ = bench.train()
    # The other one without full logits.
    assert rows.keys() == {"ours", "ours plain", "GEMM probe"}
    assert "left out" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["train", "finetune", "optim", "loader"])
def test_a_preset_that_a_device_cannot_hold_is_refused_in_one_line_before_it_is_built(tiny, monkeypatch, mode):
    monkeypatch.setattr(bench, "preset", "8b-stack")
    monkeypatch.setattr(bench, "memory_of", lambda device: 24e9)
    monkeypatch.setattr(bench, "new_model", None)
    with pytest.raises(ValueError, match="^preset=8b-stack: ours would take .* GB, and cpu has 24.0: .* --preset$"):
        bench.MODES[mode]()


def test_the_layers_of_the_8b_and_hugging_faces_of_them_fit_an_h200_together(tiny, monkeypatch):
    """16 bytes a parameter each, by hand: 8 layers of Table 1, embedding and head. The report's 8B has 8.05e9."""
    monkeypatch.setattr(bench, "preset", "8b-stack")
    monkeypatch.setattr(bench, "dtype", "bfloat16")
    monkeypatch.setattr(bench, "memory_of", lambda device: 150.7e9)
    config, batch, _ = bench.shape()
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 4096 * 21504 + 2 * 4096 + 2 * 128 + 2
    names = ["ours", "hf compile", "hf"]
    takes = {name: bench.bytes_of(name, config, batch) for name in names}
    assert takes["ours"][0] == takes["hf"][0] == 16 * (8 * layer + 2 * 131072 * 4096 + 4096)
    # Three fp32 copies of the logits.
    assert takes["hf compile"][1] - takes["ours"][1] == 3 * 4 * batch * 4096 * 131072
    assert bench.fitting(names, takes) == ["ours", "hf compile"] and batch > 1


@pytest.mark.parametrize("there", [True, False])
def test_auto_is_the_gpu_where_there_is_one(tiny, monkeypatch, there):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    for asked, found in (("auto", "cuda" if there else "cpu"), ("cpu", "cpu")):
        monkeypatch.setattr(bench, "device", asked)
        monkeypatch.setattr(bench, "preset", "auto")
        bench.resolve_settings()
        assert bench.device == found
        assert bench.preset == ("1b5" if found == "cuda" else "cpu")


def test_a_timed_step_begins_without_the_gradients_of_the_last(tiny):
    config, _, _ = bench.shape()
    model, loss = bench.contestant("ours", bench.new_model(config))
    bench.train_step(model, loss, bench.make_batches())(0)
    assert all(p.grad is None for p in model.parameters())


def test_documents_of_the_synthetic_shard_stand_between_their_borders(tmp_path):
    """Each </s>, 2, is followed by <s>, 1, and a document has 800 tokens in the mean (here within 10 %)."""
    stream = np.load(bench.synthetic_shard(str(tmp_path), 1_000_000, 5000))
    ends = np.flatnonzero(stream == 2)
    followed = stream[ends + 1] == 1
    # Two ends in a row leave one without its beginning.
    assert followed.mean() > 0.99
    assert len(stream) / len(ends) == pytest.approx(800, rel=0.1)


def test_every_page_has_the_rules_of_its_host(tmp_path):
    bench.write_pages(str(tmp_path), 2_000_000)
    rows = {name: [json.loads(line) for line in open(tmp_path / f"{name}.jsonl", encoding="utf-8")]
            for name in ("pages", "robots")}
    hosts = {row["url"].split("/")[2] for row in rows["pages"]}
    assert hosts == {row["domain"] for row in rows["robots"]}


def test_ours_decodes_compiled_and_ours_eager_does_not(tiny, monkeypatch):
    """generate() runs without a compiler here; what it was asked for is written down."""
    asked = []

    def spied(*args, compile=False, **how):
        asked.append(compile)
        return generate(*args, **how)
    monkeypatch.setattr(bench, "generate", spied)
    monkeypatch.setattr(bench, "compiles", lambda: True)
    monkeypatch.setattr(bench, "tokens", 4)
    monkeypatch.setattr(bench, "impls", "ours eager")
    bench.decode()
    assert sorted(set(asked)) == [False, True]


@pytest.mark.parametrize("sign", [1, -1])
def test_hugging_face_decodes_as_many_tokens_as_we_do(tiny, sign):
    """Also where the likeliest token is </s>, 2, which it is here for one of both signs of the state."""
    config, _, _ = bench.shape()
    ours = bench.new_model(config)
    with torch.no_grad():
        ours.lm_head.weight.zero_()
        ours.lm_head.weight[2, 0] = sign
    theirs = peers.hugging_face(ours)
    found = theirs.generate(torch.full((1, 4), 5), max_new_tokens=8, do_sample=False)
    assert found.shape == (1, 12)


def test_seconds_of_decoding_are_those_of_one_copy(tiny, monkeypatch):
    """By a clock that ticks once a reading, the pass over n copies takes one tick."""
    monkeypatch.setattr(bench, "now", itertools.count(100).__next__)
    rows, _ = bench.ffn()
    for name, row in rows.items():
        if name.startswith("decoding"):
            assert set(row["seconds"]) == {1 / 100}


def test_a_cold_start_has_the_layers_of_its_name(tiny, monkeypatch):
    started = []

    def started_with(*args):
        started.append(args)
        return 1.0
    monkeypatch.setattr(bench, "compiles", lambda: True)
    monkeypatch.setattr(bench, "first_step", started_with)
    monkeypatch.setattr(bench, "clock", "auto")
    rows, facts = bench.cold()
    named = {int(name.split(", ")[1].split()[0]) if ", " in name else facts["layers"] for name in rows}
    assert named == {int(args[2].removeprefix("--n_layer=")) for args in started}


def test_a_cold_start_takes_the_threads_it_was_told(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint('threads', os.environ['OMP_NUM_THREADS'], file=sys.stderr)\nsys.exit(1)\n")
    monkeypatch.chdir(tmp_path)
    for asked, found in ((3, "3"), (0, str(os.cpu_count()))):
        monkeypatch.setattr(bench, "threads", asked)
        with pytest.raises(ValueError, match=f"threads {found}"):
            bench.first_step()


def small_nanogpt(C=24, L=2, V=50, T=16):
    torch.manual_seed(0)
    config = ApertusConfig(block_size=T, vocab_size=V, n_layer=L, n_head=3, n_kv_head=3, n_embd=C, ffn_dim=96)
    return peers.NanoGPT(config)


def test_nanogpt_has_gpt2s_parameters():
    """12 C^2 a block and two gains, one for the last norm; embeddings of tokens (the head as well) and positions."""
    C, L, V, T = 24, 2, 50, 16
    blocks, embeddings = L * (12 * C**2 + 2 * C), V * C + T * C
    assert sum(p.numel() for p in small_nanogpt(C, L, V, T).parameters()) == blocks + C + embeddings


def test_nanogpt_is_causal():
    """The loss at the fourth position alone (it ignores -100): what follows has no part in it, what precedes has."""
    model = small_nanogpt()
    idx = torch.arange(10)[None]
    only_the_fourth = torch.full((1, 10), -100)
    only_the_fourth[0, 3] = 7
    future, past = idx.clone(), idx.clone()
    future[0, 4:], past[0, 0] = 0, 49
    loss = model(idx, only_the_fourth)
    assert torch.equal(model(future, only_the_fourth), loss)
    assert not torch.equal(model(past, only_the_fourth), loss)


def test_attended_positions_are_those_that_the_mask_lets_through(tiny):
    """A token counts half of itself, so that in a plain window it sees T / 2 positions in the mean."""
    config, batch, documents = bench.shape()
    for n in range(3):
        _, _, _, doc, mask = bench.make_batch(n, config, batch, documents)
        pairs = mask.sum().item() - mask.shape[0] * mask.shape[-1] / 2
        assert bench.attended(doc, config.block_size) == pytest.approx(pairs / doc.numel(), rel=1e-12)
    assert bench.attended(None, 64) == 32


def test_batches_differ_and_repeat_themselves(tiny):
    config, batch, documents = bench.shape()
    made = lambda n: bench.make_batch(n, config, batch, documents)
    same = lambda a, b: all(map(torch.equal, made(a), made(b)))
    assert same(1, 1) and not same(1, 2)


def test_mfu_is_measured_by_the_flops_of_palm():
    """6 N + 12 L H D T / 2 (causal), N without the embedding: the 8B at 4096 has 48.3 GFLOPs per token."""
    with torch.device("meta"):
        apertus_8b = Apertus(ApertusConfig())
    flops = apertus_8b.flops_per_token(2 * bench.attended(None, 4096))
    assert flops == pytest.approx(48.3e9, rel=2e-3)


def test_ratios_are_medians_within_rounds(tiny):
    """The machine slows down fourfold; b always takes 1.5 times as long as ours, c as long but for a hitch."""
    drift = np.array([1.0, 2.0, 3.0, 4.0])
    seconds = dict(ours=drift, b=1.5 * drift, c=drift * [3, 1, 1, 1])
    rows = bench.judge({name: dict(seconds=list(taken)) for name, taken in seconds.items()})
    assert rows["b"]["ratio"] == pytest.approx([1.5, 1.5, 1.5])
    assert rows["ours"]["ratio"] == [1, 1, 1] and rows["c"]["ratio"][0] == 1
    assert rows["b"]["median"] == pytest.approx(3.75)
    assert rows["b"]["spread"] == pytest.approx(1.5 / 2.5)


def test_everyone_runs_once_a_round_and_the_order_turns(tiny, monkeypatch):
    monkeypatch.setattr(bench, "warmup", 1)
    calls = []
    result = bench.race({name: lambda n, name=name: calls.append((n, name)) for name in "abc"})
    assert all(sorted(name for m, name in calls if m == n) == list("abc") for n in range(5))
    assert all(len(r["seconds"]) == 4 for r in result.values())
    assert {calls[3 * n][1] for n in range(5)} == set("abc")


def test_the_table_of_a_readme_comes_from_the_records(tmp_path):
    _, record = run(tmp_path, "goldfish")
    path, page = tmp_path / "goldfish-tiny-float32.json", tmp_path / "README.md"
    page.write_text("before\n<!-- bench -->\nold\n<!-- bench -->\nafter\n")
    assert script("tools.bench", path, f"--readme={page}").returncode == 0
    before, made, after = page.read_text().split("<!-- bench -->\n")
    assert (before, after) == ("before\n", "after\n") and "old\n" not in made
    assert record["command"] in made
    assert f"published {record['rows']['published']['ratio'][0]:.2f}x" in made
    page.write_text("no marks")
    done = script("tools.bench", path, f"--readme={page}")
    assert done.returncode == 2 and "want two" in done.stderr


@pytest.mark.parametrize("args, says", [
    ([], "want one of train, finetune"), (["trian"], "want one of train, finetune"),
    (["train", "--preset=9b"], "there is auto, cpu, packed"),
    (["train", "--impls=vllm"], "impls='vllm'"),
    (["train", "--clock=sun"], "clock='sun'"), (["train", "--dtype=int8"], "there is auto, float32"),
    (["optim", "--threads=2"], "--threads=1 or --clock=wall"),
    (["optim", "--rounds=0"], "at least 1"), (["train", "--micro_batch=-1"], "micro_batch=-1")])
def test_what_cannot_be_measured_is_told_in_one_line(args, says):
    done = script("tools.bench", *args, "--device=cpu")
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr


def test_a_file_that_is_no_result_is_refused(tmp_path):
    (tmp_path / "x.json").write_text('{"rows": {}}')
    done = script("tools.bench", tmp_path / "x.json")
    assert done.returncode == 2 and "is not a result of tools/bench.py" in done.stderr


@pytest.mark.parametrize("name, flops", [
    ("NVIDIA GH200 480GB", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12),
    ("NVIDIA GeForce RTX 4090", 165e12), ("Tesla T4", None)])
def test_a_gpu_is_known_by_the_name_that_torch_gives_it(monkeypatch, name, flops):
    """The vendors' data sheets: bf16, dense. What is not in the table, and a CPU, have no peak to compare with."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    assert bench.vendor_flops("cuda") == bench.vendor_flops("cuda:1") == flops
    assert bench.vendor_flops("cpu") is None
