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

import convert
from studies import structured
from ademamix import AdEMAMix, param_groups
from conftest import ROOT, script
from model import Apertus, ApertusConfig
from studies.structured import StructuredLinear

SMALL = dict(block_size=16, vocab_size=320, n_layer=3, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=64, init_std=0.1)
FORMS = [("lowrank", 12, 0), ("blockdense", 16, 4), ("blockshuffle", 0, 2)]
FACTORS = [("lowrank", 5, 0), ("blockdense", 8, 4), ("blockshuffle", 0, 2), ("blockshuffle", 0, 4)]
form = pytest.mark.parametrize("kind, rank, blocks", FORMS)


def layer(n_in, n_out, kind, rank, blocks, seed=0):
    made = StructuredLinear(n_in, n_out, kind, rank, blocks).double()
    generator = torch.Generator().manual_seed(seed)
    for p in made.parameters():
        p.data.normal_(generator=generator)
    return made


def small(kind="dense", rank=0, blocks=0, seed=1, **changes):
    return Apertus(ApertusConfig(**{**SMALL, **changes}, ffn=kind, ffn_rank=rank, ffn_blocks=blocks), seed)


def batch(step, rows=4):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(320, (rows, 16), generator=generator)


def loss_of(model, step=0):
    return model(batch(step), batch(step + 1))[1]


# -----------------------------------------------------------------------------
# the layers are matrices


def explicit(m):
    """The matrix of a structured layer from block_diag and a permutation matrix, differentiable in v and u."""
    v = m.v if m.v.ndim == 2 else torch.block_diag(*m.v)
    if m.kind != "blockshuffle":
        return m.u @ v

    def deal(n, B):
        """P (n, n): P x is x dealt out to B blocks."""
        return torch.eye(n, dtype=torch.float64)[torch.arange(n).view(-1, B).T.flatten()]

    B = len(m.u)
    return deal(m.n_out, B).T @ torch.block_diag(*m.u) @ deal(v.shape[0], B) @ v


@pytest.mark.parametrize("n_in, n_out", [(16, 48), (48, 16)])
@pytest.mark.parametrize("kind, rank, blocks", FACTORS)
def test_forward_and_all_gradients_are_those_of_the_merged_matrix(kind, rank, blocks, n_in, n_out):
    m = layer(n_in, n_out, kind, rank, blocks)
    W = explicit(m)
    torch.testing.assert_close(m.merge(), W, rtol=0, atol=1e-12 * W.abs().max().item())
    x = torch.randn(2, 3, n_in, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(2, 3, n_out, dtype=torch.float64)
    y, want = m(x), F.linear(x, W)
    ours = torch.autograd.grad(y, (x, m.v, m.u), grad)
    theirs = torch.autograd.grad(want, (x, m.v, m.u), grad)
    for a, b in zip((y, *ours), (want, *theirs)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * b.abs().max().item())


def test_the_sixteen_published_cells_are_reproduced():
    cells = 0
    for n_layer, width, tokens, kind, rank, blocks, millions, flops in structured.PUBLISHED:
        ffn = structured.ffn_params(n_layer, width, 4 * width, kind, rank, blocks)
        assert f"{structured.training_flops(n_layer, width, ffn, 32000, 1024, tokens):.2e}" == f"{flops:.2e}"
        assert millions is None or round(ffn / 1e6) == millions
        cells += 1 + (millions is not None)
    assert cells == 16
    _, *printed = script("studies.structured").stdout.splitlines()
    assert len(printed) == 9
    for line in printed:
        millions, published, flops, published_flops = re.search(r"(\d+) \((.+?)\) +(\S+) \((.+)\)$", line).groups()
        assert published in (millions, "not given") and flops == published_flops


@form
def test_the_counts_are_those_of_a_real_model(kind, rank, blocks):
    with torch.device("meta"):
        dense, made = small(activation="gelu"), small(kind, rank, blocks, activation="gelu")
    saved = structured.ffn_params(3, 32, 64, "dense") - structured.ffn_params(3, 32, 64, kind, rank, blocks)
    assert dense.num_params() - made.num_params() == saved > 0
    assert dense.flops_per_token(16) - made.flops_per_token(16) == 6 * saved


def test_the_first_layer_stays_dense_and_all_that_is_shared_starts_alike():
    dense, made = dict(small().named_parameters()), dict(small("lowrank", 12).named_parameters())
    shared = dense.keys() & made.keys()
    assert dense.keys() - shared == {f"model.layers.{i}.mlp.{m}_proj.weight" for i in (1, 2) for m in ("up", "down")}
    assert all(torch.equal(dense[name], made[name]) for name in shared)
    assert len(structured.structured_layers(small(*FORMS[1], activation="swiglu", ffn_dim=96))) == 6


@pytest.mark.parametrize("changes, says", [
    (dict(ffn="lowrang"), "not one of dense, lowrank"),
    (dict(ffn="lowrank"), "wants ffn_rank between 1 and 32, got 0: try 16"),
    (dict(ffn="lowrank", ffn_rank=33), "between 1 and 32"),
    (dict(ffn="blockdense", ffn_rank=16, ffn_blocks=3), "do not divide into ffn_blocks=3: try ffn_blocks=2"),
    (dict(ffn="blockdense", ffn_rank=18, ffn_blocks=4), "32 inputs and 18 ffn_rank do not divide into ffn_blocks=4"),
    (dict(ffn="blockshuffle", ffn_blocks=0), "ffn_blocks=0: try ffn_blocks=2"),
    (dict(ffn="blockshuffle", ffn_blocks=7),
     "32 inputs and 64 outputs do not divide into ffn_blocks=7: try ffn_blocks=4"),
    (dict(ffn="blockshuffle", ffn_blocks=2, n_layer=1), "the first layer stays dense")])
def test_sizes_that_do_not_fit_are_refused_in_one_line(changes, says):
    with pytest.raises(ValueError, match=says) as error:
        Apertus(ApertusConfig(**{**SMALL, **changes}))
    assert "\n" not in str(error.value)


# -----------------------------------------------------------------------------
# initialisation


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj", "model.layers.2.mlp.down_proj"])
def test_low_rank_starts_as_the_truncated_svd_of_the_dense_models_draw(name):
    """Its singular values, split evenly between the factors; and by Eckart and Young nothing of rank 12 is nearer."""
    W = dict(small().double().named_parameters())[name + ".weight"].detach()
    m = structured.structured_layers(small("lowrank", 12).double())[name]
    S = torch.linalg.svdvals(W)
    torch.testing.assert_close(torch.linalg.svdvals(m.merge())[:12], S[:12], rtol=1e-5, atol=0)
    error = torch.linalg.matrix_norm(W - m.merge())
    torch.testing.assert_close(error, S[12:].square().sum().sqrt(), rtol=1e-6, atol=0)
    torch.testing.assert_close(m.v @ m.v.T, m.u.T @ m.u, rtol=0, atol=1e-6)
    torch.testing.assert_close(m.v @ m.v.T, torch.diag(S[:12]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind, rank, blocks", FORMS[1:])
def test_block_forms_start_with_all_singular_values_one(kind, rank, blocks):
    for m in structured.structured_layers(small(kind, rank, blocks)).values():
        for factor in (m.v, m.u):
            assert (torch.linalg.svdvals(factor.double()) - 1).abs().max() < 1e-6
        S, n = torch.linalg.svdvals(m.double().merge()), rank or 32          # the rank of the product
        assert (S[:n] - 1).abs().max() < 1e-6 and S[n:].sum() < 1e-6


# -----------------------------------------------------------------------------
# self-guided training


def test_the_guide_weight_is_torchs_cosine_annealing():
    opt = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=40)
    for step in range(41):
        assert structured.guide_weight(step, 40) == pytest.approx(cosine.get_last_lr()[0], abs=1e-12)
        opt.step(), cosine.step()
    assert structured.guide_weight(0, 40) == 1 and structured.guide_weight(41, 40) == 0


@form
def test_the_output_is_the_published_mixture_in_training_and_the_factors_in_evaluation(kind, rank, blocks):
    m = layer(16, 48, kind, min(rank, 8), blocks)
    m.guide, m.alpha = torch.nn.Parameter(torch.randn(48, 16, dtype=torch.float64)), torch.tensor(0.3)
    x = torch.randn(5, 16, dtype=torch.float64)
    want = 0.3 * x @ m.guide.T + 0.7 * x @ explicit(m).T
    torch.testing.assert_close(m(x), want, rtol=1e-6, atol=1e-6)             # 0.3 in fp32
    torch.testing.assert_close(m.eval()(x), x @ explicit(m).T)


@form
def test_guiding_starts_from_the_true_product_so_the_first_loss_is_the_same(kind, rank, blocks):
    model = small(kind, rank, blocks).double()
    before = loss_of(model).item()
    structured.add_guides(model)
    structured.set_guides(model, 0, 10)
    for m in structured.structured_layers(model).values():
        torch.testing.assert_close(m.guide, explicit(m), rtol=0, atol=1e-12)
        assert m.alpha == 1
    assert loss_of(model).item() == pytest.approx(before, abs=1e-12)


def guided_run(model, opt, steps, last, start=0):
    """The loop that train.py has, with its three calls."""
    for step in range(start, steps):
        if step < last:
            structured.set_guides(model, step, last)
        loss = loss_of(model, step)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        if step + 1 == last:
            structured.drop_guides(model, opt)


@form
def test_at_the_end_the_guide_and_its_states_are_gone_and_the_loss_stays(kind, rank, blocks):
    model = small(kind, rank, blocks)
    plain = model.num_params()
    structured.add_guides(model)
    opt = AdEMAMix(param_groups(model), lr=1e-2, compile=False)
    guided_run(model, opt, 3, last=4)
    with_guides = len(opt.state)
    structured.set_guides(model, 4, 4)
    before = loss_of(model).item()
    assert structured.drop_guides(model, opt) == 4
    assert abs(loss_of(model).item() - before) <= 1e-6
    left = {id(p) for p in model.parameters()}
    assert model.num_params() == plain and len(opt.state) == with_guides - 4
    assert {id(p) for p in opt.state} == {id(p) for g in opt.param_groups for p in g["params"]} == left
    guided_run(model, opt, 6, last=4, start=4)


def test_the_guided_share_of_a_run_is_counted_in_steps():
    run = dict(ffn="lowrank", self_guided=0.5, total_samples=80, batch_size=8, batch_ramp_at=0)
    assert structured.guided_steps(run) == 5
    assert structured.guided_steps({**run, "self_guided": 0.0}) == structured.guided_steps({}) == 0
    assert structured.guided_steps({**run, "batch_ramp_at": 40}) == 3        # 5 steps of 8 and 2 of 16
    for wrong in (dict(ffn="dense"), dict(self_guided=1.5), dict(self_guided=-0.5)):
        with pytest.raises(ValueError, match="want a share of the run"):
            structured.guided_steps({**run, **wrong})


@pytest.mark.parametrize("last, weight", [(2, 0.5), (4, (2 + 2**0.5) / 4)])
def test_stochastic_saving_flips_a_coin_for_each_layer_step_and_micro_batch_that_lands_as_its_weight_says(last, weight):
    """Within 4 sigma: binomial, 8000 coins that land so by the weight a, 2000 pairs that agree by a^2 + (1 - a)^2."""
    model = small(*FORMS[0])
    structured.add_guides(model)
    layers, used, pairs = list(structured.structured_layers(model).values()), 0, 0
    for micro in range(2000):
        structured.set_guides(model, 1, last, stochastic=True, micro=micro)
        used += sum(m.use_guide for m in layers)
        pairs += layers[0].use_guide == layers[1].use_guide
    alike = weight**2 + (1 - weight) ** 2
    for n, found, p in ((8000, used, weight), (2000, pairs, alike)):
        assert abs(found - n * p) < 4 * (n * p * (1 - p)) ** 0.5


def test_an_unused_guide_has_a_gradient_of_zero_and_changes_nothing():
    m = layer(16, 48, "lowrank", 8, 0)
    m.guide = torch.nn.Parameter(torch.ones(48, 16, dtype=torch.float64))
    m.alpha, m.use_guide = torch.tensor(0.5), False
    x = torch.randn(3, 16, dtype=torch.float64)
    m(x).sum().backward()
    assert torch.equal(m(x), structured.multiply(x, m.v, m.u, m.kind))
    assert m.guide.grad.abs().max() == 0


# -----------------------------------------------------------------------------
# export


@form
def test_export_refuses_and_with_merge_transformers_gives_the_same_logits(kind, rank, blocks, tmp_path):
    """Of a checkpoint from the guided phase the factors are exported, and the guides left out."""
    transformers = pytest.importorskip("transformers")
    model, folder = small(kind, rank, blocks).eval(), str(tmp_path / "hf")
    structured.add_guides(model)
    with pytest.raises(ValueError, match=f"no ffn='{kind}': --merge writes the dense model"):
        convert.save_hf(model, folder)
    assert not os.path.exists(folder)
    convert.save_hf(model, folder, merge=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        want = model(batch(0))[0]
        torch.testing.assert_close(theirs(batch(0)).logits, want, rtol=0, atol=2e-5)
        torch.testing.assert_close(convert.load_hf(folder)(batch(0))[0], want, rtol=0, atol=2e-5)


# -----------------------------------------------------------------------------
# as a user runs it


@pytest.fixture(scope="module")
def guided(tmp_path_factory):
    """A run of 8 steps, guided for 4 with saving, and the flags that made it."""
    root = tmp_path_factory.mktemp("guided")
    texts = [os.path.join(ROOT, name) for name in ("schedule.py", "engine/plot.py")]
    done = script("prepare.py", *texts, f"--out={root / 'data'}", "--tokenizer=byte", "--val_share=0.5")
    assert done.returncode == 0, done.stderr
    flags = ["configs/tiny.py", f"--data={root / 'data'}", "--dtype=float32",
             "--total_samples=64", "--warmup_samples=8", "--decay_samples=16",
             "--eval_every=4", "--checkpoint_every=2", "--keep_checkpoints=9",
             "--ffn=blockdense", "--ffn_rank=16", "--ffn_blocks=2", "--self_guided=0.5", "--guide_saving"]
    done = script("train.py", *flags, f"--out={root / 'run'}")
    assert done.returncode == 0, done.stderr
    return root / "run", flags


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
    a, b = (dict(convert.load_run(str(run))[0].named_parameters()) for run in (whole, tmp_path / "run"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any("guide" in name for name in a)


def test_a_checkpoint_of_the_guided_phase_is_sampled_and_exported_without_its_guide(guided, tmp_path):
    run, hf = tmp_path / "run", tmp_path / "hf"
    stopped_at(guided[0], 2, run)

    def sampled(model):
        return script("sample.py", f"--init_from={model}", "--max_new_tokens=20", "--temperature=0")

    said = sampled(run)
    assert said.returncode == 0
    refused = script("convert.py", f"--load={run}", f"--save={hf}")
    assert refused.returncode == 2 and "--merge" in refused.stderr and refused.stderr.count("\n") == 1
    assert script("convert.py", f"--load={run}", f"--save={hf}", "--merge").returncode == 0
    assert sampled(hf).stdout == said.stdout
