"""summary: a plan in one paragraph of plain text, for the log of a run, and rows as aligned lines.

Colours and figures are in `cli.report`, as only the command line shows them: a run loads nothing that prints.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from gs_compile.machine import format_bytes
from gs_compile.planner.request import several
from gs_compile.program.ir import WORDS

if TYPE_CHECKING:
    from gs_compile.planner.step_plan import StepPlan

ON = {"device": "on the device", "host": "in host memory", "ssd": "on SSD"}
RATIO_OF = {"w": "parameter", "s": "optimizer", "x": "checkpoint"}
GAP = "  "  # between columns


def paragraph(plan: StepPlan) -> str:
    """The plan in one paragraph: ratios, seconds of a step, busy lanes, peaks, what would help."""
    shares = _shares(plan.ratios)
    on_device = _shares({ratio: share for ratio, share in plan.device_ratios.items() if share})
    busiest = sorted(plan.lanes.items(), key=lambda lane: -lane[1][1])[:3]
    busy = ", ".join(f"{lane} {share:.0%}" for lane, (_, share) in busiest)
    held = ((tier, nbytes) for tier in plan.profile.tiers if (nbytes := plan.peaks.get(tier)))
    peaks = ", ".join(f"{format_bytes(nbytes)} {ON[tier]}" for tier, nbytes in held)
    sentences = [
        f"Plan of {plan.workload.name} on {plan.profile.name}, {settings(plan)}.",
        f"In host memory: {shares}.",
        f"In device memory: {on_device}." if on_device else "",
        f"A step takes {seconds_text(plan.seconds)}: {throughput(plan)}.",
        f"Busy lanes: {busy}.",
        f"At its peak it holds {peaks}." if peaks else "",
        f"What would make it faster: {'; '.join(plan.binding)}." if plan.binding else "",
        *(f"{note[0].upper()}{note[1:].removesuffix('.')}." for note in plan.notes),
    ]
    return " ".join(filter(None, sentences))


def settings(plan: StepPlan) -> str:
    """``vertical: 32 micro-batches of 2 samples of 2048 tokens on each of 4 ranks, alpha 0.13, split masters``"""
    workload = plan.workload
    samples = "1 sample" if workload.micro_batch_size == 1 else f"{workload.micro_batch_size} samples"
    where = f" on each of {plan.ranks} ranks" if plan.ranks > 1 else ""
    masters = f", {workload.masters} masters" if workload.masters else ""
    saved = f", {plan.saved:.0%} of activations saved" if plan.shares else ""
    pieces = f", layers on {plan.layer_tokens} tokens at a time" if plan.layer_tokens else ""
    return (
        f"{plan.schedule}: {several(plan.num_micro_batches)} of {samples} of {workload.sequence} tokens{where}, "
        f"alpha {plan.alpha:g}{masters}{saved}{pieces}"
    )


def throughput(plan: StepPlan) -> str:
    """``419 tokens/s, 164 TFLOP/s``, of all ranks and of each"""

    def rates(ranks: int) -> str:
        tokens, flops = plan.tokens_per_second / ranks, plan.flops_per_second / ranks
        return f"{rate_text(tokens)} tokens/s, {rate_text(flops / 1e12)} TFLOP/s"

    return rates(1) + (f"; {rates(plan.ranks)} of each rank" if plan.ranks > 1 else "")


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[str] = ()) -> str:
    """Rows as lines of aligned columns; the columns called `right` hold numbers, which end together."""
    lines = [tuple(headings), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    ends = [heading in right for heading in headings]
    return "\n".join(
        GAP.join(
            cell.rjust(width) if end else cell.ljust(width) for cell, width, end in zip(line, widths, ends, strict=True)
        ).rstrip()
        for line in lines
    )


def seconds_text(seconds: float) -> str:
    """Seconds with three digits, or as a whole number if that has more."""
    return f"{seconds:,.0f} s" if seconds >= 1000 else f"{seconds:.3g} s"


def rate_text(rate: float) -> str:
    """A rate, such as tokens a second, with three digits, or as a whole number if that has more."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _shares(ratios: Mapping[str, float]) -> str:
    return ", ".join(f"{ratios[ratio]:.0%} of {WORDS[kind]}" for kind, ratio in RATIO_OF.items() if ratio in ratios)


def on_tokens(size: int, on_all: Collection[str]) -> str:
    """A unit in pieces, in words."""
    return f"on {size} tokens at a time" + (f", but for {', '.join(on_all)}" if on_all else "")
