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
NAMED = [
    "<unk>", "<s>", "</s>", "<pad>", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "<SPECIAL_10>", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", r"\begin{", r"\end{",
    r"\text{", r"\boxed{", "<filename>", "<gh_stars>", "<issue_start>", "<issue_comment>", "<issue_closed>",
    "<jupyter_start>", "<jupyter_text>", "<jupyter_code>", "<jupyter_output>", "<empty_output>", "<commit_before>",
    "<commit_msg>", "<commit_after>", "<reponame>", "<think>", "</think>", "<answer>", "</answer>", "<iban-pii>",
    "<email-pii>", "<ip-pii>", "<file_sep>", "<code_to_intermediate>", "<intermediate_to_code>", "<pr>", "<pr_status>",
    "<pr_is_merged>", "<pr_base>", "<pr_file>", "<pr_base_code>", "<pr_diff>", "<pr_diff_hunk>", "<pr_comment>",
    "<pr_event_id>", "<pr_review>", "<pr_review_state>", "<pr_review_comment>", "<pr_in_reply_to_review_id>",
    "<pr_in_reply_to_comment_id>", "<pr_diff_hunk_comment_line>", "<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>",
    "<|system_start|>", "<|system_end|>", "<|developer_start|>", "<|developer_end|>", "<|user_start|>", "<|user_end|>",
    "<|assistant_start|>", "<|assistant_end|>", "<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>",
    "<|tools_suffix|>",
]
# The only control tokens that ordinary text can produce.
IN_TEXT = NAMED[14:18] + NAMED[36:39]


def padded(names, n):
    """{name: id} of n control tokens: `names`, then <SPECIAL_i>, which are free for your own use."""
    free = [f"<SPECIAL_{i}>" for i in range(len(names), n)]
    return dict(zip(names + free, range(n)))


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
        hash              sha256 of all that ids depend on: equal for data and model when their ids agree
        system            the default system message of a conversation; None: that of chat.py
        foreign           the reason why chat.py cannot write the model's conversations, or ""

    ids: of the pieces, rising; None: directly after the control tokens. ends: the names of bos, eos and pad.
    """

    def __init__(self, name, pieces, special, ids=None, in_text=IN_TEXT, ends=("<s>", "</s>", "<pad>")):
        n = len(special)
        default_ids = [*range(n, n + len(pieces))]
        self.name = name
        self.pieces = pieces
        self.special = special
        self.ids = ids or default_ids
        self.in_text = special.keys() & in_text
        self.known = {*special.values(), *self.ids}
        self.vocab_size = 1 + max(self.known)
        self.bos, self.eos, self.pad = map(self.id_of, ends)
        self.system = None
        self.foreign = ""

        hashed = [PATTERN, *special, *(piece.hex() for piece in pieces)]
        if self.ids != default_ids or self.in_text != special.keys() & IN_TEXT:
            hashed.append(json.dumps([list(special.values()), self.ids, sorted(self.in_text)]))
        self.hash = hashlib.sha256("\n".join(hashed).encode()).hexdigest()

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

    # chat.py is imported in the functions that need it, because it imports this file. Pretraining does not load it.

    def chat(self, messages, *args, **options):
        """The ids of a conversation as the model reads it, with one <s>. Arguments, errors: chat.marked."""
        from chat import marked

        return self.chat_ids(marked(messages, *args, system=self.system, **options))[0]

    def chat_ids(self, text):
        """
        The text of chat.marked -> (ids, mask), two lists: mask[i] is True where the assistant itself produces ids[i].

        The text between two control tokens is encoded in one piece, as by the published tokenizer, even if the speaker
        changes in it: a token across that border belongs to the speaker who begins it.
        """
        import chat

        if OUTPUT in self.special and chat.MARKS["<|tools_prefix|>"] in text:
            raise ValueError(f"{self.name} is of Apertus 1.5: its format for calls of tools is not that of 1.0")
        ids, mask = [], []
        turn = 0            # odd: the assistant speaks
        for part in re.split(f"([{''.join(chat.NAMES)}])", text):
            if part in chat.NAMES:
                ids.append(self.id_of(chat.NAMES[part]))
                mask.append(turn % 2 == 1)
                continue
            texts = re.split(f"[{chat.BEGIN}{chat.END}]", part)       # the speaker changes after each
            by_assistant = [n % 2 == 1 for n, words in enumerate(texts, turn) for _ in words]   # for each character
            turn += len(texts) - 1
            new = self.encode("".join(texts))
            _, begins = self._bpe.decode_with_offsets(new)
            ids += new
            mask += [by_assistant[begin] for begin in begins]
        return ids, mask

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
    prefix, _, rest = name.partition(":")
    if name == "byte":
        return Tokenizer(name, BYTES, SMALL)
    if name == "apertus":
        return Tokenizer(name, tekken(), SPECIAL)
    if prefix == "apertus":
        if not rest.isdecimal() or not 256 <= int(rest) <= 130_072:
            raise ValueError(f"tokenizer {name!r}: K must be from 256 (the bytes) to 130072, like apertus:4096")
        return Tokenizer(name, tekken()[:int(rest)], SMALL)
    if prefix == "bpe" or name.endswith(".json"):
        return read_bpe(name.removeprefix("bpe:"))
    if os.path.isdir(name):
        return load_for(name)
    raise ValueError(f"tokenizer {name!r} does not exist: choose byte, apertus, apertus:K or bpe:FILE.json")


def load_for(folder):
    """The Tokenizer of a folder of data, a run or a model: its tokenizer.json, or the vocabulary that it names."""
    if os.path.isfile(f"{folder}/tokenizer.json"):
        return read_bpe(f"{folder}/tokenizer.json")
    vocabulary = read_optional(folder, "meta.json").get("tokenizer")
    if vocabulary and not vocabulary.endswith(".json"):
        return load(vocabulary)
    raise ValueError(f"{folder} has no tokenizer.json and names no vocabulary: want a folder of prepare.py or "
                     "train.py, or copy tokenizer.json from the model's repository")


def read_optional(folder, file):
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
    Cut a text inside runs of white space, on which the regular expression fails: every 65,536 of them, where a token of
    a power of two spaces ends. At least as many stay at the end of a run, since its last token may be longer (19
    spaces), and its last space may belong to the next word. Line breaks do not count: the expression itself cuts after
    the last one in a run, and tokens of spaces begin there.
    """
    cuts = [0]
    # Looked for at the first space of a run alone, since at each of 65,536 it would be quadratic.
    for spaces in re.finditer(r"(?<![^\S\r\n])[^\S\r\n]{131072,}", text):
        cuts += range(spaces.start() + 65536, spaces.end() - 65535, 65536)
    return [text[begin:end] for begin, end in itertools.pairwise([*cuts, len(text)])]


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

def frame(bos="<s>", bos_id=1):
    """
    A tokenizer.json without its vocabulary. ByteLevel spells bytes as characters. The post-processor puts <s> in front
    of a text, as the published one does; add_special_tokens=False leaves it out.
    """
    def beginning(type_id):
        return {"SpecialToken": {"id": bos, "type_id": type_id}}

    def text(name, type_id):
        return {"Sequence": {"id": name, "type_id": type_id}}

    return {
        "version": "1.0",
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [beginning(0), text("A", 0)],
            "pair": [beginning(0), text("A", 0), beginning(1), text("B", 1)],
            "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "ignore_merges": True},
    }


EXACT = {"single_word": False, "lstrip": False, "rstrip": False}    # how an added token matches: anywhere, and alone
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
    letters = byte_letters()
    spelled = [piece.decode("latin-1").translate(letters) for piece in tok.pieces]
    content = frame(ends["bos_token"], tok.bos)
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


def byte_letters():
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
        return tokenizer_of(VocabularyFiles(path))
    except (AttributeError, KeyError, TypeError, OverflowError):
        raise ValueError(f"{path}, or a JSON file next to it, is not of a byte-level BPE like Apertus'; if an older "
                         "version of this program wrote it, prepare the data again") from None


class VocabularyFiles:
    """
    The content of a tokenizer.json and of the files next to it.

        settings    tokenizer_config.json
        content     tokenizer.json, without the next three
        vocab       {spelling: id} of its model
        merges      pairs of spellings
        added       {name: entry} of its added tokens
        id_of       {spelling or name: id} of both
        spelled     the spellings of the pieces, by id
        control     names of the control tokens
        in_text     names of the control tokens that ordinary text can produce
    """

    # Apertus 1.5 has moved these names from ids 32 and 33 to 69 and 70, which are control tokens although they are not
    # among its added tokens.
    MOVED = {"<think>", "</think>"}

    def __init__(self, path):
        self.path = path
        self.folder = os.path.dirname(path) or "."
        self.settings = read_optional(self.folder, "tokenizer_config.json")
        config = read_optional(self.folder, "config.json")
        self.content = read_json(path)
        self.vocab = self.content["model"].pop("vocab")
        self.merges = [pair.split(" ") if isinstance(pair, str) else pair
                       for pair in self.content["model"].pop("merges")]
        self.added = {token["content"]: token for token in self.content.pop("added_tokens")}
        self.id_of = self.vocab | {name: token["id"] for name, token in self.added.items()}
        self.spelled = sorted(self.vocab.keys() - self.added.keys() - self.MOVED, key=self.vocab.get)
        # Apertus 1.5 has the ids of pictures and sound behind those of text.
        text_ids = (config.get("text_config") or {}).get("output_vocab_size") or math.inf
        names = self.added.keys() | (self.vocab.keys() & self.MOVED)
        self.control = {name for name in names if self.id_of[name] < text_ids}
        self.in_text = {name for name in self.control & self.added.keys() if self.is_in_text(name)}

    def is_in_text(self, name):
        """Whether text can produce an added token: one that is not special; of Apertus' control tokens only IN_TEXT."""
        return name in IN_TEXT or not (name in SPECIAL or self.added[name].get("special"))

    def pieces(self):
        """The byte strings of the vocabulary, by id."""
        byte = {letter: bytes([b]) for b, letter in byte_letters().items()}
        return [b"".join(byte[letter] for letter in spelling) for spelling in self.spelled]

    def cuts_differently(self):
        """Whether the files cut a text into other parts than PATTERN does, or join bytes by other rules."""
        ours = frame()
        model = {key: value for key, value in self.content["model"].items()
                 if value and key not in ("unk_token", "fuse_unk")}
        return model != ours["model"] or self.content.get("pre_tokenizer") != ours["pre_tokenizer"]

    def normalizes(self):
        """Whether the files change text before they cut it."""
        # The normalizer of 1.5 turns a typed <think> into a control token and deletes <answer>: here both stay text.
        normalizer = json.dumps(self.content.get("normalizer"))
        return re.search(r'"type": "(?!Sequence|Replace)|"(String|Regex)": "(?!<)', normalizer)

    def renumbered(self):
        """The names to which transformers gives other ids than tokenizer.json does."""
        # It keeps the ids of the vocabulary, and numbers all other added tokens itself, from its end on.
        added = [name for name in self.added if name not in self.vocab]
        numbers = [*self.vocab.items(), *zip(added, itertools.count(len(self.vocab)))]
        decoder = self.settings.get("added_tokens_decoder", {})
        numbers += [(token["content"], int(i)) for i, token in decoder.items()]
        return [name for name, i in numbers if self.id_of.get(name) != i]

    def ambiguous(self):
        """Names of tokens in text that transformers and tiktoken may match in different places."""
        return [name for name in self.in_text if self.is_ambiguous(name)]

    def is_ambiguous(self, name):
        # An empty token matches endlessly, and of two tokens that overlap either may match.
        return (not name
                or any(self.added[name].get(key) for key in EXACT)
                or any(other != name and (other in name or name in other) for other in self.added))


def check_same_ids(files, pieces):
    """ValueError, one line, if transformers would encode a text to other ids by these files than we do."""
    renumbered, ambiguous = files.renumbered(), files.ambiguous()
    differences = {
        "it cuts text in another way": files.cuts_differently(),
        "it normalizes text": files.normalizes(),
        "it lacks some of the 256 bytes": not {*pieces}.issuperset(BYTES),
        "its merges are not all pairs of its pieces in the order of their ids":
            files.merges != merges_of(files.spelled),
        "two tokens have the same id": len({*files.id_of.values()}) < len(files.id_of),
        f"it numbers {renumbered} by itself": renumbered,
        f"its added tokens {ambiguous} take white space with them, stand alone or overlap others": ambiguous,
    }
    for difference, applies in differences.items():
        if applies:
            raise ValueError(f"{files.path}: {difference}: this program would make other ids of a text than "
                             "transformers does")


def tokenizer_of(files):
    """The Tokenizer of VocabularyFiles. ValueError: see read_bpe()."""
    pieces = files.pieces()
    check_same_ids(files, pieces)
    # {a token's name: Apertus' name for it}. The Minis have Mistral-Nemo's control tokens: id 3 is [INST], id 10 <pad>.
    # Their conversations use the ids of Apertus' chat tokens, but not the names.
    id_of = files.id_of
    is_mini = [id_of.get(name) for name in RESERVED] == [*range(61, 73)] and not id_of.keys() & {*CHAT}
    names = dict(zip(RESERVED, CHAT)) if is_mini else {}
    # By name, not by the ids in config.json: a Mini's says pad_token_id 3, which is [INST].
    ends = [files.settings.get(key) or default for key, default in ENDS.items()]
    ends = [end["content"] if isinstance(end, dict) else end for end in ends]
    special = {names.get(name, name): id_of[name] for name in sorted(files.control, key=id_of.get)}
    ids = [files.vocab[spelling] for spelling in files.spelled]
    tok = Tokenizer(f"bpe:{files.path}", pieces, special, ids, files.in_text, [names.get(end, end) for end in ends])
    system, tok.foreign = chat_format(files.folder, files.settings.get("chat_template"))
    tok.system = files.settings.get("default_system", system)
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
    (system, foreign) of a Tokenizer, by the chat template of a model. A template is a program: it is not rendered, but
    recognised by its hash or tokens.
    """
    if not template and os.path.isfile(f"{folder}/{TEMPLATE}"):
        template = read_text(f"{folder}/{TEMPLATE}")
    if not template:
        return None, ""
    sha = hashlib.sha256(str(template).encode()).hexdigest()
    for known_sha, tokens, system in FORMATS:
        if sha == known_sha or all(token in template for token in tokens):
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
