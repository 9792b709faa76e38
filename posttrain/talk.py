"""
A conversation with a model, for `python sample.py --chat`.

The conversation is its messages. Each turn renders them to ids, and a cache keeps the keys and values of the ids that
the model has read: only ids after the first difference are read anew, so that a turn costs the time of its own
tokens. An empty line or the end of input ends the conversation; /help lists the other commands. If the model calls a
tool, you type the tool's output.

$ python sample.py --init_from=out/sft --chat
"""

import json
import os

from chat import as_json, stop_ids
from engine.files import read_text
from generate import KVCache, stream
from tokenizer import CHAT, OUTPUT

HELP = """/reset          start anew with the same system message
/system TEXT    start anew with another system message
/save FILE      append the conversation to FILE, as a line that posttrain/sft.py reads
/help           show this"""


def block(kind, part, tok):
    """A block of an answer in the chat format. part: its ids, or for tool_outputs its text."""
    if kind == "tool_outputs":
        return dict(type=kind, outputs=[dict(output=part)])
    text = tok.decode(part)
    if kind != "tool_calls":
        return dict(type=kind, text=text)
    try:
        calls = [dict(name=name, arguments=as_json(value))
                 for call in json.loads(text) for name, value in call.items()]
    except Exception:
        calls = [dict(name="", arguments=json.dumps(text))]            # not the JSON of a call: kept as it is
    return dict(type=kind, calls=calls)


def ask(prompt):
    """A line from the user, or "" at the end of input."""
    try:
        return input(prompt)
    except EOFError:
        return ""


class Conversation:
    """`messages` in the chat format; `ids`: all that was last read and said; `cache`: of the first of these ids."""

    def __init__(self, model, tok, system, tools, thinking):
        tok.check_chat()
        tok.chat([], tools)     # an error in the tools comes before the first question
        self.model, self.tok, self.tools, self.thinking = model, tok, tools, thinking
        self.cache, self.ids = KVCache(model, 1, 0), []
        self.begin(system)

    def begin(self, system):
        """Start anew with a system message ("" = the model's own)."""
        self.system = system
        self.messages = [dict(role="system", content=system)] if system else []

    def answer(self, line, how, max_new_tokens):
        """
        Answer the user's line: print the answer, token by token, and keep both. Thoughts and calls of tools are
        printed in brackets.
        """
        tok, window = self.tok, self.model.config.block_size
        around = [tok.id_of(name) for name in CHAT[-4:]]
        opens, closes, calls, called = around              # opens and closes thoughts
        # Apertus 1.5 has another format of tool calls: they stay text, and the user is not asked for an output.
        call = "response" if OUTPUT in tok.special else "tool_calls"
        stop = stop_ids(tok)
        shown = dict.fromkeys(stop, "") | dict(zip(around, ("[thoughts ", "]\n", "[calls ", "]\n")))
        decode = tok.stream()
        inside = "response"
        parts = [(inside, [])]
        turn = [dict(role="user", content=line)]
        output = "none yet"
        while output:
            ids = tok.chat(self.messages + turn, self.tools, self.thinking, len(turn) == 1)
            if len(turn) == 1 and len(ids) >= window:
                print(f"the model reads {window} tokens and the conversation has {len(ids)}: /reset starts another")
                return
            # The last id is always read, because its logits predict the next token.
            same = os.path.commonprefix([self.ids, ids[:-1]])
            self.cache.length = min(self.cache.length, len(same))
            self.ids = ids
            room = min(max_new_tokens, window - len(ids))
            for token in stream(self.model, [ids], room, stop, cache=self.cache, **how):
                i = token.item()
                ids.append(i)
                if i in (opens, closes):
                    inside = "thoughts" if i == opens else "response"
                    parts.append((inside, []))
                elif i == calls:
                    parts.append((call, []))
                elif i not in stop:
                    parts[-1][1].append(i)
                print(shown[i] if i in shown else decode(i), end="", flush=True)
            output = ask("the tool's output> ") if ids[-1] == called and call == "tool_calls" else ""
            if output:
                parts += [("tool_outputs", output), (inside, [])]
            blocks = [block(kind, part, tok) for kind, part in parts if part]
            content = tok.decode(parts[0][1]) if len(parts) == 1 else dict(blocks=blocks)
            turn[1:] = [dict(role="assistant", content=content)]
        print()
        self.messages += turn


def converse(model, tok, how, system, tools, thinking, max_new_tokens):
    """Read a line, answer, repeat. how: the arguments of sample_token; the others: settings of sample.py."""
    try:
        declared = json.loads(read_text(tools) if tools else "null")
    except json.JSONDecodeError as error:
        raise ValueError(f"--tools={tools} is not JSON ({error}): want a list of objects with name, description and "
                         "parameters") from None
    conversation = Conversation(model, tok, system, declared, thinking)
    while (line := ask("\n> ")).strip():
        command, _, rest = line.strip().partition(" ")
        try:
            if command == "/reset":
                conversation.begin(conversation.system)
            elif command == "/system" and rest:
                conversation.begin(rest)
            elif command == "/save" and rest:
                row = dict(messages=conversation.messages, tools=declared, thinking=thinking)
                with open(rest, "a", encoding="utf-8") as f:
                    f.write(as_json(row) + "\n")
                print(f"saved to {rest}")
            elif command.startswith("/"):
                print(HELP)
            else:
                conversation.answer(line, how, max_new_tokens)
        except (OSError, ValueError) as error:             # a typing mistake does not end the conversation
            print(error)
