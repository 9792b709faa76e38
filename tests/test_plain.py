"""plain.py against transformers and the published masks; train.py's steps against plain.py's; then as users run it."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT, refused, script
from oracle import Plain
from tiny import GOLDEN, ids
from torch.testing import assert_close
from trained import data, log  # noqa: F401

import convert
import plain
from data import TokenDataset
from goldfish import goldfish_mask
from model import Apertus

# -----------------------------------------------------------------------------
# the model


def published(**changes):
    """transformers' model of tests/golden/hf_tiny_a in fp64, and its weights. changes: of its RoPE's settings."""
    config = transformers.AutoConfig.from_pretrained(f"{GOLDEN}/hf_tiny_a")
    config.rope_parameters |= changes
    model = transformers.ApertusForCausalLM.from_pretrained(f"{GOLDEN}/hf_tiny_a", config=config, dtype=torch.float64)
    return model.eval(), dict(model.named_parameters())


SHAPE = 3, 4, 2


@pytest.mark.parametrize("theta, scaling, kind", [(12e6, 8.0, "llama3"), (5e5, 4.0, "llama3"), (1e4, 0.0, "default")])
def test_logits_loss_and_gradients_are_transformers(theta, scaling, kind):
    """To 1e-6, since transformers computes RoPE in fp32. The weights have the names of the checkpoint."""
    theirs, w = published(rope_theta=theta, factor=scaling, rope_type=kind)
    idx = ids(2, 40, high=512)
    no_borders = torch.zeros_like(idx)
    wanted = theirs(idx, labels=idx)
    assert_close(plain.logits(w, idx, no_borders, SHAPE, theta, scaling), wanted.logits, rtol=1e-6, atol=1e-6)
    batch = [x[:, :-1] for x in (idx, idx.roll(-1, 1), no_borders == 0, no_borders)]
    loss = plain.mean_loss(w, batch, SHAPE, theta=theta, scaling=scaling)
    assert loss.item() == pytest.approx(wanted.loss.item(), rel=1e-6)
    for ours, their in zip(*(torch.autograd.grad(x, list(w.values())) for x in (loss, wanted.loss))):
        assert_close(ours, their, rtol=1e-4, atol=1e-7)


def test_a_document_has_the_logits_that_it_has_alone():
    """In the middle of a window: RoPE depends on distances only."""
    w = plain.initial_weights(97, 48, 80, SHAPE, std=0.3)
    idx = ids(1, 30)
    doc = (torch.arange(30)[None] >= 12).long() + (torch.arange(30)[None] >= 25)
    packed = plain.logits(w, idx, doc, SHAPE)
    alone = plain.logits(w, idx[:, 12:25], torch.zeros(1, 13), SHAPE)
    assert_close(packed[:, 12:25], alone, rtol=1e-9, atol=1e-12)


# -----------------------------------------------------------------------------
# Goldfish


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("k, h", [(2, 5), (3, 1), (4, 70), (7.5, 13), (50, 50), (50, 2)])
def test_masks_are_goldfish_py_which_has_the_published_bits(k, h, dtype):
    """At k <= 4 a product of 0 is dropped, so a label without h - 1 labels before it needs its exception."""
    for high in (131_072, 256):
        labels = ids(3, 2_000, high=high).to(dtype)
        for part in (labels, labels[0], labels[:, :h], labels[:, : max(1, h - 1)]):
            assert plain.goldfish(part, k, h).equal(goldfish_mask(part, k, h))
        assert not plain.goldfish(labels, k, h).all()


# -----------------------------------------------------------------------------
# steps of train.py

TINY = """configs/tiny.py --goldfish_scope=window --goldfish_k=3 --goldfish_h=5 --checkpoint_every=0 --eval_every=0
    --last_eval_windows=1""".split()


def test_each_step_of_train_py_is_plain_pys(data, tmp_path):
    """
    20 steps in fp32, from the same weights on the same windows: losses to 1e-4, learning rates exactly, and final
    weights to 1e-3 of the distance that they moved. Masks are made here, from the tokens. Ranks: test_step.py.
    """
    out = tmp_path / "run"
    done = script("train.py", *TINY, f"--data={data}", f"--out={out}")
    assert done.returncode == 0, done.stderr
    trained = convert.load_any(str(out))[0]
    oracle = Plain(model=Apertus(trained.config, 28))
    w, state = {name: p.detach() for name, p in oracle.w.items()}, {}
    windows = TokenDataset(data, "train", 64)
    entries = log(out, "loss")
    assert [entry["step"] for entry in entries] == list(range(20))
    for t, entry in enumerate(entries, 1):
        idx, targets, *_ = windows.batch(8 * (t - 1), 8)
        keep = plain.goldfish(targets, 3, 5) & (idx != windows.meta["eos"])
        batch = idx, targets, keep, (idx == windows.meta["bos"]).cumsum(1)
        lr = plain.wsd(8 * (t - 1), 3e-3, 3e-4, warmup=16, total=160, decay=48)
        settings = dict(betas=(0.9, 0.999, 0.99), alpha=2.0, warmup=20)
        loss, norm = plain.step(w, state, batch, t, lr, oracle.shape, max_norm=0.1, **settings)
        assert entry["lr"] == lr
        assert (entry["loss"], entry["grad_norm"]) == pytest.approx((loss, norm), rel=1e-4)
        assert entry["kept"] == pytest.approx(keep.double().mean().item())
    assert loss < 4.5
    assert oracle.distance(trained) < 1e-3


# -----------------------------------------------------------------------------
# as users run it


def test_sampling_ends_with_the_document():
    """Of three equally likely tokens, one ends it."""
    w = plain.initial_weights(3, 8, 8, (1, 2, 1))
    texts = [plain.sample(w, (1, 2, 1), torch.tensor([0, 2, 1]), 200, T=8, seed=seed).tolist() for seed in range(5)]
    for text in texts:
        assert text[:3] == [0, 2, 1] and 3 < len(text) < 203
        assert text[-1] == 0 and 0 not in text[1:-1]
    assert len({len(text) for text in texts}) > 1


def test_a_reader_may_take_another_activation(monkeypatch):
    """One that does not use the curvatures: they stay, and all other weights move."""
    monkeypatch.setattr(plain, "xielu", lambda x, a_p, a_n: x.relu().square())
    w = plain.initial_weights(97, 48, 80, SHAPE, std=0.3)
    before = {name: p.clone() for name, p in w.items()}
    idx = ids(2, 31)
    batch = idx[:, :-1], idx[:, 1:], torch.ones(2, 30, dtype=torch.bool), torch.zeros(2, 30)
    plain.step(w, {}, batch, 1, 1e-2, SHAPE)
    assert {name for name in w if w[name].equal(before[name])} == {name for name in w if ".alpha_" in name}


def test_line_ends_of_windows_end_paragraphs_too(tmp_path):
    text = "A paragraph.\nIts second line.\n\nAnother.\n\n" * 40
    (tmp_path / "unix.txt").write_bytes(text.encode())
    (tmp_path / "windows.txt").write_bytes(text.replace("\n", "\r\n").encode())
    unix, windows = (plain.read_bytes(tmp_path / name) for name in ("unix.txt", "windows.txt"))
    assert windows.equal(unix) and (windows == 0).sum() == 81


def test_without_a_dropped_byte_nothing_is_recited(capsys):
    page = ids(1, 300, high=256)[0]
    plain.show_goldfish({}, {}, page, torch.ones_like(page, dtype=torch.bool), SHAPE, 64)
    assert capsys.readouterr().out == "Goldfish drops no byte far enough from both ends of the page.\n"


def test_the_demonstration_learns_and_compares_itself_with_train_py(tmp_path):
    """On a part of README.md, in 24 steps. It changes no setting of torch and draws no global random number."""
    before = torch.get_rng_state()
    (tmp_path / "page").write_bytes(Path(ROOT, "README.md").read_bytes()[:1300])
    done = script("plain.py", tmp_path / "page", 24)
    assert done.returncode == 0, done.stderr
    assert torch.get_rng_state().equal(before) and torch.get_default_dtype() == torch.float32
    steps = re.findall(r"^step +(\d+)   loss (\S+),", done.stdout, re.M)
    assert [int(step) for step, _ in steps] == [0, 3, 12, 23] * 2
    for first, last in ((0, 3), (4, 7)):
        assert 5 < float(steps[first][1]) < 6.5 and float(steps[last][1]) < 4
    assert "ln 256 = 5.55" in done.stdout
    *_, last = done.stdout.splitlines()
    errors = re.fullmatch(r"train.py's step .* agrees to (\S+) \(loss\) and (\S+) \(weights\)\.", last).groups()
    assert max(map(float, errors)) < 2e-6


@pytest.mark.slow
def test_goldfish_breaks_what_the_other_model_recites():
    """Its page is README.md: without Goldfish most dropped bytes are recited, with it at most half of those."""
    done = script("plain.py", f"{ROOT}/README.md")
    [numbers] = re.findall(
        r"(\d+) dropped bytes have enough text around them.* recites past (\d+) of these, the other past (\d+)\.",
        done.stdout,
    )
    holes, with_goldfish, without = map(int, numbers)
    assert without > 0.6 * holes and with_goldfish < without / 2
    page, other, broken = (
        re.search(rf"^    {name} +('.*)\|(.*)$", done.stdout, re.M).groups()
        for name in ("the page", "without Goldfish", "with Goldfish")
    )
    assert other == page and broken[0] == page[0] and broken[1][:8] != page[1][:8]
    # README quotes this output.
    [quoted] = re.findall(r"```text\n(With Goldfish.*?)\n```", open(f"{ROOT}/README.md").read(), re.S)
    assert len(quoted.splitlines()) == 4 and set(quoted.splitlines()) <= set(done.stdout.splitlines())


def test_a_wrong_file_is_one_line(tmp_path):
    small = tmp_path / "small.txt"
    small.write_text("hi")
    refused(script("plain.py", "nowhere.txt"), "No such file", "nowhere.txt", "plain.py [FILE [STEPS]]")
    refused(script("plain.py", small), "small.txt has 2 bytes", "1,000 bytes or more")
    refused(script("plain.py", f"{ROOT}/README.md", "many"), "'many'")
