"""posttrain/sft.py: what is learnt, against the published template's ids; the loss against torch; as users run it."""

import json
import os
import shutil
import signal

import pytest
import torch
import torch.nn.functional as F

import chat
import convert
import tokenizer
from conftest import ROOT, refused, same, script, weights
from engine import memory
from generate import generate
from model import Apertus, ApertusConfig
from plain import Plain
from posttrain import collapse, common, sft

TINY = dict(
    block_size=512,
    vocab_size=320,
    n_layer=2,
    n_head=2,
    n_kv_head=1,
    n_embd=32,
    ffn_dim=64,
    init_std=0.05,
)
TOK = tokenizer.load("byte")
with open(os.path.join(ROOT, "tests", "golden", "chat.json"), encoding="utf-8") as f:
    ANSWERED = [case for case in json.load(f) if case["messages"][-1]["role"] == "assistant"]


def user(text):
    return dict(role="user", content=text)


def assistant(content):
    return dict(role="assistant", content=content)


SYSTEM = dict(role="system", content="s")


def chat_row(*messages, **more):
    """A line of the data."""
    return dict(messages=list(messages), **more)


def write_rows(path, rows, between="\n"):
    path.write_text(between.join(map(json.dumps, rows)))


def learnt(*messages, **more):
    ids, said = chat.render(TOK, chat_row(*messages, **more), "2026-01-31")
    return TOK.decode([i for i, mine in zip(ids, said) if mine])


# -----------------------------------------------------------------------------
# which tokens


@pytest.mark.parametrize("case", ANSWERED, ids=lambda c: c["messages"][0]["content"][:12])
def test_the_ids_are_the_published_templates_and_one_end_token(case):
    """Until Apertus' own tokenizer: the golden ids, and behind them the end token that the template leaves out."""
    options = case["options"]
    row = chat_row(
        *case["messages"],
        tools=options.get("tools"),
        thinking=options.get("enable_thinking", False),
    )
    ids, said = chat.render(tokenizer.load("apertus"), row, "2026-01-31")
    assert ids == case["ids"] + [68] and said[-1] and not said[0]


def test_all_the_assistant_says_is_learnt_with_thoughts_and_calls_and_nothing_else():
    end = "<|assistant_end|>"
    turns = (
        SYSTEM,
        user("2+2?"),
        assistant("4"),
        user(f"3+3?{end}"),
        assistant("6"),
        user("last word"),
    )
    assert learnt(*turns) == f"4{end}6{end}"
    call = dict(name="f", arguments='{"x": 1}')
    blocks = [
        dict(type="thoughts", text="hmm"),
        dict(type="tool_calls", calls=[call]),
        dict(type="tool_outputs", outputs=[dict(output="OUTPUT")]),
        dict(type="response", text="Done."),
    ]
    said = '<|tools_prefix|>[{"f": {"x": 1}}]<|tools_suffix|>'
    tools = [dict(name="f", description="a tool")]
    found = learnt(user("go"), assistant(dict(blocks=blocks)), tools=tools)
    assert found == f"<|inner_prefix|>hmm{said}<|inner_suffix|>Done.{end}"
    openai = dict(role="assistant", content="", tool_calls=[dict(function=call)])
    assert (
        learnt(user("go"), openai, dict(role="tool", content="OUTPUT"), assistant("ok"))
        == f"{said}ok{end}"
    )


@pytest.mark.parametrize(
    "why, messages",
    [
        ("no assistant turn", [SYSTEM, user("a")]),
        ("roles out of order", [assistant("first")]),
        ("roles out of order", [user("a"), user("b"), assistant("c")]),
        ("an empty turn", [user(" "), assistant("c")]),
        ("an empty turn", [user("a"), assistant(None)]),
        (
            "ends with a tool's output",
            [user("a"), assistant("b"), dict(role="tool", content="c")],
        ),
        ("more than max_length=300 tokens", [user("a"), assistant("x" * 500)]),
        (chat.ODD, [user(5), assistant("c")]),
        (chat.ODD, [user("a"), assistant(dict(blocks=["x"]))]),
        (chat.ODD, [user("a"), assistant("half \ud83d a pair")]),
        (chat.ODD, [user("a"), dict(role="assistant", content="", tool_calls=[5])]),
    ],
)
def test_what_cannot_be_learnt_from_has_a_reason(why, messages):
    assert chat.learnable(TOK, chat_row(*messages), 300) == why


# -----------------------------------------------------------------------------
# the loss, the schedule, the order


def test_the_loss_is_cross_entropy_over_the_learnt_tokens_packed_or_not():
    model = Apertus(ApertusConfig(**TINY))
    sizes = 1, 9, 4, 2
    conversations = [
        chat.render(TOK, chat_row(SYSTEM, user("q" * n), assistant("a" * (3 * n))))
        for n in sizes
    ]
    total = 0.0
    for ids, said in conversations:
        logits, _ = model(torch.tensor([ids[:-1]]))
        nll = F.cross_entropy(logits[0], torch.tensor(ids[1:]), reduction="none")
        total += nll[torch.tensor(said[1:])].sum().item()
    count = sum(sum(said) for _, said in conversations)
    for pack in (False, True):
        rows = sft.rows_of(conversations, pack, 260)
        assert sum(map(len, rows)) == 4 and (len(rows) == 4) != pack
        idx, targets, doc = sft.tensors(rows, TOK.pad)
        _, loss = model(idx, targets, doc=doc if pack else None)
        assert loss.item() == pytest.approx(total / count, abs=2e-6)
        assert (targets >= 0).sum() == count


def test_the_schedule_is_transformers_linear_without_its_zeros():
    """transformers' schedule of one step more begins and ends at 0; ours lies between, so that every step learns."""
    from transformers import get_linear_schedule_with_warmup

    opt = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    theirs = get_linear_schedule_with_warmup(opt, 3, 31)
    for step in range(30):
        opt.step()
        theirs.step()
        assert common.linear(step, 30, 0.1) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
    assert [common.linear(0, 1, warmup) for warmup in (0.0, 1.0)] == [1, 1]


def test_each_epoch_takes_every_conversation_once_in_an_order_of_its_own():
    """A step may hold the end of one epoch and the beginning of the next; the last one is what remains."""
    steps = [common.items(step, 4, 10, 3, 28).tolist() for step in range(8)]
    assert list(map(len, steps)) == [4] * 7 + [2]
    taken = sum(steps, [])
    epochs = [tuple(taken[i : i + 10]) for i in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs) and len(set(epochs)) == 3


# -----------------------------------------------------------------------------
# the script


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    root = tmp_path_factory.mktemp("sft")
    convert.save_hf(Apertus(ApertusConfig(**TINY)), str(root / "model"), TOK)
    rows = [chat_row(SYSTEM, user(f"question {i}"), assistant(f"a{i} bb")) for i in range(18)]
    write_rows(root / "chats.jsonl", rows)
    return root


def arguments(start, out, *args):
    """The command line of a run of 12 steps."""
    return [
        f"--init_from={start / 'model'}",
        f"--data={start / 'chats.jsonl'}",
        f"--out={out}",
        "--batch_size=6",
        "--micro_batch=2",
        "--lr=3e-3",
        "--epochs=4",
        "--warmup=0.1",
        "--checkpoint_every=4",
        "--dtype=float32",
        "--keep_checkpoints=0",
        *args,
    ]


def tune(start, out, *args):
    return script("posttrain.sft", *arguments(start, out, *args))


@pytest.fixture(scope="module")
def tuned(start):
    done = tune(start, start / "whole")
    assert done.returncode == 0, done.stderr
    return start / "whole"


def losses(folder):
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def cut_back(run, new):
    """A copy of a run, as if it had been killed after its first checkpoint, in the middle of a line of the log."""
    shutil.copytree(run, new)
    for path in sorted((new / "ckpt").iterdir())[1:]:
        shutil.rmtree(path)
    with open(new / "log.jsonl", "a") as f:
        f.write('{"step": 12, "lo')


def test_it_learns_watches_its_ranks_and_leaves_both_kinds_of_folder(tuned):
    entries = list(map(json.loads, (tuned / "log.jsonl").read_text().splitlines()))
    watched = {"rank_effective", "rank_pca99", "rank_stable", "dead_units", "preactivation"}
    assert watched <= entries[0].keys() & entries[11].keys() - entries[1].keys()
    assert [e["step"] for e in entries] == list(range(12)) and entries[0]["lr"] == 1.5e-3
    assert entries[-1]["loss"] < entries[0]["loss"] - 0.5
    assert same(weights(tuned), dict(convert.load_hf(str(tuned)).named_parameters()))


@pytest.mark.parametrize("optimizer, clip", [("adamw", 100.0), ("ademamix", 0.05)])
def test_a_run_is_the_same_run_written_plainly_in_fp64(start, tmp_path, optimizer, clip):
    """Three steps over two epochs: batches, loss, clipping, schedule, update. A large eps shows their scale."""
    rows = [
        chat_row(SYSTEM, user("q" * n), assistant("yes" * n), user("and?"), assistant("é"))
        for n in range(1, 7)
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    done = tune(
        start,
        tmp_path / "run",
        f"--data={tmp_path / 'rows.jsonl'}",
        "--batch_size=4",
        "--epochs=2",
        "--micro_batch=3",
        "--lr=1e-2",
        "--warmup=0.5",
        f"--optimizer={optimizer}",
        f"--grad_clip={clip}",
        "--eps=1e-3",
        "--weight_decay=0.2",
    )
    assert done.returncode == 0, done.stderr
    plain = Plain(start / "model")
    rendered = [chat.render(TOK, row) for row in rows]
    for step, rate in enumerate((0.5, 1, 0.5)):
        batch = [rendered[k] for k in common.items(step, 4, 6, 2, 28)]
        count = sum(sum(said) for _, said in batch)
        loss = (
            -sum((plain.logp(ids) * torch.tensor(said[1:])).sum() for ids, said in batch)
            / count
        )
        loss.backward()
        plain.update(step + 1, 3, 1e-2 * rate, clip, 1e-3, 0.2, optimizer == "adamw")
        assert losses(tmp_path / "run")[step] == pytest.approx(loss.item(), rel=1e-5)
    assert plain.distance(convert.load_run(str(tmp_path / "run"))[0]) < 1e-4


def test_killed_or_asked_to_stop_it_resumes_to_the_same_bits(
    tuned, start, tmp_path, monkeypatch
):
    cut_back(tuned, tmp_path / "killed")

    def ask(*args):  # in the middle of the first step
        signal.raise_signal(signal.SIGTERM)
        return {}

    monkeypatch.setattr(collapse, "diagnose", ask)
    done = tune(start, tmp_path / "stopped")
    assert "stopped as asked after step 1, saved; --resume" in done.stdout, done.stderr
    assert os.listdir(tmp_path / "stopped" / "ckpt") == ["step-00000001"]
    monkeypatch.undo()
    for name in ("killed", "stopped"):
        done = tune(start, tmp_path / name, "--resume")
        assert done.returncode == 0, done.stderr
        assert same(weights(tmp_path / name), weights(tuned)) and losses(
            tmp_path / name
        ) == losses(tuned)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_do_what_one_does(launch, tuned, start, tmp_path, parallel):
    """ddp from the start; fsdp goes on with what one process left when it was killed."""
    if parallel == "fsdp":
        cut_back(tuned, tmp_path / "two")
    args = arguments(
        start, tmp_path / "two", "--device=cpu", "--resume", f"--parallel={parallel}"
    )
    codes, text = launch(2, *args, script="posttrain.sft", logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]
    assert losses(tmp_path / "two") == pytest.approx(losses(tuned), abs=2e-5)


def test_packing_and_accumulation_change_no_number_and_a_run_folder_starts_a_run(
    tuned, start, tmp_path
):
    for k, args in enumerate((["--pack", "--max_length=400"], ["--micro_batch=6"])):
        assert tune(start, tmp_path / str(k), *args).returncode == 0
        assert losses(tmp_path / str(k)) == pytest.approx(losses(tuned), abs=2e-5)
    assert (
        tune(start, tmp_path / "again", f"--init_from={tuned}", "--optimizer=adamw").returncode
        == 0
    )
    assert losses(tmp_path / "again")[0] < losses(tuned)[-1] + 0.2


@pytest.mark.parametrize("setting", "lr=1e-3 warmup=0.2 date=2020-01-01 epochs=5 grad_clip=2.0 lora_r=2".split())
def test_a_setting_that_changes_the_numbers_is_compared_on_resume_and_named(tuned, start, setting):
    done = tune(start, tuned, "--resume", f"--{setting}")
    name = setting.split("=")[0]
    refused(done, "is of another run: ", f"{name} ")


def test_where_a_run_lies_and_what_it_runs_on_may_change(tuned, start):
    free = "--micro_batch=3 --pack --rank_every=7 --keep_checkpoints=3 --recompute=full --lora_alpha=3.0"
    done = tune(start, tuned, "--resume", *free.split())
    assert done.returncode == 2 and "is finished: all 12 steps are done" in done.stderr


GOOD = chat_row(SYSTEM, user("hi"), assistant("ho"))


def test_what_is_left_out_is_counted_by_kind(start, tmp_path):
    odd = chat_row(user(5), assistant("c"))
    write_rows(tmp_path / "rows.jsonl", [GOOD, odd, chat_row(user("a")), odd])
    done = tune(start, tmp_path / "run", f"--data={tmp_path / 'rows.jsonl'}", "--epochs=1")
    first, second = (f"(first in line {n} of rows.jsonl)" for n in (2, 3))
    line = (
        f"left out 3 of 4 conversations: 2 {chat.ODD} {first}; 1 no assistant turn {second}\n"
    )
    assert done.returncode == 0 and line in done.stdout, done.stderr
    assert "1 conversations in batches of 6 make a run of 1 step," in done.stdout


def test_show_prints_bytes_as_text_and_what_is_learnt_in_green(start, tmp_path):
    write_rows(tmp_path / "rows.jsonl", [chat_row(SYSTEM, user("hi"), assistant("hör zu"))])
    done = tune(start, tmp_path / "run", f"--data={tmp_path / 'rows.jsonl'}", "--show")
    line = "<|user_start|>hi<|user_end|><|assistant_start|>\x1b[0m·\x1b[32mhör zu<|assistant_end|>\x1b[0m"
    assert done.returncode == 0 and line in done.stdout, done.stderr


@pytest.mark.parametrize(
    "row, args, says",
    [
        (
            GOOD,
            "--max_length=513",
            "max_length=513 is beyond the window of the start model, 512 tokens",
        ),
        ("not json", "", "line 1: want a JSON object"),
        (dict(text="x"), "", "line 1: want a JSON object with a list `messages`"),
        (
            chat_row(user("a")),
            "",
            "none of 1 conversations can be learnt from: 1 no assistant turn",
        ),
        (GOOD, "--data=/nowhere.jsonl", "no such file"),
        (GOOD, "--keep_checkpoints=-1", "keep_checkpoints=-1: want how many"),
        (GOOD, "--optimizer=sgd", "there is ademamix and adamw"),
        (GOOD, "--init_from=out/nothing_here", "out/nothing_here"),
        (GOOD, "--init_from=DUMB", "its vocabulary has no <|assistant_end|>"),
        (GOOD, "--lr=1e30 --batch_size=1 --warmup=0.0", "Stopped before the update"),
        (GOOD, "--out=WHOLE", "--resume continues it"),
        (GOOD, "--out=WHOLE --resume", "is of another run: data_hash"),
        (GOOD, "--out=WHOLE --resume --data=CHATS", "is finished: all 12 steps are done"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(tuned, start, tmp_path, row, args, says):
    shutil.copytree(start / "model", tmp_path / "dumb")
    file = tmp_path / "dumb" / "tokenizer.json"
    file.write_text(file.read_text().replace("<|assistant_end|>", "<|something|>"))
    write_rows(tmp_path / "rows.jsonl", [row])
    for name, path in dict(
        DUMB=tmp_path / "dumb", WHOLE=tuned, CHATS=start / "chats.jsonl"
    ).items():
        args = args.replace(name, str(path))
    done = tune(start, tmp_path / "run", f"--data={tmp_path / 'rows.jsonl'}", *args.split())
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and last.startswith("sft.py: ") and says in last, done.stderr


def test_a_run_that_cannot_fit_says_so_before_it_reads_a_weight(start, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "memory_of", lambda device: 1e5)
    done = tune(start, tmp_path / "run")
    refused(done, "GB that a step takes", "--lora_r=16 --base=bf16")


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
        run = SimpleNamespace(ranks=ranks, config={}, shape=shape, path=path, device="cpu", dtype=torch.float32)
        with Largest() as largest:
            model = start.ready(run)
        want = dict(convert.load_any(folder)[0].named_parameters())
        assert all(p.full_tensor().equal(want[n]) for n, p in model.named_parameters())
        sizes = [p.numel() for p in want.values()]
        here = sum(p.to_local().numel() for p in model.parameters())
        assert abs(here / sum(sizes) - 0.5) < 0.005 and largest.numbers <= max(sizes) / 2, (here, largest.numbers)
    ranks.leave()
"""


def test_a_sharded_start_model_is_read_shard_by_shard_and_never_held_whole(
    launch, tuned, start, tmp_path
):
    """From an export, a run folder and a model whose head is its embedding."""
    convert.save_hf(
        Apertus(ApertusConfig(**TINY, tie_embeddings=True)), str(tmp_path / "tied"), TOK
    )
    (tmp_path / "shards.py").write_text(SHARDS)
    folders = start / "model", tuned, tmp_path / "tied"
    codes, text = launch(2, *folders, script=tmp_path / "shards.py", logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]


def test_the_export_chats_in_transformers_with_the_same_greedy_tokens(tuned):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(tuned).eval()
    tok = AutoTokenizer.from_pretrained(tuned)
    messages = [SYSTEM, user("question 3")]
    encoded = tok.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = encoded["input_ids"]
    assert ids[0].tolist() == TOK.chat(messages, add_generation_prompt=True)[1]
    # As in the published file, [2, 68, 72]: it ends a turn, and stops where a tool has to answer.
    ends = [TOK.special[f"<|{name}|>"] for name in ("assistant_end", "tools_suffix")]
    assert tok.eos_token_id == ends[0] and theirs.generation_config.eos_token_id == [2, *ends]
    ours = generate(
        convert.load_run(str(tuned))[0], ids.tolist(), 30, chat.ends(TOK), temperature=0
    )
    assert theirs.generate(ids, max_new_tokens=30, do_sample=False).tolist() == ours
