"""posttrain/qrpo.py against published numbers, closed forms and an enumerable policy; then as users run it."""
import functools
import json
import math
import os
import re
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import ademamix
import chat
import convert
import generate as generate_file
import tokenizer
from configurator import configure
from conftest import ROOT, script
from engine import checkpoint
from engine.hardware import can_compile
from engine.parallel import Ranks
from generate import generate
from model import Apertus, ApertusConfig
from plain import Plain
from posttrain import collapse, common, losses, qrpo, references
from studies import digits, kit

GOLDEN = json.load(open(os.path.join(os.path.dirname(__file__), "golden", "preference_losses.json")))


def golden(name):
    return torch.tensor(GOLDEN["inputs"][name], dtype=torch.float64)


def both(name):
    return torch.stack((golden(f"{name}_chosen"), golden(f"{name}_rejected")), -1)


def case_id(c):
    parts = [str(c[k]) for k in ("loss", "transform", "beta") if k in c]
    return "-".join(parts) + ("-length" if c.get("length_norm") else "")


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=case_id)
def test_losses_are_the_published_implementations(case):
    """Their identity transform drops log(1 - e^(-1/beta)) from log Z. Ours has it, and is off by what it is worth."""
    kind = {"normal-icdf": "normal"}.get(case.get("transform"), case.get("transform", "identity"))
    length = both("len") if case.get("length_norm", case["loss"] == "simpo") else 1.0
    q = losses.TRANSFORMS[kind](losses.quantile(both("reward"), golden("ref_rewards")[:, None]), 7)
    limit = case.get("clamp", 0.0)
    b = losses.effective_beta(q, length, case["beta"], limit)

    def value(log_z):
        known = SimpleNamespace(ref=both("ref_logp"), reward=both("reward"), q=q, length=length, beta=b, log_z=log_z)
        return losses.losses[case["loss"]](both("policy_logp"), known, case["beta"], case.get("gamma_beta_ratio"))
    want = torch.tensor(case["value"], dtype=torch.float64)
    ours = losses.beta_log_z(b, kind)
    theirs = b * b.log() + 1 if kind == "identity" else ours
    torch.testing.assert_close(value(theirs), want, rtol=1e-5, atol=0)
    torch.testing.assert_close(value(ours), want, rtol=1e-5 if case["beta"] < 0.1 else 5e-5, atol=0)


# -----------------------------------------------------------------------------
# closed forms


def uniform_mean(f, n=400):
    """The integral of f over (0, 1) by Gauss-Legendre on 20 panels, exact to rounding for smooth f."""
    x, w = np.polynomial.legendre.leggauss(n)
    panels = np.linspace(0, 1, 21)
    total = 0.0
    for a, b in zip(panels, panels[1:]):
        points = torch.tensor((x + 1) / 2 * (b - a) + a)
        total += (f(points) * torch.tensor(w) * (b - a) / 2).sum().item()
    return total


@pytest.mark.parametrize("beta", [0.01, 0.03, 0.1, 0.3, 1.0, 5.0])
def test_partition_function_and_optimum_are_the_integrals(beta):
    # Z e^(-1/beta), which does not overflow.
    z = uniform_mean(lambda t: torch.exp((t - 1) / beta))
    assert losses.beta_log_z(beta) == pytest.approx(beta * math.log(z) + 1, abs=1e-9)
    best = losses.optimum(beta)
    mean = uniform_mean(lambda t: t * torch.exp((t - 1) / beta)) / z
    kl = uniform_mean(lambda t: torch.exp((t - 1) / beta) / z * ((t - 1) / beta - math.log(z)))
    assert best["quantile"] == pytest.approx(mean, abs=1e-9) and best["kl"] == pytest.approx(kl, abs=1e-9)
    # t < beta log Z: a uniform t is there with that probability.
    assert best["falling"] == losses.beta_log_z(beta)


@pytest.mark.parametrize("beta", [0.01, 0.03, 0.1, 0.3, 1.0, 5.0])
def test_partition_functions_of_the_other_transforms_have_their_closed_forms(beta):
    """log E exp(log t / beta) is log(beta / (1 + beta)); log E exp(x / beta) of a standard normal is 1 / (2 beta^2)."""
    assert losses.beta_log_z(beta, "log") == pytest.approx(beta * math.log(beta / (1 + beta)), abs=1e-12)
    assert losses.beta_log_z(beta, "normal") == 1 / (2 * beta)


def test_partition_function_has_the_published_values():
    """The paper: at beta .1 77 % fall, the quantile is .90, and KL 1.30 nats."""
    table = {0.01: .95395, 0.03: .89480, 0.1: .76974, 0.2: .67676, 0.5: .58072, 1: .54132, 5: .50833}
    for beta, want in table.items():
        assert losses.beta_log_z(beta) == pytest.approx(want, abs=5e-6)
    best = losses.optimum(0.1)
    assert (round(best["falling"], 2), round(best["quantile"], 3), round(best["kl"], 2)) == (0.77, 0.9, 1.3)
    assert losses.optimum(0.003)["falling"] > 0.98


def test_partition_function_never_overflows_and_knows_its_transforms():
    """For a large beta it is 1/2 + 1/(24 beta)."""
    b = torch.tensor([1e-6, 3e-4, 1.0, 1e3], dtype=torch.float64)
    values = losses.beta_log_z(b)
    assert values.isfinite().all() and values[3] == pytest.approx(0.5 + 1 / 24e3, abs=1e-9)
    assert type(losses.beta_log_z(0.1)) is float
    with pytest.raises(ValueError, match="there is identity, log, normal"):
        losses.beta_log_z(0.1, "icdf")


def test_quantile_counts_and_leaving_oneself_out_removes_the_bias():
    """One that counts itself is (1 - R_q) / n too large on average: .167 for n = 3. A uniform one has the mean 1/2."""
    assert losses.quantile(2.0, [1.0, 2.0, 3.0, 4.0]).item() == 0.5 and losses.quantile(0, [1, 2]).item() == 0
    r = torch.tensor([3.0, 1.0, 2.0])
    assert losses.quantile(r, r).mean() == pytest.approx(0.5 + 1 / (2 * 3))
    assert losses.quantile(r, r, loo=True).tolist() == [1.0, 0.0, 0.5]
    with pytest.raises(ValueError, match="at least one reference"):
        losses.quantile(1.0, [1.0], loo=True)


@pytest.mark.parametrize("beta, at_least", [(0.1, 3), (0.03, 8)])
def test_pass_or_fail_breaks_the_uniform_partition_and_discrete_repairs_it(beta, at_least):
    """A quarter passes. The mass, sum_y pi_ref exp(target / beta), should be 1, as it is for rewards without ties."""
    r = torch.tensor([0.0] * 75 + [1.0] * 25, dtype=torch.float64)
    tied, mass = losses.tie_report([r], beta)
    assert tied == pytest.approx((75 * 74 + 25 * 24) / (100 * 99)) and mass > at_least
    z = beta * math.expm1(1 / beta)
    assert mass == pytest.approx((0.75 * math.exp(0.75 / beta) + 0.25 * math.exp(1 / beta)) / z)
    q = losses.quantile(r, r)
    log_z = losses.discrete_beta_log_z(q, torch.tensor(beta, dtype=torch.float64))
    assert torch.exp((q - log_z) / beta).mean().item() == pytest.approx(1, abs=1e-12)
    distinct = torch.arange(1000, dtype=torch.float64)
    tied, mass = losses.tie_report([distinct], beta)
    assert tied == 0 and mass == pytest.approx(1 + 1 / (2000 * beta), rel=1e-3)


def test_a_policy_that_can_be_enumerated_reaches_the_closed_form():
    """4,096 completions of 4 tokens of 8: the regression finds pi*, KL(pi* || pi) falls from 1.30 nats below 1e-3."""
    g, beta, V, L = torch.Generator().manual_seed(0), 0.1, 8, 4
    ys = torch.cartesian_prod(*[torch.arange(V)] * L)
    prefix = []
    for i in range(L):
        earlier = [ys[:, k] * V ** (i - 1 - k) for k in range(i)]
        prefix.append(sum(earlier, torch.zeros(len(ys), dtype=torch.long)))
    start = [torch.randn(V**i, V, generator=g, dtype=torch.float64) for i in range(L)]
    def logp(tables):
        return sum(F.log_softmax(t, -1)[prefix[i], ys[:, i]] for i, t in enumerate(tables))
    ref = logp(start)
    p = ref.exp()
    # All rewards differ, and the quantile is the exact Pr(r' <= r).
    order = torch.randn(len(ys), generator=g).argsort()
    q = torch.empty_like(p)
    q[order] = p[order].cumsum(0)
    best = (ref + q / beta) - torch.logsumexp(ref + q / beta, 0)
    tables = [t.clone().requires_grad_() for t in start]
    opt = torch.optim.Adam(tables, lr=0.05)
    kl = lambda: (best.exp() * (best - logp(tables))).sum().item()
    assert kl() == pytest.approx((best.exp() * (best - ref)).sum().item()) and kl() == pytest.approx(1.30, abs=0.02)
    known = SimpleNamespace(ref=ref[:, None], q=q[:, None], beta=beta, log_z=losses.beta_log_z(beta))
    for _ in range(400):
        loss = (p * losses.losses["qrpo"](logp(tables)[:, None], known, beta, None)).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert kl() < 1e-3
    assert (logp(tables).exp() * q).sum().item() == pytest.approx(losses.optimum(beta)["quantile"], abs=2e-3)


# -----------------------------------------------------------------------------
# log-probs, diagnostics


TINY = dict(block_size=256, vocab_size=320, n_layer=2, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=64, init_std=0.05)


def test_sequence_log_probs_and_their_gradient_are_those_of_the_full_softmax():
    model = Apertus(ApertusConfig(**TINY))
    data = [([1, 5, 9], [7, 8]), ([1, 4], [30, 31, 32, 33, 12]), ([1], [2])]
    got = references.sequence_logp(model, data)
    weights = torch.tensor([1.0, -2.0, 0.5])
    (got * weights).sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    want = []
    # One at a time: no padding, all logits.
    for p, y in data:
        logits, _ = model(torch.tensor([[*p, *y]]))
        logp = F.log_softmax(logits[0].double(), -1)
        want.append(sum(logp[len(p) - 1 + k, t] for k, t in enumerate(y)))
    want = torch.stack(want)
    (want * weights).sum().backward()
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-5)
    for n, p in model.named_parameters():
        torch.testing.assert_close(grads[n], p.grad, rtol=1e-4, atol=1e-6)


def test_ranks_of_matrices_whose_rank_is_known():
    def spectrum(matrix, want, rel=1e-4):
        found = collapse.spectrum(matrix)
        assert {name: found[name] for name in want} == pytest.approx(want, rel=rel)

    q = torch.linalg.qr(torch.randn(64, 10, generator=torch.Generator().manual_seed(0)))[0]
    # Ten equal singular values; a matrix of rank one; one value of 3 and nine of 1.
    spectrum(q, dict(effective=10, pca99=10, stable=10))
    spectrum(torch.randn(50, 1) @ torch.ones(1, 9), dict(effective=1, pca99=1, stable=1), rel=1e-3)
    s = torch.tensor([3.0] + [1.0] * 9)
    p = s / s.sum()
    spectrum(q * s, dict(effective=math.exp(-(p * p.log()).sum()), pca99=10, stable=18 / 9))
    # 10,000 of 10,009 is more than 99 %.
    assert collapse.spectrum(q * torch.tensor([100.0] + [1.0] * 9))["pca99"] == 1
    assert collapse.spectrum(torch.zeros(4, 3)) == dict.fromkeys(collapse.RANKS, 0)
    infinite = torch.tensor([[1.0, math.inf], [0.0, 1.0]])
    assert all(math.isnan(v) for v in collapse.spectrum(infinite).values())


def test_dead_units_and_preactivation_norm_are_those_of_the_last_feed_forward():
    """Of all positions, of one token alone, and in documents that do not see each other."""
    model = Apertus(ApertusConfig(**TINY))
    idx = torch.randint(320, (3, 40), generator=torch.Generator().manual_seed(0))
    effective = lambda h: pytest.approx(collapse.spectrum(h.flatten(0, 1))["effective"])
    seen = []
    model.model.layers[-1].mlp.act_fn.register_forward_pre_hook(lambda m, x: seen.append(x[0]))
    with torch.no_grad():
        h, found = model.hidden(idx), collapse.diagnose(model, idx)
    z = seen[0].flatten(0, 1)
    assert found["preactivation"] == pytest.approx(z.norm(dim=1).mean().item())
    assert found["dead_units"] == 0 and found["rank_tokens"] == 120
    assert found["rank_effective"] == effective(h)

    one = torch.zeros_like(idx, dtype=torch.bool)
    one[0, 0] = True
    found = collapse.diagnose(model, idx, one)
    assert found["dead_units"] == pytest.approx((seen[0][0, 0] <= 0).float().mean().item())
    assert found["rank_effective"] == pytest.approx(1, abs=1e-5)

    doc = (torch.arange(40) // 13).expand(3, 40)
    with torch.no_grad():
        h = model.hidden(idx, doc)
    assert collapse.diagnose(model, idx, doc=doc)["rank_effective"] == effective(h)
    assert not model.model.layers[-1].mlp.up_proj._forward_hooks


def test_a_compiled_model_has_the_ranks_of_an_eager_one_each_time():
    """What torch.compile has traced without a hook, or with that of an earlier call, would not call this one."""
    model = Apertus(ApertusConfig(**TINY))
    ids = torch.arange(24).view(2, 12)
    want = collapse.diagnose(model, ids)
    model.compile_blocks(backend="eager")
    with torch.no_grad():
        model(ids)
    assert collapse.diagnose(model, ids) == want
    assert collapse.diagnose(model, ids) == want


def test_a_start_model_is_known_by_every_one_of_its_weights():
    model = Apertus(ApertusConfig(**TINY))
    seen = {checkpoint.fingerprint(model)}
    for name, p in model.named_parameters():
        with torch.no_grad():
            p.view(-1)[0] += 1
        seen.add(checkpoint.fingerprint(model))
    assert len(seen) == 1 + len(list(model.parameters()))


@pytest.mark.parametrize("size, lr", [("8b", 5e-7), ("70b", 1e-7)])
def test_the_recipes_fit_the_script_and_have_the_published_numbers(size, lr):
    found = configure({**vars(qrpo)}, [f"qrpo_{size}"])
    want = dict(lr=lr, beta=5.0, beta_max=0.1, length_norm=True, batch_size=512, warmup=0.1)
    assert {name: found[name] for name in want} == want


# -----------------------------------------------------------------------------
# the script


def ask(text):
    """The messages of a prompt."""
    return [dict(role="system", content="x"), dict(role="user", content=text)]


def write_rows(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))


def write_reward(path, value, name="reward"):
    """A reward function that returns this expression."""
    path.write_text(f"def {name}(prompt, completion):\n    return {value}\n")
    return f"--rewards={path}"


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A Hugging Face folder whose model says something short and ends; prompts; a reward function with few ties."""
    root = tmp_path_factory.mktemp("qrpo")
    convert.save_hf(Apertus(ApertusConfig(**TINY)), str(root / "untrained"), tokenizer.load("byte"))
    answers = [dict(role="assistant", content="ab"[i % 2] * (1 + i % 5)) for i in range(60)]
    write_rows(root / "chats.jsonl", [dict(messages=[*ask(f"say {i % 6}"), said]) for i, said in enumerate(answers)])
    write_rows(root / "prompts.jsonl", [dict(messages=ask(f"say {i}")) for i in range(6)])
    done = script(
        "posttrain.sft", f"--init_from={root / 'untrained'}", f"--data={root / 'chats.jsonl'}", f"--out={root / 'sft'}",
        "--batch_size=12", "--micro_batch=12", "--lr=1e-2", "--epochs=6", "--optimizer=adamw",
    )
    assert done.returncode == 0, done.stderr
    shutil.copytree(root / "sft" / "hf", root / "model")
    write_reward(root / "reward.py", "sum(map(ord, completion)) % 97 + 1e-3 * len(completion)")
    return root


def arguments(start, out):
    """The command line of a run that all tests begin with."""
    return [
        f"--init_from={start / 'model'}", f"--data={start / 'prompts.jsonl'}", f"--rewards={start / 'reward.py'}",
        f"--out={out}", "--n_refs=6", "--max_new_tokens=40", "--batch_size=4", "--micro_batch=2", "--lr=1e-3",
        "--pairs_per_prompt=0", "--rank_every=1", "--checkpoint_every=3", "--dtype=float32",
    ]


def align(start, out, *args):
    """What a run prints that ends well."""
    done = script("posttrain.qrpo", *arguments(start, out), "--keep_checkpoints=9", *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(start, out, *args):
    """The one line that a run says which cannot work."""
    done = script("posttrain.qrpo", *arguments(start, out), "--keep_checkpoints=9", *args)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and last.startswith("qrpo.py: "), done.stderr
    return last


@pytest.fixture(scope="module")
def aligned(start):
    align(start, start / "whole", "--epochs=2")
    return start / "whole"


def log(folder):
    return [json.loads(line) for line in open(os.path.join(folder, "log.jsonl"))]


def weights(folder):
    return dict(convert.load_run(str(folder))[0].named_parameters())


def same_bits(one, two):
    """Whether two runs have ended in the same weights by the same steps."""
    a, b = weights(one), weights(two)
    return all(torch.equal(a[n], b[n]) for n in a) and log(one) == log(two)


def test_every_step_logs_what_there_is_to_watch(aligned):
    """It starts at the reference, so that nothing has moved at the first step."""
    first = log(aligned)[0]
    assert {"target", "correlation", "kl", "reward", "length", "grad_norm", "log_ratio"} <= first.keys()
    assert {"rank_effective", "rank_pca99", "rank_stable", "dead_units", "preactivation"} <= first.keys()
    assert abs(first["log_ratio"]) < 1e-4 and first["kl"] < 1e-4
    assert os.path.exists(aligned / "hf" / "model.safetensors")
    assert os.path.exists(aligned / "references" / "samples-10-0000000.json")


def test_killed_and_resumed_ends_in_the_same_bits(aligned, start, tmp_path):
    shutil.copytree(aligned, tmp_path / "run")
    last = sorted(os.listdir(aligned / "ckpt"))
    for step in last[1:]:
        shutil.rmtree(tmp_path / "run" / "ckpt" / step)
    align(start, tmp_path / "run", "--epochs=2", "--resume")
    assert same_bits(aligned, tmp_path / "run")


@pytest.mark.parametrize("args", [
    ["--loss=dpo"], ["--loss=rebel", "--length_norm=False", "--beta=1.0"], ["--loss=simpo", "--beta=2.5"],
    ["--transform=log"], ["--transform=normal", "--optimizer=adamw"],
    ["--ties=discrete"], ["--pairs=best", "--loo=0"], ["--beta=0.1", "--length_norm=False"],
])
def test_each_loss_and_choice_runs_on_the_same_references(aligned, start, tmp_path, args):
    align(start, tmp_path / "run", f"--references={aligned / 'references'}", *args)
    assert all(math.isfinite(e["loss"]) for e in log(tmp_path / "run"))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_do_what_one_does(launch, aligned, start, tmp_path, parallel):
    """fsdp from the start, one of its ranks without a micro-batch; ddp goes on with what a killed process left."""
    if parallel == "ddp":
        shutil.copytree(aligned, tmp_path / "two")
        for name in sorted(os.listdir(tmp_path / "two" / "ckpt"))[1:]:
            shutil.rmtree(tmp_path / "two" / "ckpt" / name)
    micro_batch = 2 if parallel == "ddp" else 4
    args = [
        *arguments(start, tmp_path / "two"), f"--micro_batch={micro_batch}", "--epochs=2", "--device=cpu", "--resume",
        f"--parallel={parallel}",
    ]
    codes, text = launch(2, *args, script="posttrain.qrpo", logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]
    for one, two in zip(log(aligned), log(tmp_path / "two"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-6)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="torch.compile wants a C++ compiler")
@pytest.mark.parametrize("args", [[], ["--lora_r=4"]])
def test_compiled_its_losses_and_gradients_are_those_of_eager_torch(start, aligned, tmp_path, monkeypatch, args):
    """
    Over batches of other lengths; adapters run in turns with the base, which is their reference. The graphs and their
    gradients are torch.compile's, without the C++ that would take most of a minute.
    """
    graphs = functools.partialmethod(Apertus.compile_blocks, backend="aot_eager")
    monkeypatch.setattr(Apertus, "compile_blocks", graphs)
    how = [f"--references={aligned / 'references'}", *args]
    align(start, tmp_path / "eager", *how)
    before = counters["stats"]["unique_graphs"]
    align(start, tmp_path / "compiled", *how, "--compile=True")
    assert counters["stats"]["unique_graphs"] > before
    for eager, compiled in zip(log(tmp_path / "eager"), log(tmp_path / "compiled"), strict=True):
        assert compiled["loss"] == pytest.approx(eager["loss"], rel=1e-5, abs=1e-6)
        assert compiled["grad_norm"] == pytest.approx(eager["grad_norm"], rel=1e-4)


def test_an_aligned_model_exported_by_convert_chats_in_transformers_with_its_own_template(aligned, tmp_path):
    """Two turns, rendered by the template file in the export; the same greedy tokens, ended by the same token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    done = script("convert.py", f"--load={aligned}", f"--save={tmp_path / 'hf'}")
    assert done.returncode == 0, done.stderr
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    their_tok = AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours, tok = convert.load_run(str(aligned))
    with open(os.path.join(ROOT, "chat_template.jinja"), encoding="utf-8") as f:
        assert their_tok.chat_template == f.read()
    messages, how = ask("say 1"), dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
    for _ in range(2):
        ids = their_tok.apply_chat_template(messages, **how)["input_ids"]
        assert ids[0].tolist() == tok.chat(messages, add_generation_prompt=True)[1]
        said = generate(ours, ids, 30, temperature=0, stop=(tok.eos,))
        assert theirs.generate(ids, max_new_tokens=30, do_sample=False).tolist() == said.tolist()
        answer = tok.decode([i for i in said[0, ids.shape[1]:].tolist() if i != tok.eos])
        messages += [dict(role="assistant", content=answer), dict(role="user", content="say 2")]


# Two completions a prompt, (text, reward), and the rewards of its references. The better completion is the first,
# second, first and second; "é" is two tokens of one character; what is better is not what is longer.
COUPLES = [
    (("good", 2.0), ("bad é", 1.0), [0, 1.5, 1.5, 3]),
    (("no", -1.0), ("yes, of course", 0.5), [-2, -2, -2, 0]),
    (("é" * 9, 7.0), ("a", 6.5), [7, 7, 6.9, 1]),
    (("long and wrong", 0.25), ("ok", 0.75), [0.5, 0.5, 0.5, 0.5]),
]


def plain_loss(kind, lp, pair, beta, beta_max, gamma):
    """The loss of one pair, as the module's docstring has it, from its log-probs under the policy, the better first."""
    ref, q, size = pair["ref"], pair["q"], pair["size"]
    if kind == "qrpo":
        b = [min(beta / n, beta_max or math.inf) for n in size]
        return sum((q[k] - b[k] * pair["log_z"](b[k]) - b[k] * (lp[k] - ref[k])) ** 2 for k in (0, 1)) / 2
    if kind == "simpo":
        return -F.logsigmoid(beta * (lp[0] / size[0] - lp[1] / size[1] - gamma))
    g = [(lp[k] - ref[k]) / size[k] for k in (0, 1)]
    if kind == "dpo":
        return -F.logsigmoid(beta * (g[0] - g[1]))
    better, worse = pair["r"]
    return ((better - worse) / beta - (g[0] - g[1])) ** 2


@torch.no_grad()
def what_is_watched(batch, logp, beta, beta_max):
    """The log's numbers of a batch: the policy's own are means over the samples weighted by pi / pi_ref."""
    ratio, r, target = [], [], []
    for pair in batch:
        for k, said in enumerate(pair["said"]):
            b = min(beta / pair["size"][k], beta_max or math.inf)
            ratio.append(logp(*said) - pair["ref"][k])
            r.append(pair["r"][k])
            target.append(pair["q"][k] / b - pair["log_z"](b))
    ratio, r, target = (torch.tensor(x, dtype=torch.float64) for x in (ratio, r, target))
    w = ratio.exp() / ratio.exp().sum()
    return dict(
        log_ratio=ratio.mean().item(), margin=(ratio[::2] - ratio[1::2]).mean().item(), target=target.mean().item(),
        reward=r.mean().item(), reward_policy=(w * r).sum().item(), kl=(w * (w * len(w)).log()).sum().item(),
        tokens=sum(len(y) for pair in batch for _, y in pair["said"]),
    )


def plain_pair(tok, row, couple, refs, norm, ties):
    """What the loss knows of a prompt's two completions, the better one first, but for their log-probs."""
    prompt = tok.chat(row["messages"], add_generation_prompt=True)[1]
    couple = sorted(couple, key=lambda c: -c[1])
    said = [tok.encode(text) + [tok.special["<|assistant_end|>"]] for text, _ in couple]
    share = lambda r: sum(x <= r for x in refs) / len(refs)
    uniform = lambda b: math.log(b * math.expm1(1 / b))
    own = lambda b: math.log(sum(math.exp(share(r) / b) for r in refs) / len(refs))
    return dict(
        said=[(prompt, y) for y in said],
        r=[r for _, r in couple],
        q=[share(r) for _, r in couple],
        size=[len(y) if norm else 1 for y in said],
        log_z=own if ties == "discrete" else uniform,
    )


@pytest.mark.parametrize("kind, beta, norm, beta_max, ties, optimizer, clip", [
    ("qrpo", 0.3, False, 0.1, "le", "adamw", 1e9), ("qrpo", 2.0, True, 0.25, "le", "ademamix", 0.02),
    ("qrpo", 0.2, False, 0.0, "discrete", "adamw", 0.5),
    ("dpo", 0.7, False, 0.1, "le", "adamw", 0.05), ("dpo", 5.0, True, 0.1, "le", "ademamix", 1e9),
    ("rebel", 0.5, False, 0.1, "le", "adamw", 1e9), ("rebel", 4.0, True, 0.1, "le", "adamw", 0.05),
    ("simpo", 2.5, True, 0.1, "le", "adamw", 1e9), ("simpo", 0.4, False, 0.1, "le", "adamw", 0.01),
])
def test_from_pairs_to_weights_it_is_the_same_run_written_plainly_in_fp64(
    start, tmp_path, kind, beta, norm, beta_max, ties, optimizer, clip,
):
    """Two steps of two batches of two pairs: the right one is better, lengths are tokens, Z is the prompt's own."""
    rows = []
    for k, (*couple, refs) in enumerate(COUPLES):
        texts, rewards = zip(*couple)
        rows.append(dict(messages=ask(f"say {k}"), completions=texts, rewards=rewards, ref_rewards=refs))
    align(
        start, tmp_path / "run", broken(tmp_path, *rows), "--rewards=", "--n_refs=4", "--batch_size=2",
        "--micro_batch=1", f"--loss={kind}", f"--beta={beta}", f"--length_norm={norm}", f"--beta_max={beta_max}",
        f"--ties={ties}", f"--optimizer={optimizer}", f"--grad_clip={clip}", "--gamma=0.3", "--lr=1e-2", "--eps=1e-2",
        "--weight_decay=0.1", "--warmup=0.5", "--betas=(0.9,0.999,0.99)",
    )

    tok, plain = tokenizer.load("byte"), Plain(start / "model")
    logp = lambda prompt, y: plain.logp([*prompt, *y])[len(prompt) - 1:].sum()
    pairs = [plain_pair(tok, row, couple, refs, norm, ties) for row, (*couple, refs) in zip(rows, COUPLES)]
    for pair in pairs:
        pair["ref"] = [logp(*said).item() for said in pair["said"]]
    limit = beta_max if norm else 0
    for step in (0, 1):
        batch = [pairs[k] for k in common.items(step, 2, 4, 1, 28)]
        each = [plain_loss(kind, [logp(*said) for said in pair["said"]], pair, beta, limit, 0.3) for pair in batch]
        value = sum(each) / 2
        value.backward()
        entry = log(tmp_path / "run")[step]
        watched = dict(loss=value.item(), **what_is_watched(batch, logp, beta, limit))
        assert {name: entry[name] for name in watched} == pytest.approx(watched, rel=2e-5, abs=2e-5)
        plain.update(step + 1, 2, 1e-2 * (1, 0.5)[step], clip, 1e-2, 0.1, optimizer == "adamw")
    assert plain.distance(convert.load_run(str(tmp_path / "run"))[0]) < 1e-3


@pytest.fixture
def small(start, tmp_path, monkeypatch):
    """A small run's settings in posttrain/qrpo.py; its start model; prompts with two completions of their own."""
    path = tmp_path / "data.jsonl"
    write_rows(path, [dict(messages=ask(f"say {k}"), completions=["abc", "ab"]) for k in range(5)])
    values = dict(out=str(tmp_path / "run"), data=str(path), n_refs=5, max_new_tokens=9, sample_batch=10)
    for name, value in values.items():
        monkeypatch.setattr(qrpo, name, value)
    return common.start_model(str(start / "model"), "cpu", torch.float32)


@pytest.mark.parametrize("loo", [0, 1])
def test_candidates_are_finished_completions_with_their_quantile_among_the_others(
    small, start, tmp_path, monkeypatch, loo,
):
    """
    Counted by hand from the samples on disk; a completion of the data is compared with all references, a reference with
    the others. What would be too long is not sampled to its end.
    """
    monkeypatch.setattr(qrpo, "loo", loo)
    (model, tok), plain = small, Plain(start / "model")
    score = lambda row, text: 1.0 if "say 0" in str(row) else float(len(text) % 4)
    asked, _ = qrpo.prompts_of(tok, qrpo.data)
    longest = len(asked[0][2]) + 8
    reward = references.one_by_one(score)
    candidates, q_refs, groups, counts = qrpo.prepare(model, tok, asked, reward, "v", longest, Ranks(), "cpu")
    files = sorted((tmp_path / "run" / "references").glob("samples-*.json"))
    sampled = sum((json.loads(f.read_text()) for f in files), [])
    end, dropped = tok.special["<|assistant_end|>"], 0
    share = lambda r, among: sum(x <= r for x in among) / len(among)
    logp = lambda prompt, y: plain.logp(prompt + y)[len(prompt) - 1:].sum().item()
    for (_, row, prompt), ids, found, own, group in zip(asked, sampled, candidates, q_refs, groups, strict=True):
        r = [score(row, references.words(tok, y)) for y in ids]
        q = [share(r[k], r if not loo else r[:k] + r[k + 1:]) for k in range(5)]
        assert own.tolist() == pytest.approx(q) and group.tolist() == r
        every = list(zip(ids, r, q))
        for text in ("abc", "ab"):
            reward = score(row, text)
            every.append((tok.encode(text) + [end], reward, share(reward, r)))
        want = [(y, r, q) for y, r, q in every if y[-1] == end and len(y) <= 8]
        dropped += 7 - len(want)
        if len({r for _, r, _ in want}) > 1:
            assert [(c["ids"], c["reward"], c["q"]) for c in found] == [(y, r, pytest.approx(q)) for y, r, q in want]
            assert [c["ref_logp"] for c in found] == pytest.approx([logp(prompt, y) for y, _, _ in want], abs=1e-4)
        else:
            assert found == []
    assert len(files) == 3 and counts["dropped"] == dropped > 0
    assert any(candidates) and counts["constant"] == candidates.count([]) > 0
    assert max(len(y) for ids in sampled for y in ids) == 8


def test_a_reference_ends_where_it_calls_a_tool_whose_output_it_would_make_up(tmp_path, monkeypatch):
    """It has no end of turn then, and what has none is left out."""
    tok = tokenizer.load("byte")
    shape = dict(block_size=64, vocab_size=320, n_layer=1, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=16)
    calls, end = [tok.special[f"<|{name}|>"] for name in ("tools_suffix", "assistant_end")]
    said = iter([calls, 200, end])
    monkeypatch.setattr(generate_file, "sample_token", lambda logits, **_: torch.tensor([next(said)]))
    monkeypatch.setattr(qrpo, "n_refs", 1)
    asked = [(1, dict(messages=[]), [1, 100])]
    drawn = qrpo.sample(
        Apertus(ApertusConfig(**shape)), tok, asked, lambda row, texts: [0.0], 64,
        functools.partial(references.cached, str(tmp_path), Ranks()), Ranks(), "cpu",
    )
    assert drawn == [[[calls]]] and next(said) == 200


def test_every_batch_of_samples_and_every_seed_draws_anew(small, tmp_path, monkeypatch):
    """The same prompt four times, one in a file."""
    model, tok = small
    (tmp_path / "data.jsonl").write_text('{"messages": [{"role": "user", "content": "say 1"}]}\n' * 4)
    monkeypatch.setattr(qrpo, "sample_batch", 5)
    drawn = []
    for seed in (1, 2):
        monkeypatch.setattr(qrpo, "seed", seed)
        monkeypatch.setattr(qrpo, "out", str(tmp_path / str(seed)))
        asked, _ = qrpo.prompts_of(tok, qrpo.data)
        qrpo.prepare(model, tok, asked, references.one_by_one(lambda row, text: len(text)), "v", 256, Ranks(), "cpu")
        drawn += [f.read_text() for f in (tmp_path / str(seed) / "references").glob("samples-*.json")]
    assert len(drawn) == len(set(drawn)) == 8


def test_log_probs_that_are_not_the_start_models_are_refused(aligned, start, tmp_path):
    shutil.copytree(aligned / "references", tmp_path / "references")
    for file in (tmp_path / "references").glob("logp-*.json"):
        file.write_text(json.dumps([x - 5 for x in json.loads(file.read_text())]))
    last = refused(start, tmp_path / "run", f"--references={tmp_path / 'references'}")
    assert "differs from its own reference log-probs" in last
    assert not (tmp_path / "run" / "ckpt").exists()


def test_pairs_are_disjoint_and_the_better_one_comes_first(monkeypatch):
    """None is of equal rewards, and each prompt has a draw of its own."""
    monkeypatch.setattr(qrpo, "pairs_per_prompt", 0)
    distinct = [dict(reward=float(k * 7 % 10), q=k / 10) for k in range(10)]
    pools = [distinct, [dict(reward=1.0, q=0.5)] * 4, [], [dict(reward=2.0, q=1.0)]]
    found = qrpo.make_pairs(pools, 10)
    assert len(found) == 5 and sorted(k for _, *pair in found for k in pair) == list(range(10))
    assert all(i == 0 and pools[0][a]["reward"] > pools[0][b]["reward"] for i, a, b in found)
    twice = qrpo.make_pairs(pools[:1] * 2, 10)
    assert {pair[1:] for pair in twice[:5]} != {pair[1:] for pair in twice[5:]}
    monkeypatch.setattr(qrpo, "seed", 29)
    assert qrpo.make_pairs(pools, 10) != found
    monkeypatch.setattr(qrpo, "pairs_per_prompt", 2)
    assert len(qrpo.make_pairs(pools, 10)) == 2


def test_best_pairs_set_the_best_against_the_worst_fifth_or_the_worst_of_a_few(monkeypatch):
    """Apertus: quantile <= max(.2, 1/n). The one of quantile .3 is taken where n = 3."""
    monkeypatch.setattr(qrpo, "pairs", "best")
    monkeypatch.setattr(qrpo, "pairs_per_prompt", 0)
    pool = [dict(reward=float(k), q=k / 10) for k in (3, 1, 10, 2, 0, 9)]
    assert sorted(qrpo.make_pairs([pool], 10)) == [(0, 2, 1), (0, 2, 3), (0, 2, 4)]
    assert sorted(qrpo.make_pairs([pool], 3)) == [(0, 2, 0), (0, 2, 1), (0, 2, 3), (0, 2, 4)]
    assert qrpo.make_pairs([[dict(reward=1.0, q=0.1)] * 3], 10) == []


def test_offline_data_with_rewards_needs_no_sampling(start, tmp_path):
    completions = dict(completions=["good", "bad", "fair"], rewards=[2, 0, 1], ref_rewards=[0.5, 1.5, 0.1])
    rows = [dict(messages=[dict(role="user", content=f"q{i}")], **completions) for i in range(4)]
    write_rows(tmp_path / "data.jsonl", rows)
    align(start, tmp_path / "run", f"--data={tmp_path / 'data.jsonl'}", "--rewards=", "--n_refs=3", "--epochs=3")
    assert not any(f.startswith("samples") for f in os.listdir(tmp_path / "run" / "references"))
    assert all(e["reward"] in (0.5, 1.0, 1.5) for e in log(tmp_path / "run"))


def broken(tmp_path, *rows):
    (tmp_path / "data.jsonl").write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return f"--data={tmp_path / 'data.jsonl'}"


USER = dict(role="user", content="hi")
ASKED = dict(messages=[USER])
ANSWERED = dict(messages=[USER], completions=["a", "b"])


@pytest.mark.parametrize("row, args, says", [
    (dict(ANSWERED, rewards=[1, 2], ref_rewards=[1, 2]), ["--rewards="], "line 1: ref_rewards"),
    (dict(ANSWERED, rewards=[1, float("nan")], ref_rewards=[1] * 6), ["--rewards="], "line 1: rewards"),
    (ANSWERED, ["--rewards="], "line 1: no ref_rewards there, and no --rewards"),
    (dict(ANSWERED, rewards=[1, 1], ref_rewards=[1] * 6), ["--rewards="], "nothing to learn from"),
    (dict(messages=[USER, dict(role="assistant", content="x")]), [],
     "its last message is not the user's (first in line 1)"),
    (dict(messages=[]), [], "no messages (first in line 1)"),
    (ASKED, ["--loss=ppo"], "there is qrpo, dpo, rebel, simpo"),
    (ASKED, ["--n_refs=1"], "at least 2 with loo=1"),
    (ASKED, ["--ties=some"], "there is ties=le and discrete, pairs=random and best"),
    (ASKED, ["--pairs=some"], "there is ties=le and discrete, pairs=random and best"),
    (ASKED, ["--transform=some", "--init_from=nowhere"], "transform='some': there is identity, "),
    (ASKED, ["--max_length=257"], "max_length=257 is beyond the window of the start model, 256 tokens"),
    (ASKED, ["--rewards=nowhere.py"], "there is no file nowhere.py"),
    (ASKED, ["--max_length=10"], "nothing to learn from"),
    ("{", [], "line 1: want a JSON object"),
])
def test_what_cannot_work_is_told_in_one_line(start, tmp_path, row, args, says):
    assert says in refused(start, tmp_path / "run", broken(tmp_path, row), *args)


@pytest.mark.parametrize("body, says", [
    ("1 / 0 if '4' in prompt else 1.0", "line 5: .*ZeroDivisionError"),
    ("float('nan')", "line 1: .*gave nan"),
    ("'good'", "line 1: .*ValueError"),
])
def test_a_reward_function_that_fails_names_the_row_and_the_run_goes_on_from_its_references(
    start, tmp_path, body, says,
):
    reward = tmp_path / "reward.py"
    assert re.search(says, refused(start, tmp_path / "run", write_reward(reward, body)))
    samples = tmp_path / "run" / "references" / "samples-10-0000000.json"
    before = samples.stat().st_mtime_ns
    repaired = write_reward(reward, "len(completion) + sum(map(ord, completion)) / 1e4")
    align(start, tmp_path / "run", repaired, "--resume")
    assert samples.stat().st_mtime_ns == before


@pytest.mark.parametrize("signature, body, want", [
    ("prompt, completion", "f'{prompt}|{completion}'", "second|yes"),
    ("prompt, completion, **kw", "f'{prompt}|{completion}|{kw}'", "second|yes|{}"),
    ("prompt, completion, row", "row['gold']", 7), ("prompt, completion, row=None", "row['gold']", 7),
    ("*all", "all[2]['gold']", 7), ("prompt, completion, *, weight=3", "weight", 3),
])
def test_a_reward_function_gets_the_last_question_the_answer_and_the_line_if_it_wants_it(
    tmp_path, signature, body, want,
):
    (tmp_path / "r.py").write_text(f"def judge({signature}):\n    return {body}\n")
    first, answer = dict(role="user", content="first"), dict(role="assistant", content="x")
    second = dict(role="user", content=[dict(type="text", text="sec"), dict(type="text", text="ond")])
    row = dict(messages=[first, answer, second], gold=7)
    assert list(references.load_reward(f"{tmp_path / 'r.py'}:judge", "cpu")(row, ["yes"])) == [want]


def test_a_reward_is_known_by_its_content_and_its_name(tmp_path):
    """In whatever folder it is."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "r.py").write_text("def one(p, c): return 1\ndef two(p, c): return 2\n")

    def hashes(folder):
        file = folder / "r.py"
        return [references.reward_hash(spec) for spec in (f"{file}:one", f"{file}:two")]

    before = hashes(tmp_path / "a")
    assert len(set(before)) == 2 and before == hashes(tmp_path / "b")
    (tmp_path / "a" / "r.py").write_text("def one(p, c): return 2\ndef two(p, c): return 2\n")
    assert not set(before) & set(hashes(tmp_path / "a")) and references.reward_hash("") == ""


def test_scores_of_another_function_of_the_same_file_are_not_reused(start, tmp_path):
    (tmp_path / "r.py").write_text("def one(p, c):\n    return len(c)\ndef two(p, c):\n    return -len(c)\n")
    for name in ("one", "two"):
        own = f"--rewards={tmp_path / 'r.py'}:{name}"
        align(start, tmp_path / name, own, f"--references={tmp_path / 'references'}")
    scores = [json.loads(f.read_text()) for f in (tmp_path / "references").glob("rewards-*.json")]
    assert len(scores) == 2 and [[-r for r in refs] for refs, _ in scores[0]] == [refs for refs, _ in scores[1]]
    assert log(tmp_path / "one")[0]["reward"] > 0 > log(tmp_path / "two")[0]["reward"]


def test_a_reward_that_fails_is_told_before_all_is_sampled(start, tmp_path):
    """With the file, the function and the error, in one line, after the first batch of samples."""
    (tmp_path / "r.py").write_text("def judge(prompt, completion):\n    raise KeyError('a\\nb')\n")
    last = refused(start, tmp_path / "run", f"--rewards={tmp_path / 'r.py'}:judge", "--sample_batch=6")
    assert f"{tmp_path / 'r.py'}:judge failed on completion" in last and "KeyError: " in last
    assert len(list((tmp_path / "run" / "references").glob("samples-*"))) == 1


def test_a_reward_that_cannot_be_read_is_told_before_anything_is_sampled(start, tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    last = refused(start, tmp_path / "run", f"--rewards={tmp_path / 'broken.py'}")
    assert "broken.py cannot be read (ModuleNotFoundError: " in last
    assert not list((tmp_path / "run").glob("references/samples-*"))


def test_a_setting_that_changes_the_numbers_is_compared_on_resume_and_named(aligned, start):
    """All of them but where things lie, what they run on, and what is printed and kept; a reward by its content."""
    folder = sorted((aligned / "ckpt").iterdir())[-1]
    manifest = checkpoint.read_manifest(folder)
    model, tok = common.start_model(str(start / "model"), "cpu", torch.float32)
    opt = ademamix.build_optimizer(model, "ademamix", 1e-3, (0.9, 0.999, 0.99), 8.0, 1e-8, 0.0, 12, 12)
    free = {"out", "data", "rewards", "references", "resume", "device", "parallel", "micro_batch", "rank_every",
            "compile", "routes", "checkpoint_every", "keep_checkpoints", "recompute", "old", "old_every", "old_windows"}
    # Where all weights are trained, what adapters would be like.
    free |= {"lora_alpha", "lora_on", "lora_rs", "base", "start_hash"}
    compared = manifest["config"].keys() - free
    assert {"lr", "warmup", "pairs", "transform", "ties", "loo", "gamma", "beta_max", "date"} <= compared
    assert {"rewards_hash", "data_hash"} <= compared
    for key in manifest["config"]:
        other = {**manifest["config"], key: "another"}
        if key in free:
            assert common.go_on(aligned, model, opt, other, Ranks()) == manifest["step"]
        else:
            with pytest.raises(ValueError, match=f"is of another run: {key} .* -> 'another'"):
                common.go_on(aligned, model, opt, other, Ranks())
    other = write_reward(start / "other.py", "len(completion)")
    assert "is of another run: rewards_hash" in refused(start, aligned, "--epochs=2", "--resume", other)


def test_asked_to_stop_it_saves_leaves_with_0_and_resumes_to_the_same_bits(aligned, start, tmp_path, monkeypatch):
    diagnose = collapse.diagnose

    def ask_to_stop(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return diagnose(*args)
    monkeypatch.setattr(collapse, "diagnose", ask_to_stop)
    assert "stopped as asked after step 2 of " in align(start, tmp_path / "run", "--epochs=2")
    assert os.listdir(tmp_path / "run" / "ckpt") == ["step-00000002"]
    monkeypatch.undo()
    align(start, tmp_path / "run", "--epochs=2", "--resume")
    assert same_bits(aligned, tmp_path / "run")


def test_sft_and_qrpo_run_where_there_is_no_posix(launch, start, tmp_path):
    """Windows, as far as it can be had here (tests/faults/launch.py): no fcntl, SIGUSR2, fork, uname."""
    sizes = ["--n_refs=3", "--max_new_tokens=30"]
    scripts = {
        "posttrain/sft.py": [f"--data={start / 'chats.jsonl'}"],
        "posttrain/qrpo.py": [f"--data={start / 'prompts.jsonl'}", f"--rewards={start / 'reward.py'}", *sizes],
    }
    same = ["--dtype=float32", "--device=cpu", "--batch_size=12", "--rank_every=0"]
    for script, args in scripts.items():
        out = tmp_path / script
        where = [f"--init_from={start / 'model'}", f"--out={out}"]
        codes, text = launch(0, *where, *args, *same, script=script, logs=tmp_path / "log", fault="windows")
        assert codes == [0] and (out / "hf" / "model.safetensors").exists(), text[-3000:]


def test_a_second_run_in_the_same_folder_is_refused_and_touches_nothing(start, tmp_path):
    with checkpoint.claim(str(tmp_path / "run")):
        assert "another run is writing there" in refused(start, tmp_path / "run")
        assert os.listdir(tmp_path / "run") == [".lock"]


def test_only_one_process_reads_what_references_are_made_from(tmp_path):
    """Another would meet a file half written: here it is, and rank 1 does not look."""
    path = tmp_path / "settings.json"
    path.write_text('{"start": "ab')
    references.same_or_refuse(str(path), dict(start="abc"), SimpleNamespace(first=False, files=None))
    path.unlink()
    references.same_or_refuse(str(path), dict(start="abc"), Ranks())
    assert json.loads(path.read_text()) == dict(start="abc")
    with pytest.raises(ValueError, match="references of other settings: start 'abc' -> 'other'"):
        references.same_or_refuse(str(path), dict(start="other"), Ranks())
    with pytest.raises(ValueError, match="references of other settings: seed None -> 1"):    # of an older version
        references.same_or_refuse(str(path), dict(start="abc", seed=1), Ranks())


def test_runs_that_share_references_do_not_write_into_each_others_half_files(tmp_path):
    (tmp_path / "settings.json.tmp").write_text("half of another's")
    references.same_or_refuse(str(tmp_path / "settings.json"), dict(start="abc"), Ranks())
    assert (tmp_path / "settings.json.tmp").read_text() == "half of another's"


def test_ranks_make_a_share_of_the_references_each_and_read_all(tmp_path):
    """Where ranks wait for one another, the other one of two has its turn."""
    made = {0: [], 1: []}

    def entries(rank, wait):
        def compute(k, part):
            made[rank] += part
            return [2 * x for x in part]
        ranks = SimpleNamespace(rank=rank, size=2, first=rank == 0, files=None, add=wait)
        return references.cached(str(tmp_path), ranks, "doubles", list(range(9)), 2, compute)

    class Waits(Exception):
        pass

    def wait(_):
        raise Waits
    for rank in (0, 1):
        with pytest.raises(Waits):
            entries(rank, wait)
    assert made == {0: [0, 1, 4, 5, 8], 1: [2, 3, 6, 7]}
    assert entries(0, lambda _: None) == entries(1, lambda _: None) == [2 * x for x in range(9)]
    assert sum(map(len, made.values())) == 9


def test_prompts_are_of_a_fixed_day_and_openai_content_is_its_text(tmp_path, monkeypatch):
    """A run over midnight trains on the prompts that it sampled with."""
    tok, asked = tokenizer.load("byte"), [dict(role="user", content="what day is it?")]
    listed = [dict(role="user", content=[dict(type="text", text="what day "), dict(type="text", text="is it?")])]
    picture = dict(messages=[dict(role="user", content=[dict(type="image_url")])])
    odd = dict(messages=listed, completions="no list"), picture, dict(messages=listed, completions=[5])
    broken(tmp_path, dict(messages=asked), *odd, dict(messages=listed))
    found, bad = qrpo.prompts_of(tok, str(tmp_path / "data.jsonl"))
    want = tok.chat(asked, add_generation_prompt=True, date="2025-09-02")[1]
    assert [(line, ids) for line, _, ids in found] == [(1, want), (5, want)]
    assert bad == {"completions that are not a list of texts": (2, "line 2"), chat.ODD: (1, "line 3")}
    monkeypatch.setattr(qrpo, "date", "2026-01-31")
    want = tok.chat(asked, add_generation_prompt=True, date="2026-01-31")[1]
    assert qrpo.prompts_of(tok, str(tmp_path / "data.jsonl"))[0][0][2] == want


def test_odd_prompts_are_left_out_and_told_in_one_line(start, tmp_path):
    good, odd = dict(messages=ask("say 1")), dict(messages=[dict(role="user", content=5)])
    printed = align(start, tmp_path / "run", broken(tmp_path, good, odd, good, dict(messages=[])))
    line = f"left out 2 of 4 prompts: 1 {chat.ODD} (first in line 2); 1 no messages (first in line 4)\n"
    assert line in printed


def test_references_of_another_start_model_or_tokenizer_are_refused(aligned, start, tmp_path):
    model = Apertus(ApertusConfig(**{**TINY, "vocab_size": 1088}))
    convert.save_hf(model, str(tmp_path / "other"), tokenizer.load("apertus:1024"))
    other = f"--init_from={tmp_path / 'other'}"
    last = refused(start, tmp_path / "run", other, f"--references={aligned / 'references'}")
    assert "references of other settings" in last and "tokenizer" in last
    last = refused(start, tmp_path / "run1", "--max_length=200", f"--references={aligned / 'references'}")
    assert "references of other settings: max_length 256 -> 200" in last
    # A model with the tokenizer of another one.
    shutil.copytree(start / "model", tmp_path / "mixed")
    shutil.copy(tmp_path / "other" / "tokenizer.json", tmp_path / "mixed")
    assert "do not belong together" in refused(start, tmp_path / "run2", f"--init_from={tmp_path / 'mixed'}")


def test_a_run_is_not_gone_on_with_by_another_beta(aligned, start):
    assert "is of another run: beta 0.0 -> 0.3" in refused(start, aligned, "--resume", "--epochs=2", "--beta=0.3")


def test_the_warning_of_ties_asks_for_as_much_as_by_hand(monkeypatch):
    """
    Half pass, so that quantiles are 1/2 and 1. With b = beta / |y| = 5 / 10 the targets ask for
    (e^(1/2b) + e^(1/b)) / 2 of Z = b (e^(1/b) - 1).
    """
    monkeypatch.setattr(qrpo, "beta_max", 0.0)
    [line] = qrpo.warn_of_ties([torch.tensor([0.0, 0.0, 1.0, 1.0])], 10.0)
    mass = (math.e + math.e**2) / 2 / (0.5 * (math.e**2 - 1))
    assert line.startswith("warning: 33% of reference pairs tie") and f"for {mass:.2f} times the probability" in line


def test_pass_or_fail_is_warned_about(start, tmp_path):
    how = [write_reward(tmp_path / "reward.py", "len(completion) % 4 == 0"), "--length_norm=False", "--beta=0.1"]
    printed = align(start, tmp_path / "run", *how)
    assert "% of reference pairs tie" in printed and "--ties=discrete" in printed
    assert "reference pairs tie" not in align(start, tmp_path / "run2", *how, "--ties=discrete")


def test_a_reward_reads_words_and_no_control_tokens():
    """As transformers' decode(skip_special_tokens=True): only <email-pii> is text, all others are silent."""
    tok = tokenizer.load("byte")
    names = ("<|inner_prefix|>", "<|inner_suffix|>", "<email-pii>", "<|user_start|>", "<|assistant_end|>")
    said = [tok.special[name] for name in names]
    ids = [*said[:1], *tok.encode("hm "), said[1], *tok.encode("12 "), *said[2:]]
    assert references.words(tok, ids) == "hm 12 <email-pii>"


def test_the_demonstration_measures_a_model_against_itself_as_equal(start, tmp_path, monkeypatch):
    """out/sft and its export are one model. The table has a head, a rule, sft, qrpo, dpo and the closed form."""
    monkeypatch.setattr(digits, "n_refs", 3)
    monkeypatch.setattr(digits, "out", str(tmp_path))
    convert.save_hf(Apertus(ApertusConfig(**TINY), seed=5), str(tmp_path / "qrpo-s0"), tokenizer.load("byte"))
    shutil.copytree(start / "sft", tmp_path / "dpo-s0")
    runs = {"qrpo-s0": ("qrpo", 1e-3, 0.3, 0), "dpo-s0": ("dpo", 1e-3, 1.0, 0)}
    rows = digits.measure(runs, str(start / "model"), digits.tasks()[2][:4], 0.3)
    sft, same, other = rows["sft"], rows["dpo-s0"], rows["qrpo-s0"]
    assert sft["kl"] == 0 and same["kl"] == pytest.approx(0, abs=1e-6) and other["kl"] > 1
    assert same["reward"] == sft["reward"] and len(sft["points"]) == 12
    digits.draw(rows, 0.3, str(tmp_path / "align.png"))
    table = digits.table(rows, 0.3)
    assert "| closed form, beta 0.3 | | | 0.737 | 0.36 | | 1 | 0 |" in table and table.count("\n") == 6
    assert (tmp_path / "align.png").stat().st_size > 1000


def test_the_demonstration_measures_what_its_page_says(start, tmp_path, monkeypatch):
    """Against the same samples, scored here one by one; a qrpo run is held against the formula with its own beta."""
    for name, value in dict(n_refs=4, samples=3, out=str(tmp_path)).items():
        monkeypatch.setattr(digits, name, value)
    monkeypatch.setattr(digits, "reward", lambda prompt, text: (0.0, -1.0, -2.0, -3.0, -30.0)[len(text) % 5])
    tests, tok = digits.tasks()[2][:3], tokenizer.load("byte")
    end = tok.special["<|assistant_end|>"]
    convert.save_hf(Apertus(ApertusConfig(**TINY), seed=5), str(tmp_path / "qrpo-s0"), tok)
    shutil.copytree(tmp_path / "qrpo-s0", tmp_path / "dpo-s0")
    runs = {"qrpo-s0": ("qrpo", 1e-3, 0.5, 0), "dpo-s0": ("dpo", 1e-3, 9.0, 0)}
    rows = digits.measure(runs, str(start / "model"), tests, 0.2)

    prompts = [tok.chat(digits.question(*t), add_generation_prompt=True)[1] for t in tests]

    def draw(folder, seed, n):
        asked = [p for p in prompts for _ in range(n)]
        model, generator = convert.load_any(str(folder))[0], torch.Generator().manual_seed(seed)
        done = generate(model, asked, 24, stop=(end,), generator=generator)
        return [(p, ids[len(p):]) for p, ids in zip(asked, done)]
    score = lambda y: (0, -1, -2, -3, -30)[len(references.words(tok, y)) % 5]
    plain, ours = Plain(start / "model"), Plain(tmp_path / "qrpo-s0")
    ratio = lambda p, y: (ours.logp(p + y) - plain.logp(p + y))[len(p) - 1:].sum().item()
    # Of each of three prompts: four references, and three samples of the trained model.
    refs, said = draw(start / "model", 1000, 4), draw(tmp_path / "qrpo-s0", 2000, 3)
    r, of_refs = [score(y) for _, y in said], [score(y) for _, y in refs]
    groups = [of_refs[k:k + 4] for k in (0, 4, 8)]
    q = [sum(x <= own for x in group) - 1 for group in groups for own in group]
    no_better = sum(x <= r[k] for k in range(9) for x in groups[k // 3])
    got = [ratio(*pair) for pair in refs]
    close = lambda x: pytest.approx(x, abs=1e-3)
    for name, beta in (("qrpo-s0", 0.5), ("dpo-s0", 0.2)):
        want = [(x / 3 - beta * math.log(beta * math.expm1(1 / beta))) / beta for x in q]
        row = rows[name]
        assert row["reward"] == close(sum(r) / 9) and row["exact"] == close(r.count(0) / 9)
        assert row["malformed"] == close(r.count(-30) / 9)
        assert row["length"] == close(sum(len(y) for _, y in said) / 9)
        assert row["quantile"] == close(no_better / 36)
        assert row["kl"] == close(sum(ratio(*pair) for pair in said) / 9)
        assert row["agreement"] == close(np.corrcoef(want, got)[0, 1])
        assert row["error"] == close(math.sqrt(sum((a - b) ** 2 for a, b in zip(want, got)) / 12))


def test_the_demonstrations_teacher_gives_about_the_right_sum():
    rng = np.random.default_rng(0)
    for total, first in ((49, 1), (10, 9), (27, 4)):
        said = [digits.teacher(rng, total, first) for _ in range(200)]
        assert all(s.isdecimal() and 4 <= len(s) <= 8 and s[0] == str(first) for s in said)
        assert abs(sum(sum(map(int, s)) for s in said) / 200 - total) < 4


def test_the_demonstration_reports_seeds_and_prompts_that_chose_nothing(tmp_path, monkeypatch):
    """
    Each loss is tuned on the validation prompts with seed 1000, then reported on the test prompts with seeds 0, 1, ...;
    spread over them is n - 1. The last run of each is the best here.
    """
    calls, measured = [], []
    names = dict(
        out=str(tmp_path), results=str(tmp_path / "results"), tuning=str(tmp_path / "tuning.json"), start="given",
        methods="qrpo,dpo", n_conversations=5, seeds=3,
    )
    for name, value in names.items():
        monkeypatch.setattr(digits, name, value)

    def measure(runs, sft, tests, beta):
        measured.append((set(runs), tests, beta))
        numbers = dict(exact=0.5, malformed=0, quantile=0.5, kl=1, length=5, agreement=0.5, error=1, points=[])
        return {name: dict(numbers, reward=-9.0 + 2 * k) for k, name in enumerate(["sft", *runs])}

    def call(name, done, script, *args, **how):
        calls.append((name, script, dict(a.split("=") for a in args if "=" in a)))
        return {}
    monkeypatch.setattr(digits, "measure", measure)
    monkeypatch.setattr(digits, "draw", lambda *args: None)
    monkeypatch.setattr(digits, "call", call)
    digits.main()
    (tuned, on, _), (reported, on_test, beta) = measured
    assert on == digits.tasks()[1] and on_test == digits.tasks()[2] and len(tuned) == 40
    assert reported == {f"{m}-s{s}" for m in ("qrpo", "dpo") for s in range(3)}
    chosen = json.loads((tmp_path / "tuning.json").read_text())["chosen"]
    assert beta == chosen["qrpo"]["beta"] == 3.0 and chosen["dpo"] == dict(lr=3e-3, beta=10.0)
    for name, script, args in calls:
        if script == "posttrain.qrpo":
            method, seed = name.split("-")[:2] if name.startswith("tune") else name.split("-s")
            seed = "1000" if name in tuned else seed
            assert args["--seed"] == seed and args["--references"] == f"{tmp_path}/references-s{seed}"
            if name not in tuned:
                best = chosen[method]
                assert (args["--loss"], args["--beta"], args["--lr"]) == (method, str(best["beta"]), str(best["lr"]))
    same = ("0.500 ± 0.000", "1.00 ± 0.00", "5.00 ± 0.00", "0.50 ± 0.00", "1.00 ± 0.00")
    row = f"| qrpo | -5.00 ± 2.00 | 50.0% ± 0.0% | {' | '.join(same)} |"
    assert row in (tmp_path / "results" / "table.md").read_text()
    # What the mocked scripts would have read: 5 conversations, and a prompt for each of 240 tasks.
    assert [sum(1 for _ in open(tmp_path / f"{file}.jsonl")) for file in ("conversations", "prompts")] == [5, 240]


def test_the_demonstration_chooses_rates_and_betas_on_prompts_of_their_own(monkeypatch):
    train, validation, test = map(set, digits.tasks())
    assert (len(train), len(validation), len(test)) == (240, 60, 60) and len(train | validation | test) == 360
    # As many betas for each loss, each about three times the one before.
    for grid in digits.GRIDS.values():
        assert all(2.8 < b / a < 3.6 for a, b in zip(grid, grid[1:]))
    assert {len(grid) for grid in digits.GRIDS.values()} == {4} and set(digits.GRIDS) == set(losses.losses)
    runs = {f"tune-{m}-{b}": (m, 1e-3 * b, b, 1000) for m in ("qrpo", "dpo") for b in (0.1, 0.3, 1.0)}
    rewards = dict(zip(runs, (-9, -5, -6, -4, -8, -7)))
    want = {"qrpo": dict(lr=3e-4, beta=0.3), "dpo": dict(lr=1e-4, beta=0.1)}
    assert digits.choose({name: dict(reward=r) for name, r in rewards.items()}, runs) == want
    monkeypatch.setattr(digits, "methods", "qrpo,ppo")
    with pytest.raises(ValueError, match="there is qrpo, dpo"):
        digits.main()


def test_the_demonstration_takes_up_only_runs_of_the_same_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(digits, "out", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = tmp_path / "run" / "done"
    done.parent.mkdir()
    hello = tmp_path / "hello.py"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    threads = "print(os.environ['OMP_NUM_THREADS'])"
    hello.write_text(f"import os, sys\nopen({str(done)!r}, 'a').write(sys.argv[1])\n{threads}\n")
    for _ in range(2):
        assert digits.call("run", str(done), "hello", "x")["args"] == ["x"]
    assert done.read_text() == "x"      # run once
    # Several runs share the machine.
    assert (tmp_path / "run.txt").read_text() == "1\n"
    with pytest.raises(ValueError, match="made with other settings"):
        digits.call("run", str(done), "hello", "y")
    hello.write_text("raise ValueError('no way')\n")
    with pytest.raises(ValueError, match="failed: ValueError: no way"):
        digits.call("other", str(tmp_path / "none"), "hello")


def test_a_script_has_the_gpu_and_the_threads_that_it_was_given_and_its_last_line_is_told(tmp_path, monkeypatch):
    for name, value in dict(PYTHONPATH=tmp_path, CUDA_VISIBLE_DEVICES="0,1", OMP_NUM_THREADS=3).items():
        monkeypatch.setenv(name, str(value))
    names = "os.environ['CUDA_VISIBLE_DEVICES'], os.environ['OMP_NUM_THREADS']"
    (tmp_path / "says.py").write_text(f"import os\nprint('first')\nprint({names})\n")
    assert kit.run_script("says", [], f"{tmp_path}/log") == (0, "0,1 3")
    assert kit.run_script("says", [], f"{tmp_path}/log", threads=2, device=1) == (0, "1 2")


def test_the_demonstration_runs_where_processes_do_not_tell_their_seconds(tmp_path, monkeypatch):
    """os.wait4 is Unix alone."""
    monkeypatch.setattr(digits, "out", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delattr(os, "wait4")
    (tmp_path / "good.py").write_text("print('done')")
    assert digits.call("good", "nowhere", "good", "x").keys() == {"args", "wall"}
    (tmp_path / "bad.py").write_text("raise SystemExit('no')")
    with pytest.raises(ValueError, match="failed: no"):
        digits.call("bad", "nowhere", "bad")


def test_the_demonstrations_reward_is_what_its_page_says():
    assert digits.reward("Sum 27, first 4", "4797") == 0 and digits.reward("Sum 27, first 4", "45") == -18
    for no_answer in ("5499", "4 x", ""):
        assert digits.reward("Sum 27, first 4", no_answer) == -30
