"""volumes: the bytes that each lane moves in each phase of a step, as affine formulas of the ratios; and the seconds.

The ratios are the shares of a class of data that live in a place:

    c, p, o     of checkpoints, parameters and optimizer states in host memory
    dc, dp      of checkpoints and parameters in spare memory of the device

What is left is on SSD. A formula is an array `[alpha, 1 + 5]`: for each alpha a constant and the five coefficients.
They count what `offload` makes of a step, to the byte but for cuts at whole quanta and tensors. The forward has all
that the late updates move, the backward what the early ones do, wherever `pipeline` issues it. A unit of which only
some tensors are trained is taken as if any part of it had its share of them. What a trained unit without a master has
never lives on the device, whatever dp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gs_compile.placement.workload import UnitSize, Workload
from gs_compile.planner.lp.stage_graph import Journey, Outline, outline
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.simulate.prices import ADAMW_NBYTES, backward_seconds, forward_seconds, update_nbytes

Array = npt.NDArray[np.float64]
RATIOS = ("checkpoint", "parameter", "optimizer", "device_checkpoint", "device_parameter")
PHASES = ("forward", "backward")
TIMED = ("compute", "cpu", "h2d", "d2h", "ssd_read", "ssd_write")

ALL, CHECKPOINT, PARAMETER, OPTIMIZER = (np.eye(6)[index] for index in range(4))
DEVICE_CHECKPOINT, DEVICE_PARAMETER = np.eye(6)[4], np.eye(6)[5]
SSD_CHECKPOINT = ALL - CHECKPOINT - DEVICE_CHECKPOINT
SSD_OPTIMIZER = ALL - OPTIMIZER

ONCE, LATE, COPIED = np.eye(3)  # see `_Sums`
EARLY = ONCE - LATE


def volumes(
    workload: Workload,
    num_micro_batches: int,
    alphas: Sequence[float],
    *,
    separate: bool,
    speculative: bool = False,
    step: Outline | None = None,
) -> dict[tuple[str, str, str], Array]:
    """Bytes by phase, lane and kind of value ("forward", "ssd_read", "w"); what moves nothing is not there.

    speculative: no step is rolled back, but all gradients wait until that is known.
    """
    step = step or outline(workload.num_layers, workload.shape)
    moved = _Sums()
    for size in workload.sizes:
        _parameters(moved, size, step, separate=separate)
        _optimizer(moved, size, separate=separate, speculative=speculative)
    for journey in step.journeys:
        _activations(moved, journey, step, num_micro_batches, workload.x_nbytes, separate=separate)
    return moved.of(alphas)


def seconds(
    workload: Workload,
    profile: Profile,
    num_micro_batches: int,
    alphas: Sequence[float],
    *,
    speculative: bool = False,
    step: Outline | None = None,
) -> dict[tuple[str, str], Array]:
    """What each lane needs in each phase if nothing else runs, by phase and lane."""
    step = step or outline(workload.num_layers, workload.shape)
    late = np.asarray(alphas, dtype=np.float64)
    found = {(phase, lane): np.zeros((late.size, 6)) for phase in PHASES for lane in TIMED}
    separate = profile.separate
    moved = volumes(workload, num_micro_batches, alphas, separate=separate, speculative=speculative, step=step)
    for (phase, lane, _), nbytes in moved.items():
        found[phase, lane] += nbytes / rate_of(lane, profile)
    for stage in step.stages:
        if stage.unit is not None:
            price = forward_seconds if stage.phase == "forward" else backward_seconds
            alone = price(workload.costs[stage.unit], workload, profile)
            found[stage.phase, "compute"] += num_micro_batches * alone * ALL
    passes = 2 * workload.gradients_nbytes / profile.memory_bytes_per_second  # zeros, and the norm
    found["backward", "compute"] += passes * ALL
    updated = sum(size.num_trained * update_nbytes(size) for size in workload.sizes)
    updates = updated / ADAMW_NBYTES / profile.update_elements_per_second
    found["forward", "cpu"] += np.outer(late * updates, ALL)
    found["backward", "cpu"] += np.outer((1 - late) * updates, ALL)
    if speculative:  # what is updated into a shadow copy is not in cache there
        states = workload.states_nbytes / ADAMW_NBYTES / profile.update_elements_per_second
        found["backward", "cpu"] += np.outer((1 - late) * states, OPTIMIZER)
    return found


def rate_of(lane: str, profile: Profile) -> float:
    """Bytes a second of a lane alone. In one memory what is still copied is read and written at the memory's rate."""
    rate: float = getattr(profile, f"{lane}_bytes_per_second")
    return rate if math.isfinite(rate) else profile.memory_bytes_per_second / 2


class _Sums:
    """Formulas that grow. Bytes are in three parts: a constant, what is late, and what is late and copied."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, str, str], Array] = {}

    def add(self, phase: str, lane: str, kind: str, nbytes: Array, share: Array) -> None:
        """`nbytes`, of which the share moves."""
        if (phase, lane, kind) not in self.sums:
            self.sums[phase, lane, kind] = np.zeros((3, 6))
        self.sums[phase, lane, kind] += nbytes[:, None] * share

    def add_both(self, lane: str, kind: str, nbytes: float, share: Array) -> None:
        """What follows the updates: late ones in the forward, early ones in the backward."""
        self.add("forward", lane, kind, nbytes * LATE, share)
        self.add("backward", lane, kind, nbytes * EARLY, share)

    def of(self, alphas: Sequence[float]) -> dict[tuple[str, str, str], Array]:
        """For each alpha; what moves nothing is left out."""
        late = np.asarray(alphas, dtype=np.float64)
        parts = np.stack([np.ones_like(late), late, late * (late < 1)], axis=1)
        return {key: parts @ array for key, array in sorted(self.sums.items()) if array.any()}


def _parameters(moved: _Sums, size: UnitSize, step: Outline, *, separate: bool) -> None:
    uses: tuple[int, ...] = step.uses.get(size.unit, ())
    nbytes, trained = size.numel * size.itemsize, size.num_trained * size.itemsize
    on_device = DEVICE_PARAMETER * size.may_reside
    on_ssd = ALL - PARAMETER - on_device
    for use in uses:
        moved.add(step.phase(use), "ssd_read", "w", nbytes * ONCE, on_ssd)
        if separate:
            moved.add(step.phase(use), "h2d", "w", nbytes * ONCE, ALL - on_device)
    if uses and trained:
        first = step.phase(uses[0])
        moved.add(first, "ssd_read", "w", -trained * LATE, on_ssd)  # the late update has it in host memory,
        if not size.has_master:
            moved.add("forward", "ssd_read", "w", trained * LATE, on_ssd)  # as it had to read it itself
    moved.add_both("ssd_write", "w", trained, on_ssd)
    if separate:
        moved.add_both("h2d", "w", trained, on_device)  # what the update has made


def _optimizer(moved: _Sums, size: UnitSize, *, separate: bool, speculative: bool) -> None:
    states, gradients = size.num_trained * size.state_itemsize, size.num_trained * size.gradient_itemsize
    moved.add_both("ssd_read", "s", states, SSD_OPTIMIZER)
    moved.add_both("ssd_write", "s", states, SSD_OPTIMIZER)
    if separate:
        moved.add("backward", "d2h", "dw", gradients * ONCE, ALL)
    elif not speculative:  # what waits is copied, unless all of the unit does: then it stays where it was summed
        moved.add("backward", "d2h", "dw", gradients * COPIED, ALL)


def _activations(
    moved: _Sums, journey: Journey, step: Outline, num_micro_batches: int, x_nbytes: int, *, separate: bool
) -> None:
    is_checkpoint = step.is_checkpoint(journey)
    if is_checkpoint:
        nbytes = num_micro_batches * x_nbytes * ONCE
        moved.add(step.phase(journey.made), "ssd_write", "x", nbytes, SSD_CHECKPOINT)
        moved.add(step.phase(journey.reads[-1]), "ssd_read", "x", nbytes, SSD_CHECKPOINT)
        if not separate:
            moved.add(step.phase(journey.made), "d2h", "x", nbytes, SSD_CHECKPOINT)
    if separate:
        share = ALL - DEVICE_CHECKPOINT if is_checkpoint else ALL
        leaving = journey.leaving(num_micro_batches) * x_nbytes * ONCE
        moved.add(step.phase(journey.made), "d2h", journey.kind, leaving, share)
        for read in journey.reads:
            nbytes = journey.crossings(read, num_micro_batches) * x_nbytes * ONCE
            moved.add(step.phase(read), "h2d", journey.kind, nbytes, share)
