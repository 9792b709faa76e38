"""posttrain/sft.py: what is learnt, against the published template's ids; the loss against torch; as users run it."""
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, get_linear_schedule_with_warmup

import chat
import convert
import tokenizer
from conftest import ROOT, refused, script
from engine import memory
from generate import generate
from lab import tuning
from model import Apertus, ApertusConfig
from plain import Plain
from posttrain import common
from trained import log

TOK = tokenizer.load("byte")
SYSTEM = dict(role="system", content="s")
GOLDEN = json.loads(Path(ROOT, "tests", "golden", "chat.json").read_text(encoding="utf-8"))
ANSWERED = [case for case in GOLDEN if case["messages"][-1]["role"] == "assistant"]


def user(text):
    return dict(role="user", content=text)


def assistant(content, **more):
    return dict(role="assistant", content=content, **more)


def chat_row(*messages, **more):
    """A line of the data."""
    return dict(messages=list(messages), **more)


def write_rows(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))


# -----------------------------------------------------------------------------
# which tokens


@pytest.mark.parametrize("case", ANSWERED, ids=lambda c: c["messages"][0]["content"][:12])
def test_the_ids_are_the_published_templates_and_one_end_token(case):
    """The golden ids, and behind them the end token that the template leaves out."""
    options = case["options"]
    more = dict(tools=options.get("tools"), thinking=options.get("enable_thinking", False))
    ids, said = chat.render(tokenizer.load("apertus"), chat_row(*case["messages"], **more), "2026-01-31")
    assert ids == case["ids"] + [68] and said[-1] and not said[0]


CALL = dict(name="f", arguments='{"x": 1}')
CALLED = '<|tools_prefix|>[{"f": {"x": 1}}]<|tools_suffix|>'
BLOCKS = [dict(type="thoughts", text="hmm"), dict(type="tool_calls", calls=[CALL]),
          dict(type="tool_outputs", outputs=[dict(output="OUTPUT")]), dict(type="response", text="Done.")]


@pytest.mark.parametrize("want, turns", [
    ("4END6END", [SYSTEM, user("2+2?"), assistant("4"), user("3+3?END"), assistant("6"), user("last word")]),
    (f"<|inner_prefix|>hmm{CALLED}<|inner_suffix|>Done.END", [user("go"), assistant(dict(blocks=BLOCKS))]),
    (f"{CALLED}okEND", [user("go"), assistant("", tool_calls=[dict(function=CALL)]),
                        dict(role="tool", content="OUTPUT"), assistant("ok")]),
])
def test_all_the_assistant_says_is_learnt_with_thoughts_and_calls_and_nothing_else(want, turns):
    """END: <|assistant_end|>, also as the user types it."""
    row = json.loads(json.dumps(chat_row(*turns)).replace("END", "<|assistant_end|>"))
    ids, said = chat.render(TOK, row)
    assert TOK.decode([i for i, mine in zip(ids, said) if mine]) == want.replace("END", "<|assistant_end|>")


# -----------------------------------------------------------------------------
# the schedule and the order


def test_the_schedule_is_transformers_linear_without_its_zeros():
    """transformers' schedule of one step more begins and ends at 0; ours lies between, so that every step learns."""
    theirs = get_linear_schedule_with_warmup(torch.optim.SGD([torch.zeros(1)], 1.0), 3, 31).lr_lambdas[0]
    for step in range(30):
        assert common.linear(step, 30, 0.1) == pytest.approx(theirs(step + 1), abs=1e-12)
    assert [common.linear(0, 1, warmup) for warmup in (0.0, 1.0)] == [1, 1]


def test_each_epoch_takes_every_conversation_once_in_an_order_of_its_own():
    """A step may hold the end of one epoch and the beginning of the next; the last one is what remains."""
    steps = [common.items(step, 4, 10, 3, 28).tolist() for step in range(8)]
    assert list(map(len, steps)) == [4] * 7 + [2]
    epochs = {tuple(sum(steps, [])[i:i + 10]) for i in (0, 10, 20)}
    assert len(epochs) == 3 and all(sorted(epoch) == list(range(10)) for epoch in epochs)


# -----------------------------------------------------------------------------
# the script


def tune(lab, out, *args):
    """A run of conversations, which has to end well."""
    done = script(*tuning(lab, out, *args))
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(folder):
    return [entry["loss"] for entry in log(folder)]


def test_it_learns_at_the_rates_of_the_schedule_and_watches_its_ranks(lab):
    first, second, *_, last = log(lab / "sft")
    watched = {"rank_effective", "rank_pca99", "rank_stable", "dead_units", "preactivation"}
    assert watched <= first.keys() & last.keys() - second.keys()
    assert (last["step"], last["lr"]) == (19, pytest.approx(1e-2 / 20)) and last["loss"] < first["loss"] - 0.5


@pytest.mark.parametrize("optimizer, clip", [("adamw", 100.0), ("ademamix", 0.05)])
def test_a_run_is_the_same_run_written_plainly_in_fp64(lab, tmp_path, optimizer, clip):
    """Three steps over two epochs: batches, loss, clipping, schedule, update. A large eps shows their scale."""
    rows = [chat_row(SYSTEM, user("q" * n), assistant("yes" * n), user("and?"), assistant("é")) for n in range(1, 7)]
    write_rows(tmp_path / "rows.jsonl", rows)
    how = f"""--data={tmp_path}/rows.jsonl --batch_size=4 --epochs=2 --micro_batch=3 --lr=1e-2 --warmup=0.5
        --optimizer={optimizer} --grad_clip={clip} --eps=1e-3 --weight_decay=0.2"""
    tune(lab, tmp_path / "run", *how.split())
    plain, found = Plain(lab / "hf"), losses(tmp_path / "run")
    for step, rate in enumerate((0.5, 1, 0.5)):
        batch = [chat.render(TOK, rows[k]) for k in common.items(step, 4, 6, 2, 28)]
        logp = torch.cat([plain.logp(ids)[torch.tensor(said[1:])] for ids, said in batch])
        loss = -logp.mean()
        loss.backward()
        plain.update(step + 1, 3, 1e-2 * rate, clip, 1e-3, 0.2, optimizer == "adamw")
        assert found[step] == pytest.approx(loss.item(), rel=1e-5)
    assert plain.distance(convert.load_run(str(tmp_path / "run"))[0]) < 1e-4


def test_packing_changes_no_number(lab, tmp_path):
    tune(lab, tmp_path / "packed", "--pack", "--max_length=200", "--micro_batch=6")
    assert losses(tmp_path / "packed") == pytest.approx(losses(lab / "sft"), abs=2e-5)


def test_what_is_left_out_is_counted_by_kind(lab, tmp_path):
    odd = chat_row(user(5), assistant("c"))
    write_rows(tmp_path / "rows.jsonl", [chat_row(user("hi"), assistant("ho")), odd, chat_row(user("a")), odd])
    said = tune(lab, tmp_path / "run", f"--data={tmp_path}/rows.jsonl", "--epochs=1")
    reasons = f"2 {chat.ODD} (first in line 2 of rows.jsonl); 1 no assistant turn (first in line 3 of rows.jsonl)\n"
    assert f"left out 3 of 4 conversations: {reasons}" in said and "1 conversations, 1 step\n" in said
    refused(script(*tuning(lab, tmp_path / "run", "--epochs=1", "--resume")), "is of another run: data_hash")


def test_show_prints_bytes_as_text_and_what_is_learnt_in_green(lab, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [chat_row(user("a")), chat_row(SYSTEM, user("hi"), assistant("hör\nzu"))])
    said = tune(lab, tmp_path / "run", f"--data={tmp_path}/rows.jsonl", "--show")
    line = "<|user_start|>hi<|user_end|><|assistant_start|>\x1b[0m·\x1b[32mhör⏎zu<|assistant_end|>\x1b[0m\n"
    assert f"{line}8 of 69 " in said and "line 1 is left out: no assistant turn\n" in said


def test_a_start_that_cannot_chat_or_does_not_fit_is_an_error_before_a_weight_is_read(lab, tmp_path, monkeypatch):
    file = shutil.copytree(lab / "hf", tmp_path / "dumb") / "tokenizer.json"
    file.write_text(file.read_text().replace("<|assistant_end|>", "<|something|>"))
    dumb = tuning(lab, tmp_path / "run", f"--init_from={tmp_path}/dumb")
    refused(script(*dumb), "sft.py: ", "its vocabulary has no <|assistant_end|>")
    monkeypatch.setattr(memory, "memory_of", lambda device: 1e5)
    refused(script(*tuning(lab, tmp_path / "run")), "GB that a step takes", "--lora_r=16 --base=bf16")


# A program for two ranks: an AssertionError is a failure.
SHARDS = """
import sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
import convert
from types import SimpleNamespace
from posttrain import start
from engine.parallel import Ranks, orderly_exit

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
        shape, _, path = convert.start_of(folder)
        config = dict(base="fp32")
        run = SimpleNamespace(ranks=ranks, config=config, shape=shape, path=path, device="cpu", dtype=torch.float32)
        with Largest() as largest:
            start.ready(run)
        want = dict(convert.load_any(folder)[0].named_parameters())
        assert all(p.full_tensor().equal(want[n]) for n, p in run.policy.named_parameters())
        sizes = [p.numel() for p in want.values()]
        here = sum(p.to_local().numel() for p in run.policy.parameters())
        assert abs(here / sum(sizes) - 0.5) < 0.005 and largest.numbers <= max(sizes) / 2, (here, largest.numbers)
    ranks.leave()
"""


def test_a_sharded_start_model_is_read_shard_by_shard_and_never_held_whole(launch, lab, tmp_path):
    """From an export, a run folder and a model whose head is its embedding."""
    shape = dict(block_size=64, vocab_size=320, n_layer=2, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=64)
    convert.save_hf(Apertus(ApertusConfig(**shape, tie_embeddings=True)), str(tmp_path / "tied"), TOK)
    (tmp_path / "shards.py").write_text(SHARDS)
    folders = lab / "hf", lab / "sft", tmp_path / "tied"
    codes, text = launch(2, *folders, script=tmp_path / "shards.py", logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]


def test_the_run_chats_in_transformers_with_the_same_greedy_tokens(lab):
    theirs, tok = (kind.from_pretrained(lab / "sft") for kind in (AutoModelForCausalLM, AutoTokenizer))
    messages = [SYSTEM, user("say 3")]
    ids = tok.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == TOK.chat(messages, add_generation_prompt=True)[1]
    # As in the published file, [2, 68, 72]: it ends a turn, and stops where a tool has to answer.
    ends = [TOK.special[f"<|{name}|>"] for name in ("assistant_end", "tools_suffix")]
    assert tok.eos_token_id == ends[0] and theirs.generation_config.eos_token_id == [2, *ends]
    ours = generate(convert.load_run(str(lab / "sft"))[0], ids.tolist(), 30, chat.stop_ids(TOK), temperature=0)
    assert theirs.generate(ids, max_new_tokens=30, do_sample=False).tolist() == ours
