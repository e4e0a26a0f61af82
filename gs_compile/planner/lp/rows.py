"""constraints: the rows of the placement's linear program, which `place` states in symbols and solves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gs_compile.placement.cut import DEVICE_CLASSES
from gs_compile.planner.lp.coefficients import Formulas
from gs_compile.planner.lp.counting import PHASES, RATIOS, TIMED, Array

PAIRS = (
    ("ssd_read", "ssd_write"),
    ("h2d", "d2h"),
    ("cpu", "compute"),
    ("compute", "ssd_read"),
    ("compute", "ssd_write"),
)


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """What a run may use. Without wear_bytes_per_second SSDs are written as fast as they take it."""

    host_nbytes: int
    device_nbytes: int = 0
    ssd_nbytes: int
    wear_bytes_per_second: float | None = None

    def of(self, tier: str) -> int:
        """Bytes of a tier."""
        nbytes: int = getattr(self, f"{tier}_nbytes")
        return max(nbytes, 1)


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """What is not for the planner to choose.

    alpha: the late part of updates. clip: all updates are late, or early ones are speculative.
    ratios: of "parameter", "checkpoint", "optimizer", and those in device memory, "device_parameter" and
        "device_checkpoint": none where only the one in host memory is given, as what is left is on SSD then.
    device: whether spare memory of a device that has its own may be a home too.
    """

    alpha: float | None = None
    ratios: Mapping[str, float] = field(default_factory=dict)
    clip: bool = False
    speculative: bool = False
    device: bool = False


def contradiction(fixed: Fixed, *, separate: bool, may_reside: bool, prefix: str = "the ratio ") -> str | None:
    """In a sentence, why ratios contradict each other or what there is; `prefix` makes a ratio's name the user's."""
    for name in DEVICE_CLASSES:
        ratio = fixed.ratios.get(name)
        if ratio and not separate:
            host = name.removeprefix("device_")
            return (
                f"{prefix}{name} is {ratio:g}, but this device has no memory of its own: it reads the host's, so give "
                f"{prefix.removeprefix('the ratio ')}{host}"
            )
    if (ratio := fixed.ratios.get("device_parameter")) and not may_reside:
        return (
            f"{prefix}device_parameter is {ratio:g}, but parameters that are updated in the type they are computed in "
            'go to host memory for that: leave it out, or choose precision="bf16"'
        )
    for name in ("parameter", "checkpoint"):
        host_part, device_part = (fixed.ratios.get(each, 0.0) for each in (name, f"device_{name}"))
        if host_part + device_part > 1:
            return (
                f"the ratios {name} {host_part:g} and device_{name} {device_part:g} are more than there is: lower one"
            )
    return None


@dataclass(frozen=True)
class Row:
    """``ratios @ coefficients[1:] + coefficients[0] <= t[phase]`` or, without a phase, ``<= 1``.

    lanes: the part of it that each lane's time is, in the same form; tier: whose budget it keeps.
    """

    coefficients: Array
    phase: str = ""
    lanes: Mapping[str, Array] = field(default_factory=dict)
    tier: str = ""
    per_second: float = 0.0  # of t_f + t_b, that the right side has on top


@dataclass(frozen=True)
class System:
    """The rows of one alpha. `lower` and `upper` bound the ratios; `traffic` is SSD bytes as a part of the most."""

    alpha: float
    rows: tuple[Row, ...]
    lanes: Mapping[tuple[str, str], Array]
    traffic: Array
    unit_seconds: float
    lower: Array
    upper: Array
    classes: tuple[str, ...]  # that have a ratio in host memory

    def least(self) -> Array:
        """The point that takes the least host and device memory: all that may be on SSD is there."""
        return np.array([1.0, *self.lower])

    def excess(self, point: Array) -> dict[str, float]:
        """How much of each tier a point takes, as a part of its budget, beyond 1."""
        found: dict[str, float] = {}
        for row in self.rows:
            if row.tier:
                found[row.tier] = max(found.get(row.tier, -1.0), float(row.coefficients @ point) - 1.0)
        return found

    def times(self, point: Array) -> tuple[float, float]:
        """t_f and t_b of a point; what the wear budget asks to wait is waited in the backward."""
        found = dict.fromkeys(PHASES, 0.0)
        for row in self.rows:
            if row.phase:
                found[row.phase] = max(found[row.phase], float(row.coefficients @ point))
        forward, backward = found.values()
        for row in self.rows:
            if row.per_second:
                backward = max(backward, float(row.coefficients @ point) / row.per_second - forward)
        return forward, backward


def build(
    formulas: Formulas, num_micro_batches: int, alphas: Sequence[float], budgets: Budgets, fixed: Fixed
) -> list[System]:
    """The linear program of each alpha."""
    lower, upper = _bounds(fixed, separate=formulas.separate, may_reside=formulas.may_reside)
    speeds = formulas.profile.speeds()
    systems = []
    for alpha in alphas:
        numbers = formulas.of(alpha, num_micro_batches)
        rows = [row for phase in PHASES for row in _phase(phase, numbers.seconds, speeds)]
        rows += _homes()
        for tier, alive in numbers.alive.items():
            rows += [Row(row / budgets.of(tier), tier=tier) for row in alive]
        if budgets.wear_bytes_per_second is not None:
            rows.append(_wear(numbers.written, budgets.wear_bytes_per_second))
        traffic = numbers.ssd / max(float(numbers.ssd[0]), 1.0)
        unit = max(sum(float(array[0]) for array in numbers.seconds.values()), 1e-30)
        systems.append(System(alpha, tuple(rows), numbers.seconds, traffic, unit, lower, upper, formulas.classes))
    return systems


def _phase(phase: str, lanes: Mapping[tuple[str, str], Array], speeds: Mapping[tuple[str, str], float]) -> list[Row]:
    rows = [Row(lanes[phase, lane], phase, {lane: lanes[phase, lane]}) for lane in TIMED]
    for first, second in PAIRS:
        a, b = speeds.get((first, second), 1.0), speeds.get((second, first), 1.0)
        if min(a, b) < 1.0:
            rows += _pair(phase, (first, lanes[phase, first], a), (second, lanes[phase, second], b))
    return [row for row in rows if row.coefficients.any()]


def _pair(phase: str, first: tuple[str, Array, float], second: tuple[str, Array, float]) -> list[Row]:
    """What two lanes that disturb each other take together."""
    (one, x, a), (two, y, b) = first, second
    if a + b < 1:
        return [Row(x + y, phase, {one: x, two: y})]
    parts = [{one: x * (1 - b) / a, two: y}, {one: x, two: y * (1 - a) / b}]
    return [Row(part[one] + part[two], phase, part) for part in parts]


def _homes() -> list[Row]:
    """What is in host and device memory is not more than there is; see `RATIOS` for the order."""
    return [Row(np.array([0.0, 1, 0, 0, 1, 0, 0])), Row(np.array([0.0, 0, 1, 0, 0, 1, 0]))]


def _wear(written: Array, bytes_per_second: float) -> Row:
    return Row(written, per_second=bytes_per_second)


def _bounds(fixed: Fixed, *, separate: bool, may_reside: bool) -> tuple[Array, Array]:
    """Of the ratios, in the order of `RATIOS`."""
    lower, upper = np.zeros(len(RATIOS)), np.ones(len(RATIOS))
    if not (separate and fixed.device):
        upper[[RATIOS.index(name) for name in DEVICE_CLASSES]] = 0.0
    if not may_reside:
        upper[RATIOS.index("device_parameter")] = 0.0
    for name, ratio in fixed.ratios.items():
        if f"device_{name}" in RATIOS and f"device_{name}" not in fixed.ratios:
            upper[RATIOS.index(f"device_{name}")] = 0.0
        lower[RATIOS.index(name)] = upper[RATIOS.index(name)] = ratio
    return lower, upper
