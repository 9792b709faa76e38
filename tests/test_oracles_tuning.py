"""Random conversations, data sizes and settings of fine-tuning against transformers' template and lists of numbers."""

import json
import math
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
from draws import drawn
from hypothesis.strategies import booleans, floats, integers, lists, sampled_from, text, tuples
from lab import aligning, run, tuning
from oracle import Plain
from pytest import MonkeyPatch, approx
from test_qrpo import COUPLES
from test_sft import TOK, assistant, chat_row, user
from tiny import write_rows
from tokenizers import Tokenizer
from trained import log
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

import chat
import convert
import tokenizer
from corpus import readers
from data import permute
from engine.files import write_json
from posttrain import common, losses, qrpo


def batches(n, batch_size, epochs):
    """The items of each step: every epoch has all of them, in an order of its own, and the last step what is left."""
    order = [i for epoch in range(epochs) for i in permute(np.arange(n), n, 28, epoch).tolist()]
    return [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]


@drawn(
    4,
    sizes=lists(integers(1, 9), min_size=3, max_size=7),
    batch_size=integers(2, 4),
    epochs=integers(1, 2),
    micro_batch=integers(1, 3),
    pack=booleans(),
    warmup=floats(0, 1),
)
def test_tuning_is_the_mean_over_the_learnt_tokens_of_each_step(lab, tmp_path_factory, large_eps, sizes, **how):
    large_eps(1e-3)
    folder = tmp_path_factory.mktemp("sft")
    rows = [chat_row(user("q" * n), assistant("yes" * (n % 4 + 1))) for n in sizes]
    write_rows(folder / "rows.jsonl", rows)
    flags = how | dict(data=folder / "rows.jsonl", optimizer="ademamix")
    run(*tuning(lab, folder / "run", *(f"--{name}={value}" for name, value in flags.items())))
    steps, oracle = batches(len(rows), how["batch_size"], how["epochs"]), Plain(lab / "hf")
    for t, (batch, found) in enumerate(zip(steps, log(folder / "run"), strict=True)):
        rate = 1e-2 * common.linear(t, len(steps), how["warmup"])
        conversations = [chat.render(TOK, rows[k], chat.DATE) for k in batch]
        loss = -torch.cat([oracle.logp(ids)[torch.tensor(mask[1:])] for ids, mask in conversations]).mean()
        loss.backward()
        oracle.update(t + 1, len(steps), rate, 1.0, 1e-3, 0.0, False)
        assert (found["loss"], found["lr"]) == approx((loss.item(), rate), rel=1e-4)
    assert oracle.distance(convert.load_any(str(folder / "run"))[0]) < 1e-3


@drawn(3, batch_size=integers(1, 5), epochs=integers(1, 2), dtype=sampled_from(["float32", "bfloat16"]))
def test_preferences_are_learnt_from_every_pair_and_log_probs_are_kept_by_dtype(
    lab, tmp_path_factory, batch_size, epochs, dtype
):
    folder = tmp_path_factory.mktemp("qrpo")
    for name in {"float32", dtype}:
        how = f"""--data={COUPLES} --rewards= --n_refs=4 --batch_size={batch_size} --epochs={epochs} --dtype={name}
            --references={folder}/refs"""
        run(*aligning(lab, folder / name, *how.split()))
        assert len([*folder.glob(f"refs/*/logp-{name}-*")]) == 1
    sizes = [sum(len(TOK.encode(text)) + 1 for text in row["completions"]) for row in readers.records(COUPLES)]
    wanted = [sum(sizes[k] for k in batch) for batch in batches(4, batch_size, epochs)]
    assert [entry["tokens"] for entry in log(folder / name)] == wanted


NUMBER = floats(-3, 3)
COMPLETION = tuples(NUMBER, NUMBER, floats(0, 1), floats(0, 1), integers(1, 90))


def loss_of(kind, better, worse, refs, beta, gamma, norm, ties):
    """The loss of a pair. better, worse: log-prob, that of the reference, reward, its quantile, tokens."""

    def target_and_ratio(pi, ref, reward, q, n):
        own = min(beta / n, 0.1) if norm else beta
        z = own * math.log(sum(math.exp(r / own) for r in refs) / len(refs))
        if ties == "le":
            z = own * math.log(own * math.expm1(1 / own))
        return q - z, own * (pi - ref)

    (pi_b, ref_b, r_b, _, n_b), (pi_w, ref_w, r_w, _, n_w) = better, worse
    if not norm:
        n_b = n_w = 1
    if kind == "qrpo":
        return sum((target - ratio) ** 2 for target, ratio in (target_and_ratio(*c) for c in (better, worse))) / 2
    margin = (pi_b - ref_b) / n_b - (pi_w - ref_w) / n_w
    if kind == "simpo":
        margin = pi_b / n_b - pi_w / n_w - gamma
    return ((r_b - r_w) / beta - margin) ** 2 if kind == "rebel" else math.log1p(math.exp(-beta * margin))


@drawn(
    100,
    kind=sampled_from(["qrpo", "dpo", "rebel", "simpo"]),
    pairs=lists(tuples(COMPLETION, COMPLETION), min_size=1, max_size=3),
    refs=lists(floats(0, 1), min_size=2, max_size=4),
    beta=sampled_from([0.05, 0.3, 5.0]),
    gamma=floats(0, 1),
    norm=booleans(),
    ties=sampled_from(["le", "discrete"]),
)
def test_each_pair_has_the_loss_of_its_own_lengths_and_references(kind, pairs, refs, beta, gamma, norm, ties):
    def candidate(pi, ref, reward, q, n):
        return qrpo.Candidate(([], [0] * n), reward, q, torch.tensor(refs), ref)

    with MonkeyPatch.context() as patch:
        for name, value in dict(loss=kind, length_norm=norm, ties=ties).items():
            patch.setattr(qrpo, name, value)
        known = qrpo.known_values([(candidate(*better), candidate(*worse)) for better, worse in pairs], beta)
    pi = torch.tensor([[better[0], worse[0]] for better, worse in pairs])
    wanted = [loss_of(kind, *pair, refs, beta, gamma, norm, ties) for pair in pairs]
    assert losses.LOSSES[kind](pi, known, beta, gamma).tolist() == approx(wanted, rel=1e-4, abs=1e-4)


# ----------------------------------------------------------------------------------------------------------------------
# conversations and ids


@cache
def in_transformers(folder):
    for name, content in tokenizer.hf_files(TOK).items():
        write_json(folder / name, content)
    return AutoTokenizer.from_pretrained(folder)


WORDS = text("aé你 \n<|>", min_size=1, max_size=9).filter(str.strip)


@drawn(40, system=lists(WORDS, max_size=1), turns=lists(tuples(WORDS, WORDS), max_size=2), last=WORDS)
def test_prompts_and_conversations_are_transformers_with_the_date_of_post_training(
    tmp_path_factory, monkeypatch, system, turns, last
):
    """Without a system message the default one is written, which has the date."""
    theirs = in_transformers(tmp_path_factory.getbasetemp())
    messages = [dict(role="system", content=words) for words in system]
    for question, answer in turns:
        messages += [user(question), assistant(answer)]
    today = SimpleNamespace(strftime=lambda form: chat.DATE)
    monkeypatch.setattr(chat_template_utils, "datetime", SimpleNamespace(now=lambda: today))
    prompt = chat_row(*messages, user(last))
    wanted = theirs.apply_chat_template(prompt["messages"], add_generation_prompt=True)["input_ids"]
    assert chat.prompt_ids(TOK, prompt) == wanted
    if turns:
        wanted = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
        ids, mask = chat.learnable(TOK, chat_row(*messages), 10**6)
        end = TOK.special["<|assistant_end|>"]
        assert (ids, mask) == (wanted["input_ids"] + [end], [*map(bool, wanted["assistant_masks"]), True])


@cache
def vocabulary():
    tok = tokenizer.load("apertus:2048")
    return tok, Tokenizer.from_str(json.dumps(tokenizer.hf_files(tok)["tokenizer.json"]))


@drawn(30, parts=lists(tuples(sampled_from([" ", "\t", "\n", "x", "Éa"]), integers(0, 40)), max_size=5))
def test_ids_are_those_of_tokenizers(parts):
    content = "".join(part * times for part, times in parts)
    ours, theirs = vocabulary()
    assert ours.encode(content) == theirs.encode(content, add_special_tokens=False).ids


@drawn(18, n=integers(-1, 4), after=sampled_from(["", "y", "\t y"]))
def test_long_runs_of_spaces_have_the_ids_of_their_pieces(n, after):
    """Of 200,000 spaces tiktoken, whose regular expression fails on a million, still makes ids at once."""
    content = "x" + " " * (3 * 2**16 + n) + after
    tok, _ = vocabulary()
    assert sum(map(tok.encode, tokenizer.without_long_runs(content)), []) == tok.encode(content)
