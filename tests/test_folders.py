"""train.py --data=A,B and {A: 2, B: 1}, up to the audit: like a run on one folder with both texts."""

import shutil
from pathlib import Path

import pytest
from conftest import refused, script
from lab import run
from trained import corpus, equal, killed_after, log, ran, trained

from engine import plot
from engine.files import read_json

# The mixture of two folders, and of their sources in one folder: by size, or two of three samples of the first.
WEIGHTED = "--stage=all", "--stages=(('1',{'a.jsonl':2,'b.jsonl':1},1000000,28),)"
FORMS = {"{a},{b}": [], "{{{a}: 2, {b}: 1}}": WEIGHTED}
XIELU = "--activation=xielu"  # which transformers has


@pytest.fixture(scope="module", params=FORMS)
def runs(tmp_path_factory, request):
    """(--data of two folders, a run on it, one folder with both texts, a run on it)"""
    root = tmp_path_factory.mktemp("folders")
    both = corpus(root)
    for name in "ab":
        flags = f"--source_by=file --tokenizer=byte --val_share=0.2 --out={root}/{name}"
        run("prepare.py", f"{root}/{name}.jsonl", *flags.split())
    data = request.param.format(a=f"{root}/a", b=f"{root}/b")
    return (
        data,
        trained(data, root / "apart", XIELU),
        both,
        trained(both, root / "together", XIELU, *FORMS[request.param]),
    )


def test_a_run_on_two_folders_is_that_on_one_with_both_texts_killed_and_resumed_too(runs, tmp_path):
    data, apart, _, together = runs
    assert equal(apart, together) and log(apart, "val_bpb") == log(together, "val_bpb") != []
    assert equal(trained(data, killed_after(apart, tmp_path / "killed", 10), XIELU, "--resume"), together)


def test_its_curve_is_compared_with_that_of_the_other_run(runs):
    """Their data have other hashes, and the same validation text."""
    _, apart, _, together = runs
    assert list(plot.shared_panels([apart, together])) == ["val_bpb"]


def test_it_is_evaluated_on_the_validation_text_of_both(runs, tmp_path):
    _, apart, _, together = runs
    for folder in apart, together:
        run("evaluate.py", f"--init_from={folder}", f"--out={tmp_path / folder.name}")
    one, other = (read_json(f"{tmp_path}/{folder.name}/evaluation.json")["rows"] for folder in (apart, together))
    assert one == other


@pytest.mark.parametrize("name", "ab")
def test_the_audit_of_either_folder_names_the_steps_that_read_a_document(runs, name):
    """Those of the run on one folder, and none for a document of the validation split."""
    _, apart, both, together = runs
    answers = []
    for folder, trained_run in (f"{Path(both).parent}/{name}", apart), (both, together):
        find = [f"--find={name}.jsonl line {i + 1}" for i in range(40)]
        said = [run("corpus.audit", folder, document, f"--when={trained_run}").stdout for document in find]
        answers.append([text.splitlines()[-1].replace(str(trained_run), "RUN") for text in said])
    assert answers[0] == answers[1]
    assert sum("steps of RUN: " in text for text in answers[0]) > 10 and any(
        "validation" in text for text in answers[0]
    )


def test_a_document_that_is_removed_from_one_folder_ends_the_run_and_its_audit(runs, tmp_path):
    data, apart, both, _ = runs
    root = Path(both).parent
    kept = shutil.copytree(root / "b", tmp_path / "kept")
    (tmp_path / "list").write_text("b.jsonl line 4\n")
    run("prepare.py", f"--remove={tmp_path / 'list'}", f"--out={root / 'b'}")
    killed = killed_after(apart, tmp_path / "killed", 10)
    refused(ran(data, killed, XIELU, "--resume"), "data_hash")
    find = "--find=a.jsonl line 6", f"--when={apart}"
    refused(script("corpus.audit", root / "a", *find), "has changed since the run began")
    gone = script("corpus.audit", root / "b", "--find=b.jsonl line 4", find[1])
    refused(gone, "its steps can no longer be counted")
    assert gone.stdout.startswith("b.jsonl line 4 came in and was removed: withdrawn:id")
    shutil.rmtree(root / "b")
    shutil.move(kept, root / "b")
    assert ran(data, killed, XIELU, "--resume").returncode == 0
    refused(script("corpus.audit", both, *find), "ask that folder")


def test_folders_of_two_vocabularies_are_an_error_in_one_line(runs, tmp_path):
    _, _, both, _ = runs
    run("prepare.py", f"{Path(both).parent}/b.jsonl", "--train_bpe=400", f"--out={tmp_path / 'bpe'}")
    other = f"{both},{tmp_path / 'bpe'}"
    refused(ran(other, tmp_path / "run"), "prepare both with the same --tokenizer")
    assert not (tmp_path / "run").exists()
