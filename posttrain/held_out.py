"""
Held-out conversations: SFT measures its loss on them, and learns nothing from them.

    --val_share=0.05      this share of --data, if that has at least 200 different conversations
    --val_data=FILES      instead, those of other files; nothing is learnt from equal ones in --data either

A hash of its words decides whether a conversation is held out: not its place, its form, the tokenizer or the number of
ranks. So copies of a conversation are on the same side, and all runs on the same data hold out the same ones.
"""

import numpy as np
from torch.utils.data import Subset

from chat import FORMS, OddRow
from posttrain.conversations import conversation_ids, first_rows, row_hash, sources_of

LEAST = 200                     # different conversations from which on a share of them is held out


def hold_out(conversations, share, val_conversations=None):
    """
    (conversations to learn from, held-out ones, a line for the user or ""). The held-out ones are different, and in the
    order of their hashes.

    share: of --val_share; val_conversations: of --val_data, or None. All have the items of Conversations. ValueError:
    nothing is left to learn from.
    """
    hashes = conversations.hashes
    if hashes is None:                                     # of a run that an earlier version has begun
        if val_conversations:
            raise ValueError("an earlier version has begun this run, and held nothing out: leave val_data out, or "
                             "begin another run with --out")
        return conversations, [], ""
    if val_conversations:
        held_out = different(val_conversations, np.arange(len(val_conversations)))
        is_kept = ~np.isin(hashes, val_conversations.hashes)
        note = (f"{len(held_out)} conversations of --val_data for validation; {(~is_kept).sum()} of --data equal one "
                "of them, and are left out")
    elif not share:
        return conversations, [], ""
    elif len(np.unique(hashes)) < LEAST:
        return conversations, [], (f"no validation, since fewer than {LEAST} conversations differ: --val_data=FILE "
                                   "names some for it")
    else:
        is_kept = ~is_below(hashes, share)
        held_out = different(conversations, np.flatnonzero(~is_kept))
        note = f"{(~is_kept).sum()} of {len(hashes)} conversations are held out for validation"
    if not is_kept.any():
        raise ValueError("every conversation of --data is held out: nothing is left to learn from")
    return Subset(conversations, np.flatnonzero(is_kept)), held_out, note


def different(conversations, indices):
    """Those of the conversations at some indices that differ, in the order of their hashes."""
    _, first = np.unique(conversations.hashes[indices], return_index=True)
    return Subset(conversations, np.asarray(indices)[first])


def is_below(hashes, share):
    """Which of some hashes, uint64, are in the lowest `share` (below 1) of all that there can be."""
    return hashes < np.uint64(share * 2.0**64)


# -----------------------------------------------------------------------------
# the rows, for evaluate.py


def held_out_rows(settings, tok):
    """
    The held-out rows of a run of SFT, [(place, row)]. settings: of the run, a dict; tok: its Tokenizer.

    ValueError: it has held nothing out, or its data have changed since.
    """
    data, share = settings["val_data"] or settings["data"], settings["val_share"]
    rows = {}
    for source in sources_of(data):
        for place, row in first_rows(source, None):
            number = hash_of_row(row)
            if number is None or not settings["val_data"] and not is_below(np.uint64(number), share):
                continue
            if not isinstance(conversation_ids(tok, row, settings["max_length"], settings["too_long"]), str):
                rows.setdefault(number, (place, row))
    if len(rows) != settings["held_out"]:
        raise ValueError(f"{data} has changed since {settings['out']} was trained: {settings['held_out']} of its "
                         f"conversations were held out, now {len(rows)} would be: name conversations that the model "
                         "has not seen")
    return [rows[number] for number in sorted(rows)]


def hash_of_row(row):
    """row_hash(), or None if the row is no conversation."""
    try:
        return row_hash(row) if any(keys <= row.keys() for keys in FORMS) else None
    except OddRow:
        return None
