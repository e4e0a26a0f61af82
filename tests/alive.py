"""Counts the bytes that the tensors of a piece of code have alive at once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """most: the most bytes alive at once of memory that was taken inside; largest: those of the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in given | self._known:
                    self._note(storage)
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += nbytes
        self.most, self.largest = max(self.most, self.now), max(self.largest, nbytes)
        weakref.finalize(storage, self._end, key, nbytes)

    def _end(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def most_allocated(function: Callable[..., Any], *arguments: Any) -> tuple[int, Any]:
    """The most bytes that a function takes on the CPU at once, what compiled code takes among it; and its results."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as taken:
        results = function(*arguments)
    assert taken.profiler is not None
    events = [each for each in taken.profiler.kineto_results.events() if each.name() == "[memory]"]
    events.sort(key=lambda each: each.start_ns())
    return max(accumulate(each.nbytes() for each in events)), results
