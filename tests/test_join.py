"""corpus/join.py, the command of data.py: folders in one, which copies no tokens and replaces only an earlier one."""

import os
import shutil

import pytest

import tokenizer
from conftest import refused, script
from data import TokenDataset


def prepared(out, text, *args):
    """The folder that prepare.py makes of this text, in bytes or other tokens."""
    out.parent.mkdir(exist_ok=True)
    (out.parent / f"{out.name}.txt").write_text(text)
    done = script("prepare.py", f"{out}.txt", f"--out={out}", *(args or ["--tokenizer=byte"]))
    assert done.returncode == 0, done.stderr
    return str(out)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two folders, a and b."""
    root = tmp_path_factory.mktemp("parts")
    return [prepared(root / name, f"the text of {name}, the only text of it. " * 30) for name in "ab"]


def files(folder):
    return {file: open(os.path.join(folder, file), "rb").read() for file in sorted(os.listdir(folder))}


def test_joined_folders_have_the_sources_of_all_and_copy_nothing(folders, tmp_path):
    both = tmp_path / "both"
    assert script("data.py", *folders, f"--join={both}", "--block_size=8").returncode == 0
    assert sorted(files(both)) == ["meta.json", "report.json", "report.md"]
    data = TokenDataset(str(both), "train", 8)
    assert list(data.meta["sources"]) == ["a", "b"]
    assert data.n_tokens == sum(TokenDataset(part, "train", 8).n_tokens for part in folders)
    # Added to itself and once more joined; a name that is there twice gets that of its folder.
    more = prepared(tmp_path / "more" / "b", "another text " * 20)
    assert script("data.py", both, more, f"--join={both}/", "--block_size=8").returncode == 0
    assert list(TokenDataset(str(both), "train", 8).meta["sources"]) == ["a", "b", "b/b"]
    refused(script("data.py", both, more, f"--join={tmp_path / 'new'}"), "already there as 'b/b'")


def test_only_folders_of_one_vocabulary_are_joined_and_it_goes_with_them(folders, tmp_path):
    """Trained on the first folder and in it alone: without it nobody could read the joined one."""
    a = prepared(tmp_path / "a", "the text of a, the only text of it. " * 30, "--train_bpe=330")
    b = prepared(tmp_path / "b", "the text of b, the only text of it. " * 30, f"--tokenizer={a}/tokenizer.json")
    both = tmp_path / "both"
    refused(script("data.py", a, folders[1], f"--join={both}"), "the same --tokenizer")
    refused(script("data.py", a, f"--join={both}"), "--join wants the folders to join")
    assert not both.exists()
    assert script("data.py", a, b, f"--join={both}", "--block_size=8").returncode == 0
    assert files(both)["tokenizer.json"] == files(a)["tokenizer.json"]
    data = TokenDataset(str(both), "train", 8, sources=["b"])
    ids = data.tokens(1, data.n_tokens - 1).tolist()
    assert tokenizer.load_for(data.folder).decode(ids).startswith("the text of b, the only")


def test_join_replaces_nothing_but_an_earlier_join(folders, tmp_path):
    own, ours = tmp_path / "own", tmp_path / "ours"
    own.mkdir()
    (own / "meta.json").write_text("years of work")
    shutil.copytree(folders[0], ours)
    before = files(own), files(ours)
    for into in (own, f"{own}/", ours, ours / "new"):
        refused(script("data.py", ours, folders[1], f"--join={into}"))
        assert (files(own), files(ours)) == before
