"""
Evaluate a model: bits per byte of text by language or source, multiple choice, exact answers, lm-eval's benchmarks.

    bits per byte   = - sum over documents of log2 p(document and its end)  /  their bytes in UTF-8
    choice          = argmax over choices of log p(choice | examples, question)
    choice per byte = argmax over choices of log p(choice | examples, question) / bytes of the choice

Bits per byte compare models with different tokenizers, which nats per token cannot. Every score comes with its n, its
95 % interval and its chance level. Intervals are Wilson's for shares, and for bits per byte Student's t of the ratio
estimator, with documents as the sample; for lm-eval's scores they are t times its own standard error. --against=MODEL
adds the difference to another model, paired by document: its interval is much narrower than that of either score. A
text longer than the window is scored in windows that overlap by half, so that every token after the first window has at
least half a window of context. The Apertus report evaluates base models by log-likelihood too (arXiv 2509.14233,
sec. 5).

$ python evaluate.py --init_from=out/laptop                                # the run's own validation documents
$ python evaluate.py udhr.jsonl book.txt --init_from=out/laptop --by=lang  # any texts, by language
$ python evaluate.py --init_from=out/sft --against=out/laptop data/stdlib  # how much fine-tuning has forgotten
$ python evaluate.py books/*.jsonl --by_position=1024 --init_from=out/8b-16k  # does it use distant context?
$ python evaluate.py quiz.jsonl sums.jsonl --shots=3                       # tasks: rows of question, choices, answer
$ python evaluate.py --harness=arc_easy,hellaswag --init_from=swiss-ai/Apertus-8B-2509    # pip install lm-eval[hf]
"""

import itertools
import math
import os
import tempfile

import convert  # first: engine.hardware comes before torch

# isort: split
import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from chat import stop_ids
from configurator import run
from corpus import readers
from data import TokenDataset
from engine.files import make_folder, read_json, write_json
from engine.intervals import student, t_quantile, wilson
from engine.runs import settings_of
from generate import generate
from tokenizer import load_for

paths = []                # texts (.txt; .jsonl with "text"), tasks (.jsonl with "question", "answer"), data folders;
                          # nothing = the validation documents of the run's own data
init_from = "out/laptop"  # run folder, Hugging Face folder or hub name
against = ""              # another model: differences to it, paired by document
by = "lang"               # groups of texts: a field of their rows (lang, source, ...); texts without it: by file
by_position = 0           # also bits per byte by position in the window, in steps of this many tokens; 0 = off
lookup = 0                # keys to look up at each distance, in a list of keys and colours (studies/length.py); 0 = off
window = 0                # window of by_position and lookup, also beyond the training length; 0 = the model's window
shots = 0                 # solved examples before each question: the first rows of the task, which are then not asked
limit = 0                 # maximum documents or questions of each file; 0 = all
max_new_tokens = 64       # maximum tokens of an answer, which ends at a line break
harness = ""              # lm-evaluation-harness: names of tasks, separated by commas
harness_path = ""         # your own folder of task files, instead of the harness' collection, which is slow to index
batch_tokens = 8192       # tokens per batch
device = "auto"           # cuda | mps | cpu
dtype = "auto"            # float32 | bfloat16; auto: the dtype of the weights, but bf16 on CUDA
base = ""                 # int8 | nf4: the matrices of the blocks in 8 or 4 bits (posttrain/quantised.py)
out = ""                  # folder to write evaluation.json to; "" = the run folder, or results/evaluate

# Letters: B windows in a batch, T tokens in a window.


# -----------------------------------------------------------------------------
# log-likelihoods


@torch.no_grad()
def token_nats(model, windows):
    """
    -log p in nats of the tokens of windows: an array (len(ids) - first,) of float64 for each window.

    windows: list of (ids, first), of which ids[first:] are scored, first > 0.
    """
    size = max(1, batch_tokens // max(len(ids) for ids, _ in windows))
    nats = []
    for i in tqdm(range(0, len(windows), size), "scoring", disable=None):
        idx, targets = padded_batch(windows[i:i + size], model.lm_head.weight.device)
        nll = model.nll(idx, targets)                      # (B, T)
        nats += [row[scored].cpu().double().numpy() for row, scored in zip(nll, targets >= 0)]
    return nats


def padded_batch(windows, device):
    """
    Windows (ids, first) as a batch: idx and targets, each (B, T), padded on the right.

    Targets before `first` and of padding are -1: they are not scored.
    """
    inputs = [torch.tensor(ids[:-1]) for ids, _ in windows]
    targets = [torch.tensor([-1] * (first - 1) + ids[first:]) for ids, first in windows]
    return pad_sequence(inputs, True).to(device), pad_sequence(targets, True, -1).to(device)


def windows_of(ids, T):
    """
    A document's ids, BOS first -> windows (ids, first) of at most T + 1 ids, for token_nats.

    Each window starts half a window before its first scored token.
    """
    scored = 1                                             # tokens that have a score; BOS needs none
    while scored < len(ids):
        begin = max(0, scored - T // 2 - 1)
        end = begin + T + 1
        yield ids[begin:end], scored - begin
        scored = end


def pair(tok, context, continuation, T):
    """
    Context and continuation (str) -> (ids, first) for token_nats, BOS first.

    The continuation begins with a space, where the text is cut in any case, so the ids are those of the two as one text
    (lm-evaluation-harness encodes both at once). A context that is too long loses its beginning. ValueError if the
    continuation has more than T tokens.
    """
    choice = tok.encode(continuation)
    if len(choice) > T:
        raise ValueError(f"the choice {continuation[:40]!r} adds {len(choice)} tokens to its question: want 1 to {T}, "
                         "the model's window")
    ids = [tok.bos, *tok.encode(context), *choice][-T - 1:]
    return ids, len(ids) - len(choice)


# -----------------------------------------------------------------------------
# bits per byte


def validation_documents(folder):
    """(source, text) of each validation document of a data folder."""
    validation = TokenDataset(folder, "val", 1)
    tok = load_for(folder)
    # The sources follow one another in the stream. A document is BOS, its text, and the end of text.
    sources = (source for source, splits in validation.meta["sources"].items()
               for _ in range(splits["val"]["documents"]))
    ids = validation.streams[0].read(0, np.empty(validation.n_tokens, np.int64))
    documents = np.split(ids, np.flatnonzero(ids == validation.meta["bos"]))[1:]
    return [(source, tok.decode(document[1:-1])) for source, document in zip(sources, documents)]


def text_ids(tok, text):
    """A document's ids between BOS and the end of a text: </s>, also for a chat model, whose tok.eos ends a turn."""
    return [tok.bos, *tok.encode(text), tok.special.get("</s>", tok.eos)]


def text_bytes(tok, ids):
    """The number of bytes of ids; the end of a text has none."""
    end = text_ids(tok, "")[-1]
    return len(tok.decode_bytes([i for i in ids if i != end]))


def ratio(bits, sizes):
    """
    Bits per byte of documents, and half of its 95 % interval; nan for one document.

    bits, sizes (n,): of each document. The documents are the sample, and the error of a ratio r of two sums over it is
    that of the mean of bits - r sizes, divided by the mean size.
    """
    r = bits.sum() / sizes.sum()
    return r, student(bits - r * sizes)[1] / sizes.mean()


def result(name, metric, n, score, interval, **columns):
    """A row of the results, with the 95 % interval of the score. columns: bytes, shots, chance."""
    low, high = interval
    row = dict(name=name, metric=metric, n=n, score=score, low=low, high=high, **columns)
    # JSON has no NaN: the interval of a single document is null.
    return {key: None if value != value else value for key, value in row.items()}


def bits_row(name, metric, bits, sizes):
    """A row of the results: bits per byte of documents or windows, and the total of their bytes."""
    r, half = ratio(bits, sizes)
    return result(name, metric, len(bits), r, (r - half, r + half), bytes=int(sizes.sum()))


def document_bits(model, tok, documents):
    """The bits of each of the documents, (group, text) each: an array (n,)."""
    document_of, windows = zip(*[
        (n, window)
        for n, (_, text) in enumerate(documents)
        for window in windows_of(text_ids(tok, text), model.config.block_size)])
    return np.bincount(document_of, [nll.sum() for nll in token_nats(model, windows)]) / math.log(2)


def text_scores(model, tok, documents, baseline=None):
    """
    Yield rows of the results: bits per byte of all documents, a list of (group, text), and of each group.

    baseline: document_bits() of --against; adds the differences to its bits per byte, paired by document.
    """
    measures = {"bits/byte": document_bits(model, tok, documents)}
    if against:
        measures[f"bits/byte above {against}"] = measures["bits/byte"] - baseline
    sizes = np.array([len(text.encode()) for _, text in documents])
    groups = np.array([group for group, _ in documents])
    for name in ["all", *np.unique(groups).tolist()]:
        members = (groups == name) | (name == "all")
        for metric, bits in measures.items():
            yield bits_row(name, metric, bits[members], sizes[members])


def position_scores(model, tok, documents, T, step):
    """
    Rows of the results: bits per byte at positions 0 to step - 1 of a window of T, at the next `step`, and so on.

    documents: list of (group, text), cut into windows one after the other. The rest, which fills no window, is left
    out, so that all positions have the same texts. The windows are the sample, so the interval is too narrow for a few
    long documents. ValueError if no document fills one.
    """
    texts = [text_ids(tok, text) for _, text in documents]
    windows = [(ids[i:i + T + 1], 1) for ids in texts for i in range(0, len(ids) - T, T)]
    if not windows:
        raise ValueError(f"no document has {T:,} tokens: name longer ones, or a shorter --window")
    bits = np.array(token_nats(model, windows)) / math.log(2)                       # (windows, T)
    rows = []
    for begin in range(0, T, step):
        end = min(begin + step, T)
        sizes = np.array([text_bytes(tok, ids[begin + 1:end + 1]) for ids, _ in windows])
        row = bits_row(f"{begin:,} to {end - 1:,}", "bits/byte by position", bits[:, begin:end].sum(1), sizes)
        rows.append(row | dict(begin=begin, end=end, bits_per_byte=row["score"]))      # as in the studies' rows
    return rows


# -----------------------------------------------------------------------------
# tasks


def accepted_answers(row):
    """
    The accepted answers of a question, as texts; an empty list if its answer is not valid.

    With choices, "answer" is the right choice, a letter from A, or an index from 0. Without, it is a text, a number, or
    a list of them.
    """
    answer, choices = map(row.get, ("answer", "choices"))
    if not choices:
        answers = answer if isinstance(answer, list) else [answer]
        return [str(one).strip() for one in answers if one is not None and str(one).strip()]
    if type(choices) is not list or "" in choices or None in choices:
        return []
    if answer in choices:
        return [answer]
    return [choice for i, choice in enumerate(choices) if str(answer).upper() in (str(i), chr(65 + i))]


def questions_of(rows, name):
    """
    (prompt, accepted answers, choices) of each question, after the first `shots` rows of the task as solved examples.

    ValueError if no question is left, or if one has no valid answer.
    """
    if shots >= len(rows):
        raise ValueError(f"--shots={shots} leaves no question of {len(rows)}: lower it")
    examples, questions = "", []
    for n, row in enumerate(rows, 1):
        accepted = accepted_answers(row)
        if not accepted:
            raise ValueError(f"{name}, question {n}: no valid answer: want an index from 0, a letter from A, or a "
                             "choice, of a list of texts; without choices a text, a number, or a list of them; got "
                             f"{row.get('answer')!r:.60} of {row.get('choices')!r:.60}")
        prompt = row["question"].rstrip() + "\nAnswer:"
        if n <= shots:
            examples += f"{prompt} {accepted[0]}\n\n"
        else:
            questions.append((examples + prompt, accepted, row.get("choices")))
    return questions


def share(name, metric, hits, chance):
    """A row of the results: the share of right answers. hits: True or False for each question."""
    right, n = sum(hits), len(hits)
    return result(name, metric, n, right / n, wilson(right, n), shots=shots, chance=chance)


def choice_scores(model, tok, rows, name):
    """
    Multiple choice by log-likelihood, as two rows of the results: by the sum over a choice, and by its mean per byte.

    A sum favours short choices. Chance is the mean over questions of 1 / their number of choices.
    """
    questions = questions_of(rows, name)
    windows = [
        pair(tok, prompt, f" {choice}", model.config.block_size)
        for prompt, _, choices in questions
        for choice in choices]
    nats = iter(token_nats(model, windows))
    hits = []
    for _, accepted, choices in questions:
        costs = np.array([next(nats).sum() for _ in choices])
        sizes = [len(f"{choice}".encode()) for choice in choices]
        hits.append([choices[each.argmin()] in accepted for each in (costs, costs / sizes)])
    by_sum, by_mean = zip(*hits)
    chance = np.mean([1 / len(choices) for _, _, choices in questions])
    return [share(name, "choice", by_sum, chance), share(name, "choice per byte", by_mean, chance)]


def answer_scores(model, tok, rows, name):
    """
    Exact match of the first line of a greedy answer with an accepted one, as one row of the results.

    A question that does not fit into the window together with its answer loses its beginning. The chance level is 0:
    free text cannot be guessed.
    """
    T = model.config.block_size
    room = T - max_new_tokens
    if not 1 < room < T:
        raise ValueError(f"max_new_tokens={max_new_tokens}: want 1 to {T - 2}, so that a question has room in a window "
                         f"of {T}")
    questions = questions_of(rows, name)
    size = max(1, batch_tokens // T)
    hits = []
    for i in tqdm(range(0, len(questions), size), "answering", disable=None):
        batch = questions[i:i + size]
        prompts = [[tok.bos, *tok.encode(prompt)][-room:] for prompt, _, _ in batch]
        texts = generate(model, prompts, max_new_tokens, temperature=0, stop=stop_ids(tok))
        for prompt, ids, (_, accepted, _) in zip(prompts, texts, batch):
            text = tok.words(ids[len(prompt):])
            hits.append(text.split("\n")[0].strip() in accepted)
    return [share(name, "exact match", hits, 0.0)]


# -----------------------------------------------------------------------------
# lm-evaluation-harness


def harness_scores(model, tok):
    """
    Yield rows of the results: each metric of the tasks of --harness, and of groups of tasks, whose n is the sum of
    theirs.

    The harness loads an export of the model by its own interface to transformers, so the results are those of
    `lm_eval --model hf`. ValueError for a task that does not exist, and for a model that cannot be exported.
    """
    import lm_eval  # here, since it is optional
    from lm_eval.tasks import TaskManager

    if base:
        raise ValueError(f"--harness reads an export of the model, which cannot have --base={base}: leave it out")
    manager = TaskManager(include_path=harness_path or None, include_defaults=not harness_path)
    tasks = harness.split(",")
    for task in set(tasks) - set(manager.all_tasks):
        raise ValueError(f"lm-evaluation-harness has no task {task!r}: `lm_eval --tasks list` shows them, "
                         "--harness_path=FOLDER takes your own")
    weight = model.lm_head.weight
    with tempfile.TemporaryDirectory() as folder:
        convert.save_hf(model, folder, tok, str(weight.dtype).removeprefix("torch."), merge=True)
        output = lm_eval.simple_evaluate(
            "hf",
            dict(pretrained=folder),
            tasks=tasks,
            num_fewshot=shots or None,
            batch_size=max(1, batch_tokens // model.config.block_size),
            device=str(weight.device),
            limit=limit or None,
            task_manager=manager)
    for task, values in output["results"].items():
        n = values["sample_len"]
        for metric, score in values.items():
            if isinstance(score, float) and "_stderr" not in metric:
                error = values.get(metric.replace(",", "_stderr,"))     # "N/A" for one question; 0 if all are right
                half = t_quantile(n - 1) * error if isinstance(error, float) and error else math.nan
                yield result(task, metric, n, score, (score - half, score + half), shots=output["n-shot"].get(task))


# -----------------------------------------------------------------------------
# results


COLUMNS = ["name", "metric", "shots", "n", "bytes", "score", "low", "high", "chance"]


def as_cell(value):
    if value is None:
        return ""
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def table_md(rows):
    """The rows of the results as a Markdown table; a cell without a value is empty."""
    table = [COLUMNS, ["---"] * len(COLUMNS)]
    for row in rows:
        table.append([as_cell(row.get(column)) for column in COLUMNS])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


# -----------------------------------------------------------------------------
# the script


def contents(path):
    """
    Documents (group, text), questions with choices, and questions without: of a file of text or of rows, or the
    validation documents of a data folder; at most `limit` of each.

    ValueError if there is no such file or folder, and for a row without text or question.
    """
    if os.path.isdir(path):
        return validation_documents(path)[:limit or None], [], []
    if not os.path.isfile(path):
        raise ValueError(f"no such file or folder: {path}. Name a text, .jsonl, or data that you prepare: "
                         f"python prepare.py FILES --out={path}")
    documents, with_choices, without_choices = [], [], []
    for n, row in enumerate(itertools.islice(readers.records(path), limit or None), 1):
        if not isinstance(row.get("text", row.get("question")), str):
            raise ValueError(f'{path}, row {n}: want a JSON object with "text", or with "question" and "answer", got '
                             f"{str(row)[:60]!r}")
        if row.get("text", "").strip():
            # Half a surrogate pair, which JSON can hold, would be an error when the bytes are counted.
            documents.append((str(row.get(by, os.path.basename(path))), readers.writable(row["text"])))
        elif "text" not in row:
            questions = with_choices if row.get("choices") else without_choices
            questions.append(row)
    return documents, with_choices, without_choices


def all_scores(model, tok, sources, parts, baseline):
    """
    All rows of the results. sources: paths; parts: contents() of each; baseline: as in text_scores(), of the texts of
    all of them.
    """
    T = window or model.config.block_size
    documents = sum((texts for texts, *_ in parts), [])
    rows = [*text_scores(model, tok, documents, baseline)] if documents else []
    for path, (_, with_choices, without_choices) in zip(sources, parts):
        name = os.path.basename(path)
        rows += choice_scores(model, tok, with_choices, name) if with_choices else []
        rows += answer_scores(model, tok, without_choices, name) if without_choices else []
    if by_position:
        rows += position_scores(model, tok, documents, T, by_position)
    if lookup:
        from studies.length import lookup_scores  # here, since few evaluations need it

        rows += [entry | dict(name=f"{entry['distance']:,} tokens back", metric="colours looked up", chance=0.1,
                              score=entry["right"] / entry["n"])
                 for entry in lookup_scores(model, tok, T, lookup)]
    if harness:
        rows += harness_scores(model, tok)
    return rows


def main():
    if min(shots, limit, window, by_position, lookup) < 0:
        raise ValueError("--shots, --limit, --window, --by_position and --lookup are 0 or more")
    is_run = os.path.isdir(f"{init_from}/ckpt")
    folder = out or (init_from if is_run else "results/evaluate")
    if os.path.exists(f"{folder}/evaluation.json") and "rows" not in read_json(f"{folder}/evaluation.json"):
        raise ValueError(f"{folder}/evaluation.json is not of evaluate.py: name another folder with --out")
    sources = paths
    if is_run and not paths and not harness:
        # A run of SFT on several files has a dict here: contents() says that there is no such file.
        sources = [str(settings_of(init_from)["data"])]
    # All files are read before a model, so that a mistake in the last file costs no hour of the first.
    parts = [contents(path) for path in sources]
    documents = sum((texts for texts, *_ in parts), [])
    baseline = None
    if against and documents:                              # one model after the other is in memory
        baseline = document_bits(*convert.load_for_inference(against, device, dtype), documents)
    model, tok = convert.load_for_inference(init_from, device, dtype, base)
    rows = all_scores(model, tok, sources, parts, baseline)
    if not rows:
        raise ValueError(f"nothing to evaluate {init_from} on: name texts, tasks or data, or --harness=TASKS")
    # Printed first, so that a folder that cannot be written costs no result.
    print(table_md(rows))
    make_folder(folder)
    write_json(f"{folder}/evaluation.json", dict(model=init_from, base=base, against=against, rows=rows))
    print(f"wrote {folder}/evaluation.json")


if __name__ == "__main__":
    run(main, globals())
