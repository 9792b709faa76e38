"""generate.py against transformers' greedy tokens, the model without a cache, and the probabilities that it claims."""
import pytest
import torch

import generate as file
from generate import KVCache, generate, next_logits, sample_token, stream
from tiny import golden, ids, small

PROMPTS = [ids(n, seed=n).tolist() for n in (1, 7, 19)]


@pytest.mark.parametrize("name", ["hf_tiny_a", "hf_tiny_b"])
def test_greedy_tokens_are_transformers(name):
    model, io = golden(name)
    assert torch.equal(generate(model, io["idx"][:, :16], 24, temperature=0)[:, 16:], io["greedy"])


@pytest.mark.parametrize("dtype, off", [(None, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("padding", [None, [0, 4, 11]])
@pytest.mark.parametrize("fixed", [False, True])
@torch.no_grad()
def test_reading_through_the_cache_is_the_full_forward_pass(monkeypatch, fixed, padding, dtype, off):
    """In parts and chunks of any size, of rows that begin elsewhere, in a buffer that grows or is fixed."""
    monkeypatch.setattr(file, "CHUNK", 4)
    real, positions = KVCache.begin, []
    monkeypatch.setattr(KVCache, "begin", lambda *args: positions.append(real(*args)) or positions[-1])
    model, idx = small(), ids(3, 30)
    begins = padding or [0, 0, 0]
    want = [model(row[None, begin:])[0][0] for row, begin in zip(idx, begins)]
    model.dtype = dtype
    cache = KVCache(model, 3, 32, torch.tensor(padding) if padding else None)
    read = 0
    for part in idx.split([13, 1, 1, 5, 1, 9], dim=1):
        read += part.shape[1]
        with cache.attached(model):
            found = next_logits(model, part, cache)
        assert cache.length == read and found.dtype == (dtype or torch.float32)
        for row, begin, exact in zip(found, begins, want):
            assert (row - exact[read - 1 - begin]).abs().max() < off * exact.abs().max()
        if fixed and not cache.fixed:
            cache.fix()
        assert positions[-1][:, -1].tolist() == [read - 1 - begin for begin in begins]
    assert max(part.shape[1] for part in positions) == 4 and cache.kv[0][0].shape == (3, 2, 32, 8)


@pytest.mark.parametrize("prompts, compile", [(PROMPTS, False), (PROMPTS[1:2], True)])
def test_text_is_decoded_as_without_a_cache_and_as_if_alone(monkeypatch, prompts, compile):
    """Compiled by a backend that writes no code: Inductor takes 15 s."""
    step = torch.compile(next_logits, fullgraph=True, backend="eager")
    monkeypatch.setattr(file, "compiled", lambda device: step)
    model = small()
    found = generate(model, prompts, 9, temperature=0, compile=compile)
    for prompt, whole in zip(prompts, found, strict=True):
        assert whole[:len(prompt)] == prompt and len(whole) == len(prompt) + 9
        greedy = model(torch.tensor([whole[:-1]]))[0][0].argmax(-1).tolist()
        assert greedy[len(prompt) - 1:] == whole[len(prompt):]


def test_a_row_that_has_ended_repeats_its_stop_token_until_all_have():
    model, prompts = small(), ids(4, 3)
    free = generate(model, prompts, 20, temperature=0)[:, 3:].tolist()
    stop = [row[4 + 3 * b] for b, row in enumerate(free)]  # each row meets one of them, at another step
    ends = [next(i for i, token in enumerate(row) if token in stop) for row in free]
    assert len(set(ends)) > 1
    want = [row[:end] + [row[end]] * (max(ends) - end + 1) for row, end in zip(free, ends)]
    said = torch.stack(list(stream(model, prompts, 20, temperature=0, stop=stop)), 1).tolist()
    assert said == want
    cut = generate(model, prompts.tolist(), 20, temperature=0, stop=stop)
    assert [whole[3:] for whole in cut] == [row[:end + 1] for row, end in zip(free, ends)]


def test_what_cannot_be_is_refused_in_one_line():
    model = small()
    with pytest.raises(ValueError, match="a prompt is empty"):
        generate(model, [[5, 6], []], 3)
    cache = KVCache(model, 1, 8)
    with pytest.raises(ValueError, match="holds 8 positions, 9 were asked for"), cache.attached(model):
        next_logits(model, ids(1, 9), cache)
    first = stream(model, [[5]], 3)
    next(first)
    with pytest.raises(ValueError, match="generating another text already"):
        generate(model, [[5]], 1)
    first.close()
    assert torch.equal(model(ids(1, 9))[0], small()(ids(1, 9))[0])


@pytest.mark.parametrize("how, want", [
    (dict(), [0.5, 0.3, 0.15, 0.05]),
    (dict(top_k=9, top_p=1.0), [0.5, 0.3, 0.15, 0.05]),    # all there are
    (dict(top_k=2), [0.625, 0.375, 0, 0]),
    (dict(top_p=0.8), [0.625, 0.375, 0, 0]),               # 0.5 + 0.3 is enough
    (dict(top_p=0.81), [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]),
    (dict(temperature=0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
    (dict(temperature=0), [1.0, 0, 0, 0])])
def test_sampling_has_the_probabilities_that_it_claims(how, want):
    logits = torch.tensor([[0.3, 0.5, 0.05, 0.15]]).log().bfloat16().expand(20000, 4)
    tokens = sample_token(logits, generator=torch.Generator().manual_seed(0), **how)
    shares = torch.bincount(tokens, minlength=4)[[1, 0, 3, 2]] / 20000
    torch.testing.assert_close(shares, torch.tensor(want), rtol=0, atol=0.015)
