"""
--device=mps without a Mac: every operation of training and of sampling has a kernel there, and none makes fp64, which it
has not. The authority is torch's own table of kernels, native_functions.yaml, which comes with each build.

The model runs on the meta device: no kernel computes anything, and the code takes the way that it takes on every device
that is neither CPU nor CUDA.
"""
import functools
import os

import pytest
import torch
import torchgen
from torch.utils._python_dispatch import TorchDispatchMode
from torchgen.gen import parse_native_yaml
from torchgen.model import DispatchKey

from ademamix import build_optimizer
from generate import KVCache, next_logits, sample_token
from model import Apertus, ApertusConfig

SHAPE = dict(block_size=32, vocab_size=97, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, ffn_dim=64)


@functools.cache
def kernels():
    """{name of an operation: does MPS have it, by a kernel of its own or one made of others}."""
    folder = os.path.join(os.path.dirname(torchgen.__file__), "packaged", "ATen", "native")
    parsed = parse_native_yaml(f"{folder}/native_functions.yaml", f"{folder}/tags.yaml")
    of_mps = parsed.backend_indices[DispatchKey.MPS]
    by_name = {str(f.func.name): f for f in parsed.native_functions}

    def has(f):
        if f.structured_delegate:
            f = by_name[str(f.structured_delegate)]
        return f.has_composite_kernel or of_mps.has_kernel(f)
    return {name: has(f) for name, f in by_name.items()}


class Mac(TorchDispatchMode):
    """Notes each operation on tensors of the meta device, and refuses fp64 among them."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        found = op(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves((args, kwargs, found))
        there = [t for t in leaves if isinstance(t, torch.Tensor) and t.is_meta]
        if there:
            # aten.add.Tensor is add.Tensor in the table, and aten.mm.default is mm.
            self.seen.add(str(op).removeprefix("aten.").removesuffix(".default"))
        if any(t.dtype == torch.float64 for t in there):
            raise TypeError(f"{op}: MPS has no float64")
        return found


def missing(seen):
    return sorted(name for name in seen if not kernels().get(name, False))


def on_a_mac(dtype=None):
    with torch.device("meta"):
        model = Apertus(ApertusConfig(**SHAPE))
    model.dtype = dtype
    return model


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("documents", [True, False])
def test_a_step_of_training_has_a_kernel_for_everything(dtype, documents):
    model = on_a_mac(dtype)
    opt = build_optimizer(model, "ademamix", 1e-3, (0.9, 0.999, 0.9999), 8.0, 1e-8, 0.1, 10, 10, compile=False)
    idx, targets = torch.zeros(2, 2, 32, dtype=torch.long, device="meta")
    doc = torch.zeros_like(idx) if documents else None
    with Mac() as mac:
        _, loss = model(idx, targets, keep=targets > 0, doc=doc, n_tokens=40)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
        opt.step()
    assert len(mac.seen) > 40 and missing(mac.seen) == []


@pytest.mark.parametrize("how", [dict(temperature=0), dict(temperature=0.8, top_k=5, top_p=0.9)])
def test_a_prompt_and_a_token_have_a_kernel_for_everything(how):
    model = on_a_mac()
    idx = torch.zeros(2, 7, dtype=torch.long, device="meta")
    with torch.no_grad(), Mac() as mac:
        cache = KVCache(model, 2, 16, torch.zeros(2, dtype=torch.long, device="meta"))
        for tokens in (idx, idx[:, :1]):
            sample_token(next_logits(model, tokens, cache), **how)
    assert len(mac.seen) > 20 and missing(mac.seen) == []


@pytest.mark.parametrize("op, there", [
    ("mm", True), ("add.Tensor", True), ("_fused_adamw_", True),        # the last is AdamW's whole step
    ("_linalg_eigh", False), ("_scaled_dot_product_flash_attention_for_cpu", False)])
def test_the_table_tells_what_mps_has_from_what_it_has_not(op, there):
    assert kernels()[op] == there


def test_fp64_is_refused():
    with Mac(), pytest.raises(TypeError, match="MPS has no float64"):
        torch.zeros(3, device="meta").double()
