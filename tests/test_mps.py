"""
--device=mps, tested without a Mac: every operation of training and sampling has an MPS kernel, and none makes fp64,
which MPS lacks. The authority is torch's own table of kernels, native_functions.yaml, which comes with each build.

The model runs on the meta device: nothing is computed, and the code is that of devices other than CPU and CUDA.
"""

import os

import pytest
import torch
import torchgen
from tiny import small
from torch.utils._python_dispatch import TorchDispatchMode
from torchgen.gen import parse_native_yaml
from torchgen.model import DispatchKey

from ademamix import build_optimizer
from generate import KVCache, next_logits, sample_token
from posttrain.sft import collate
from scoring import sequence_logp


@pytest.fixture(scope="module")
def on_mps():
    """The names of all operations that have an MPS kernel or are composed of other operations."""
    folder = f"{os.path.dirname(torchgen.__file__)}/packaged/ATen/native"
    parsed = parse_native_yaml(f"{folder}/native_functions.yaml", f"{folder}/tags.yaml")
    own = parsed.backend_indices[DispatchKey.MPS]
    functions = {str(f.func.name): f for f in parsed.native_functions}
    return {
        name
        for name, f in functions.items()
        # A structured operation uses the kernel of its out= variant.
        for kernel in [functions[str(f.structured_delegate or name)]]
        if kernel.has_composite_kernel or own.has_kernel(kernel)
    }


class Mac(TorchDispatchMode):
    """
    Records the operations on tensors of the meta device. TypeError if one of them is fp64, or a copy that does not
    wait, which MPS may make of memory that is free by then (pytorch issue 189690).
    """

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        found = op(*args, **(kwargs or {}))
        dtypes = [
            t.dtype
            for t in torch.utils._pytree.tree_leaves((args, kwargs, found))
            if isinstance(t, torch.Tensor) and t.is_meta
        ]
        if dtypes:
            self.seen.add(op.name().removeprefix("aten::"))
        if torch.float64 in dtypes or (kwargs or {}).get("non_blocking"):
            raise TypeError(f"{op}: MPS has no float64, and no safe copy that does not wait")
        return found


@pytest.mark.parametrize("dtype, documents", [(None, True), (torch.bfloat16, False)])
def test_a_step_of_training_and_of_sampling_has_a_kernel_for_everything(on_mps, dtype, documents):
    with torch.device("meta"):
        model = small()
        idx = torch.zeros(2, 32, dtype=torch.long)
    model.dtype = dtype
    opt = build_optimizer(model, "ademamix", 1e-3, (0.9, 0.999, 0.9999), 8.0, 0.1, 10, compile=False)
    with Mac() as mac:
        model.loss(idx, idx, idx > 0, idx if documents else None, n_tokens=40).backward()
        opt.step()
        collate([[([1, 2], [True, False])]], "meta")
        sequence_logp(model, [([1, 2], [3])]).sum().backward()
        with torch.no_grad():
            cache = KVCache(model, 2, 33, idx[:, 0])
            sample_token(next_logits(model, idx, cache), temperature=0)
            sample_token(next_logits(model, idx[:, :1], cache), temperature=0.8, top_k=5, top_p=0.9)
    assert len(mac.seen) > 60 and mac.seen <= on_mps
