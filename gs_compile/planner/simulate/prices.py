"""prices: the bytes of every operation of a step program, and its seconds alone on its lane.

Rates are those of the profile for each lane alone; that parallel lanes slow each other down is left to the simulator
(`Profile.speeds`). The order of operations does not matter here.

    embed, forward, head, backward ...     measured seconds of the unit's code, or its FLOPs by the matrix rate
    norm, zeros                            a pass over the gradient; a norm also has the computation that the unit's
                                           update needs on the device
    decode                                 some passes over the values
    count, clip                            a few numbers: nothing beside the cost of issuing
    prefetch, offload                      bytes by the lane's rate; for the SSD also the latency of a request
    all_gather, reduce_scatter             bytes by the lane's rate, and a ring's steps, one for each other rank; for a
                                           gradient also a pass over this rank's share
    update                                 elements by the optimizer's rate, scaled by the rule's bytes to AdamW's
    seal                                   the seconds of syncing a file of each part, and of writing the manifest
    commit                                 copies of what the device reads in host memory; the rest is only swapped
    alias                                  within one memory, of what a layer saves: a copy by the issue loop
    gather, other aliases, empty, free     nothing: memory under another name

If every Nth step is committed, an Nth of a commit is counted: that of a mean step.

The cost of issuing, `Profile.op_seconds` for each operation, is the issue loop's and not included.
"""

from __future__ import annotations

from dataclasses import replace

from gs_compile.placement.kinds import nbytes_of
from gs_compile.placement.placement import Placement
from gs_compile.placement.traffic import op_nbytes
from gs_compile.placement.workload import UnitSize, Workload
from gs_compile.planner.measure.profile import Profile
from gs_compile.program.ir import MEMORY_VERBS, SHADOWS, Op, Program, Unit
from gs_compile.program.verbs import BACKWARDS, SIGNATURES

# AdamW in fp32, for which a profile has the update rate: it reads parameter, two moments, gradient, and writes three.
ADAMW_NBYTES = 28
# Passes over memory for each byte of a value that is decoded: 1.8 ns a bfloat16 (benchmarks/frozen.py), at 4 GB/s.
DECODING = 4
# Of a commit: syncing a file that is written already, and writing the manifest, measured on a drive that need not flush
# its cache. One that must takes milliseconds for each file.
SYNC_SECONDS, MANIFEST_SECONDS = 2e-4, 5e-3


def op_prices(program: Program, placement: Placement, workload: Workload, profile: Profile) -> list[float]:
    """The seconds of each operation alone on its lane, in the program's order; for a memory verb, in the issue loop."""
    return [_seconds(op, placement, workload, profile) for op in program.ops]


def with_products(sizes: tuple[UnitSize, ...], profile: Profile) -> tuple[UnitSize, ...]:
    """The sizes with the time of the matrix products in updates, added once: to the update, and, if a device with
    memory of its own computes them, also to the step's computation.
    """
    rates = profile.matmul_flops_per_second
    rate = rates.get("bf16") or min(rates.values())

    def with_own(size: UnitSize) -> UnitSize:
        if size.products is None or size.products.is_priced:
            return size
        seconds = size.products.flops / rate
        exchanged = size.products.shared_nbytes / profile.transfer_rate("net")
        waits = (seconds + exchanged) * lane_rate("cpu", profile) / size.num_trained
        passes = seconds * profile.memory_bytes_per_second if profile.separate else 0
        conversion_nbytes, products = size.conversion_nbytes + int(waits), replace(size.products, is_priced=True)
        return replace(size, conversion_nbytes=conversion_nbytes, device_nbytes=int(passes), products=products)

    return tuple(map(with_own, sizes))


def code_seconds(unit: Unit, workload: Workload, profile: Profile, *, backward: bool, level: int = 0) -> float:
    """The seconds of a unit's forward, or of its backward including recomputation, for one micro-batch: measured, or
    its FLOPs by the matrix rate of the workload's dtype. level: of what the forward saves.
    """
    cost = workload.costs[unit].at(level)
    if cost.seconds is not None:
        return cost.seconds[backward]
    return (cost.backward_flops if backward else cost.forward_flops) / profile.matmul_flops_per_second[workload.dtype]


def runs_backward(op: Op) -> bool:
    """Whether an operation runs the backward of a unit's code; a head does if a gradient is wanted."""
    has_gradient = bool(op.into) or any(value.kind == "dx" for value in op.results)
    return op.verb in BACKWARDS or (op.verb == "head" and has_gradient)


def work_nbytes(op: Op, placement: Placement) -> int:
    """The bytes that an operation moves between tiers, or reads and writes in memory; 0 for a unit's code."""
    match op.verb:
        case "prefetch" | "offload" | "all_gather" | "reduce_scatter":
            return op_nbytes(op, placement) // _steps(op, placement)
        case "update":
            unit = placement.by_unit[op.into[0].unit]
            former = (value for value in op.reads if value.kind in SHADOWS)  # read in addition to what is written
            elsewhere = sum(nbytes_of(placement, value) for value in former)
            return int(unit.group_of(op.into[0]).numel * update_nbytes(unit)) + elsewhere
        case "alias":
            kept = (value for value in op.results if value.kind in ("x", "a") and value.tier == "host")
            return 2 * sum(nbytes_of(placement, value) for value in kept)
        case "decode":
            return DECODING * placement.by_unit[op.into[0].unit].decoded_nbytes
        case "norm" | "zeros":  # of a placed unit; the user's own gradients are not ours to count
            placed = placement.by_unit.get((*op.reads, *op.results)[0].unit)
            beside = placed.device_nbytes if placed and op.verb == "norm" else 0
            return placed.num_trained * placed.gradient_itemsize + beside if placed else 0
    return 0


def lane_rate(lane: str, profile: Profile) -> float:
    """Bytes a second of a lane alone, as `work_nbytes` counts bytes."""
    if lane == "cpu":
        return ADAMW_NBYTES * profile.update_elements_per_second
    return profile.memory_bytes_per_second if lane in ("compute", "memory") else profile.transfer_rate(lane)


def update_nbytes(unit: UnitSize) -> float:
    """The bytes that updating one element reads and writes: its state, its gradient, and its parameter.

    A parameter that has a master in the state is only written. The conversion of narrow moments is added, as bytes.
    """
    parameter = unit.itemsize if unit.has_master else 2 * unit.itemsize
    return 2 * unit.state_itemsize + parameter + unit.gradient_itemsize + unit.conversion_nbytes


def _steps(op: Op, placement: Placement) -> int:
    """The number N if only every Nth step has the operation."""
    return placement.durability if op.kind == "seal" else 1


def _seconds(op: Op, placement: Placement, workload: Workload, profile: Profile) -> float:
    if op.verb in SIGNATURES:
        shares = (placement.activations.share_of(value) for value in op.values if value.kind == "a")
        level = max((share.level for share in shares if share), default=0)
        return code_seconds(op.unit, workload, profile, backward=runs_backward(op), level=level)
    match op.verb:
        case "prefetch" | "offload" | "update" | "norm" | "zeros" | "alias" | "decode":
            asked = profile.request_seconds if op.lane in ("ssd_read", "ssd_write") else 0.0
            return work_nbytes(op, placement) / lane_rate(op.lane, profile) + asked / _steps(op, placement)
        case "all_gather" | "reduce_scatter":
            rings, passed = 1, 0
            if op.verb == "reduce_scatter":
                unit, passed = placement.by_unit[op.reads[0].unit], nbytes_of(placement, op.results[0])
                rings = sum(start < unit.num_trained for start, _ in unit.pieces)
            hops = rings * (placement.world - 1) * profile.net_hop_seconds
            moved = work_nbytes(op, placement) / lane_rate(op.lane, profile)
            return moved + hops + passed / profile.memory_bytes_per_second
        case "count" | "clip":
            return profile.op_seconds
        case "seal":
            files = sum(len(unit.w) + len(unit.s) for unit in placement.units)
            return (MANIFEST_SECONDS + SYNC_SECONDS * files) / _steps(op, placement)
        case "commit":
            zone = placement.device_tier
            in_place = (value for value in op.into[::2] if (value.kind, value.tier) == ("w", zone))
            return 2 * sum(nbytes_of(placement, value) for value in in_place) / profile.memory_bytes_per_second
    assert op.verb in MEMORY_VERBS, f"no price is known for {op.verb}"
    return 0.0
