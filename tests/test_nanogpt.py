"""
tools/nanogpt.py: nanoGPT is transformers' GPT-2 and its schedule the published one; both sides read and are judged by
the same windows; who wins is a pure function of the rows.
"""
import json
import math
import os

import numpy as np
import pytest
import torch

from conftest import ROOT, refused, script
from studies import kit
from tools import nanogpt, peers

TEXT = "To be, or not to be, that is the question:\n" * 40


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    """Compiling costs half a minute and changes no claim here."""
    monkeypatch.setenv("CXX", "no-such-compiler")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


# -----------------------------------------------------------------------------
# nanoGPT


def test_nanogpts_loss_and_gradients_are_those_of_transformers_gpt2():
    """GPT-2 with the exact GELU and without biases, whose matrices lie the other way round. fp64."""
    import transformers
    model, _, _ = nanogpt.nanogpt(65, 1e-3, 20, seed=1)
    model.double()
    config = transformers.GPT2Config(
        vocab_size=65, n_positions=64, n_embd=128, n_layer=4, n_head=4, activation_function="gelu",
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    theirs = transformers.GPT2LMHeadModel(config).double()
    names = {"attn_proj": "attn.c_proj", "c_attn": "attn.c_attn", "c_fc": "mlp.c_fc", "c_proj": "mlp.c_proj"}
    weights = {name: torch.zeros_like(p) for name, p in theirs.named_parameters() if name.endswith("bias")}
    for name, p in model.state_dict().items():
        *before, part, kind = name.split(".")
        matrix = before and part in names
        weights[".".join(["transformer", *before, names.get(part, part), kind])] = p.T if matrix else p
    left_out = theirs.load_state_dict(weights, strict=False)
    assert left_out == (["lm_head.weight"], []) and theirs.lm_head.weight is theirs.transformer.wte.weight
    stream = torch.randint(65, (2, 65), generator=torch.Generator().manual_seed(2))
    idx, targets = stream[:, :-1], stream[:, 1:]
    loss = model(idx, targets)
    their_logits = theirs(idx).logits
    assert torch.allclose(model.logits(idx), their_logits, rtol=0, atol=1e-12)
    their_loss = torch.nn.functional.cross_entropy(their_logits.flatten(0, 1), targets.flatten())
    loss.backward()
    their_loss.backward()
    assert loss.item() == pytest.approx(their_loss.item(), abs=1e-12)
    fc, wte = theirs.transformer.h[2].mlp.c_fc.weight, theirs.transformer.wte.weight
    assert torch.allclose(model.h[2].c_fc.weight.grad, fc.grad.T, rtol=0, atol=1e-12)
    assert torch.allclose(model.wte.weight.grad, wte.grad, rtol=0, atol=1e-12)


def test_nanogpt_begins_as_its_init_weights_says():
    """N(0, 0.02), and what is added to the residual stream 1/sqrt(2L) of that; gains 1. Within 3 % of 8,192 numbers."""
    model, _, _ = nanogpt.nanogpt(65, 1e-3, 20, seed=1)
    for name, p in model.named_parameters():
        to_residual = name.endswith(("attn_proj.weight", ".c_proj.weight"))
        std = 0.02 / math.sqrt(8) if to_residual else 0.02
        if p.ndim == 1:
            assert (p == 1).all()
        else:
            assert p.std().item() == pytest.approx(std, rel=0.03) and abs(p.mean().item()) < 0.05 * std, name


@pytest.mark.parametrize("step, rate", [(0, 1e-3 / 101), (99, 1e-3 * 100 / 101), (100, 1e-3), (1050, 5.5e-4),
                                        (2000, 1e-4)])
def test_nanogpts_rate_is_that_of_its_get_lr(step, rate):
    """Warm-up over 100 of 2,000 steps, which begins above zero; half way down the cosine; the end."""
    assert peers.nanogpt_rate(step, 2000, 1e-3, 100) == pytest.approx(rate, rel=1e-12)


def test_nanogpts_first_step_is_adamws_in_closed_form():
    """Adam's first update is the rate times the gradient's sign; matrices lose rate * 0.1 of themselves, gains none."""
    model, _, step = nanogpt.nanogpt(65, 2e-3, 20, seed=1)
    stream = torch.randint(65, (4, 65), generator=torch.Generator().manual_seed(2))
    idx, targets = stream[:, :-1], stream[:, 1:]
    matrix, gain = model.h[0].c_fc.weight, model.ln_f.weight
    before = matrix.detach().clone(), gain.detach().clone()
    grads = torch.autograd.grad(model(idx, targets), [matrix, gain])
    step(0, idx, targets)
    lr = 2e-3 / 2                                          # the first of a warm-up of one step
    for p, old, g, decay in zip((matrix, gain), before, grads, (0.1, 0.0)):
        big = g.abs() > 1e-4                               # against AdamW's eps of 1e-8
        expected = old * (1 - lr * decay) - lr * g.sign()
        assert big.float().mean() > 0.5 and torch.allclose(p[big], expected[big], rtol=0, atol=1e-6)


# -----------------------------------------------------------------------------
# what both sides read, and how they are judged


def test_ids_and_split_are_those_of_nanogpts_prepare(text, tmp_path):
    """Its characters in order, "\\n" before " " before "," ...; the first nine tenths are trained on."""
    nanogpt.write_ids(str(text), str(tmp_path))
    train, val = (np.load(tmp_path / f"{split}.npy") for split in ("train", "val"))
    kinds = sorted(set(TEXT))
    assert kinds[:4] == ["\n", " ", ",", ":"] and train[:3].tolist() == [kinds.index(c) for c in "To "]
    assert len(train) == int(0.9 * len(TEXT))
    assert "".join(kinds[i] for i in [*train, *val]) == TEXT
    about = json.loads((tmp_path / "text.json").read_text())
    assert about["kinds"] == len(kinds) and about["characters"] == len(TEXT)


def test_every_id_of_the_validation_split_is_judged_once():
    """200 ids: three windows of 64, each id but the first a target once, up to the last whole window."""
    idx, targets = nanogpt.windows(np.arange(200, dtype=np.uint16))
    assert targets.flatten().tolist() == list(range(1, 193)) and torch.equal(targets, idx + 1)


def test_the_judge_finds_the_mean_surprise_of_a_known_model():
    """Who says that id k comes with probability 2^-(k+1) is surprised by (k + 1) ln 2 nats; windows of three calls."""
    targets = torch.arange(150 * 64).view(150, 64) % 7

    def logits(idx):
        return (-math.log(2) * torch.arange(1.0, 41.0)).expand(*idx.shape, 40)
    expected = math.log(2) * (targets.double().mean().item() + 1) + math.log(1 - 2.0**-40)
    assert nanogpt.judge(logits, targets, targets) == pytest.approx(expected, rel=1e-6)


def test_both_sides_read_the_same_windows_and_learn(text, tmp_path):
    """Two runs of each: the same seed reads the same on both sides, another seed something else; ln 23 is chance."""
    nanogpt.write_ids(str(text), str(tmp_path))
    rows = {}
    for side, seed in (("nanoGPT", 1), ("ours", 1), ("nanoGPT", 2)):
        done = script("tools.nanogpt", f"--only={side},4e-3,6,{seed}", f"--out={tmp_path}",
                      f"--results={tmp_path}/{side}", "--eval_every=2")
        assert done.returncode == 0, done.stderr
        rows[side, seed] = json.loads((tmp_path / side / "row.json").read_text())
    first = rows["nanoGPT", 1]
    assert first["windows"] == rows["ours", 1]["windows"] != rows["nanoGPT", 2]["windows"]
    chance = math.log(len(set(TEXT)))
    for row in rows.values():
        steps, cpu, wall, losses = zip(*row["curve"])
        assert steps == (2, 4, 6) and row["loss"] == losses[-1] < losses[0] < chance + 0.2
        assert 0 < row["first"] <= cpu[0] < cpu[1] < cpu[2] and list(wall) == sorted(wall)
    assert abs(rows["ours", 1]["parameters"] / first["parameters"] - 1) < 0.06


def test_of_65_characters_ours_has_as_many_parameters():
    """nanoGPT's 0.80M (its README) without positions; with them, as many as ours to a thousandth."""
    model, _, _ = nanogpt.nanogpt(65, 1e-3, 20, seed=1)
    theirs = sum(p.numel() for p in model.parameters())
    mine, _, _ = nanogpt.ours(65, 1e-3, 20, seed=1)
    assert f"{(theirs - model.wpe.weight.numel()) / 1e6:.2f}" == "0.80"
    assert mine.num_params() / theirs == pytest.approx(1, abs=1e-3)


def test_our_rate_follows_wsd():
    """Its warm-up begins at 0, which moves nothing; the second of 40 steps moves, one behind the end a tenth of it."""
    model, _, step = nanogpt.ours(65, 1e-3, 40, seed=1)
    stream = torch.randint(65, (2, 65), generator=torch.Generator().manual_seed(2))
    p, moved = model.model.norm.weight, []
    for n in (0, 1, 40):
        before = p.detach().clone()
        step(n, stream[:, :-1], stream[:, 1:])
        moved.append((p.detach() - before).abs().mean().item())
    assert moved[0] == 0 and moved[1] > 2e-4 and moved[2] < moved[1] / 2


# -----------------------------------------------------------------------------
# the race


def closed_form(side, lr, steps, seed):
    """A row whose loss is known: a parabola in log2 of the rate, and less by 0.1 for each factor of two in steps."""
    best = {"nanoGPT": 1e-3 * 2**4, "ours": 2.5e-4}[side]
    at_1000 = {"nanoGPT": 1.88, "ours": 1.8}[side]
    loss = at_1000 - 0.1 * math.log2(steps / 1000) + 0.01 * math.log2(lr / best) ** 2 + 0.001 * seed
    cpu, wall = steps * 0.05 + (10 if side == "ours" else 0), steps * 0.1
    return dict(side=side, lr=lr, steps=steps, seed=seed, loss=loss, first=0.05, parameters=100, dtype="float32",
                load=1.5,
                curve=[[steps // 2, cpu / 2, wall / 2, loss + 0.3], [steps, cpu, wall, loss]])


def raced():
    rows = {}
    for row in nanogpt.race(closed_form):
        rows[row["side"], row["lr"], row["steps"], row["seed"]] = row
    return list(rows.values())


def test_the_race_widens_its_grid_for_both_and_tries_lengths_until_all_seeds_reach_the_target():
    """
    nanoGPT's best rate lies above the grid, ours below: five rates more for both. nanoGPT's command is 0.16
    above 1.78, so the target is 1.942: ours needs 2^-1.4 of 1,000 steps, within the shortest length; nanoGPT 2^-0.6,
    660, so 800.
    """
    rows = raced()
    grid = [(row["side"], row["lr"]) for row in rows if row["seed"] == 0]
    tried = [1e-3 * 2**n for n in range(-3, 6)]
    assert sorted(grid) == sorted((side, lr) for side in nanogpt.SIDES for lr in tried)
    assert nanogpt.best_rate(rows, "nanoGPT") == 16e-3 and nanogpt.best_rate(rows, "ours") == 2.5e-4
    # What is reported chooses nothing.
    assert nanogpt.best_rate([*rows, dict(closed_form("ours", 1.0, 600, 1), loss=0.0)], "ours") == 2.5e-4
    found, target = nanogpt.finishers(rows)
    assert target == pytest.approx(1.78 + 0.16 + 0.002)
    assert {arm: {row["steps"] for row in group} for arm, group in found.items()} == {
        "README": {2000}, "nanoGPT": {800}, "ours": {600}}
    assert all(sorted(row["seed"] for row in group) == [1, 2, 3] for group in found.values())
    # nanoGPT misses with seed 1 at 600, and is asked no more there.
    at_600 = [row["seed"] for row in rows if row["side"] == "nanoGPT" and row["steps"] == 600 and row["seed"]]
    assert at_600 == [1]
    # With all seeds there, one that misses is enough for the length not to be reached.
    lucky = [dict(closed_form("nanoGPT", 16e-3, 600, seed), loss=1.9) for seed in (2, 3)]
    assert {row["steps"] for row in nanogpt.finishers([*rows, *lucky])[0]["nanoGPT"]} == {800}


def test_known_rows_give_known_numbers_and_a_picture(tmp_path):
    """600 of 2,000 steps are 0.30x of the tokens; 40 CPU seconds of 100 are 0.40x, 60 seconds of 200 are 0.30x."""
    kit.write_rows(f"{tmp_path}/rows.jsonl", raced())
    done = script("tools.nanogpt", "--report", f"--results={tmp_path}")
    assert done.returncode == 0, done.stderr
    line, = [line for line in done.stdout.splitlines() if line.startswith("| ours, tuned | 0.00025 | 600 | 460,800 |")]
    losses = ", ".join(f"{closed_form('ours', 2.5e-4, 600, seed)['loss']:.4f}" for seed in (1, 2, 3))
    assert line.endswith(f"| {losses} | 40.0 | 60.0 | 0.1 | 0.30x | 0.40x | 0.30x |")
    assert "1,536,000" in done.stdout and "The target is 1.9420" in done.stdout
    assert (tmp_path / "table.md").read_text() == nanogpt.table_md(kit.read_rows(f"{tmp_path}/rows.jsonl"))
    assert (tmp_path / "nanogpt.png").stat().st_size > 10_000


def test_without_the_text_one_line_says_where_it_is(tmp_path):
    gone = script("tools.nanogpt", f"--text={tmp_path}/none.txt", f"--out={tmp_path}/out")
    refused(gone, "no text", "https://", "--text=input.txt")
    short = tmp_path / "short.txt"
    short.write_text("To be", encoding="utf-8")
    refused(script("tools.nanogpt", f"--text={short}", f"--out={tmp_path}/out"), "5 characters")
    assert not (tmp_path / "out").exists()
    refused(script("tools.nanogpt", "--report", f"--results={tmp_path}"), "run tools.nanogpt first")


def test_in_the_committed_rows_both_sides_of_a_seed_read_the_same():
    rows = kit.read_rows(os.path.join(ROOT, "results", "nanogpt", "rows.jsonl"))
    read = {}
    for row in rows:
        read.setdefault((row["seed"], row["steps"]), {}).setdefault(row["windows"], set()).add(row["side"])
    assert all(len(hashes) == 1 for hashes in read.values())
    assert any(sides == {"nanoGPT", "ours"} for hashes in read.values() for sides in hashes.values())
