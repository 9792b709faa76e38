"""convert.py against transformers: each reads what the other writes, and what convert.py cannot read it refuses."""
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
import tokenizer
from conftest import ROOT, script
from engine import checkpoint
from model import Apertus, ApertusConfig

GOLDEN = os.path.join(ROOT, "tests", "golden", "hf_tiny_a")


BASE = ApertusConfig(block_size=64, vocab_size=320, init_std=0.1)
CONFIG = replace(BASE, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=48)
SMALL = replace(BASE, n_layer=1, n_head=2, n_kv_head=1, n_embd=16, ffn_dim=24)


def edited(tmp_path, **changes):
    """The golden folder with a changed config.json (None removes a key)."""
    folder = tmp_path / "hf"
    shutil.copytree(GOLDEN, folder, dirs_exist_ok=True)
    config = json.load(open(folder / "config.json"))
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return str(folder)


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_our_export_and_gives_our_logits_and_ids(tmp_path, tied):
    transformers = pytest.importorskip("transformers")
    model = Apertus(replace(CONFIG, tie_embeddings=tied))
    tok = tokenizer.load("byte")
    convert.save_hf(model, str(tmp_path), tok)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    idx = torch.randint(64, 320, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(idx).logits, model(idx)[0], rtol=1e-5, atol=1e-6)
    text = "Grüezi mitenand, 你好! x = f(1)\n"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == [tok.bos, *tok.encode(text)]


@pytest.mark.parametrize("tied", [False, True])
def test_out_and_in_again_is_bit_exact(tmp_path, tied):
    config = replace(CONFIG, tie_embeddings=tied)
    model = Apertus(config)
    convert.save_hf(model, str(tmp_path), tokenizer.load("byte"), shard_bytes=30_000)
    shards = [file for file in os.listdir(tmp_path) if file.endswith(".safetensors")]
    assert len(shards) > 2
    back, tok = convert.load_any(str(tmp_path))
    assert back.config == config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), back.parameters(), strict=True))
    assert torch.equal(model(torch.arange(9)[None])[0], back(torch.arange(9)[None])[0])
    assert tok.hash == tokenizer.load("byte").hash


@pytest.mark.parametrize("most, sizes", [
    (12, [[3], [2, 1], [4]]),       # in order, each file as full as it may be: 12 bytes are 3 numbers
    (11, [[3], [2], [1], [4]]),     # a tensor that is larger than a file may be has its own
    (39, [[3, 2, 1], [4]]),
    (40, [[3, 2, 1, 4]])])
def test_a_file_of_weights_is_no_larger_than_asked(most, sizes):
    tensors = [(str(n), torch.zeros(n)) for n in (3, 2, 1, 4)]
    files = convert.in_files(iter(tensors), most)
    assert [[len(tensor) for tensor in shard.values()] for shard in files.values()] == sizes


def test_in_and_out_again_is_the_published_file(tmp_path):
    convert.save_hf(convert.load_hf(GOLDEN), str(tmp_path))
    ours, theirs = (load_file(f"{folder}/model.safetensors") for folder in (tmp_path, GOLDEN))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs if not k.endswith("eps"))
    ours, theirs = (json.load(open(f"{folder}/config.json")) for folder in (tmp_path, GOLDEN))
    same = theirs.keys() - {"transformers_version", "bos_token_id", "eos_token_id", "pad_token_id"}
    assert {k: ours.get(k) for k in same} == {k: theirs[k] for k in same}


def test_both_spellings_of_rope_are_read(tmp_path):
    rope = json.load(open(os.path.join(GOLDEN, "config.json")))["rope_parameters"]
    theta = rope.pop("rope_theta")
    old = convert.load_hf(edited(tmp_path, rope_parameters=None, rope_theta=theta, rope_scaling=rope)).config
    assert old == convert.load_hf(GOLDEN).config
    assert (old.rope_theta, old.rope_scaling) == (12e6, 8)
    new = dict(rope_type="default", rope_theta=5e5)
    plain = convert.load_hf(edited(tmp_path, rope_scaling=None, rope_parameters=new)).config
    assert (plain.rope_theta, plain.rope_scaling) == (5e5, 0)


@pytest.mark.parametrize("changes, says", [
    (dict(model_type="llama"), "is of a 'llama' model"),
    (dict(hidden_act="silu"), "hidden_act='silu'"),
    (dict(attention_bias=True), "attention_bias=True"),
    (dict(sliding_window=4096), "sliding_window=4096"),
    (dict(qk_norm=False), "qk_norm=False"),
    (dict(head_dim=32), "head_dim=32"),
    (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=2.0)), "rope_type='yarn'"),
    (dict(quantization_config=dict(bits=4)), "quantization_config"),
    (dict(num_hidden_layers=2), "no such tensor"),
    (dict(num_hidden_layers=4), "are missing"),
    (dict(intermediate_size=96), r"\[64, 160\] is not what config.json describes"),
    (dict(num_attention_heads=7), "not divisible")])
def test_a_config_that_asks_for_something_else_is_refused_by_name(tmp_path, changes, says):
    with pytest.raises(ValueError, match=says) as e:
        convert.load_hf(edited(tmp_path, **changes))
    assert "\n" not in str(e.value)


def test_stray_keys_of_the_released_config_are_accepted(tmp_path):
    stray = dict(qk_norm=True, post_norm=False, mlp_bias=False, torch_dtype="bfloat16", use_cache=True)
    # Other configurations of transformers have these keys; with these values they ask for nothing.
    stray.update(pruned_heads={}, pretraining_tp=1, partial_rotary_factor=1.0)
    convert.load_hf(edited(tmp_path, **stray))


def test_an_index_that_points_outside_its_folder_is_refused(tmp_path):
    folder = edited(tmp_path)
    # As in transformers, the index is read only where the one file is not there.
    os.remove(os.path.join(folder, "model.safetensors"))
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as f:
        json.dump(dict(weight_map={"lm_head.weight": "../../secret.safetensors"}), f)
    with pytest.raises(ValueError, match="outside of its folder"):
        convert.load_hf(folder)


def test_a_pickle_under_a_safetensors_name_is_refused_and_does_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'executed'}",)
    folder = edited(tmp_path)
    torch.save(Evil(), os.path.join(folder, "model.safetensors"))
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        convert.load_hf(folder)
    assert not (tmp_path / "executed").exists()


def test_what_transformers_cannot_express_is_not_exported(tmp_path):
    with pytest.raises(ValueError, match="activation='swiglu'"):
        convert.save_hf(Apertus(replace(CONFIG, activation="swiglu")), str(tmp_path))


def test_bf16_files_load_as_they_are_and_as_fp32(tmp_path):
    tensors = {k: v.bfloat16() for k, v in load_file(os.path.join(GOLDEN, "model.safetensors")).items()}
    folder = edited(tmp_path)
    save_file(tensors, os.path.join(folder, "model.safetensors"))
    assert convert.load_hf(folder).lm_head.weight.dtype == torch.bfloat16
    model = convert.load_hf(folder, dtype=torch.float32)
    assert model.lm_head.weight.dtype == torch.float32 and model(torch.arange(8)[None])[0].isfinite().all()


# --- an export in place of an older one -----------------------------------------------------------------------------


def ours(folder):
    return convert.load_hf(str(folder))


def theirs(folder):
    import transformers
    return transformers.AutoModelForCausalLM.from_pretrained(str(folder), local_files_only=True)


def flat(model):
    """All parameters in one vector, by name."""
    return torch.cat([p.detach().flatten() for _, p in sorted(model.named_parameters())])


@pytest.mark.parametrize("shards", [(5e9, 5e9), (5e9, 9_000), (9_000, 5e9), (4_000, 9_000), (9_000, 4_000)])
def test_an_export_over_an_export_is_the_new_one_for_us_and_for_transformers(tmp_path, shards):
    pytest.importorskip("transformers")
    tok = tokenizer.load("byte")
    for seed, size in enumerate(shards):
        model = Apertus(SMALL, seed=seed)
        convert.save_hf(model, str(tmp_path / "x"), tok if seed == 0 else None, shard_bytes=size)
        if seed == 0:
            (tmp_path / "x" / "README.md").write_text("mine")
    for read in (ours, theirs):
        assert torch.equal(flat(read(tmp_path / "x")), flat(model))
    convert.save_hf(model, str(tmp_path / "fresh"), shard_bytes=shards[1])
    # Nothing of the old one is left, its tokenizer neither.
    assert set(os.listdir(tmp_path / "x")) - {"README.md"} == set(os.listdir(tmp_path / "fresh"))
    assert (tmp_path / "x" / convert.LIST).read_text() == (tmp_path / "fresh" / convert.LIST).read_text()
    assert (tmp_path / "x" / "README.md").read_text() == "mine"


class Killed(BaseException):
    pass


def export_until(monkeypatch, step, *args, **how):
    """save_hf, killed before its `step`-th change of the disk. Returns whether it got to its end."""
    with monkeypatch.context() as patch:
        left = [step]
        def counted(real):
            def change(*args, **kw):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return real(*args, **kw)
            return change
        for owner, name in ((convert, "save_file"), (convert, "write_json"), (os, "replace"), (os, "remove")):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            convert.save_hf(*args, **how)
        except Killed:
            return False
    return True


LAYOUT = ["config.json", "generation_config.json", "model.safetensors"]


def test_killed_at_any_moment_the_folder_is_the_old_model_the_new_one_or_none(tmp_path, monkeypatch):
    """
    Both exports have the same file names, so that a mixture would load. transformers says the same, and the next
    export succeeds.
    """
    pytest.importorskip("transformers")
    models = dict(old=Apertus(SMALL, seed=0), new=Apertus(SMALL, seed=1))
    convert.save_hf(models["old"], str(tmp_path / "start"), shard_bytes=12_000)
    seen, done, step = [], False, 0
    while not done:
        folder = tmp_path / str(step)
        shutil.copytree(tmp_path / "start", folder)
        done = export_until(monkeypatch, step, models["new"], str(folder), shard_bytes=12_000)
        try:
            found = flat(ours(folder))
        except ValueError:
            if "none" not in seen:
                with pytest.raises((OSError, ValueError)):
                    theirs(folder)
            seen.append("none")
        else:
            assert torch.equal(flat(theirs(folder)), found)
            seen += [name for name, model in models.items() if torch.equal(found, flat(model))] or ["a mixture"]
        convert.save_hf(models["old"], str(folder))
        assert torch.equal(flat(ours(folder)), flat(models["old"]))
        assert {convert.LIST, *LAYOUT} == set(os.listdir(folder))
        step += 1
    assert [s for i, s in enumerate(seen) if s != seen[i - 1]] == ["old", "none", "new"]
    assert seen.count("none") > 5


def test_a_first_export_that_was_killed_can_be_made_again(tmp_path, monkeypatch):
    """What it left behind counts as ours at every moment."""
    step, done = 0, False
    while not done:
        folder = str(tmp_path / str(step))
        done = export_until(monkeypatch, step, Apertus(SMALL), folder, shard_bytes=12_000)
        convert.save_hf(Apertus(SMALL), folder)
        assert {convert.LIST, *LAYOUT} == set(os.listdir(folder))
        step += 1
    assert step > 10


def test_a_full_disk_leaves_the_old_export_whole(tmp_path, monkeypatch):
    old = Apertus(SMALL, seed=0)
    convert.save_hf(old, str(tmp_path))
    before = {f: (tmp_path / f).read_bytes() for f in LAYOUT}

    def full(path, content, write=convert.write_json):
        if path.endswith("config.json.tmp"):
            raise OSError(28, "No space left on device")
        write(path, content)
    monkeypatch.setattr(convert, "write_json", full)
    with pytest.raises(OSError, match="No space left on device.*is untouched") as e:
        convert.save_hf(Apertus(SMALL, seed=1), str(tmp_path))
    assert "\n" not in str(e.value) and before == {f: (tmp_path / f).read_bytes() for f in LAYOUT}
    assert not [f for f in os.listdir(tmp_path) if f.endswith(".tmp")]


@pytest.mark.parametrize("file", [
    "config.json", "model.safetensors", "model-00001-of-00007.safetensors", "chat_template.jinja",
    "pytorch_model.bin", "tokenizer.json", "model.safetensors.index.json", "adapter_config.json"])
def test_what_no_export_wrote_is_not_replaced_and_not_left_to_mix(tmp_path, file):
    (tmp_path / file).write_text("of the user")
    with pytest.raises(ValueError, match=f"holds {file}, which no export wrote"):
        convert.save_hf(Apertus(SMALL), str(tmp_path), tokenizer.load("byte"))
    assert os.listdir(tmp_path) == [file] and (tmp_path / file).read_text() == "of the user"


def test_a_list_that_points_outside_its_folder_is_refused(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "precious").write_text("keep me")
    (tmp_path / "x" / convert.LIST).write_text(json.dumps(dict(files=["../precious"])))
    with pytest.raises(ValueError, match="names files outside of its folder"):
        convert.save_hf(Apertus(SMALL), str(tmp_path / "x"))
    assert (tmp_path / "precious").exists()


def test_a_model_is_saved_over_the_files_that_it_was_loaded_from(tmp_path):
    """Its tensors are views of those files: written in place, they would change under it."""
    convert.save_hf(Apertus(SMALL, seed=3), str(tmp_path))
    model = convert.load_hf(str(tmp_path))
    want = {n: p.clone() for n, p in model.named_parameters()}
    convert.save_hf(model, str(tmp_path), shard_bytes=6_000)
    back = convert.load_hf(str(tmp_path))
    assert all(torch.equal(p, want[n]) for n, p in [*model.named_parameters(), *back.named_parameters()])


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": ' * 50_000])
def test_a_damaged_config_says_so_in_one_line(tmp_path, content):
    folder = edited(tmp_path)
    with open(os.path.join(folder, "config.json"), "w") as f:
        f.write(content)
    with pytest.raises(ValueError, match="config.json is damaged") as e:
        convert.load_hf(folder)
    assert "\n" not in str(e.value)


def test_of_one_file_and_an_index_the_one_file_is_read_as_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    a, b = Apertus(SMALL, seed=0), Apertus(SMALL, seed=1)
    convert.save_hf(a, str(tmp_path / "a"))
    convert.save_hf(b, str(tmp_path / "b"), shard_bytes=6_000)
    shutil.copytree(tmp_path / "b", tmp_path / "both")
    shutil.copy(tmp_path / "a" / "model.safetensors", tmp_path / "both")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "both")
    assert torch.equal(convert.load_hf(str(tmp_path / "both")).lm_head.weight, a.lm_head.weight)
    assert torch.equal(theirs.lm_head.weight, a.lm_head.weight)


def test_xielu_constants_of_other_precisions_are_the_same_and_other_ones_are_refused(tmp_path):
    folder = edited(tmp_path)
    tensors = load_file(os.path.join(GOLDEN, "model.safetensors"))
    for dtype in (torch.float16, torch.bfloat16):
        save_file({k: v.to(dtype) for k, v in tensors.items()}, os.path.join(folder, "model.safetensors"))
        convert.load_hf(folder)
    for name, value in (("beta", 0.52), ("eps", -1e-5), ("eps", 1e-6)):
        changed = {k: torch.tensor(value) if k.endswith(f"act_fn.{name}") else v for k, v in tensors.items()}
        save_file(changed, os.path.join(folder, "model.safetensors"))
        with pytest.raises(ValueError, match=f"act_fn.{name} is "):
            convert.load_hf(folder)


def saved_with_rows(folder, rows):
    """A model whose embedding has so many rows, saved with the 320 ids of tokenizer 'byte'."""
    convert.save_hf(Apertus(replace(SMALL, vocab_size=rows)), str(folder), tokenizer.load("byte"))
    return str(folder)


def test_padding_rows_decode_to_nothing(tmp_path):
    _, tok = convert.load_any(saved_with_rows(tmp_path, 384))
    assert tok.vocab_size == 384 and tok.hash == tokenizer.load("byte").hash
    assert tok.decode([*tok.encode("a"), 320, 383, *tok.encode("b")]) == "ab"
    with pytest.raises(ValueError, match="0 to 383"):
        tok.decode([384])


def test_a_foreign_tokenizer_is_refused(tmp_path):
    """An id without a row, or 1,024 rows without an id."""
    for rows in (319 + 1025, 319):
        folder = saved_with_rows(tmp_path / str(rows), rows)
        says = f"the model has {rows} ids and its tokenizer 320: they do not belong together"
        with pytest.raises(ValueError, match=says):
            convert.load_any(folder)


def test_convert_refuses_a_run_folder_before_it_reads_a_model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done = script("convert.py", "--load=out/no-such-run", f"--save={tmp_path}")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "holds config.json, which no export wrote" in done.stderr


def test_convert_refuses_a_dtype_that_no_export_has(tmp_path):
    convert.save_hf(Apertus(SMALL), str(tmp_path / "x"), tokenizer.load("byte"))
    done = script("convert.py", f"--load={tmp_path / 'x'}", f"--save={tmp_path / 'y'}", "--dtype=bf16")
    assert done.returncode == 2
    assert done.stderr == "convert.py: dtype='bf16': an export has float32 or bfloat16\n"


# --- memory ---------------------------------------------------------------------------------------------------------

# Peaks of resident memory, in MB, over what the process had before and what it holds afterwards. Each is taken in a
# fork, whose peak begins at what its parent has.
PEAKS = """
import json, os, sys
import torch, convert
from posttrain import quantised

def status(key):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(key)) / 1e3

def over(made, held=True):
    read, write = os.pipe()
    if os.fork():
        os.wait()
        return float(os.read(read, 100))
    before = status("VmRSS")
    model = made()
    holds = sum(t.nbytes for t in [*model.parameters(), *model.buffers()]) / 1e6 if held else 0
    os.write(write, str(status("VmHWM") - before - holds).encode())
    os._exit(0)

folder = sys.argv[1]
found = dict(fp32=over(lambda: convert.load_hf(folder, dtype=torch.float32)))
for base in ("int8", "nf4"):
    found[base] = over(lambda: convert.load_hf(folder, base=base))
model = convert.load_hf(folder, dtype=torch.float32)
found["export"] = over(lambda: convert.save_hf(model, folder + "/out", dtype="bfloat16", shard_bytes=10e6), held=False)
print(json.dumps(found))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="resident memory is read from Linux' /proc")
def test_loading_holds_the_model_and_one_tensor_and_an_export_one_file(tmp_path):
    """
    A file of 73 MB in bf16: fp32 masters, 8 and 4 bits, each with less than 60 MB beside what they end as. A second
    copy, be it pages of the file, would be 73. malloc gives back at once what it is told to, so that no hole counts.
    """
    config = replace(CONFIG, n_layer=12, n_head=8, n_kv_head=4, n_embd=512, ffn_dim=2048, vocab_size=2048)
    with torch.device("meta"):
        model = Apertus(config)
    for p in model.to_empty(device="cpu").parameters():
        p.data.fill_(0.01)
    convert.save_hf(model, str(tmp_path), dtype="bfloat16")
    assert os.path.getsize(tmp_path / "model.safetensors") > 73e6
    env = dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536", OMP_NUM_THREADS="1", PYTHONPATH=ROOT)
    done = subprocess.run([sys.executable, "-c", PEAKS, str(tmp_path)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == {"fp32", "int8", "nf4", "export"} and max(found.values()) < 60, found


def run_of(folder, model):
    """A run folder that holds the model, its vocabulary the bytes."""
    checkpoint.save(str(folder / "ckpt"), 3, model, SimpleNamespace(state={}), dict(config={}))
    (folder / "config.json").write_text(json.dumps(dict(vars(model.config), tokenizer="byte")))
    return str(folder)


@pytest.mark.parametrize("how", [dict(base="int8"), dict(base="nf4"), dict(dtype=torch.bfloat16)], ids=str)
def test_a_run_is_loaded_matrix_by_matrix(tmp_path, how):
    """
    The bytes that torch has alive, counted at each of its operations: over what the model ends as, at most three copies
    of its largest matrix, as DCP has them and as a block is quantised. All of it in fp32 would be 24 of them.
    """
    from living import Living
    model = Apertus(replace(CONFIG, n_layer=12, n_embd=64, ffn_dim=256))
    run = run_of(tmp_path, model)
    with Living() as alive:
        read, _ = convert.load_run(run, **how)
    holds = sum(t.nbytes for t in {*read.parameters(), *read.buffers()})
    largest = max(p.nbytes for p in model.parameters())
    assert sum(p.nbytes for p in model.parameters()) > 24 * largest
    assert holds <= alive.most < holds + 4 * largest


@pytest.mark.parametrize("tied", [None, False, True])
def test_a_base_quantised_as_it_is_read_is_the_one_quantised_afterwards(tmp_path, tied):
    """
    The same bits, and the same hash of the weights that both were made of, by which adapters know their base. Of the
    golden folder, and of a run with head and embedding apart or in one.
    """
    from posttrain.quantised import quantise

    def load(**how):
        return convert.load_hf(GOLDEN, **how) if tied is None else convert.load_run(run, **how)[0]
    if tied is not None:
        run = run_of(tmp_path, Apertus(replace(CONFIG, tie_embeddings=tied), 4))
    dense = load()
    for base in ("int8", "nf4"):
        read = load(base=base)
        after = quantise(load(), base)
        assert read.state_dict().keys() == after.state_dict().keys() != dense.state_dict().keys()
        assert all(torch.equal(t, after.state_dict()[name]) for name, t in read.state_dict().items())
        assert checkpoint.fingerprint(read) == checkpoint.fingerprint(dense) and read.in_bits == after.in_bits
        assert not any(p.requires_grad for p in read.parameters())
