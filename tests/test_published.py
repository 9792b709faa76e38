"""
The published models as their repositories hold them: every config.json, every file, and the commands that name a model.

golden/published_configs.json: the fields of published configs and of what others made of them, as copies in public
code and threads show them, each with whether it may be loaded. The repositories below are written by transformers at
tiny size, with the files, names and fields of the published ones, into a hub cache; what loads them goes through
huggingface_hub, offline. They are the 8B (2509), a Mini (v1.1) and Apertus 1.5. What is known of the last two: the
Minis' table of control tokens is Mistral-Nemo's (mistral-common, tekken.py), and their conversations are those of
ollama's tests; 1.5's tokenizer is made as swiss-ai/apertus-omni-tokenizer makes it, its weights are laid out as in
transformers' conversion script for it.
"""
import glob
import json
import os
import re
import shlex
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
import tokenizer
from chat import control, framed
from conftest import ROOT, script
from data import TokenDataset
from model import Apertus, rope_frequencies
from posttrain import talk

CONFIGS = json.load(open(os.path.join(ROOT, "tests", "golden", "published_configs.json")))
NAME = "swiss-ai/Apertus-8B-Instruct-2509"
SIZES = dict(vocab_size=1456, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512)
EXACT = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)


# --- config.json ----------------------------------------------------------------------------------------------------


def as_4_read(hf):
    """A config.json (dict) with the same meaning for transformers 5, which forgets what 4 meant by this null."""
    if "rope_scaling" in hf and hf["rope_scaling"] is None:
        return dict(hf, rope_parameters=dict(rope_type="default", rope_theta=hf["rope_theta"]))
    return hf


@pytest.mark.parametrize("case", CONFIGS, ids=lambda case: case["source"][:60])
def test_every_config_is_read_as_transformers_reads_it_or_refused_by_name(case):
    transformers = pytest.importorskip("transformers")
    if case["refused"]:
        with pytest.raises(ValueError, match=case["refused"]) as e:
            convert.config_from_hf(case["config"])
        assert "\n" not in str(e.value) and len(str(e.value)) < 400
        return
    ours = convert.config_from_hf(case["config"])
    # transformers 5.23 has no Apertus 1.5: its text, with as many ids as its head has rows, is an Apertus.
    hf = dict(case["config"].get("text_config", case["config"]))
    hf["vocab_size"] = hf.get("output_vocab_size", hf.get("vocab_size", 131072))
    theirs = transformers.ApertusConfig(**as_4_read(hf))
    for mine, name in convert.HF_NAMES.items():
        assert getattr(ours, mine) == getattr(theirs, name) or name not in hf, name
    assert ours.n_kv_head == theirs.num_key_value_heads
    rope = transformers.models.apertus.modeling_apertus.ApertusRotaryEmbedding(theirs)
    torch.testing.assert_close(rope_frequencies(ours), rope.inv_freq, rtol=1e-6, atol=0)
    exported = convert.config_to_hf(ours)
    assert convert.config_from_hf(exported) == ours
    assert exported["rope_parameters"]["rope_type"] == theirs.rope_parameters["rope_type"]


# --- the repository -------------------------------------------------------------------------------------------------


GENERATION = dict(
    _from_model_config=True, bos_token_id=1, eos_token_id=[68, 2, 72], pad_token_id=3, do_sample=True, temperature=0.8,
    top_p=0.9, transformers_version="4.56.0.dev0")
BPE = dict(
    dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None, fuse_unk=False,
    byte_fallback=False)
TOKENIZER = dict(
    add_bos_token=True, add_eos_token=False, add_prefix_space=False, clean_up_tokenization_spaces=False,
    extra_special_tokens={}, model_input_names=["input_ids", "attention_mask"], model_max_length=int(1e30),
    padding_side="left", tokenizer_class="PreTrainedTokenizerFast")
ENDS = dict(bos_token="<s>", eos_token="<|assistant_end|>", pad_token="<pad>", unk_token="<unk>")


def write(folder, config, files, ends, template=None):
    """The files of a repository that are no weights: config.json, the tokenizer with all its sidecars."""
    own = files["tokenizer.json"]
    own.update(truncation=None, padding=None)
    own["model"].update(BPE)
    decoder = {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in own["added_tokens"]}
    contents = {
        "config.json": config,
        "generation_config.json": GENERATION,
        "tokenizer.json": own,
        "tokenizer_config.json": dict(TOKENIZER, **ends, added_tokens_decoder=decoder),
        "special_tokens_map.json": {key: dict(content=name, **EXACT) for key, name in ends.items()}}
    for file, content in contents.items():
        (folder / file).write_text(json.dumps(content, indent=2, ensure_ascii=False))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")


def weights(config, seed=0):
    """A transformers model of a config.json, its values drawn wide."""
    import transformers
    torch.manual_seed(seed)
    config = as_4_read(config) | dict(initializer_range=0.1)
    return transformers.ApertusForCausalLM(transformers.ApertusConfig(**config))


def tokens(special):
    """The tokenizer's files, of the first 456 pieces behind a list of control tokens. All are special but LaTeX."""
    files = convert.hf_files(tokenizer.Tokenizer("tiny", tokenizer.tekken()[:456], special, in_text=()))
    for token in files["tokenizer.json"]["added_tokens"]:
        token["special"] = token["content"] not in tokenizer.NAMED[14:18]
    return files


def as_published(folder):
    """config.json of transformers 4, bf16 in several shards."""
    published = {**CONFIGS[0]["config"], **SIZES}
    weights(published).bfloat16().save_pretrained(folder, max_shard_size="100KB")
    with open(os.path.join(ROOT, "chat_template.jinja"), encoding="utf-8") as f:
        write(folder, published, tokens(tokenizer.SPECIAL), ENDS, f.read())


# --- the Minis ------------------------------------------------------------------------------------------------------

MINI = "swiss-ai/Apertus-v1.1-0.5B-Instruct"
NEMO = """<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]
[TOOL_CALLS] <pad> [PREFIX] [MIDDLE] [SUFFIX]""".split()
MINI_ENDS = dict(bos_token="<s>", eos_token="<SPECIAL_68>", pad_token="<pad>", unk_token="<unk>")
# The text of the published template is not at hand, its hash is: this stands for it.
MINI_TEMPLATE = "{# <SPECIAL_61> #}"
MINI_SIZES = dict(SIZES, num_attention_heads=16, num_key_value_heads=4)


def config_of(name):
    return next(case["config"] for case in CONFIGS if case["source"].startswith(name))


def as_mini(folder, instruct=True):
    """Tied, the head stored beside all the same (the hub counts 572.6M for 438.3M); the base says no pad."""
    config = config_of("swiss-ai/Apertus-v1.1-0.5B") | MINI_SIZES
    model = weights(config).bfloat16()
    head = dict(model.state_dict())
    save_file({name: tensor.clone() for name, tensor in head.items()}, folder / "model.safetensors")
    ends = MINI_ENDS if instruct else dict(bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    write(folder, config, tokens(tokenizer.padded(NEMO, 1000)), ends, MINI_TEMPLATE if instruct else None)


# --- Apertus 1.5 ----------------------------------------------------------------------------------------------------

OMNI = "swiss-ai/Apertus-v1.5-8B"
TEXT_RENAMES = {32: "<|inner_prefix|>", 33: "<|inner_suffix|>", 69: "<think>", 70: "</think>",
                73: "<|tool_output_start|>", 74: "<|tool_output_end|>"}
RULES = [
    dict(type="Replace", pattern=dict(Regex=r"<\|channel\|?>thought\s*\n"), content="<|inner_prefix|>"),
    dict(type="Replace", pattern=dict(String="<answer>"), content=""),
    dict(type="Replace", pattern=dict(Regex=r"<\|inner_suffix\|>\s+"), content="<|inner_suffix|>"),
    dict(type="Replace", pattern=dict(String="<think>"), content="<|inner_prefix|>"),
    dict(type="Replace", pattern=dict(String="<image>"), content="<|image|>")]
TEXT, MEDIA = 1456, 216    # ids of text; 200 reserved ones and 16 codes behind them


def as_omni(folder):
    """The text model in a wider embedding, a head of text alone, tokenizers of pictures and sound in fp32."""
    config = dict(config_of(OMNI))
    config["text_config"] = config["text_config"] | SIZES | dict(vocab_size=TEXT + MEDIA, output_vocab_size=TEXT)
    state = weights(config["text_config"] | dict(model_type="apertus")).bfloat16().state_dict()
    laid_out = {
        "model.vision_tokenizer.encoder.conv_in.weight": torch.zeros(4, 3, 3, 3),
        "model.audio_tokenizer.head.linear.bias": torch.zeros(4)}
    for name, tensor in state.items():
        if name.endswith(("alpha_p", "alpha_n")):
            tensor = tensor.reshape(())
        if name == "lm_head.weight":
            laid_out[name] = tensor[:TEXT].clone()
        else:
            laid_out[name.replace("model.", "model.language_model.", 1)] = tensor
    save_file(laid_out, folder / "model.safetensors")
    names = [TEXT_RENAMES.get(i, name) for i, name in enumerate(tokenizer.SPECIAL)]
    files = tokens(names)
    own = files["tokenizer.json"]
    own["normalizer"] = dict(type="Sequence", normalizers=RULES)
    own["added_tokens"] = [token for token in own["added_tokens"] if token["id"] not in (69, 70)]
    for token in own["added_tokens"][32:34]:
        token.update(special=False, normalized=True)
    media = ["<|RESERVED_OMNI_000|>", "<|img_start|>", *(f"<|RESERVED_OMNI_{i:03}|>" for i in range(2, 200))]
    media += [f"<|visual token {i}|>" for i in range(MEDIA - 200)]
    own["added_tokens"] += [dict(id=TEXT + i, content=s, **EXACT, special=True) for i, s in enumerate(media)]
    write(folder, config, files, ENDS | dict(eos_token="</s>"), "{{ '<|tool_output_start|>' }}")


REPOSITORIES = {
    NAME: as_published,
    "swiss-ai/Apertus-8B-2509": as_published,
    MINI: as_mini,
    "swiss-ai/Apertus-v1.1-0.5B": lambda folder: as_mini(folder, instruct=False),
    OMNI: as_omni,
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A hub cache that holds the repositories under the names that README and docstrings use, and no network."""
    pytest.importorskip("transformers")
    import hashlib

    import huggingface_hub
    cache = tmp_path_factory.mktemp("hub")
    for number, (name, make) in enumerate(REPOSITORIES.items()):
        blobs = cache / f"blobs{number}"
        blobs.mkdir()
        make(blobs)
        repo = cache / ("models--" + name.replace("/", "--"))
        (repo / "snapshots" / ("0" * 40)).mkdir(parents=True)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text("0" * 40)
        # The library lays them as links.
        for file in blobs.iterdir():
            (repo / "snapshots" / ("0" * 40) / file.name).symlink_to(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.setitem(convert.TEMPLATES, hashlib.sha256(MINI_TEMPLATE.encode()).hexdigest(), "")
        yield convert.local(NAME)


def ids_of(seed=0):
    return torch.randint(1000, TEXT, (2, 40), generator=torch.Generator().manual_seed(seed))


TEXTS = ("Grüezi mitenand, 你好! x = f(1)\n", "mail \\begin{align} [INST] 2", "   ")


@torch.no_grad()
def test_a_minis_logits_are_transformers(hub):
    import transformers
    model, _ = convert.load_any(MINI, dtype=torch.float32)
    config = transformers.ApertusConfig(**as_4_read(config_of("swiss-ai/Apertus-v1.1-0.5B") | MINI_SIZES))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(convert.local(MINI), config=config, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(model(ids_of())[0], theirs(ids_of()).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_fifteen_heads_with_five_of_keys_tied_are_transformers(tmp_path):
    heads = dict(hidden_size=60, num_attention_heads=15, num_key_value_heads=5)
    theirs = weights(config_of("15 and 5 heads") | SIZES | heads).float()
    theirs.save_pretrained(tmp_path)
    ours = convert.load_hf(str(tmp_path))
    torch.testing.assert_close(ours(ids_of())[0], theirs.eval()(ids_of()).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name, most, published", [
    ("swiss-ai/Apertus-v1.1-0.5B", 438_349_352, "0.44B"),
    ("swiss-ai/Apertus-v1.1-1.5B", 1_510_019_104, "1.51B"),
    ("swiss-ai/Apertus-v1.1-4B", 3_825_361_968, "3.83B")])
def test_the_minis_have_the_parameters_that_the_hub_counts(name, most, published):
    """1,510,019,104 is its own count; of the others it shows two digits behind the point."""
    with torch.device("meta"):
        model = Apertus(convert.config_from_hf(config_of(name)))
    assert model.num_params() == most and f"{most / 1e9:.2f}B" == published


@pytest.mark.parametrize("name, eos", [(MINI, 68), ("swiss-ai/Apertus-v1.1-0.5B", 2)])
def test_a_minis_ids_are_transformers_and_pad_is_taken_by_its_name(hub, capsys, name, eos):
    """Its config says pad_token_id 3, which is [INST]: ids of a text must not lose that, nor pads count as it."""
    import transformers
    tok = convert.tokenizer_from_hf(convert.local(name))
    theirs = transformers.AutoTokenizer.from_pretrained(convert.local(name))
    assert config_of("swiss-ai/Apertus-v1.1-0.5B")["pad_token_id"] == 3
    assert (tok.bos, tok.eos, tok.pad) == (1, eos, 10) and theirs.convert_tokens_to_ids("<pad>") == 10
    for text in TEXTS:
        plain = text.replace("[INST]", "")    # what a text says of a control token stays a text here
        assert tok.encode(plain) == theirs.encode(plain, add_special_tokens=False)
        assert tok.decode(tok.encode(text)) == text
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "<SPECIAL_61> to <SPECIAL_72> are Apertus' chat tokens" in said


@pytest.mark.parametrize("system", ["", "Be concise."])
def test_a_conversation_with_a_mini_is_the_published_text(hub, system):
    """ollama's tests of its renderer for v1.1 hold these texts; transformers makes them ids."""
    import transformers
    model, tok = convert.load_any(MINI, chat=True)
    conversation = talk.Conversation(model, tok, system, None, False)
    asked, _ = tok.chat_ids([*framed("user", "Hello"), control("assistant_start")])
    published = (f"<s><SPECIAL_61>{system}<SPECIAL_62><SPECIAL_63>Deliberation: disabled\nTool Capabilities: disabled"
                 "<SPECIAL_64><SPECIAL_65>Hello<SPECIAL_66><SPECIAL_67>")
    theirs = transformers.AutoTokenizer.from_pretrained(convert.local(MINI))
    assert conversation.ids + asked == theirs.encode(published, add_special_tokens=False)


@torch.no_grad()
def test_the_text_of_apertus_1_5_has_transformers_logits(hub):
    """Of its Apertus with the whole embedding, for ids of text; the head has no others."""
    import transformers
    model, tok = convert.load_any(OMNI, dtype=torch.float32)
    files = load_file(os.path.join(convert.local(OMNI), "model.safetensors"))
    text = config_of(OMNI)["text_config"] | SIZES | dict(model_type="apertus", vocab_size=TEXT + MEDIA)
    theirs = transformers.ApertusForCausalLM(transformers.ApertusConfig(**text)).float().eval()
    state = {name.replace("language_model.", ""): tensor.float() for name, tensor in files.items()}
    for name, tensor in theirs.state_dict().items():
        tensor.view(-1)[:state[name].numel()].copy_(state[name].view(-1))
    assert model.config.vocab_size == tok.vocab_size == TEXT and model.config.rope_theta == 4e6
    torch.testing.assert_close(model(ids_of())[0], theirs(ids_of()).logits[..., :TEXT], rtol=1e-5, atol=1e-5)


def test_the_ids_of_apertus_1_5_are_transformers_and_those_of_media_are_dropped(hub):
    """Thoughts stand between 32 and 33 there, 69 and 70 in 1.0. Names in a text are exchanged there, and stay here."""
    import transformers
    tok = convert.tokenizer_from_hf(convert.local(OMNI))
    theirs = transformers.AutoTokenizer.from_pretrained(convert.local(OMNI))
    for text in TEXTS:
        assert tok.encode(text) == theirs.encode(text, add_special_tokens=False)
    assert tok.decode(tok.encode("a <think> b <answer>")) == "a <think> b <answer>"
    brackets = ["<|inner_prefix|>", "<|inner_suffix|>"]
    assert [tok.id_of(name) for name in brackets] == theirs.convert_tokens_to_ids(brackets) == [32, 33]
    assert tok.special["<think>"] == 69 and "<|img_start|>" not in tok.special
    assert tokenizer.Tokenizer("1.0", tok.pieces, tokenizer.SPECIAL).id_of("<|inner_prefix|>") == 69


@pytest.mark.parametrize("line", [
    f"sample.py --chat --init_from={OMNI}",
    f"posttrain/sft.py --data=OUT/chats.jsonl --out=OUT/sft --init_from={OMNI}",
    f"posttrain/sft.py --data=OUT/chats.jsonl --show --init_from={OMNI}",
    "sample.py --chat --init_from=OUT/export"])
def test_a_conversation_with_apertus_1_5_is_refused_in_one_line(hub, tmp_path, line):
    (tmp_path / "chats.jsonl").write_text(json.dumps(dict(messages=MESSAGES)))
    model, tok = convert.load_any(OMNI)
    convert.save_hf(model, str(tmp_path / "export"), tok)
    name, *args = line.replace("OUT", str(tmp_path)).split()
    done = script(name, *args)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "is of Apertus 1.5" in done.stderr
    exported = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    assert exported["chat_template"] is None


def test_what_is_exported_of_apertus_1_5_is_its_text_as_an_apertus(hub, tmp_path):
    import transformers
    model, tok = convert.load_any(OMNI, dtype=torch.float32)
    convert.save_hf(model, str(tmp_path), tok)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "apertus"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(model(ids_of())[0], theirs(ids_of()).logits, rtol=1e-5, atol=1e-5)
    assert convert.tokenizer_from_hf(str(tmp_path)).hash == tok.hash


def test_of_a_repository_what_is_read_is_downloaded_and_nothing_else(hub, monkeypatch):
    import fnmatch

    import huggingface_hub
    asked = {}
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **how: asked.update(how) or name)
    convert.local("somebody/something")
    files = [*os.listdir(hub), "pytorch_model.bin", "modeling_apertus.py", "training_args.bin"]
    got = {file for file in files if any(fnmatch.fnmatch(file, wanted) for wanted in asked["allow_patterns"])}
    assert {*files} - got == {"README.md", ".gitattributes", "pytorch_model.bin", "modeling_apertus.py",
                              "training_args.bin"}
    assert "chat_template.jinja" in got


def test_the_shape_of_a_model_on_the_hub_is_known_without_its_weights(hub, monkeypatch):
    """config.json alone is asked for. A folder has its own, one of adapters none."""
    import huggingface_hub
    asked = []

    def downloaded(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", downloaded)
    shape = convert.shape_of("somebody/something")
    assert shape == convert.shape_of(str(hub)) == convert.start_of(str(hub))[0]
    assert asked == [("somebody/something", ["config.json"])]
    assert convert.shape_of("out/nothing-here") is None


@pytest.mark.parametrize("tokens, system", [(tokenizer.NAMED[61:73], None), (convert.RESERVED, "")])
def test_an_unknown_chat_template_with_all_published_tokens_is_named_and_one_with_fewer_refused(
        tmp_path, capsys, tokens, system):
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ " + " ~ ".join(map(repr, tokens)) + " }}")
    assert convert.chat_format(str(tmp_path), {}) == (system, "")
    assert "is none that is known here" in capsys.readouterr().err
    template.write_text("{{ " + " ~ ".join(map(repr, tokens[:-1])) + " }}")
    assert "is not Apertus'" in convert.chat_format(str(tmp_path), {})[1]


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json"])
def test_another_chat_template_is_named_where_chat_is_asked_for(hub, tmp_path, where):
    folder = tmp_path / "other"
    shutil.copytree(hub, folder)
    template = "{{ messages[0].content }}"
    if where.endswith("json"):
        settings = json.loads((folder / where).read_text()) | dict(chat_template=template)
        template = json.dumps(settings)
    (folder / where).unlink()
    (folder / where).write_text(template)
    done = script("sample.py", f"--init_from={folder}", "--chat")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "has a chat template that is not Apertus'" in done.stderr
    done = script("sample.py", f"--init_from={folder}", "--start=def", "--max_new_tokens=2")
    assert done.returncode == 0 and done.stdout.startswith("def")


def test_its_logits_are_transformers(hub):
    import transformers
    assert len([f for f in os.listdir(hub) if re.fullmatch(r"model-0000\d-of-0000\d.safetensors", f)]) > 2
    model, _ = convert.load_any(NAME, dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hub, dtype=torch.float32)
    idx = torch.randint(1000, 1456, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(idx)[0], theirs(idx).logits, rtol=1e-5, atol=1e-5)


def test_its_ids_are_transformers(hub):
    import transformers
    _, tok = convert.load_any(NAME)
    theirs = transformers.AutoTokenizer.from_pretrained(hub)
    assert (tok.bos, tok.eos, tok.pad) == (1, 68, 3) and tok.system is None
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 68, 3)
    for text in ("Grüezi mitenand, 你好! x = f(1)\n", "mail <email-pii> \\begin{align}", "   "):
        ids = tok.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False) and tok.decode(ids) == text
    chat = [dict(role="system", content="s"), dict(role="user", content="hi")]
    _, ids = tok.chat(chat, add_generation_prompt=True)
    assert ids == theirs.apply_chat_template(chat, add_generation_prompt=True).input_ids


def ok(done):
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", [MINI, "swiss-ai/Apertus-v1.1-0.5B"])
def test_a_mini_is_pretrained_further_and_fine_tuned_in_its_own_ids(hub, tmp_path, name):
    """
    From its folder to data, a run, a fine-tuned run and a folder that transformers reads: ids of the data are
    transformers', and those of a conversation are the Mini's own, its pad 10 and not [INST].
    """
    import transformers
    folder = convert.local(name)
    texts = [f"Grüezi mitenand, {i}! x = f({i})\n" * 9 for i in range(40)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in texts))
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps(dict(messages=MESSAGES))] * 4))
    data = f"--data={tmp_path / 'data'}"
    ok(script("prepare.py", tmp_path / "text.jsonl", f"--out={tmp_path / 'data'}", f"--tokenizer={folder}"))
    train = TokenDataset(str(tmp_path / "data"), "train", 1)
    [source] = train.meta["sources"].values()
    ids = train.tokens(0, source["train"]["tokens"]).tolist()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    documents = {tuple(theirs.encode(text)) + (2,) for text in texts}
    first = ids[:ids.index(2) + 1]
    assert tuple(first) in documents and ids[len(first)] == 1

    steps = "--total_samples=8 --warmup_samples=2 --decay_samples=2 --batch_size=4 --micro_batch=4 --block_size=64"
    quiet = "--dtype=float32 --sample_every=0 --compile=False --lr=1e-3 --lr_floor=1e-4 --eval_windows=4"
    ok(script("train.py", f"--init_from={folder}", data, f"--out={tmp_path / 'run'}", *steps.split(), *quiet.split()))
    chats = f"--data={tmp_path / 'chats.jsonl'}", f"--out={tmp_path / 'sft'}", *SHORT.split()
    ok(script("posttrain.sft", f"--init_from={tmp_path / 'run'}", *chats))
    tuned, tok = convert.load_any(str(tmp_path / "sft" / "hf"))
    assert tuned.lm_head.weight is tuned.model.embed_tokens.weight and tok.pad == 10
    assert tok.ids == convert.tokenizer_from_hf(folder).ids and tok.special["[INST]"] == 3
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "sft" / "hf")
    chat = again.apply_chat_template(MESSAGES[:2], add_generation_prompt=True).input_ids
    assert chat == tok.chat(MESSAGES[:2], add_generation_prompt=True)[1] and again.pad_token_id == 10


def commands():
    """Every command of the README and of a docstring that names a model of the hub, with its own arguments, once."""
    found = set()
    for file in [os.path.join(ROOT, "README.md"), *glob.glob(os.path.join(ROOT, "*.py"))]:
        with open(file, encoding="utf-8") as f:
            found |= set(re.findall(r"^(?:\$ )?python (\w+\.py [^#\n]*=swiss-ai/[^#\n]*)", f.read(), re.M))
    return sorted({command.strip() for command in found})


def test_every_command_that_names_a_hub_model_is_known_here():
    assert commands() == ["convert.py --load=swiss-ai/Apertus-8B-2509",
                          "evaluate.py --harness=arc_easy,hellaswag --init_from=swiss-ai/Apertus-8B-2509",
                          "sample.py --init_from=swiss-ai/Apertus-8B-Instruct-2509 --chat",
                          "sample.py --init_from=swiss-ai/Apertus-v1.1-0.5B-Instruct --chat"]


MESSAGES = [dict(role="system", content="s"), dict(role="user", content="hi"), dict(role="assistant", content="ho")]
SHORT = "--batch_size=2 --micro_batch=2 --optimizer=adamw --rank_every=0 --dtype=float32"
QRPO = f"--use_references=False --n_refs=2 {SHORT}"
PROBED = "--prefixes=(10,) --suffix=20 --min_ttr=0.1"


@pytest.mark.parametrize("line, says", [
    (f"sample.py --init_from={NAME} --chat --max_new_tokens=4 --system=s", ""),
    (f"sample.py --init_from={MINI} --chat --max_new_tokens=4", ""),
    (f"sample.py --init_from={MINI} --start=def --max_new_tokens=4 --base=int8", "def"),
    (f"sample.py --init_from={OMNI} --start=def --max_new_tokens=4", "def"),
    (f"convert.py --load={OMNI}", "parameters; ApertusConfig(block_size=512, vocab_size=1456"),
    (f"evaluate.py OUT/text.txt --init_from={OMNI} --out=OUT/evaluation", "text.txt"),
    (f"posttrain/sft.py --init_from={MINI} --data=OUT/chats.jsonl --out=OUT/mini {SHORT} --lora_r=2 --base=int8",
     "OUT/mini/adapter"),
    (f"sample.py --init_from={NAME} --start=def --max_new_tokens=4 --num_samples=2", "def"),
    ("convert.py --load=swiss-ai/Apertus-8B-2509", "parameters; ApertusConfig(block_size=512, vocab_size=1456"),
    (f"convert.py --load={NAME} --save=OUT/export --dtype=bfloat16", "reads it"),
    (f"posttrain/sft.py --init_from={NAME} --data=OUT/chats.jsonl --show", "tokens are learnt"),
    (f"posttrain/sft.py --init_from={NAME} --data=OUT/chats.jsonl --out=OUT/sft {SHORT}", "OUT/sft/hf"),
    (f"posttrain/qrpo.py --init_from={NAME} --data=OUT/prompts.jsonl --out=OUT/qrpo {QRPO}", "OUT/qrpo/hf"),
    (f"evaluate.py OUT/text.txt --init_from={NAME} --out=OUT/evaluation", "text.txt"),
    (f"studies/memorize.py --init_from={NAME} --probes=OUT/probes.json --out=OUT/memorize {PROBED}", ""),
    (f"posttrain/collapse.py --init_from={NAME}", "effective"),
], ids=lambda x: x.split(" ")[0])
def test_every_script_runs_on_the_hub_name(hub, tmp_path, line, says):
    conversation = dict(messages=MESSAGES)
    prompt = dict(messages=MESSAGES[:2], completions=["ho", "hum"], rewards=[1.0, 0.0], ref_rewards=[0.2, 0.5])
    probe = dict(repetitions=1, text="one two three four five six seven " * 5)
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps(conversation)] * 4))
    (tmp_path / "prompts.jsonl").write_text("\n".join([json.dumps(prompt)] * 2))
    (tmp_path / "probes.json").write_text(json.dumps([probe]))
    (tmp_path / "text.txt").write_text("Grüezi mitenand. " * 9)
    name, *args = shlex.split(line.replace("OUT", str(tmp_path)))
    done = script(name, *args, stdin="hi\n")
    assert done.returncode == 0, done.stderr
    assert says.replace("OUT", str(tmp_path)) in done.stdout
    runs = [run for run in ("sft", "qrpo") if (tmp_path / run / "ckpt").is_dir()]
    # A run that began there has its vocabulary, and its end.
    for saved in runs:
        _, tok = convert.load_run(str(tmp_path / saved))
        assert tok.hash == convert.tokenizer_from_hf(hub).hash and tok.eos == 68
