"""The bytes that torch has alive, counted at each of its operations, for test_convert.py."""
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary


def leaves(values):
    """The tensors in nested lists and dicts."""
    return [value for value in torch.utils._pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


class Living(TorchDispatchMode):
    """now: the bytes that are alive; most: the most that there were."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known = WeakIdKeyDictionary()

    def add(self, tensors):
        """Count the memory of tensors, once where they share it, until the last of them is gone."""
        for tensor in leaves(tensors):
            storage = tensor.untyped_storage()
            if storage in self.known:
                continue
            size = self.known[storage] = storage.nbytes()
            self.now += size
            weakref.finalize(storage, self.free, size)
        self.most = max(self.most, self.now)

    def free(self, size):
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.add([t for t in leaves(made) if not t.is_meta])
        return made
