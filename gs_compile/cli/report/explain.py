"""explain: reports of a plan: where data is stored, what limits the step, other plans; and how the step runs.

`report` and `step_report` are for people, `as_dict` and `step_dict` for programs. The paragraph in a run's log is
`planner.summary.paragraph`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from textwrap import indent
from typing import Any

from gs_compile.machine import format_bytes
from gs_compile.passes.baselines.registry import SCHEDULES
from gs_compile.planner import variants
from gs_compile.planner.step_plan import StepPlan, nested
from gs_compile.planner.summary import RATIO_OF, rate_text, seconds_text, settings, table, throughput
from gs_compile.program.ir import LANES, TIERS, WORDS

FIELDS = "schedule ranks num_micro_batches alpha ratios device_ratios seconds bound_seconds tokens_per_second".split()
FIELDS += "flops_per_second binding notes wear masters saved".split()
HISTORY = ("num_micro_batches", "seconds", "tokens_per_second")
DIGITS = 6  # significant digits in JSON: further ones differ between machines


def report(plan: StepPlan) -> str:
    """All of a plan, as text and tables."""
    where = f" on each of {plan.ranks} ranks" if plan.ranks > 1 else ""
    sections = {
        f"Where data is stored{where}:": _homes(plan),
        f"What each lane does in a step{where}:": _lanes(plan),
        "What would make it faster:": "\n".join(plan.binding),
        "Notes:": "\n".join(plan.notes),
        "Other settings, by the linear program:": _alternatives(plan) if plan.alternatives else "",
    }
    return "\n\n".join([headline(plan), *_titled(sections), f"SSD wear: {plan.wear}"])


def as_dict(plan: StepPlan) -> dict[str, Any]:
    """The plan for JSON: seconds, bytes, fractions; None: no bound."""
    workload = plan.workload
    found = {
        "model": workload.name,
        "machine": plan.profile.name,
        "sequence": workload.sequence,
        "micro_batch_size": workload.micro_batch_size,
        "batch_size": plan.ranks * plan.num_micro_batches * workload.micro_batch_size,
        **{name: getattr(plan, name) for name in FIELDS},
        "homes": nested(plan.homes),
        "peaks": {tier: plan.peaks[tier] for tier in TIERS if tier in plan.peaks},
        "budgets": {tier: getattr(plan.budgets, f"{tier}_nbytes") for tier in TIERS},
        "lanes": {lane: {"seconds": busy, "share": share} for lane, (busy, share) in plan.lanes.items()},
        "bubbles": plan.simulation.bubbles,
        "traffic": nested(plan.traffic),
        "alternatives": [vars(row) for row in plan.alternatives],
        "history": [dict(zip(HISTORY, row, strict=True)) for row in plan.history],
    }
    text = json.dumps(found, default=dict)
    rounded: dict[str, Any] = json.loads(text, parse_float=_rounded, parse_constant=lambda _: None)
    return rounded


def step_report(plan: StepPlan, files: Mapping[str, Path]) -> str:
    """How the step runs: its lanes, the waits of the computation, the critical path, memory, and the files written."""
    spec, peaks, room = SCHEDULES[plan.schedule], plan.simulation.peaks.items(), plan.simulation.room
    most = {tier: format_bytes(nbytes) for tier, nbytes in room.items()}
    memory = [(tier, format_bytes(nbytes), most.get(tier, "no bound")) for tier, nbytes in peaks]
    decided = variants.table(plan.placement, plan.problem.builder)
    sections = {
        "What each lane does in a step:": _lanes(plan),
        "What the computation waits for:": _times(plan, plan.simulation.bubbles) or "nothing",
        "The critical path, by lane:": _times(plan, _critical(plan)),
        "Memory at its peak:": table(("", "simulated", "at most"), memory, right=("simulated", "at most")),
        spec.heading: "\n".join(filter(None, [decided, *plan.notes])) if spec.heading else "",
    }
    drawn = "\n".join(f"{what}: {path}" for what, path in files.items())
    return "\n\n".join(filter(None, [headline(plan), *_titled(sections), drawn]))


def step_dict(plan: StepPlan, files: Mapping[str, Path]) -> dict[str, Any]:
    """`as_dict` with the results of the simulation. (The operations, which are many, are in the trace.)"""
    simulated: dict[str, Any] = {"peaks": plan.simulation.peaks, "room": plan.simulation.room}
    simulated["critical_path"] = _critical(plan)
    if SCHEDULES[plan.schedule].fills_memory:
        simulated |= variants.as_dict(plan.placement, plan.problem.builder)
    return as_dict(plan) | {"simulated": simulated, "files": {what: str(path) for what, path in files.items()}}


def headline(plan: StepPlan) -> str:
    """The model, the machine and the settings of a step, and how fast it is."""
    formula = "3 x the FLOPs of a forward, nothing for what is recomputed, over the seconds of a step"
    simulated, bound = seconds_text(plan.seconds), seconds_text(plan.bound_seconds)
    return (
        f"{plan.workload.name} on {plan.profile.name}\n"
        f"{settings(plan)}\n"
        f"a step takes {simulated} in simulation, {bound} by the linear program\n"
        f"{throughput(plan)} ({formula})"
    )


def _homes(plan: StepPlan) -> str:
    def row(name: str, nbytes: Mapping[str, int], share: str = "") -> tuple[str, ...]:
        return (name, *(format_bytes(nbytes[tier]) if nbytes.get(tier) else "-" for tier in shown), share)

    shown = plan.profile.tiers
    rows = [row(WORDS[kind], sizes, _share(plan, kind)) for kind, sizes in nested(plan.homes).items()]
    rows.append(row("peak, working buffers too", plan.peaks))
    rows.append(row("may be used", {tier: getattr(plan.budgets, f"{tier}_nbytes") for tier in shown}))
    return table(("", *shown, "in host memory"), rows, right=shown)


def _share(plan: StepPlan, kind: str) -> str:
    ratio = RATIO_OF.get(kind, "")
    words = f"{plan.ratios[ratio]:.0%}" if ratio in plan.ratios else ""
    on_device = plan.device_ratios.get(ratio, 0.0)
    return f"{words}, {on_device:.0%} on the device" if on_device else words


def _lanes(plan: StepPlan) -> str:
    """Seconds of work, and bytes moved, of each lane."""
    moved = nested(plan.traffic)
    rows = []
    for lane in (lane for lane in LANES if lane in plan.lanes):
        seconds, share = plan.lanes[lane]
        kinds = moved.get(lane, {})
        of_it = ", ".join(f"{WORDS.get(kind, kind)} {format_bytes(nbytes)}" for kind, nbytes in kinds.items())
        total = format_bytes(sum(kinds.values())) if kinds else "-"
        rows.append((lane, seconds_text(seconds), f"{share:.0%}", total, of_it))
    return table(("lane", "works", "busy", "moves", "of that"), rows, right=("works", "busy", "moves"))


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


def _alternatives(plan: StepPlan) -> str:
    own = plan.num_micro_batches * plan.workload.tokens / plan.bound_seconds  # tokens a second by the same measure
    rows = []
    for row in plan.alternatives:
        rate = row.tokens_per_second
        rows.append((row.label, seconds_text(row.seconds), rate_text(rate), f"{rate / own - 1:+.1%}"))
    return table(("", "step", "tokens/s", "throughput"), rows, right=("step", "tokens/s", "throughput"))


def _titled(sections: Mapping[str, str]) -> list[str]:
    """Each section that is not empty, indented below its heading."""
    return [f"{heading}\n{indent(text, '  ')}" for heading, text in sections.items() if text]


def _rounded(number: str) -> float:
    return float(f"{float(number):.{DIGITS}g}")
