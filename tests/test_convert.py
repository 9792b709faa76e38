"""convert.py against transformers: what it writes, transformers reads; what transformers writes, it reads; the rest it refuses."""
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
import tokenizer
from conftest import ROOT
from model import Apertus, ApertusConfig

GOLDEN = os.path.join(ROOT, "tests", "golden", "hf_tiny_a")
CONFIG = ApertusConfig(block_size=64, vocab_size=320, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=48, init_std=0.1)


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
    model = Apertus(ApertusConfig(**{**vars(CONFIG), "tie_embeddings": tied}))
    tok = tokenizer.load("byte")
    convert.save_hf(model, str(tmp_path), tok)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    idx = torch.randint(64, 320, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(idx).logits, model(idx)[0], rtol=1e-5, atol=1e-6)
    text = "Grüezi mitenand, 你好! x = f(1)\n"
    assert transformers.AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == [tok.bos, *tok.encode(text)]


def test_out_and_in_again_is_bit_exact(tmp_path):
    model = Apertus(CONFIG)
    convert.save_hf(model, str(tmp_path), tokenizer.load("byte"), shard_bytes=30_000)
    assert len([f for f in os.listdir(tmp_path) if f.endswith(".safetensors")]) > 2           # shards and an index
    back, tok = convert.load_any(str(tmp_path))
    assert back.config == CONFIG and all(torch.equal(a, b) for a, b in zip(model.parameters(), back.parameters(), strict=True))
    assert tok.hash == tokenizer.load("byte").hash


def test_in_and_out_again_is_the_published_file(tmp_path):
    convert.save_hf(convert.load_hf(GOLDEN), str(tmp_path))
    a, b = load_file(os.path.join(GOLDEN, "model.safetensors")), load_file(tmp_path / "model.safetensors")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a if not k.endswith("eps"))
    ours, theirs = (json.load(open(os.path.join(d, "config.json"))) for d in (tmp_path, GOLDEN))
    same = theirs.keys() - {"transformers_version", "bos_token_id", "eos_token_id", "pad_token_id"}
    assert {k: ours.get(k) for k in same} == {k: theirs[k] for k in same}


def test_both_spellings_of_rope_are_read(tmp_path):
    rope = json.load(open(os.path.join(GOLDEN, "config.json")))["rope_parameters"]
    theta = rope.pop("rope_theta")
    old = convert.load_hf(edited(tmp_path, rope_parameters=None, rope_theta=theta, rope_scaling=rope))
    assert old.config == convert.load_hf(GOLDEN).config and old.config.rope_theta == 12e6 and old.config.rope_scaling == 8
    plain = convert.load_hf(edited(tmp_path, rope_scaling=None, rope_parameters=dict(rope_type="default", rope_theta=5e5)))
    assert plain.config.rope_scaling == 0 and plain.config.rope_theta == 5e5


@pytest.mark.parametrize("changes, says", [
    (dict(model_type="llama"), "is of a 'llama' model"), (dict(hidden_act="silu"), "hidden_act='silu'"), (dict(attention_bias=True), "attention_bias=True"),
    (dict(sliding_window=4096), "sliding_window=4096"), (dict(qk_norm=False), "qk_norm=False"), (dict(head_dim=32), "head_dim=32"),
    (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=2.0)), "rope_type='yarn'"),
    (dict(quantization_config=dict(bits=4)), "quantization_config"), (dict(num_hidden_layers=2), "no such tensor"), (dict(num_hidden_layers=4), "are missing"),
    (dict(intermediate_size=96), r"\[64, 160\] is not what config.json describes"), (dict(num_attention_heads=7), "not divisible")])
def test_a_config_that_asks_for_something_else_is_refused_by_name(tmp_path, changes, says):
    with pytest.raises(ValueError, match=says) as e:
        convert.load_hf(edited(tmp_path, **changes))
    assert "\n" not in str(e.value)


def test_stray_keys_of_the_released_config_are_accepted(tmp_path):
    convert.load_hf(edited(tmp_path, qk_norm=True, post_norm=False, mlp_bias=False, torch_dtype="bfloat16", use_cache=True))


def test_an_index_that_points_outside_its_folder_is_refused(tmp_path):
    folder = edited(tmp_path)
    os.remove(os.path.join(folder, "model.safetensors"))                                      # or the index is not read, as in transformers
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
        convert.save_hf(Apertus(ApertusConfig(**{**vars(CONFIG), "activation": "swiglu"})), str(tmp_path))


def test_bf16_files_load_as_they_are_and_as_fp32(tmp_path):
    tensors = {k: v.bfloat16() for k, v in load_file(os.path.join(GOLDEN, "model.safetensors")).items()}
    folder = edited(tmp_path)
    save_file(tensors, os.path.join(folder, "model.safetensors"))
    assert convert.load_hf(folder).lm_head.weight.dtype == torch.bfloat16
    model = convert.load_hf(folder, dtype=torch.float32)
    assert model.lm_head.weight.dtype == torch.float32 and model(torch.arange(8)[None])[0].isfinite().all()
