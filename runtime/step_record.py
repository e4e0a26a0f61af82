"""step_record: what is known of one step, while its updates run."""

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
    """What the updates of one step need, early and late: captured when its backward begins.

    What was set since then is taken up by `optimizer.step()`, where no update has run by then.
    """

    number: int  # of the optimizer's steps, from 1; of a parameter's own, without those that it has missed
    hypers: Sequence[Mapping[str, Any]]  # by param group
    max_grad_norm: float | None = None
    groups: Sequence[Mapping[str, Any]] = ()  # the settings of each as they were, of which hypers are made
    squares: dict[Unit | str, Reading] = field(default_factory=dict)  # of gradients, in the order of norms
    losses: Sequence[Reading] = ()  # of this backward
    earlier: Sequence[Reading] = ()  # of the backwards of the step before it, and of all ranks
    loss_scale: float = 1.0  # in all gradients
    num_ranks: int = 1  # over which gradients are summed: they are those of the mean of the ranks' losses
    scale: float = 1.0  # that clips
    scale_norm: float = math.nan  # the norm that it follows from
    dtype: torch.dtype = torch.float32  # of the scale: the widest of the gradients
    is_too_large: bool = False  # the norm, for that dtype
    is_dropped: bool = False  # its gradients: between the backward and `optimizer.step()`
    adds: bool = False  # to the sums of backwards before it
    issued: list[tuple[Unit, int]] = field(default_factory=list)  # an update, and how many norms were there before it
    num_losses: int = 0  # of this rank's backwards so far; 0: none was trained
    num_tokens: int = 0  # of this rank's calls whose backward has run, padding too
    predicted_seconds: float = math.nan  # of such a step, as it was planned
    idle: frozenset[Slice] = frozenset()  # trained parameters that no gradient has come to: they stay as they are
    woken: frozenset[Slice] = frozenset()  # those that the first call shows none comes to, and one has come to since
    missed: Mapping[Slice, int] = field(default_factory=dict)  # the steps that parameters have been so, or frozen
    means: Mapping[Tensor, int] = field(default_factory=dict)  # over ranks, of gradients in memory: their versions

    @property
    def grad_norm(self) -> float:
        """The norm of all gradients, before clipping; infinite where an element is not finite."""
        squares = [square() for square in self.squares.values()]
        finite = all(map(math.isfinite, squares))
        return math.sqrt(math.fsum(squares)) / (self.loss_scale * self.num_ranks) if finite else math.inf

    @property
    def factor(self) -> float:
        """What gradients are multiplied by in updates."""
        return self.scale / (self.loss_scale * self.num_ranks)

    @property
    def skipped(self) -> bool:
        """Whether nothing is updated: a gradient so far is not finite, or gradients were dropped.

        A loss that is not finite alone, as of a batch without a label that counts, has gradients as any other.
        """
        squares = self.squares.values()
        return self.is_dropped or self.is_too_large or not all(math.isfinite(square()) for square in squares)

    @property
    def is_loss_bad(self) -> bool:
        """Whether the loss itself is not finite."""
        return not all(math.isfinite(loss()) for loss in self._all_losses)

    @property
    def loss(self) -> float:
        """The mean of the losses of all backwards and ranks; nan where the step trains none."""
        if not self.num_losses:
            return math.nan
        return math.fsum(loss() for loss in self._all_losses) / (self.num_losses * self.num_ranks)

    @property
    def _all_losses(self) -> tuple[Reading, ...]:
        return *self.earlier, *self.losses

    @property
    def updated(self) -> list[Unit]:
        """The units that have been updated before it was known that the step is skipped."""
        finite = [math.isfinite(square()) for square in self.squares.values()]
        return [unit for unit, number in self.issued if all(finite[:number])]

    def share(self, unit: Unit, norm: SharedNorm, factor: Tensor | None) -> None:
        """Read the norm of a unit from an exchange, and from the first of a step the losses of all ranks."""
        norm.factor = factor
        if self.squares.keys() <= {"resident"}:
            norm.losses, self.losses = self.losses, (partial(norm.reading, 1),)
        self.squares[unit] = partial(norm.reading, 0)

    @property
    def told_settings(self) -> str:
        """In words: alike where what was set is, to six digits."""
        settings = [*self.groups, self.max_grad_norm, self.loss_scale]
        text = re.sub(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?", lambda found: f"{float(found[0]):.6g}", repr(settings))
        rates = ", ".join(f"{group.get('lr', 0):.6g}" for group in self.groups)
        return f"lr {rates:.60}, all settings {zlib.crc32(text.encode()):08x}"

    @property
    def told(self) -> str:
        """In words: alike where `told_settings` and what is woken are."""
        text = " ".join(sorted(map(str, self.woken)))
        return self.told_settings + (f", late first gradients {zlib.crc32(text.encode()):08x}" if text else "")

    def so_far(self) -> StepRecord:
        """What is known when an update is issued; what comes later does not change it."""
        return replace(self, squares=dict(self.squares))

    def clip(self) -> None:
        """Find what torch's clip_grad_norm_ would multiply by, in its dtype; skip where a gradient is not finite."""
        self.scale, self.scale_norm = 1.0, self.grad_norm
        norm = torch.tensor(self.scale_norm, dtype=self.dtype)
        self.is_too_large = not bool(norm.isfinite())
        if self.max_grad_norm is not None and not self.skipped:
            self.scale = min(1.0, (self.max_grad_norm / (norm + 1e-6)).item())

    @property
    def confirmed(self) -> bool:
        """Whether what was updated before the scale was known is what it should be, as `clip` has found last."""
        return self.scale == 1.0 and math.isfinite(self.scale_norm) and not (self.is_too_large or self.is_dropped)
