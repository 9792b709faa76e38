"""plain.py against transformers and the published masks, then as users run it. test_step.py has train.py's steps."""

import re

import pytest
import torch
import transformers
from conftest import ROOT, refused, script
from tiny import GOLDEN, ids
from torch.testing import assert_close

import plain
from goldfish import goldfish_mask

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
# as users run it


def test_sampling_ends_with_the_document():
    """Of three equally likely tokens, one ends it."""
    w = plain.initial_weights(3, 8, 8, (1, 2, 1))
    texts = [plain.sample(w, (1, 2, 1), torch.tensor([0, 2, 1]), 200, T=8, seed=seed).tolist() for seed in range(5)]
    for text in texts:
        assert text[:3] == [0, 2, 1] and 3 < len(text) < 203
        assert text[-1] == 0 and 0 not in text[1:-1]
    assert len({len(text) for text in texts}) > 1


def test_the_demonstration_learns_and_compares_itself_with_train_py():
    """On README.md, in 40 steps instead of 800. It changes no setting of torch and draws no global random number."""
    before = torch.get_rng_state()
    done = script("plain.py", f"{ROOT}/README.md", 40)
    assert done.returncode == 0, done.stderr
    assert torch.get_rng_state().equal(before) and torch.get_default_dtype() == torch.float32
    held_out = [float(loss) for loss in re.findall(r"held-out loss (\S+),", done.stdout)]
    assert len(held_out) == 4 and 5 < held_out[0] < 6.5 and held_out[-1] < 4
    steps = re.findall(r"^step +(\d+)   loss", done.stdout, re.M)
    assert steps == ["0", "20"]
    assert "ln 256 = 5.55" in done.stdout
    *_, last = done.stdout.splitlines()
    errors = re.fullmatch(r"train.py's step .* agrees to (\S+) \(loss\) and (\S+) \(weights\)\.", last).groups()
    assert max(map(float, errors)) < 2e-6


def test_a_wrong_file_is_one_line(tmp_path):
    small = tmp_path / "small.txt"
    small.write_text("hi")
    refused(script("plain.py", "nowhere.txt"), "No such file", "nowhere.txt", "plain.py [FILE [STEPS]]")
    refused(script("plain.py", small), "small.txt has 2 bytes", "1,000 bytes or more")
    refused(script("plain.py", f"{ROOT}/README.md", "many"), "'many'")
