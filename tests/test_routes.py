"""
engine/routes.py: all ways give the numbers of torch's own loss and product in fp64 (of attention: test_attention.py);
the fastest is found by the clock, remembered, and part of a run.
"""
import dataclasses
import json
import os
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import model as model_file
from conftest import refused, same, script, weights
from engine import routes
from engine.hardware import ROUTES, linear
from model import ApertusConfig, ChunkedCrossEntropy, causal_attention, chunk_loss
from test_attention import numbers, with_gradients


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """The usual ways, and a cache of this test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    routes.take({})


@pytest.mark.parametrize("rows", [1, 7, 40, 100])
def test_any_number_of_rows_has_torchs_cross_entropy_and_gradients(rows):
    h, head = numbers(40, 8, seed=0), numbers(50, 8, seed=1)
    targets = torch.arange(40) % 50
    each = torch.full((40,), 1 / 40, dtype=torch.float64)

    def ours(h, head):
        return ChunkedCrossEntropy.apply(h, head, targets, each.to(h.dtype), rows, chunk_loss)[0]

    true = with_gradients(lambda h, head: F.cross_entropy(h @ head.T, targets), (h, head), torch.float64)
    found = with_gradients(ours, (h, head), torch.float32)
    assert (found - true).abs().max() <= 1e-6 * true.abs().max()


@pytest.mark.parametrize("way, N, loops", [("sums", 64, 4), ("sums", 66, 1), ("library", 64, 0)])
def test_both_ways_to_multiply_one_row_are_the_product(way, N, loops):
    """By sums all quarters of the outputs at once, if there are quarters."""
    ROUTES.decoding = way
    x, w = numbers(1, 96, seed=0).float(), numbers(N, 96, seed=1).float()
    want = x.double() @ w.double().T
    graph = []

    def look(traced, inputs):
        graph.append(traced.code)
        return traced
    with torch.no_grad():
        y = torch.compile(linear, backend=look, fullgraph=True)(x, w)
    assert (y - want).abs().max() <= 1e-6 * want.abs().max()
    assert graph[0].count(".sum(-1)") == loops


def test_the_rows_of_the_loss_are_those_that_were_taken_on_a_cpu_alone():
    routes.take(dict(rows=96))
    assert model_file.chunk_rows(4096, "cpu") == 96 and model_file.chunk_rows(131_072, "cuda") == 1024


@pytest.mark.parametrize("way, T, goes", [
    ("formula", 1024, "formula"), ("formula", 1025, "kernel"), ("wide", 2048, "wide"), ("auto", 512, "formula"),
    ("auto", 513, "kernel")])
def test_long_windows_do_not_take_the_formula(way, T, goes):
    """Half of its scores are kept in memory."""
    ROUTES.attention = way
    q = torch.empty(1, 1, T, 2, dtype=torch.bfloat16)
    assert model_file.way_on_cpu(q, False) == goes
    assert model_file.way_on_cpu(q, True) == goes.replace("kernel", "wide")


# -----------------------------------------------------------------------------
# the race


class Clock:
    """A clock that moves when somebody runs."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(routes.time, "perf_counter", lambda: self.now)

    def runner(self, *seconds):
        """A contestant that takes so long, the next time the next of them, and at last the last of them."""
        left = list(seconds)

        def run():
            self.now += left.pop(0) if len(left) > 1 else left[0]
        return run


@pytest.mark.parametrize("usual, other, wins", [(3.0, 2.7, "other"), (3.0, 2.88, "usual"), (0.5, 0.55, "usual")])
def test_another_way_is_taken_if_it_is_clearly_faster(monkeypatch, usual, other, wins):
    clock = Clock(monkeypatch)
    assert routes.fastest("x", "1 x 1", dict(usual=clock.runner(usual), other=clock.runner(other))) == wins


def test_neither_compilation_nor_a_neighbours_load_decides(monkeypatch):
    """The first call and a slow round do not count."""
    clock = Clock(monkeypatch)
    other = clock.runner(50.0, 0.3, 5.0, 0.3, 0.3)
    assert routes.seconds_of(dict(usual=clock.runner(0.5), other=other), limit=3) == pytest.approx(
        dict(usual=0.5, other=0.3))


def test_short_calls_are_timed_many_at_a_time(monkeypatch):
    clock = Clock(monkeypatch)
    calls = []
    run = clock.runner(1e-5)
    assert routes.seconds_of(dict(a=lambda: (calls.append(1), run())), limit=0.003)["a"] == pytest.approx(1e-5)
    assert len(calls) >= 2 + 2 * 200


def test_what_was_timed_is_remembered_by_cpu_torch_threads_and_shape(monkeypatch, capsys):
    clock = Clock(monkeypatch)
    ways = dict(a=clock.runner(1.0), b=clock.runner(0.5))
    assert routes.fastest("x", "1 x 1", ways) == "b"
    assert "timed once on this CPU, x: a 1000.00 ms, b 500.00 ms for 1 x 1; taken: b" in capsys.readouterr().err
    never = dict(a=None, b=None)                           # cannot be called
    assert routes.fastest("x", "1 x 1", never) == "b" and capsys.readouterr().err == ""
    for name, shape in (("x", "1 x 2"), ("y", "1 x 1")):
        with pytest.raises(TypeError):
            routes.fastest(name, shape, never)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    with pytest.raises(TypeError):
        routes.fastest("x", "1 x 1", never)


@pytest.mark.parametrize("content", ["", "[1]", '{"half a fi', '{"other": 1}'])
def test_a_cache_that_is_none_is_made_anew_and_one_that_cannot_be_is_done_without(monkeypatch, tmp_path, content):
    clock = Clock(monkeypatch)
    ways = dict(a=clock.runner(1.0), b=clock.runner(0.5))
    os.makedirs(os.path.dirname(routes.cache_file()))
    with open(routes.cache_file(), "w", encoding="utf-8") as f:
        f.write(content)
    assert routes.fastest("x", "1 x 1", ways) == "b" and "b" in routes.remembered().values()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert routes.fastest("x", "1 x 1", ways) == "b" and routes.remembered() == {}


@pytest.mark.skipif(not os.path.exists("/proc/cpuinfo"), reason="the kernel's own words are in /proc")
def test_a_cpu_is_told_from_another_by_the_kernels_words():
    """Vendors give several generations one name: family, model and stepping tell them apart."""
    with open("/proc/cpuinfo", encoding="utf-8") as f:
        text = f.read()
    found = [re.search(rf"^{name}\s*:\s*(.*)$", text, re.M) for name in ("model name", "cpu family", "model", "stepping")]
    assert routes.cpu_name().split() == " ".join(match[1] for match in found if match).split() or not any(found)


def test_the_cache_is_the_users(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert routes.cache_file() == "/somewhere/nanoapertus/routes.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert routes.cache_file() == os.path.expanduser("~/.cache/nanoapertus/routes.json")


@pytest.fixture
def entered(monkeypatch):
    """A race that takes place without a clock, and eagerly: fills (name, shape, {way: what its call returns})."""
    found = []

    def all_run(name, shape, contestants):
        found.extend((name, shape, {way: call() for way, call in contestants.items()}))
        return next(iter(contestants))
    monkeypatch.setattr(routes, "fastest", all_run)
    monkeypatch.setattr(torch, "compile", lambda f, **how: f)
    return found


SHAPE = ApertusConfig(block_size=1024, vocab_size=4096, n_layer=1, n_head=4, n_kv_head=2, n_embd=16, ffn_dim=32)


@pytest.mark.parametrize("dtype, T, documents, ways", [
    (torch.bfloat16, 512, False, "formula kernel wide"), (torch.bfloat16, 1024, False, "kernel formula wide"),
    (torch.bfloat16, 1025, True, "wide kernel"), (torch.float32, 1024, False, "kernel formula"),
    (torch.float32, 1024, True, "wide formula")])
def test_ways_to_attend_race_with_the_usual_one_first(entered, monkeypatch, dtype, T, documents, ways):
    asked = []

    def attend(q, k, v, doc, way):
        asked.append((way, q.shape, k.shape, q.dtype, doc is not None))
        return causal_attention(q, k, v, doc, way)
    monkeypatch.setattr(model_file, "causal_attention", attend)
    doc = torch.arange(T).div(100, rounding_mode="floor").expand(2, T) if documents else None
    shape = dataclasses.replace(SHAPE, block_size=T)
    assert routes.race_attention(2, shape, dtype, doc) == ways.split()[0]
    name, what, gradients = entered
    assert name == "attention" and what.startswith(f"2 x 4 / 2 x {T} x 4 in {str(dtype)[6:]}")
    assert what.endswith(", documents of about 128") == documents
    assert [way for way, *_ in asked] == list(gradients) == ways.split()
    assert {tuple(how) for _, *how in asked} == {((2, 4, T, 4), (2, 2, T, 4), dtype, documents)}
    first, *others = gradients.values()
    assert all(torch.isfinite(g).all() and g.abs().sum() > 0 for g in first[1:])
    for other in others:
        for g, want in zip(other, first):
            off = (g.double() - want.double()).abs().max()
            assert off <= (2**-5 if dtype == torch.bfloat16 else 1e-5) * want.abs().max()


def test_numbers_of_rows_race_with_the_usual_one_first_and_none_beyond_the_batch(entered):
    assert routes.race_rows(3000, SHAPE, torch.float32) == 1024
    name, what, gradients = entered
    assert name == "rows" and what == "3000 x 16 x 4096 in float32" and list(gradients) == [1024, 512, 2048]
    for g, want in zip(gradients[512], gradients[1024]):
        torch.testing.assert_close(g, want, rtol=1e-4, atol=1e-7)
    entered.clear()
    assert routes.race_rows(100, SHAPE, torch.float32) == 100 and not entered
    # A head of 128 million numbers would take seconds a call.
    published = dataclasses.replace(SHAPE, vocab_size=131_072, n_embd=1024)
    assert routes.race_rows(4096, published, torch.float32) == 512 and not entered


def test_libraries_race_over_a_product_and_its_gradients(entered):
    assert routes.race_products(64, 16, 32) == "torch"
    name, what, gradients = entered
    assert name == "products" and what == "64 x 16 x 32" and list(gradients)[0] == "torch"
    for g, want in zip(*gradients.values()):
        torch.testing.assert_close(g, want, rtol=1e-5, atol=1e-5)
    entered.clear()
    routes.race_products(4096, 1024, 8192)
    assert entered[1] == "1024 x 1024 x 8192"


def test_ways_of_decoding_race_over_more_matrices_than_a_cache_holds(entered, monkeypatch):
    full, made = torch.full, []
    monkeypatch.setattr(torch, "full", lambda *of, **how: made.append(full(*of, **how)) or made[-1])
    shape = dataclasses.replace(SHAPE, n_embd=512, ffn_dim=2048)
    assert routes.race_decoding(shape, torch.float32) == "sums"
    name, what, products = entered
    assert name == "decoding" and what == "1 x 512 x 2048 x 512 in float32" and ROUTES.decoding == "sums"
    assert 64e6 <= sum(w.nbytes for w in made) <= 80e6
    # Each matrix takes means, and of ones they are ones.
    for way in ("sums", "library"):
        torch.testing.assert_close(products[way], torch.ones(1, 512))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_race_of_a_small_model_takes_ways_that_there_are(dtype):
    shape = ApertusConfig(block_size=32, vocab_size=4096, n_layer=1, n_head=2, n_kv_head=1, n_embd=32, ffn_dim=64)
    routes.take({})
    ways = routes.race_all(shape, 64, dtype, None, compiled=False)
    assert ways.keys() - {"products"} == {"attention"} and ("products" in ways) == (dtype == torch.float32)
    ways["rows"] = routes.race_rows(2048, shape, dtype)
    assert ways["rows"] in (512, 1024, 2048)
    assert routes.parse(routes.written(ways)) == ways


def test_what_was_compiled_for_a_race_is_forgotten_before_the_run(monkeypatch):
    """A run that was timed compiles what one compiles that finds the answer in the cache."""
    for race in ("race_attention", "race_rows", "race_products"):
        monkeypatch.setattr(routes, race, lambda *args: torch.compile(chunk_loss, backend="eager", dynamic=True)(
            torch.ones(8, 4), torch.ones(6, 4), torch.zeros(8, dtype=torch.long), torch.ones(8), True) and "kernel")
    seen = []

    def look(graph, inputs):
        seen.append(any(isinstance(x, torch.SymInt) for x in inputs))
        return graph
    routes.race_all(SHAPE, 2, torch.bfloat16, None, compiled=True)
    labels = torch.zeros(16, dtype=torch.long)
    torch.compile(chunk_loss, backend=look)(torch.ones(16, 4), torch.ones(6, 4), labels, torch.ones(16), True)
    assert seen == [False]


# -----------------------------------------------------------------------------
# the run


@pytest.mark.parametrize("text", ["fast", "products=mkl", "rows=many", "attention=formula,products", "rows=-1"])
def test_a_way_that_is_none_is_refused_in_one_line(text, data, tmp_path):
    done = script("train.py", "configs/tiny.py", f"--data={data}", f"--out={tmp_path}/run", f"--routes={text}")
    refused(done, "routes=", "products=torch|onednn", "rows=NUMBER")
    assert not os.path.exists(tmp_path / "run")


def test_all_ranks_take_the_ways_of_the_first():
    mine = dict(products="onednn", attention="wide", rows=96, decoding="library")
    other = dict(products="torch", attention="formula", rows=32, decoding="sums")
    said = []
    first = SimpleNamespace(first=True, add=lambda *numbers: said.extend(numbers) or numbers)
    assert routes.shared(mine, first) == mine
    second = SimpleNamespace(first=False, add=lambda *numbers: [float(a + b) for a, b in zip(said, numbers)])
    assert routes.shared(other, second) == mine


def test_a_run_goes_on_with_the_ways_that_it_began_with(data, tmp_path, monkeypatch):
    """Also on another machine, where others are faster: the bits are those of a run that was not stopped."""
    settings = "configs/tiny.py", f"--data={data}", "--n_layer=1", "--eval_every=0", "--last_eval_windows=8"
    said = "--routes=rows=128,attention=kernel"
    whole, part = tmp_path / "whole", tmp_path / "part"
    script("train.py", *settings, said, f"--out={whole}")
    part.mkdir()
    (part / "stop").touch()
    script("train.py", *settings, said, f"--out={part}")
    monkeypatch.setattr(routes, "WORTH", 0)
    monkeypatch.setattr(routes, "race_all", None)          # would be called, and cannot
    done = script("train.py", *settings, f"--out={part}", "--resume")
    assert done.returncode == 0, done.stderr
    config = json.loads((part / "config.json").read_text())
    assert config["routes"] == "products=torch,attention=kernel,rows=128,decoding=sums"
    assert same(weights(whole), weights(part))


def test_a_short_run_and_an_exact_one_take_the_usual_ways(data, tmp_path, monkeypatch):
    monkeypatch.setattr(routes, "race_all", None)
    settings = "configs/tiny.py", f"--data={data}", "--n_layer=1", "--eval_every=0", "--last_eval_windows=8"
    settings += "--total_samples=8", "--warmup_samples=0", "--decay_samples=0"
    assert script("train.py", *settings, f"--out={tmp_path}/short").returncode == 0
    monkeypatch.setattr(routes, "WORTH", 0)
    assert script("train.py", *settings, f"--out={tmp_path}/exact", "--exact").returncode == 0
    with pytest.raises(TypeError):
        script("train.py", *settings, f"--out={tmp_path}/long")
