"""contents: what the values of a placed unit hold, on each tier.

Flat      elements in memory, one dimension; the host's or the device's
Resident  a part that lives on the device, in a zone of its unit's
Region    a range of an extent on SSD
Gradient  a unit's gradient sums, one flat tensor with a view for each parameter
Kept      a checkpoint or inter-layer gradient in host memory or on SSD, with what it takes to make it again
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from gs_compile.capture.gradients import Term, add_term, put_term
from gs_compile.runtime.arena import Buffer, Charge
from gs_compile.runtime.lanes import Ticket
from gs_compile.runtime.store import Extent
from gs_compile.runtime.stream import Device


class Hold:
    """A share in a buffer: it goes back when the last share is released, and all who used it are done."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.shares = 0
        self.users: list[Ticket] = []

    def share(self) -> Hold:
        self.shares += 1
        return self

    def release(self, after: Iterable[Ticket]) -> None:
        self.users += (ticket for ticket in after if not ticket.done)
        self.shares -= 1
        if self.shares == 0:
            self.buffer.release(self.users)


class Held:
    """What is in memory that it has shares in."""

    holds: tuple[Hold | Charge, ...]

    def release(self, after: Iterable[Ticket]) -> None:
        for hold in self.holds:
            hold.release(after)


@dataclass
class Flat(Held):
    """A part in memory."""

    tensor: torch.Tensor
    holds: tuple[Hold | Charge, ...] = ()


class Zone:
    """Memory of the device that lives on; taken when it is first written.

    Parameters move home one by one, and the model may have been on the device: what it leaves makes room for this.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: Device) -> None:
        self._like = numel, dtype, device

    @cached_property
    def tensor(self) -> torch.Tensor:
        numel, dtype, device = self._like
        return device.empty((numel,), dtype)


@dataclass
class Resident(Held):
    """A part where it lives on the device."""

    zone: Zone
    start: int
    stop: int
    holds: tuple[Hold | Charge, ...] = ()

    @property
    def tensor(self) -> torch.Tensor:
        return self.zone.tensor[self.start : self.stop]


@dataclass
class Gathered(Held):
    """A unit's parameters (and buffers) by input index, as its code takes them."""

    tensors: Mapping[int, torch.Tensor]
    holds: tuple[Hold | Charge, ...] = ()


@dataclass(frozen=True, slots=True)
class Region:
    """`nbytes` of an extent from `offset` on."""

    extent: Extent
    offset: int
    nbytes: int


class Gradient(Held):
    """Sums of a unit's gradients over micro-batches, as `units.Accumulator`, in one flat tensor.

    What is between the parameters, and parameters that get no gradient, are zero. `added` are the parameters that have
    sums already, where these have come back from elsewhere.
    """

    def __init__(
        self, flat: torch.Tensor, views: Mapping[Any, torch.Tensor], hold: Hold | None, added: Iterable[Any] = ()
    ) -> None:
        self.flat = flat
        self.views = views
        self.holds = (hold.share(),) if hold else ()
        self._added = set(added)

    @property
    def added(self) -> frozenset[Any]:
        return frozenset(self._added)

    def add(self, gradients: Mapping[Any, Term], among: Sequence[torch.Tensor]) -> None:
        for key, term in gradients.items():
            (add_term if key in self._added else put_term)(self.views[key], term)
        self._added |= gradients.keys()

    def scale(self, factor: torch.Tensor) -> None:
        for key in self._added:
            self.views[key].mul_(factor)

    def complete(self) -> None:
        """Make zero what was not added to."""
        for key in self.views.keys() - self._added:
            self.views[key].zero_()


@dataclass
class Kept(Held):
    """An activation away from the device: `flat` in host memory or `region` on SSD, and its shape and strides."""

    like: torch.Tensor  # on the meta device
    flat: torch.Tensor | None = None
    region: Region | None = None
    holds: tuple[Hold | Charge, ...] = field(default=())

    @property
    def tensor(self) -> torch.Tensor:
        assert self.flat is not None
        return self.flat.as_strided(self.like.shape, self.like.stride())
