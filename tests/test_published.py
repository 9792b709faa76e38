"""
The published models in the form of their repositories: every config.json, and every file.

golden/published_configs.json: fields of published configs and of derived models, copied from public code and threads,
each with whether it may be loaded. transformers writes the repositories below at tiny size, with the files, names and
fields of the published ones: the 8B (2509), a Mini (v1.1) and Apertus 1.5. Sources of the last two:
the Minis' control tokens are Mistral-Nemo's (mistral-common, tekken.py), their conversations those of ollama's tests;
1.5's tokenizer is made as swiss-ai/apertus-omni-tokenizer makes it, its weights lie as in transformers' conversion
script for it.
"""

import hashlib
import json
import shutil

import huggingface_hub
import pytest
import torch
import transformers
from conftest import ROOT
from safetensors.torch import save_file
from tiny import GOLDEN
from torch.testing import assert_close

import convert
import tokenizer
import tokenizer_json
from chat import CHAT, render, stop_ids
from engine.files import read_json, read_text
from model import rope_frequencies
from tokenizer import Tokenizer
from tokenizer_json import ENDS, EXACT, RESERVED, SETTINGS, hf_files
from vocabulary import NAMED, SPECIAL, Vocabulary, padded, tekken
from weights.config import HF_NAMES, config_from_hf, config_to_hf
from weights.folders import folder_of, shape_of, start_of

NAME = "swiss-ai/Apertus-8B-Instruct-2509"
MINI = "swiss-ai/Apertus-v1.1-0.5B-Instruct"
OMNI = "swiss-ai/Apertus-v1.5-8B"
TEXT, MEDIA = 1456, 216  # text ids; media ids: 200 reserved and 16 codes
SIZES = json.loads("""{
    "vocab_size": 1456,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512
}""")
CONFIGS = json.loads(read_text(f"{GOLDEN}/published_configs.json"))


def config_of(name):
    return next(case["config"] for case in CONFIGS if case["source"].startswith(name))


def as_4_read(hf):
    """A config.json for transformers 5 that means what rope_scaling null meant to transformers 4."""
    if hf.get("rope_scaling", 0) is None:
        return hf | dict(rope_parameters=dict(rope_type="default", rope_theta=hf["rope_theta"]))
    return hf


@pytest.mark.parametrize("case", CONFIGS, ids=lambda case: case["source"][:60])
def test_every_config_is_read_as_transformers_reads_it_or_refused_by_name(case):
    if case["refused"]:
        with pytest.raises(ValueError, match=f"^(?=[^\n]{{,400}}$).*{case['refused']}"):
            config_from_hf(case["config"])
        return
    ours = config_from_hf(case["config"])
    # Of Apertus 1.5 compare the text part, with one id for each row of its head: that is an Apertus.
    hf = dict(case["config"].get("text_config", case["config"]))
    hf["vocab_size"] = hf.get("output_vocab_size", hf.get("vocab_size", 131072))
    theirs = transformers.ApertusConfig(**as_4_read(hf))
    for mine, name in HF_NAMES.items():
        assert getattr(ours, mine) == getattr(theirs, name) or name not in hf, name
    assert ours.n_kv_head == theirs.num_key_value_heads
    rope = transformers.models.apertus.modeling_apertus.ApertusRotaryEmbedding(theirs)
    assert_close(rope_frequencies(ours), rope.inv_freq, rtol=1e-6, atol=0)
    exported = config_to_hf(ours)
    assert config_from_hf(exported) == ours
    assert exported["rope_parameters"]["rope_type"] == theirs.rope_parameters["rope_type"]


# -----------------------------------------------------------------------------
# the repositories


# Each as_... function writes a repository and returns transformers' model of it.


def weights(config):
    """A transformers model of a config.json, with large initial values."""
    torch.manual_seed(0)
    config = as_4_read(config) | dict(initializer_range=0.1)
    return transformers.ApertusForCausalLM(transformers.ApertusConfig(**config)).bfloat16().eval()


def in_fp32(model):
    """The model in fp32; .float() alone leaves RoPE's frequencies rounded to bf16."""
    model.float().model.rotary_emb.__init__(model.config)
    return model


def tokens(names):
    """The tokenizer's files: control tokens, special except for LaTeX's, and then the first 456 pieces."""
    files = hf_files(Tokenizer(Vocabulary("tiny", tekken()[:456], names, in_text=())))
    for token in files["tokenizer.json"]["added_tokens"]:
        token["special"] = token["content"] not in NAMED[14:18]
    return files


def write(folder, config, files, eos, template):
    """Write a repository's files other than weights."""
    decoder = {
        str(token["id"]): {key: value for key, value in token.items() if key != "id"}
        for token in files["tokenizer.json"]["added_tokens"]
    }
    settings = SETTINGS | ENDS | dict(eos_token=eos, added_tokens_decoder=decoder)
    contents = {"config.json": config, "tokenizer.json": files["tokenizer.json"], "tokenizer_config.json": settings}
    for file, content in contents.items():
        (folder / file).write_text(json.dumps(content, ensure_ascii=False))
    (folder / "chat_template.jinja").write_text(template)


def as_published(folder):
    """A repository with a config.json of transformers 4 and bf16 weights in several shards."""
    config = CONFIGS[0]["config"] | SIZES
    model = weights(config)
    model.save_pretrained(folder, max_shard_size="100KB")
    write(folder, config, tokens(SPECIAL), "<|assistant_end|>", read_text(f"{ROOT}/chat_template.jinja"))
    return in_fp32(model)


NEMO = """<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]
[TOOL_CALLS] <pad> [PREFIX] [MIDDLE] [SUFFIX]""".split()


def as_mini(folder):
    """A Mini: tied, but the head is stored too (572.6M numbers on the hub for 438.3M). The template lists tokens."""
    config = config_of("swiss-ai/Apertus-v1.1-0.5B") | SIZES
    model = weights(config)
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    write(folder, config, tokens(padded(NEMO, 1000)), "<SPECIAL_68>", str(RESERVED))
    return in_fp32(model)


RENAMED = {32: "<|inner_prefix|>", 33: "<|inner_suffix|>", 69: "<think>", 70: "</think>", 73: "<|tool_output_start|>"}
NORMALIZER = r"""{
    "type": "Sequence",
    "normalizers": [
        {"type": "Replace", "pattern": {"Regex": "<\\|inner_suffix\\|>\\s+"}, "content": "<|inner_suffix|>"},
        {"type": "Replace", "pattern": {"String": "<answer>"}, "content": ""},
        {"type": "Replace", "pattern": {"String": "<think>"}, "content": "<|inner_prefix|>"}]
}"""


# Tiny image and audio tokenizers, with eight codes each.
TOKENIZERS = """{
    "image_token_offset": 1656,
    "audio_token_offset": 1664,
    "vision_config": {"codebook_size": 8, "embed_dim": 32, "latent_channels": 32, "base_channels": 32,
                      "channel_multiplier": [1], "num_res_blocks": 1},
    "audio_config": {"model_type": "wavtokenizer_encoder", "codebook_size": 8, "codebook_dim": 8, "num_filters": 2,
                     "hidden_size": 8, "num_lstm_layers": 1, "decoder_hidden_size": 32,
                     "decoder_intermediate_size": 32, "decoder_num_layers": 1, "upsampling_ratios": [2]}
}"""


def as_omni(folder):
    """Apertus 1.5 by transformers: an embedding of text and media, a head of text only, and the media tokenizers."""
    sizes = dict(vocab_size=TEXT + MEDIA, output_vocab_size=TEXT, initializer_range=0.1)
    text = config_of(OMNI)["text_config"] | SIZES | sizes
    config = transformers.Apertus1p5Config(text_config=text, **json.loads(TOKENIZERS))
    torch.manual_seed(0)
    transformers.Apertus1p5ForConditionalGeneration(config).bfloat16().save_pretrained(folder)
    model = transformers.Apertus1p5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    files = tokens({RENAMED.get(i, name): i for name, i in SPECIAL.items()})
    own = files["tokenizer.json"]
    own["normalizer"] = json.loads(NORMALIZER)
    own["added_tokens"] = [token for token in own["added_tokens"] if token["id"] not in (69, 70)]
    for token in own["added_tokens"][32:34]:
        token.update(special=False, normalized=True)
    for i in range(MEDIA):
        media = dict(id=TEXT + i, content=f"<|visual token {i}|>", normalized=False, special=True)
        own["added_tokens"].append(EXACT | media)
    write(folder, read_json(folder / "config.json"), files, "</s>", "{{ '<|tool_output_start|>' }}")
    return model


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """{name: transformers' model} of the repositories, which convert.py loads by these names."""
    folders, models = {}, {}
    for name, make in ((NAME, as_published), (MINI, as_mini), (OMNI, as_omni)):
        folders[name] = tmp_path_factory.mktemp("hub")
        models[name] = make(folders[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", lambda name, **how: str(folders[name]))
        yield models


@pytest.mark.parametrize("name, ends", [(NAME, (1, 68, 3)), (MINI, (1, 68, 10)), (OMNI, (1, 2, 3))])
@torch.no_grad()
def test_logits_and_ids_are_transformers_and_an_export_keeps_them(hub, tmp_path, name, ends):
    """A Mini's config has pad_token_id 3, which is [INST] there, so <pad> is found by name."""
    model, tok = convert.load_any(name, dtype=torch.float32)
    idx = torch.randint(1000, TEXT, (2, 40))
    wanted = hub[name](idx).logits[..., :TEXT]
    convert.save_hf(model, str(tmp_path), tok)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close((model(idx), again(idx).logits), (wanted, wanted), rtol=1e-5, atol=1e-5)
    kept = tokenizer.load_for(str(tmp_path))
    assert (kept.hash, kept.system) == (tok.hash, tok.system)
    theirs = transformers.AutoTokenizer.from_pretrained(folder_of(name))
    assert (tok.bos, tok.eos, tok.pad) == ends == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    for text in ("Grüezi mitenand, 你好! x = f(1)\n", "mail <email-pii> \\begin{align}", "   "):
        assert tok.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert tok.decode(tok.encode(text)) == text


SAYS_OMNI = (
    "You are Apertus 1.5 Omni, a multimodal assistant developed by the Swiss AI Initiative. Extended from "
    "Apertus 1 via continued pretraining, you understand images and audio and respond in text."
)


@pytest.mark.parametrize(
    "name, asked, system", [(MINI, "", ""), (MINI, "Be concise.", "Be concise."), (OMNI, "", SAYS_OMNI)]
)
def test_conversations_of_a_mini_and_of_1_5_are_those_of_ollamas_tests(hub, name, asked, system):
    """For 1.5 also those of the template in swiss-ai/apertus-omni-tokenizer."""
    tok = convert.load_any(name)[1]
    messages = dict(role="system", content=asked), dict(role="user", content="Hello")
    found = tok.chat([message for message in messages if message["content"]], add_generation_prompt=True)
    text = (
        f"<s><SPECIAL_61>{system}<SPECIAL_62><SPECIAL_63>Deliberation: disabled\nTool Capabilities: disabled"
        "<SPECIAL_64><SPECIAL_65>Hello<SPECIAL_66><SPECIAL_67>"
    )
    theirs = transformers.AutoTokenizer.from_pretrained(folder_of(name))
    for i, control in enumerate(CHAT, 61) if name == OMNI else ():
        text = text.replace(f"<SPECIAL_{i}>", control)
    assert found == theirs.encode(text, add_special_tokens=False)


def test_of_apertus_1_5_thoughts_are_32_and_33_names_stay_text_and_tools_and_media_are_left_out(hub):
    """In 1.0 thoughts are 69 and 70. Tool calls are an error, because 1.5 has another format for them."""
    tok = tokenizer.load_for(folder_of(OMNI))
    assert tok.decode(tok.encode("a <think> b <answer>")) == "a <think> b <answer>"
    assert [tok.special.get(name) for name in ("<think>", "<|visual token 0|>")] == [69, None]
    assert stop_ids(tok) == {2, 68, 72}
    blocks = dict(type="thoughts", text="a"), dict(type="response", text="b")
    said = dict(role="assistant", content=dict(blocks=[*blocks]))
    row = dict(messages=[dict(role="user", content="c"), said])
    ids, _ = render(tok, row)
    assert ids[-5:] == [32, *tok.encode("a"), 33, *tok.encode("b"), 68]
    assert tok.decode(ids).startswith(f"<s><|system_start|>{SAYS_OMNI}")
    said["tool_calls"] = [dict(function=dict(name="f", arguments="{}"))]
    with pytest.raises(ValueError, match="is of Apertus 1.5: its format for calls of tools"):
        render(tok, row)
    with pytest.raises(ValueError, match="ids of pictures and sound are no text"):
        tok.decode([TEXT])


def test_safetensors_json_and_the_template_are_downloaded_and_nothing_else(hub, monkeypatch):
    folder, asked = folder_of(NAME), []
    download = lambda name, allow_patterns: asked.append(allow_patterns) or folder  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert shape_of("some/body") == start_of("some/body")[0]
    assert asked == [["config.json"], ["*.safetensors", "*.json", "chat_template.jinja"]]


def test_a_chat_template_is_known_by_its_tokens_or_its_hash_and_another_one_is_refused(hub, tmp_path, monkeypatch):
    folder = str(shutil.copytree(folder_of(NAME), tmp_path / "other"))
    (tmp_path / "other" / "chat_template.jinja").write_text("another")
    with pytest.raises(ValueError, match="a chat template that is not Apertus'"):
        tokenizer.load_for(folder).check_chat()
    known = hashlib.sha256(b"another").hexdigest(), CHAT, "system"
    monkeypatch.setattr(tokenizer_json, "FORMATS", [known])
    assert tokenizer.load_for(folder).system == "system"
