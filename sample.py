"""
Generate text, or talk to a model, from a run folder of train.py, posttrain/sft.py or posttrain/qrpo.py, a Hugging Face folder, or a hub name.

$ python sample.py                                                              # out/laptop goes on from nothing
$ python sample.py --init_from=out/laptop --start="def main(" --num_samples=3
$ python sample.py --init_from=swiss-ai/Apertus-8B-Instruct-2509 --chat         # 16 GB of weights, then a conversation

In a conversation an empty line ends it, and so does the end of input; /help lists the rest. The keys and values of all that was said
stay in the cache: a turn costs its own tokens, not the conversation's.
"""

import json
import sys

import torch
import torch.nn.functional as F

import convert
from studies import structured
from generate import KVCache, generate, lay_out_for_decoding, sample_token, stream
from engine.hardware import pick_device, pick_dtype
from chat import control, plain

init_from = "out/laptop"     # run folder, Hugging Face folder or hub name
start = ""                   # the text to go on from; FILE:path reads it from a file
num_samples = 1              # continuations; one is streamed, several are made at once
max_new_tokens = 300         # of a continuation, of an answer
temperature = 0.8            # 0 = greedy
top_k = 0                    # keep the k likeliest tokens; 0 = off
top_p = 0.95                 # keep the likeliest tokens up to this probability; 0 or 1 = off
seed = 28
device = "auto"              # cuda | mps | cpu
dtype = "auto"               # float32 | bfloat16; auto: that of the weights, bf16 on CUDA
compile = False              # compile the step that makes a token: 15 s, then 1.8 (fp32) to 2.2 times (bf16) as fast on one CPU thread; not for --chat
chat = False                 # a conversation in Apertus' chat format
system = ""                  # its system message; "" = the published one
thinking = False             # "Deliberation: enabled": the model may think before it answers
tools = ""                   # a JSON file with a list of tools the model may call: [{"name", "description", "parameters"}]

HELP = """/reset          forget what was said; the system message stays
/system TEXT    another system message; forgets what was said
/thoughts       the thoughts behind the last answer
/save FILE      append the conversation to FILE, a line that posttrain/sft.py reads
/help           this"""


def main():
    if temperature < 0 or top_k < 0 or not 0 <= top_p <= 1 or num_samples < 1 or max_new_tokens < 1:
        raise ValueError(f"temperature={temperature} and top_k={top_k} must be 0 or more, top_p={top_p} from 0 to 1, "
                         f"num_samples={num_samples} and max_new_tokens={max_new_tokens} at least 1")
    place = pick_device(device)
    model, tok = convert.load_any(init_from, place, None if dtype == "auto" else pick_dtype(dtype, place))
    if place == "cuda" and dtype == "auto":
        model.to(torch.bfloat16)
    model.eval()
    if chat or not compile:                                # compiled code wants rows
        lay_out_for_decoding(model)
    if model.config.ffn != "dense":
        below = structured.premerge(model)
        print(f"structured feed-forward ({model.config.ffn}), measured: " + (f"merged matrices for up to {below} tokens at a time, factors above"
              if below else "the factors are faster at every size"), file=sys.stderr)
    how = dict(temperature=temperature, top_k=top_k, top_p=top_p, generator=torch.Generator(place).manual_seed(seed))
    if chat:
        return converse(model, tok, how)
    how["compile"] = compile
    text = start
    if start.startswith("FILE:"):
        with open(start[5:], encoding="utf-8") as f:
            text = f.read()
    prompt = [tok.bos, *tok.encode(text)]
    stop = {tok.eos, tok.special.get("</s>", tok.eos)}     # of a chat model a turn's end, and a document's end in any case
    if num_samples > 1:
        for ids in generate(model, [prompt] * num_samples, max_new_tokens, stop=stop, **how):
            print(tok.decode([i for i in ids[1:] if i not in stop]) + "\n" + "-" * 40)
        return
    print(text, end="", flush=True)
    decode = tok.stream()
    for token in stream(model, [prompt], max_new_tokens, stop=stop, **how):
        if token.item() not in stop:
            print(decode(token.item()), end="", flush=True)
    print()


# -----------------------------------------------------------------------------
# chat: the conversation is one growing list of ids, and a cache that has read its first cache.length


@torch.no_grad()
def reply(model, cache, ids, how, stop, limit):
    """
    Read what the cache has not read of `ids`, then yield up to `limit` new ids, each appended to `ids`, until one of `stop` (yielded too).
    The last one is not read yet: the next call does it, together with the next message.
    """
    for _ in range(limit):
        x = torch.tensor([ids[cache.length:]], device=cache.start.device)                # (1, T): all that is new, then one by one
        make_room(cache, x.shape[1])
        logits, _ = model(x, cache=cache)                                               # (1, V)
        ids.append(sample_token(logits, **how).item())
        yield ids[-1]
        if ids[-1] in stop:
            return


def make_room(cache, T):
    """Double the cache's buffers until T more positions fit: no memory for 65,536 of them before they are said."""
    size = cache.size
    while size < cache.length + T:
        size *= 2
    if size > cache.size:
        cache.kv = [tuple(F.pad(t, (0, 0, 0, size - cache.size)) for t in pair) for pair in cache.kv]
        cache.size = size


def blocks_of(turn, tok):
    """An assistant's turn, ids and outputs of tools (str) -> its blocks as the chat format has them: thoughts, response, tool_calls, tool_outputs."""
    opens, closes, calls, called = brackets(tok)
    parts, inside = [("response", [])], False
    for i in turn:
        if i in (opens, closes):
            inside = i == opens
        if isinstance(i, str):
            parts.append(("tool_outputs", i))
        elif i == calls:
            parts.append(("tool_calls", []))
        elif i not in (opens, closes, called):
            parts[-1][1].append(i)
        if i in (opens, closes, called) or isinstance(i, str):
            parts.append(("thoughts" if inside else "response", []))
    content = dict(tool_outputs=lambda part: dict(outputs=[dict(output=part)]), tool_calls=lambda part: dict(calls=calls_in(tok.decode(part))))
    return [dict(type=kind, **content.get(kind, lambda part: dict(text=tok.decode(part)))(part)) for kind, part in parts if part]


def brackets(tok):
    """The ids around thoughts and around calls of tools."""
    return [tok.id_of(f"<|{name}|>") for name in ("inner_prefix", "inner_suffix", "tools_prefix", "tools_suffix")]


def calls_in(text):
    """'[{"f": {"x": 1}}]' -> [{"name": "f", "arguments": '{"x": 1}'}]; a text that is not such JSON is kept as a call without a name."""
    try:
        return [dict(name=name, arguments=json.dumps(arguments, ensure_ascii=False))
                for call in json.loads(text) for name, arguments in call.items()]
    except (ValueError, AttributeError, TypeError):
        return [dict(name="", arguments=json.dumps(text))]


def say(new, tok, stop, inside=False):
    """Print an answer as it comes: thoughts folded to their length, tool calls in brackets, control tokens unspoken. Returns its ids."""
    opens, closes, calls, called = brackets(tok)
    decode, ids, folded, calling = tok.stream(), [], 0, False
    for i in new:
        ids.append(i)
        if i == opens:
            inside = True
        elif i == closes:
            print(f"[thought for {folded} tokens, /thoughts shows them]", flush=True)
            inside, folded = False, 0
        elif i in (calls, called):
            calling = i == calls
            print("[calls " if calling else "]", end="" if calling else "\n", flush=True)
        elif inside and not calling:
            folded += 1
        elif i not in stop:
            print(decode(i), end="", flush=True)
    print(f"[{folded} tokens of thought, unfinished]" if folded and ids[-1] != called else "")
    return ids


def ask(sign):
    """A line from the user, None at the end of input. The sign is printed only where somebody sees it."""
    try:
        return input(sign if sys.stdin.isatty() else "")
    except EOFError:
        return None


def converse(model, tok, how):
    """Read a line, answer, repeat. The template writes <s>, once; a turn ends on <|assistant_end|>, which it appends if the model did not."""
    end, called, ended = tok.id_of("<|assistant_end|>"), tok.id_of("<|tools_suffix|>"), tok.id_of("</s>")
    stop, declared, message = {end, ended, called}, None, system
    if tools:
        with open(tools, encoding="utf-8") as f:
            declared = json.load(f)

    def begin():
        """An empty conversation: its messages, its ids, and a cache that has read nothing."""
        messages = [dict(role="system", content=message)] if message else []
        return messages, tok.chat(messages, declared, thinking)[1], KVCache(model, 1, 256)

    messages, ids, cache = begin()
    while True:
        line = ask("\n> ")
        if line is None or not line.strip():
            return
        command, _, rest = line.strip().partition(" ")
        if command == "/reset" or command == "/system" and rest:
            message = rest if command == "/system" else message
            messages, ids, cache = begin()
        elif command == "/thoughts":
            blocks = [b for m in messages if isinstance(m["content"], dict) for b in m["content"]["blocks"]]
            print("\n".join(b["text"] for b in blocks if b["type"] == "thoughts") or "no thoughts so far")
        elif command == "/save" and rest:
            with open(rest, "a", encoding="utf-8") as f:
                f.write(json.dumps(dict(messages=messages, **({"tools": declared} if declared else {})), ensure_ascii=False) + "\n")
            print(f"saved to {rest}")
        elif command.startswith("/"):
            print(HELP)
        else:
            asked = tok.chat_ids([control("user_start"), plain(line), control("user_end"), control("assistant_start")])[0]
            if len(ids) + len(asked) >= model.config.block_size:
                print(f"the model reads {model.config.block_size} tokens and the conversation has {len(ids) + len(asked)}: /reset begins another")
                continue
            messages.append(dict(role="user", content=line))
            ids += asked
            turn = []
            while True:
                inside = brackets(tok)[0] in turn and brackets(tok)[1] not in turn
                limit = min(max_new_tokens, model.config.block_size - len(ids))
                turn += say(reply(model, cache, ids, how, stop, limit), tok, stop, inside)
                output = ask("the tool's output> ") if turn and turn[-1] == called else None
                if not output:
                    break
                turn.append(output)
                ids += tok.encode(f"[{output}]")
            if ids[-1] == ended:
                ids.pop()                                                               # sampled last, so the cache has not read it
            ids += [end] * (ids[-1] != end)
            blocks = blocks_of([i for i in turn if i not in (end, ended)], tok)
            only_words = all(b["type"] == "response" for b in blocks)
            messages.append(dict(role="assistant", content="".join(b["text"] for b in blocks) if only_words else dict(blocks=blocks)))


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
