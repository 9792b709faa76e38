"""
Run a lesson's file on the telling inputs of tools/lessons.toml, and compare with the right values and typical mistakes.

tools/lesson.py starts main() in a process in which the reader's file replaces the project's: its folder is the
first in PYTHONPATH. Each function below imports the file of one lesson, and returns {name: how to call it} with
the plain numbers and texts of a case.
"""

import sys
import tomllib
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import tensor

from configurator import ROOT


def rope():
    import model

    def norm(x, weight):
        layer = model.RMSNorm(len(weight), eps=1e-5)
        layer.load_state_dict({"weight": tensor(weight)})
        return layer.forward(tensor(x))

    def frequencies(scaling):
        return model.rope_frequencies(model.ApertusConfig(n_embd=8, n_head=1, n_kv_head=1, rope_scaling=scaling))

    return dict(norm=norm, frequencies=frequencies, rotate=lambda *xs: model.rotate(*map(tensor, xs)))


def attention():
    import model

    def forward(T, shift, size, documents, keys):
        """
        The last of T positions. shift: of the positions; size: of the weights that make queries and keys.

        documents: document numbers, or none. keys: the owner of all keys, "layer", "cache" or "ranks". Cache and ranks
        are replaced by objects that return the negative of attention, so that the result shows their use.
        """
        layer = model.Attention(model.ApertusConfig(n_embd=8, n_head=4, n_kv_head=2), 9).double()
        layer.load_state_dict({
            name: (torch.arange(p.numel()).view(p.shape) % 7 - 2.0) * (size if name[0] in "qk" and p.ndim > 1 else 1)
            for name, p in layer.state_dict().items()} | {"k_norm.weight": tensor([1.0, -1.5])})
        x = (torch.arange(8.0 * T).view(1, T, 8) ** 2 % 11 - 5).double()
        angle = (torch.arange(T).double() + shift)[:, None].expand(T, 2)[None]
        cache = None
        if keys == "cache":
            cache = SimpleNamespace(attend=lambda number, q, k, v: number - model.attend(q, k, v))
        elif keys == "ranks":
            layer.attend_across_ranks(SimpleNamespace(attend=lambda *args: -model.attend(*args)))
        documents = tensor([documents]) if documents else None
        return layer.forward(x, angle.cos(), angle.sin(), documents, cache)[0, -1, :4]

    return dict(forward=forward)


def xielu():
    import model
    layer = model.XIELU()
    layer.load_state_dict(dict(alpha_p=torch.ones(1), alpha_n=-torch.ones(1)))

    def slope(x):
        x = tensor(x, requires_grad=True)
        return torch.autograd.grad(layer.formula(x).sum(), x)[0]

    # The slope comes first: it tells no clamp from one at 0, which have the same value at 0.
    return dict(slope=slope, formula=lambda x: layer.formula(tensor(x)),
                bf16=lambda x: [layer.formula(tensor(x).bfloat16()).dtype.itemsize,
                                *layer.formula(tensor(x).bfloat16()).float()])


def mask():
    import model

    def attend(q, k, v, documents):
        """
        One number per position, or per window and position if there are several windows.

        q, k and v: one number per position, the same in all windows and in the two channels. documents: their numbers
        in one window or in each of several, or none.
        """
        documents = tensor(documents).view(-1, len(q)) if documents else None
        B = 1 if documents is None else len(documents)
        q, k, v = (tensor(x).view(1, 1, -1, 1).expand(B, 1, -1, 2) for x in (q, k, v))
        return model.attend(q, k, v, documents)[:, 0, :, 0].squeeze(0)

    return dict(attend=attend)


def loss():
    import loss

    def chunk(z, targets, weights, with_gradient):
        """(nll, gradient) of these logits: the matrix of the head is the unit matrix."""
        z = tensor(z)
        return loss.chunk_loss(z, torch.eye(z.shape[-1]), tensor(targets), tensor(weights), with_gradient)

    return dict(nll=lambda *args: chunk(*args, False)[0], gradient=lambda *args: chunk(*args, True)[1])


def goldfish():
    import goldfish

    def mask(labels, k, h, hash, context, dtype="int64"):
        context = tensor(context, dtype=getattr(torch, dtype)) if context else None
        return goldfish.goldfish_mask(tensor(labels, dtype=getattr(torch, dtype)), k, h, hash, context).long()

    def repeats(passage, k, h):
        """Whether two copies of a passage, one after the other, have the same mask far from their ends: 1 or 0."""
        first, second = mask([passage, passage], k, h, "product", []).view(2, -1)[:, h:-h]
        n, both = len(passage), mask(passage + passage, k, h, "product", [])
        return int(first.equal(second) and both[h:n - h].equal(both[n + h:2 * n - h]))

    return dict(window_product=lambda x, h: goldfish.window_product(np.array(x), h),
                kept_keys=lambda k, keys: goldfish.kept_keys(k)[keys].astype(int), mask=mask, repeats=repeats)


def ademamix():
    import ademamix

    def step(g, moments, settings, gradient="float32"):
        """[weight, moments, gradient] of one number after a step from the weight 1. gradient: the dtype of g."""
        p, m1, m2, v = (tensor([x]) for x in (1.0, *moments))
        g = tensor([g], dtype=getattr(torch, gradient))
        ademamix.ademamix(p, g, m1, m2, v, *map(tensor, settings))
        return [x.item() for x in (p, m1, m2, v, g)]

    return dict(step=lambda *args: step(*args)[:4], gradient=lambda *args: step(*args)[4],
                alpha=ademamix.alpha_at, memory=lambda *args: 1 / (1 - ademamix.beta3_at(*args)))


def schedule():
    import schedule
    return dict(wsd=lambda samples, *args: [schedule.wsd(s, *args) for s in samples],
                decay=schedule.rescale_decay)


def feistel():
    import data

    def numbers(x):
        return np.array(x, np.uint64)

    return dict(hash32=lambda x: data.hash32(numbers(x)), feistel=lambda x, half, keys: data.feistel(
        numbers(x), half, keys), permute=lambda n, epoch: data.permute(np.arange(n), n, 28, epoch))


def bpe():
    import tokenizer_json
    return dict(letters=lambda b: [tokenizer_json.byte_letters()[i] for i in b], merges=tokenizer_json.merges_of)


def qrpo():
    from posttrain import losses

    def loss(pi, ref, q, length, beta, beta_log_z):
        """Of one pair, with the reward 0."""
        ref, q, length, beta, beta_log_z = map(tensor, (ref, q, length, beta, beta_log_z))
        return losses.qrpo_loss(tensor(pi), losses.Known(ref, 0 * ref, q, length, beta, beta_log_z, length), 0.5, 0.0)

    return dict(quantile=losses.quantile, loss=loss,
                log_z=lambda *args: losses.discrete_beta_log_z(*map(tensor, args)),
                beta=lambda length, *args: losses.effective_beta(tensor(length), *args))


def robots():
    from corpus import robots

    def reason(text, path, agents=("GPTBot",), explicit=False):
        return robots.may_train_on(f"https://host.example{path}", text, agents, explicit)[1]

    return dict(kept=lambda text, paths, *agents: [int(reason(text, path, *agents) == "allowed") for path in paths],
                reason=reason)


LESSONS = dict(rope=rope, attention=attention, xielu=xielu, mask=mask, loss=loss, goldfish=goldfish, ademamix=ademamix,
               schedule=schedule, feistel=feistel, bpe=bpe, qrpo=qrpo, robots=robots)


def as_lists(value):
    """Tensors and arrays as lists of numbers."""
    if isinstance(value, (list, tuple)):
        return [as_lists(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def same(value, other):
    """Whether two results are equal to five digits, or equal texts."""
    try:
        a, b = np.array(value, float), np.array(other, float)
    except (TypeError, ValueError):
        return value == other
    return a.shape == b.shape and np.allclose(a, b, 1e-5, 1e-9, equal_nan=True)


def shown(value):
    """A result with six digits."""
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def describe(error):
    """An error and its line, as a text."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in line {at.lineno} of {Path(at.filename).name}: {error}"


def result(call, args):
    """The result of a call as lists, or as a text the error that it raises."""
    try:
        return as_lists(call(*args))
    except Exception as error:
        return describe(error)


def judge(call, case):
    """Print whether the result of a case is right; if not, print it too. Returns the result."""
    value = result(call, case["args"])
    right = same(value, case["right"])
    print("right  " if right else "WRONG  ", case["name"], flush=True)
    if not right:
        for word, shown_value in (("input", case["args"]), ("yours", value), ("right", case["right"])):
            print(f"         {word} {shown(shown_value)}")
    return value


def agrees(mistake, case, value):
    """Whether a mistake gives this result in a case. In cases that do not list it, it changes nothing."""
    return any(same(value, typical) for typical in case["wrong"].get(mistake, [case["right"]]))


def typical_mistakes(tried):
    """
    The set of mistakes that (case, result) pairs show.

    Several mistakes may give the same wrong result. Of these, the ones that disagree with the fewest other cases count.
    """
    named = set()
    for case, value in tried:
        if same(value, case["right"]):
            continue
        disagree = {mistake: sum(not agrees(mistake, *other) for other in tried)
                    for mistake in case["wrong"] if agrees(mistake, case, value)}
        named |= {mistake for mistake, n in disagree.items() if n == min(disagree.values())}
    return named


def main():
    """Print the cases of the lesson sys.argv[1] and the mistakes that they show, and exit with 1 if one is wrong."""
    name = sys.argv[1]
    lesson = tomllib.loads(Path(ROOT, "tools/lessons.toml").read_text())[name]
    try:
        calls = LESSONS[name]()
    except Exception as error:
        sys.exit(describe(error))
    tried, wrong, named = [], [], set()
    # Mistakes are named after each function, because a loop in the next one may not end.
    for function, call in calls.items():
        results = [(case, judge(call, case)) for case in lesson["cases"] if case["do"] == function]
        wrong_before = [name for name in lesson.get("needs", {}).get(function, []) if name in wrong]
        if not all(same(value, case["right"]) for case, value in results):
            wrong.append(function)
            if wrong_before:
                print(f"First mend {' and '.join(wrong_before)} above: it may be why these are wrong", flush=True)
        if wrong_before:
            continue
        tried += results
        for mistake in sorted(typical_mistakes(tried) - named):
            named.add(mistake)
            print(f"This looks like a typical mistake: {lesson['mistakes'][mistake]}", flush=True)
    sys.exit(bool(wrong))
