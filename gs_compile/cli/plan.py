"""plan: the plan that the command line asks for, and the figures of a machine's profile in units for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from typer import BadParameter

from gs_compile.cli.report.tables import busy
from gs_compile.cli.requests import PlanRequest
from gs_compile.machine import format_bytes
from gs_compile.options import Options
from gs_compile.program.ir import Schedule

if TYPE_CHECKING:
    from gs_compile.planner.measure.profile import Profile
    from gs_compile.planner.step_plan import StepPlan

UNITS = (  # of a field by the end of its name; the first that fits
    ("bytes_per_second", 1e9, "GB/s"),
    ("flops_per_second", 1e12, "TFLOP/s"),
    ("elements_per_second", 1e9, "billion/s"),
    ("_seconds", 1e-6, "µs"),
)


def make_plan(request: PlanRequest, schedule: Schedule = "vertical") -> StepPlan:
    """Ask the planner for what a request describes.

    Raises `BadParameter` for a ratio that is none, and the errors of `planner.plan.plan`.
    """
    ratios = dict(map(_ratio, request.ratios or ()))
    Options.of({"expert": {"ratios": ratios}})  # refuses unknown classes, and parts that are none
    with busy(f"planning {request.model}"):
        from gs_compile.planner.plan import plan

        return plan(**{**request._asdict(), "ratios": ratios or None, "schedule": schedule})


def _ratio(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name.strip(), float(number)
    except ValueError as error:
        raise BadParameter(f"--ratio {text}: not a class and a number, such as parameter=0.5") from error


def profile_rows(profile: Profile) -> Iterator[tuple[str, str, str]]:
    """Name, figure with its unit, and source, of all that a profile holds."""
    for name, value in profile.as_dict().items():
        if name in ("format", "sources"):
            continue
        shown, source = name.removesuffix("_per_second"), profile.sources.get(name, "")
        for key, each in value.items() if isinstance(value, Mapping) else [("", value)]:
            yield f"{shown} {key}".rstrip(), figure(name, each), source


def figure(name: str, value: object) -> str:
    """A value with the unit that the end of its name tells."""
    if not isinstance(value, int | float):
        return str(value)
    if name.endswith("_nbytes"):
        return format_bytes(int(value)) if value else "-"  # none, or unknown
    for end, scale, unit in UNITS:
        if name.endswith(end):
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
