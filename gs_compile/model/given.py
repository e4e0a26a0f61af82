"""given: the state of a tensor's memory, to find later changes in place: of a copy that a state dict has of a value or
a state on the tiers, of an input of a call, of a buffer.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from gs_compile.capture.internals import changes, num_holders
from gs_compile.model.files import SMALL_NBYTES
from gs_compile.runtime.homes import bytes_of

# Of each end of a tensor's memory: all of one that is in no file. To read all of others would be one more pass over the
# model.
END_NBYTES = SMALL_NBYTES // 2


class Place(NamedTuple):
    """Where a state dict has a tensor: in a dict, under a name, behind an earlier tensor.

    tries: how often all objects may still be searched for the dict of any place of the state dict.
    """

    number: int  # the id of the dict
    name: str
    earlier: weakref.ref[Tensor]
    tries: Iterator[int]

    @property
    def now(self) -> Any:
        """What is there in place of a tensor that ends; None if the dict ends, which lets go of earlier ones first."""
        earlier = self.earlier()
        if earlier is None or next(self.tries, None) is None:
            return None
        found = (each for each in gc.get_referrers(earlier) if type(each) is dict and id(each) == self.number)
        return next(found, {}).get(self.name)


class Given:
    """What a state dict was given of a tiered parameter, or of its state: a copy, where torch gives their memory.

    torch counts no changes by `.data` or by a numpy array: those of an end of the memory are found. place: of a state.
    """

    def __init__(self, values: Tensor, place: Place | None = None) -> None:
        self.values = weakref.ref(values)
        # Not a callback of the reference: Python still makes those when it has taken modules apart.
        weakref.finalize(values, _end, weakref.WeakMethod(self._end)).atexit = False
        self._memory = values.detach()  # with the version of the values
        self._num_holders, self._place = num_holders(values), place
        self._first, self._was_changed = mark_of(values), False

    @property
    def is_changed(self) -> bool:
        return self._was_changed or (self._memory.numel() > 0 and mark_of(self._memory) != self._first)

    def _end(self) -> None:
        """The values are going, and so does their memory, unless somebody else has it, as of `.data`."""
        old, new = self._memory, None if self._place is None else self._place.now
        is_same = isinstance(new, Tensor) and new.shape == old.shape and torch.equal(new.to(old), old)
        self._was_changed |= new is not None and not is_same
        if num_holders(self._memory) <= self._num_holders:
            self._was_changed, self._memory = self.is_changed, torch.empty(0, device="cpu")


def _end(method: weakref.WeakMethod[Any]) -> None:
    """Not the method itself, which would keep what was given alive."""
    if (end := method()) is not None:
        end()


def state_of(tensor: Tensor) -> tuple[int, int]:
    """Numbers that differ once a tensor was changed in place. torch does not count changes through `.data` or through a
    numpy array, so for an ordinary tensor there is a checksum, too.
    """
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return changes(tensor), 0
    flat = bytes_of(tensor.detach().cpu().resolve_conj().resolve_neg())
    return changes(tensor), xxh3_64_intdigest(flat.numpy().data)


def mark_of(tensor: Tensor) -> tuple[int, int]:
    """The same, but of what torch does not count only changes at the ends of the memory are found."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return changes(tensor), xxh3_64_intdigest(torch.cat([flat[:END_NBYTES], flat[-END_NBYTES:]]).cpu().numpy().data)
