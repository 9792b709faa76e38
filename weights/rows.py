"""
Trained rows of a frozen embedding and head, together with adapters (weights/lora.py).

    x = E[id]     z = H h     with trained rows in the place of those of a few ids (PEFT: trainable_token_indices)

Pretraining never uses the chat's control tokens, so that their rows become nearly parallel (cosine 0.98 after 4.3M
tokens). While they are frozen, adapters can hardly tell them apart: with --lora_r=16 38 of 59 answers ended, with
trained rows 58. So SFT and QRPO train these rows as well if the start model has hardly learnt them: unused_chat_rows().

A row begins with the start model's values, and the whole row is stored, not its change. A tied model has them once.
"""

import functools

import torch
import torch.nn as nn
import torch.nn.functional as F

from chat import CHAT
from engine.restore import copy_into
from model import Linear
from weights.stored import StoredWeights, meta_model

# Distance of <|assistant_end|> from the middle of all control tokens, over the median distance: 0.84 to 0.98 in four
# starts that never used it, of 10 to 4,251 steps, and 3.6 to 3.9 after SFT of all weights.
USED = 1.5


def has_learnt_chat(head, tok):
    """
    Whether a model has learnt to end an answer. A short SFT may not be enough: 29 steps were not.

    All rows of a head that were never a target have changed equally since their initial values. So they are
    equally far from their middle, however long the model was trained. head: its matrix (V, C).
    """
    rows = head[list(tok.special.values())].float()
    distances = (rows - rows.median(0).values).norm(dim=1)
    end = distances[list(tok.special).index("<|assistant_end|>")]
    return bool(end > USED * distances.median())


def unused_chat_rows(path, shape, tok):
    """The ids of the chat's control tokens if a model has not learnt them, else []. path: of its weights."""
    name = "model.embed_tokens.weight" if shape.tie_embeddings else "lm_head.weight"
    head = StoredWeights(path, meta_model(shape)).read(name)
    return [] if has_learnt_chat(head, tok) else [tok.special[name] for name in CHAT]


@functools.cache
def ids_on(ids, device):
    """ids (a tuple) as a tensor, copied to a device once. No buffer: FSDP gives those no values."""
    return torch.tensor(ids, device=device)


class EmbeddingRows(nn.Module):
    """
    A frozen embedding with trained rows in its place. base: the embedding; ids: of the rows; lora_rows: holds them.

    weight: that of the base, in which these rows are not the trained ones.
    """

    def __init__(self, base, ids, lora_rows):
        super().__init__()
        self.base = base
        self.lora_rows = lora_rows                         # all parameters of adapters have ".lora_" in their names
        self.ids = tuple(ids)
        self.is_on = True                                  # if not, the base alone: without_lora()

    @property
    def weight(self):
        return self.base.weight

    def forward(self, idx):
        x = self.base(idx)
        if not self.is_on:
            return x
        matches = idx[..., None] == ids_on(self.ids, idx.device)       # (B, T, rows)
        rows = F.embedding(matches.int().argmax(-1), self.lora_rows.weight).to(x.dtype)
        return torch.where(matches.any(-1, keepdim=True), rows, x)

    def switch(self, is_on):
        """Turn the trained rows on or off."""
        self.is_on = is_on


class HeadRows(nn.Module):
    """A frozen head with trained rows in its place. Arguments: as in EmbeddingRows. weight: with the trained rows."""

    def __init__(self, base, ids, lora_rows):
        super().__init__()
        self.base = base
        self.lora_rows = lora_rows
        self.ids = tuple(ids)
        self.is_on = True

    @property
    def weight(self):
        return replace_rows(*self.parts())

    def parts(self):
        """As Linear.parts(): the frozen matrix (V, C), the trained rows (n, C) and their ids (n,)."""
        if not self.is_on:
            return self.base.weight, None, None
        return self.base.weight, self.lora_rows.weight, ids_on(self.ids, self.lora_rows.weight.device)

    def forward(self, x):
        z = self.base(x)                                   # (..., V)
        if not self.is_on:
            return z
        return z.index_copy(-1, ids_on(self.ids, x.device), self.lora_rows(x))

    def switch(self, is_on):
        """Turn the trained rows on or off."""
        self.is_on = is_on


def replace_rows(weight, rows, ids):
    """A matrix (V, C) with rows (n, C) in the place of its own; weight itself with rows=None."""
    return weight if rows is None else weight.index_copy(0, ids, rows.to(weight.dtype))


def add_rows(model, token_indices):
    """
    Put trained rows in the place of those of a frozen model. Changes the model. The rows have no values yet.

    token_indices: {"embed_tokens": ids, "lm_head": ids}, as PEFT names them, or one of both. ValueError for ids that
    the model does not have, and for a tied model whose head would have others.
    """
    vocab_size, C = model.lm_head.weight.shape
    tied, device = model.config.tie_embeddings, model.lm_head.weight.device
    for name, ids in token_indices.items():
        if name not in ("embed_tokens", "lm_head") or not {*ids} <= {*range(vocab_size)}:
            raise ValueError(f"trainable_token_indices={token_indices!s:.90}: want ids below {vocab_size} of "
                             "embed_tokens, lm_head or both")
    of_embedding, of_head = token_indices.get("embed_tokens"), token_indices.get("lm_head")
    if tied and of_head not in (None, of_embedding):
        raise ValueError(f"trainable_token_indices={token_indices!s:.90}: embedding and head of the model are one "
                         "matrix: want the same ids for both")
    embedding_rows = None
    if of_embedding:
        embedding_rows = Linear(C, len(of_embedding)).to(device)
        embedding = EmbeddingRows(model.model.embed_tokens, of_embedding, embedding_rows)
        model.set_submodule("model.embed_tokens", embedding)
    if tied and of_embedding:
        model.set_submodule("lm_head", HeadRows(model.lm_head, of_embedding, embedding_rows))
    elif of_head:
        model.set_submodule("lm_head", HeadRows(model.lm_head, of_head, Linear(C, len(of_head)).to(device)))


def row_modules(model):
    """{name: module} of a model's modules that have trained rows: at most embedding and head."""
    return {name: module for name, module in model.named_modules() if isinstance(module, (EmbeddingRows, HeadRows))}


@torch.no_grad()
def init_rows(model):
    """Set the initial values of trained rows, also of sharded ones: those of the frozen matrix."""
    for module in row_modules(model).values():
        weight = module.base.weight
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        copy_into(module.lora_rows.weight, weight[list(module.ids)].float())


@torch.no_grad()
def merge_rows(model):
    """Write trained rows into their matrices, and put these back. Changes the model."""
    for name, module in row_modules(model).items():
        weight, rows = module.base.weight, module.lora_rows.weight
        weight[list(module.ids)] = rows.to(weight.dtype)
        model.set_submodule(name, module.base)
