"""
Text from a model: a run folder of train.py or of posttrain/, a Hugging Face folder, or a hub name.

$ python sample.py                                                              # text of out/laptop, from nothing
$ python sample.py --init_from=out/laptop --start="def main(" --num_samples=3
$ python sample.py --init_from=swiss-ai/Apertus-v1.1-0.5B-Instruct --chat       # 1.1 GB of weights, then a conversation
"""

import convert  # first: engine.hardware comes before torch

# isort: split
import torch

import tokenizer
from chat import stop_ids
from data import first_folder
from engine.decoding import lay_out_for_decoding
from engine.files import read_text
from engine.parallel import drop_gathered
from generate import generate, stream

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
chat = False                 # a conversation in Apertus' chat format (posttrain/talk.py)
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
        from posttrain.talk import converse  # here, since plain text does not need it
        converse(model, tok, sampling, system, tools, thinking, max_new_tokens)
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


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
