"""fit: ratios that keep a step within its budgets, from nothing but sizes.

Host memory is given first to parameters, which move three times a step, then to checkpoints and optimizer states, which
move twice. What a class takes is counted by lowering the step and reading its planned peaks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gs_compile.errors import MemoryBudgetError
from gs_compile.machine import format_bytes
from gs_compile.placement.placement import Placement
from gs_compile.program.ir import Program

CLASSES = ("parameter", "checkpoint", "optimizer")  # in the order in which they are given host memory


def fit(
    make: Callable[[Mapping[str, float]], Placement],
    lower: Callable[[Placement], Program],
    given: Mapping[str, float],
    host_nbytes: int,
    *,
    classes: Sequence[str] = CLASSES,
) -> dict[str, float]:
    """The ratios that keep the most in host memory, `classes` served in order; those in `given` are kept as they are.

    Raises `MemoryBudgetError` where not even the least fits; it says what is needed.
    """
    ratios = {name: given.get(name, 0.0) for name in classes}
    needed = host_needed(lower(make(ratios)))
    if needed > host_nbytes:
        raise MemoryBudgetError(too_small(host_nbytes, needed, ratios))
    for name in classes:
        if name not in given:
            ratios[name] = _most(partial(_needed, make, lower, ratios, name), host_nbytes)
    return ratios


def lessened(
    ratios: Mapping[str, float], given: Mapping[str, float], host_nbytes: int, needed: int
) -> dict[str, float]:
    """A 64th less of the class that was served last and still has some; raises `MemoryBudgetError` if there is none."""
    for name in reversed(list(ratios)):
        if name not in given and ratios[name] > 0:
            return {**ratios, name: max(0.0, ratios[name] - 1 / 64)}
    raise MemoryBudgetError(too_small(host_nbytes, needed, ratios))


def peak(program: Program, tier: str) -> int:
    """The planned peak of a tier, in bytes."""
    return dict(program.peaks).get(tier, 0)


def host_needed(program: Program) -> int:
    """Bytes of host memory that a run of `program` has to be given."""
    return peak(program, "host")


def too_small(host_nbytes: int, needed: int, ratios: Mapping[str, float]) -> str:
    """That a budget is less than a step needs with the least there is."""
    words = ", ".join(f"{name} {ratio:g}" for name, ratio in ratios.items())
    return (
        f"host_memory is {format_bytes(host_nbytes)}; this step needs {format_bytes(needed)} ({needed} bytes) of it at "
        f"least, with ratios {words}: give it more, lower ratios, a lower alpha, or a smaller micro_batch_size"
    )


def _needed(
    make: Callable[[Mapping[str, float]], Placement],
    lower: Callable[[Placement], Program],
    ratios: Mapping[str, float],
    name: str,
    ratio: float,
) -> int:
    """Bytes of host memory at one ratio of a class."""
    return host_needed(lower(make({**ratios, name: ratio})))


def _most(needed: Callable[[float], int], host_nbytes: int) -> float:
    """The largest ratio of one class that fits, to a 64th; what is needed grows nearly linearly with it."""
    if needed(1.0) <= host_nbytes:
        return 1.0
    low, high = 0, 64
    least, most = needed(0.0), needed(1.0)
    while high - low > 1:
        guess = low + int((high - low) * (host_nbytes - least) / max(most - least, 1))
        at = min(max(guess, low + 1), high - 1)
        needs = needed(at / 64)
        if needs <= host_nbytes:
            low, least = at, needs
        else:
            high, most = at, needs
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
