"""
The published models as their repositories hold them: every config.json, every file, and the commands that name a model.

golden/published_configs.json: the fields of published configs and of what others made of them, as copies in public
code and threads show them, each with whether it may be loaded. The repository below is written by transformers at
tiny size, with the files, names and fields of swiss-ai/Apertus-8B-Instruct-2509, into a hub cache; what loads it goes
through huggingface_hub, offline.
"""
import glob
import json
import os
import re
import shlex
import shutil

import pytest
import torch

import convert
import tokenizer
from conftest import ROOT, script
from model import rope_frequencies

CONFIGS = json.load(open(os.path.join(ROOT, "tests", "golden", "published_configs.json")))
NAME = "swiss-ai/Apertus-8B-Instruct-2509"
SIZES = dict(vocab_size=1456, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=512)
EXACT = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)


# --- config.json ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CONFIGS, ids=lambda case: case["source"][:60])
def test_every_config_is_read_as_transformers_reads_it_or_refused_by_name(case):
    transformers = pytest.importorskip("transformers")
    if case["refused"]:
        with pytest.raises(ValueError, match=case["refused"]) as e:
            convert.config_from_hf(case["config"])
        assert "\n" not in str(e.value) and len(str(e.value)) < 400
        return
    ours = convert.config_from_hf(case["config"])
    hf = dict(case["config"])
    # transformers 5 forgets what 4 meant by this null.
    if "rope_scaling" in hf and hf["rope_scaling"] is None:
        hf.update(rope_scaling=None, rope_parameters=dict(rope_type="default", rope_theta=hf["rope_theta"]))
    theirs = transformers.ApertusConfig(**hf)
    for mine, name in convert.HF_NAMES.items():
        assert getattr(ours, mine) == getattr(theirs, name) or name not in hf, name
    assert ours.n_kv_head == theirs.num_key_value_heads
    rope = transformers.models.apertus.modeling_apertus.ApertusRotaryEmbedding(theirs)
    torch.testing.assert_close(rope_frequencies(ours), rope.inv_freq, rtol=1e-6, atol=0)


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


def as_published(folder):
    """
    The files of the repository, tiny: config.json of transformers 4, bf16 in several shards, the tokenizer with all
    its sidecars.
    """
    import transformers
    published = {**CONFIGS[0]["config"], **SIZES}
    torch.manual_seed(0)
    config = transformers.ApertusConfig(**{**published, "initializer_range": 0.1})
    transformers.ApertusForCausalLM(config).bfloat16().save_pretrained(folder, max_shard_size="100KB")
    files = convert.hf_files(tokenizer.Tokenizer("tiny", tokenizer.tekken()[:456], tokenizer.SPECIAL))
    own = files["tokenizer.json"]
    own.update(truncation=None, padding=None)
    own["model"].update(BPE)
    decoder = {}
    for token in own["added_tokens"]:
        # Of the published file LaTeX alone is not special.
        token["special"] = token["content"] not in tokenizer.NAMED[14:18]
        decoder[str(token["id"])] = {k: v for k, v in token.items() if k != "id"}
    contents = {
        "config.json": published,
        "generation_config.json": GENERATION,
        "tokenizer.json": own,
        "tokenizer_config.json": dict(TOKENIZER, **ENDS, added_tokens_decoder=decoder),
        "special_tokens_map.json": {key: dict(content=name, **EXACT) for key, name in ENDS.items()}}
    for file, content in contents.items():
        (folder / file).write_text(json.dumps(content, indent=2, ensure_ascii=False))
    shutil.copy(os.path.join(ROOT, "chat_template.jinja"), folder / "chat_template.jinja")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A hub cache that holds the repository under the names that README and docstrings use, and no network."""
    pytest.importorskip("transformers")
    import huggingface_hub
    cache = tmp_path_factory.mktemp("hub")
    blobs = cache / "blobs"
    blobs.mkdir()
    as_published(blobs)
    for name in (NAME, "swiss-ai/Apertus-8B-2509"):
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
        yield str(blobs)


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
    assert (tok.bos, tok.eos, tok.pad) == (1, 68, 3)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (1, 68, 3)
    for text in ("Grüezi mitenand, 你好! x = f(1)\n", "mail <email-pii> \\begin{align}", "   "):
        ids = tok.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False) and tok.decode(ids) == text
    chat = [dict(role="system", content="s"), dict(role="user", content="hi")]
    _, ids = tok.chat(chat, add_generation_prompt=True)
    assert ids == theirs.apply_chat_template(chat, add_generation_prompt=True).input_ids


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
                          "sample.py --init_from=swiss-ai/Apertus-8B-Instruct-2509 --chat"]


MESSAGES = [dict(role="system", content="s"), dict(role="user", content="hi"), dict(role="assistant", content="ho")]
SHORT = "--batch_size=2 --micro_batch=2 --optimizer=adamw --rank_every=0 --dtype=float32"
QRPO = f"--use_references=False --n_refs=2 {SHORT}"
PROBED = "--prefixes=(10,) --suffix=20 --min_ttr=0.1"


@pytest.mark.parametrize("line, says", [
    (f"sample.py --init_from={NAME} --chat --max_new_tokens=4 --system=s", ""),
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
