"""
What each module of a model computes, to debug another engine: convert.py --trace.
"""

import functools
import hashlib

import torch


@torch.no_grad()
def trace_modules(model, tok, text):
    """
    Print the ids of a text, and a line for each module of a model in the order of computation: its name, the shape,
    mean, norm, and eight digits of the sha256 of its values in fp32.

    Names and values are those of transformers' modules, so the first line that differs names the faulty module. RoPE
    and the product of attention have no line: if q_norm, k_norm and v_proj agree and o_proj does not, look there. Mean
    and norm agree up to rounding, the hash only if every bit does.
    """
    ids = [tok.bos, *tok.encode(text)]
    print(f"ids {ids}")
    hooks = [module.register_forward_hook(functools.partial(print_output, name))
             for name, module in model.named_modules()]
    model(torch.tensor([ids]))
    for hook in hooks:
        hook.remove()


def print_output(name, module, inputs, output):
    """Print the line of a module. output: (1, ...). The model itself, whose name is "", has no line."""
    if name:
        x = output[0].float()
        digest = hashlib.sha256(x.numpy().tobytes()).hexdigest()
        print(f"{name:45} {list(x.shape)!s:16} {x.mean():+.6e} {x.norm():.6e} {digest:.8}")
