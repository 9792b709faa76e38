"""
weights/rows.py: rows of embedding and head that are trained with adapters, against PEFT's trainable_token_indices;
when SFT trains those of the chat's control tokens; and that answers then end.
"""

import shutil

import peft
import pytest
import torch
from conftest import refused, script
from lab import ADAPTERS, run, tuning
from test_lora import close, published
from test_sft import TOK, losses, tune
from tiny import small

import chat
import convert
from generate import generate
from scoring import sequence_logp
from weights import lora, rows
from weights.folders import start_of

IDX = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(1))
IDS = [5, 7, 300]
IDX[:, ::5] = torch.tensor(IDS)[torch.arange(10).view(2, 5) % 3]
CHAT_IDS = [TOK.special[name] for name in chat.CHAT]


@torch.no_grad()
def logits(model):
    return model(IDX)


def answers(folder):
    return logits(convert.load_any(str(folder))[0])


@pytest.fixture(scope="module")
def starts(lab, tmp_path_factory):
    """tied/ and untied/: two starts of the same shape; parallel/: as long pretraining leaves the control tokens."""
    folder = tmp_path_factory.mktemp("starts")
    for name, tied in dict(tied=True, untied=False).items():
        model = small(3, vocab_size=320, block_size=256, tie_embeddings=tied)
        convert.save_hf(model, str(folder / name), TOK)
    model, _ = convert.load_any(str(lab / "hf"))
    with torch.no_grad():
        for matrix in (model.model.embed_tokens.weight, model.lm_head.weight):
            common = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(1))
            common *= 1.5 * matrix.norm(dim=1).mean() / common.norm()
            special = list(TOK.special.values())
            matrix[special] = common + 0.1 * matrix[special]
    convert.save_hf(model, str(folder / "parallel"), TOK)
    return folder


# -----------------------------------------------------------------------------
# PEFT


def adapted_by_peft(start, indices):
    """PEFT's model with random adapters and rows."""
    config = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        init_lora_weights=False,
        target_modules=["q_proj", "down_proj"],
        trainable_token_indices=indices,
    )
    torch.manual_seed(2)
    theirs = peft.get_peft_model(published(start), config)
    for name, p in theirs.named_parameters():
        if "trainable_tokens" in name:
            torch.nn.init.normal_(p, std=0.2)
    return theirs


BOTH = dict(embed_tokens=IDS, lm_head=IDS)
HEAD = dict(embed_tokens=IDS[:1], lm_head=IDS[1:])


@pytest.mark.parametrize("start, indices", [("untied", BOTH), ("untied", IDS), ("untied", HEAD), ("tied", IDS)])
def test_logits_loss_gradients_and_merged_matrices_are_pefts(starts, tmp_path, start, indices):
    """A list is for the embedding; in a tied model, for the head too."""
    theirs = adapted_by_peft(starts / start, indices)
    theirs.save_pretrained(tmp_path)
    ours = convert.load_hf(str(starts / start))
    lora.load_adapter(ours, str(tmp_path))
    close(ours(IDX), theirs(IDX).logits)
    loss = ours.loss(IDX[:, :-1], IDX[:, 1:])
    loss.backward()
    their_loss = theirs(IDX, labels=IDX).loss
    their_loss.backward()
    close(loss, their_loss)
    nll = ours.nll(IDX[:, :-1], IDX[:, 1:])
    assert nll.mean().item() == pytest.approx(loss.item(), rel=1e-6)
    gradients = [
        {p.shape: p.grad for name, p in model.named_parameters() if key in name}
        for model, key in ((ours, ".lora_rows."), (theirs, "trainable_tokens_delta"))
    ]
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for shape, gradient in gradients[0].items():
        close(gradient, gradients[1][shape], atol=1e-6)
    base = convert.load_hf(str(starts / start))
    with lora.without_lora(ours):
        assert logits(ours).equal(logits(base))
    lora.merge_adapters(ours)
    close(logits(ours), theirs.merge_and_unload()(IDX).logits)
    assert dict(ours.named_parameters()).keys() == dict(base.named_parameters()).keys()


def test_log_probs_of_completions_and_their_gradients_see_the_rows(starts):
    """As QRPO computes them, against the logits; without adapters they are those of the start model."""
    config = dict(r=2, lora_alpha=4, target_modules=["q_proj"], trainable_token_indices=BOTH)
    model = lora.add_lora(convert.load_hf(str(starts / "untied")), config)
    lora.init_lora(model, 1)
    pairs = [(IDX[0, :9].tolist(), IDX[0, 9:].tolist()), (IDX[1, :4].tolist(), IDX[1, 4:15].tolist())]
    before = sequence_logp(model, pairs)
    close(before, sequence_logp(convert.load_hf(str(starts / "untied")), pairs))
    parameters = [module.lora_rows.weight for module in rows.row_modules(model).values()]
    for p in parameters:
        torch.nn.init.normal_(p)
    logp = sequence_logp(model, pairs)
    want = []
    for prompt, completion in pairs:
        whole = torch.tensor([prompt + completion])
        chosen = model(whole[:, :-1]).log_softmax(-1).gather(2, whole[:, 1:, None])[0, :, 0]
        want.append(chosen[len(prompt) - 1 :].sum())
    close(logp, torch.stack(want), atol=1e-4)
    for ours, plain in zip(*(torch.autograd.grad(x.sum(), parameters) for x in (logp, torch.stack(want)))):
        close(ours, plain, atol=1e-4)
    with lora.without_lora(model):
        close(sequence_logp(model, pairs), before)


@pytest.mark.parametrize("start", ["untied", "tied"])
def test_peft_reads_the_adapter_of_a_run_and_its_merged_model_is_the_same(lab, starts, tmp_path, start):
    tune(lab, tmp_path / "run", *ADAPTERS, f"--init_from={starts / start}", "--epochs=1")
    want = answers(tmp_path / "run")
    assert answers(tmp_path / "run" / "adapter").equal(want)
    theirs = peft.PeftModel.from_pretrained(published(starts / start), tmp_path / "run" / "adapter")
    assert theirs.peft_config["default"].trainable_token_indices == dict(embed_tokens=CHAT_IDS, lm_head=CHAT_IDS)
    named = [name for name, _ in theirs.named_parameters() if "trainable_tokens_delta" in name]
    assert len(named) == dict(tied=1, untied=2)[start]
    close(theirs(IDX).logits, want)
    run("convert.py", f"--load={tmp_path / 'run'}", f"--save={tmp_path / 'hf'}", "--merge")
    close(answers(tmp_path / "hf"), want)


# -----------------------------------------------------------------------------
# runs


def unused(folder):
    shape, tok, path = start_of(str(folder))
    return rows.unused_chat_rows(path, shape, tok)


def test_a_start_has_used_the_tokens_once_sft_has_taught_them(lab, starts):
    for folder in (lab / "hf", lab / "pretrained", starts / "tied", starts / "untied", starts / "parallel"):
        assert unused(folder) == CHAT_IDS
    assert unused(lab / "sft") == unused(lab / "qrpo") == []


def ended(folder):
    """How many of six answers end, each within 30 tokens."""
    model, tok = convert.load_any(str(folder))
    messages = [[dict(role="system", content="x"), dict(role="user", content=f"say {i}")] for i in range(6)]
    prompts = [tok.chat(of_one, add_generation_prompt=True) for of_one in messages]
    texts = generate(model, prompts, 30, chat.stop_ids(tok), temperature=0)
    return sum(text[-1] in chat.stop_ids(tok) for text in texts)


def test_answers_end_with_trained_rows_and_do_not_without(lab, starts, tmp_path, monkeypatch):
    start = f"--init_from={starts / 'parallel'}"
    printed = tune(lab, tmp_path / "with", *ADAPTERS, start)
    assert f"{starts / 'parallel'} has hardly learnt the chat's 12 control tokens: their rows in embedding" in printed
    monkeypatch.setattr(rows, "USED", 0)
    assert "hardly learnt" not in tune(lab, tmp_path / "without", *ADAPTERS, start)
    assert (ended(tmp_path / "with"), ended(tmp_path / "without")) == (6, 0)


@pytest.mark.parametrize("start", ["untied", "tied"])
def test_two_ranks_train_the_same_rows(lab, starts, launch, tmp_path, start):
    how = *ADAPTERS, f"--init_from={starts / start}", "--epochs=1"
    tune(lab, tmp_path / "one", *how)
    args = tuning(lab, tmp_path / "two", *how, "--parallel=fsdp")
    codes, text = launch(2, *args[1:], script="posttrain.sft", logs=tmp_path / "log")
    assert codes == [0, 0], text[-2000:]
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    close(answers(tmp_path / "two"), answers(tmp_path / "one"), atol=1e-4)


def test_a_stopped_run_resumes_with_its_rows(lab, starts, tmp_path):
    """From a checkpoint that holds rows and adapters alone."""
    args = tuning(lab, tmp_path / "run", *ADAPTERS, f"--init_from={starts / 'tied'}", "--epochs=3")
    run(*args)
    want = answers(tmp_path / "run")
    newest = max((tmp_path / "run" / "ckpt").iterdir())
    shutil.rmtree(newest)
    (tmp_path / "run" / "summary.json").unlink()
    run(*args, "--resume")
    assert answers(tmp_path / "run").equal(want)
    refused(script(*args, "--resume"), "is finished")


@pytest.mark.parametrize(
    "start, indices",
    [("untied", dict(q_proj=[1])), ("untied", [320]), ("untied", dict(lm_head=[-1])), ("tied", HEAD)],
    ids=str,
)
def test_other_rows_than_a_model_has_are_an_error(starts, start, indices):
    config = dict(r=2, lora_alpha=4, target_modules=["q_proj"], trainable_token_indices=indices)
    with pytest.raises(ValueError, match="trainable_token_indices=.*: .*want"):
        lora.add_lora(convert.load_hf(str(starts / start)), config)
