"""
Pairs of features: rows in which each pair of values of two settings occurs (pairs.py), and each run is compared with
plain.py or plain lists, with the files that it leaves, its log, its config and its printed numbers.

A new setting belongs to a table of features here, or to the settings that no pair needs, with the reason.
"""

import json
import math
import os
import re
import signal
from dataclasses import replace
from itertools import accumulate, combinations, count
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from conftest import ROOT
from oracle import Plain
from pairs import covering, pairs_of
from pytest import approx
from safetensors.torch import load_file, save_file
from trained import corpus, log, ran as run_train, steps

import convert
import plain
import tokenizer
import train
from configurator import settings
from data import StagedDataset, TokenDataset, read_meta
from engine import parallel
from engine.runs import settings_of
from model import Apertus, ApertusConfig
from tokenizer_json import hf_files
from weights import lora
from weights.hashes import WRITTEN
from weights.write import save_hf, write_config

BYTE = tokenizer.load("byte")

# ----------------------------------------------------------------------------------------------------------------------
# train.py

STAGES = ("a", ("a.jsonl",), 16, 28), ("b", ("b.jsonl", "a.jsonl"), 34, 3), ("c", ("none",), 99, 4)
TRAIN = dict(
    start=["", "whole", "adapters", "nf4"],
    data=["one", "weights", "stages"],
    teacher=["", 0.5],
    goldfish=["0", "3 window product", "3 stream mix"],
    micro_batch=[4, 8],
    recompute=["none", "cheap"],
    loss_average=["step", "micro"],
    schedule=["wsd", "cosine"],
    warmup_samples=[0, 12],
    batch_ramp_at=[0, 10],
    exact=[False, True],
    optimizer=["ademamix", "ademamix 4", "adamw"],
    state_dtype=["float32", "bfloat16"],
    grad_clip=[0.0, 0.3],
    weight_decay=[0.0, 0.5],
    eval_every=[0, 2],
    eval_windows=[0, 7],
    last_eval_windows=[0, 11],
    sample_every=[0, 3],
    checkpoint_every=[0, 1],
    keep_checkpoints=[0, 1],
    stopped=[False, True],
    activation=["xielu", "gelu"],
    qk_norm=[True, False],
    doc_mask=[True, False],
    tie_embeddings=[False, True],
    rope_scaling=[8.0, 0.0],
    n_kv_head=[1, 2],
)
NEVER = [
    (("state_dtype", "bfloat16"), ("exact", True)),
    (("state_dtype", "bfloat16"), ("optimizer", "adamw")),
    (("start", "nf4"), ("exact", True)),
]
# Names of features that are not settings, and the settings that they set.
STANDS_FOR = dict(
    start="init_from lora_r lora_alpha base",
    data="data stages stage",
    teacher="teacher distill",
    goldfish="goldfish_k goldfish_h goldfish_hash goldfish_scope",
    optimizer="optimizer alpha_warmup",
    stopped="resume out",
)
WITHOUT_PAIRS = {
    "the sizes of a run, which all rows share": """seed n_layer n_head n_embd ffn_dim vocab_size block_size batch_size
        total_samples decay_samples lr min_lr betas alpha""",
    "ranks: test_step.py, test_matrix.py, test_parallel.py": "parallel hsdp_shard sequence_parallel timeout",
    "hardware, which a row cannot choose: test_hardware.py, test_speed.py, test_fp8.py": "device dtype compile fp8",
    "the clock: test_train.py": "minutes checkpoint_minutes",
    "a service: test_train.py": "wandb_log",
    "read by model.py alone: test_model.py": "rope_theta init_std",
    "drawn under transformers' names, with config.json": "rope_original rope_low rope_high norm_eps",
}


def names_in(features, stands_for, without):
    """The settings of a table of features and of those that need no pair, each in a test file that its reason names."""
    for reason, settings_there in without.items():
        texts = [Path(ROOT, "tests", file).read_text() for file in re.findall(r"test_\w+\.py", reason)]
        for name in settings_there.split() * bool(texts):
            assert any(re.search(rf"\b{name}\b", text) for text in texts), (name, reason)
    names = [stands_for.get(name, name) for name in features] + list(without.values())
    return set(" ".join(names).split())


def test_each_setting_of_train_is_a_feature_or_has_a_reason_to_be_none():
    assert names_in(TRAIN, STANDS_FOR, WITHOUT_PAIRS) == settings(vars(train), train.shape).keys()


def test_a_covering_array_has_each_pair_and_none_that_is_excluded():
    rows = covering(TRAIN, NEVER)
    values = [(name, value) for name in sorted(TRAIN) for value in TRAIN[name]]
    wanted = {pair for pair in combinations(values, 2) if pair[0][0] != pair[1][0]}
    wanted -= {tuple(sorted(pair)) for pair in NEVER}
    assert set().union(*map(pairs_of, rows)) == wanted and len(rows) <= 18


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """data(kind): the setting --data of a folder of two sources, and of it with another one."""
    root = tmp_path_factory.mktemp("text")
    one, other = corpus(root), corpus(root / "other", "--val_share=0.3")
    return dict(one=one, stages=one, weights=f"{{{one}: 3, {other}: 1}}")


def shape_of(row):
    names = "activation qk_norm doc_mask tie_embeddings rope_scaling n_kv_head".split()
    fixed = dict(block_size=32, vocab_size=BYTE.vocab_size, n_layer=1, n_head=2, n_embd=32, ffn_dim=64, init_std=0.1)
    return ApertusConfig(**fixed | {name: row[name] for name in names})


def write_start(folder, shape, seed):
    """A start model, as an export or, if transformers cannot compute it, as the folder of a run without checkpoints."""
    model = Apertus(shape, seed)
    if shape.activation == "xielu" and shape.qk_norm:
        save_hf(model, folder, BYTE)
    else:
        folder.mkdir()
        write_config(folder, vars(shape), shape, BYTE)
        tensors = {name: p.detach() for name, p in model.named_parameters()}
        save_file(tensors, folder / "model.safetensors")
    return folder


def flags_of(row, root, data):
    flags = {name: value for name, value in row.items() if name not in STANDS_FOR}
    flags["data"] = data[row["data"]]
    if row["data"] == "stages":
        flags |= dict(stages=STAGES, stage="b")
    if row["start"]:
        # A run may change these: its start has another window, RoPE and mask.
        other = dict(block_size=64, rope_scaling=8.0 - row["rope_scaling"], doc_mask=not row["doc_mask"])
        flags["init_from"] = write_start(root / "start", replace(shape_of(row), **other), 7)
    if row["start"] in ("adapters", "nf4"):
        flags |= dict(lora_r=4, lora_alpha=8.0, base="nf4" if row["start"] == "nf4" else "fp32")
    if row["teacher"]:
        shape = shape_of(dict(TRAIN_DEFAULT, n_kv_head=2, rope_scaling=0.0))
        flags |= dict(teacher=write_start(root / "teacher", shape, 9), distill=row["teacher"])
    flags["optimizer"], *warmup = row["optimizer"].split()
    flags["alpha_warmup"] = int(*warmup)
    k, *others = row["goldfish"].split()
    flags["goldfish_k"] = int(k)
    if others:
        flags |= dict(goldfish_h=5, goldfish_scope=others[0], goldfish_hash=others[1])
    return flags


TRAIN_DEFAULT = {name: values[0] for name, values in TRAIN.items()}
SIZES = dict(
    seed=5,
    total_samples=50,
    decay_samples=16,
    batch_size=8,
    lr=4e-3,
    min_lr=1e-3,
    betas=(0.8, 0.95, 0.99),
    alpha=3.0,
    init_std=0.1,
)


def first_model(row, flags):
    """The model before the first step."""
    if not row["start"]:
        return Apertus(shape_of(row), 5)
    model = convert.load_any(str(flags["init_from"]), base="nf4" if row["start"] == "nf4" else "")[0]
    if "lora_r" in flags:
        lora.add_lora(model, dict(r=4, lora_alpha=8.0, target_modules=lora.MATRICES))
        lora.init_lora(model, 5)
    model.config = shape_of(row)
    return model


def plan_of(row):
    """[(samples before, samples of, learning rate)] of all steps, and how many the warm-up of alpha lasts."""
    sizes = []
    while sum(sizes) + (n := 16 if 0 < row["batch_ramp_at"] <= sum(sizes) else 8) <= 50:
        sizes.append(n)
    steps = []
    for seen, n in zip(accumulate(sizes, initial=0), sizes):
        if row["data"] == "stages" and seen + n > 34:
            break
        rate = plain.wsd(seen, 4e-3, 1e-3, row["warmup_samples"], 50, 16)
        if row["schedule"] == "cosine" and seen >= row["warmup_samples"]:
            share = (seen - row["warmup_samples"]) / (50 - row["warmup_samples"])
            rate = 1e-3 + 3e-3 * (1 + math.cos(math.pi * share)) / 2
        steps.append((seen, n, rate))
    return steps, 4 if row["optimizer"] == "ademamix 4" else len(sizes)


def windows_of(row, flags):
    """The windows for training and for validation."""
    goldfish = [flags[f"goldfish_{name}"] for name in "k h hash scope".split() if f"goldfish_{name}" in flags]
    folder, val = flags["data"], TokenDataset(flags["data"], "val", 32, 5)
    if row["data"] == "stages":
        return StagedDataset(folder, STAGES, 32, *goldfish, stage="b"), val
    return TokenDataset(folder, "train", 32, 5, *goldfish), val


@pytest.mark.parametrize("row", covering(TRAIN, NEVER))
def test_a_run_of_train_is_that_of_the_plain_formulas(data, tmp_path, large_eps, row):
    """Losses, norms, rates, validations, weights; the log, the files, config.json and the printed numbers."""
    large_eps(1e-3)
    flags, out = flags_of(row, tmp_path, data), tmp_path / "run"
    args = [f"--{name}={value}" for name, value in (SIZES | flags).items()]
    planned, warmup = plan_of(row)
    n_parts = [-(-n // row["micro_batch"]) for _, n, _ in planned]
    # The signal comes in the third step, which does not count if another micro-batch follows.
    stopped_at = row["stopped"] and 2 + (n_parts[2] == 1)
    if row["stopped"]:
        with stop_after(sum(n_parts[:2])):
            assert run_train(flags["data"], out, *args).returncode == 0
        assert not os.path.exists(out / "summary.json") and steps(out)[-1] == stopped_at
    flops, flops_per_token = [], Apertus.flops_per_token
    with patch.object(Apertus, "flops_per_token", lambda *args: flops.append(flops_per_token(*args)) or flops[-1]):
        done = run_train(flags["data"], out, *args, *["--resume"] * row["stopped"])
    assert done.returncode == 0, done.stderr

    oracle, train_data, val_data = Plain(model=first_model(row, flags)), *windows_of(row, flags)
    teacher = Plain(flags["teacher"]) if row["teacher"] else None
    entries = [validation(oracle, val_data, 0, 0, row["eval_windows"])] * bool(row["start"] and row["eval_every"])
    for step, (seen, n, rate) in enumerate(planned):
        batch = train_data.batch(seen, n)
        parts = [batch] if row["loss_average"] == "step" else batch.split(row["micro_batch"], "cpu")
        loss = torch.stack([oracle.loss(part) for part in parts]).mean()
        terms = dict(loss=loss)
        if teacher:
            terms["kl"] = torch.stack([oracle.divergence(teacher, part) for part in parts]).mean()
            loss = 0.5 * loss + 0.5 * terms["kl"]
        loss.backward()
        how = row["grad_clip"], 1e-3, row["weight_decay"], row["optimizer"] == "adamw", (0.8, 0.95, 0.99), 3.0
        norm, tokens = oracle.update(step + 1, warmup, rate, *how), 32 * (seen + n)
        terms = {name: term.item() for name, term in terms.items()}
        kept = batch.keep.float().mean().item()
        entries.append(terms | dict(step=step, tokens=tokens, grad_norm=norm, lr=rate, kept=kept))
        if step + 1 == len(planned):
            entries.append(validation(oracle, val_data, step, tokens, row["last_eval_windows"]))
        elif row["eval_every"] and (step + 1) % row["eval_every"] == 0:
            entries.append(validation(oracle, val_data, step, tokens, row["eval_windows"]))
    tolerance = 1e-3 if row["state_dtype"] == "float32" else 2e-2
    assert log(out) == [approx(entry, rel=tolerance) for entry in entries]
    trained = convert.load_any(str(out))[0]
    assert oracle.distance(trained) < 2 * tolerance
    compare_files(row, flags, out, trained, planned, stopped_at, entries[-1])
    assert flops == [plain_flops(oracle)]
    n_parameters = sum(p.numel() for p in [*oracle.w.values(), *oracle.frozen.values()])
    assert (
        f"{n_parameters:,} parameters on cpu in float32, {len(planned)} steps of 8 x 32 tokens per step; "
        f"data: {train_data.n_tokens:,} tokens" in done.stdout
    )


def plain_flops(oracle):
    """
    FLOPs of a token: 6 for each weight of a matrix, 4 where that is frozen, and causal attention. An embedding is a
    look-up, unless it is the head too.
    """
    config, flops = oracle.config, 6 * 32 * 32
    for names, cost in ((oracle.w, 6), (oracle.frozen, 4)):
        for name, p in names.items():
            is_product = p.ndim > 1 and ("embed_tokens" not in name or config.tie_embeddings)
            flops += cost * p.numel() * is_product
    return flops


def validation(oracle, val_data, step, tokens, n):
    """The entry of a validation on n windows, 0 = all: in bits, of all predicted tokens of the split by its bytes."""
    idx, targets, _, doc = val_data.batch(0, min(n or val_data.n_windows, val_data.n_windows))
    with torch.no_grad():
        loss = oracle.loss((idx, targets, idx != BYTE.eos, doc)).item()
    parts = [source["val"] for source in read_meta(val_data.data)["sources"].values()]
    predicted, size = (sum(part[name] for part in parts) for name in ("tokens", "bytes"))
    predicted -= sum(part["documents"] for part in parts)
    return dict(step=step, tokens=tokens, val_loss=loss, val_bpb=loss / math.log(2) * predicted / size)


def stop_after(n_parts):
    """A context in which a signal comes in the next micro-batch after n_parts of them."""
    calls, set_gradient_sync = count(), parallel.set_gradient_sync

    def signalled(*args, is_last):
        if next(calls) == n_parts:
            signal.raise_signal(signal.SIGTERM)
        set_gradient_sync(*args, is_last=is_last)

    return patch.object(parallel, "set_gradient_sync", signalled)


def compare_files(row, flags, out, trained, planned, stopped_at, last):
    """The files of a finished run: checkpoints, weights for transformers, adapters, config.json, summary.json."""
    end, before_decay = len(planned), sum(seen + n <= 34 for seen, n, _ in planned)
    saved = sorted({end, *range(1, end * row["checkpoint_every"]), *[stopped_at] * row["stopped"]})
    newest_before = [step for step in saved if step <= before_decay][-1:]
    assert steps(out) == sorted({*saved[-row["keep_checkpoints"] :], *newest_before})

    has_adapters = "lora_r" in flags
    is_exported = row["activation"] == "xielu" and row["qk_norm"] and not has_adapters
    files = {".lock", "ckpt", "config.json", "log.jsonl", "summary.json", "generation_config.json"} | {*hf_files(BYTE)}
    files |= {"model.safetensors", WRITTEN} if is_exported else set()
    assert {*os.listdir(out)} == (files | {"adapter"} if has_adapters else files)
    if is_exported:
        tensors = load_file(out / "model.safetensors")
        assert all(tensors[name].equal(p) for name, p in trained.named_parameters())
    if has_adapters:
        tensors = load_file(out / "adapter" / "adapter_model.safetensors")
        wanted = {name: p for name, p in trained.named_parameters() if ".lora_" in name}
        assert len(tensors) == len(wanted)
        assert all(tensors[lora.PREFIX + name].equal(p) for name, p in wanted.items())
    found = settings_of(out)
    wanted = json.loads(json.dumps(SIZES | flags, default=str))
    assert {name: found[name] for name in wanted} == wanted
    found, last = json.loads((out / "summary.json").read_text()), {name: last[name] for name in last if name != "step"}
    assert {name: found[name] for name in (*last, "steps")} == approx(last | dict(steps=end), rel=2e-2)
