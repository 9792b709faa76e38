"""
A conversation with a model, for `python sample.py --chat`.

What was said is one growing list of ids. The cache holds the keys and values of its beginning, so that each
turn costs its own tokens and not the conversation's. An empty line or the end of input ends it; /help lists
the other commands.
"""

import json
import sys

import torch
import torch.nn.functional as F

from chat import as_json, user_turn
from generate import KVCache, next_logits, sample_token

HELP = """/reset          forget what was said; the system message stays
/system TEXT    another system message; forgets what was said
/thoughts       the thoughts behind the last answer
/save FILE      append the conversation to FILE, a line that posttrain/sft.py reads
/help           this"""


# -----------------------------------------------------------------------------
# the model's side


@torch.no_grad()
def reply(model, cache, ids, how, stop, limit):
    """
    Read what the cache has not read of `ids`, then yield up to `limit` new ids, until one of `stop`, which
    is yielded too.

    Each new id is appended to `ids`. The last one stays unread: the next call reads it together with the
    next message. how: the arguments of sample_token.
    """
    for _ in range(limit):
        # All that is new, then one id at a time.
        unread = ids[cache.length:]
        make_room(cache, len(unread))
        x = torch.tensor([unread], device=cache.padding.device)  # (1, T)
        with cache.attached(model):
            logits = next_logits(model, x, cache)               # (1, V)
        ids.append(sample_token(logits, **how).item())
        yield ids[-1]
        if ids[-1] in stop:
            return


def make_room(cache, T):
    """Double the cache's buffers until T more positions fit, so that memory grows with the conversation."""
    size = cache.size
    while size < cache.length + T:
        size *= 2
    if size > cache.size:
        more = (0, 0, 0, size - cache.size)
        for layer, buffers in enumerate(cache.kv):
            cache.kv[layer] = [F.pad(buffer, more) for buffer in buffers]
        cache.size = size


# -----------------------------------------------------------------------------
# an answer: words, thoughts in brackets, calls of tools in brackets


def brackets(tok):
    """The ids that open and close thoughts, then those that open and close calls of tools."""
    names = ("inner_prefix", "inner_suffix", "tools_prefix", "tools_suffix")
    return [tok.id_of(f"<|{name}|>") for name in names]


def blocks_of(turn, tok):
    """
    An assistant's turn -> its blocks as the chat format has them: thoughts, response, tool_calls,
    tool_outputs.

    turn: ids, and between them the outputs of tools as str.
    """
    opens, closes, calls, called = brackets(tok)
    inside = False      # the thoughts
    ids = []            # of the block that grows
    parts = [("response", ids)]
    for i in turn:
        if i not in (opens, closes, calls, called) and not isinstance(i, str):
            ids.append(i)
            continue
        if i in (opens, closes):
            inside = i == opens
        if isinstance(i, str):
            parts.append(("tool_outputs", i))
        ids = []
        text = "thoughts" if inside else "response"
        parts.append(("tool_calls" if i == calls else text, ids))
    return [block(kind, part, tok) for kind, part in parts if part]


def block(kind, part, tok):
    """part: the ids of a block, or the output of a tool as str."""
    if kind == "tool_outputs":
        output = dict(output=part)
        return dict(type=kind, outputs=[output])
    text = tok.decode(part)
    if kind == "tool_calls":
        return dict(type=kind, calls=calls_in(text))
    return dict(type=kind, text=text)


def calls_in(text):
    """
    '[{"f": {"x": 1}}]' -> [{"name": "f", "arguments": '{"x": 1}'}].

    A text that is not such JSON is kept, as the arguments of a call without a name.
    """
    try:
        return [
            dict(name=name, arguments=as_json(arguments))
            for call in json.loads(text)
            for name, arguments in call.items()
        ]
    except (ValueError, AttributeError, TypeError):
        return [dict(name="", arguments=json.dumps(text))]


def say(new, tok, stop, inside=False):
    """
    Print an answer's ids as they come, and return them.

    Thoughts are folded to their length, calls of tools stand in brackets, control tokens are not printed.
    inside: the answer begins within a thought.
    """
    opens, closes, calls, called = brackets(tok)
    decode = tok.stream()
    calling = False     # inside a call of a tool
    folded = 0          # tokens of thought so far
    ids = []
    for i in new:
        ids.append(i)
        if i == opens:
            inside = True
        elif i == closes:
            print(f"[thought for {folded} tokens, /thoughts shows them]", flush=True)
            inside, folded = False, 0
        elif i == calls:
            calling = True
            print("[calls ", end="", flush=True)
        elif i == called:
            calling = False
            print("]", flush=True)
        elif inside and not calling:
            folded += 1
        elif i not in stop:
            print(decode(i), end="", flush=True)
    print(f"[{folded} tokens of thought, unfinished]" if folded and ids[-1] != called else "")
    return ids


# -----------------------------------------------------------------------------
# the conversation


def ask(prompt):
    """A line from the user, or None at the end of input. The prompt is printed only to a terminal."""
    try:
        return input(prompt if sys.stdin.isatty() else "")
    except EOFError:
        return None


class Conversation:
    """
    What was said: `messages` as the chat format has them, their `ids`, and a cache that has read a part of
    the ids.
    """

    def __init__(self, model, tok, system, tools, thinking):
        self.model, self.tok, self.tools, self.thinking = model, tok, tools, thinking
        tok.check_chat()
        self.begin(system)

    def begin(self, system):
        """Forget all but the system message ("" = the model's own)."""
        self.system = system
        content = system or self.tok.system
        self.messages = [] if content is None else [dict(role="system", content=content)]
        self.ids = self.tok.chat(self.messages, self.tools, self.thinking)[1]
        self.cache = KVCache(self.model, 1, 256)

    def thoughts(self):
        texts = []
        for message in self.messages:
            if isinstance(message["content"], dict):
                blocks = message["content"]["blocks"]
                texts += [block["text"] for block in blocks if block["type"] == "thoughts"]
        return "\n".join(texts)

    def save(self, path):
        row = dict(messages=self.messages)
        if self.tools:
            row["tools"] = self.tools
        with open(path, "a", encoding="utf-8") as f:
            f.write(as_json(row) + "\n")

    def answer(self, line, how, max_new_tokens):
        """
        Take the user's line, print the answer, and keep both.

        Where the model calls a tool, the user types the tool's output and the turn goes on.
        """
        tok, window = self.tok, self.model.config.block_size
        asked = user_turn(tok, line)
        length = len(self.ids) + len(asked)
        if length >= window:
            print(f"the model reads {window} tokens and the conversation has {length}: /reset begins another")
            return
        self.messages.append(dict(role="user", content=line))
        self.ids += asked

        end, ended = tok.id_of("<|assistant_end|>"), tok.id_of("</s>")
        opens, closes, _, called = brackets(tok)
        stop = {end, ended, called}
        turn = []
        while True:
            inside = opens in turn and closes not in turn
            limit = min(max_new_tokens, window - len(self.ids))
            new = reply(self.model, self.cache, self.ids, how, stop, limit)
            turn += say(new, tok, stop, inside)
            if not turn or turn[-1] != called:
                break
            output = ask("the tool's output> ")
            if not output:
                break
            turn.append(output)
            self.ids += tok.encode(f"[{output}]")

        # The template ends a turn with <|assistant_end|>, whether the model did or not. What was sampled
        # last has not been read by the cache, so it may still be exchanged.
        if self.ids[-1] == ended:
            self.ids.pop()
        if self.ids[-1] != end:
            self.ids.append(end)
        said = [i for i in turn if i not in (end, ended)]
        blocks = blocks_of(said, tok)
        content = dict(blocks=blocks)
        if all(block["type"] == "response" for block in blocks):
            content = "".join(block["text"] for block in blocks)
        self.messages.append(dict(role="assistant", content=content))


def converse(
    model,
    tok,
    how,
    system="",
    tools="",
    thinking=False,
    max_new_tokens=300,
):
    """Read a line, answer, repeat. tools: a JSON file, or "". how: the arguments of sample_token."""
    declared = None
    if tools:
        with open(tools, encoding="utf-8") as f:
            declared = json.load(f)
    conversation = Conversation(model, tok, system, declared, thinking)
    while True:
        line = ask("\n> ")
        if line is None or not line.strip():
            return
        command, _, rest = line.strip().partition(" ")
        if command == "/reset":
            conversation.begin(conversation.system)
        elif command == "/system" and rest:
            conversation.begin(rest)
        elif command == "/thoughts":
            print(conversation.thoughts() or "no thoughts so far")
        elif command == "/save" and rest:
            conversation.save(rest)
            print(f"saved to {rest}")
        elif command.startswith("/"):
            print(HELP)
        else:
            conversation.answer(line, how, max_new_tokens)
