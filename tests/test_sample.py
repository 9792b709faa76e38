"""sample.py and its conversations (posttrain/talk.py): the same tokens as from scratch, and what a user may type."""
import json

import pytest
import torch

import chat
import convert
import generate as generate_file
import tokenizer
from conftest import script
from generate import KVCache, generate
from posttrain import talk
from tiny import small

TOK = tokenizer.load("byte")


def ids_of(*parts):
    """The ids of texts and control tokens, which are written @assistant_end and so on."""
    ids = []
    for part in parts:
        ids += [TOK.special[f"<|{part[1:]}|>"]] if part.startswith("@") else TOK.encode(part)
    return ids


@pytest.fixture(scope="module")
def model():
    return small(vocab_size=320, block_size=700)


def said(folder, *flags, **how):
    done = script("sample.py", f"--init_from={folder}", "--max_new_tokens=20", "--device=cpu", *flags, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_flags_choose_the_text(lab, tmp_path):
    """A seed repeats it, 0 turns top_k and top_p off, a file is read byte by byte, a run and its export agree."""
    hf, start = lab / "hf", "--start=def f(x):\r\n"
    plain = said(hf, start, "--top_p=0")
    assert plain.startswith("def f(x):\r\n")
    (tmp_path / "start").write_bytes(b"def f(x):\r\n")
    for same in ("--top_p=1", "--top_k=320"):
        assert plain == said(lab / "pretrained", f"--start=FILE:{tmp_path / 'start'}", "--top_p=0", same)
    assert plain != said(hf, start, "--top_p=0", "--seed=1")
    greedy = said(hf, start, "--temperature=0")
    assert greedy == said(hf, start, "--top_k=1", "--top_p=0") != plain
    several = said(hf, start, "--top_k=1", "--num_samples=2")
    assert several == 2 * (greedy + "-" * 40 + "\n")


@pytest.mark.parametrize("number", [1, 2])
def test_text_stops_at_the_end_of_a_call_of_a_tool(lab, monkeypatch, number):
    """The output is the tool's: a model that went on would make it up. Published: eos_token_id [2, 68, 72]."""
    new = iter(ids_of("@tools_prefix", "[]", "@tools_suffix", "made up"))
    monkeypatch.setattr(
        generate_file,
        "sample_token",
        lambda logits, **_: torch.tensor([next(new)] * number)
    )
    out = said(lab / "hf", f"--num_samples={number}")
    assert "[]" in out and "made up" not in out


# -----------------------------------------------------------------------------
# conversations


def test_the_cache_kept_across_turns_gives_the_tokens_of_a_conversation_read_anew(model):
    """It begins with room for 16 and grows several times."""
    end = ids_of("@assistant_end")
    ids = TOK.chat([dict(role="system", content="s")])[1]
    cache = KVCache(model, 1, 16)
    for words in ("first", "second, and longer", "third"):
        ids += ids_of("@user_start", words, "@user_end", "@assistant_start")
        [whole] = generate(model, [ids], 20, temperature=0, stop=end)
        want = whole[len(ids):]
        assert list(talk.reply(model, cache, ids, dict(temperature=0), end, 20)) == want
        assert cache.length == len(ids) - 1
        ids += end


def test_a_saved_conversation_renders_to_the_ids_that_were_said(model, monkeypatch, tmp_path):
    """Thoughts, a call of a tool and its output, an answer: /save writes what posttrain/sft.py learns from."""
    convert.save_hf(model, str(tmp_path / "hf"), TOK)
    calls = '[{"get_weather": {"city": "Bern"}}]'
    told = ids_of("@inner_prefix", "need it", "@tools_prefix", calls, "@tools_suffix", "so", "@inner_suffix", "12 C.",
                  "@assistant_end")
    new = iter([*ids_of("gone", "@assistant_end"), *told, *ids_of("plain"), TOK.id_of("</s>")])
    monkeypatch.setattr(
        talk,
        "sample_token",
        lambda logits, **_: torch.tensor([next(new)])
    )
    kept, save = [], talk.Conversation.save
    monkeypatch.setattr(
        talk.Conversation,
        "save",
        lambda self, path: kept.extend(self.ids) or save(self, path)
    )
    typed = f'Hi\n/system be brief\nWeather?\n"12 C"\n/thoughts\n/help\nAnd?\n/save {tmp_path / "saved"}\n'
    out = said(tmp_path / "hf", "--chat", "--max_new_tokens=99", stdin=typed + "b" * 700 + "\n\nnever read\n")
    assert f"[calls {calls}]\n[thought for 2 tokens" in out and "12 C.\nneed it\nso" in out and "/system TEXT" in out
    assert "/reset starts another" in out
    row = json.loads((tmp_path / "saved").read_text())
    ids, mine = chat.render(TOK, row)
    assert ids == kept
    assert [
        i
        for i, its in zip(ids, mine)
        if its
    ] == told + ids_of("plain", "@assistant_end")
    assert row["messages"][-1]["content"] == "plain"
