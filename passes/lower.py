"""The passes from a layer-major step to the program that runs, on one page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gs_compile.program import Program, StepShape, Value
from gs_compile.verify import verify

from .free import free
from .snake import snake
from .vertical import vertical

# In this order, each with its reason. A pass keeps the meaning of the program: same loss, gradients and outputs.
PASSES: tuple[Callable[..., Program], ...] = (
    snake,  # one micro-batch stays on the device from layer to layer
    free,  # last: lifetimes follow from the reads that all passes before it have left
)


def lower(
    num_layers: int,
    num_micro_batches: int,
    *,
    shape: StepShape | None = None,
    snake: bool = True,
    keep: Iterable[Value] = (),
) -> list[Program]:
    """Every snapshot from `vertical` to the program that runs, which is the last; `made_by` names each.

    All are verified. `snake=False` leaves that pass out; values in `keep` are not freed.
    """
    options: dict[str, dict[str, Any]] = {"free": {"keep": frozenset(keep)}}
    left_out = set() if snake else {"snake"}
    snapshots = [vertical(num_layers, num_micro_batches, shape=shape)]
    verify(snapshots[0])
    for run in PASSES:
        if run.__name__ not in left_out:
            snapshots.append(run(snapshots[-1], **options.get(run.__name__, {})))
            verify(snapshots[-1])
    return snapshots
