"""explain: a plan in words: what lives where, what each lane does, what binds, and what else there was.

`report` is for people who ask, `paragraph` for the log of a run, `as_dict` for programs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gs_compile.cli.report.tables import text
from gs_compile.machine import format_bytes
from gs_compile.program.ir import LANES

if TYPE_CHECKING:
    from gs_compile.planner.step_plan import StepPlan

TIERS = ("device", "host", "ssd")
ON = {"device": "on the device", "host": "in host memory", "ssd": "on SSD"}
RATIO_OF = {"parameters": "parameter", "states": "optimizer", "checkpoints": "checkpoint"}
KINDS = {
    "w": "parameters",
    "s": "optimizer states",
    "x": "checkpoints",
    "dx": "gradients of layer inputs",
    "dw": "gradients",
}
DIGITS = 6  # significant ones in JSON: more would only differ from machine to machine


def report(plan: StepPlan) -> str:
    """All of a plan, as text and tables."""
    parts = [
        headline(plan),
        f"What lives where:\n{indented(_homes(plan))}",
        f"What each lane does in a step:\n{indented(lanes_table(plan))}",
        _list("What binds:", plan.binding),
        _list("Notes:", plan.notes),
        f"What else there was, by the linear program:\n{indented(_alternatives(plan))}" if plan.alternatives else "",
        f"SSD wear: {plan.wear}",
    ]
    return "\n\n".join(filter(None, parts))


def headline(plan: StepPlan) -> str:
    """What is planned, and how fast it is."""
    formula = "3 x the FLOPs of a forward, nothing for what is recomputed, over the seconds of a step"
    return (
        f"{plan.workload.name} on {plan.profile.name}\n"
        f"{_settings(plan)}\n"
        f"a step takes {_seconds(plan.seconds)} in simulation, {_seconds(plan.bound_seconds)} by the linear program\n"
        f"{_throughput(plan)} ({formula})"
    )


def paragraph(plan: StepPlan) -> str:
    """The plan in one paragraph."""
    shares = ", ".join(
        f"{plan.ratios[ratio]:.0%} of {name}" for name, ratio in RATIO_OF.items() if ratio in plan.ratios
    )
    resident = ", ".join(
        f"{share:.0%} of {name}" for name, ratio in RATIO_OF.items() if (share := plan.device_ratios.get(ratio, 0.0))
    )
    busiest = sorted(plan.lanes.items(), key=lambda lane: -lane[1][1])[:3]
    busy = ", ".join(f"{lane} {share:.0%}" for lane, (_, share) in busiest)
    peaks = ", ".join(f"{format_bytes(plan.peaks[tier])} {ON[tier]}" for tier in _tiers(plan) if plan.peaks.get(tier))
    sentences = [
        f"Plan of {plan.workload.name} on {plan.profile.name}, {_settings(plan)}.",
        f"In host memory: {shares}.",
        f"In device memory: {resident}." if resident else "",
        f"A step takes {_seconds(plan.seconds)}: {_throughput(plan)}.",
        f"Busy lanes: {busy}.",
        f"At its peak it holds {peaks}." if peaks else "",
        f"What binds: {'; '.join(plan.binding)}." if plan.binding else "",
        *plan.notes,
    ]
    return " ".join(filter(None, sentences))


def as_dict(plan: StepPlan) -> dict[str, Any]:
    """For JSON: seconds, bytes, fractions; None where there is no bound."""
    workload = plan.workload
    found: dict[str, Any] = _rounded(
        {
            "model": workload.name,
            "machine": plan.profile.name,
            "schedule": plan.schedule,
            "sequence": workload.sequence,
            "micro_batch_size": workload.micro_batch_size,
            "num_micro_batches": plan.num_micro_batches,
            "batch_size": plan.num_micro_batches * workload.micro_batch_size,
            "alpha": plan.alpha,
            "ratios": dict(plan.ratios),
            "device_ratios": dict(plan.device_ratios),
            "seconds": plan.seconds,
            "bound_seconds": plan.bound_seconds,
            "tokens_per_second": plan.tokens_per_second,
            "flops_per_second": plan.flops_per_second,
            "homes": _nested(plan.homes),
            "peaks": {tier: plan.peaks[tier] for tier in TIERS if tier in plan.peaks},
            "budgets": {tier: getattr(plan.budgets, f"{tier}_nbytes") for tier in TIERS},
            "lanes": {lane: {"seconds": busy, "share": share} for lane, (busy, share) in plan.lanes.items()},
            "bubbles": dict(plan.simulation.bubbles),
            "traffic": _nested(plan.traffic),
            "binding": list(plan.binding),
            "notes": list(plan.notes),
            "alternatives": [
                {"label": row.label, "seconds": row.seconds, "tokens_per_second": row.tokens_per_second}
                for row in plan.alternatives
            ],
            "wear": plan.wear,
            "history": [
                {"num_micro_batches": number, "seconds": seconds, "tokens_per_second": rate}
                for number, seconds, rate in plan.history
            ],
        }
    )
    return found


# Sentences ------------------------------------------------------------------------------------------------------------


def _settings(plan: StepPlan) -> str:
    workload = plan.workload
    samples = "1 sample" if workload.micro_batch_size == 1 else f"{workload.micro_batch_size} samples"
    number = "1 micro-batch" if plan.num_micro_batches == 1 else f"{plan.num_micro_batches} micro-batches"
    return f"{plan.schedule}: {number} of {samples} of {workload.sequence} tokens, alpha {plan.alpha:g}"


def _throughput(plan: StepPlan) -> str:
    return f"{_rate(plan.tokens_per_second)} tokens/s, {plan.flops_per_second / 1e12:.3g} TFLOP/s"


def _list(heading: str, sentences: tuple[str, ...]) -> str:
    return "\n".join([heading, *(f"  {sentence}" for sentence in sentences)]) if sentences else ""


# Tables ---------------------------------------------------------------------------------------------------------------


def _homes(plan: StepPlan) -> str:
    def row(name: str, nbytes: Mapping[str, int], share: str = "") -> tuple[str, ...]:
        return (name, *(format_bytes(nbytes[tier]) if nbytes.get(tier) else "-" for tier in tiers), share)

    tiers = _tiers(plan)
    rows = [row(name, sizes, _share(plan, name)) for name, sizes in _nested(plan.homes).items()]
    rows.append(row("peak, working buffers too", plan.peaks))
    rows.append(row("may be used", {tier: getattr(plan.budgets, f"{tier}_nbytes") for tier in tiers}))
    return text(("", *tiers, "in host memory"), rows, right=tiers)


def _share(plan: StepPlan, name: str) -> str:
    ratio = RATIO_OF.get(name, "")
    words = f"{plan.ratios[ratio]:.0%}" if ratio in plan.ratios else ""
    on_device = plan.device_ratios.get(ratio, 0.0)
    return f"{words}, {on_device:.0%} on the device" if on_device else words


def lanes_table(plan: StepPlan) -> str:
    """Seconds of work, and bytes moved, of each lane."""
    moved = _nested(plan.traffic)
    rows = []
    for lane in (lane for lane in LANES if lane in plan.lanes):
        seconds, share = plan.lanes[lane]
        kinds = moved.get(lane, {})
        of_it = ", ".join(f"{KINDS.get(kind, kind)} {format_bytes(nbytes)}" for kind, nbytes in kinds.items())
        total = format_bytes(sum(kinds.values())) if kinds else "-"
        rows.append((lane, _seconds(seconds), f"{share:.0%}", total, of_it))
    return text(("lane", "works", "busy", "moves", "of that"), rows, right=("works", "busy", "moves"))


def _alternatives(plan: StepPlan) -> str:
    def against(tokens_per_second: float) -> str:
        own = plan.num_micro_batches * plan.workload.tokens / plan.bound_seconds  # by the same measure
        return f"{tokens_per_second / own - 1:+.1%}"

    rows = [
        (row.label, _seconds(row.seconds), _rate(row.tokens_per_second), against(row.tokens_per_second))
        for row in plan.alternatives
    ]
    return text(("", "step", "tokens/s", "throughput"), rows, right=("step", "tokens/s", "throughput"))


def _tiers(plan: StepPlan) -> tuple[str, ...]:
    """Where a step's data can be: without a device of its own, the host is both."""
    return TIERS if plan.profile.separate else TIERS[1:]


def indented(lines: str) -> str:
    return "\n".join(f"  {line}" for line in lines.splitlines())


# Numbers --------------------------------------------------------------------------------------------------------------


def _nested(nbytes: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    """By the first key, then the second."""
    found: dict[str, dict[str, int]] = {}
    for (first, second), size in nbytes.items():
        found.setdefault(first, {})[second] = size
    return found


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 1000 else f"{seconds:.3g} s"


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:.3g}"


def _rounded(value: Any) -> Any:
    """With no more digits than mean something."""
    match value:
        case dict():
            return {key: _rounded(entry) for key, entry in value.items()}
        case list():
            return [_rounded(entry) for entry in value]
        case float():
            return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
        case _:
            return value
