"""
The published models as their repositories hold them: every config.json, every file, and the commands that name a model.

golden/published_configs.json: the fields of published configs and of what others made of them, as copies in public code and threads
show them, each with whether it may be loaded. The repository below is written by transformers at tiny size, with the files, names and
fields of swiss-ai/Apertus-8B-Instruct-2509, into a hub cache; what loads it goes through huggingface_hub, offline.
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


# --- config.json ----------------------------------------------------------------------------------------------------------


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
    if "rope_scaling" in hf and hf["rope_scaling"] is None:                # transformers 5 forgets what 4 meant by this null
        hf.update(rope_scaling=None, rope_parameters=dict(rope_type="default", rope_theta=hf["rope_theta"]))
    theirs = transformers.ApertusConfig(**hf)
    for mine, name in convert.HF_NAMES.items():
        assert getattr(ours, mine) == getattr(theirs, name) or name not in hf, name
    assert ours.n_kv_head == theirs.num_key_value_heads
    rope = transformers.models.apertus.modeling_apertus.ApertusRotaryEmbedding(theirs)
    torch.testing.assert_close(rope_frequencies(ours), rope.inv_freq, rtol=1e-6, atol=0)


# --- the repository -------------------------------------------------------------------------------------------------------


def as_published(folder):
    """The files of the repository, tiny: config.json of transformers 4, bf16 in several shards, the tokenizer with all its sidecars."""
    import transformers
    published = {**CONFIGS[0]["config"], **SIZES}
    torch.manual_seed(0)
    model = transformers.ApertusForCausalLM(transformers.ApertusConfig(**{**published, "initializer_range": 0.1})).bfloat16()
    model.save_pretrained(folder, max_shard_size="100KB")
    write = lambda file, content: (folder / file).write_text(json.dumps(content, indent=2, ensure_ascii=False))
    write("config.json", published)
    write("generation_config.json", dict(_from_model_config=True, bos_token_id=1, eos_token_id=[68, 2, 72], pad_token_id=3,
                                         do_sample=True, temperature=0.8, top_p=0.9, transformers_version="4.56.0.dev0"))
    files = convert.hf_files(tokenizer.Tokenizer("tiny", tokenizer.tekken()[:456], tokenizer.SPECIAL))
    own = files["tokenizer.json"]
    own.update(truncation=None, padding=None)
    own["model"].update(dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None, fuse_unk=False,
                        byte_fallback=False)
    for token in own["added_tokens"]:
        token["special"] = token["content"] not in tokenizer.NAMED[14:18]  # of the published file LaTeX alone is not
    write("tokenizer.json", own)
    write("tokenizer_config.json", dict(
        add_bos_token=True, add_eos_token=False, add_prefix_space=False,
        added_tokens_decoder={str(t["id"]): {k: v for k, v in t.items() if k != "id"} for t in own["added_tokens"]},
        bos_token="<s>", clean_up_tokenization_spaces=False, eos_token="<|assistant_end|>", extra_special_tokens={},
        model_input_names=["input_ids", "attention_mask"], model_max_length=int(1e30), pad_token="<pad>", padding_side="left",
        tokenizer_class="PreTrainedTokenizerFast", unk_token="<unk>"))
    ends = dict(bos_token="<s>", eos_token="<|assistant_end|>", pad_token="<pad>", unk_token="<unk>")
    write("special_tokens_map.json", {key: dict(content=name, **EXACT) for key, name in ends.items()})
    shutil.copy(os.path.join(ROOT, "chat_template.jinja"), folder / "chat_template.jinja")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A hub cache that holds the repository under the names that the README and the files' docstrings use, and no network."""
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
        for file in blobs.iterdir():                                       # as the library lays them: links
            (repo / "snapshots" / ("0" * 40) / file.name).symlink_to(file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        yield str(blobs)


def test_its_logits_and_ids_are_transformers(hub):
    import transformers
    assert len([f for f in os.listdir(hub) if re.fullmatch(r"model-0000\d-of-0000\d.safetensors", f)]) > 2
    model, tok = convert.load_any(NAME, dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hub, dtype=torch.float32)
    idx = torch.randint(1000, 1456, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(idx)[0], theirs(idx).logits, rtol=1e-5, atol=1e-5)
    reads = transformers.AutoTokenizer.from_pretrained(hub)
    assert (tok.bos, tok.eos, tok.pad) == (reads.bos_token_id, reads.eos_token_id, reads.pad_token_id) == (1, 68, 3)
    for text in ("Grüezi mitenand, 你好! x = f(1)\n", "mail <email-pii> \\begin{align}", "   "):
        assert tok.encode(text) == reads.encode(text, add_special_tokens=False) and tok.decode(tok.encode(text)) == text
    chat = [dict(role="system", content="s"), dict(role="user", content="hi")]
    assert tok.chat(chat, add_generation_prompt=True)[1] == reads.apply_chat_template(chat, add_generation_prompt=True).input_ids


def commands():
    """Every command of the README and of a docstring that names a model of the hub, with its own arguments, and no others twice."""
    found = set()
    for file in [os.path.join(ROOT, "README.md"), *glob.glob(os.path.join(ROOT, "*.py"))]:
        with open(file, encoding="utf-8") as f:
            found |= set(re.findall(r"^(?:\$ )?python (\w+\.py [^#\n]*=swiss-ai/[^#\n]*)", f.read(), re.M))
    return sorted({command.strip() for command in found})


def test_every_command_that_names_a_hub_model_is_known_here():
    assert commands() == ["convert.py --load=swiss-ai/Apertus-8B-2509",
                          "evaluate.py --harness=arc_easy,hellaswag --init_from=swiss-ai/Apertus-8B-2509",
                          "sample.py --init_from=swiss-ai/Apertus-8B-Instruct-2509 --chat"]


ROW = dict(messages=[dict(role="system", content="s"), dict(role="user", content="hi"), dict(role="assistant", content="ho")])
SHORT = "--batch_size=2 --micro_batch=2 --optimizer=adamw --rank_every=0 --dtype=float32"


@pytest.mark.parametrize("line, says", [
    (f"sample.py --init_from={NAME} --chat --max_new_tokens=4 --system=s", ""),
    (f"sample.py --init_from={NAME} --start=def --max_new_tokens=4 --num_samples=2", "def"),
    ("convert.py --load=swiss-ai/Apertus-8B-2509", "parameters; ApertusConfig(block_size=512, vocab_size=1456"),
    (f"convert.py --load={NAME} --save=OUT/export --dtype=bfloat16", "reads it"),
    (f"posttrain/sft.py --init_from={NAME} --data=OUT/chats.jsonl --show", "tokens are learnt"),
    (f"posttrain/sft.py --init_from={NAME} --data=OUT/chats.jsonl --out=OUT/sft {SHORT}", "OUT/sft/hf"),
    (f"posttrain/qrpo.py --init_from={NAME} --data=OUT/prompts.jsonl --out=OUT/qrpo --use_references=False --n_refs=2 {SHORT}", "OUT/qrpo/hf"),
    (f"evaluate.py OUT/text.txt --init_from={NAME} --out=OUT/evaluation", "text.txt"),
    (f"studies/memorize.py --init_from={NAME} --probes=OUT/probes.json --prefixes=(10,) --suffix=20 --min_ttr=0.1 --out=OUT/memorize", ""),
    (f"posttrain/collapse.py --init_from={NAME}", "effective"),
], ids=lambda x: x.split(" ")[0])
def test_every_script_runs_on_the_hub_name(hub, tmp_path, line, says):
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps(ROW)] * 4))
    prompt = dict(messages=ROW["messages"][:2], completions=["ho", "hum"], rewards=[1.0, 0.0], ref_rewards=[0.2, 0.5])
    (tmp_path / "prompts.jsonl").write_text("\n".join([json.dumps(prompt)] * 2))
    (tmp_path / "text.txt").write_text("Grüezi mitenand. " * 9)
    (tmp_path / "probes.json").write_text(json.dumps([dict(repetitions=1, text="one two three four five six seven " * 5)]))
    name, *args = shlex.split(line.replace("OUT", str(tmp_path)))
    done = script(name, *args, stdin="hi\n")
    assert done.returncode == 0, done.stderr
    assert says.replace("OUT", str(tmp_path)) in done.stdout
    runs = [run for run in ("sft", "qrpo") if (tmp_path / run / "ckpt").is_dir()]
    for saved in runs:                                                     # a run that began there has its vocabulary, and its end
        tok = convert.load_run(str(tmp_path / saved))[1]
        assert tok.hash == convert.tokenizer_from_hf(hub).hash and tok.eos == 68
