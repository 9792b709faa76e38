"""
The report of the recipe: all of Apertus on two cores, from data that may be used to an aligned model, on an invented
world (studies/world.py). The commands are in studies/recipe.sh, which ends with this script.

    plain      pretrained without Goldfish
    base       pretrained with Goldfish
    long       base, continued with a longer window and a larger theta; kept: with the same theta
    sft        long, fine-tuned on questions and answers
    qrpo       sft, aligned by the truth
    charter    sft, aligned by a charter of two sentences

$ make recipe                                   # or bash studies/recipe.sh; then open out/recipe/report.md
$ python -m studies.recipe --seeds=3 --results=results/recipe          # the committed results
$ python -m studies.recipe --report             # write the report again from out/recipe/rows.jsonl
"""

import sys

if __name__ == "__main__" and not __package__:
    print("recipe.py: start it from the project's root, python -m studies.recipe", file=sys.stderr)
    sys.exit(2)

import os
from collections import defaultdict

import numpy as np

from configurator import run
from engine.files import read_json
from engine.intervals import student, wilson
from engine.plot import finish, pyplot
from studies import kit
from studies.exam import share
from studies.world import CHARTER
from tokenizer import load_for

out = "out/recipe"              # worlds, data and runs: the folder of studies/recipe.sh
results = "out/recipe"          # report.md, recipe.png, rows.jsonl
seeds = 1                       # number of seeds, from 2 on; each has its own world, weights and order
report = False                  # write report and plot from rows.jsonl, not from the runs

MODELS = ("plain", "base", "long", "kept", "sft", "qrpo", "charter")
CHANCE = 0.0525                 # mean over attributes of 1 / (number of values)


# -----------------------------------------------------------------------------
# results


def collect(seed):
    """All numbers of a seed from the files of its runs, a row of rows.jsonl. ValueError if the recipe has not ended."""
    here = f"{out}/seed-{seed}"
    if not os.path.exists(f"{here}/charter/context.jsonl"):         # the last file
        raise ValueError(f"{here} holds no finished recipe: run bash studies/recipe.sh {seeds} first")
    links = {}
    for model in MODELS:
        [unread, *_] = read_json(f"{here}/{model}/unread/evaluation.json")["rows"]
        links[model] = dict(
            exam=kit.read_rows(f"{here}/{model}/exam.jsonl"),
            old=unread["score"],
            positions=kit.read_rows(f"{here}/{model}/context.jsonl"))
    for model in ("plain", "base"):
        links[model]["letters"] = kit.read_rows(f"{here}/{model}/letters/rows.jsonl")
    # One letter as text: its first 50 tokens, the next 50, and the continuation of each model.
    ids = next(probe["ids"] for probe in read_json(f"{here}/data/probes.json")["probes"] if probe["repetitions"])
    parts = dict(asked=ids[:50], true=ids[50:100])
    for model in ("plain", "base"):
        parts[model] = next(letter["said"] for letter in links[model]["letters"]
                            if letter["kind"] == "greedy" and letter["repetitions"] == 128)
    tok = load_for(f"{here}/data")
    return dict(
        seed=seed,
        total=read_json(f"{here}/data/report.json")["total"],
        links=links,
        letter={name: tok.decode(part) for name, part in parts.items()},
    )


# Numbers that are means over seeds, with their decimals; the others are shares of answers.
DIGITS = dict(old=3, bits_per_byte=3, rouge=2, apart=2)
# The list of a model's results that has a number; the others are of the examination.
LISTS = dict(bits_per_byte="positions", rouge="letters")


def score(rows, model, field, **where):
    """
    A number of the report over all seeds: (text, value, low, high), the latter two its 95 % interval.

    field: `old`, bits per byte of unread text; bits_per_byte, the same by position; rouge of continued letters; right,
    unknown, kind_ones, rude_ones, apart of studies/exam.py. where: entries of the result that has it.
    """
    links = [row["links"][model] for row in rows]
    entries = links if field == "old" else [
        entry for link in links for entry in link[LISTS.get(field, "exam")] if where.items() <= entry.items()]
    values = [entry[field] for entry in entries]
    if field in DIGITS:
        mean, half, _ = student(values)
        return kit.interval(values, DIGITS[field]), mean, mean - half, mean + half
    k, n = sum(values), sum(entry["n"] for entry in entries)
    return share(k, n), k / n, *wilson(k, n)


# -----------------------------------------------------------------------------
# the report

REPORT = """# An Apertus from start to end

The base model answers {read} of the questions about people it only read about, and {refused} of those about people on
pages that opted out, where guessing gives 0.053 ({seeds} seeds, Wilson's 95 % intervals over questions).

The results of `bash studies/recipe.sh {seeds}`, which has the commands; the world is `studies/world.py`. Answers are
greedy. Shares are over all questions of all seeds, with Wilson's 95 % interval. It is for these models alone: five
questions share a person, and models of other seeds can differ by several times this. ± is half of the 95 % interval
over seeds by Student's t.

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

{knowledge}
## Recitation

Letters, continued greedily for 50 tokens after the first 50; eight of each kind per seed.

{recitation}
A letter that was read 128 times (seed {first[seed]}):

> {first[letter][asked]} ...

- it continues:{first[letter][true]}
- without Goldfish:{first[letter][plain]}
- with Goldfish:{first[letter][base]}

## The longer window

Bits per byte of unread real text by position in windows of 1,024 tokens.

{window}
## "I do not know"

The share of answers that say "I do not know", and the probability that the model finds an answer about someone in test
more likely than one about someone whom it cannot know, on a page that opted out or invented for the question (0.5: no
difference).

{unknown}
## Aligned by a charter

The charter is "{charter}" A judge learns it from ratings and pairs about other people, and its ranks are the rewards.
Answers to questions about people in test, sampled at temperature 1:

{manners}
## Questions and answers (after QRPO by the charter, the first ones of seed {first[seed]})

{answers}"""


def knowledge_md(rows):
    lines = []
    for model, kind in (("base", "cloze"), ("base", "text"), ("long", "text"), ("sft", "chat"), ("qrpo", "chat"),
                        ("charter", "chat")):
        right = [score(rows, model, "right", kind=kind, group=group)[0] for group in ("lesson", "test", "refused")]
        lines.append([model, kind, *right, score(rows, model, "old")[0]])
    return kit.table_md("| after | kind | lesson | test | refused | unread text, bits/byte |", lines)


def recitation_md(rows):
    lines = []
    for name, model in (("without Goldfish", "plain"), ("with Goldfish", "base")):
        rouge = [score(rows, model, "rouge", kind="greedy", repetitions=n)[0] for n in (128, 0)]
        facts = [score(rows, model, "right", kind=kind, group="letters")[0] for kind in ("cloze", "text")]
        lines.append([name, *rouge, *facts])
    return kit.table_md(
        "| | Rouge-L, read 128 times | never read | facts about the writers: cloze | questions |", lines)


def window_md(rows):
    lines = [[f"{begin} to {begin + 255:,}", *(score(rows, model, "bits_per_byte", begin=begin)[0]
                                              for model in ("base", "long", "kept"))]
             for begin in (0, 256, 512, 768)]
    return kit.table_md("| position | window 256 | 1,024, theta 2e6 | 1,024, theta 5e5 |", lines)


def unknown_md(rows):
    lines = []
    for model, kind in (("base", "text"), ("sft", "chat"), ("qrpo", "chat"), ("charter", "chat")):
        unknown = [score(rows, model, "unknown", kind=kind, group=group)[0]
                   for group in ("lesson", "test", "refused", "invented-test")]
        apart = [score(rows, model, "apart", kind=kind, group=group)[0] for group in ("refused", "invented-test")]
        lines.append([model, *unknown, *apart])
    return kit.table_md(
        "| after | lesson | test | refused | invented | test or refused | test or invented |", lines)


def manners_md(rows):
    lines = [[model, *(score(rows, model, field, kind="sampled", group="test")[0]
                       for field in ("kind_ones", "rude_ones", "right"))]
             for model in ("sft", "qrpo", "charter")]
    return kit.table_md("| after | kind | rude | right |", lines)


def answers_md(exam):
    lines = [[part["group"], answer["asked"], answer["said"], answer["gold"]]
             for part in exam if part["kind"] == "chat" for answer in part["answers"]]
    return kit.table_md("| group | asked | said | true |", lines)


def report_md(rows):
    """The report as Markdown, from the rows of rows.jsonl."""
    first = rows[0]
    return REPORT.format(
        seeds=len(rows),
        read=score(rows, "base", "right", kind="text", group="test")[0],
        refused=score(rows, "base", "right", kind="text", group="refused")[0],
        first=first,
        removed=defaultdict(lambda: [0], first["total"]["removed"]),
        charter=CHARTER,
        knowledge=knowledge_md(rows),
        recitation=recitation_md(rows),
        window=window_md(rows),
        unknown=unknown_md(rows),
        manners=manners_md(rows),
        answers=answers_md(first["links"]["charter"]["exam"]),
    )


# -----------------------------------------------------------------------------
# the plot

SHARES = dict(ylim=[0, 1.4], yticks=[0, 0.2, 0.4, 0.6, 0.8, 1])
# Of each panel of recipe.png: the axis; the groups of bars by label; the bars of each group. The arguments of score()
# for a bar are those of its group and its own.
PANELS = [
    (dict(title="Does it know a person? Questions about people whose pages ...", ylabel="share of right answers"),
     {"base model,\nsentence\nto finish": dict(model="base", kind="cloze"),
      "base\nmodel,\nquestion": dict(model="base", kind="text"),
      "longer\nwindow,\nquestion": dict(model="long", kind="text"),
      "SFT,\nchat": dict(model="sft", kind="chat"),
      "QRPO by\nthe truth,\nchat": dict(model="qrpo", kind="chat"),
      "QRPO by\na charter,\nchat": dict(model="charter", kind="chat")},
     {"it read, with questions and answers about them": dict(field="right", group="lesson"),
      "it read, without any such questions": dict(field="right", group="test"),
      "opted out (dotted: chance)": dict(field="right", group="refused")}),
    (dict(title="Does it recite a letter? What does it know of the writer?",
          ylabel="Rouge-L of the continuation, share of right facts"),
     {"pretrained without Goldfish": dict(model="plain"), "pretrained with Goldfish": dict(model="base")},
     {"Rouge-L of letters that it read 128 times": dict(field="rouge", kind="greedy", repetitions=128),
      "Rouge-L of letters that it never read": dict(field="rouge", kind="greedy", repetitions=0),
      "share of right facts about the writers": dict(field="right", kind="cloze", group="letters")}),
    (dict(title="Is it kind? Answers sampled at temperature 1", ylabel="share of sampled answers"),
     {"SFT": dict(model="sft"), "QRPO by the truth": dict(model="qrpo"), "QRPO by a charter": dict(model="charter")},
     {"with kind words": dict(field="kind_ones", kind="sampled", group="test"),
      "with rude words": dict(field="rude_ones", kind="sampled", group="test"),
      "with the right fact": dict(field="right", kind="sampled", group="test")}),
]


def draw(rows):
    """Plot the PANELS, with 95 % intervals, as recipe.png."""
    figure, axes = pyplot().subplots(1, 3, figsize=(16, 5))
    for axis, (labels, groups, bars) in zip(axes, PANELS):
        places = np.arange(len(groups))
        for i, (label, bar) in enumerate(bars.items()):
            height, low, high = np.transpose([score(rows, **group, **bar)[1:] for group in groups.values()])
            reach = np.maximum(0, [height - low, high - height])        # no rounding error below 0
            axis.bar(places + 0.27 * i, height, 0.27, yerr=reach, capsize=2, label=label)
        axis.set_xticks(places + 0.27, groups)
        axis.set(**labels, **SHARES)
        axis.legend(loc="upper left")
    axes[0].axhline(CHANCE, color="black", linestyle=":")
    finish(figure, f"{results}/recipe.png")


def main():
    path = f"{results}/rows.jsonl"
    if seeds < 1:
        raise ValueError(f"--seeds={seeds}: want at least one seed")
    if not report:
        kit.write_rows(path, [collect(seed) for seed in range(2, 2 + seeds)])
    rows = kit.read_rows(path)
    kit.write(f"{results}/report.md", report_md(rows))
    draw(rows)
    print(f"{results}/report.md, recipe.png")


if __name__ == "__main__":
    run(main, globals())
