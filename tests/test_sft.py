"""posttrain/sft.py: trained tokens against the published template's ids; the loss against torch; as users run it."""

import json
import shutil

import pytest
import torch
from conftest import ROOT, refused, script
from lab import run, tuning
from tiny import small, write_rows
from trained import log
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup

import chat
import convert
import tokenizer
from engine.files import read_text
from generate import generate
from posttrain import common

TOK = tokenizer.load("byte")
SYSTEM = dict(role="system", content="s")
GOLDEN = json.loads(read_text(f"{ROOT}/tests/golden/chat.json"))
NO_TEXT = "content: a number where a text, parts or blocks belong"
ANSWERED = [case for case in GOLDEN if case["messages"][-1]["role"] == "assistant"]


def user(text):
    return dict(role="user", content=text)


def assistant(text):
    return dict(role="assistant", content=text)


def chat_row(*messages, **more):
    """A line of the data."""
    return dict(messages=list(messages), **more)


# -----------------------------------------------------------------------------
# which tokens, at which rate


@pytest.mark.parametrize("case", ANSWERED)
def test_the_ids_are_the_published_templates_and_one_end_token(case):
    """
    The golden ids, followed by the end token that the template omits. Thoughts are found without a flag. An answer of
    weight 0, OpenAI's sign, is not learnt.
    """
    row = chat_row(*case["messages"], tools=case["options"].get("tools"))
    ids, said = chat.render(tokenizer.load("apertus"), row, "2026-01-31")
    assert ids == case["ids"] + [68]
    assert said[-1] > said[0]
    row["messages"][-1]["weight"] = 0
    assert not chat.render(TOK, row)[1][-1]


def test_the_schedule_is_transformers_linear_without_its_zeros():
    """Ours is transformers' schedule of one step more without its first and last rate, 0, so every step learns."""
    [theirs] = get_linear_schedule_with_warmup(torch.optim.SGD([torch.zeros(1)]), 3, 31).lr_lambdas
    for step in range(30):
        assert common.linear(step, 30, 0.1) == pytest.approx(theirs(step + 1), abs=1e-12)
    assert common.linear(0, 1, 0.0) == common.linear(0, 1, 1.0) == 1


# -----------------------------------------------------------------------------
# the script


def tune(lab, out, *args):
    """The output of a run on conversations, which must succeed."""
    return run(*tuning(lab, out, *args)).stdout


def losses(folder):
    return [entry["loss"] for entry in log(folder)]


def test_packing_changes_no_number(lab, tmp_path, monkeypatch):
    """Even if the start model was pretrained without the document mask. MFU counts the rows, not the start's window."""
    start = shutil.copytree(lab / "pretrained", tmp_path / "start")
    config = read_text(start / "config.json")
    (start / "config.json").write_text(config.replace('"doc_mask": true', '"doc_mask": false'))
    packed = f"--pack --max_length=200 --micro_batch=6 --init_from={start}".split()
    lengths = []
    monkeypatch.setattr("model.Apertus.flops_per_token", lambda model, T: lengths.append(T) or 1)
    assert "warning" not in tune(lab, tmp_path / "packed", *packed)
    assert lengths == [200]
    assert losses(tmp_path / "packed") == pytest.approx(losses(lab / "sft"), abs=2e-5)


def test_what_is_left_out_is_counted_by_kind_and_other_data_are_another_run(lab, tmp_path):
    odd = chat_row(user(5), assistant("c"))
    write_rows(tmp_path / "rows.jsonl", [chat_row(user("hi"), assistant("ho")), odd, chat_row(user("a")), odd])
    said = tune(lab, tmp_path / "run", f"--data={tmp_path}/rows.jsonl", "--epochs=1")
    reasons = f"2 {NO_TEXT} (first in line 2 of rows.jsonl); 1 no assistant turn (first in line 3 of rows.jsonl)\n"
    few = "1 conversations, 1 step\nwarning: fewer than 20 steps hardly change a model: take --batch_size=1,"
    assert f"left out 3 of 4 conversations: {reasons}" in said and few in said
    refused(
        script(*tuning(lab, tmp_path / "run", "--epochs=1", "--resume")), "was trained with other settings: data_hash"
    )


def test_the_user_reads_what_is_cut_repeated_and_not_read_and_that_the_start_has_not_ended(lab, tmp_path):
    start = shutil.copytree(lab / "sft", tmp_path / "start")
    (start / "summary.json").unlink()
    twice = chat_row(user("a"), assistant("b" * 300) | dict(name="x", mood="glad", tags=[]))
    write_rows(tmp_path / "rows.jsonl", [twice, chat_row(user("hi"), assistant("ho")), twice])
    printed = tune(lab, tmp_path / "run", f"--data={tmp_path}/rows.jsonl", f"--init_from={start}", "--too_long=cut")
    for line in (
        "2 of 3 conversations are cut at max_length=256 tokens (first in line 1 of rows.jsonl)",
        "2 of 3 conversations have the key 'mood' in a message, which is not read (first in line 1 of rows.jsonl)",
        "1 of 3 conversations repeat another",
    ):
        assert f"{line}\n" in printed
    assert f"{start} has not ended, and its newest checkpoint is the start\n" in printed
    assert "tags" not in printed and "left out" not in printed


def test_show_prints_bytes_as_text_and_what_is_learnt_in_green(lab, tmp_path):
    """Without the default system message."""
    own = chat_row(SYSTEM, user("hi"), assistant("hör\nzu"), functions=["f"])
    write_rows(tmp_path / "rows.jsonl", [chat_row(user("a")), own, chat_row(user("q"), assistant("x"))])
    said = tune(lab, tmp_path / "run", f"--data={tmp_path}/rows.jsonl", "--show")
    line = "<|user_start|>hi<|user_end|><|assistant_start|>\x1b[0m·\x1b[32mhör⏎zu<|assistant_end|>\x1b[0m\n"
    assert f"{line}8 of 69 tokens are learnt (green)\nthe key 'functions' is not read\n" in said
    assert "line 1 is left out: no assistant turn\n" in said
    begins, learnt = said.splitlines()[-3:-1]
    assert begins.startswith("\x1b[90m<|user_start|>q") and ", is not shown" in learnt


def test_a_start_that_cannot_chat_is_an_error(lab, tmp_path):
    file = shutil.copytree(lab / "hf", tmp_path / "dumb") / "tokenizer.json"
    file.write_text(file.read_text().replace("<|assistant_end|>", "<|something|>"))
    dumb = tuning(lab, tmp_path / "run", f"--init_from={tmp_path}/dumb")
    refused(script(*dumb), "its vocabulary has no control token <|assistant_end|>")


# A script for two ranks; an AssertionError fails the test.
SHARDS = """
import sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
import convert
from engine.exit import orderly_exit
from engine.parallel import Ranks
from build import build_model, load_whole
from weights.folders import start_of

class Largest(TorchDispatchMode):
    numbers, files = 0, set()
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor) and not t.is_meta and type(t) is torch.Tensor:
                store = t.untyped_storage()
                if t.dtype == torch.uint8:                  # safetensors: bytes of a file, mapped and not read
                    self.files.add(store.data_ptr())
                elif store.data_ptr() not in self.files:
                    self.numbers = max(self.numbers, store.nbytes() // t.element_size())
        return out

with orderly_exit():
    ranks = Ranks("fsdp")
    ranks.join("cpu", 60)
    for folder in sys.argv[1:]:
        shape, _, path = start_of(folder)
        settings = dict(init_from=folder, lora_r=0, base="fp32", dtype="float32", recompute="none", seed=1)
        with Largest() as largest:
            model = build_model(shape, settings, ranks, "cpu", weights=path)
        want = dict(convert.load_any(folder)[0].named_parameters())
        assert all(p.full_tensor().equal(want[n]) for n, p in model.named_parameters())
        sizes = [p.numel() for p in want.values()]
        here = sum(p.to_local().numel() for p in model.parameters())
        assert abs(here / sum(sizes) - 0.5) < 0.005 and largest.numbers <= max(sizes) / 2, (here, largest.numbers)
        whole = load_whole(settings | dict(base="bf16"), "cpu")     # each rank holds it whole to sample
        assert whole.lm_head.weight.dtype == torch.bfloat16
    ranks.leave()
"""


def test_a_sharded_start_model_is_read_shard_by_shard_and_never_held_whole(launch, lab, tmp_path):
    """From an export, a run folder and a model whose head is its embedding."""
    convert.save_hf(small(vocab_size=320, n_embd=96, tie_embeddings=True), str(tmp_path / "tied"), TOK)
    (tmp_path / "shards.py").write_text(SHARDS)
    folders = lab / "hf", lab / "sft", tmp_path / "tied"
    codes, text = launch(2, *folders, script=tmp_path / "shards.py", logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]


def test_the_run_chats_in_transformers_with_the_same_greedy_tokens(lab):
    """eos_token_id is [2, 68, 72] in the published file: it ends a turn, and stops where a tool has to answer."""
    theirs, tok = (kind.from_pretrained(lab / "sft") for kind in (AutoModelForCausalLM, AutoTokenizer))
    messages = [SYSTEM, user("say 3")]
    ids = tok.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == TOK.chat(messages, add_generation_prompt=True)
    ours, own = convert.load_any(str(lab / "sft"))
    ends = [TOK.special[f"<|{name}|>"] for name in ("assistant_end", "tools_suffix")]
    assert theirs.generation_config.eos_token_id == [2, *ends]
    assert own.eos == tok.eos_token_id == ends[0]
    answer = theirs.generate(torch.tensor([ids]), max_new_tokens=30, do_sample=False)
    assert answer.tolist() == generate(ours, [ids], 30, chat.stop_ids(TOK), temperature=0)
