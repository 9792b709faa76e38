"""posttrain/qrpo.py against published numbers, closed forms and a run written plainly in fp64; then as users run it."""

import functools
import json
import math
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import chat
import convert
import tokenizer
from conftest import ROOT, refused, same, script, weights
from engine.parallel import Ranks
from model import Apertus, ApertusConfig
from plain import Plain
from posttrain import collapse, common, losses, qrpo, references
from test_sft import cut_back, write_rows

with open(
    os.path.join(ROOT, "tests", "golden", "preference_losses.json"), encoding="utf-8"
) as f:
    GOLDEN = json.load(f)


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
    kind = {"normal-icdf": "normal"}.get(
        case.get("transform"), case.get("transform", "identity")
    )
    length = both("len") if case.get("length_norm", case["loss"] == "simpo") else 1.0
    q = losses.TRANSFORMS[kind](
        losses.quantile(both("reward"), golden("ref_rewards")[:, None]), 7
    )
    limit = case.get("clamp", 0.0)
    b = losses.effective_beta(q, length, case["beta"], limit)

    def value(log_z):
        known = SimpleNamespace(
            ref=both("ref_logp"), reward=both("reward"), q=q, length=length, beta=b, log_z=log_z
        )
        return losses.losses[case["loss"]](
            both("policy_logp"), known, case["beta"], case.get("gamma_beta_ratio")
        )

    want = torch.tensor(case["value"], dtype=torch.float64)
    ours = losses.beta_log_z(b, kind)
    theirs = b * b.log() + 1 if kind == "identity" else ours
    torch.testing.assert_close(value(theirs), want, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        value(ours), want, rtol=1e-5 if case["beta"] < 0.1 else 5e-5, atol=0
    )


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
    assert best["quantile"] == pytest.approx(mean, abs=1e-9) and best["kl"] == pytest.approx(
        kl, abs=1e-9
    )
    # t < beta log Z: a uniform t is there with that probability.
    assert best["falling"] == losses.beta_log_z(beta)


def test_partition_functions_of_the_other_transforms_have_their_closed_forms_and_none_overflows():
    """log E exp(log t / beta) is log(beta / (1 + beta)); log E exp(x / beta) of a standard normal is 1 / (2 beta^2)."""
    assert losses.beta_log_z(0.3, "log") == pytest.approx(0.3 * math.log(0.3 / 1.3), abs=1e-12)
    assert losses.beta_log_z(0.3, "normal") == 1 / 0.6
    values = losses.beta_log_z(torch.tensor([1e-6, 1e3], dtype=torch.float64))
    assert values.isfinite().all() and values[1] == pytest.approx(0.5 + 1 / 24e3, abs=1e-9)


def test_quantile_counts_and_leaving_oneself_out_removes_the_bias():
    """One that counts itself is (1 - R_q) / n too large on average: .167 for n = 3. A uniform one has the mean 1/2."""
    assert (
        losses.quantile(2.0, [1.0, 2.0, 3.0, 4.0]).item() == 0.5
        and losses.quantile(0, [1, 2]).item() == 0
    )
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


# -----------------------------------------------------------------------------
# log-probs, diagnostics


TINY = dict(
    block_size=256,
    vocab_size=320,
    n_layer=2,
    n_head=2,
    n_kv_head=1,
    n_embd=32,
    ffn_dim=64,
    init_std=0.05,
)


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
    q = torch.linalg.qr(torch.randn(64, 10, generator=torch.Generator().manual_seed(0)))[0]
    s = torch.tensor([3.0] + [1.0] * 9)
    p = s / s.sum()
    entropy = -(p * p.log()).sum()
    for matrix, *want in (
        (q, 10, 10, 10),
        (torch.ones(50, 1) @ torch.ones(1, 9), 1, 1, 1),
        (q * s, math.exp(entropy), 10, 18 / 9),
        (torch.zeros(4, 3), 0, 0, 0),
    ):
        found = collapse.spectrum(matrix)
        assert [found[name] for name in ("effective", "pca99", "stable")] == pytest.approx(
            want, rel=1e-3
        )


# -----------------------------------------------------------------------------
# the script


def ask(text):
    """The messages of a prompt."""
    return [dict(role="system", content="x"), dict(role="user", content=text)]


REWARDS = """
def reward(prompt, completion): return sum(map(ord, completion)) % 97 + 1e-3 * len(completion)
def one(prompt, completion): return 1 + len(completion)
def two(prompt, completion): return -1 - len(completion)
def nan(prompt, completion): return float("nan")
def fails(prompt, completion): return 1 / 0
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A Hugging Face folder whose model says something short and ends; prompts; a reward function with few ties."""
    root = tmp_path_factory.mktemp("qrpo")
    convert.save_hf(
        Apertus(ApertusConfig(**TINY)), str(root / "untrained"), tokenizer.load("byte")
    )
    answers = [dict(role="assistant", content="ab"[i % 2] * (1 + i % 5)) for i in range(60)]
    write_rows(
        root / "chats.jsonl",
        [dict(messages=[*ask(f"say {i % 6}"), said]) for i, said in enumerate(answers)],
    )
    write_rows(root / "prompts.jsonl", [dict(messages=ask(f"say {i}")) for i in range(6)])
    done = script(
        "posttrain.sft",
        f"--init_from={root / 'untrained'}",
        f"--data={root / 'chats.jsonl'}",
        f"--out={root / 'sft'}",
        "--batch_size=12",
        "--micro_batch=12",
        "--lr=1e-2",
        "--epochs=6",
        "--optimizer=adamw",
    )
    assert done.returncode == 0, done.stderr
    convert.save_hf(convert.load_run(str(root / "sft"))[0], str(root / "model"), tokenizer.load("byte"))
    (root / "reward.py").write_text(REWARDS)
    return root


def arguments(start, out):
    """The command line of a run that all tests begin with."""
    return [
        f"--init_from={start / 'model'}",
        f"--data={start / 'prompts.jsonl'}",
        f"--rewards={start / 'reward.py'}",
        f"--out={out}",
        "--n_refs=6",
        "--max_new_tokens=40",
        "--batch_size=4",
        "--micro_batch=2",
        "--lr=1e-3",
        "--pairs_per_prompt=0",
        "--rank_every=1",
        "--checkpoint_every=3",
        "--dtype=float32",
        "--keep_checkpoints=0",
    ]


def align(start, out, *args):
    return script("posttrain.qrpo", *arguments(start, out), *args)


@pytest.fixture(scope="module")
def aligned(start):
    done = align(start, start / "whole", "--epochs=2")
    assert done.returncode == 0, done.stderr
    return start / "whole"


def log(folder):
    """The entries of a run's log without the speed, which no two runs share."""
    entries = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return [{name: value for name, value in entry.items() if name != "tok_s"} for entry in entries]


def test_it_starts_at_the_reference_is_watched_and_resumes_to_the_same_bits(
    aligned, start, tmp_path
):
    first = log(aligned)[0]
    assert {
        "target",
        "correlation",
        "reward_policy",
        "length",
        "rank_effective",
        "dead_units",
    } <= first.keys()
    assert abs(first["log_ratio"]) < 1e-4 and first["kl"] < 1e-4
    cut_back(aligned, tmp_path / "run")
    done = align(start, tmp_path / "run", "--epochs=2", "--resume")
    assert done.returncode == 0, done.stderr
    assert same(weights(aligned), weights(tmp_path / "run")) and log(aligned) == log(
        tmp_path / "run"
    )


@pytest.mark.parametrize("parallel, micro_batch", [("ddp", 2), ("fsdp", 4)])
def test_two_ranks_do_what_one_does(launch, aligned, start, tmp_path, parallel, micro_batch):
    """fsdp from the start, one of its ranks without a micro-batch; ddp goes on with what a killed process left."""
    if parallel == "ddp":
        cut_back(aligned, tmp_path / "two")
    args = [
        *arguments(start, tmp_path / "two"),
        f"--micro_batch={micro_batch}",
        "--epochs=2",
        "--device=cpu",
    ]
    codes, text = launch(
        2,
        *args,
        "--resume",
        f"--parallel={parallel}",
        script="posttrain.qrpo",
        logs=tmp_path / "log",
    )
    assert codes == [0, 0], text[-2000:]
    for one, two in zip(log(aligned), log(tmp_path / "two"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-6)
        assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


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
        return (
            sum(
                (q[k] - b[k] * pair["log_z"](b[k]) - b[k] * (lp[k] - ref[k])) ** 2
                for k in (0, 1)
            )
            / 2
        )
    if kind == "simpo":
        return -F.logsigmoid(beta * (lp[0] / size[0] - lp[1] / size[1] - gamma))
    g = [(lp[k] - ref[k]) / size[k] for k in (0, 1)]
    if kind == "dpo":
        return -F.logsigmoid(beta * (g[0] - g[1]))
    better, worse = pair["r"]
    return ((better - worse) / beta - (g[0] - g[1])) ** 2


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


@pytest.mark.parametrize(
    "kind, beta, norm, beta_max, ties, optimizer, clip",
    [
        ("qrpo", 2.0, True, 0.25, "le", "ademamix", 0.02),
        ("qrpo", 0.2, False, 0.1, "discrete", "adamw", 0.5),
        ("dpo", 5.0, True, 0.1, "le", "ademamix", 1e9),
        ("rebel", 4.0, True, 0.1, "le", "adamw", 0.05),
        ("simpo", 0.4, False, 0.1, "le", "adamw", 0.01),
    ],
)
def test_from_pairs_to_weights_it_is_the_same_run_written_plainly_in_fp64(
    start,
    tmp_path,
    kind,
    beta,
    norm,
    beta_max,
    ties,
    optimizer,
    clip,
):
    """Two steps of two batches of two pairs: the right one is better, lengths are tokens, Z is the prompt's own."""
    rows = []
    for k, (*couple, refs) in enumerate(COUPLES):
        texts, rewards = zip(*couple)
        rows.append(
            dict(messages=ask(f"say {k}"), completions=texts, rewards=rewards, ref_rewards=refs)
        )
    done = align(
        start,
        tmp_path / "run",
        broken(tmp_path, *rows),
        "--rewards=",
        "--n_refs=4",
        "--batch_size=2",
        "--micro_batch=1",
        f"--loss={kind}",
        f"--beta={beta}",
        f"--length_norm={norm}",
        f"--beta_max={beta_max}",
        f"--ties={ties}",
        f"--optimizer={optimizer}",
        f"--grad_clip={clip}",
        "--gamma=0.3",
        "--lr=1e-2",
        "--eps=1e-2",
        "--weight_decay=0.1",
        "--warmup=0.5",
        "--betas=(0.9,0.999,0.99)",
    )
    assert done.returncode == 0, done.stderr

    tok, plain = tokenizer.load("byte"), Plain(start / "model")
    logp = lambda prompt, y: plain.logp([*prompt, *y])[len(prompt) - 1 :].sum()
    pairs = [
        plain_pair(tok, row, couple, refs, norm, ties)
        for row, (*couple, refs) in zip(rows, COUPLES)
    ]
    for pair in pairs:
        pair["ref"] = [logp(*said).item() for said in pair["said"]]
    limit = beta_max if norm else 0
    for step in (0, 1):
        batch = [pairs[k] for k in common.items(step, 2, 4, 1, 28)]
        each = [
            plain_loss(kind, [logp(*said) for said in pair["said"]], pair, beta, limit, 0.3)
            for pair in batch
        ]
        value = sum(each) / 2
        value.backward()
        entry = log(tmp_path / "run")[step]
        with torch.no_grad():
            ratio = [
                [logp(*pair["said"][k]).item() - pair["ref"][k] for k in (0, 1)]
                for pair in batch
            ]
        r = [reward for pair in batch for reward in pair["r"]]
        w = torch.tensor(ratio).flatten().softmax(0)
        watched = dict(
            loss=value.item(),
            log_ratio=np.mean(ratio),
            margin=np.mean([better - worse for better, worse in ratio]),
            reward=np.mean(r),
            reward_policy=(w * torch.tensor(r)).sum().item(),
            kl=(w * (4 * w).log()).sum().item(),
        )
        assert {name: entry[name] for name in watched} == pytest.approx(
            watched, rel=2e-5, abs=2e-5
        )
        plain.update(step + 1, 2, 1e-2 * (1, 0.5)[step], clip, 1e-2, 0.1, optimizer == "adamw")
    assert plain.distance(convert.load_run(str(tmp_path / "run"))[0]) < 1e-3


@pytest.fixture
def small(start, tmp_path, monkeypatch):
    """A small run's settings in posttrain/qrpo.py; its start model; prompts with two completions of their own."""
    path = tmp_path / "data.jsonl"
    write_rows(
        path, [dict(messages=ask(f"say {k}"), completions=["abc", "ab"]) for k in range(5)]
    )
    values = dict(
        out=str(tmp_path / "run"), data=str(path), n_refs=5, max_new_tokens=9, sample_batch=10
    )
    for name, value in values.items():
        monkeypatch.setattr(qrpo, name, value)
    return convert.load_any(str(start / "model"), "cpu", torch.float32)


@pytest.mark.parametrize("loo", [0, 1])
def test_candidates_are_finished_completions_with_their_quantile_among_the_others(
    small,
    start,
    tmp_path,
    monkeypatch,
    loo,
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
    folder = tmp_path / "run" / "references"
    folder.mkdir(parents=True)
    run = SimpleNamespace(tok=tok, longest=longest, ranks=Ranks(), device="cpu", dtype=torch.float32, policy=model)
    cache = functools.partial(references.cached, str(folder), run.ranks)
    candidates, q_refs, groups = qrpo.candidates_of(run, asked, reward, "v", cache)
    files = sorted((tmp_path / "run" / "references").glob("samples-*.json"))
    sampled = sum((json.loads(f.read_text()) for f in files), [])
    end, dropped = tok.special["<|assistant_end|>"], 0
    share = lambda r, among: sum(x <= r for x in among) / len(among)
    logp = lambda prompt, y: plain.logp(prompt + y)[len(prompt) - 1 :].sum().item()
    for (_, row, prompt), ids, found, own, group in zip(
        asked, sampled, candidates, q_refs, groups, strict=True
    ):
        r = [score(row, references.words(tok, y)) for y in ids]
        q = [share(r[k], r if not loo else r[:k] + r[k + 1 :]) for k in range(5)]
        assert own.tolist() == pytest.approx(q) and group.tolist() == r
        every = list(zip(ids, r, q))
        for text in ("abc", "ab"):
            reward = score(row, text)
            every.append((tok.encode(text) + [end], reward, share(reward, r)))
        want = [(y, r, q) for y, r, q in every if y[-1] == end and len(y) <= 8]
        dropped += 7 - len(want)
        expected = [(prompt + y, r, pytest.approx(q)) for y, r, q in want]
        assert [(sum(c["text"], []), c["reward"], c["q"]) for c in found] == expected
        assert [c["ref_logp"] for c in found] == pytest.approx([logp(prompt, y) for y, _, _ in want], abs=1e-4)
    assert len(files) == 3 and dropped > 0
    assert max(len(y) for ids in sampled for y in ids) == 8


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


def broken(tmp_path, *rows):
    (tmp_path / "data.jsonl").write_text(
        "\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows)
    )
    return f"--data={tmp_path / 'data.jsonl'}"


USER = dict(role="user", content="hi")
ASKED = dict(messages=[USER])
ANSWERED = dict(messages=[USER], completions=["a", "b"])


@pytest.mark.parametrize(
    "row, args, says",
    [
        (
            dict(ANSWERED, rewards=[1, 2], ref_rewards=[1, 2]),
            "--rewards=",
            "line 1: ref_rewards",
        ),
        (
            dict(ANSWERED, rewards=[1, float("nan")], ref_rewards=[1] * 6),
            "--rewards=",
            "line 1: rewards",
        ),
        (ANSWERED, "--rewards=", "line 1: no ref_rewards there, and no --rewards"),
        (
            dict(ANSWERED, rewards=[1, 1], ref_rewards=[1] * 6),
            "--rewards=",
            "nothing to learn from",
        ),
        (
            dict(messages=[USER, dict(role="assistant", content="x")]),
            "",
            "its last message is not the user's",
        ),
        (ASKED, "--loss=ppo", "there is qrpo, dpo, rebel, simpo"),
        (ASKED, "--n_refs=1", "at least 2 with loo=1"),
        (ASKED, "--ties=some", "there is le, discrete"),
        (ASKED, "--transform=some", "transform='some': there is identity, "),
        (ASKED, "--rewards=nowhere.py", "there is no file nowhere.py"),
        (ASKED, "--rewards=ROOT/reward.py:none", "has no function none(prompt, completion)"),
        (
            ASKED,
            "--rewards=ROOT/reward.py:fails",
            "line 1: --rewards=ROOT/reward.py:fails failed on completion",
        ),
        (ASKED, "--rewards=ROOT/reward.py:nan", "gave nan for completion"),
        (
            ASKED,
            "--data=ROOT/prompts.jsonl --references=ROOT/whole/references --max_length=200",
            "max_length 256 -> 200",
        ),
        (
            ASKED,
            "--data=ROOT/prompts.jsonl --references=ROOT/whole/references --dtype=float32 --init_from=ROOT/untrained",
            "references of other settings: another start",
        ),
        (
            ASKED,
            "--data=ROOT/prompts.jsonl --references=MOVED",
            "differs from its own reference log-probs",
        ),
        (
            ASKED,
            "--data=ROOT/prompts.jsonl --out=ROOT/whole --epochs=2 --resume --beta=0.3",
            "beta 0.0 -> 0.3",
        ),
        (
            ASKED,
            "--data=ROOT/prompts.jsonl --out=ROOT/whole --epochs=2 --resume --rewards=ROOT/reward.py:two",
            "rewards_hash",
        ),
    ],
)
def test_what_cannot_work_is_told_in_one_line(aligned, start, tmp_path, row, args, says):
    """MOVED: references whose log-probs are not the start model's."""
    data = broken(tmp_path, row)
    shutil.copytree(aligned / "references", tmp_path / "moved")
    for file in (tmp_path / "moved").glob("logp-*.json"):
        file.write_text(json.dumps([x - 5 for x in json.loads(file.read_text())]))
    args, says = (
        text.replace("ROOT", str(start)).replace("MOVED", str(tmp_path / "moved"))
        for text in (args, says)
    )
    done = align(start, tmp_path / "run", data, *args.split())
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and last.startswith("qrpo.py: ") and says in last, done.stderr


def test_a_repaired_reward_is_given_to_the_references_that_there_are(start, tmp_path):
    """Of another function of the same file the scores are others. The first batch is scored before all is sampled."""
    run = tmp_path / "run"
    failed = align(start, run, f"--rewards={start / 'reward.py'}:fails", "--sample_batch=6")
    refused(failed, "ZeroDivisionError")
    [samples] = (run / "references").glob("samples-*")
    before = samples.stat().st_mtime_ns
    for name in ("one", "two"):
        done = align(
            start,
            run,
            f"--rewards={start / 'reward.py'}:{name}",
            "--sample_batch=6",
            f"--out={tmp_path / name}",
            f"--references={run / 'references'}",
        )
        assert done.returncode == 0, done.stderr
    assert samples.stat().st_mtime_ns == before
    assert log(tmp_path / "one")[0]["reward"] > 0 > log(tmp_path / "two")[0]["reward"]


@pytest.mark.parametrize(
    "signature, body, want",
    [
        ("prompt, completion", "f'{prompt}|{completion}'", "second|yes"),
        ("prompt, completion, row=None", "row['gold']", 7),
        ("*all", "all[2]['gold']", 7),
        ("prompt, completion, *, weight=3", "weight", 3),
    ],
)
def test_a_reward_function_gets_the_last_question_the_answer_and_the_line_if_it_wants_it(
    tmp_path,
    signature,
    body,
    want,
):
    (tmp_path / "r.py").write_text(f"def judge({signature}):\n    return {body}\n")
    parts = [dict(type="text", text="sec"), dict(type="text", text="ond")]
    row = dict(
        messages=[
            *ask("first"),
            dict(role="assistant", content="x"),
            dict(role="user", content=parts),
        ],
        gold=7,
    )
    assert list(references.load_reward(f"{tmp_path / 'r.py'}:judge", "cpu")(row, ["yes"])) == [
        want
    ]


def test_a_reward_file_may_see_all_completions_of_a_prompt(tmp_path):
    file = tmp_path / "r.py"
    file.write_text("def rewards(row, completions):\n    return [sorted(completions).index(c) for c in completions]\n")
    score = references.load_reward(str(file), "cpu")
    assert references.scored({}, ["c", "a", "b"], score, "here") == [2, 0, 1]
    assert references.load_reward(f"{file}:rewards", "cpu")({}, ["b", "a"]) == [1, 0]
    with pytest.raises(ValueError, match="here gave 1 rewards for 2 completions"):
        references.scored({}, ["a", "b"], lambda row, completions: [1], "here")
    file.write_text("def rewards(row, completions):\n    pass\ndef reward(prompt, completion):\n    return 1\n")
    with pytest.raises(ValueError, match="has reward and rewards: say which"):
        references.load_reward(str(file), "cpu")
    row = dict(messages=ask("hello"))
    assert list(references.load_reward(f"{file}:reward", "cpu")(row, ["b", "a"])) == [1, 1]


def test_prompts_are_of_a_fixed_day_and_odd_ones_are_left_out(tmp_path):
    """A run over midnight trains on the prompts that it sampled with."""
    tok, asked = tokenizer.load("byte"), [dict(role="user", content="what day is it?")]
    broken(
        tmp_path,
        dict(messages=asked, completions="no list"),
        dict(messages=[dict(role="user", content=5)]),
        dict(messages=[]),
        dict(messages=asked),
    )
    found, bad = qrpo.prompts_of(tok, str(tmp_path / "data.jsonl"))
    want = tok.chat(asked, add_generation_prompt=True, date="2025-09-02")[1]
    assert [(line, ids) for line, _, ids in found] == [(4, want)]
    assert bad == {
        "completions that are not a list of texts": (1, "line 1"),
        chat.ODD: (1, "line 2"),
        "no messages": (1, "line 3"),
    }


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
