"""explain: all of a plan: where data is stored, what each lane does, what binds, and the plans beside it.

`report` is for people, `as_dict` for programs; the one paragraph of a run's log is `planner.summary.paragraph`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from textwrap import indent
from typing import TYPE_CHECKING, Any

from gs_compile.machine import format_bytes
from gs_compile.planner.summary import RATIO_OF, TIERS, rate_text, seconds_text, settings, table, throughput, tiers
from gs_compile.program.ir import LANES

if TYPE_CHECKING:
    from gs_compile.planner.step_plan import StepPlan

NAMES = {
    "w": "parameters",
    "s": "optimizer states",
    "x": "checkpoints",
    "dx": "gradients of layer inputs",
    "dw": "gradients",
}
FIELDS = "schedule num_micro_batches alpha ratios device_ratios seconds bound_seconds tokens_per_second".split()
FIELDS += "flops_per_second binding notes wear".split()
HISTORY = ("num_micro_batches", "seconds", "tokens_per_second")
DIGITS = 6  # significant ones in JSON: more would only differ from machine to machine


def report(plan: StepPlan) -> str:
    """All of a plan, as text and tables."""
    sections = {
        "What lives where:": _homes(plan),
        "What each lane does in a step:": lanes_table(plan),
        "What binds:": "\n".join(plan.binding),
        "Notes:": "\n".join(plan.notes),
        "What else there was, by the linear program:": _alternatives(plan) if plan.alternatives else "",
    }
    return "\n\n".join([headline(plan), *titled(sections), f"SSD wear: {plan.wear}"])


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


def lanes_table(plan: StepPlan) -> str:
    """Seconds of work, and bytes moved, of each lane."""
    moved = _nested(plan.traffic)
    rows = []
    for lane in (lane for lane in LANES if lane in plan.lanes):
        seconds, share = plan.lanes[lane]
        kinds = moved.get(lane, {})
        of_it = ", ".join(f"{NAMES.get(kind, kind)} {format_bytes(nbytes)}" for kind, nbytes in kinds.items())
        total = format_bytes(sum(kinds.values())) if kinds else "-"
        rows.append((lane, seconds_text(seconds), f"{share:.0%}", total, of_it))
    return table(("lane", "works", "busy", "moves", "of that"), rows, right=("works", "busy", "moves"))


def titled(sections: Mapping[str, str]) -> list[str]:
    """Each section that says something, indented below its heading."""
    return [f"{heading}\n{indent(text, '  ')}" for heading, text in sections.items() if text]


def as_dict(plan: StepPlan) -> dict[str, Any]:
    """For JSON: seconds, bytes, fractions; None where there is no bound."""
    workload = plan.workload
    found = {
        "model": workload.name,
        "machine": plan.profile.name,
        "sequence": workload.sequence,
        "micro_batch_size": workload.micro_batch_size,
        "batch_size": plan.num_micro_batches * workload.micro_batch_size,
        **{name: getattr(plan, name) for name in FIELDS},
        "homes": _nested(plan.homes),
        "peaks": {tier: plan.peaks[tier] for tier in TIERS if tier in plan.peaks},
        "budgets": {tier: getattr(plan.budgets, f"{tier}_nbytes") for tier in TIERS},
        "lanes": {lane: {"seconds": busy, "share": share} for lane, (busy, share) in plan.lanes.items()},
        "bubbles": plan.simulation.bubbles,
        "traffic": _nested(plan.traffic),
        "alternatives": [vars(row) for row in plan.alternatives],
        "history": [dict(zip(HISTORY, row, strict=True)) for row in plan.history],
    }
    text = json.dumps(found, default=dict)
    rounded: dict[str, Any] = json.loads(text, parse_float=_rounded, parse_constant=lambda _: None)
    return rounded


def _rounded(number: str) -> float:
    return float(f"{float(number):.{DIGITS}g}")


def _homes(plan: StepPlan) -> str:
    def row(name: str, nbytes: Mapping[str, int], share: str = "") -> tuple[str, ...]:
        return (name, *(format_bytes(nbytes[tier]) if nbytes.get(tier) else "-" for tier in shown), share)

    shown = tiers(plan)
    rows = [row(name, sizes, _share(plan, name)) for name, sizes in _nested(plan.homes).items()]
    rows.append(row("peak, working buffers too", plan.peaks))
    rows.append(row("may be used", {tier: getattr(plan.budgets, f"{tier}_nbytes") for tier in shown}))
    return table(("", *shown, "in host memory"), rows, right=shown)


def _share(plan: StepPlan, name: str) -> str:
    ratio = RATIO_OF.get(name, "")
    words = f"{plan.ratios[ratio]:.0%}" if ratio in plan.ratios else ""
    on_device = plan.device_ratios.get(ratio, 0.0)
    return f"{words}, {on_device:.0%} on the device" if on_device else words


def _alternatives(plan: StepPlan) -> str:
    own = plan.num_micro_batches * plan.workload.tokens / plan.bound_seconds  # tokens a second by the same measure
    rows = []
    for row in plan.alternatives:
        rate = row.tokens_per_second
        rows.append((row.label, seconds_text(row.seconds), rate_text(rate), f"{rate / own - 1:+.1%}"))
    return table(("", "step", "tokens/s", "throughput"), rows, right=("step", "tokens/s", "throughput"))


def _nested(nbytes: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """By the first key, then the second."""
    found: dict[str, dict[str, int]] = {}
    for (first, second), size in nbytes.items():
        found.setdefault(first, {})[second] = size
    return found
