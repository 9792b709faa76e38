"""
Histories: random commands on one folder of data and one of a run, against a model of both in plain Python. The claims
about a state, which hold after each command, are in `check`. A failure names the seed and the commands so far.
"""

import math
import os
import shutil
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import same, script, weights
from corpora import BYTE, ledger, streams, texts_of, write_lines
from oracle import Plain
from pytest import approx
from test_pairs_corpus import number
from trained import contents, equal, log, steps

import plain
from data import TokenDataset
from engine import parallel
from engine.files import read_json
from engine.runs import settings_of

T, LR, MIN_LR = 32, 3e-3, 3e-4
# (samples of the run, of its decay) as it is planned first, and longer.
SHORT, LONG = (64, 32), (96, 48)
PREPARE = "--tokenizer=byte", "--val_share=0.3"
RUN = f"""configs/tiny.py --n_layer=1 --n_embd=32 --ffn_dim=64 --n_head=2 --n_kv_head=1 --block_size={T} --lr={LR}
    --activation=xielu --goldfish_k=3 --goldfish_h=5 --eval_every=0 --last_eval_windows=4 --checkpoint_every=1
    --keep_checkpoints=0 --alpha_warmup=20 --min_lr={MIN_LR} --warmup_samples=8 --batch_ramp_at=16 --micro_batch=8
    """.split()


def sizes_in(samples):
    """[(samples before, samples of)] of the whole steps in `samples`: 8 samples each, 16 from the third step on."""
    found = []
    while (seen := sum(found)) + (n := 8 if seen < 16 else 16) <= samples:
        found.append(n)
    return [(sum(found[:i]), n) for i, n in enumerate(found)]


class History:
    """
    The model. docs: {id: (host, text)} of the input. data: the docs of the data folder and the ids of those that were
    withdrawn, or None. run: the data that it reads, its length, the samples before its decay, also as each checkpoint
    knows it, the finished steps, how often it was started, and whether it is at its end; or None.
    """

    def __init__(self, folder, seed):
        self.folder, self.rng = folder, Random(seed)
        self.input, self.out, self.data_folder = folder / "in.jsonl", folder / "run", folder / "data"
        self.docs = {f"d{n}": (f"host{n % 4}.example", f"text {n} says {n * 7919 % 997} " * 3) for n in range(28)}
        self.data = self.run = None
        self.kept_versions, self.references, self.done = [], [], []
        self.write_input()

    def choose(self):
        """The next command: most often one that the state allows."""
        weights = dict(prepare=1, preview=1, change=0.5, remove=0.5, store=0.5, evaluate=1, export=1, when=1.5)
        if not self.data:
            weights |= dict(prepare=8)
        elif self.data[1]:
            weights |= dict(preview=3)
        if not self.run:
            weights |= dict(train=6, resume=1)
        elif self.run.finished:
            weights |= dict(extend=5, lose_end=3, train=0.3, resume=0.5)
        else:
            weights |= dict(extend=3, resume=4, damage=2, train=0.3)
        return self.rng.choices([*weights], [*weights.values()])[0]

    def write_input(self):
        rows = [dict(id=i, text=text, url=f"https://{host}/{i}") for i, (host, text) in self.docs.items()]
        write_lines(self.input, rows)

    def kept(self):
        docs, withdrawn = self.data
        return {i: docs[i] for i in docs if i not in withdrawn}

    def version(self):
        return repr(self.data and (sorted(self.data[0].items()), sorted(self.data[1])))

    def files(self):
        return {path: content for path, content in contents(self.folder).items() if not path.endswith(".lock")}

    def call(self, works, name, *args):
        """Call a command. works: whether it should; if not, it is one line and changes no file."""
        before = {} if works else self.files()
        done = script(name, *args)
        if works:
            assert done.returncode == 0, done.stderr
        else:
            assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
            assert self.files() == before
        return done

    # data

    def prepare(self):
        works, before = not (self.data and self.data[1]), self.version()
        done = self.call(works, "prepare.py", self.input, f"--out={self.data_folder}", *PREPARE)
        if works:
            is_first, self.data = not self.data, (dict(self.docs), set())
            assert ("replaces other data" in done.stdout) == (not is_first and self.version() != before)

    def preview(self):
        """Print what would be written, or removed; nothing is, even if documents were withdrawn."""
        before, flags = self.files(), [self.input, *PREPARE]
        kept = sorted(self.kept()) if self.data else []
        if len(kept) > 1 and self.rng.random() < 0.5:
            write_lines(self.folder / "list.jsonl", [dict(id=self.rng.choice(kept))])
            before, flags = self.files(), [f"--remove={self.folder}/list.jsonl"]
        done = self.call(True, "prepare.py", *flags, f"--out={self.data_folder}", "--dry_run")
        assert self.files() == before and ("would be removed" in done.stdout) == (flags[0] != self.input)

    def change(self):
        """Another text in the place of one document; the next prepare reads it."""
        i = self.rng.choice(sorted(self.docs))
        self.docs[i] = self.docs[i][0], f"{i} is another text {self.rng.random()} " * 2
        self.write_input()

    def take(self, gone, list_of_them):
        """Withdraw these documents, unless too few for validation would be left."""
        stay = [text for i, (_, text) in self.kept().items() if i not in gone] if self.data else []
        if self.data and (not gone or sum(number(text) < 0.3 for text in stay) < 2):
            return
        write_lines(self.folder / "list.jsonl", list_of_them)
        flags = f"--remove={self.folder}/list.jsonl", f"--out={self.data_folder}"
        done = self.call(bool(self.data), "prepare.py", *flags)
        if self.data:
            assert f": {len(gone)} document" in done.stdout
            self.data = self.data[0], self.data[1] | gone

    def remove(self):
        i = self.rng.choice(sorted(self.kept() if self.data else self.docs))
        self.take({i}, [dict(id=i)])

    def store(self):
        """A newer robots.txt of a host."""
        host = f"host{self.rng.randrange(4)}.example"
        gone = {i for i, (own, _) in self.kept().items() if own == host} if self.data else set()
        self.take(gone, [dict(domain=host, robots="User-agent: GPTBot\nDisallow: /")])

    # the run

    def end_of(self, total, decay, begin):
        """(samples of a run whose decay begins after `begin` samples, samples of this decay)"""
        decay = decay if begin == total - decay else begin * decay // (total - decay)
        return begin + decay, decay

    def start(self, resume, length, works):
        """train.py, which is asked for a stop or for the decay in one of its steps, or not."""
        request, at = self.rng.choice(["", "stop", "stop", "cooldown"]), self.rng.randrange(3)
        calls, square_norm = iter(range(99)), parallel.square_norm

        def requesting(*args):
            if next(calls) == at and request:
                (self.out / request).touch()
            return square_norm(*args)

        flags = [f"--total_samples={length[0]}", f"--decay_samples={length[1]}", *["--resume"] * resume]
        with patch.object(parallel, "square_norm", requesting):
            done = self.call(works, "train.py", *RUN, f"--data={self.data_folder}", f"--out={self.out}", *flags)
        if not works:
            return
        run, first, lines = self.run, self.run.done, []
        run.starts += 1
        while run.done < len(sizes_in(self.end_of(*run.length, run.begin)[0])):
            step, run.done = run.done - first, run.done + 1
            seen = sum(sizes_in(1000)[run.done - 1])
            if request == "cooldown" and step == at + 1 and seen >= run.begin:
                lines.append(f"step {run.done:6}   asked for its decay, which this schedule has begun")
            elif request == "cooldown" and step == at + 1:
                run.begin = seen
                left = len(sizes_in(self.end_of(*run.length, seen)[0])) - run.done
                lines.append(f"step {run.done:6}   the decay begins, {left} steps\n")
            run.begins[run.done] = run.length, run.begin
            if request == "stop" and step == at:
                break
        run.finished = run.done == len(sizes_in(self.end_of(*run.length, run.begin)[0]))
        lines += [f"resumed from {self.out}/ckpt/step-{first:08d}\n"] * bool(first)
        lines += [] if run.finished else [f"{self.out}: stopped as asked after step {run.done}, saved"]
        assert all(line in done.stdout for line in lines), (lines, done.stdout)

    def new_run(self):
        version = self.version()
        if version not in self.kept_versions:
            self.kept_versions.append(version)
            shutil.copytree(self.data_folder, self.folder / f"version-{self.kept_versions.index(version)}")
        begin = SHORT[0] - SHORT[1]
        self.run = SimpleNamespace(version=version, length=SHORT, begin=begin, begins={}, done=0)
        self.run.starts, self.run.finished = 0, False

    def train(self):
        works = bool(self.data) and not self.run
        if works:
            self.new_run()
        self.start(False, SHORT, works)

    def resume(self):
        if not self.run:
            return self.train()
        works = bool(self.data) and self.version() == self.run.version and not self.run.finished
        self.start(True, self.run.length, works)

    def extend(self):
        """Resume for longer: from before the decay, if it has begun."""
        if not self.run or self.run.length == LONG:
            return self.resume()
        run, begin = self.run, LONG[0] - LONG[1]
        seen = sum(sizes_in(1000)[run.done - 1])
        works = bool(self.data) and self.version() == run.version
        before = [step for step in range(1, run.done + 1) if sum(sizes_in(1000)[step - 1]) <= min(run.begin, begin)]
        works = works and (seen <= run.begin or bool(before))
        if works:
            if seen > run.begin:
                run.done = before[-1]
            run.length, run.begin, run.finished = LONG, begin, False
        self.start(True, LONG, works)

    def damage(self):
        """A byte of the newest checkpoint flips: it is passed over for the one before."""
        if not self.run or self.run.done < 2 or self.run.finished or self.version() != self.run.version:
            return
        [file, *_] = sorted((self.out / "ckpt" / f"step-{self.run.done:08d}").glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        self.run.done -= 1
        length, begin = self.run.begins[self.run.done]
        # A checkpoint from before the run was extended does not know the later begin of its decay.
        self.run.begin = begin if length == self.run.length else LONG[0] - LONG[1]
        self.resume()

    def lose_end(self):
        """A finished run as if it had been killed in its last validation, or behind it: it makes up for that alone."""
        if not self.run or not self.run.finished or self.version() != self.run.version:
            return
        (self.out / "summary.json").unlink()
        if self.rng.random() < 0.5:
            (self.out / "model.safetensors").unlink()
            *lines, last = (self.out / "log.jsonl").read_text().splitlines(keepends=True)
            (self.out / "log.jsonl").write_text("".join(lines) + last[:9])
        self.run.finished = False
        self.resume()

    # readers

    def evaluate(self):
        """Bits per byte of the validation texts, the end of each included."""
        done = self.call(bool(self.run and self.data), "evaluate.py", self.data_folder, f"--init_from={self.out}")
        if done.returncode:
            return
        oracle, nats = Plain(self.out), 0.0
        texts = texts_of(self.data_folder)["val"]
        with torch.no_grad():
            for text in texts:
                ids = [BYTE.bos, *BYTE.encode(text), BYTE.eos]
                begins = [0, *range(T // 2, len(ids) - T // 2 - 1, T // 2)] if len(ids) > T + 1 else [0]
                for begin in begins:
                    logp = oracle.logp(ids[begin : begin + T + 1])
                    nats -= logp[0 if begin == 0 else T // 2 :].sum().item()
        row = read_json(self.out / "evaluation.json")["rows"][0]
        assert row["n"] == len(texts)
        assert row["score"] == approx(nats / math.log(2) / sum(len(text.encode()) for text in texts), rel=1e-4)

    def export(self):
        self.call(bool(self.run), "convert.py", f"--load={self.out}", f"--save={self.folder}/hf")
        if self.run:
            assert same(weights(self.folder / "hf"), weights(self.out))

    def when(self):
        """The steps that have read a document, by the tokens of all windows of the run."""
        if not self.data:
            return
        i = self.rng.choice(sorted(self.kept()))
        works = bool(self.run) and self.version() == self.run.version
        done = self.call(works, "corpus.audit", self.data_folder, f"--find={i}", f"--when={self.out}")
        if not works:
            return
        [row] = [row for row in ledger(self.data_folder) if row["id"].endswith(f":{i}")]
        sizes = sizes_in(1000)[: self.run.done]
        idx, targets, *_ = TokenDataset(str(self.data_folder), "train", T).batch(0, sum(sizes[-1]))
        windows = np.concatenate([idx.numpy(), targets.numpy()[:, -1:]], 1).astype(np.uint16)
        whole = streams(self.data_folder)["data", "train"].tobytes()
        places = np.array([whole.find(window.tobytes()) // 2 for window in windows])
        near = (row["offset"] - T - 1 < places) & (places < row["offset"] + row["tokens"])
        read = [n for n, (seen, size) in enumerate(sizes) if near[seen : seen + size].any()]
        spans = ", ".join(f"{n} (tokens {T * sizes[n][0]:,} to {T * sum(sizes[n]):,})" for n in read)
        wanted = f"read at {len(read)} of the {len(sizes)} steps of {self.out}: {spans}\n"
        if row["split"] == "val":
            wanted = "for validation"
        assert (wanted if read or row["split"] == "val" else f"none of the {len(sizes)} steps") in done.stdout

    # what holds after each command

    def check(self):
        assert not os.path.exists(f"{self.data_folder}.tmp")
        assert bool(self.data) == self.data_folder.exists() and bool(self.run) == self.out.exists()
        if self.data:
            self.check_data()
        if self.run:
            self.check_run()

    def check_data(self):
        kept, (docs, withdrawn) = self.kept(), self.data
        found = texts_of(self.data_folder)
        assert sorted(sum(found.values(), [])) == sorted(text for _, text in kept.values())
        assert all(number(text) < 0.3 for text in found["val"])
        reasons = {row["id"].rpartition(":")[2]: row["reason"].partition(":")[0] for row in ledger(self.data_folder)}
        assert reasons == {i: "withdrawn" if i in withdrawn else "" for i in docs}
        said = script("corpus.audit", self.data_folder).stdout
        assert f"{len(docs)} documents in = {len(kept)} kept + {len(withdrawn)} removed; " in said

    def check_run(self):
        """The log has each step once, with the rate of its plan; the weights are those of an undisturbed run."""
        run, entries = self.run, log(self.out, "loss")
        end, decay = self.end_of(*run.length, run.begin)
        sizes = sizes_in(end)[: run.done]
        wanted = []
        for step, (seen, n) in enumerate(sizes):
            rate = plain.wsd(seen, LR, MIN_LR, 8, end, decay)
            wanted.append((step, T * (seen + n), approx(rate)))
        assert [(entry["step"], entry["tokens"], entry["lr"]) for entry in entries] == wanted
        assert steps(self.out) == list(range(1, run.done + 1))
        assert settings_of(self.out)["total_samples"] == run.length[0]
        files = {*os.listdir(self.out)}
        assert ({"summary.json", "model.safetensors"} <= files) == run.finished and "stop" not in files
        assert not run.finished or "cooldown" not in files
        assert run.finished or not files & {"summary.json", "model.safetensors"}
        assert [entry["step"] for entry in log(self.out, "val_loss")] == [run.done - 1] * run.finished
        reference = self.folder / f"reference-{self.kept_versions.index(run.version)}-{end}"
        if not run.finished or (run.starts, end, decay) == (1, *SHORT):
            return
        if not reference.exists():
            data = self.folder / f"version-{self.kept_versions.index(run.version)}"
            flags = f"--data={data}", f"--out={reference}", f"--total_samples={end}", f"--decay_samples={decay}"
            assert script("train.py", *RUN, *flags).returncode == 0
        assert equal(self.out, reference)


def play(folder, seed, n):
    folder.mkdir()
    history, names = History(folder, seed), []
    while len(names) < n:
        # Most histories begin with a run; some without data.
        begin = ["prepare", "train"][len(names) :] if seed % 4 else []
        names.append(begin[0] if begin else history.choose())
        try:
            getattr(history, names[-1])()
            history.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {' '.join(names)}: {error}") from error


# Seeds in which runs are stopped, extended, damaged and finished twice, and documents are withdrawn between.
SEEDS = 5, 6, 9, 11, 17, 26, 29, 30


def test_any_commands_leave_what_the_model_of_the_folder_says(tmp_path):
    for seed in SEEDS:
        play(tmp_path / str(seed), seed, n=6)


@pytest.mark.slow
def test_more_commands_leave_what_the_model_of_the_folder_says(tmp_path):
    for seed in range(100, 160):
        play(tmp_path / str(seed), seed, n=7)
        shutil.rmtree(tmp_path / str(seed))
