"""Random conversations, data sizes and settings of fine-tuning against transformers' template and lists of numbers."""

import json
import math
from copy import deepcopy
from dataclasses import fields
from functools import cache
from itertools import product
from types import SimpleNamespace

import numpy as np
import peft
import torch
from draws import drawn
from hypothesis.strategies import booleans, floats, integers, lists, sampled_from, text, tuples
from lab import aligning, run
from pytest import MonkeyPatch, approx, mark
from test_lora import IDX, published
from test_qrpo import COUPLES
from test_sft import TOK, assistant, chat_row, user
from tiny import GOLDEN
from tokenizers import Tokenizer
from torch.testing import assert_close
from trained import log
from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

import chat
import convert
import tokenizer
import tokenizer_json
from corpus import readers
from data import permute
from engine.files import write_json
from posttrain import qrpo
from weights import lora


def batches(n, batch_size, epochs):
    """The items of each step: every epoch has all of them, in an order of its own, and the last step has the rest."""
    order = [i for epoch in range(epochs) for i in permute(np.arange(n), n, 28, epoch).tolist()]
    return [order[begin : begin + batch_size] for begin in range(0, len(order), batch_size)]


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


@drawn(
    60,
    sizes=lists(tuples(*[integers(1, 60)] * 2), min_size=1, max_size=3),
    refs=lists(lists(floats(0, 1), min_size=3, max_size=3), min_size=3, max_size=3),
    beta=sampled_from([0.3, 5.0]),
    norm=booleans(),
    ties=sampled_from(["le", "discrete"]),
)
def test_each_completion_has_the_beta_and_the_partition_of_its_length_and_references(sizes, refs, beta, norm, ties):
    """sizes: tokens of the better and the worse completion of each pair. At most 0.1 only with length_norm."""
    pairs, wanted = [], []
    for completions, quantiles in zip(sizes, refs):
        pairs.append([qrpo.Candidate(([], [0] * n), 0.0, 0.0, torch.tensor(quantiles)) for n in completions])
        for n in completions:
            own = min(beta / n, 0.1) if norm else beta
            mean = sum(math.exp(q / own) for q in quantiles) / len(quantiles)
            log_z = math.log(mean if ties == "discrete" else own * math.expm1(1 / own))
            wanted.append([own, own * log_z, n if norm else 1, n])
    with MonkeyPatch.context() as patch:
        patch.setattr(qrpo, "length_norm", norm)
        patch.setattr(qrpo, "ties", ties)
        known = qrpo.known_values(pairs, beta)
    found = torch.stack((known.beta, known.beta_log_z, known.length, known.tokens), -1)
    assert found.view(-1, 4).numpy() == approx(np.array(wanted), rel=1e-4)


@drawn(
    150,
    rewards=lists(tuples(integers(0, 4), integers(0, 4)), max_size=9),
    i=integers(0, 2),
    seed=integers(0, 2),
    which=sampled_from(["all", "random", "best"]),
    n_refs=integers(2, 10),
)
def test_pairs_are_those_of_a_plain_choice_among_ties(rewards, i, seed, which, n_refs):
    """rewards: (reward, quarters of the quantile) of each completion of prompt i."""
    pool = [SimpleNamespace(reward=reward, q=quarters / 4) for reward, quarters in rewards]
    order = [pool[k] for k in np.random.default_rng((seed, i)).permutation(len(pool))]
    couples = [(order[k], order[k + 1]) for k in range(0, len(order) - 1, 2)]
    if which == "best":
        best = [one for one in order if one.q == max(other.q for other in pool)][:1]
        low = [one for one in order if one.q <= 0.2 or one.q <= 1 / n_refs]
        couples = [(best[0], one) for q in (0.5, 0.25, 0) for one in low if one.q == q]
    wanted = [couple if couple[0].reward > couple[1].reward else couple[::-1] for couple in couples]
    wanted = [(one, two) for one, two in wanted if one.reward != two.reward]
    with MonkeyPatch.context() as patch:
        for name, value in dict(seed=seed, pairs=which, n_refs=n_refs).items():
            patch.setattr(qrpo, name, value)
        found = qrpo.pairs_of(i, pool)
    ids = [[tuple(map(id, pair)) for pair in pairs] for pairs in (found, wanted)]
    assert ids[0] == (ids[1] if which == "all" else ids[1][:1])


VALUES = True, 3, "gaussian", [1], ["q_proj", "v_proj.weight"], {"q_proj": 3}, [[0, 1], [0, 2]]


@mark.filterwarnings("ignore")
@torch.no_grad()
def test_each_field_of_peft_has_its_logits_or_is_an_error(tmp_path):
    """One value at a time. What PEFT cannot make is left out."""
    base, accepted = published(f"{GOLDEN}/lora/base"), set()
    fixed = dict(r=2, lora_alpha=5, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    for field, value in product(fields(peft.LoraConfig), VALUES):
        try:
            config = peft.LoraConfig(**fixed | {field.name: value})
            config.save_pretrained(tmp_path)
            lora.read_peft_config(tmp_path)
            theirs = peft.get_peft_model(deepcopy(base), config)
        except Exception:
            continue
        for name, p in theirs.named_parameters():
            if ".lora_" in name:
                torch.nn.init.normal_(p)
        theirs.save_pretrained(tmp_path)
        ours = convert.load_hf(f"{GOLDEN}/lora/base")
        lora.load_adapter(ours, str(tmp_path))
        accepted.add(field.name)
        assert_close(ours(IDX), theirs.eval()(IDX).logits, rtol=1e-3, atol=1e-3, msg=f"{field.name}={value}")
    assert {"r", "lora_alpha", "use_rslora", "target_modules", "layers_to_transform"} <= accepted


# ----------------------------------------------------------------------------------------------------------------------
# conversations and ids


@cache
def in_transformers(folder):
    for name, content in tokenizer_json.hf_files(TOK).items():
        write_json(folder / name, content)
    return AutoTokenizer.from_pretrained(folder)


WORDS = text("aé你 \n<|>", min_size=1, max_size=9).filter(str.strip)


@drawn(40, system=lists(WORDS, max_size=1), turns=lists(tuples(WORDS, WORDS), max_size=2), last=WORDS)
def test_prompts_are_transformers_with_the_date_of_post_training(tmp_path_factory, monkeypatch, system, turns, last):
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


@cache
def vocabulary():
    tok = tokenizer.load("apertus:2048")
    return tok, Tokenizer.from_str(json.dumps(tokenizer_json.hf_files(tok)["tokenizer.json"]))


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
