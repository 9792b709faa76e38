"""
--device=mps without a Mac: every operation of training and of sampling has a kernel there, and none makes fp64, which
MPS does not have. The authority is torch's own table of kernels, native_functions.yaml, which comes with each build.

The model runs on the meta device: nothing is computed, by the code of every device that is neither CPU nor CUDA.
"""
import os

import pytest
import torch
import torchgen
from torch.utils._python_dispatch import TorchDispatchMode
from torchgen.gen import parse_native_yaml
from torchgen.model import DispatchKey

from ademamix import build_optimizer
from generate import KVCache, next_logits, sample_token
from tiny import small


@pytest.fixture(scope="module")
def on_mps():
    """The names of all operations with a kernel on MPS, of its own or made of others."""
    folder = f"{os.path.dirname(torchgen.__file__)}/packaged/ATen/native"
    parsed = parse_native_yaml(f"{folder}/native_functions.yaml", f"{folder}/tags.yaml")
    own = parsed.backend_indices[DispatchKey.MPS]
    functions = {str(f.func.name): f for f in parsed.native_functions}
    # A structured operation has the kernel of its out= variant.
    return {
        name
        for name, f in functions.items()
        for kernel in [functions[str(f.structured_delegate or name)]]
        if kernel.has_composite_kernel or own.has_kernel(kernel)
    }


class Mac(TorchDispatchMode):
    """Notes each operation on tensors of the meta device. TypeError for fp64 among them."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        found = op(*args, **(kwargs or {}))
        dtypes = [
            t.dtype
            for t in torch.utils._pytree.tree_leaves((args, kwargs, found)) if isinstance(t, torch.Tensor) and t.is_meta
        ]
        if dtypes:
            self.seen.add(op.name().removeprefix("aten::"))
        if torch.float64 in dtypes:
            raise TypeError(f"{op}: MPS has no float64")
        return found


@pytest.mark.parametrize("dtype, documents", [
    (None, True),
    (torch.bfloat16, False)
])
def test_a_step_of_training_and_of_sampling_has_a_kernel_for_everything(on_mps, dtype, documents):
    with torch.device("meta"):
        model = small()
        idx = torch.zeros(2, 32, dtype=torch.long)
    model.dtype = dtype
    opt = build_optimizer(model, "ademamix", 1e-3, (0.9, 0.999, 0.9999), 8.0, 1e-8, 0.1, 10, 10, compile=False)
    with Mac() as mac:
        model(idx, idx, idx > 0, idx if documents else None, n_tokens=40)[1].backward()
        opt.step()
        with torch.no_grad():
            cache = KVCache(model, 2, 33, idx[:, 0])
            sample_token(next_logits(model, idx, cache), temperature=0)
            sample_token(next_logits(model, idx[:, :1], cache), temperature=0.8, top_k=5, top_p=0.9)
    assert len(mac.seen) > 60 and mac.seen <= on_mps
    assert "_linalg_eigh" not in on_mps
