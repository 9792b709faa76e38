"""
Does the suite notice a mistake? Plant one at a time, run the tests that claim to hold that file, and print what survived.

    $ python tests/mutants.py                                # all of the product: two hours of one core the first time
    $ python tests/mutants.py --files=model.py,train.py      # these; --rate=3 plants three times as many
    $ python tests/mutants.py --files=model.py --plan        # only lists what would be planted

A passing suite says that the code does what the tests ask, and nothing about what they do not ask. A mutant answers that: the
same program with one small mistake, such as a tired person makes. If a test fails, the mutant is killed. If all pass, it has
survived, and a user could have received it.

Mutants come from two places. mutate.py changes an operator or a constant, swaps arguments or branches, leaves a statement out.
mutants_by_hand.py has the meaningful ones of each file, and HARMLESS there lists survivors that change nothing that anyone could
notice, with the reason: they are not counted.

A run costs seconds because nothing is imported twice: this process has imported torch and transformers, but nothing of the
project, and is forked for every mutant. The child has a private copy of the tree and runs first those tests of test_X.py that
execute the mutated line (coverage.py has seen which), the fastest first, then its others, then those of further modules that
execute the line or start processes, until one fails. Answers are kept in out/mutants/answers.jsonl by the hash of the mutated
file and its tests: an interrupted run goes on where it stopped, and only what has changed is asked again.
"""

import argparse
import collections
import contextlib
import glob
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from tqdm import tqdm

from mutate import CORE, by_hand, generated, stem

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)

# The tests that claim to hold X.py are test_X.py and these.
ALSO = {
    "chat": ["test_tokenizer", "test_sample", "test_sft"],
    "checkpoint": ["test_train"],
    "collapse": ["test_qrpo"],
    "common": ["test_sft", "test_qrpo"],
    "convert": ["test_published", "test_tokenizer"],
    "dedup": ["test_quality", "test_prepare"],
    "digits": ["test_qrpo", "test_readme"],
    "explain": ["test_plot"],
    "fairness": ["test_tokenizer"],
    "files": ["test_checkpoint", "test_prepare"],
    "generate": ["test_model", "test_speed", "test_sample"],
    "hardware": ["test_model", "test_parallel"],
    "intervals": ["test_evaluate", "test_ablate", "test_memorize"],
    "kit": ["test_ablate", "test_memorize", "test_qrpo"],
    "losses": ["test_qrpo"],
    "model": ["test_speed"],
    "parallel": ["test_train", "test_step"],
    "peers": ["test_bench"],
    "pii": ["test_robots"],
    "readers": ["test_prepare"],
    "references": ["test_qrpo", "test_sft"],
    "runs": ["test_train", "test_sft", "test_checkpoint"],
    "shards": ["test_prepare", "test_data"],
    "sift": ["test_prepare"],
    "talk": ["test_sample"],
    "tokenizer": ["test_published"],
    "train": ["test_step", "test_parallel"],
}


# ---- who would notice ----

def claimants(file, root):
    """The test modules that claim to hold a file, those that exist."""
    names = [f"test_{stem(file)}", *ALSO.get(stem(file), [])]
    return [f"tests/{name}.py" for name in names if os.path.exists(f"{root}/tests/{name}.py")]


def helpers(root):
    """What any test may use: conftest.py and the modules in tests/ that are no tests."""
    return sorted(path for path in glob.glob(f"{root}/tests/**/*.py", recursive=True)
                  if not os.path.basename(path).startswith(("test_", "mutants", "mutate")))


def sha(*paths):
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as f:
            digest.update(f.read())
    return digest.hexdigest()[:16]


class Watch:
    """
    A pytest plugin: runs the tests in the order of `rank` and remembers which failed, and how long each took. A test that takes ten
    times as long as it did kills this process by an alarm, which no loop can catch.
    """

    def __init__(self, rank=None, seconds={}, coverage=None):
        self.rank, self.known, self.coverage = rank, seconds, coverage
        self.seconds, self.failed, self.forking, self.now = collections.Counter(), [], set(), ""

    def pytest_collection_modifyitems(self, items):
        if self.rank:
            items[:] = sorted((i for i in items if i.nodeid in self.known), key=lambda item: self.rank(item.nodeid))
        self.forking |= {item.nodeid for item in items if "launch" in getattr(item, "fixturenames", ())}

    def pytest_runtest_logstart(self, nodeid, location):
        signal.alarm(int(20 + 10 * self.known.get(nodeid, 60)))
        self.now = nodeid
        if self.coverage:
            self.coverage.switch_context(nodeid)

    def audit(self, event, args):
        """For sys.addaudithook: which tests start processes, whose lines coverage.py does not see."""
        if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
            self.forking.add(self.now)

    def pytest_runtest_logreport(self, report):
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)


def run_tests(tree, modules, watch, more=()):
    """pytest in this process, which was forked for it and ends after it: its exit code."""
    os.chdir(tree)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.path[:] = [p for p in sys.path if os.path.abspath(p) not in (HERE, ROOT)]
    signal.alarm(300)                          # for collecting: an import may hang as well
    import pytest
    quiet = ["-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--tb=no", f"--basetemp={tree}.tmp"]
    return int(pytest.main([*quiet, *more, *modules], plugins=[watch]))


def fork(work, log):
    """Run work() in a child with a process group of its own, its output in `log`: the pid. The exit code is what it returns."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.setsid()
        tqdm._instances.clear()                             # or a test's bar would leave a line for the one of this program
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(out, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = work()
    finally:
        sys.stdout.flush()
        os._exit(code)


def finished():
    """Wait for a child: its pid, exit code (negative: the signal), and nothing of its process group is left."""
    pid, status = os.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return pid, os.waitstatus_to_exitcode(status)


def copy_tree(root, to):
    """What git knows of or does not ignore, by copies: a test may write into its tree. With the compiled files of the first copy."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        if os.path.isfile(f"{root}/{name}"):
            os.makedirs(os.path.dirname(f"{to}/{name}"), exist_ok=True)
            shutil.copy2(f"{root}/{name}", f"{to}/{name}")
    subprocess.run([sys.executable, "-m", "compileall", "-q", to, "-f"], capture_output=True)


def observe(module, tree, out):
    """Run one test module as it is, in a forked child: seconds and lines of each test, and which fail, as JSON into `out`."""
    import coverage
    watch = Watch(coverage=coverage.Coverage(data_file=None, config_file=False, source=[tree]))
    watch.coverage.start()
    sys.addaudithook(watch.audit)
    code = run_tests(tree, [module], watch)
    watch.coverage.stop()
    lines, data = {}, watch.coverage.get_data()
    for path in data.measured_files():
        name = os.path.relpath(path, tree)
        if not name.startswith("tests"):
            lines[name] = data.contexts_by_lineno(path)                        # "" is what importing executes
    seen = {name: sha(f"{tree}/{name}") for name in [*lines, module, "tests/conftest.py"] if os.path.exists(f"{tree}/{name}")}
    with open(out, "w", encoding="utf-8") as f:
        json.dump(dict(seen=seen, seconds=watch.seconds, failed=watch.failed, forking=list(watch.forking), lines=lines, code=code), f)
    return 0


def try_mutant(mutant, tree, modules, observed, out):
    """The mutant in a private tree, its tests in a good order, in a forked child: the test that killed it, as JSON into `out`."""
    path = f"{tree}/{mutant.file}"
    os.remove(path)
    with open(path, "wb") as f:
        f.write(mutant.source)
    for cached in glob.glob(f"{tree}/**/__pycache__/{stem(path)}.*.pyc", recursive=True):
        os.remove(cached)
    seconds, rank = {}, {}
    for i, record in enumerate(observed):
        lines = record["lines"].get(mutant.file, {})
        covering = {test for line in mutant.lines for test in lines.get(str(line), [])}
        for test, s in record["seconds"].items():
            if test not in record["failed"] and (i == 0 or test in covering or test in record["forking"] or "" in covering):
                seconds[test], rank[test] = s, (i, test not in covering, s)
    watch = Watch(rank.get, seconds)
    code = run_tests(tree, modules, watch, ["-x"])
    with open(out, "w", encoding="utf-8") as f:
        json.dump(watch.failed, f)
    return code


# ---- asking ----

class Workshop:
    """A folder for trees and logs, and up to `jobs` forked children at work in it."""

    def __init__(self, folder, root, jobs):
        self.folder, self.jobs, self.running, self.count = folder, jobs, {}, 0
        copy_tree(root, f"{folder}/clean")

    def run(self, tasks):
        """tasks: an iterable of (name, work(tree, out)). Yields (name, exit code, what it wrote to out, its log) as they end."""
        tasks = iter(tasks)
        try:
            while True:
                while len(self.running) < self.jobs and (task := next(tasks, None)):
                    self.start(*task)
                if not self.running:
                    return
                yield self.finish()
        finally:
            for pid in self.running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def start(self, name, work):
        self.count += 1
        tree = f"{self.folder}/{self.count}"
        shutil.copytree(f"{self.folder}/clean", tree, symlinks=True)
        pid = fork(lambda: work(tree, f"{tree}.json"), f"{tree}.log")
        self.running[pid] = name, tree

    def finish(self):
        pid, code = finished()
        name, tree = self.running.pop(pid)
        with open(f"{tree}.log", encoding="utf-8", errors="replace") as f:
            log = f.read()
        answer = None
        if os.path.exists(f"{tree}.json"):
            with open(f"{tree}.json", encoding="utf-8") as f:
                answer = json.load(f)
        shutil.rmtree(tree, ignore_errors=True)
        shutil.rmtree(f"{tree}.tmp", ignore_errors=True)
        return name, code, answer, log


def observations(modules, shop, root, store):
    """What each test module does to the unmutated tree: from `store` where nothing that it executed has changed, else seen now."""
    found, missing = {}, []
    for module in modules:
        path = f"{store}/{stem(module)}.json"
        record = None
        if os.path.exists(path):
            with open(path, encoding="utf-8") as f:
                record = json.load(f)
        fresh = record and all(os.path.exists(f"{root}/{name}") and sha(f"{root}/{name}") == h for name, h in record["seen"].items())
        if fresh:
            found[module] = record
        else:
            missing.append(module)
    tasks = [(module, lambda tree, out, module=module: observe(module, tree, out)) for module in missing]
    for module, _, record, log in tqdm(shop.run(tasks), "unmutated tests", len(tasks), disable=not tasks):
        if record is None or not record["seconds"]:
            raise SystemExit(f"{module} does not run, mistake or not:\n{log[-2000:]}")
        for test in record["failed"]:
            print(f"left out, fails without a mistake: {test}")
        with open(f"{store}/{stem(module)}.json", "w", encoding="utf-8") as f:
            json.dump(record, f)
        found[module] = record
    return found


def verdict(code, failed):
    """Who killed it: a test, an endless loop, a signal; "" if nobody; None if it could not be asked."""
    if code == 0:
        return ""
    if code < 0:
        return "a test ten times as long as it was" if code == -signal.SIGALRM else signal.Signals(-code).name
    return failed[0] if failed else None


def ask(mutants, shop, root, store, minutes, trust=False):
    """
    Every Mutant's answer as a dict, those of `store` first; after `minutes` no more are begun. trust: what an earlier state of the
    tests killed counts as killed, so that only survivors are asked again while tests are written.
    """
    path, deadline = f"{store}/answers.jsonl", time.monotonic() + 60 * minutes
    known = {}
    if os.path.exists(path):
        with open(path, encoding="utf-8") as f:
            known = {row["key"]: row for row in map(json.loads, f)}
    killed = {row.get("source"): row for row in known.values() if row["by"]}
    keys = {}
    for m in mutants:
        tests = [f"{root}/{module}" for module in claimants(m.file, root)]
        key = hashlib.sha256(m.source + f"{m.file} {sha(*helpers(root), *tests)}".encode()).hexdigest()[:16]
        keys[key] = m
        if trust and hashed(m) in killed:
            known.setdefault(key, killed[hashed(m)])
    todo = [key for key in keys if key not in known]
    observed = observations(sorted({module for key in todo for module in claimants(keys[key].file, root)}), shop, root, store)

    def tasks():
        for key in todo:
            if minutes and time.monotonic() > deadline:
                return
            m = keys[key]
            modules = claimants(m.file, root)
            yield key, lambda tree, out, m=m, modules=modules: try_mutant(m, tree, modules, [observed[x] for x in modules], out)

    survived = 0
    with open(path, "a", encoding="utf-8") as f, tqdm(total=len(todo), desc="mutants", mininterval=1) as bar:
        for key, code, failed, log in shop.run(tasks()):
            m, by = keys[key], verdict(code, failed)
            bar.update()
            if by is None:
                tqdm.write(f"could not be asked: {m.file}:{m.lines[0]} {m.new}\n{log[-1000:]}")
                continue
            known[key] = dict(key=key, source=hashed(m), file=m.file, line=m.lines[0], old=m.old, new=m.new, by=by)
            f.write(json.dumps(known[key]) + "\n")
            f.flush()
            survived += not by
            bar.set_postfix(survived=survived, refresh=False)
            if not by:
                tqdm.write(f"survived  {m.file}:{m.lines[0]}  {m.old}  ->  {m.new}")
    return [known[key] | dict(line=m.lines[0]) for key, m in keys.items() if key in known]


def hashed(mutant):
    return hashlib.sha256(mutant.file.encode() + b"\n" + mutant.source).hexdigest()[:16]


def table(answers, harmless, planned):
    """The Markdown that is committed: a row per file, then the survivors, then what is harmless and why."""
    reasons = {(file, old, new): why for file, old, new, why in harmless}
    excused = [a for a in answers if not a["by"] and (a["file"], a["old"], a["new"]) in reasons]
    counted = [a for a in answers if a not in excused]
    lines = ["| file | mutants | killed | survived | killed, % | harmless |", "|---|--:|--:|--:|--:|--:|"]

    def row(name, chosen, excused):
        killed = sum(bool(a["by"]) for a in chosen)
        share = f"{100 * killed / len(chosen):.0f}" if chosen else ""
        return f"| {name} | {len(chosen)} | {killed} | {len(chosen) - killed} | {share} | {len(excused)} |"

    for file in sorted({a["file"] for a in answers}, key=lambda file: (stem(file) not in CORE, file)):
        lines.append(row(file, [a for a in counted if a["file"] == file], [a for a in excused if a["file"] == file]))
    for name, core in (("**the core**", True), ("**the rest**", False)):
        part = lambda rows: [a for a in rows if (stem(a["file"]) in CORE) == core]
        lines.append(row(name, part(counted), part(excused)))
    if planned > len(answers):
        lines.append(f"\n{planned - len(answers)} of {planned} were not asked.")
    lines.append("\n## Survived\n")
    lines += [f"- {a['file']}:{a['line']} `{a['old']}` -> `{a['new']}`" for a in counted if not a["by"]] or ["None."]
    lines.append("\n## Harmless\n")
    lines += [f"- {a['file']}:{a['line']} `{a['old']}` -> `{a['new']}`: {reasons[a['file'], a['old'], a['new']]}" for a in excused] or ["None."]
    return "\n".join(lines) + "\n"


def collect(root, files, rate, mistakes):
    """All Mutants of the files of `root`, and the mistakes by hand whose text is not there any more."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True).stdout.split()
    product = [f for f in listed if f.split("/")[0] not in ("tests", "configs") and os.path.exists(f"{root}/{f}")]
    mutants, stale = [], []
    for file in files or product:
        with open(f"{root}/{file}", "rb") as f:
            source = f.read()
        hand, gone = by_hand(file, source, mistakes)
        mutants += list({m.source: m for m in hand + generated(file, source, rate)}.values())
        stale += gone
    return mutants, stale + [(name, old) for name, old, *_ in mistakes if not files and name not in product]


def main():
    parser = argparse.ArgumentParser(description="Plant mistakes, run the tests, print what survived.")
    parser.add_argument("--files", default="", help="model.py,train.py: only these")
    parser.add_argument("--minutes", type=float, default=0, help="begin no mutant after so many minutes; 0: all are asked")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="mutants at a time")
    parser.add_argument("--rate", type=float, default=1.0, help="times as many generated mutants")
    parser.add_argument("--trust", action="store_true", help="what other tests killed counts as killed: quick while tests are written")
    parser.add_argument("--plan", action="store_true", help="print what would be planted, and stop")
    parser.add_argument("--table", default="", help="write the table to this file as well")
    args = parser.parse_args()
    from mutants_by_hand import HARMLESS, MISTAKES
    mutants, stale = collect(ROOT, args.files.split(",") if args.files else [], args.rate, MISTAKES)
    for file, old in stale:
        print(f"stale, to be found exactly once in {file}: {old!r}")
    if args.plan:
        for m in mutants:
            print(f"{m.file}:{m.lines[0]}  {m.old}  ->  {m.new}")
        print(f"{len(mutants)} mutants, {sum(stem(m.file) in CORE for m in mutants)} of them in the core")
        return
    store = f"{ROOT}/out/mutants"
    os.makedirs(store, exist_ok=True)
    warm_up()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        answers = ask(mutants, Workshop(folder, ROOT, args.jobs), ROOT, store, args.minutes, args.trust)
    text = table(answers, HARMLESS, len(mutants))
    print(text)
    if args.table:
        os.makedirs(os.path.dirname(os.path.abspath(args.table)), exist_ok=True)
        with open(args.table, "w", encoding="utf-8") as f:
            f.write(text)


def warm_up():
    """
    Import what the tests import, once, and nothing of the project. One thread a child, or they would fight for the cores. The
    compiler's cache of gradients goes by the graph and does not see that a registered gradient has changed, so it is off.
    """
    os.environ.update(OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1", TORCHINDUCTOR_AUTOGRAD_CACHE="0", TQDM_DISABLE="1")
    os.nice(5)
    import coverage, matplotlib.pyplot, numpy, pyarrow.parquet, pytest, safetensors.torch, tiktoken, transformers      # noqa
    import torch._dynamo, torch._inductor.compile_fx, torch.distributed.fsdp                                          # noqa
    import transformers.models.apertus.modeling_apertus                                                               # noqa


if __name__ == "__main__":
    main()
