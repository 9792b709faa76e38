"""
Chats: conversations as people's data have them, checked, and written in Apertus' format.

    <s> <|system_start|> who you are, the date <|system_end|>
    <|developer_start|> Deliberation: disabled, Tool Capabilities: disabled <|developer_end|>
    <|user_start|> question <|user_end|>
    <|assistant_start|> <|inner_prefix|> thoughts <|inner_suffix|> <|tools_prefix|> [calls] <|tools_suffix|> [outputs]
        answer <|assistant_end|>
    <|user_start|> ...                                     no line break between blocks

The format is made of pieces, each a text or a control token: `<|user_start|>` typed by a user is text about a token and
never becomes one. posttrain/sft.py trains on the pieces marked as said by the assistant; Tokenizer.chat turns all of
them into ids. Source: the published template (swiss-ai/apertus_format, chat_template.jinja), whose text this is
wherever that accepts the messages.

Post-training reads rows of {"messages": [{"role", "content"}, ...]}, and SFT those of other forms too, which
posttrain/sft.py lists. A line that is no JSON object ends the run with its number; a conversation that cannot be learnt
from is left out and counted.

$ python sample.py --init_from=out/sft --chat             # a conversation in this format
"""

import datetime
import itertools
import json
import os

# -----------------------------------------------------------------------------
# the format

WHO_AM_I = ("You are Apertus, a helpful assistant created by the SwissAI initiative.\n"
            "Knowledge cutoff: 2024-04\nCurrent date: ")


def control(token, said=False):
    return f"<|{token}|>", True, said


def plain(text, said=False):
    return text, False, said


def chat_pieces(messages, tools=None, thinking=False, add_generation_prompt=False, date=None):
    """
    Apertus' chat format as a list of (text, control, said): said marks what the assistant itself must produce.

    messages: [{"role": "system" | "user" | "assistant" | "tool", "content": …}], a system message only first. content
    is a str, or {"text": …} (system), {"parts": [{"type": "text", "text": …}]} (user), {"blocks": […]} (assistant) of
    type thoughts, response (text), tool_calls (calls of name, arguments), tool_outputs (outputs of output). An
    assistant may carry OpenAI-style "tool_calls". tools: [{"name", "description", "parameters": JSON schema}]. date:
    YYYY-MM-DD, default today. ValueError, one line, if something does not fit.
    """
    system = WHO_AM_I + (date or datetime.date.today().isoformat())
    if messages and messages[0].get("role") == "system":
        first, *messages = messages
        system = content_of(first)
    deliberation = "enabled" if thinking else "disabled"
    abilities = ": disabled"
    if tools:
        abilities = ":\n" + "\n".join(map(describe_tool, tools))
    return [
        ("<s>", True, False),
        *framed("system", system),
        *framed("developer", f"Deliberation: {deliberation}\nTool Capabilities{abilities}"),
        *turns(messages),
        *([control("assistant_start")] if add_generation_prompt else []),
    ]


def framed(role, text):
    return control(f"{role}_start"), plain(text), control(f"{role}_end")


def turns(messages):
    """
    The messages after the header, piece by piece. The assistant's turn stays open across tool calls and thoughts, and
    only a following user message closes it: the last <|assistant_end|> is not written. Training must add it.
    """
    speaking = False        # inside the assistant's turn
    outputs = False         # inside a list of tool outputs
    inner = False           # inside the assistant's thoughts
    for message in messages:
        role = message.get("role")
        if role not in ("user", "assistant", "tool") or role == "tool" and not speaking:
            raise ValueError(f"chat: role {role!r} here; want user, assistant, tool after assistant, system only first")
        if role == "tool":
            yield plain((", " if outputs else "[") + content_of(message))
            outputs = True
            continue
        if outputs:
            yield plain("]")
            outputs = False
        if role == "user":
            if speaking:
                yield control("assistant_end", said=True)
            yield from framed("user", content_of(message))
            speaking = inner = False
            continue
        if not speaking:
            yield control("assistant_start")
            speaking = True
        for kind, text in assistant_blocks(message):
            if kind == "thoughts" and not inner:
                yield control("inner_prefix", said=True)
                inner = True
            if kind in ("response", "display") and inner:
                yield control("inner_suffix", said=True)
                inner = False
            if kind in ("calls", "display"):
                yield control("tools_prefix", said=True)
                yield plain(text, said=True)
                yield control("tools_suffix", said=True)
            else:
                yield plain(text, said=kind != "outputs")
    if outputs:
        yield plain("]")


def content_of(message):
    """The text of a system, user or tool message. ValueError names the role if there is none."""
    content = message.get("content")
    try:
        content = content if isinstance(content, dict) else {"text": content}
        parts = content.get("parts", [{"type": "text", **content}])
        if all(part["type"] == "text" for part in parts):
            return "".join(part["text"] for part in parts)
    except (AttributeError, KeyError, TypeError):
        pass
    raise ValueError(f"chat: the content of a {message['role']} message is {message.get('content')!r}; "
                     f"want text, {{'text': …}} or {{'parts': [text parts]}}")


def assistant_blocks(message):
    """(kind, text) of each block of an assistant message: thoughts, response, calls, display (a call), or outputs."""
    content = message.get("content") or ""
    if isinstance(content, str):
        content = {"blocks": [{"type": "response", "text": content}]}
    try:
        blocks = list(content["blocks"])
        if message.get("tool_calls"):
            calls = [call["function"] for call in message["tool_calls"]]
            blocks.append({"type": "tool_calls", "calls": calls})
        for n, block in enumerate(blocks):
            if block["type"] in ("thoughts", "response"):
                yield block["type"], block["text"] + ""
            elif block["type"] == "tool_calls":
                calls = [(c["name"], c["arguments"]) for c in block["calls"]]
                text = ", ".join(f'{{"{f}": {a if isinstance(a, str) else as_json(a)}}}' for f, a in calls)
                # display_answers is the one tool whose call is the answer: Apertus ends its thoughts before it.
                answers = n and [f for f, _ in calls] == ["display_answers"]
                yield "display" if answers else "calls", f"[{text}]"
            elif block["type"] == "tool_outputs":
                text = ", ".join(o["output"] for o in block["outputs"])
                yield "outputs", f"[{text}]"
            else:
                raise KeyError(block["type"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"chat: {error} in the assistant message {message!r}; want text or blocks") from None


def as_json(value):
    return json.dumps(value, ensure_ascii=False)


def describe_tool(tool):
    """A tool as a TypeScript declaration, the way Apertus reads it. ValueError without a name and a description."""
    tool = tool.get("function", tool)
    texts = (tool.get("name"), tool.get("description"))
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"chat: tool {tool!r} needs a name and a description")
    schema = tool.get("parameters") or {}
    lines = []
    for key, spec in schema.get("properties", {}).items():
        if spec.get("description"):
            lines.append(f"// {spec['description']}\n")
        default = ""
        if "default" in spec:
            enum, one_of = spec.get("enum"), spec.get("oneOf")
            comma = "" if one_of and not enum else ", "
            value = spec["default"]
            if not enum and not one_of:
                value = as_json(value)
            default = f"{comma}// default: {value}"
        optional = "" if key in schema.get("required", []) else "?"
        lines.append(f"{key}{optional}: {ts_type(spec)}{default},\n")
    body = "(_: {\n" + "".join(lines).removesuffix(",\n") + "\n})" if lines else "()"
    return f"// {tool['description']}\ntype {tool['name']} = {body} => any;"


def ts_type(spec):
    """The TypeScript type of a JSON schema, line breaks and all as the published template renders them."""
    kind = spec.get("type")
    null = " | null" if spec.get("nullable") else ""
    scalars = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}
    if isinstance(kind, list) and kind:
        return " | ".join(kind)
    if kind == "array":
        item = spec.get("items") or {}
        inner = scalars.get(str(item.get("type"))) or ts_type(item)
        if inner == "object | object" or len(inner) > 50:
            inner = "any"
        return inner + "[]" + null
    if spec.get("oneOf"):
        types = []
        for one in spec["oneOf"]:
            description = f"// {one['description']}" if one.get("description") else ""
            default = f"{'':20}// default: {as_json(one['default'])}" if "default" in one else ""
            types.append(ts_type(one) + description + default)
        return " | \n".join(types)
    if kind == "string" and spec.get("enum"):
        return '"' + '" | "'.join(spec["enum"]) + '"'
    if kind == "string":
        return "string" + null
    if kind == "object" and spec.get("properties"):
        fields = []
        for key, value in spec["properties"].items():
            optional = "" if key in spec.get("required", []) else "?"
            fields.append(f"{key}{optional}: \n{'':16}{ts_type(value)}")
        return "{\n" + ", ".join(fields) + "}"
    return "object" if kind == "object" else scalars.get(kind, "any")


def check(tok):
    """ValueError, one line, if a model with this Tokenizer has conversations of another format."""
    if "<|tool_output_start|>" in tok.special:
        raise ValueError(f"{tok.name} is of Apertus 1.5, of which this is the text part: its conversations have "
                         "another format, so text only, without --chat")
    if tok.foreign:
        raise ValueError(tok.foreign)
    for name in ("user_start", "assistant_start", "assistant_end"):
        tok.id_of(f"<|{name}|>")


def ids_of(tok, pieces):
    """
    Pieces of `chat_pieces` -> (ids, said), two lists: said[i] is True where the assistant itself must produce ids[i].

    Only a piece marked as control becomes a control token; the same name in a message stays text. Neighbouring texts
    are encoded as one, as in the published tokenizer; a token across their border belongs to where it begins.
    """
    ids = []
    said = []
    for is_control, neighbours in itertools.groupby(pieces, key=lambda piece: piece[1]):
        neighbours = list(neighbours)
        if is_control:
            ids += [tok.id_of(name) for name, _, _ in neighbours]
            said += [mine for _, _, mine in neighbours]
            continue
        new = tok.encode("".join(text for text, _, _ in neighbours))
        ids += new
        # For each byte of the text, whether the assistant produces it. Nearly always all are alike.
        owner = b"".join(bytes([mine]) * len(text.encode()) for text, _, mine in neighbours)
        if len(set(owner)) < 2:
            said += [any(owner)] * len(new)
            continue
        begin = 0
        for i in new:
            said.append(bool(owner[begin]))
            begin += len(tok.decode_bytes([i]))
    return ids, said


def ends(tok):
    """
    The ids at which a model stops: the end of a text, of a turn, and of a call of tools, whose output is not the
    model's to write. Source: eos_token_id of the published generation_config.json, [2, 68, 72].
    """
    names = ("</s>", "<|assistant_end|>", "<|tools_suffix|>")
    return {tok.eos, *(tok.special[name] for name in names if name in tok.special)}


# -----------------------------------------------------------------------------
# .jsonl files

CONVERSATION = "a list `messages` of {role, content}"


def is_conversation(row):
    messages = row.get("messages")
    return isinstance(messages, list) and all(isinstance(message, dict) for message in messages)


def parsed(line, fits=is_conversation):
    """The JSON object of a line, or None if it is something else or does not fit."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and fits(row) else None


def numbered_rows(path, fits=is_conversation, want=CONVERSATION):
    """
    (line, JSON object) of a .jsonl file; empty lines are passed over.

    ValueError if there is no such file, or with the number of a line that is not an object for which fits(object) is
    true. want: what such an object has, in words.
    """
    if not os.path.isfile(path):
        raise ValueError(f"no such file: {path}; want .jsonl, each line a JSON object with {want}")
    with open(path, "rb") as f:
        for n, line in enumerate(f, 1):
            if line.strip():
                row = parsed(line, fits)
                if row is None:
                    got = line.decode(errors="replace").strip()[:60]
                    raise ValueError(f"{path}, line {n}: want a JSON object with {want}, got {got!r}")
                yield n, row


def read_rows(path, fits=is_conversation, want=CONVERSATION):
    """The JSON objects of a .jsonl file as a list. ValueError as above, and if there are none."""
    rows = [row for _, row in numbered_rows(path, fits, want)]
    if not rows:
        raise ValueError(f"{path} is empty")
    return rows


# -----------------------------------------------------------------------------
# other forms of a row (posttrain/sft.py lists them)

# The keys by which a row is recognised; the first of these that it has all of.
FORMS = {"messages"}, {"conversations"}, {"instruction", "output"}, {"prompt", "completion"}
SPEAKERS = dict(
    system="system",
    human="user",
    user="user",
    gpt="assistant",
    assistant="assistant",
    observation="tool",
    tool="tool",
)


def has_form(row):
    """Whether a row has all keys of one of FORMS."""
    return any(keys <= row.keys() for keys in FORMS)


def conversation(row):
    """A row of one of FORMS as {"messages", "tools", …}. What its keys hold may not fit: then one of ODD_CONTENT."""
    if "messages" in row:
        messages = row["messages"]
    elif "conversations" in row:
        messages = list(map(of_sharegpt, row["conversations"]))
    elif FORMS[2] <= row.keys():
        prompt = alpaca_prompt(row["instruction"], row.get("input"))
        messages = question_and_answer(prompt, row["output"])
    else:
        prompt, answer = row["prompt"], row["completion"]
        messages = [*prompt, *answer] if isinstance(prompt, list) else question_and_answer(prompt, answer)
    if row.get("system") and [message.get("role") for message in messages[:1]] != ["system"]:
        messages = [dict(role="system", content=row["system"]), *messages]
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = json.loads(tools or "null")
    return {**row, "messages": messages, "tools": tools}


def question_and_answer(prompt, answer):
    """Two texts as the two messages of a conversation."""
    return [dict(role="user", content=prompt), dict(role="assistant", content=answer)]


def of_sharegpt(turn):
    """{"from", "value"} as a message. The value of a function_call is {"name", "arguments"} as JSON."""
    if "from" not in turn:
        return turn
    if turn["from"] == "function_call":
        call = dict(function=json.loads(turn["value"]))
        return dict(role="assistant", content="", tool_calls=[call])
    return dict(role=SPEAKERS[turn["from"]], content=turn["value"])


def alpaca_prompt(instruction, context):
    """What Alpaca's model is asked. Source: PROMPT_DICT of tatsu-lab/stanford_alpaca, train.py."""
    if context:
        given = ", paired with an input that provides further context"
        context = "\n\n### Input:\n" + context
    else:
        given = context = ""
    return (f"Below is an instruction that describes a task{given}. Write a response that appropriately completes the "
            f"request.\n\n### Instruction:\n" + instruction + context + "\n\n### Response:")


# -----------------------------------------------------------------------------
# checks: what can be learnt from, and why the rest cannot

# after whom each role may speak; "" is the beginning
FOLLOWS = {
    "system": {""},
    "user": {"", "system", "assistant"},
    "assistant": {"user", "tool"},
    "tool": {"assistant", "tool"},
}

# What odd content raises on its way to ids: a number where text belongs, a picture, a block without its text, half a
# surrogate pair. ODD is the reason that is counted for it.
ODD_CONTENT = (AttributeError, KeyError, TypeError, ValueError)
ODD = "content that the chat format has no place for: want text or blocks"


def normal(message):
    """OpenAI's content, a list of text parts, as their text; any other message as it is."""
    def is_text(part):
        return isinstance(part, dict) and part.get("type") == "text"

    parts = message.get("content")
    if not isinstance(parts, list) or not all(map(is_text, parts)):
        return message
    text = "".join(part["text"] for part in parts)
    return {**message, "content": text}


def fault(messages):
    """Why a conversation of normal messages cannot be learnt from, or None."""
    before = ""
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or before not in FOLLOWS.get(role, ()):
            return "roles out of order"
        if isinstance(content, dict):
            # A call has no text, but it is something to learn.
            blocks = content.get("blocks", content.get("parts", [content]))
            content = "".join(str(b.get("text", "call")) for b in blocks)
        says = (content or "").strip() or message.get("tool_calls")
        if not says and role != "system":
            return "an empty turn"
        before = role
    if not any(message["role"] == "assistant" for message in messages):
        return "no assistant turn"
    return "ends with a tool's output" if before == "tool" else None


def learnable(tok, row, max_length, date=None):
    """A row of any form -> (ids, said) as render() gives them, or why it cannot be learnt from (str)."""
    try:
        if not has_form(row):
            return "no known form of a conversation"
        row = conversation(row)
        messages = list(map(normal, row["messages"]))
        if why := fault(messages):
            return why
        ids, said = render(tok, {**row, "messages": messages}, date)
    except ODD_CONTENT:
        return ODD
    return (ids, said) if len(ids) <= max_length else f"more than max_length={max_length} tokens"


def prompt_ids(tok, row, date=None):
    """A conversation that waits for an answer -> ids that end in <|assistant_start|>, or why it is none (str)."""
    try:
        messages = list(map(normal, row["messages"]))
        if not messages:
            return "no messages"
        if messages[-1].get("role") != "user":
            return "its last message is not the user's"
        if why := fault([*messages, dict(role="assistant", content="an answer")]):
            return why
        thinking = row.get("thinking", False)
        return tok.chat(messages, row.get("tools"), thinking, add_generation_prompt=True, date=date)[1]
    except ODD_CONTENT:
        return ODD


def render(tok, row, date=None):
    """
    A conversation -> ids, said (two lists): said[i] is True where the assistant must produce ids[i] itself.

    It begins with its only <s>, and has <|assistant_end|> also after the last answer. "Deliberation: enabled" is
    written if row["thinking"] says so, by default if there are thoughts. ValueError: what the template cannot express.
    """
    messages = row["messages"]
    thoughts = False
    for message in messages:
        if isinstance(message.get("content"), dict):
            blocks = message["content"].get("blocks", ())
            thoughts |= any(block.get("type") == "thoughts" for block in blocks)
    thinking = row.get("thinking", thoughts)
    pieces = chat_pieces(messages, row.get("tools"), thinking, date=date)
    if messages[-1]["role"] == "assistant":
        pieces.append(control("assistant_end", said=True))
    return tok.chat_ids(pieces)


def count(bad, why, place, times=1):
    """Add to {reason: (count, first place)}. place: as in "line 3"; the first one that is counted stays."""
    had, first = bad.get(why, (0, place))
    bad[why] = had + times, first


def left_out(bad, kept, what):
    """What was left out and why, in one line. bad: {reason: (count, first place)}; what: the items' name, plural."""
    n = sum(times for times, _ in bad.values())
    reasons = []
    for why, (times, place) in bad.items():
        reasons.append(f"{times} {why} (first in {place})")
    head = f"left out {n} of {n + kept} {what}" if kept else f"none of {n} {what} can be learnt from"
    return f"{head}: {'; '.join(reasons)}"
