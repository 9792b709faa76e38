"""convert.py against transformers: each reads what the other writes, and what convert.py cannot read it refuses."""
import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import convert
import tokenizer
from conftest import refused, save_checkpoint, script
from model import Apertus, ApertusConfig
from posttrain.quantised import quantise
from tiny import GOLDEN, ids

FOLDER = os.path.join(GOLDEN, "hf_tiny_a")
SMALL = ApertusConfig(block_size=64, vocab_size=320, init_std=0.1, n_layer=1, n_head=2, n_kv_head=1, n_embd=16,
                      ffn_dim=24)
BYTE = tokenizer.load("byte")
LAYOUT = {"config.json", "generation_config.json", "model.safetensors", convert.LIST}


def theirs(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True)


def flat(model):
    """All parameters in one vector, by name."""
    return torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])


def same(one, other):
    return torch.equal(flat(one), flat(other))


# -----------------------------------------------------------------------------
# there and back


@pytest.mark.parametrize("tied", [False, True])
def test_an_export_is_the_same_model_here_and_for_transformers(tmp_path, tied):
    model = Apertus(replace(SMALL, tie_embeddings=tied, n_layer=2))
    convert.save_hf(model, str(tmp_path), BYTE, shard_bytes=9_000)
    assert sum(file.endswith(".safetensors") for file in os.listdir(tmp_path)) > 2
    back, tok = convert.load_any(str(tmp_path))
    assert back.config == model.config and same(back, model) and tok.hash == BYTE.hash
    idx = ids(2, 40, high=320)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tmp_path)(idx).logits, model(idx)[0], rtol=1e-5, atol=1e-6)
    text = "Grüezi mitenand, 你好! x = f(1)\n"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == [tok.bos, *tok.encode(text)]


def test_in_and_out_again_is_the_published_file(tmp_path):
    convert.save_hf(convert.load_hf(FOLDER), str(tmp_path))
    ours, wanted = (load_file(f"{folder}/model.safetensors") for folder in (tmp_path, FOLDER))
    assert ours.keys() == wanted.keys()
    assert all(torch.equal(ours[key], wanted[key]) for key in wanted if not key.endswith("eps"))
    ours, wanted = (json.load(open(f"{folder}/config.json")) for folder in (tmp_path, FOLDER))
    free = {"transformers_version", "bos_token_id", "eos_token_id", "pad_token_id"}
    assert all(ours.get(key) == value for key, value in wanted.items() if key not in free)


@pytest.mark.parametrize("most, sizes", [
    (12, [[3], [2, 1], [4]]),       # in order, each file as full as it may be: 12 bytes are 3 numbers
    (11, [[3], [2], [1], [4]]),     # a tensor that is larger than a file may be has its own
    (39, [[3, 2, 1], [4]]), (40, [[3, 2, 1, 4]])])
def test_a_file_of_weights_is_no_larger_than_asked(most, sizes):
    files = convert.in_files(((str(n), torch.zeros(n)) for n in (3, 2, 1, 4)), most)
    assert [[len(tensor) for tensor in shard.values()] for shard in files.values()] == sizes


def test_files_in_bf16_load_as_they_are_and_as_fp32(tmp_path):
    convert.save_hf(convert.load_hf(FOLDER), str(tmp_path), dtype="bfloat16")
    assert convert.load_hf(str(tmp_path)).lm_head.weight.dtype == torch.bfloat16
    wide = convert.load_hf(str(tmp_path), dtype=torch.float32)
    assert wide.lm_head.weight.dtype == torch.float32
    torch.testing.assert_close(flat(wide), flat(convert.load_hf(FOLDER)), rtol=2**-8, atol=0)


def test_of_one_file_and_an_index_the_one_file_is_read_as_in_transformers(tmp_path):
    one, other = Apertus(SMALL, seed=0), Apertus(SMALL, seed=1)
    convert.save_hf(one, str(tmp_path / "one"))
    convert.save_hf(other, str(tmp_path / "both"), shard_bytes=6_000)
    shutil.copy(tmp_path / "one" / "model.safetensors", tmp_path / "both")
    both = str(tmp_path / "both")
    assert same(convert.load_hf(both), one)
    assert torch.equal(theirs(both).lm_head.weight, one.lm_head.weight)


def test_rows_that_pad_the_embedding_decode_to_nothing_and_another_tokenizer_is_refused(tmp_path):
    """Up to 1,023 rows more than ids."""
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
    """And both are known by the same hash of the weights. Of the golden folder, and of a run."""
    if tied is not None:
        model = Apertus(replace(SMALL, tie_embeddings=tied, n_embd=32, ffn_dim=48, n_head=4))
        optimizer = torch.optim.SGD(model.parameters())
        save_checkpoint(str(tmp_path / "ckpt"), 3, model, optimizer, dict(config={}))
        (tmp_path / "config.json").write_text(json.dumps(dict(vars(model.config), tokenizer="byte")))

    def load(**how):
        return convert.load_hf(FOLDER, **how) if tied is None else convert.load_run(str(tmp_path), **how)[0]
    read, after = load(base=base), quantise(load(), base).state_dict()
    assert read.state_dict().keys() == after.keys() != load().state_dict().keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in read.state_dict().items())
    assert convert.fingerprint(read) == convert.fingerprint(load())
    assert not any(p.requires_grad for p in read.parameters())


# -----------------------------------------------------------------------------
# refusals


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def pickled(folder):
    torch.save(Evil(), folder / "model.safetensors")


def outside(folder):
    os.remove(folder / "model.safetensors")
    index = dict(weight_map={"lm_head.weight": "../../secret.safetensors"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def constant(name, value):
    def change(folder):
        file = folder / "model.safetensors"
        tensors = load_file(file)
        tensors["model.layers.1.mlp.act_fn." + name] = torch.tensor(value)
        save_file(tensors, file)
    return change


def text(content):
    return lambda folder: (folder / "config.json").write_text(content)


@pytest.mark.parametrize("change, says", [
    (pickled, "not a readable safetensors file"),
    (outside, "outside of its folder"),
    (constant("beta", 0.52), "act_fn.beta is "),
    (constant("eps", 1e-6), "act_fn.eps is "),
    (lambda folder: os.remove(folder / "config.json"), "has no config.json"),
    (text("{"), "config.json is damaged"),
    (text("[1]"), "config.json is damaged"),
    (text('{"a": ' * 50_000), "config.json is damaged"),
    (dict(hidden_act="silu"), "hidden_act='silu'"),
    (dict(num_hidden_layers=2), "no such tensor"),
    (dict(num_hidden_layers=4), "are missing"),
    (dict(intermediate_size=96), r"\[64, 160\] is not what config.json describes"),
    (dict(num_attention_heads=7), "not divisible")])
def test_a_folder_that_is_not_such_a_model_is_refused_in_one_line(tmp_path, monkeypatch, change, says):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hf"
    shutil.copytree(FOLDER, folder)
    if isinstance(change, dict):
        config = json.loads((folder / "config.json").read_text()) | change
        change = text(json.dumps(config))
    change(folder)
    with pytest.raises(ValueError, match=says) as e:
        convert.load_hf(str(folder))
    assert "\n" not in str(e.value) and not os.path.exists("executed")


@pytest.mark.parametrize("line, says", [
    ("--load=out/no-such-run", "no run in 'out/no-such-run'"),
    ("--load=out/no-such-run --save=OUT/mine", "holds config.json, which no export wrote"),
    ("--load=OUT/hf --save=OUT/new --dtype=bf16", "dtype='bf16': an export has float32 or bfloat16"),
    ("--load=nowhere", "is neither a folder here nor the name of a hub repository")])
def test_a_command_that_cannot_be_is_one_line(tmp_path, line, says):
    convert.save_hf(Apertus(SMALL), str(tmp_path / "hf"), BYTE)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    refused(script("convert.py", *line.replace("OUT", str(tmp_path)).split()), says)


# -----------------------------------------------------------------------------
# an export in place of an older one


@pytest.mark.parametrize("file", [
    "config.json", "model-00001-of-00007.safetensors", "pytorch_model.bin", "tokenizer.json", "adapter_config.json"])
def test_a_file_that_no_export_wrote_is_not_replaced(tmp_path, file):
    (tmp_path / file).write_text("of the user")
    with pytest.raises(ValueError, match=f"holds {file}, which no export wrote"):
        convert.save_hf(Apertus(SMALL), str(tmp_path), BYTE)
    assert os.listdir(tmp_path) == [file]
    (tmp_path / convert.LIST).write_text(json.dumps(dict(files=["../precious"])))
    with pytest.raises(ValueError, match="names files outside of its folder"):
        convert.save_hf(Apertus(SMALL), str(tmp_path))


@pytest.mark.parametrize("shards", [(5e9, 5e9), (5e9, 3_000), (3_000, 5e9), (2_000, 4_000)])
def test_an_export_over_the_files_of_its_own_model_leaves_nothing_of_the_old_one(tmp_path, shards):
    """The model's tensors are views of those files: written in place, they would change under it."""
    folder = str(tmp_path / "hf")
    convert.save_hf(Apertus(SMALL, seed=3), folder, BYTE, shard_bytes=shards[0])
    (tmp_path / "hf" / "README.md").write_text("mine")
    model = convert.load_hf(folder)
    convert.save_hf(model, folder, shard_bytes=shards[1])
    for found in (model, convert.load_hf(folder), theirs(folder)):
        assert torch.equal(flat(found), flat(Apertus(SMALL, seed=3)))
    convert.save_hf(model, str(tmp_path / "fresh"), shard_bytes=shards[1])
    assert {*os.listdir(folder)} == {"README.md", *os.listdir(tmp_path / "fresh")}


class Killed(BaseException):
    pass


def export_until(step, model, folder):
    """save_hf, killed before its `step`-th change of the disk. Returns whether it got to its end."""
    left = [step]

    def counted(real):
        def change(*args, **how):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(*args, **how)
        return change
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((convert, "save_file"), (convert, "write_json"), (os, "replace"), (os, "remove")):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            convert.save_hf(model, folder, shard_bytes=3_000)
        except Killed:
            return False
    return True


@pytest.mark.parametrize("over", [True, False])
def test_killed_at_any_moment_the_folder_is_the_old_model_the_new_one_or_none(tmp_path, over):
    """All files have the same names, so that a mixture would load. The next export succeeds."""
    models = dict(old=Apertus(SMALL, seed=0), new=Apertus(SMALL, seed=1))
    old, new = models.values()
    seen, done, step = [], False, 0
    while not done:
        folder = str(tmp_path / str(step))
        if over:
            convert.save_hf(old, folder, shard_bytes=3_000)
        done = export_until(step, new, folder)
        try:
            found = convert.load_hf(folder)
        except ValueError:
            seen.append("none")
        else:
            seen += [name for name, model in models.items() if same(found, model)] or ["a mixture"]
        convert.save_hf(old, folder)
        assert same(convert.load_hf(folder), old) and {*os.listdir(folder)} == LAYOUT
        step += 1
    in_turn = [name for i, name in enumerate(seen) if i == 0 or name != seen[i - 1]]
    assert in_turn == (["old", "none", "new"] if over else ["none", "new"]) and seen.count("none") > 5


def test_a_full_disk_leaves_the_old_export_whole(tmp_path, monkeypatch):
    convert.save_hf(Apertus(SMALL, seed=0), str(tmp_path))

    def full(path, content):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(convert, "write_json", full)
    with pytest.raises(OSError, match="No space left on device.*is untouched"):
        convert.save_hf(Apertus(SMALL, seed=1), str(tmp_path))
    assert same(convert.load_hf(str(tmp_path)), Apertus(SMALL, seed=0)) and {*os.listdir(tmp_path)} == LAYOUT
