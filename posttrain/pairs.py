"""
The rows of posttrain/qrpo.py: prompts, or pairs of a chosen and a rejected answer as TRL's DPO takes them.

    {"prompt", "chosen", "rejected"}    explicit: two texts, or two lists of a message each; the prompt is a text or a
                                        list of messages, also under the name "messages"
    {"chosen", "rejected"}              implicit: the prompt is what both begin with

A pair says which answer is better and not by how much, so that only DPO and SimPO learn from it; no references are
sampled. Source: TRL's documentation, Dataset formats and types, "Preference".

$ python -m posttrain.qrpo --data=pairs.jsonl --loss=dpo
"""

import itertools
import math
import os

from chat import (
    BESIDE,
    OddRow,
    as_prompt,
    conversation,
    describe_dropped,
    has_thoughts,
    is_filled,
    learnable,
    prompt_ids,
    unread_of_messages,
)
from posttrain.conversations import add_count, describe_counts, first_rows, sources_of
from posttrain.references import Prompt, read_prompts

PAIR = {"chosen", "rejected"}
# Columns that tell how good an answer is.
JUDGED = {"completion", "completions", "rewards", "ref_rewards", *PAIR}
READ = {"messages", "prompt"} | BESIDE | JUDGED


def read_data(tok, settings):
    """
    The prompts of --data that can be used, each with its given completions, and [(reason, place)] of the other rows.

    settings: of posttrain/qrpo.py, a dict. ValueError: no row can be used, or a column would be ignored.
    """
    rows = itertools.chain(*(first_rows(source, None, ()) for source in sources_of(settings["data"])))
    place, first = next(rows, ("", {}))
    if place and not settings["rewards"] and not (PAIR | {"ref_rewards"}) & first.keys():
        raise ValueError(f"{settings['data']}, {place}: a prompt without rewards, from which nothing can be learnt: "
                         "name a function that scores answers, --rewards=FILE.py, or give each row ref_rewards, or "
                         "chosen and rejected with --loss=dpo")
    if PAIR & first.keys():
        check_pair_settings(settings)
        prompts, dropped = read_pairs(tok, settings["data"])
        read = PAIR
    else:
        prompts, dropped = read_prompts(tok, settings)
        read = {"completions"} if settings["rewards"] else {"completions", "rewards", "ref_rewards"}
    for prompt in prompts:
        filled = {key for key, value in prompt.row.items() if value is not None}
        if ignored := sorted(JUDGED & filled - read):
            reader = f"--rewards={settings['rewards']}" if settings["rewards"] else f"--loss={settings['loss']}"
            raise ValueError(f"{settings['data']}, {prompt.place}: with {reader} the column {ignored[0]} would be "
                             f"ignored (read: {', '.join(sorted(read))}): remove it, or choose other settings")
    return prompts, dropped


def check_pair_settings(settings):
    """ValueError, one line, for settings that would ignore which answer was chosen, or that need more than a pair."""
    if settings["loss"] not in ("dpo", "simpo"):
        raise ValueError(f"{settings['data']} has chosen and rejected answers without rewards, from which "
                         f"--loss={settings['loss']} cannot learn: take --loss=dpo or --loss=simpo")
    if settings["rewards"]:
        raise ValueError(f"rewards={settings['rewards']}: {settings['data']} has chosen and rejected answers, which it "
                         "would ignore: leave rewards out")
    if settings["pairs"] == "best" or settings["ties"] == "discrete":
        raise ValueError(f"pairs=best and ties=discrete read the rewards of references, and {settings['data']} has "
                         "chosen and rejected answers without them: leave pairs and ties out")


def count_unread(prompts, rewards):
    """
    Lines that count keys of rows and messages that are not read. rewards: the setting; a function of the user gets the
    whole row.
    """
    counts = {}
    for prompt in prompts:
        phrases = unread_phrases(prompt.row)
        if not rewards:
            phrases |= {f"the key {key!r}" for key, value in prompt.row.items() if key not in READ and is_filled(value)}
        for phrase in sorted(phrases):
            add_count(counts, f"have {phrase}, which is not read", 1, prompt.place)
    return describe_counts(counts, len(prompts), "prompts")


def unread_phrases(row):
    """The unread parts of the messages of a row, and the keys that they displace: a set of phrases for the user."""
    lists = [row[key] for key in ("messages", "prompt", *sorted(PAIR)) if isinstance(row.get(key), list)]
    messages = [message for each in lists for message in each if isinstance(message, dict)]
    phrases = unread_of_messages(messages)
    systems = [message.get("content") for message in messages if message.get("role") == "system"]
    if is_filled(row.get("system")) and systems and row["system"] not in systems:
        phrases.add("the key 'system' next to a system message")
    if is_filled(row.get("prompt")) and not is_in_messages(row):
        phrases.add("the key 'prompt' next to other messages")
    return phrases


def is_in_messages(row):
    """Whether the prompt of a row is what its messages hold, all or one of them. True without messages."""
    messages = row.get("messages")
    if not isinstance(messages, list):
        return True
    return row["prompt"] == messages or row["prompt"] in [message.get("content") for message in messages]


def count_repeated(prompts):
    """A list with a line that counts prompts that repeat another with its given completions; empty if none does."""
    repeated = len(prompts) - len({repr((prompt.ids, prompt.given)) for prompt in prompts})
    return [f"{repeated} of {len(prompts)} prompts repeat another"] * (repeated > 0)


def read_pairs(tok, data):
    """The pairs of --data as Prompts whose given completions are the chosen and the rejected one; and other rows."""
    prompts, dropped = [], []
    for place, row in itertools.chain(*(first_rows(source, None, ()) for source in sources_of(data))):
        result = pair_ids(tok, row)
        if isinstance(result, str):
            dropped.append((result, place))
        else:
            ids, chosen, rejected = result
            prompts.append(Prompt(place, row, ids, given=[chosen, rejected], given_rewards=[1.0, 0.0]))
    if not prompts:
        raise ValueError(f"{data}: {describe_dropped(dropped, 0, 'pairs')}")
    return prompts, dropped


def pair_ids(tok, row):
    """(ids of the prompt, of the chosen answer, of the rejected one), or the reason why a row is no pair (str)."""
    messages = split_pair(row)
    if isinstance(messages, str):
        return messages
    prompt, *answers = messages
    # The same prompt for both: it says that deliberation is enabled if one of them has thoughts.
    row = row | dict(thinking=any(thinks(row, [*prompt, *answer]) for answer in answers))
    ids = prompt_ids(tok, row | dict(messages=prompt))
    if isinstance(ids, str):
        return ids
    answers_ids = []
    for key, answer in zip(("chosen", "rejected"), answers):
        whole = learnable(tok, row | dict(messages=[*prompt, *answer]), math.inf)
        if isinstance(whole, str):
            return f"{key}: {whole}"
        whole_ids, mask = whole
        if whole_ids[:len(ids)] != ids or not all(mask[len(ids):]):
            return f"{key}: want one answer of the assistant after the prompt"
        answers_ids.append(whole_ids[len(ids):])
    return ids, *answers_ids


def thinks(row, messages):
    """Whether a row says "thinking", or does not say it and has thoughts. False for odd messages: learnable() tells."""
    try:
        row = conversation(row | dict(messages=messages))
    except OddRow:
        return False
    return has_thoughts(row["messages"]) if row.get("thinking") is None else row["thinking"]


def split_pair(row):
    """The messages of the prompt, of the chosen answer and of the rejected one, or why a row is no pair (str)."""
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if chosen == rejected:
        return "chosen and rejected are equal or missing"
    if isinstance(chosen, str) and isinstance(rejected, str):
        return split_texts(row, chosen, rejected)
    if not (isinstance(chosen, list) and isinstance(rejected, list)):
        return "chosen and rejected: want two texts, or two lists of messages"
    if chosen and isinstance(chosen[0], dict) and chosen[0].get("role") == "assistant":
        prompt = as_prompt(row).get("messages")
        return (prompt, chosen, rejected) if isinstance(prompt, list) else "prompt: want a text or a list of messages"
    n = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected)))
    # Data sets of whole conversations often have the question, or the better conversation, once more.
    words = [message.get("content") for message in chosen[:n] if isinstance(message, dict)]
    if row.get("prompt", chosen) not in (*words, chosen, chosen[:n]):
        return "prompt: another than that with which chosen and rejected begin"
    if row.get("messages", chosen) not in (chosen, chosen[:n]):
        return "messages: others than those with which chosen and rejected begin"
    return chosen[:n], chosen[n:], rejected[n:]


def split_texts(row, chosen, rejected):
    """split_pair() of two texts. Without a prompt, it is what both begin with, up to the space before they differ."""
    prompt = as_prompt(row).get("messages")
    if prompt is None:
        shared = os.path.commonprefix([chosen, rejected])
        n = len(shared.rpartition(" ")[0])
        if not n:
            return "no prompt, and chosen and rejected begin with different words"
        prompt, chosen, rejected = [dict(role="user", content=chosen[:n])], chosen[n:], rejected[n:]
    if not isinstance(prompt, list):
        return "prompt: want a text or a list of messages"
    return prompt, [dict(role="assistant", content=chosen)], [dict(role="assistant", content=rejected)]
