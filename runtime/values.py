"""values: the contents of a program's values, the operations that make and use them, and their allocations.

Tensor     in memory of the host or of the device: a part in one dimension, an activation in its own shape
dict       a unit's parameters (and buffers) by input index, as its code takes them
Saved      what a layer saves for its backward: several tensors
Extent     a file on SSD
Gradient   a unit's gradient sums, one flat tensor with a view for each parameter
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from gs_compile.capture.gradients import Term, put_terms
from gs_compile.placement.levels import aligned
from gs_compile.placement.users import Users
from gs_compile.program.ir import Value
from gs_compile.runtime.formats import seconds
from gs_compile.runtime.lanes import Ticket
from gs_compile.runtime.slab import Allocation


class Gradient:
    """Sums of a unit's gradients over micro-batches, as `units.Accumulator`, in one flat tensor.

    added: the parameters that have sums; the rest of `flat` is undefined until `complete`. widths: of parameters that
        take more than one element of `flat` for each of theirs.
    """

    def __init__(
        self,
        flat: torch.Tensor,
        views: Mapping[Any, torch.Tensor],
        added: Iterable[Any] = (),
        widths: Mapping[Any, int] | None = None,
    ) -> None:
        self.flat = flat
        self.views = views
        self.added = set(added)
        self.widths = widths or {}

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def add(self, gradients: Mapping[Any, Term], among: Sequence[torch.Tensor]) -> None:
        put_terms(self.views, gradients, self.added)
        self.added |= gradients.keys()

    def scale(self, factor: torch.Tensor) -> None:
        for key in self.added:
            self.views[key].mul_(factor)

    def complete(self) -> None:
        """Set to zero what was not added to: other parameters, padding, and the second elements of wide parameters."""
        end = 0
        for view, width in sorted(((self.views[key], self.widths.get(key, 1)) for key in self.added), key=_begin):
            start = int(view.storage_offset() - self.flat.storage_offset())
            if end < start:
                self.flat[end:start].zero_()
            end = start + width * view.numel()
            if width > 1:
                seconds(self.flat[start:end]).zero_()
        if end < len(self.flat):
            self.flat[end:].zero_()


def _begin(found: tuple[torch.Tensor, int]) -> int:
    return int(found[0].storage_offset())


class Saved:
    """The tensors that a layer's forward saves for its backward, dense: each where the code has made it, or all of them
    in one contiguous buffer, `flat`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], flat: torch.Tensor | None = None) -> None:
        self.tensors = tuple(tensors)
        self.flat = flat

    @property
    def nbytes(self) -> int:
        """The bytes of such a buffer."""
        return sum(aligned(tensor.nbytes) for tensor in self.tensors)

    def within(self, flat: torch.Tensor) -> Saved:
        """Tensors like these in a buffer."""
        tensors, at = [], 0
        for tensor in self.tensors:
            there = flat[at : at + tensor.nbytes].view(tensor.dtype)
            tensors.append(there.as_strided(tensor.shape, tensor.stride(), there.storage_offset()))
            at += aligned(tensor.nbytes)
        return Saved(tensors, flat)


def without_contents(content: torch.Tensor | Saved) -> torch.Tensor | Saved:
    """A content's shapes, dtypes and dense strides, on the device "meta"."""
    metas = [_on_meta(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors_of(content)]
    return Saved(metas) if isinstance(content, Saved) else metas[0]


@lru_cache(maxsize=1024)
def _on_meta(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Cached for all micro-batches: each call of torch releases the GIL, and this thread then waits for it."""
    return torch.empty_like(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))


def flat_of(content: torch.Tensor | Gradient) -> torch.Tensor:
    """The memory of a content."""
    return content.flat if isinstance(content, Gradient) else content


def tensors_of(content: torch.Tensor | Gradient | Saved) -> tuple[torch.Tensor, ...]:
    """The tensors that are copied when a content is copied."""
    return content.tensors if isinstance(content, Saved) else (flat_of(content),)


class Held:
    """Contents of values that have ended, while an operation on another stream than the computation's still uses them:
    the computation may reuse device memory as soon as no tensor refers to it.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Any, Sequence[Ticket]]] = []

    def keep(self, content: Any, users: Sequence[Ticket]) -> None:
        """Refer to a content until all of `users` are done; contents whose users are done are released."""
        self.let_go()
        if users := [ticket for ticket in users if not ticket.is_in_order]:
            self._entries.append((content, users))

    def let_go(self) -> None:
        """Release the contents that no operation uses any more."""
        self._entries = [each for each in self._entries if not all(ticket.done for ticket in each[1])]


class ValueTable:
    """Contents of values, and the tickets of the operations that make, read or change them.

    held: keeps contents on the device that have ended and are still in use.
    """

    def __init__(self, held: Held) -> None:
        self.contents: dict[Value, Any] = {}
        self._held = held
        self.allocations: dict[Value, Allocation] = {}  # of those in the slab
        self.users: Users[Value, Ticket] = Users(unfinished)

    def close(self) -> None:
        """Release all memory, although others may still refer to this table."""
        self.contents.clear()
        self.allocations.clear()

    def define(
        self, value: Value, content: Any, tickets: Sequence[Ticket] = (), *, allocation: Allocation | None = None
    ) -> None:
        """A new value, ready when all of `tickets` are done."""
        self.contents[value] = content
        self.users.define(value, tickets)
        if allocation is not None:
            self.allocations[value] = allocation

    def swap(self, one: Value, other: Value) -> None:
        """Exchange contents and tickets of two values that live on."""
        self.contents[one], self.contents[other] = self.contents[other], self.contents[one]
        self.users.swap(one, other)

    def free(self, value: Value) -> Sequence[Ticket]:
        """End a value. Returns the tickets that still use it; then its memory is free."""
        content = self.contents.pop(value)
        users = self.users.free(value)
        if value.tier == "device":
            self._held.keep(content, users)
        allocation = self.allocations.pop(value, None)
        if allocation is not None:
            allocation.end(users)
        return users


def unfinished(tickets: Sequence[Ticket]) -> list[Ticket]:
    """The tickets that are not done yet."""
    return [ticket for ticket in tickets if not ticket.done]
