"""posttrain/sft.py: what is learnt, against the published template's ids; the loss against torch; as users run it."""
import json
import math
import os
import re
import shutil
import signal
import types

import pytest
import torch
import torch.nn.functional as F

import ademamix
import chat
import convert
import tokenizer
from configurator import configure
from conftest import script
from engine import checkpoint
from engine.parallel import Ranks
from generate import generate
from model import Apertus, ApertusConfig
from plain import Plain
from posttrain import collapse, common, sft, talk

TINY = dict(block_size=512, vocab_size=320, n_layer=2, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=64, init_std=0.05)
TOK = tokenizer.load("byte")
CHAT = json.load(open(os.path.join(os.path.dirname(__file__), "golden", "chat.json")))
ANSWERED = [case for case in CHAT if case["messages"][-1]["role"] == "assistant"]


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


def learnt(row, tok=TOK):
    ids, said = chat.render(tok, row, "2026-01-31")
    return tok.decode([i for i, mine in zip(ids, said) if mine])


# -----------------------------------------------------------------------------
# which tokens


@pytest.mark.parametrize("case", ANSWERED, ids=lambda c: c["messages"][0]["content"][:12])
def test_the_ids_are_the_published_templates_and_one_end_token(case):
    """Until Apertus' own tokenizer: the golden ids, and behind them the end token that the template leaves out."""
    tok = tokenizer.load("apertus")
    options = case["options"]
    thinking = options.get("enable_thinking", False)
    row = dict(messages=case["messages"], tools=options.get("tools"), thinking=thinking)
    ids, said = chat.render(tok, row, "2026-01-31")
    assert ids == case["ids"] + [68] and said[-1] and ids.count(1) == 1 and not said[0]


def test_all_the_assistant_says_is_learnt_and_nothing_else():
    two_turns = chat_row(SYSTEM, user("2+2?"), assistant("4"), user("3+3?"), assistant("6"))
    assert learnt(two_turns) == "4<|assistant_end|>6<|assistant_end|>"
    unanswered = chat_row(SYSTEM, user("hi"), assistant("yo"), user("last word"))
    assert learnt(unanswered) == "yo<|assistant_end|>"


def test_thoughts_and_calls_are_learnt_and_the_outputs_of_tools_are_not():
    blocks = [
        dict(type="thoughts", text="hmm"),
        dict(type="tool_calls", calls=[dict(name="f", arguments='{"x": 1}')]),
        dict(type="tool_outputs", outputs=[dict(output="OUTPUT")]),
        dict(type="response", text="Done."),
    ]
    row = chat_row(SYSTEM, user("go"), assistant(dict(blocks=blocks)), tools=[dict(name="f", description="a tool")])
    thoughts, call = "<|inner_prefix|>hmm", '<|tools_prefix|>[{"f": {"x": 1}}]<|tools_suffix|>'
    assert learnt(row) == f"{thoughts}{call}<|inner_suffix|>Done.<|assistant_end|>"


def test_openais_calls_are_learnt_and_its_tool_messages_are_not():
    call = dict(function=dict(name="f", arguments="{}"))
    outputs = [dict(role="tool", content=text) for text in ("OUTPUT", "ANOTHER")]
    row = chat_row(user("w?"), dict(role="assistant", content="", tool_calls=[call]), *outputs, assistant("ok"))
    assert chat.fault(row["messages"]) is None
    assert learnt(row) == '<|tools_prefix|>[{"f": {}}]<|tools_suffix|>ok<|assistant_end|>'


def test_a_conversation_with_thoughts_says_that_deliberation_is_on():
    """As chat_pieces is told by thinking=True; a line that says otherwise is believed."""
    blocks = [dict(type="thoughts", text="hmm"), dict(type="response", text="Done.")]
    thoughts = [SYSTEM, user("go"), assistant(dict(blocks=blocks))]
    text = lambda row: TOK.decode(chat.render(TOK, row)[0])
    assert "Deliberation: enabled" in text(chat_row(*thoughts))
    assert "Deliberation: disabled" in text(chat_row(*thoughts, thinking=False))
    assert "Deliberation: disabled" in text(chat_row(SYSTEM, user("go"), assistant("Done.")))


def test_a_control_token_spelled_by_a_user_stays_text():
    typed = "<|assistant_start|>me<|assistant_end|><s>"
    ids, said = chat.render(TOK, chat_row(SYSTEM, user(typed), assistant("no")))
    assert ids.count(TOK.special["<|assistant_start|>"]) == 1 and ids.count(TOK.bos) == 1 and sum(said) == 3


def test_show_colours_what_is_learnt_green_token_by_token(start):
    done = script("posttrain.sft", f"--init_from={start / 'model'}", f"--data={start / 'chats.jsonl'}", "--show")
    assert done.returncode == 0, done.stderr
    first = done.stdout.split("\n")[0]
    green = "".join(re.findall(r"\x1b\[32m(.*?)\x1b\[0m", first))
    grey = "".join(re.findall(r"\x1b\[90m(.*?)\x1b\[0m", first))
    assert green == "a0 bb<|assistant_end|>"
    assert grey.startswith("<s><|system_start|>s<|system_end|>") and grey.endswith("<|assistant_start|>")
    assert first.count("·") == first.count("\x1b[0m") - 1 and "6 of" in done.stdout


# -----------------------------------------------------------------------------
# the loss


def test_the_loss_is_cross_entropy_over_the_learnt_tokens_packed_or_not():
    model = Apertus(ApertusConfig(**TINY))
    rows = [chat_row(SYSTEM, user("q" * n), assistant("a" * (3 * n))) for n in (1, 9, 4, 2)]
    conversations = [chat.render(TOK, row) for row in rows]
    total, count = 0.0, 0
    # One conversation at a time, by torch.
    for ids, said in conversations:
        logits, _ = model(torch.tensor([ids[:-1]]))
        nll = F.cross_entropy(logits[0], torch.tensor(ids[1:]), reduction="none")
        total += nll[torch.tensor(said[1:])].sum().item()
        count += sum(said)
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


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 100])
@pytest.mark.parametrize("warmup", [0.0, 0.03, 0.5, 1.0])
def test_no_step_of_any_run_is_without_a_learning_rate_and_one_has_the_peak(steps, warmup):
    rates = [common.linear(step, steps, warmup) for step in range(steps)]
    assert min(rates) > 0 and max(rates) == 1


def test_a_run_of_few_steps_is_warned_about_with_a_batch_that_gives_ten():
    assert common.too_short("conversations", 5120, 1, 512) == ""
    warning = common.too_short("conversations", 200, 1, 512)
    assert "200 conversations in batches of 512 make a run of 1 step," in warning
    for n, epochs, batch in ((200, 1, 512), (17, 3, 6), (3, 1, 512), (1, 1, 1)):
        warning = common.too_short("pairs", n, epochs, batch)
        advice = {name: int(value) for name, value in re.findall(r"--(batch_size|epochs)=(\d+)", warning)}
        items = advice.get("epochs", epochs) * n
        assert math.ceil(items / advice["batch_size"]) >= 10


@pytest.mark.parametrize("size, lr, batch", [("8b", 5e-6, 512), ("70b", 2e-6, 1024)])
def test_the_recipes_fit_the_script_and_have_the_published_numbers(size, lr, batch):
    found = configure({**vars(sft)}, [f"sft_{size}"])
    want = dict(lr=lr, batch_size=batch, warmup=0.03, max_length=4096, pack=False, epochs=1)
    assert {name: found[name] for name in want} == want


# -----------------------------------------------------------------------------
# the script


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    root = tmp_path_factory.mktemp("sft")
    torch.manual_seed(0)
    convert.save_hf(Apertus(ApertusConfig(**TINY)), str(root / "model"), TOK)
    rows = [chat_row(SYSTEM, user(f"question {i}"), assistant(f"a{i} bb")) for i in range(18)]
    write_rows(root / "chats.jsonl", rows)
    return root


def arguments(start, out):
    """The command line of a run that all tests begin with."""
    return [
        f"--init_from={start / 'model'}", f"--data={start / 'chats.jsonl'}", f"--out={out}", "--batch_size=6",
        "--micro_batch=2", "--lr=3e-3", "--epochs=4", "--warmup=0.1", "--checkpoint_every=4", "--dtype=float32",
    ]


def tune(start, out, *args):
    return script("posttrain.sft", *arguments(start, out), "--keep_checkpoints=9", *args)


@pytest.fixture(scope="module")
def tuned(start):
    done = tune(start, start / "whole")
    assert done.returncode == 0, done.stderr
    return start / "whole"


def log(folder):
    """The lines of a run's log, without the speed, which is never the same twice."""
    with open(os.path.join(folder, "log.jsonl")) as f:
        entries = list(map(json.loads, f))
    for entry in entries:
        entry.pop("tok_s")
    return entries


def logged_losses(folder):
    return [entry["loss"] for entry in log(folder)]


def weights(folder):
    return dict(convert.load_run(str(folder))[0].named_parameters())


def same_bits(one, two):
    """Whether two runs have ended in the same weights by the same steps."""
    a, b = weights(one), weights(two)
    return all(torch.equal(a[n], b[n]) for n in a) and log(one) == log(two)


def test_it_learns_and_watches_the_first_and_the_last_step(tuned):
    entries = log(tuned)
    watched = {"rank_effective", "rank_pca99", "rank_stable", "dead_units", "preactivation"}
    assert watched <= entries[0].keys() & entries[11].keys() - entries[1].keys()
    assert [e["step"] for e in entries] == list(range(12)) and entries[0]["lr"] == 1.5e-3
    assert entries[-1]["loss"] < entries[0]["loss"] - 0.5


def test_it_leaves_both_kinds_of_folder(tuned):
    ours, theirs = weights(tuned), dict(convert.load_hf(str(tuned / "hf")).named_parameters())
    assert all(torch.equal(ours[n], theirs[n]) for n in ours) and tokenizer.load_for(str(tuned)).name == "byte"
    assert os.listdir(tuned / "tokens")                    # beside them, and not where the script was started


@pytest.mark.parametrize("optimizer", ["adamw", "ademamix"])
@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_a_run_is_the_same_run_written_plainly_in_fp64(start, tmp_path, optimizer, clip):
    """Three steps over two epochs: batches, loss, clipping, schedule, update. A large eps shows their scale."""
    answers = [(user("q" * n), assistant("yes" * n)) for n in range(1, 7)]
    rows = [chat_row(SYSTEM, *pair, user("and?"), assistant("é")) for pair in answers]
    done = tune(
        start, tmp_path / "run", broken(tmp_path, *rows), "--batch_size=4", "--epochs=2", "--micro_batch=3",
        "--lr=1e-2", "--warmup=0.5", f"--optimizer={optimizer}", f"--grad_clip={clip}", "--eps=1e-3",
        "--weight_decay=0.2",
    )
    assert done.returncode == 0, done.stderr

    plain = Plain(start / "model")
    rendered = [chat.render(TOK, row) for row in rows]
    for step, rate in enumerate((0.5, 1, 0.5)):
        batch = [rendered[k] for k in common.items(step, 4, 6, 2, 28)]
        learnt = sum(sum(said) for _, said in batch)
        loss = -sum((plain.logp(ids) * torch.tensor(said[1:])).sum() for ids, said in batch) / learnt
        loss.backward()
        plain.update(step + 1, 3, 1e-2 * rate, clip, 1e-3, 0.2, optimizer == "adamw")
        assert log(tmp_path / "run")[step]["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert plain.distance(convert.load_run(str(tmp_path / "run"))[0]) < 1e-4


def test_each_epoch_takes_every_conversation_once_in_an_order_of_its_own():
    """A step may hold the end of one epoch and the beginning of the next; the last one is what remains."""
    steps = [common.items(step, 4, 10, 3, 28).tolist() for step in range(8)]
    assert list(map(len, steps)) == [4] * 7 + [2]
    taken = sum(steps, [])
    epochs = [taken[:10], taken[10:20], taken[20:]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3 and list(range(10)) not in epochs
    assert common.items(0, 10, 10, 1, 29).tolist() != epochs[0]


def test_killed_and_resumed_ends_in_the_same_bits(tuned, start, tmp_path):
    shutil.copytree(tuned, tmp_path / "run")
    for step in ("step-00000008", "step-00000012"):
        shutil.rmtree(tmp_path / "run" / "ckpt" / step)
    with open(tmp_path / "run" / "log.jsonl", "a") as f:
        f.write('{"step": 12, "lo')
    done = tune(start, tmp_path / "run", "--resume")
    assert done.returncode == 0, done.stderr
    assert same_bits(tuned, tmp_path / "run")


@pytest.mark.parametrize("how", ["signal", "file"])
def test_asked_to_stop_it_saves_leaves_with_0_and_resumes_to_the_same_bits(tuned, start, tmp_path, monkeypatch, how):
    out, diagnose = tmp_path / "run", collapse.diagnose

    def ask(*args):                                                           # in the middle of the first step
        if how == "signal":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            (out / "stop").touch()
        return diagnose(*args)
    monkeypatch.setattr(collapse, "diagnose", ask)
    done = tune(start, out)
    assert done.returncode == 0, done.stderr
    assert "stopped as asked after step 2 of 12, saved; --resume goes on" in done.stdout
    assert os.listdir(out / "ckpt") == ["step-00000002"]
    assert not (out / "stop").exists() and not (out / "hf").exists()
    monkeypatch.undo()
    done = tune(start, out, "--resume")
    assert done.returncode == 0, done.stderr
    assert same_bits(tuned, out)


def test_a_second_run_in_the_same_folder_is_refused_and_touches_nothing(tuned, start, tmp_path):
    with checkpoint.claim(str(tmp_path / "run")):
        done = tune(start, tmp_path / "run")
        assert done.returncode == 2 and done.stderr.strip().startswith("sft.py: ")
        assert "another run is writing there" in done.stderr
        assert os.listdir(tmp_path / "run") == [".lock"]


def test_a_setting_that_changes_the_numbers_is_compared_on_resume_and_named(tuned, start):
    """All of them but where things lie, what they run on, and what is printed and kept."""
    config = checkpoint.read_manifest(tuned / "ckpt" / "step-00000012")["config"]
    model, tok = common.start_model(str(start / "model"), "cpu", torch.float32)
    opt = ademamix.build_optimizer(model, "ademamix", 1e-3, (0.9, 0.999, 0.99), 8.0, 1e-8, 0.0, 12, 12)
    free = {"out", "data", "show", "resume", "device", "parallel", "compile", "routes", "micro_batch", "pack",
            "rank_every", "checkpoint_every", "keep_checkpoints", "recompute", "old", "old_every", "old_windows"}
    # data_hash has in it what these leave out.
    free |= {"keep_licenses", "decontaminate"}
    # Where all weights are trained, what adapters would be like.
    free |= {"lora_alpha", "lora_on", "lora_rs", "base", "start_hash"}
    compared = config.keys() - free
    assert {"lr", "warmup", "betas", "alpha", "grad_clip", "dtype", "data_hash", "tokenizer_hash", "date"} <= compared
    for key in config:
        other = {**config, key: "another"}
        if key in free:
            assert common.go_on(tuned, model, opt, other, Ranks()) == 12
        else:
            with pytest.raises(ValueError, match=f"is of another run: {key} .* -> 'another'"):
                common.go_on(tuned, model, opt, other, Ranks())


def test_packing_and_accumulation_do_not_change_the_run(tuned, start, tmp_path):
    for k, args in enumerate((["--pack", "--max_length=400"], ["--micro_batch=6"])):
        assert tune(start, tmp_path / str(k), *args).returncode == 0
        assert logged_losses(tmp_path / str(k)) == pytest.approx(logged_losses(tuned), abs=2e-5)


def mixture_of(tmp_path):
    """A file of ShareGPT's form and one of Alpaca's, with weights, as --data names them."""
    turns = [[{"from": "human", "value": f"{i}?"}, {"from": "gpt", "value": "yes"}] for i in range(6)]
    write_rows(tmp_path / "a.jsonl", [dict(conversations=both) for both in turns])
    write_rows(tmp_path / "b.jsonl", [dict(instruction=f"{i}?", output="no") for i in range(3)])
    return "--data=" + str({str(tmp_path / "a.jsonl"): 1.0, str(tmp_path / "b.jsonl"): 0.5})


def test_a_run_on_a_mixture_is_resumed_to_the_same_bits_and_says_what_of_it_is_seen_how_often(start, tmp_path):
    data = mixture_of(tmp_path)
    shown = tune(start, tmp_path / "whole", data, "--show")
    assert shown.stdout.count("are learnt (green)") == 6, shown.stderr
    done = tune(start, tmp_path / "whole", data, "--checkpoint_every=2")
    assert done.returncode == 0, done.stderr
    # 36 conversations: 24 of the six, 12 of the three.
    assert f"{tmp_path / 'a.jsonl'}: 6 conversations, 66.7% of the run, each seen 4.00 times" in done.stdout
    assert f"{tmp_path / 'b.jsonl'}: 3 conversations, 33.3% of the run, each seen 4.00 times" in done.stdout
    assert [len(log(tmp_path / "whole")), "9 conversations, 6 steps" in done.stdout] == [6, True]
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for step in ("step-00000004", "step-00000006"):
        shutil.rmtree(tmp_path / "run" / "ckpt" / step)
    done = tune(start, tmp_path / "run", data, "--checkpoint_every=2", "--resume")
    assert done.returncode == 0, done.stderr
    assert same_bits(tmp_path / "whole", tmp_path / "run")
    done = tune(start, tmp_path / "run", data.replace("0.5", "0.6"), "--checkpoint_every=2", "--resume")
    assert done.returncode == 2 and "is of another run: data_hash" in done.stderr


def test_a_run_folder_starts_a_run_and_a_trained_vocabulary_goes_along(tuned, start, tmp_path):
    assert tune(start, tmp_path / "again", f"--init_from={tuned}", "--optimizer=adamw").returncode == 0
    # It goes on from where that one ended.
    assert logged_losses(tmp_path / "again")[0] < logged_losses(tuned)[-1] + 0.2
    own = tokenizer.load("apertus:300")
    convert.save_hf(Apertus(ApertusConfig(**{**TINY, "vocab_size": own.vocab_size})), str(tmp_path / "own"), own)
    assert tune(start, tmp_path / "third", f"--init_from={tmp_path / 'own'}", "--epochs=1").returncode == 0
    assert tokenizer.load_for(str(tmp_path / "third")).pieces == own.pieces


# -----------------------------------------------------------------------------
# what users have


def broken(tmp_path, *rows):
    (tmp_path / "data.jsonl").write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return f"--data={tmp_path / 'data.jsonl'}"


GOOD = dict(messages=[SYSTEM, user("hi"), assistant("ho")])


@pytest.mark.parametrize("messages, why", [
    ([assistant("first")], "roles out of order"),
    ([user("a"), user("b"), assistant("c")], "roles out of order"),
    ([user("a"), SYSTEM, assistant("c")], "roles out of order"),
    ([user("a"), assistant("c"), dict(role="judge", content="x")], "roles out of order"),
    ([user(" "), assistant("c")], "an empty turn"),
    ([user("a"), assistant("")], "an empty turn"),
    ([user("a"), dict(role="assistant", content=None)], "an empty turn"),
    ([SYSTEM, user("a")], "no assistant turn"),
    ([user("a"), assistant("b"), dict(role="tool", content="c")], "ends with a tool's output"),
    ([user("a"), assistant("x" * 500)], "more than max_length=300 tokens"),
    ([user("a"), assistant(dict(blocks=[dict(type="picture")]))], "want text or blocks"),
])
def test_what_cannot_be_learnt_from_is_left_out_counted_and_named(start, tmp_path, messages, why):
    data = broken(tmp_path, GOOD, dict(messages=messages), dict(messages=messages), GOOD)
    done = tune(start, tmp_path / "run", data, "--max_length=300", "--epochs=1")
    assert done.returncode == 0, done.stderr
    told = rf"left out 2 of 4 conversations: .*{re.escape(why)}.*\(first in line 2 of data.jsonl\)"
    assert re.search(told, done.stdout), done.stdout
    done = tune(start, tmp_path / "run2", broken(tmp_path, dict(messages=messages)), "--max_length=300")
    assert done.returncode == 2 and why in done.stderr
    assert "none of 1 conversations can be learnt from: 1" in done.stderr


def test_openai_content_is_read_as_its_text():
    parts = lambda *texts: [dict(type="text", text=text) for text in texts]
    listed = dict(messages=[dict(role="system", content=parts("s")), user(parts("2+", "2?")), assistant(parts("4"))])
    assert chat.learnable(TOK, listed, 512) == chat.render(TOK, dict(messages=[SYSTEM, user("2+2?"), assistant("4")]))


@pytest.mark.parametrize("messages", [
    [user(5), assistant("c")],
    [user("a"), assistant(5)],
    [user(["a"]), assistant("c")],
    [user({"text": 5}), assistant("c")],
    [user([dict(type="image_url", image_url="x")]), assistant("c")],
    [user([dict(type="text")]), assistant("c")],
    [user("a"), assistant(dict(blocks=5))],
    [user("a"), assistant(dict(blocks=["x"]))],
    [user("a"), assistant("half \ud83d a pair")],
    [user("a"), dict(role="assistant", content="", tool_calls=[5])],
    [dict(role=[], content="a"), assistant("c")],
    [dict(role=None), assistant("c")],
    [user("a"), assistant([dict(type="text", text=None)])],
], ids=str)
def test_odd_content_is_left_out_and_counted_by_its_kind(start, tmp_path, messages):
    why = chat.learnable(TOK, dict(messages=messages), 512)
    assert why in (chat.ODD, "roles out of order")
    assert chat.prompt_ids(TOK, chat_row(*messages, user("b"))) == why


def test_what_is_left_out_is_told_in_one_line_by_kind(start, tmp_path):
    odd = [
        chat_row(user(5), assistant("c")),
        chat_row(user("a")),
        chat_row(user("a"), assistant(dict(blocks=[5]))),
        chat_row(user("a"), assistant(dict(blocks=[6]))),
        chat_row(user("a"), assistant("b"), tools=[5]),
    ]
    data = broken(tmp_path, GOOD, *odd)
    done = tune(start, tmp_path / "run", data)
    places = [f"(first in line {n} of data.jsonl)" for n in (2, 3)]
    line = f"left out 5 of 6 conversations: 4 {chat.ODD} {places[0]}; 1 no assistant turn {places[1]}\n"
    assert done.returncode == 0 and line in done.stdout, done.stderr


@pytest.mark.parametrize("row, args, says", [
    (GOOD, ["--max_length=513"],
     "max_length=513 is beyond the window of the start model, 512 tokens: take --max_length=512"),
    ("not json", [], "line 1: want a JSON object"),
    ({"text": "x"}, [], "line 1: want a JSON object with a list `messages`"),
    ("", [], "is empty"),
    (GOOD, ["--data=/nowhere.jsonl"], "no such file"),
    (GOOD, ["--optimizer=sgd"], "there is ademamix and adamw"),
    (GOOD, ["--dtype=float16"], "there is auto, float32 and bfloat16"),
    (GOOD, ["--init_from=out/nothing_here"], "no run in"),
    (GOOD, ["--lr=1e30", "--batch_size=1", "--warmup=0.0"], "Stopped before the update"),
])
def test_what_cannot_work_is_told_in_one_line(start, tmp_path, row, args, says):
    done = tune(start, tmp_path / "run", broken(tmp_path, row), *args)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and last.startswith("sft.py: ") and says in last, done.stderr


def test_a_conversation_may_be_as_long_as_the_window():
    model = types.SimpleNamespace(config=types.SimpleNamespace(block_size=512))
    assert [common.window(n, model) for n in (0, 511, 512)] == [512, 511, 512]


def test_what_is_frozen_gets_no_gradient_which_would_be_as_large_as_the_model():
    model = torch.nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    model.bias.grad = torch.tensor([3.0, 4.0])
    assert common.collect(model, Ranks(), 1.0) == 5.0      # 3, 4, 5: the norm before clipping
    assert model.weight.grad is None and model.bias.grad.tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("loss, norm", [(math.inf, 1.0), (math.nan, 1.0), (1.0, math.inf)])
def test_a_number_that_is_none_changes_no_weight(loss, norm):
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    with pytest.raises(ValueError, match="step 7: .* Stopped before the update"):
        common.update(torch.optim.SGD([p], lr=1.0), 7, 1.0, loss, norm)
    assert p.tolist() == [1, 1]


def test_a_start_model_that_cannot_chat_is_refused(start, tmp_path):
    shutil.copytree(start / "model", tmp_path / "model")
    file = tmp_path / "model" / "tokenizer.json"
    file.write_text(file.read_text().replace("<|assistant_end|>", "<|something|>"))
    done = tune(start, tmp_path / "run", f"--init_from={tmp_path / 'model'}")
    assert done.returncode == 2
    assert "its vocabulary has no <|assistant_end|>: a conversation needs Apertus' control tokens" in done.stderr


def test_a_run_is_not_overwritten_nor_gone_on_with_by_other_settings(tuned, start):
    for args, says in (
        ([], "--resume goes on with it"),
        (["--resume"], "is finished"),
        (["--resume", "--seed=3"], "is of another run: seed 28 -> 3"),
    ):
        done = tune(start, tuned, *args)
        assert done.returncode == 2 and says in done.stderr


# -----------------------------------------------------------------------------
# two processes, and the way out


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_do_what_one_does(launch, tuned, start, tmp_path, parallel):
    """ddp from the start; fsdp goes on with what one process left when it was killed."""
    if parallel == "fsdp":
        shutil.copytree(tuned, tmp_path / "two")
        for step in ("step-00000008", "step-00000012"):
            shutil.rmtree(tmp_path / "two" / "ckpt" / step)
    args = [*arguments(start, tmp_path / "two"), "--device=cpu", "--resume", f"--parallel={parallel}"]
    codes, text = launch(2, *args, script="posttrain.sft", logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]
    assert logged_losses(tmp_path / "two") == pytest.approx(logged_losses(tuned), abs=2e-5)


def test_a_chat_with_apertus_own_ids_ends_its_turn_on_68(monkeypatch, capsys):
    tok = tokenizer.load("apertus")
    model = Apertus(ApertusConfig(**{**TINY, "vocab_size": tok.vocab_size, "n_layer": 1, "n_embd": 8, "ffn_dim": 8}))
    says, types = iter([*tok.encode("Four."), 68, *tok.encode("never said")]), iter(["2+2?", ""])
    monkeypatch.setattr(talk, "sample_token", lambda logits, **_: torch.tensor([next(says)]))
    monkeypatch.setattr("builtins.input", lambda _="": next(types))
    talk.converse(model, tok, dict(temperature=1.0))
    assert capsys.readouterr().out == "Four.\n" and tok.decode(list(says)) == "never said"


PROBE = """
import sys
import torch
from torch.utils._python_dispatch import TorchDispatchMode
import convert
from posttrain import common
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
    ranks, where = Ranks("fsdp"), "cpu"
    ranks.join(where, 60)
    for folder in sys.argv[1:]:
        with Largest() as largest:
            model, _ = common.start_model(folder, where, torch.float32, ranks)
        want = dict(convert.load_any(folder)[0].named_parameters())
        names = [n for n, p in model.named_parameters() if not torch.equal(p.full_tensor(), want[n])]
        here = sum(p.to_local().numel() for p in model.parameters())
        sizes = [p.numel() for p in want.values()]
        print(f"rank {ranks.rank}: {names} differ, {here} of {sum(sizes)} numbers here, at most {largest.numbers} at "
              f"once, {max(sizes)} in the largest", flush=True)
        with torch.no_grad():
            h = model.hidden(torch.arange(12).view(1, 12))
        assert torch.equal(h, convert.load_any(folder)[0].hidden(torch.arange(12).view(1, 12)))
    ranks.leave()
"""


def test_a_sharded_start_model_is_read_shard_by_shard_and_never_held_whole(launch, tuned, tmp_path):
    """
    Two ranks, from an export, a run folder and a model whose head is its embedding: the same weights, and no tensor of
    the size of a whole one.
    """
    torch.manual_seed(1)
    convert.save_hf(Apertus(ApertusConfig(**TINY, tie_embeddings=True)), str(tmp_path / "tied"), TOK)
    program = tmp_path / "probe.py"
    program.write_text(PROBE)
    codes, text = launch(2, tuned / "hf", tuned, tmp_path / "tied", script=program, logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]
    reports = r"rank \d: \[\] differ, (\d+) of (\d+) numbers here, at most (\d+) at once, (\d+) in the largest"
    found = re.findall(reports, text)
    assert len(found) == 6, text
    for here, all_there_are, once, largest in (map(int, f) for f in found):
        assert here == pytest.approx(all_there_are / 2, rel=0.01) and once <= largest / 2


def test_the_export_chats_in_transformers_with_the_same_greedy_tokens(tuned):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    theirs = AutoModelForCausalLM.from_pretrained(tuned / "hf").eval()
    tok = AutoTokenizer.from_pretrained(tuned / "hf")
    messages = [SYSTEM, user("question 3")]
    encoded = tok.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = encoded["input_ids"]
    assert ids[0].tolist() == TOK.chat(messages, add_generation_prompt=True)[1]
    end, called = TOK.special["<|assistant_end|>"], TOK.special["<|tools_suffix|>"]
    ours = generate(convert.load_run(str(tuned))[0], ids, 30, temperature=0, stop=chat.ends(TOK))
    assert tok.eos_token_id == theirs.config.eos_token_id == end
    # As the published file, [2, 68, 72]: it ends a turn, and stops where a tool has to answer.
    assert theirs.generation_config.eos_token_id == [2, end, called]
    assert theirs.generate(ids, max_new_tokens=30, do_sample=False).tolist() == ours.tolist()


@pytest.mark.parametrize("name", ["posttrain/sft.py", "posttrain/qrpo.py"])
def test_a_negative_number_of_checkpoints_is_told_before_anything_is_read(tmp_path, name):
    done = script(name, "--keep_checkpoints=-1", f"--data={tmp_path / 'none.jsonl'}", f"--out={tmp_path / 'run'}")
    assert done.returncode == 2 and "keep_checkpoints=-1: want how many" in done.stderr
    assert not os.path.exists(tmp_path / "run")


def test_a_run_that_cannot_fit_says_so_with_the_sum_before_it_reads_a_weight(start, tmp_path, monkeypatch):
    """
    The 8B's config.json alone, without weights, on a device of 24 GB: 20 bytes for each of 8.05B weights are 161 GB,
    adapters of rank 16 beside it in bf16 16.9. AdamW holds one number less for each, or averages in bf16 4 bytes: 129.
    """
    folder = tmp_path / "8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(convert.config_to_hf(ApertusConfig(vocab_size=131072))))
    monkeypatch.setattr(common, "memory_of", lambda device: 24e9)
    config = dict(init_from=str(folder), base="fp32", optimizer="ademamix", state_dtype="float32", lora_r=0)
    alone = types.SimpleNamespace(sharded=False)
    with pytest.raises(ValueError, match="ademamix take 161.1 GB, and cuda has 24.0: --lora_r=16 --base=bf16 takes 16.9"):
        common.check_room(config, "cuda", alone)
    for other in (dict(optimizer="adamw"), dict(state_dtype="bfloat16")):
        with pytest.raises(ValueError, match="take 128.9 GB"):
            common.check_room(config | other, "cuda", alone)
    with pytest.raises(ValueError, match="take 40.3 GB"):
        common.check_room(config, "cuda", types.SimpleNamespace(sharded=True, shard=4))
    adapters = dict(lora_r=16, lora_alpha=32.0, lora_on="all", lora_rs=False)
    common.check_room(config | adapters | dict(base="nf4"), "cuda", alone)
    monkeypatch.setattr(common, "memory_of", lambda device: 12e9)
    with pytest.raises(ValueError, match="take 16.9 GB, and cuda has 12.0: --lora_r=16 --base=nf4 takes 6.5"):
        common.check_room(config | adapters | dict(base="bf16"), "cuda", alone)
