"""
What can go wrong with a run, done to it on purpose; after each fault the final weights must be those of a run that nothing happened to.

$ make faults                                          # all of it, and 500 kills more than the record has
$ python tests/faults/suite.py --kills=20 --only=kill  # a part, and nothing is recorded
$ python tests/faults/suite.py --kills=50 --only=kill --record=results/faults     # kills add up, the table follows
$ python -m pytest tests/faults                        # the short form, also in `make test`

Every function here takes the laboratory and how often to try, raises AssertionError where a promise is broken, and returns its rows of the
table: (fault, times tried, steps lost, outcome). All runs are exact (fp64 sums), so "the same" is a sha256 of all weights, on any
number of processes.
"""
import collections
import glob
import json
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(os.path.dirname(HERE)), os.path.dirname(HERE)]

from faults.launch import Launcher, losses, sha_of  # noqa: E402

kills = 500          # kill -9
flips = 1000         # single bits
only = ""            # run these only: names as below, with commas between
work = "out/faults"  # where; deleted before and after
record = ""          # a folder: keep the results there (faults.json), and write its table.md; "" = print them only

STEPS = 30
MODEL = ["--n_layer=1", "--n_embd=32", "--ffn_dim=64", "--n_head=2", "--n_kv_head=1", "--block_size=32", "--vocab_size=0"]
RUN = ["configs/tiny.py", *MODEL, "--dtype=float32", "--batch_size=8", "--micro_batch=2", f"--total_samples={8 * STEPS}", "--warmup_samples=16",
       "--decay_samples=64", "--alpha_warmup=20", "--beta3_warmup=20", "--eval_every=1000", "--checkpoint_every=5", "--exact", "--timeout=60"]


class Lab:
    """A folder, a corpus, a launcher, and the run that nothing happens to."""

    def __init__(self, launch, folder):
        self.launch, self.folder, self.known = launch, str(folder), {}
        os.makedirs(self.folder, exist_ok=True)
        self.data = self.corpus("data", "The quick brown fox number %d jumps over the lazy dog, and %d lines follow.\n")

    def corpus(self, name, line):
        """60 kB of text as token shards of bytes."""
        text, out = os.path.join(self.folder, name + "-text"), os.path.join(self.folder, name)
        os.makedirs(text, exist_ok=True)
        for i in range(24):
            with open(os.path.join(text, f"{i}.txt"), "w", encoding="utf-8") as f:
                f.write("".join(line % (i, j) for j in range(4 if i in (1, 18) else 40)))       # the two for validation, read at each run's end
        codes, said = self.launch(0, text, f"--out={out}", "--tokenizer=byte", "--val_share=0.05", script="prepare.py", logs=out + ".log")
        assert codes == [0], said
        return out

    def fresh(self, name):
        path = os.path.join(self.folder, name)
        shutil.rmtree(path, ignore_errors=True)
        return path

    def args(self, run, ranks, *more):
        return [*RUN, f"--data={self.data}", f"--out={run}", "--resume", *(["--parallel=fsdp"] if ranks else []), *more]

    def run(self, run, ranks, *more, fault="", uid=0, limit=120):
        """To the end: (exit codes, what was said). ranks = 0: plain `python train.py`."""
        return self.launch(ranks, *self.args(run, ranks, *more), fault=fault, uid=uid, limit=limit, logs=run + ".log")

    def start(self, run, ranks, *more, fault=""):
        return self.launch.start(ranks, *self.args(run, ranks, *more), fault=fault, logs=run + ".log")

    def whole(self):
        """(sha256, {step: loss}, seconds) of the run that nothing happens to, on one process."""
        if not self.known:
            began, run = time.monotonic(), self.fresh("whole")
            codes, text = self.run(run, 0)
            assert codes == [0], text
            self.known = dict(sha=sha_of(run)[0], losses=losses(run), seconds=time.monotonic() - began)
        return self.known["sha"], self.known["losses"], self.known["seconds"]

    def must_end_well(self, run, ranks, *more):
        """Go on with a run, without a fault: it ends with the weights and the losses of the whole run."""
        codes, text = self.run(run, ranks, *more)
        assert set(codes) == {0}, (codes, text[-3000:])
        sha, steps, _ = self.whole()
        assert sha_of(run) == (sha, STEPS), "the weights differ from those of the run that nothing happened to"
        assert losses(run) == steps, "a step has another loss, or is missing"
        return text


def kill(lab, times, worlds=(1, 2, 4), seed=0):
    """kill -9 of one or of all ranks at any moment (start-up, loading, saving included), on as many processes as the next launch draws."""
    draw, left, counts = random.Random(seed), times, collections.Counter(kills=times)
    sha, steps, seconds = lab.whole()
    while left:
        run, seen = lab.fresh("kill"), collections.defaultdict(set)
        while True:
            ranks = draw.choice(worlds)
            counts[f"on {ranks}"] += 1
            trial, killed = lab.start(run, ranks), False
            if left:
                wait_for_a_moment(trial, run, draw, seconds)
                trial.kill(trial.pids if draw.random() < 0.5 else [draw.choice(trial.pids)])
            codes = trial.wait(grace=1)
            killed = -9 in codes
            left -= killed
            counts["in a save"] += bool(glob.glob(os.path.join(run, "ckpt", "*.tmp")))
            for step, loss in losses(run).items():
                seen[step].add(loss)
            if set(codes) == {0}:                                                # whole, or stopped right after: then nothing is left to do
                break
            if not killed and "is finished" in trial.text():
                break
            if os.path.isdir(run):
                assert killed, (codes, trial.text()[-3000:])
        counts["ends"] += 1
        assert {s: {x} for s, x in steps.items()} == dict(seen), "a step had two losses, or is missing"
        assert sha_of(run)[0] == sha, "the weights differ"
    return [kill_row(counts)]


def kill_row(counts):
    how = ", ".join(f"{counts[f'on {ranks}']} on {ranks}" for ranks in (1, 2, 4))
    return (f"kill -9 of one or all ranks, launches redrawn ({how})", counts["kills"], 0,
            f"{counts['ends']} runs ended in identical weights; {counts['in a save']} launches left an unfinished save behind", counts)


def wait_for_a_moment(trial, run, draw, seconds):
    """Return some time into a trial: in its start (3 of 10), in a save (3 of 10), or after a step that is drawn (4 of 10)."""
    what, reach, ended = draw.random(), draw.randrange(max(losses(run), default=0), STEPS), time.monotonic() + seconds * draw.random()
    while None in trial.codes():
        if what < 0.3 and time.monotonic() > ended or what >= 0.6 and max(losses(run), default=0) >= reach:
            break
        if 0.3 <= what < 0.6 and glob.glob(os.path.join(run, "ckpt", "*.tmp")) and draw.random() < 0.2:
            break
        time.sleep(0.003)


def elastic(lab, times=1):
    """1 -> 2 -> 4 -> 1 processes, each stopping in the middle."""
    run = lab.fresh("elastic")
    for ranks, until in ((0, 7), (2, 15), (4, 22), (1, STEPS)):
        codes, text = lab.run(run, ranks, f"--total_samples={8 * until}", "--decay_samples=0") if until < STEPS else ([0], "")
        assert set(codes) == {0}, text
    # the schedule depends on total_samples: WSD is flat until its decay, so a shorter run is a prefix up to STEPS - 8
    lab.must_end_well(run, 1)
    return [("another number of processes at each start (1, 2, 4, 1)", 3 * times, 0, "identical weights")]


def prepared(lab):
    """A run that was stopped after step 20, with two checkpoints (15 and 20); copied, since many faults begin there."""
    origin = os.path.join(lab.folder, "prepared")
    if not os.path.isdir(os.path.join(origin, "ckpt", "step-00000020")):
        codes, text = lab.run(origin, 2, f"--total_samples={8 * 20}", "--decay_samples=0")
        assert set(codes) == {0}, text
    run = lab.fresh("copy")
    shutil.copytree(origin, run)
    return run


def flip(path, at):
    with open(path, "r+b") as f:
        f.seek(at // 8)
        byte = f.read(1)[0]
        f.seek(at // 8)
        f.write(bytes([byte ^ 1 << at % 8]))


def flip_bits(lab, times, seed=0):
    """Any single bit of any file of a checkpoint."""
    from engine import checkpoint
    run, draw, missed = prepared(lab), random.Random(seed), 0
    newest = os.path.join(run, "ckpt", "step-00000020")
    checkpoint.verified(newest)
    files = sorted(glob.glob(newest + "/*"))
    bits = [8 * os.path.getsize(f) for f in files]
    for i in range(times):
        file, = draw.choices(range(len(files)), weights=bits if i % 2 else None)        # by size, and each file alike
        at = draw.randrange(bits[file])
        flip(files[file], at)
        try:
            checkpoint.verified(newest)
            missed += 1
        except ValueError:
            pass
        flip(files[file], at)
    checkpoint.verified(newest)
    assert not missed
    flip(files[0], 4242)
    text = lab.must_end_well(run, 2)
    assert "passed over" in text and "resumed from" in text and "step-00000015" in text
    return [("one bit flipped, in any file of a checkpoint", times, 0, "all found; the one before was used, identical weights")]


def damage(lab, times=1):
    """Files of the newest checkpoint cut, emptied, missing, foreign; then of all checkpoints."""
    def each(change, which="20"):
        run = prepared(lab)
        for folder in glob.glob(os.path.join(run, "ckpt", f"step-*{which}")):
            change(folder, sorted(glob.glob(folder + "/shard-*"))[0])
        return run

    changes = {"a shard cut short": lambda d, s: os.truncate(s, 1000), "a shard emptied": lambda d, s: os.truncate(s, 0),
               "a shard missing": lambda d, s: os.remove(s), "the manifest emptied": lambda d, s: os.truncate(d + "/manifest.json", 0),
               "a foreign shard beside": lambda d, s: shutil.copy(s, d + "/shard-00009-model-00001-of-00001.safetensors"),
               "a shard of another step": lambda d, s: shutil.copy(s.replace("step-00000020", "step-00000015"), s)}
    for i, (name, change) in enumerate(changes.items()):
        text = lab.must_end_well(each(change), 2 * (i % 3 == 0))                 # two processes, or one alone
        assert "passed over" in text, name
    run = each(changes["a shard emptied"], which="")
    codes, text = lab.run(run, 0)
    assert codes == [2] and "no checkpoint in" in text and "--allow_restart" in text and "Traceback" not in text, text
    text = lab.must_end_well(run, 0, "--allow_restart")
    return [("files of the newest checkpoint cut, emptied, missing, foreign", len(changes), 0, "named and passed over, identical weights"),
            ("all checkpoints damaged", 1, 0, "stops and says so; starts over with --allow_restart only")]


class Disk:
    """
    What a power cut may leave of a folder, at each moment of what is done to it: with Disk(folder) as disk. Both may be lost until they are
    flushed: a file's content (os.fsync of the file), and its name (os.fsync of the folder that holds it). Deletions may be kept all the same.
    """

    def __init__(self, folder, states):
        self.folder, self.states = folder, states
        self.moments, self.promised = [], 0                                      # what a caller has been told is safe
        self.content, self.names = set(), {}                                     # inodes of flushed files; of folders, the names flushed
        self.true = {(module, name): getattr(module, name) for module, name in (
            (os, "fsync"), (os, "rename"), (os, "replace"), (os, "mkdir"), (shutil, "rmtree"))}

    def __enter__(self):
        true = {name: act for (_, name), act in self.true.items()}
        self.names[os.stat(self.folder).st_ino] = set(os.listdir(self.folder))

        def fsync(fd):
            true["fsync"](fd)
            if "torch" in sys._getframe(1).f_code.co_filename:                   # DCP flushes its files today, and has not promised to
                return
            found = os.fstat(fd)
            if stat.S_ISDIR(found.st_mode):
                self.names[found.st_ino] = set(os.listdir(fd))
            else:
                self.content.add(found.st_ino)
            self.moment("fsync")

        def then(name):
            def act(*args, **kwargs):
                true[name](*args, **kwargs)
                if str(args[0]).startswith(self.folder + os.sep):
                    self.moment(f"{name} {os.path.basename(str(args[0]))}")
            return act

        def rmtree(path, ignore_errors=False):                                   # a deletion is many: a moment after each file
            for file in sorted(glob.glob(os.path.join(path, "*"))):
                os.remove(file)
                self.moment(f"remove {os.path.basename(file)}")
            if os.path.isdir(path):
                os.rmdir(path)
                self.moment("rmdir")

        os.fsync, shutil.rmtree = fsync, rmtree
        os.rename, os.replace, os.mkdir = then("rename"), then("replace"), then("mkdir")
        return self

    def __exit__(self, *error):
        for (module, name), act in self.true.items():
            setattr(module, name, act)

    def moment(self, what):
        """Remember the folder as it is now, and what of it is safe."""
        copy = os.path.join(self.states, f"{len(self.moments):03d}")
        here, loose, unnamed = set(), [], []
        for root, folders, files in os.walk(self.folder):
            known = self.names.get(os.stat(root).st_ino, set())
            for name in folders + files:
                path = os.path.join(root, name)
                inode = os.stat(path).st_ino
                here.add(inode)
                if name in files and inode not in self.content:
                    loose.append(os.path.relpath(path, self.folder))
                if name not in known:
                    unnamed.append(os.path.relpath(path, self.folder))
        self.content &= here                                                     # the number of a deleted file goes to another
        self.names = {inode: names for inode, names in self.names.items() if inode in here | {os.stat(self.folder).st_ino}}
        shutil.copytree(self.folder, copy)
        self.moments.append((what, copy, loose, unnamed, self.promised))

    def cuts(self):
        """(what, folder, promised) after a cut at every moment: content not flushed whole, empty or torn, names not flushed there or lost."""
        for what, copy, loose, unnamed, promised in self.moments:
            for content in ("whole", "empty", "torn"):
                for file in loose:
                    path = os.path.join(copy, file)
                    os.truncate(path, os.path.getsize(path) // 2 if content == "torn" else 0 if content == "empty" else os.path.getsize(path))
                yield f"{what}, content {content}", copy, promised
            for name in unnamed:
                path = os.path.join(copy, name)
                if os.path.isdir(path):
                    shutil.rmtree(path)
                elif os.path.exists(path):
                    os.remove(path)
            yield f"{what}, names lost", copy, promised


def power_loss(lab, times=1):
    """
    The disk after a power cut at every moment of a run's first three saves, its folder made before them. What a save() that returned has
    promised must be there, whole: the checkpoint of that step, or of a later one.
    """
    from engine import checkpoint
    import torch
    base, states = lab.fresh("power"), lab.fresh("power-states")
    os.makedirs(base)
    os.makedirs(states)
    torch.manual_seed(0)
    models = {step: torch.nn.Linear(7, 5) for step in (1, 2, 3)}
    optimizer = torch.optim.SGD(models[1].parameters())
    run = os.path.join(base, "out", "run")
    with Disk(base, states) as disk:
        lock = checkpoint.claim(run)
        for step in models:
            checkpoint.save(os.path.join(run, "ckpt"), step, models[step], optimizer, {}, keep=1)
            disk.promised = step
            disk.moment("saved")
    lock.close()
    tried, seen = 0, set()
    for what, copy, promised in disk.cuts():
        found = checkpoint.newest_intact(os.path.join(copy, "out", "run", "ckpt"))
        step = found[1]["step"] if found else 0
        assert step >= promised, f"after {what}: the checkpoint of step {promised} was promised, and that of {step} is there"
        if found:
            restored = torch.nn.Linear(7, 5)
            checkpoint.load(found[0], restored)
            assert all(torch.equal(a, b) for a, b in zip(restored.parameters(), models[step].parameters())), what
        tried, seen = tried + 1, seen | {step}
    assert seen == {0, 1, 2, 3}
    return [("power lost at any moment of a save (simulated): every prefix of its trace, unflushed files whole, empty or torn, unflushed names lost",
             tried, 0, "a whole checkpoint in each")]


def disk_full(lab, times=1):
    """No space left in a save: a limit on the size of files, which the kernel reports as it does a full disk (EFBIG for ENOSPC)."""
    run = prepared(lab)
    before = sorted(os.listdir(os.path.join(run, "ckpt")))
    codes, text = lab.run(run, 2, "--save_failures=2", "--checkpoint_every=3", fault="small_disk:20000")
    assert codes == [2, 2] and "the training goes on" in text and "failed 2 times in a row" in text and "Traceback" not in text, text[-3000:]
    assert sorted(os.listdir(os.path.join(run, "ckpt"))) == before
    assert max(losses(run)) == 26, "21 fails and the training goes on; 24 fails too, which 27 sees"
    lab.must_end_well(run, 2)
    return [("disk full in a save (a limit on the size of files)", 2, 0,
             "training goes on, tries again, stops after k failures; the old one intact; resumes to identical weights")]


def not_a_number(lab, times=1):
    """NaN or Inf on one rank."""
    rows = []
    for value in ("nan", "inf"):
        run = prepared(lab)
        codes, text = lab.run(run, 2, fault=f"no_number:1,5,{value}")
        assert codes == [2, 2] and "Stopped before the update" in text and max(losses(run)) == 24, text[-3000:]
        lab.must_end_well(run, 2)
    run = prepared(lab)
    codes, text = lab.run(run, 2, "--skip_nonfinite=1", fault="no_number:1,5,nan")
    assert codes == [0, 0] and [s for s, x in losses(run).items() if x is None] == [25], text[-3000:]
    rows.append(("NaN or Inf on one rank", 2, 0, "all stop before the update; resumes to identical weights"))
    return [*rows, ("NaN on one rank, --skip_nonfinite=1", 1, 1, "that step is skipped by all, and counted")]


def hang(lab, times=1):
    """A rank that stops answering (SIGSTOP)."""
    run = prepared(lab)
    trial = lab.start(run, 2, "--timeout=5", fault="slow:0.2")
    trial.until("resumed from")
    while len(losses(run)) < 24:
        time.sleep(0.05)
    began = time.monotonic()
    trial.kill(trial.pids[1:], signal.SIGSTOP)
    while trial.codes()[0] is None:
        assert time.monotonic() - began < 40, "the other rank still waits"
        time.sleep(0.1)
    waited = time.monotonic() - began
    trial.kill(trial.pids)
    assert trial.wait()[0] == 1 and "lost another rank" in trial.text() and "Traceback" not in trial.text(), trial.text()[-3000:]
    lab.must_end_well(run, 2)
    return [("a rank hangs (--timeout=5)", 1, 0, f"the other says so and ends after {waited:.0f} s; resumes to identical weights")]


def signals(lab, times=1, worlds=(1, 2, 4)):
    """SIGTERM or SIGUSR2 to one rank, or a stop file: all save the same step and leave with 0."""
    tried, lag = 0, 0
    for ranks in worlds:
        for how in (signal.SIGTERM, signal.SIGUSR2, "file"):
            run = prepared(lab)
            trial = lab.start(run, ranks, "--checkpoint_every=1000", fault="slow:0.2")
            trial.until("resumed from")
            while len(losses(run)) < 23:
                time.sleep(0.01)
            if how == "file":
                open(os.path.join(run, "stop"), "w").close()
            else:
                trial.kill(trial.pids[-1:], how)
            asked = max(losses(run))
            codes = trial.wait()
            assert set(codes) == {0} and "stopped as asked" in trial.text(), (how, codes, trial.text()[-3000:])
            sha, step = sha_of(run)
            assert step == max(losses(run)) + 1 and not os.path.exists(os.path.join(run, "stop"))
            lag, tried = max(lag, step - asked - 1), tried + 1
            lab.must_end_well(run, ranks)
    assert lag <= 2
    return [("SIGTERM, SIGUSR2 to one rank, or a stop file", tried, 0, "all ranks save the same step and leave with 0; resumes to identical weights")]


def two_runs(lab, times=1):
    """A second run in the same folder; and the lock of a run that was killed."""
    run = prepared(lab)
    trial = lab.start(run, 0, fault="slow:0.1")
    trial.until("resumed from")
    codes, text = lab.launch(0, *lab.args(run, 0), logs=run + ".second")
    assert codes == [2] and "another run is writing there" in text and "Traceback" not in text, text
    trial.kill(trial.pids)
    trial.wait()
    lab.must_end_well(run, 0)
    return [("two runs in one folder", 1, 0, "the second is refused; a killed owner's lock is free at once")]


def read_only(lab, times=1):
    """A folder that cannot be written: noticed before anything is built."""
    run = os.path.join(lab.fresh("locked"), "run")
    os.makedirs(os.path.dirname(run))
    codes, text = lab.launch(0, *lab.args("/proc/run", 0), logs=lab.folder + "/locked.log")
    assert codes == [2] and "cannot be written" in text and "parameters on" not in text and "Traceback" not in text, text
    return [("a folder that cannot be written", 1, 0, "one line, before the model is built")]


def swapped(lab, times=1):
    """Data, model or tokenizer exchanged between two starts."""
    other = lab.corpus("other", "Another text, of which line %d says %d.\n")
    for more, says in ((["--n_layer=2"], "n_layer 1 -> 2"), ([f"--data={other}"], "data_hash"), (["--seed=5"], "seed 28 -> 5"),
                       (["--batch_size=16"], "batch_size 8 -> 16")):
        run = prepared(lab)
        codes, text = lab.run(run, 0, *more)
        assert codes == [2] and "is of another run" in text and says in text and "Traceback" not in text, text
        lab.must_end_well(run, 0)
    return [("data, model, seed or batch exchanged between two starts", 4, 0, "refused, the differences named")]


def no_summary(lab, times=1):
    """Killed between the last checkpoint and the summary: what is missing is made up for; a run that is finished says so."""
    lab.whole()
    run = lab.fresh("late")
    shutil.copytree(os.path.join(lab.folder, "whole"), run)
    with open(os.path.join(run, "summary.json"), encoding="utf-8") as f:
        before = json.load(f)
    os.remove(os.path.join(run, "summary.json"))
    lab.must_end_well(run, 2)
    with open(os.path.join(run, "summary.json"), encoding="utf-8") as f:
        after = json.load(f)
    assert {k: v for k, v in after.items() if k != "seconds"} == {k: v for k, v in before.items() if k != "seconds"}
    codes, text = lab.run(run, 0)
    assert codes == [2] and "is finished" in text and "Traceback" not in text, text
    return [("killed between the last checkpoint and the summary", 1, 0, "the summary is made up for; a finished run says that it is")]


def bad_data(lab, times=1):
    """Token shards that are empty, cut, of another type, foreign, or hold ids that the vocabulary has not."""
    import numpy as np
    shard = sorted(glob.glob(lab.data + "/*train*.npy"))[0]
    with open(shard, "rb") as f:
        whole = f.read()
    tokens = np.load(shard, allow_pickle=False)

    def array(a):
        path = os.path.join(lab.folder, "changed.npy")
        np.save(path, a, allow_pickle=a.dtype == object)
        with open(path, "rb") as f:
            return f.read()

    changes = {"empty": b"", "cut short": whole[:-100], "of another type": array(tokens.astype(np.float32)), "foreign": b"PK\x03\x04" + bytes(1000),
               "of another length": array(tokens[:-7]), "out of range": array(np.where(np.arange(len(tokens)) % 50 == 3, 60000, tokens).astype(tokens.dtype)),
               "a pickle": array(np.array([Marker(os.path.join(lab.folder, "executed"))], dtype=object))}
    for name, content in changes.items():
        with open(shard, "wb") as f:
            f.write(content)
        try:
            codes, text = lab.run(lab.fresh("data-run"), 0)
        finally:
            with open(shard, "wb") as f:
                f.write(whole)
        assert codes == [2] and shard.split("/")[-2] in text and "Traceback" not in text, (name, codes, text[-2000:])
    assert not os.path.exists(os.path.join(lab.folder, "executed"))
    return [("a token shard empty, cut, foreign, of another type, with ids out of range", len(changes), 0, "one line that names the file")]


class Marker:
    """What a malicious file would contain: unpickling it leaves a mark."""
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def malicious(lab, times=1):
    """Files that would run code, or read outside of their folder, behind hashes that hold."""
    from engine import checkpoint
    import torch
    mark, tried = os.path.join(lab.folder, "executed"), 0
    header = lambda text: len(text).to_bytes(8, "little") + text
    contents = {"pickle": None, "header of 2^63 bytes": (2**63 - 1).to_bytes(8, "little") + b"{}", "header that is no JSON": header(b"{{{{"),
                "offsets outside": header(json.dumps({"model/lm_head.weight": dict(dtype="F32", shape=[320, 32], data_offsets=[0, 2**40])}).encode()),
                "a deep header": header(b"[" * 100_000), "no offsets of DCP": header(json.dumps({"__metadata__": {"DCP_SHARDING_INFO": "{}"}, "model/x": dict(
                    dtype="F32", shape=[1], data_offsets=[0, 4])}).encode()) + bytes(4)}
    for name, content in contents.items():
        run = prepared(lab)
        newest = os.path.join(run, "ckpt", "step-00000020")
        shutil.rmtree(os.path.join(run, "ckpt", "step-00000015"))
        manifest = checkpoint.verified(newest)
        for shard in glob.glob(newest + "/shard-*"):
            os.remove(shard)
        shard = newest + "/shard-00001-model-00001-of-00001.safetensors"
        if content is None:
            torch.save({"x": Marker(mark)}, shard)
        else:
            with open(shard, "wb") as f:
                f.write(content)
        manifest["files"] = {os.path.basename(shard): checkpoint.sha256(shard)}
        checkpoint.write_flushed(newest + "/manifest.json", checkpoint.sealed(manifest))
        codes, text = lab.run(run, 0)
        assert codes == [2] and "not readable as safetensors" in text and not os.path.exists(mark), (name, codes, text[-2000:])
        tried += 1
    manifest["files"] = {"../../../data/meta.json": "0"}
    checkpoint.write_flushed(newest + "/manifest.json", checkpoint.sealed(manifest))
    codes, text = lab.run(run, 0)
    assert codes == [2] and "not a file in this folder" in text, text
    for name, content in {"brackets": "[" * 100_000, "no dict": "[]", "another dict": "{\"manifest\": {\"step\": 1}}"}.items():
        with open(newest + "/manifest.json", "w", encoding="utf-8") as f:
            f.write(content)
        codes, text = lab.run(run, 0)
        assert codes == [2] and "damaged, or not of this project" in text and "Traceback" not in text, (name, text[-2000:])
    return [("pickle, hostile safetensors headers, JSON bombs, `..` in the manifest, behind valid hashes", tried + 4, 0, "nothing runs, one line each")]


def torchrun(lab, times=1):
    """
    The real launcher, with the flags of the README. A stop file, or a signal to a rank, ends in exit code 0. A signal to torchrun itself reaches
    the ranks, which save; but torchrun then raises it again (torch.distributed.launcher.api, SignalException) and exits with 1.
    """
    root, codes = os.path.dirname(os.path.dirname(HERE)), {}
    env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    for how in ("stop file", "SIGUSR2 to a rank", "SIGUSR2 to torchrun", "SIGTERM to torchrun"):
        run = prepared(lab)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--shutdown-timeout=600",
                   "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2", "train.py",
                   *lab.args(run, 2, f"--total_samples={8 * 100_000}", "--checkpoint_every=100000")]
        with open(run + ".log", "w") as log:
            process = subprocess.Popen(command, cwd=root, env=env, stdout=log, stderr=log, start_new_session=True)
            end = time.monotonic() + 120
            while len(losses(run)) < 22 and time.monotonic() < end:
                time.sleep(0.1)
            if how == "stop file":
                open(os.path.join(run, "stop"), "w").close()
            else:
                ranks = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
                os.kill(int(ranks[-1]) if how.endswith("rank") else process.pid, signal.SIGTERM if "TERM" in how else signal.SIGUSR2)
            codes[how] = process.wait(120)
        said = open(run + ".log", encoding="utf-8").read()
        left = subprocess.run(["pgrep", "-f", f"--out={run}"], capture_output=True, text=True).stdout.split()
        assert "stopped as asked" in said and not left, (how, codes, left, said[-3000:])
        assert sha_of(run)[1] == max(losses(run)) + 1
    assert codes["stop file"] == codes["SIGUSR2 to a rank"] == 0, codes
    own = " and ".join(sorted({str(code) for how, code in codes.items() if how.endswith("torchrun")}))
    return [("under torchrun (flags of the README): a stop file, SIGUSR2 to a rank; SIGUSR2, SIGTERM to torchrun itself", len(codes), 0,
             f"all ranks saved, no process left; exit code 0, after a signal to torchrun itself {own}")]


FAULTS = dict(kill=kill, elastic=elastic, flip_bits=flip_bits, damage=damage, power_loss=power_loss, disk_full=disk_full, not_a_number=not_a_number,
              hang=hang, signals=signals, two_runs=two_runs, read_only=read_only, swapped=swapped, no_summary=no_summary,
              bad_data=bad_data, malicious=malicious, torchrun=torchrun)


def merged(before, name, rows, seconds):
    """What the record has of a fault, with these rows: kills add up, of the others the newest try stands."""
    if name == "kill" and name in before:
        rows = [kill_row(collections.Counter(before[name]["rows"][0][4]) + rows[0][4])]
        seconds += before[name]["seconds"]
    return dict(rows=rows, seconds=seconds)


def table(found):
    """The table of a record, in Markdown."""
    lines = ["| fault | times | steps lost | outcome |", "|---|---:|---:|---|"]
    rows = [row for name in FAULTS if name in found for row in found[name]["rows"]]
    lines += ["| " + " | ".join(map(str, row[:4])) + " |" for row in rows]
    minutes = sum(fault["seconds"] for fault in found.values()) / 60
    return "\n".join(lines) + f"\n\n{sum(row[1] for row in rows):,} faults in {minutes:.0f} minutes on {os.cpu_count()} cores.\n"


def write_tables(found):
    with open(os.path.join(record, "faults.json"), "w", encoding="utf-8") as f:
        json.dump(found, f, indent=1)
    with open(os.path.join(record, "table.md"), "w", encoding="utf-8") as f:
        f.write("# What can go wrong, done on purpose\n\n`make faults`, all runs on the CPU with gloo in exact mode; \"identical\" is one sha256 of all "
                "weights.\n\n" + table(found))


def main():
    shutil.rmtree(work, ignore_errors=True)
    before, found, failed = {}, {}, False
    if record and os.path.exists(os.path.join(record, "faults.json")):
        with open(os.path.join(record, "faults.json"), encoding="utf-8") as f:
            before = json.load(f)
    killed = before["kill"]["rows"][0][1] if "kill" in before else 0
    with Launcher() as launch:
        lab = Lab(launch, os.path.abspath(work))
        for name, fault in FAULTS.items():
            if not only or name in only.split(","):
                began, how = time.monotonic(), dict(seed=killed) if name == "kill" else {}                 # other moments than those before
                try:
                    rows = fault(lab, dict(kill=kills, flip_bits=flips).get(name, 1), **how)
                except AssertionError as e:
                    rows, failed = [(name, 1, "?", f"FAILED: {str(e)[:900]}")], True
                found[name] = dict(rows=rows, seconds=time.monotonic() - began)
                print(f"{found[name]['seconds']:6.0f} s   {name}: {rows[-1][-1]}", file=sys.stderr, flush=True)
    print(table(found))
    if failed:
        raise SystemExit(1)
    if record:
        write_tables({**before, **{name: merged(before, name, **one) for name, one in found.items()}})
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
