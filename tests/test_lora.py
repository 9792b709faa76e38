"""
weights/lora.py against PEFT: golden values that peft computed, and peft itself reading and writing the files.

tests/golden/lora: a tiny ApertusForCausalLM and three adapters, made by peft 0.21.2 and transformers 5.23.0.
"""

import shutil

import peft
import pytest
import torch
import transformers
from conftest import same
from lab import ADAPTERS, run, tuning
from safetensors.torch import load_file, save_file
from test_sft import losses
from tiny import GOLDEN, small, tensors

import convert
from weights import lora

FOLDER = f"{GOLDEN}/lora"
VALUES = tensors("lora", "io.npz")
IDX = VALUES["idx"]  # (2, 24)


def base():
    return convert.load_hf(f"{FOLDER}/base")


@torch.no_grad()
def logits(model):
    return model(IDX)


def close(ours, theirs, atol=1e-5):
    torch.testing.assert_close(ours.detach().to(theirs.dtype), theirs, rtol=0, atol=atol)


def published(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("case", ["all", "rs", "gauss"])
def test_logits_loss_gradients_and_merged_matrices_are_pefts(case):
    """Targets are full names, suffixes with rsLoRA, a regular expression. Without them the model equals its base."""
    model = base()
    lora.load_adapter(model, f"{FOLDER}/adapter_{case}")
    close(logits(model), VALUES[case])
    loss = model.loss(IDX[:, :-1], IDX[:, 1:])
    loss.backward()
    close(loss, VALUES[f"{case}_loss"], atol=1e-6)
    layers = list(lora.lora_layers(model).values())
    norms = [
        torch.nn.utils.get_total_norm([getattr(layer, part).weight.grad for layer in layers]).item()
        for part in ("lora_A", "lora_B")
    ]
    assert norms == pytest.approx(VALUES[f"{case}_grad_norm"].tolist(), rel=1e-6)
    assert all((p.grad is not None) == (".lora_" in name) for name, p in model.named_parameters())
    with lora.without_lora(model):
        assert logits(model).equal(logits(base()))
    close(logits(model), VALUES[case])
    lora.merge_adapters(model)
    assert not lora.lora_layers(model)
    close(logits(model), VALUES[f"{case}_merged"])


def test_a_new_adapter_is_the_base_exactly_and_starts_like_pefts_by_seed_and_name_alone():
    """PEFT's kaiming_uniform with a = sqrt(5) is uniform in +-1/sqrt(in)."""
    drawn = []
    for on, seed in (lora.MATRICES, 1), (["v_proj", "o_proj"], 1), (lora.MATRICES, 2):
        model = lora.add_lora(base(), dict(r=4, lora_alpha=8, target_modules=on))
        lora.init_lora(model, seed)
        assert logits(model).equal(logits(base()))
        drawn.append({name: layer.lora_A.weight for name, layer in lora.lora_layers(model).items()})
    six, two, other = drawn
    assert (len(six), len(two)) == (12, 4) and same(two, six)
    assert len({A[0, 0].item() for A in [*six.values(), *other.values()]}) == 24
    numbers = torch.cat([A.flatten() * A.shape[1] ** 0.5 for A in six.values()])
    assert numbers.abs().max() <= 1
    assert numbers.std().item() == pytest.approx(3**-0.5, rel=0.03)


NAME = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"


def test_an_adapter_of_peft_on_some_matrices_of_one_layer_has_its_logits(tmp_path):
    """The names of the tensors say which matrices have an adapter."""
    config = peft.LoraConfig(
        r=5,
        lora_alpha=7,
        init_lora_weights=False,
        target_modules=["v_proj", "up_proj"],
        layers_to_transform=[1],
        layers_pattern="layers",
    )
    theirs = peft.get_peft_model(published(f"{FOLDER}/base"), config)
    theirs.save_pretrained(tmp_path)
    model = base()
    lora.load_adapter(model, str(tmp_path))
    assert len(lora.lora_layers(model)) == 2
    close(logits(model), theirs(IDX).logits)


@pytest.mark.parametrize(
    "changed, says",
    [
        ({NAME: torch.ones(4, 160)}, "has shape .4, 160. there and .8, 160. in"),
        ({NAME: None}, f"{NAME} has shape None"),
    ],
)
def test_the_adapter_of_another_model_is_an_error_that_names_the_tensor(tmp_path, changed, says):
    """refusals.txt has the settings that would change a logit."""
    folder = shutil.copytree(f"{FOLDER}/adapter_all", tmp_path / "adapter")
    file = folder / "adapter_model.safetensors"
    whole = load_file(file) | changed
    save_file({name: tensor for name, tensor in whole.items() if tensor is not None}, file)
    with pytest.raises(ValueError, match=says):
        lora.load_adapter(base(), str(folder))


# -----------------------------------------------------------------------------
# runs of posttrain/sft.py


def answers(name, **how):
    return logits(convert.load_any(str(name), **how)[0])


def test_a_run_learns_and_its_folder_adapter_merged_model_and_peft_agree(lab, tmp_path):
    """Up to fp32 rounding: W x + s B A x and (W + s B A) x round differently."""
    adapted = lab / "adapted"
    assert sum(losses(adapted)[-3:]) < 0.95 * sum(losses(adapted)[:3])
    want = answers(adapted)
    assert answers(adapted / "adapter").equal(want)
    assert not torch.allclose(answers(lab / "hf"), want, atol=1e-2)
    close(peft.PeftModel.from_pretrained(published(lab / "hf"), adapted / "adapter")(IDX).logits, want)
    run("convert.py", f"--load={adapted}", f"--save={tmp_path / 'hf'}", "--merge")
    close(answers(tmp_path / "hf"), want)


def test_a_run_on_an_int8_base_learns_and_is_loaded_in_any_dtype(lab, tmp_path):
    """The base is recognised by its values, read as bf16 or fp32."""
    run(*tuning(lab, tmp_path / "run", *ADAPTERS, "--base=int8", "--recompute=full"))
    assert losses(tmp_path / "run") == pytest.approx(losses(lab / "adapted"), rel=0.01)
    for dtype in (None, torch.bfloat16):
        assert answers(tmp_path / "run", dtype=dtype).equal(answers(tmp_path / "run" / "adapter", dtype=dtype))


def test_an_adapter_of_other_weights_is_an_error(lab, tmp_path):
    adapted = shutil.copytree(lab / "adapted", tmp_path / "run")
    for path in (adapted / "config.json", adapted / "adapter" / "adapter_config.json"):
        path.write_text(path.read_text().replace(f"{lab}/hf", f"{lab}/sft"))
        with pytest.raises(ValueError, match="was trained on other weights"):
            convert.load_any(str(path.parent))


def test_a_single_other_value_of_the_start_model_is_an_error(lab, tmp_path):
    """It is the last of a matrix, and differs by an eighth of itself."""
    start = shutil.copytree(lab / "hf", tmp_path / "start")
    adapter = shutil.copytree(lab / "adapted" / "adapter", tmp_path / "adapter")
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace(f"{lab}/hf", str(start)))
    answers(adapter)
    file = start / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.mlp.up_proj.weight"][-1, -1] *= 1.125
    save_file(weights, file, metadata={"format": "pt"})
    for how in (dict(), dict(base="int8")):
        with pytest.raises(ValueError, match="was trained on other weights"):
            answers(adapter, **how)


def test_an_adapter_without_a_hash_of_its_start_model_is_loaded_and_a_line_says_so(lab, tmp_path, capsys):
    """PEFT writes none. Earlier versions wrote one under another key, of a part of the weights."""
    adapter = shutil.copytree(lab / "adapted" / "adapter", tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file), file, metadata={"format": "pt", "base": "0123456789abcdef"})
    assert answers(adapter).equal(answers(lab / "adapted" / "adapter"))
    assert capsys.readouterr().out.startswith(f"{file} has no hash of all weights of {lab}/hf")


def test_the_first_values_are_drawn_on_the_cpu_whatever_device_a_model_is_built_on():
    how = dict(r=4, lora_alpha=8, target_modules=lora.MATRICES)
    model, again = (lora.add_lora(small(0, vocab_size=320), how) for _ in range(2))
    lora.init_lora(model, 3)
    with torch.device("meta"):
        lora.init_lora(again, 3)
    assert same(dict(model.named_parameters()), dict(again.named_parameters()))


@pytest.mark.parametrize("older", [dict(lora_rs=True), dict(lora_on="q_proj,v_proj")])
def test_a_run_with_adapters_of_another_scale_or_on_some_matrices_is_an_error(older):
    """Older versions had such runs. Their folder adapter/ is in PEFT's format, which says both."""
    with pytest.raises(ValueError, match="load its folder adapter/"):
        lora.lora_config(dict(lora_r=4, lora_alpha=8) | older)
