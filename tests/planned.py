"""Models and machines for the tests of the planner, and the programs that their plans lower to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from tiers import frozen_quanta, tensors, tiered_steps, with_gradient, x_nbytes

from gs_compile.options import Ratios
from gs_compile.passes.lower import StepSpec, lower
from gs_compile.placement.levels import Share, Shares
from gs_compile.placement.placement import Decision, Placement, StepContext
from gs_compile.placement.shards import QUANTUM
from gs_compile.placement.workload import UnitCost, UnitSize, Workload
from gs_compile.planner.builder import StepBuilder
from gs_compile.planner.lp.coefficients import Formulas
from gs_compile.planner.lp.counting import Counted
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.problem import Problem
from gs_compile.planner.request import Request
from gs_compile.planner.workloads import Levelled
from gs_compile.program.ir import Program, StepShape, Unit

GB = 10**9
SSD_RATES = [f"ssd_{way}{beside}_bytes_per_second" for way in ("read", "write") for beside in ("", "_mixed")]
A100 = Profile(
    name="server",
    device="cuda",
    host_nbytes=400 * GB,
    device_nbytes=40 * GB,
    ssd_nbytes=8000 * GB,
    matmul_flops_per_second={"bf16": 200e12},
    memory_bytes_per_second=1.5e12,
    ssd_read_bytes_per_second=6e9,
    ssd_write_bytes_per_second=3e9,
    ssd_read_mixed_bytes_per_second=4e9,
    ssd_write_mixed_bytes_per_second=2e9,
    h2d_bytes_per_second=24e9,
    d2h_bytes_per_second=24e9,
    h2d_mixed_bytes_per_second=18e9,
    d2h_mixed_bytes_per_second=18e9,
    update_elements_per_second=4e9,
    update_mixed_elements_per_second=3e9,
    compute_mixed_speed=0.97,
)


def gpt(
    num_layers: int,
    hidden: int,
    *,
    vocabulary: int = 50257,
    sequence: int = 2048,
    bf16: bool = True,
    tied: bool = True,
) -> Workload:
    """A GPT: 12 h^2 in a layer's four matrices, and what a token of it computes."""
    itemsize = 2 if bf16 else 4

    def size(unit: Unit, *tensors: int) -> UnitSize:
        whole = tuple(-(-numel // QUANTUM) * QUANTUM for numel in tensors)
        return UnitSize(unit, whole, (), itemsize, 4, 12 if bf16 else 8, bf16)

    words = vocabulary * hidden
    sizes = [size("e", sequence * hidden, *([] if tied else [words]))]
    sizes += [size(i, 3 * hidden**2, hidden**2, 4 * hidden**2, 4 * hidden**2, 13 * hidden) for i in range(num_layers)]
    sizes += [size("h", 2 * hidden, *([] if tied else [words])), *([size("t", words)] if tied else [])]
    layer = sequence * (24 * hidden**2 + 4 * sequence * hidden)
    costs: dict[Unit, UnitCost] = {"e": UnitCost(forward_flops=0.0, backward_flops=0.0)}
    costs |= dict.fromkeys(
        range(num_layers),
        UnitCost(forward_flops=layer, backward_flops=3 * layer, workspace_nbytes=34 * sequence * hidden),
    )
    costs["h"] = UnitCost(forward_flops=2.0 * sequence * words, backward_flops=6.0 * sequence * words)
    shape = StepShape(has_total=True, tied=frozenset({"e", "h"} if tied else ()))
    return Workload(
        name=f"gpt {num_layers} x {hidden}",
        num_layers=num_layers,
        sizes=tuple(sizes),
        costs=costs,
        micro_batch_size=1,
        sequence=sequence,
        x_nbytes=(sequence * hidden * itemsize,),
        dtype="bf16" if bf16 else "fp32",
        shape=shape,
    )


@st.composite
def toys(draw: st.DrawFn, whole: bool = False) -> tuple[Workload, int]:
    """A toy of any shape and its number of micro-batches; `whole`: a unit is trained as a whole or not at all."""
    num_layers, num_micro_batches, shape = draw(tiered_steps().filter(lambda step: step[2].training))
    has_master = draw(st.booleans())
    units: list[Unit] = ["e", *range(num_layers), "h", *(["t"] if shape.tied else [])]
    sizes = []
    for unit in units:
        elements = tuple(quanta * QUANTUM for _, quanta in tensors(unit))
        rest = () if whole else tuple(quanta * QUANTUM for quanta in frozen_quanta(unit))
        trained, frozen = (elements, rest) if unit in with_gradient(num_layers, shape) else ((), elements + rest)
        sizes.append(UnitSize(unit, trained, frozen, 2 if has_master else 4, 4, 12 if has_master else 8, has_master))
    cost = UnitCost(forward_flops=1e6, backward_flops=3e6)
    workload = Workload(
        name="toy",
        num_layers=num_layers,
        sizes=tuple(sizes),
        costs=dict.fromkeys(["e", *range(num_layers), "h"], cost),
        micro_batch_size=1,
        sequence=8,
        x_nbytes=x_nbytes(num_layers, shape, draw(st.sampled_from([512, 65536]))),
        side_nbytes=(draw(st.sampled_from([0, 1024])) if shape.sides else 0,),
        dside_nbytes=(draw(st.sampled_from([0, 2048])) if shape.side_gradients else 0,),
        shape=shape,
    )
    return workload, num_micro_batches


def placed(
    workload: Workload,
    num_micro_batches: int,
    ratios: Ratios,
    alpha: float,
    *,
    separate: bool,
    clip: bool = False,
    speculative: bool = False,
    layer_updates: int = 1,
    shares: Sequence[Share] = (),
) -> Placement:
    builder = StepBuilder.of(workload, num_micro_batches, separate=separate, clip=clip)
    shares = Shares(shares)
    return builder.placement(
        Decision(ratios=(ratios,), alpha=alpha, shares=shares, speculative=speculative, layer_updates=layer_updates)
    )


def problem(
    workload: Workload,
    profile: Profile,
    number: int = 0,
    *,
    request: Request | None = None,
    bare: bool = False,
    **changes: Any,
) -> Problem:
    """Of a made-up model on a machine; `bare`: its layers save their inputs alone, but where that is faster."""
    request = request or Request()
    budgets, plain = request.budgets(profile), workload.bare() if bare else workload
    layout = {"separate": profile.separate, "clip": request.clip, "schedule": request.schedule}
    found = Problem(
        builder=StepBuilder.of(plain, number, durability=request.durability, **layout),
        request=request,
        machine=lambda: profile,
        code=lambda: plain,
        saving=Levelled(lambda: workload) if bare else None,
        host_nbytes=budgets.host_nbytes,
        device_nbytes=budgets.device_nbytes or None,
    )
    return replace(found, **changes)


def formulas(workload: Workload, profile: Profile, *, speculative: bool = False, layer_updates: int = 1) -> Formulas:
    builder = StepBuilder.of(workload, 0, separate=profile.separate, clip=speculative)
    counted = Counted(workload, builder, speculative=speculative, layer_updates=layer_updates)
    return Formulas(workload, profile, counted)


def on(known: Formulas, profile: Profile) -> Formulas:
    """The same on another machine: no program is lowered again."""
    return Formulas(known.workload, profile, known.counted)


def lowered(workload: Workload, placement: Placement) -> list[Program]:
    """Every snapshot of a step in the middle of a run."""
    number = placement.layout.num_micro_batches
    return lower(
        StepSpec(
            workload.num_layers,
            number,
            shape=workload.shape,
            placement=placement,
            context=StepContext(late=placement.has_late),
        )
    )


def ratios(checkpoint: float, parameter: float, optimizer: float, *on_device: float) -> Ratios:
    """In host memory, and of checkpoints and parameters on the device."""
    on_device = on_device or (0.0, 0.0)
    return Ratios(
        checkpoint=checkpoint,
        parameter=parameter,
        optimizer=optimizer,
        device_checkpoint=on_device[0],
        device_parameter=on_device[1],
    )
