"""measure: what every operation of a step program moves and computes, and how long that takes alone on its lane.

Rates are those of the profile, each lane on its own; how lanes that work side by side slow each other down is for the
simulator (`Profile.speeds`). Nothing here looks at the order of operations.

    embed, forward, head, backward ...     measured seconds of the unit's code, or its FLOPs by the matrix rate
    norm, zeros                            a pass over the gradient
    count, clip                            a few numbers: what issuing any operation costs
    prefetch, offload                      bytes by the lane's rate; of the SSD also the wait for the first one
    update                                 elements by the optimizer's rate, as the rule's bytes are to AdamW's
    gather, keep, empty, free              nothing: memory under another name

What issuing costs on top, `Profile.op_seconds` each, is the walk's and not a lane's: it is not in here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gs_compile.placement.kinds import nbytes_of
from gs_compile.placement.placement import Placement, UnitPlacement
from gs_compile.placement.traffic import op_nbytes
from gs_compile.placement.workload import UnitCost, UnitSize, Workload
from gs_compile.planner.measure.profile import Profile
from gs_compile.program.ir import SHADOWS, Op, Program, Unit

# AdamW in fp32, the rule that a profile's update rate is of: reads parameter, two moments and gradient, writes three.
ADAMW_NBYTES = 28

FORWARD = frozenset({"embed", "forward"})
BACKWARD = frozenset({"backward", "embed_backward", "head_backward"})


@dataclass(frozen=True, slots=True)
class Price:
    """The cost of one operation.

    nbytes: that it moves between tiers, or passes over in memory; those of a unit's code are in its seconds.
    seconds: alone on its lane; of a memory verb, of the thread that issues it.
    """

    nbytes: int = 0
    flops: float = 0.0
    seconds: float = 0.0


def measure(program: Program, placement: Placement, workload: Workload, profile: Profile) -> tuple[Price, ...]:
    """The price of each operation, in the program's order."""
    meter = _Meter(placement, workload, profile)
    return tuple(meter.price(op) for op in program.ops)


def forward_seconds(cost: UnitCost, workload: Workload, profile: Profile) -> float:
    """Of a unit's forward for one micro-batch: measured, or its FLOPs by the matrix rate of the workload's dtype."""
    if cost.forward_seconds is not None:
        return cost.forward_seconds
    return cost.forward_flops / profile.matmul_flops_per_second[workload.dtype]


def backward_seconds(cost: UnitCost, workload: Workload, profile: Profile) -> float:
    """Of a unit's backward for one micro-batch, what it recomputes included."""
    if cost.backward_seconds is not None:
        return cost.backward_seconds
    return cost.backward_flops / profile.matmul_flops_per_second[workload.dtype]


def code_seconds(workload: Workload, profile: Profile) -> float:
    """Of all units' code, forward and backward, for one micro-batch."""
    return sum(
        price(cost, workload, profile)
        for cost in workload.costs.values()
        for price in (forward_seconds, backward_seconds)
    )


def update_nbytes(unit: UnitPlacement | UnitSize) -> int:
    """The bytes that updating one element reads and writes: its state, its gradient, and its parameter.

    A parameter that has a master in the state is only written.
    """
    parameter = unit.itemsize if unit.has_master else 2 * unit.itemsize
    return 2 * unit.state_itemsize + parameter + unit.gradient_itemsize


class _Meter:
    def __init__(self, placement: Placement, workload: Workload, profile: Profile) -> None:
        self.placement = placement
        self.workload = workload
        self.profile = profile
        self.rates = {
            "h2d": profile.h2d_bytes_per_second,
            "d2h": profile.d2h_bytes_per_second,
            "ssd_read": profile.ssd_read_bytes_per_second,
            "ssd_write": profile.ssd_write_bytes_per_second,
        }

    def price(self, op: Op) -> Price:
        match op.verb:
            case "prefetch" | "offload":
                return self._transfer(op)
            case "update":
                return self._update(op)
            case "norm" | "zeros":
                return self._pass((*op.reads, *op.results)[0].unit)
            case "count" | "clip":
                return Price(seconds=self.profile.op_seconds)
            case "commit":
                return self._commit(op)
            case "gather" | "alias" | "empty" | "free":
                return Price()
        return self._code(op)

    def _code(self, op: Op) -> Price:
        cost = self.workload.costs[op.unit]
        has_backward = bool(op.into) or any(value.kind == "dx" for value in op.results)
        if op.verb in BACKWARD or (op.verb == "head" and has_backward):
            return Price(0, cost.backward_flops, backward_seconds(cost, self.workload, self.profile))
        assert op.verb in FORWARD or op.verb == "head", f"no price is known for {op.verb}"
        return Price(0, cost.forward_flops, forward_seconds(cost, self.workload, self.profile))

    def _pass(self, unit: Unit | None) -> Price:
        """Over the gradient of a placed unit; the user's own gradients are not ours to count."""
        placed = self.placement.by_unit.get(unit) if unit is not None else None
        nbytes = placed.num_trained * placed.gradient_itemsize if placed else 0
        return Price(nbytes, 0.0, nbytes / self.profile.memory_bytes_per_second)

    def _commit(self, op: Op) -> Price:
        """Places are exchanged for nothing, but what the device reads in host memory is copied home."""
        in_place = () if self.placement.separate else (v for v in op.into[::2] if (v.kind, v.tier) == ("w", "host"))
        nbytes = sum(nbytes_of(self.placement, value) for value in in_place)
        return Price(0, 0.0, 2 * nbytes / self.profile.memory_bytes_per_second)

    def _transfer(self, op: Op) -> Price:
        nbytes = op_nbytes(op, self.placement)
        rate = self.rates[op.lane]
        if math.isinf(rate):  # device and host are one memory: a copy reads and writes
            return Price(nbytes, 0.0, 2 * nbytes / self.profile.memory_bytes_per_second)
        asked = self.profile.request_seconds if op.lane in ("ssd_read", "ssd_write") else 0.0
        return Price(nbytes, 0.0, nbytes / rate + asked)

    def _update(self, op: Op) -> Price:
        unit = self.placement.by_unit[op.into[0].unit or 0]
        numel = unit.group_of(op.into[0]).numel
        kept = (value for value in op.reads if value.kind in SHADOWS)  # what is written elsewhere is not in cache
        nbytes = numel * update_nbytes(unit) + sum(nbytes_of(self.placement, value) for value in kept)
        return Price(nbytes, 0.0, nbytes / ADAMW_NBYTES / self.profile.update_elements_per_second)
