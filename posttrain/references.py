"""
The references of posttrain/qrpo.py on disk: sampled completions, their rewards, their log-probs.

Each batch is a JSON file, written whole under its final name, and an existing file is not made again: a run can be
killed anywhere, and runs with the same start model share the folder.

    references/HASH/                             HASH: of the start model, the data, the seed and the lengths
                    samples-N-0000000.json       N prompts per file: [[ids, ...] of each prompt]
                    rewards-HASH-0000000.json    HASH: of the reward's files and function, or of its judge and charter
                    logp-DTYPE-N-of-M-0000000.json    N of the M completions per file
"""

import functools
import inspect
import itertools
import math
import os
import runpy
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as recompute

import convert
import evaluate
from chat import DATE, content_of, describe_dropped, prompt_ids
from engine.files import sha256_of
from engine.parallel import drop_gathered
from generate import generate
from loss import at_least_fp32, chunk_rows
from posttrain.common import cached
from posttrain.conversations import first_rows, sources_of
from posttrain.judge import Charter, parse_spec, reward_hash
from posttrain.start import load_whole

END = "<|assistant_end|>"       # the token that ends a completion
# The settings that decide which completions are sampled.
OF_SAMPLES = ["seed", "base", "n_refs", "sample_batch", "max_new_tokens", "max_length"]


# -----------------------------------------------------------------------------
# prompts


@dataclass
class Prompt:
    """A prompt, its completions as ids, and a reward for each of these."""
    place: str                  # in the data, for error messages
    row: dict                   # of the data
    ids: list
    given: list                 # completions in the data
    given_rewards: list = ()
    references: list = ()       # completions of the start model; with ref_rewards in the data there are none
    ref_rewards: list = ()


def read_prompts(tok, settings):
    """
    The prompts that can be used, and [(reason, place)] of the others. Without --rewards they have those of the data.

    settings: data, rewards and n_refs count. ValueError: no prompt, or a row lacks its rewards.
    """
    data, n_refs = settings["data"], settings["n_refs"]
    prompts, dropped = [], []
    for place, row in itertools.chain(*(first_rows(source, None, ()) for source in sources_of(data))):
        result = prompt_ids(tok, row)
        texts = row.get("completions", [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            result = "completions that are not a list of texts"
        if isinstance(result, str):
            dropped.append((result, place))
            continue
        prompt = Prompt(place, row, result, [[*tok.encode(text), tok.special[END]] for text in texts])
        if not settings["rewards"]:
            where = f"{data}, {place}: without --rewards,"
            prompt = replace(prompt, ref_rewards=read_numbers(row, "ref_rewards", n_refs, where),
                             given_rewards=read_numbers(row, "rewards", len(texts), where))
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{data}: {describe_dropped(dropped, 0, 'prompts')}")
    return prompts, dropped


def read_numbers(row, name, n, where):
    """The numbers row[name] as floats, of ref_rewards the first n. ValueError if they are not n finite numbers."""
    values = row.get(name, [])
    if isinstance(values, list) and name == "ref_rewards":
        values = values[:n]
    fits = isinstance(values, list) and len(values) == n
    if not fits or not all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
        raise ValueError(f"{where} {name}={str(values)[:60]}: want {n} finite numbers")
    return list(map(float, values))


# -----------------------------------------------------------------------------
# prompts -> completions -> rewards -> log-probs, each on disk


class References:
    """
    The references of a run, and the start model that makes them.

    model: the start model, on all ranks; settings: of posttrain/qrpo.py, a dict. hash: of the prompts' rows.
    """

    def __init__(self, model, tok, prompts, ranks, device, settings):
        self.model, self.tok, self.ranks, self.device, self.settings = model, tok, ranks, device, settings
        self.prompts = prompts
        self.hash = sha256_of([prompt.row for prompt in prompts])
        made_from = {name: settings[name] for name in OF_SAMPLES} | dict(
            start=convert.fingerprint(model),
            tokenizer=tok.hash,
            data=self.hash,
            date=DATE,
            prompts=sha256_of([prompt.ids for prompt in prompts]))
        self.folder = f"{settings['references'] or settings['out'] + '/references'}/{sha256_of(made_from)[:16]}"
        os.makedirs(self.folder, exist_ok=True)

    def file(self, stage, k):
        """The file of a stage that begins with its k-th entry."""
        return f"{self.folder}/{stage}-{k:07d}.json"

    def cached(self, stage, inputs, per_file, compute, together=False):
        """
        A list with an entry for each of the inputs, per_file of them in a file: compute(k, part), part = inputs[k:...].

        together: as in common.cached.
        """
        starts = range(0, len(inputs), per_file)
        parts = cached([self.file(stage, k) for k in starts], self.ranks, stage,
                       lambda n: compute(starts[n], inputs[starts[n]:starts[n] + per_file]), together)
        return list(itertools.chain(*parts))

    def room_for(self, prompts):
        """How many tokens a completion of these prompts (ids) may have: a longer one would be dropped."""
        room = self.settings["max_length"] - min(map(len, prompts))
        return max(1, min(self.settings["max_new_tokens"], room))

    def sample_and_score(self, score):
        """The prompts with references, and rewards of these and of the given completions. score: of load_reward()."""
        version = reward_hash(self.settings["rewards"])
        stage = f"rewards-{version}"
        # A judge that cannot read these prompts is an error before sampling. If rewards are on disk, it is not loaded.
        if isinstance(score, Charter) and not os.path.exists(self.file(stage, 0)):
            score.check([prompt.row for prompt in self.prompts], self.room_for([prompt.ids for prompt in self.prompts]))
        samples = self.sample(score)
        prompts = [replace(prompt, references=ids) for prompt, ids in zip(self.prompts, samples)]
        rewards = self.cached(stage, prompts, 64, lambda k, part: [self.rewards_of(prompt, score) for prompt in part])
        return [replace(prompt, ref_rewards=of_refs, given_rewards=of_given)
                for prompt, (of_refs, of_given) in zip(prompts, rewards)]

    def sample(self, score):
        """
        n_refs completions of each prompt, as ids, from the model that training starts from.

        A sharded model would gather all weights for every token: so each rank loads the whole model, and frees it when
        this function returns. The 70B is too large for that. Its data come with "completions" and "ref_rewards" from an
        inference engine, and no rank ever holds the whole model.
        """
        prompts = [prompt.ids for prompt in self.prompts]
        per_file = max(1, self.settings["sample_batch"] // self.settings["n_refs"])
        stage = f"samples-{per_file}"
        missing = [k for k in range(0, len(prompts), per_file) if not os.path.exists(self.file(stage, k))]
        model = self.model
        if self.ranks.sharded and missing:
            # In the dtype of the activations, or every token would convert all weights to it.
            model = load_whole(self.settings, self.device).to(model.dtype)
        draw = functools.partial(self.draw, model)
        # The first prompt is scored at once, so that an error in the reward function comes before hours of sampling.
        [ids, *_] = self.cached(stage, prompts[:per_file], per_file, draw)
        if any(missing):                                   # a file other than the first, whose number is 0
            self.rewards_of(replace(self.prompts[0], references=ids), score)
        return self.cached(stage, prompts, per_file, draw)

    def draw(self, model, k, prompts):
        """n_refs completions of each of these prompts (ids), as ids. k: the number of the first of them."""
        # Seeded by the batch and not by the run, so that a resumed run draws the same.
        generator = torch.Generator(self.device).manual_seed(self.settings["seed"] * 1_000_003 + k)
        return sample_completions(
            model, self.tok, prompts, self.settings["n_refs"], self.room_for(prompts), generator)

    def rewards_of(self, prompt, score):
        """
        [rewards of a prompt's references, those of the given completions], from one call, because a reward may compare
        all. ValueError if the function raises, or does not return one finite number for each.
        """
        texts = [self.tok.words(ids) for ids in [*prompt.references, *prompt.given]]
        where = f"{self.settings['data']}, {prompt.place}: --rewards={self.settings['rewards']}"
        values = score_texts(score, prompt.row, texts, where, ". The samples are kept: repair it and --resume")
        return [values[:len(prompt.references)], values[len(prompt.references):]]

    @torch.no_grad()
    def log_probs(self, sequences):
        """
        Log-probs of completions under the start model, a list of floats, in batches as large as in training. sequences:
        as in sequence_logp().
        """
        size = 2 * self.settings["micro_batch"]
        per_file = 64 * size

        def compute(k, part):
            # Sharded ranks gather each other's weights, so each of them runs the forward passes of a full file.
            end = per_file if self.ranks.sharded else len(part)
            batches = [sequence_logp(self.model, part[k:k + size] or part[:1]) for k in range(0, end, size)]
            return torch.cat(batches).tolist()[:len(part)]

        self.model.eval()
        stage = f"logp-{str(self.model.dtype).removeprefix('torch.')}-{per_file}-of-{len(sequences)}"
        values = self.cached(stage, sequences, per_file, compute, together=self.ranks.sharded)
        drop_gathered(self.model)
        self.model.train()
        return values


def sample_completions(model, tok, prompts, n, room, generator):
    """n completions of each of the prompts (ids), as ids of at most `room` tokens: a list of n for each prompt."""
    repeated = [ids for ids in prompts for _ in range(n)]
    # Stop at a tool call too: the model would invent the tool's output. Unfinished completions are left out.
    stop = {tok.special[END], tok.special.get("<|tools_suffix|>", tok.special[END])}
    # Temperature 1, without top-k or top-p, samples from the model itself.
    texts = generate(model, repeated, room, stop, generator=generator)
    completions = [text[len(ids):] for text, ids in zip(texts, repeated)]
    return [completions[i:i + n] for i in range(0, len(completions), n)]


# -----------------------------------------------------------------------------
# log-probs


def token_logp(h, targets, head):
    """log p of each target: h (n, C), targets (n,), head (V, C) -> (n,), in fp32."""
    logits = at_least_fp32(h @ head.to(h.dtype).T)
    return -F.cross_entropy(logits, targets, reduction="none")


def laid_out(sequences):
    """B pairs of ids (prompt, completion) -> idx and targets, (B, T) each on the CPU; -1: not of the completion."""
    return evaluate.padded_batch([([*prompt, *completion], len(prompt)) for prompt, completion in sequences], "cpu")


def sequence_logp(model, sequences):
    """
    log pi(completion | prompt) in nats, summed over the completion's tokens in fp32, with gradient.

    sequences: B pairs of ids (prompt, completion) -> (B,). Logits exist for the tokens of completions only, a chunk at
    a time, and are computed again in the backward pass: 2,048 tokens of 131,072 logits would be 1.1 GB per sequence.
    """
    head = model.lm_head.weight                     # (V, C)
    idx, targets = laid_out(sequences)
    # The completions are located on the CPU, because nonzero() on a GPU would wait for it.
    positions = (targets >= 0).flatten().nonzero()[:, 0]
    targets = targets.flatten()[positions]          # (n,)
    # Not on MPS, which may read a tensor after it is freed (pytorch issue 189690).
    idx, positions, targets = (t.to(head.device, non_blocking=head.is_cuda) for t in (idx, positions, targets))
    h = model.hidden(idx).flatten(0, 1)[positions]  # (n, C), at the position before each token
    head = model.lm_head.weight                     # again, since sharded ranks have gathered it in hidden()
    rows = chunk_rows(len(head), h.device)
    logp = [recompute(token_logp, *chunk, head, use_reentrant=False)
            for chunk in zip(h.split(rows), targets.split(rows))]
    completions = torch.cat(logp).split([len(completion) for _, completion in sequences])
    return torch.stack([token_logps.sum() for token_logps in completions])


# -----------------------------------------------------------------------------
# rewards


def in_one_line(error):
    return " ".join(f"{type(error).__name__}: {error}".split())


def score_texts(score, row, texts, where, advice=""):
    """
    The rewards of completions (str) of the prompt of a row. where, advice: beginning and end of the ValueError if the
    function raises, or does not return one finite number for each.
    """
    try:
        values = [float(value) for value in score(row, texts)]
    except Exception as e:          # anything may come from the user's code
        raise ValueError(f"{where} failed ({in_one_line(e)}){advice}") from None
    return read_numbers(dict(rewards=values), "rewards", len(texts), where)


def load_reward(spec, device):
    """
    --rewards -> a function (row, completions) -> a number for each of the completions of one prompt.

    FILE.py[:name]: its function reward(prompt, completion), where prompt is the text of the last user message; a third
    argument gets the whole row of the data, which may hold a gold answer. Or its function rewards(row, completions),
    recognised by its argument `completions`. charter:MODEL[,FILE]: posttrain/judge.py. ValueError: no such function.
    """
    path, _, name = spec.partition(":")
    if path == "charter":
        return Charter(*parse_spec(name), device)
    try:
        script = runpy.run_path(path)
    except Exception as e:          # anything may come from the user's code
        raise ValueError(f"--rewards={spec}: {path} cannot be read ({in_one_line(e)}); want FILE.py with "
                         "reward(prompt, completion), or charter:MODEL,FILE") from None
    names = [name] if name else ["reward", "rewards"]
    functions = [script[name] for name in names if callable(script.get(name))]
    if len(functions) != 1:
        raise ValueError(f"--rewards={spec}: {path} has {len(functions)} functions named {' or '.join(names)}: want "
                         "one, reward(prompt, completion) or rewards(row, completions); FILE.py:NAME picks it")
    [function] = functions
    signature = inspect.signature(function)
    if "completions" in signature.parameters:
        return function
    try:
        signature.bind("prompt", "completion", "row")
        takes_row = True
    except TypeError:
        takes_row = False

    def one_by_one(row, completions):
        question = content_of(row["messages"][-1])
        more = [row] if takes_row else []
        return [function(question, completion, *more) for completion in completions]
    return one_by_one
