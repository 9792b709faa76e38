"""sample.py --chat: the same tokens as from scratch, the format of the published template, and what a user may type."""
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
    return Apertus(ApertusConfig(block_size=700, vocab_size=320, n_layer=2, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=64, init_std=0.05)).eval()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("model"))
    convert.save_hf(model, path, TOK)
    return path


def test_the_cache_kept_across_turns_gives_the_tokens_of_a_conversation_read_anew(model):
    how = dict(temperature=0, top_k=None, top_p=None, generator=None)
    ids = TOK.chat([dict(role="system", content="s")])[1]
    cache = KVCache(model, 1, 16)                                             # grows six times
    for words in ("first", "second, and longer", "third"):
        ids += TOK.chat_ids([chat.control("user_start"), chat.plain(words), chat.control("user_end"), chat.control("assistant_start")])[0]
        want = generate(model, [list(ids)], 100, temperature=0, stop=(END,))[0][len(ids):]
        assert list(talk.reply(model, cache, ids, how, {END}, 100)) == want
        assert cache.length == len(ids) - 1                                   # all but the last was read once and is kept
        ids += [END] * (ids[-1] != END)


def speak(monkeypatch, text):
    """Let the model say these ids, whatever its logits are."""
    new = iter(text)
    monkeypatch.setattr(talk, "sample_token", lambda logits, **_: torch.tensor([next(new)]))


def ids_of(*parts):
    return [i for p in parts for i in ([TOK.special[f"<|{p[1:]}|>"]] if p.startswith("@") else TOK.encode(p))]


def converse(monkeypatch, capsys, model, said, lines, **settings):
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


def test_a_turn_ends_on_its_end_token_and_thoughts_are_folded(monkeypatch, capsys, model):
    out = converse(monkeypatch, capsys, model, ["@inner_prefix", "hmm hmm", "@inner_suffix", "Four.", "@assistant_end", "Five.", "@assistant_end"],
               ["2+2?", "/thoughts", "2+3?"])
    assert out == "[thought for 7 tokens, /thoughts shows them]\nFour.\nhmm hmm\nFive.\n"


def test_saved_conversations_render_to_the_ids_that_were_said(monkeypatch, capsys, model, tmp_path):
    """Thoughts, a tool call in the middle of them, its output, the answer: what /save writes is what posttrain/sft.py learns from."""
    weather = [dict(name="get_weather", description="Look up", parameters=dict(type="object", properties=dict(city=dict(type="string"))))]
    (tmp_path / "tools.json").write_text(json.dumps(weather))
    calls = '[{"get_weather": {"city": "Bern"}}]'
    seen = []
    real = talk.reply
    monkeypatch.setattr(talk, "reply", lambda model, cache, ids, *a: (seen.append(ids), real(model, cache, ids, *a))[1])
    out = converse(monkeypatch, capsys, model, ["@inner_prefix", "need it", "@tools_prefix", calls, "@tools_suffix", "so", "@inner_suffix", "12 C.", "@assistant_end"],
               ["Weather?", '"12 C"', f"/save {tmp_path / 'saved.jsonl'}"], tools=str(tmp_path / "tools.json"), thinking=True, system="s")
    assert f"[calls {calls}]\n" in out and "12 C.\n" in out and "need it" not in out
    row = chat.read_rows(str(tmp_path / "saved.jsonl"))[0]
    ids, said = chat.render(TOK, row)
    assert ids == seen[0]
    assert TOK.decode([i for i, mine in zip(ids, said) if mine]) == f"<|inner_prefix|>need it<|tools_prefix|>{calls}<|tools_suffix|>so<|inner_suffix|>12 C.<|assistant_end|>"


def test_reset_and_system_begin_anew(monkeypatch, capsys, model, tmp_path):
    out = converse(monkeypatch, capsys, model, ["one", "@assistant_end", "two", "@assistant_end", "three", "@assistant_end"],
               ["a", "/reset", "b", "/system be brief", "c", f"/save {tmp_path / 's'}", "/what"], system="first")
    assert out.startswith("one\ntwo\nthree\n") and "/system TEXT" in out
    assert json.loads((tmp_path / "s").read_text())["messages"] == [dict(role="system", content="be brief"), dict(role="user", content="c"),
                                                                    dict(role="assistant", content="three")]


def test_an_answer_cut_by_its_length_is_closed_and_a_full_conversation_says_so(monkeypatch, capsys, model):
    out = converse(monkeypatch, capsys, model, ["x" * 2000], ["a", "b" * 600, "c"], max_new_tokens=50, system="s")
    assert out.startswith("x" * 50 + "\n") and "/reset begins another" in out


def test_compiled_it_says_the_same(monkeypatch, folder):
    step = torch.compile(generate_file.next_logits, fullgraph=True, backend="aot_eager")              # Inductor takes 15 s
    monkeypatch.setattr(generate_file, "compiled_step", lambda device: step)
    args = [f"--init_from={folder}", "--start=def ", "--max_new_tokens=20", "--temperature=0"]
    said = [script("sample.py", *args, flag).stdout for flag in ("--compile=False", "--compile=True")]
    assert said[0] == said[1] and len(said[0]) > len("def ")


def test_the_script_chats_and_ends_at_an_empty_line(folder):
    done = script("sample.py", f"--init_from={folder}", "--chat", "--max_new_tokens=8", "--system=s", stdin="hi\n/help\nand you?\n\nnever read\n")
    assert done.returncode == 0 and "/system TEXT" in done.stdout, done.stderr
    again = script("sample.py", f"--init_from={folder}", "--chat", "--max_new_tokens=8", "--system=s", stdin="hi\n/help\nand you?\n")
    assert again.stdout == done.stdout


# -----------------------------------------------------------------------------
# flags


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """A run folder as train.py leaves it: config.json and a checkpoint."""
    path = tmp_path_factory.mktemp("run")
    (path / "config.json").write_text(json.dumps(dict(dataclasses.asdict(model.config), tokenizer="byte", checkpoint_every=1)))
    checkpoint.save(str(path / "ckpt"), 1, model, torch.optim.SGD(model.parameters()), dict(config={}))
    return str(path)


@pytest.mark.parametrize("which", ["run", "folder"])
def test_dtype_is_that_of_the_weights_for_run_folders_too(which, run, folder, monkeypatch):
    name, seen = dict(run=run, folder=folder)[which], []
    for dtype, want in ((None, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)):
        assert {p.dtype for p in convert.load_any(name, dtype=dtype)[0].parameters()} == {want}
    real = generate_file.next_logits
    monkeypatch.setattr(generate_file, "next_logits", lambda model, x, cache: (seen.append(cache.kv[0][0].dtype), real(model, x, cache))[1])
    for flag, want in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        done = script("sample.py", f"--init_from={name}", f"--dtype={flag}", "--max_new_tokens=2")
        assert done.returncode == 0 and seen.pop() == want, done.stderr


def test_zero_turns_top_k_and_top_p_off(run):
    args = [f"--init_from={run}", "--start=def ", "--max_new_tokens=30"]
    said = [script("sample.py", *args, *flags).stdout for flags in
            (["--top_k=0", "--top_p=0"], ["--top_k=0", "--top_p=1.0"], ["--top_k=320", "--top_p=0"], ["--top_k=1", "--top_p=0"], ["--temperature=0"])]
    assert said[0] == said[1] == said[2] and said[3] == said[4] != said[0]
    assert "0 = off" in script("sample.py", "--help").stdout


@pytest.mark.parametrize("flag, says", [
    ("--dtype=bf16", "dtype='bf16': there is auto, float32 and bfloat16"), ("--top_k=-1", "top_k=-1"), ("--top_p=1.5", "top_p=1.5"),
    ("--top_p=-0.1", "top_p=-0.1"), ("--temperature=-1", "temperature=-1"), ("--num_samples=0", "num_samples=0"),
    ("--max_new_tokens=0", "max_new_tokens=0"), ("--top_k=many", "top_k wants int"), ("--top_k=None", "top_k wants int")])
def test_a_flag_that_cannot_be_is_one_line(run, flag, says):
    done = script("sample.py", f"--init_from={run}", flag)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["evaluate.py", "posttrain/sft.py", "posttrain/qrpo.py", "sample.py"])
def test_a_dtype_that_does_not_exist_is_one_line_in_every_script(name, folder, tmp_path):
    row = dict(messages=[dict(role="user", content="a"), dict(role="assistant", content="b")])
    (tmp_path / "x.jsonl").write_text(json.dumps({**row, "text": "words"}))
    text = [str(tmp_path / "x.jsonl")] if name == "evaluate.py" else [] if name == "sample.py" else [f"--data={tmp_path / 'x.jsonl'}"]
    done = script(name, f"--init_from={folder}", "--dtype=bf16", f"--out={tmp_path / 'out'}" if name != "sample.py" else "--start=a", *text)
    assert done.returncode == 2 and "dtype='bf16': there is auto" in done.stderr and done.stderr.count("\n") == 1
