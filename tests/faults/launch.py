"""
Start train.py, or another script, on n ranks in half a second instead of five: one warm process has imported torch and forks every trial, as torchrun would.

$ python tests/faults/launch.py          # not by hand: the class below starts it, and talks to it in lines of JSON

A trial may be asked to misbehave in ways that a user's run cannot: `fault` names a function of this file, called in each child before
train.py runs. Nothing in the product knows of it.
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
        self.server = subprocess.Popen([sys.executable, os.path.abspath(__file__)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                       cwd=ROOT, env=env)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.server.stdin.close()
        self.server.wait(30)

    def ask(self, **question):
        self.server.stdin.write(json.dumps(question) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def start(self, ranks, *args, script="train.py", fault="", logs, uid=0):
        """
        Fork `ranks` processes of the script (0: one, without a launcher's environment); each writes what it says to logs.RANK.
        Returns a Trial.
        """
        for rank in range(max(1, ranks)):
            if os.path.exists(f"{logs}.{rank}"):
                os.remove(f"{logs}.{rank}")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        answer = self.ask(start=ranks, script=str(script), args=[str(a) for a in args], fault=fault, logs=str(logs), port=port, uid=uid)
        return Trial(self, answer["pids"], str(logs))

    def __call__(self, ranks, *args, limit=300, **how):
        """Run to the end: (exit code of each rank, all that they said)."""
        trial = self.start(ranks, *args, **how)
        return trial.wait(limit), trial.text()


class Trial:
    def __init__(self, launcher, pids, logs):
        self.launcher, self.pids, self.logs = launcher, pids, logs

    def text(self):
        logs = [f"{self.logs}.{r}" for r in range(len(self.pids))]
        return "".join(open(log, encoding="utf-8").read() for log in logs if os.path.exists(log))

    def codes(self):
        """Exit code of each rank, None while it runs."""
        return self.launcher.ask(poll=self.pids)["codes"]

    def kill(self, victims, number=signal.SIGKILL):
        for pid, code in zip(self.pids, self.codes()):
            if pid in victims and code is None:
                os.kill(pid, number)

    def until(self, words, limit=60):
        """Wait until a rank has said `words`."""
        end = time.monotonic() + limit
        while words not in self.text():
            if time.monotonic() > end or None not in self.codes():
                raise AssertionError(f"{words!r} was not said: {self.codes()} {self.text()[-2000:]}")
            time.sleep(0.02)

    def wait(self, limit=300, grace=10.0):
        """As torchrun does: the first rank that fails takes the others down, after `grace` seconds here, so that they can say what they saw."""
        end = time.monotonic() + limit
        while None in (codes := self.codes()):
            if any(codes) and grace is not None:
                end, grace = min(end, time.monotonic() + grace), None
            if time.monotonic() > end:
                self.kill(self.pids)
            time.sleep(0.02)
        return codes


def sha_of(run):
    """sha256 of all weights of a run folder's newest checkpoint, by name: (hash, step). Two equal hashes are two equal models."""
    from engine import checkpoint
    import torch
    import convert
    model, _ = convert.load_run(str(run))
    digest = hashlib.sha256()
    for name, p in sorted(model.named_parameters()):
        digest.update(name.encode() + p.detach().to(torch.float32).numpy().tobytes())
    return digest.hexdigest()[:16], checkpoint.newest_intact(os.path.join(run, "ckpt"))[1]["step"]


def losses(run):
    """{step: loss} of a run folder's log; a torn last line is passed over."""
    found = {}
    path = os.path.join(run, "log.jsonl")
    for line in open(path, encoding="utf-8") if os.path.exists(path) else []:
        entry = json.loads(line) if line.endswith("\n") else {}
        if "loss" in entry:
            found[entry["step"]] = entry["loss"]
    return found


# -----------------------------------------------------------------------------
# faults, in the children


def no_number(rank, step, value):
    """The loss of `rank` is `value` from `step` on, for one step."""
    import model
    from engine import parallel
    true_norm, calls = parallel.square_norm, [0]

    def forward(self, idx, targets=None, *args, true=model.Apertus.forward, **kwargs):
        logits, loss = true(self, idx, targets, *args, **kwargs)
        return logits, loss * float(value) if kwargs.get("n_tokens") and calls[0] == int(step) and os.environ.get("RANK", "0") == rank else loss

    def square_norm(*args):
        calls[0] += 1
        return true_norm(*args)
    model.Apertus.forward, parallel.square_norm = forward, square_norm


def small_disk(limit):
    """No file may grow beyond so many bytes, from the first step on: the kernel refuses the write, as on a full disk."""
    import resource
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    from engine import checkpoint
    true = checkpoint.write

    def write(*args):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
        try:
            return true(*args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    checkpoint.write = write


def slow(seconds):
    """Every step takes longer."""
    from engine import parallel
    true = parallel.square_norm
    parallel.square_norm = lambda *args: (time.sleep(float(seconds)), true(*args))[1]


def picture(path):
    """Nothing wrong: when the picture is drawn, say whether the summary is there and whether other ranks still wait for this one."""
    from engine import plot

    def curves(folders, *args):
        import torch.distributed as dist
        with open(path, "w", encoding="utf-8") as f:
            json.dump(dict(summary=os.path.exists(os.path.join(folders[0], "summary.json")), waiting=dist.is_initialized()), f)
    plot.curves = curves


def windows():
    """
    What Windows has not is not here: modules, signals and functions of POSIX. Its msvcrt is, in so far as a lock needs it. The project's
    files are imported anew, since they may look for these as they are imported.
    """
    import errno
    import fcntl as posix
    import types

    import torch.distributed.checkpoint  # noqa: F401  torch knows Windows by sys.platform, and is imported as it is here

    def locking(fd, mode, nbytes):
        try:
            posix.lockf(fd, posix.LOCK_EX | posix.LOCK_NB, nbytes, os.lseek(fd, 0, os.SEEK_CUR))
        except OSError:
            raise PermissionError(errno.EACCES, "Permission denied") from None
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(ROOT + os.sep) and ".venv" not in module.__file__ and name != "__main__":
            del sys.modules[name]
    sys.modules.update(fcntl=None, resource=None, pwd=None, grp=None, termios=None, msvcrt=types.SimpleNamespace(LK_NBLCK=2, locking=locking))
    for name in ("SIGUSR1", "SIGUSR2", "SIGKILL", "SIGSTOP", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGCHLD", "SIGPIPE", "alarm", "setitimer"):
        delattr(signal, name)
    for name in ("fork", "uname", "wait4", "killpg", "getuid", "geteuid", "getpgid", "setsid", "mkfifo", "sched_getaffinity"):
        delattr(os, name)


def clock(path):
    """Nothing wrong: a line a step to a file, of the wall clock, the CPU seconds of all threads, and the seconds spent in Saver.save."""
    from engine import checkpoint
    from engine import parallel
    file, blocked = open(path, "w", buffering=1), [0.0]
    true_norm, true_save = parallel.square_norm, checkpoint.Saver.save

    def square_norm(*args):
        file.write(f"{time.perf_counter()} {time.process_time()} {blocked[0]}\n")
        return true_norm(*args)

    def save(*args):
        began = time.perf_counter()
        true_save(*args)
        blocked[0] += time.perf_counter() - began
    parallel.square_norm, checkpoint.Saver.save = square_norm, save


def child(question, rank, log):
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    if question["start"]:
        n, r = str(question["start"]), str(rank)
        os.environ.update(RANK=r, WORLD_SIZE=n, LOCAL_RANK=r, LOCAL_WORLD_SIZE=n, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(question["port"]))
    if question["uid"]:
        os.setgid(question["uid"])
        os.setuid(question["uid"])
    name, _, args = question["fault"].partition(":")
    if name:
        globals()[name](*(args.split(",") if args else ()))
    folder, script = os.path.split(question["script"]) if os.path.isabs(question["script"]) else (ROOT, question["script"])
    script = script.removesuffix(".py").replace("/", ".")
    sys.argv, code = [os.path.join(folder, script.replace(".", "/") + ".py"), *question["args"]], 1
    sys.path.insert(0, folder)
    try:
        runpy.run_module(script, run_name="__main__", alter_sys=True)       # run_path would compile the source anew
        code = 0
    except SystemExit as e:
        code = e.code or 0
    except BaseException:
        import traceback
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve():
    sys.path[:0] = [ROOT, os.path.dirname(HERE)]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch, torch._dynamo, train      # noqa: E401, F401  all that a trial would import
    from corpus import audit
    from engine import checkpoint, hardware, parallel, plot      # noqa: F401
    plot.curves = audit.picture = lambda *args: None                            # nobody looks at these
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()                 # a child that looks for garbage would look through, and so copy, all that was imported: 15 % of a short run
    if hasattr(os, "SCHED_BATCH"):
        # gloo's thread, woken while the sender still holds the lock, asks for it until the kernel lets the sender finish: a quarter of
        # the time where ranks outnumber cores (four on two: 7.6 s instead of 5.5). Batch processes do not interrupt those that wake them
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    codes, warm = {}, False
    for line in sys.stdin:
        question = json.loads(line)
        if "start" in question:
            if "--compile" in question["args"] and not warm and hardware.can_compile(torch.device("cpu")):
                warm = True
                torch._inductor.config.compile_threads = 1                       # no pool: its threads cannot be forked
                torch.compile(lambda x: (x @ x).relu().sum())(torch.ones(4, 4, requires_grad=True)).backward()   # 2 s in each rank otherwise
                gc.freeze()
            pids = []
            for rank in range(max(1, question["start"])):
                pid = os.fork()
                if pid == 0:
                    child(question, rank, f"{question['logs']}.{rank}")
                pids.append(pid)
            print(json.dumps(dict(pids=pids)), file=answers, flush=True)
        else:
            for pid in question["poll"]:
                if pid not in codes:
                    found, status = os.waitpid(pid, os.WNOHANG)
                    if found:
                        codes[pid] = os.waitstatus_to_exitcode(status)
            print(json.dumps(dict(codes=[codes.get(pid) for pid in question["poll"]])), file=answers, flush=True)


if __name__ == "__main__":
    serve()
