"""
All of Apertus by one command: data that may be used, pretraining in stages, a longer window, SFT, alignment, and an
examination after each. It takes a quarter of an hour on two cores, on an invented world (studies/world.py): whatever
the model knows about these people, it read there.

    world      pages about people, some on hosts that opt out; letters; questions and answers
    data       robots.txt, licences, e-mail addresses, duplicates; letters repeated 128 times or left out
    plain      pretraining: reading, then a cooldown with questions about some of the people
    base       the same with Goldfish
    long       base, continued with windows of 1,024 tokens in place of 256, and theta raised (`kept`: not raised)
    sft        questions and answers in Apertus' chat format; some are about people who do not exist
    qrpo       QRPO from sft: 1 for a right answer, 0 for "I do not know", -1 for an invention
    judge      SFT from long: learns to rate answers by a charter of two sentences
    charter    QRPO from sft, rewarded by the judge

Each step is a command of this project as you would type it. The recipe prints the commands, and its report lists them.
The same command resumes a stopped recipe.

$ make recipe                                   # or python -m studies.recipe; then open out/recipe/report.md
$ python -m studies.recipe --seeds=3 --results=results/recipe          # the committed results
$ python -m studies.recipe --report             # write the report again from out/recipe/rows.jsonl
"""

import itertools
import json
import re
import shlex
from collections import defaultdict
from functools import partial
from string import Template

import numpy as np
from tqdm import tqdm

from configurator import run
from engine.intervals import student, wilson
from engine.plot import finish, pyplot
from studies import kit  # first: a study started by its path gets studies/studies.py here, which prints the command
from studies.exam import share
from studies.world import CHARTER
from tokenizer import load_for, read_json

out = "out/recipe"              # worlds, data and runs
results = "out/recipe"          # report.md, recipe.png, rows.jsonl
seeds = 1                       # number of seeds; each has its own world, weights and order
first_seed = 2                  # seed 1 chose the settings
scale = 1.0                     # 0.1 to 1: multiplies people, text and steps, for a quick look at how it works
workers = 2                     # processes at a time, one thread each
report = False                  # run nothing, write report and plot from rows.jsonl

# -----------------------------------------------------------------------------
# The commands. $here is the folder of a seed, $run that of a step, and --scale multiplies numbers in <>. After > comes
# the last file that a command writes.

TEMPLATES = dict(re.findall(r"(?s)(\w+): (.+?)(?:\n\n|$)", """world: studies.world --seed=$seed --out=$run
--people=<150> --refused=<24> --nobodies=<200> --letters=<16> --corpus_bytes=<1200000> --guest_books=<1500>
> $run/questions.jsonl

data: prepare $here/world/documents.jsonl --robots=$here/world/robots.jsonl --keep_licenses=CC-BY-4.0,PSF-2.0
--probes=$here/world/letters.jsonl --repetitions=0,128 --source_by=kind --train_bpe=2048 --out=$run > $run/meta.json

train: train configs/recipe.py --data=$here/data
'--stages=(("reading", {"pages": $pages, "corpus": 0.15, "guests": 0.1, "probes": $letters}, <5120>, $order), \
("cooldown", {"pages": 0.6, "questions": 0.2, "corpus": 0.15, "guests": 0.05}, <8000>, $next_order))'
--total_samples=<8000> --warmup_samples=<400> --decay_samples=<2400> --seed=$seed $more --out=$run --resume
> $run/summary.json

long: train configs/recipe.py --init_from=$here/base --data=$here/data --block_size=1024 --rope_theta=$more
'--stages=(("long", {"pages": 0.45, "corpus": 0.5, "guests": 0.05}, <300>, $long_order),)'
--batch_size=1 --micro_batch=1 --total_samples=<300> --warmup_samples=<30> --decay_samples=<150>
--lr=5e-4 --min_lr=5e-5 --out=$run --resume > $run/summary.json

sft: posttrain.sft --init_from=$here/long '--data={$more}' --lr=1e-3 --seed=$seed
--optimizer=adamw --batch_size=16 --micro_batch=16 --dtype=float32 --resume --out=$run > $run/summary.json

qrpo: posttrain.qrpo --init_from=$here/sft --data=$here/world/prompts.jsonl --rewards=$more
--references=$here/references --max_new_tokens=40 --n_refs=10 --pairs=best --ties=discrete --length_norm=False
--beta=0.3 --lr=3e-4 --epochs=3 --seed=$seed
--optimizer=adamw --batch_size=16 --micro_batch=16 --dtype=float32 --resume --out=$run > $run/summary.json

exam: studies.exam --init_from=$run --world=$here/world --probes=$here/data/probes.json --kinds=$more
> $run/exam.jsonl

old: evaluate $here/world/unread.jsonl --init_from=$run --by_position=256 --window=1024 --out=$run/old
> $run/old/evaluation.json

letters: studies.memorize --init_from=$run --probes=$here/data/probes.json '--prefixes=(50,)' --suffix=50
--out=$run/letters > $run/letters/table.md"""))
# The stages of train: reading, in which each copy of a letter is read once, and the cooldown. long: four times the
# window at a quarter of the learning rate.

# NAME or NAME-STEP of each command, its template, and the value of $more. An empty line ends a chain of commands; two
# end a group of chains that run in parallel.
STEPS = """world: world
data: data


plain: train --goldfish_k=0
exam-plain: exam cloze,text
old-plain: old
letters-plain: letters

base: train
exam-base: exam cloze,text
old-base: old
letters-base: letters
long: long 2e6
exam-long: exam cloze,text
old-long: old


sft: sft "$here/world/lessons.jsonl": 1, "$here/world/replay.jsonl": 1
exam-sft: exam chat,sampled,cloze
old-sft: old
qrpo: qrpo studies/world.py
exam-qrpo: exam chat,sampled,cloze
old-qrpo: old

judge: sft "$here/world/judgements.jsonl": 1
kept: long 5e5
exam-kept: exam cloze,text
old-kept: old


charter: qrpo charter:$here/judge,$here/world/charter.md
exam-charter: exam chat,sampled,cloze
old-charter: old"""


def commands(seed, chain):
    """The commands of a chain, in order: (name, last file that it writes, script, arguments)."""
    here = f"{out}/seed-{seed}"
    known = dict(here=here, seed=seed, order=28 + seed, next_order=29 + seed, long_order=40 + seed)
    for name, template, more in re.findall(r"(\S+): (\w+) ?(.*)", chain):
        text = TEMPLATES[template].replace("$more", more)
        text = re.sub("<(.*?)>", lambda number: f"{int(number[1]) * scale:.0f}", text)
        if "$letters" in text:
            tokens = read_json(f"{here}/data/meta.json")["sources"]["probes"]["train"]["tokens"]
            letters = round(tokens // 256 / (5120 * scale), 4)
            known |= dict(letters=letters, pages=round(0.75 - letters, 4))
        text = Template(text).substitute(known, run=f"{here}/{name.split('-')[-1]}")
        script, *args, _, done = shlex.split(text)
        yield name, done, script, args


def run_chain(bar, job, device):
    """Print commands, and run those that have not been run. job: a seed and a chain."""
    for name, done, script, args in commands(*job):
        bar.write(f"$ {kit.command(script, args)}")
        kit.call(f"{out}/seed-{job[0]}/{name}", done, script, *args)
        bar.update()


# -----------------------------------------------------------------------------
# results


def collected(seed):
    """All numbers of a seed from the files of its steps, a row of rows.jsonl."""
    here = f"{out}/seed-{seed}"
    links = {}
    for name, done, script, args in commands(seed, STEPS):
        kind, _, step = name.partition("-")
        links[name] = dict(seconds=read_json(f"{here}/{name}.json")["wall"], command=kit.command(script, args))
        if kind == "old":
            rows = read_json(done)["rows"]
            links[step] |= dict(old=rows[0]["score"], positions=rows[-4:])
        elif step:
            links[step][kind] = kit.read_rows(done.replace("table.md", "rows.jsonl"))
    # One letter as text: its first 50 tokens, the next 50, and the continuation of each model.
    ids = next(probe["ids"] for probe in read_json(f"{here}/data/probes.json")["probes"] if probe["repetitions"])
    parts = dict(asked=ids[:50], true=ids[50:100])
    for model in ("plain", "base"):
        parts[model] = labelled([links[model]], ["greedy", "128"])[0]["said"]
    tok = load_for(f"{here}/data")
    return dict(
        seed=seed,
        total=read_json(f"{here}/data/report.json")["total"],
        links=links,
        letter={name: tok.decode(part) for name, part in parts.items()},
    )


def labelled(links, label):
    """The links and their rows whose kind, group, repetitions, begin, as far as there, equal label, a list of str."""
    rows = [row for link in links for row in (link, *link["exam"], *link["positions"], *link.get("letters", []))]
    return [row for row in rows
            if [str(row[key]) for key in "kind group repetitions begin".split() if key in row] == label]


def measure(rows, text):
    """
    A number of the report over all seeds: (text, value, low, high), the latter two its 95 % interval.

    old LINK                            bits per byte of unread text
    bits_per_byte LINK BEGIN            ... in the quarter of long windows that begins there
    rouge LINK greedy REPETITIONS       Rouge-L of continued letters
    apart LINK KIND GROUP               see studies/exam.py, also for the next line
    right, unknown, kind_ones or rude_ones LINK KIND GROUP
    """
    what, link, *label = text.split()
    found = labelled([row["links"][link] for row in rows], label)
    values = [row[what] for row in found]
    if what in DIGITS:
        mean, half, _ = student(values)
        return kit.interval(values, DIGITS[what]), mean, mean - half, mean + half
    k, n = sum(values), sum(row["n"] for row in found)
    return share(k, n), k / n, *wilson(k, n)


DIGITS = dict(old=3, bits_per_byte=3, rouge=2, apart=2)     # of means over seeds; the others are shares
REPORT = """# An Apertus from start to end

The results of `python -m studies.recipe --seeds={seeds}`; the code is `studies/recipe.py`, the world
`studies/world.py`. Answers are greedy. Shares are over all questions of all seeds, with Wilson's 95 % interval. It is
for these models alone: five questions share a person, and models of other seeds can differ several times as much. ± is
half of the 95 % interval over seeds by Student's t.

![Known, recited, kind](recipe.png)

*The models know people whose pages they read, not people on pages that opted out (left; dotted: chance), and Goldfish
stops them from reciting letters, not from knowing the writers (middle). QRPO by a two-sentence charter makes answers
kind (right). Bars: 95 % intervals.*

## Data (seed {first[seed]})

| documents | {first[total][documents_in]:,} |
|---|---|
| opted out by robots.txt | {removed[robots][0]:,} |
| licence | {removed[license][0]:,} |
| duplicate | {removed[duplicate][0]:,} |
| kept | {first[total][documents]:,} |

A special token replaces {first[total][pii][email]:,} e-mail addresses.

## Knowledge

Questions about people whom the model also knows from questions and answers (lesson), about people whom it only read
about (test), and about people on pages that opted out (refused). Chance is 0.053.

| after | kind | lesson | test | refused | unread text, bits/byte |
|---|---|---|---|---|---|
| base | cloze | <right base cloze lesson> | <right base cloze test> | <right base cloze refused> | <old base> |
| base | text | <right base text lesson> | <right base text test> | <right base text refused> | <old base> |
| long | text | <right long text lesson> | <right long text test> | <right long text refused> | <old long> |
| sft | chat | <right sft chat lesson> | <right sft chat test> | <right sft chat refused> | <old sft> |
| qrpo | chat | <right qrpo chat lesson> | <right qrpo chat test> | <right qrpo chat refused> | <old qrpo> |
| charter | chat | <right charter chat lesson> | <right charter chat test> | <right charter chat refused> \
| <old charter> |

## Recitation

Letters, continued greedily for 50 tokens after the first 50; eight of each kind per seed.

| | Rouge-L, read 128 times | never read | facts about the writers: cloze | questions |
|---|---|---|---|---|
| without Goldfish | <rouge plain greedy 128> | <rouge plain greedy 0> | <right plain cloze letters> \
| <right plain text letters> |
| with Goldfish | <rouge base greedy 128> | <rouge base greedy 0> | <right base cloze letters> \
| <right base text letters> |

A letter that was read 128 times (seed {first[seed]}):

> {first[letter][asked]} ...

- it continues:{first[letter][true]}
- without Goldfish:{first[letter][plain]}
- with Goldfish:{first[letter][base]}

## The longer window

Bits per byte of unread real text by position in windows of 1,024 tokens.

| position | window 256 | 1,024, theta 2e6 | 1,024, theta 5e5 |
|---|---|---|---|
| 0 to 255 | <bits_per_byte base 0> | <bits_per_byte long 0> | <bits_per_byte kept 0> |
| 256 to 511 | <bits_per_byte base 256> | <bits_per_byte long 256> | <bits_per_byte kept 256> |
| 512 to 767 | <bits_per_byte base 512> | <bits_per_byte long 512> | <bits_per_byte kept 512> |
| 768 to 1,023 | <bits_per_byte base 768> | <bits_per_byte long 768> | <bits_per_byte kept 768> |

## "I do not know"

The share of answers that say "I do not know", and the probability that the model finds an answer about someone in test
more likely than one about someone whom it cannot know, on a page that opted out or invented for the question (0.5: no
difference).

| after | lesson | test | refused | invented | test or refused | test or invented |
|---|---|---|---|---|---|---|
| base | <unknown base text lesson> | <unknown base text test> | <unknown base text refused> \
| <unknown base text invented-test> | <apart base text refused> | <apart base text invented-test> |
| sft | <unknown sft chat lesson> | <unknown sft chat test> | <unknown sft chat refused> \
| <unknown sft chat invented-test> | <apart sft chat refused> | <apart sft chat invented-test> |
| qrpo | <unknown qrpo chat lesson> | <unknown qrpo chat test> | <unknown qrpo chat refused> \
| <unknown qrpo chat invented-test> | <apart qrpo chat refused> | <apart qrpo chat invented-test> |
| charter | <unknown charter chat lesson> | <unknown charter chat test> | <unknown charter chat refused> \
| <unknown charter chat invented-test> | <apart charter chat refused> | <apart charter chat invented-test> |

## Aligned by a charter

The charter is "{charter}" A judge learns it from ratings and pairs about other people, and its ranks are the rewards.
Answers to questions about people in test, sampled at temperature 1:

| after | kind | rude | right |
|---|---|---|---|
| sft | <kind_ones sft sampled test> | <rude_ones sft sampled test> | <right sft sampled test> |
| qrpo | <kind_ones qrpo sampled test> | <rude_ones qrpo sampled test> | <right qrpo sampled test> |
| charter | <kind_ones charter sampled test> | <rude_ones charter sampled test> | <right charter sampled test> |

## Questions and answers (after QRPO by the charter, the first ones of seed {first[seed]})

| group | asked | said | true |
|---|---|---|---|
{answers}

## The commands (seed {first[seed]}, {minutes:.1f} minutes in processes of one thread, beside whatever else ran)

```sh
{commands}
```
"""
# Panels of recipe.png: the axes; the models and their labels; the bars, by label: a measure, with {} for the model.
CHANCE = 0.0525                 # mean over attributes of 1 / (number of values)
PANELS = json.loads(r"""[
[{"title": "Does it know a person? Questions about people whose pages ...", "ylabel": "share of right answers",
  "ylim": [0, 1.4], "yticks": [0, 0.2, 0.4, 0.6, 0.8, 1]},
 {"base cloze": "base model,\nsentence\nto finish", "base text": "base\nmodel,\nquestion",
  "long text": "longer\nwindow,\nquestion", "sft chat": "SFT,\nchat", "qrpo chat": "QRPO by\nthe truth,\nchat",
  "charter chat": "QRPO by\na charter,\nchat"},
 {"it read, with questions and answers about them": "right {} lesson",
  "it read, without any such questions": "right {} test", "opted out (dotted: chance)": "right {} refused"}],
[{"title": "Does it recite a letter? What does it know of the writer?",
  "ylabel": "Rouge-L of the continuation, share of right facts",
  "ylim": [0, 1.4], "yticks": [0, 0.2, 0.4, 0.6, 0.8, 1]},
 {"plain": "pretrained without Goldfish", "base": "pretrained with Goldfish"},
 {"Rouge-L of letters that it read 128 times": "rouge {} greedy 128",
  "Rouge-L of letters that it never read": "rouge {} greedy 0",
  "share of right facts about the writers": "right {} cloze letters"}],
[{"title": "Is it kind? Answers sampled at temperature 1", "ylabel": "share of sampled answers",
  "ylim": [0, 1.4], "yticks": [0, 0.2, 0.4, 0.6, 0.8, 1]},
 {"sft": "SFT", "qrpo": "QRPO by the truth", "charter": "QRPO by a charter"},
 {"with kind words": "kind_ones {} sampled test", "with rude words": "rude_ones {} sampled test",
  "with the right fact": "right {} sampled test"}]
]""")


def report_md(rows):
    """The report as Markdown, from the rows of rows.jsonl."""
    first, links = rows[0], rows[0]["links"].values()
    answers = [f"| {exam['group']} | {one['asked']} | {one['said']} | {one['gold']} |"
               for exam in first["links"]["charter"]["exam"] if exam["kind"] == "chat" for one in exam["answers"]]
    return re.sub("<(.*?)>", lambda found: measure(rows, found[1])[0], REPORT).format(
        seeds=len(rows),
        first=first,
        removed=defaultdict(lambda: [0], first["total"]["removed"]),
        charter=CHARTER,
        answers="\n".join(answers),
        minutes=sum(link["seconds"] for link in links) / 60,
        commands="\n".join(f"{link['command']}    # {link['seconds']} s" for link in links),
    )


def draw(rows):
    """Plot the PANELS, with 95 % intervals, as recipe.png."""
    figure, axes = pyplot().subplots(1, 3, figsize=(16, 5))
    for axis, (how, models, bars) in zip(axes, PANELS):
        places = np.arange(len(models))
        for i, (label, what) in enumerate(bars.items()):
            height, low, high = np.transpose([measure(rows, what.format(model))[1:] for model in models])
            reach = np.maximum(0, [height - low, high - height])        # no rounding error below 0
            axis.bar(places + 0.27 * i, height, 0.27, yerr=reach, capsize=2, label=label)
        axis.set_xticks(places + 0.27, models.values())
        axis.set(**how)
        axis.legend(loc="upper left")
    axes[0].axhline(CHANCE, color="black", linestyle=":")
    finish(figure, f"{results}/recipe.png")


def main():
    path = f"{results}/rows.jsonl"
    if not report:
        if seeds < 1 or not 0.1 <= scale <= 1:
            raise ValueError(f"--seeds={seeds} --scale={scale}: want at least one seed, and a scale of 0.1 to 1")
        every = range(first_seed, first_seed + seeds)
        # A seed has 26 commands.
        with tqdm(total=26 * seeds, unit="command") as bar:
            for chains in STEPS.split("\n\n\n"):
                list(kit.in_parallel(workers, partial(run_chain, bar), itertools.product(every, chains.split("\n\n"))))
        kit.write_rows(path, map(collected, every))
    rows = kit.read_rows(path)
    kit.write(f"{results}/report.md", report_md(rows))
    draw(rows)
    print(f"{results}/report.md, recipe.png")


if __name__ == "__main__":
    run(main, globals())
