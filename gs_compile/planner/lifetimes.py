"""lifetimes: the schedule `lifetime` for data whose homes are chosen: what stays where it is, if that is faster at all.

The program that keeps what there is room for is held against the plain horizontal one by the simulator, and is taken
where it is faster. So the schedule is never slower than the one it begins with, as far as can be known before a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from gs_compile.machine import format_bytes
from gs_compile.passes.baselines.lifetime import Lifetime, Period
from gs_compile.passes.lower import StepSpec, lower
from gs_compile.placement.placement import Placement, Room
from gs_compile.placement.workload import Workload
from gs_compile.planner import summary
from gs_compile.planner.lp.fit import peak
from gs_compile.planner.lp.solve import Budgets
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.prediction import Prediction
from gs_compile.program.ir import TRANSFER_LANES, Program, StepShape

ENDLESS = 1 << 60  # bytes, where no budget is known
NOTHING = "nothing is moved away and back within a step: there is nothing to keep"
EVERYTHING = Room(
    device_nbytes=ENDLESS,
    host_nbytes=ENDLESS,
    bytes_per_second=tuple(dict.fromkeys(TRANSFER_LANES.values(), 1.0).items()),
)
NAMES = {"w": "parameters", "x": "checkpoints", "dw": "gradient sums"}
INACTIVE = {"w": "between two uses", "x": "from forward to backward", "dw": "between two micro-batches"}
NEXT = {"device": "host", "host": "SSD"}  # where a tensor goes that does not stay


@dataclass(frozen=True)
class Outcome:
    """A placement, how its program runs, and in a sentence why it is this one."""

    placement: Placement
    prediction: Prediction
    reason: str


def room_of(budgets: Budgets, workload: Workload, profile: Profile) -> Room:
    """What budgets leave: of the device's memory what its code does not compute in.

    Where the device reads host memory itself a copy reads and writes there.
    """
    rates = {lane: getattr(profile, f"{lane}_bytes_per_second") for lane in ("h2d", "d2h", "ssd_read", "ssd_write")}
    copies = profile.memory_bytes_per_second / 2
    return Room(
        device_nbytes=max(budgets.device_nbytes - workload.workspace_nbytes, 0) if budgets.device_nbytes else ENDLESS,
        host_nbytes=budgets.host_nbytes,
        bytes_per_second=tuple((lane, copies if math.isinf(rate) else rate) for lane, rate in rates.items()),
    )


def has_periods(placement: Placement, lowered: Callable[[Placement], Program]) -> bool:
    """Whether a horizontal step moves anything away and back that could stay."""
    plain, most = (lowered(replace(placement, room=room)) for room in (None, EVERYTHING))
    return plain.ops != most.ops


def fastest(
    plain: Placement,
    others: Iterable[Placement],
    lowered: Callable[[Placement], Program],
    predicted: Callable[[Program, Placement], Prediction],
) -> Outcome:
    """Of a horizontal step and of some that keep what there is room for the one that takes least in simulation.

    With gaps between what is in host memory, what is kept may need more than there is room for: then it is left out.
    """
    programs = [(placement, lowered(placement)) for placement in dict.fromkeys((plain, *others))]
    fits = [(p, program) for p, program in programs if p.room is None or peak(program, "host") <= p.room.host_nbytes]
    found = [(placement, predicted(program, placement)) for placement, program in fits]
    placement, prediction = min(reversed(found), key=lambda each: each[1].simulation.seconds)
    return Outcome(placement, prediction, why(found[0][1], prediction))


def why(plain: Prediction, chosen: Prediction) -> str:
    """In a sentence, what keeping brings, or that it would bring nothing."""
    before, after = plain.simulation.seconds, chosen.simulation.seconds
    if chosen is plain:
        return f"to keep what there is room for would not be faster than {before:.3g} s: nothing is kept"
    saved = _moved(plain) - _moved(chosen)
    words = f"{format_bytes(saved)} less are moved" if saved >= 0 else f"{format_bytes(-saved)} more are moved"
    return (
        f"what there is room for stays where it is: {words} in a step, which takes {after:.3g} s in simulation, and "
        f"{before:.3g} s by the horizontal schedule"
    )


def table(placement: Placement, shape: StepShape) -> str:
    """For people: the periods in which tensors are inactive, by kind, and what becomes of them."""
    headings = ("", "on", "inactive", "times", "bytes", "stay", "bytes that stay", "others go to")
    return summary.table(
        headings, _rows(periods(placement, shape)), right=("times", "bytes", "stay", "bytes that stay")
    )


def periods(placement: Placement, shape: StepShape) -> tuple[Period, ...]:
    """All of a step among others, each with what was decided."""
    late = placement.has_late
    snapshots = lower(
        StepSpec(placement.num_layers, len(placement.x_nbytes), shape=shape, placement=placement, late=late),
        verified=False,
    )
    program = next(program for program in snapshots if program.made_by == "pipeline")
    return Lifetime(placement, late).decide(program)[1]


def as_dicts(found: Iterable[Period]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {
            "tensor": str(period.value),
            "since": str(period.since),
            "until": str(period.until),
            "nbytes": period.nbytes,
            "stays": period.kept,
        }
        for period in found
    ]


def _rows(found: Iterable[Period]) -> Iterator[tuple[str, ...]]:
    groups: dict[tuple[str, str], list[Period]] = {}
    for period in found:
        groups.setdefault((period.value.kind, str(period.value.tier)), []).append(period)
    for (kind, tier), members in groups.items():
        kept = [period for period in members if period.kept]
        yield (
            NAMES[kind],
            tier,
            INACTIVE[kind],
            str(len(members)),
            _total(members),
            str(len(kept)),
            _total(kept),
            NEXT[tier] if len(kept) < len(members) else "",
        )


def _total(found: Iterable[Period]) -> str:
    return format_bytes(sum(period.nbytes for period in found))


def _moved(prediction: Prediction) -> int:
    """Bytes of all transfers of a step."""
    ops = zip(prediction.program.ops, prediction.prices, strict=True)
    return sum(price.nbytes for op, price in ops if op.verb in ("prefetch", "offload"))
