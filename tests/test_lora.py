"""
posttrain/lora.py against real PEFT: golden values that peft computed, and peft itself reading and writing the files.

tests/golden/lora: a tiny ApertusForCausalLM and three adapters, made by peft 0.21.2 and transformers 5.23.0.
"""

import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from conftest import ROOT, refused, same, script
from model import Apertus, ApertusConfig
from posttrain import lora
from posttrain import start as begin
from test_sft import (
    TINY,
    TOK,
    arguments,
    cut_back,
    losses,
    start,
    tune,
)  # noqa: F401  start is a fixture

GOLDEN = os.path.join(ROOT, "tests", "golden", "lora")
VALUES = dict(np.load(os.path.join(GOLDEN, "io.npz")))
IDX = torch.from_numpy(VALUES["idx"])  # (2, 24)
# all-linear by full names; rsLoRA by suffixes; a regular expression
CASES = ("all", "rs", "gauss")


def base():
    return convert.load_hf(os.path.join(GOLDEN, "base"))


def with_adapter(case):
    model = base()
    lora.load(model, os.path.join(GOLDEN, f"adapter_{case}"))
    return model


@torch.no_grad()
def logits(model):
    return model(IDX)[0]


def close(ours, name, atol=1e-5):
    theirs = torch.from_numpy(np.asarray(VALUES[name]))
    torch.testing.assert_close(ours.detach().to(theirs.dtype), theirs, rtol=0, atol=atol)


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_gradients_and_merged_matrices_are_pefts(case):
    """And without its adapter a model is its base, bit for bit, until an error has passed."""
    model = with_adapter(case)
    close(logits(model), case)
    _, loss = model(IDX[:, :-1], IDX[:, 1:])
    loss.backward()
    close(loss, f"{case}_loss", atol=1e-6)
    layers = list(lora.adapted(model).values())
    for part, theirs in zip(("lora_A", "lora_B"), VALUES[f"{case}_grad_norm"]):
        norm = torch.nn.utils.get_total_norm(
            [getattr(layer, part).weight.grad for layer in layers]
        )
        assert norm.item() == pytest.approx(theirs, rel=1e-6)
    close(layers[0].lora_A.weight.grad, f"{case}_grad_first_A", atol=1e-6)
    assert all(
        (p.grad is not None) == (".lora_" in name) for name, p in model.named_parameters()
    )
    with pytest.raises(KeyError), lora.off(model):
        assert logits(model).equal(logits(base()))
        raise KeyError
    close(logits(model), case)
    assert lora.merge(model) == pytest.approx(1.0, abs=1e-6)
    first = "o_proj" if case == "gauss" else "q_proj"
    assert getattr(model.model.layers[0].self_attn, first).weight.equal(
        torch.from_numpy(VALUES[f"{case}_merged_q0"])
    )
    close(logits(model), f"{case}_merged")
    assert not lora.adapted(model)


def test_a_new_adapter_is_the_base_exactly_and_begins_as_pefts_by_seed_and_name_alone():
    """kaiming_uniform with a = sqrt(5), PEFT's choice, is uniform in +-1/sqrt(in)."""

    def drawn(on, seed):
        model = lora.adapt(base(), lora.settings_of(4, 8, on), seed)
        assert logits(model).equal(logits(base()))
        return {name: layer.lora_A.weight for name, layer in lora.adapted(model).items()}

    six, two, other = drawn("all", 1), drawn("v_proj,o_proj", 1), drawn("all", 2)
    assert (len(six), len(two)) == (12, 4) and same(two, six)
    numbers = [A.flatten() * A.shape[1] ** 0.5 for A in six.values()]
    assert len({A[0].item() for A in [*numbers, *(A.flatten() for A in other.values())]}) == 24
    numbers = torch.cat(numbers)
    assert numbers.abs().max() <= 1 and numbers.std().item() == pytest.approx(3**-0.5, rel=0.03)


def test_what_peft_saves_we_load_with_its_logits(tmp_path):
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    settings = dict(
        r=5,
        lora_alpha=7,
        target_modules="all-linear",
        exclude_modules=["layers.1.self_attn.v_proj"],
    )
    config = peft.LoraConfig(**settings, init_lora_weights=False, task_type="CAUSAL_LM")
    published = transformers.AutoModelForCausalLM.from_pretrained(
        os.path.join(GOLDEN, "base"), dtype=torch.float32
    )
    theirs = peft.get_peft_model(published.eval(), config)
    theirs.save_pretrained(tmp_path)
    model = base()
    lora.load(model, str(tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(logits(model), theirs(IDX).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "key, value",
    [
        ("use_dora", True),
        ("bias", "all"),
        ("rank_pattern", {"q_proj": 4}),
        ("layers_to_transform", [0]),
        ("modules_to_save", ["lm_head"]),
        ("init_lora_weights", "pissa_niter_4"),
        ("peft_type", "IA3"),
        ("a_key_of_the_future", 1),
        ("r", 4),
    ],
)
def test_a_setting_that_changes_a_logit_is_refused_by_name(tmp_path, key, value):
    """Another r does not fit the file's tensors."""
    folder = tmp_path / "adapter"
    shutil.copytree(os.path.join(GOLDEN, "adapter_all"), folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(
        ValueError, match="it is an adapter of another model" if key == "r" else key
    ):
        lora.load(base(), str(folder))


def test_an_adapter_of_another_model_is_refused_by_its_first_tensor(tmp_path):
    shutil.copytree(os.path.join(GOLDEN, "adapter_all"), tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = min(tensors)
    tensor = tensors.pop(name)
    for changed, says in (
        (tensors, f"lacks {name}"),
        (tensors | {name: tensor, "x": tensor.clone()}, "this model has no, x"),
    ):
        save_file(changed, path)
        with pytest.raises(ValueError, match=says):
            lora.load(base(), str(tmp_path / "adapter"))


@pytest.mark.parametrize(
    "r, on, says",
    [
        (0, "all", "lora_r=0"),
        (4, "q_proj,lm_head", "all or some of q_proj"),
        (33, "k_proj", "lora_r=33 is larger than model.layers.0.self_attn.k_proj, 32 x 64"),
        (4, "gate_proj", "names no matrix"),
    ],
)
def test_a_rank_or_a_matrix_that_cannot_be_is_refused_by_name(r, on, says):
    with pytest.raises(ValueError, match=says):
        lora.adapt(base(), lora.settings_of(r, 8, on))


# -----------------------------------------------------------------------------
# runs of posttrain/sft.py and qrpo.py

ADAPTERS = ["--lora_r=4", "--lora_alpha=8", "--lr=1e-2", "--rank_every=0"]


@pytest.fixture(scope="module")
def tuned(start):
    done = tune(start, start / "tuned", *ADAPTERS)
    assert done.returncode == 0, done.stderr
    return start / "tuned"


@torch.no_grad()
def answers(name, **how):
    model, _ = convert.load_any(str(name), **how)
    return model(IDX)[0]


def test_a_run_learns_and_its_folder_adapter_merged_model_and_peft_are_one(
    start, tuned, tmp_path
):
    """Within the rounding of fp32: the sum W x + s B A x, or of the matrices before the product."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    assert (
        sum(losses(tuned)[-3:]) < 0.9 * sum(losses(tuned)[:3]) and not (tuned / "hf").exists()
    )
    for file in tuned.glob("ckpt/step-*/*.safetensors"):
        assert all(".lora_" in name for name in load_file(file))
    want = answers(tuned)
    assert answers(tuned / "adapter").equal(want)
    assert not torch.allclose(answers(start / "model"), want, atol=1e-2)
    published = transformers.AutoModelForCausalLM.from_pretrained(
        start / "model", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(published, tuned / "adapter")(IDX).logits
    torch.testing.assert_close(theirs, want, rtol=0, atol=1e-4)
    save = ["convert.py", f"--load={tuned}", f"--save={tmp_path / 'hf'}"]
    refused(script(*save), "--merge adds the adapters")
    done = script(*save, "--merge")
    assert (
        done.returncode == 0 and "100.0% of the adapters' update survives" in done.stdout
    ), done.stderr
    torch.testing.assert_close(answers(tmp_path / "hf"), want, rtol=1e-4, atol=1e-5)


def test_two_ranks_resume_what_one_began_and_one_to_the_same_bits(
    launch, start, tuned, tmp_path
):
    for name in ("one", "two"):
        cut_back(tuned, tmp_path / name)
    done = tune(start, tmp_path / "one", *ADAPTERS, "--resume", "--recompute=selective")
    assert done.returncode == 0, done.stderr
    assert answers(tmp_path / "one").equal(answers(tuned)) and losses(
        tmp_path / "one"
    ) == losses(tuned)
    args = arguments(
        start, tmp_path / "two", *ADAPTERS, "--resume", "--parallel=fsdp", "--device=cpu"
    )
    codes, text = launch(2, *args, script="posttrain.sft", logs=tmp_path / "log")
    assert codes == [0, 0], text
    assert losses(tmp_path / "two") == pytest.approx(losses(tuned), rel=1e-5)
    # Where a gradient is nearly 0, its sign, and so an early step of the optimizer, hangs on the order of a sum.
    off, moved = (answers(run) - answers(tuned) for run in (tmp_path / "two", start / "model"))
    assert off.norm() <= 1e-4 * moved.norm()
    assert answers(tmp_path / "two" / "adapter").equal(answers(tmp_path / "two"))


@pytest.mark.parametrize("kind", ["int8", "nf4", "bf16"])
def test_a_run_on_a_small_base_learns_and_is_loaded_in_any_dtype(
    start, tuned, tmp_path, kind
):
    """The start is known again by its values in bf16 and in fp32."""
    done = tune(start, tmp_path / "run", *ADAPTERS, f"--base={kind}", "--recompute=full")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(tuned), rel=0.1)
    for dtype in (None, torch.bfloat16):
        assert answers(tmp_path / "run", dtype=dtype).equal(
            answers(tmp_path / "run" / "adapter", dtype=dtype)
        )
    if kind != "bf16":
        with pytest.raises(ValueError, match=f"{kind} keeps bits beside their scales"):
            begin.check_base(kind, dict(r=4), sharded=True)


@pytest.mark.parametrize(
    "args, says",
    [
        ("--out=TUNED --resume --lora_r=2", "lora_r 4 -> 2"),
        ("--out=TUNED --resume --lora_on=q_proj", "lora_on"),
        ("--lora_r=0 --base=nf4", "--lora_r=16 trains adapters beside frozen weights in nf4"),
        ("--init_from=TUNED", "holds adapters"),
        ("--init_from=TUNED/adapter --lora_r=0", "--merge"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(start, tuned, tmp_path, args, says):
    """A second adapter would take the place of the first one, and full fine-tuning would train the adapter alone."""
    args = args.replace("TUNED", str(tuned)).split()
    refused(tune(start, tmp_path / "run", *ADAPTERS, *args), says)


def test_an_adapter_or_its_run_whose_base_has_changed_is_refused(tuned, tmp_path):
    convert.save_hf(Apertus(ApertusConfig(**TINY), seed=29), str(tmp_path / "model"), TOK)
    shutil.copytree(tuned, tmp_path / "run")
    adapter = tmp_path / "run" / "adapter"
    for file, key, folder in (
        (adapter / "adapter_config.json", "base_model_name_or_path", adapter),
        (tmp_path / "run" / "config.json", "init_from", tmp_path / "run"),
    ):
        config = json.loads(file.read_text())
        for name, says in (
            ("model", "was trained on other weights"),
            ("gone", "is an adapter of .*gone"),
        ):
            file.write_text(json.dumps(config | {key: str(tmp_path / name)}))
            if name == "model" or folder == adapter:
                with pytest.raises(ValueError, match=says):
                    convert.load_any(str(folder))


def test_qrpo_with_adapters_has_its_reference_below_them_and_stores_none(
    start, tmp_path
):
    """At step 0 policy and reference are one, whichever way its log-probs came: the loss of the full run."""
    rows = [
        dict(messages=[dict(role="user", content=f"question {i}")], completions=["yes", "no no"])
        for i in range(5)
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "reward.py").write_text(
        "def reward(prompt, completion):\n    return sum(map(ord, completion)) % 97\n"
    )
    found = {}
    for name, args in (("lora", ["--lora_r=4"]), ("full", [])):
        done = script(
            "posttrain.qrpo",
            f"--init_from={start / 'model'}",
            f"--data={tmp_path / 'prompts.jsonl'}",
            f"--rewards={tmp_path / 'reward.py'}",
            f"--out={tmp_path / name}",
            f"--references={tmp_path / 'shared'}",
            "--n_refs=4",
            "--max_new_tokens=12",
            "--batch_size=4",
            "--lr=1e-2",
            "--pairs_per_prompt=0",
            "--dtype=float32",
            *args,
        )
        stored = [name for name in os.listdir(tmp_path / "shared") if name.startswith("logp")]
        assert done.returncode == 0 and bool(stored) == (name == "full"), done.stderr
        found[name] = losses(tmp_path / name)
    assert (
        found["lora"][0] == pytest.approx(found["full"][0], rel=1e-5)
        and found["lora"][-1] != found["lora"][0]
    )
