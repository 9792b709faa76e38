"""
The file of a vocabulary, Hugging Face's tokenizer.json, and tokenizer_config.json next to it: write and read them.

We write what transformers.AutoTokenizer reads to the same ids. We read files of a byte-level BPE that cuts text as
Apertus' does, also with other control tokens: those of the Minis, of Apertus 1.5, of a fine-tune that added some. If
transformers would make other ids of a text than tokenizer.py does, an error says why; of Apertus 1.5 a typed <think>
or <answer> is the exception (normalizes()).
"""

import hashlib
import itertools
import json
import math
import os
import re
from typing import NamedTuple

import chat
from configurator import ROOT
from engine.files import read_json, read_text, write_json
from vocabulary import BYTES, IN_TEXT, OUTPUT, PATTERN, SPECIAL, Vocabulary

EXACT = {"single_word": False, "lstrip": False, "rstrip": False}    # how an added token matches: anywhere, and alone
SETTINGS = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False, padding_side="left")
ENDS = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
TEMPLATE = "chat_template.jinja"
RESERVED = [f"<SPECIAL_{i}>" for i in range(61, 73)]    # the names of the Minis for the ids of the chat tokens
# Apertus 1.5 has moved these names from ids 32 and 33 to 69 and 70, which are control tokens although they are not
# among its added tokens.
MOVED = {"<think>", "</think>"}


class ChatFormat(NamedTuple):
    """A published template whose conversations chat.py can write. Its hash or its tokens suffice to know it."""
    sha256: str
    tokens: list
    system: str | None      # the system message of a conversation that has none; None: that of chat.py


FORMATS = (
    # Apertus 1.5; the stored versions of its template differ in thoughts and tools (swiss-ai/apertus-omni-tokenizer).
    ChatFormat(
        "", [OUTPUT],
        "You are Apertus 1.5 Omni, a multimodal assistant developed by the Swiss AI Initiative. Extended from Apertus "
        "1 via continued pretraining, you understand images and audio and respond in text."),
    # Apertus-8B-Instruct-2509
    ChatFormat("56f72c27fa2e565312a830b7315a455c79fb452fdbe7a5b7595d8a094f282b07", chat.CHAT, None),
    # Apertus-v1.1-1.5B-Instruct
    ChatFormat("4afab8361a4bd0c2994404e0b0851dbaad461a06e56bdfdb635aae3977473c19", RESERVED, ""))

# -----------------------------------------------------------------------------
# how pieces are spelled in the file


def byte_letters():
    """GPT-2's alphabet, {byte: character}: printable bytes are themselves, the others the characters from 256 on."""
    free = map(chr, itertools.count(256))
    return {b: chr(b) if chr(b).isprintable() and chr(b) != " " else next(free) for b in range(256)}


def pieces_of(spelled):
    """The byte strings that are spelled in these letters."""
    byte = {letter: bytes([b]) for b, letter in byte_letters().items()}
    return [b"".join(byte[letter] for letter in spelling) for spelling in spelled]


def merges_of(spelled):
    """
    The list of merges that a byte-level BPE of these pieces (str, by rank) has in Hugging Face's format: all pairs of
    pieces which, joined, make a piece, by the rank of that piece, then by their own (Apertus: 269,443, in the published
    order).
    """
    rank = {s: i for i, s in enumerate(spelled)}
    merges = []
    for s in spelled:
        pairs = [[s[:i], s[i:]] for i in range(1, len(s)) if s[:i] in rank and s[i:] in rank]
        merges += sorted(pairs, key=lambda pair: rank[pair[0]])
    return merges


# -----------------------------------------------------------------------------
# write


def without_vocabulary(bos="<s>", bos_id=1):
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


def hf_files(tok):
    """
    {file name: its content, for JSON} of a Tokenizer, from which transformers.AutoTokenizer makes the same ids.

    transformers also turns a control token that is spelled out in a text into that token, unless called with
    split_special_tokens=True. The chat template is included if chat.py can write the model's conversations.
    """
    names = {i: name for name, i in tok.special.items()}
    ends = {end: names[i] for end, i in zip(ENDS, (tok.bos, tok.eos, tok.pad))}
    letters = byte_letters()
    spelled = [piece.decode("latin-1").translate(letters) for piece in tok.pieces]
    content = without_vocabulary(ends["bos_token"], tok.bos)
    content["model"] |= dict(vocab=tok.special | dict(zip(spelled, tok.ids)), merges=merges_of(spelled))
    content["added_tokens"] = [
        dict(id=i, content=name, **EXACT, normalized=False, special=name not in tok.in_text)
        for name, i in tok.special.items()]
    settings = SETTINGS | ends
    template = read_text(f"{ROOT}/{TEMPLATE}")             # the format of chat.py, in Jinja
    if tok.system is not None:
        settings["default_system"] = tok.system            # for read_vocabulary(); transformers reads the template
        template = f"{{%- set default_system = {json.dumps(tok.system)} -%}}\n{template}"
    # Not of Apertus 1.5, whose own template has other thoughts and tools than ours.
    if {*chat.CHAT} <= tok.special.keys() and OUTPUT not in tok.special and not tok.chat_problem:
        settings["chat_template"] = template
    return {"tokenizer.json": content, "tokenizer_config.json": settings}


def write_vocabulary(tok, path):
    """Write tokenizer.json alone, all or nothing. It does not name bos, eos and pad: they must be Apertus'."""
    write_json(path, hf_files(tok)["tokenizer.json"])


# -----------------------------------------------------------------------------
# read


def read_vocabulary(path):
    """
    The Vocabulary in a tokenizer.json, with the tokenizer_config.json, config.json and chat template next to it, if
    any. Every id is the stored one, also of tokens that were added behind the vocabulary.

    ValueError, one line, if transformers would encode a text to other ids, or if a file has another form.
    """
    try:
        return parse(path)
    except (AttributeError, KeyError, TypeError, OverflowError):
        raise ValueError(f"{path}, or a JSON file next to it, is not of a byte-level BPE like Apertus'; if an older "
                         "version of this program wrote it, prepare the data again") from None


def parse(path):
    """read_vocabulary(), which catches the errors of files in another form."""
    folder = os.path.dirname(path) or "."
    content, settings = read_json(path), read_optional(folder, "tokenizer_config.json")
    vocab, added, id_of = tokens_in(content)
    spelled = sorted(vocab.keys() - added.keys() - MOVED, key=vocab.get)
    pieces = pieces_of(spelled)
    # Apertus 1.5 has the ids of pictures and sound behind those of text.
    text_config = read_optional(folder, "config.json").get("text_config") or {}
    n_text = text_config.get("output_vocab_size") or math.inf
    # Control tokens: those added, and those that other programs keep in the vocabulary (MOVED), but not of pictures.
    control = [name for name in added.keys() | (vocab.keys() & MOVED) if id_of[name] < n_text]
    in_text = {name for name in added.keys() & control if is_in_text(name, added)}
    check_same_ids(path, content, settings, spelled, pieces, in_text)

    apertus_names = mini_names(id_of)
    system, chat_problem = chat_format(folder, settings.get("chat_template"))
    return Vocabulary(
        name=f"bpe:{path}",
        pieces=pieces,
        special={apertus_names.get(name, name): id_of[name] for name in sorted(control, key=id_of.get)},
        ids=[vocab[spelling] for spelling in spelled],
        in_text=in_text,
        ends=[apertus_names.get(end, end) for end in ends_in(settings)],
        system=settings.get("default_system", system),
        chat_problem=chat_problem)


def tokens_in(content):
    """
    The tokens of a tokenizer.json: {spelling of a piece, or name: id} of its model, {name: entry} of the added tokens,
    and the ids of both.
    """
    vocab = content["model"]["vocab"]
    added = {token["content"]: token for token in content["added_tokens"]}
    return vocab, added, vocab | {name: token["id"] for name, token in added.items()}


def is_in_text(name, added):
    """Whether text can produce an added token: one that is not special; of Apertus' control tokens only IN_TEXT."""
    return name in IN_TEXT or not (name in SPECIAL or added[name].get("special"))


def mini_names(id_of):
    """
    {name: Apertus' name} of the chat tokens of a Mini; {} for another model. The Minis have Mistral-Nemo's control
    tokens: id 3 is [INST], id 10 <pad>. Their conversations use the ids of Apertus' chat tokens, but not the names.
    """
    is_mini = [id_of.get(name) for name in RESERVED] == [*range(61, 73)] and not id_of.keys() & {*chat.CHAT}
    return dict(zip(RESERVED, chat.CHAT)) if is_mini else {}


def ends_in(settings):
    """The names of bos, eos and pad in a tokenizer_config.json. (In a Mini's config.json the id of pad is [INST]'s.)"""
    ends = [settings.get(key) or default for key, default in ENDS.items()]
    return [end["content"] if isinstance(end, dict) else end for end in ends]


def read_optional(folder, file):
    """The object in a JSON file of a folder; {} if the file is missing."""
    path = f"{folder}/{file}"
    return read_json(path) if os.path.isfile(path) else {}


def chat_format(folder, template):
    """
    (system, chat_problem) of a Vocabulary, by the chat template of a model. A template is a program: it is not
    rendered, but recognised by its hash or tokens.
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


# -----------------------------------------------------------------------------
# does transformers make the same ids?


def check_same_ids(path, content, settings, spelled, pieces, in_text):
    """
    ValueError, one line, if transformers would encode a text to other ids by these files than tokenizer.py does.

    content: of tokenizer.json; settings: of tokenizer_config.json; spelled, pieces: by id, in the letters of the file
    and as bytes; in_text: names of the added tokens that ordinary text can produce.
    """
    vocab, added, id_of = tokens_in(content)
    merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in content["model"]["merges"]]
    renumbered = renumbered_names(vocab, id_of, settings.get("added_tokens_decoder", {}))
    ambiguous = [name for name in in_text if is_ambiguous(name, added)]
    differences = {
        "it cuts text differently": cuts_differently(content),
        "it normalizes text": normalizes(content.get("normalizer")),
        "it lacks some of the 256 bytes": not {*pieces}.issuperset(BYTES),
        "its merges are not all pairs of its pieces in the order of their ids": merges != merges_of(spelled),
        "two tokens have the same id": len({*id_of.values()}) < len(id_of),
        f"it numbers {renumbered} by itself": renumbered,
        f"its added tokens {ambiguous} take white space with them, stand alone or overlap others": ambiguous,
    }
    for difference, applies in differences.items():
        if applies:
            raise ValueError(f"{path}: {difference}: this program would make other ids of a text than transformers "
                             "does")


def cuts_differently(content):
    """Whether a tokenizer.json cuts a text into other parts than PATTERN does, or joins bytes by other rules."""
    ours = without_vocabulary()
    model = {key: value for key, value in content["model"].items()
             if value and key not in ("vocab", "merges", "unk_token", "fuse_unk")}
    return model != ours["model"] or content.get("pre_tokenizer") != ours["pre_tokenizer"]


def normalizes(normalizer):
    """
    Whether the normalizer of a tokenizer.json changes text: it has a part of another type than Sequence or Replace, or
    one whose pattern does not begin with "<".
    """
    # That of 1.5 turns a typed <think> into a control token and deletes <answer>: here both stay text.
    return bool(re.search(r'"type": "(?!Sequence|Replace)|"(String|Regex)": "(?!<)', json.dumps(normalizer)))


def renumbered_names(vocab, id_of, decoder):
    """The names to which transformers gives other ids than tokenizer.json does. decoder: its added_tokens_decoder."""
    # It keeps the ids of the vocabulary, and numbers all other added tokens itself, from its end on.
    added = [name for name in id_of if name not in vocab]
    numbers = [*vocab.items(), *zip(added, itertools.count(len(vocab)))]
    numbers += [(token["content"], int(i)) for i, token in decoder.items()]
    return [name for name, i in numbers if id_of.get(name) != i]


def is_ambiguous(name, added):
    """Whether transformers and tiktoken may match an added token in different places. added: {name: entry} of all."""
    # An empty token matches endlessly, and of two tokens that overlap either may match.
    return (not name
            or any(added[name].get(key) for key in EXACT)
            or any(other != name and (other in name or name in other) for other in added))
