"""qrpo.py against the published implementations' numbers, closed forms and a policy small enough to enumerate; then as a user runs it."""
import json
import math
import os
import shutil
import sys

import pytest
import torch
import torch.nn.functional as F

import convert
import qrpo
import rank
import tokenizer
from configurator import configure
from conftest import ROOT, script
from model import Apertus, ApertusConfig

GOLDEN = json.load(open(os.path.join(os.path.dirname(__file__), "golden", "preference_losses.json")))


def golden(name):
    return torch.tensor(GOLDEN["inputs"][name], dtype=torch.float64)


def both(name):
    return torch.stack((golden(f"{name}_chosen"), golden(f"{name}_rejected")), -1)


def case_id(c):
    return "-".join(str(c[k]) for k in ("loss", "transform", "beta") if k in c) + ("-length" if c.get("length_norm") else "")


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=case_id)
def test_losses_are_the_published_implementations(case):
    """Their identity transform drops log(1 - e^(-1/beta)) from log Z; with that it is 1e-6, and without it off by what the term is worth."""
    kind = {"normal-icdf": "normal"}.get(case.get("transform"), case.get("transform", "identity"))
    length = both("len") if case.get("length_norm", case["loss"] == "simpo") else 1.0
    q = qrpo.TRANSFORMS[kind](qrpo.quantile(both("reward"), golden("ref_rewards")[:, None]), 7)
    b = qrpo.effective_beta(q, length, case["beta"], case.get("clamp", 0.0))
    def value(log_z):
        return qrpo.losses[case["loss"]](both("policy_logp"), both("ref_logp"), both("reward"), q, length, case["beta"], beta_max=case.get("clamp", 0.0),
                                         gamma=case.get("gamma_beta_ratio"), transform=kind, log_z=log_z)
    want = torch.tensor(case["value"], dtype=torch.float64)
    torch.testing.assert_close(value(b * b.log() + 1 if kind == "identity" else None), want, rtol=1e-5, atol=0)
    torch.testing.assert_close(value(None), want, rtol=1e-5 if case["beta"] < 0.1 else 5e-5, atol=0)


# -----------------------------------------------------------------------------
# closed forms


def uniform_mean(f, n=400):
    """The integral of f over (0, 1) by Gauss-Legendre on 20 panels, exact to rounding for smooth f."""
    import numpy as np
    x, w = np.polynomial.legendre.leggauss(n)
    panels = np.linspace(0, 1, 21)
    return sum((f(torch.tensor((x + 1) / 2 * (b - a) + a)) * torch.tensor(w) * (b - a) / 2).sum().item() for a, b in zip(panels, panels[1:]))


@pytest.mark.parametrize("beta", [0.01, 0.03, 0.1, 0.3, 1.0, 5.0])
def test_partition_function_and_optimum_are_the_integrals(beta):
    z = uniform_mean(lambda t: torch.exp((t - 1) / beta))                     # Z e^(-1/beta), which does not overflow
    assert qrpo.beta_log_z(beta) == pytest.approx(beta * math.log(z) + 1, abs=1e-9)
    best = qrpo.optimum(beta)
    mean = uniform_mean(lambda t: t * torch.exp((t - 1) / beta)) / z
    kl = uniform_mean(lambda t: torch.exp((t - 1) / beta) / z * ((t - 1) / beta - math.log(z)))
    assert best["quantile"] == pytest.approx(mean, abs=1e-9) and best["kl"] == pytest.approx(kl, abs=1e-9)
    assert best["falling"] == qrpo.beta_log_z(beta)                           # t < beta log Z: a uniform t is there with that probability
    assert qrpo.beta_log_z(beta, "log") == pytest.approx(beta * math.log(beta / (1 + beta)), abs=1e-12)
    assert qrpo.beta_log_z(beta, "normal") == 1 / (2 * beta)                  # log E exp(x / beta) of a standard normal is 1 / (2 beta^2)


def test_partition_function_has_the_published_values_and_never_overflows():
    table = {0.01: .95395, 0.03: .89480, 0.1: .76974, 0.2: .67676, 0.5: .58072, 1: .54132, 5: .50833}
    for beta, want in table.items():
        assert qrpo.beta_log_z(beta) == pytest.approx(want, abs=5e-6)
    best = qrpo.optimum(0.1)                                                  # the paper: 77 % fall, .90, 1.30 nats
    assert (round(best["falling"], 2), round(best["quantile"], 3), round(best["kl"], 2)) == (0.77, 0.9, 1.3) and qrpo.optimum(0.003)["falling"] > 0.98
    b = torch.tensor([1e-6, 3e-4, 1.0, 1e3], dtype=torch.float64)
    assert qrpo.beta_log_z(b).isfinite().all() and qrpo.beta_log_z(b)[3] == pytest.approx(0.5 + 1 / 24e3, abs=1e-9)     # 1/2 + 1/(24 beta)
    assert type(qrpo.beta_log_z(0.1)) is float
    with pytest.raises(ValueError, match="there is identity, log, normal"):
        qrpo.beta_log_z(0.1, "icdf")


def test_quantile_counts_and_leaving_oneself_out_removes_the_bias():
    assert qrpo.quantile(2.0, [1.0, 2.0, 3.0, 4.0]).item() == 0.5 and qrpo.quantile(0, [1, 2]).item() == 0
    r = torch.tensor([3.0, 1.0, 2.0])
    assert qrpo.quantile(r, r).mean() == pytest.approx(0.5 + 1 / (2 * 3))     # (1 - R_q) / n on average: .167 for n = 3
    assert qrpo.quantile(r, r, loo=True).tolist() == [1.0, 0.0, 0.5]          # mean 1/2, as a uniform quantile has
    with pytest.raises(ValueError, match="at least one reference"):
        qrpo.quantile(1.0, [1.0], loo=True)


@pytest.mark.parametrize("beta, at_least", [(0.1, 3), (0.03, 8)])
def test_pass_or_fail_breaks_the_uniform_partition_and_discrete_repairs_it(beta, at_least):
    r = torch.tensor([0.0] * 75 + [1.0] * 25, dtype=torch.float64)            # a quarter passes: sum_y pi_ref exp(target / beta) should be 1
    tied, mass = qrpo.tie_report([r], beta)
    assert tied == pytest.approx((75 * 74 + 25 * 24) / (100 * 99)) and mass > at_least
    assert mass == pytest.approx((0.75 * math.exp(0.75 / beta) + 0.25 * math.exp(1 / beta)) / (beta * math.expm1(1 / beta)))
    q = qrpo.quantile(r, r)
    log_z = qrpo.discrete_beta_log_z(q, torch.tensor(beta, dtype=torch.float64))
    assert torch.exp((q - log_z) / beta).mean().item() == pytest.approx(1, abs=1e-12)
    distinct = torch.arange(1000, dtype=torch.float64)
    assert qrpo.tie_report([distinct], beta)[0] == 0 and qrpo.tie_report([distinct], beta)[1] == pytest.approx(1 + 1 / (2000 * beta), rel=1e-3)


def test_a_policy_that_can_be_enumerated_reaches_the_closed_form():
    """4,096 completions of 4 tokens of 8: the regression finds pi*, KL(pi* || pi) falls from 1.30 nats to below 1e-3."""
    g, beta, V, L = torch.Generator().manual_seed(0), 0.1, 8, 4
    ys = torch.cartesian_prod(*[torch.arange(V)] * L)
    prefix = [sum(ys[:, k] * V ** (i - 1 - k) for k in range(i)) + torch.zeros(len(ys), dtype=torch.long) for i in range(L)]
    start = [torch.randn(V**i, V, generator=g, dtype=torch.float64) for i in range(L)]
    def logp(tables):
        return sum(F.log_softmax(t, -1)[prefix[i], ys[:, i]] for i, t in enumerate(tables))
    ref = logp(start)
    p = ref.exp()
    order = torch.randn(len(ys), generator=g).argsort()                       # all rewards differ
    q = torch.empty_like(p)
    q[order] = p[order].cumsum(0)                                             # the exact Pr(r' <= r)
    best = (ref + q / beta) - torch.logsumexp(ref + q / beta, 0)
    tables = [t.clone().requires_grad_() for t in start]
    opt = torch.optim.Adam(tables, lr=0.05)
    kl = lambda: (best.exp() * (best - logp(tables))).sum().item()
    assert kl() == pytest.approx(qrpo.optimum(beta)["kl"] * 0 + (best.exp() * (best - ref)).sum().item()) and kl() == pytest.approx(1.30, abs=0.02)
    for _ in range(400):
        loss = (p * qrpo.losses["qrpo"](logp(tables)[:, None], ref[:, None], None, q[:, None], beta=beta)).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
    assert kl() < 1e-3
    assert (logp(tables).exp() * q).sum().item() == pytest.approx(qrpo.optimum(beta)["quantile"], abs=2e-3)


# -----------------------------------------------------------------------------
# log-probs, diagnostics


TINY = dict(block_size=256, vocab_size=320, n_layer=2, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=64, init_std=0.05)


def test_sequence_log_probs_and_their_gradient_are_those_of_the_full_softmax():
    model = Apertus(ApertusConfig(**TINY))
    data = [([1, 5, 9], [7, 8]), ([1, 4], [30, 31, 32, 33, 12]), ([1], [2])]
    got = qrpo.sequence_logp(model, data)
    weights = torch.tensor([1.0, -2.0, 0.5])
    (got * weights).sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    want = []
    for p, y in data:                                                         # one at a time: no padding, all logits
        logits, _ = model(torch.tensor([[*p, *y]]))
        logp = F.log_softmax(logits[0].double(), -1)
        want.append(sum(logp[len(p) - 1 + k, t] for k, t in enumerate(y)))
    want = torch.stack(want)
    (want * weights).sum().backward()
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-5)
    for n, p in model.named_parameters():
        torch.testing.assert_close(grads[n], p.grad, rtol=1e-4, atol=1e-6)


def test_ranks_of_matrices_whose_rank_is_known():
    q = torch.linalg.qr(torch.randn(64, 10, generator=torch.Generator().manual_seed(0)))[0]
    assert rank.ranks(q) == pytest.approx(dict(effective=10, pca99=10, stable=10), rel=1e-4)          # ten equal singular values
    assert rank.ranks(torch.randn(50, 1) @ torch.ones(1, 9)) == pytest.approx(dict(effective=1, pca99=1, stable=1), rel=1e-3)
    s = torch.tensor([3.0] + [1.0] * 9)
    p = s / s.sum()
    assert rank.ranks(q * s) == pytest.approx(dict(effective=math.exp(-(p * p.log()).sum()), pca99=10, stable=18 / 9), rel=1e-4)
    assert rank.ranks(q * torch.tensor([100.0] + [1.0] * 9))["pca99"] == 1    # 10,000 of 10,009 is more than 99 %
    assert rank.ranks(torch.zeros(4, 3)) == dict(effective=0, pca99=0, stable=0)
    assert all(math.isnan(v) for v in rank.ranks(torch.tensor([[1.0, math.inf], [0.0, 1.0]])).values())


def test_dead_units_and_preactivation_norm_are_those_of_the_last_feed_forward():
    model = Apertus(ApertusConfig(**TINY))
    idx = torch.randint(320, (3, 40), generator=torch.Generator().manual_seed(0))
    seen = []
    model.model.layers[-1].mlp.act_fn.register_forward_pre_hook(lambda m, x: seen.append(x[0]))
    with torch.no_grad():
        h, found = model.hidden(idx), rank.diagnose(model, idx)
    z = seen[0].flatten(0, 1)
    assert found["preactivation"] == pytest.approx(z.norm(dim=1).mean().item()) and found["dead_units"] == 0 and found["rank_tokens"] == 120
    assert found["rank_effective"] == pytest.approx(rank.ranks(h.flatten(0, 1))["effective"])
    keep = torch.zeros_like(idx, dtype=torch.bool)
    keep[0, 0] = True
    with torch.no_grad():
        assert rank.diagnose(model, idx, keep)["dead_units"] == pytest.approx((seen[0][0, 0] <= 0).float().mean().item())


@pytest.mark.parametrize("size, lr", [("8b", 5e-7), ("70b", 1e-7)])
def test_the_recipes_fit_the_script_and_have_the_published_numbers(size, lr):
    found = configure({**vars(qrpo)}, [f"qrpo_{size}"])
    assert (found["lr"], found["beta"], found["beta_max"], found["length_norm"], found["batch_size"], found["warmup"]) == (lr, 5.0, 0.1, True, 512, 0.1)


# -----------------------------------------------------------------------------
# the script


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A Hugging Face folder with a model that has learnt to say something short and to end; prompts; a reward function with few ties."""
    root = tmp_path_factory.mktemp("qrpo")
    convert.save_hf(Apertus(ApertusConfig(**TINY)), str(root / "untrained"), tokenizer.load("byte"))
    ask = lambda i: [dict(role="system", content="x"), dict(role="user", content=f"say {i}")]
    chats = [dict(messages=[*ask(i % 6), dict(role="assistant", content="ab"[i % 2] * (1 + i % 5))]) for i in range(60)]
    (root / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (root / "prompts.jsonl").write_text("\n".join(json.dumps(dict(messages=ask(i))) for i in range(6)))
    done = script("sft.py", f"--init_from={root / 'untrained'}", f"--data={root / 'chats.jsonl'}", f"--out={root / 'sft'}", "--batch_size=12", "--micro_batch=12",
                  "--lr=1e-2", "--epochs=6", "--optimizer=adamw")
    assert done.returncode == 0, done.stderr
    shutil.copytree(root / "sft" / "hf", root / "model")
    (root / "reward.py").write_text("def reward(prompt, completion):\n    return sum(map(ord, completion)) % 97 + 1e-3 * len(completion)\n")
    return root


def align(start, out, *args, **kw):
    return script("qrpo.py", f"--init_from={start / 'model'}", f"--data={start / 'prompts.jsonl'}", f"--rewards={start / 'reward.py'}", f"--out={out}",
                  "--n_refs=6", "--max_new_tokens=40", "--batch_size=4", "--micro_batch=2", "--lr=1e-3", "--pairs_per_prompt=0", "--rank_every=1",
                  "--checkpoint_every=3", "--keep_checkpoints=9", "--dtype=float32", *args, **kw)


@pytest.fixture(scope="module")
def aligned(start):
    done = align(start, start / "whole", "--epochs=2")
    assert done.returncode == 0, done.stderr
    return start / "whole"


def log(folder):
    return [json.loads(line) for line in open(os.path.join(folder, "log.jsonl"))]


def weights(folder):
    return dict(convert.load_run(str(folder))[0].named_parameters())


def test_every_step_logs_what_there_is_to_watch(aligned):
    entries = log(aligned)
    assert {"target", "correlation", "kl", "reward", "length", "grad_norm", "log_ratio", "rank_effective", "rank_pca99", "rank_stable", "dead_units",
            "preactivation"} <= entries[0].keys()
    assert abs(entries[0]["log_ratio"]) < 1e-4 and entries[0]["kl"] < 1e-4         # starts at the reference
    assert os.path.exists(aligned / "hf" / "model.safetensors") and os.path.exists(aligned / "references" / "samples-10-0000000.json")


def test_killed_and_resumed_ends_in_the_same_bits(aligned, start, tmp_path):
    shutil.copytree(aligned, tmp_path / "run")
    last = sorted(os.listdir(aligned / "ckpt"))
    for step in last[1:]:
        shutil.rmtree(tmp_path / "run" / "ckpt" / step)
    done = align(start, tmp_path / "run", "--epochs=2", "--resume")
    assert done.returncode == 0, done.stderr
    a, b = weights(aligned), weights(tmp_path / "run")
    assert all(torch.equal(a[n], b[n]) for n in a) and log(aligned) == log(tmp_path / "run")


@pytest.mark.parametrize("args", [["--loss=dpo"], ["--loss=rebel", "--length_norm=False", "--beta=1.0"], ["--loss=simpo", "--beta=2.5"], ["--transform=log"],
                                  ["--transform=normal", "--optimizer=adamw"], ["--ties=discrete"], ["--pairs=best", "--loo=0"], ["--beta=0.1", "--length_norm=False"]])
def test_each_loss_and_choice_runs_on_the_same_references(aligned, start, tmp_path, args):
    done = align(start, tmp_path / "run", f"--references={aligned / 'references'}", *args)
    assert done.returncode == 0, done.stderr
    assert all(math.isfinite(e["loss"]) for e in log(tmp_path / "run"))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_do_what_one_does(launch, aligned, start, tmp_path, parallel):
    """fsdp from the start; ddp goes on with what one process left when it was killed."""
    if parallel == "ddp":
        shutil.copytree(aligned, tmp_path / "two")
        for name in sorted(os.listdir(tmp_path / "two" / "ckpt"))[1:]:
            shutil.rmtree(tmp_path / "two" / "ckpt" / name)
    args = [f"--init_from={start / 'model'}", f"--data={start / 'prompts.jsonl'}", f"--rewards={start / 'reward.py'}", f"--out={tmp_path / 'two'}",
            "--n_refs=6", "--max_new_tokens=40", "--batch_size=4", "--micro_batch=2", "--lr=1e-3", "--pairs_per_prompt=0", "--epochs=2", "--rank_every=1", "--checkpoint_every=3",
            "--device=cpu", "--dtype=float32", "--resume", f"--parallel={parallel}"]
    codes, text = launch(2, *args, script="qrpo.py", logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]
    for one, two in zip(log(aligned), log(tmp_path / "two"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-6) and two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


def test_an_aligned_model_exported_by_convert_chats_in_transformers_with_its_own_template(aligned, tmp_path):
    """Two turns, rendered by the template file in the export; the same greedy tokens, ended by the same token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    done = script("convert.py", f"--load={aligned}", f"--save={tmp_path / 'hf'}")
    assert done.returncode == 0, done.stderr
    theirs, their_tok = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval(), AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours, tok = convert.load_run(str(aligned))
    with open(os.path.join(ROOT, "chat_template.jinja"), encoding="utf-8") as f:
        assert their_tok.chat_template == f.read()
    messages = [dict(role="system", content="x"), dict(role="user", content="say 1")]
    for _ in range(2):
        ids = their_tok.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]
        assert ids[0].tolist() == tok.chat(messages, add_generation_prompt=True)[1]
        said = ours.generate(ids, 30, temperature=0, stop=(tok.eos,))
        assert theirs.generate(ids, max_new_tokens=30, do_sample=False).tolist() == said.tolist()
        answer = tok.decode([i for i in said[0, ids.shape[1]:].tolist() if i != tok.eos])
        messages += [dict(role="assistant", content=answer), dict(role="user", content="say 2")]


def test_offline_data_with_rewards_needs_no_sampling(start, tmp_path):
    rows = [dict(messages=[dict(role="user", content=f"q{i}")], completions=["good", "bad", "fair"], rewards=[2, 0, 1], ref_rewards=[0.5, 1.5, 0.1]) for i in range(4)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    done = align(start, tmp_path / "run", f"--data={tmp_path / 'data.jsonl'}", "--rewards=", "--n_refs=3", "--epochs=3")
    assert done.returncode == 0, done.stderr
    assert not any(f.startswith("samples") for f in os.listdir(tmp_path / "run" / "references"))
    assert all(e["reward"] in (0.5, 1.0, 1.5) for e in log(tmp_path / "run"))


def broken(tmp_path, *rows):
    (tmp_path / "data.jsonl").write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return f"--data={tmp_path / 'data.jsonl'}"


USER = dict(role="user", content="hi")


@pytest.mark.parametrize("row, args, says", [
    (dict(messages=[USER], completions=["a", "b"], rewards=[1, 2], ref_rewards=[1, 2]), ["--rewards="], "line 1: ref_rewards"),       # 2 of 6
    (dict(messages=[USER], completions=["a", "b"], rewards=[1, float("nan")], ref_rewards=[1] * 6), ["--rewards="], "line 1: rewards"),
    (dict(messages=[USER], completions=["a", "b"]), ["--rewards="], "line 1: no ref_rewards there, and no --rewards"),
    (dict(messages=[USER], completions=["a", "b"], rewards=[1, 1], ref_rewards=[1] * 6), ["--rewards="], "nothing to learn from"),
    (dict(messages=[USER, dict(role="assistant", content="x")]), [], "its last message is not the user's (first in line 1)"),
    (dict(messages=[]), [], "no messages (first in line 1)"),
    (dict(messages=[USER]), ["--loss=ppo"], "there is qrpo, dpo, rebel, simpo"),
    (dict(messages=[USER]), ["--n_refs=1"], "at least 2 with loo=1"),
    (dict(messages=[USER]), ["--rewards=nowhere.py"], "there is no file nowhere.py"),
    (dict(messages=[USER]), ["--max_length=10"], "nothing to learn from"),
    ("{", [], "line 1: want a JSON object"),
])
def test_what_cannot_work_is_told_in_one_line(start, tmp_path, row, args, says):
    done = align(start, tmp_path / "run", broken(tmp_path, row), *args)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and last.startswith("qrpo.py: ") and says in last, done.stderr


@pytest.mark.parametrize("body, says", [("1 / 0 if '4' in prompt else 1.0", "line 5: .*ZeroDivisionError"), ("float('nan')", "line 1: .*gave nan"), ("'good'", "line 1: .*ValueError")])
def test_a_reward_function_that_fails_names_the_row_and_the_run_goes_on_from_its_references(start, tmp_path, body, says):
    import re
    reward = tmp_path / "reward.py"
    reward.write_text(f"def reward(prompt, completion):\n    return {body}\n")
    done = align(start, tmp_path / "run", f"--rewards={reward}")
    assert done.returncode == 2 and re.search(says, done.stderr), done.stderr
    samples = tmp_path / "run" / "references" / "samples-10-0000000.json"
    before = samples.stat().st_mtime_ns
    reward.write_text("def reward(prompt, completion):\n    return len(completion) + sum(map(ord, completion)) / 1e4\n")
    done = align(start, tmp_path / "run", f"--rewards={reward}", "--resume")
    assert done.returncode == 0 and samples.stat().st_mtime_ns == before, done.stderr


def test_references_of_another_start_model_or_tokenizer_are_refused(aligned, start, tmp_path):
    model = Apertus(ApertusConfig(**{**TINY, "vocab_size": 1088}))
    convert.save_hf(model, str(tmp_path / "other"), tokenizer.load("apertus:1024"))
    done = align(start, tmp_path / "run", f"--init_from={tmp_path / 'other'}", f"--references={aligned / 'references'}")
    assert done.returncode == 2 and "references of other settings" in done.stderr and "tokenizer" in done.stderr
    done = align(start, aligned, "--resume", "--epochs=2", "--beta=0.3")
    assert done.returncode == 2 and "is of another run: beta 0.0 -> 0.3" in done.stderr
    shutil.copy(tmp_path / "other" / "tokenizer.json", tmp_path / "tokenizer.json")
    shutil.copytree(start / "model", tmp_path / "mixed")
    shutil.copy(tmp_path / "tokenizer.json", tmp_path / "mixed")
    done = align(start, tmp_path / "run2", f"--init_from={tmp_path / 'mixed'}")
    assert done.returncode == 2 and "do not belong together" in done.stderr


def test_pass_or_fail_is_warned_about(start, tmp_path):
    (tmp_path / "reward.py").write_text("def reward(prompt, completion):\n    return len(completion) % 4 == 0\n")
    done = align(start, tmp_path / "run", f"--rewards={tmp_path / 'reward.py'}", "--length_norm=False", "--beta=0.1")
    assert done.returncode == 0 and "% of reference pairs tie" in done.stdout and "--ties=discrete" in done.stdout, done.stderr
    done = align(start, tmp_path / "run2", f"--rewards={tmp_path / 'reward.py'}", "--length_norm=False", "--beta=0.1", "--ties=discrete")
    assert done.returncode == 0 and "reference pairs tie" not in done.stdout, done.stderr


def test_a_reward_model_scores_as_its_own_head_says(start, tmp_path):
    from transformers import LlamaConfig, LlamaForSequenceClassification
    torch.manual_seed(1)
    judge = LlamaForSequenceClassification(LlamaConfig(vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                                                       num_key_value_heads=1, num_labels=1, pad_token_id=3))
    judge.save_pretrained(tmp_path / "judge")
    tok = tokenizer.load("byte")
    for name, content in tokenizer.hf_files(tok).items():
        (tmp_path / "judge" / name).write_text(json.dumps(content))
    row = dict(messages=[dict(role="system", content="x"), USER])
    ids = tok.chat([*row["messages"], dict(role="assistant", content="yes")])[1]
    with torch.no_grad():
        h = judge.model(torch.tensor([ids])).last_hidden_state[0, -1]
        want = (judge.score.weight @ h).item()
    assert qrpo.load_reward(f"hf:{tmp_path / 'judge'}", "cpu")(row, "yes") == pytest.approx(want, abs=1e-6)


def test_a_reward_reads_words_and_no_control_tokens():
    """As transformers' decode(skip_special_tokens=True): the end, brackets and stray tokens are silent, but <email-pii> is text."""
    tok = tokenizer.load("byte")
    said = [tok.special[name] for name in ("<|inner_prefix|>", "<|inner_suffix|>", "<email-pii>", "<|user_start|>", "<|assistant_end|>")]
    ids = [*said[:1], *tok.encode("hm "), said[1], *tok.encode("12 "), *said[2:]]
    assert qrpo.words(tok, ids) == "hm 12 <email-pii>"


def test_the_demonstration_measures_a_model_against_itself_as_equal(start, tmp_path, monkeypatch):
    import align
    monkeypatch.setattr(align, "n_refs", 3)
    monkeypatch.setattr(align, "out", str(tmp_path))
    convert.save_hf(Apertus(ApertusConfig(**TINY), seed=5), str(tmp_path / "qrpo-s0"), tokenizer.load("byte"))
    shutil.copytree(start / "sft", tmp_path / "dpo-s0")                       # out/sft and its export are one model
    runs = {"qrpo-s0": ("qrpo", 1e-3, 0.3, 0), "dpo-s0": ("dpo", 1e-3, 1.0, 0)}
    rows = align.measure(runs, str(start / "model"), align.tasks()[2][:4], 0.3)
    assert rows["sft"]["kl"] == 0 and rows["dpo-s0"]["kl"] == pytest.approx(0, abs=1e-6) and rows["qrpo-s0"]["kl"] > 1
    assert rows["dpo-s0"]["reward"] == rows["sft"]["reward"] and len(rows["sft"]["points"]) == 12
    align.draw(rows, 0.3, str(tmp_path / "align.png"))
    table = align.table(rows, 0.3)
    assert "| closed form, beta 0.3 | | | 0.737 | 0.36 | | 1 | 0 |" in table and (tmp_path / "align.png").stat().st_size > 1000
    assert table.count("\n") == 6                                             # head, rule, sft, qrpo, dpo, closed form


def test_the_demonstration_chooses_rates_and_betas_on_prompts_of_their_own(monkeypatch):
    import align
    train, validation, test = map(set, align.tasks())
    assert (len(train), len(validation), len(test)) == (240, 60, 60) and len(train | validation | test) == 360
    assert {len(grid) for grid in align.GRIDS.values()} == {3} and set(align.GRIDS) == set(qrpo.losses)
    runs = {f"tune-{m}-{b}": (m, 1e-3 * b, b, 1000) for m in ("qrpo", "dpo") for b in (0.1, 0.3, 1.0)}
    rewards = dict(zip(runs, (-9, -5, -6, -4, -8, -7)))
    assert align.choose({name: dict(reward=r) for name, r in rewards.items()}, runs) == {"qrpo": dict(lr=3e-4, beta=0.3), "dpo": dict(lr=1e-4, beta=0.1)}
    monkeypatch.setattr(align, "methods", "qrpo,ppo")
    with pytest.raises(ValueError, match="there is qrpo, dpo"):
        align.main()


def test_the_demonstration_takes_up_only_runs_of_the_same_settings(tmp_path, monkeypatch):
    import align
    monkeypatch.setattr(align, "out", str(tmp_path))
    done = tmp_path / "run" / "done"
    done.parent.mkdir()
    hello = tmp_path / "hello.py"
    hello.write_text(f"import sys\nopen({str(done)!r}, 'a').write(sys.argv[1])\n")
    assert align.call("run", str(done), str(hello), "x")["args"] == align.call("run", str(done), str(hello), "x")["args"] == ["x"]
    assert done.read_text() == "x"                                            # once
    with pytest.raises(ValueError, match="made with other settings"):
        align.call("run", str(done), str(hello), "y")
    hello.write_text("raise ValueError('no way')\n")
    with pytest.raises(ValueError, match="failed: ValueError: no way"):
        align.call("other", str(tmp_path / "none"), str(hello))


def test_the_demonstrations_reward_is_what_its_page_says():
    import align
    assert align.reward("Sum 27, first 4", "4797") == 0 and align.reward("Sum 27, first 4", "45") == -18
    assert align.reward("Sum 27, first 4", "5499") == align.reward("Sum 27, first 4", "4 x") == align.reward("Sum 27, first 4", "") == -30
