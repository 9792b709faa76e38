"""
A GPU computes the same as a CPU: `make gpu`. Skipped without a GPU.

The authority is the CPU in fp64, which other tests compare with outside authorities. Bounds are shares of the norm:

    bit-exact       a resumed run against the undisturbed one
    fp32            1e-5 (a CPU in fp32: 1.5e-6). Products are in fp32, not TF32, but sums have another order
    bf16, fp8       three times the CPU's error in the same format, and at most 0.1 (bf16) or 0.5 (fp8)

Flash attention adds the gradients of windows without documents in no fixed order, so no test expects them bit-exact.
APERTUS_TEST_DEVICE=cpu runs the same tests on a CPU, to test this file.
"""

import os
import re
import shutil

import pytest
import torch
from conftest import same, script, weights
from torch._dynamo.utils import counters
from trained import data  # noqa: F401

from ademamix import AdEMAMix
from engine.fp8 import multiply_in_fp8
from engine.parallel import compile_model
from goldfish import goldfish_mask
from model import XIELU, Apertus, ApertusConfig

DEVICE = os.environ.get("APERTUS_TEST_DEVICE", "cuda")
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU")

# Heads of 64 and 5.25 C, as in the 8B; four query heads share a key-value head.
SHAPE = dict(vocab_size=1024, n_layer=2, n_head=4, n_kv_head=1, n_embd=256, ffn_dim=1344)


def apertus(device, dtype=None, compiled=False, recompute="none", fp8=False, init_std=0.05):
    model = Apertus(ApertusConfig(**SHAPE, init_std=init_std)).to(device)
    model.dtype = dtype
    if fp8:
        multiply_in_fp8(model, 16, device)
    compile_model(model, recompute, compiled)
    return model


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet():
    """Past eight variants of a block torch would stop compiling it, which is an error in compile_model()'s blocks."""
    torch._dynamo.reset()
    counters.clear()


def packed(T, documents=True):
    """idx, targets, keep, doc (2, T) as in train.py: documents of about 100 tokens, and Goldfish."""
    torch.manual_seed(0)
    stream = torch.randint(4, 1024, (2, T + 1))
    doc = (torch.rand(2, T) < 0.01).cumsum(1)
    return stream[:, :-1], stream[:, 1:], goldfish_mask(stream[:, 1:], 4, 13), doc if documents else None


def results(batch, model):
    """{name: fp64 vector} of loss, logits and gradients; those of all layers are joined."""
    device = model.lm_head.weight.device
    idx, targets, keep, doc = (None if t is None else t.to(device) for t in batch)
    loss = model.loss(idx, targets, keep, doc)
    loss.backward()
    found = dict(loss=[loss], logits=[model(idx[:, :64])])
    graphs = counters["stats"]["unique_graphs"]
    model.loss(idx, targets, keep, doc if doc is None else doc.flip(0))
    assert counters["stats"]["unique_graphs"] == graphs  # other documents compile nothing
    for name, p in model.named_parameters():
        found.setdefault(re.sub(r"\.\d+\.", ".", name), []).append(p.grad)
    return {name: torch.cat([t.detach().double().cpu().flatten() for t in parts]) for name, parts in found.items()}


def distances(batch, model):
    """{name: relative error against a CPU in fp64}; a tenth of it for xIELU's slopes, whose sums cancel."""
    found, true = results(batch, model), results(batch, apertus("cpu").double())
    return {
        name: ((found[name] - x).norm() / x.norm()).item() / (10 if "act_fn" in name else 1) for name, x in true.items()
    }


@pytest.mark.parametrize(
    "T, documents, compiled, recompute",
    [
        (256, False, False, "none"),
        (256, True, False, "none"),
        (256, False, True, "none"),
        (256, True, True, "selective"),
        (1000, True, True, "full"),
        (4096, True, True, "none"),
    ],
)
def test_loss_logits_and_gradients_in_fp32(monkeypatch, T, documents, compiled, recompute):
    """
    Also for windows that are no multiple of 128, flex_attention's block. EPS removes the jump of xIELU's slope within
    1e-6 left of 0, where one in a million inputs falls.
    """
    monkeypatch.setattr(XIELU, "EPS", -1e-30)
    off = distances(packed(T, documents), apertus(DEVICE, torch.float32, compiled, recompute))
    assert off == pytest.approx(dict.fromkeys(off, 0), abs=1e-5)


@pytest.mark.parametrize("fp8, most", [(False, 0.1), (True, 0.5)])
@pytest.mark.parametrize("documents", [True, False])
def test_loss_logits_and_gradients_in_bf16_and_fp8(documents, fp8, most):
    if fp8 and DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no products in fp8")
    batch = packed(256, documents)
    found = distances(batch, apertus(DEVICE, torch.bfloat16, compiled=True, fp8=fp8))
    on_cpu = distances(batch, apertus("cpu", torch.bfloat16, fp8=fp8))
    for name, off in found.items():
        assert off <= min(most, 3 * on_cpu[name] + 2**-8), name


@pytest.mark.parametrize("states, off", [(torch.float32, 1e-4), (torch.bfloat16, 1e-3)])
def test_the_optimizer_moves_weights_as_on_a_cpu(states, off):
    """To 1e-4 of the distance moved. With bf16 averages, rounded by a hash, one in 1,000 may round differently."""
    torch.manual_seed(0)
    start, *gradients = torch.randn(6, 256, 1343)
    moved = []
    for device in ("cpu", DEVICE):
        p = torch.nn.Parameter(start.to(device, copy=True))
        opt = AdEMAMix([p], lr=1e-2, alpha_warmup=4, beta3_warmup=4, state_dtype=states, compile=device == DEVICE)
        for gradient in gradients:
            p.grad = gradient.to(device)
            opt.step(grad_scale=0.5)
        moved.append(p.detach().cpu() - start)
    assert (moved[1] - moved[0]).norm() <= off * moved[0].norm()


def test_a_resumed_run_ends_in_the_same_bits(data, tmp_path):
    """A whole run, and the same after its last checkpoint was deleted, as after a kill."""
    flags = f"configs/tiny.py --data={data} --device={DEVICE} --dtype=bfloat16 --compile=True".split()
    assert script("train.py", *flags, f"--out={tmp_path}/whole").returncode == 0
    halves = shutil.copytree(tmp_path / "whole", tmp_path / "halves")
    shutil.rmtree(max((halves / "ckpt").iterdir()))
    assert script("train.py", *flags, f"--out={halves}", "--resume").returncode == 0
    assert same(weights(tmp_path / "whole"), weights(halves))
