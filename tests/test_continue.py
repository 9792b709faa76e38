"""
train.py --init_from: a run that begins with the weights of another model, against evaluate.py's loss of that model,
against the run that was never stopped, and on two ranks against one.
"""

import json
import os
import shutil
import sysconfig

import pytest
import torch

import convert
import tokenizer
from conftest import refused, same, script, weights
from data import TokenDataset
from engine import plot
from faults.launch import sha_of
from model import Apertus, ApertusConfig
from posttrain import lora
from safetensors.torch import load_file

SHAPE = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=64)
RUN = ["--total_samples=64", "--warmup_samples=8", "--decay_samples=16", "--batch_size=8", "--micro_batch=4",
       "--lr=1e-3", "--lr_floor=1e-4", "--dtype=float32", "--sample_every=0", "--eval_every=4", "--eval_windows=8",
       "--checkpoint_every=2", "--keep_checkpoints=9", "--compile=False"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Data, a run of train.py on it, and the same model as a Hugging Face folder."""
    root = tmp_path_factory.mktemp("continue")
    # Python's own, since the losses below would move with every line of ours.
    files = [os.path.join(sysconfig.get_path("stdlib"), name) for name in ("argparse.py", "heapq.py", "textwrap.py")]
    # By id: by text another file might validate in another version of Python.
    how = [f"--out={root / 'data'}", "--tokenizer=byte", "--split_by=id"]
    assert script("prepare.py", *files, *how).returncode == 0
    shape = [f"--{name}={value}" for name, value in SHAPE.items()]
    done = script("train.py", f"--data={root / 'data'}", f"--out={root / 'start'}", "--block_size=64", *shape, *RUN)
    assert done.returncode == 0, done.stderr
    assert script("convert.py", f"--load={root / 'start'}", f"--save={root / 'hf'}").returncode == 0
    return root


def go_on(lab, out, *args, start="start"):
    """A run that begins where another ended; it is told nothing of the model's shape."""
    return script(
        "train.py", f"--data={lab / 'data'}", f"--init_from={lab / start}", f"--out={out}", "--seed=29", *RUN, *args,
    )


@pytest.fixture(scope="module")
def continued(lab):
    done = go_on(lab, lab / "continued")
    assert done.returncode == 0, done.stderr
    return lab / "continued"


def log(out):
    return plot.read_log(str(out))


def validation(out):
    return [entry["val_loss"] for entry in log(out) if "val_loss" in entry]


def test_the_curve_begins_with_the_loss_of_the_start_model(lab, continued):
    """Before the first step, on the same validation windows as evaluate.py."""
    model = convert.load_run(str(lab / "start"))[0]
    idx, targets, keep, doc = TokenDataset(str(lab / "data"), "val", 64, 29).batch(0, 8)
    with torch.no_grad():
        _, nll = model(idx, targets, keep, doc, per_token=True)
    first = log(continued)[0]
    assert first["step"] == first["tokens"] == 0
    assert first["val_loss"] == pytest.approx(((nll * keep).sum() / keep.sum()).item(), rel=1e-6)
    assert validation(continued)[-1] < first["val_loss"]


def test_optimizer_schedule_and_order_are_new(lab, continued):
    steps = [entry for entry in log(continued) if "loss" in entry]
    assert [entry["step"] for entry in steps] == list(range(8)) and steps[0]["lr"] == 0
    assert not same(weights(continued), weights(lab / "start"))


def test_a_hugging_face_folder_starts_the_same_run(lab, continued, tmp_path):
    assert go_on(lab, tmp_path / "run", start="hf").returncode == 0
    assert same(weights(tmp_path / "run"), weights(continued))


def test_stopped_and_resumed_it_ends_in_the_same_bits(lab, continued, tmp_path):
    shutil.copytree(continued, tmp_path / "run")
    os.remove(tmp_path / "run" / "summary.json")
    for step in ("step-00000006", "step-00000008"):
        shutil.rmtree(tmp_path / "run" / "ckpt" / step)
    done = go_on(lab, tmp_path / "run", "--resume")
    assert done.returncode == 0 and "resumed from" in done.stdout, done.stderr
    assert same(weights(tmp_path / "run"), weights(continued))
    assert validation(tmp_path / "run") == validation(continued)


@pytest.mark.parametrize("ranks, parallel", [(2, "ddp"), (2, "fsdp")])
def test_two_processes_begin_and_end_as_one(launch, lab, continued, tmp_path, ranks, parallel):
    args = [f"--data={lab / 'data'}", f"--init_from={lab / 'hf'}", f"--out={tmp_path / 'run'}", "--seed=29", *RUN]
    codes, text = launch(ranks, *args, f"--parallel={parallel}", script="train", logs=tmp_path / "log")
    assert codes == [0] * ranks, text[-2000:]
    assert validation(tmp_path / "run") == pytest.approx(validation(continued), abs=2e-5)


def test_window_and_rope_may_change_and_nothing_else_of_the_shape(lab, tmp_path):
    done = go_on(lab, tmp_path / "short", "--block_size=32", "--rope_theta=1e6")
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    assert config["block_size"] == 32 and config["rope_theta"] == 1e6 and config["n_embd"] == 32
    done = go_on(lab, tmp_path / "long", "--block_size=128")
    assert done.returncode == 0 and "has seen 64 at once" in done.stdout
    done = go_on(lab, tmp_path / "longer", "--block_size=128", "--rope_theta=1e6", "--doc_mask=False")
    assert done.returncode == 0 and "has seen" not in done.stdout
    refused(go_on(lab, tmp_path / "other", "--n_embd=64"), "n_embd=64", "has 32")
    assert not os.path.exists(tmp_path / "other")


def test_data_of_another_vocabulary_are_refused_by_their_first_id(lab, tmp_path):
    """The same number of ids is not enough: here two of them have changed places."""
    shutil.copytree(lab / "hf", tmp_path / "hf")
    path = tmp_path / "hf" / "tokenizer.json"
    saved = json.loads(path.read_text())
    vocab = saved["model"]["vocab"]
    ids = {i: piece for piece, i in vocab.items()}
    vocab[ids[100]], vocab[ids[101]] = 101, 100
    path.write_text(json.dumps(saved))
    done = script(
        "train.py", f"--data={lab / 'data'}", f"--init_from={tmp_path / 'hf'}", f"--out={tmp_path / 'run'}", *RUN,
    )
    refused(done, "id 100", "another vocabulary")
    assert not os.path.exists(tmp_path / "run")


def test_the_first_difference_of_two_vocabularies():
    byte, other = tokenizer.load("byte"), tokenizer.load("byte")
    assert tokenizer.first_difference(byte, other) is None
    names = list(byte.special)
    names[5] = "<other>"
    assert tokenizer.first_difference(byte, tokenizer.Tokenizer("x", byte.pieces, names)) == (
        5, list(byte.special)[5], "<other>")
    fewer = tokenizer.Tokenizer("x", byte.pieces[:-1], list(byte.special))
    assert tokenizer.first_difference(fewer, byte) == (319, None, byte.pieces[-1])


@pytest.mark.parametrize("name, says", [("nowhere", "is neither a folder here"), ("data", "no config.json")])
def test_a_start_that_is_no_model_is_told_in_one_line(lab, tmp_path, name, says):
    refused(go_on(lab, tmp_path / "run", start=name), says)


def test_adapters_are_no_start(lab, tmp_path):
    model = lora.adapt(Apertus(ApertusConfig(**SHAPE, vocab_size=320)), lora.settings_of(2, 2, "all"))
    lora.save(model, lora.settings_of(2, 2, "all"), str(tmp_path / "adapter"), "base", "")
    done = script("train.py", f"--data={lab / 'data'}", f"--init_from={tmp_path / 'adapter'}", *RUN)
    refused(done, "holds adapters", "--merge")


# -----------------------------------------------------------------------------
# adapters beside the frozen start

ADAPTERS = ["--lora_r=4", "--lora_alpha=8", "--lr=1e-2", "--weight_decay=0.5"]


@pytest.fixture(scope="module")
def adapted(lab):
    done = go_on(lab, lab / "adapted", *ADAPTERS, "--rope_theta=50")
    assert done.returncode == 0, done.stderr
    return lab / "adapted"


def test_with_adapters_the_curve_begins_as_without(lab, continued, tmp_path):
    """B is zero: at step 0 the validation loss is that of full training, which is the start's, in all digits."""
    done = go_on(lab, tmp_path / "run", *ADAPTERS)
    assert done.returncode == 0, done.stderr
    assert validation(tmp_path / "run")[0] == validation(continued)[0]


def test_with_adapters_another_text_is_learnt(lab, tmp_path):
    """A refrain that the start has never read: from its own text adapters of a model this small learn nearly nothing."""
    (tmp_path / "refrain.txt").write_text("Row, row, row your boat, gently down the stream.\n" * 1500)
    how = [f"--out={tmp_path / 'data'}", "--tokenizer=byte"]
    assert script("prepare.py", tmp_path / "refrain.txt", *how).returncode == 0
    done = go_on(lab, tmp_path / "run", *ADAPTERS, f"--data={tmp_path / 'data'}", "--total_samples=240")
    assert done.returncode == 0, done.stderr
    assert validation(tmp_path / "run")[-1] < validation(tmp_path / "run")[0] - 0.04


def test_checkpoints_hold_adapters_and_their_states_alone(adapted):
    for file in (adapted / "ckpt").glob("step-*/*.safetensors"):
        names = load_file(file).keys()
        assert names and all(".lora_" in name for name in names)


def test_peft_computes_the_loss_that_the_run_ends_with(lab, adapted):
    """
    transformers' model, given the run's RoPE, with PEFT's reading of out/adapter, on the validation windows. A weight
    decay of 0.5 would be seen, had it met anything frozen.
    """
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.AutoConfig.from_pretrained(lab / "hf")
    config.rope_parameters["rope_theta"] = 50.0
    published = transformers.AutoModelForCausalLM.from_pretrained(lab / "hf", config=config, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(published.eval(), adapted / "adapter")
    data = TokenDataset(str(lab / "data"), "val", 64, 29)
    found = 0.0, 0
    for idx, targets, keep, doc in (tuple(t[None] for t in row) for row in zip(*data.batch(0, data.n_windows))):
        mask = (doc[0][:, None] == doc[0][None]) & torch.ones(64, 64).tril().bool()
        with torch.no_grad():
            logits = model(idx, attention_mask=mask[None, None]).logits[0]
        nll = torch.nn.functional.cross_entropy(logits, targets[0].clamp(min=0), reduction="none")
        found = found[0] + (nll * keep[0]).sum().item(), found[1] + keep.sum().item()
    assert validation(adapted)[-1] == pytest.approx(found[0] / found[1], rel=1e-5)


def test_such_a_run_is_loaded_with_its_own_rope_and_sampled_evaluated_and_merged(lab, adapted, tmp_path):
    model, tok = convert.load_any(str(adapted))
    data = TokenDataset(str(lab / "data"), "val", 64, 29)
    idx, targets, keep, doc = data.batch(0, data.n_windows)
    with torch.no_grad():
        _, nll = model(idx, targets, keep, doc, per_token=True)
    assert ((nll * keep).sum() / keep.sum()).item() == pytest.approx(validation(adapted)[-1], rel=1e-6)
    assert tok.eos == tok.special["</s>"]               # text goes on, no turn ends
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 9)
    for command in (
        ["sample.py", f"--init_from={adapted}", "--max_new_tokens=5"],
        ["evaluate.py", tmp_path / "text.txt", f"--init_from={adapted}", f"--out={tmp_path / 'scores'}"],
        ["convert.py", f"--load={adapted}", f"--save={tmp_path / 'hf'}", "--merge"],
    ):
        done = script(*command)
        assert done.returncode == 0, done.stderr
    merged, _ = convert.load_any(str(tmp_path / "hf"))
    with torch.no_grad():
        torch.testing.assert_close(merged(idx[:4])[0], model(idx[:4])[0], rtol=1e-4, atol=1e-5)


def cut_back(out, new, *steps):
    """A copy of a run, as if it had been killed before these checkpoints."""
    shutil.copytree(out, new)
    shutil.rmtree(new / "adapter")
    os.remove(new / "summary.json")
    for step in steps:
        shutil.rmtree(new / "ckpt" / step)


def test_with_adapters_too_a_stopped_run_ends_in_the_same_bits(lab, adapted, tmp_path):
    cut_back(adapted, tmp_path / "run", "step-00000006", "step-00000008")
    done = go_on(lab, tmp_path / "run", *ADAPTERS, "--rope_theta=50", "--resume")
    assert done.returncode == 0 and "resumed from" in done.stdout, done.stderr
    assert same(weights(tmp_path / "run"), weights(adapted)) and validation(tmp_path / "run") == validation(adapted)
    one, two = (load_file(run / "adapter" / "adapter_model.safetensors") for run in (adapted, tmp_path / "run"))
    assert same(one, two) and one.keys() == two.keys()


def on_two(launch, lab, out, *args):
    start = [f"--data={lab / 'data'}", f"--init_from={lab / 'start'}", f"--out={out}", "--seed=29", *RUN, *ADAPTERS]
    codes, text = launch(2, *start, *args, script="train", logs=f"{out}.log")
    assert codes == [0, 0], text[-2000:]


@pytest.mark.parametrize("parallel, base", [("ddp", "int8"), ("fsdp", "bf16"), ("fsdp", "fp32")])
def test_two_processes_train_adapters_as_one_does(launch, lab, tmp_path, parallel, base):
    assert go_on(lab, tmp_path / "one", *ADAPTERS, f"--base={base}").returncode == 0
    on_two(launch, lab, tmp_path / "two", f"--base={base}", f"--parallel={parallel}")
    assert validation(tmp_path / "two") == pytest.approx(validation(tmp_path / "one"), abs=2e-5)
    one, two = (load_file(tmp_path / run / "adapter" / "adapter_model.safetensors") for run in ("one", "two"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-4)


def test_exact_mode_goes_on_with_adapters_on_two_processes_to_the_bits_of_one(launch, lab, tmp_path):
    assert go_on(lab, tmp_path / "one", *ADAPTERS, "--exact").returncode == 0
    cut_back(tmp_path / "one", tmp_path / "two", "step-00000004", "step-00000006", "step-00000008")
    on_two(launch, lab, tmp_path / "two", "--exact", "--parallel=fsdp", "--resume")
    assert sha_of(tmp_path / "two") == sha_of(tmp_path / "one")


@pytest.mark.parametrize("args, says", [
    (["--init_from=", "--lora_r=4"], "name it with --init_from"),
    (["--base=bf16"], "their rank, --lora_r=16"),
    (["--lora_r=4", "--self_guided=0.5"], "freezes what self_guided=0.5 guides"),
    (["--lora_r=4", "--lora_on=head"], "all or some of q_proj"),
    (["--lora_r=4", "--base=fp8"], "there is fp32, bf16, int8, nf4"),
])
def test_what_adapters_cannot_do_is_told_in_one_line(lab, tmp_path, args, says):
    refused(go_on(lab, tmp_path / "run", *args), says)
    assert not os.path.exists(tmp_path / "run" / "ckpt")


@pytest.mark.parametrize("args", [[], [*ADAPTERS, "--lora_alpha=4"], [*ADAPTERS, "--base=bf16"]])
def test_a_run_goes_on_with_its_own_adapters_only(lab, adapted, args):
    refused(go_on(lab, adapted, "--rope_theta=50", "--resume", "--total_samples=80", *args), "is of another run")


def test_a_run_of_adapters_whose_start_has_changed_does_not_go_on(lab, adapted, tmp_path):
    shutil.copytree(adapted, tmp_path / "run")
    done = go_on(lab, tmp_path / "run", *ADAPTERS, "--rope_theta=50", "--resume", start="continued")
    refused(done, "start_hash")
