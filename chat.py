"""
Conversations: read, checked, and turned into ids in Apertus' chat format.

    <s> <|system_start|> who you are, the date <|system_end|>
    <|developer_start|> Deliberation: disabled, Tool Capabilities: disabled <|developer_end|>
    <|user_start|> question <|user_end|>
    <|assistant_start|> <|inner_prefix|> thoughts <|inner_suffix|> <|tools_prefix|> [calls] <|tools_suffix|> [outputs]
        answer <|assistant_end|>
    <|user_start|> ...                                     no line break between blocks

The format is the published one (swiss-ai/apertus_format); chat_template.jinja writes it. Jinja renders that template
here with a mark, a single character, instead of each control token, and no text can contain a mark. So a
`<|user_start|>` typed by a user stays ordinary text. Two more marks enclose the words of the assistant, which
posttrain/sft.py trains on. No other template is ever rendered, since a template is a program.

Post-training reads rows of {"messages": [{"role", "content"}, ...]}. SFT also reads the other forms that
posttrain/sft.py lists. A line that is no JSON object raises an error with its number. A conversation from which nothing
can be learnt is left out and counted.

$ python sample.py --init_from=out/sft --chat             # a conversation in this format
"""

import functools
import json
import time
from collections import Counter

from configurator import ROOT
from engine.files import read_text
from tokenizer import NAMED

# ----------------------------------------------------------------------------------------------------------------------
# the format

# A mark is half of a surrogate pair: UTF-8 cannot express it, so no text that anyone types or stores has one.
BEGIN, END, *others = map(chr, range(0xD800, 0xD80F))     # around the words of the assistant
MARKS = dict(zip(["<s>", *NAMED[61:73]], others))         # {control token: its mark}
NAMES = {mark: name for name, mark in MARKS.items()}
# "Current date" of the default system message in post-training: fixed, so that a run can be repeated.
DATE = "2025-09-02"


def as_json(value):
    return json.dumps(value, ensure_ascii=False)


@functools.cache
def template():
    """chat_template.jinja, compiled with marks instead of control tokens."""
    import jinja2  # torch installs it. Imported here, because pretraining does not need it.

    source = read_text(f"{ROOT}/chat_template.jinja")
    # Each tag stands between two expressions that strip the white space around it.
    tags = {
        "{%- generation -%}": f"{{{{ '{BEGIN}' if ns.learnt }}}}",
        "{%- endgeneration -%}": f"{{{{ '{END}' if ns.learnt }}}}"}
    for tag, mark in (MARKS | tags).items():
        source = source.replace(tag, mark)
    environment = jinja2.Environment()
    environment.filters["tojson"] = as_json     # jinja's own sorts the keys and escapes HTML
    return environment.from_string(source)


def marked(messages, tools=None, thinking=False, add_generation_prompt=False, date=None, system=None, closed=False):
    """
    A conversation as marked text, up to the last message or, to ask for an answer, <|assistant_start|>.

    messages: [{"role": "system" | "user" | "assistant" | "tool", "content": …}], a system message only first. content
    is a str, a list of {"type": "text", "text": …}, or {"text": …} or {"parts": [the same list]}; the assistant's also
    {"blocks": […]} of type thoughts, response (text), tool_calls (calls of name, arguments), tool_outputs (outputs of
    output), and OpenAI's "tool_calls". tools: [{"name", "description", "parameters": JSON schema}]. date:
    YYYY-MM-DD, default today. system: the system message if messages have none; None: Apertus' own. The last turn of
    the assistant stays open unless `closed`. Words of a message with "weight": 0 (OpenAI) are not marked as learnt.
    ValueError, one line: a role, content or tool that the format has no place for, or half a surrogate pair.
    """
    def raise_error(reason):
        raise ValueError(reason)

    render_template = template().render
    try:
        json.dumps([messages, tools], ensure_ascii=False, default=str).encode()     # ValueError: it has a mark
        return render_template(
            messages=messages,
            tools=tools,
            enable_thinking=thinking,
            add_generation_prompt=add_generation_prompt,
            default_system=system,
            closed=closed,
            bos_token=MARKS["<s>"],
            strftime_now=lambda form: date or time.strftime(form),
            raise_exception=raise_error)
    except Exception as error:      # odd data raise errors of many types inside a template
        raise ValueError(f"chat: {error}; want user, assistant, tool after assistant, system only first, with text, "
                         "parts or blocks as content") from None


def parts_of(message):
    """(type, text) of each part or block of a message, with "call" as the text of a call and of its output."""
    content = message.get("content") or ""
    if isinstance(content, str):
        content = dict(text=content)
    if isinstance(content, dict):
        content = content.get("blocks", content.get("parts", [content]))
    return [(part.get("type", "text"), "call" if {"calls", "outputs"} & part.keys() else part["text"])
            for part in content]


def content_of(message):
    """The words of a message as text, without thoughts and calls. Raises one of ODD_CONTENT for other content."""
    return "".join(text for part_type, text in parts_of(message) if part_type in ("text", "response"))


def render(tok, row, date=None):
    """
    A conversation -> ids, mask (two lists): mask[i] is True where the assistant must produce ids[i] itself.

    The ids begin with their only <s>, and have <|assistant_end|> also after the last answer. row["thinking"]: whether
    to write "Deliberation: enabled"; by default it is written if there are thoughts. ValueError: as marked().
    """
    messages = row["messages"]
    thinking = row.get("thinking")
    if thinking is None:
        thinking = any(part_type == "thoughts" for message in messages for part_type, _ in parts_of(message))
    return tok.chat_ids(marked(messages, row.get("tools"), thinking, date=date, system=tok.system, closed=True))


def stop_ids(tok):
    """
    The ids at which a model stops: the end of a text, of a turn, and of a call of tools, because the model must not
    write the output of a tool. Source: eos_token_id of the published generation_config.json, [2, 68, 72].
    """
    return {tok.eos} | {tok.special.get(name, tok.eos) for name in ("</s>", "<|assistant_end|>", "<|tools_suffix|>")}


# ----------------------------------------------------------------------------------------------------------------------
# other forms of a row (posttrain/sft.py lists them)

# The keys of each form. A row has the first form whose keys it has.
FORMS = {"messages"}, {"conversations"}, {"instruction", "output"}, {"prompt", "completion"}
# ShareGPT's names of the roles.
SPEAKERS = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "observation": "tool", "tool": "tool",
}


def conversation(row):
    """A row of one of FORMS as {"messages", "tools", …}. Raises one of ODD_CONTENT for a value of another type."""
    if "messages" in row:
        messages = row["messages"]
    elif "conversations" in row:
        messages = list(map(of_sharegpt, row["conversations"]))
    elif FORMS[2] <= row.keys():
        messages = question_and_answer(alpaca_prompt(row), row["output"])
    elif isinstance(row["prompt"], list):
        messages = [*row["prompt"], *row["completion"]]
    else:
        messages = question_and_answer(row["prompt"], row["completion"])
    if row.get("system") and not (messages and messages[0].get("role") == "system"):
        messages = [dict(role="system", content=row["system"]), *messages]
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = json.loads(tools or "null")
    return row | dict(messages=messages, tools=tools)


def question_and_answer(prompt, answer):
    """Two texts as the two messages of a conversation."""
    return [dict(role="user", content=prompt), dict(role="assistant", content=answer)]


def of_sharegpt(turn):
    """{"from", "value"} as a message. The value of a function_call is {"name", "arguments"} as JSON."""
    if "from" not in turn:
        return turn
    if turn["from"] == "function_call":
        return dict(role="assistant", content="", tool_calls=[dict(function=json.loads(turn["value"]))])
    return dict(role=SPEAKERS[turn["from"]], content=turn["value"])


def alpaca_prompt(row):
    """The prompt that Alpaca was trained with. Source: PROMPT_DICT of tatsu-lab/stanford_alpaca, train.py."""
    paired = context = ""
    if row.get("input"):
        paired = ", paired with an input that provides further context"
        context = "\n\n### Input:\n" + row["input"]
    return (f"Below is an instruction that describes a task{paired}. Write a response that appropriately completes the "
            f"request.\n\n### Instruction:\n" + row["instruction"] + context + "\n\n### Response:")


# ----------------------------------------------------------------------------------------------------------------------
# checks: can a model learn from a conversation, and why not

# {role: the roles after which it may speak}; "" is the beginning.
FOLLOWS = {
    "system": [""],
    "user": ["", "system", "assistant"],
    "assistant": ["user", "tool"],
    "tool": ["assistant", "tool"],
}

# Errors that odd content raises on its way to ids: a number instead of text, a picture, a block without its text, half
# a surrogate pair, a million brackets. Such conversations are counted under the reason ODD.
ODD_CONTENT = AttributeError, KeyError, TypeError, ValueError, RecursionError
ODD = "content that the chat format has no place for: want text or blocks"


def find_fault(messages):
    """The reason why a model cannot learn from a conversation, or None."""
    previous = ""
    for message in messages:
        role = message.get("role")
        if role not in list(FOLLOWS):                      # a list, since the role may be of a type without a hash
            return f"the unknown role {role!r:.40}: want {', '.join(FOLLOWS)}"
        if previous not in FOLLOWS[role]:
            return "roles out of order"
        has_content = any(text.strip() for _, text in parts_of(message)) or message.get("tool_calls")
        if not has_content and role != "system":
            return "an empty turn"
        previous = role
    if previous == "tool":
        return "ends with a tool's output"
    if not any(message["role"] == "assistant" for message in messages):
        return "no assistant turn"


def learnable(tok, row, max_length):
    """A row of any form -> (ids, mask) as render() gives them, or the reason why a model cannot learn from it (str)."""
    try:
        if not any(keys <= row.keys() for keys in FORMS):
            return "no known form of a conversation"
        row = conversation(row)
        if reason := find_fault(row["messages"]):
            return reason
        ids, mask = render(tok, row, DATE)
    except ODD_CONTENT:
        return ODD
    if not any(mask):
        return "no word to learn: each answer has weight 0"
    return (ids, mask) if len(ids) <= max_length else f"more than max_length={max_length} tokens"


def prompt_ids(tok, row):
    """A conversation that waits for an answer -> ids that end in <|assistant_start|>, or why it does not wait (str)."""
    try:
        row = conversation(row | dict(messages=row["messages"]))
        messages = row["messages"]
        if not messages or messages[-1].get("role") != "user":
            return "its last message is not the user's"
        if reason := find_fault([*messages, dict(role="assistant", content="an answer")]):
            return reason
        return tok.chat(messages, row.get("tools"), row.get("thinking", False), True, DATE)
    except ODD_CONTENT:
        return ODD


def describe_dropped(bad, kept, items):
    """How many items were left out and why, in one line. bad: [(reason, place)]; items: their name, plural."""
    first = dict(reversed(bad))
    counts = Counter(reason for reason, _ in bad)
    reasons = "; ".join(f"{count} {reason} (first in {first[reason]})" for reason, count in counts.items())
    if kept:
        return f"left out {len(bad)} of {len(bad) + kept} {items}: {reasons}"
    return f"none of {len(bad)} {items} can be learnt from: {reasons}"
