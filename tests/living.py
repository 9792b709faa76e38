"""The bytes that torch has alive, counted at each of its operations, for test_convert.py."""
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary


class Living(TorchDispatchMode):
    """now: the bytes that are alive; most: the most that there were."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known = WeakIdKeyDictionary()

    def add(self, values):
        """Count the memory of the tensors in nested lists and dicts, once where they share it, until it is freed."""
        for tensor in torch.utils._pytree.tree_leaves(values):
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.untyped_storage() in self.known:
                continue
            storage = tensor.untyped_storage()
            size = self.known[storage] = storage.nbytes()
            self.now += size
            weakref.finalize(storage, self.free, size)
        self.most = max(self.most, self.now)

    def free(self, size):
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.add(made)
        return made
