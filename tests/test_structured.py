"""
studies/structured.py against explicit dense matrices, torch's own counts and schedules, the paper's table, and
transformers.
"""
import os
import re
import shutil

import pytest
import torch
import torch.nn.functional as F
import transformers

import convert
from ademamix import AdEMAMix, param_groups
from conftest import refused, same, script, weights
from model import Apertus, ApertusConfig
from studies import structured

SMALL = dict(block_size=16, vocab_size=320, n_layer=3, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=64, init_std=0.1)
FORMS = [("lowrank", 12, 0), ("blockdense", 16, 4), ("blockshuffle", 0, 2)]
form = pytest.mark.parametrize("kind, rank, blocks", FORMS)
double = dict(dtype=torch.float64)


def layer(n_in, n_out, kind, rank, blocks):
    made = structured.StructuredLinear(n_in, n_out, kind, rank, blocks).double()
    for p in made.parameters():
        p.data = torch.randn(p.shape, **double)
    return made


def small(kind="dense", rank=0, blocks=0, guided=False, **changes):
    """A model as posttrain/attach.py builds it: its layers first, its values last."""
    model = Apertus(ApertusConfig(**SMALL | changes), seed=None)
    if kind != "dense":
        structured.build(model, dict(ffn=kind, ffn_rank=rank, ffn_blocks=blocks))
    if guided:
        structured.add_guides(model)
    model.init_weights(1)
    return model


def layers(model):
    return list(structured.structured_layers(model).values())


def loss_of(model):
    ids = torch.arange(68).view(4, 17)
    return model(ids[:, :-1], ids[:, 1:])[1]


# -----------------------------------------------------------------------------
# the layers are matrices


def explicit(m):
    """The matrix of a structured layer from block_diag and a permutation matrix, differentiable in v and u."""
    v = m.v if m.v.ndim == 2 else torch.block_diag(*m.v)
    if m.kind != "blockshuffle":
        return m.u @ v
    B = len(m.u)

    def deal(n):
        """P (n, n): P x is x dealt out to B blocks."""
        return torch.eye(n, dtype=v.dtype)[torch.arange(n).view(-1, B).T.flatten()]
    return deal(m.n_out).T @ torch.block_diag(*m.u) @ deal(len(v)) @ v


@pytest.mark.parametrize("n_in, n_out", [(16, 48), (48, 16)])
@form
def test_forward_and_all_gradients_are_those_of_the_merged_matrix(kind, rank, blocks, n_in, n_out):
    m = layer(n_in, n_out, kind, rank, blocks)
    W = explicit(m)
    x = torch.randn(2, 3, n_in, **double, requires_grad=True)
    grad = torch.randn(2, 3, n_out, **double)
    y, want = m(x), F.linear(x, W)
    ours = torch.autograd.grad(y, (x, m.v, m.u), grad)
    theirs = torch.autograd.grad(want, (x, m.v, m.u), grad)
    torch.testing.assert_close((m.merge(), y, *ours), (W, want, *theirs), rtol=1e-11, atol=1e-11)


def test_the_sixteen_published_cells_are_reproduced():
    _, *printed = script("studies.structured").stdout.splitlines()
    cells = []
    for line in printed:
        cells += re.findall(r"(\S+) \(([\d.e+]+)\)", line)
    assert len(printed) == 9 and len(cells) == 16
    assert all(ours == published for ours, published in cells)


@form
def test_the_counts_are_those_of_a_real_model(kind, rank, blocks):
    dense, made = small(activation="gelu"), small(kind, rank, blocks, activation="gelu")
    saved = structured.ffn_params(3, 32, 64, "dense") - structured.ffn_params(3, 32, 64, kind, rank, blocks)
    assert dense.num_params() - made.num_params() == saved > 0
    assert dense.flops_per_token(16) - made.flops_per_token(16) == 6 * saved


@pytest.mark.parametrize("asked, says", [
    (("lowrang",), "not one of dense, lowrank"),
    (("lowrank",), "wants ffn_rank between 1 and 32, got 0: try 16"),
    (("lowrank", 33), "between 1 and 32"),
    (("blockdense", 18, 4), "32 inputs and 18 ffn_rank do not divide into ffn_blocks=4: try ffn_blocks=2"),
    (("blockshuffle", 0, 7), "32 inputs and 64 outputs do not divide into ffn_blocks=7: try ffn_blocks=4")])
def test_sizes_that_do_not_fit_are_refused_with_one_that_does(asked, says):
    with pytest.raises(ValueError, match=says):
        small(*asked)


def test_a_model_of_one_layer_would_stay_dense():
    with pytest.raises(ValueError, match="the first layer stays dense"):
        small(*FORMS[0], n_layer=1)


# -----------------------------------------------------------------------------
# initialisation


def test_the_first_layer_stays_dense_and_all_that_is_shared_starts_alike():
    dense, made = (dict(model.named_parameters()) for model in (small(), small(*FORMS[0])))
    shared = dense.keys() & made.keys()
    assert dense.keys() - shared == {f"model.layers.{i}.mlp.{m}_proj.weight" for i in (1, 2) for m in ("up", "down")}
    assert all(dense[name].equal(made[name]) for name in shared)
    assert len(layers(small(*FORMS[1], activation="swiglu", ffn_dim=96))) == 6


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj", "model.layers.2.mlp.down_proj"])
def test_low_rank_starts_as_the_truncated_svd_of_the_dense_models_draw(name):
    """By Eckart and Young nothing of rank 12 is nearer; its singular values are split evenly between the factors."""
    W = small().double().get_submodule(name).weight.detach()
    m = small(*FORMS[0]).double().get_submodule(name)
    S = torch.linalg.svdvals(W)
    error = torch.linalg.matrix_norm(W - m.merge())
    torch.testing.assert_close(error, S[12:].square().sum().sqrt(), rtol=1e-6, atol=0)
    for gram in (m.v @ m.v.T, m.u.T @ m.u):
        torch.testing.assert_close(gram, torch.diag(S[:12]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind, rank, blocks", FORMS[1:])
def test_block_forms_start_with_all_singular_values_one(kind, rank, blocks):
    for m in layers(small(kind, rank, blocks).double()):
        S = torch.linalg.svdvals(m.merge())
        n = rank or 32                                     # the rank of the product
        assert (S[:n] - 1).abs().max() < 1e-6 and S[n:].sum() < 1e-6


# -----------------------------------------------------------------------------
# self-guided training


def test_the_guide_weight_is_torchs_cosine_annealing():
    opt = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=40)
    for step in range(41):
        assert structured.guide_weight(step, 40) == pytest.approx(cosine.get_last_lr()[0], abs=1e-12)
        opt.step()
        cosine.step()
    assert structured.guide_weight(41, 40) == 0


@form
def test_the_output_is_the_published_mixture_in_training_and_the_factors_in_evaluation(kind, rank, blocks):
    m = layer(16, 48, kind, rank, blocks)
    m.guide = torch.nn.Parameter(torch.randn(48, 16, **double))
    m.alpha = torch.tensor(0.25)
    x = torch.randn(5, 16, **double)
    torch.testing.assert_close(m(x), 0.25 * x @ m.guide.T + 0.75 * x @ explicit(m).T)
    torch.testing.assert_close(m.eval()(x), x @ explicit(m).T)


@form
def test_guiding_starts_from_the_true_product_so_the_first_loss_is_the_same(kind, rank, blocks):
    model = small(kind, rank, blocks, guided=True)
    structured.set_guides(model, 0, 10)
    for m in layers(model):
        torch.testing.assert_close(m.guide, explicit(m), rtol=0, atol=1e-6)
        assert m.alpha == 1
    assert loss_of(model).item() == pytest.approx(loss_of(small(kind, rank, blocks)).item(), abs=1e-5)


def test_at_the_end_the_guide_and_its_states_are_gone_and_the_loss_stays():
    model = small(*FORMS[1], guided=True)
    opt = AdEMAMix(param_groups(model), lr=1e-2, compile=False)
    structured.set_guides(model, 1, 4)
    loss_of(model).backward()
    opt.step()
    structured.set_guides(model, 4, 4)
    before = loss_of(model).item()
    assert structured.drop_guides(model, opt) == 4
    assert loss_of(model).item() == pytest.approx(before, abs=1e-6)
    assert model.num_params() == small(*FORMS[1]).num_params()
    grouped = [p for group in opt.param_groups for p in group["params"]]
    assert set(opt.state) == set(grouped) == set(model.parameters())


def test_the_guided_share_of_a_run_is_counted_in_steps():
    run = dict(ffn="lowrank", self_guided=0.5, total_samples=80, batch_size=8, batch_ramp_at=0)
    assert structured.guided_steps(run) == 5 and structured.guided_steps({}) == 0
    assert structured.guided_steps({**run, "batch_ramp_at": 40}) == 3        # 5 steps of 8 and 2 of 16
    for wrong in (dict(ffn="dense"), dict(self_guided=1.5), dict(self_guided=-0.5)):
        with pytest.raises(ValueError, match="want a share of the run"):
            structured.guided_steps(run | wrong)


def test_stochastic_saving_flips_a_coin_for_each_layer_step_and_micro_batch_that_lands_as_its_weight_says():
    """Within 4 sigma: binomial, 8000 coins that land so by the weight a, 2000 pairs that agree by a^2 + (1 - a)^2."""
    model = small(*FORMS[0], guided=True)
    used = pairs = 0
    for micro in range(2000):
        structured.set_guides(model, 1, 4, stochastic=True, micro=micro)
        coins = [m.use_guide for m in layers(model)]
        used += sum(coins)
        pairs += coins[0] == coins[1]
    a = (2 + 2**0.5) / 4
    for n, found, p in ((8000, used, a), (2000, pairs, a**2 + (1 - a) ** 2)):
        assert abs(found - n * p) < 4 * (n * p * (1 - p)) ** 0.5


def test_an_unused_guide_has_a_gradient_of_zero_and_changes_nothing():
    m = layer(16, 48, *FORMS[0])
    m.guide = torch.nn.Parameter(torch.ones(48, 16, **double))
    m.alpha, m.use_guide = torch.tensor(0.5), False
    x = torch.randn(3, 16, **double)
    m(x).sum().backward()
    assert m(x).equal(m.eval()(x)) and m.guide.grad.abs().max() == 0


# -----------------------------------------------------------------------------
# in and out of files


@form
def test_merged_for_transformers_a_guided_checkpoint_gives_the_same_logits(kind, rank, blocks, tmp_path):
    model, folder = small(kind, rank, blocks, guided=True).eval(), str(tmp_path / "hf")
    with pytest.raises(ValueError, match=f"no ffn='{kind}': --merge writes the dense model"):
        convert.save_hf(model, folder)
    assert not os.path.exists(folder)
    convert.save_hf(model, folder, merge=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(64).view(4, 16)
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids)[0], rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def guided(data, tmp_path_factory):
    """A run of 8 steps, guided for 4 with saving, and the flags that made it."""
    run = tmp_path_factory.mktemp("guided") / "run"
    flags = ["configs/tiny.py", f"--data={data}", "--total_samples=64", "--warmup_samples=8", "--decay_samples=16",
             "--checkpoint_every=2", "--keep_checkpoints=9",
             "--ffn=blockdense", "--ffn_rank=16", "--ffn_blocks=2", "--self_guided=0.5", "--guide_saving"]
    done = script("train.py", *flags, f"--out={run}")
    assert done.returncode == 0, done.stderr
    return run, flags


def stopped_at(run, step, copy):
    shutil.copytree(run, copy)
    for later in range(step + 2, 10, 2):
        shutil.rmtree(copy / "ckpt" / f"step-{later:08d}")


@pytest.mark.parametrize("step", [2, 4])
def test_train_resumes_a_guided_run_to_the_same_bits(guided, tmp_path, step):
    """Stopped inside and at the end of the guided phase."""
    whole, flags = guided
    stopped_at(whole, step, tmp_path / "run")
    done = script("train.py", *flags, f"--out={tmp_path / 'run'}", "--resume")
    assert done.returncode == 0 and f"step-{step:08d}" in done.stdout, done.stderr
    a, b = weights(whole), weights(tmp_path / "run")
    assert a.keys() == b.keys() and same(a, b)
    assert not any("guide" in name for name in a)


def test_a_checkpoint_of_the_guided_phase_is_sampled_and_exported_without_its_guide(guided, tmp_path):
    run, hf = tmp_path / "run", tmp_path / "hf"
    stopped_at(guided[0], 2, run)
    refused(script("convert.py", f"--load={run}", f"--save={hf}"), "--merge")
    assert script("convert.py", f"--load={run}", f"--save={hf}", "--merge").returncode == 0
    said, again = (script("sample.py", f"--init_from={model}", "--max_new_tokens=20", "--temperature=0")
                   for model in (run, hf))
    assert said.returncode == 0 and again.stdout == said.stdout
