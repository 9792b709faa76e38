"""generate.py against transformers' greedy tokens, the model without a cache, and the probabilities that it claims."""

import random

import pytest
import torch
from tiny import golden, ids, small
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import generate as file
from generate import KVCache, generate, next_logits, sample_token


@pytest.mark.parametrize("name", ["hf_tiny_a", "hf_tiny_b"])
def test_greedy_tokens_are_transformers(name):
    model, io = golden(name)
    assert torch.equal(generate(model, io["idx"][:, :16], 24, temperature=0)[:, 16:], io["greedy"])


@pytest.mark.parametrize(
    "fixed, begins, dtype, off",
    [
        (False, None, None, 1e-5),
        (False, [0, 4, 11], torch.bfloat16, 0.05),
        (True, None, torch.bfloat16, 0.05),
        (True, [0, 4, 11], None, 1e-5),
    ],
)
@torch.no_grad()
def test_reading_through_the_cache_is_the_full_forward_pass(monkeypatch, fixed, begins, dtype, off):
    """With parts and chunks of any size, rows that begin at different places, and a growing or fixed buffer."""
    true, chunks = KVCache.begin, []
    monkeypatch.setattr(file, "CHUNK", 4)
    monkeypatch.setattr(KVCache, "begin", lambda cache, T: chunks.append(T) or true(cache, T))
    model, idx = small(), ids(3, 30)
    padding = torch.tensor(begins or [0, 0, 0])
    want = [model(row[None, begin:])[0] for row, begin in zip(idx, padding)]
    model.dtype = dtype
    cache = KVCache(model, 3, 32, padding if begins else None)
    for part in idx.split([13, 1, 1, 5, 1, 9], dim=1):
        found = next_logits(model, part, cache)
        for row, begin, exact in zip(found, padding, want):
            assert (row - exact[cache.length - 1 - begin]).abs().max() < off * exact.abs().max()
        if fixed and not cache.fixed:
            cache.fix()
    assert cache.length == 30
    assert max(chunks) == 4
    assert found.dtype == (dtype or torch.float32)


@torch.no_grad()
def test_a_cache_that_has_read_and_forgotten_goes_on_as_the_tokens_that_are_left():
    """Random lengths that it reads, and lengths to which it is cut; its buffer grows when it must."""
    model = small()
    for seed in range(12):
        rng, cache, kept = random.Random(seed), KVCache(model, 1, 0), []
        for step in range(6):
            new = ids(1, rng.randint(1, 9), seed=9 * seed + step)
            cache.grow(len(kept) + new.shape[1] + rng.randint(0, 3))
            found = next_logits(model, new, cache)
            kept += new[0].tolist()
            assert cache.length == len(kept)
            assert_close(found, model(torch.tensor([kept]))[:, -1], rtol=0, atol=1e-5)
            length = rng.choice([0, len(kept) // 2, len(kept) - 1, len(kept), len(kept) + 5])
            cache.truncate(length)
            kept = kept[:length]


def test_text_is_decoded_as_without_a_cache_and_as_if_alone(monkeypatch):
    """
    One compiled step serves all prompts and uses later weights. The backend only runs the graph: Inductor takes 15 s.
    """
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    step = torch.compile(next_logits, fullgraph=True, backend=counter)
    monkeypatch.setattr(file, "compiled_step", lambda device: step)
    model = small()
    for seed, lengths in ((1, (1, 7, 19)), (2, (2, 40, 3))):
        model.init_weights(seed)
        prompts = [ids(n, seed=n).tolist() for n in lengths]
        texts = generate(model, prompts, 9, temperature=0, compile=True)
        for prompt, whole in zip(prompts, texts, strict=True):
            n = len(prompt)
            assert whole[:n] == prompt and len(whole) == n + 9
            assert model(torch.tensor([whole[:-1]]))[0].argmax(-1)[n - 1 :].tolist() == whole[n:]
    assert counter.frame_count == 1


def test_a_row_that_has_ended_repeats_its_stop_token_until_all_have():
    model, prompts = small(), ids(4, 3)
    free = generate(model, prompts, 20, temperature=0)[:, 3:].tolist()
    stop = {row[4 + 3 * b] for b, row in enumerate(free)}  # each row has its stop at another step
    said = [row[: 1 + min(map(row.index, stop.intersection(row)))] for row in free]
    longest = max(map(len, said))
    want = [row + row[-1:] * (longest - len(row)) for row in said]
    assert want != said and longest < 20
    assert generate(model, prompts, 20, stop, temperature=0)[:, 3:].tolist() == want
    assert [whole[3:] for whole in generate(model, prompts.tolist(), 20, stop, temperature=0)] == said


def test_what_cannot_be_is_refused_in_one_line():
    with pytest.raises(ValueError, match="a prompt is empty"):
        generate(small(), [[5, 6], []], 3)


@pytest.mark.parametrize(
    "how, want",
    [
        (dict(top_k=9, top_p=1.0), [50, 30, 15, 5]),  # more than there are
        (dict(top_p=0.8), [62.5, 37.5, 0, 0]),  # 50 and 30 are enough
        (dict(temperature=0), [100, 0, 0, 0]),
    ],
)
def test_sampling_has_the_probabilities_that_it_claims(how, want):
    """Shares in percent. The logits are the logs of 30, 50, 5 and 15 %."""
    logits = torch.tensor([[0.3, 0.5, 0.05, 0.15]]).log().bfloat16().expand(20000, 4)
    tokens = sample_token(logits, generator=torch.Generator().manual_seed(0), **how)
    shares = torch.bincount(tokens, minlength=4)[[1, 0, 3, 2]] / 200
    assert shares.tolist() == pytest.approx(want, abs=1.5)


def test_a_token_of_probability_0_is_not_drawn_where_a_random_number_is_0(monkeypatch):
    """As torch 2.13 draws on MPS (pytorch issue 192577): the largest p / q, where q may be -0.0, and nan is largest."""
    q = torch.tensor([1, 1, -0.0])
    monkeypatch.setattr(torch, "multinomial", lambda p, n, generator: (p / q).argmax(-1, True))
    assert sample_token(torch.tensor([[3.0, 2, 1]]), top_k=2) == 0
