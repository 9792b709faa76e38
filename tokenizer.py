r"""
Text to token ids and back: bytes, Apertus' vocabulary, a prefix of it, or a BPE trained on your own text.

A byte-level BPE vocabulary is a list of byte strings, and their order is the algorithm: cut the text with a regular
expression, start from single bytes, and keep joining the two neighbours whose union comes first in the list.

    id = rank + len(special)     ids below len(special) are control tokens, which no text can produce

    byte        256 bytes, nothing to join                                                   vocab_size     320
    apertus     Apertus' own: Mistral-Nemo's 130,072 ranks after 1,000 control tokens        vocab_size 131,072
    apertus:K   the first K ranks. Every piece is the union of two earlier ones, so any
                prefix is a vocabulary too: nothing to train, same order as Apertus' own     vocab_size K + 64
    bpe:FILE    a tokenizer.json: trained on your own text by train_bpe, or of a model       vocab_size as you say

Text produces only seven control tokens: the three placeholders for personal data and four LaTeX pieces. `</s>` or
`<|user_start|>` in a web page is spelled out in ordinary pieces, so no document can end itself and no user can speak
as the assistant. Conversations: chat.py.

All vocabulary files have one format, Hugging Face's tokenizer.json: in data folders, in run folders, in models.

Source: Apertus report (arXiv 2509.14233) sec. 2.2; ids as in swiss-ai/Apertus-8B-2509's tokenizer.json.

$ python tokenizer.py --name=apertus "Grüezi mitenand </s>"                    # the pieces and their ids
$ python prepare.py my_texts/ --train_bpe=4096 --out=data/mine                 # a vocabulary of your own
$ python -m studies.fairness texts.jsonl --names=byte,apertus,apertus:32768    # tokens per language and vocabulary
"""

import base64
import codecs
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import os
import re

import numpy as np
import tiktoken

from configurator import ROOT, run
from engine.files import read_json, read_text, write_json

name = "apertus"    # the vocabulary: one of the above, or a data or run folder that has one
paths = []          # texts to encode: their pieces and ids are printed

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
    """{name: id} of n control tokens: `names`, then <SPECIAL_i>, which are free for your own use."""
    more = [f"<SPECIAL_{i}>" for i in range(len(names), n)]
    return dict(zip(names + more, range(n)))


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

        name, vocab_size
        special           {name: id} of the control tokens
        bos, eos, pad     ids
        pieces, ids       the byte strings by rank, and the id of each
        known             all ids that are in use, a set
        in_text           the control tokens that ordinary text can produce
        hash              sha256 of everything that decides an id: equal for data and model when their ids agree
        system            the default system message of a conversation; None: that of chat.py
        foreign           why chat.py cannot write the model's conversations, or ""

    ids: of the pieces, rising; None: directly after the control tokens. ends: the names of bos, eos and pad.
    """

    def __init__(self, name, pieces, special, ids=None, in_text=IN_TEXT, ends=("<s>", "</s>", "<pad>")):
        n = len(special)
        usual = [*range(n, n + len(pieces))]
        self.name = name
        self.pieces = pieces
        self.special = special
        self.ids = ids or usual
        self.in_text = special.keys() & in_text
        self.known = {*special.values(), *self.ids}
        self.vocab_size = 1 + max(self.known)
        self.bos, self.eos, self.pad = map(self.id_of, ends)
        self.system = None
        self.foreign = ""

        decides = [PATTERN, *special, *(piece.hex() for piece in pieces)]
        if self.ids != usual or self.in_text != special.keys() & IN_TEXT:
            decides.append(json.dumps([list(special.values()), self.ids, sorted(self.in_text)]))
        self.hash = hashlib.sha256("\n".join(decides).encode()).hexdigest()

        # tiktoken joins by rank, but any rising numbers will do. Given our ids, it returns our ids.
        ranks = dict(zip(pieces, self.ids))
        self._bpe = tiktoken.Encoding(name, pat_str=GROUPED, mergeable_ranks=ranks, special_tokens=special)

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
            parts = without_long_runs(text)
            return np.array([i for part in parts for i in self._bpe.encode(part, **special)], np.uint32)

    def decode_bytes(self, ids):
        """
        The bytes of a list or array of ids. Control tokens decode to their names, unused ids (padding rows of the
        embedding) to nothing, as in transformers. ValueError: an id outside the vocabulary.
        """
        ids = [int(i) for i in ids]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(f"token ids {min(ids)} to {max(ids)}, but {self.name} has 0 to {self.vocab_size - 1}: "
                             "use the tokenizer that made them (Apertus 1.5's ids of pictures and sound are no text)")
        return self._bpe.decode_bytes([i for i in ids if i in self.known])

    def decode(self, ids):
        """The text of ids. Half a character at either end becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def words(self, ids):
        """The text of ids without control tokens, such as the end of an answer and the brackets of thoughts."""
        control = {i for name, i in self.special.items() if name not in self.in_text}
        return self.decode([i for i in ids if i not in control])

    def stream(self):
        """A function id -> text, to print token by token: it holds bytes back until their character is complete."""
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda i: utf8.decode(self.decode_bytes([i]))

    def id_of(self, name):
        """The id of a control token. ValueError, one line, if this vocabulary does not have it."""
        if name not in self.special:
            raise ValueError(f"{self.name}: its vocabulary has no control token {name}")
        return self.special[name]

    # chat.py, which builds on this file, is imported on demand: pretraining does not need it.

    def chat(self, messages, *args, **options):
        """The ids of a conversation as the model reads it, with one <s>. Arguments, errors: chat.marked."""
        from chat import marked

        return self.chat_ids(marked(messages, *args, system=self.system, **options))[0]

    def chat_ids(self, text):
        """
        The text of chat.marked -> (ids, said), two lists: said[i] is True where the assistant itself produces ids[i].

        The text between two control tokens is encoded in one piece, as by the published tokenizer, even if the speaker
        changes in it: a token across that border belongs to the speaker who begins it.
        """
        import chat

        if OUTPUT in self.special and chat.MARKS["<|tools_prefix|>"] in text:
            raise ValueError(f"{self.name} is of Apertus 1.5: its format for calls of tools is not that of 1.0")
        ids, said = [], []
        turn = 0            # odd: the assistant speaks
        for part in re.split(f"([{''.join(chat.NAMES)}])", text):
            if part in chat.NAMES:
                ids.append(self.id_of(chat.NAMES[part]))
                said.append(turn % 2 == 1)
                continue
            texts = re.split(f"[{chat.BEGIN}{chat.END}]", part)       # the speaker changes after each
            by_assistant = [n % 2 == 1 for n, words in enumerate(texts, turn) for _ in words]   # for each character
            turn += len(texts) - 1
            new = self.encode("".join(texts))
            _, begins = self._bpe.decode_with_offsets(new)
            ids += new
            said += [by_assistant[begin] for begin in begins]
        return ids, said

    def check_chat(self):
        """ValueError, one line, if chat.py cannot write this model's conversations."""
        if self.foreign:
            raise ValueError(self.foreign)
        for name in CHAT:
            self.id_of(name)


# ----------------------------------------------------------------------------------------------------------------------
# vocabularies by name


def load(name):
    """
    A vocabulary by name: 'byte', 'apertus', 'apertus:K' (256 <= K <= 130,072), 'bpe:FILE' or FILE.json, or a folder of
    data, of a run or of a model.

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
        return read_bpe(name.removeprefix("bpe:"))
    if os.path.isdir(name):
        return load_for(name)
    raise ValueError(f"tokenizer {name!r} does not exist: choose byte, apertus, apertus:K or bpe:FILE.json")


def load_for(folder):
    """The Tokenizer of a folder of data, a run or a model: its tokenizer.json, or the vocabulary that it names."""
    if os.path.isfile(f"{folder}/tokenizer.json"):
        return read_bpe(f"{folder}/tokenizer.json")
    named = beside(folder, "meta.json").get("tokenizer")
    if named and not named.endswith(".json"):
        return load(named)
    raise ValueError(f"{folder} has no tokenizer.json and names no vocabulary: want a folder of prepare.py or "
                     "train.py, or copy tokenizer.json from the model's repository")


def beside(folder, file):
    """The object in a JSON file of a folder; {} if the file is missing."""
    path = f"{folder}/{file}"
    return read_json(path) if os.path.isfile(path) else {}


@functools.cache
def tekken():
    """
    The 130,072 pieces of Apertus' vocabulary, from a data file of mistral-common; the package is not imported. The file
    has 19,928 more, for which Apertus has no ids.
    """
    package = importlib.util.find_spec("mistral_common")
    if not package:
        raise ValueError("Apertus' vocabulary is not installed: pip install --no-deps mistral-common==1.13.1")
    vocab = read_json(f"{os.path.dirname(package.origin)}/data/tekken_240718.json")["vocab"]
    return [base64.b64decode(piece["token_bytes"]) for piece in vocab[:130_072]]


def without_long_runs(text):
    """
    Cut a text inside runs of 65,536 white spaces, on which the regular expression fails: where a token of a power of
    two spaces ends, and never before the last space, which may belong to the next word. Line breaks do not count: the
    expression itself cuts after the last one in a run, and tokens of spaces begin there.
    """
    return re.split(r"([^\S\r\n]{65536})(?=[^\S\r\n])", text)


def train_bpe(texts, vocab_size, path):
    """
    Learn a vocabulary of `vocab_size` ids, the 64 control tokens included, from an iterable of str; write it to `path`.

    It cuts text as Apertus does; only the training text differs. On unseen files, 4,096 ids trained on the standard
    library encode 3.78 bytes per token; apertus:4096 3.00 and apertus 4.33. Returns the Tokenizer, with fewer ids if
    the texts have too few repetitions.
    """
    import rustbpe  # here, since no other vocabulary needs it

    bpe = rustbpe.Tokenizer()
    parts = itertools.chain.from_iterable(map(without_long_runs, texts))
    bpe.train_from_iterator(parts, vocab_size - len(SMALL), pattern=PATTERN)
    by_rank = sorted(bpe.get_mergeable_ranks(), key=lambda pair: pair[1])
    tok = Tokenizer(f"bpe:{path}", [bytes(piece) for piece, _ in by_rank], SMALL)
    write_bpe(tok, path)
    return tok


# ----------------------------------------------------------------------------------------------------------------------
# vocabulary files: Hugging Face's

# A tokenizer.json without its vocabulary. ByteLevel spells bytes as characters. The post-processor puts <s> in front of
# a text, as the published one does; add_special_tokens=False leaves it out.
FRAME = """{
    "version": "1.0",
    "normalizer": null,
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                 {"SpecialToken": {"id": "<s>", "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
    "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
    "model": {"type": "BPE", "ignore_merges": true}
}""".replace("PATTERN", json.dumps(PATTERN))
EXACT = dict.fromkeys("single_word lstrip rstrip".split(), False)    # how an added token matches: anywhere, and alone
SETTINGS = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False, padding_side="left")
ENDS = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
TEMPLATE = "chat_template.jinja"
CHAT = NAMED[61:73]                                     # <|system_start|> to <|tools_suffix|>
RESERVED = [f"<SPECIAL_{i}>" for i in range(61, 73)]    # the same ids in the Minis


def hf_files(tok):
    """
    {file name: its content, for JSON}, from which transformers.AutoTokenizer makes the same ids.

    transformers also turns a control token that is spelled out in a text into that token, unless called with
    split_special_tokens=True. The chat template is included if chat.py can write the model's conversations.
    """
    names = {i: s for s, i in tok.special.items()}
    ends = {end: names[i] for end, i in zip(ENDS, (tok.bos, tok.eos, tok.pad))}
    letter = letters()
    spelled = [piece.decode("latin-1").translate(letter) for piece in tok.pieces]
    frame = FRAME.replace('"<s>"', json.dumps(ends["bos_token"])).replace("[1]", f"[{tok.bos}]")
    content = json.loads(frame)
    content["model"] |= dict(vocab=tok.special | dict(zip(spelled, tok.ids)), merges=merges_of(spelled))
    content["added_tokens"] = [
        dict(id=i, content=s, **EXACT, normalized=False, special=s not in tok.in_text)
        for s, i in tok.special.items()]
    settings = SETTINGS | ends
    template = read_text(f"{ROOT}/{TEMPLATE}")             # the format of chat.py, in Jinja
    if tok.system is not None:
        settings["default_system"] = tok.system            # for read_bpe(); transformers reads the template
        template = f"{{%- set default_system = {json.dumps(tok.system)} -%}}\n{template}"
    if {*CHAT} <= tok.special.keys() and OUTPUT not in tok.special and not tok.foreign:
        settings["chat_template"] = template
    return {"tokenizer.json": content, "tokenizer_config.json": settings}


def write_bpe(tok, path):
    """Write a vocabulary as one file, all or nothing. It does not name bos, eos and pad: they must be Apertus'."""
    write_json(path, hf_files(tok)["tokenizer.json"])


def letters():
    """GPT-2's alphabet, {byte: character}: printable bytes are themselves, the others the characters from 256 on."""
    free = map(chr, itertools.count(256))
    return {b: chr(b) if chr(b).isprintable() and chr(b) != " " else next(free) for b in range(256)}


def merges_of(spelled):
    """
    The list of merges that a byte-level BPE of these pieces (str, by rank) has in Hugging Face's format: all pairs of
    pieces whose union is a piece, by the union's rank, then by their own (Apertus: 269,443, in the published order).
    """
    rank = {s: i for i, s in enumerate(spelled)}
    merges = []
    for s in spelled:
        pairs = [[s[:i], s[i:]] for i in range(1, len(s)) if s[:i] in rank and s[i:] in rank]
        merges += sorted(pairs, key=lambda pair: rank[pair[0]])
    return merges


def read_bpe(path):
    """
    The Tokenizer in a tokenizer.json, with the tokenizer_config.json, config.json and chat template next to it, if any.

    Every id is the stored one, also of tokens that were added behind the vocabulary. ValueError, one line, if
    transformers would encode a text to other ids, or if a file has another form.
    """
    try:
        return of_files(path)
    except (AttributeError, KeyError, TypeError, OverflowError):
        raise ValueError(f"{path}, or a JSON file next to it, is not of a byte-level BPE like Apertus'; if an older "
                         "version of this program wrote it, prepare the data again") from None


def of_files(path):
    """read_bpe(), which gives files of another form an error of one line."""
    folder = os.path.dirname(path) or "."
    settings, config = beside(folder, "tokenizer_config.json"), beside(folder, "config.json")
    # Apertus 1.5 has the ids of pictures and sound behind those of text. It has moved the names <think> and </think>
    # from ids 32 and 33 to 69 and 70, which are control tokens although they are not among its added tokens.
    most = (config.get("text_config") or {}).get("output_vocab_size") or math.inf
    renamed = {"<think>", "</think>"}
    byte = {c: bytes([b]) for b, c in letters().items()}
    saved = read_json(path)
    model = saved["model"]
    vocab = model.pop("vocab")
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model.pop("merges")]
    added = {token["content"]: token for token in saved["added_tokens"]}
    id_of = vocab | {s: token["id"] for s, token in added.items()}
    spelled = sorted(vocab.keys() - added.keys() - renamed, key=vocab.get)
    pieces = [b"".join(byte[c] for c in s) for s in spelled]
    control = {s for s in added.keys() | vocab.keys() & renamed if id_of[s] < most}
    # Ordinary text can produce added tokens that are not special, but of Apertus' control tokens only IN_TEXT.
    in_text = {s for s in control & added.keys() if s in IN_TEXT or not (s in SPECIAL or added[s].get("special"))}

    frame = json.loads(FRAME)
    own = {key: value for key, value in model.items() if value and key not in ("unk_token", "fuse_unk")}
    # The normalizer of 1.5 turns a typed <think> into a control token and deletes <answer>: here both stay text.
    normalizer = json.dumps(saved.get("normalizer"))
    # transformers keeps the ids of the vocabulary, and numbers all other added tokens itself, from its end on.
    there = [*vocab.items(), *zip([s for s in added if s not in vocab], itertools.count(len(vocab)))]
    there += [(token["content"], int(i)) for i, token in settings.get("added_tokens_decoder", {}).items()]
    moved = [s for s, i in there if id_of.get(s) != i]
    # Of two tokens that overlap, transformers and tiktoken may take different ones. An empty one is found for ever.
    odd = [s for s in in_text if not s or any(map(added[s].get, EXACT))
           or any(t != s and (t in s or s in t) for t in added)]
    faults = {
        "it cuts text in another way": own != frame["model"] or saved.get("pre_tokenizer") != frame["pre_tokenizer"],
        "it normalizes text": re.search(r'"type": "(?!Sequence|Replace)|"(String|Regex)": "(?!<)', normalizer),
        "it lacks some of the 256 bytes": not {*pieces}.issuperset(BYTES),
        "its merges are not all pairs of its pieces in the order of their ids": merges != merges_of(spelled),
        "two tokens have the same id": len({*id_of.values()}) < len(id_of),
        f"it numbers {moved} by itself": moved,
        f"its added tokens {odd} take white space with them, stand alone or overlap others": odd,
    }
    for fault, found in faults.items():
        if found:
            raise ValueError(f"{path}: {fault}: this program would make other ids of a text than transformers does")

    # {a token's name: Apertus' name for it}. The Minis have Mistral-Nemo's control tokens: id 3 is [INST], id 10 <pad>.
    # Their conversations use the ids of Apertus' chat tokens, but not the names.
    mini = [*map(id_of.get, RESERVED)] == [*range(61, 73)] and not id_of.keys() & {*CHAT}
    names = dict(zip(RESERVED, CHAT)) if mini else {}
    # By name, not by the ids in config.json: a Mini's says pad_token_id 3, which is [INST].
    ends = [settings.get(key) or usual for key, usual in ENDS.items()]
    ends = [end["content"] if isinstance(end, dict) else end for end in ends]
    special = {names.get(s, s): id_of[s] for s in sorted(control, key=id_of.get)}
    ids = [*map(vocab.get, spelled)]
    tok = Tokenizer(f"bpe:{path}", pieces, special, ids, in_text, [names.get(s, s) for s in ends])
    system, tok.foreign = chat_format(folder, settings.get("chat_template"))
    tok.system = settings.get("default_system", system)
    return tok


# The published templates whose conversations chat.py can write: (sha256, or tokens by which they are known, system
# message of a conversation that has none; None: that of chat.py).
OUTPUT = "<|tool_output_start|>"
FORMATS = (
    ("", [OUTPUT],
     # Apertus 1.5; the stored versions of its template differ in thoughts and tools (swiss-ai/apertus-omni-tokenizer).
     "You are Apertus 1.5 Omni, a multimodal assistant developed by the Swiss AI Initiative. Extended from Apertus 1 "
     "via continued pretraining, you understand images and audio and respond in text."),
    ("56f72c27fa2e565312a830b7315a455c79fb452fdbe7a5b7595d8a094f282b07", CHAT, None),     # Apertus-8B-Instruct-2509
    ("4afab8361a4bd0c2994404e0b0851dbaad461a06e56bdfdb635aae3977473c19", RESERVED, ""))   # Apertus-v1.1-1.5B-Instruct


def chat_format(folder, template):
    """
    (the system message of a conversation that has none, or None for that of chat.py; why chat.py cannot write this
    model's conversations, or ""). A template is a program: it is not rendered, but recognised by its hash or tokens.
    """
    if not template and os.path.isfile(f"{folder}/{TEMPLATE}"):
        template = read_text(f"{folder}/{TEMPLATE}")
    if not template:
        return None, ""
    sha = hashlib.sha256(str(template).encode()).hexdigest()
    for known, tokens, system in FORMATS:
        if sha == known or all(token in template for token in tokens):
            return system, ""
    return None, (f"{folder} has a chat template that is not Apertus' (sha256 {sha[:16]}): its conversations may have "
                  "another form. If you know that they have Apertus' form, use a copy of the folder without it")


def main():
    t = load(name)
    print(f"{t.name}: {t.vocab_size:,} ids, sha256 {t.hash[:16]}…")
    for text in paths:
        ids = t.encode(text)
        print(*(f"{i}:{t.decode([i])!r}" for i in ids), f"({len(ids)} tokens, {len(text.encode())} bytes)")


if __name__ == "__main__":
    run(main, globals())
