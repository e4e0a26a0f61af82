"""plan: the plan that the command line asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import BadParameter

from gs_compile.cli.report.tables import busy
from gs_compile.options import Options

if TYPE_CHECKING:
    from gs_compile.planner.step_plan import StepPlan


def made(model: str, *, ratios: Sequence[str] | None, storage: Sequence[Path] | None, **settings: Any) -> StepPlan:
    """What `planner.plan` makes of the arguments. Raises `BadParameter` for a ratio that is none, and its errors."""
    given = dict(map(_ratio, ratios or ()))
    Options.of({"expert": {"ratios": given}})  # refuses unknown classes, and parts that are none
    with busy(f"planning {model}"):
        from gs_compile.planner.plan import plan

        return plan(model, ratios=given or None, storage=storage or None, **settings)


def _ratio(text: str) -> tuple[str, float]:
    name, separator, number = text.partition("=")
    try:
        if separator:
            return name.strip(), float(number)
    except ValueError:
        pass
    raise BadParameter(f"--ratio {text}: not a class and a number, such as parameter=0.5")
