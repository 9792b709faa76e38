"""corpus/cluster.py: datatrove's executors make of the same texts the tokens that prepare.py makes, however often killed."""
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest

from conftest import ROOT, script

pytest.importorskip("datatrove")
import prepare  # noqa: E402
import pyarrow.parquet  # noqa: E402

from corpus.steps import keys_of, share_of, write_keys  # noqa: E402
from engine.files import lock_file  # noqa: E402

WORDS = [f"w{i}" for i in range(3000)]
HOSTS = ["a.org", "b.org", "c.org", "d.org"]
ROBOTS = [dict(domain="b.org", content="User-agent: GPTBot\nDisallow: /"), dict(domain="a.org", content="User-agent: *")]


def rows(n, seed=0):
    rng = random.Random(seed)
    return [dict(id=f"{seed}-{i}", text=" ".join(rng.choices(WORDS, k=rng.randint(60, 120))) + f" mail {i}@x.org",
                 url=f"https://{rng.choice(HOSTS)}/{seed}/{i}", license=rng.choice(["cc0", "mit", "none"]),
                 language=rng.choice(["deu", "fra"]), date=f"20{10 + i % 9}-01-01") for i in range(n)]


def write(path, records):
    path.write_text("".join(json.dumps(row) + "\n" for row in records))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Files with copies of each other's documents, in the order of the input and against it; an empty one, no text."""
    root = tmp_path_factory.mktemp("texts")
    (root / "in").mkdir()
    every = [rows(80, seed) for seed in range(4)]
    every[3] += [dict(row, id=f"copy {i}") for i, row in enumerate(every[0][:15])]
    every[1] = [dict(row, id=f"early {i}") for i, row in enumerate(every[2][:15])] + every[1]
    for seed, records in enumerate(every):
        write(root / "in" / f"{seed}.jsonl", records)
    (root / "in" / "empty.jsonl").write_text("")
    (root / "in" / "x.txt").write_bytes(b"Gr\xfcezi")
    (root / "in" / "y.pdf").write_bytes(b"%PDF")
    write(root / "robots.jsonl", ROBOTS)
    return root


def flags(root, *more):
    return [f"{root}/in", f"--robots={root}/robots.jsonl", "--keep_licenses=cc0,mit", "--tokenizer=byte",
            "--min_tokens=100", "--source_by=language", *more]


def cluster(out, *args, **options):
    command = [sys.executable, "-m", "corpus.cluster", *map(str, args), f"--out={out}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def alone(texts):
    """What prepare.py makes of them."""
    done = script("prepare.py", *flags(texts), f"--out={texts}/alone/data")
    assert done.returncode == 0, done.stderr
    return texts / "alone" / "data"


def streams(folder):
    """{(source, split): all of its tokens, in order}"""
    meta = json.loads((folder / "meta.json").read_text())
    return {(name, split): np.concatenate([np.zeros(0, np.uint16), *(np.load(folder / shard["file"])
                                                                     for shard in part["shards"])]).tolist()
            for name, source in meta["sources"].items() for split, part in source.items()}


def listed(folder):
    """The rows of kept.parquet but for the places, which other cuts between shards move."""
    table = pyarrow.parquet.read_table(folder / "kept.parquet")
    return table.drop_columns(["shard", "offset"]).to_pylist()


def removed(folder):
    with gzip.open(folder / "removed.jsonl.gz", "rt") as lines:
        return Counter(lines)


def same(folder, alone):
    """Tokens and their order, the list of what is in, what was removed, the audit."""
    assert streams(folder) == streams(alone) and any(map(len, streams(alone).values()))
    assert listed(folder) == listed(alone) and removed(folder) == removed(alone)
    reports = [json.loads((one / "report.json").read_text()) for one in (folder, alone)]
    for key in reports[0].keys() - {"run", "outputs"}:
        assert reports[0][key] == reports[1][key], key
    assert reports[1]["total"]["removed"].keys() >= {"robots", "license", "duplicate", "unreadable"}


@pytest.mark.parametrize("tasks, parts", [(3, 4), (1, 1), (9, 2)])
def test_any_number_of_tasks_makes_the_tokens_of_prepare_in_its_order(texts, alone, tmp_path, tasks, parts):
    done = cluster(tmp_path / "data", *flags(texts, f"--tasks={tasks}", f"--parts={parts}", "--shard_tokens=5000"))
    assert done.returncode == 0, done.stderr[-2000:]
    same(tmp_path / "data", alone)
    # The tokens of a document stand where kept.parquet says.
    meta = json.loads((tmp_path / "data" / "meta.json").read_text())
    for row in pyarrow.parquet.read_table(tmp_path / "data" / "kept.parquet").to_pylist():
        assert np.load(tmp_path / "data" / row["shard"])[row["offset"]] == meta["bos"]
    assert script("data.py", f"{tmp_path}/data").returncode == 0


STAND_INS = dict(
    # Runs each task of an array at once, in order, as the script of the job says.
    sbatch="""array=$(grep -o '^#SBATCH --array=.*' "${@: -1}" | sed 's/.*=//; s/%.*//')
for task in $(seq ${array%-*} ${array#*-}); do
    SLURM_ARRAY_TASK_ID=$task SLURM_JOB_ID=7 SLURM_NODELIST=here bash "${@: -1}" || exit 1
done
echo Submitted batch job 7""",
    srun="shift 3; exec \"$@\"",
    scontrol="echo localhost")


@pytest.mark.skipif(not shutil.which("bash"), reason="jobs of Slurm are scripts of bash")
def test_the_jobs_that_are_given_to_slurm_make_the_same(texts, alone, tmp_path):
    """Real job scripts and pickles, on a stand-in for the three commands of Slurm."""
    (tmp_path / "bin").mkdir()
    for name, lines in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = dict(os.environ, PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    done = cluster(tmp_path / "data", *flags(texts, "--tasks=2", "--parts=1", "--executor=slurm", "--partition=cpu"),
                   env=env)
    assert done.returncode == 0 and "submitted" in done.stdout, done.stderr[-2000:]
    same(tmp_path / "data", alone)


def test_killed_in_every_stage_and_started_again_it_makes_the_same(texts, alone, tmp_path):
    out, kills = tmp_path / "data", 0
    command = [sys.executable, "-m", "corpus.cluster", *flags(texts, "--tasks=2", "--parts=2"), f"--out={out}"]
    for place in ("judged", "keys", "parts", "kept"):
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=-3, stderr=-3)
        while process.poll() is None and not (out / "work" / place).exists():
            time.sleep(0.01)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
        assert not (out / "meta.json").exists()
    # Another run does not go on in it, and this one does.
    other = cluster(out, *flags(texts, "--tasks=2", "--parts=3"))
    assert other.returncode == 2 and "holds another run" in other.stderr.splitlines()[-1]
    assert cluster(out, *flags(texts, "--tasks=2", "--parts=2")).returncode == 0 and kills == 4
    same(out, alone)
    again = cluster(out, *flags(texts, "--tasks=2", "--parts=2"))
    assert again.returncode == 2 and "is finished" in again.stderr


def test_on_real_text_of_four_languages_it_is_the_same(tmp_path):
    """Laws, manuals, speeches and a novel, with personal data, rules about text and the ids of a BPE."""
    shared = os.path.join(ROOT, "..", "shared", "data")
    names = ("code_civil_fr.jsonl", "pydocs_ita_Latn.jsonl", "us_speeches.jsonl", "kafka_verwandlung_de.txt")
    files = [os.path.join(shared, name) for name in names]
    if not all(map(os.path.isfile, files)):
        pytest.skip("shared/data is not there")
    args = [*files, "--tokenizer=apertus:2048", "--source_by=file", "--heuristics=gopher,repetition"]
    assert script("prepare.py", *args, f"--out={tmp_path}/alone/data").returncode == 0
    process = subprocess.Popen([sys.executable, "-m", "corpus.cluster", *args, f"--out={tmp_path}/data"], cwd=ROOT,
                               start_new_session=True, stdout=-3, stderr=-3)
    while process.poll() is None and not (tmp_path / "data" / "work" / "parts").exists():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert cluster(tmp_path / "data", *args).returncode == 0
    assert streams(tmp_path / "data") == streams(tmp_path / "alone" / "data")
    assert listed(tmp_path / "data") == listed(tmp_path / "alone" / "data") and len(listed(tmp_path / "data")) > 500


def test_of_near_duplicates_in_pairs_the_first_stays_as_in_prepare(tmp_path):
    """Ten pages with one copy each in which a word is another, in other files."""
    (tmp_path / "in").mkdir()
    first, second = rows(60, 1), rows(60, 2)
    for i in range(10):
        second[3 * i]["text"] = first[5 * i]["text"].replace(first[5 * i]["text"].split()[40], "other", 1)
    for name, records in (("a", first), ("b", second)):
        write(tmp_path / "in" / f"{name}.jsonl", records)
    args = [f"{tmp_path}/in", "--tokenizer=byte", "--near_dedup=0.72"]
    assert script("prepare.py", *args, f"--out={tmp_path}/alone/data").returncode == 0
    assert cluster(tmp_path / "data", *args, "--tasks=2", "--parts=2").returncode == 0
    assert streams(tmp_path / "data") == streams(tmp_path / "alone" / "data")
    assert removed(tmp_path / "data") == removed(tmp_path / "alone" / "data") and sum(removed(tmp_path / "data").values()) > 5


def test_keys_are_written_as_datatrove_reads_them(tmp_path):
    from datatrove.pipeline.dedup.minhash import read_sigs
    from datatrove.io import get_datafolder
    keys = np.random.default_rng(1).integers(0, 2**64, (50, 3), np.uint64)
    write_keys(tmp_path, 7, keys)
    for number in range(3):
        file = get_datafolder(str(tmp_path)).open(f"bucket_{number:03d}/00007.minhash.sig")
        found = [(one.sig, one.doc_id) for one in read_sigs(file, 0, keys_of(2))]
        halves = [((int(key) >> 32, int(key) % 2**32), i) for i, key in enumerate(keys[:, number])]
        assert found == sorted(halves)


def test_tasks_have_neighbouring_files_and_all_of_them_once():
    from types import SimpleNamespace
    plan = SimpleNamespace(files=list(range(40)), sizes=np.random.default_rng(2).integers(0, 1000, 40).tolist())
    for tasks in (1, 3, 40, 100):
        assert sum((share_of(plan, rank, tasks) for rank in range(tasks)), []) == plan.files


@pytest.mark.parametrize("more, says", [
    (["--tokenizer="], "name the texts and a --tokenizer"), (["--max_bytes=5"], "--max_bytes looks at all"),
    (["--executor=cloud"], "want local, slurm or ray"), (["--executor=slurm"], "wants --partition"),
    (["--tasks=0"], "at least one"), (["--missing=perhaps"], "want 'allow'"), (["--task=3"], "did you mean 'tasks'")])
def test_what_does_not_fit_is_one_line_and_leaves_nothing(texts, tmp_path, more, says):
    done = cluster(tmp_path / "data", *flags(texts, *more))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and says in done.stderr
    assert not (tmp_path / "data").exists()


def test_a_task_that_fails_says_in_a_line_that_nothing_is_lost_and_two_at_once_are_refused(texts, tmp_path):
    done = cluster(tmp_path / "data", *flags(texts, "--strict"))
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and "(--strict)" in last and "the same command goes on" in last
    with open(tmp_path / "data" / "work" / "lock", "a") as lock:
        assert lock_file(lock)
        done = cluster(tmp_path / "data", *flags(texts, "--strict"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "another run is at work" in done.stderr


def test_texts_that_have_changed_since_it_began_are_not_mixed_with_those_before(texts, tmp_path):
    shutil.copytree(texts / "in", tmp_path / "in")
    args = [f"{tmp_path}/in", "--tokenizer=byte"]
    assert cluster(tmp_path / "data", *args, "--strict").returncode == 2
    os.utime(tmp_path / "in" / "0.jsonl", (1, 1))
    done = cluster(tmp_path / "data", *args, "--strict")
    assert done.returncode == 2 and "begun with other texts" in done.stderr.splitlines()[-1]


def test_data_that_are_not_what_was_counted_are_no_data(texts, tmp_path, monkeypatch):
    """The last stage alone, with an audit that counts a document more than there is."""
    from corpus import steps
    done = cluster(tmp_path / "data", *flags(texts, "--strict"))
    assert done.returncode == 2
    plan = json.loads((tmp_path / "data" / "work" / "cluster.json").read_text())
    plan["asked"]["strict"] = False
    (tmp_path / "data" / "work" / "cluster.json").write_text(json.dumps(plan))
    before = dict(vars(prepare))
    try:
        steps.Judge(tmp_path / "data").run(rank=0, world_size=1)
        steps.Deal(tmp_path / "data").run(steps.Judged(tmp_path / "data").run())
        for part in range(plan["asked"]["parts"]):
            steps.Tokens(tmp_path / "data").run(rank=part)
        true = steps.take_in
        # Everything is counted twice.
        monkeypatch.setattr(steps, "take_in", lambda audit, part: [true(audit, json.loads(json.dumps(part))) for _ in "12"])
        with pytest.raises(ValueError):
            steps.Account(tmp_path / "data").run()
    finally:
        vars(prepare).update(before)
    assert not (tmp_path / "data" / "meta.json").exists()


@pytest.mark.parametrize("out", ["", "."])
def test_no_folder_is_not_the_root_of_the_disk(texts, out):
    """The working folder of this test, the project's own, is somebody's."""
    done = cluster(out, *flags(texts))
    assert done.returncode == 2 and ". holds something else" in done.stderr


def test_an_empty_folder_is_taken_and_stays_where_a_setting_is_refused(texts, tmp_path):
    (tmp_path / "mine").mkdir()
    done = cluster(f"{tmp_path}/mine/", *flags(texts, "--missing=perhaps"))
    assert done.returncode == 2 and os.listdir(tmp_path / "mine") == []
    assert cluster(f"{tmp_path}/mine/", *flags(texts, "--tasks=1", "--parts=1")).returncode == 0


def test_a_folder_of_others_is_left_alone(texts, tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    done = cluster(tmp_path, *flags(texts))
    assert done.returncode == 2 and "holds something else" in done.stderr and os.listdir(tmp_path) == ["note.txt"]
