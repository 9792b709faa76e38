"""Every long study, from its first command to its page, with small but real runs."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import refused, script, table
from lab import run
from shell import run_shell

from data import open_data
from engine.files import read_json
from engine.runs import settings_of
from studies import borders, decay, kit

# Flags that make a study's commands small. QRPO needs a model that ends its answers, and rewards that differ.
SMALL = """
train: --n_layer=1 --n_head=2 --n_kv_head=1 --n_embd=32 --ffn_dim=64 --compile=False --last_eval_windows=9 \
--batch_size=4 --micro_batch=4 --total_samples=16 --warmup_samples=4 --decay_samples=4
prepare: --train_bpe=400 --max_bytes=1e6
evaluate: --limit=9
posttrain.sft: --epochs=1 --batch_size=64 --micro_batch=64
align posttrain.sft: --init_from=LAB/hf --data=LAB/chats.jsonl --epochs=5 --lr=1e-2 --batch_size=6 --micro_batch=6
posttrain.qrpo: --init_from=LAB/sft --data=LAB/prompts.jsonl --rewards=LAB/reward.py --n_refs=6 --epochs=1
studies.world: --people=8 --refused=3 --nobodies=3 --pages=9 --judgements=40 --corpus_bytes=90000 --unread_bytes=90000
studies.exam: --show=1
studies.memorize: --suffix=50
studies.context: --window=1024
studies.recipe: --report=False
"""
STUDIES = """
align    | --out=NEW/runs --results=NEW --workers=1 --seeds=1 --n_conversations=64 --test_prompts=3 \
--samples=1                                                                           | table.md align.png
decay    | --out=NEW/runs --results=NEW --jobs=1 --seeds=1 '--lrs=(1e-3,)'            | table.md plot.png curves.png
length   | --out=NEW/runs --results=NEW --jobs=1 --seeds=1                            | table.md
memorize | --out=NEW --runs=NEW/runs --jobs=1 --seeds=1 --n_passages=1 --background=9000 '--models=none k4' \
LAB/pages.jsonl                                                                       | table.md maps.png
"""


def small(study, lab, script, args):
    """The arguments of a command of a study, with those that make it small."""
    flags = dict(line.split(": ") for line in SMALL.replace("LAB", str(lab)).strip().splitlines())
    args = [arg.replace("--lookup=100", "--lookup=1") for arg in args]
    return [*args, *flags.get(f"{study} {script}", flags[script]).split()]


@pytest.mark.slow
@pytest.mark.parametrize("study, flags, written", table(STUDIES))
def test_a_study_runs_to_its_page_and_picture(lab, tmp_path, monkeypatch, study, flags, written):
    def call(path, done, script, *args, device=None, root=""):
        args = small(study, lab, script, args)
        run(script, *args)
        assert Path(done).exists()
        kit.write(f"{path}.json", json.dumps(dict(args=args, wall=1)))

    monkeypatch.setattr(kit, "call", call)
    run(f"studies.{study}", *shlex.split(flags.replace("NEW", str(tmp_path)).replace("LAB", str(lab))))
    assert all((tmp_path / name).stat().st_size > 200 for name in written.split())


@pytest.mark.slow
def test_the_recipe_runs_to_its_page_and_picture(lab, tmp_path):
    def call(script, *args):
        run(script, *small("recipe", lab, script, args))
        return 0

    assert run_shell("studies/recipe.sh", call=call, OUT=str(tmp_path)) == 0
    assert all((tmp_path / name).stat().st_size > 200 for name in ("report.md", "recipe.png"))


def read_documents(folder, split):
    return borders.documents_of(read_json(f"{folder}/meta.json"), split, folder)


def test_pieces_of_documents_keep_their_tokens_and_get_other_neighbours(lab, tmp_path):
    """
    Each piece has 40 to 80 tokens and stands in one document of the old folder. Neighbours are of different documents,
    and training and validation share none.
    """
    run("studies.borders", str(lab / "data"), f"--out={tmp_path}/new")
    assert open_data(dict(settings_of(lab / "pretrained"), data=f"{tmp_path}/new"), 256, True)
    for split in ("train", "val"):
        old, new = (
            [piece.tobytes() for piece in read_documents(folder, split)] for folder in (lab / "data", tmp_path / "new")
        )
        origins = [[i for i, text in enumerate(old) if piece in text] for piece in new]
        assert all(40 <= len(piece) // 2 <= 80 for piece in new) and all(origins)
        assert 0.97 < sum(map(len, new)) / sum(map(len, old)) <= 1
        assert split == "val" or sum(a == b for a, b in zip(origins, origins[1:])) < len(new) / 10


@pytest.mark.parametrize("study", ["borders", "repeat"])
def test_a_data_folder_is_not_made_over_files_that_are_there(lab, tmp_path, study):
    """Nor over the folder that it is made from."""
    (tmp_path / "train_00000.npy").write_text("mine")
    data = shutil.copytree(lab / "data", tmp_path.parent / f"{study}-data")
    before = [path.read_bytes() for path in sorted(data.iterdir())]
    for out in (tmp_path, data):
        refused(script(f"studies.{study}", str(data), f"--out={out}/"), "holds files: name a new folder")
    assert (tmp_path / "train_00000.npy").read_text() == "mine"
    assert [path.read_bytes() for path in sorted(data.iterdir())] == before


def test_a_part_of_a_folder_is_its_documents_up_to_a_number_of_tokens_and_all_of_its_validation(lab, tmp_path):
    """Whole documents of the old folder, none twice; the last is the beginning of one."""
    run("studies.repeat", str(lab / "data"), "--tokens=30_000", f"--out={tmp_path}/new")
    old, new = lab / "data", tmp_path / "new"
    assert sum(map(len, read_documents(new, "train"))) + 2 * len(read_documents(new, "train")) == 30_000
    *whole, cut = (ids.tobytes() for ids in read_documents(new, "train"))
    texts = [ids.tobytes() for ids in read_documents(old, "train")]
    assert len(whole) > 1 and len({*whole}) == len(whole) and {*whole} <= {*texts}
    assert any(text.startswith(cut) for text in texts if text not in whole)
    for a, b in zip(read_documents(old, "val"), read_documents(new, "val"), strict=True):
        assert a.tobytes() == b.tobytes()
    assert open_data(dict(settings_of(lab / "pretrained"), data=str(new)), 256, True)


def test_the_rule_of_decay_holds_where_a_model_without_a_decay_is_worse_before_and_better_after():
    """Differences of some 0.1 in five seeds are significant by Holm; differences that change their sign are not."""
    noise = dict(zip(range(2, 7), (0.01, -0.02, 0.0, 0.02, -0.01)))
    rows = [
        dict(arm=arm, seed=seed, lr=1e-3, before=2 + by + noise[seed], loss=1 - by, right=0.5 + noise[seed] * by)
        for arm, by in dict(wsd=0.0, constant=0.1, cosine=0.0, mean=-0.1).items()
        for seed in noise
    ]
    for row in rows:
        if row["arm"] != "wsd":
            row["loss"] += noise[row["seed"]]
    compared = decay.compare(rows)
    verdicts = {arm: [decay.verdict(compared, arm, name) for name in decay.MEASURES] for arm in decay.ARMS[1:]}
    assert verdicts["constant"] == ["worse", "better", "not decided"]
    assert verdicts["cosine"] == ["not decided", "not decided", "not decided"]
    assert verdicts["mean"] == ["better", "worse", "not decided"]
    assert "the published finding holds here" in decay.conclusion(compared)
    searched = [dict(arm=arm, seed=1, lr=lr, loss=abs(lr - 1e-3)) for arm in decay.ARMS for lr in decay.lrs]
    assert set(decay.best_rates(searched).values()) == {1e-3}
