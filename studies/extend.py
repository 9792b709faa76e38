"""
Do more tokens pay? A small model goes on with a text that its vocabulary was not made for, with and without new pieces.

    old           the vocabulary of the start
    same bytes    with new pieces, over as much text: fewer tokens, so fewer steps and less compute
    same tokens   with new pieces, over as many tokens: the compute of `old`, and more text (or more often the same)

New pieces are learnt from what is trained on, never from what is validated on (tokenizer.py --extend), and their rows
start as the mean of the old rows that spelled them (convert.fill). Compared are bits per byte of the same validation
text, not nats per token: a longer token costs more nats and says more. Windows have as many tokens in all arms, so
longer tokens also see more text at once, which is part of what one pays for. Seeds draw the order of the windows; the
start, the text and the vocabulary are the same for all.

What is known at scale: after 2B tokens of Greek Apertus-8B had .491 bits per character with the old vocabulary. With
17,920 more ids, at 1.74 instead of 2.69 tokens a word, it had .574 where their rows began as means ("ReTok", as we
understand it), .531 at best (eellak/greek-apertus). Ours says something of models and texts of this size alone.

$ python -m studies.extend shakespeare.txt              # trains the start on data/stdlib, then 5 seeds of each arm
$ python -m studies.extend pages.jsonl --samples=5200   # about one epoch of 1.3M old tokens
$ python -m studies.extend --report                     # table.md and curves.png again from rows.jsonl
"""

import sys

if __name__ == "__main__" and not __package__:
    print("extend.py: start it from the project's root, python -m studies.extend", file=sys.stderr)
    sys.exit(2)

import os
import statistics

from configurator import config_file, lengths, read_config, run
from engine import plot
from studies import kit
from tokenizer import read_json

paths = []                    # the new text, as prepare.py takes it
start = ""                    # the model that goes on: run folder, Hugging Face folder; "" = one trained on `data`
data = "data/stdlib"          # what prepare.py wrote, for the start
config = "configs/ablations/start.py"   # of the start, and of how the others train
size = 0                      # ids of the extended vocabulary; 0 = an eighth more
samples = 1600                # windows that `old` and `same tokens` read
lr = 5e-4                     # peak, half of the start's; a tenth of it at the end
val_share = 0.1               # of the new text
seeds = 5
jobs = 1                      # runs at a time; 0 = one for each GPU, or for each CPU core without one
out = "out/extend"            # the runs
results = "results/extend"    # rows.jsonl, table.md, curves.png
report = False                # run nothing: table and picture from rows.jsonl

ARMS = dict(old="old", same_bytes="new", same_tokens="new")     # arm -> the data that it reads


def made(path, script, args):
    """`path`, made by a script unless it is there already. ValueError with the script's own last line if it fails."""
    if not os.path.exists(path):
        code, last = kit.run_script(script, args, f"{out}/{script}.txt")
        if code:
            raise ValueError(f"{script}.py {' '.join(args)} ended with code {code}: {last}")
    return path


def begin():
    """The start and the new text in both vocabularies: (model, {"old": data folder, "new": data folder})."""
    model = start
    if not model:
        model = f"{out}/start-{kit.digest([config, data])}"
        kit.train(model, [config, f"--data={data}", "--minutes=0"])
    root = f"{out}/{kit.digest([paths, model, size, val_share])}"
    os.makedirs(root, exist_ok=True)
    vocabulary = made(f"{root}/old.json", "convert", [f"--load={model}", f"--save={root}/old.json"])
    folders = {}
    for name in ("old", "new"):
        folders[name] = folder = f"{root}/{name}"
        args = [*paths, f"--out={folder}", f"--tokenizer={vocabulary}", f"--val_share={val_share}"]
        made(f"{folder}/meta.json", "prepare", args)
        if name == "old":
            args = [f"--name={vocabulary}", f"--extend={folder}", f"--size={size}", f"--out={root}/new.json"]
            vocabulary = made(f"{root}/new.json", "tokenizer", args)
    return model, folders


def counts(folder):
    """(ids, tokens, bytes) of a data folder; tokens and bytes of the text to train on."""
    meta = read_json(f"{folder}/meta.json")
    train = [splits["train"] for splits in meta["sources"].values()]
    return meta["vocab_size"], sum(part["tokens"] for part in train), sum(part["bytes"] for part in train)


def train_arm(arm, seed, model, folders):
    """
    One run, as a line of rows.jsonl.

    megabytes, bpb: lists, an entry for each validation: the text read by then, and bits per byte of all validation
    text. The first is the start itself, before any step: in it new tokens are means that no one has trained.
    """
    folder = folders[ARMS[arm]]
    ids, tokens, size_in_bytes = counts(folder)
    total = samples
    if arm == "same_bytes":
        total = round(samples * tokens / counts(folders["old"])[1])
    steps = total // read_config(config_file(config))["batch_size"]
    settings = dict(
        data=folder,
        init_from=model,
        seed=seed,
        lr=lr,
        lr_floor=lr / 10,
        eval_every=max(1, steps // 8),
        eval_windows=0,
        sample_every=0,
    )
    # The optimizer and the batch are those of the start's config.
    args = [config, *kit.flags(settings), *lengths(total).split()]
    run_folder = f"{out}/{kit.digest(args)}"
    kit.train(run_folder, args)
    entries = [entry for entry in plot.read_log(run_folder) if "val_bpb" in entry]
    bytes_per_token = size_in_bytes / tokens
    return dict(
        arm=arm,
        seed=seed,
        ids=ids,
        bytes_per_token=bytes_per_token,
        megabytes=[entry["tokens"] * bytes_per_token / 1e6 for entry in entries],
        tokens=entries[-1]["tokens"],
        bpb=[entry["val_bpb"] for entry in entries],
    )


def by_arm(rows):
    return {arm: [row for row in rows if row["arm"] == arm] for arm in ARMS}


def table_md(rows):
    """A line for each arm: a pure function of the runs."""
    groups = by_arm(rows)
    lines = []
    for arm, group in groups.items():
        first = group[0]
        against = ""
        if arm != "old":
            differences = kit.differences(group, groups["old"], lambda row: row["bpb"][-1])
            against = kit.interval(differences, 4)
        cells = [
            arm.replace("_", " "),
            f"{first['ids']:,}",
            f"{first['bytes_per_token']:.2f}",
            f"{first['tokens'] / 1e3:,.0f}",
            f"{first['megabytes'][-1]:.2f}",
            f"{first['bpb'][0]:.3f}",
            kit.interval([row["bpb"][-1] for row in group], 4),
            against,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    head = "| arm | ids | bytes/token | thousand tokens | MB read | bits/byte before | after | against old, by seed |"
    text = [*kit.table(head, lines), ""]
    text.append(f"{len(groups['old'])} seeds of the order of the windows; ±: half of the 95 % interval (Student's t).")
    return "\n".join(text) + "\n"


def draw(rows, path):
    """Bits per byte over the text that was read, the mean of the seeds."""
    figure, axis = plot.pyplot().subplots(figsize=(7, 4.2))
    for arm, group in by_arm(rows).items():
        means = [statistics.fmean(column) for column in zip(*(row["bpb"] for row in group))]
        axis.plot(group[0]["megabytes"], means, marker=".", label=arm.replace("_", " "))
    axis.set(title="The same validation text, with and without new tokens", xlabel="MB of text read",
             ylabel="validation, bits per byte")
    axis.legend()
    plot.finish(figure, path)


def main():
    lines = f"{results}/rows.jsonl"
    if not report:
        if not paths or seeds < 1:
            raise ValueError("name the text to go on with, and at least one seed: python -m studies.extend book.txt")
        model, folders = begin()
        asked = [(arm, seed) for seed in range(1, seeds + 1) for arm in ARMS]

        def one(asked, device):
            return train_arm(*asked, model, folders)
        kit.write_rows(lines, list(kit.in_parallel(jobs, one, asked)))
    rows = kit.rows_to_report(lines, "studies/extend.py")
    text = table_md(rows)
    kit.write(f"{results}/table.md", text)
    draw(rows, f"{results}/curves.png")
    print(text)


if __name__ == "__main__":
    run(main, globals())
