"""plan: plans and profiles for the command line, and the progress that is shown while they are made."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from gs_compile.machine import format_bytes
from gs_compile.planner.summary import table

if TYPE_CHECKING:
    from gs_compile.planner.measure.profile import Profile
    from gs_compile.planner.request import Request
    from gs_compile.planner.step_plan import StepPlan

QUIET_SECONDS = 1.0  # what takes less needs no progress
UNITS = (  # of a field, by the end of its name; the first one that fits counts
    ("bytes_per_second", 1e9, "GB/s"),
    ("flops_per_second", 1e12, "TFLOP/s"),
    ("elements_per_second", 1e9, "billion/s"),
    ("_seconds", 1e-6, "µs"),
)


def make_plan(model: str, request: Request) -> StepPlan:
    """The plan of a request; raises the errors of `planner.plan.plan`."""
    with busy(f"planning {model}"):  # also while the planner is imported
        from gs_compile.planner.plan import planner_of

        return planner_of(model, request, keeps=True).plan()


@contextmanager
def busy(words: str) -> Iterator[None]:
    """On a terminal, show what takes longer than a second, and what the planner logs meanwhile."""
    status = Console(stderr=True).status(Text(f"{words} ..."))

    class Shown(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            status.update(Text(f"{words}: {record.getMessage()}"))

    planner, shown, timer = logging.getLogger("gs_compile.planner"), Shown(), Timer(QUIET_SECONDS, status.start)
    level = planner.level
    planner.addHandler(shown)
    planner.setLevel(logging.INFO)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()
        planner.removeHandler(shown)
        planner.setLevel(level)


# A profile for people -------------------------------------------------------------------------------------------------


def profile_table(profile: Profile) -> str:
    """The name, the figure with its unit, and the source of each entry of a profile."""
    rows = []
    for name, value in profile.as_dict().items():
        if name not in ("format", "sources"):
            shown, source = name.removesuffix("_per_second"), profile.sources.get(name, "")
            entries = value if isinstance(value, Mapping) else {"": value}
            rows += [(f"{shown} {key}".rstrip(), figure(name, each), source) for key, each in entries.items()]
    return table(("", "", "source"), rows)


def figure(name: str, value: object) -> str:
    """A value with its unit, by the end of its name."""
    if not isinstance(value, int | float):
        return str(value)
    if name.endswith("_nbytes"):
        return format_bytes(int(value)) if value else "-"  # none, or unknown
    for end, scale, unit in UNITS:
        if name.endswith(end):
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
