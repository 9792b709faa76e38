"""sample.py --chat: the same tokens as from scratch, the format of the published template, and what a user may type."""
import copy
import dataclasses
import json

import pytest
import torch

from engine import checkpoint
import convert
import generate as generate_file
from posttrain import talk
from posttrain import sft
import tokenizer
import chat
from conftest import script
from model import Apertus, ApertusConfig
from generate import KVCache, generate

TOK = tokenizer.load("byte")
END = TOK.special["<|assistant_end|>"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = dict(block_size=700, vocab_size=320, n_layer=2, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=64)
    return Apertus(ApertusConfig(**shape, init_std=0.05)).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("model"))
    convert.save_hf(model, path, TOK)
    return path


def test_the_cache_kept_across_turns_gives_the_tokens_of_a_conversation_read_anew(model):
    """The cache begins with room for 16 and grows six times."""
    how = dict(temperature=0, top_k=None, top_p=None, generator=None)
    ids = TOK.chat([dict(role="system", content="s")])[1]
    cache = KVCache(model, 1, 16)
    for words in ("first", "second, and longer", "third"):
        ids += ids_of("@user_start", words, "@user_end", "@assistant_start")
        want = generate(model, [list(ids)], 100, temperature=0, stop=(END,))[0][len(ids):]
        assert list(talk.reply(model, cache, ids, how, {END}, 100)) == want
        # All but the last was read once and is kept.
        assert cache.length == len(ids) - 1
        ids += [END] * (ids[-1] != END)


def test_without_a_system_message_a_conversation_has_that_of_its_model(model):
    """Apertus 1.0's is written by the template; a Mini's is empty, and written all the same; the user's own wins."""
    mini = copy.copy(TOK)
    mini.system = ""
    for tok, said, messages in ((TOK, "", []), (mini, "", [dict(role="system", content="")]),
                                (mini, "own", [dict(role="system", content="own")])):
        conversation = talk.Conversation(model, tok, said, None, False)
        assert conversation.messages == messages and conversation.ids == tok.chat(messages)[1]


def test_a_seed_repeats_its_samples_and_another_one_draws_others(folder):
    def said(*args):
        done = script("sample.py", f"--init_from={folder}", "--max_new_tokens=20", "--device=cpu", *args)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for how in ("--num_samples=1", "--num_samples=2"):
        first = said("--seed=1", how)
        assert first == said("--seed=1", how) and first != said("--seed=2", how)


def speak(monkeypatch, text):
    """Let the model say these ids, whatever its logits are."""
    new = iter(text)
    monkeypatch.setattr(talk, "sample_token", lambda logits, **_: torch.tensor([next(new)]))


def ids_of(*parts):
    """The ids of texts and control tokens, which are written @assistant_end and so on."""
    ids = []
    for part in parts:
        ids += [TOK.special[f"<|{part[1:]}|>"]] if part.startswith("@") else TOK.encode(part)
    return ids


@pytest.fixture
def converse(monkeypatch, capsys, model):
    """converse(said, lines, ...): what is shown when the user types the lines and the model says what it was told."""
    def converse(said, lines, **settings):
        speak(monkeypatch, ids_of(*said))
        lines = iter(lines)

        def typed(_=""):
            try:
                return next(lines)
            except StopIteration:
                raise EOFError
        monkeypatch.setattr("builtins.input", typed)
        talk.converse(model, TOK, dict(temperature=1.0), **settings)
        return capsys.readouterr().out
    return converse


def test_a_turn_ends_on_its_end_token_and_thoughts_are_folded(converse):
    said = ["@inner_prefix", "hmm hmm", "@inner_suffix", "Four.", "@assistant_end", "Five.", "@assistant_end"]
    out = converse(said, ["2+2?", "/thoughts", "2+3?"])
    assert out == "[thought for 7 tokens, /thoughts shows them]\nFour.\nhmm hmm\nFive.\n"


def test_saved_conversations_render_to_the_ids_that_were_said(monkeypatch, converse, tmp_path):
    """
    Thoughts, a tool call in the middle of them, its output, the answer: what /save writes is what posttrain/sft.py
    learns from.
    """
    tools, saved = tmp_path / "tools.json", tmp_path / "saved.jsonl"
    city = dict(type="object", properties=dict(city=dict(type="string")))
    tools.write_text(json.dumps([dict(name="get_weather", description="Look up", parameters=city)]))
    seen = []
    real = talk.reply
    monkeypatch.setattr(talk, "reply", lambda model, cache, ids, *a: (seen.append(ids), real(model, cache, ids, *a))[1])
    calls = '[{"get_weather": {"city": "Bern"}}]'
    told = ["@inner_prefix", "need it", "@tools_prefix", calls, "@tools_suffix", "so", "@inner_suffix", "12 C."]
    lines = ["Weather?", '"12 C"', f"/save {saved}"]
    out = converse([*told, "@assistant_end"], lines, tools=str(tools), thinking=True, system="s")
    assert f"[calls {calls}]\n" in out and "12 C.\n" in out and "need it" not in out
    ids, said = chat.render(TOK, chat.read_rows(str(saved))[0])
    assert ids == seen[0]
    assert [i for i, mine in zip(ids, said) if mine] == ids_of(*told, "@assistant_end")


def test_a_call_of_a_tool_ends_the_turn_where_no_output_is_given_and_none_is_made_up(converse, tmp_path):
    said = ["@tools_prefix", "[]", "@tools_suffix", "Next.", "@assistant_end"]
    out = converse(said, ["Weather?", "", "and?", f"/save {tmp_path / 's'}"])
    assert out.startswith("[calls []]\n\nNext.\n")
    saved = json.loads((tmp_path / "s").read_text())["messages"]
    assert [message["role"] for message in saved] == ["user", "assistant"] * 2


@pytest.mark.parametrize("number", [1, 2])
def test_text_stops_at_the_end_of_a_call_of_a_tool(folder, monkeypatch, number):
    """The output is the tool's: a model that went on would make it up. Published: eos_token_id [2, 68, 72]."""
    new = iter(ids_of("@tools_prefix", "[]", "@tools_suffix", "made up"))
    monkeypatch.setattr(generate_file, "sample_token", lambda logits, **_: torch.tensor([next(new)] * number))
    done = script("sample.py", f"--init_from={folder}", f"--num_samples={number}", "--device=cpu")
    assert done.returncode == 0 and "[]" in done.stdout and "made up" not in done.stdout


def test_reset_and_system_begin_anew(converse, tmp_path):
    said = ["one", "@assistant_end", "two", "@assistant_end", "three", "@assistant_end"]
    lines = ["a", "/reset", "b", "/system be brief", "c", f"/save {tmp_path / 's'}", "/what"]
    out = converse(said, lines, system="first")
    assert out.startswith("one\ntwo\nthree\n") and "/system TEXT" in out
    messages = json.loads((tmp_path / "s").read_text())["messages"]
    assert [(message["role"], message["content"]) for message in messages] == [
        ("system", "be brief"), ("user", "c"), ("assistant", "three")]


def test_an_answer_cut_by_its_length_is_closed_and_a_full_conversation_says_so(converse):
    out = converse(["x" * 2000], ["a", "b" * 600, "c"], max_new_tokens=50, system="s")
    assert out.startswith("x" * 50 + "\n") and "/reset begins another" in out


def test_the_model_reads_an_answer_that_was_cut_as_one_that_has_ended(monkeypatch, converse):
    """As the template writes it: <|assistant_end|> stands before the next <|user_start|>."""
    seen, real = [], talk.reply

    def reply(model, cache, ids, *rest):
        seen.append([*ids])
        return real(model, cache, ids, *rest)
    monkeypatch.setattr(talk, "reply", reply)
    converse(["x" * 2000], ["a", "b"], max_new_tokens=5)
    assert seen[1][len(seen[0]):][:7] == ids_of("xxxxx", "@assistant_end", "@user_start")


def test_compiled_it_says_the_same(monkeypatch, folder):
    """By a backend that generates no code, since Inductor takes 15 s."""
    step = torch.compile(generate_file.next_logits, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(generate_file, "compiled_step", lambda device: step)
    args = [f"--init_from={folder}", "--start=def ", "--max_new_tokens=20", "--temperature=0"]
    said = [script("sample.py", *args, flag).stdout for flag in ("--compile=False", "--compile=True")]
    assert said[0] == said[1] and len(said[0]) > len("def ")


def test_the_script_chats_and_ends_at_an_empty_line(folder):
    flags = [f"--init_from={folder}", "--chat", "--max_new_tokens=8", "--system=s"]
    typed = "hi\n/help\nand you?\n"
    done = script("sample.py", *flags, stdin=typed + "\nnever read\n")
    assert done.returncode == 0 and "/system TEXT" in done.stdout, done.stderr
    assert script("sample.py", *flags, stdin=typed).stdout == done.stdout


# -----------------------------------------------------------------------------
# flags


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """A run folder as train.py leaves it: config.json and a checkpoint."""
    path = tmp_path_factory.mktemp("run")
    config = dict(dataclasses.asdict(model.config), tokenizer="byte", checkpoint_every=1)
    (path / "config.json").write_text(json.dumps(config))
    checkpoint.save(str(path / "ckpt"), 1, model, torch.optim.SGD(model.parameters()), dict(config={}))
    return str(path)


@pytest.mark.parametrize("which", ["run", "folder"])
def test_dtype_is_that_of_the_weights_for_run_folders_too(which, run, folder, monkeypatch):
    name = dict(run=run, folder=folder)[which]
    for dtype, want in ((None, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)):
        assert {p.dtype for p in convert.load_any(name, dtype=dtype)[0].parameters()} == {want}
    seen = []
    real = generate_file.next_logits

    def noted(model, x, cache):
        seen.append(cache.kv[0][0].dtype)
        return real(model, x, cache)
    monkeypatch.setattr(generate_file, "next_logits", noted)
    for flag, want in (("bfloat16", torch.bfloat16), ("float32", torch.float32), ("auto", torch.float32)):
        done = script("sample.py", f"--init_from={name}", f"--dtype={flag}", "--device=cpu", "--max_new_tokens=2")
        assert done.returncode == 0 and seen.pop() == want, done.stderr


def test_zero_turns_top_k_and_top_p_off(run):
    """320 is the whole vocabulary; the likeliest token alone is greedy."""
    def said(*flags):
        return script("sample.py", f"--init_from={run}", "--start=def ", "--max_new_tokens=30", *flags).stdout

    plain = said("--top_k=0", "--top_p=0")
    assert plain == said("--top_k=0", "--top_p=1.0") == said("--top_k=320", "--top_p=0")
    assert plain != said("--top_k=1", "--top_p=0") == said("--temperature=0")
    assert "0 = off" in script("sample.py", "--help").stdout


def test_a_file_is_gone_on_from_as_the_same_text_is(run, tmp_path):
    """Every byte of it: a carriage return is not lost, as it would be by Python's own translation of line ends."""
    file = tmp_path / "start.txt"
    file.write_bytes(b"def f(x):\r\n")
    flags = [f"--init_from={run}", "--max_new_tokens=8"]
    said = script("sample.py", *flags, f"--start=FILE:{file}").stdout
    assert said == script("sample.py", *flags, "--start=def f(x):\r\n").stdout
    assert said.startswith("def f(x):\r\n")


def told_in_one_line(done, says):
    return done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("flag, says", [
    ("--dtype=bf16", "dtype='bf16': there is auto, float32 and bfloat16"),
    ("--top_k=-1", "top_k=-1"), ("--top_k=many", "top_k wants int"), ("--top_k=None", "top_k wants int"),
    ("--top_p=1.5", "top_p=1.5"), ("--top_p=-0.1", "top_p=-0.1"), ("--temperature=-1", "temperature=-1"),
    ("--num_samples=0", "num_samples=0"), ("--max_new_tokens=0", "max_new_tokens=0")])
def test_a_flag_that_cannot_be_is_one_line(run, flag, says):
    assert told_in_one_line(script("sample.py", f"--init_from={run}", flag), says)


def test_a_file_that_is_no_text_is_one_line(run, tmp_path):
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff")
    done = script("sample.py", f"--init_from={run}", f"--start=FILE:{tmp_path / 'picture'}")
    assert told_in_one_line(done, "byte 0 is not UTF-8")


@pytest.mark.parametrize("line", [
    "evaluate.py {rows} --out={out}", "posttrain/sft.py --data={rows} --out={out}",
    "posttrain/qrpo.py --data={rows} --out={out}", "sample.py --start=a"], ids=lambda line: line.split()[0])
def test_a_dtype_that_does_not_exist_is_one_line_in_every_script(line, folder, tmp_path):
    messages = [dict(role="user", content="a"), dict(role="assistant", content="b")]
    rows = tmp_path / "x.jsonl"
    rows.write_text(json.dumps(dict(messages=messages, text="words")))
    name, *flags = line.format(rows=rows, out=tmp_path / "out").split()
    done = script(name, f"--init_from={folder}", "--dtype=bf16", *flags)
    assert told_in_one_line(done, "dtype='bf16': there is auto")
