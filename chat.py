"""
Apertus' chat format: a conversation as pieces of text and control tokens, and which of them the assistant must produce.

    <s> <|system_start|> who you are, the date <|system_end|>
    <|developer_start|> Deliberation: disabled, Tool Capabilities: disabled <|developer_end|>
    <|user_start|> question <|user_end|>
    <|assistant_start|> <|inner_prefix|> thoughts <|inner_suffix|> <|tools_prefix|> [calls] <|tools_suffix|> [outputs]
        answer <|assistant_end|>
    <|user_start|> ...                                     no line break between blocks

A piece knows whether it is control: `<|user_start|>` typed by a user is text about a token and never becomes one. posttrain/sft.py
trains on the pieces marked as said by the assistant; Tokenizer.chat turns all of them into ids. Source: the published template
(swiss-ai/apertus_format, chat_template.jinja), whose text this is wherever that accepts the messages.

$ python sample.py --init_from=out/sft --chat             # a conversation in this format
"""

import datetime
import json

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

    Source: the published template (swiss-ai/apertus_format), whose text this is wherever that accepts the messages.
    """
    system = WHO_AM_I + (date or datetime.date.today().isoformat())
    if messages and messages[0].get("role") == "system":
        system, messages = content_of(messages[0]), messages[1:]
    deliberation = "enabled" if thinking else "disabled"
    abilities = ":\n" + "\n".join(map(describe_tool, tools)) if tools else ": disabled"
    return [
        ("<s>", True, False),
        control("system_start"), plain(system), control("system_end"),
        control("developer_start"),
        plain(f"Deliberation: {deliberation}\nTool Capabilities{abilities}"),
        control("developer_end"),
        *turns(messages),
        *([control("assistant_start")] if add_generation_prompt else []),
    ]


def turns(messages):
    """
    The messages after the header, piece by piece. The assistant's turn stays open across tool calls and thoughts, and
    only a following user message closes it: the last <|assistant_end|> is not written. Training must add it.
    """
    speaking = outputs = inner = False               # inside the assistant's turn, a list of tool outputs, its thoughts
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
            yield from (control("user_start"), plain(content_of(message)), control("user_end"))
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
                yield from (control("tools_prefix", True), plain(text, True), control("tools_suffix", True))
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
    try:
        blocks = [{"type": "response", "text": content}] if isinstance(content, str) else list(content["blocks"])
        if message.get("tool_calls"):
            blocks.append({"type": "tool_calls", "calls": [call["function"] for call in message["tool_calls"]]})
        for n, block in enumerate(blocks):
            if block["type"] in ("thoughts", "response"):
                yield block["type"], block["text"] + ""
            elif block["type"] == "tool_calls":
                calls = [(c["name"], c["arguments"]) for c in block["calls"]]
                text = ", ".join(f'{{"{f}": {a if isinstance(a, str) else as_json(a)}}}' for f, a in calls)
                # the one tool whose call is the answer: Apertus ends its thoughts before it
                yield "display" if n and [f for f, _ in calls] == ["display_answers"] else "calls", f"[{text}]"
            elif block["type"] == "tool_outputs":
                yield "outputs", "[" + ", ".join(o["output"] for o in block["outputs"]) + "]"
            else:
                raise KeyError(block["type"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"chat: {error} in the assistant message {message!r}; want text or blocks") from None


def as_json(value):
    return json.dumps(value, ensure_ascii=False)


def describe_tool(tool):
    """A tool as a TypeScript declaration, the way Apertus reads it. ValueError without a name and a description."""
    tool = tool.get("function", tool)
    if not isinstance(tool.get("name"), str) or not isinstance(tool.get("description"), str):
        raise ValueError(f"chat: tool {tool!r} needs a name and a description")
    schema = tool.get("parameters") or {}
    lines = []
    for key, spec in schema.get("properties", {}).items():
        if spec.get("description"):
            lines.append(f"// {spec['description']}\n")
        default = ""
        if "default" in spec:
            comma, value = "" if spec.get("oneOf") and not spec.get("enum") else ", ", spec["default"]
            default = f"{comma}// default: {value if spec.get('enum') or spec.get('oneOf') else as_json(value)}"
        optional = "" if key in schema.get("required", []) else "?"
        lines.append(f"{key}{optional}: {ts_type(spec)}{default},\n")
    body = "(_: {\n" + "".join(lines)[:-2] + "\n})" if lines else "()"           # no comma behind the last one
    return f"// {tool['description']}\ntype {tool['name']} = {body} => any;"


def ts_type(spec):
    """The TypeScript type of a JSON schema, line breaks and all as the published template renders them."""
    kind, null = spec.get("type"), " | null" if spec.get("nullable") else ""
    scalars = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}
    if isinstance(kind, list) and kind:
        return " | ".join(kind)
    if kind == "array":
        item = spec.get("items") or {}
        inner = scalars.get(str(item.get("type"))) or ts_type(item)
        return ("any" if inner == "object | object" or len(inner) > 50 else inner) + "[]" + null
    if spec.get("oneOf"):
        return " | \n".join(
            ts_type(one) + (f"// {one['description']}" if one.get("description") else "") +
            (f"{'':20}// default: {as_json(one['default'])}" if "default" in one else "") for one in spec["oneOf"])
    if kind == "string":
        return '"' + '" | "'.join(spec["enum"]) + '"' if spec.get("enum") else "string" + null
    if kind == "object" and spec.get("properties"):
        fields = [f"{key}{'' if key in spec.get('required', []) else '?'}: \n{'':16}{ts_type(value)}"
                  for key, value in spec["properties"].items()]
        return "{\n" + ", ".join(fields) + "}"
    return scalars.get(kind, "object" if kind == "object" else "any")
