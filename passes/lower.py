"""The passes from a layer-major step to the program that runs, on one page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gs_compile.passes.baselines.horizontal import horizontal
from gs_compile.passes.baselines.lifetime import lifetime
from gs_compile.passes.baselines.single import single
from gs_compile.passes.free import free
from gs_compile.passes.offload import offload
from gs_compile.passes.overlap import overlap
from gs_compile.passes.pipeline import pipeline
from gs_compile.passes.snake import snake
from gs_compile.passes.vertical import vertical
from gs_compile.placement.placement import Placement
from gs_compile.placement.verify import verify
from gs_compile.program.ir import Program, Schedule, StepShape, Value

SCHEDULES: dict[Schedule, Callable[..., Program]] = {
    "vertical": vertical,
    "horizontal": horizontal,
    "single": single,
    "lifetime": horizontal,
}

# In this order, each with its reason. A pass keeps the meaning of the program: same loss, gradients and outputs.
PASSES: tuple[Callable[..., Program], ...] = (
    snake,  # one micro-batch stays on the device from layer to layer
    overlap,  # the optimizer beside the backward, its late part before the next forward
    offload,  # every value to its home and back, just in time
    pipeline,  # each transfer in the latest stage that still hides it
    lifetime,  # where a tensor may wait for its next use, it stays (of the schedule of that name alone)
    free,  # last: lifetimes follow from the reads that all passes before it have left
)

TIERED = (overlap, offload, pipeline, lifetime)  # of no use where everything stays on the device


def lower(
    num_layers: int,
    num_micro_batches: int,
    *,
    shape: StepShape | None = None,
    schedule: Schedule = "vertical",
    snake: bool = True,
    outputs: Iterable[Value] = (),
    placement: Placement | None = None,
    late: bool = False,
    redo: bool = True,
    verified: bool = True,
) -> list[Program]:
    """Every snapshot from the schedule's pass to the program that runs, which is the last; `made_by` names each.

    All are verified, but for candidates that will not run (`verified=False`). A `placement` has a schedule of its own,
    and what does not train is always vertical: each unit is loaded once. `snake=False` leaves that pass out, as the
    horizontal order does; values in `outputs` are not freed. Without a `placement` everything stays on the device.
    `late`: the step before has left gradients that wait for their update; `redo`: those of speculative ones among them.
    """
    kept = frozenset(outputs)
    leaves_late = placement is not None and placement.has_late and (shape is None or shape.training)
    options: dict[str, dict[str, Any]] = {
        "overlap": {"placement": placement, "late": late, "redo": redo},
        "offload": {"placement": placement, "outputs": kept},
        "pipeline": {"placement": placement},
        "lifetime": {"outputs": kept, "placement": placement, "late": leaves_late},
        "free": {"outputs": kept, "placement": placement, "late": leaves_late},
    }
    trains = shape is None or shape.training
    lay_out = SCHEDULES[placement.schedule if placement else schedule] if trains else vertical
    left_out = set() if snake and lay_out is vertical else {"snake"}
    if placement is None:
        left_out |= {run.__name__ for run in TIERED}
    elif placement.schedule != "lifetime" or not trains:
        left_out |= {"lifetime"}
    program = lay_out(num_layers, num_micro_batches, shape=shape)
    return rewrite(program, left_out, options, placement, late, redo, verified=verified)


def flush(num_layers: int, placement: Placement, *, redo: bool = True) -> list[Program]:
    """The late updates alone: what brings all parameters up to date between two steps."""
    options: dict[str, dict[str, Any]] = {
        "overlap": {"placement": placement, "late": True, "redo": redo},
        "offload": {"placement": placement},
        "pipeline": {"placement": placement},
        "free": {"placement": placement, "late": False},
    }
    nothing = Program((), num_layers, 1, made_by="vertical")
    return rewrite(nothing, {"snake", "lifetime"}, options, placement, True, redo)


def rewrite(
    program: Program,
    left_out: set[str],
    options: dict[str, dict[str, Any]],
    placement: Placement | None,
    late: bool,
    redo: bool,
    *,
    verified: bool = True,
) -> list[Program]:
    """`program` and what each pass makes of it, all verified."""
    snapshots = [program]
    if program.ops and verified:
        verify(program)
    for run in PASSES:
        if run.__name__ not in left_out:
            snapshots.append(run(snapshots[-1], **options.get(run.__name__, {})))
            if verified:
                verify(
                    snapshots[-1], placement if placement and run.__name__ != "snake" else None, late=late, redo=redo
                )
    return snapshots
