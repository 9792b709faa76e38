"""
Start train.py, or another script, on n ranks in half a second instead of five.

One warm process has imported torch and forks every trial, as torchrun would start it. It is started by the class
Launcher, not by hand, and they talk in lines of JSON.

A trial may be asked to misbehave in ways that a user's run cannot: `fault` names a function of this file, which is
called in each child before train.py runs. Nothing in the product knows of it.
"""
import gc
import hashlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


class Launcher:
    """with Launcher() as launch: codes, text = launch(2, "configs/tiny.py", "--parallel=fsdp")"""

    def __init__(self):
        env = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", TQDM_DISABLE="1")
        for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            env.pop(key, None)
        command = [sys.executable, os.path.abspath(__file__)]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.server = subprocess.Popen(command, cwd=ROOT, env=env, **pipes)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.server.stdin.close()
        self.server.wait(30)

    def ask(self, **question):
        """The server's answer: a line of JSON for a line of JSON."""
        self.server.stdin.write(json.dumps(question) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def start(self, ranks, *args, script="train.py", fault="", logs, uid=0):
        """
        Fork `ranks` processes of the script (0: one, without a launcher's environment): a Trial.

        Each writes what it says to logs.RANK.
        """
        for rank in range(max(1, ranks)):
            log = f"{logs}.{rank}"
            if os.path.exists(log):
                os.remove(log)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            _, port = s.getsockname()
        what = dict(script=str(script), args=[str(a) for a in args])
        answer = self.ask(start=ranks, **what, fault=fault, logs=str(logs), port=port, uid=uid)
        return Trial(self, answer["pids"], str(logs))

    def __call__(self, ranks, *args, limit=300, **how):
        """Run to the end: (exit code of each rank, all that they said)."""
        trial = self.start(ranks, *args, **how)
        return trial.wait(limit), trial.text()


class Trial:
    """The processes of one launch."""

    def __init__(self, launcher, pids, logs):
        self.launcher = launcher
        self.pids = pids
        self.logs = logs

    def text(self):
        """All that the ranks have said so far."""
        said = []
        for rank in range(len(self.pids)):
            log = f"{self.logs}.{rank}"
            if os.path.exists(log):
                with open(log, encoding="utf-8") as f:
                    said.append(f.read())
        return "".join(said)

    def codes(self):
        """Exit code of each rank, None while it runs."""
        return self.launcher.ask(poll=self.pids)["codes"]

    def kill(self, victims, number=signal.SIGKILL):
        """Send a signal to those of the victims that still run."""
        for pid, code in zip(self.pids, self.codes()):
            if pid in victims and code is None:
                os.kill(pid, number)

    def until(self, words, limit=60):
        """Wait until a rank has said `words`."""
        end = time.monotonic() + limit
        while words not in self.text():
            ended = None not in self.codes()
            if ended or time.monotonic() > end:
                raise AssertionError(f"{words!r} was not said: {self.codes()} {self.text()[-2000:]}")
            time.sleep(0.02)

    def wait(self, limit=300, grace=10.0):
        """
        The exit codes. As under torchrun, the first rank that fails takes the others down.

        Here they have `grace` seconds before that, so that they can say what they saw.
        """
        end = time.monotonic() + limit
        while None in (codes := self.codes()):
            if any(codes) and grace is not None:
                end = min(end, time.monotonic() + grace)
                grace = None
            if time.monotonic() > end:
                self.kill(self.pids)
            time.sleep(0.02)
        return codes


def sha_of(run):
    """(sha256 of all weights by name, step) of a run folder's newest checkpoint. Equal hashes are equal models."""
    from engine import checkpoint
    import torch
    import convert
    model, _ = convert.load_run(str(run))
    digest = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        numbers = p.detach().to(torch.float32).numpy()
        digest.update(name.encode() + numbers.tobytes())
    _, manifest = checkpoint.newest_intact(os.path.join(run, "ckpt"))
    return digest.hexdigest()[:16], manifest["step"]


def losses(run):
    """{step: loss} of a run folder's log; a torn last line is passed over."""
    found = {}
    path = os.path.join(run, "log.jsonl")
    if not os.path.exists(path):
        return found
    with open(path, encoding="utf-8") as f:
        for line in f:
            entry = json.loads(line) if line.endswith("\n") else {}
            if "loss" in entry:
                found[entry["step"]] = entry["loss"]
    return found


# -----------------------------------------------------------------------------
# Faults, in the children


def no_number(rank, step, value):
    """The loss of `rank` is `value` from `step` on, for one step."""
    import model
    from engine import parallel

    true_norm = parallel.square_norm
    true_forward = model.Apertus.forward
    steps_done = 0
    here = os.environ.get("RANK", "0") == rank

    def forward(self, idx, targets=None, *args, **kwargs):
        logits, loss = true_forward(self, idx, targets, *args, **kwargs)
        # Only the forward passes of training are told the number of tokens.
        training = kwargs.get("n_tokens")
        if training and here and steps_done == int(step):
            loss = loss * float(value)
        return logits, loss

    def square_norm(*args):
        nonlocal steps_done
        steps_done += 1
        return true_norm(*args)

    model.Apertus.forward = forward
    parallel.square_norm = square_norm


def small_disk(limit):
    """In a save no file may grow beyond so many bytes: the kernel refuses the write, as on a full disk."""
    import resource
    from engine import checkpoint

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    true_write = checkpoint.write

    def set_limit(n_bytes):
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, resource.RLIM_INFINITY))

    def write(*args):
        set_limit(int(limit))
        try:
            return true_write(*args)
        finally:
            set_limit(resource.RLIM_INFINITY)

    checkpoint.write = write


def slow(seconds):
    """Every step takes longer."""
    from engine import parallel

    true_norm = parallel.square_norm

    def square_norm(*args):
        time.sleep(float(seconds))
        return true_norm(*args)

    parallel.square_norm = square_norm


def picture(path):
    """
    Nothing wrong: a note of what is true when the picture is drawn.

    It says whether the summary is there, and whether other ranks still wait for this one.
    """
    from engine import plot

    def curves(folders, *args):
        import torch.distributed as dist

        summary = os.path.join(folders[0], "summary.json")
        seen = dict(summary=os.path.exists(summary), waiting=dist.is_initialized())
        with open(path, "w", encoding="utf-8") as f:
            json.dump(seen, f)

    plot.curves = curves


def windows():
    """
    What Windows lacks is missing here too: modules, signals and functions of POSIX.

    Its msvcrt is there, in so far as a lock needs it. The project's files are imported anew, since they may look for
    these as they are imported.
    """
    import errno
    import fcntl as posix
    import types

    # torch knows Windows by sys.platform, so it is imported before anything is taken away.
    import torch.distributed.checkpoint  # noqa: F401

    def locking(fd, mode, nbytes):
        try:
            posix.lockf(fd, posix.LOCK_EX | posix.LOCK_NB, nbytes, os.lseek(fd, 0, os.SEEK_CUR))
        except OSError:
            raise PermissionError(errno.EACCES, "Permission denied") from None

    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        ours = file.startswith(ROOT + os.sep) and "site-packages" not in file
        if ours and name != "__main__":
            del sys.modules[name]
    missing = "fcntl resource pwd grp termios"
    sys.modules.update(dict.fromkeys(missing.split()))
    sys.modules["msvcrt"] = types.SimpleNamespace(LK_NBLCK=2, locking=locking)
    signals = "SIGUSR1 SIGUSR2 SIGKILL SIGSTOP SIGHUP SIGQUIT SIGALRM SIGCHLD SIGPIPE alarm setitimer"
    for name in signals.split():
        delattr(signal, name)
    functions = "fork uname wait4 killpg getuid geteuid getpgid setsid mkfifo sched_getaffinity"
    for name in functions.split():
        delattr(os, name)


def clock(path):
    """
    Nothing wrong: a line per step to a file.

    It has the wall clock, the CPU seconds of all threads, and the seconds spent in Saver.save.
    """
    from engine import checkpoint, parallel

    file = open(path, "w", buffering=1)
    true_norm = parallel.square_norm
    true_save = checkpoint.Saver.save
    seconds_in_save = 0.0

    def square_norm(*args):
        file.write(f"{time.perf_counter()} {time.process_time()} {seconds_in_save}\n")
        return true_norm(*args)

    def save(*args):
        nonlocal seconds_in_save
        began = time.perf_counter()
        true_save(*args)
        seconds_in_save += time.perf_counter() - began

    parallel.square_norm = square_norm
    checkpoint.Saver.save = save


# -----------------------------------------------------------------------------
# The warm process


def child(question, rank, log):
    """What a rank does, in a process of its own: the environment, the fault, the script, and its exit code."""
    import torch

    # After a fork the first thread that asks makes torch's pool of threads anew. Two threads of autograd, as a build
    # for CUDA has, would ask at once, and one of them would find none.
    torch.set_num_threads(torch.get_num_threads())
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    if question["start"]:
        n_ranks, r = str(question["start"]), str(rank)
        os.environ.update(RANK=r, LOCAL_RANK=r, WORLD_SIZE=n_ranks, LOCAL_WORLD_SIZE=n_ranks)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(question["port"]))
    if question["uid"]:
        os.setgid(question["uid"])
        os.setuid(question["uid"])
    name, _, args = question["fault"].partition(":")
    if name:
        misbehave = globals()[name]
        misbehave(*(args.split(",") if args else ()))
    folder, script = ROOT, question["script"]
    if os.path.isabs(script):
        folder, script = os.path.split(script)
    module = script.removesuffix(".py").replace("/", ".")
    path = os.path.join(folder, module.replace(".", "/") + ".py")
    sys.argv = [path, *question["args"]]
    sys.path.insert(0, folder)
    code = 1
    try:
        # run_path would compile the source anew.
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as e:
        code = e.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fork_ranks(question):
    """The process ids of a trial's ranks."""
    pids = []
    for rank in range(max(1, question["start"])):
        pid = os.fork()
        if pid == 0:
            child(question, rank, f"{question['logs']}.{rank}")
        pids.append(pid)
    return pids


def poll(pids, codes):
    """Exit code of each process, None while it runs; `codes` remembers those that have ended."""
    for pid in pids:
        if pid in codes:
            continue
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            codes[pid] = os.waitstatus_to_exitcode(status)
    return [codes.get(pid) for pid in pids]


def compile_once():
    """Warm up the compiler, which would take every rank 2 s otherwise."""
    import torch

    # No pool, since its threads cannot be forked.
    torch._inductor.config.compile_threads = 1
    # A build for CUDA forbids to fork after a backward pass, even on the CPU: there the ranks compile theirs themselves.
    train = torch.version.cuda is None
    x = torch.ones(4, 4, requires_grad=train)
    y = torch.compile(lambda x: (x @ x).relu().sum())(x)
    if train:
        y.backward()
    gc.freeze()


def serve():
    sys.path[:0] = [ROOT, os.path.dirname(HERE)]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # All that a trial would import.
    import torch
    import torch._dynamo
    import train  # noqa: F401
    from corpus import audit
    from engine import checkpoint, hardware, parallel, plot  # noqa: F401

    # Nobody looks at these pictures.
    plot.curves = audit.picture = lambda *args: None
    torch.set_num_threads(1)
    # A child that looks for garbage would look through, and so copy, all that was imported: 15 % of a short run.
    gc.collect()
    gc.freeze()
    if hasattr(os, "SCHED_BATCH"):
        # gloo's thread, woken while the sender still holds the lock, asks for it until the kernel lets the sender
        # finish. Where ranks outnumber cores, this takes a quarter of the time. Batch processes do not interrupt those
        # that wake them.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    codes, warm = {}, False
    for line in sys.stdin:
        question = json.loads(line)
        if "poll" in question:
            answer = dict(codes=poll(question["poll"], codes))
        else:
            if "--compile" in question["args"] and not warm and hardware.can_compile(torch.device("cpu")):
                warm = True
                compile_once()
            answer = dict(pids=fork_ranks(question))
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
