r"""
Text to token ids and back: bytes, Apertus' vocabulary, a prefix of it, or a BPE trained on your own text.

A byte-level BPE vocabulary is a list of byte strings, and their order is the algorithm: cut the text with a regular
expression, start from single bytes, and keep joining the two neighbours whose union comes first in the list.

    id = rank + n_special        ids below n_special are control tokens, which no text can produce

    byte        256 bytes, nothing to join                                                   vocab_size     320
    apertus     Apertus' own: Mistral-Nemo's 130,072 ranks after 1,000 control tokens        vocab_size 131,072
    apertus:K   the first K ranks. Every piece is the union of two earlier ones, so any
                prefix is a vocabulary too: nothing to train, same order as Apertus' own     vocab_size K + 64
    bpe:FILE    trained on your own text by train_bpe                                        vocab_size as you say

Text produces only seven control tokens: the three placeholders for personal data and four LaTeX pieces. `</s>` or
`<|user_start|>` in a web page is text about tokens. It is spelled out in ordinary pieces, so no document can end
itself and no user can speak as the assistant. Conversations: chat.py.

Source: Apertus report (arXiv 2509.14233) sec. 2.2; ids as in swiss-ai/Apertus-8B-2509's tokenizer.json.

$ python tokenizer.py --name=apertus "Grüezi mitenand </s>"                    # the pieces and their ids
$ python prepare.py my_texts/ --train_bpe=4096 --out=data/mine                 # a vocabulary of your own
$ python -m studies.fairness texts.jsonl --names=byte,apertus,apertus:32768    # what a language pays: table and plot
"""

import base64
import codecs
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import re

import numpy as np
import tiktoken

from configurator import attached, run
from engine.files import read_json, write_flushed

name = "apertus"    # the vocabulary: one of the above, or a data or run folder that has one
paths = []          # texts whose pieces are shown

# How text is cut before bytes are joined, as in Mistral-Nemo: words with at most one leading mark, cut again before a
# new capital; single digits; punctuation; line breaks.
PATTERN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
           r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
           r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# The same pattern, regrouped: tiktoken compiles the part without look-ahead to one automaton, which is faster.
GROUPED = "(?:" + PATTERN.replace(r"|\s+(?!\S)", r")|\s+(?!\S)")

# Apertus' ids 0 to 72, in order.
NAMED = r"""<unk> <s> </s> <pad> [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]
[TOOL_CALLS] <SPECIAL_10> [PREFIX] [MIDDLE] [SUFFIX] \begin{ \end{ \text{ \boxed{ <filename> <gh_stars> <issue_start>
<issue_comment> <issue_closed> <jupyter_start> <jupyter_text> <jupyter_code> <jupyter_output> <empty_output>
<commit_before> <commit_msg> <commit_after> <reponame> <think> </think> <answer> </answer> <iban-pii> <email-pii>
<ip-pii> <file_sep> <code_to_intermediate> <intermediate_to_code> <pr> <pr_status> <pr_is_merged> <pr_base>
<pr_file> <pr_base_code> <pr_diff> <pr_diff_hunk> <pr_comment> <pr_event_id> <pr_review> <pr_review_state>
<pr_review_comment> <pr_in_reply_to_review_id> <pr_in_reply_to_comment_id> <pr_diff_hunk_comment_line> <|fim_begin|>
<|fim_hole|> <|fim_end|> <|system_start|> <|system_end|> <|developer_start|> <|developer_end|> <|user_start|>
<|user_end|> <|assistant_start|> <|assistant_end|> <|inner_prefix|> <|inner_suffix|> <|tools_prefix|>
<|tools_suffix|>""".split()
# The only control tokens that ordinary text can produce.
IN_TEXT = NAMED[14:18] + NAMED[36:39]


def padded(names, n):
    """Fill `names` up to n control tokens; the new ones are free for your own use."""
    return names + [f"<SPECIAL_{i}>" for i in range(len(names), n)]


# `apertus` has the published 1,000 control tokens. All others have 64 with the same names, so that chat and SFT work:
# ids 0 to 3 as above, 4 to 10 IN_TEXT, 11 to 22 those of the chat.
SPECIAL = padded(NAMED, 1000)
SMALL = padded(NAMED[:4] + IN_TEXT + NAMED[61:], 64)
BYTES = [bytes([b]) for b in range(256)]


# ----------------------------------------------------------------------------------------------------------------------
# one vocabulary


class Tokenizer:
    """
    One vocabulary. Its attributes:

        name, vocab_size, n_special
        special           {name: id} of the control tokens
        bos, eos, pad     ids
        pieces, ids       the byte strings by rank, and the id of each
        in_text           the control tokens that ordinary text can produce
        hash              sha256 of everything that decides an id: equal for data and model when their ids agree
        system            the default system message of a conversation; None: that of chat.py
        foreign           why the model's conversations are not those of chat.py, or ""

    special: a list of names from id 0 on, or {name: id}. ids: of the pieces, rising; None: directly after the control
    tokens. ends: the names of bos, eos and pad.
    """

    def __init__(self, name, pieces, special, ids=None, in_text=IN_TEXT, ends=("<s>", "</s>", "<pad>")):
        if isinstance(special, list):
            special = {s: i for i, s in enumerate(special)}
        n = len(special)
        usual = list(range(n, n + len(pieces)))
        self.name = name
        self.pieces = pieces
        self.n_special = n
        self.special = special
        self.ids = list(ids or usual)
        self.in_text = special.keys() & in_text
        self.vocab_size = 1 + max(*special.values(), *self.ids)
        self.bos, self.eos, self.pad = (special[end] for end in ends)
        self.system = None
        self.foreign = ""

        decides = [PATTERN, *special, *(piece.hex() for piece in pieces)]
        if self.ids != usual or self.in_text != special.keys() & IN_TEXT:
            decides.append(json.dumps([list(special.values()), self.ids, sorted(self.in_text)]))
        self.hash = hashlib.sha256("\n".join(decides).encode()).hexdigest()

        # tiktoken joins by rank, but any rising numbers will do. Given our ids, it returns our ids.
        self._bpe = tiktoken.Encoding(
            name,
            pat_str=GROUPED,
            mergeable_ranks=dict(zip(pieces, self.ids)),
            special_tokens=special)

    def encode(self, text):
        """The ids of a text as a list, without <s> and </s>."""
        return self.encode_array(text).tolist()

    def encode_array(self, text):
        """The same as a numpy array (n,) of uint32: 4 bytes an id, where a Python list takes 36."""
        special = dict(allowed_special=self.in_text, disallowed_special=())
        try:
            return self._bpe.encode_to_numpy(text, **special)
        except ValueError:
            # The regular expression fails on a run of a million spaces. encode_to_numpy() fails on half a surrogate
            # pair, which is not UTF-8; encode() repairs it.
            ids = []
            for part in without_long_runs(text):
                ids += self._bpe.encode(part, **special)
            return np.array(ids, np.uint32)

    def decode_bytes(self, ids):
        """
        The bytes of a list or array of ids. Control tokens give their names. Unused ids (padding rows of the embedding)
        give nothing, as in transformers. ValueError: an id outside the vocabulary.
        """
        ids = [int(i) for i in ids]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(f"token ids {min(ids)} to {max(ids)}, but {self.name} has 0 to {self.vocab_size - 1}: "
                             "use the tokenizer that made them")
        try:
            return self._bpe.decode_bytes(ids)
        except KeyError:
            tokens = self.tokens()
            return self._bpe.decode_bytes([i for i in ids if i in tokens])

    def decode(self, ids):
        """The text of ids. Half a character at either end becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def stream(self):
        """A function id -> text, to print token by token: it holds bytes back until their character is complete."""
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda i: utf8.decode(self.decode_bytes([i]))

    def tokens(self):
        """{id: bytes of a piece, or name of a control token}."""
        return dict(zip(self.ids, self.pieces)) | {i: s for s, i in self.special.items()}

    def ends(self):
        """The names of bos, eos and pad."""
        tokens = self.tokens()
        return [tokens[i] for i in (self.bos, self.eos, self.pad)]

    def id_of(self, name):
        """The id of a control token. ValueError, one line, if this vocabulary does not have it."""
        if name not in self.special:
            raise ValueError(f"{self.name}: its vocabulary has no {name}: a conversation needs Apertus' control tokens")
        return self.special[name]

    # chat.py, which builds on this file, is imported on demand: pretraining does not need it.

    def chat(self, messages, *args, **options):
        """A conversation as the model reads it: (text, ids), with one <s>. Arguments, errors: chat.marked."""
        chat = attached("chat")
        text = chat.marked(messages, *args, **options)
        return text.translate(chat.SPELLED), self.chat_ids(text)[0]

    def chat_ids(self, text):
        """
        The text of chat.marked -> (ids, said), two lists: said[i] is True where the assistant itself produces ids[i].

        The text between two control tokens is encoded as one, as in the published tokenizer, also where the speaker
        changes: a token across that border belongs to the speaker who begins it.
        """
        chat = attached("chat")
        ids, said = [], []
        speaks = 0          # 1: the assistant
        for part in re.split(f"([{''.join(chat.NAMES)}])", text):
            if part in chat.NAMES:
                ids.append(self.id_of(chat.NAMES[part]))
                said.append(speaks == 1)
                continue
            texts = re.split(f"[{chat.BEGIN}{chat.END}]", part)       # the speaker changes between any two
            new = self.encode("".join(texts))
            speakers = b"".join(bytes([(speaks + n) % 2]) * len(words.encode()) for n, words in enumerate(texts))
            begins = [0] * len(new)
            if 0 in speakers and 1 in speakers:             # rare, and slow
                begins = itertools.accumulate((len(self.decode_bytes([i])) for i in new[:-1]), initial=0)
            ids += new
            said += [speakers[begin] == 1 for begin in begins]
            speaks = (speaks + len(texts) - 1) % 2
        return ids, said

    def check_chat(self):
        """ValueError, one line, if conversations in the format of chat.py are not those of this model."""
        chat = attached("chat")
        chat.check(self)

    def can_chat(self):
        try:
            self.check_chat()
        except ValueError:
            return False
        return True


def first_difference(a, b):
    """(id, token in a, token in b) at the first id where two Tokenizers differ, None where one has none; or None."""
    ours, theirs = a.tokens(), b.tokens()
    for i in sorted(ours | theirs):
        if ours.get(i) != theirs.get(i):
            return i, ours.get(i), theirs.get(i)
    return None


# ----------------------------------------------------------------------------------------------------------------------
# vocabularies by name


def load(name):
    """
    A vocabulary by name: 'byte', 'apertus', 'apertus:K' (256 <= K <= 130,072), 'bpe:FILE' or FILE.json, or a data or
    run folder that has one.

    Returns a Tokenizer. ValueError: unknown name, K out of range, not a vocabulary, mistral-common missing.
    """
    kind, _, rest = name.partition(":")
    if name == "byte":
        return Tokenizer(name, BYTES, SMALL)
    if name == "apertus":
        return Tokenizer(name, tekken(), SPECIAL)
    if kind == "apertus":
        if not rest.isdecimal() or not 256 <= int(rest) <= 130_072:
            raise ValueError(f"tokenizer {name!r}: K must be from 256 (the bytes) to 130072, like apertus:4096")
        return Tokenizer(name, tekken()[:int(rest)], SMALL)
    if kind == "bpe" or name.endswith(".json"):
        path = name.removeprefix("bpe:")
        return Tokenizer(f"bpe:{path}", **read_bpe(path))
    if os.path.isdir(name):
        return load_for(name)
    raise ValueError(f"tokenizer {name!r} does not exist: choose byte, apertus, apertus:K or bpe:FILE.json")


def load_for(folder):
    """The Tokenizer of a data folder (meta.json) or a run folder (config.json), where `tokenizer` names it."""
    for path in (f"{folder}/meta.json", f"{folder}/config.json"):
        if os.path.exists(path):
            name = read_json(path).get("tokenizer")
            if not name:
                raise ValueError(f"{folder} is a Hugging Face model: `python convert.py --load={folder} "
                                 "--save=FILE.json` writes its vocabulary, to be named as FILE.json")
            return load(os.path.join(folder, name) if name.endswith(".json") else name)
    raise ValueError(f"{folder!r} has no meta.json and no config.json: want a folder that prepare.py or train.py wrote")


def keep_for(tokenizer, folder):
    """The name by which load_for(folder) finds this vocabulary: its own, or tokenizer.json, which is written there."""
    for name, size in ("byte", 320), ("apertus", 131072):  # size first: loading apertus takes a second
        if tokenizer.vocab_size == size and tokenizer.hash == load(name).hash:
            return name
    write_bpe(tokenizer, f"{folder}/tokenizer.json")
    return "tokenizer.json"


def tekken():
    """The 130,072 pieces of Apertus' vocabulary, from a data file of mistral-common; the package is not imported."""
    package = importlib.util.find_spec("mistral_common")
    file = package and f"{os.path.dirname(package.origin)}/data/tekken_240718.json"
    if not file or not os.path.exists(file):
        raise ValueError("Apertus' vocabulary is not installed: pip install --no-deps mistral-common==1.13.1")
    return read_tekken(file)


@functools.cache
def read_tekken(file):
    """Cached: studies/fairness.py takes several prefixes. Apertus has no ids for the last 19,928 pieces of the file."""
    vocab = read_json(file)["vocab"]
    return [base64.b64decode(piece["token_bytes"]) for piece in vocab[:130_072]]


def read_bpe(path):
    """The arguments of Tokenizer in a file of write_bpe. ValueError, one line, if it is anything else."""
    try:
        saved = read_json(path)
        pieces = [base64.b64decode(piece, validate=True) for piece in saved["pieces"]]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not a vocabulary: want the JSON that prepare.py --train_bpe writes") from None
    different = {*pieces}
    if saved.get("pattern") != PATTERN or len(different) < len(pieces) or not different.issuperset(BYTES):
        raise ValueError(f"{path} is damaged: want Apertus' pattern, all 256 bytes, no piece twice; train it again")
    unusual = {key: saved[key] for key in ("special", "ids", "in_text", "ends") if key in saved}
    return dict(special=SMALL, pieces=pieces) | unusual


def write_bpe(tokenizer, path):
    """Write a vocabulary as one file, all or nothing: its pieces, and its control tokens and ids if unusual."""
    pieces = [base64.b64encode(piece).decode() for piece in tokenizer.pieces]
    saved = dict(pattern=PATTERN, pieces=pieces)
    if tokenizer.hash != Tokenizer("", tokenizer.pieces, SMALL).hash:
        saved |= dict(
            special=tokenizer.special,
            ids=tokenizer.ids,
            in_text=sorted(tokenizer.in_text),
            ends=tokenizer.ends())
    write_flushed(path, json.dumps(saved, indent=0))


def without_long_runs(text):
    """Cut a text inside runs of 100,000 white spaces, of which the regular expression overflows."""
    return re.split(r"(\s{100000})", text)


def train_bpe(texts, vocab_size, path):
    """
    Learn a vocabulary of `vocab_size` ids, the 64 control tokens included, from an iterable of str; write it to `path`.

    It cuts text as Apertus does and differs only in what it has seen. 4,096 ids trained on the standard library put
    3.78 bytes of unseen files into a token; apertus:4096 puts 3.00 and apertus 4.33. Returns the Tokenizer, with fewer
    ids where the texts have fewer repetitions. ValueError: vocab_size below 320, rustbpe missing.
    """
    if vocab_size < 256 + len(SMALL):
        raise ValueError(f"vocab_size {vocab_size} is too small: 256 bytes and 64 special ids are 320")
    try:
        import rustbpe
    except ImportError:
        raise ValueError("rustbpe is missing: pip install rustbpe==0.1.0, or use --tokenizer=apertus:4096") from None
    bpe = rustbpe.Tokenizer()
    parts = (part for text in texts for part in without_long_runs(text))
    bpe.train_from_iterator(parts, vocab_size - len(SMALL), pattern=PATTERN)
    by_rank = sorted(bpe.get_mergeable_ranks(), key=lambda pair: pair[1])
    pieces = [bytes(piece) for piece, _ in by_rank]
    write_bpe(Tokenizer(path, pieces, SMALL), path)
    return load(f"bpe:{path}")


def main():
    t = load(name)
    print(f"{t.name}: {t.vocab_size:,} ids, sha256 {t.hash[:16]}…")
    for text in paths:
        ids = t.encode(text)
        shown = [f"{i}:{t.decode([i])!r}" for i in ids]
        print(*shown, f"({len(ids)} tokens, {len(text.encode())} bytes)")


if __name__ == "__main__":
    run(main, globals())
