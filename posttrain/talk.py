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


def read_line(prompt):
    """A line from the user, or "" at the end of input."""
    try:
        return input(prompt)
    except EOFError:
        return ""


def block(block_type, part, tok):
    """A block of an answer in the chat format. part: its ids, or for tool_outputs its text."""
    if block_type == "tool_outputs":
        return dict(type=block_type, outputs=[dict(output=part)])
    text = tok.decode(part)
    if block_type != "tool_calls":
        return dict(type=block_type, text=text)
    try:
        calls = [dict(name=name, arguments=as_json(value))
                 for call in json.loads(text) for name, value in call.items()]
    except Exception:
        calls = [dict(name="", arguments=json.dumps(text))]            # not the JSON of a call: kept as it is
    return dict(type=block_type, calls=calls)


class Answer:
    """
    An answer of the model: add() takes its tokens one by one and returns the text to print.

    `parts`: (type of block, its ids, or for tool_outputs its text) in order; `section`: thoughts or response, without
    regard to calls of tools.
    """

    def __init__(self, tok):
        self.tok = tok
        self.decode = tok.stream()
        self.stop = stop_ids(tok)
        control = [tok.id_of(name) for name in CHAT[-4:]]
        self.begin_thoughts, self.end_thoughts, self.begin_calls, self.end_calls = control
        self.printed = dict.fromkeys(self.stop, "") | dict(zip(control, ("[thoughts ", "]\n", "[calls ", "]\n")))
        # Apertus 1.5 has another format of tool calls: they stay text, and the user is not asked for an output.
        self.call_type = "response" if OUTPUT in tok.special else "tool_calls"
        self.section = "response"
        self.parts = [(self.section, [])]

    def add(self, i):
        """Add a token by its id. Returns its text on the screen, where thoughts and calls of tools are in brackets."""
        if i in (self.begin_thoughts, self.end_thoughts):
            self.section = "thoughts" if i == self.begin_thoughts else "response"
            self.parts.append((self.section, []))
        elif i == self.begin_calls:
            self.parts.append((self.call_type, []))
        elif i not in self.stop:
            self.parts[-1][1].append(i)
        return self.printed[i] if i in self.printed else self.decode(i)

    def waits_for_output(self, last_id):
        """Whether the answer has stopped, at its last id, for the output of a tool."""
        return last_id == self.end_calls and self.call_type == "tool_calls"

    def add_output(self, text):
        """Add the output of a tool, after which the answer goes on."""
        self.parts += [("tool_outputs", text), (self.section, [])]

    def message(self):
        """The answer as a message of the chat format."""
        if len(self.parts) == 1:
            content = self.tok.decode(self.parts[0][1])
        else:
            content = dict(blocks=[block(block_type, part, self.tok) for block_type, part in self.parts if part])
        return dict(role="assistant", content=content)


class Conversation:
    """`messages` in the chat format; `ids`: of all text that was last read and generated; `cache`: of the first ids."""

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

    def answer(self, line, sampling, max_new_tokens):
        """Answer the user's line: print the answer, token by token, and keep both. sampling: as in converse()."""
        window = self.model.config.block_size
        turn = [dict(role="user", content=line)]
        ids = self.tok.chat(self.messages + turn, self.tools, self.thinking, True)
        if len(ids) >= window:
            print(f"the model reads {window} tokens and the conversation has {len(ids)}: /reset starts another")
            return
        answer = Answer(self.tok)
        while True:
            self.generate(ids, answer, sampling, min(max_new_tokens, window - len(ids)))
            output = read_line("the tool's output> ") if answer.waits_for_output(ids[-1]) else ""
            if output:
                answer.add_output(output)
            turn[1:] = [answer.message()]
            if not output:
                break
            ids = self.tok.chat(self.messages + turn, self.tools, self.thinking, False)
        print()
        self.messages += turn

    def generate(self, ids, answer, sampling, max_new_tokens):
        """Continue ids: append each token to them and to the answer, and print it."""
        # The last id is always read, because its logits predict the next token.
        unchanged = os.path.commonprefix([self.ids, ids[:-1]])
        self.cache.truncate(len(unchanged))
        self.ids = ids
        for token in stream(self.model, [ids], max_new_tokens, answer.stop, cache=self.cache, **sampling):
            ids.append(token.item())
            print(answer.add(token.item()), end="", flush=True)


def converse(model, tok, sampling, system, tools, thinking, max_new_tokens):
    """Read a line, answer, repeat. sampling: the arguments of sample_token; the others: settings of sample.py."""
    try:
        declared = json.loads(read_text(tools) if tools else "null")
    except json.JSONDecodeError as error:
        raise ValueError(f"--tools={tools} is not JSON ({error}): want a list of objects with name, description and "
                         "parameters") from None
    conversation = Conversation(model, tok, system, declared, thinking)
    while (line := read_line("\n> ")).strip():
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
                conversation.answer(line, sampling, max_new_tokens)
        except (OSError, ValueError) as error:             # a typing mistake does not end the conversation
            print(error)
