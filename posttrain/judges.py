"""
Judges: models that are asked for one word, and how probable each word is.

    judge.logp(texts, words) -> (n, len(words))     log p of the answer's first token being that word

Each text is one user message. The probability of a word is summed over all tokens that read as the word once blanks
are taken off: "8" and " 8" are the same answer. A sampled answer would be one digit of nine, its probabilities are the
whole opinion. Thinking is switched off, because it collapses them (arXiv 2503.03064).

    run folder, or a hub name or folder of an Apertus    convert.py loads it, chat.py writes the conversation
    any other chat model of transformers                 its own template
    http://localhost:8000/v1#NAME                        an OpenAI-compatible server; it lists the 20 likeliest tokens

No text can speak as the template does. Apertus' control tokens cannot be typed, transformers is told to keep typed
ones text, and for a server, whose vocabulary is unknown here, whatever looks like one is broken by a zero-width space.
"""

import concurrent.futures
import hashlib
import inspect
import json
import math
import os
import re
import time
import urllib.error
import urllib.request

import torch
from torch.nn.utils.rnn import pad_sequence

import convert
from engine import restore
from engine.files import read_json, sha256
from engine.hardware import pick_device

BATCH = 8                   # texts at once, for models that run here
AT_ONCE = 8                 # requests to a server
LISTED = 20                 # tokens that a server is asked for: the most that OpenAI's interface allows
TRIES = 3                   # of a request that the server does not answer
WAIT = 2.0                  # seconds between them
TIMEOUT = 600               # seconds for an answer
DATE = "2025-09-02"         # "Current date" of Apertus' system message; fixed, so that a score can be repeated

# What some template may use as a control token: <|im_end|>, </s>, <start_of_turn>, [INST].
LIKE_CONTROL = re.compile(r"<(?=[^\s<>]{1,60}>)|\[(?=/?[A-Z_]{2,20}\])")


def load(name, device="auto"):
    """The judge of that name: see above. ValueError or OSError if there is none."""
    if is_url(name):
        return Server(name)
    kind = Ours if is_ours(name) else Theirs
    return kind(name, pick_device(device))


def is_ours(name):
    """Whether convert.py loads it: a run, adapters on an Apertus, or an Apertus; by its config.json."""
    if os.path.isdir(f"{name}/ckpt"):
        return True
    folder = convert.local(name)
    if os.path.isfile(f"{folder}/adapter_config.json"):
        return True
    config = f"{folder}/config.json"
    if not os.path.isfile(config):
        raise ValueError(f"{name} is no model: it has no config.json and no checkpoints")
    return str(read_json(config).get("model_type")).startswith("apertus")


def is_url(name):
    return name.startswith(("http://", "https://"))


def version(name):
    """What decides a judge's answers: the hash of its files, wherever they lie, or the address and name of a server."""
    if is_url(name):
        return name
    if os.path.isdir(f"{name}/ckpt"):
        found = restore.newest_intact(f"{name}/ckpt")
        return sha256(f"{found[0]}/manifest.json") if found else "no checkpoint"
    return hash_of(files_of(convert.local(name)))


def files_of(folder):
    return [os.path.join(folder, file) for file in sorted(os.listdir(folder))]


def hash_of(files, name=""):
    """A hash of the contents and the names of files, and of one name more, whatever folder they are in."""
    digests = []
    for file in filter(os.path.isfile, files):
        sha = sha256(file)
        digests.append((os.path.basename(file), sha))
    decisive = repr((name, digests))
    return hashlib.sha256(decisive.encode()).hexdigest()[:16]


def sanitised(tok, messages, **template):
    """
    The ids of a conversation by a transformers tokenizer and its template. Control tokens that somebody has typed into
    a message stay text; those that the template writes are control tokens.
    """
    if "sanitize_control_tokens" not in inspect.signature(tok.apply_chat_template).parameters:
        raise ValueError("this transformers turns typed control tokens into real ones: pip install -U transformers")
    return tok.apply_chat_template(messages, sanitize_control_tokens=True, return_dict=False, **template)


# -----------------------------------------------------------------------------
# models that run here


class Local:
    """
    What both kinds of models that run here have in common. They know

        window              tokens that they can read
        ids(text)           of the conversation up to where the answer begins
        tokens()            (text, id) of each token of the vocabulary
        logits(idx, last)   (B, V) of the positions `last` (B,) of ids (B, T)
    """

    def __init__(self):
        self.spelled = {}       # word: ids that read like it
        for text, i in self.tokens():
            self.spelled.setdefault(text.strip(), []).append(i)

    # "8", " 8" and "8\n" are one answer. To look at one of them alone, as the published scripts do, takes a word for
    # improbable because its probability is spread over several spellings.
    def spell(self, word):
        """All ids that are the word, with blanks around it or without. ValueError if no single token is."""
        if word not in self.spelled:
            raise ValueError(f"{self.name} cannot judge: no token of its vocabulary is the word {word!r} alone")
        return self.spelled[word]

    def count(self, text):
        """Tokens of the conversation."""
        return len(self.ids(text))

    @torch.no_grad()
    def logp(self, texts, words):
        """(n, len(words)) in fp64. ValueError for a text over the window, and for logits that are not finite."""
        spelled = list(map(self.spell, words))
        found = [torch.zeros(0, len(words), dtype=torch.float64)]
        for k in range(0, len(texts), BATCH):
            some = texts[k:k + BATCH]
            rows = [torch.tensor(self.ids(text)) for text in some]
            last = torch.tensor(list(map(len, rows))) - 1
            if last.max() >= self.window:
                raise ValueError(f"{last.max() + 1} tokens are more than {self.name} can read, {self.window}")
            # Padded on the right, where a causal model does not look.
            idx = pad_sequence(rows, batch_first=True)                  # (B, T)
            logits = self.logits(idx.to(self.device), last.to(self.device))
            logp = logits.double().log_softmax(-1).cpu()                # (B, V)
            of_words = [logp[:, ids].logsumexp(-1) for ids in spelled]
            found.append(torch.stack(of_words, -1))
        found = torch.cat(found)
        if not found.isfinite().all():
            raise ValueError(f"{self.name} gives logits that are not finite: it cannot judge")
        return found


class Ours(Local):
    """An Apertus: of a run folder, a Hugging Face folder or the hub."""

    def __init__(self, name, device):
        self.name, self.device = name, device
        self.model, self.tok = convert.load_ready(name, device, "auto", chat=True)
        self.tok.check_chat()
        self.window = self.model.config.block_size
        super().__init__()

    def tokens(self):
        for piece, i in zip(self.tok.pieces, self.tok.ids):
            yield piece.decode("utf-8", errors="replace"), i

    def ids(self, text):
        messages = [dict(role="user", content=text)]
        if self.tok.system is not None:
            messages.insert(0, dict(role="system", content=self.tok.system))
        return self.tok.chat(messages, add_generation_prompt=True, date=DATE)[1]

    def logits(self, idx, last):
        h = self.model.hidden(idx)                          # (B, T, C)
        rows = torch.arange(len(idx), device=idx.device)
        return self.model.lm_head(h[rows, last])


class Theirs(Local):
    """Any other chat model that transformers knows."""

    def __init__(self, name, device):
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError:
            raise ValueError(f"{name} is no Apertus: to judge it needs pip install transformers") from None
        self.name, self.device = name, device
        try:
            self.tok = AutoTokenizer.from_pretrained(name)
            model = AutoModelForCausalLM.from_pretrained(name, use_safetensors=True, dtype="auto")
        except (OSError, ValueError) as e:
            [why, *_] = str(e).splitlines() or ["?"]
            raise ValueError(f"{name} is no chat model that transformers can load: {why}") from None
        if not self.tok.chat_template:
            raise ValueError(f"{name} has no chat template: a judge is asked in a conversation")
        self.model = model.to(device).eval()
        config = model.config.get_text_config()
        self.window = getattr(config, "max_position_embeddings", math.inf)
        super().__init__()

    def tokens(self):
        ids = [[i] for i in range(len(self.tok))]
        for text, [i] in zip(self.tok.batch_decode(ids), ids):
            yield text, i

    def ids(self, text):
        messages = [dict(role="user", content=text)]
        return sanitised(self.tok, messages, add_generation_prompt=True, enable_thinking=False)

    def logits(self, idx, last):
        # The rows end at few different positions: only there are there logits, of 150,000 words each.
        ends, which = last.unique(return_inverse=True)
        positions = torch.arange(idx.shape[1], device=idx.device)
        mask = positions <= last[:, None]
        rows = torch.arange(len(idx), device=idx.device)
        found = self.model(
            input_ids=idx,
            attention_mask=mask.long(),
            logits_to_keep=ends,
        )
        return found.logits[rows, which]


# -----------------------------------------------------------------------------
# a server


class Server:
    """
    A model behind an OpenAI-compatible address, http://HOST/v1#NAME; $OPENAI_API_KEY, if set, is sent along.

    One token is asked for and its list of alternatives is read, so that it does not matter which one was sampled.
    Temperature 1: some servers list log-probs after it, others before. A word that is not among the 20 is -inf.
    """

    window = math.inf       # it says itself what is too long

    def __init__(self, url):
        address, _, self.model = url.partition("#")
        self.url = address.rstrip("/")
        self.name = url
        if not self.model:
            raise ValueError(f"judge {url}: want http://HOST:PORT/v1#NAME, with the name that the server has for it")

    def count(self, text):
        """Unknown here: the server has the vocabulary."""
        return 0

    def logp(self, texts, words):
        """(n, len(words)) in fp64; -inf for what is not listed. OSError if there is no answer."""
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            rows = list(pool.map(self.listed, texts))
        p = torch.zeros(len(texts), len(words), dtype=torch.float64)
        place = {word: j for j, word in enumerate(words)}
        for i, row in enumerate(rows):
            for token, logp in row:
                j = place.get(token.strip())
                if j is not None:
                    p[i, j] += math.exp(logp)
        return p.log()

    def listed(self, text):
        """[(token, log-prob)] of the first token of the answer."""
        text = LIKE_CONTROL.sub(lambda found: found[0] + "\u200b", text)
        answer = self.post(dict(
            model=self.model,
            messages=[dict(role="user", content=text)],
            max_tokens=1,
            temperature=1,
            logprobs=True,
            top_logprobs=LISTED,
            chat_template_kwargs=dict(enable_thinking=False),
        ))
        found = []
        try:
            first = answer["choices"][0]["logprobs"]["content"][0]
            for entry in first["top_logprobs"]:
                found.append((entry["token"] + "", float(entry["logprob"])))
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"{self.name} lists no log-probs ({str(answer)[:80]}): a judge needs them") from None
        if not all(math.isfinite(logp) for _, logp in found):
            raise ValueError(f"{self.name} gives log-probs that are not finite: it cannot judge")
        return found

    def post(self, body):
        """What the server answers to /chat/completions."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        content = json.dumps(body).encode()
        ask = urllib.request.Request(f"{self.url}/chat/completions", content, headers)
        for left in reversed(range(TRIES)):
            try:
                with urllib.request.urlopen(ask, timeout=TIMEOUT) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as e:
                # Of the 400s only "too many requests" passes.
                if e.code < 500 and e.code != 429 or not left:
                    said = e.read(200).decode(errors="replace")
                    raise ValueError(f"{self.name} refuses ({e.code}): {' '.join(said.split())}") from None
            except (OSError, ValueError) as e:
                if not left:
                    raise OSError(f"{self.name} does not answer ({e}): start it, then repeat the command") from None
            time.sleep(WAIT)
