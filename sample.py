"""
Text from a model, or a conversation with it: a run folder of train.py or of posttrain/, a Hugging Face folder, or a hub
name.

A conversation is its messages. Each turn renders them to ids, and a cache keeps the keys and values of the ids that the
model has read: only ids after the first difference are read anew, so that a turn costs the time of its own tokens. A
call of a tool is printed and ends the turn. An empty line or the end of input ends the conversation; /help lists the
other commands.

$ python sample.py                                                              # text of out/laptop, from nothing
$ python sample.py --init_from=out/laptop --start="def main(" --num_samples=3
$ python sample.py --init_from=swiss-ai/Apertus-v1.1-0.5B-Instruct --chat       # 1.1 GB of weights, then a conversation
"""

import convert  # first: engine.hardware comes before torch

# isort: split
import json
import os

import torch

import tokenizer
from chat import as_json, stop_ids
from data import first_folder
from engine.decoding import lay_out_for_decoding
from engine.files import read_text
from engine.parallel import drop_gathered
from generate import KVCache, generate, stream

init_from = "out/laptop"     # run folder, Hugging Face folder or hub name
start = ""                   # the prompt; FILE:path reads it from a file
num_samples = 1              # continuations, one after the other
max_new_tokens = 300         # tokens of a continuation or an answer, at most
temperature = 0.8            # 0 = greedy
top_k = 0                    # keep the k likeliest tokens; 0 = off
top_p = 0.95                 # keep the likeliest tokens up to this probability; 0 or 1 = off
seed = 28                    # of the random draws
device = "auto"              # cuda | mps | cpu
dtype = "auto"               # float32 | bfloat16; auto: that of the weights, bf16 on CUDA
base = ""                    # int8 | nf4: the matrices of the blocks in 8 or 4 bits (posttrain/quantised.py)
compile = False              # compile the decoding step: half a minute, then about twice as fast; not for --chat
chat = False                 # a conversation in Apertus' chat format (chat.py)
system = ""                  # system message of the chat; "" = the published one
thinking = False             # "Deliberation: enabled": the model may think before it answers
tools = ""                   # JSON file, a list of tools the model may call: [{"name", "description", "parameters"}]


def main():
    if temperature < 0 or top_k < 0 or not 0 <= top_p <= 1 or num_samples < 1 or max_new_tokens < 1:
        raise ValueError(f"temperature={temperature} and top_k={top_k} must be 0 or more, top_p={top_p} from 0 to 1, "
                         f"num_samples={num_samples} and max_new_tokens={max_new_tokens} at least 1")
    model, tok = convert.load_for_inference(init_from, device, dtype, base)
    # The compiled step reads its matrices by rows.
    if chat or not compile:
        lay_out_for_decoding(model)
    # The generator lives where the logits are, and its seed makes a sample repeatable.
    generator = torch.Generator(model.lm_head.weight.device).manual_seed(seed)
    sampling = dict(temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
    if chat:
        converse(Conversation(model, tok, system, read_tools(tools), thinking), max_new_tokens, sampling)
        return
    text = read_text(start.removeprefix("FILE:")) if start.startswith("FILE:") else start
    prompt = [tok.bos, *tok.encode(text)]
    stop = stop_ids(tok)
    for _ in range(num_samples):
        print(text, end="", flush=True)
        # A character may take several tokens: the stream holds its bytes back until it is whole.
        decode = tok.stream()
        for token in stream(model, [prompt], max_new_tokens, stop=stop, compile=compile, **sampling):
            if token.item() not in stop:
                print(decode(token.item()), end="", flush=True)
        print("\n" + "-" * 40 if num_samples > 1 else "")


def sample_of(model, device, data, seed):
    """
    A short text by a model while train.py trains it. data: the data folder of the run. Eager, because the cached
    decoding step has shapes that training has not compiled. By top_k, since the sums of top_p have no deterministic
    form on a GPU, where --exact would raise an error.
    """
    tok = tokenizer.load_for(first_folder(data))
    generator = torch.Generator(device).manual_seed(seed)
    model.eval()
    with torch.compiler.set_stance("force_eager"):
        ids = generate(
            model,
            [[tok.bos]],
            min(120, model.config.block_size),
            temperature=0.8,
            top_k=50,
            generator=generator)
    model.train()
    drop_gathered(model)
    return tok.decode(ids[0][1:]) + "\n"


# -----------------------------------------------------------------------------
# conversations

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


def read_tools(path):
    """The list of tools in a JSON file; None without a path."""
    try:
        return json.loads(read_text(path) if path else "null")
    except json.JSONDecodeError as error:
        raise ValueError(f"--tools={path} is not JSON ({error}): want a list of objects with name, description and "
                         "parameters") from None


def call_block(text):
    """The JSON of a call of tools as a block of the chat format. Other text stays text."""
    try:
        calls = [dict(name=name, arguments=as_json(value))
                 for call in json.loads(text) for name, value in call.items()]
        return dict(type="tool_calls", calls=calls)
    except Exception:                                      # of any kind, as the model wrote the text
        return dict(type="response", text=text)


class Conversation:
    """`messages` in the chat format; `ids`: of all text that was last read and generated; `cache`: of the first ids."""

    def __init__(self, model, tok, system, tools, thinking):
        tok.check_chat()
        tok.chat([], tools)     # an error in the tools comes before the first question
        self.model, self.tok, self.tools, self.thinking = model, tok, tools, thinking
        self.stop = stop_ids(tok)
        begin_thoughts, end_thoughts, begin_calls, end_calls = map(tok.id_of, tokenizer.CHAT[-4:])
        # The blocks that begin after control tokens. Apertus 1.5 has another format of tool calls: they stay text.
        calls = "response" if tokenizer.OUTPUT in tok.special else "tool_calls"
        self.blocks = {begin_thoughts: "thoughts", end_thoughts: "response", begin_calls: calls}
        # On the screen thoughts and calls are in brackets.
        self.shown = dict.fromkeys(self.stop, "") | {
            begin_thoughts: "[thoughts ", end_thoughts: "]\n", begin_calls: "[calls ", end_calls: "]\n"}
        self.cache, self.ids = KVCache(model, 1, 0), []
        self.begin(system)

    def begin(self, system):
        """Start anew with a system message ("" = the model's own)."""
        self.system = system
        self.messages = [dict(role="system", content=system)] if system else []

    def answer(self, line, max_new_tokens, sampling):
        """Answer the user's line: print the answer, token by token, and keep both. sampling: as in converse()."""
        window = self.model.config.block_size
        question = dict(role="user", content=line)
        ids = self.tok.chat([*self.messages, question], self.tools, self.thinking, True)
        if len(ids) >= window:
            print(f"the model reads {window} tokens and the conversation has {len(ids)}: /reset starts another")
            return
        # The last id is always read, because its logits predict the next token.
        unchanged = os.path.commonprefix([self.ids, ids[:-1]])
        self.cache.truncate(len(unchanged))
        self.ids, begin, decode = ids, len(ids), self.tok.stream()
        n = min(max_new_tokens, window - begin)
        for token in stream(self.model, [ids], n, self.stop, cache=self.cache, **sampling):
            ids.append(token.item())
            print(self.shown[ids[-1]] if ids[-1] in self.shown else decode(ids[-1]), end="", flush=True)
        print()
        self.messages += [question, dict(role="assistant", content=self.content(ids[begin:]))]

    def content(self, ids):
        """The ids of an answer as the content of a message: text, or blocks if it has thoughts or calls of tools."""
        parts = [("response", [])]
        for i in ids:
            if i in self.blocks:
                parts.append((self.blocks[i], []))
            elif i not in self.stop:
                parts[-1][1].append(i)
        texts = [(block_type, self.tok.decode(part)) for block_type, part in parts if part]
        if len(parts) == 1:
            return texts[0][1] if texts else ""
        return dict(blocks=[call_block(text) if block_type == "tool_calls" else dict(type=block_type, text=text)
                            for block_type, text in texts])


def converse(conversation, max_new_tokens, sampling):
    """Read a line, answer, repeat. sampling: the arguments of sample_token."""
    while (line := read_line("\n> ")).strip():
        command, _, rest = line.strip().partition(" ")
        try:
            if command == "/reset":
                conversation.begin(conversation.system)
            elif command == "/system" and rest:
                conversation.begin(rest)
            elif command == "/save" and rest:
                row = dict(messages=conversation.messages, tools=conversation.tools, thinking=conversation.thinking)
                with open(rest, "a", encoding="utf-8") as f:
                    f.write(as_json(row) + "\n")
                print(f"saved to {rest}")
            elif command.startswith("/"):
                print(HELP)
            else:
                conversation.answer(line, max_new_tokens, sampling)
        except (OSError, ValueError) as error:             # a typing mistake does not end the conversation
            print(error)


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
