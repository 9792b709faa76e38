"""
Evaluate a model: bits per byte of text by language or source, multiple choice, and the mean reward of its answers.

    bits per byte   = - sum over documents of log2 p(document and its end)  /  their bytes in UTF-8
    choice          = argmax over choices of log p(choice | question)
    choice per byte = argmax over choices of log p(choice | question) / bytes of the choice
    reward          = mean over prompts of the mean reward of four answers, sampled at temperature 1

Bits per byte compare models with different tokenizers, which nats per token cannot. Every score comes with its n and
its 95 % interval: Wilson's for shares, Student's t of the ratio estimator for bits per byte, with documents as the
sample. --against=MODEL adds the difference to another model, paired by document, question or prompt: its interval is
much narrower than that of either score. A text longer than the window is scored in windows that overlap by half, so
that every token after the first window has at least half a window of context. The Apertus report evaluates base models
by log-likelihood too (arXiv 2509.14233, sec. 5).

$ python evaluate.py --init_from=out/laptop                                # the run's own validation documents
$ python evaluate.py udhr.jsonl book.txt --init_from=out/laptop --by=lang  # any texts, by language
$ python evaluate.py --init_from=out/sft --against=out/laptop data/stdlib  # how much fine-tuning has forgotten
$ python evaluate.py quiz.jsonl --init_from=out/sft --against=out/laptop   # rows of "question", "choices", "answer"
$ python evaluate.py prompts.jsonl --rewards=reward.py --init_from=out/qrpo --against=out/sft  # what alignment gained
$ lm_eval --model hf --model_args pretrained=out/laptop --tasks hellaswag  # benchmarks: docs/studies.md
"""

import itertools
import math
import os

import convert  # first: engine.hardware comes before torch

# isort: split
import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from chat import describe_dropped
from configurator import run
from corpus import readers
from data import TokenDataset, folders_of
from engine.files import make_folder, read_json, sha256_of, write_json
from engine.hardware import pick_device
from engine.intervals import student, wilson
from engine.runs import settings_of
from tokenizer import load_for

paths = []                # texts, tasks (.jsonl) and data folders; nothing = the validation documents of the run's data
init_from = "out/laptop"  # run folder, Hugging Face folder or hub name
against = ""              # another model: differences to it, paired by document, question or prompt
rewards = ""              # FILE.py[:name] | charter:JUDGE[,FILE], as in posttrain/qrpo.py: paths are then its prompts
by = "lang"               # groups of texts: a field of their rows (lang, source, ...); texts without it: by file
limit = 0                 # maximum documents, questions or prompts of each file; 0 = all
device = "auto"           # cuda | mps | cpu
dtype = "auto"            # float32 | bfloat16; auto: the dtype of the weights, but bf16 on CUDA
base = ""                 # int8 | nf4: the matrices of the blocks in 8 or 4 bits (posttrain/quantised.py)
out = ""                  # folder to write evaluation.json to; "" = the run folder, or results/evaluate

BATCH_TOKENS = 8192
ANSWERS = 4               # of a prompt
MAX_NEW_TOKENS = 2048     # of an answer

# Letters: B windows in a batch, T tokens in a window.


# -----------------------------------------------------------------------------
# log-likelihoods


@torch.no_grad()
def token_nats(model, windows):
    """
    -log p in nats of the tokens of windows: an array (len(ids) - first,) of float64 for each window.

    windows: list of (ids, first), of which ids[first:] are scored, first > 0.
    """
    size = max(1, BATCH_TOKENS // max(len(ids) for ids, _ in windows))
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


def ratio(bits, sizes):
    """
    Bits per byte of documents, and half of its 95 % interval; nan for one document.

    bits, sizes (n,): of each document. The documents are the sample, and the error of a ratio r of two sums over it is
    that of the mean of bits - r sizes, divided by the mean size.
    """
    r = bits.sum() / sizes.sum()
    return r, student(bits - r * sizes)[1] / sizes.mean()


def result(name, metric, n, score, interval, **columns):
    """A row of the results, with the 95 % interval of the score. columns: bytes, chance."""
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


def text_scores(documents, bits, baseline=None):
    """
    Yield rows of the results: bits per byte of all documents, a list of (group, text), and of each group.

    bits: document_bits() of them. baseline: the same by the model of --against, for rows of the difference.
    """
    measures = {"bits/byte": bits}
    if baseline is not None:
        measures[f"bits/byte above {against}"] = bits - baseline
    sizes = np.array([len(text.encode()) for _, text in documents])
    groups = np.array([group for group, _ in documents])
    for name in ["all", *np.unique(groups).tolist()]:
        members = (groups == name) | (name == "all")
        for metric, values in measures.items():
            yield bits_row(name, metric, values[members], sizes[members])


# -----------------------------------------------------------------------------
# multiple choice


def right_choice(choices, answer):
    """The choice that an answer names: as it is, by index from 0 or by letter from A. None if it names none."""
    if answer in choices:
        return answer
    named = [choice for i, choice in enumerate(choices) if str(answer).upper() in (str(i), chr(65 + i))]
    return named[0] if named else None


def read_question(row, place):
    """(prompt, choices, right choice) of a row of a task. place: of the row, for the ValueError if it is not valid."""
    question, choices, answer = map(row.get, ("question", "choices", "answer"))
    if not isinstance(question, str) or not choices:
        raise ValueError(f'{place}: want a JSON object with "text", or with "question", "choices" and "answer" '
                         f"(lm_eval scores answers without choices: docs/studies.md), got {str(row)[:60]!r}")
    is_list = isinstance(choices, list) and "" not in choices and None not in choices
    right = right_choice(choices, answer) if is_list else None
    if right is None:
        raise ValueError(f"{place}: no valid answer: want an index from 0, a letter from A, or a choice, of a list of "
                         f"texts; got {answer!r:.60} of {choices!r:.60}")
    return question.rstrip() + "\nAnswer:", choices, right


def choice_hits(model, tok, questions):
    """
    Whether the most likely choice of each question is right: a bool array (2, n).

    [0]: by the sum of log p over a choice, which favours short ones; [1]: by its mean per byte.
    """
    windows = [
        pair(tok, prompt, f" {choice}", model.config.block_size)
        for prompt, choices, _ in questions
        for choice in choices]
    nats = iter(token_nats(model, windows))
    hits = []
    for _, choices, right in questions:
        costs = np.array([next(nats).sum() for _ in choices])
        sizes = [len(f"{choice}".encode()) for choice in choices]
        hits.append([choices[each.argmin()] == right for each in (costs, costs / sizes)])
    return np.array(hits).T


def choice_scores(name, questions, hits, baseline=None):
    """
    Yield rows of the results: the share of right choices of a task, by both measures of choice_hits().

    Chance is the mean over questions of 1 / their number of choices. hits, baseline: as in text_scores().
    """
    chance = np.mean([1 / len(choices) for _, choices, _ in questions])
    n = len(questions)
    for i, metric in enumerate(("choice", "choice per byte")):
        right = int(hits[i].sum())
        yield result(name, metric, n, right / n, wilson(right, n), chance=chance)
        if baseline is not None:
            difference, half, _ = student(hits[i].astype(float) - baseline[i])
            yield result(name, f"{metric} above {against}", n, difference, (difference - half, difference + half))


# -----------------------------------------------------------------------------
# rewards


def sample_answers(name, base):
    """The prompts of all paths, and ANSWERS texts of a model for each of them. base: as the setting."""
    from posttrain import references  # here, since it imports this file

    model, tok = convert.load_for_inference(name, device, dtype, base)
    tok.check_chat()
    prompts = []
    for path in paths:
        of_path, dropped = references.read_prompts(tok, dict(data=path, rewards=rewards, n_refs=0))
        prompts += of_path[:limit or None]
        if dropped:
            print(f"{path}: {describe_dropped(dropped, len(of_path), 'prompts')}")
    generator = torch.Generator(model.lm_head.weight.device).manual_seed(28)
    completions = []
    for i in tqdm(range(0, len(prompts), 16), "sampling", disable=None):
        part = [prompt.ids for prompt in prompts[i:i + 16]]
        room = max(1, min(MAX_NEW_TOKENS, model.config.block_size - max(map(len, part))))
        completions += references.sample_completions(model, tok, part, ANSWERS, room, generator)
    unfinished = sum(ids[-1] != tok.special[references.END] for answers in completions for ids in answers)
    if unfinished:
        print(f"{unfinished} of {ANSWERS * len(prompts)} answers of {name} are unfinished, and scored as they are")
    return prompts, [[tok.words(ids) for ids in answers] for answers in completions]


def reward_rows():
    """
    Rows of the results, mean rewards of the answers and their difference to those of --against, and a hash of prompts
    and reward.

    One call of the reward scores the answers of both models, since a charter only ranks answers of one prompt.
    """
    from posttrain.judge import reward_hash  # here, since the rest of this file needs no rewards
    from posttrain.references import load_reward, score_texts

    if not paths:
        raise ValueError(f"--rewards={rewards}: name files of prompts")
    if rewards.startswith("charter:") and not against:
        raise ValueError(f"--rewards={rewards} ranks the answers of two models: name the other with --against")
    score = load_reward(rewards, pick_device(device))
    prompts, answers = sample_answers(init_from, base)
    # One model after the other is in memory.
    baseline = sample_answers(against, "")[1] if against else [[]] * len(prompts)
    values = [score_texts(score, prompt.row, ours + theirs, f"{prompt.place}: --rewards={rewards}")
              for prompt, ours, theirs in zip(prompts, answers, baseline)]
    means = np.array(values).reshape(len(prompts), -1, ANSWERS).mean(-1)        # (prompts, models)
    measures = {"reward": means[:, 0]}
    if against:
        measures[f"reward above {against}"] = means[:, 0] - means[:, 1]
    name, rows = ",".join(map(os.path.basename, paths)), []
    for metric, by_prompt in measures.items():
        mean, half, _ = student(by_prompt)
        rows.append(result(name, metric, len(prompts), mean, (mean - half, mean + half)))
    return rows, sha256_of([[prompt.row for prompt in prompts], reward_hash(rewards)])


# -----------------------------------------------------------------------------
# results


COLUMNS = ["name", "metric", "n", "bytes", "score", "low", "high", "chance"]


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


def without_copies(rows):
    """The rows but for those of all documents, if these have one group, whose rows are the same."""
    groups = {row["name"] for row in rows if "bytes" in row} - {"all"}
    return [row for row in rows if row["name"] != "all" or len(groups) > 1]


def save_rows(folder, texts_hash, rows):
    """
    Write evaluation.json. One of other texts or options, which is there already, becomes evaluation-1.json or the next
    number. texts_hash: of all that was read.
    """
    path = f"{folder}/evaluation.json"
    inputs = dict(model=init_from, base=base, against=against, dtype=dtype, texts_hash=texts_hash[:16])
    make_folder(folder)
    if os.path.exists(path) and not inputs.items() <= read_json(path).items():
        free = (f"{folder}/evaluation-{n}.json" for n in itertools.count(1))
        older = next(name for name in free if not os.path.exists(name))
        os.rename(path, older)
        print(f"kept the results of other texts or options as {older}")
    write_json(path, inputs | dict(rows=rows))
    print(f"wrote {path}")


# -----------------------------------------------------------------------------
# the script


def contents(path):
    """
    The documents (group, text) and the questions (prompt, choices, right choice) of a file of text or of rows, or the
    validation documents of a data folder; at most `limit` of each.

    ValueError if there is no such file or folder, and for a row without text or question.
    """
    if os.path.isdir(path):
        return validation_documents(path)[:limit or None], []
    if not os.path.isfile(path):
        raise ValueError(f"no such file or folder: {path}. Name a text, .jsonl, or data that you prepare: "
                         f"python prepare.py FILES --out={path}")
    documents, questions = [], []
    for n, row in enumerate(itertools.islice(readers.records(path), limit or None), 1):
        text = row.get("text")
        if not isinstance(text, str):
            questions.append(read_question(row, f"{path}, row {n}"))
        elif text.strip():
            # Half a surrogate pair, which JSON can hold, would be an error when the bytes are counted.
            documents.append((str(row.get(by, os.path.basename(path))), readers.writable(text)))
    return documents, questions


def read_paths(is_run):
    """
    The documents of all paths, and a list of tasks (name, questions). is_run: no path means the run's own data.

    ValueError if a path has neither, or there is no path.
    """
    sources = list(folders_of(settings_of(init_from)["data"])) if is_run and not paths else paths
    parts = [contents(path) for path in sources]
    for path, (documents, questions) in zip(sources, parts):
        if not documents and not questions:
            raise ValueError(f"nothing to evaluate in {path}: it has no text and no question")
    documents = [document for documents, _ in parts for document in documents]
    tasks = [(os.path.basename(path), questions) for path, (_, questions) in zip(sources, parts) if questions]
    if not sources:
        raise ValueError(f"nothing to evaluate {init_from} on: name texts, tasks or data")
    return documents, tasks


def measure(model, tok, documents, tasks):
    """document_bits() of the documents (None if there are none), and a list: choice_hits() of each task."""
    bits = document_bits(model, tok, documents) if documents else None
    return bits, [choice_hits(model, tok, questions) for _, questions in tasks]


def likelihood_rows(is_run):
    """Rows of the results, of documents and tasks, and a hash of these. is_run: as in read_paths()."""
    # All files are read before a model, so that a mistake in the last file costs no hour of the first.
    documents, tasks = read_paths(is_run)
    baseline_bits, baseline_hits = None, [None] * len(tasks)
    if against:
        # Not kept in a variable: one model after the other is in memory.
        baseline_bits, baseline_hits = measure(*convert.load_for_inference(against, device, dtype), documents, tasks)
    model, tok = convert.load_for_inference(init_from, device, dtype, base)
    bits, hits = measure(model, tok, documents, tasks)
    rows = list(text_scores(documents, bits, baseline_bits)) if documents else []
    for i, (name, questions) in enumerate(tasks):
        rows += choice_scores(name, questions, hits[i], baseline_hits[i])
    return rows, sha256_of([documents, tasks])


def main():
    if limit < 0:
        raise ValueError("--limit is 0 or more")
    is_run = os.path.isdir(f"{init_from}/ckpt")
    folder = out or (init_from if is_run else "results/evaluate")
    if os.path.exists(f"{folder}/evaluation.json") and "rows" not in read_json(f"{folder}/evaluation.json"):
        raise ValueError(f"{folder}/evaluation.json is not of evaluate.py: name another folder with --out")
    rows, texts_hash = reward_rows() if rewards else likelihood_rows(is_run)
    # Printed first, so that a folder that cannot be written costs no result.
    print(table_md(without_copies(rows)))
    save_rows(folder, texts_hash, rows)


if __name__ == "__main__":
    run(main, globals())
