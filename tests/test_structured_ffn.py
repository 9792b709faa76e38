"""papers/structured_ffn.py against explicit dense matrices, torch's decompositions, the paper and transformers."""

import shutil

import pytest
import torch
import transformers
from conftest import refused, script
from lab import pretraining, run
from safetensors.torch import load_file
from tiny import SMALL, small
from torch.testing import assert_close
from trained import killed_after

import convert
from engine.files import read_json
from model import ApertusConfig
from papers import structured_ffn
from papers.structured_ffn import StructuredApertus

FORMS = ("lowrank", 12, 0), ("blockdense", 16, 4), ("blockshuffle", 0, 2)
RUN = dict(self_guided=0.5, total_samples=80, batch_size=1, batch_ramp_at=0, seed=28, guide_saving=True)
form = pytest.mark.parametrize("form", FORMS)
IDS = torch.arange(64).view(4, 16)


def settings(form):
    return RUN | dict(zip(("ffn", "ffn_rank", "ffn_blocks"), form))


def build(form):
    """(model, guides) of a run with 40 guided steps."""
    model = StructuredApertus(ApertusConfig(**SMALL | dict(n_layer=3)), settings(form), guided=True)
    model.init_weights(1)
    return model, structured_ffn.Guides(model, settings(form))


def layers(model):
    return list(model.structured_layers().values())


def explicit(m):
    """The dense matrix of a structured layer, by torch's block_diag and channel_shuffle."""
    v = m.v if m.v.ndim == 2 else torch.block_diag(*m.v)
    if m.u.ndim == 2:
        return m.u @ v
    B = len(m.u)
    dealt = torch.channel_shuffle(v[None], len(v) // B)
    return torch.channel_shuffle(torch.block_diag(*m.u) @ dealt, B)[0]


# Form, rank, blocks, and millions of parameters in all MLPs: arXiv 2406.16450, Table 1.
PUBLISHED = [("lowrank", 1024, 0, 516), ("blockdense", 1536, 4, 486), ("blockshuffle", 0, 2, 516)]


@pytest.mark.parametrize("row", PUBLISHED)
def test_a_model_of_the_published_size_has_the_published_parameters(row):
    *form, millions = row
    shape = ApertusConfig(n_layer=24, n_embd=2048, ffn_dim=8192, n_head=16, n_kv_head=16)
    with torch.device("meta"):
        model = StructuredApertus(shape, settings(form))
    ffn = sum(p.numel() for block in model.model.layers for p in block.mlp.parameters())
    assert round(ffn / 1e6) == millions


def test_low_rank_starts_as_the_truncated_svd_of_the_dense_models_draw():
    """By Eckart and Young no matrix of rank 12 is nearer. Each factor has the square roots of its singular values."""
    W = small(n_layer=3).model.layers[2].mlp.down_proj.weight.double()
    m = layers(build(FORMS[0])[0].double())[3]
    S = torch.linalg.svdvals(W)
    assert_close((W - m.merge()).norm(), S[12:].norm(), rtol=1e-6, atol=0)
    for factor in (m.v, m.u):
        assert_close(torch.linalg.svdvals(factor), S[:12].sqrt(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", FORMS[1:])
def test_block_forms_start_with_all_singular_values_one(form):
    want = (torch.arange(48) < (form[1] or 48)).float()
    for m in layers(build(form)[0]):
        assert_close(torch.linalg.svdvals(m.merge()), want, rtol=0, atol=1e-5)


@form
def test_training_mixes_as_published_and_evaluation_takes_the_factors(form):
    """A step whose coin skips the guide takes the factors too. The guide's gradient is then 0: ranks of ddp add it."""
    for m in layers(build(form)[0].double()):
        W = explicit(m)
        assert_close((m.guide, m.merge()), (W, W), rtol=0, atol=1e-6)
        torch.nn.init.normal_(m.guide)
        m.set_guide(0.25, True)
        x = torch.randn(2, 5, W.shape[1]).double()
        assert_close((m(x), m.eval()(x)), (0.25 * x @ m.guide.T + 0.75 * x @ W.T, x @ W.T))
        m.set_guide(0.25, False)
        y = m.train()(x)
        assert_close(y, x @ W.T)
        y.sum().backward()
        assert m.guide.grad.abs().max() == 0


def test_guides_fade_like_torchs_hann_window_and_coins_land_as_their_weight_says():
    """4,000 coins, one per layer and micro-batch, at a weight of 0.65: within 4 sigma, in all 16 patterns."""
    model, guides = build(FORMS[0])
    weights, coins = [], []
    for step in range(40):
        guides.set(step, 0)
        weights.append(layers(model)[3].alpha.item())
    assert_close(torch.tensor(weights), torch.hann_window(80)[40:])
    for micro in range(1000):
        guides.set(16, micro)
        coins.append([m.use_guide for m in layers(model)])
    coins = torch.tensor(coins).float()
    assert coins.mean() == pytest.approx(weights[16], abs=0.030)
    assert len(coins.unique(dim=0)) == 16


def test_a_run_in_its_guided_phase_is_exported_as_a_dense_model(lab, tmp_path):
    """The run itself is no Apertus: it is neither loaded as one nor completed with weights for transformers."""
    out, hf = tmp_path / "run", tmp_path / "hf"
    how = "--checkpoint_every=5 --keep_checkpoints=0 --ffn=blockdense --ffn_rank=8 --ffn_blocks=2 --self_guided=1.0"
    _, *flags = pretraining(lab, out, *how.split(), "--guide_saving", "--sample_every=10")
    run("papers.structured_ffn", *flags)
    shutil.rmtree(out / "ckpt" / "step-00000010")
    assert read_json(out / "config.json")["model_type"] == "nanoapertus" and not list(out.glob("*.safetensors"))
    with pytest.raises(ValueError, match="is of another model"):
        convert.load_any(str(out))
    run("papers.structured_ffn", f"--merge={out}", f"--save={hf}")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf)
    with torch.no_grad():
        assert_close(theirs(IDS).logits, structured_ffn.load_structured(str(out))(IDS), rtol=0, atol=2e-5)
    refused(script("papers.structured_ffn", *flags, "--resume", "--ffn_rank=4"), "other settings: ffn_rank 8 -> 4")
    refused(script("train.py", *pretraining(lab, out, "--resume")), "is of another model")


def names_of(run, step):
    """The names of the tensors in a checkpoint."""
    return [name for file in (run / "ckpt" / f"step-{step:08d}").glob("*.safetensors") for name in load_file(file)]


@pytest.mark.slow
def test_a_run_that_is_resumed_with_another_length_is_guided_for_half_of_that(lab, tmp_path):
    """It was planned for 10 steps, half of them guided. Guides that are gone after step 5 do not come back."""
    how = "--ffn=lowrank --ffn_rank=8 --self_guided=0.5 --checkpoint_every=1 --keep_checkpoints=0 --warmup_samples=0"
    _, *flags = pretraining(lab, tmp_path / "run", *how.split())
    run("papers.structured_ffn", *flags)
    for step, samples, guided in ((4, 48, False), (4, 160, True), (5, 160, False)):
        again = killed_after(tmp_path / "run", tmp_path / f"{step}-{samples}", step)
        assert any("guide" in name for name in names_of(again, step)) == (step == 4)
        changes = f"--out={again}", f"--total_samples={samples}", "--decay_samples=0", "--resume"
        run("papers.structured_ffn", *flags, *changes)
        assert any("guide" in name for name in names_of(again, step + 2)) == guided
