"""config.json as transformers reads it, the keys of runs and studies, and what else files decide."""

import os
import shutil
from itertools import product

import torch
from corpora import put
from draws import drawn
from hypothesis.strategies import integers, lists, none, sampled_from, tuples
from pytest import approx, raises
from test_oracles import models
from tiny import GOLDEN, ids, small
from torch.testing import assert_close
from trained import data  # noqa: F401
from transformers import ApertusForCausalLM

import convert
import prepare
import scoring
from configurator import settings
from corpus import build
from engine.files import read_json, write_json
from studies import ablate, kit
from weights import lora
from weights.write import remove_old_weights


def test_a_run_resumes_only_with_the_same_content_of_each_file_that_a_setting_names(tmp_path):
    put(tmp_path, {"store/list": "", "list": ""})
    plan, own = settings(vars(prepare)), f"{tmp_path}/list"
    names = "robots", "reservations", "blocked", "agents", "decontaminate", "probes", "tokenizer"
    for name, path in [*product(names, (own, f"{tmp_path}/store")), ("tokenizer", f"bpe:{own}")]:
        before = build.key_of(plan | {name: path}, [])
        for file in (tmp_path / "list", tmp_path / "store" / "list"):
            file.write_text(file.read_text() + "x")
        assert build.key_of(plan | {name: path}, []) != before, (name, path)


# ----------------------------------------------------------------------------------------------------------------------
# models


ROPES = [
    dict(rope_type="default"),
    dict(rope_type="linear", factor=3.0),
    dict(
        rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
    ),
]


@drawn(14, rope=none() | sampled_from(ROPES), theta=none() | sampled_from([1e4, 5e5]), form=sampled_from(["v4", "v5"]))
@torch.no_grad()
def test_a_config_has_the_logits_that_transformers_reads_from_it(tmp_path_factory, rope, theta, form):
    """In the forms of transformers 4 and 5, with and without a RoPE, a theta, and keys that have a default."""
    folder = tmp_path_factory.mktemp("hf")
    shutil.copy(f"{GOLDEN}/hf_tiny_a/model.safetensors", folder)
    config = read_json(f"{GOLDEN}/hf_tiny_a/config.json")
    for name in ("rope_parameters", "rms_norm_eps", "initializer_range", "tie_word_embeddings"):
        del config[name]
    base = dict(rope_theta=theta) if rope and theta else {}
    if form == "v5" and rope:
        config["rope_parameters"] = rope | base
    elif rope:
        config |= base | dict(rope_scaling=rope)
    write_json(folder / "config.json", config)
    idx = ids(2, 90, high=512)
    theirs = ApertusForCausalLM.from_pretrained(folder)
    assert_close(convert.load_hf(str(folder))(idx), theirs(idx).logits, rtol=1e-4, atol=1e-4)


def test_an_older_end_leaves_no_weights_and_no_index(tmp_path):
    pieces = "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"
    put(tmp_path, dict.fromkeys([*pieces, "notes.txt", "config.json"], ""))
    remove_old_weights(tmp_path)
    assert {*os.listdir(tmp_path)} == {"notes.txt", "config.json"}


def test_adapters_are_merged_in_fp32_and_rounded_once():
    merged = []
    for dtype in (torch.float32, torch.bfloat16):
        model = lora.add_lora(small(), dict(r=2, lora_alpha=4, target_modules=lora.MATRICES))
        lora.init_lora(model, 1)
        for layer in lora.lora_layers(model).values():
            torch.nn.init.normal_(layer.lora_B.weight, generator=torch.Generator().manual_seed(2))
        lora.merge_adapters(model, dtype)
        merged.append([layer.weight for layer in model.modules() if hasattr(layer, "in_features")])
    for exact, rounded in zip(*merged, strict=True):
        assert rounded.to(torch.bfloat16).equal(exact.bfloat16())


# ----------------------------------------------------------------------------------------------------------------------
# scores and studies


@drawn(20, sizes=lists(tuples(integers(2, 30), integers(1, 29)), min_size=1, max_size=4))
@torch.no_grad()
def test_tokens_have_the_log_probabilities_of_transformers_in_any_batch(sizes):
    """sizes: tokens of a window, and the first of them that is scored."""
    ours, theirs = models()
    windows = [(ids(n, high=512, seed=n).tolist(), min(first, n - 1)) for n, first in sizes]
    for (row, first), found in zip(windows, scoring.token_nats(ours, windows)):
        logp = theirs(torch.tensor([row[:-1]])).logits[0].log_softmax(-1)[range(len(row) - 1), row[1:]]
        assert found == approx(-logp[first - 1 :].numpy(), rel=1e-3, abs=1e-4)


def test_a_run_of_a_study_is_named_after_its_settings_its_data_and_its_sources_alone(tmp_path, data):
    meta, arms = f"{shutil.copytree(data, tmp_path / 'data')}/meta.json", dict(one="--alpha=3.0", same="--alpha=3.0")
    study, sources = (
        ablate.STUDY | dict(arms=arms, data=f"{tmp_path}/data"),
        {script: dict(model="1") for script in ablate.SCRIPTS},
    )

    def folder(arm="one", lr=0.5, seed=1, **changes):
        return ablate.plan_run(study | changes, sources, arm, lr, seed).folder

    first = folder()
    assert first == folder(arm="same") == folder(question="?", seeds=9, reading="", lrs=[1], out="x", name="y")
    size = dict(size=f"{study['size']} --batch_size=7")
    names = {first, folder(lr=0.25), folder(seed=2), folder(**size), folder(arms=dict(one="--alpha=2.0"))}
    whole = read_json(meta)
    # One byte of a shard, whose hash is there, and the vocabulary.
    for part, key in ((whole["sources"]["a.jsonl"]["train"]["shards"][0], "sha256"), (whole, "tokenizer_hash")):
        part[key] = f"0{part[key][1:]}1"
        write_json(meta, whole)
        names.add(folder())
    # The part before the last "-" finds the runs of other sources.
    sources["train"] = dict(model="2")
    names.add(folder())
    assert len(names) == 8 and folder().rpartition("-")[0] in {name.rpartition("-")[0] for name in names - {folder()}}


def test_a_study_keeps_the_threads_of_the_user_and_a_tenth_of_each_rate(tmp_path, monkeypatch, data):
    plan = ablate.plan_run(
        ablate.STUDY | dict(arms=dict(one=""), data=data), dict.fromkeys(ablate.SCRIPTS), "one", 0.5, 1
    )
    assert "--min_lr=0.05" in plan.command
    asked = []

    def fail(command, file, env, folder):
        asked.append(env["OMP_NUM_THREADS"])
        return 1, 0.0

    monkeypatch.setattr(kit, "run_process", fail)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with raises(ValueError, match="ended with code 1"):
        kit.call(f"{tmp_path}/run", f"{tmp_path}/done", "train")
    assert asked == ["7"]
