"""
Generate text, or talk to a model, from a run folder of train.py, a Hugging Face folder, or a hub name.

$ python sample.py                                                              # out/laptop goes on from nothing
$ python sample.py --init_from=out/laptop --start="def main(" --num_samples=3
$ python sample.py --init_from=swiss-ai/Apertus-8B-Instruct-2509 --chat         # 16 GB of weights, then a conversation
"""

import sys

import torch

import convert

init_from = "out/laptop"     # run folder, Hugging Face folder or hub name
start = ""                   # the text to go on from; FILE:path reads it from a file
num_samples = 1              # continuations; one is streamed, several are made at once
max_new_tokens = 300
temperature = 0.8            # 0 = greedy
top_k = None                 # keep the k likeliest tokens
top_p = 0.95                 # keep the likeliest tokens up to this probability
seed = 28
device = "auto"              # cuda | mps | cpu
dtype = "auto"               # float32 | bfloat16; auto: that of the weights, bf16 on CUDA
chat = False                 # a conversation in Apertus' chat format
system = ""                  # its system message; "" = the published one


def main():
    place = next(d for d, here in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available()), ("cpu", True)) if here)
    place = place if device == "auto" else device
    model, tok = convert.load_any(init_from, place, None if dtype == "auto" else getattr(torch, dtype))
    if place == "cuda" and dtype == "auto":
        model.to(torch.bfloat16)
    model.eval()
    how = dict(temperature=temperature, top_k=top_k, top_p=top_p, generator=torch.Generator(place).manual_seed(seed))
    if chat:
        return converse(model, tok, how)
    text = start
    if start.startswith("FILE:"):
        with open(start[5:], encoding="utf-8") as f:
            text = f.read()
    prompt = [tok.bos, *tok.encode(text)]
    if num_samples > 1:
        for ids in model.generate([prompt] * num_samples, max_new_tokens, stop=(tok.eos,), **how):
            print(tok.decode([i for i in ids[1:] if i != tok.eos]) + "\n" + "-" * 40)
        return
    print(text, end="", flush=True)
    write_stream(model.stream([prompt], max_new_tokens, stop=(tok.eos,), **how), tok, {tok.eos})
    print()


def write_stream(tokens, tok, silent):
    """Print tokens as they come, whole characters only. Returns their ids."""
    decode, ids = tok.stream(), []
    for token in tokens:
        ids.append(token.item())
        if ids[-1] not in silent:
            print(decode(ids[-1]), end="", flush=True)
    return ids


def converse(model, tok, how):
    """Read a line, answer, repeat; an empty line or end of input ends. The template writes <s>, once."""
    end = tok.special["<|assistant_end|>"]
    messages = [dict(role="system", content=system)] if system else []
    while True:
        try:
            line = input("\n> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if not line.strip():
            return
        messages.append(dict(role="user", content=line))
        _, ids = tok.chat(messages, add_generation_prompt=True)
        said = write_stream(model.stream([ids], max_new_tokens, stop=(end, tok.eos), **how), tok, {end, tok.eos})
        messages.append(dict(role="assistant", content=tok.decode([i for i in said if i not in (end, tok.eos)])))
        print()


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
