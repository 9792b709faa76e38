"""convert.py against transformers: each reads the other's files, and transformers loads a finished run unchanged."""

import contextlib
import itertools
import os
import shutil
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import conftest
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_checkpoint import Marker
from tiny import GOLDEN, ids
from torch.testing import assert_close

import convert
import tokenizer
from engine.files import read_json, read_text, write_json
from engine.runs import settings_of
from model import Apertus, ApertusConfig
from weights import write
from weights.folders import start_of
from weights.hashes import weights_hash
from weights.quantised import quantise_blocks
from weights.stored import read_weights
from weights.trace import trace_modules
from weights.write import LIST, remove_old_weights, write_config, write_final_weights

FOLDER = os.path.join(GOLDEN, "hf_tiny_a")
SMALL = ApertusConfig(
    block_size=64, vocab_size=320, init_std=0.1, n_layer=1, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=24
)
BYTE = tokenizer.load("byte")
TEXT = "Grüezi mitenand, 你好! x = f(1)\n"


def theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True)


def same(*models):
    """Whether two models have the same parameters."""
    return conftest.same(*(dict(model.named_parameters()) for model in models))


@torch.no_grad()
def assert_known_to_transformers(folder, model, tok):
    """transformers computes the same logits and the same ids."""
    idx = ids(2, 40, high=320)
    assert_close(theirs(folder)(idx).logits, model(idx), rtol=1e-5, atol=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"] == [tok.bos, *tok.encode(TEXT)]


# -----------------------------------------------------------------------------
# runs


def test_a_finished_run_loads_in_transformers_as_it_is(lab, tmp_path):
    run = f"{lab}/pretrained"
    model, tok = convert.load_any(run)
    assert_known_to_transformers(run, model, tok)
    assert os.stat(f"{run}/config.json").st_mode == os.stat(f"{run}/model.safetensors").st_mode
    started = Apertus(model.config, seed=1)
    read_weights(started, start_of(run)[2])
    assert same(started, model)
    exported = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("ckpt"))
    assert same(convert.load_any(str(exported))[0], model)


@pytest.mark.parametrize("more", [dict(activation="swiglu"), dict(lora_r=4)], ids=str)
def test_a_variant_is_not_loaded_as_an_apertus(lab, tmp_path, more):
    folder = shutil.copytree(lab / "pretrained", tmp_path / "run")
    settings = settings_of(folder) | more
    remove_old_weights(folder)
    write_config(folder, settings, ApertusConfig.from_settings(settings), BYTE)
    write_final_weights(folder)
    assert not (folder / "model.safetensors").exists()
    assert settings_of(folder) == settings
    with pytest.raises(ValueError, match="model type `nanoapertus`"):
        theirs(folder)


def test_of_an_edited_run_the_checkpoint_is_read_and_a_line_says_so(lab, tmp_path, capsys):
    """sha256sum reads the hashes that the run has written. Without its checkpoints the edited file is the model."""
    run = shutil.copytree(lab / "pretrained", tmp_path / "run")
    subprocess.run(["sha256sum", "-c", "--strict", "model.sha256"], cwd=run, check=True, capture_output=True)
    before, _ = convert.load_any(str(run))
    assert capsys.readouterr().out == ""
    tensors = load_file(run / "model.safetensors")
    tensors["model.norm.weight"][5] += 1
    save_file(tensors, run / "model.safetensors", metadata={"format": "pt"})
    again, _ = convert.load_any(str(run))
    said = capsys.readouterr().out
    assert said.startswith(f"{run}/model.safetensors is not as the run has written it") and f"{run}/ckpt/step-" in said
    assert same(again, before)
    shutil.rmtree(run / "ckpt")
    assert convert.load_any(str(run))[0].model.norm.weight.equal(tensors["model.norm.weight"])
    assert capsys.readouterr().out == ""


# -----------------------------------------------------------------------------
# export and import


@pytest.mark.parametrize("tied", [False, True])
def test_an_export_is_the_same_model_here_and_for_transformers(tmp_path, tied):
    model = Apertus(replace(SMALL, tie_embeddings=tied, n_layer=2, rope_original=64 * tied))
    convert.save_hf(model, str(tmp_path), BYTE, shard_bytes=9_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    back, tok = convert.load_any(str(tmp_path))
    assert back.config == model.config
    assert same(back, model)
    assert tok.hash == BYTE.hash
    assert weights_hash(back) == weights_hash(model.bfloat16())
    assert_known_to_transformers(tmp_path, back, tok)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_has_one_dtype_which_its_config_names(lab, tmp_path, dtype):
    """So transformers and servers load it in the dtype of its file, not at twice its size."""
    conftest.script("convert.py", f"--load={lab}/hf", f"--save={tmp_path}/new", f"--dtype={dtype}")
    stored = load_file(tmp_path / "new" / "model.safetensors")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="auto")
    assert {str(t.dtype) for t in [*stored.values(), *theirs.parameters()]} == {f"torch.{dtype}"}


def test_rows_that_pad_the_embedding_decode_to_nothing_and_another_tokenizer_is_refused(tmp_path):
    for rows in (319, 384, 320 + 1024):
        convert.save_hf(Apertus(replace(SMALL, vocab_size=rows)), f"{tmp_path}/{rows}", BYTE)
    _, tok = convert.load_any(f"{tmp_path}/384")
    assert tok.vocab_size == 384
    assert tok.decode([*tok.encode("a"), 320, 383]) == "a"
    for rows in (319, 1344):
        with pytest.raises(ValueError, match=f"the model has {rows} ids and its tokenizer 320"):
            convert.load_any(f"{tmp_path}/{rows}")


@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_a_base_quantised_as_it_is_read_is_the_one_quantised_afterwards(base):
    """Both also have the hash that earlier runs have stored."""
    read, whole = convert.load_hf(FOLDER, base=base), convert.load_hf(FOLDER)
    assert weights_hash(whole)[:16] == weights_hash(read)[:16] == "6e7e3c65c84cce4c"
    assert_close(read.state_dict(), quantise_blocks(whole, base).state_dict(), rtol=0, atol=0)
    assert not any(p.requires_grad for p in read.parameters())


# -----------------------------------------------------------------------------
# errors


def another_beta(weights):
    save_file(load_file(weights) | {"model.layers.1.mlp.act_fn.beta": torch.tensor(0.52)}, weights)


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda weights: torch.save(Marker(), weights), "not readable as safetensors"),
        (lambda weights: shutil.copy(weights, weights.with_name("model-2.safetensors")), "in part only, or twice"),
        (another_beta, "act_fn.beta is "),
        (dict(num_hidden_layers=2), "12 tensors are missing, or not of the model"),
        (dict(intermediate_size=96), r"is \[160, 64\], and config.json describes \[96, 64\]"),
    ],
)
def test_a_folder_that_is_not_such_a_model_raises_one_line(tmp_path, monkeypatch, change, says):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(FOLDER, tmp_path / "hf")
    if isinstance(change, dict):
        write_json(folder / "config.json", read_json(folder / "config.json") | change)
    else:
        change(folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"^[^\n]*{says}[^\n]*$"):
        convert.load_hf(str(folder))
    assert not os.path.exists("executed")


# -----------------------------------------------------------------------------
# an export that replaces an older one


class Killed(BaseException):
    pass


@pytest.mark.parametrize("error", [Killed(), OSError(28, "No space left on device")], ids=["killed", "disk full"])
def test_stopped_at_any_moment_the_folder_is_the_old_model_or_the_new_one(tmp_path, monkeypatch, error):
    """
    It stops once at each change of the disk. Old and new files have the same names, so a mixture would load.
    test_prepare.py tests the files that kill -9 leaves between two renames.
    """
    old, new = Apertus(SMALL, seed=0), Apertus(SMALL, seed=1)
    folder, seen = str(tmp_path / "hf"), []

    def stopping(real):
        def change(*args, **how):
            if not next(left):
                raise error
            return real(*args, **how)

        return change

    while "new" not in seen:
        convert.save_hf(old, folder, shard_bytes=21_000)
        left = itertools.count(-len(seen))
        with monkeypatch.context() as patch, contextlib.suppress(type(error)):
            for owner, name in ((write, "save_file"), (write, "write_json"), (os, "replace"), (os, "rename")):
                patch.setattr(owner, name, stopping(getattr(owner, name)))
            convert.save_hf(new, folder, shard_bytes=21_000)
        there = convert.load_hf(folder)
        seen.append("old" if same(there, old) else "new")
    assert same(there, new)
    assert len(seen) > 8 and list(dict.fromkeys(seen)) == ["old", "new"]
    convert.save_hf(old, folder)
    assert {*os.listdir(folder)} == {"config.json", "model.safetensors", LIST}
    assert os.listdir(tmp_path) == ["hf"]


def test_a_trace_is_that_of_transformers_modules_and_shows_the_first_that_differs(capsys):
    """Mean and norm of each module's output in transformers, in order of computation; then we change one key norm."""
    model = convert.load_hf(FOLDER)
    tok = SimpleNamespace(bos=1, encode=lambda text: list(range(40, 56)))
    golden = [line.split() for line in read_text(f"{FOLDER}/trace.txt").splitlines()]

    def first_difference():
        trace_modules(model, tok, "")
        lines = capsys.readouterr().out.splitlines()[1:]
        assert len(lines) == len(golden)
        for line, (name, *want) in zip(lines, golden):
            found = line.split()
            assert found[0] == name
            if [*map(float, found[-3:-1])] != pytest.approx([*map(float, want)], rel=1e-4, abs=1e-7):
                return name

    assert not first_difference()
    model.model.layers[1].self_attn.k_norm.weight.data[3] += 1
    assert first_difference() == "model.layers.1.self_attn.k_norm"
