"""
Hashes of weights: whether adapters still have the start model that they were trained on, and whether the weights that
a run wrote have been edited.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.files import read_text, sha256, write_flushed

SLICE = 2**25                   # values that a thread hashes at once
WRITTEN = "model.sha256"        # in a run folder, the hashes of its weights as written; sha256sum -c reads it


def tensor_hash(values):
    """The sha256 of a tensor rounded to bf16, as hex: equal for the same weights in fp32 and in bf16."""
    bits = values.detach().bfloat16().flatten().cpu().view(torch.int16)
    # The hash of the hashes of slices, which several cores compute at once.
    with ThreadPoolExecutor() as pool:
        digests = pool.map(lambda part: hashlib.sha256(part.numpy()).digest(), bits.split(SLICE))
        return hashlib.sha256(b"".join(digests)).hexdigest()


def weights_hash(model):
    """
    The sha256 of all values of a model's weights, as hex: equal in fp32 and in bf16, quantised or not, sharded or not.
    Adapters do not count. All ranks call this. The 8B has 16 GB of such values, and a core hashes 0.7 GB a second.
    """
    digest = hashlib.sha256()
    for path, module in model.named_modules():
        path = path.removesuffix(".base")                  # the matrix next to an adapter
        if path == "lm_head" and model.config.tie_embeddings or ".lora_" in path:
            continue                                       # a tied head is the embedding, which counts once
        if hasattr(module, "original_hash"):               # a quantised matrix
            digest.update(f"{path}.weight {module.original_hash}\n".encode())
        for leaf, p in module.named_parameters(recurse=False):
            p = p.full_tensor() if hasattr(p, "full_tensor") else p     # shards are gathered, one tensor at a time
            digest.update(f"{path}.{leaf} {tensor_hash(p)}\n".encode())
    return digest.hexdigest()


# -----------------------------------------------------------------------------
# the start model of adapters


def check_start(path, recorded, now, start):
    """
    ValueError if the adapters at `path` were trained on other weights than those of the model `start` today.

    recorded, now: weights_hash() then and now, or its beginning. recorded may be None: PEFT's files have no such hash,
    and earlier versions hashed 64 values of each tensor. Then a line says that nothing is compared.
    """
    if not recorded:
        print(f"{path} has no hash of all weights of {start}: whether they have changed since is not checked")
    elif recorded[:16] != now[:16]:
        raise ValueError(f"{path} was trained on other weights than those of {start} today: their hashes are "
                         f"{recorded[:16]} and {now[:16]}")


def frozen_hash(model, checkpoint):
    """
    The hash of the frozen weights, for config.json. checkpoint: None, or (path, manifest) of the run that resumes:
    ValueError if its frozen weights were others.
    """
    start_sha256 = weights_hash(model)[:16]
    if checkpoint:
        path, manifest = checkpoint
        check_start(path, manifest["config"].get("start_sha256"), start_sha256, manifest["config"]["init_from"])
    return start_sha256


# -----------------------------------------------------------------------------
# the weights that a finished run has written


def record_files(folder, files):
    """Write the hashes of files of a run folder, in the format of sha256sum."""
    write_flushed(f"{folder}/{WRITTEN}", "".join(f"{sha256(f'{folder}/{file}')}  {file}\n" for file in files))


def edited_file(folder):
    """The name of the first file whose hash is no longer the recorded one, or ""."""
    path = f"{folder}/{WRITTEN}"
    for line in read_text(path).splitlines() if os.path.isfile(path) else ():
        digest, _, file = line.partition("  ")
        if os.path.isfile(f"{folder}/{file}") and sha256(f"{folder}/{file}") != digest:
            return file
    return ""
