"""Random plans of resumed runs, memory and FLOPs of steps, conversations and choices against counts in plain lists."""

import math
from dataclasses import replace
from functools import cache
from itertools import product, takewhile
from random import Random

import numpy as np
import torch
from corpora import put
from draws import drawn
from hypothesis.strategies import booleans, fixed_dictionaries, integers, lists, sampled_from, text, tuples
from pytest import MonkeyPatch, approx
from test_oracles import models
from test_sft import TOK, assistant, user
from tiny import ids, small
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import evaluate
import plain
import sample
import tokenizer
from ademamix import build_optimizer
from engine import restore
from engine.checkpoint import seal_manifest
from engine.memory import MODES, step_memory
from engine.recompute import recompute_activations
from schedule import Plan
from studies.kit import read_rows
from tools import plan as planner
from train import MAY_CHANGE
from weights import lora

# ----------------------------------------------------------------------------------------------------------------------
# resumed runs

PLAN = dict(batch_size=4, block_size=7, lr=1.0, min_lr=0.8, loss_average="step", data_hash="", stage="", micro_batch=4)
PHASES = dict(
    schedule=["wsd", "wsd", "wsd", "cosine"],
    minutes=[0.0, 0.0, 0.0, 1.0],
    total_samples=[56, 60, 64, 71],
    decay_samples=[8, 12, 20, 31],
    warmup_samples=[0, 9, 25],
)


def ends_of(s, begin):
    """Samples at the end of a run whose decay begins after `begin` samples, and of its decay."""
    decay = begin * s["decay_samples"] // (s["total_samples"] - s["decay_samples"])
    return begin + decay, decay


def rate(s, samples, begin):
    """begin: samples before the decay; inf: the clock will say."""
    peak, low, warmup = s["lr"], s["min_lr"], s["warmup_samples"]
    if s["schedule"] == "cosine":
        if samples < warmup:
            return peak * samples / warmup
        share = (samples - warmup) / (s["total_samples"] - warmup)
        return low + (peak - low) * (0.5 + 0.5 * math.cos(math.pi * share))
    if begin == math.inf:
        return peak * min(1, samples / warmup) if warmup else peak
    if begin < warmup:
        peak, warmup = peak * begin / warmup, begin
    return plain.wsd(samples, peak, min(low, peak), warmup, *ends_of(s, begin))


def steps_of(s, begin, stage_end):
    """(samples before, samples of, tokens after, learning rate) of each step of a run, counted one by one."""
    end, steps, seen = math.inf if begin == math.inf else ends_of(s, begin)[0], [], 0
    while len(steps) < (30 if end == math.inf else end):
        n = s["batch_size"] * (2 if 0 < s["batch_ramp_at"] <= seen else 1)
        if seen + n > min(end, stage_end or end):
            break
        steps.append((seen, n, (seen + n) * s["block_size"], approx(rate(s, seen, begin))))
        seen += n
    return steps


def begin_of(s):
    return math.inf if s["minutes"] else s["total_samples"] - s["decay_samples"]


def resumed(first, later, saved, seconds):
    """(step, begin of the decay) with which a run resumes. None: it cannot. saved: (step, samples, begin) of each."""
    step, seen, known = saved[-1]
    begin = begin_of(later)
    if any(first[name] != later[name] for name in ("schedule", "warmup_samples")):
        return None
    if later["schedule"] == "cosine" and first["total_samples"] != later["total_samples"]:
        return None  # each of its rates depends on the end
    if all(first[name] == later[name] for name in ("total_samples", "decay_samples", "minutes")):
        return step, known
    if first["schedule"] == "wsd" and seen > known:
        is_longer = 60 * later["minutes"] > seconds if later["minutes"] else later["total_samples"] > seen
        steps = [step for step, seen, _ in saved if seen <= min(known, begin)]
        return (steps[-1], begin) if is_longer and steps else None
    return None if later["schedule"] == "wsd" and seen > begin else (step, begin)


def has_the_steps(plan, s, begin):
    """Whether a plan is that of steps_of(); else an error that names them."""
    steps = steps_of(s, begin, plan.stage_end)
    found = [(*plan.samples_of(n), plan.tokens_after(n), plan.lr_at(n)) for n in range(len(steps))]
    assert found == steps
    return plan.end == (math.inf if begin == math.inf else len(steps))


def test_a_run_resumed_after_any_step_has_the_steps_of_the_formulas(tmp_path):
    for seed in range(240):
        resume_after_each_step(tmp_path / str(seed), seed)


def resume_after_each_step(out, seed):
    """With another schedule, or not. request: the step before which a decay is requested, which is saved too."""
    rng = Random(seed)
    first, later = ({name: rng.choice(values) for name, values in PHASES.items()} for _ in range(2))
    first |= PLAN | dict(batch_ramp_at=rng.choice([0, 17, 32]))
    later = first | {name: later[name] for name in rng.sample([*PHASES], rng.randint(0, 2))}
    stage_end, request, every = rng.choice([None] * 5 + [50]), rng.choice([99, rng.randint(1, 15)]), rng.randint(1, 3)
    for s in (first, later):
        if s["schedule"] == "cosine" or stage_end:
            s["minutes"] = 0.0
    plan, longer = (Plan.from_settings(s, stage_end=stage_end) for s in (first, later))
    begins = [begin_of(first)] * 2
    steps = steps_of(first, begins[0], stage_end)
    if request < len(steps):
        if first["schedule"] == "wsd" and steps[request][0] < begins[0]:
            begins[1] = steps[request][0]
        assert plan.begin_decay(request) == (begins[0] != begins[1])
        steps = steps_of(first, begins[1], stage_end)
    assert has_the_steps(plan, first, begins[1])

    saved = []
    for n, (samples, size, *_) in enumerate(steps, 1):
        if n % every and n != request:
            continue
        saved.append((n, samples + size, begins[n >= request]))
        seconds, finished = rng.choice([1, 99]), rng.random() < 0.2
        decay_at = None if saved[-1][-1] == math.inf else saved[-1][-1]
        manifest = seal_manifest(dict(step=n, seconds=seconds, config=first, decay_at=decay_at, files={}))
        put(out, {f"ckpt/step-{n:08d}/manifest.json": manifest, "summary.json": f'{{"steps": {n * finished}}}'})
        wanted = resumed(first, later, saved, seconds)
        known_end = wanted and wanted[1] < math.inf
        is_done = finished and known_end and len(steps_of(later, wanted[1], stage_end)) <= wanted[0]
        try:
            (_, manifest), begin, decayed = restore.find_checkpoint(str(out), later, MAY_CHANGE, longer, None)
        except ValueError:
            assert not wanted or is_done
        else:
            assert (manifest["step"], math.inf if begin is None else begin) == wanted
            assert decayed == [n for n, *_ in saved if n > wanted[0]] and not is_done
            assert has_the_steps(replace(longer, decay_at=begin), later, wanted[1])


# ----------------------------------------------------------------------------------------------------------------------
# the memory and FLOPs of a step


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside and not freed, without those of `known` ones."""

    def __init__(self, known):
        super().__init__()
        self.known, self.storages = {t.untyped_storage().data_ptr() for t in known}, {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        made = op(*args, **(kwargs or {}))
        for storage in [t.untyped_storage() for t in tree_leaves(made) if isinstance(t, torch.Tensor)]:
            if storage.data_ptr() not in self.known:
                ref = StorageWeakRef(storage)
                self.storages[ref.cdata] = ref, storage.nbytes()
        return made

    def count(self):
        return sum(size for ref, size in self.storages.values() if not ref.expired())


SHAPES = dict(
    activation=sampled_from(["xielu", "swiglu", "gelu", "relu2"]),
    n_kv_head=sampled_from([1, 2, 4]),
    n_embd=sampled_from([16, 24]),
    ffn_dim=sampled_from([48, 72, 96]),
    tie_embeddings=booleans(),
)


def numbers_of_a_block(mode, T, **shape):
    """Numbers that a block keeps for each position: by the formula; counted, but for attention's T for each head."""
    model = small(n_layer=1, n_head=4, **shape).bfloat16()
    recompute_activations(model, mode)
    x, angles = (torch.ones(1, T, n, dtype=torch.bfloat16) for n in (model.config.n_embd, model.config.head_dim))
    with Alive([*model.parameters(), angles]) as alive:
        y = model.model.layers[0](x.requires_grad_(), angles, angles)  # noqa: F841  it holds what backward needs
    settings = dict(optimizer="adamw", recompute=mode, micro_batch=2)
    formula = step_memory(model, settings, T, 2)["activations"] / 2 / 2 / T - 3 * shape["n_embd"]
    return np.array([formula, alive.count() / 2 / T - 4 * T * (mode != "full")])


@drawn(
    40,
    shape=fixed_dictionaries(SHAPES),
    T=integers(2, 20),
    mode=sampled_from(MODES),
    r=integers(0, 3),
    optimizer=sampled_from(["ademamix", "adamw"]),
    state_dtype=sampled_from(["float32", "bfloat16"]),
    shards=sampled_from([1, 2]),
    exact=booleans(),
)
def test_a_step_takes_the_memory_of_what_it_keeps(shape, T, mode, r, optimizer, state_dtype, shards, exact):
    model = small(n_layer=1, n_head=4, **shape)
    if r:
        lora.init_lora(lora.add_lora(model, dict(r=r, lora_alpha=8, target_modules=lora.MATRICES)), 1)
    settings = dict(optimizer=optimizer, state_dtype=state_dtype, recompute=mode, exact=exact, micro_batch=3)
    found = step_memory(model, settings, T, 2, shards)
    idx = ids(1, T)
    model.loss(idx, idx).backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    stepped = build_optimizer(model, optimizer, 0.1, (0.9, 0.9, 0.9), 1.0, 0.1, 1, False, state_dtype)
    stepped.step()
    wanted = dict(weights=model.parameters(), gradients=grads)
    wanted["states"] = [t for state in stepped.state.values() for t in state.values() if t.ndim]
    wanted = {part: sum(t.nbytes for t in tensors) / shards for part, tensors in wanted.items()}
    if exact:
        wanted["gradients"] += 8 * sum(grad.numel() for grad in grads)
    assert {part: found[part] for part in wanted} == wanted

    formula, kept = numbers_of_a_block(mode, T, **shape)
    if mode == "none":
        # Eager attention keeps more, so compare what more width adds. Compiled blocks compute silu(gate) again.
        formula, kept = numbers_of_a_block(mode, T, **shape | dict(ffn_dim=120)) - (formula, kept)
        added = 120 - shape["ffn_dim"]
        kept -= added * 2 / 3 * (shape["activation"] == "swiglu")
    assert kept == approx(formula)


@drawn(3, shape=fixed_dictionaries(SHAPES), T=integers(4, 9))
def test_a_plan_counts_the_flops_of_a_step(shape, T):
    for activation, r in product(["xielu", "swiglu"], [0, 1]):
        compare_flops(shape | dict(activation=activation), T, r)


def compare_flops(shape, T, r):
    """r: of adapters; with them only without and with full recomputation, where their share is about right."""
    model = small(block_size=T, n_layer=2, n_head=4, **shape)
    C, wide = shape["n_embd"], model.config.ffn_width
    # torch counts no products that are added in place: those of the head's gradient.
    head = 2 * C * 97
    left_out = head
    if r:
        lora.init_lora(lora.add_lora(model, dict(r=1, lora_alpha=8, target_modules=lora.MATRICES)), 1)
        # Nothing before the first q_proj, k_proj and v_proj is trained.
        left_out = 2 * C * (C + 2 * shape["n_kv_head"] * C // 4) + 3 * 2 * C

    def counted(mode):
        recompute_activations(model, mode)
        idx = ids(1, T)
        with FlopCounterMode(display=False) as flops:
            model.loss(idx, idx).backward()
        by_op = flops.get_flop_counts()["Global"]
        attention = by_op[torch.ops.aten.bmm]
        return (sum(by_op.values()) - attention) / T + left_out, attention / T

    matrices, attention = counted("none")
    whole = matrices + attention / 2  # of causal attention
    assert planner.flops_per_token(model, "none") == approx(whole)
    for mode in ("full",) if r else ("cheap", "selective", "full"):
        # The plan runs whole blocks again; here the last matrix is not, unless an adapter follows it.
        again = counted(mode)[0] - matrices + (mode == "full" and not r) * 2 * 2 * C * wide
        assert planner.flops_per_token(model, mode) / whole == approx(1 + again / matrices, rel=0.03 * r + 1e-9)


# ----------------------------------------------------------------------------------------------------------------------
# conversations and choices

LINES = (
    "/reset",
    " /reset x",
    "/system",
    "/system  be é",
    "/save",
    "/save FILE",
    "/x",
    " hi ",
    "é",
    "so",
    "fill",
    "fill",
    " ",
)


def test_a_conversation_is_a_list_of_messages(tmp_path):
    for seed in range(60):
        converse(tmp_path / str(seed), seed)


def converse(path, seed):
    """Replies of the model end their turns, or not. Some lines nearly fill the window of 700 tokens."""
    rng, thinking, most = Random(seed), seed % 2 == 0, 5
    replies = [("ab " * 3)[: rng.randint(0, 9)] for _ in range(20)]
    ends = [rng.random() < 0.5 for _ in replies]
    typed, prompts, wanted, said, saved = [], [], [], [], []
    start = system = rng.choice(["", "s t"])
    for line in takewhile(str.strip, rng.choices(LINES, [2] * 12 + [1], k=20)):
        messages = [dict(role="system", content=system)] * bool(system) + said
        if line == "fill":
            line = "b" * max(
                1, rng.choice([696, 699, 700]) - len(TOK.chat([*messages, user("")], None, thinking, True))
            )
        typed.append(line.replace("FILE", str(path)))
        command, _, rest = line.strip().partition(" ")
        prompt = TOK.chat([*messages, user(line)], None, thinking, True)
        if command == "/reset":
            said = []
        elif command == "/system" and rest:
            system, said = rest, []
        elif command == "/save" and rest:
            saved.append(dict(messages=messages, tools=None, thinking=thinking))
        elif command[0] != "/" and len(prompt) < 700:
            k, room = len(wanted), min(most, 700 - len(prompt))
            is_cut = not ends[k] or len(replies[k]) >= room  # its end is not learnt
            said = [*said, user(line), assistant(replies[k][:room]) | (dict(weight=0) if is_cut else {})]
            wanted.append(prompt)

    def stream(model, idx, n, stop, **how):
        reply = TOK.encode(replies[len(prompts)]) + [TOK.id_of("<|assistant_end|>")] * ends[len(prompts)]
        prompts.append([*idx[0]])
        yield from torch.tensor(reply)[:n]

    lines = iter([*typed, " ", "never read"])
    with MonkeyPatch.context() as patch:
        patch.setattr(sample, "stream", stream)
        patch.setattr(sample, "read_line", lambda prompt: next(lines))
        model = small(vocab_size=320, block_size=700, n_layer=1)
        sample.converse(sample.Conversation(model, TOK, start, None, thinking), most, {})
    assert prompts == wanted
    assert (read_rows(path) if path.exists() else []) == saved


@cache
def words():
    return tokenizer.load("apertus:400")


CHOICES = lists(text("é你ßx ", min_size=1, max_size=8), min_size=2, max_size=4)


@drawn(
    25,
    questions=lists(
        tuples(sampled_from(["Où?", "x x "]), CHOICES, integers(0, 3), integers(0, 3)), min_size=1, max_size=3
    ),
    template=sampled_from(["{question}\nAnswer: {choice}", "{question}{choice}", "Q: {question} \n{choice}"]),
    baseline=lists(booleans(), min_size=6, max_size=6),
)
@torch.no_grad()
def test_choices_are_scored_as_transformers_scores_them(questions, template, baseline):
    """
    The right choice as it is, its index, its letter. By the sum of log p and by its mean per byte. Question and choice
    have the ids of one text; white space before a choice is scored.
    """
    ours, theirs = models()
    read, wanted = [], []
    for prompt, choices, right, form in questions:
        right %= len(choices)
        answer = [choices[right], right, str(right), "aBcD"[right]][form]
        read.append(evaluate.read_question(dict(question=prompt, choices=choices, answer=answer), ""))
        costs = []
        for choice in choices:
            written = {
                "{question}\nAnswer: {choice}": f"{prompt.rstrip()}\nAnswer: {choice}",
                "{question}{choice}": f"{prompt}{choice}",
                "Q: {question} \n{choice}": f"Q: {prompt.rstrip()} \n{choice}",
            }[template]
            before = [words().bos, *words().encode(written.removesuffix(choice).rstrip())]
            row = [words().bos, *words().encode(written)]
            logp = theirs(torch.tensor([row[:-1]])).logits[0].log_softmax(-1)[range(len(row) - 1), row[1:]]
            costs.append(-logp[len(before) - 1 :].sum().item())
        per_byte = [cost / len(choice.encode()) for cost, choice in zip(costs, choices)]
        wanted.append([choices[each.index(min(each))] == choices[right] for each in (costs, per_byte)])
    hits = evaluate.choice_hits(ours, words(), read, template)
    assert hits.T.tolist() == wanted
    n = len(wanted)
    others = np.array(baseline[: 2 * n]).reshape(2, n)
    rows = list(evaluate.choice_rows("x", read, [hits, others], "other"))
    shares = [sum(row[i] for row in wanted) / n for i in range(2)]
    assert [row["score"] for row in rows[::2]] == approx(shares)
    assert [row["score"] for row in rows[1::2]] == approx(np.array(shares) - others.mean(1))
    assert rows[0]["chance"] == approx(sum(1 / len(choices) for _, choices, *_ in questions) / n)
