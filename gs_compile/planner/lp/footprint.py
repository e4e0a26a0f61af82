"""footprint: the bytes alive on each tier at every moment of a step, as affine formulas of the ratios.

What has a home takes its share of memory all the time. What has not takes all of its memory, whatever the ratio, from
the moment it is asked for to the moment it is given back: the stages are those of `pipeline`'s table, the memory is
what `Placement.slot` says. So a unit's parameters count p times their bytes, and one time while they are in use.

    moment   in a stage
    FETCH    prefetches are issued first; what was updated a stage ago is still on its way home
    UPDATE   that is home; parts without a home get memory for their update
    LEAVE    gradients that were updated are gone; the next leave the device
    COMPUTE  gradients begin, micro-batches run; activations come and go beside them

The formulas are never below what `Placement.peaks` counts on the program. They are above it by what rounds to quanta,
and where several things come and go within one moment. In one memory no tensor is cut: there a unit keeps less of its
parameters in host memory than p, and more on SSD, which is not in here. Nor is a tensor cut that lives on the device:
one unit has more than its part there and the next less, so while a unit is in use all of it counts beside them.

Where early updates are speculative, all that a step takes after one that was rolled back is counted: every update is in
the forward, and the early ones are in the backward too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import numpy as np

from gs_compile.placement.placement import QUANTUM
from gs_compile.placement.workload import UnitSize, Workload
from gs_compile.planner.lp.stage_graph import Journey, Outline, outline
from gs_compile.planner.lp.volumes import (
    ALL,
    CHECKPOINT,
    DEVICE_CHECKPOINT,
    DEVICE_PARAMETER,
    OPTIMIZER,
    PARAMETER,
    SSD_CHECKPOINT,
    SSD_OPTIMIZER,
    Array,
)

FETCH, UPDATE, LEAVE, COMPUTE = range(4)
BEGIN, END = (-(1 << 30), 0), (1 << 30, 0)  # of the step
# Micro-batches whose activations are on the device: of one input the one that is read and the one that comes, of one
# result the one that is made and the one that leaves. A backward has two inputs.
IN_FLIGHT = {"forward": 4, "backward": 6}

Moment = tuple[int, int]  # a stage and a moment in it
Span = tuple[Moment, Moment]  # first and last
Index = Any  # of some alphas in an array of all


@dataclass(frozen=True)
class Footprint:
    """The moments of one alpha that bind for some ratios: bytes, as arrays `[moment, 1 + 5]`, that any number of
    micro-batches takes (`fixed`) and that each one takes.
    """

    fixed: Array
    each: Array

    def rows(self, num_micro_batches: int) -> Array:
        """The bytes at these moments."""
        return self.fixed + num_micro_batches * self.each


def footprints(
    workload: Workload,
    alphas: Sequence[float],
    *,
    separate: bool,
    speculative: bool = False,
    step: Outline | None = None,
) -> dict[str, tuple[Footprint, ...]]:
    """By alpha, of host memory, the device's (where it has its own; activations of one memory are torch's) and SSD."""
    step = step or outline(workload.num_layers, workload.shape)
    each, once = _Bytes(1), _Bytes(1)
    for journey in step.journeys:
        _activations(each, journey, step, workload.x_nbytes, separate=separate)
    once.add("ssd", workload.x_nbytes, ALL, (BEGIN, END))  # checkpoints round to SSD
    if separate:
        _workspace(each, once, workload, step)
    homes = _Bytes(len(alphas))
    for size in workload.sizes:
        _place(homes, size, step, alphas, _most_numel(workload), separate=separate, speculative=speculative)
    span = homes.span(len(step.stages))
    found = {}
    for tier in ("host", "device", "ssd"):
        fixed, every = homes.at(tier, span) + once.at(tier, span), each.at(tier, span)[0]
        found[tier] = tuple(_binding(of_alpha, every) for of_alpha in fixed)
    return found


def _most_numel(workload: Workload) -> int:
    """The most elements of one update, as `cut_units` has it."""
    layers = [size.num_trained for size in workload.sizes if isinstance(size.unit, int)]
    return max(layers, default=0) or max(size.num_trained for size in workload.sizes) or 1


class _Bytes:
    """What is alive when, for several alphas."""

    def __init__(self, num_alphas: int) -> None:
        self.num_alphas = num_alphas
        self.entries: dict[str, list[tuple[Span, Array | float, Array, Index]]] = {}

    def add(self, tier: str, nbytes: Array | float, share: Array, *spans: Span, alphas: Index = slice(None)) -> None:
        """`nbytes` times `share`, for as long as any of the spans lasts."""
        self.entries.setdefault(tier, []).extend((span, nbytes, share, alphas) for span in _union(spans))

    def span(self, num_stages: int) -> range:
        """All stages in which anything changes, and one more at either end."""
        moments = (moment for entries in self.entries.values() for span, *_ in entries for moment in span)
        stages = [stage for stage, _ in moments if BEGIN[0] < stage < END[0]]
        return range(min([0, *stages]) - 1, max([num_stages, *stages]) + 2)

    def at(self, tier: str, span: range) -> Array:
        """Bytes `[alpha, moment, 1 + 5]` of every moment of these stages."""
        changes = np.zeros((4 * len(span) + 1, self.num_alphas, 6))
        for (first, last), nbytes, share, alphas in self.entries.get(tier, ()):
            amount = np.multiply.outer(nbytes, share)
            changes[_row(first, span), alphas] += amount
            changes[_row(last, span) + 1, alphas] -= amount
        return np.moveaxis(np.cumsum(changes, axis=0)[:-1], 1, 0)


def _row(moment: Moment, span: range) -> int:
    return min(max(4 * (moment[0] - span.start) + moment[1], 0), 4 * len(span) - 1)


def _place(
    homes: _Bytes,
    size: UnitSize,
    step: Outline,
    alphas: Sequence[float],
    most_numel: int,
    *,
    separate: bool,
    speculative: bool,
) -> None:
    """One unit; alphas with equal numbers of groups are counted together."""
    together: dict[tuple[int, int], list[int]] = {}
    for index, alpha in enumerate(alphas):
        groups = tuple(ceil(share * size.num_trained / most_numel) for share in (1 - alpha, alpha))
        together.setdefault((groups[0], groups[1]), []).append(index)
    for groups, indices in together.items():
        late = np.array([alphas[index] for index in indices])
        unit = _Unit(homes, size, step, late, np.array(indices), groups, separate=separate, speculative=speculative)
        unit.count()


class _Unit:
    """Parameters, gradient and state of one unit."""

    def __init__(
        self,
        homes: _Bytes,
        size: UnitSize,
        step: Outline,
        alphas: Array,
        indices: Index,
        groups: tuple[int, int],
        *,
        separate: bool,
        speculative: bool,
    ) -> None:
        self.add = partial(homes.add, alphas=indices)
        self.size = size
        self.num_trained = size.num_trained
        self.separate = separate
        self.uses: tuple[int, ...] = step.uses.get(size.unit, ())
        self.first = self.uses[0] if self.uses else 0
        self.opened = step.opened.get(size.unit, 0)
        complete = step.complete.get(size.unit, 0)
        self.gone = complete + 1  # the stage in which the gradient leaves
        self.update = complete + 1 + separate  # of the first early group
        self.num_early, self.num_late = groups
        self.num_again = self.num_early if speculative else 0  # of early groups that may be late ones too
        self.num_forward = self.num_again + self.num_late
        self.early = self._group(1 - alphas, self.num_early)
        self.late = self._group(alphas, self.num_late)
        # With several groups the second may get its memory before the first has given back its own.
        self.home = LEAVE if max(self.num_early, self.num_forward) > 1 else FETCH

    def _group(self, share: Array, number: int) -> Array:
        """Elements of one update: cuts of its three zones go to the nearest quantum."""
        return np.minimum(share * self.num_trained / max(number, 1) + 3 * QUANTUM, self.num_trained)

    def count(self) -> None:
        self._parameters()
        self._states()
        self._gradient()

    # Where the group `k` of those in the forward is: groups take one stage each, the last just in time; early ones come
    # before late ones.

    def _late_stage(self, k: int, offset: int) -> int:
        return self.first - offset - (self.num_forward - 1 - k)

    def _forward_groups(self) -> Iterator[tuple[int, Array]]:
        """The place of each, and its elements."""
        yield from enumerate([self.early] * self.num_again + [self.late] * self.num_late)

    def _parameters(self) -> None:
        nbytes = self.size.numel * self.size.itemsize
        on_device = DEVICE_PARAMETER * self.size.may_reside
        self.add("ssd", nbytes, ALL - PARAMETER - on_device, (BEGIN, END))
        self.add("ssd", QUANTUM * self.size.itemsize, ALL, (BEGIN, END))  # a cut rounds down
        self.add("host", nbytes, ALL - PARAMETER, *self._in_host())
        if not (self.separate and self.size.has_master and self.num_late):
            self.add("host", nbytes, PARAMETER, (BEGIN, END))
        else:
            self._reclaimed(nbytes)
        if self.separate:
            self.add("device", nbytes, on_device, (BEGIN, END))
            spans = (((use - 1, COMPUTE), (use, COMPUTE)) for use in self.uses)
            self.add("device", nbytes, ALL, *spans)

    def _reclaimed(self, nbytes: int) -> None:
        """Late parts are stale from their last use to their update: gradients take their memory."""
        exact = self.late == self.num_trained
        stale = np.where(exact, self.late, np.maximum(self.num_late * (self.late - 3 * QUANTUM) - QUANTUM, 0))
        self.add("host", nbytes - stale * self.size.itemsize, PARAMETER, (BEGIN, END))
        for k in range(self.num_late):
            span = ((self._late_stage(self.num_again + k, 2), UPDATE), (self.uses[-1] - 1, COMPUTE))
            self.add("host", stale / self.num_late * self.size.itemsize, PARAMETER, span)

    def _in_host(self) -> Iterator[Span]:
        """When what has no home in host memory is there: for the device, and for its update."""
        fetch, last = (2, (-1, COMPUTE)) if self.separate else (1, (0, COMPUTE))
        for use in self.uses:
            yield (use - fetch, FETCH), (use + last[0], last[1])
        if self.num_forward:
            asked = (self._late_stage(0, 2), UPDATE) if self.size.has_master else (self._late_stage(0, 3), FETCH)
            yield asked, (self.first + last[0], last[1])
        if self.num_early:
            home = (self.update + self.num_early, self.home)
            since = (self.update, UPDATE) if self.size.has_master else (self.uses[-1] - fetch, FETCH)
            yield since, home

    def _states(self) -> None:
        nbytes = self.num_trained * self.size.state_itemsize
        self.add("ssd", nbytes, SSD_OPTIMIZER, (BEGIN, END))
        rounded = (self.num_early + self.num_late) * QUANTUM * self.size.state_itemsize
        self.add("ssd", rounded, ALL, (BEGIN, END))
        self.add("host", nbytes, OPTIMIZER, (BEGIN, END))
        for k in range(self.num_early):
            span = ((self.update - 1 + k, FETCH), (self.update + 1 + k, self.home))
            self.add("host", self.early * self.size.state_itemsize, SSD_OPTIMIZER, span)
        for k, group in self._forward_groups():
            span = ((self._late_stage(k, 3), FETCH), (self._late_stage(k, 1), self.home))
            self.add("host", group * self.size.state_itemsize, SSD_OPTIMIZER, span)
        if self.num_again:
            self._other_places()

    def _other_places(self) -> None:
        """Of what an early update needs to be done again."""
        numel = np.minimum(self.num_again * self.early, self.num_trained)
        self.add("ssd", self.num_again * QUANTUM * self.size.state_itemsize, ALL, (BEGIN, END))  # a cut rounds down
        self.add("ssd", numel * self.size.state_itemsize, SSD_OPTIMIZER, (BEGIN, END))
        self.add("host", numel * self.size.state_itemsize, OPTIMIZER, (BEGIN, END))
        if not self.size.has_master:
            self.add("ssd", numel * self.size.itemsize, ALL - PARAMETER, (BEGIN, END))
            self.add("host", numel * self.size.itemsize, PARAMETER, (BEGIN, END))

    def _gradient(self) -> None:
        if not self.num_trained:
            return
        itemsize, began = self.size.gradient_itemsize, (self.opened, COMPUTE)
        whole = self.num_trained * itemsize
        if not self.separate and self.num_early == self.num_again:  # it stays where it was summed
            self.add("host", whole, ALL, (began, END), (BEGIN, (self._late_stage(self.num_forward - 1, 2), UPDATE)))
            return
        if self.separate:
            self.add("device", whole, ALL, (began, (self.gone, LEAVE)))
            for k in range(self.num_early - self.num_again):
                self.add("host", self.early * itemsize, ALL, ((self.gone, LEAVE), (self.update + k, UPDATE)))
        else:
            self.add("host", whole, ALL, (began, (self.update + self.num_early - 1, UPDATE)))
        kept = (self.gone, LEAVE if self.separate else UPDATE)
        for k, group in self._forward_groups():
            until = (self._late_stage(k, 2), UPDATE)
            self.add("host", group * itemsize, ALL, (kept, END), (BEGIN, until))


def _activations(alive: _Bytes, journey: Journey, step: Outline, x_nbytes: int, *, separate: bool) -> None:
    """Of one layer's input or its gradient, for one micro-batch."""
    made, last = (journey.made, COMPUTE), (journey.reads[-1], COMPUTE)
    if step.is_checkpoint(journey):
        again = journey.reads[-1]
        collected = (journey.reads[0], COMPUTE) if separate else (journey.made + 1, LEAVE)
        alive.add("host", x_nbytes, CHECKPOINT, (made, last))
        alive.add("host", x_nbytes, SSD_CHECKPOINT, (made, collected), ((again - 1, FETCH), last))
        alive.add("ssd", x_nbytes, SSD_CHECKPOINT, ((journey.made + 1, FETCH), (again - 1, FETCH)))
        if separate:
            alive.add("device", x_nbytes, DEVICE_CHECKPOINT, (made, last))
    elif step.is_kept(journey) or separate:
        # As many come as go: while a stage reads these, what it makes takes their place.
        makes = any(other.kind == "dx" and other.made == last[0] for other in step.journeys)
        passed_on = separate and not step.is_kept(journey) and makes
        alive.add("host", x_nbytes, ALL, (made, (last[0], LEAVE) if passed_on else last))


def _workspace(each: _Bytes, once: _Bytes, workload: Workload, step: Outline) -> None:
    """What a stage computes with, beside parameters and gradients."""
    inside = max((cost.workspace_nbytes for cost in workload.costs.values()), default=0)
    for number, stage in enumerate(step.stages):
        in_flight = IN_FLIGHT[stage.phase] * workload.x_nbytes
        once.add("device", in_flight, ALL, ((number, FETCH), (number, COMPUTE)))
    once.add("device", inside, ALL, (BEGIN, END))
    each.add("device", workload.side_nbytes, ALL, (BEGIN, END))


def _union(spans: Iterable[Span]) -> list[Span]:
    """The same moments, none twice."""
    found: list[Span] = []
    for first, last in sorted(span for span in spans if span[0] <= span[1]):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found


CORNERS = np.array([[1, *((corner >> bit) & 1 for bit in range(5))] for corner in range(32)], dtype=np.float64)
POSSIBLE = CORNERS[(CORNERS[:, 1] + CORNERS[:, 4] <= 1) & (CORNERS[:, 2] + CORNERS[:, 5] <= 1)]


def _binding(fixed: Array, each: Array) -> Footprint:
    """Of all moments those that bind for some ratios, whatever the number of micro-batches.

    From layer to layer bytes mostly change evenly: where both parts of a moment are, at every corner of what the ratios
    may be, no more than the mean of those a stage before and after, one of the ends of such a run is above it. Of the
    others those go that are below another in both parts at every corner.
    """
    heights = np.concatenate([fixed @ POSSIBLE.T, each @ POSSIBLE.T], axis=1).reshape(len(fixed) // 4, -1)
    bent = heights[1:-1] > (heights[:-2] + heights[2:]) / 2 + 1.0
    ends = np.ones((len(heights), 4), dtype=bool)
    ends[1:-1] = bent.reshape(len(bent), 4, -1).any(axis=2)
    left = np.flatnonzero(ends)
    heights = heights.reshape(len(fixed), -1)
    found = []
    while left.size:
        best = left[np.argmax(heights[left].sum(axis=1))]
        found.append(best)
        left = left[(heights[left] > heights[best] + 1.0).any(axis=1)]
    return Footprint(fixed[found], each[found])
