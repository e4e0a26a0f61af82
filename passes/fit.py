"""fit: ratios that keep a step within its budgets, from nothing but sizes.

Host memory is given first to parameters, which move three times a step, then to checkpoints and optimizer states, which
move twice. What a class takes is counted by lowering the step and reading its planned peaks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gs_compile.errors import MemoryBudgetError
from gs_compile.machine import format_bytes
from gs_compile.placement import Placement
from gs_compile.program import Program

CLASSES = ("parameter", "checkpoint", "optimizer")  # in the order in which they are given host memory
MARGIN = 1 << 20  # bytes: rounding of buffers to pages


def fit(
    make: Callable[[Mapping[str, float]], Placement],
    lower: Callable[[Placement], Program],
    given: Mapping[str, float],
    host_nbytes: int,
) -> Placement:
    """The placement with the most in host memory; ratios in `given` are kept as they are.

    Raises `MemoryBudgetError` where not even the least fits; it says what is needed.
    """
    ratios = {name: given.get(name, 0.0) for name in CLASSES}
    needed = peak(lower(make(ratios)), "host") + MARGIN
    if needed > host_nbytes:
        raise MemoryBudgetError(
            f"host_memory is {format_bytes(host_nbytes)}; this step needs {format_bytes(needed)} ({needed} bytes) of "
            f"it at least, with ratios {_words(ratios)}: give it more, lower ratios, a lower alpha, or a smaller "
            "micro_batch_size"
        )
    for name in CLASSES:
        if name not in given:
            ratios[name] = _most(name, ratios, make, lower, host_nbytes)
    return make(ratios)


def peak(program: Program, tier: str) -> int:
    """The planned peak of a tier, in bytes."""
    return dict(program.peaks).get(tier, 0)


def _most(
    name: str,
    ratios: Mapping[str, float],
    make: Callable[[Mapping[str, float]], Placement],
    lower: Callable[[Placement], Program],
    host_nbytes: int,
) -> float:
    """The largest ratio of one class that fits, to a 64th."""

    def fits(ratio: float) -> bool:
        return peak(lower(make({**ratios, name: ratio})), "host") + MARGIN <= host_nbytes

    if fits(1.0):
        return 1.0
    low, high = 0, 64
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle / 64) else (low, middle)
    return low / 64


def most_alpha(fits: Callable[[float], bool]) -> float | None:
    """The largest alpha of 0.00, 0.01 ... 1.00 for which `fits` holds; None if it holds for none."""
    if not fits(0.0):
        return None
    low, high = 0, 101
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle / 100) else (low, middle)
    return low / 100


def _words(ratios: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {ratio:g}" for name, ratio in ratios.items())
