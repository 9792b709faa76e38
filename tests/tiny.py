"""A tiny model, tokens for it, rows of a file, and the values of tests/golden."""

import json
import os

import numpy as np
import torch
from conftest import ROOT

import convert
from model import Apertus, ApertusConfig

GOLDEN = os.path.join(ROOT, "tests", "golden")
SMALL = dict(block_size=64, vocab_size=97, n_layer=2, n_head=6, n_kv_head=2, n_embd=48, ffn_dim=80, init_std=0.1)


def small(seed=1, **changes):
    return Apertus(ApertusConfig(**SMALL | changes), seed)


def ids(*shape, seed=0, high=97):
    return torch.randint(4, high, shape, generator=torch.Generator().manual_seed(seed))


def tensors(*path):
    """{name: tensor} of a .npz file below tests/golden."""
    arrays = np.load(os.path.join(GOLDEN, *path))
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def golden(name):
    """(a model that transformers 5.23 saved, its inputs and results)"""
    return convert.load_hf(os.path.join(GOLDEN, name)), tensors(name, "io.npz")


def write_rows(path, rows):
    """Write a .jsonl file of JSON objects."""
    path.write_text("\n".join(map(json.dumps, rows)))
