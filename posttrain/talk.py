"""
A conversation with a model, for `python sample.py --chat`.

The conversation is one list of ids that grows. A cache holds the keys and values of all ids but the newest, so that a
turn costs the time of its own tokens. An empty line or the end of input ends the conversation; /help lists the other
commands. If the model calls a tool, you type the tool's output.

$ python sample.py --init_from=out/sft --chat
"""

import json
import sys

import torch
import torch.nn.functional as F

from chat import as_json, stop_ids, user_turn
from engine.files import read_text
from generate import KVCache, next_logits, sample_token

HELP = """/reset          start anew with the same system message
/system TEXT    start anew with another system message
/thoughts       show the thoughts behind the last answer
/save FILE      append the conversation to FILE, as a line that posttrain/sft.py reads
/help           show this"""


@torch.no_grad()
def reply(model, cache, ids, how, stop, limit):
    """
    Continue ids: yield up to `limit` new ids, until one of `stop`, which is yielded too, and append each to ids.

    cache: a KVCache of the first of these ids; its buffers at least double when they are full. The last id stays
    unread, until the next call. how: the arguments of sample_token.
    """
    for _ in range(limit):
        if len(ids) > cache.size:
            grown = [[F.pad(buffer, (0, 0, 0, len(ids))) for buffer in buffers] for buffers in cache.kv]
            cache.kv, cache.size = grown, cache.size + len(ids)
        x = torch.tensor([ids[cache.length:]], device=cache.padding.device)        # (1, T)
        with cache.attached(model):
            logits = next_logits(model, x, cache)                                  # (1, V)
        ids.append(sample_token(logits, **how).item())
        yield ids[-1]
        if ids[-1] in stop:
            return


def block(kind, part, tok):
    """A block of an answer as the chat format has it. part: its ids; of tool_outputs the text."""
    if kind == "tool_outputs":
        return dict(type=kind, outputs=[dict(output=part)])
    text = tok.decode(part)
    if kind != "tool_calls":
        return dict(type=kind, text=text)
    try:
        calls = [(name, as_json(value)) for call in json.loads(text) for name, value in call.items()]
    except (ValueError, AttributeError, TypeError):
        calls = [("", json.dumps(text))]                               # not the JSON of a call: kept as it is
    return dict(type=kind, calls=[dict(name=name, arguments=arguments) for name, arguments in calls])


def ask(prompt):
    """A line from the user, or "" at the end of input. The prompt is printed only to a terminal."""
    try:
        return input(prompt if sys.stdin.isatty() else "")
    except EOFError:
        return ""


class Conversation:
    """`messages` in the chat format, their `ids`, a `cache` of the first of the ids, and the last `thoughts`."""

    def __init__(self, model, tok, system, tools, thinking):
        tok.check_chat()
        self.model, self.tok, self.tools, self.thinking = model, tok, tools, thinking
        self.begin(system)

    def begin(self, system):
        """Start anew with a system message ("" = the model's own)."""
        self.system = system
        self.messages = [dict(role="system", content=system)] if system else []
        self.ids = self.tok.chat(self.messages, self.tools, self.thinking)
        self.cache = KVCache(self.model, 1, 256)
        self.thoughts = ""

    def save(self, path):
        """Append the conversation to a .jsonl file."""
        row = dict(messages=self.messages, tools=self.tools, thinking=self.thinking)
        with open(path, "a", encoding="utf-8") as f:
            f.write(as_json(row) + "\n")

    def answer(self, line, how, max_new_tokens):
        """
        Take the user's line; print the answer, token by token, and keep both.

        Thoughts are folded to their length, calls of tools are printed in brackets.
        """
        tok, ids, window = self.tok, self.ids, self.model.config.block_size
        asked = user_turn(tok, line)
        length = len(ids) + len(asked)
        if length >= window:
            print(f"the model reads {window} tokens and the conversation has {length}: /reset starts another")
            return
        ids += asked
        names = "inner_prefix inner_suffix tools_prefix tools_suffix assistant_end".split()
        opens, closes, calls, called, end = (tok.id_of(f"<|{name}|>") for name in names)
        stop = stop_ids(tok)
        decode = tok.stream()
        inside = "response"
        parts = [(inside, [])]
        while True:
            for i in reply(self.model, self.cache, ids, how, stop, min(max_new_tokens, window - len(ids))):
                kind, part = parts[-1]
                if i == closes:
                    print(f"[thought for {len(part)} tokens, /thoughts shows them]", flush=True)
                if i in (opens, closes):
                    inside = "thoughts" if i == opens else "response"
                    parts.append((inside, []))
                elif i == calls:
                    parts.append(("tool_calls", []))
                    print("[calls ", end="", flush=True)
                elif i not in stop:
                    part.append(i)
                    print("" if kind == "thoughts" else decode(i), end="", flush=True)
            if ids[-1] != called:
                break
            print("]", flush=True)
            # Apertus 1.5 has other brackets for outputs.
            output = "" if "<|tool_output_start|>" in tok.special else ask("the tool's output> ")
            if not output:
                break
            parts += [("tool_outputs", output), (inside, [])]
            ids += tok.encode(f"[{output}]")
        kind, part = parts[-1]
        print(f"[{len(part)} tokens of thought, unfinished]" if kind == "thoughts" else "")

        # The template ends a turn with <|assistant_end|>, even if the model did not. The cache has not read the last
        # id yet, so that it can still be exchanged.
        if ids[-1] == tok.id_of("</s>"):
            ids.pop()
        if ids[-1] != end:
            ids.append(end)
        blocks = [block(kind, part, tok) for kind, part in parts if part]
        self.thoughts = "\n".join(block["text"] for block in blocks if block["type"] == "thoughts")
        plain = all(kind == "response" for kind, _ in parts)
        content = "".join(block["text"] for block in blocks) if plain else dict(blocks=blocks)
        self.messages += [dict(role="user", content=line), dict(role="assistant", content=content)]


def converse(model, tok, how, system="", tools="", thinking=False, max_new_tokens=300):
    """Read a line, answer, repeat. tools: a JSON file, or "". how: the arguments of sample_token."""
    declared = json.loads(read_text(tools)) if tools else None
    conversation = Conversation(model, tok, system, declared, thinking)
    while (line := ask("\n> ")).strip():
        command, _, rest = line.strip().partition(" ")
        if command == "/reset":
            conversation.begin(conversation.system)
        elif command == "/system" and rest:
            conversation.begin(rest)
        elif command == "/thoughts":
            print(conversation.thoughts or "no thoughts so far")
        elif command == "/save" and rest:
            conversation.save(rest)
            print(f"saved to {rest}")
        elif command.startswith("/"):
            print(HELP)
        else:
            conversation.answer(line, how, max_new_tokens)
