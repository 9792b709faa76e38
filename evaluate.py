"""
How good is a model: bits per byte of text, by language or source; multiple choice; exact answers; the usual benchmarks.

    bits per byte = - sum over documents of log2 p(document and its end)  /  its bytes in UTF-8       comparable across tokenizers
    choice        = argmax over choices of log p(choice | examples, question), also per byte of the choice (norm)

$ python evaluate.py --init_from=out/laptop                                          # the validation documents that the run has never seen
$ python evaluate.py udhr.jsonl book.txt --init_from=out/laptop --by=lang            # any texts; bars by language
$ python evaluate.py quiz.jsonl sums.jsonl --shots=3                                 # tasks: rows of question, choices, answer
$ python evaluate.py --harness=arc_easy,hellaswag --init_from=swiss-ai/Apertus-8B-2509    # lm-evaluation-harness (pip install lm-eval)

A score without its n, its chance level and its interval says nothing: they are printed beside it (95 %: Wilson's for shares, Student's t
of the ratio estimator over documents for bits per byte). Texts longer than the window are scored in windows that overlap by half, so that
every token but the first has at least half a window of context. The report evaluates base models by log-likelihood too (sec. 5, table 22).
"""

import json
import math
import os

import numpy as np
import torch
from tqdm import tqdm

import convert
import tokenizer as tokenizers
from engine.intervals import t_quantile, wilson
from model import chunk_rows
from engine.hardware import pick_device, pick_dtype
from generate import generate
from chat import read_rows

paths = []                   # texts (.txt .md .py; .jsonl with "text"), tasks (.jsonl with "question", "answer"), data folders;
                             # nothing = the validation documents of the run's own data
init_from = "out/laptop"     # run folder, Hugging Face folder or hub name
by = "lang"                  # groups of texts: a field of their rows (lang, source, ...); texts without it go by file
shots = 0                    # solved examples before each question: the first rows of the task, which are then not asked
limit = 0                    # documents or questions of each file at most; 0 = all
max_new_tokens = 64          # of an answer; it ends at a line break
harness = ""                 # lm-evaluation-harness: tasks by name, with commas
harness_path = ""            # folder of task files of your own, instead of the harness' collection (which takes 10 s to index)
batch_tokens = 8192          # at once
device = "auto"              # cuda | mps | cpu
dtype = "auto"               # float32 | bfloat16; auto: that of the weights, bf16 on CUDA
out = ""                     # folder of evaluation.json and evaluation.png; "" = the run folder, or results/evaluate for other models


# -----------------------------------------------------------------------------
# log-likelihoods


@torch.no_grad()
def token_scores(model, windows):
    """
    -log p of the tokens of windows in nats, and whether each is the likeliest. windows: list of (ids, first): ids[first:] are
    scored, first > 0.

    Returns a list of pairs of arrays (float64, bool) of len(ids) - first. Batches of similar length, padded on the right, which a causal
    model does not see; the head is applied to scored positions only, a chunk at a time.
    """
    found, place = [None] * len(windows), model.lm_head.weight.device
    order = sorted(range(len(windows)), key=lambda i: -len(windows[i][0]))
    rows = chunk_rows(model.config.vocab_size, place)                       # as in training
    bar = tqdm(total=len(order), desc="scoring", unit="window", disable=len(order) < 32)
    while order:
        n = max(1, batch_tokens // len(windows[order[0]][0]))
        some, order = order[:n], order[n:]
        T = len(windows[some[0]][0]) - 1
        idx, targets = torch.zeros(len(some), T, dtype=torch.long), torch.full((len(some), T), -1)
        for row, i in enumerate(some):
            ids, first = windows[i]
            idx[row, :len(ids) - 1] = torch.tensor(ids[:-1])
            targets[row, first - 1:len(ids) - 1] = torch.tensor(ids[first:])
        h = model.hidden(idx.to(place))[(targets >= 0).to(place)]           # (N, C), row by row
        wanted, nll, top = targets[targets >= 0].to(place), [], []          # (N,)
        for h_part, y in zip(h.split(rows), wanted.split(rows)):
            z = model.lm_head(h_part).float()                               # (rows, V)
            nll.append(z.logsumexp(-1) - z.gather(1, y[:, None])[:, 0])
            top.append(z.argmax(-1) == y)
        nll, top = torch.cat(nll).cpu().double().numpy(), torch.cat(top).cpu().numpy()
        ends = np.cumsum([len(windows[i][0]) - windows[i][1] for i in some])[:-1]
        for i, a, b in zip(some, np.split(nll, ends), np.split(top, ends)):
            found[i] = a, b
        bar.update(len(some))
    bar.close()
    return found


def windows_of(ids, T):
    """A document (ids, BOS first) as windows of at most T + 1 ids that overlap by half, each with the place of its first new token."""
    found, done = [], 1
    while done < len(ids):
        begin = 0 if done == 1 else max(0, done - T // 2 - 1)
        end = min(begin + T + 1, len(ids))
        found.append((ids[begin:end], done - begin))
        done = end
    return found


def pair(tok, context, continuation, T):
    """
    Context and continuation -> (ids, first) for token_scores, with BOS. Encoded as one, as lm-evaluation-harness does: whitespace at the
    end of the context belongs to the continuation, and a context that is too long loses its beginning. ValueError if nothing is left to
    score, or the continuation alone is longer than the window.
    """
    words = context.rstrip()
    continuation, context = context[len(words):] + continuation, words
    before = [tok.bos, *tok.encode(context)]
    ids = [tok.bos, *tok.encode(context + continuation)]
    if len(ids) <= len(before):
        raise ValueError(f"the choice {continuation!r} adds no token to its question: nothing to score")
    if len(ids) - len(before) > T:
        raise ValueError(f"the choice {continuation[:40]!r}... has {len(ids) - len(before):,} tokens, more than the model's window of {T}")
    cut = max(0, len(ids) - (T + 1))
    return ids[cut:], len(before) - cut


# -----------------------------------------------------------------------------
# reading


def answer_of(row, where):
    """The number of the right choice: answer is an index, a letter, or the choice itself."""
    choices, answer = row["choices"], row.get("answer")
    if isinstance(choices, list) and len(choices) > 1 and len(set(choices)) == len(choices):
        if answer in choices:
            return choices.index(answer)
        if isinstance(answer, str) and len(answer) == 1 and 0 <= ord(answer.upper()) - 65 < len(choices):
            return ord(answer.upper()) - 65
        if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
            return answer
    raise ValueError(f"{where}: no valid answer: want two or more different \"choices\", and \"answer\" an index from 0, a letter from A, "
                     f"or a choice; got {answer!r}")


def validation_documents(folder, tok):
    """(source, text) of the validation documents of a data folder, from its shards."""
    from data import TokenDataset, read_meta
    meta = read_meta(folder)
    if meta["tokenizer_hash"] != tok.hash:
        print(f"{folder} was made with another vocabulary than the model's: its text is decoded and encoded again")
        tok = tokenizers.load_for(folder)
    for source, splits in meta["sources"].items():
        only = TokenDataset(folder, "val", 1)
        first = sum(s["val"]["tokens"] for s in list(meta["sources"].values())[:list(meta["sources"]).index(source)])
        ids = only.tokens(first, first + splits["val"]["tokens"])
        ends = np.flatnonzero(ids == tok.bos).tolist() + [len(ids)]
        for a, b in zip(ends, ends[1:]):
            yield source, tok.decode([i for i in ids[a:b].tolist() if i not in (tok.bos, tok.eos)])


# -----------------------------------------------------------------------------
# measuring


def text_scores(model, tok, documents):
    """
    documents: list of (group, text). Returns one row a group and one for all: documents, bytes, tokens, bits per byte, half its 95 %
    interval (documents are the sample: t(n - 1) sqrt(n / (n - 1) sum (bits - r bytes)^2) / sum bytes, nan for one document).
    """
    windows, owner = [], []
    for n, (_, text) in enumerate(documents):
        for w in windows_of([tok.bos, *tok.encode(text), tok.eos], model.config.block_size):
            windows.append(w)
            owner.append(n)
    bits, sizes, tokens = np.zeros(len(documents)), np.array([len(t.encode()) for _, t in documents]), np.zeros(len(documents), dtype=int)
    for n, (nll, _) in zip(owner, token_scores(model, windows)):
        bits[n] += nll.sum() / math.log(2)
        tokens[n] += len(nll)
    groups = np.array([g for g, _ in documents])
    rows = []
    for group in ["all", *sorted(set(groups))]:
        here = np.full(len(groups), True) if group == "all" else groups == group
        n, r = int(here.sum()), bits[here].sum() / sizes[here].sum()
        error = math.sqrt(n / (n - 1) * ((bits[here] - r * sizes[here]) ** 2).sum()) / sizes[here].sum() if n > 1 else math.nan
        spread = t_quantile(n - 1) * error if n > 1 else math.nan
        rows.append(dict(group=str(group), documents=n, bytes=int(sizes[here].sum()), tokens=int(tokens[here].sum()),
                         bits_per_byte=float(r), plus_minus=float(spread)))
    return rows


def prompt_of(row):
    return row["question"].rstrip() + "\nAnswer:"


def with_shots(rows, solution):
    """The questions that are asked, each behind the first `shots` rows solved: (row, context)."""
    if shots >= len(rows):
        raise ValueError(f"--shots={shots} leaves no question of {len(rows)}: lower it")
    examples = "".join(f"{prompt_of(r)} {solution(r)}\n\n" for r in rows[:shots])
    return [(r, examples + prompt_of(r)) for r in rows[shots:]]


def choice_scores(model, tok, rows, name):
    """Multiple choice by log-likelihood: accuracy by the sum and per byte of the choice (norm), n, chance level, 95 % interval."""
    right = {id(r): answer_of(r, f"{name}, question {n}") for n, r in enumerate(rows, 1)}
    asked = with_shots(rows, lambda r: r["choices"][right[id(r)]])
    windows = [pair(tok, context, " " + choice, model.config.block_size) for r, context in asked for choice in r["choices"]]
    scores, hits, hits_norm = iter(token_scores(model, windows)), 0, 0
    for r, _ in asked:
        total = np.array([-next(scores)[0].sum() for _ in r["choices"]])
        size = np.array([len(choice.encode()) for choice in r["choices"]])
        hits += int(total.argmax() == right[id(r)])
        hits_norm += int((total / size).argmax() == right[id(r)])
    n = len(asked)
    return dict(task=name, kind="choice", n=n, shots=shots, score=hits / n, interval=wilson(hits, n),
                score_norm=hits_norm / n, interval_norm=wilson(hits_norm, n),
                chance=float(np.mean([1 / len(r["choices"]) for r, _ in asked])))


def continue_texts(model, tok, contexts, stops, new_tokens):
    """Greedy continuations of texts, each cut at the first of `stops`; a context that is too long loses its beginning."""
    room, found = model.config.block_size - new_tokens, []
    if room < 2:
        raise ValueError(f"max_new_tokens={new_tokens} leaves no room for a question in a window of {model.config.block_size}: lower it")
    silent = {i for name, i in tok.special.items() if name not in tokenizers.IN_TEXT}       # control tokens are no words of an answer
    prompts = [[tok.bos, *tok.encode(c)][-room:] for c in contexts]
    size = max(1, batch_tokens // model.config.block_size)
    for i in tqdm(range(0, len(prompts), size), "answering", unit="batch", disable=len(prompts) <= size):
        some = prompts[i:i + size]
        for p, ids in zip(some, generate(model, some, new_tokens, temperature=0, stop=(tok.eos,))):
            text = tok.decode([t for t in ids[len(p):] if t not in silent])
            found.append(min((text.split(s)[0] for s in stops if s), key=len, default=text))
    return found


def answer_scores(model, tok, rows, name):
    """Exact match of a greedy answer's first line; "answer" is a string or a list of accepted ones."""
    accepted = {}
    for n, r in enumerate(rows, 1):
        answers = r.get("answer") if isinstance(r.get("answer"), list) else [r.get("answer")]
        if not answers or not all(isinstance(a, str | int | float) and str(a).strip() for a in answers):
            raise ValueError(f"{name}, question {n}: no valid answer: want a text, a number, or a list of them; got {r.get('answer')!r}")
        accepted[id(r)] = [str(a).strip() for a in answers]
    asked = with_shots(rows, lambda r: accepted[id(r)][0])
    said = continue_texts(model, tok, [c for _, c in asked], ["\n"], max_new_tokens)
    hits, n = sum(text.strip() in accepted[id(r)] for (r, _), text in zip(asked, said)), len(asked)
    return dict(task=name, kind="exact match", n=n, shots=shots, score=hits / n, interval=wilson(hits, n), chance=0.0)


# -----------------------------------------------------------------------------
# lm-evaluation-harness


def harness_model(model, tok):
    """Our model behind lm-evaluation-harness' own interface (lm_eval.api.model.LM): batched, equal requests scored once."""
    from lm_eval.api.model import LM
    from lm_eval.models.utils import normalize_gen_kwargs
    T = model.config.block_size

    class Harness(LM):
        tokenizer_name = tok.name

        def loglikelihood(self, requests, disable_tqdm=False):
            windows = [pair(tok, *r.args, T) for r in requests]
            once = list(dict.fromkeys((tuple(ids), first) for ids, first in windows))          # equal requests are scored once
            scores = dict(zip(once, token_scores(model, once)))
            return [(-float(nll.sum()), bool(top.all())) for nll, top in (scores[tuple(ids), first] for ids, first in windows)]

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            totals = []
            for r in requests:                                              # the harness' rule: no overlap, one token of context;
                ids, windows = [tok.bos, *tok.encode(r.args[0])], []        # one <s>: its HFLM puts two, unless add_bos_token=False
                for i in range(1, len(ids), T):                             # the last window is filled up with context from the left
                    end = min(i + T, len(ids))
                    begin = max(0, end - T - 1)
                    windows.append((ids[begin:end], i - begin))
                totals.append(-float(sum(nll.sum() for nll, _ in token_scores(model, windows))))
            return totals

        def generate_until(self, requests, disable_tqdm=False):
            found, groups = [None] * len(requests), {}
            for i, r in enumerate(requests):                                # those with the same stops and length are decoded together
                how = normalize_gen_kwargs(r.args[1])                       # length and stops have several names
                if how["do_sample"] and how["temperature"]:
                    raise ValueError("this harness interface decodes greedily; the task asks for sampling")
                groups.setdefault((tuple(how["until"]), min(how["max_gen_toks"], T // 2)), []).append(i)
            for (stops, n), members in groups.items():
                for i, text in zip(members, continue_texts(model, tok, [requests[i].args[0] for i in members], stops, n)):
                    found[i] = text
            return found

    return Harness()


def run_harness(model, tok):
    try:
        import lm_eval
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise ValueError("lm-evaluation-harness is not installed: pip install lm-eval") from None
    manager = TaskManager(include_path=harness_path or None, include_defaults=not harness_path)
    names = harness.split(",")
    missing = [n for n in names if n not in manager.all_tasks]
    if missing:
        raise ValueError(f"lm-evaluation-harness has no task {missing[0]!r}: `lm_eval --tasks list` shows them, "
                         "--harness_path=FOLDER takes your own")
    found = lm_eval.simple_evaluate(harness_model(model, tok), tasks=names, num_fewshot=shots or None, limit=limit or None,
                                    task_manager=manager)
    rows = []
    for task, result in found["results"].items():                           # tasks, and groups of tasks, whose n is the sum of theirs
        for key, value in result.items():
            if not isinstance(value, float) or "_stderr" in key:
                continue
            stderr = result.get(key.replace(",", "_stderr,", 1))
            rows.append(dict(task=task, kind="harness", n=result["sample_len"], shots=found["n-shot"].get(task), metric=key, score=value,
                             stderr=stderr, interval=harness_interval(value, stderr, result["sample_len"])))
    return rows


def harness_interval(score, stderr, n):
    """
    95 % interval of a mean that lm-evaluation-harness reports with its standard error; None without one.

    Values that are 0 or 1 have the standard error sqrt(p (1 - p) / (n - 1)) and only they: Wilson's interval. All others: Student's t.
    """
    if not isinstance(stderr, float) or n < 2:
        return None
    if 0 <= score <= 1 and math.isclose(stderr, math.sqrt(score * (1 - score) / (n - 1)), rel_tol=1e-6, abs_tol=1e-12):
        return wilson(score * n, n)
    half = t_quantile(n - 1) * stderr
    return score - half, score + half


# -----------------------------------------------------------------------------
# what is written


def table_md(results):
    """evaluation.json as Markdown."""
    lines = [f"# {results['model']}", ""]
    if results["texts"]:
        lines += ["| text | documents | bytes | bytes/token | bits/byte (95 %) |", "|---|---|---|---|---|"]
        for r in results["texts"]:
            lines.append(f"| {r['group']} | {r['documents']:,} | {r['bytes']:,} | {r['bytes'] / r['tokens']:.2f} | "
                         f"{r['bits_per_byte']:.3f} ± {r['plus_minus']:.3f} |")
        lines.append("")
    if results["tasks"]:
        lines += ["| task | n | shots | score (95 %) | per byte | chance |", "|---|---|---|---|---|---|"]
        for r in results["tasks"]:
            if r["kind"] == "harness":
                bounds = f"({r['interval'][0]:.3f} to {r['interval'][1]:.3f})" if r["interval"] else ""
                lines.append(f"| {r['task']} ({r['metric']}) | {r['n']} | {r['shots']} | {r['score']:.3f} {bounds} | | |")
                continue
            norm = f"{r['score_norm']:.3f} ({r['interval_norm'][0]:.3f} to {r['interval_norm'][1]:.3f})" if "score_norm" in r else ""
            lines.append(f"| {r['task']} ({r['kind']}) | {r['n']} | {r['shots']} | {r['score']:.3f} ({r['interval'][0]:.3f} to "
                         f"{r['interval'][1]:.3f}) | {norm} | {r['chance']:.3f} |")
        lines.append("")
    return "\n".join(lines)


def draw_bars(rows, picture, title):
    """Bits per byte by group, best first, with 95 % intervals."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = sorted((r for r in rows if r["group"] != "all"), key=lambda r: r["bits_per_byte"])
    figure, axis = plt.subplots(figsize=(8, 1 + 0.3 * len(rows)), layout="constrained")
    spread = [0 if math.isnan(r["plus_minus"]) else r["plus_minus"] for r in rows]
    axis.barh([r["group"] for r in rows], [r["bits_per_byte"] for r in rows], xerr=spread,
              color="C0", ecolor="grey", height=0.7)
    axis.invert_yaxis()
    axis.set_xlabel("bits per byte (lower is better); 95 % intervals over documents")
    axis.set_title(title, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110)
    plt.close(figure)


def main():
    place = pick_device(device)
    model, tok = convert.load_any(init_from, place, None if dtype == "auto" else pick_dtype(dtype, place))
    if place == "cuda" and dtype == "auto":
        model.to(torch.bfloat16)
    model.eval()
    is_run = os.path.isdir(os.path.join(init_from, "ckpt"))
    sources = list(paths)
    if not sources and not harness:
        if not is_run:
            raise ValueError(f"{init_from} is no run folder with validation data of its own: name texts or tasks, or --harness=TASKS")
        with open(os.path.join(init_from, "config.json"), encoding="utf-8") as f:
            sources = [json.load(f)["data"]]
    documents, tasks = [], []
    for path in sources:
        name = os.path.basename(os.path.normpath(path))
        if os.path.isdir(path):
            documents += list(validation_documents(path, tok))[:limit or None]
        elif path.endswith(".jsonl"):
            want = '"text", or with "question" and "answer"'
            rows = read_rows(path, lambda r: {"text", "question"} & r.keys(), want)[:limit or None]
            texts = [r for r in rows if "text" in r]
            documents += [(str(r.get(by, name)), r["text"]) for r in texts if r["text"].strip()]
            for kind, score in ((True, choice_scores), (False, answer_scores)):
                asked = [r for r in rows if "text" not in r and ("choices" in r) == kind]
                if asked:
                    tasks.append(score(model, tok, asked, name))
        elif os.path.isfile(path):
            with open(path, encoding="utf-8") as f:
                documents.append((name, f.read()))
        else:
            raise ValueError(f"no file or folder {path!r}")
    tasks += run_harness(model, tok) if harness else []
    results = dict(model=init_from, texts=text_scores(model, tok, documents) if documents else [], tasks=tasks)
    folder = out or (init_from if is_run else "results/evaluate")
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "evaluation.json"), "w", encoding="utf-8") as f:
        json.dump(results, f, indent=1)
    if len(results["texts"]) > 2:
        title = f"{init_from}: {results['texts'][0]['bits_per_byte']:.3f} bits per byte overall"
        draw_bars(results["texts"], os.path.join(folder, "evaluation.png"), title)
    print(table_md(results))
    print(f"wrote {os.path.join(folder, 'evaluation.json')}")


if __name__ == "__main__":
    from configurator import run
    run(main, globals())
