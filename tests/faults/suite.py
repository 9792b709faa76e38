"""
What can go wrong with a run, done to it on purpose. After each fault the final weights must be those of a run that
nothing happened to.

$ make faults                                          # all of it, and 500 kills more than the record has
$ python tests/faults/suite.py --kills=20 --only=kill  # a part, and nothing is recorded
$ python tests/faults/suite.py --kills=50 --only=kill --record=results/faults     # kills add up, the table follows
$ python -m pytest tests/faults                        # the short form, also in `make test`

Every fault is a function that takes the laboratory and how often to try. It raises AssertionError where a promise is
broken, and returns its rows of the table: (fault, times tried, steps lost, outcome). All runs are exact (fp64 sums), so
"the same" is one sha256 of all weights, on any number of processes.
"""
import collections
import functools
import glob
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [ROOT, os.path.dirname(HERE)]

from faults.launch import Launcher, losses, sha_of  # noqa: E402

kills = 500          # kill -9
flips = 1000         # single bits
only = ""            # run these only: names as below, with commas between
work = "out/faults"  # where; deleted before and after
record = ""          # a folder: keep the results there (faults.json), and write its table.md; "" = print them only

STEPS = 30
BATCH = 8
RUN = f"""
    configs/tiny.py --n_layer=1 --n_embd=32 --ffn_dim=64 --n_head=2 --n_kv_head=1 --block_size=32 --vocab_size=0
    --dtype=float32 --batch_size={BATCH} --micro_batch=2 --total_samples={BATCH * STEPS} --warmup_samples=16
    --decay_samples=64 --alpha_warmup=20 --beta3_warmup=20 --eval_every=1000 --checkpoint_every=5 --exact --timeout=60
""".split()


def until(step):
    """
    The arguments of a run that ends at a step before its decay.

    The schedule depends on total_samples, but WSD is flat until its decay. So a shorter run without a decay is a prefix
    of the whole one, up to step STEPS - 8.
    """
    return [f"--total_samples={BATCH * step}", "--decay_samples=0"]


def last_step(run):
    """The last step in a run's log, 0 if it has none."""
    return max(losses(run), default=0)


def checkpoint_folder(run, step):
    return os.path.join(run, "ckpt", f"step-{step:08d}")


def checkpoints(run):
    return sorted(os.listdir(os.path.join(run, "ckpt")))


def unfinished_saves(run):
    return glob.glob(os.path.join(run, "ckpt", "*.tmp"))


def write(path, content):
    with open(path, "wb") as f:
        f.write(content)


def read_json(path):
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def check_ended(result):
    """All ranks have left with 0: what they said."""
    codes, text = result
    end = text[-3000:]
    assert set(codes) == {0}, (codes, end)
    return text


def check_refused(result, *says):
    """All ranks have left with 2, after a line that says this, and without a traceback."""
    codes, text = result
    end = text[-3000:]
    assert set(codes) == {2}, (codes, end)
    for words in says:
        assert words in text, (words, end)
    assert "Traceback" not in text, end


class Lab:
    """A folder, a corpus, a launcher, and the run that nothing happens to."""

    def __init__(self, launch, folder):
        self.launch = launch
        self.folder = str(folder)
        os.makedirs(self.folder, exist_ok=True)
        self.data = self.corpus("data", "The quick brown fox number %d jumps over the lazy dog, and %d lines follow.\n")

    def corpus(self, name, line):
        """60 kB of text as token shards of bytes: the folder."""
        out = os.path.join(self.folder, name)
        text = out + "-text"
        os.makedirs(text, exist_ok=True)
        for i in range(24):
            # Documents 1 and 18 are for validation. They are short, since they are read at the end of each run.
            lines = 4 if i in (1, 18) else 40
            document = "".join(line % (i, j) for j in range(lines))
            write(os.path.join(text, f"{i}.txt"), document.encode())
        args = [text, f"--out={out}", "--tokenizer=byte", "--val_share=0.05"]
        check_ended(self.launch(0, *args, script="prepare.py", logs=out + ".log"))
        return out

    def fresh(self, name):
        """A path in the laboratory's folder where nothing is."""
        path = os.path.join(self.folder, name)
        shutil.rmtree(path, ignore_errors=True)
        return path

    def args(self, run, ranks, *more):
        parallel = ["--parallel=fsdp"] if ranks else []
        return [*RUN, f"--data={self.data}", f"--out={run}", "--resume", *parallel, *more]

    def run(self, run, ranks, *more, fault="", uid=0, limit=120):
        """To the end: (exit codes, what was said). ranks = 0: plain `python train.py`."""
        args = self.args(run, ranks, *more)
        return self.launch(ranks, *args, fault=fault, uid=uid, limit=limit, logs=run + ".log")

    def start(self, run, ranks, *more, fault=""):
        """A Trial that runs while the caller does something to it."""
        args = self.args(run, ranks, *more)
        return self.launch.start(ranks, *args, fault=fault, logs=run + ".log")

    @functools.cache
    def whole(self):
        """(sha256, {step: loss}, seconds) of the run that nothing happens to, on one process."""
        began = time.monotonic()
        run = self.fresh("whole")
        check_ended(self.run(run, 0))
        sha, _ = sha_of(run)
        seconds = time.monotonic() - began
        return sha, losses(run), seconds

    def must_end_well(self, run, ranks, *more):
        """Go on with a run, without a fault: it ends with the weights and the losses of the whole run."""
        text = check_ended(self.run(run, ranks, *more))
        sha, steps, _ = self.whole()
        assert sha_of(run) == (sha, STEPS), "the weights differ from those of the run that nothing happened to"
        assert losses(run) == steps, "a step has another loss, or is missing"
        return text


# -----------------------------------------------------------------------------
# Kills


def kill(lab, times, worlds=(1, 2, 4), seed=0):
    """
    kill -9 of one or of all ranks at any moment, start-up, loading and saving included.

    Each launch draws anew on how many processes it runs.
    """
    draw = random.Random(seed)
    counts = collections.Counter(kills=times)
    sha, steps, seconds = lab.whole()
    left = times
    while left:
        run = lab.fresh("kill")
        seen = collections.defaultdict(set)  # step -> its losses in all launches of this run
        ended = False
        while not ended:
            ranks = draw.choice(worlds)
            counts[f"on {ranks}"] += 1
            trial = lab.start(run, ranks)
            if left:
                wait_for_a_moment(trial, run, draw, seconds)
                victims = trial.pids
                if draw.random() >= 0.5:
                    victims = [draw.choice(trial.pids)]
                trial.kill(victims)
            codes = trial.wait(grace=1)
            killed = -9 in codes
            left -= killed
            counts["in a save"] += bool(unfinished_saves(run))
            for step, loss in losses(run).items():
                seen[step].add(loss)
            # A launch after a kill in a run's last moments finds that nothing is left to do.
            text = trial.text()
            nothing_left = not killed and "is finished" in text
            ended = set(codes) == {0} or nothing_left
            if not ended and os.path.isdir(run):
                assert killed, (codes, text[-3000:])
        counts["ends"] += 1
        once = {step: {loss} for step, loss in steps.items()}
        assert seen == once, "a step had two losses, or is missing"
        assert sha_of(run)[0] == sha, "the weights differ"
    return [kill_row(counts)]


def kill_row(counts):
    """The row of the table, with the counts behind it, since those of several records add up."""
    how = ", ".join(f"{counts[f'on {ranks}']} on {ranks}" for ranks in (1, 2, 4))
    fault = f"kill -9 of one or all ranks, launches redrawn ({how})"
    ends = f"{counts['ends']} runs ended in identical weights"
    saves = f"{counts['in a save']} launches left an unfinished save behind"
    return fault, counts["kills"], 0, f"{ends}; {saves}", counts


def wait_for_a_moment(trial, run, draw, seconds):
    """Return in a trial's start (3 of 10 times), in a save (3 of 10), or after a step that is drawn (4 of 10)."""
    kind = draw.random()
    step = draw.randrange(last_step(run), STEPS)
    moment = time.monotonic() + seconds * draw.random()
    while None in trial.codes():
        if kind < 0.3:
            reached = time.monotonic() > moment
        elif kind < 0.6:
            reached = unfinished_saves(run) and draw.random() < 0.2
        else:
            reached = last_step(run) >= step
        if reached:
            break
        time.sleep(0.003)


def elastic(lab, times=1):
    """1 -> 2 -> 4 -> 1 processes, each stopping in the middle."""
    run = lab.fresh("elastic")
    starts = {0: 7, 2: 15, 4: 22}  # processes -> the step at which they stop
    for ranks, step in starts.items():
        result = lab.run(run, ranks, *until(step))
        check_ended(result)
    lab.must_end_well(run, 1)
    return [("another number of processes at each start (1, 2, 4, 1)", 3 * times, 0, "identical weights")]


# -----------------------------------------------------------------------------
# Damaged checkpoints


def prepared(lab):
    """A copy of a run that was stopped after step 20, with two checkpoints (15 and 20): many faults begin there."""
    origin = os.path.join(lab.folder, "prepared")
    if not os.path.isdir(checkpoint_folder(origin, 20)):
        check_ended(lab.run(origin, 2, *until(20)))
    run = lab.fresh("copy")
    shutil.copytree(origin, run)
    return run


def flip(path, bit):
    with open(path, "r+b") as f:
        f.seek(bit // 8)
        byte = f.read(1)[0]
        f.seek(bit // 8)
        f.write(bytes([byte ^ 1 << bit % 8]))


def flip_bits(lab, times, seed=0):
    """Any single bit of any file of a checkpoint."""
    from engine import checkpoint

    run = prepared(lab)
    draw = random.Random(seed)
    newest = checkpoint_folder(run, 20)
    checkpoint.verified(newest)
    files = sorted(glob.glob(newest + "/*"))
    bits = [8 * os.path.getsize(f) for f in files]
    missed = 0
    for i in range(times):
        # By turns: every file alike, so that small ones are hit too, and by size.
        weights = bits if i % 2 else None
        (file,) = draw.choices(range(len(files)), weights)
        bit = draw.randrange(bits[file])
        flip(files[file], bit)
        try:
            checkpoint.verified(newest)
            missed += 1
        except ValueError:
            pass
        flip(files[file], bit)
    checkpoint.verified(newest)
    assert not missed
    flip(files[0], 4242)
    text = lab.must_end_well(run, 2)
    for words in ("passed over", "resumed from", "step-00000015"):
        assert words in text
    outcome = "all found; the one before was used, identical weights"
    return [("one bit flipped, in any file of a checkpoint", times, 0, outcome)]


def foreign_shard(folder, shard):
    shutil.copy(shard, folder + "/shard-00009-model-00001-of-00001.safetensors")


def shard_of_another_step(folder, shard):
    shutil.copy(shard.replace("step-00000020", "step-00000015"), shard)


# What is done to a checkpoint's folder and its first shard.
DAMAGES = {
    "a shard cut short": lambda folder, shard: os.truncate(shard, 1000),
    "a shard emptied": lambda folder, shard: os.truncate(shard, 0),
    "a shard missing": lambda folder, shard: os.remove(shard),
    "the manifest emptied": lambda folder, shard: os.truncate(folder + "/manifest.json", 0),
    "a foreign shard beside": foreign_shard,
    "a shard of another step": shard_of_another_step,
}


def damage(lab, times=1):
    """Files of the newest checkpoint cut, emptied, missing, foreign; then of all checkpoints."""

    def damaged(name, which):
        run = prepared(lab)
        for folder in glob.glob(os.path.join(run, "ckpt", f"step-*{which}")):
            first_shard = min(glob.glob(folder + "/shard-*"))
            DAMAGES[name](folder, first_shard)
        return run

    for i, name in enumerate(DAMAGES):
        ranks = 2 if i % 3 == 0 else 0
        text = lab.must_end_well(damaged(name, "20"), ranks)
        assert "passed over" in text, name
    run = damaged("a shard emptied", "")
    check_refused(lab.run(run, 0), "no checkpoint in", "--allow_restart")
    lab.must_end_well(run, 0, "--allow_restart")
    newest = "files of the newest checkpoint cut, emptied, missing, foreign"
    return [
        (newest, len(DAMAGES), 0, "named and passed over, identical weights"),
        ("all checkpoints damaged", 1, 0, "stops and says so; starts over with --allow_restart only"),
    ]


# -----------------------------------------------------------------------------
# Power cuts and full disks


def inode_of(path):
    return os.stat(path).st_ino


class Disk:
    """
    What a power cut may leave of a folder, at each moment of what is done to it: with Disk(folder, states) as disk.

    Both may be lost until they are flushed: a file's content (os.fsync of the file), and its name (os.fsync of the
    folder that holds it). Deletions may be kept all the same. `states` is where a copy of each moment is kept.
    """

    WATCHED = [
        (os, "fsync"),
        (os, "rename"),
        (os, "replace"),
        (os, "mkdir"),
        (shutil, "rmtree"),
    ]

    def __init__(self, folder, states):
        self.folder = folder
        self.states = states
        self.moments = []
        self.promised = 0  # the step whose checkpoint a caller has been told is safe
        self.content = set()  # inodes of the files that were flushed
        self.names = {}  # inode of a folder -> the names in it that were flushed
        self.true = {}
        for module, name in self.WATCHED:
            self.true[name] = getattr(module, name)

    def __enter__(self):
        self.names[inode_of(self.folder)] = set(os.listdir(self.folder))
        os.fsync = self.fsync
        shutil.rmtree = self.rmtree
        for name in ("rename", "replace", "mkdir"):
            setattr(os, name, self.followed_by_a_moment(name))
        return self

    def __exit__(self, *error):
        for module, name in self.WATCHED:
            setattr(module, name, self.true[name])

    def fsync(self, fd):
        self.true["fsync"](fd)
        # DCP flushes its files today, but it has not promised to, so its flushes do not count.
        caller = sys._getframe(1).f_code
        if "torch" in caller.co_filename:
            return
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            self.names[found.st_ino] = set(os.listdir(fd))
        else:
            self.content.add(found.st_ino)
        self.moment("fsync")

    def rmtree(self, path, ignore_errors=False):
        """A deletion is many: there is a moment after each file."""
        for file in sorted(glob.glob(os.path.join(path, "*"))):
            os.remove(file)
            self.moment(f"remove {os.path.basename(file)}")
        if os.path.isdir(path):
            os.rmdir(path)
            self.moment("rmdir")

    def followed_by_a_moment(self, name):
        def act(*args, **kwargs):
            self.true[name](*args, **kwargs)
            path = str(args[0])
            if path.startswith(self.folder + os.sep):
                self.moment(f"{name} {os.path.basename(path)}")

        return act

    def moment(self, what):
        """Remember the folder as it is now, and what of it is safe."""
        here = {inode_of(self.folder)}
        loose, unnamed = [], []
        for root, folders, files in os.walk(self.folder):
            flushed_names = self.names.get(inode_of(root), set())
            for name in folders + files:
                path = os.path.join(root, name)
                inode = inode_of(path)
                relative = os.path.relpath(path, self.folder)
                here.add(inode)
                if name in files and inode not in self.content:
                    loose.append(relative)
                if name not in flushed_names:
                    unnamed.append(relative)
        # The number of a deleted file goes to another one, which was not flushed.
        self.content &= here
        for inode in self.names.keys() - here:
            del self.names[inode]
        copy = os.path.join(self.states, f"{len(self.moments):03d}")
        shutil.copytree(self.folder, copy)
        self.moments.append((what, copy, loose, unnamed, self.promised))

    def cuts(self):
        """
        (what, folder, promised) after a cut at every moment.

        First with content that was not flushed whole, torn and empty, then with names that were not flushed lost too.
        """
        for what, copy, loose, unnamed, promised in self.moments:
            # In this order, since half of an emptied file would be empty.
            shares = dict(whole=1, torn=0.5, empty=0)
            for content, share in shares.items():
                for file in loose:
                    path = os.path.join(copy, file)
                    length = share * os.path.getsize(path)
                    os.truncate(path, int(length))
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
    The disk after a power cut at every moment of a run's first three saves, its folder made before them.

    What a save() that returned has promised must be there, whole: the checkpoint of that step, or of a later one.
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
    checkpoints_folder = os.path.join(run, "ckpt")
    with Disk(base, states) as disk:
        lock = checkpoint.claim(run)
        for step, model in models.items():
            checkpoint.save(checkpoints_folder, step, model, optimizer, {}, keep=1)
            disk.promised = step
            disk.moment("saved")
    lock.close()
    tried, seen = 0, set()
    for what, copy, promised in disk.cuts():
        left = checkpoints_folder.replace(base, copy)
        found = checkpoint.newest_intact(left)
        step = found[1]["step"] if found else 0
        assert step >= promised, f"after {what}: step {promised} was promised, and that of {step} is there"
        if found:
            restored = torch.nn.Linear(7, 5)
            checkpoint.load(found[0], restored)
            pairs = zip(restored.parameters(), models[step].parameters())
            assert all(torch.equal(a, b) for a, b in pairs), what
        tried += 1
        seen.add(step)
    assert seen == {0, 1, 2, 3}
    fault = (
        "power lost at any moment of a save (simulated): every prefix of its trace, "
        "unflushed files whole, empty or torn, unflushed names lost"
    )
    return [(fault, tried, 0, "a whole checkpoint in each")]


def disk_full(lab, times=1):
    """
    No space left in a save.

    A limit on the size of files stands for it: the kernel reports that as it does a full disk (EFBIG for ENOSPC).
    """
    run = prepared(lab)
    before = checkpoints(run)
    result = lab.run(run, 2, "--save_failures=2", "--checkpoint_every=3", fault="small_disk:20000")
    check_refused(result, "the training goes on", "failed 2 times in a row")
    assert checkpoints(run) == before
    assert last_step(run) == 26, "21 fails and the training goes on; 24 fails too, which 27 sees"
    lab.must_end_well(run, 2)
    outcome = (
        "training goes on, tries again, stops after k failures; the old one intact; resumes to identical weights"
    )
    return [("disk full in a save (a limit on the size of files)", 2, 0, outcome)]


# -----------------------------------------------------------------------------
# Ranks and numbers that fail


def not_a_number(lab, times=1):
    """NaN or Inf on one rank."""
    for value in ("nan", "inf"):
        run = prepared(lab)
        check_refused(lab.run(run, 2, fault=f"no_number:1,5,{value}"), "Stopped before the update")
        assert last_step(run) == 24
        lab.must_end_well(run, 2)
    run = prepared(lab)
    check_ended(lab.run(run, 2, "--skip_nonfinite=1", fault="no_number:1,5,nan"))
    skipped = [step for step, loss in losses(run).items() if loss is None]
    assert skipped == [25]
    return [
        ("NaN or Inf on one rank", 2, 0, "all stop before the update; resumes to identical weights"),
        ("NaN on one rank, --skip_nonfinite=1", 1, 1, "that step is skipped by all, and counted"),
    ]


def start_at(lab, run, ranks, step, *more, fault="slow:0.2"):
    """A Trial of slow steps that has resumed and logged a step."""
    trial = lab.start(run, ranks, *more, fault=fault)
    trial.until("resumed from")
    while last_step(run) < step:
        time.sleep(0.01)
    return trial


def hang(lab, times=1):
    """A rank that stops answering (SIGSTOP)."""
    run = prepared(lab)
    trial = start_at(lab, run, 2, 24, "--timeout=5")
    began = time.monotonic()
    trial.kill(trial.pids[1:], signal.SIGSTOP)
    while trial.codes()[0] is None:
        assert time.monotonic() - began < 40, "the other rank still waits"
        time.sleep(0.1)
    waited = time.monotonic() - began
    trial.kill(trial.pids)
    code = trial.wait()[0]
    text = trial.text()
    assert code == 1, text[-3000:]
    assert "lost another rank" in text, text[-3000:]
    assert "Traceback" not in text, text[-3000:]
    lab.must_end_well(run, 2)
    outcome = f"the other says so and ends after {waited:.0f} s; resumes to identical weights"
    return [("a rank hangs (--timeout=5)", 1, 0, outcome)]


def ask_to_stop(run):
    """What a user does with `touch RUN/stop`."""
    write(os.path.join(run, "stop"), b"")


def signals(lab, times=1, worlds=(1, 2, 4)):
    """SIGTERM or SIGUSR2 to one rank, or a stop file: all save the same step and leave with 0."""
    tried, lag = 0, 0
    for ranks in worlds:
        for how in (signal.SIGTERM, signal.SIGUSR2, "file"):
            run = prepared(lab)
            trial = start_at(lab, run, ranks, 23, "--checkpoint_every=1000")
            if how == "file":
                ask_to_stop(run)
            else:
                trial.kill(trial.pids[-1:], how)
            asked = last_step(run)
            codes = trial.wait()
            text = check_ended((codes, trial.text()))
            assert "stopped as asked" in text, (how, text[-3000:])
            _, step = sha_of(run)
            assert step == last_step(run) + 1
            assert not os.path.exists(os.path.join(run, "stop"))
            lag = max(lag, step - asked - 1)
            tried += 1
            lab.must_end_well(run, ranks)
    assert lag <= 2
    outcome = "all ranks save the same step and leave with 0; resumes to identical weights"
    return [("SIGTERM, SIGUSR2 to one rank, or a stop file", tried, 0, outcome)]


def cooldown(lab, times=1, worlds=(1, 2, 4)):
    """
    SIGUSR1 to one rank, or a cooldown file, and a kill -9 of all ranks once the decay has begun.

    On one process the run then ends in the weights of one that was planned with a decay from that step on.
    """
    longer = [f"--total_samples={BATCH * 100}", f"--decay_samples={BATCH * 25}"]
    tried = 0
    for ranks in worlds:
        for how in (signal.SIGUSR1, "file"):
            run = prepared(lab)
            trial = start_at(lab, run, ranks, 22, *longer)
            if how == "file":
                write(os.path.join(run, "cooldown"), b"")
            else:
                trial.kill(trial.pids[-1:], how)
            trial.until("the decay begins")
            # Said before its begin is on disk, and that is before the next step.
            step = last_step(run)
            while last_step(run) < step + 2 and None in trial.codes():
                time.sleep(0.01)
            trial.kill(trial.pids)
            trial.wait()
            check_ended(lab.run(run, 1, *longer))
            assert not os.path.exists(os.path.join(run, "cooldown"))
            sha, end = sha_of(run)
            begun = read_json(checkpoint_folder(run, end) + "/manifest.json")["manifest"]["decay_at"]
            # A quarter of the run, as the settings have it.
            planned = [f"--total_samples={begun + begun // 3}", f"--decay_samples={begun // 3}"]
            other = prepared(lab)
            check_ended(lab.run(other, 1, *planned))
            assert sha_of(other) == (sha, end), how
            assert BATCH * 22 < begun < BATCH * 75
            tried += 1
    outcome = "all ranks begin it after the same step; killed and resumed, the weights of a run that was planned so"
    return [("SIGUSR1 to one rank, or a cooldown file, and kill -9 in the decay", tried, 0, outcome)]


# -----------------------------------------------------------------------------
# Folders, settings and data that are not the run's


def two_runs(lab, times=1):
    """A second run in the same folder; and the lock of a run that was killed."""
    run = prepared(lab)
    trial = lab.start(run, 0, fault="slow:0.1")
    trial.until("resumed from")
    args = lab.args(run, 0)
    second = lab.launch(0, *args, logs=run + ".second")
    check_refused(second, "another run is writing there")
    trial.kill(trial.pids)
    trial.wait()
    lab.must_end_well(run, 0)
    return [("two runs in one folder", 1, 0, "the second is refused; a killed owner's lock is free at once")]


def read_only(lab, times=1):
    """A folder that cannot be written: noticed before anything is built."""
    args = lab.args("/proc/run", 0)
    result = lab.launch(0, *args, logs=lab.folder + "/locked.log")
    check_refused(result, "cannot be written")
    _, text = result
    assert "parameters on" not in text
    return [("a folder that cannot be written", 1, 0, "one line, before the model is built")]


def swapped(lab, times=1):
    """Data, model or tokenizer exchanged between two starts."""
    other = lab.corpus("other", "Another text, of which line %d says %d.\n")
    swaps = {
        "--n_layer=2": "n_layer 1 -> 2",
        f"--data={other}": "data_hash",
        "--seed=5": "seed 28 -> 5",
        "--batch_size=16": "batch_size 8 -> 16",
    }
    for argument, difference in swaps.items():
        run = prepared(lab)
        check_refused(lab.run(run, 0, argument), "is of another run", difference)
        lab.must_end_well(run, 0)
    fault = "data, model, seed or batch exchanged between two starts"
    return [(fault, len(swaps), 0, "refused, the differences named")]


def no_summary(lab, times=1):
    """Killed between the last checkpoint and the summary: it is made up for, and a run that is finished says so."""
    lab.whole()
    run = lab.fresh("late")
    shutil.copytree(os.path.join(lab.folder, "whole"), run)
    path = os.path.join(run, "summary.json")
    before = read_json(path)
    os.remove(path)
    lab.must_end_well(run, 2)
    after = read_json(path)
    for summary in (before, after):
        summary.pop("seconds", None)
    assert after == before
    check_refused(lab.run(run, 0), "is finished")
    outcome = "the summary is made up for; a finished run says that it is"
    return [("killed between the last checkpoint and the summary", 1, 0, outcome)]


class Marker:
    """What a malicious file would contain: unpickling it leaves a mark."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def bad_data(lab, times=1):
    """Token shards that are empty, cut, of another type, foreign, or hold ids that the vocabulary has not."""
    import numpy as np

    shard = min(glob.glob(lab.data + "/*train*.npy"))
    with open(shard, "rb") as f:
        whole = f.read()
    tokens = np.load(shard, allow_pickle=False)
    mark = os.path.join(lab.folder, "executed")

    def file_of(array):
        path = os.path.join(lab.folder, "changed.npy")
        np.save(path, array, allow_pickle=array.dtype == object)
        with open(path, "rb") as f:
            return f.read()

    out_of_range = tokens.copy()
    out_of_range[3::50] = 60000
    pickled = np.array([Marker(mark)], dtype=object)
    changes = {
        "empty": b"",
        "cut short": whole[:-100],
        "of another type": file_of(tokens.astype(np.float32)),
        "foreign": b"PK\x03\x04" + bytes(1000),
        "of another length": file_of(tokens[:-7]),
        "out of range": file_of(out_of_range),
        "a pickle": file_of(pickled),
    }
    for name, content in changes.items():
        write(shard, content)
        try:
            result = lab.run(lab.fresh("data-run"), 0)
        finally:
            write(shard, whole)
        data_folder = shard.split("/")[-2]
        check_refused(result, data_folder)
    assert not os.path.exists(mark)
    fault = "a token shard empty, cut, foreign, of another type, with ids out of range"
    return [(fault, len(changes), 0, "one line that names the file")]


def safetensors_file(header, numbers=b""):
    """The format of safetensors: the header's length in 8 bytes, the header, the numbers."""
    length = len(header).to_bytes(8, "little")
    return length + header.encode() + numbers


def hostile_shards():
    """{name: content} of shards that a reader must not trust; None stands for a pickle."""
    weight = dict(dtype="F32", shape=[320, 32], data_offsets=[0, 2**40])
    outside = {"model/lm_head.weight": weight}
    scalar = dict(dtype="F32", shape=[1], data_offsets=[0, 4])
    no_offsets = {"__metadata__": {"DCP_SHARDING_INFO": "{}"}, "model/x": scalar}
    return {
        "pickle": None,
        "header of 2^63 bytes": (2**63 - 1).to_bytes(8, "little") + b"{}",
        "header that is no JSON": safetensors_file("{{{{"),
        "offsets outside": safetensors_file(json.dumps(outside)),
        "a deep header": safetensors_file("[" * 100_000),
        "no offsets of DCP": safetensors_file(json.dumps(no_offsets), bytes(4)),
    }


HOSTILE_MANIFESTS = {
    "brackets": b"[" * 100_000,
    "no dict": b"[]",
    "another dict": b'{"manifest": {"step": 1}}',
}


def malicious(lab, times=1):
    """Files that would run code, or read outside of their folder, behind hashes that hold."""
    from engine import checkpoint
    import torch

    mark = os.path.join(lab.folder, "executed")
    shards = hostile_shards()
    for name, content in shards.items():
        run = prepared(lab)
        newest = checkpoint_folder(run, 20)
        shutil.rmtree(checkpoint_folder(run, 15))
        manifest = checkpoint.verified(newest)
        for shard in glob.glob(newest + "/shard-*"):
            os.remove(shard)
        shard = newest + "/shard-00001-model-00001-of-00001.safetensors"
        if content is None:
            torch.save({"x": Marker(mark)}, shard)
        else:
            write(shard, content)
        name_in_folder = os.path.basename(shard)
        manifest["files"] = {name_in_folder: checkpoint.sha256(shard)}
        checkpoint.write_flushed(newest + "/manifest.json", checkpoint.sealed(manifest))
        check_refused(lab.run(run, 0), "not readable as safetensors")
        assert not os.path.exists(mark), name
    # From here on the manifest itself is hostile.
    path = newest + "/manifest.json"
    manifest["files"] = {"../../../data/meta.json": "0"}
    checkpoint.write_flushed(path, checkpoint.sealed(manifest))
    check_refused(lab.run(run, 0), "not a file in this folder")
    for content in HOSTILE_MANIFESTS.values():
        write(path, content)
        check_refused(lab.run(run, 0), "damaged, or not of this project")
    fault = "pickle, hostile safetensors headers, JSON bombs, `..` in the manifest, behind valid hashes"
    tried = len(shards) + 1 + len(HOSTILE_MANIFESTS)
    return [(fault, tried, 0, "nothing runs, one line each")]


# -----------------------------------------------------------------------------
# The real launcher


def pgrep(*how):
    """The ids of processes, as text."""
    done = subprocess.run(["pgrep", *how], capture_output=True, text=True)
    return done.stdout.split()


def stop_under_torchrun(lab, run, how):
    """The exit code of torchrun after a stop file or a signal, and what was said."""
    flags = "--standalone --nproc_per_node=2 --shutdown-timeout=600"
    handled = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"
    endless = [f"--total_samples={BATCH * 100_000}", "--checkpoint_every=100000"]
    command = [sys.executable, "-m", "torch.distributed.run", *flags.split(), handled, "train.py"]
    command += lab.args(run, 2, *endless)
    env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    with open(run + ".log", "w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
        end = time.monotonic() + 120
        while len(losses(run)) < 22 and time.monotonic() < end:
            time.sleep(0.1)
        if how == "stop file":
            ask_to_stop(run)
        else:
            name, target = how.split(" to ")
            pid = process.pid
            if target == "a rank":
                ranks = pgrep("-P", str(pid))
                pid = int(ranks[-1])
            os.kill(pid, signal.Signals[name])
        code = process.wait(120)
    with open(run + ".log", encoding="utf-8") as log:
        return code, log.read()


def torchrun(lab, times=1):
    """
    The real launcher, with the flags of the README.

    A stop file, or a signal to a rank, ends in exit code 0. A signal to torchrun itself reaches the ranks, which save;
    but torchrun then raises it again (torch.distributed.launcher.api, SignalException) and exits with 1.
    """
    codes = {}
    for how in ("stop file", "SIGUSR2 to a rank", "SIGUSR2 to torchrun", "SIGTERM to torchrun"):
        run = prepared(lab)
        codes[how], text = stop_under_torchrun(lab, run, how)
        left = pgrep("-f", f"--out={run}")
        assert "stopped as asked" in text, (how, codes, text[-3000:])
        assert not left, (how, codes, left)
        _, step = sha_of(run)
        assert step == last_step(run) + 1
    assert codes["stop file"] == codes["SIGUSR2 to a rank"] == 0, codes
    own = sorted({codes["SIGUSR2 to torchrun"], codes["SIGTERM to torchrun"]})
    fault = (
        "under torchrun (flags of the README): a stop file, SIGUSR2 to a rank; SIGUSR2, SIGTERM to torchrun itself"
    )
    saved = "all ranks saved, no process left; exit code 0, after a signal to torchrun itself"
    return [(fault, len(codes), 0, f"{saved} {' and '.join(map(str, own))}")]


# -----------------------------------------------------------------------------
# The record

FAULTS = dict(
    kill=kill,
    elastic=elastic,
    flip_bits=flip_bits,
    damage=damage,
    power_loss=power_loss,
    disk_full=disk_full,
    not_a_number=not_a_number,
    hang=hang,
    signals=signals,
    cooldown=cooldown,
    two_runs=two_runs,
    read_only=read_only,
    swapped=swapped,
    no_summary=no_summary,
    bad_data=bad_data,
    malicious=malicious,
    torchrun=torchrun,
)


def merged(before, name, rows, seconds):
    """What the record has of a fault, with these rows: kills add up, of the others the newest try stands."""
    if name == "kill" and name in before:
        *_, recorded = before[name]["rows"][0]
        *_, new = rows[0]
        rows = [kill_row(collections.Counter(recorded) + new)]
        seconds += before[name]["seconds"]
    return dict(rows=rows, seconds=seconds)


def table(found):
    """The table of a record, in Markdown."""
    lines = ["| fault | times | steps lost | outcome |", "|---|---:|---:|---|"]
    done = 0
    for name in FAULTS:
        if name not in found:
            continue
        for fault, times, lost, outcome, *_ in found[name]["rows"]:
            lines.append(f"| {fault} | {times} | {lost} | {outcome} |")
            done += times
    minutes = sum(fault["seconds"] for fault in found.values()) / 60
    return "\n".join(lines) + f"\n\n{done:,} faults in {minutes:.0f} minutes on {os.cpu_count()} cores.\n"


HEAD = """# What can go wrong, done on purpose

`make faults`, all runs on the CPU with gloo in exact mode; "identical" is one sha256 of all weights.

"""


def write_record(found):
    with open(os.path.join(record, "faults.json"), "w", encoding="utf-8") as f:
        json.dump(found, f, indent=1)
    with open(os.path.join(record, "table.md"), "w", encoding="utf-8") as f:
        f.write(HEAD + table(found))


def main():
    shutil.rmtree(work, ignore_errors=True)
    before, found, failed = {}, {}, False
    recorded = os.path.join(record, "faults.json")
    if record and os.path.exists(recorded):
        before = read_json(recorded)
    chosen = only.split(",") if only else FAULTS
    how_often = dict(kill=kills, flip_bits=flips)
    # The seed is the number of kills in the record, so that other moments are drawn than those before.
    kills_before = before["kill"]["rows"][0][1] if "kill" in before else 0
    with Launcher() as launch:
        lab = Lab(launch, os.path.abspath(work))
        for name, fault in FAULTS.items():
            if name not in chosen:
                continue
            began = time.monotonic()
            seed = dict(seed=kills_before) if name == "kill" else {}
            try:
                rows = fault(lab, how_often.get(name, 1), **seed)
            except AssertionError as e:
                rows = [(name, 1, "?", f"FAILED: {str(e)[:900]}")]
                failed = True
            seconds = time.monotonic() - began
            found[name] = dict(rows=rows, seconds=seconds)
            print(f"{seconds:6.0f} s   {name}: {rows[-1][-1]}", file=sys.stderr, flush=True)
    print(table(found))
    if failed:
        raise SystemExit(1)
    if record:
        newest = {name: merged(before, name, **one) for name, one in found.items()}
        write_record({**before, **newest})
    shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
