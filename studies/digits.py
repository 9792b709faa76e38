"""
Alignment on a laptop, start to end: a small pretrained model -> SFT -> references -> QRPO, DPO, REBEL, SimPO, five seeds each.

The task has a reward that needs no judge: "Sum 27, first 4" wants digits that add up to 27, the first of them 4; any number of digits.

    reward = - |sum of the digits - 27|          - 30 if it is not digits, or begins otherwise;     exact match: reward 0

SFT learns from a sloppy teacher, who picks digits of about the right size and seldom hits the sum. Its samples, scored, are all that the
losses get: the same pairs in the same order, no new samples. Each loss has the learning rate and the beta, of six pairs, that gave the
best reward on validation prompts, with references of a seed of its own: --tune, results/align/tuning.json.

What is measured, on test prompts that nothing was trained on or chosen by: reward, exact match, mean quantile among the reference's
completions, KL to the reference in nats (log pi - log ref over the policy's own samples), length; and for completions of the reference,
log pi/ref against the target that QRPO's formula sets for them: correlation ("agreement") and root mean square difference ("distance",
nats). QRPO predicts where log-ratios land; the others only which of two is larger. What came out: results/align/notes.md.

$ make align                                    # or python -m studies.digits: minutes on two cores; goes on where it was stopped
$ python -m studies.digits --tune                        # choose learning rates and betas anew
$ python sample.py --chat --init_from=out/align/qrpo-s0 --system="Answer with digits."
"""

import sys

if __name__ == "__main__" and not __package__:
    print("digits.py: start it from the project's root, python -m studies.digits", file=sys.stderr)
    sys.exit(2)

import json
import os
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

out = "out/align"               # runs, data
results = "results/align"       # table.md, results.json, align.png
tuning = "results/align/tuning.json"    # learning rates and betas; made by a run that finds none
start = ""                      # a pretrained model: run folder, Hugging Face folder or hub name; "" = train configs/align.py first
tune = False                    # make `tuning` anew, and stop: every beta of GRIDS with every lr, once, measured on the validation prompts
methods = ""                    # some of GRIDS, with commas; "" = all
seeds = 5                       # of references, pairs and their order; pretraining and SFT are done once
workers = 2                     # runs at a time, one thread each
n_conversations = 6000          # of the sloppy teacher
n_refs = 16                     # samples of the SFT model per prompt
test_prompts = 60               # of 360; as many more are for validation, and the others are trained on
samples = 8                     # per test prompt, to measure with
epochs = 3                      # over the pairs: one moves the log-ratios a third of the way, results/align/notes.md

SYSTEM = "Answer with digits."

# loss -> the betas that --tune tries, as many for each, steps of about 3. Rewards differ by 5 between completions (standard deviation),
# which REBEL divides by its beta; SimPO counts per token, as published, and completions have 7.
GRIDS = {"qrpo": (0.1, 0.3, 1.0), "dpo": (0.3, 1.0, 3.0), "rebel": (3.0, 10.0, 30.0), "simpo": (0.7, 2.0, 7.0)}
LRS = (3e-4, 1e-3)


def reward(prompt, completion):
    """The graded reward; posttrain/qrpo.py calls it by --rewards=studies/digits.py."""
    total, first = map(int, re.findall(r"\d+", prompt))
    if not re.fullmatch(r"[0-9]+", completion) or completion[0] != str(first):
        return -30.0
    return -float(abs(sum(map(int, completion)) - total))


def tasks():
    """All (sum, first digit), shuffled, in three: trained on, validation (the betas are chosen by it), test."""
    every = [(total, first) for total in range(10, 50) for first in range(1, 10)]
    every = [every[i] for i in np.random.default_rng(0).permutation(len(every))]
    return every[:-2 * test_prompts], every[-2 * test_prompts:-test_prompts], every[-test_prompts:]


def question(total, first):
    return [dict(role="system", content=SYSTEM), dict(role="user", content=f"Sum {total}, first {first}")]


def teacher(rng, total, first):
    """4 to 8 digits of about the right size: (total - first) / (n - 1) each, give or take 2."""
    n = max(int(rng.integers(4, 9)), 1 + -(-(total - first) // 9))
    rest = rng.normal((total - first) / (n - 1), 2.0, n - 1).round().clip(0, 9).astype(int)
    return "".join(map(str, [first, *rest]))


def write_data():
    os.makedirs(out, exist_ok=True)
    rng, (train, _, _) = np.random.default_rng(1), tasks()
    conversations = []
    for _ in range(n_conversations):
        total, first = train[rng.integers(len(train))]
        conversations.append(dict(messages=[*question(total, first), dict(role="assistant", content=teacher(rng, total, first))]))
    for name, rows in (("conversations", conversations), ("prompts", [dict(messages=question(*t)) for t in train])):
        with open(os.path.join(out, f"{name}.jsonl"), "w", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)


# -----------------------------------------------------------------------------
# the runs


def call(name, done, script, *args, threads=1):
    """
    Run one of the scripts, unless the file `done` says that it has been; what it says goes to NAME.txt, its arguments and seconds to
    NAME.json, which is returned ({} where it was not run from here). ValueError: with its last line; or it was run with other arguments.
    """
    log, record = (os.path.join(out, f"{name}.{kind}") for kind in ("txt", "json"))
    if not os.path.exists(done):
        began = time.perf_counter()
        with open(log, "w", encoding="utf-8") as f:
            process = subprocess.Popen([sys.executable, "-m", script, *args], stdout=f, stderr=subprocess.STDOUT,
                                       env=dict(os.environ, OMP_NUM_THREADS=str(threads)))
            seconds = cpu_seconds(process)
        if process.returncode:
            with open(log, encoding="utf-8", errors="replace") as f:
                raise ValueError(f"{script} {' '.join(args)} failed: {f.read().strip().splitlines()[-1]} ({log})")
        with open(record, "w", encoding="utf-8") as f:
            json.dump(dict(args=args, wall=round(time.perf_counter() - began), **seconds), f)
    if not os.path.exists(record):
        return {}
    with open(record, encoding="utf-8") as f:
        found = json.load(f)
    if found["args"] != list(args):
        raise ValueError(f"{os.path.dirname(done)} was made with other settings ({record}): delete it, or name another --out")
    return found


def cpu_seconds(process):
    """Wait for a process -> {"cpu": its seconds on the processor}; {} on Windows, which does not tell."""
    if not hasattr(os, "wait4"):
        process.wait()
        return {}
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return dict(cpu=round(used.ru_utime + used.ru_stime))


def pretrain_and_sft():
    """-> the folder of the SFT model, {name: its call}."""
    sft, pretrained, calls = os.path.join(out, "sft"), start or os.path.join(out, "pretrained"), {}
    if not start:
        calls["prepare"] = call("prepare", "data/align/meta.json", "prepare.py", "--out=data/align", "--tokenizer=apertus:1024")
        calls["pretrained"] = call("pretrained", os.path.join(pretrained, "summary.json"), "train", "configs/align.py",
                                   f"--out={pretrained}", "--resume", threads=workers)
    calls["sft"] = call("sft", os.path.join(sft, "hf", "config.json"), "posttrain.sft", f"--init_from={pretrained}",
                        f"--data={out}/conversations.jsonl", f"--out={sft}", "--resume", "--epochs=2", "--batch_size=64",
                        "--micro_batch=64", "--lr=1e-3", "--optimizer=adamw", "--max_length=128", threads=workers)
    return sft, calls


def align(runs, sft):
    """posttrain/qrpo.py for runs {name: (loss, lr, beta, seed)} -> {name: its call}; the first one of a seed makes the references for its others."""
    began, calls, first = time.perf_counter(), {}, {}

    def one(name, loss, lr, beta, seed, before):
        if before:
            before.result()
        return call(name, os.path.join(out, name, "hf", "config.json"), "posttrain.qrpo", f"--init_from={sft}", f"--data={out}/prompts.jsonl",
                    "--rewards=studies/digits.py", f"--out={out}/{name}", f"--references={out}/references-s{seed}", f"--seed={seed}",
                    f"--n_refs={n_refs}", "--max_new_tokens=24", "--sample_batch=512", "--pairs_per_prompt=0", f"--epochs={epochs}",
                    "--batch_size=16", "--micro_batch=16", f"--lr={lr}", "--optimizer=adamw", "--warmup=0.1", "--grad_clip=1.0",
                    "--max_length=128", "--resume", f"--loss={loss}", f"--beta={beta}", f"--length_norm={loss == 'simpo'}",
                    "--beta_max=0", "--gamma=0.1")                          # simpo's margin

    with ThreadPoolExecutor(workers) as pool:
        for name, (*how, seed) in runs.items():
            calls[name] = pool.submit(one, name, *how, seed, first.get(seed))
            first.setdefault(seed, calls[name])
        for name in calls:
            calls[name] = calls[name].result()
            print(f"{name} after {time.perf_counter() - began:.0f} s", flush=True)
    return calls


# -----------------------------------------------------------------------------
# measuring


def measure(runs, sft, tests, beta):
    """
    {name: numbers} for the SFT model and runs {name: (loss, lr, beta, seed)}, on the prompts of `tests`, all against the same completions
    of the SFT model. beta: of the formula that log-ratios are held against; a qrpo run is held against that of its own.
    """
    import torch
    import convert
    from generate import generate
    from posttrain.references import words
    from posttrain.losses import beta_log_z, correlation, effective_beta, quantile
    from posttrain.references import sequence_logp
    reference, tok = convert.load_any(sft)
    end = tok.special["<|assistant_end|>"]
    prompts = [tok.chat(question(*t), add_generation_prompt=True)[1] for t in tests]

    def speak(model, seed, n):
        """n completions a prompt: (prompt ids, completion ids) of each, and their rewards (prompts, n)."""
        asked = [p for p in prompts for _ in range(n)]
        ids = generate(model, asked, 24, stop=(end,), generator=torch.Generator().manual_seed(seed))
        said = [(p, full[len(p):]) for full, p in zip(ids, asked)]
        scores = [reward(question(*tests[k // n])[-1]["content"], words(tok, y)) for k, (_, y) in enumerate(said)]
        return said, torch.tensor(scores, dtype=torch.float64).view(-1, n)

    @torch.no_grad()
    def logp(model, said):
        return torch.cat([sequence_logp(model, said[k:k + 64]) for k in range(0, len(said), 64)]).double()

    ref_said, ref_r = speak(reference, 1000, n_refs)
    of_ref = logp(reference, ref_said)
    q = quantile(ref_r.T, ref_r, loo=True).T.flatten()                      # each against its prompt's other references

    def one(name):
        model = reference if name == "sft" else convert.load_any(os.path.join(out, name))[0]
        loss, _, its_beta, _ = runs.get(name, ("sft", 0, beta, 0))
        b = effective_beta(q, 1.0, its_beta if loss == "qrpo" else beta, 0.0)
        target = (q - beta_log_z(b)) / b
        said, r = speak(model, 2000, samples)
        ratio = logp(model, ref_said) - of_ref if model is not reference else torch.zeros_like(of_ref)
        return dict(reward=r.mean().item(), exact=(r == 0).double().mean().item(), malformed=(r == -30).double().mean().item(),
                    quantile=quantile(r.T, ref_r).mean().item(), kl=(logp(model, said) - logp(reference, said)).mean().item() if model is not reference else 0.0,
                    length=float(np.mean([len(y) for _, y in said])),
                    agreement=correlation(target, ratio), error=(ratio - target).square().mean().sqrt().item(),
                    points=[[round(a, 4), round(b, 3)] for a, b in zip(q.tolist(), ratio.tolist())])

    names, threads = ["sft", *runs], torch.get_num_threads()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(workers) as pool:
        rows = dict(zip(names, list(tqdm(pool.map(one, names), "measuring", len(names), unit="model"))))
    torch.set_num_threads(threads)
    return rows


COLUMNS = dict(reward="{:.2f}", exact="{:.1%}", quantile="{:.3f}", kl="{:.2f}", length="{:.2f}", agreement="{:.2f}", error="{:.2f}")


def runs_of(method, rows):
    return [r for name, r in rows.items() if name.rpartition("-s")[0] == method]


def table(rows, beta):
    """Markdown: mean and, over seeds, standard deviation. beta: of the row "qrpo", for the closed form below."""
    from posttrain.losses import optimum
    best = optimum(beta)
    lines = ["| | reward | exact match | mean quantile | KL (nats) | length | agreement | distance (nats) |", "|---" * 8 + "|"]
    for method in ["sft", *GRIDS]:
        runs = [rows["sft"]] if method == "sft" else runs_of(method, rows)
        cells = []
        for key, how in COLUMNS.items() if runs else ():
            v = [r[key] for r in runs]
            cells.append(how.format(np.mean(v)) + (f" ± {how.format(np.std(v, ddof=1))}" if len(v) > 1 else ""))
        if runs:
            cells = ["" if method == "sft" and key == "agreement" else c for key, c in zip(COLUMNS, cells)]
            lines.append(f"| {method} | {' | '.join(cells)} |")
    lines.append(f"| closed form, beta {beta:g} | | | {best['quantile']:.3f} | {best['kl']:.2f} | | 1 | 0 |")
    return "\n".join(lines) + "\n"


def draw(rows, beta, picture):
    """Left, middle: log-ratios of the reference's completions on test prompts over their quantile; the formula. Right: reward over KL."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from posttrain.losses import beta_log_z

    figure, axes = plt.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
    t = np.linspace(0, 1, 50)
    for axis, method in zip(axes, ("qrpo", "dpo")):
        runs = [np.array(r["points"]) for r in runs_of(method, rows)]
        if not runs:
            continue
        axis.scatter(runs[0][:, 0], runs[0][:, 1], s=5, alpha=0.25, color="C0", label="held-out completions, seed 0")
        for points in runs:
            x = np.unique(points[:, 0])
            axis.plot(x, [points[points[:, 0] == v, 1].mean() for v in x], ".-", color="C0", lw=1,
                      label="mean, one line a seed" if points is runs[0] else None)
        axis.plot(t, (t - beta_log_z(beta)) / beta, color="C3", label=f"(R_q - beta log Z) / beta, beta = {beta:g}")
        axis.set(title=f"{method.upper()}: log pi/ref of the reference's completions", xlabel="quantile of their reward",
                 ylabel="log-ratio (nats)", ylim=(-9, 5))
        axis.legend(fontsize=8, frameon=False)
    for n, method in enumerate(GRIDS):
        runs = runs_of(method, rows)
        axes[2].scatter([r["kl"] for r in runs], [r["reward"] for r in runs], color=f"C{n}", label=method if runs else None)
    axes[2].scatter([0], [rows["sft"]["reward"]], color="black", marker="x", label="sft")
    axes[2].set(title="reward on test prompts, one point a seed", xlabel="KL to the reference (nats)", ylabel="reward")
    axes[2].legend(fontsize=8, frameon=False)
    for axis in axes:
        axis.grid(alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


# -----------------------------------------------------------------------------


def choose(rows, runs):
    """{loss: lr and beta of its run with the best reward}"""
    chosen = {}
    for name, (loss, lr, beta, _) in sorted(runs.items(), key=lambda item: rows[item[0]]["reward"]):
        chosen[loss] = dict(lr=lr, beta=beta)                               # the best comes last
    return chosen


def write(path, content):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.write(content if isinstance(content, str) else json.dumps(content, indent=1))


def tuned(names, sft):
    """Every beta of the grids with every learning rate, on the validation prompts; writes `tuning`. -> {name: its call}"""
    runs = {f"tune-{m}-{lr:g}-{beta:g}": (m, lr, beta, 1000) for m in names for beta in GRIDS[m] for lr in LRS}
    calls = align(runs, sft)
    rows = measure(runs, sft, tasks()[1], beta=1.0)
    keys = ("reward", "exact", "malformed", "kl")
    write(tuning, dict(chosen=choose(rows, runs), rows={name: {k: row[k] for k in keys} for name, row in rows.items()}))
    print("\n".join(f"{name:24} reward {row['reward']:7.2f}  KL {row['kl']:6.2f}" for name, row in rows.items()) + f"\n{tuning}")
    return calls


def main():
    began, names = time.perf_counter(), methods.split(",") if methods else list(GRIDS)
    if set(names) - set(GRIDS) or not 1 <= test_prompts < 180:
        raise ValueError(f"methods={methods!r}, test_prompts={test_prompts}: there is {', '.join(GRIDS)}; and 1 to 179 of 360 prompts")
    write_data()
    sft, calls = pretrain_and_sft()
    print(f"pretrained and SFT after {time.perf_counter() - began:.0f} s", flush=True)
    if tune or not os.path.exists(tuning):
        calls |= tuned(names, sft)
    if tune:
        return
    with open(tuning, encoding="utf-8") as f:
        chosen = json.load(f)["chosen"]
    lacks = {"qrpo", *names} - chosen.keys()
    if lacks:
        raise ValueError(f"{tuning} has no beta for {', '.join(sorted(lacks))}: python -m studies.digits --tune makes it anew")
    runs = {f"{m}-s{s}": (m, chosen[m]["lr"], chosen[m]["beta"], s) for m in names for s in range(seeds)}
    calls |= align(runs, sft)
    beta = chosen["qrpo"]["beta"]
    rows = measure(runs, sft, tasks()[2], beta)
    text = table(rows, beta)
    write(os.path.join(results, "table.md"), text)
    numbers = {name: {k: v for k, v in row.items() if k != "points"} for name, row in rows.items()}
    seconds = {name: {k: c[k] for k in ("wall", "cpu") if k in c} for name, c in calls.items()}
    write(os.path.join(results, "results.json"), dict(rows=numbers, chosen=chosen, seconds=seconds))
    draw(rows, beta, os.path.join(results, "align.png"))
    print(text + f"{time.perf_counter() - began:.0f} s; the picture: {results}/align.png")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
