"""
studies/structured.py against explicit dense matrices, torch's decompositions, the paper's table and transformers.
"""
import re
import shutil

import pytest
import torch
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
    """The matrix of a structured layer from block_diag and a permutation matrix."""
    v = m.v if m.v.ndim == 2 else torch.block_diag(*m.v)
    if m.kind != "blockshuffle":
        return m.u @ v
    B = len(m.u)

    def deal(n):
        """P (n, n): P x is x dealt out to B blocks."""
        return torch.eye(n, dtype=v.dtype)[torch.arange(n).view(-1, B).T.flatten()]
    return deal(m.n_out).T @ torch.block_diag(*m.u) @ deal(len(v)) @ v


def test_the_sixteen_published_cells_are_reproduced():
    _, *printed = script("studies.structured").stdout.splitlines()
    cells = []
    for line in printed:
        cells += re.findall(r"(\S+) \(([\d.e+]+)\)", line)
    assert len(cells) == 16
    assert all(ours == published for ours, published in cells)


@form
def test_the_counts_are_those_of_a_real_model(kind, rank, blocks):
    dense, made = small(), small(kind, rank, blocks)
    saved = structured.ffn_params(3, 32, 64, "dense") - structured.ffn_params(3, 32, 64, kind, rank, blocks)
    assert dense.num_params() - made.num_params() == saved > 0
    assert dense.flops_per_token(16) - made.flops_per_token(16) == 6 * saved


@pytest.mark.parametrize("asked, says", [
    (("lowrang",), "not one of dense, lowrank"),
    (("lowrank",), "wants ffn_rank between 1 and 32, got 0: try 16"),
    (("blockdense", 18, 4), "32 inputs and 18 ffn_rank do not divide into ffn_blocks=4: try ffn_blocks=2"),
    (("blockshuffle", 0, 7), "32 inputs and 64 outputs do not divide into ffn_blocks=7: try ffn_blocks=4")])
def test_sizes_that_do_not_fit_are_refused_with_one_that_does(asked, says):
    with pytest.raises(ValueError, match=says):
        small(*asked)


# -----------------------------------------------------------------------------
# initialisation


def test_the_first_layer_stays_dense_and_all_that_is_shared_starts_alike():
    dense, made = (dict(model.named_parameters()) for model in (small(), small(*FORMS[0])))
    shared = dense.keys() & made.keys()
    assert len(shared) == len(dense) - 4 and all(dense[name].equal(made[name]) for name in shared)


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


def test_the_guide_weight_is_the_falling_half_of_torchs_hann_window():
    ours = [structured.guide_weight(step, 40) for step in range(42)]
    torch.testing.assert_close(torch.tensor(ours[:40]), torch.hann_window(80)[40:])
    assert ours[40:] == [0, 0]


@pytest.mark.parametrize("n_in, n_out", [(16, 48), (48, 16)])
@form
def test_training_mixes_as_published_and_evaluation_takes_the_factors(kind, rank, blocks, n_in, n_out):
    """So does training where the coin saves the guide, whose gradient is then 0, not absent: DDP waits for it."""
    m = structured.StructuredLinear(n_in, n_out, kind, rank, blocks).double()
    m.guide = torch.nn.Parameter(torch.empty(n_out, n_in, **double))
    for p in m.parameters():
        torch.nn.init.normal_(p)
    m.alpha = torch.tensor(0.25)
    x = torch.randn(2, 5, n_in, **double)
    W = explicit(m)
    torch.testing.assert_close(m(x), 0.25 * x @ m.guide.T + 0.75 * x @ W.T)
    m.use_guide = False
    saved = m(x)
    torch.testing.assert_close((saved, m.eval()(x), m.merge()), (x @ W.T, x @ W.T, W))
    saved.sum().backward()
    assert m.guide.grad.abs().max() == 0


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
    grouped = [p for group in opt.param_groups for p in group["params"]]
    assert set(opt.state) == set(grouped) == set(model.parameters())


def test_the_guided_share_of_a_run_is_counted_in_steps():
    run = dict(ffn="lowrank", self_guided=0.5, total_samples=80, batch_size=8, batch_ramp_at=0)
    assert structured.guided_steps(run) == 5
    assert structured.guided_steps({**run, "batch_ramp_at": 40}) == 3        # 5 steps of 8 and 2 of 16
    for wrong in (dict(ffn="dense"), dict(self_guided=1.5)):
        with pytest.raises(ValueError, match="want a share of the run"):
            structured.guided_steps(run | wrong)


def test_stochastic_saving_flips_a_coin_for_each_layer_step_and_micro_batch_that_lands_as_its_weight_says():
    """Within 4 sigma: binomial, 8000 coins that land so by the weight a, 2000 pairs that agree by a^2 + (1 - a)^2."""
    model = small(*FORMS[0], guided=True)
    coins = torch.empty(2000, 4)
    for micro in range(2000):
        structured.set_guides(model, 1, 4, stochastic=True, micro=micro)
        coins[micro] = torch.tensor([m.use_guide for m in layers(model)])
    alike = coins[:, 0] == coins[:, 1]
    assert coins.mean() == pytest.approx((2 + 2**0.5) / 4, abs=0.016)
    assert alike.float().mean() == pytest.approx(0.75, abs=0.039)


# -----------------------------------------------------------------------------
# in and out of files


@form
def test_merged_for_transformers_a_guided_checkpoint_gives_the_same_logits(kind, rank, blocks, tmp_path):
    model, folder = small(kind, rank, blocks, guided=True).eval(), str(tmp_path / "hf")
    convert.save_hf(model, folder, merge=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
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
    ignore = [f"step-{later:08d}" for later in range(step + 2, 10, 2)]
    return shutil.copytree(run, copy, ignore=shutil.ignore_patterns(*ignore))


@pytest.mark.parametrize("step", [2, 4])
def test_train_resumes_a_guided_run_to_the_same_bits(guided, tmp_path, step):
    """Stopped inside and at the end of the guided phase."""
    whole, flags = guided
    run = stopped_at(whole, step, tmp_path / "run")
    done = script("train.py", *flags, f"--out={run}", "--resume")
    assert f"step-{step:08d}" in done.stdout, done.stderr
    a, b = weights(whole), weights(run)
    assert a.keys() == b.keys() and same(a, b)


def test_a_checkpoint_of_the_guided_phase_is_sampled_and_exported_without_its_guide(guided, tmp_path):
    run, hf = stopped_at(guided[0], 2, tmp_path / "run"), tmp_path / "hf"
    refused(script("convert.py", f"--load={run}", f"--save={hf}"), "--merge")
    assert script("convert.py", f"--load={run}", f"--save={hf}", "--merge").returncode == 0
    said, again = (script("sample.py", f"--init_from={model}", "--max_new_tokens=20", "--temperature=0")
                   for model in (run, hf))
    assert said.returncode == 0 and again.stdout == said.stdout
