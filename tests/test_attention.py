"""attend() against torch's own attention in fp64: by the formula, and by the kernel in long windows."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

from attention import attend, masked_attention


def qkv(T, dtype=torch.float32):
    """Two windows of T positions, as the model has them: q (2, 4, T, 8), k and v (2, 2, T, 8)."""
    torch.manual_seed(T)
    return [torch.randn(2, T, heads, 8, dtype=dtype).transpose(1, 2).requires_grad_() for heads in (4, 2, 2)]


def documents_of(T):
    torch.manual_seed(T)
    return (torch.rand(2, T) < 0.2).cumsum(1)


def torchs_attention(q, k, v, doc):
    mask = (doc[:, None, :, None] == doc[:, None, None, :]).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def with_gradients(function, inputs, doc):
    """function(*inputs, doc) and the gradients of its squares, as one fp64 tensor."""
    y = function(*inputs, doc)
    tensors = y, *torch.autograd.grad(y.square().sum(), inputs)
    return torch.cat([x.detach().double().flatten() for x in tensors])


# bf16 keeps 8 bits, an error of 2^-8 of the largest value; scores rounded before softmax make it four times that.
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)])
@pytest.mark.parametrize("T", [1, 37, 512, 513])
def test_attention_and_its_gradients_are_torchs_in_fp64(T, dtype, tolerance):
    inputs = qkv(T, dtype)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    for doc in (documents_of(T), None):
        expected = with_gradients(torchs_attention, wide, torch.zeros(2, T) if doc is None else doc)
        found = with_gradients(attend, inputs, doc)
        assert (found - expected).abs().max() <= tolerance * expected.abs().max()


class Kernels(TorchFunctionMode):
    """Notes whether torch may choose cuDNN's kernel, and computes no attention."""

    allowed = None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            self.allowed = torch.backends.cuda.cudnn_sdp_enabled()
            return args[0]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("T, masked, allowed", [(4096, False, True), (257, False, False), (4096, True, False)])
def test_cudnn_computes_windows_of_a_fixed_length_and_no_others(T, masked, allowed):
    """It plans anew for each length, and prompts and padded rows have any. On tensors that are on CUDA by name only."""
    with FakeTensorMode(), Kernels() as kernels:
        q, k = (torch.empty(1, heads, T, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
        masked_attention(q, k, k, torch.empty(1, 1, T, T, dtype=torch.bool, device="cuda") if masked else None)
    assert kernels.allowed == allowed and torch.backends.cuda.cudnn_sdp_enabled()
