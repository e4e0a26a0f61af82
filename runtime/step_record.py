"""step_record: what the updates of one step need to know of it."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gs_compile.program.ir import Unit
from gs_compile.runtime.lanes import Ticket
from gs_compile.runtime.spans import Slice
from gs_compile.runtime.stream import Reading


@dataclass
class SharedNorm:
    """The sum of squares of a gradient that ranks share, and the sum of their losses.

    losses: this rank's, with the first gradient of a step; factor: of the gradient.
    """

    losses: Sequence[Reading] = ()
    factor: Tensor | None = None
    ticket: Ticket | None = None  # of the exchange
    arrived: Sequence[Reading] = ()

    def reading(self, index: int) -> float:
        assert self.ticket is not None
        self.ticket.wait()
        return self.arrived[index]()


@dataclass
class StepRecord:
    """What the updates of one step, early and late, need to know of it: the settings when its backward began.

    `optimizer.step()` takes settings that have changed since then, if no update has run before.
    """

    number: int  # of the optimizer's steps, from 1; a parameter's own number is smaller by the steps that it has missed
    hypers: Sequence[Mapping[str, Any]]  # by param group
    max_grad_norm: float | None = None
    groups: Sequence[Mapping[str, Any]] = ()  # the settings of each param group, from which `hypers` are made
    squares: dict[Unit | str, Reading] = field(default_factory=dict)  # of gradients, in the order of norms
    losses: Sequence[Reading] = ()  # of this backward
    earlier: Sequence[Reading] = ()  # of the step's backwards before this one, of all ranks
    loss_scale: float = 1.0  # that all gradients are multiplied by
    num_ranks: int = 1  # whose gradients are summed; the step takes the mean of their losses
    scale: float = 1.0  # of clipping
    scale_norm: float = math.nan  # the norm from which `scale` follows
    dtype: torch.dtype = torch.float32  # of the scale: the widest of the gradients
    is_too_large: bool = False  # the norm is not finite in that dtype
    is_dropped: bool = False  # the gradients were dropped between the backward and `optimizer.step()`
    adds: bool = False  # gradients are added to the sums of earlier backwards
    issued: list[tuple[Unit, int]] = field(default_factory=list)  # each update, and how many norms were known before it
    num_losses: int = 0  # of this rank's backwards so far; 0: no loss was trained
    num_tokens: int = 0  # of this rank's calls whose backward has run, including padding
    predicted_seconds: float = math.nan  # of such a step, by its plan
    idle: frozenset[Slice] = frozenset()  # trained parameters that have got no gradient: they are not updated
    woken: frozenset[Slice] = frozenset()  # by the first call they get no gradient, but one has come since
    missed: Mapping[Slice, int] = field(default_factory=dict)  # the number of steps for which each was idle or frozen
    means: Mapping[Tensor, int] = field(default_factory=dict)  # gradients in memory that are means over ranks: versions

    @property
    def grad_norm(self) -> float:
        """The norm of all gradients, before clipping; infinite if an element is not finite."""
        squares = [square() for square in self.squares.values()]
        finite = all(map(math.isfinite, squares))
        return math.sqrt(math.fsum(squares)) / (self.loss_scale * self.num_ranks) if finite else math.inf

    @property
    def factor(self) -> float:
        """The factor that gradients are multiplied by in updates."""
        return self.scale / (self.loss_scale * self.num_ranks)

    @property
    def skipped(self) -> bool:
        """Whether nothing is updated: a gradient so far is not finite, or gradients were dropped.

        A loss that is not finite does not suffice: that of a batch without counted labels has finite gradients.
        """
        squares = self.squares.values()
        return self.is_dropped or self.is_too_large or not all(math.isfinite(square()) for square in squares)

    @property
    def is_loss_bad(self) -> bool:
        """Whether the loss itself is not finite."""
        return not all(math.isfinite(loss()) for loss in self._all_losses)

    @property
    def loss(self) -> float:
        """The mean of the losses of all backwards and ranks; nan if the step has no loss."""
        if not self.num_losses:
            return math.nan
        return math.fsum(loss() for loss in self._all_losses) / (self.num_losses * self.num_ranks)

    @property
    def _all_losses(self) -> tuple[Reading, ...]:
        return *self.earlier, *self.losses

    @property
    def updated(self) -> list[Unit]:
        """The units that were updated before it was known that the step is skipped."""
        finite = [math.isfinite(square()) for square in self.squares.values()]
        return [unit for unit, number in self.issued if all(finite[:number])]

    def share(self, unit: Unit, norm: SharedNorm, factor: Tensor | None) -> None:
        """Have the norm of a unit read from `norm`, and with a step's first exchange the losses of all ranks."""
        norm.factor = factor
        if self.squares.keys() <= {"resident"}:
            norm.losses, self.losses = self.losses, (partial(norm.reading, 1),)
        self.squares[unit] = partial(norm.reading, 0)

    @property
    def told_settings(self) -> str:
        """The settings in words: equal where settings are equal to six digits."""
        settings = [*self.groups, self.max_grad_norm, self.loss_scale]
        text = re.sub(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?", lambda found: f"{float(found[0]):.6g}", repr(settings))
        rates = ", ".join(f"{group.get('lr', 0):.6g}" for group in self.groups)
        return f"lr {rates:.60}, all settings {zlib.crc32(text.encode()):08x}"

    @property
    def told(self) -> str:
        """The same, with the parameters of `woken`."""
        text = " ".join(sorted(map(str, self.woken)))
        return self.told_settings + (f", late first gradients {zlib.crc32(text.encode()):08x}" if text else "")

    def so_far(self) -> StepRecord:
        """A copy for an update that is issued now: norms that come later are not in it."""
        return replace(self, squares=dict(self.squares))

    def clip(self) -> None:
        """Find the factor of torch's clip_grad_norm_, in its dtype; 1 if a gradient is not finite."""
        self.scale, self.scale_norm = 1.0, self.grad_norm
        norm = torch.tensor(self.scale_norm, dtype=self.dtype)
        self.is_too_large = not bool(norm.isfinite())
        if self.max_grad_norm is not None and not self.skipped:
            self.scale = min(1.0, (self.max_grad_norm / (norm + 1e-6)).item())

    @property
    def confirmed(self) -> bool:
        """Whether updates that ran before the scale was known are right, by the result of `clip`."""
        return self.scale == 1.0 and math.isfinite(self.scale_norm) and not (self.is_too_large or self.is_dropped)
