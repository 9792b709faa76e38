"""
Examine a model on the invented world (studies/world.py): its knowledge, and its answers when it does not know.

    cloze     "NAME was born in"                    the beginning of a sentence, as on pages
    text      "Question: Where was NAME born?       the form of the questions in the cooldown of pretraining
               Answer:"
    chat      the same question in Apertus' format  for models that can chat
    sampled   the same, at temperature 1            how often the model gives each answer

All answers but the sampled ones are greedy. A right answer names the one right value and no other value of its kind; an
unknown one says "I do not know". A model may know more than it says. `apart` measures that: the probability that the
model finds an answer about someone of `test` more likely than one about someone of another group (0.5: no difference;
the area under the ROC curve). Words after the first sentence make an answer kind or rude.

$ python -m studies.exam --init_from=out/recipe/seed-2/base --world=out/recipe/seed-2/world --kinds=cloze,text
$ python -m studies.exam --init_from=out/recipe/seed-2/sft --world=out/recipe/seed-2/world --kinds=chat --show=5
"""

import sys

if __name__ == "__main__" and not __package__:
    print("exam.py: start it from the project's root, python -m studies.exam", file=sys.stderr)
    sys.exit(2)

import itertools
from collections import Counter

import numpy as np
import torch
from tqdm import tqdm

from chat import prompt_ids, stop_ids
from configurator import run
from engine.files import read_json
from engine.intervals import wilson
from generate import generate
from scoring import sequence_logp
from studies import kit
from studies.world import SAY, manner_of, mark
from weights.read import load_any

init_from = "out/recipe/seed-2/sft"     # run folder, Hugging Face folder or hub name
world = "out/recipe/seed-2/world"       # folder that studies/world.py wrote
kinds = "chat"                          # one or more of cloze,text,chat,sampled
probes = ""                             # probes.json of the data: also ask about the writers of letters in it
show = 2                                # answers to keep and print of each group
out = ""                                # file of the results; "" = exam.jsonl in the run folder

TOKENS = 40                             # of an answer, at most
BATCH = 128                             # questions at a time


def prompt_of(tok, row, kind):
    """The ids of a question in the form `kind`. ValueError for an unknown kind."""
    if kind in ("chat", "sampled"):
        return prompt_ids(tok, row)
    if kind == "text":
        text = f"Question: {row['messages'][-1]['content']}\nAnswer:"
    elif kind == "cloze":
        # A sentence of a page up to its last word, the fact.
        text = SAY["en"][row["attribute"]][0].rpartition(" ")[0].format(name=row["person"])
    else:
        raise ValueError(f"--kinds={kinds}: no kind {kind!r}, want some of cloze,text,chat,sampled")
    return [tok.bos, *tok.encode(text)]


def first_sentence(tok, ids, stop):
    """The ids up to a full stop, a line break, or the end."""
    for n, token in enumerate(ids, 1):
        if token in stop or {".", "\n"} & set(tok.decode([token])):
            return ids[:n]
    return ids


@torch.no_grad()
def answers(model, tok, rows, kind):
    """
    Ask questions. Returns columns: questions, first sentences of answers, their log-probabilities, and the manners of
    the whole answers.
    """
    stop = stop_ids(tok)
    torch.manual_seed(0)
    examined = []
    for begin in tqdm(range(0, len(rows), BATCH)):
        part = rows[begin:begin + BATCH]
        prompts = [prompt_of(tok, row, kind) for row in part]
        texts = generate(model, prompts, TOKENS, stop, temperature=kind == "sampled")
        completions = [ids[len(prompt):] for prompt, ids in zip(prompts, texts)]
        firsts = [first_sentence(tok, ids, stop) for ids in completions]
        sentences = [tok.decode([token for token in ids if token not in stop]).strip() for ids in firsts]
        logp = sequence_logp(model, list(zip(prompts, firsts))).tolist()
        examined += zip(part, sentences, logp, map(manner_of, map(tok.decode, completions)))
    return list(zip(*examined))


def share(k, n):
    """A share with its 95 % interval by Wilson, as text."""
    low, high = wilson(k, n)
    return f"{k / n:.3f} ({low:.2f} to {high:.2f})"


def apart(ours, theirs):
    """The probability that a number of `ours` is above one of `theirs`; ties count half."""
    return round(np.sign(np.subtract.outer(ours, theirs)).mean() / 2 + 0.5, 4)


def read_questions():
    """The questions of the world, and those about the writers of letters that the model has read, again as a group."""
    questions = kit.read_rows(f"{world}/questions.jsonl")
    if not probes:
        return questions
    letters = str([probe["text"] for probe in read_json(probes)["probes"] if probe["repetitions"]])
    return questions + [row | dict(group="letters") for row in questions if f"A letter of {row['person']}." in letters]


def main():
    questions = read_questions()
    model, tok = load_any(init_from, dtype=torch.float32)
    results = []
    for kind in kinds.split(","):
        # Invented people have no pages, so there is no sentence to finish.
        by_group = {group: answers(model, tok, list(rows), kind)
                    for group, rows in itertools.groupby(questions, lambda row: row["group"])
                    if kind != "cloze" or "invented" not in group}
        for group, (rows, sentences, logp, manners) in by_group.items():
            marks = Counter([*map(mark, sentences, rows), *manners])
            results.append(dict(
                kind=kind,
                group=group,
                n=len(rows),
                right=marks["right"],
                unknown=marks["unknown"],
                kind_ones=marks["kind"],
                rude_ones=marks["rude"],
                apart=apart(by_group["test"][2], logp),
                answers=[dict(asked=row["messages"][-1]["content"], said=sentence, gold=row["gold"])
                         for row, sentence in zip(rows[:show], sentences)],
            ))
            print(f"{kind} {group}: right {share(marks['right'], len(rows))}, "
                  f"unknown {share(marks['unknown'], len(rows))}, n {len(rows)}, apart {results[-1]['apart']}")
            print(*map("    {asked} -> {said}   [{gold}]".format_map, results[-1]["answers"]), sep="\n")
    kit.write_rows(out or f"{init_from}/exam.jsonl", results)


if __name__ == "__main__":
    run(main, globals())
