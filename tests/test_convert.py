"""convert.py against transformers: each reads what the other writes; a finished run loads there as it is."""
import json
import os
import shutil
from dataclasses import asdict, replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import convert
import tokenizer
from conftest import refused, save_checkpoint, script
from engine.runs import settings_of
from living import Living
from model import Apertus, ApertusConfig
from posttrain.quantised import quantise
from tiny import GOLDEN, ids
from trained import corpus

FOLDER = os.path.join(GOLDEN, "hf_tiny_a")
SMALL = ApertusConfig(block_size=64, vocab_size=320, init_std=0.1, n_layer=1, n_head=2, n_kv_head=1, n_embd=16,
                      ffn_dim=24)
BYTE = tokenizer.load("byte")
TEXT = "Grüezi mitenand, 你好! x = f(1)\n"


def theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True)


def flat(model):
    """All parameters in one vector, by name."""
    return torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])


def same(one, other):
    return torch.equal(flat(one), flat(other))


@torch.no_grad()
def assert_known_to_transformers(folder, model, tok):
    """The same logits and the same ids there."""
    idx = ids(2, 40, high=320)
    torch.testing.assert_close(theirs(folder)(idx).logits, model(idx)[0], rtol=1e-5, atol=1e-5)
    assert transformers.AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"] == [tok.bos, *tok.encode(TEXT)]


# -----------------------------------------------------------------------------
# runs

@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run as train.py left it before its folder was Hugging Face's."""
    root = tmp_path_factory.mktemp("run")
    settings = "--n_layer=1 --total_samples=16 --warmup_samples=2 --decay_samples=4 --eval_every=0 --last_eval_windows=2"
    done = script("train.py", "configs/tiny.py", *settings.split(), f"--data={corpus(root)}", f"--out={root}/run")
    assert done.returncode == 0, done.stderr
    return str(root / "run")


def described(run, folder, **more):
    """A copy of the run, described and completed with these settings: (folder, settings)."""
    shutil.copytree(run, folder)
    settings = settings_of(run) | more
    for _ in range(2):  # a resumed run describes itself again
        convert.describe(folder, settings, ApertusConfig.of(settings), BYTE)
    convert.complete(folder)
    return folder, settings


def test_a_finished_run_loads_in_transformers_as_it_is(finished, tmp_path):
    folder, settings = described(finished, str(tmp_path / "run"))
    model, tok = convert.load_any(folder)
    assert settings_of(folder) == settings and convert.shape_of(folder) == model.config
    assert same(model, convert.load_any(finished)[0]) and tok.hash == tokenizer.load_for(finished).hash == BYTE.hash
    assert_known_to_transformers(folder, model, tok)
    modes = {os.stat(f"{folder}/{file}").st_mode for file in ("config.json", "model.safetensors", "tokenizer.json")}
    assert len(modes) == 1
    shutil.rmtree(f"{folder}/ckpt")
    assert same(convert.load_any(folder)[0], model)
    started = Apertus(model.config, seed=1)
    convert.fill(started, convert.start_of(folder)[2])
    assert same(started, model)


@pytest.mark.parametrize("more", [dict(activation="swiglu"), dict(ffn="lowrank"), dict(lora_r=4)], ids=str)
def test_a_variant_is_not_loaded_as_an_apertus(finished, tmp_path, more):
    folder, _ = described(finished, str(tmp_path / "run"), **more)
    assert not os.path.exists(f"{folder}/model.safetensors")
    with pytest.raises(ValueError, match="model type `nanoapertus`"):
        theirs(folder)


def test_a_chat_run_ends_at_the_end_of_a_turn(finished, tmp_path):
    """Source: eos_token_id of the published generation_config.json is [2, 68, 72]; the small vocabulary has other ids."""
    folder, _ = described(finished, str(tmp_path / "run"), chat=True)
    ends = [BYTE.id_of(name) for name in ("</s>", "<|assistant_end|>", "<|tools_suffix|>")]
    assert theirs(folder).generation_config.eos_token_id == ends
    there = transformers.AutoTokenizer.from_pretrained(folder)
    assert convert.load_any(folder)[1].eos == there.eos_token_id == ends[1] and BYTE.eos == ends[0]
    assert there.chat_template


# -----------------------------------------------------------------------------
# there and back


@pytest.mark.parametrize("tied", [False, True])
def test_an_export_is_the_same_model_here_and_for_transformers(tmp_path, tied):
    model = Apertus(replace(SMALL, tie_embeddings=tied, n_layer=2))
    convert.save_hf(model, str(tmp_path), BYTE, shard_bytes=9_000)
    assert sum(file.endswith(".safetensors") for file in os.listdir(tmp_path)) > 2
    back, tok = convert.load_any(str(tmp_path))
    assert back.config == model.config and same(back, model) and tok.hash == BYTE.hash
    assert_known_to_transformers(tmp_path, model, tok)


def test_in_and_out_again_is_the_published_file(tmp_path):
    convert.save_hf(convert.load_hf(FOLDER), str(tmp_path))
    ours, wanted = (load_file(f"{folder}/model.safetensors") for folder in (tmp_path, FOLDER))
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[key], wanted[key]) for key in wanted if not key.endswith("eps"))
    ours, wanted = (json.load(open(f"{folder}/config.json")) for folder in (tmp_path, FOLDER))
    free = {"transformers_version", "bos_token_id", "eos_token_id", "pad_token_id"}
    assert all(ours.get(key) == value for key, value in wanted.items() if key not in free)


def test_files_in_bf16_load_as_they_are_and_as_fp32(tmp_path):
    convert.save_hf(convert.load_hf(FOLDER), str(tmp_path), dtype="bfloat16")
    assert convert.load_hf(str(tmp_path)).lm_head.weight.dtype == torch.bfloat16
    wide = convert.load_hf(str(tmp_path), dtype=torch.float32)
    torch.testing.assert_close(flat(wide), flat(convert.load_hf(FOLDER)), rtol=2**-8, atol=0)


def test_loading_holds_the_model_and_one_tensor(tmp_path):
    model = Apertus(replace(SMALL, n_layer=8))
    convert.save_hf(model, str(tmp_path))
    sizes = [p.nbytes for p in model.parameters()]
    with Living() as bytes_of:
        convert.load_hf(str(tmp_path), dtype=torch.float32)
    assert sum(sizes) <= bytes_of.most < sum(sizes) + max(sizes) + 100   # and xIELU's constants


def test_rows_that_pad_the_embedding_decode_to_nothing_and_another_tokenizer_is_refused(tmp_path):
    for rows in (319, 384, 320 + 1024):
        convert.save_hf(Apertus(replace(SMALL, vocab_size=rows)), str(tmp_path), BYTE)
        if rows == 384:
            _, tok = convert.load_any(str(tmp_path))
            assert tok.vocab_size == rows and tok.decode([*tok.encode("a"), 320, 383]) == "a"
            continue
        with pytest.raises(ValueError, match=f"the model has {rows} ids and its tokenizer 320"):
            convert.load_any(str(tmp_path))


@pytest.mark.parametrize("tied", [None, False, True])
@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_a_base_quantised_as_it_is_read_is_the_one_quantised_afterwards(tmp_path, base, tied):
    """And both have the same fingerprint. Of the golden folder, and of a run."""
    folder = FOLDER
    if tied is not None:
        folder = str(tmp_path)
        model = Apertus(replace(SMALL, tie_embeddings=tied, n_embd=32, ffn_dim=48, n_head=4))
        save_checkpoint(f"{folder}/ckpt", 3, model, torch.optim.SGD(model.parameters()), dict(config={}))
        convert.describe(folder, asdict(model.config), model.config, BYTE)
    read, after = convert.load_hf(folder, base=base), quantise(convert.load_hf(folder), base).state_dict()
    assert read.state_dict().keys() == after.keys() != convert.load_hf(folder).state_dict().keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in read.state_dict().items())
    assert convert.fingerprint(read) == convert.fingerprint(convert.load_hf(folder))
    assert not any(p.requires_grad for p in read.parameters())


# -----------------------------------------------------------------------------
# errors


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def constant(name, value):
    def change(folder):
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {f"model.layers.1.mlp.act_fn.{name}": torch.tensor(value)}, folder / "model.safetensors")
    return change


@pytest.mark.parametrize("change, says", [
    (lambda folder: torch.save(Evil(), folder / "model.safetensors"), "not readable as safetensors"),
    (lambda folder: shutil.copy(folder / "model.safetensors", folder / "model-2.safetensors"), "two files have it"),
    (lambda folder: os.remove(folder / "model.safetensors"), "tensors are missing"),
    (constant("beta", 0.52), "act_fn.beta is "),
    (constant("eps", 1e-6), "act_fn.eps is "),
    ("[1]", "config.json is damaged"),
    (dict(hidden_act="silu"), "hidden_act='silu'"),
    (dict(num_hidden_layers=2), "12 tensors are missing, or not of the model"),
    (dict(num_hidden_layers=4), "are missing"),
    (dict(intermediate_size=96), r"is \[160, 64\], and config.json describes \[96, 64\]"),
    (dict(num_attention_heads=7), "not divisible")])
def test_a_folder_that_is_not_such_a_model_raises_one_line(tmp_path, monkeypatch, change, says):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hf"
    shutil.copytree(FOLDER, folder)
    if isinstance(change, dict):
        change = json.dumps(json.loads((folder / "config.json").read_text()) | change)
    if isinstance(change, str):
        (folder / "config.json").write_text(change)
    else:
        change(folder)
    with pytest.raises(ValueError, match=says) as e:
        convert.load_hf(str(folder))
    assert "\n" not in str(e.value) and not os.path.exists("executed")


@pytest.mark.parametrize("line, says", [
    ("--load=out/no-such-run", "no run in 'out/no-such-run'"),
    ("--load=OUT/mine", "OUT/mine has no config.json"),
    ("--load=OUT/hf --save=OUT/mine", "holds weights.bin, which no export wrote"),
    ("--load=OUT/hf --save=OUT/new --dtype=bf16", "dtype='bf16'"),
    ("--load=OUT/hf --save=OUT/hf/config.json", "is there already")])
def test_a_command_that_cannot_be_is_one_line(tmp_path, line, says):
    convert.save_hf(Apertus(SMALL), str(tmp_path / "hf"), BYTE)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "weights.bin").write_text("of the user")
    line, says = (text.replace("OUT", str(tmp_path)) for text in (line, says))
    refused(script("convert.py", *line.split()), says)
    assert os.listdir(tmp_path / "mine") == ["weights.bin"]


# -----------------------------------------------------------------------------
# an export in place of an older one


def test_an_export_leaves_nothing_of_an_older_one(tmp_path):
    folder = str(tmp_path / "hf")
    convert.save_hf(Apertus(SMALL, seed=3), folder, BYTE, shard_bytes=3_000)
    model = convert.load_hf(folder)
    convert.save_hf(model, folder)
    assert same(model, Apertus(SMALL, seed=3)) and same(theirs(folder), model)
    assert {*os.listdir(folder)} == {"config.json", "model.safetensors", convert.LIST} and os.listdir(tmp_path) == ["hf"]


class Killed(BaseException):
    pass


def export_until(step, model, folder, error):
    """save_hf, stopped by an error before its `step`-th change of the disk. Returns whether it got to its end."""
    left = [step]

    def counted(real):
        def change(*args, **how):
            left[0] -= 1
            if left[0] < 0:
                raise error
            return real(*args, **how)
        return change
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((convert, "save_file"), (convert, "write_json"), (os, "replace"), (os, "rename")):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            convert.save_hf(model, folder, BYTE, shard_bytes=3_000)
        except type(error):
            return False
    return True


@pytest.mark.parametrize("error", [Killed(), OSError(28, "No space left on device")], ids=["killed", "disk full"])
def test_stopped_at_any_moment_the_folder_is_the_old_model_the_new_one_or_none(tmp_path, error):
    """All files have the same names, so that a mixture would load. The next export succeeds."""
    models = dict(old=Apertus(SMALL, seed=0), new=Apertus(SMALL, seed=1))
    seen, done, step = [], False, 0
    while not done:
        folder = str(tmp_path / str(step) / "hf")
        convert.save_hf(models["old"], folder, BYTE, shard_bytes=3_000)
        done = export_until(step, models["new"], folder, error)
        seen.append("none")
        if os.path.exists(folder):
            seen[-1] = next(name for name, model in models.items() if same(convert.load_hf(folder), model))
        convert.save_hf(models["old"], folder, BYTE)
        assert same(convert.load_hf(folder), models["old"]) and os.listdir(tmp_path / str(step)) == ["hf"]
        step += 1
    in_turn = [name for i, name in enumerate(seen) if i == 0 or name != seen[i - 1]]
    assert in_turn == ["old", "none", "new"] and len(seen) > 10
