"""Random settings of optimizer, windows, sampling and whole runs against plain.py and transformers."""

import json
from functools import cache

import numpy as np
import torch
from draws import drawn
from hypothesis.strategies import booleans, floats, integers, lists, sampled_from, tuples
from pytest import MonkeyPatch
from tiny import GOLDEN, ids
from torch.testing import assert_close
from trained import data, log, trained  # noqa: F401
from transformers import ApertusForCausalLM
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import convert
import plain
from ademamix import AdEMAMix, param_groups
from data import TokenDataset
from generate import generate, sample_token


@drawn(
    60,
    betas=tuples(*[sampled_from([0.1, 0.9, 0.9999])] * 3),
    present=lists(tuples(*[booleans()] * 3), min_size=1, max_size=6),
    alpha=floats(0, 9),
    warmup=integers(0, 7),
    eps=sampled_from([1e-8, 1e-2, 1]),
    weight_decay=floats(0, 1),
    scale=floats(0.1, 1),
    transposed=booleans(),
)
def test_each_parameter_has_the_steps_of_its_own_gradients(present, scale, warmup, transposed, eps, **how):
    """present: which of three parameters have a gradient, step by step. A step that has none is not counted."""
    rng = torch.Generator().manual_seed(0)

    def new():
        tensors = [torch.randn(*shape, generator=rng, dtype=torch.float64) for shape in ((3, 2), (2, 3), (3,))]
        return [tensors[0].T if transposed else tensors[0], *tensors[1:]]

    weights = new()
    model = torch.nn.ParameterList([torch.nn.Parameter(w.clone()) for w in weights])
    betas, alpha, weight_decay = how["betas"], how["alpha"], how["weight_decay"]
    optimizer = AdEMAMix(param_groups(model, weight_decay), 0.1, betas, alpha, eps, 0, warmup, warmup)
    states, counts = [{}, {}, {}], [0, 0, 0]
    for row in present:
        grads = new()
        for n in range(3):
            model[n].grad = grads[n] if row[n] else None
            if row[n]:
                counts[n] += 1
                one, g = {"": weights[n]}, {"": scale * grads[n]}
                plain.ademamix(one, g, states[n], counts[n], 0.1, **how, warmup=max(1, warmup), eps=eps)
        optimizer.step(grad_scale=scale)
    for found, wanted in zip(model, weights):
        assert_close(found.detach(), wanted, rtol=1e-5, atol=1e-7)


@drawn(
    60, seed=integers(0, 99), V=integers(2, 9), temperature=floats(0.2, 3), top_k=integers(0, 9), top_p=floats(0.05, 1)
)
def test_tokens_have_transformers_probabilities(seed, V, temperature, top_k, top_p):
    """Temperature first, then top_k, then top_p of the rest."""
    logits = 2 * torch.randn(3, V, generator=torch.Generator().manual_seed(seed))
    wanted = TemperatureLogitsWarper(temperature)(None, logits)
    for warp in [*([TopKLogitsWarper(top_k)] if top_k else []), TopPLogitsWarper(top_p)]:
        wanted = warp(None, wanted)
    asked = []
    with MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", lambda p, n, generator: asked.append(p) or p.argmax(-1, True))
        sample_token(logits, temperature, top_k, top_p)
    assert_close(asked[0], wanted.softmax(-1))


@cache
def models():
    folder = f"{GOLDEN}/hf_tiny_a"
    return convert.load_hf(folder), ApertusForCausalLM.from_pretrained(folder)


@drawn(
    8, n=integers(0, 7), lengths=lists(integers(1, 9), min_size=1, max_size=3), ends=lists(integers(0, 6), max_size=3)
)
@torch.no_grad()
def test_padded_rows_go_on_as_each_alone_in_transformers_up_to_a_stop(n, lengths, ends):
    """Greedy, without a cache there. Stops are tokens that some row says."""
    ours, theirs = models()
    prompts = [ids(length, high=512, seed=length + 9 * row).tolist() for row, length in enumerate(lengths)]
    wanted = [list(prompt) for prompt in prompts]
    for row in wanted:
        for _ in range(n):
            row.append(theirs(torch.tensor([row])).logits[0, -1].argmax().item())
    stop = {row[len(prompt) + end] for row, prompt, end in zip(wanted, prompts, ends) if end < n}
    for row, prompt in zip(wanted, prompts):
        while stop.intersection(row[len(prompt) : -1]):
            row.pop()
    assert generate(ours, prompts, n, stop, temperature=0) == wanted


@drawn(
    40,
    sizes=lists(lists(integers(1, 30), min_size=1, max_size=3), min_size=1, max_size=2),
    T=integers(1, 12),
    k=sampled_from([0, 2, 5]),
    h=integers(1, 14),
    scope=sampled_from(["window", "stream"]),
    first=integers(0, 50),
)
def test_an_epoch_is_each_window_of_the_stream_once(tmp_path_factory, sizes, T, k, h, scope, first):
    """sizes: tokens of the shards of each source. Windows overlap by one token, and the rest is not read."""
    folder, sources, stream = tmp_path_factory.mktemp("data"), {}, []
    for name, of_source in zip("ab", sizes):
        shards = []
        for n in of_source:
            shards.append(dict(file=f"{name}{len(shards)}.npy", tokens=n))
            stream += np.random.default_rng(len(stream)).integers(1, 9, n).tolist()
            np.save(folder / shards[-1]["file"], np.uint16(stream[-n:]))
        sources[name] = dict(train=dict(shards=shards))
    (folder / "meta.json").write_text(json.dumps(dict(sources=sources, vocab_size=9, bos=1, eos=2)))
    n = (len(stream) - 1) // T
    if not n:
        return
    # Before the targets: the first input, and the tokens that Goldfish hashes.
    c = h - 1 if k and scope == "stream" else 0
    places = [[T * i + j for j in range(min(0, 1 - c), T + 1)] for i in range(n)]
    rows = torch.tensor([[stream[place % len(stream)] for place in of_window] for of_window in places])
    idx, keep = rows[:, -T - 1 : -1], rows[:, -T - 1 : -1] != 2
    if k:
        keep &= plain.goldfish(rows[:, -T - c :], k, h)[:, -T:]
    wanted = idx, rows[:, -T:], keep, (idx == 1).cumsum(1)
    found = TokenDataset(str(folder), "train", T, 28, k, h, "product", scope).batch(n * first, n)
    found, wanted = (torch.cat(parts, 1).tolist() for parts in (found, wanted))
    assert sorted(found) == sorted(wanted)
