"""simulate: what ``greedysnake simulate`` shows of a plan's step, and the files it draws it into."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gs_compile.cli.report import draw, explain
from gs_compile.cli.report.timeline import timeline_html
from gs_compile.errors import MemoryBudgetError, NoFitError
from gs_compile.machine import format_bytes
from gs_compile.passes.baselines.registry import SCHEDULES
from gs_compile.planner import lifetimes, summary
from gs_compile.planner.summary import table

if TYPE_CHECKING:
    from gs_compile.planner.step_plan import StepPlan
    from gs_compile.program.ir import Schedule

COMPARED: tuple[Schedule, ...] = ("vertical", "horizontal")  # that figures show side by side


def report(plan: StepPlan, files: Mapping[str, Path]) -> str:
    """How the step runs: its lanes, what the computation waits for, the critical path, memory, and what was drawn."""
    spec, peaks = SCHEDULES[plan.schedule], plan.simulation.peaks.items()
    memory = [(tier, format_bytes(nbytes), format_bytes(plan.peaks.get(tier, 0))) for tier, nbytes in peaks]
    sections = {
        "What each lane does in a step:": explain.lanes_table(plan),
        "What the computation waits for:": _times(plan, plan.simulation.bubbles) or "nothing",
        "The critical path, by lane:": _times(plan, _critical(plan)),
        "Memory at its peak:": table(("", "simulated", "planned"), memory, right=("simulated", "planned")),
        "What is inactive between two uses:": _inactive(plan) if spec.fills_memory else "",
        "What to know:": "\n".join(plan.notes) if spec.halves_blocks else "",
    }
    drawn = "\n".join(f"{what}: {path}" for what, path in files.items())
    return "\n\n".join(filter(None, [explain.headline(plan), *explain.titled(sections), drawn]))


def as_dict(plan: StepPlan, files: Mapping[str, Path]) -> dict[str, Any]:
    """The plan's, with what the simulation adds; its operations, which are many, are in the trace."""
    simulated: dict[str, Any] = {"peaks": plan.simulation.peaks, "critical_path": _critical(plan)}
    if SCHEDULES[plan.schedule].fills_memory:
        simulated["periods"] = lifetimes.as_dicts(lifetimes.periods(plan.placement, plan.workload.shape))
    return explain.as_dict(plan) | {"simulated": simulated, "files": {what: str(path) for what, path in files.items()}}


def save(plan: StepPlan, *, trace: Path | None, page: Path | None, figures: Path | None) -> dict[str, Path]:
    """Write what is asked for: the paths by what they are."""
    files: dict[str, Path] = {}
    if trace is not None:
        plan.simulation.trace().save(trace)
        files["trace"] = trace
    if page is not None:
        texts = {"The plan": explain.report(plan), "The step": report(plan, {}), "The program": str(plan.program)}
        note = summary.paragraph(plan)
        page.write_text(timeline_html(plan.simulation, title=_title(plan), note=note, texts=texts))
        files["timeline"] = page
    return files if figures is None else files | _figures(plan, figures)


def _figures(plan: StepPlan, folder: Path) -> dict[str, Path]:
    """The lanes of this step; of whole layers also throughput over the batch size and bytes moved, in both orders."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.svg" for name in ("throughput", "traffic", "lanes")}
    title, number = _title(plan), plan.num_micro_batches
    draw.lanes(plan.simulation, paths["lanes"], title=title)
    if SCHEDULES[plan.schedule].halves_blocks:  # both orders run layers, and its workload has halves
        return {"lanes": paths["lanes"]}
    sizes = sorted({2**power for power in range(number.bit_length())} | {number})
    planned = {schedule: list(_planned(plan, schedule, sizes)) for schedule in COMPARED}
    plans: dict[str, list[StepPlan]] = {schedule: found for schedule, found in planned.items() if found}
    points = {schedule: [draw.Point.of(each) for each in found] for schedule, found in plans.items()}
    roofline = draw.Roofline.of(plan.workload, plan.profile)
    draw.throughput(points, paths["throughput"], roofline=roofline, title=title)
    moved = {schedule: found[-1].traffic for schedule, found in plans.items()}
    draw.traffic_bars(moved, paths["traffic"], title=f"{title}, {number} micro-batches")
    return paths


def _planned(plan: StepPlan, schedule: Schedule, sizes: Iterable[int]) -> Iterator[StepPlan]:
    """Plans of the same model within the same budgets, for numbers of micro-batches, as far as they fit."""
    from gs_compile.planner.plan import plan as make

    for number in sizes:
        try:
            yield make(
                plan.workload,
                machine=plan.profile,
                micro_batch_size=plan.workload.micro_batch_size,
                num_micro_batches=number,
                host_memory=plan.budgets.host_nbytes,
                device_memory=plan.budgets.device_nbytes or None,
                schedule=schedule,
            )
        except (NoFitError, MemoryBudgetError):
            return


def _title(plan: StepPlan) -> str:
    """In few words: a machine's name goes on to say what is in it."""
    return f"{plan.workload.name} on {re.split('[:,(]', plan.profile.name)[0].strip()}"


def _times(plan: StepPlan, seconds: Mapping[str, float]) -> str:
    """Seconds by name, the longest first, each also as a share of the step."""
    longest_first = sorted(seconds.items(), key=lambda entry: -entry[1])
    rows = [(name, f"{each:.3g} s", f"{each / plan.seconds:.1%}") for name, each in longest_first if each > 0]
    return table(("", "seconds", "of the step"), rows, right=("seconds", "of the step")) if rows else ""


def _critical(plan: StepPlan) -> dict[str, float]:
    """Seconds of the critical path, by lane."""
    found: defaultdict[str, float] = defaultdict(float)
    for span in plan.simulation.critical_path:
        found[span.lane] += span.stop_seconds - span.start_seconds
    return found


def _inactive(plan: StepPlan) -> str:
    """The periods that the schedule `lifetime` has decided on, and its notes."""
    rows = [lifetimes.table(plan.placement, plan.workload.shape)] if plan.placement.room else []
    return "\n".join([*rows, *plan.notes])
