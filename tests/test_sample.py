"""sample.py and its conversations: the same tokens as without a cache, and a user's commands."""

import shutil

import pytest
import torch
from lab import run
from tiny import small

import chat
import convert
import generate as generate_file
import tokenizer
from chat import stop_ids
from engine.files import read_json
from generate import KVCache, generate
from sample import Conversation

TOK = tokenizer.load("byte")


def ids_of(*parts):
    """The ids of texts and control tokens; @assistant_end means <|assistant_end|>."""
    ids = []
    for part in parts:
        ids += [TOK.special[f"<|{part[1:]}|>"]] if part.startswith("@") else TOK.encode(part)
    return ids


@pytest.fixture(scope="module")
def model():
    return small(vocab_size=320, block_size=700)


def said(folder, *flags, **how):
    flags = f"--init_from={folder}", "--max_new_tokens=20", "--device=cpu", *flags
    return run("sample.py", *flags, **how).stdout


def test_flags_choose_the_text(lab, tmp_path):
    """A seed repeats a text, 0 turns top_k and top_p off, a file keeps its bytes, a run and its export agree."""
    hf, start = lab / "hf", "--start=def f(x):\r\n"
    plain = said(hf, start, "--top_p=0")
    assert plain.startswith("def f(x):\r\n")
    (tmp_path / "start").write_bytes(b"def f(x):\r\n")
    for same in ("--top_p=1", "--top_k=320"):
        assert plain == said(lab / "pretrained", f"--start=FILE:{tmp_path / 'start'}", "--top_p=0", same)
    assert plain != said(hf, start, "--top_p=0", "--seed=1")
    greedy = said(hf, start, "--temperature=0")
    assert greedy == said(hf, start, "--top_k=1", "--top_p=0") != plain
    assert said(hf, start, "--top_k=1", "--num_samples=2") == 2 * (greedy + "-" * 40 + "\n")


def test_text_stops_at_the_end_of_a_call_of_a_tool(lab, monkeypatch):
    """
    The output must come from the tool; a model that continued would invent it. Published: eos_token_id [2, 68, 72].
    "é" is two tokens.
    """
    new = iter(ids_of("@tools_prefix", "[é]", "@tools_suffix", "made up"))
    monkeypatch.setattr(generate_file, "sample_token", lambda logits, **_: torch.tensor([next(new)]))
    assert "[é]\n" in said(lab / "hf")


# -----------------------------------------------------------------------------
# conversations


def test_the_cache_kept_across_turns_gives_the_tokens_of_a_conversation_read_anew(monkeypatch):
    """The cache grows and reads each position once, as answers of letters render to their ids. Also after begin()."""
    model = small(vocab_size=320, block_size=700)
    model.lm_head.weight.data[: 64 + ord("a")] = model.lm_head.weight.data[65 + ord("z") :] = 0
    read, begin, said = [], KVCache.begin, []
    monkeypatch.setattr(KVCache, "begin", lambda self, T: read.append(T) or begin(self, T))
    conversation = Conversation(model, TOK, "s", None, False)

    def answer(words):
        prompt = [*conversation.messages, dict(role="user", content=words)]
        conversation.answer(words, 20, dict(temperature=0))
        said.append((TOK.chat(prompt, add_generation_prompt=True), conversation.ids))

    list(map(answer, ("first", "second, and longer", "third")))
    assert sum(read) == conversation.cache.length == len(conversation.ids) - 1
    conversation.begin("another")
    answer("first")
    for prompt, ids in said:
        assert generate(model, [prompt], 20, temperature=0, stop=stop_ids(TOK)) == [ids]


def test_a_saved_conversation_renders_to_the_ids_that_were_said(model, monkeypatch, tmp_path):
    """
    Thoughts and a call of a tool, which ends the turn; thoughts and an answer; text: posttrain/sft.py can train on the
    file of /save.
    """
    convert.save_hf(model, str(tmp_path / "hf"), TOK)
    calls = '[{"get_weather": {"city": "Bern"}}]'
    call = ids_of("@inner_prefix", "need it", "@tools_prefix", calls, "@tools_suffix")
    told = ids_of("@inner_prefix", "so", "@inner_suffix", "12 C.", "@assistant_end")
    new = iter([*ids_of("gone", "@assistant_end"), *call, *told, *ids_of("plain"), TOK.id_of("</s>")])
    monkeypatch.setattr(generate_file, "sample_token", lambda logits, **_: torch.tensor([next(new)]))
    prompts, stream = [], generate_file.stream
    monkeypatch.setattr(
        generate_file,
        "stream",
        lambda model, idx, *args, **how: prompts.append([*idx[0]]) or stream(model, idx, *args, **how),
    )
    typed = f"Hi\n/system be brief\nWeather?\n12 C\n/help\nAnd?\n/save {tmp_path / 'saved'}\n"
    out = said(tmp_path / "hf", "--chat", "--max_new_tokens=99", stdin=typed + "b" * 700 + "\n\nnever read\n")
    assert f"[thoughts need it[calls {calls}]\n" in out and "[thoughts so]\n12 C.\n" in out and "/system TEXT" in out
    assert "/reset starts another" in out
    row, end = read_json(tmp_path / "saved"), ids_of("@assistant_end")
    ids, mine = chat.render(TOK, row)
    assert len(prompts) == 4 and all(ids[: len(prompt)] == prompt for prompt in prompts[1:])
    assert [i for i, its in zip(ids, mine) if its] == call + end + told + ids_of("plain") + end
    assert row["messages"][-1]["content"] == "plain"


def test_an_answer_that_breaks_off_is_saved_so_that_nothing_learns_to_break_off_there(model, monkeypatch, tmp_path):
    """The second answer has no room for its end: posttrain/sft.py reads its words and learns the first answer alone."""
    convert.save_hf(model, str(tmp_path / "hf"), TOK)
    new = iter(ids_of("whole", "@assistant_end", "broken"))
    monkeypatch.setattr(generate_file, "sample_token", lambda logits, **_: torch.tensor([next(new)]))
    printed = said(tmp_path / "hf", "--chat", "--max_new_tokens=6", stdin=f"a\nb\n/save {tmp_path / 'saved'}\n\n")
    assert "; 1 of its answers are unfinished" in printed
    row = read_json(tmp_path / "saved")
    ids, mask = chat.render(TOK, row)
    assert row["messages"][-1]["content"] == "broken"
    assert [i for i, is_learnt in zip(ids, mask) if is_learnt] == ids_of("whole", "@assistant_end")


def test_what_a_model_lacks_for_a_chat_and_that_its_run_has_not_ended_is_said_once(lab, tmp_path):
    """On stderr: the text is for other programs. SFT taught lab/sft the chat format."""
    unfinished = shutil.copytree(lab / "pretrained", tmp_path / "run")
    (unfinished / "summary.json").unlink()
    lines = {}
    for folder in (unfinished, lab / "hf", lab / "sft", lab / "adapted"):
        for flags in ([], ["--chat"]):
            done = run("sample.py", f"--init_from={folder}", "--max_new_tokens=2", "--device=cpu", *flags, stdin="\n")
            lines[folder.name, *flags] = done.stderr
    ended = f"{unfinished} has not ended: its newest checkpoint is read\n"
    warnings = {
        name: f"warning: {folder} has hardly learnt the chat format"
        for name, folder in (("run", unfinished), ("hf", lab / "hf"))
    }
    assert lines["run",] == ended and lines["run", "--chat"].startswith(ended + warnings["run"])
    assert lines["hf", "--chat"].startswith(warnings["hf"]) and lines["hf", "--chat"].count("\n") == 1
    assert [lines["hf",], *(lines[key] for key in lines if key[0] in ("sft", "adapted"))] == [""] * 5
