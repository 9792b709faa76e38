"""
Does the suite notice a mistake? Plant one at a time, run the tests that claim to hold that file, and print what
survived.

    $ python tests/mutants.py                                # all of the product: two hours of one core the first time
    $ python tests/mutants.py --files=model.py,train.py      # these; --rate=3 plants three times as many
    $ python tests/mutants.py --files=model.py --plan        # only lists what would be planted

A passing suite says that the code does what the tests ask, and nothing about what they do not ask. A mutant answers
that: the same program with one small mistake, such as a tired person makes. If a test fails, the mutant is killed. If
all pass, it has survived, and a user could have received it.

Mutants come from two places. mutate.py changes an operator or a constant, swaps arguments or branches, leaves a
statement out. mutants_by_hand.txt has the meaningful ones of each file, mutants_harmless.txt the survivors that change
nothing that anyone could notice, with the reason: they are not counted.

A run costs seconds because nothing is imported twice: this process has imported torch and transformers, but nothing of
the project, and is forked for every mutant. The child has a private copy of the tree and runs tests until one fails:
first those of test_X.py that execute the mutated line (coverage.py has seen which), the fastest first, then its others,
then those of further modules that execute the line or start processes. Answers are kept in out/mutants/answers.jsonl by
the hash of the mutated file and its tests. So an interrupted run goes on where it stopped, and only what has changed is
asked again.
"""

import argparse
import collections
import contextlib
import functools
import glob
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from tqdm import tqdm

from mutate import CORE, by_hand, generated, read, stem

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)

# The tests that claim to hold X.py are test_X.py and these.
ALSO = {
    "attention": ["test_model"],
    "audit": ["test_kept"],
    "chat": ["test_tokenizer", "test_sample", "test_sft", "test_conversations"],
    "checkpoint": ["test_train", "test_anytime", "test_lora", "test_extend"],
    "collapse": ["test_qrpo", "test_ppo_collapse"],
    "common": ["test_sft", "test_forgetting", "test_lora", "test_qrpo"],
    "configurator": ["test_continue", "test_anytime"],
    "conversations": ["test_sft"],
    "convert": ["test_published", "test_tokenizer", "test_lora", "test_continue", "test_extend"],
    "data": ["test_kept", "test_withdraw"],
    "dedup": ["test_quality", "test_prepare"],
    "digits": ["test_qrpo", "test_readme"],
    "exam": ["test_world"],
    "explain": ["test_plot"],
    "fairness": ["test_tokenizer"],
    "evaluate": ["test_forgetting", "test_world"],
    "files": ["test_checkpoint", "test_prepare"],
    "forget": ["test_forgetting"],
    "generate": ["test_model", "test_speed", "test_sample"],
    "grow": ["test_kept"],
    "hardware": ["test_model", "test_parallel", "test_routes"],
    "intervals": ["test_evaluate", "test_ablate", "test_memorize"],
    "judges": ["test_charter", "test_qrpo"],
    "kept": ["test_withdraw"],
    "kit": ["test_ablate", "test_memorize", "test_qrpo", "test_ppo_collapse"],
    "losses": ["test_qrpo"],
    "quantised": ["test_lora"],
    "model": ["test_speed", "test_lora", "test_quantised", "test_parallel", "test_mps"],
    "parallel": ["test_train", "test_step", "test_lora", "test_distill"],
    "peers": ["test_bench"],
    "tracing": ["test_plan"],
    "pii": ["test_robots", "test_pii"],
    "inputs": ["test_readers", "test_prepare", "test_conversations"],
    "cluster": ["test_cluster"],
    "steps": ["test_cluster"],
    "readers": ["test_readers", "test_prepare", "test_conversations"],
    "qrpo": ["test_lora", "test_charter"],
    "recipe": ["test_world"],
    "references": ["test_qrpo", "test_sft", "test_charter"],
    "runs": ["test_train", "test_anytime", "test_sft", "test_checkpoint"],
    "start": ["test_continue", "test_extend", "test_distill"],
    "sft": ["test_lora"],
    "shards": ["test_prepare", "test_data"],
    "sift": ["test_prepare", "test_quality", "test_language", "test_heuristics"],
    "talk": ["test_sample"],
    "tokenizer": ["test_published", "test_continue", "test_extend"],
    "train": ["test_step", "test_anytime", "test_continue", "test_extend", "test_distill", "test_forgetting",
              "test_parallel"],
}


# ---- who would notice ----

def claimants(file, root):
    """The test modules that claim to hold a file, those that exist."""
    names = [f"test_{stem(file)}", *ALSO.get(stem(file), [])]
    return [f"tests/{name}.py" for name in names if os.path.exists(f"{root}/tests/{name}.py")]


def helpers(root):
    """What any test may use: conftest.py and the modules in tests/ that are no tests."""
    no_help = ("test_", "mutants", "mutate")
    paths = glob.glob(f"{root}/tests/**/*.py", recursive=True)
    return sorted(path for path in paths if not os.path.basename(path).startswith(no_help))


def sha(*paths):
    """16 hex digits of the contents of files."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as f:
            digest.update(f.read())
    return digest.hexdigest()[:16]


def read_json(path):
    """What a file holds, None if there is none."""
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as f:
        return json.load(f)


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as f:
        json.dump(value, f)


class Watch:
    """
    A pytest plugin: runs the tests in the order of `rank`, and remembers which failed and how long each took.

    A test that takes ten times as long as it did kills this process by an alarm, which no loop can catch.
    """

    def __init__(self, rank=None, seconds={}, coverage=None):
        self.rank = rank
        self.known = seconds  # what each test took without a mistake
        self.coverage = coverage
        self.seconds = collections.Counter()
        self.failed = []
        self.forking = set()  # tests that start processes, whose lines coverage.py does not see
        self.now = ""

    def pytest_collection_modifyitems(self, items):
        if self.rank:
            chosen = [item for item in items if item.nodeid in self.known]
            items[:] = sorted(chosen, key=lambda item: self.rank(item.nodeid))
        for item in items:
            if "launch" in getattr(item, "fixturenames", ()):
                self.forking.add(item.nodeid)

    def pytest_runtest_logstart(self, nodeid, location):
        expected = self.known.get(nodeid, 60)
        signal.alarm(int(20 + 10 * expected))
        self.now = nodeid
        if self.coverage:
            self.coverage.switch_context(nodeid)

    def audit(self, event, args):
        """For sys.addaudithook: notes which tests start processes."""
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
    original = (HERE, ROOT)
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) not in original]
    # For collecting: an import may hang as well.
    signal.alarm(300)
    import pytest

    quiet = "-q -p no:xdist -p no:cacheprovider -p no:faulthandler --tb=no"
    args = [*quiet.split(), f"--basetemp={tree}.tmp", *more, *modules]
    return int(pytest.main(args, plugins=[watch]))


def fork(work, log):
    """
    Run work() in a child with a process group of its own, its output in `log`: the pid.

    The child's exit code is what work() returns.
    """
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        os.setsid()
        # Without this, a test's bar would leave a line for the one of this program.
        tqdm._instances.clear()
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
    """
    What git knows of or does not ignore, compiled.

    By copies, not by links, since a test may write into its tree.
    """
    command = "git ls-files -co --exclude-standard"
    listed = subprocess.run(command.split(), cwd=root, capture_output=True, text=True)
    for name in listed.stdout.splitlines():
        source, copy = f"{root}/{name}", f"{to}/{name}"
        if os.path.isfile(source):
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            shutil.copy2(source, copy)
    subprocess.run([sys.executable, "-m", "compileall", "-q", to, "-f"], capture_output=True)


def observe(module, tree, out):
    """Run one test module as it is, in a forked child: seconds and lines of each test, and which fail, to `out`."""
    import coverage

    measure = coverage.Coverage(data_file=None, config_file=False, source=[tree])
    watch = Watch(coverage=measure)
    measure.start()
    sys.addaudithook(watch.audit)
    code = run_tests(tree, [module], watch)
    measure.stop()
    data = measure.get_data()
    lines = {}  # file -> line -> the tests that execute it; "" is what importing executes
    for path in data.measured_files():
        name = os.path.relpath(path, tree)
        if not name.startswith("tests"):
            lines[name] = data.contexts_by_lineno(path)
    seen = {}  # file -> hash of what the record rests on
    for name in [*lines, module, "tests/conftest.py"]:
        path = f"{tree}/{name}"
        if os.path.exists(path):
            seen[name] = sha(path)
    record = dict(
        seen=seen,
        seconds=watch.seconds,
        failed=watch.failed,
        forking=list(watch.forking),
        lines=lines,
        code=code,
    )
    write_json(out, record)
    return 0


def plant(mutant, tree):
    """Write the mutant into a private tree, and remove what was compiled of the file before."""
    path = f"{tree}/{mutant.file}"
    os.remove(path)
    with open(path, "wb") as f:
        f.write(mutant.source)
    for cached in glob.glob(f"{tree}/**/__pycache__/{stem(path)}.*.pyc", recursive=True):
        os.remove(cached)


def try_mutant(mutant, tree, modules, observed, out):
    """The mutant in a private tree, its tests in a good order, in a forked child: the test that killed it, to `out`."""
    plant(mutant, tree)
    seconds, rank = {}, {}
    for i, record in enumerate(observed):
        lines = record["lines"].get(mutant.file, {})
        covering = set()
        for line in mutant.lines:
            covering.update(lines.get(str(line), []))
        for test, s in record["seconds"].items():
            executes = test in covering or "" in covering
            may_notice = i == 0 or executes or test in record["forking"]
            if may_notice and test not in record["failed"]:
                seconds[test] = s
                rank[test] = (i, test not in covering, s)
    watch = Watch(rank.get, seconds)
    code = run_tests(tree, modules, watch, ["-x"])
    write_json(out, watch.failed)
    return code


# ---- asking ----

class Workshop:
    """A folder for trees and logs, and up to `jobs` forked children at work in it."""

    def __init__(self, folder, root, jobs):
        self.folder = folder
        self.jobs = jobs
        self.running = {}  # pid -> (name, tree)
        self.count = 0
        copy_tree(root, f"{folder}/clean")

    def run(self, tasks):
        """
        Yields (name, exit code, what it wrote to out, its log) of each task as it ends.

        tasks: an iterable of (name, work(tree, out)).
        """
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
        answer = read_json(f"{tree}.json")
        shutil.rmtree(tree, ignore_errors=True)
        shutil.rmtree(f"{tree}.tmp", ignore_errors=True)
        return name, code, answer, log


def is_fresh(record, root):
    """Whether nothing that was executed for the record has changed."""
    for name, before in record["seen"].items():
        path = f"{root}/{name}"
        if not os.path.exists(path) or sha(path) != before:
            return False
    return True


def observations(modules, shop, root, store):
    """What each test module does to the unmutated tree: from `store` where nothing has changed, else seen now."""
    found, missing = {}, []
    for module in modules:
        record = read_json(f"{store}/{stem(module)}.json")
        if record and is_fresh(record, root):
            found[module] = record
        else:
            missing.append(module)
    tasks = [(module, functools.partial(observe, module)) for module in missing]
    answers = tqdm(shop.run(tasks), "unmutated tests", len(tasks), disable=not tasks)
    for module, _, record, log in answers:
        if record is None or not record["seconds"]:
            raise SystemExit(f"{module} does not run, mistake or not:\n{log[-2000:]}")
        for test in record["failed"]:
            print(f"left out, fails without a mistake: {test}")
        write_json(f"{store}/{stem(module)}.json", record)
        found[module] = record
    return found


def verdict(code, failed):
    """Who killed it: a test, an endless loop, a signal; "" if nobody; None if it could not be asked."""
    if code == 0:
        return ""
    if code < 0:
        return "a test ten times as long as it was" if code == -signal.SIGALRM else signal.Signals(-code).name
    return failed[0] if failed else None


def key_of(mutant, root):
    """What the answer depends on: the mutated file, and the tests that claim to hold it."""
    tests = [f"{root}/{module}" for module in claimants(mutant.file, root)]
    holders = sha(*helpers(root), *tests)
    text = mutant.source + f"{mutant.file} {holders}".encode()
    return hashlib.sha256(text).hexdigest()[:16]


def known_answers(path):
    """{key: row} of the answers of earlier runs."""
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as f:
        return {row["key"]: row for row in map(json.loads, f)}


def ask(mutants, shop, root, store, minutes, trust=False):
    """
    Every Mutant's answer as a dict, those of `store` first; after `minutes` no more are begun.

    trust: what an earlier state of the tests killed counts as killed, so that only survivors are asked again while
    tests are written.
    """
    path = f"{store}/answers.jsonl"
    deadline = time.monotonic() + 60 * minutes
    known = known_answers(path)
    keys = {key_of(m, root): m for m in mutants}
    if trust:
        killed = {row.get("source"): row for row in known.values() if row["by"]}
        for key, m in keys.items():
            if hashed(m) in killed:
                known.setdefault(key, killed[hashed(m)])
    todo = [key for key in keys if key not in known]
    asked = {module for key in todo for module in claimants(keys[key].file, root)}
    observed = observations(sorted(asked), shop, root, store)

    def work_on(mutant, tree, out):
        modules = claimants(mutant.file, root)
        records = [observed[module] for module in modules]
        return try_mutant(mutant, tree, modules, records, out)

    def tasks():
        for key in todo:
            if minutes and time.monotonic() > deadline:
                return
            yield key, functools.partial(work_on, keys[key])

    survived = 0
    bar = tqdm(total=len(todo), desc="mutants", mininterval=1)
    with open(path, "a", encoding="utf-8") as f, bar:
        for key, code, failed, log in shop.run(tasks()):
            m = keys[key]
            by = verdict(code, failed)
            bar.update()
            if by is None:
                tqdm.write(f"could not be asked: {m.file}:{m.lines[0]} {m.new}\n{log[-1000:]}")
                continue
            line = m.lines[0]
            row = dict(file=m.file, line=line, old=m.old, new=m.new, by=by)
            known[key] = dict(key=key, source=hashed(m), **row)
            f.write(json.dumps(known[key]) + "\n")
            f.flush()
            survived += not by
            bar.set_postfix(survived=survived, refresh=False)
            if not by:
                tqdm.write(f"survived  {m.file}:{line}  {m.old}  ->  {m.new}")
    answers = []
    for key, m in keys.items():
        if key in known:
            # A mutant that is known may have moved to another line since.
            answers.append(known[key] | dict(line=m.lines[0]))
    return answers


def hashed(mutant):
    """The mutated file alone, whatever its tests are."""
    text = mutant.file.encode() + b"\n" + mutant.source
    return hashlib.sha256(text).hexdigest()[:16]


# ---- the table ----

def table_row(name, counted, excused):
    killed = sum(bool(a["by"]) for a in counted)
    survived = len(counted) - killed
    share = f"{100 * killed / len(counted):.0f}" if counted else ""
    return f"| {name} | {len(counted)} | {killed} | {survived} | {share} | {len(excused)} |"


def bullet(answer):
    return f"- {answer['file']}:{answer['line']} `{answer['old']}` -> `{answer['new']}`"


def is_core(answer):
    return stem(answer["file"]) in CORE


def table(answers, harmless, planned):
    """The Markdown that is committed: a row per file, then the survivors, then what is harmless and why."""
    reasons = {(file, old, new): why for file, old, new, why in harmless}

    def reason(answer):
        return reasons.get((answer["file"], answer["old"], answer["new"]))

    survivors = [a for a in answers if not a["by"]]
    excused = [a for a in survivors if reason(a) is not None]
    counted = [a for a in answers if a not in excused]
    lines = ["| file | mutants | killed | survived | killed, % | harmless |", "|---|--:|--:|--:|--:|--:|"]

    def add_row(name, belongs):
        its_counted = [a for a in counted if belongs(a)]
        its_excused = [a for a in excused if belongs(a)]
        lines.append(table_row(name, its_counted, its_excused))

    files = {a["file"]: is_core(a) for a in answers}
    for file in sorted(files, key=lambda file: (not files[file], file)):
        add_row(file, lambda a: a["file"] == file)
    add_row("**the core**", is_core)
    add_row("**the rest**", lambda a: not is_core(a))
    if planned > len(answers):
        lines.append(f"\n{planned - len(answers)} of {planned} were not asked.")
    lines.append("\n## Survived\n")
    lines += [bullet(a) for a in survivors if a not in excused] or ["None."]
    lines.append("\n## Harmless\n")
    lines += [f"{bullet(a)}: {reason(a)}" for a in excused] or ["None."]
    return "\n".join(lines) + "\n"


# ---- the command ----

def collect(root, files, rate, mistakes):
    """All Mutants of the files of `root`, and the mistakes by hand whose text is not there any more."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True)
    product = []
    for name in listed.stdout.split():
        folder = name.split("/")[0]
        if folder not in ("tests", "configs") and os.path.exists(f"{root}/{name}"):
            product.append(name)
    mutants, stale = [], []
    for file in files or product:
        with open(f"{root}/{file}", "rb") as f:
            source = f.read()
        hand, gone = by_hand(file, source, mistakes)
        # One of each: a mistake by hand may be generated as well.
        different = {m.source: m for m in hand + generated(file, source, rate)}
        mutants += different.values()
        stale += gone
    if not files:
        stale += [(name, old) for name, old, *_ in mistakes if name not in product]
    return mutants, stale


def arguments():
    parser = argparse.ArgumentParser(description="Plant mistakes, run the tests, print what survived.")
    option = parser.add_argument
    cores = len(os.sched_getaffinity(0))
    quick = "what other tests killed counts as killed: quick while tests are written"
    option("--files", default="", help="model.py,train.py: only these")
    option("--minutes", type=float, default=0, help="begin no mutant after so many minutes; 0: all are asked")
    option("--jobs", type=int, default=cores, help="mutants at a time")
    option("--rate", type=float, default=1.0, help="times as many generated mutants")
    option("--trust", action="store_true", help=quick)
    option("--plan", action="store_true", help="print what would be planted, and stop")
    option("--table", default="", help="write the table to this file as well")
    return parser.parse_args()


def print_plan(mutants):
    for m in mutants:
        print(f"{m.file}:{m.lines[0]}  {m.old}  ->  {m.new}")
    in_core = sum(stem(m.file) in CORE for m in mutants)
    print(f"{len(mutants)} mutants, {in_core} of them in the core")


def main():
    args = arguments()
    files = args.files.split(",") if args.files else []
    mutants, stale = collect(ROOT, files, args.rate, read(f"{HERE}/mutants_by_hand.txt"))
    for file, old in stale:
        print(f"stale, to be found exactly once in {file}: {old!r}")
    if args.plan:
        print_plan(mutants)
        return
    store = f"{ROOT}/out/mutants"
    os.makedirs(store, exist_ok=True)
    warm_up()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        shop = Workshop(folder, ROOT, args.jobs)
        answers = ask(mutants, shop, ROOT, store, args.minutes, args.trust)
    text = table(answers, read(f"{HERE}/mutants_harmless.txt"), len(mutants))
    print(text)
    if args.table:
        os.makedirs(os.path.dirname(os.path.abspath(args.table)), exist_ok=True)
        with open(args.table, "w", encoding="utf-8") as f:
            f.write(text)


def warm_up():
    """
    Import what the tests import, once, and nothing of the project.

    One thread a child, or they would fight for the cores. The compiler's cache of gradients goes by the graph and does
    not see that a registered gradient has changed, so it is off.
    """
    os.environ.update(OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")
    os.environ.update(TORCHINDUCTOR_AUTOGRAD_CACHE="0", TQDM_DISABLE="1")
    os.nice(5)
    used = """
        coverage matplotlib.pyplot numpy pyarrow.parquet pytest safetensors.torch tiktoken transformers torch._dynamo
        torch._inductor.compile_fx torch.distributed.fsdp transformers.models.apertus.modeling_apertus
    """
    for name in used.split():
        importlib.import_module(name)


if __name__ == "__main__":
    main()
