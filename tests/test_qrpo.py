"""posttrain/qrpo.py against published numbers, closed forms and a run in plain fp64; then as users run it."""

import copy
import math
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, refused, script
from lab import ADAPTERS, aligning, run
from oracle import Plain
from scipy import integrate
from test_sft import NO_TEXT, SYSTEM, TOK, assistant, chat_row, user
from tiny import write_rows
from trained import log

import chat
import convert
import tokenizer
from configurator import settings as settings_in
from corpus import readers
from engine.files import read_json
from engine.parallel import Ranks
from posttrain import common, losses, pairs, qrpo, references, rewards

GOLDEN = read_json(f"{ROOT}/tests/golden/preference_losses.json")
END = TOK.special["<|assistant_end|>"]


# -----------------------------------------------------------------------------
# published numbers and closed forms


def golden(*names):
    return torch.tensor([GOLDEN["inputs"][name] for name in names], dtype=torch.float64).movedim(0, 1)


def both(name):
    return golden(f"{name}_chosen", f"{name}_rejected")


@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_losses_are_the_published_implementations(case):
    """The published code drops log(1 - e^(-1/beta)) from log Z, so this test does too."""
    length = both("len") if case.get("length_norm", case["loss"] == "simpo") else torch.ones(1).double()
    beta = losses.effective_beta(length, case["beta"], case.get("clamp", 0.0))
    known = SimpleNamespace(
        ref=both("ref_logp"),
        reward=both("reward"),
        q=losses.quantile(both("reward"), golden("ref_rewards")),
        length=length,
        beta=beta,
        beta_log_z=beta * beta.log() + 1,
    )
    found = losses.LOSSES[case["loss"]](both("policy_logp"), known, case["beta"], case.get("gamma_beta_ratio"))
    assert found.tolist() == pytest.approx(case["value"], rel=1e-5)


@pytest.mark.parametrize("beta", [0.01, 0.1, 1.0, 5.0])
def test_the_partition_function_is_the_integral(beta):
    z = integrate.quad(lambda t: math.exp((t - 1) / beta), 0, 1)[0]  # Z e^(-1/beta), which does not overflow
    assert losses.beta_log_z(beta) == pytest.approx(beta * math.log(z) + 1, abs=1e-9)
    assert losses.beta_log_z(torch.tensor([1e-6, 1e3])).isfinite().all()


def test_quantile_counts_and_leaving_oneself_out_removes_the_bias():
    """Counting oneself makes a quantile (1 - R_q) / n too large on average, .167 for n = 3; the true mean is 1/2."""
    r = torch.tensor([3.0, 1.0, 2.0])
    assert losses.quantile(r, r).mean() == pytest.approx(0.5 + 1 / (2 * 3))
    assert losses.quantile(r, r, loo=True).tolist() == [1.0, 0.0, 0.5]


def test_pass_or_fail_breaks_the_uniform_partition_and_discrete_repairs_it():
    """A quarter passes. The mass sum_y pi_ref exp(target / beta) should be 1, as for rewards without ties."""
    beta = torch.tensor(0.1).double()
    r = (torch.arange(100) >= 75).double()
    q = losses.quantile(r, r)
    uniform, discrete = (
        torch.exp((q - log_z) / beta).mean().item()
        for log_z in (losses.beta_log_z(beta), losses.discrete_beta_log_z(q, beta))
    )
    assert discrete == pytest.approx(1, abs=1e-12)
    assert uniform > 3


# -----------------------------------------------------------------------------
# the script


def align(lab, out, *args):
    """Run QRPO, which must succeed. Returns the log."""
    run(*aligning(lab, out, *args))
    return log(out)


def test_adapters_have_the_model_without_them_as_their_reference(lab, tmp_path):
    first, *_ = log(lab / "qrpo")
    begun, *_, last = align(lab, tmp_path / "run", *ADAPTERS, "--lr=1e-2", f"--references={lab}/qrpo/references")
    for name in "target", "loss", "reward", "log_ratio":
        assert begun[name] == pytest.approx(first[name], abs=1e-4)
    assert abs(first["log_ratio"]) < 1e-4 and last["kl"] > 1e-3
    assert first.keys() >= {"correlation", "length"}


# Each row has two completions, their rewards and those of its references. The better completion is the first, second,
# first and second, and not always the longer one; "é" is one character but two tokens.
COUPLES = f"{ROOT}/tests/golden/couples.jsonl"
FIXED = "r", "ref", "target", "beta", "size"


def pair_of(plain, row, norm, ties):
    """A row as a pair, the better completion first: rewards r, logp() of both, its start value ref, target, beta."""
    prompt = TOK.chat(row["messages"], add_generation_prompt=True)
    r, texts = zip(*sorted(zip(row["rewards"], row["completions"]), reverse=True))
    completions = [TOK.encode(text) + [END] for text in texts]

    def logp():
        return torch.stack([plain.logp(prompt + ids)[len(prompt) - 1 :].sum() for ids in completions])

    refs = torch.tensor(row["ref_rewards"]).double()
    size = torch.tensor([len(ids) for ids in completions]).double()
    beta = (0.8 / size).clamp(max=0.1) if norm else torch.full((2,), 0.003).double()
    log_z = losses.beta_log_z(beta)
    if ties == "discrete":
        log_z = losses.discrete_beta_log_z(losses.quantile(refs, refs), beta)
    return SimpleNamespace(
        r=torch.tensor(r).double(),
        logp=logp,
        ref=logp().detach(),
        target=losses.quantile(r, refs) - log_z,
        beta=beta,
        size=size if norm else torch.ones(2),
    )


@pytest.mark.filterwarnings("error:.*use_reentrant")
@pytest.mark.parametrize(
    "kind, b, norm, ties, optimizer, clip",
    [
        ("qrpo", 0.8, True, "le", "ademamix", 0.02),
        ("qrpo", 0.0, False, "discrete", "adamw", 0.5),
        ("dpo", 5.0, True, "le", "ademamix", 1e9),
        ("rebel", 4.0, True, "le", "adamw", 0.05),
        ("simpo", 0.4, False, "le", "adamw", 0.01),
    ],
)
def test_it_is_the_same_run_written_plainly_in_fp64(lab, tmp_path, large_eps, kind, b, norm, ties, optimizer, clip):
    """Steps of three pairs and of one: which completion is better, lengths are tokens, and Z is the prompt's."""
    large_eps(1e-2)
    how = f"""--data={COUPLES} --rewards= --n_refs=4 --batch_size=3 --micro_batch=2 --length_norm={norm}
        --loss={kind} --beta={b} --gamma=0.3 --ties={ties} --optimizer={optimizer} --grad_clip={clip}
        --lr=1e-2 --weight_decay=0.1 --warmup=0.5 --epochs=1 --betas=(0.9,0.999,0.99)"""
    plain = Plain(lab / "sft")
    couples = [pair_of(plain, row, norm, ties) for row in readers.records(COUPLES)]
    done = run(*aligning(lab, tmp_path / "run", *how.split()))
    assert ("warning: 44% of the references" in done.stdout) == (kind == "qrpo" and norm)
    for step, found in enumerate(log(tmp_path / "run")):
        batch = [couples[k] for k in common.item_indices(step, 3, 4, 1, 28)]
        r, ref, target, beta, size = (torch.stack([getattr(p, name) for p in batch]) for name in FIXED)
        logp = torch.stack([p.logp() for p in batch])
        ratio = logp - ref
        better, worse = ((logp if kind == "simpo" else ratio) / size).T
        by_name = dict(
            qrpo=(target - beta * ratio).square().mean(-1),
            dpo=-F.logsigmoid(b * (better - worse)),
            rebel=((r[:, 0] - r[:, 1]) / b - better + worse) ** 2,
            simpo=-F.logsigmoid(b * (better - worse - 0.3)),
        )
        loss = by_name[kind].mean()
        loss.backward()
        w = ratio.flatten().softmax(0)
        want = dict(
            loss=loss,
            margin=-ratio.diff().mean(),
            log_ratio=ratio.mean(),
            reward_policy=w @ r.flatten(),
            kl=w @ (len(w) * w).log(),
        )
        for name, number in want.items():
            assert found[name] == pytest.approx(number.item(), rel=2e-5, abs=2e-5), name
        plain.update(step + 1, 2, (1e-2, 5e-3)[step], clip, 1e-2, 0.1, optimizer == "adamw")
    assert plain.distance(convert.load_any(str(tmp_path / "run"))[0]) < 1e-3


def test_given_pairs_are_learnt_as_the_same_pairs_with_rewards_and_no_reward_is_in_the_log(lab, tmp_path):
    """Without rewards of references, which the other run needs."""
    given = []
    for row in readers.records(COUPLES):
        rejected, chosen = (text for _, text in sorted(zip(row["rewards"], row["completions"])))
        given.append(dict(messages=row["messages"], chosen=chosen, rejected=rejected))
    write_rows(tmp_path / "given.jsonl", [*given, given[0] | dict(chosen=5)])
    how = "--rewards= --loss=dpo --beta=5 --batch_size=3 --lr=1e-2".split()
    rated = align(lab, tmp_path / "rated", *how, f"--data={COUPLES}", "--n_refs=4")
    found = align(lab, tmp_path / "given", *how, f"--data={tmp_path}/given.jsonl")
    for ours, theirs in zip(found, rated, strict=True):
        assert all(ours[name] == theirs[name] for name in ("loss", "margin", "kl", "grad_norm", "tokens"))
    assert rated[0].keys() - found[0].keys() == {"target", "correlation", "reward", "reward_policy"}
    assert found[0]["loss"] == pytest.approx(math.log(2)) and found[-1]["margin"] > 0
    states = [convert.load_any(str(tmp_path / name))[0].state_dict() for name in ("given", "rated")]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


# -----------------------------------------------------------------------------
# from prompts to pairs


QUESTION, BETTER, WORSE = user("The sky is"), assistant(" blue."), assistant(" green.")


@pytest.mark.parametrize(
    "row",
    [
        dict(prompt="The sky is", chosen=" blue.", rejected=" green."),
        dict(chosen="The sky is blue.", rejected="The sky is green."),
        dict(prompt=[QUESTION], chosen=[BETTER], rejected=[WORSE]),
        dict(chosen=[QUESTION, BETTER], rejected=[QUESTION, WORSE]),
        dict(messages=[QUESTION], chosen=" blue.", rejected=" green."),
        dict(
            prompt="The sky is",
            messages=[QUESTION, BETTER],
            chosen=[QUESTION, BETTER],
            rejected=[QUESTION, WORSE],
            score_chosen=9.0,
        ),
    ],
)
def test_a_pair_is_read_in_each_form_of_trl_and_of_the_hub(tmp_path, row):
    """Explicit and implicit, as texts and messages: the examples of TRL's page on formats; and ultrafeedback's rows."""
    write_rows(tmp_path / "pairs.jsonl", [row])
    settings = settings_in(vars(qrpo)) | dict(data=f"{tmp_path}/pairs.jsonl", loss="dpo")
    [found], dropped = pairs.read_data(TOK, settings)
    assert found.ids == TOK.chat([QUESTION], add_generation_prompt=True, date=chat.DATE) and not dropped
    assert found.given == [[*TOK.encode(text), END] for text in (" blue.", " green.")]


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(chosen=[BETTER], rejected=[BETTER]), "chosen and rejected are equal or missing"),
        (dict(chosen=[BETTER, user("why?"), WORSE]), "chosen: want one answer of the assistant after the prompt"),
        (dict(rejected=[assistant(5)]), f"rejected: {NO_TEXT}"),
        (dict(prompt="else", chosen=[QUESTION, BETTER], rejected=[QUESTION, WORSE]), "prompt: another than that with"),
        (dict(prompt=[QUESTION, BETTER]), "its last message is not the user's"),
        (dict(chosen=[user("why?"), BETTER], rejected=[user("how?"), WORSE]), "prompt: another than"),
        (dict(prompt=5), "prompt: want a text or a list of messages"),
        (dict(chosen=[BETTER | dict(train=False)]), "chosen: no word to learn: each answer has weight 0"),
        (dict(rejected=[WORSE | dict(weight=0)]), "rejected: no word to learn: each answer has weight 0"),
    ],
)
def test_what_is_no_pair_is_left_out_for_a_reason(changes, reason):
    row = dict(prompt=[QUESTION], chosen=[BETTER], rejected=[WORSE])
    assert pairs.pair_ids(TOK, row | changes).startswith(reason)


def test_what_a_pair_or_a_prompt_holds_and_nobody_reads_is_counted_by_key(tmp_path):
    """A function of the user gets all columns of a row, so that only keys of messages are counted."""
    pair = dict(prompt=[QUESTION], chosen=[BETTER | dict(mood="glad")], rejected=[WORSE], score_chosen=9.0, id=5)
    write_rows(tmp_path / "data.jsonl", [pair, pair | dict(source="web", score_chosen=None)])
    settings = settings_in(vars(qrpo)) | dict(data=f"{tmp_path}/data.jsonl", loss="dpo")
    prompts, _ = pairs.read_data(TOK, settings)
    of_messages, *of_rows = [
        f"{count} of 2 prompts have the key {key}, which is not read (first in line {line})"
        for count, key, line in ((2, "'mood' in a message", 1), (1, "'score_chosen'", 1), (1, "'source'", 2))
    ]
    assert pairs.count_unread(prompts, "") == [of_messages, *of_rows]
    assert pairs.count_unread(prompts, "reward.py") == [of_messages]


def test_a_prompt_or_a_system_message_that_loses_against_messages_is_counted(tmp_path):
    asked = [dict(role="system", content="s"), QUESTION | dict(mood="sad")]
    same = dict(prompt="The sky is", messages=asked, system="s", chosen="a", rejected="b")
    third = dict(prompt=asked, system="t", chosen="a", rejected="b")
    write_rows(tmp_path / "data.jsonl", [same, same | dict(prompt="else"), third])
    settings = settings_in(vars(qrpo)) | dict(data=f"{tmp_path}/data.jsonl", loss="dpo")
    prompts, _ = pairs.read_data(TOK, settings)
    assert pairs.count_unread(prompts, "") == [
        f"{count} of 3 prompts have the key {key}, which is not read (first in line {line})"
        for count, key, line in (
            (3, "'mood' in a message", 1),
            (1, "'prompt' next to other messages", 2),
            (1, "'system' next to a system message", 3),
        )
    ]


@pytest.mark.parametrize("flags, says", [("", True), ("--length_norm=False", False)])
def test_dpo_says_that_its_beta_is_by_the_token_where_trls_is_not(lab, tmp_path, flags, says):
    """TRL: DPOConfig has beta=0.1."""
    write_rows(tmp_path / "pairs.jsonl", [dict(prompt=f"{i}?", chosen="a", rejected="b") for i in range(4)])
    how = f"--data={tmp_path}/pairs.jsonl --rewards= --loss=dpo --epochs=1 --beta=0.1 {flags}".split()
    done = script(*aligning(lab, tmp_path / "run", *how))
    assert done.returncode == 0, done.stderr
    line = "beta is 0.1 / tokens of the answer; TRL's DPO has --length_norm=False --beta=0.1\n"
    assert (line in done.stdout) == says


def test_thoughts_of_one_answer_open_the_deliberation_of_both():
    thoughtful = dict(prompt=[QUESTION], chosen=[BETTER | dict(reasoning="blue?")], rejected=[WORSE])
    swapped = dict(prompt=[QUESTION], chosen=[WORSE], rejected=[BETTER | dict(reasoning="blue?")])
    for n, row in enumerate((thoughtful, swapped)):
        prompt, *answers = pairs.pair_ids(TOK, row)
        assert prompt == TOK.chat([QUESTION], None, True, True, chat.DATE)
        assert answers[n][:1] == [TOK.special["<|inner_prefix|>"]]


def test_a_prompt_alone_is_the_same_as_messages_and_so_is_its_reward(tmp_path):
    (tmp_path / "r.py").write_text("def reward(prompt, completion):\n    return prompt + completion\n")
    write_rows(tmp_path / "data.jsonl", [dict(prompt="a"), dict(prompt=[user("a")]), chat_row(user("a"))])
    settings = settings_in(vars(qrpo)) | dict(data=f"{tmp_path}/data.jsonl", rewards=f"{tmp_path}/r.py")
    prompts, _ = pairs.read_data(TOK, settings)
    score = rewards.load_reward(settings["rewards"], "cpu")
    assert [score(prompt.row, ["b"]) for prompt in prompts] == [["ab"]] * 3
    assert len({tuple(prompt.ids) for prompt in prompts}) == 1
    assert pairs.count_repeated(prompts) == ["2 of 3 prompts repeat another"]


def test_references_on_disk_are_six_of_each_prompt_and_begin_behind_it(lab):
    """There are six prompts, two in each file."""
    sampled = sum(map(common.contents, sorted((lab / "qrpo" / "references").glob("*/samples-2-*"))), [])
    assert [len(ids) for ids in sampled] == [6] * 6
    assert TOK.special["<|assistant_start|>"] not in {completion[0] for ids in sampled for completion in ids}


def test_references_are_shared_by_runs_that_sample_alike_and_no_others(lab, tmp_path):
    """A setting that decides the samples, the start model, a prompt and the tokenizer each make another folder."""
    model, tok = convert.load_any(f"{lab}/sft")
    settings = settings_in(vars(qrpo)) | dict(references=f"{tmp_path}/refs", out=f"{tmp_path}/run")
    prompts = [references.Prompt("line 1", dict(prompt="a"), [1, 2], [])]

    def folder_of(model=model, tok=tok, prompts=prompts, **changes):
        return references.References(model, tok, prompts, Ranks(), "cpu", settings | changes).folder

    decisive = dict(seed=29, base="int8", n_refs=7, sample_batch=5, max_new_tokens=9, max_length=99)
    others = dict(lr=1.0, loss="rebel", beta=3.0, epochs=9, batch_size=1, pairs="all", out="b", rewards="c", lora_r=8)
    edited = copy.deepcopy(model)
    edited.lm_head.weight.data[0, 0] += 1
    more = dict(model=edited, tok=tokenizer.load("apertus:300"), prompts=[replace(prompts[0], ids=[1, 3])])
    folders = [folder_of(**{name: value}) for name, value in (decisive | more).items()]
    assert len({folder_of(), *folders}) == 1 + len(folders)
    assert {folder_of(**{name: value}) for name, value in others.items()} == {folder_of()}


def test_candidates_are_finished_completions_with_their_quantile():
    """
    The quantile of a given completion is among all references; that of a reference is among the others. A reference
    without an end and a completion that is too long are left out.
    """
    a, b, c = TOK.encode("abc")
    refs = [[a, END], [b, END], [c]]
    given = [[a, b, END], [c] * 7 + [END]]
    prompt = references.Prompt("line 1", {}, [1, 2], given, [5, 9], refs, [1, 1, 9])
    found = qrpo.candidates_of(prompt, END, 9)
    assert [c.sequence for c in found] == [([1, 2], ids) for ids in (*refs[:2], given[0])]
    assert [c.length for c in found] == [2, 2, 3]
    assert [c.q for c in found] == pytest.approx([0.5, 0.5, 2 / 3])
    assert found[0].ref_quantiles.tolist() == pytest.approx([0.5, 0.5, 1])
    [alone, _] = qrpo.candidates_of(replace(prompt, references=[]), END, 99)
    assert alone.ref_quantiles.tolist() == pytest.approx([2 / 3, 2 / 3, 1])


def test_each_batch_of_prompts_has_its_own_draws_and_room_for_its_shortest(monkeypatch):
    def seed_and_room(model, tok, prompts, n, room, generator):
        return generator.initial_seed(), room

    monkeypatch.setattr(references, "sample_completions", seed_and_room)
    store = SimpleNamespace(device="cpu", tok=None, settings=dict(seed=1, n_refs=2, max_length=9, max_new_tokens=7))
    store.room_for = lambda prompts: references.References.room_for(store, prompts)
    drawn = [references.References.sample_prompts(store, None, k, [[0] * 3, [0] * 5]) for k in (0, 2)]
    assert drawn[0][0] != drawn[1][0] and [room for _, room in drawn] == [6, 6]


@pytest.fixture
def pairs_of(monkeypatch):
    """pairs_of(rewards): the rewards of the pairs. A completion's quantile is a tenth of its reward, at most 1."""

    def pairs_of(rewards, i=0, **settings):
        for name, value in (dict(pairs="all") | settings).items():
            monkeypatch.setattr(qrpo, name, value)
        pool = [SimpleNamespace(reward=r, q=min(r / 10, 1)) for r in rewards]
        return [(better.reward, worse.reward) for better, worse in qrpo.pairs_of(i, pool)]

    return pairs_of


def test_pairs_are_disjoint_and_the_better_one_comes_first(pairs_of):
    """No pair has equal rewards, and pairs are drawn by prompt and seed."""
    found = pairs_of(range(10))
    assert sorted(sum(found, ())) == list(range(10))
    assert all(better > worse for better, worse in found)
    assert found not in (pairs_of(range(10), i=1), pairs_of(range(10), seed=29))
    assert not pairs_of([1] * 4) + pairs_of([])
    assert pairs_of(range(10), pairs="random", seed=28) == found[:1]


@pytest.mark.parametrize("n, worse", [(10, 2), (3, 3)])
def test_best_pairs_set_one_of_the_best_against_the_best_of_the_worst_fifth_or_of_a_few(pairs_of, n, worse):
    """Apertus pairs any of quantile 1 with quantiles <= max(.2, 1/n), so quantile .3 is taken only if n = 3."""
    found = [pairs_of([3, 1, 10, 2, 0, 9, 12], i, pairs="best", n_refs=n) for i in range(9)]
    assert all(len(some) == 1 for some in found)
    assert {some[0] for some in found} == {(10, worse), (12, worse)}


def test_prompts_are_of_a_fixed_day_and_odd_ones_are_left_out(tmp_path):
    """So a run over midnight trains on the prompts with which it sampled."""
    question = user("what day is it?")
    good = chat_row(question) | dict(system="s")
    reasons = {
        "completions that are not a list of texts": good | dict(completions="no list"),
        NO_TEXT: chat_row(user(5)),
        "its last message is not the user's": chat_row(user("a"), assistant("x")),
    }
    write_rows(tmp_path / "data.jsonl", [*reasons.values(), good])
    settings = settings_in(vars(qrpo)) | dict(data=f"{tmp_path}/data.jsonl", rewards="r.py")
    [found], bad = references.read_prompts(TOK, settings)
    assert found.ids == TOK.chat([SYSTEM, question], add_generation_prompt=True, date="2025-09-02")
    assert bad == [(why, f"line {n}") for n, why in enumerate(reasons, 1)]


# -----------------------------------------------------------------------------
# rewards and errors


def test_a_repaired_reward_is_given_to_the_references_that_there_are(lab, tmp_path):
    """Another function of the same file is scored anew. The first batch is scored before the rest is sampled."""

    def with_reward(name):
        sampling = ["--sample_batch=6", f"--references={tmp_path}/refs", "--epochs=1"]
        return tmp_path / name, *sampling, f"--rewards={lab}/reward.py:{name}"

    for wrong, says in dict(fails="failed (ZeroDivisionError", nan="rewards=[nan", few="want 6 finite numbers").items():
        refused(script(*aligning(lab, *with_reward(wrong))), f"line 1: --rewards={lab}/reward.py:{wrong} ", says)
    [samples] = (tmp_path / "refs").glob("*/samples-*")
    before = samples.stat()
    one, two = (align(lab, *with_reward(name)) for name in ("one", "two"))
    assert samples.stat().st_mtime_ns == before.st_mtime_ns
    assert one[0]["reward"] > 0 > two[0]["reward"]


@pytest.mark.parametrize(
    "signature, body, want",
    [
        ("reward(prompt, completion)", "f'{prompt}|{completion}'", ["second|yes", "second|a"]),
        ("reward(prompt, completion, row=None)", "row['gold']", [7, 7]),
        ("reward(prompt, completion, **columns)", "columns", [dict(gold=7)] * 2),
        ("rewards(row, completions)", "[row['gold'], *completions]", [7, "yes", "a"]),
        (
            "reward(prompts, completions, **kwargs)",
            "zip((prompt[0]['content'] for prompt in prompts), completions, kwargs['gold'])",
            [("first", [assistant("yes")], 7), ("first", [assistant("a")], 7)],
        ),
        (
            "reward(completions, gold, **kwargs)",
            "zip([c[0]['content'] for c in completions], gold)",
            [("yes", 7), ("a", 7)],
        ),
    ],
)
def test_a_reward_function_gets_what_it_asks_for(tmp_path, signature, body, want):
    """
    reward() gets the last question and the answer; rewards() the row and all answers. Functions of TRL's page on GRPO
    get lists: of conversations, of their answers as messages, and of each other column of the data.
    """
    (tmp_path / "r.py").write_text(f"def {signature}:\n    return {body}\n")
    parts = [dict(type="text", text=part) for part in ("sec", "ond")]
    row = chat_row(user("first"), assistant("x"), user(parts), gold=7)
    assert list(rewards.load_reward(f"{tmp_path}/r.py", "cpu")(row, ["yes", "a"])) == want


def test_trls_reward_gets_texts_of_a_prompt_that_is_a_text_and_another_signature_is_an_error(tmp_path):
    (tmp_path / "r.py").write_text(
        "def reward(prompts, completions, **columns):\n    return prompts, completions, columns\n"
    )
    row = chat.as_prompt(dict(prompt="q", gold=7))
    score = rewards.load_reward(f"{tmp_path}/r.py", "cpu")
    assert score(row, ["yes", "a"]) == (["q", "q"], ["yes", "a"], dict(gold=[7, 7]))
    (tmp_path / "r.py").write_text("def reward(completions, gold):\n    return gold\n")
    with pytest.raises(ValueError, match=r"\(completions, gold\): want \(row, completions\), or TRL's"):
        rewards.load_reward(f"{tmp_path}/r.py", "cpu")


def test_a_reward_imports_the_modules_beside_it_but_none_with_a_name_of_ours(tmp_path):
    (tmp_path / "length_of_it.py").write_text("def length(text): return len(text)")
    (tmp_path / "model.py").write_text("def length(text): return -1")
    for name in "length_of_it", "model":
        (tmp_path / f"{name}_r.py").write_text(
            f"def reward(prompt, completion):\n    from {name} import length\n    return length(completion)"
        )
    assert rewards.load_reward(f"{tmp_path}/length_of_it_r.py", "cpu")(chat_row(user("q")), ["yes", "a"]) == [3, 1]
    with pytest.raises(ValueError, match="it would import model.py of this project"):
        rewards.load_reward(f"{tmp_path}/model_r.py", "cpu")


def test_another_reward_and_equal_ones_are_errors(lab, tmp_path):
    old = shutil.copytree(lab / "qrpo", tmp_path / "old")
    refused(script(*aligning(lab, old, "--resume", f"--rewards={lab}/reward.py:two")), "rewards_hash")
    new = aligning(lab, tmp_path / "new", f"--references={old}/references")
    (tmp_path / "r.py").write_text("def reward(prompt, completion): return 1")
    refused(script(*new, f"--rewards={tmp_path}/r.py"), "nothing to learn from")
