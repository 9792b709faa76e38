"""
Alignment on a laptop, start to end: a small pretrained model -> SFT -> references -> QRPO, DPO, REBEL, SimPO, three seeds each.

The task has a reward that needs no judge: "Sum 27, first 4" wants digits that add up to 27, the first of them 4; any number of digits.

    reward = - |sum of the digits - 27|          - 30 if it is not digits, or begins otherwise;     exact match: reward 0

SFT learns from a sloppy teacher, who picks digits of about the right size and seldom hits the sum. Its samples, scored, are all that the four
losses get: the same pairs in the same order, the same learning rate, no new samples.

What is measured, on prompts that nothing was trained on: reward, exact match, mean quantile among the reference's completions, KL to the
reference in nats (log pi - log ref over the policy's own samples), length; and for completions of the reference, log pi/ref against the
target that QRPO's formula sets for them: correlation ("agreement") and root mean square difference ("distance", nats). QRPO predicts where
log-ratios land; the others only which of two is larger. What came out, and why it ranks nothing: results/align/notes.md.

$ make align                                    # or python align.py: minutes on two cores; goes on where it was stopped
$ python sample.py --chat --init_from=out/align/qrpo-s0 --system="Answer with digits."
"""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

out = "out/align"               # runs, data
results = "results/align"       # table.md, results.json, align.png
start = ""                      # a pretrained model: run folder, Hugging Face folder or hub name; "" = train configs/align.py first
seeds = 3                       # of references, pairs and their order; pretraining and SFT are done once
workers = 2                     # runs at a time, one thread each
n_conversations = 6000          # of the sloppy teacher
n_refs = 16                     # samples of the SFT model per prompt
test_prompts = 60               # held out, of 360
samples = 8                     # per test prompt, to measure with
epochs = 1                      # over the pairs

SYSTEM = "Answer with digits."

# Which values were tried: results/align/notes.md. With smaller betas (qrpo .1, dpo .3) the policies leave the text that the references cover.
METHODS = {
    "qrpo": ["--loss=qrpo", "--beta=0.3"],
    "dpo": ["--loss=dpo", "--beta=1.0"],
    "rebel": ["--loss=rebel", "--beta=10.0"],
    "simpo": ["--loss=simpo", "--beta=10.0", "--gamma=0.1", "--length_norm"],
}
BETA = 0.3                      # of the formula that log-ratios are held against: that of "qrpo"


def reward(prompt, completion):
    """The graded reward; qrpo.py calls it by --rewards=align.py."""
    total, first = map(int, re.findall(r"\d+", prompt))
    if not re.fullmatch(r"[0-9]+", completion) or completion[0] != str(first):
        return -30.0
    return -float(abs(sum(map(int, completion)) - total))


def tasks():
    """All (sum, first digit), shuffled: the last `test_prompts` are never trained on."""
    every = [(total, first) for total in range(10, 50) for first in range(1, 10)]
    return [every[i] for i in np.random.default_rng(0).permutation(len(every))]


def question(total, first):
    return [dict(role="system", content=SYSTEM), dict(role="user", content=f"Sum {total}, first {first}")]


def teacher(rng, total, first):
    """4 to 8 digits of about the right size: (total - first) / (n - 1) each, give or take 2."""
    n = max(int(rng.integers(4, 9)), 1 + -(-(total - first) // 9))
    rest = rng.normal((total - first) / (n - 1), 2.0, n - 1).round().clip(0, 9).astype(int)
    return "".join(map(str, [first, *rest]))


def write_data():
    os.makedirs(out, exist_ok=True)
    rng, train = np.random.default_rng(1), tasks()[:-test_prompts]
    conversations = []
    for _ in range(n_conversations):
        total, first = train[rng.integers(len(train))]
        conversations.append(dict(messages=[*question(total, first), dict(role="assistant", content=teacher(rng, total, first))]))
    for name, rows in (("conversations", conversations), ("prompts", [dict(messages=question(*t)) for t in train])):
        with open(os.path.join(out, f"{name}.jsonl"), "w", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in rows)


def call(name, done, script, *args, threads=1):
    """
    Run one of the scripts, unless the file `done` says that it has been; what it says goes to NAME.txt. Returns seconds of (wall, CPU), as they
    were when it ran. ValueError with its last line.
    """
    log, clock = os.path.join(out, f"{name}.txt"), os.path.join(out, f"{name}.seconds")
    if not os.path.exists(done):
        began, root = time.perf_counter(), os.path.dirname(os.path.abspath(__file__))
        with open(log, "w", encoding="utf-8") as f:
            process = subprocess.Popen([sys.executable, os.path.join(root, script), *args], stdout=f, stderr=subprocess.STDOUT,
                                       env=dict(os.environ, OMP_NUM_THREADS=str(threads)))
            _, status, used = os.wait4(process.pid, 0)
        if status:
            with open(log, encoding="utf-8", errors="replace") as f:
                raise ValueError(f"{script} {' '.join(args)} failed: {f.read().strip().splitlines()[-1]} ({log})")
        with open(clock, "w", encoding="utf-8") as f:
            json.dump([time.perf_counter() - began, used.ru_utime + used.ru_stime], f)
    if not os.path.exists(clock):
        return None
    with open(clock, encoding="utf-8") as f:
        return json.load(f)


def measure(folders, sft):
    """{name: numbers} for run folders, all against the same SFT model, on prompts that nothing was trained on."""
    import torch
    import convert
    from qrpo import beta_log_z, correlation, quantile, sequence_logp
    reference, tok = convert.load_any(sft)
    end = tok.special["<|assistant_end|>"]
    tests = tasks()[-test_prompts:]
    prompts = [tok.chat(question(*t), add_generation_prompt=True)[1] for t in tests]

    def speak(model, seed, n):
        """n completions a prompt: (prompt ids, completion ids) of each, and their rewards (prompts, n)."""
        asked = [p for p in prompts for _ in range(n)]
        ids = model.generate(asked, 24, stop=(end,), generator=torch.Generator().manual_seed(seed))
        said = [(p, full[len(p):]) for full, p in zip(ids, asked)]
        words = [tok.decode([i for i in y if i != end]) for _, y in said]
        scores = [reward(question(*tests[k // n])[-1]["content"], w) for k, w in enumerate(words)]
        return said, torch.tensor(scores, dtype=torch.float64).view(-1, n)

    @torch.no_grad()
    def logp(model, said):
        return torch.cat([sequence_logp(model, said[k:k + 64]) for k in range(0, len(said), 64)]).double()

    ref_said, ref_r = speak(reference, 1000, n_refs)
    of_ref = logp(reference, ref_said)
    q = quantile(ref_r.T, ref_r, loo=True).T.flatten()                                            # each against its prompt's other references
    target = (q - beta_log_z(BETA)) / BETA
    rows = {}
    for name, folder in tqdm(folders.items(), "measuring", unit="model"):
        model = reference if folder == sft else convert.load_any(folder)[0]
        said, r = speak(model, 2000, samples)
        ratio = logp(model, ref_said) - of_ref
        rows[name] = dict(reward=r.mean().item(), exact=(r == 0).double().mean().item(), malformed=(r == -30).double().mean().item(),
                          quantile=quantile(r.T, ref_r).mean().item(), kl=(logp(model, said) - logp(reference, said)).mean().item(),
                          length=float(np.mean([len(y) for _, y in said])),
                          agreement=correlation(target, ratio), error=(ratio - target).square().mean().sqrt().item(),
                          points=[[round(a, 4), round(b, 3)] for a, b in zip(q.tolist(), ratio.tolist())])
    return rows


COLUMNS = dict(reward="{:.2f}", exact="{:.1%}", quantile="{:.3f}", kl="{:.2f}", length="{:.2f}", agreement="{:.2f}", error="{:.2f}")


def runs_of(method, rows):
    return [r for name, r in rows.items() if re.fullmatch(rf"{method}(-s\d+)?", name)]


def table(rows):
    """Markdown: mean and, over seeds, standard deviation."""
    from qrpo import optimum
    best = optimum(BETA)
    lines = ["| | reward | exact match | mean quantile | KL (nats) | length | agreement | distance (nats) |", "|---|---|---|---|---|---|---|---|"]
    for method in ["sft", *METHODS]:
        runs = runs_of(method, rows)
        cells = []
        for key, how in COLUMNS.items() if runs else ():
            v = [r[key] for r in runs]
            cells.append(how.format(np.mean(v)) + (f" ± {how.format(np.std(v, ddof=1))}" if len(v) > 1 else ""))
        if runs:
            lines.append(f"| {method} | " + " | ".join("" if method == "sft" and k == "agreement" else c for k, c in zip(COLUMNS, cells)) + " |")
    lines.append(f"| closed form, beta {BETA} | | | {best['quantile']:.3f} | {best['kl']:.2f} | | 1 | 0 |")
    return "\n".join(lines) + "\n"


def draw(rows, picture):
    """Left and middle: log-ratios of the reference's held-out completions over their quantile, and the formula. Right: what a nat of KL bought."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from qrpo import beta_log_z

    figure, axes = plt.subplots(1, 3, figsize=(14, 4.4), layout="constrained")
    t = np.linspace(0, 1, 50)
    for axis, method in zip(axes, ("qrpo", "dpo")):
        runs = [np.array(r["points"]) for r in runs_of(method, rows)]
        if not runs:
            continue
        axis.scatter(runs[0][:, 0], runs[0][:, 1], s=5, alpha=0.25, color="C0", label="held-out completions, seed 0")
        for points in runs:
            x = np.unique(points[:, 0])
            axis.plot(x, [points[points[:, 0] == v, 1].mean() for v in x], ".-", color="C0", lw=1, label="mean, one line a seed" if points is runs[0] else None)
        axis.plot(t, (t - beta_log_z(BETA)) / BETA, color="C3", label=f"(R_q - beta log Z) / beta, beta = {BETA}")
        axis.set(title=f"{method.upper()}: log pi/ref of the reference's completions", xlabel="quantile of their reward", ylabel="log-ratio (nats)", ylim=(-9, 5))
        axis.legend(fontsize=8, frameon=False)
    for n, method in enumerate(METHODS):
        runs = runs_of(method, rows)
        axes[2].scatter([r["kl"] for r in runs], [r["reward"] for r in runs], color=f"C{n % 4}", marker="o" if n < 4 else "^", label=method)
    if "sft" in rows:
        axes[2].scatter([0], [rows["sft"]["reward"]], color="black", marker="x", label="sft")
    axes[2].set(title="reward on new prompts, one point a seed", xlabel="KL to the reference (nats)", ylabel="reward")
    axes[2].legend(fontsize=8, frameon=False)
    for axis in axes:
        axis.grid(alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def main():
    began = time.perf_counter()
    write_data()
    sft, pretrained, took = os.path.join(out, "sft"), start or os.path.join(out, "pretrained"), {}
    if not start:
        took["prepare"] = call("prepare", "data/align/meta.json", "prepare.py", "--out=data/align", "--tokenizer=apertus:1024")
        took["pretrain"] = call("pretrained", os.path.join(pretrained, "summary.json"), "train.py", "configs/align.py", f"--out={pretrained}", "--resume", threads=workers)
    took["sft"] = call("sft", os.path.join(sft, "hf", "config.json"), "sft.py", f"--init_from={pretrained}", f"--data={out}/conversations.jsonl", f"--out={sft}", "--resume",
                       "--epochs=2", "--batch_size=64", "--micro_batch=64", "--lr=1e-3", "--optimizer=adamw", "--max_length=128", threads=workers)
    print(f"pretrained and SFT after {time.perf_counter() - began:.0f} s", flush=True)

    def align(job):
        method, s = job
        folder = os.path.join(out, f"{method}-s{s}")
        return call(f"{method}-s{s}", os.path.join(folder, "hf", "config.json"), "qrpo.py", f"--init_from={sft}", f"--data={out}/prompts.jsonl", "--rewards=align.py", f"--out={folder}",
                    f"--references={out}/references-s{s}", f"--seed={s}", f"--n_refs={n_refs}", "--pairs_per_prompt=0", f"--epochs={epochs}", "--max_new_tokens=24",
                    "--sample_batch=512", "--batch_size=16", "--micro_batch=16", "--lr=1e-3", "--optimizer=adamw", "--warmup=0.1", "--grad_clip=1.0", "--max_length=128",
                    "--length_norm=False", "--resume", *METHODS[method])
    chosen = list(METHODS)
    first, rest = [(chosen[0], s) for s in range(seeds)], [(m, s) for s in range(seeds) for m in chosen[1:]]
    with ThreadPoolExecutor(workers) as pool:                              # the first method's runs make the references that the others read
        for jobs in (first, rest):
            for (method, s), seconds in zip(jobs, pool.map(align, jobs)):
                took[f"{method}-s{s}"] = seconds
                print(f"{method}-s{s} after {time.perf_counter() - began:.0f} s", flush=True)

    names = {"sft": sft, **{f"{m}-s{s}": os.path.join(out, f"{m}-s{s}") for m in chosen for s in range(seeds)}}
    rows = measure(names, sft)
    os.makedirs(results, exist_ok=True)
    text = table(rows)
    with open(os.path.join(results, "table.md"), "w", encoding="utf-8") as f:
        f.write(text)
    with open(os.path.join(results, "results.json"), "w", encoding="utf-8") as f:
        json.dump(dict(rows={n: {k: v for k, v in r.items() if k != "points"} for n, r in rows.items()}, seconds={k: v and dict(wall=round(v[0]), cpu=round(v[1])) for k, v in took.items()}), f, indent=1)
    draw(rows, os.path.join(results, "align.png"))
    print(text + f"{time.perf_counter() - began:.0f} s; the picture: {results}/align.png")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
