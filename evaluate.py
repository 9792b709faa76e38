"""
How good is a model: bits per byte of text by language or source, multiple choice, exact answers, the usual benchmarks.

    bits per byte = - sum over documents of log2 p(document and its end)  /  their bytes in UTF-8
    choice        = argmax over choices of log p(choice | examples, question);  norm: the same, per byte of the choice

Bits per byte compare models with different tokenizers, which nats per token do not. A score says nothing without its n,
its chance level and its interval, so these are printed beside it. Intervals are 95 %: Wilson's for shares, and for bits
per byte Student's t of the ratio estimator, whose sample are the documents. --against=BASE adds what the model has
above another one, document by document: such a difference is known far better than either score. A text that is longer
than the window is scored in windows that overlap by half, so that every token after the first window has at least half
a window of context. Source: the report evaluates base models by log-likelihood too (arXiv 2509.14233, sec. 5).

$ python evaluate.py --init_from=out/laptop                                # validation documents the run has never seen
$ python evaluate.py udhr.jsonl book.txt --init_from=out/laptop --by=lang  # any texts; bars by language
$ python evaluate.py --init_from=out/sft --against=out/laptop data/stdlib  # what fine-tuning has forgotten
$ python evaluate.py books/*.jsonl --by_position=1024 --init_from=out/8b-16k  # does it use what stands far behind?
$ python evaluate.py quiz.jsonl sums.jsonl --shots=3                       # tasks: rows of question, choices, answer
$ python evaluate.py --harness=arc_easy,hellaswag --init_from=swiss-ai/Apertus-8B-2509    # pip install lm-eval
"""

import json
import math
import os

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import convert
import tokenizer as tokenizers
from configurator import attached
from chat import read_rows
from data import TokenDataset
from engine.files import read_json, read_text, write_flushed
from engine.intervals import t_quantile, wilson
from generate import generate
from loss import chunk_rows

paths = []                # texts (.txt; .jsonl with "text"), tasks (.jsonl with "question", "answer"), data folders;
                          # nothing = the validation documents of the run's own data
init_from = "out/laptop"  # run folder, Hugging Face folder or hub name
against = ""              # another model: differences to it, paired by document
by = "lang"               # groups of texts: a field of their rows (lang, source, ...); texts without it go by file
by_position = 0           # also by position in the window, in steps of so many tokens: what does a longer context give?
lookup = 0                # keys to look up at each distance in the window, in a register (studies/length.py)
window = 0                # tokens of these windows, also beyond what the model was trained at; 0 = the model's window
shots = 0                 # solved examples before each question: the first rows of the task, which are then not asked
limit = 0                 # documents or questions of each file at most; 0 = all
max_new_tokens = 64       # of an answer; it ends at a line break
harness = ""              # lm-evaluation-harness: tasks by name, with commas
harness_path = ""         # folder of task files of your own, instead of the harness' collection, which is slow to index
batch_tokens = 8192       # at once
device = "auto"           # cuda | mps | cpu
dtype = "auto"            # float32 | bfloat16; auto: that of the weights, bf16 on CUDA
base = ""                 # int8 | nf4: the matrices of the blocks in 8 or 4 bits (posttrain/quantised.py)
out = ""                  # folder of evaluation.json; "" = the run folder, or results/evaluate

# Letters: B windows in a batch, T tokens in a window, C channels, V vocabulary, N scored positions of a batch.


# -----------------------------------------------------------------------------
# log-likelihoods


@torch.no_grad()
def token_scores(model, windows):
    """
    -log p in nats of the tokens of windows, and whether each of them is the likeliest.

    windows: list of (ids, first), of which ids[first:] are scored, first > 0. Returns an array (2, len(ids) - first) of
    float64 for each: -log p, and 1 or 0. Windows of similar length share a batch. They are padded on the right, which a
    causal model does not see. The head is applied to scored positions only, a chunk at a time, since its logits are by
    far the largest tensor.
    """
    device = model.lm_head.weight.device
    rows = chunk_rows(model.config.vocab_size, device, trained=False)

    def score(h, y):
        """h (rows, C), y (rows,) -> (2, rows)."""
        z = model.lm_head(h).float()                       # (rows, V)
        nll = z.logsumexp(-1) - z.gather(1, y[:, None])[:, 0]
        top = z.argmax(-1) == y
        return torch.stack([nll, top.float()])

    order = sorted(range(len(windows)), key=lambda i: -len(windows[i][0]))
    left = [windows[i] for i in order]
    found = []
    bar = tqdm(
        total=len(left),
        desc="scoring",
        unit="window",
        disable=len(left) < 32)
    while left:
        # The first window is the longest of its batch, so it says how many fit.
        size = max(1, batch_tokens // len(left[0][0]))
        batch = left[:size]
        left = left[size:]
        idx, targets = laid_out(batch, device)
        scored = targets >= 0                              # (B, T)
        h = model.hidden(idx)[scored]                      # (N, C), window by window
        y = targets[scored]                                # (N,)
        parts = map(score, h.split(rows), y.split(rows))
        scores = torch.cat(list(parts), 1).cpu().double()  # (2, N)
        counts = [len(ids) - first for ids, first in batch]
        found += [own.numpy() for own in scores.split(counts, 1)]
        bar.update(len(batch))
    bar.close()
    # Back from the order of lengths to that of the windows.
    return [found[i] for i in np.argsort(order)]


def laid_out(windows, device):
    """
    Windows (ids, first) as a batch: idx and targets, each (B, T), padded on the right.

    A target of -1 is not scored: that of a token before `first`, or of padding.
    """
    inputs = [torch.tensor(ids[:-1]) for ids, _ in windows]
    targets = [
        torch.tensor([-1] * (first - 1) + ids[first:])
        for ids, first in windows]
    return pad_sequence(inputs, True).to(device), pad_sequence(targets, True, -1).to(device)


def windows_of(ids, T):
    """
    A document's ids, BOS first -> windows (ids, first) of at most T + 1 ids, for token_scores.

    Each window begins half a window before the first token that the one before did not score.
    """
    done = 1
    while done < len(ids):
        begin = max(0, done - T // 2 - 1)
        end = begin + T + 1
        yield ids[begin:end], done - begin
        done = end


def pair(tok, context, continuation, T):
    """
    Context and continuation (str) -> (ids, first) for token_scores, BOS first.

    They are encoded as one text, as lm-evaluation-harness does, so whitespace at the end of the context belongs to the
    continuation. A context that is too long loses its beginning. ValueError if the continuation adds no token, or has
    more than T.
    """
    words = context.rstrip()
    continuation = context[len(words):] + continuation
    first = 1 + len(tok.encode(words))
    ids = [tok.bos, *tok.encode(words + continuation)]
    added = len(ids) - first
    if added < 1:
        raise ValueError(f"the choice {continuation!r} adds no token to its question: nothing to score")
    if added > T:
        raise ValueError(f"the choice {continuation[:40]!r}... has {added:,} tokens, more than the model's window of "
                         f"{T}")
    cut = max(0, len(ids) - (T + 1))
    return ids[cut:], first - cut


# -----------------------------------------------------------------------------
# bits per byte


def validation_documents(folder, tok, most=0):
    """
    (source, text) of each validation document of a data folder, or of `most` of them, evenly spaced. They are read back
    from its shards.
    """
    validation = TokenDataset(folder, "val", 1)
    if validation.meta["tokenizer_hash"] != tok.hash:
        print(f"{folder} was made with another vocabulary than the model's: its text is decoded and encoded again")
        tok = tokenizers.load_for(folder)
    sources = validation.meta["sources"]
    total = sum(splits["val"]["documents"] for splits in sources.values())
    every = -(-total // most) if most else 1
    # The sources follow one another in the stream, and every document begins with BOS.
    seen = end = 0
    for source, splits in sources.items():
        begin = end
        end += splits["val"]["tokens"]
        ids = validation.tokens(begin, end)
        begins = np.flatnonzero(ids == tok.bos)
        for document in np.split(ids, begins)[1:]:
            seen += 1
            if (seen - 1) % every:
                continue
            words = [
                i for i in document.tolist()
                if i not in (validation.meta["bos"], validation.meta["eos"])]
            yield source, tok.decode(words)


def text_ids(tok, text):
    """A document's ids between BOS and the end of a text."""
    return [tok.bos, *tok.encode(text), end_of_text(tok)]


def end_of_text(tok):
    """</s>, also for a chat model, whose tok.eos ends a turn."""
    return tok.special.get("</s>", tok.eos)


def ratio(bits, sizes):
    """
    Bits per byte of documents, and half of its 95 % interval; nan for one document.

    bits, sizes (n,): of each document. The documents are the sample, and the error of a ratio r of two sums over it is
    sqrt(n / (n - 1) sum (bits - r sizes)^2) / sum(sizes).
    """
    n = len(bits)
    r = bits.sum() / sizes.sum()
    if n == 1:
        return r, math.nan
    squares = ((bits - r * sizes) ** 2).sum()
    error = math.sqrt(n / (n - 1) * squares) / sizes.sum()
    return r, t_quantile(n - 1) * error


def document_bits(model, tok, documents):
    """Bits and scored tokens of each of the documents, (group, text) each: two arrays (n,)."""
    # Of each window: itself, and the number of its document.
    windows = []
    owner = []
    for n, (_, text) in enumerate(documents):
        ids = text_ids(tok, text)
        for window in windows_of(ids, model.config.block_size):
            windows.append(window)
            owner.append(n)
    scores = token_scores(model, windows)
    bits = np.bincount(owner, [nll.sum() / math.log(2) for nll, _ in scores])
    tokens = np.bincount(owner, [len(nll) for nll, _ in scores])
    return bits, tokens


def text_scores(model, tok, documents, other=None):
    """
    documents: list of (group, text). Returns a list of dicts, "all" first and then a dict for each group: documents,
    bytes, tokens, bits_per_byte and plus_minus, half of its 95 % interval.

    other: another model and its tokenizer; then also above and above_plus_minus, what the model has above it: the mean
    over bytes of the differences of the documents.
    """
    bits, tokens = document_bits(model, tok, documents)
    other_bits = document_bits(*other, documents)[0] if other else None
    sizes = np.array([len(text.encode()) for _, text in documents])
    groups = [group for group, _ in documents]
    rows = []
    for name in ["all", *sorted(set(groups))]:
        here = [name in ("all", group) for group in groups]
        r, plus_minus = ratio(bits[here], sizes[here])
        rows.append(dict(
            group=name,
            documents=sum(here),
            bytes=int(sizes[here].sum()),
            tokens=int(tokens[here].sum()),
            bits_per_byte=r,
            plus_minus=plus_minus))
        if other:
            difference = bits - other_bits
            above, half = ratio(difference[here], sizes[here])
            rows[-1].update(above=above, above_plus_minus=half)
    return rows


def position_scores(model, tok, documents, T, step):
    """
    Bits per byte of the tokens at positions 0 to step - 1 of a window of T, of the next `step`, and so on.

    documents: list of (group, text), cut into windows one after the other; what fills no window is left out, so that
    all positions have the same texts. Returns a list of dicts: begin, end, windows, bytes, bits_per_byte, and
    plus_minus, half of its 95 % interval over windows. ValueError if no document fills a window.
    """
    windows = []
    for _, text in documents:
        ids = text_ids(tok, text)
        for begin in range(0, len(ids) - T, T):
            windows.append((ids[begin:begin + T + 1], 1))
    if not windows:
        raise ValueError(f"no document has {T:,} tokens: name longer ones, or a shorter --window")
    nats = np.array([nll for nll, _ in token_scores(model, windows)])               # (windows, T)
    end = end_of_text(tok)
    rows = []
    for begin in range(0, T, step):
        part = slice(begin, begin + step)
        words = [[i for i in ids[1:][part] if i != end] for ids, _ in windows]
        sizes = np.array([len(tok.decode_bytes(ids)) for ids in words])
        r, plus_minus = ratio(nats[:, part].sum(1) / math.log(2), sizes)
        rows.append(dict(
            begin=begin,
            end=min(begin + step, T),
            windows=len(windows),
            bytes=int(sizes.sum()),
            bits_per_byte=r,
            plus_minus=plus_minus))
    return rows


# -----------------------------------------------------------------------------
# tasks


def answer_of(row, name):
    """
    The number of the right choice. The answer of a row is a choice itself, a letter from A, or an index from 0.

    ValueError, which begins with name, if the choices are no list of two or more or the answer is none of them.
    """
    choices = row["choices"]
    answer = row.get("answer")
    if isinstance(choices, list) and len(set(choices)) == len(choices) > 1:
        if answer in choices:
            return choices.index(answer)
        index = answer
        if isinstance(answer, str) and len(answer) == 1:
            index = ord(answer.upper()) - ord("A")
        if type(index) is int and 0 <= index < len(choices):
            return index
    raise ValueError(f'{name}: no valid answer: want two or more different "choices", and "answer" an index from 0, '
                     f"a letter from A, or a choice; got {answer!r}")


def accepted_answers(row, name):
    """
    The texts of which the model must say one. The answer of a row is a text, a number, or a list of them.

    ValueError, which begins with name, for anything else.
    """
    answer = row.get("answer")
    accepted = answer if isinstance(answer, list) else [answer]
    texts = [
        str(a).strip() if isinstance(a, str | int | float) else ""
        for a in accepted]
    if not texts or not all(texts):
        raise ValueError(f"{name}: no valid answer: want a text, a number, or a list of them; got {answer!r}")
    return texts


def with_answers(rows, name, answer):
    """Copies of the rows of a task with answer(row, name) as their answers: all are checked before the model works."""
    return [
        {**row, "answer": answer(row, f"{name}, question {n}")}
        for n, row in enumerate(rows, 1)]


def prompt_of(row):
    return row["question"].rstrip() + "\nAnswer:"


def with_shots(rows, solution):
    """
    (row, context) of each question that is asked: the first `shots` rows with their solution(row), then the question.

    ValueError if no row is left to ask.
    """
    if shots >= len(rows):
        raise ValueError(f"--shots={shots} leaves no question of {len(rows)}: lower it")
    examples = "".join(
        f"{prompt_of(row)} {solution(row)}\n\n"
        for row in rows[:shots])
    return [(row, examples + prompt_of(row)) for row in rows[shots:]]


def task_result(task, kind, hits, n, **more):
    return dict(
        task=task,
        kind=kind,
        n=n,
        shots=shots,
        score=hits / n,
        interval=wilson(hits, n),
        **more)


def choice_scores(model, tok, rows, name):
    """
    Multiple choice by log-likelihood: accuracy by the sum over a choice and by its mean per byte (norm).

    Both come with n and their 95 % intervals. Chance is the mean over questions of 1 / their number of choices.
    """
    rows = with_answers(rows, name, answer_of)
    asked = with_shots(rows, lambda row: row["choices"][row["answer"]])
    windows = []
    for row, context in asked:
        for choice in row["choices"]:
            windows.append(pair(tok, context, " " + choice, model.config.block_size))
    scores = iter(token_scores(model, windows))
    hits = hits_norm = 0
    for row, _ in asked:
        choices, right = row["choices"], row["answer"]
        logp = np.array([-next(scores)[0].sum() for _ in choices])
        size = np.array([len(choice.encode()) for choice in choices])
        # An accuracy by the sum favours short choices.
        hits += int(logp.argmax() == right)
        hits_norm += int((logp / size).argmax() == right)
    n = len(asked)
    return task_result(
        name,
        "choice",
        hits,
        n,
        score_norm=hits_norm / n,
        interval_norm=wilson(hits_norm, n),
        chance=np.mean([1 / len(row["choices"]) for row, _ in asked]))


def continue_texts(model, tok, contexts, stops, new_tokens):
    """
    Greedy continuations of texts by at most new_tokens, each cut at the first of the strings `stops`.

    A context that does not fit into the window together with its answer loses its beginning. ValueError if none fits.
    """
    T = model.config.block_size
    room = T - new_tokens
    if room < 2:
        raise ValueError(f"max_new_tokens={new_tokens} leaves no room for a question in a window of {T}: lower it")
    # Control tokens are no words of an answer.
    silent = {
        i for name, i in tok.special.items()
        if name not in tokenizers.IN_TEXT}
    prompts = [[tok.bos, *tok.encode(context)][-room:] for context in contexts]
    size = max(1, batch_tokens // T)
    batches = [
        prompts[i:i + size]
        for i in range(0, len(prompts), size)]
    found = []
    for batch in tqdm(batches, "answering", unit="batch", disable=len(batches) < 2):
        whole = generate(model, batch, new_tokens, temperature=0, stop=(tok.eos,))
        for prompt, ids in zip(batch, whole):
            new = ids[len(prompt):]
            text = tok.decode([t for t in new if t not in silent])
            cut = [
                text.split(stop)[0]
                for stop in stops if stop]
            found.append(min(cut, key=len, default=text))
    return found


def answer_scores(model, tok, rows, name):
    """
    Exact match of the first line of a greedy answer with an accepted one, n and the 95 % interval.

    An answer in free words is not guessed: the chance level is 0.
    """
    rows = with_answers(rows, name, accepted_answers)
    asked = with_shots(rows, lambda row: row["answer"][0])
    contexts = [context for _, context in asked]
    said = continue_texts(model, tok, contexts, ["\n"], max_new_tokens)
    hits = 0
    for (row, _), text in zip(asked, said):
        if text.strip() in row["answer"]:
            hits += 1
    return task_result(name, "exact match", hits, len(asked), chance=0.0)


# -----------------------------------------------------------------------------
# lm-evaluation-harness


def harness_model(model, tok):
    """Our model behind lm-evaluation-harness' own interface, lm_eval.api.model.LM."""
    from lm_eval.api.model import LM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    T = model.config.block_size

    class Harness(LM):
        tokenizer_name = tok.name

        def loglikelihood(self, requests, disable_tqdm=False):
            windows = [pair(tok, *request.args, T) for request in requests]
            return [
                (-float(nll.sum()), bool(top.all()))
                for nll, top in token_scores(model, windows)]

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            # The harness' rule for long texts differs from ours: windows overlap by one token, and only the last is
            # filled up with context. There is one BOS; its own HFLM puts two, unless add_bos_token=False.
            totals = []
            for request in requests:
                ids = tok.encode(request.args[0])
                rolling = get_rolling_token_windows(ids, tok.bos, T, context_len=1)
                parts = map(make_disjoint_window, rolling)
                windows = [
                    (context + scored, len(context))
                    for context, scored in parts]
                nll = sum(nll.sum() for nll, _ in token_scores(model, windows))
                totals.append(-float(nll))
            return totals

        def generate_until(self, requests, disable_tqdm=False):
            # Requests with the same stops and length are decoded together.
            groups = {}
            for i, request in enumerate(requests):
                how = normalize_gen_kwargs(request.args[1])
                if how["do_sample"] and how["temperature"]:
                    raise ValueError("this harness interface decodes greedily; the task asks for sampling")
                key = tuple(how["until"]), min(how["max_gen_toks"], T // 2)
                groups.setdefault(key, []).append(i)
            found = [None] * len(requests)
            for (stops, length), members in groups.items():
                contexts = [requests[i].args[0] for i in members]
                texts = continue_texts(model, tok, contexts, stops, length)
                for i, text in zip(members, texts):
                    found[i] = text
            return found

    return Harness()


def run_harness(model, tok):
    """
    The tasks of --harness by lm-evaluation-harness: a dict for each metric of each task, and of each group of tasks,
    whose n is the sum of theirs. ValueError if the package or a task is not there.
    """
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ValueError("lm-evaluation-harness is not installed: pip install lm-eval") from None
    manager = TaskManager(
        include_path=harness_path or None,
        include_defaults=not harness_path)
    names = harness.split(",")
    missing = [name for name in names if name not in manager.all_tasks]
    if missing:
        raise ValueError(f"lm-evaluation-harness has no task {missing[0]!r}: `lm_eval --tasks list` shows them, "
                         "--harness_path=FOLDER takes your own")
    found = lm_eval.simple_evaluate(
        harness_model(model, tok),
        tasks=names,
        num_fewshot=shots or None,
        limit=limit or None,
        task_manager=manager)
    rows = []
    for task, result in found["results"].items():
        n = result["sample_len"]
        for metric, score in result.items():
            if not isinstance(score, float) or "_stderr" in metric:
                continue
            stderr = result.get(metric.replace(",", "_stderr,", 1))
            rows.append(dict(
                task=task,
                kind="harness",
                n=n,
                shots=found["n-shot"].get(task),
                metric=metric,
                score=score,
                stderr=stderr,
                interval=harness_interval(score, stderr, n)))
    return rows


def harness_interval(score, stderr, n):
    """
    95 % interval of a mean that lm-evaluation-harness reports with its standard error; None without one.

    Values that are 0 or 1, and only they, have the standard error sqrt(p (1 - p) / (n - 1)): these means are shares and
    get Wilson's interval. All others get Student's t.
    """
    if not isinstance(stderr, float) or n < 2:
        return None
    if 0 <= score <= 1:
        of_share = math.sqrt(score * (1 - score) / (n - 1))
        is_share = math.isclose(stderr, of_share, rel_tol=1e-6, abs_tol=1e-12)
        if is_share:
            return wilson(score * n, n)
    half = t_quantile(n - 1) * stderr
    return score - half, score + half


# -----------------------------------------------------------------------------
# what is written


def with_interval(score, interval):
    bounds = f"({interval[0]:.3f} to {interval[1]:.3f})" if interval else ""
    return f"{score:.3f} {bounds}"


def table_md(results):
    """The content of evaluation.json (dict) as Markdown."""
    lines = [f"# {results['model']}", ""]
    if results["texts"]:
        paired = "above" in results["texts"][0]
        more = f" above {results['against']} (95 %) |" if paired else ""
        lines += [f"| text | documents | bytes | bytes/token | bits/byte (95 %) |{more}", "|---" * (5 + paired) + "|"]
        for r in results["texts"]:
            more = f" {r['above']:+.3f} ± {r['above_plus_minus']:.3f} |" if paired else ""
            lines.append(f"| {r['group']} | {r['documents']:,} | {r['bytes']:,} | {r['bytes'] / r['tokens']:.2f} | "
                         f"{r['bits_per_byte']:.3f} ± {r['plus_minus']:.3f} |{more}")
        lines.append("")
    if results["positions"]:
        n = results["positions"][0]["windows"]
        lines += [f"| position in {n:,} windows | bits/byte (95 %) |", "|---|---|"]
        for r in results["positions"]:
            lines.append(f"| {r['begin']:,} to {r['end'] - 1:,} | {r['bits_per_byte']:.3f} ± {r['plus_minus']:.3f} |")
        lines.append("")
    if results.get("lookups"):
        lines += ["| tokens since a key was said | its colour is given | 95 % |", "|---|---|---|"]
        for r in results["lookups"]:
            lines.append(f"| {r['distance']:,} | {r['right']} of {r['n']} | {r['low']:.2f} to {r['high']:.2f} |")
        lines.append("")
    if results["tasks"]:
        lines += ["| task | n | shots | score (95 %) | per byte | chance |", "|---|---|---|---|---|---|"]
        for r in results["tasks"]:
            norm = with_interval(r["score_norm"], r["interval_norm"]) if "score_norm" in r else ""
            # The harness knows neither a score per byte nor the chance level.
            rest = f" {norm} | {r['chance']:.3f} |" if "chance" in r else " | |"
            lines.append(f"| {r['task']} ({r.get('metric', r['kind'])}) | {r['n']} | {r['shots']} | "
                         f"{with_interval(r['score'], r['interval'])} |{rest}")
        lines.append("")
    return "\n".join(lines)


# -----------------------------------------------------------------------------
# the script


def contents(path, most=0):
    """The documents of a .txt or .jsonl file, a list of (group, text), and the rows of its tasks; `most` rows of it."""
    name = os.path.basename(path)
    if not path.endswith(".jsonl"):
        return [(name, read_text(path))], []
    want = '"text", or with "question" and "answer"'
    rows = read_rows(path, lambda row: {"text", "question"} & row.keys(), want)[:most or None]
    documents = [
        (str(row.get(by, name)), row["text"])
        for row in rows
        if row.get("text", "").strip()]
    return documents, [row for row in rows if "text" not in row]


def measured(path, model, tok):
    """A path of the command line -> its documents, a list of (group, text), and a list of the results of its tasks."""
    if os.path.isdir(path):
        return list(validation_documents(path, tok))[:limit or None], []
    documents, questions = contents(path, limit)
    return documents, task_scores(model, tok, questions, os.path.basename(path))


def task_scores(model, tok, questions, name):
    """The results of the questions with choices, and of those whose answer has to be said."""
    choices = [row for row in questions if "choices" in row]
    answers = [row for row in questions if "choices" not in row]
    tasks = []
    if choices:
        tasks.append(choice_scores(model, tok, choices, name))
    if answers:
        tasks.append(answer_scores(model, tok, answers, name))
    return tasks


def main():
    model, tok = convert.load_ready(init_from, device, dtype, base)
    is_run = os.path.isdir(f"{init_from}/ckpt")
    sources = paths
    if not sources and not harness and not (lookup and not is_run):
        if not is_run:
            raise ValueError(f"{init_from} is no run folder with validation data of its own: name texts or tasks, "
                             "or --harness=TASKS")
        sources = [read_json(f"{init_from}/config.json")["data"]]
    documents = []
    tasks = []
    for path in sources:
        more_documents, more_tasks = measured(path, model, tok)
        documents += more_documents
        tasks += more_tasks
    if harness:
        tasks += run_harness(model, tok)
    other = convert.load_ready(against, device, dtype) if against else None
    texts = text_scores(model, tok, documents, other) if documents else []
    positions = []
    if by_position:
        positions = position_scores(model, tok, documents, window or model.config.block_size, by_position)

    lookups = []
    if lookup:
        lookup_scores = attached("studies.length").lookup_scores
        lookups = lookup_scores(model, tok, window or model.config.block_size, lookup)

    folder = out or (init_from if is_run else "results/evaluate")
    os.makedirs(folder, exist_ok=True)
    results = dict(model=init_from, base=base, against=against, texts=texts, positions=positions, lookups=lookups,
                   tasks=tasks)
    write_flushed(f"{folder}/evaluation.json", json.dumps(results, indent=1))
    print(table_md(results))
    print(f"wrote {folder}/evaluation.json")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
