"""
The whole of Apertus by one command: data that one may use, pretraining in stages, a longer window, SFT, alignment, and
an examination after each link. Two cores finish it while one has lunch, on an invented world (studies/world.py), where
right answers are visible: what the model knows of these people it can only have read.

    world      pages of people, of which three hosts refuse to be read; letters; questions and answers
    prepare    robots.txt, licences, addresses, duplicates, the plan of letters: 128 times or never
    base       reading, then a cooldown with questions about some of the people; Goldfish
    plain      the same without Goldfish: what it recites, the other does not
    long       from 256 tokens to 1,024, theta raised (and `kept`: not raised)
    sft        questions and answers in Apertus' chat format; some are about people who do not exist
    qrpo       rewards for what is right, nothing for "I do not know", a penalty for what is invented
    charter    the same with another rule: a judge that learnt from rated answers about others, and one sentence

Every link is a command of this project as a user would type it: they are printed, and kept in the report. A recipe that
was stopped goes on with the link that it was in.

$ make recipe                                   # or python -m studies.recipe; then out/recipe/report.md
$ python -m studies.recipe --seeds=3 --results=results/recipe          # what is committed there
$ python -m studies.recipe --scale=8 --corpus=texts.jsonl --out=out/large --results=out/large      # on a GPU
$ python -m studies.recipe --report             # the report again from out/recipe/rows.jsonl
"""

import sys

if __name__ == "__main__" and not __package__:
    print("recipe.py: start it from the project's root, python -m studies.recipe", file=sys.stderr)
    sys.exit(2)

import ast
import difflib
import glob
import itertools
import json
import os
import shlex
import statistics

from tqdm import tqdm

from engine.files import lock_file
from engine.intervals import wilson
from engine.plot import finish, pyplot
from posttrain.references import reward_hash, words
from studies import kit
from studies.exam import UNKNOWN
from studies.world import CHARTER, manner_of
from tokenizer import load_for, read_json

out = "out/recipe"              # worlds, data and runs
results = "out/recipe"          # report.md, recipe.png, rows.jsonl
seeds = 1                       # how many: each has a world, weights and an order of its own
first_seed = 2                  # with 1 the settings were chosen
scale = 1.0                     # of people, text and steps; the model's width grows with its square root
corpus = ""                     # real text to read beside the world: .jsonl; "" = Python's standard library
workers = 2                     # processes at a time, one thread each
report = False                  # run nothing: write report and picture again from rows.jsonl

WINDOW, LONG = 256, 1024
LINE = 68                       # letters in a line of the picture
PREFIX, SUFFIX = 50, 50         # tokens of a letter that are asked, and that are compared
GROUPS = ("lesson", "test", "refused", "nobody-test")
COLOURS = dict(zip(GROUPS, ("C2", "C0", "C3", "0.5")))
# Links of which bits per byte by position are compared.
WINDOWS = dict(base="window 256", long="1,024, theta 2e6", kept="1,024, theta 5e5")
# By chance, with as many possible values as the world has of each attribute: the mean of 1/24, 1/40, 1/16, 1/20, 1/12.
CHANCE = statistics.fmean((1 / 24, 1 / 40, 1 / 16, 1 / 20, 1 / 12))


# -----------------------------------------------------------------------------
# the links


def grown(number):
    """A number of people, bytes or steps at this scale."""
    return max(1, round(number * scale))


def shape():
    """The model's width at this scale, as flags."""
    width = max(32, 64 * round(2 * scale ** 0.5))
    return kit.flags(dict(n_embd=width, ffn_dim=int(5.25 * width)))


def stages(data, seed):
    """
    The table of stages for train.py: reading, in which every copy of a letter is read once, and the cooldown.

    data: the folder that prepare.py wrote.
    """
    reading, end = 4 * grown(1280), 4 * grown(2000)
    letters = read_json(f"{data}/meta.json")["sources"]["probes"]["train"]["tokens"] // WINDOW
    share = round(letters / reading, 4)
    if share > 0.5:
        raise ValueError(f"{letters} windows of letters are more than half of the {reading} that are read: "
                         "a larger --scale has room for them")
    first = {"pages": round(0.75 - share, 4), "corpus": 0.15, "guests": 0.1, "probes": share}
    second = {"pages": 0.6, "questions": 0.2, "corpus": 0.15, "guests": 0.05}
    return (("reading", first, reading, seed), ("cooldown", second, end, seed + 1))


def quoted(name, value):
    """A flag whose value has names in it, in double quotes: a shell wants the single ones around it."""
    return f"--{name}={value}".replace("'", '"')


def begin(folder, seed):
    """World and data of a seed: (name, the file that it writes last, script, arguments) of both links."""
    world, data = f"{folder}/world", f"{folder}/data"
    sizes = dict(people=max(20, grown(150)), refused=max(5, grown(24)), nobodies=max(10, grown(200)))
    sizes["letters"] = 16 if scale >= 1 else 2
    sizes |= dict(corpus_bytes=grown(1_200_000), guest_books=grown(1500), pages=100 if scale >= 1 else 20)
    if corpus:
        sizes["corpus"] = corpus
    yield "world", f"{world}/world.json", "studies.world", [f"--seed={seed}", f"--out={world}", *kit.flags(sizes)]
    yield "prepare", f"{data}/meta.json", "prepare", [
        f"{world}/documents.jsonl",
        f"--robots={world}/robots.jsonl",
        f"--keep_licenses=CC-BY-4.0,{'user-supplied' if corpus else 'PSF-2.0'}",
        f"--probes={world}/letters.jsonl",
        "--repetitions=0,128",
        "--source_by=kind",
        "--train_bpe=2048",
        f"--out={data}",
    ]


def pretrained(folder, seed, name, *flags):
    """The link that trains a model from nothing, and its examinations."""
    data, run = f"{folder}/data", f"{folder}/{name}"
    steps = grown(2000)
    yield name, f"{run}/summary.json", "train", [
        "configs/recipe.py",
        f"--data={data}",
        quoted("stages", stages(data, 28 + seed)),
        f"--total_samples={4 * steps}",
        f"--warmup_samples={4 * (steps // 20)}",
        f"--decay_samples={4 * (steps * 3 // 10)}",
        f"--seed={seed}",
        *shape(),
        *flags,
        f"--out={run}",
        "--resume",
    ]
    yield from examined(folder, name, "cloze,text")
    yield f"letters-{name}", f"{run}/letters/table.md", "studies.memorize", [
        f"--init_from={run}",
        f"--probes={data}/probes.json",
        f"--prefixes=({PREFIX},)",
        f"--suffix={SUFFIX}",
        f"--out={run}/letters",
    ]


def examined(folder, name, kinds):
    """What the model of a link knows, and its bits per byte on real text that nobody has read, by position."""
    run = f"{folder}/{name}"
    yield f"exam-{name}", f"{run}/exam.jsonl", "studies.exam", [
        f"--init_from={run}",
        f"--world={folder}/world",
        f"--probes={folder}/data/probes.json",
        f"--kinds={kinds}",
    ]
    yield f"old-{name}", f"{run}/old/evaluation.json", "evaluate", [
        f"{folder}/world/unread.jsonl",
        f"--init_from={run}",
        f"--by_position={WINDOW}",
        f"--window={LONG}",
        f"--out={run}/old",
    ]


def extended(folder, seed, name, theta):
    """The link that lengthens the window: a quarter of the windows, four times as long, at a quarter of the rate."""
    data, run = f"{folder}/data", f"{folder}/{name}"
    windows = grown(300)
    mixture = {"pages": 0.45, "corpus": 0.5, "guests": 0.05}
    yield name, f"{run}/summary.json", "train", [
        "configs/recipe.py",
        f"--init_from={folder}/base",
        f"--data={data}",
        f"--block_size={LONG}",
        f"--rope_theta={theta}",
        quoted("stages", (("long", mixture, windows, 40 + seed),)),
        "--batch_size=1",
        "--micro_batch=1",
        f"--total_samples={windows}",
        f"--warmup_samples={windows // 10}",
        f"--decay_samples={windows // 2}",
        "--lr=5e-4",
        "--lr_floor=5e-5",
        *shape(),
        f"--out={run}",
        "--resume",
    ]
    yield from examined(folder, name, "cloze,text")


def tuned(seed):
    """Flags that SFT and QRPO share."""
    return [f"--seed={seed}", "--optimizer=adamw", "--batch_size=16", "--micro_batch=16", "--dtype=float32", "--resume"]


def taught(folder, seed, name, mixture):
    """The link that teaches conversations of the world, in these shares, to the model that reads 1,024 tokens."""
    run = f"{folder}/{name}"
    files = {f"{folder}/world/{kind}.jsonl": share for kind, share in mixture.items()}
    return name, f"{run}/hf/config.json", "posttrain.sft", [
        f"--init_from={folder}/long",
        quoted("data", files),
        "--lr=1e-3",
        *tuned(seed),
        f"--out={run}",
    ]


RULE = "studies/world.py"       # what QRPO is rewarded by: the world's own reward(), which knows the facts


def by_charter(folder):
    """The same by a judge, which has read what it knows."""
    return f"charter:{folder}/judge,{folder}/world/charter.md"


def rewarded(folder, seed, name, rewards):
    """QRPO with some rewards; both kinds have the same samples of the same model."""
    run = f"{folder}/{name}"
    yield name, f"{run}/hf/config.json", "posttrain.qrpo", [
        f"--init_from={folder}/sft",
        f"--data={folder}/world/prompts.jsonl",
        f"--rewards={rewards}",
        f"--references={folder}/references",
        "--max_new_tokens=40",
        "--n_refs=10",
        "--pairs=best",
        "--ties=discrete",
        "--length_norm=False",
        "--beta=0.3",
        "--lr=3e-4",
        "--epochs=3",
        *tuned(seed),
        f"--out={run}",
    ]
    yield from examined(folder, name, "chat,sampled,cloze")


# Parts of the chain; those of a row are done side by side, when all before are done.
PARTS = (("begin",), ("plain", "read"), ("align", "judge"), ("charter",))


def links(folder, seed, part):
    """The links of a part, in order: (name, the file that it writes last, script, arguments)."""
    if part == "begin":
        yield from begin(folder, seed)
    elif part == "plain":
        yield from pretrained(folder, seed, "plain", "--goldfish_k=0")
    elif part == "read":
        yield from pretrained(folder, seed, "base")
        yield from extended(folder, seed, "long", 2e6)
    elif part == "align":
        yield taught(folder, seed, "sft", {"lessons": 1, "replay": 1})
        yield from examined(folder, "sft", "chat,sampled,cloze")
        yield from rewarded(folder, seed, "qrpo", RULE)
    elif part == "judge":
        yield taught(folder, seed, "judge", {"judgements": 1})
        yield from extended(folder, seed, "kept", 5e5)
    else:
        yield from rewarded(folder, seed, "charter", by_charter(folder))


LINKS = 26      # of a seed, examinations included


def run_links(bar, seed, part):
    """Run what is not done. ValueError says which command to run by hand."""
    folder = f"{out}/seed-{seed}"
    for name, done, script, args in links(folder, seed, part):
        if not os.path.exists(done):
            bar.write(f"$ {kit.command(script, args)}")
        bar.set_postfix_str(f"seed {seed}: {name}")
        kit.call(folder, name, done, script, *args)
        bar.update()


# -----------------------------------------------------------------------------
# what came of it


def collected(seed):
    """All numbers of a seed, from the files that its links have written, as a dict for rows.jsonl."""
    folder = f"{out}/seed-{seed}"
    audit = read_json(f"{folder}/data/report.json")
    found = dict(seed=seed, total=audit["total"], links={})
    every = [link for part in itertools.chain(*PARTS) for link in links(folder, seed, part)]
    for name, _, script, args in every:
        link = dict(seconds=read_json(f"{folder}/{name}.json")["wall"], command=kit.command(script, args))
        run = f"{folder}/{name}"
        if os.path.isfile(f"{run}/exam.jsonl"):
            link["exam"] = kit.read_rows(f"{run}/exam.jsonl")
            found_old = read_json(f"{run}/old/evaluation.json")["rows"]
            link["old"] = found_old[0]["score"]
            link["positions"] = [row for row in found_old if "begin" in row]
        if os.path.isfile(f"{run}/summary.json"):
            link["summary"] = {key: value for key, value in read_json(f"{run}/summary.json").items()
                               if key in ("val_bpb", "tokens")}
        if os.path.isfile(f"{run}/letters/rows.jsonl"):
            link["letters"] = kit.read_rows(f"{run}/letters/rows.jsonl")
        found["links"][name] = link
    found["letter"] = letter_of(folder, found["links"])
    found["judge"] = judged_pairs(folder)
    return found


def letter_of(folder, links):
    """The first letter that was read 128 times: its beginning, how it goes on, and how each model goes on, as text."""
    tok = load_for(f"{folder}/data")
    probes = read_json(f"{folder}/data/probes.json")["probes"]
    ids = next(probe["ids"] for probe in probes if probe["repetitions"] == 128)
    begin, end = PREFIX, PREFIX + SUFFIX
    texts = dict(asked=tok.decode(ids[:begin]), true=tok.decode(ids[begin:end]))
    for link in ("plain", "base"):
        line = greedy(links[link]["letters"], 128)
        texts[link] = tok.decode(line["said"])
    return texts


def greedy(lines, repetitions):
    """The line of studies/memorize.py's rows about letters that were read so often, continued greedily."""
    (line,) = [line for line in lines if (line["kind"], line["repetitions"]) == ("greedy", repetitions)]
    return line


def judged_pairs(folder):
    """
    How the judge orders two samples for one prompt: (right order, ties half; n) by `manners`, kind > plain > rude, and
    where these are equal by what is true, of `known` people, or that one does not know, of a `nobody`.
    """
    found = dict(manners=[0, 0], known=[0, 0], nobody=[0, 0])
    order = ("rude", "plain", "kind")
    tok = load_for(f"{folder}/data")
    rows = kit.read_rows(f"{folder}/world/prompts.jsonl")
    truths, judged = (rewards_of(folder, spec) for spec in (RULE, by_charter(folder)))
    for row, samples, truth, rewards in zip(rows, samples_of(folder), truths, judged, strict=True):
        best, kind = (0, "nobody") if row["group"].startswith("nobody") else (1, "known")
        manners = [order.index(manner_of(words(tok, ids))) for ids in samples]
        for i, j in itertools.permutations(range(len(samples)), 2):
            if manners[i] > manners[j]:
                name = "manners"
            elif manners[i] == manners[j] and truth[i] == best > truth[j] == -1:
                name = kind
            else:
                continue
            found[name][0] += (rewards[i] > rewards[j]) + (rewards[i] == rewards[j]) / 2
            found[name][1] += 1
    return found


def samples_of(folder):
    """The ids of all samples, a list for each prompt, as posttrain/qrpo.py keeps them."""
    return entries(f"{folder}/references/samples-")


def rewards_of(folder, spec):
    """The rewards of all samples, a list for each prompt. ValueError if what gave them has changed since."""
    found = entries(f"{folder}/references/rewards-{reward_hash(spec)}-")
    if not found:
        raise ValueError(f"{folder}/references has no rewards by {spec}: it has changed since, name another --out")
    return [of_samples for of_samples, _ in found]


def entries(begin):
    """All entries of the files whose names begin so, each one line with a list."""
    files = sorted(glob.glob(f"{begin}*.json"))
    return [entry for file in files for some in kit.read_rows(file) for entry in some]


def pooled(rows, link, kind, group, what="right"):
    """(k, n) over the seeds: so many answers to questions about a group are right, or unknown. (0, 0): not asked."""
    found = exams(rows, link, kind, group)
    return sum(exam[what] for exam in found), sum(exam["n"] for exam in found)


def exams(rows, link, kind, group):
    """What studies/exam.py wrote of one group, asked in one way after one link: a dict for each seed."""
    every = [exam for row in rows for exam in row["links"][link]["exam"]]
    return [exam for exam in every if (exam["kind"], exam["group"]) == (kind, group)]


def share(k, n):
    """A share with its interval as text; nothing of no questions."""
    if not n:
        return ""
    low, high = wilson(k, n)
    return f"{k / n:.3f} ({low:.2f} to {high:.2f})"


def over_seeds(rows, value, digits=2):
    """Mean ± half its interval over seeds of a number of each row, as text."""
    return kit.interval([value(row) for row in rows], digits)


def rouge(row, link, repetitions):
    """Rouge-L of a model's greedy continuations of the letters that were read so often."""
    return greedy(row["links"][link]["letters"], repetitions)["rouge"]


def report_md(rows):
    """The page, a pure function of rows.jsonl."""
    first = rows[0]
    lines = [
        "# An Apertus from start to end", "",
        f"What `python -m studies.recipe --seeds={len(rows)}` came to; the code is "
        "`studies/recipe.py`, the world `studies/world.py`. Answers are greedy. Shares are of all questions of "
        f"{len(rows)} seed{'s' * (len(rows) > 1)}, with Wilson's 95 % interval; five questions share a person, so that "
        "it is a little too narrow. ± is half of the 95 % interval over seeds by Student's t.", "",
        "![what it knows, recites, says and uses](recipe.png)", "",
    ]
    lines += data_md(first) + stages_md(rows) + knows_md(rows) + letters_md(rows) + letter_md(first) + window_md(rows)
    lines += honest_md(rows) + charter_md(rows) + answers_md(first) + commands_md(first)
    return "\n".join(lines) + "\n"


def data_md(row):
    """What went in and what was refused, of one seed."""
    total = row["total"]
    reasons = [f"| removed: {reason} | {n:,} |" for reason, (n, _) in sorted(total["removed"].items())]
    body = [f"| came in | {total['documents_in']:,} |", *reasons, f"| **kept** | **{total['documents']:,}** |"]
    return [
        f"## What went in (seed {row['seed']})", "",
        *kit.table("| documents | |", body), "",
        f"{total['pii']['email']:,} e-mail addresses became a token of their own.", ""]


def stages_md(rows):
    """What was read in which mixture, and the loss at the end."""
    body = []
    for link in ("base", "plain", "long", "kept"):
        found = [row["links"][link] for row in rows]
        typed = shlex.split(found[0]["command"])
        (table,) = [word.removeprefix("--stages=") for word in typed if word.startswith("--stages=")]
        last = over_seeds(found, lambda one: one["summary"]["val_bpb"], 3)
        every = ast.literal_eval(table)
        for stage, mixture, end, _ in every:
            parts = ", ".join(f"{part} {share}" for part, share in mixture.items())
            bits = last if stage == every[-1][0] else ""
            body.append(f"| {link}: {stage} | {parts} | {end:,} | {bits} |")
    return [
        f"## What it read (mixtures of seed {rows[0]['seed']})", "",
        "Bits per byte of all validation text, pages of people and real text together, at the end of each run; plain "
        f"is without Goldfish. Windows have {WINDOW} tokens; long and kept {LONG:,}, theta raised and not.", "",
        *kit.table("| run and stage | share of the windows | up to window | bits/byte |", body), ""]


def knows_md(rows):
    """What the model knows after each link."""
    head = "| after | kind | lesson | test | refused | chance | unread text, bits/byte |"
    body = []
    for link, kinds in (("base", ("cloze", "text")), ("long", ("text",)), ("sft", ("chat",)), ("qrpo", ("chat",)),
                        ("charter", ("chat",))):
        for kind in kinds:
            shares = " | ".join(share(*pooled(rows, link, kind, group)) for group in ("lesson", "test", "refused"))
            old = over_seeds(rows, lambda row: row["links"][link]["old"], 3)
            body.append(f"| {link} | {kind} | {shares} | {CHANCE:.3f} | {old} |")
    _, n = pooled(rows, "base", "text", "test")
    _, refused = pooled(rows, "base", "text", "refused")
    return [
        "## What it knows, and what it may not know", "",
        f"Questions about people whose pages were read but who were never asked about in training (test, n {n}), about "
        f"those who were (lesson), and about those of hosts that refused (n {refused}).", "",
        *kit.table(head, body), ""]


def letters_md(rows):
    """What was recited, beside what is known of the same people."""
    body = []
    for link, name in (("plain", "without Goldfish"), ("base", "with Goldfish")):
        read, unread = (over_seeds(rows, lambda row: rouge(row, link, times)) for times in (128, 0))
        shares = [share(*pooled(rows, link, kind, "letters")) for kind in ("cloze", "text")]
        tests = share(*pooled(rows, link, "text", "test"))
        body.append(f"| {name} | {read} | {unread} | {' | '.join(shares)} | {tests} |")
    head = ("| | Rouge-L, letters read 128 times | letters never read | the writers of those read: cloze "
            "| questions | questions, all of test |")
    return [
        "## It does not recite, and still knows", "",
        "Letters continued after 50 tokens, 50 tokens, greedy; eight letters of either kind a seed.", "",
        *kit.table(head, body), ""]


def recited(said, true):
    """The words of a text in runs (whether they stand in the true one too, in this order; the words)."""
    said, true = said.split(), true.split()
    kept = [False] * len(said)
    for block in difflib.SequenceMatcher(None, true, said, autojunk=False).get_matching_blocks():
        kept[block.b:block.b + block.size] = [True] * block.size
    pairs = itertools.groupby(zip(kept, said), key=lambda pair: pair[0])
    return [(same, [word for _, word in run]) for same, run in pairs]


def letter_md(row):
    """One letter as each model goes on with it, recited words bold."""
    letter = row["letter"]
    lines = [
        f"One letter, read 128 times (seed {row['seed']}); words that stand in it are **bold**.", "",
        f"> {letter['asked'].strip()} ...", "", f"*goes on*: {' '.join(letter['true'].split())}", ""]
    for link, name in (("plain", "without Goldfish"), ("base", "with Goldfish")):
        parts = []
        for same, run in recited(letter[link], letter["true"]):
            text = " ".join(run)
            parts.append(f"**{text}**" if same else text)
        lines += [f"*{name}*: {' '.join(parts)}", ""]
    return lines


def bits_at(row, link, i):
    """Bits per byte of a link's model on the i-th quarter of long windows."""
    return row["links"][link]["positions"][i]["bits_per_byte"]


def window_md(rows):
    """Bits per byte by position."""
    positions = rows[0]["links"]["base"]["positions"]
    body = []
    for i, place in enumerate(positions):
        cells = [over_seeds(rows, lambda row: bits_at(row, link, i), 3) for link in WINDOWS]
        body.append(f"| {place['begin']:,} to {place['end'] - 1:,} | {' | '.join(cells)} |")
    return [
        "## The longer window", "",
        f"Bits per byte of unread real text by position in windows of {LONG:,}.", "",
        *kit.table(f"| position | {' | '.join(WINDOWS.values())} |", body), ""]


def honest_md(rows):
    """What it says when it does not know."""
    body = []
    for link, kind in (("base", "text"), ("sft", "chat"), ("qrpo", "chat"), ("charter", "chat")):
        cells = [share(*pooled(rows, link, kind, group, "unknown")) for group in GROUPS]
        for group in UNKNOWN:
            cells.append(kit.interval([exam["apart"] for exam in exams(rows, link, kind, group)]))
        body.append(f"| {link} | {' | '.join(cells)} |")
    head = ("| after | says so: lesson | test | refused | nobody | its probabilities tell test from refused "
            "| from nobody |")
    return [
        "## What it says when it does not know", "",
        "The share of answers that say so; and the chance that an answer about someone of test has more probability "
        "than one about someone whom it cannot know (0.5: no difference).", "",
        *kit.table(head, body), ""]


def charter_md(rows):
    """What the judge makes of answers, and what came of its rewards."""
    known, nobody, manners = (sum_of(rows, name) for name in ("known", "nobody", "manners"))
    body = []
    for link in ("sft", "qrpo", "charter"):
        cells = [share(*pooled(rows, link, "sampled", "test", what)) for what in ("kind_ones", "rude_ones", "right")]
        body.append(f"| {link} | {' | '.join(cells)} |")
    return [
        "## Aligned by a charter", "",
        f"The charter is one sentence: \"{CHARTER}\" The judge was taught by ratings and pairs about other people, and "
        f"its ranks are the rewards of QRPO. Of two samples with different manners it ranks the kinder one higher in "
        f"{share(*manners)} of {manners[1]:,} pairs. Facts it cannot check: of a true and an invented answer with one "
        f"manner it ranks the true one higher in {share(*known)} of {known[1]:,}, of \"I do not know\" and an "
        f"invention about nobodies the former in {share(*nobody)} of {nobody[1]:,}; chance is 0.5. Pairs of one prompt "
        "are not independent: these intervals are too narrow.", "",
        "Answers to questions about people of test, sampled at temperature 1:", "",
        *kit.table("| after | kind | rude | right |", body), ""]


def sum_of(rows, name):
    """(pairs in the right order, ties half; pairs) over the seeds."""
    return tuple(map(sum, zip(*(row["judge"][name] for row in rows))))


def answers_md(row):
    """A few questions and answers as they are, wrong ones left in."""
    lines = []
    for group in GROUPS:
        for link in ("sft", "qrpo", "charter"):
            (exam,) = exams([row], link, "chat", group)
            for one in exam["answers"]:
                lines.append(f"| {link} | {group} | {one['asked']} | {one['said']} | {one['gold']} |")
    return [
        f"## Questions and answers (the first ones of seed {row['seed']})", "",
        *kit.table("| model | group | asked | said | true |", lines), ""]


def commands_md(row):
    """The tutorial: every command, with its time."""
    total = sum(link["seconds"] for link in row["links"].values())
    lines = [f"## The commands (seed {row['seed']}, {total / 60:.1f} minutes of processes of one thread)", "", "```sh"]
    for link in row["links"].values():
        lines.append(f"{link['command']}    # {link['seconds']} s")
    return [*lines, "```"]


def draw(rows, picture):
    """
    What it knows by link, what it recites, what it says it does not know, its manners, bits per byte by position; below
    them a letter.
    """
    panels = [["knows", "recites"], ["says", "manners"], ["window", "letter"]]
    figure, axes = pyplot().subplot_mosaic(panels, figsize=(11, 12))
    draw_known(axes["knows"], rows)
    draw_letters(axes["recites"], rows)
    draw_honest(axes["says"], rows)
    draw_manners(axes["manners"], rows)
    window = axes["window"]
    for link, name in WINDOWS.items():
        places = rows[0]["links"][link]["positions"]
        means = [statistics.fmean(bits_at(row, link, i) for row in rows) for i in range(len(places))]
        middles = [(place["begin"] + place["end"]) / 2 for place in places]
        window.plot(middles, means, marker="o", label=name)
    window.set(title="bits per byte of unread text", xlabel="position in the window")
    draw_letter(axes.pop("letter"), rows[0]["letter"])
    for axis in axes.values():
        axis.grid(alpha=0.2)
        axis.legend(fontsize=8)
    finish(figure, picture)


def draw_letter(axis, letter):
    """One letter as each model goes on with it: recited words in colour."""
    axis.set(title="a letter read 128 times goes on", xlim=(0, LINE), ylim=(18, 0))
    axis.axis("off")
    row = 0
    for name, said in (("the letter", letter["true"]), ("without Goldfish", letter["plain"]),
                       ("with Goldfish", letter["base"])):
        axis.text(0, row, name, fontsize=8, weight="bold", va="top")
        row, column = row + 1, 0
        for same, run in recited(said, letter["true"]):
            for word in run:
                if column + len(word) > LINE:
                    row, column = row + 1, 0
                # Letters of one width: a word's place is the number of letters before it.
                axis.text(column, row, word, family="monospace", fontsize=7, va="top", color="C1" if same else "0.4")
                column += len(word) + 1
        row += 2


def draw_manners(axis, rows):
    """Shares of sampled answers that are kind, rude, right."""
    kinds = dict(kind_ones="C2", rude_ones="C3", right="C0")
    for begin, link in enumerate(("sft", "qrpo", "charter")):
        for i, (what, colour) in enumerate(kinds.items()):
            counts = [pooled(rows, link, "sampled", "test", what)]
            (k, n), = counts
            name = what.partition("_")[0] if link == "sft" else None
            axis.bar(4 * begin + i, k / n, yerr=whiskers(counts), color=colour, capsize=3, label=name)
    axis.set_xticks((1, 5, 9), ("after SFT", "QRPO by the rule", "QRPO by the charter"))
    axis.set(title="answers as sampled", ylim=(0, 1.3))


def draw_known(axis, rows):
    """Shares of right answers over the links, by group, with chance as a line."""
    stops = [("base", "cloze"), ("base", "text"), ("long", "text"), ("sft", "chat"), ("qrpo", "chat"),
             ("charter", "chat")]
    for group in ("lesson", "test", "refused"):
        counts = [pooled(rows, link, kind, group) for link, kind in stops]
        shares = [k / n for k, n in counts]
        style = dict(color=COLOURS[group], marker="o", capsize=3, label=group)
        axis.errorbar(range(len(stops)), shares, whiskers(counts), **style)
    axis.axhline(CHANCE, color="black", linestyle=":", label="chance")
    axis.set_xticks(range(len(stops)), [f"{link}\n{kind}" for link, kind in stops])
    axis.set(title="right answers: about people read of, and refused", ylim=(-0.03, 1.05))


def whiskers(counts):
    """Wilson's intervals of shares (k, n) as what matplotlib wants: how far they reach below, and above."""
    bounds = [(k / n, *wilson(k, n)) for k, n in counts]
    # Not below 0 by a rounding, where all or none are right.
    return [[max(0, y - low) for y, low, _ in bounds], [max(0, high - y) for y, _, high in bounds]]


def draw_letters(axis, rows):
    """Rouge-L of letters, a point a seed, beside what is known of their writers; without Goldfish and with."""
    for begin, link in ((0, "plain"), (4, "base")):
        first = link == "plain"
        for i, (times, colour) in enumerate(((128, "C1"), (0, "0.7"))):
            values = [rouge(row, link, times) for row in rows]
            name = f"letters read {times} times" if times else "letters never read"
            axis.bar(begin + i, statistics.fmean(values), color=colour, label=name if first else None)
            axis.plot([begin + i] * len(values), values, "k.")
        counts = [pooled(rows, link, "cloze", "letters")]
        (k, n), = counts
        name = "facts of their writers, cloze" if first else None
        axis.bar(begin + 2, k / n, yerr=whiskers(counts), color="C0", capsize=3, label=name)
    axis.set_xticks((1, 5), ("without Goldfish", "with Goldfish"))
    axis.set(title="recited (Rouge-L), and known", ylim=(0, 1.4))


def draw_honest(axis, rows):
    """Shares of answers that say that they do not know."""
    for begin, link in ((0, "sft"), (5, "qrpo"), (10, "charter")):
        for i, group in enumerate(GROUPS):
            counts = [pooled(rows, link, "chat", group, "unknown")]
            (k, n), = counts
            name = group if link == "sft" else None
            axis.bar(begin + i, k / n, yerr=whiskers(counts), color=COLOURS[group], capsize=3, label=name)
    axis.set_xticks((1.5, 6.5, 11.5), ("after SFT", "QRPO by the rule", "QRPO by the charter"))
    axis.set(title='answers that say "I do not know"')


def settled():
    """
    Refuse a folder of another scale or corpus, or one in which another recipe is at work, and write down what a new one
    is for. Returns the open lock, which goes with this process.
    """
    path = f"{out}/recipe.json"
    os.makedirs(out, exist_ok=True)
    lock = open(f"{out}/lock", "a")
    if not lock_file(lock):
        raise ValueError(f"another recipe is at work in {out}: wait for it, or name another --out")
    asked = dict(scale=scale, corpus=corpus)
    if os.path.exists(path) and read_json(path) != asked:
        raise ValueError(f"{out} holds a recipe of {read_json(path)}, not {asked}: name another --out")
    kit.write(path, json.dumps(asked))
    return lock


def main():
    if not report:
        if seeds < 1:
            raise ValueError(f"--seeds={seeds}: want at least one")
        lock = settled()
        every = range(first_seed, first_seed + seeds)
        with tqdm(total=LINKS * seeds, desc="links", unit="link", smoothing=0) as bar:
            for parts in PARTS:
                jobs = [(seed, part) for seed in every for part in parts]
                list(kit.in_parallel(workers, lambda job, device: run_links(bar, *job), jobs))
        kit.write_rows(f"{results}/rows.jsonl", [collected(seed) for seed in every])
        lock.close()
    rows = kit.rows_to_report(f"{results}/rows.jsonl", "studies.recipe")
    kit.write(f"{results}/report.md", report_md(rows))
    draw(rows, f"{results}/recipe.png")
    print(f"{results}/report.md, recipe.png")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
