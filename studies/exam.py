"""
The examination of a model on the invented world (studies/world.py): what it knows, and what it says when it does not.

    cloze     "NAME was born in"                    as a page goes on
    text      "Question: Where was NAME born?       as the cooldown asks about others
               Answer:"
    chat      the same question in Apertus' format  for models that can talk
    sampled   the same, at temperature 1            what the model says as often as it says it

Other answers are greedy. Right is one that names the one value and no other of its kind; unknown one that says so. A
model may also know better than it says: `apart` is the chance that it gives its answer about someone of `test` more
probability than its answer about someone whom it cannot know (0.5: it cannot tell them apart). What is behind the
first sentence has a manner: kind, rude, or nothing.

$ python -m studies.exam --init_from=out/recipe/seed-2/base --world=out/recipe/seed-2/world --kinds=cloze,text
$ python -m studies.exam --init_from=out/recipe/seed-2/sft --world=out/recipe/seed-2/world --kinds=chat --show=5
"""

import sys

if __name__ == "__main__" and not __package__:
    print("exam.py: start it from the project's root, python -m studies.exam", file=sys.stderr)
    sys.exit(2)

import numpy as np
import torch
from tqdm import tqdm

import convert
from chat import prompt_ids
from configurator import run
from engine.intervals import wilson
from generate import generate
from posttrain.references import sequence_logp
from studies import kit
from studies import world as worlds
from tokenizer import read_json

init_from = "out/recipe/seed-2/sft"     # run folder, Hugging Face folder or hub name
world = "out/recipe/seed-2/world"       # folder that studies/world.py wrote
kinds = "chat"                          # of cloze, text, chat, sampled
language = "en"                         # en | de
groups = "lesson,test,refused,nobody-test"
probes = ""                             # probes.json of the data: also the people whose letters were read, as "letters"
show = 2                                # answers to print of each group
batch = 128                             # questions at once
out = ""                                # file of the results; "" = exam.jsonl in the run folder

TOKENS = 40                             # of an answer, at most
UNKNOWN = ("refused", "nobody-test")    # groups that nothing was read of


def prompt_of(tok, row, kind):
    """The ids of a question, asked in one of these ways."""
    if kind in ("chat", "sampled"):
        return prompt_ids(tok, row)
    question = row["messages"][-1]["content"]
    if kind == "text":
        asks, answers = (words[row["language"]] for words in (worlds.QUESTION, worlds.ANSWER))
        return [tok.bos, *tok.encode(f"{asks}: {question}\n{answers}:")]
    begin, _, _ = worlds.SAY[row["language"]][row["attribute"]][0].partition("{v}")
    return [tok.bos, *tok.encode(begin.format(n=row["person"]).rstrip())]


@torch.no_grad()
def answers(model, tok, rows, kind):
    """
    What the model says to each question: a list of (text up to the first full stop, log of its probability, manner of
    the whole).
    """
    stop = {tok.eos, tok.id_of("</s>"), tok.id_of("<|assistant_end|>")}
    how = dict(temperature=0)
    if kind == "sampled":
        device = model.lm_head.weight.device
        how = dict(temperature=1, generator=torch.Generator(device).manual_seed(0))
    found = []
    for at in tqdm(range(0, len(rows), batch), f"{kind}, {len(rows)} questions", leave=False, delay=2):
        prompts = [prompt_of(tok, row, kind) for row in rows[at:at + batch]]
        said = [ids[len(prompt):] for prompt, ids in zip(prompts, generate(model, prompts, TOKENS, stop, **how))]
        pairs = [(prompt, first_sentence(tok, ids, stop)) for prompt, ids in zip(prompts, said)]
        texts = [tok.decode([i for i in ids if i not in stop]).strip() for _, ids in pairs]
        manners = [worlds.manner_of(tok.decode(ids)) for ids in said]
        found += zip(texts, sequence_logp(model, pairs).tolist(), manners)
    return found


def first_sentence(tok, ids, stop):
    """The ids up to a full stop, a line break, or the end."""
    for n, i in enumerate(ids, 1):
        if i in stop or {".", "\n"} & set(tok.decode([i])):
            return ids[:n]
    return ids


def marks(rows, said):
    """
    How many answers are right, unknown, kind, rude: a dict with n, and the intervals of the first two by Wilson.
    """
    verdicts = [worlds.judge(text, row) for (text, *_), row in zip(said, rows)]
    n = len(rows)
    found = dict(n=n)
    for verdict in ("right", "unknown"):
        k = verdicts.count(verdict)
        found[verdict] = k
        found[f"{verdict}_interval"] = [round(x, 4) for x in wilson(k, n)]
    manners = [manner for *_, manner in said]
    return found | dict(kind_ones=manners.count("kind"), rude_ones=manners.count("rude"))


def apart(ours, theirs):
    """The chance that a number of `ours` is above one of `theirs` (ties count half): the area under the ROC curve."""
    ours, theirs = np.array(ours)[:, None], np.array(theirs)[None]
    return float((ours > theirs).mean() + (ours == theirs).mean() / 2)


def readers(place, path):
    """The names of the people whose letters stand in the training text, by probes.json."""
    read = {probe["text"] for probe in read_json(path)["probes"] if probe["repetitions"]}
    return {letter["person"] for letter in place.letters if letter["text"] in read}


def examine(model, tok, place, kind):
    """Asks all groups in one way. Yields a dict for each: kind, language, group, marks, apart, a few answers."""
    names = groups.split(",")
    sure = {}
    for group in [*names, *["letters"] * bool(probes)]:
        if kind == "cloze" and group.startswith("nobody"):
            continue        # A page about nobody cannot go on.
        rows = list(place.questions("test" if group == "letters" else group, language=language))
        if group == "letters":
            named = readers(place, probes)
            rows = [row for row in rows if row["person"] in named]
        said = answers(model, tok, rows, kind)
        sure[group] = [logp for _, logp, _ in said]
        found = dict(kind=kind, language=language, group=group, **marks(rows, said))
        if group in UNKNOWN and "test" in sure:
            found["apart"] = round(apart(sure["test"], sure[group]), 4)
        asked = [row["messages"][-1]["content"] for row in rows]
        found["answers"] = [
            dict(asked=question, said=text, gold=row["gold"])
            for question, (text, *_), row in zip(asked, said, rows)][:show]
        yield found


def check(place):
    """ValueError for a way of asking, a language or a group of people that the world does not have."""
    for name, asked, known in (
        ("kinds", kinds, {"cloze", "text", "chat", "sampled"}),
        ("language", language, worlds.LANGUAGES),
        ("groups", groups, {person["group"] for person in place.people}),
    ):
        for word in asked.split(","):
            if word not in known:
                raise ValueError(f"--{name}={asked}: there is no {word!r}, but {', '.join(sorted(known))}")


def main():
    place = worlds.load(world)
    check(place)
    model, tok = convert.load_any(init_from, dtype=torch.float32)
    model.eval()
    results = []
    for kind in kinds.split(","):
        for found in examine(model, tok, place, kind):
            results.append(found)
            n = found["n"]
            low, high = found["right_interval"]
            more = f", apart {found['apart']:.2f}" if "apart" in found else ""
            print(f"{kind} {found['group']}: right {found['right'] / n:.3f} ({low:.3f} to {high:.3f}, n {n}), "
                  f"does not know {found['unknown'] / n:.3f}{more}")
            for one in found["answers"]:
                print(f"    {one['asked']} -> {one['said']}   [{one['gold']}]")
    kit.write_rows(out or f"{init_from}/exam.jsonl", results)


if __name__ == "__main__":
    run(main, globals())
