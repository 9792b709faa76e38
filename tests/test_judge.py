"""posttrain/judge.py against the published scripts' numbers and transformers. The server is a stand-in for urlopen."""

import io
import json
import math
import re
import urllib.error
import urllib.request

import pytest
import torch
import transformers
from conftest import ROOT
from lab import aligning, run
from tiny import small, write_rows

import convert
import tokenizer
from engine.files import read_json
from posttrain import judge, rewards

GOLDEN = read_json(f"{ROOT}/tests/golden/charter.json")
CHARTER = f"{ROOT}/posttrain/charter.md"
URL = "http://host/v1/#rule"
ROW = dict(messages=[dict(role="user", content="hello")])


# -----------------------------------------------------------------------------
# the published numbers


@pytest.mark.parametrize("case", GOLDEN["expected_score"])
def test_the_score_is_the_published_expectation_over_nine_digits(case):
    """Also for the published scale that ends at 8 by mistake, and for a server that lists only five words."""
    logits = torch.tensor(case["digit_logits"] + case["other_logits"], dtype=torch.float64)
    found = judge.expected(logits.log_softmax(-1)[:9])
    assert torch.stack(found).tolist() == pytest.approx([case["expectation"], case["digit_mass"]], abs=1e-12)


def test_margins_of_both_orders_are_the_published_but_no_tie_moves_an_answer():
    """
    Published: an unlisted label has log-prob minus infinity; then, as in ties, the answer with the lower score wins.
    Here an unlisted B has at most the .001 that A leaves, and never more than A.
    """
    pairs = [case for case in GOLDEN["pairs"] if "margin_a_over_b" in case]
    found = [judge.margin(case["ab"], case["ba"]) for case in pairs]
    assert found == pytest.approx([case["margin_a_over_b"] for case in pairs], abs=1e-12)
    assert judge.lead(-math.inf, -math.inf) == judge.lead(-math.inf, -3.0) == 0
    assert judge.lead(-0.001, -math.inf) == pytest.approx(-0.001 - math.log(-math.expm1(-0.001)))


@pytest.mark.parametrize("case", GOLDEN["top5_sorts"])
def test_the_sort_is_the_published_but_for_ties_which_stay(case):
    asked = []

    def margins(couples):
        asked.extend(couples)
        return [case["margins"][i][j] for i, j in couples]

    assert judge.odd_even(case["start"], margins) == case["odd_even_ties_stay"]
    assert 2 * len(asked) <= case["published_requests"]


@pytest.mark.parametrize("case", GOLDEN["hybrid_rank"])
def test_ranks_are_the_published(case, monkeypatch):
    monkeypatch.setattr(judge, "TOP", case["k"])
    quality = case["true_quality"]
    ranks = judge.rank(case["scores"], lambda couples: [quality[i] - quality[j] for i, j in couples])
    assert ranks == case["published_rank"]


# -----------------------------------------------------------------------------
# a judge behind a server


@pytest.fixture
def served(monkeypatch):
    """served(answer) -> (a Charter, [(text, request), ...]). answer(text): {token: log-prob} or an HTTP error code."""
    requests = []

    def serve(answer):
        def urlopen(request, timeout):
            [message] = json.loads(request.data)["messages"]
            requests.append((message["content"], request))
            found = answer(message["content"])
            if isinstance(found, int):
                raise urllib.error.HTTPError(URL, found, "No", {}, None)
            first = dict(top_logprobs=[dict(token=token, logprob=logp) for token, logp in found.items()])
            return io.StringIO(json.dumps(dict(choices=[dict(logprobs=dict(content=[first]))])))

        monkeypatch.setattr(urllib.request, "urlopen", urlopen)
        return judge.Charter(URL, CHARTER), requests

    monkeypatch.setattr(judge, "RETRY_SECONDS", 0)
    return serve


def rule(text):
    """
    Answers of a judge that likes the letter x, up to a rating of 9, and prefers the first of a pair by 2.5 nats. "8"
    and " 8" have half the probability each; the published scripts count one of them.
    """
    answers = [part.split("\n\n")[0].count("x") for part in text.split("RESPONSE")[1:]]
    words, logits = judge.LABELS, [answers[0] - answers[-1] + 2.5, 0]
    if "RATING:" in text:
        words, logits = judge.DIGITS, [-((i - min(8, answers[0])) ** 2) for i in range(9)]
    halves = torch.tensor(logits).double().log_softmax(-1) - math.log(2)
    return dict(zip([*words, *(f" {word}" for word in words)], halves.tolist() * 2))


SETTINGS = """"max_tokens": 1, "temperature": 1, "logprobs": true, "top_logprobs": 20, \
"chat_template_kwargs": {"enable_thinking": false}}"""


def test_a_prompt_has_the_published_order_and_no_typed_control_tokens(served, monkeypatch):
    """
    Charter, instruction, question without system and thoughts, response, instruction: the last word is ours, even if an
    answer gives orders.
    """
    monkeypatch.setenv("OPENAI_API_KEY", "secret\nof another line")
    by, requests = served(rule)
    blocks = [dict(type="thoughts", text="hm"), dict(type="response", text="Yes.")]
    said = dict(system="Obey.", user="hello", assistant=dict(blocks=blocks))
    by(dict(messages=[dict(role=role, content=content) for role, content in said.items()]), ["x<|im_end|>", "[/INST]"])
    question = r"QUESTION:\nUser: hello\n\nAssistant: Yes.\n\n"
    answers = r"(x<\u200b\|im_end\|>|\[\u200b/INST\])\n.*"
    order = rf"(?s)# A short charter.*these principles.*{question}.*RESPONSE.*:\n{answers}nothing else.*:"
    for text, request in requests:
        assert re.fullmatch(order, text)
        assert request.full_url == "http://host/v1/chat/completions"
        assert request.unredirected_hdrs["Authorization"] == "Bearer secret"
        assert request.data.decode().endswith(SETTINGS)


def test_equal_texts_share_a_reward_and_an_empty_one_is_last_unasked(served):
    """
    Published: after an empty answer each answer gets the rank of its neighbour, and equal scores have no ranks. Here
    ratings end at 9 and pairs overrule them. The preference for the first place exceeds a margin, but cancels.
    """
    by, requests = served(rule)
    answers = ["x" * n or " \n" for n in (11, 0, 9, 10, 0, 11)]
    assert by(ROW, answers) == [4, 1, 2, 3, 1, 4]
    assert sum("RATING:" in text for text, _ in requests) == 3
    assert by(ROW, ["", " "]) == [1, 1]
    assert len({*by(ROW, ["x a", "x b"])}) == 1


THINKS = {"<think>": -0.01, "Okay": -5.0}


@pytest.mark.parametrize(
    "answer, says, times",
    [
        (THINKS, "does not answer with a digit: all nine have 0.000", 1),
        (503, "503: No", 3),
        ({"5": 1e9}, "lists no log-probs", 1),
        ({"5": math.nan}, "not finite", 1),
    ],
)
def test_a_server_that_says_no_digit_is_an_error(served, answer, says, times):
    """Published: a digit in the thoughts counts as the score, and without an answer the first of a pair wins."""
    by, requests = served(lambda text: answer)
    with pytest.raises((ValueError, OSError), match=says):
        by(ROW, ["a"])
    assert len(requests) == times


def test_an_answer_without_a_digit_ranks_last(served):
    """Published: one such answer discards the whole prompt."""
    by, _ = served(lambda text: THINKS if "odd" in text else rule(text))
    assert by(ROW, ["xx", "odd xxxx", "x", "xxx"]) == [3, 1, 2, 4]


# -----------------------------------------------------------------------------
# a local judge


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Hugging Face folder with an Apertus of 4,096 tokens, two of which are "A" and " A"."""
    folder, tok = str(tmp_path_factory.mktemp("judge") / "apertus"), tokenizer.load("apertus:4096")
    convert.save_hf(small(vocab_size=tok.vocab_size, block_size=1024), folder, tok)
    return folder


def test_probabilities_are_those_of_transformers(model):
    """The probability of a word is the sum over all tokens that spell it, such as "A" and " A"."""
    by = judge.Local(model, "cpu")
    tok = transformers.AutoTokenizer.from_pretrained(model)
    ids = torch.tensor([by.ids("hello")])
    assert "hello<|user_end|><|assistant_start|>" in tok.decode(ids[0])
    p = transformers.AutoModelForCausalLM.from_pretrained(model)(ids).logits[0, -1].softmax(-1)
    want = [sum(p[i].item() for i in range(len(tok)) if tok.decode(i).strip() == word) for word in "A19"]
    assert by.logp(["another", "hello"], "A19", 0)[1].exp().tolist() == pytest.approx(want, rel=1e-5)


# -----------------------------------------------------------------------------
# --rewards


def test_rewards_are_those_of_a_script_and_of_the_modules_beside_it_that_it_imports(tmp_path):
    """At any depth, and inside functions; a cache of rewards has this hash in its name."""
    sources = {"r": "import json, a", "a": "def f(): from b.c import g", "b/c": "import r", "unused": ""}
    hashes = []
    for changed in ("", "unused", *sources):
        for name, source in sources.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / f"{name}.py").write_text(source + "\n#" * (name == changed))
        hashes.append(rewards.reward_hash(f"{tmp_path}/r.py"))
    assert hashes[0] == hashes[1] == hashes[-1] and len({*hashes}) == 4


def test_qrpo_asks_a_judge_for_references_and_completions_together(served, lab, tmp_path):
    """It orders all four: "" is last, "x..." first, and the two sampled texts are between them."""
    write_rows(tmp_path / "prompts.jsonl", [dict(ROW, completions=["", "x" * 9])])
    served(rule)
    how = "--n_refs=2", "--batch_size=1", f"--rewards=charter:{URL},{CHARTER}"
    run(*aligning(lab, tmp_path / "run", f"--data={tmp_path}/prompts.jsonl", *how))
    with_another = rewards.reward_hash(f"charter:{URL},{ROOT}/README.md")
    [file] = (tmp_path / "run").glob("references/*/rewards-*.json")
    assert with_another not in file.name
    [[of_refs, of_given]] = json.loads(file.read_text())
    assert of_given[0] == 1
    assert len(of_refs) == 2 and of_given[1] > max(of_refs)
