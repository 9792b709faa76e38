"""posttrain/qrpo.py against published numbers, closed forms and a run written plainly in fp64; then as users run it."""
import functools
import json
import math
import runpy
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from scipy import integrate

import chat
import convert
from conftest import ROOT, refused, script
from engine.files import read_json
from lab import ADAPTERS, aligning
from plain import Plain
from posttrain import common, losses, qrpo, references
from test_sft import TOK, assistant, chat_row, user, write_rows
from trained import log

GOLDEN = read_json(f"{ROOT}/tests/golden/preference_losses.json")
END = TOK.special["<|assistant_end|>"]


# -----------------------------------------------------------------------------
# published numbers and closed forms


def golden(*names):
    return torch.tensor([GOLDEN["inputs"][name] for name in names], dtype=torch.float64).movedim(0, 1)


def both(name):
    return golden(f"{name}_chosen", f"{name}_rejected")


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda c: "-".join(map(str, c.values()))[:40])
def test_losses_are_the_published_implementations(case):
    """Their identity transform drops log(1 - e^(-1/beta)) from log Z. Ours has it, and is off by what it is worth."""
    kind = case.get("transform", "identity").removesuffix("-icdf")
    length = both("len") if case.get("length_norm", case["loss"] == "simpo") else 1.0
    q = losses.TRANSFORMS[kind](losses.quantile(both("reward"), golden("ref_rewards")), 7)
    b = losses.effective_beta(q, length, case["beta"], case.get("clamp", 0.0))
    ours = losses.beta_log_z(b, kind)
    theirs = b * b.log() + 1 if kind == "identity" else ours
    want = torch.tensor(case["value"], dtype=torch.float64)
    for log_z, rtol in (theirs, 1e-5), (ours, 1e-5 if case["beta"] < 0.1 else 5e-5):
        known = SimpleNamespace(ref=both("ref_logp"), reward=both("reward"), q=q, length=length, beta=b, log_z=log_z)
        found = losses.losses[case["loss"]](both("policy_logp"), known, case["beta"], case.get("gamma_beta_ratio"))
        torch.testing.assert_close(found, want, rtol=rtol, atol=0)


@pytest.mark.parametrize("beta", [0.01, 0.1, 1.0, 5.0])
def test_partition_functions_are_the_integrals(beta):
    """log E exp(log t / beta) is log(beta / (1 + beta)); log E exp(x / beta) of a standard normal is 1 / (2 beta^2)."""
    z = integrate.quad(lambda t: math.exp((t - 1) / beta), 0, 1)[0]         # Z e^(-1/beta), which does not overflow
    want = [beta * math.log(z) + 1, beta * math.log(beta / (1 + beta)), 1 / (2 * beta)]
    assert [losses.beta_log_z(beta, kind) for kind in losses.LOG_Z] == pytest.approx(want, abs=1e-9)
    assert losses.beta_log_z(torch.tensor([1e-6, 1e3])).isfinite().all()


def test_quantile_counts_and_leaving_oneself_out_removes_the_bias():
    """One that counts itself is (1 - R_q) / n too large on average: .167 for n = 3. A uniform one has the mean 1/2."""
    r = torch.tensor([3.0, 1.0, 2.0])
    assert losses.quantile(r, r).mean() == pytest.approx(0.5 + 1 / (2 * 3))
    assert losses.quantile(r, r, loo=True).tolist() == [1.0, 0.0, 0.5]
    with pytest.raises(ValueError, match="at least one reference"):
        losses.quantile(1.0, [1.0], loo=True)


@pytest.mark.parametrize("beta", [0.1, 0.03])
def test_pass_or_fail_breaks_the_uniform_partition_and_discrete_repairs_it(beta):
    """A quarter passes. The mass, sum_y pi_ref exp(target / beta), should be 1, as it is for rewards without ties."""
    r = torch.tensor([0.0] * 75 + [1.0] * 25, dtype=torch.float64)
    mass = (0.75 * math.exp(0.75 / beta) + 0.25 * math.exp(1 / beta)) / (beta * math.expm1(1 / beta))
    assert mass > 3 and losses.tie_report([r], beta) == pytest.approx(((75 * 74 + 25 * 24) / (100 * 99), mass))
    q = losses.quantile(r, r)
    log_z = losses.discrete_beta_log_z(q, torch.tensor(beta, dtype=torch.float64))
    assert torch.exp((q - log_z) / beta).mean().item() == pytest.approx(1, abs=1e-12)
    distinct = torch.arange(1000, dtype=torch.float64)
    assert losses.tie_report([distinct], beta) == pytest.approx((0, 1 + 1 / (2000 * beta)), rel=1e-3)


# -----------------------------------------------------------------------------
# the script


def ask(text, **more):
    """A row of the data: a prompt."""
    return chat_row(dict(role="system", content="x"), user(text), **more)


def align(lab, out, *args):
    """The log of a run that has to end well."""
    done = script(*aligning(lab, out, *args))
    assert done.returncode == 0, done.stderr
    return log(out)


def test_it_starts_at_the_reference_and_is_watched_and_adapters_have_their_model_without_them_as_reference(
    lab, tmp_path
):
    first, *_ = log(lab / "qrpo")
    watched = {"target", "correlation", "reward_policy", "length", "rank_effective", "dead_units"}
    assert watched <= first.keys() and abs(first["log_ratio"]) < 1e-4 and first["kl"] < 1e-4
    begun, *_, last = align(lab, tmp_path / "run", *ADAPTERS, "--lr=1e-2", f"--references={lab}/qrpo/references")
    for name in "target", "loss", "reward", "log_ratio":
        assert begun[name] == pytest.approx(first[name], abs=1e-4)
    assert last["kl"] > 1e-3


# Two completions a prompt, (text, reward), and the rewards of its references. The better completion is the first,
# second, first and second; "é" is two tokens of one character; what is better is not what is longer.
COUPLES = [
    (("good", 2.0), ("bad é", 1.0), [0, 1.5, 1.5, 3]),
    (("no", -1.0), ("yes, of course", 0.5), [-2, -2, -2, 0]),
    (("é" * 9, 7.0), ("a", 6.5), [7, 7, 6.9, 1]),
    (("long and wrong", 0.25), ("ok", 0.75), [0.5, 0.5, 0.5, 0.5]),
]


def prompt_of(row):
    return TOK.chat(row["messages"], add_generation_prompt=True)[1]


def plain_logp(plain, prompt, said):
    return plain.logp([*prompt, *said])[len(prompt) - 1:].sum()


def plain_loss(kind, lp, p, beta, norm, ties):
    """The loss of one pair, as the module's docstring has it, from its log-probs under the policy, the better first."""
    if kind == "qrpo":
        def target(r, b):
            q = [sum(x <= r for x in p.refs) / len(p.refs) for r in (r, *p.refs)]
            if ties == "le":
                return q[0] - b * math.log(b * math.expm1(1 / b))
            return q[0] - b * math.log(sum(math.exp(x / b) for x in q[1:]) / len(p.refs))

        b = [min(beta / n, 0.25) if norm else beta for n in p.size]
        return sum((target(p.r[k], b[k]) - b[k] * (lp[k] - p.ref[k])) ** 2 for k in (0, 1)) / 2
    ref = [0, 0] if kind == "simpo" else p.ref
    better, worse = [(lp[k] - ref[k]) / p.size[k] for k in (0, 1)]
    if kind == "rebel":
        return ((p.r[0] - p.r[1]) / beta - (better - worse)) ** 2
    return -F.logsigmoid(beta * (better - worse - (0.3 if kind == "simpo" else 0)))


@pytest.mark.parametrize("kind, beta, norm, ties, optimizer, clip", [
    ("qrpo", 2.0, True, "le", "ademamix", 0.02),
    ("qrpo", 0.2, False, "discrete", "adamw", 0.5),
    ("dpo", 5.0, True, "le", "ademamix", 1e9),
    ("rebel", 4.0, True, "le", "adamw", 0.05),
    ("simpo", 0.4, False, "le", "adamw", 0.01),
])
def test_it_is_the_same_run_written_plainly_in_fp64(lab, tmp_path, kind, beta, norm, ties, optimizer, clip):
    """Two steps of two batches of two pairs: the right one is better, lengths are tokens, Z is the prompt's own."""
    rows = []
    for k, (*couple, refs) in enumerate(COUPLES):
        texts, r = zip(*couple)
        rows.append(ask(f"say {k}", completions=texts, rewards=r, ref_rewards=refs))
    write_rows(tmp_path / "data.jsonl", rows)
    how = f"""--data={tmp_path}/data.jsonl --rewards= --n_refs=4 --batch_size=2 --micro_batch=1 --loss={kind}
        --beta={beta} --length_norm={norm} --beta_max=0.25 --ties={ties} --optimizer={optimizer}
        --grad_clip={clip} --gamma=0.3 --lr=1e-2 --eps=1e-2 --weight_decay=0.1 --warmup=0.5 --epochs=1
        --betas=(0.9,0.999,0.99)"""
    logged = align(lab, tmp_path / "run", *how.split())
    plain, pairs = Plain(lab / "sft"), []
    for row, (*couple, refs) in zip(rows, COUPLES):
        texts, r = zip(*sorted(couple, key=lambda c: -c[1]))
        said = [(prompt_of(row), TOK.encode(text) + [END]) for text in texts]
        size = [len(ids) if norm else 1 for _, ids in said]
        ref = [plain_logp(plain, *pair).item() for pair in said]
        pairs.append(SimpleNamespace(said=said, r=r, refs=refs, size=size, ref=ref))
    for step in (0, 1):
        batch = [pairs[k] for k in common.items(step, 2, 4, 1, 28)]
        policy = [[plain_logp(plain, *said) for said in p.said] for p in batch]
        value = sum(plain_loss(kind, lp, p, beta, norm, ties) for lp, p in zip(policy, batch)) / 2
        value.backward()
        ratio = torch.tensor([[lp.item() for lp in pair] for pair in policy]) - torch.tensor([p.ref for p in batch])
        r = torch.tensor([p.r for p in batch])
        w = ratio.flatten().softmax(0)
        found = logged[step]
        names = "loss", "margin", "reward_policy", "kl"
        want = value, ratio.diff().mean().neg(), w @ r.flatten(), w @ (4 * w).log()
        assert [found[name] for name in names] == pytest.approx([x.item() for x in want], rel=2e-5, abs=2e-5)
        plain.update(step + 1, 2, 1e-2 * (1, 0.5)[step], clip, 1e-2, 0.1, optimizer == "adamw")
    assert plain.distance(convert.load_run(str(tmp_path / "run"))[0]) < 1e-3


# -----------------------------------------------------------------------------
# from prompts to pairs


def test_references_on_disk_are_sampled_ids_their_rewards_and_fp64_log_probs(lab):
    """Log-probs are of the finished ones; six prompts, two in a file."""
    plain, reward = Plain(lab / "sft"), runpy.run_path(lab / "reward.py")["reward"]
    folder = lab / "qrpo" / "references"
    files = {stage: sorted(folder.glob(f"{stage}-*")) for stage in ("samples-2", "rewards", "logp")}
    sampled, rewards, logp = (sum((json.loads(file.read_text()) for file in files[stage]), []) for stage in files)
    assert [len(ids) for ids in sampled] == [6] * 6 and len(files["samples-2"]) == 3
    assert rewards == [[[reward("", references.words(TOK, said)) for said in ids], []] for ids in sampled]
    prompts = [prompt_of(ask(f"say {k}")) for k in range(6)]
    want = [plain_logp(plain, prompts[k], said).item() for k, ids in enumerate(sampled)
            for said in ids if said[-1] == END]
    assert logp == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("loo, q", [(1, [0.5, 0.5, 1]), (0, [2 / 3, 2 / 3, 1])])
def test_candidates_are_finished_completions_with_their_quantile(monkeypatch, loo, q):
    """Among all references, or with loo=1 among the others; the fourth has no end, the last is too long."""
    monkeypatch.setattr(qrpo, "loo", loo)
    refs, given = [[5, END], [6, END], [7]], [[5, 6, END], [5] * 7 + [END]]
    prompt = SimpleNamespace(ids=[1, 2], refs=refs, given=given, rated=([1.0, 1.0, 9.0], [9.0, 9.0]))
    found = qrpo.candidates(SimpleNamespace(tok=TOK, longest=9), prompt)
    assert [(c.text, c.reward, c.length) for c in found] == [
        (([1, 2], refs[0]), 1, 2), (([1, 2], refs[1]), 1, 2), (([1, 2], given[0]), 9, 3)]
    assert [c.q for c in found] == pytest.approx(q)
    assert all(c.own.tolist() == pytest.approx(q) for c in found)


def pairs_of(monkeypatch, rewards, i=0, **settings):
    """The rewards of pairs of completions whose quantile is a tenth of their reward."""
    for name, value in (dict(pairs_per_prompt=0) | settings).items():
        monkeypatch.setattr(qrpo, name, value)
    pool = [SimpleNamespace(reward=float(r), q=r / 10) for r in rewards]
    return [(better.reward, worse.reward) for better, worse in qrpo.pairs_of(i, pool)]


def test_pairs_are_disjoint_and_the_better_one_comes_first(monkeypatch):
    """None is of equal rewards, and each prompt has a draw of its own."""
    pairs = functools.partial(pairs_of, monkeypatch)
    found = pairs(range(10))
    assert sorted(sum(found, ())) == list(range(10)) and all(better > worse for better, worse in found)
    assert found != pairs(range(10), i=1) and found != pairs(range(10), seed=29)
    assert pairs([1] * 4) == pairs([]) == pairs([2]) == [] and len(pairs(range(10), pairs_per_prompt=2)) == 2


def test_best_pairs_set_the_best_against_the_worst_fifth_or_the_worst_of_a_few(monkeypatch):
    """Apertus: quantile <= max(.2, 1/n). The one of quantile .3 is taken where n = 3."""
    for n, worse in (10, [0, 1, 2]), (3, [0, 1, 2, 3]):
        found = pairs_of(monkeypatch, [3, 1, 10, 2, 0, 9], pairs="best", n_refs=n)
        assert sorted(found) == [(10, k) for k in worse]


def test_prompts_are_of_a_fixed_day_and_odd_ones_are_left_out(tmp_path, monkeypatch):
    """A run over midnight trains on the prompts that it sampled with."""
    monkeypatch.setattr(qrpo, "rewards", "r")
    asked = [user("what day is it?")]
    write_rows(tmp_path / "data.jsonl", [dict(messages=asked, completions="no list"), chat_row(user(5)), chat_row(),
                                         chat_row(user("a"), assistant("x")), dict(messages=asked)])
    [found], bad = qrpo.prompts_of(TOK, str(tmp_path / "data.jsonl"))
    assert found.line == 5 and found.ids == TOK.chat(asked, add_generation_prompt=True, date="2025-09-02")[1]
    why = "completions that are not a list of texts", chat.ODD, "no messages", "its last message is not the user's"
    assert bad == {reason: (1, f"line {n}") for n, reason in enumerate(why, 1)}


# -----------------------------------------------------------------------------
# rewards and errors


def test_a_repaired_reward_is_given_to_the_references_that_there_are(lab, tmp_path):
    """Of another function of the same file the scores are others. The first batch is scored before all is sampled."""
    args = ["--sample_batch=6", f"--references={tmp_path}/refs"]
    for wrong, says in dict(fails="failed (ZeroDivisionError", nan="rewards=[nan", few="gave 1 rewards for 6").items():
        line = f"line 1: --rewards={lab}/reward.py:{wrong} "
        refused(script(*aligning(lab, tmp_path / wrong, *args, f"--rewards={lab}/reward.py:{wrong}")), line, says)
    [samples] = (tmp_path / "refs").glob("samples-*")
    before = samples.stat().st_mtime_ns
    one, two = (align(lab, tmp_path / name, *args, f"--rewards={lab}/reward.py:{name}", "--epochs=1")
                for name in ("one", "two"))
    assert samples.stat().st_mtime_ns == before and one[0]["reward"] > 0 > two[0]["reward"]


@pytest.mark.parametrize("name, signature, body, want", [
    ("judge", "prompt, completion", "f'{prompt}|{completion}'", ["second|yes", "second|a"]),
    ("judge", "prompt, completion, row=None", "row['gold']", [7, 7]),
    ("judge", "*all", "all[2]['gold']", [7, 7]),
    ("reward", "prompt, completion, *, weight=3", "weight", [3, 3]),
    ("rewards", "row, completions", "[sorted(completions).index(c) + row['gold'] for c in completions]", [8, 7]),
])
def test_a_reward_function_gets_what_it_asks_for(tmp_path, name, signature, body, want):
    """The last question and the answer, and the row too; or the row and all answers."""
    (tmp_path / "r.py").write_text(f"def {name}({signature}):\n    return {body}\n")
    parts = [dict(type="text", text=part) for part in ("sec", "ond")]
    row = chat_row(user("first"), assistant("x"), user(parts), gold=7)
    spec = f"{tmp_path}/r.py" + ":judge" * (name == "judge")
    assert list(references.load_reward(spec, "cpu")(row, ["yes", "a"])) == want


def test_another_reward_equal_ones_or_log_probs_of_another_model_are_errors(lab, tmp_path):
    tied = ask("x", completions=["a", "b"], rewards=[1, 1], ref_rewards=[1] * 6)
    write_rows(tmp_path / "tied.jsonl", [tied])
    done = script(*aligning(lab, tmp_path / "tied", f"--data={tmp_path}/tied.jsonl", "--rewards="))
    refused(done, "nothing to learn from")
    run = shutil.copytree(lab / "qrpo", tmp_path / "run")
    refused(script(*aligning(lab, run, "--resume", f"--rewards={lab}/reward.py:two")), "rewards_hash")
    for file in (run / "references").glob("logp-*.json"):
        file.write_text(json.dumps([x - 5 for x in json.loads(file.read_text())]))
    done = script(*aligning(lab, tmp_path / "new", f"--references={run}/references"))
    assert done.returncode == 2 and "differs from its own reference log-probs" in done.stderr
