r"""
Text to token ids and back: bytes, Apertus' own vocabulary, a prefix of it, or one of your own. Conversations: chat.py.

A byte-level BPE vocabulary is a list of byte strings. Their order is the algorithm: cut the text by a regular
expression, start from single bytes, and keep joining the two neighbours whose union stands first in the list.

    id = rank + n_special        ids below n_special are control tokens, which no text can produce

    byte        256 bytes, nothing to join                                                   vocab_size     320
    apertus     what Apertus uses: Mistral-Nemo's 130,072 ranks after 1,000 special ids      vocab_size 131,072
    apertus:K   the first K ranks. Every piece is the union of two earlier ones, so any
                prefix is a vocabulary too: nothing to train, nested in Apertus' own ids     vocab_size K + 64
    bpe:FILE    trained on your own text by train_bpe                                        vocab_size as you say

More tokens for a language that pays too many: --extend learns further pieces from your text and appends them to any of
these. They rank behind all others, so BPE does what it always did and then goes on: every old id keeps its meaning, and
a text without a new piece its ids. train.py --init_from starts the new rows of a model as means (convert.fill). It may
not pay: Apertus-8B had .491 bits per character after 2B tokens of Greek with its own vocabulary, and with 17,920 pieces
more .531 (rows distilled) or .574 (means), for 35 % fewer tokens a word (eellak/greek-apertus). studies/extend.py
measures it at laptop size.

Only the three placeholders for personal data and four LaTeX pieces are recognised in text. `</s>` or `<|user_start|>`
in a web page is text about tokens: it is spelled out, so that no document can end itself and no user can speak as the
assistant. Source: Apertus report (arXiv 2509.14233) sec. 2.2; ids as in swiss-ai/Apertus-8B-2509's tokenizer.json.

$ python tokenizer.py --name=apertus "Grüezi mitenand </s>"               # the pieces and their ids
$ python tokenizer.py --extend=greek.txt --out=data/greek.json            # then prepare.py --tokenizer=data/greek.json
$ python -m studies.fairness texts.jsonl --names=byte,apertus,apertus:32768    # what a language pays: table and picture
"""

import base64
import codecs
import functools
import hashlib
import heapq
import importlib.util
import itertools
import json
import math
import os
import re
from collections import Counter, defaultdict

import numpy as np
import regex
import tiktoken
from tqdm import tqdm

from chat import chat_pieces, read_rows
from configurator import run
from engine.files import make_folder, read_json, read_text, write_flushed

name = "apertus"                     # the vocabulary: one of the above, or the folder of data or of a run that has it
extend = ""                          # learn more pieces from this: .txt, .jsonl of text and lang, or a data folder
size = 0                             # ids of the extended vocabulary; 0 = an eighth more, to a multiple of 256
out = "out/extended.json"            # where it goes
paths = []                           # texts whose pieces are shown

# How text is cut before bytes are joined, as Mistral-Nemo does: words with at most one leading mark, cut again where a
# new capital starts; digits one by one; punctuation; line breaks.
PATTERN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
           r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
           r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
# The same in another spelling: what needs no look-ahead is one group, which tiktoken turns into one automaton.
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
# The only ones that ordinary text may become.
IN_TEXT = NAMED[14:18] + NAMED[36:39]


def padded(names, n):
    """`names` filled up to n control tokens that are free for your own use."""
    return names + [f"<SPECIAL_{i}>" for i in range(len(names), n)]


# Of 'apertus': the published 1,000. Of all others 64, with the same names so that chat and SFT work: ids 0-3 as above,
# 4-10 IN_TEXT, 11-22 the chat's.
SPECIAL = padded(NAMED, 1000)
SMALL = padded(NAMED[:4] + IN_TEXT + NAMED[61:], 64)
BYTES = [bytes([b]) for b in range(256)]


# ----------------------------------------------------------------------------------------------------------------------
# vocabularies


def first_difference(a, b):
    """The first id of which two Tokenizers have different tokens: (id, a's, b's), None where one has none; or None."""
    def token_of(tok):
        pieces = dict(zip(tok.ids, tok.pieces))
        control = {i: name for name, i in tok.special.items()}
        return pieces | control

    mine = token_of(a)
    yours = token_of(b)
    for i in sorted(mine.keys() | yours.keys()):
        if mine.get(i) != yours.get(i):
            return i, mine.get(i), yours.get(i)
    return None


def new_tokens(tok, start):
    """
    {id: the ids that spell it in `start`} of the pieces that `tok` has behind the last id of `start`.

    What is in front of them is not looked at: see first_difference.
    """
    return {i: start.spell(piece) for i, piece in zip(tok.ids, tok.pieces) if i >= start.vocab_size}


class Tokenizer:
    """
    One vocabulary. Its attributes:

        name, vocab_size, n_special
        special           {name: id} of the control tokens
        bos, eos, pad     ids
        pieces, ids       the byte strings by rank, and the id of each
        in_text           the control tokens that ordinary text may become
        hash              sha256 of all that decides an id. Data and model compare it to know that their ids mean the
                          same
        system            the system message of a conversation that has none; None: that of chat.py
        foreign           why the model's conversations are not those of chat.py, or ""

    special: a list of names from id 0 on, or {name: id}. ids: of the pieces, rising; None: directly behind the control
    tokens. ends: the names of bos, eos and pad.
    """

    def __init__(self, name, pieces, special, ids=None, in_text=IN_TEXT, ends=("<s>", "</s>", "<pad>")):
        if isinstance(special, list):
            special = {s: i for i, s in enumerate(special)}
        n = len(special)
        behind = list(range(n, n + len(pieces)))
        self.name = name
        self.pieces = pieces
        self.n_special = n
        self.special = special
        self.ids = behind if ids is None else list(ids)
        self.in_text = special.keys() & in_text
        self.vocab_size = 1 + max(*special.values(), *self.ids)
        bos, eos, pad = ends
        self.bos = special[bos]
        self.eos = special[eos]
        self.pad = special[pad]
        self.system = None
        self.foreign = ""

        decides = [PATTERN, *special, *(piece.hex() for piece in pieces)]
        if self.ids != behind or self.in_text != special.keys() & IN_TEXT:
            unusual = [list(special.values()), self.ids, sorted(self.in_text)]
            decides.append(json.dumps(unusual))
        text = "\n".join(decides)
        self.hash = hashlib.sha256(text.encode()).hexdigest()

        # tiktoken wants ranks, but any rising numbers decide which pair is joined first. Given the ids it returns ids.
        self._bpe = tiktoken.Encoding(
            name,
            pat_str=GROUPED,
            mergeable_ranks=dict(zip(pieces, self.ids)),
            special_tokens=special)

    def encode(self, text):
        """The ids of a text, and of nothing else: no <s>, no </s>."""
        return self.encode_array(text).tolist()

    def encode_array(self, text):
        """The same ids as a numpy array (n,) of uint32: an id takes 4 bytes in it, and 36 in a Python list."""
        special = dict(allowed_special=self.in_text, disallowed_special=())
        try:
            return self._bpe.encode_to_numpy(text, **special)
        except ValueError:
            # The regular expression gives up on a run of a million spaces; half a surrogate pair is no UTF-8, which
            # encode() repairs and encode_to_numpy() does not.
            ids = []
            for part in without_long_runs(text):
                ids += self._bpe.encode(part, **special)
            return np.array(ids, np.uint32)

    def spell(self, word):
        """The ids of bytes that the regular expression does not cut."""
        return self._bpe._encode_single_piece(word)

    def decode_bytes(self, ids):
        """
        The bytes of a list or array of ids; control tokens give their names, an id that the vocabulary leaves free (a
        padding row of the embedding) gives nothing, as in transformers. ValueError: an id that is not here.
        """
        ids = [int(i) for i in ids]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(f"token ids {min(ids)} to {max(ids)}, but {self.name} has 0 to {self.vocab_size - 1}: "
                             "use the tokenizer that made them")
        try:
            return self._bpe.decode_bytes(ids)
        except KeyError:
            taken = {*self.special.values(), *self.ids}
            known = [i for i in ids if i in taken]
            return self._bpe.decode_bytes(known)

    def decode(self, ids):
        """The text of ids. A character cut in two at either end becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def stream(self):
        """A function id -> text, to print token by token: it holds back bytes until their character is complete."""
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

        def text_of(i):
            return utf8.decode(self.decode_bytes([i]))

        return text_of

    def ends(self):
        """The names of bos, eos and pad."""
        name = {i: s for s, i in self.special.items()}
        return [name[i] for i in (self.bos, self.eos, self.pad)]

    def id_of(self, name):
        """The id of a control token. ValueError, one line, if this vocabulary has none of that name."""
        if name not in self.special:
            raise ValueError(f"{self.name}: its vocabulary has no {name}: a conversation needs Apertus' control tokens")
        return self.special[name]

    def check_chat(self):
        """ValueError, one line, if conversations in the format of chat.py are not those of this model."""
        if "<|tool_output_start|>" in self.special:
            raise ValueError(f"{self.name} is of Apertus 1.5, of which this is the text part: its conversations have "
                             "another format, so text only, without --chat")
        if self.foreign:
            raise ValueError(self.foreign)
        for name in ("user_start", "assistant_start", "assistant_end"):
            self.id_of(f"<|{name}|>")

    def can_chat(self):
        try:
            self.check_chat()
        except ValueError:
            return False
        return True

    def chat(self, messages, tools=None, thinking=False, add_generation_prompt=False, date=None):
        """A conversation as the model reads it: (text, ids), with one <s>. Arguments and errors: see `chat_pieces`."""
        pieces = chat_pieces(messages, tools, thinking, add_generation_prompt, date)
        ids, _ = self.chat_ids(pieces)
        return "".join(words for words, _, _ in pieces), ids

    def chat_ids(self, pieces):
        """
        What `chat_pieces` returned -> (ids, said): said[i] is True where the assistant itself must produce ids[i].

        Only a piece marked as control becomes a control token; one in the content of a message stays text.
        Neighbouring texts are encoded as one, as the published tokenizer sees them; a token across a border belongs
        to the side where it begins.
        """
        ids = []
        said = []
        for is_control, neighbours in itertools.groupby(pieces, key=lambda piece: piece[1]):
            if is_control:
                for name, _, mine in neighbours:
                    ids.append(self.id_of(name))
                    said.append(mine)
                continue
            text = ""
            owner = b""  # for each byte of the text, whether it is the assistant's
            for words, _, mine in neighbours:
                text += words
                owner += bytes([mine]) * len(words.encode())
            new = self.encode(text)
            ids += new
            # Nearly always all bytes have one owner. Then there is no need to look at each token.
            if len(set(owner)) < 2:
                said += [any(owner)] * len(new)
                continue
            begin = 0
            for i in new:
                said.append(bool(owner[begin]))
                begin += len(self._bpe.decode_single_token_bytes(i))
        return ids, said


def load(name):
    """
    A vocabulary by name: 'byte', 'apertus', 'apertus:K' (256 <= K <= 130,072), 'bpe:FILE' or just FILE.json, or the
    folder of data or of a run that has it.

    Returns a Tokenizer. ValueError: another name, K out of range, a file that is no vocabulary, mistral-common missing.
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
    """The Tokenizer of a data folder (meta.json) or run folder (config.json); a trained one is its tokenizer.json."""
    for path in (f"{folder}/meta.json", f"{folder}/config.json"):
        if os.path.exists(path):
            name = read_json(path).get("tokenizer")
            if not name:
                raise ValueError(f"{folder} is a Hugging Face model: `python convert.py --load={folder} "
                                 "--save=FILE.json` writes its vocabulary, to be named as FILE.json")
            if name.endswith(".json"):
                name = os.path.join(folder, name)
            return load(name)
    raise ValueError(f"{folder!r} has no meta.json and no config.json: want a folder that prepare.py or train.py wrote")


def tekken():
    """The 130,072 pieces of Apertus' vocabulary, from a data file of mistral-common; the package is not imported."""
    package = importlib.util.find_spec("mistral_common")
    file = package and f"{os.path.dirname(package.origin)}/data/tekken_240718.json"
    if not file or not os.path.exists(file):
        raise ValueError("Apertus' vocabulary is not installed: pip install --no-deps mistral-common==1.13.1")
    return read_tekken(file)


@functools.lru_cache
def read_tekken(file):
    """Read once, since studies/fairness.py takes several prefixes. Apertus has no ids for the file's last 19,928."""
    with open(file, encoding="utf-8") as f:
        vocab = json.load(f)["vocab"]
    return [base64.b64decode(piece["token_bytes"]) for piece in vocab[:130_072]]


def read_bpe(path):
    """The arguments of Tokenizer in a file of write_bpe. ValueError if it is anything else."""
    try:
        saved = read_json(path)
        pieces = [base64.b64decode(piece, validate=True) for piece in saved["pieces"]]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not a vocabulary: want the JSON that prepare.py --train_bpe writes") from None
    different = {*pieces}
    complete = different.issuperset(BYTES) and len(different) == len(pieces)
    if saved.get("pattern") != PATTERN or not complete:
        raise ValueError(f"{path} is damaged: want Apertus' pattern, all 256 bytes, no piece twice; train it again")
    own = {key: saved[key] for key in ("special", "ids", "in_text", "ends") if key in saved}
    return dict(special=SMALL, pieces=pieces) | own


def write_bpe(tokenizer, path):
    """A vocabulary as one file, whole or not at all: its pieces; control tokens and ids, unless they are the usual."""
    pieces = [base64.b64encode(piece).decode() for piece in tokenizer.pieces]
    saved = dict(pattern=PATTERN, pieces=pieces)
    if tokenizer.hash != Tokenizer("", tokenizer.pieces, SMALL).hash:
        saved["special"] = tokenizer.special
        saved["ids"] = tokenizer.ids
        saved["in_text"] = sorted(tokenizer.in_text)
        saved["ends"] = tokenizer.ends()
    write_flushed(path, json.dumps(saved, indent=0))


def keep_for(tokenizer, folder):
    """The name by which load_for(folder) finds this vocabulary again: its own, or tokenizer.json, which it writes."""
    for name, size in ("byte", 320), ("apertus", 131072):  # by size first: to load apertus takes a second
        if tokenizer.vocab_size == size and tokenizer.hash == load(name).hash:
            return name
    write_bpe(tokenizer, f"{folder}/tokenizer.json")
    return "tokenizer.json"


def without_long_runs(text):
    """The text in parts, cut inside runs of white space, since the regular expression stands no million of it."""
    return re.split(r"(\s{100000})", text)


def train_bpe(texts, vocab_size, path):
    """
    Learn a vocabulary of `vocab_size` ids, the 64 special ones included, from an iterable of str; write it to `path`.

    It cuts text as Apertus does and differs only in what it has seen: 4,096 ids trained on the standard library put
    3.78 bytes of unseen files into a token, apertus:4096 puts 3.00 and apertus 4.33. Returns the Tokenizer, with fewer
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


# ----------------------------------------------------------------------------------------------------------------------
# more tokens: BPE goes on


PART = 2000     # characters of text that are learnt from, or kept apart, as one


def read_documents(files):
    """
    [(language, text)] of .jsonl files with text and lang, and of text files, whose names say their languages.

    Empty texts are left out. ValueError, one line, for a row that is something else, or if nothing is left.
    """
    def fits(row):
        return all(isinstance(row.get(key), str) for key in ("lang", "text"))

    documents = []
    for file in files:
        if file.endswith(".jsonl"):
            found = read_rows(file, fits, "the strings text and lang")
            documents += [(row["lang"], row["text"]) for row in found]
        else:
            name, _ = os.path.splitext(os.path.basename(file))
            documents.append((name, read_text(file)))
    documents = [(lang, text) for lang, text in documents if text]
    if not documents:
        raise ValueError("no text in there: name .jsonl files with text and lang, or .txt files")
    return documents


def prepared_texts(folder):
    """
    (source, text) of what prepare.py has put into a data folder to train on, a million tokens at a time.

    With prepare.py --source_by=COLUMN the sources are languages, if that is what the column holds.
    """
    tok = load_for(folder)
    control = list(tok.special.values())
    for source, splits in read_json(f"{folder}/meta.json")["sources"].items():
        for shard in splits["train"]["shards"]:
            ids = np.load(f"{folder}/{shard['file']}", mmap_mode="r", allow_pickle=False)
            for begin in range(0, len(ids), 1 << 20):
                part = ids[begin:begin + (1 << 20)]
                yield source, tok.decode(part[~np.isin(part, control)])


def words_of(documents, tok):
    """
    (words, apart) of (language, text) pairs: a Counter of what the regular expression cuts, and (language, text) pairs
    of what is not counted: one part in twenty of each language, a million characters at most, to measure on.
    """
    names = map(re.escape, sorted(tok.in_text))
    in_text = re.compile("|".join(names) or "(?!)")
    words = Counter()
    apart = []
    seen = Counter()
    for lang, text in documents:
        for begin in range(0, len(text), PART):
            part = text[begin:begin + PART]
            number = seen[lang]
            seen[lang] += 1
            if number % 20 == 0 and number < 10_000:
                apart.append((lang, part))
                continue
            for between in in_text.split(part):
                words.update(regex.findall(PATTERN, between))
    return words, apart


def joined(pieces, union):
    """The pieces of a word, where two neighbours that make `union` have become one, from the left."""
    out = []
    for piece in pieces:
        if out and out[-1] + piece == union:
            out[-1] = union
        else:
            out.append(piece)
    return out


def continue_bpe(tok, words, n):
    """
    What BPE learns next from words, {str: how often}, behind the pieces of tok: up to n byte strings, in their order,
    as {piece: how often it was joined}.

    Each is the most frequent union of two neighbours, whatever the two: that is how tiktoken and convert.merges_of join
    them again. Of equally frequent ones it is the first in the order of bytes. A union that occurs once is not learnt.
    """
    control = (s.encode() for s in tok.special)
    known = {*tok.pieces, *control}
    piece_of = dict(zip(tok.ids, tok.pieces))
    spelled = []
    times = []
    for word, n_times in words.items():
        ids = tok.spell(word.encode(errors="replace"))
        if len(ids) > 1:
            spelled.append([piece_of[i] for i in ids])
            times.append(n_times)
    frequency = Counter()
    where = defaultdict(set)        # union -> the numbers of words that had it

    def count(number, sign):
        unions = [a + b for a, b in itertools.pairwise(spelled[number])]
        for union in unions:
            frequency[union] += sign * times[number]
            where[union].add(number)
        return unions

    for number in range(len(spelled)):
        count(number, 1)
    heap = [(-f, union) for union, f in frequency.items()]
    heapq.heapify(heap)
    more = {}
    with tqdm(desc="joining", total=n, unit="piece", disable=None) as bar:
        while heap and len(more) < n:
            f, union = heapq.heappop(heap)
            # What was pushed before the frequency changed is out of date; the newest entry is in the heap too.
            if -f != frequency[union] or union in known:
                continue
            if -f < 2:
                break
            more[union] = -f
            known.add(union)
            bar.update()
            changed = set()
            for number in where.pop(union):
                changed.update(count(number, -1))
                spelled[number] = joined(spelled[number], union)
                changed.update(count(number, 1))
            for other in changed:
                heapq.heappush(heap, (-frequency[other], other))
    return more


def extended(tok, more):
    """The Tokenizer with byte strings appended to the pieces of `tok`, which all keep their ids."""
    ids = [*tok.ids, *range(tok.vocab_size, tok.vocab_size + len(more))]
    return Tokenizer(tok.name, [*tok.pieces, *more], tok.special, ids, tok.in_text, tok.ends())


def print_bytes_per_token(before, after, documents):
    """One line for each language of the (language, text) pairs, and one for all."""
    sizes = Counter()
    old = Counter()
    new = Counter()
    for lang, text in documents:
        sizes[lang] += len(text.encode(errors="replace"))
        old[lang] += len(before.encode(text))
        new[lang] += len(after.encode(text))
    for counter in (sizes, old, new):
        counter["together"] = counter.total()
    print(f"{'bytes per token':24} {'before':>8} {'after':>8}   fewer tokens")
    for lang, n in sizes.items():
        saved = 1 - new[lang] / old[lang]
        print(f"{lang:24} {n / old[lang]:8.3f} {n / new[lang]:8.3f}   {saved:.1%}")


def extend_by_text(tok):
    """The settings' vocabulary with more pieces, written to `out`. ValueError before any work if it cannot be."""
    eighth = tok.vocab_size // 8
    wanted = size or math.ceil((tok.vocab_size + eighth) / 256) * 256
    if wanted <= tok.vocab_size:
        raise ValueError(f"size={wanted}, but {name} has {tok.vocab_size} ids already: want more, or 0")
    if not out.endswith(".json") or os.path.exists(out):
        raise ValueError(f"out={out!r}: want the name of a new file that ends in .json")
    if os.path.isdir(extend):
        documents = prepared_texts(extend)
    else:
        documents = read_documents([extend])
    documents = tqdm(documents, "reading", unit="text", disable=None)
    words, apart = words_of(documents, tok)
    more = continue_bpe(tok, words, wanted - tok.vocab_size)
    learnt = len(more)
    if not size:
        learnt -= (tok.vocab_size + learnt) % 256   # the text may have ended before the number was reached
    if learnt < 1:
        raise ValueError(f"{extend} has {len(more)} pieces to learn that {name} lacks: name more text, or a --size")
    more = dict(itertools.islice(more.items(), learnt))
    after = extended(tok, more)
    make_folder(os.path.dirname(out) or ".")
    write_bpe(after, out)
    print_bytes_per_token(tok, after, apart)
    print(f"{out}: {after.vocab_size:,} ids, {learnt:,} of them new, of which the rarest was joined "
          f"{min(more.values())} times; python prepare.py TEXTS --tokenizer={out}")
    return load(out)


def main():
    t = load(name)
    if extend:
        t = extend_by_text(t)
    print(f"{t.name}: {t.vocab_size:,} ids, sha256 {t.hash[:16]}…")
    for text in paths:
        ids = t.encode(text)
        shown = [f"{i}:{t.decode([i])!r}" for i in ids]
        print(*shown, f"({len(ids)} tokens, {len(text.encode())} bytes)")


if __name__ == "__main__":
    run(main, globals())
