r"""
Apertus' vocabulary: the pattern by which text is cut, the control tokens, and the pieces, each with its id.

tokenizer.py encodes text with a vocabulary, tokenizer_json.py reads and writes its file. Source: ids as in
swiss-ai/Apertus-8B-2509's tokenizer.json.
"""

import base64
import functools
import importlib.util
import os
from typing import NamedTuple

import chat
from engine.files import read_json

# How text is cut before bytes are joined, as in Mistral-Nemo: words with at most one leading mark, cut again before a
# new capital; single digits; punctuation; line breaks.
PATTERN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
           r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
           r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")

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
    *chat.CHAT,
]
# The only control tokens that ordinary text can produce: LaTeX, and placeholders for personal data.
IN_TEXT = [r"\begin{", r"\end{", r"\text{", r"\boxed{", "<iban-pii>", "<email-pii>", "<ip-pii>"]
OUTPUT = "<|tool_output_start|>"    # only Apertus 1.5 has this control token


def padded(names, n):
    """{name: id} of n control tokens: `names`, then <SPECIAL_i>, which are free for your own use."""
    free = [f"<SPECIAL_{i}>" for i in range(len(names), n)]
    return dict(zip(names + free, range(n)))


# `apertus` has the published 1,000 control tokens. All others have 64 with the same names, so that chat and SFT work:
# ids 0 to 3 as above, 4 to 10 IN_TEXT, 11 to 22 those of the chat.
SPECIAL = padded(NAMED, 1000)
SMALL = padded(NAMED[:4] + IN_TEXT + NAMED[61:], 64)
BYTES = [bytes([b]) for b in range(256)]


class Vocabulary(NamedTuple):
    """The content of a vocabulary, from which a Tokenizer is made."""
    name: str
    pieces: list                # byte strings, by rank
    special: dict               # {name: id} of the control tokens
    ids: list = ()              # of the pieces, rising; none: directly after the control tokens
    in_text: set = IN_TEXT      # names of the control tokens that ordinary text can produce
    ends: tuple = ("<s>", "</s>", "<pad>")          # the names of bos, eos and pad
    system: str | None = None   # the default system message of a conversation; None: that of chat.py
    chat_problem: str = ""      # the reason why chat.py cannot write the model's conversations


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
