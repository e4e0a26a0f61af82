"""fit: what of host memory a step has to be given, from its program's planned peaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gs_compile.machine import format_bytes
from gs_compile.program.ir import Program

CLASSES = ("parameter", "checkpoint", "optimizer")  # of data that have a ratio in host memory


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


def most_alpha(fits: Callable[[float], bool]) -> float | None:
    """The largest alpha of 0.00, 0.01 ... 1.00 for which `fits` holds; None if it holds for none."""
    if not fits(0.0):
        return None
    low, high = 0, 101
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle / 100) else (low, middle)
    return low / 100
