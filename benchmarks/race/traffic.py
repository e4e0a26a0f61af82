"""traffic: what a step moves, by kind of data and schedule: counted on the step programs, nothing runs.

GPT-2 medium in bf16 on a device with memory of its own, everything on SSD: what is between host and device, and what
between host and SSD. The runtime counts the same bytes (`tests/end_to_end/test_tiers_traffic.py` holds it to that).
`lifetime` leaves on the device what there is room for, so it is given 1 GiB of it.

    python -m benchmarks.race.traffic
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import transformers

from benchmarks.race.protocol import PRESETS
from gs_compile.cli.report.draw import COLOURS, INK
from gs_compile.errors import PlanError
from gs_compile.planner.plan import plan
from gs_compile.program.ir import WORDS, Schedule

PRESET, MICRO_BATCHES, SEQUENCE = "350m", 8, 1024
MACHINE = "rtx4090"  # its link and drives do not matter here: bytes are counted
DEVICE_MEMORY = {"lifetime": "1GiB"}  # of all of it this one would make use, and leave the model there
LANES = {"h2d": "to the device", "d2h": "from the device", "ssd_read": "from SSD", "ssd_write": "to SSD"}
GIB = 2**30


def counted() -> dict[str, Mapping[tuple[str, str], int]]:
    """Bytes by lane and kind, for every schedule that the planner knows."""
    case = PRESETS[PRESET]
    config = transformers.GPT2Config(
        n_layer=case.layers, n_embd=case.hidden, n_head=case.heads, n_positions=SEQUENCE, use_cache=False
    )
    found = {}
    for schedule in get_args(Schedule):
        try:
            planned = plan(
                config,
                machine=MACHINE,
                sequence=SEQUENCE,
                micro_batch_size=1,
                num_micro_batches=MICRO_BATCHES,
                ratios=dict.fromkeys(("parameter", "checkpoint", "optimizer"), 0.0),
                alpha=0.0,
                device_memory=DEVICE_MEMORY.get(schedule),
                schedule=schedule,
            )
        except PlanError as error:
            print(f"{schedule}: {error}")
            continue
        if planned.num_micro_batches * planned.workload.micro_batch_size == MICRO_BATCHES:
            found[schedule] = planned.traffic
    return found


def draw_traffic(drawn: Any) -> None:
    """Bars by lane and schedule, in pieces by kind, side by side for the link and the drives."""
    moved = counted()
    named: set[str] = set()
    for axes, lanes in zip(drawn.subplots(1, 2), (("h2d", "d2h"), ("ssd_read", "ssd_write")), strict=True):
        bars = [(lane, schedule) for lane in lanes for schedule in moved]
        most = max((total(moved[schedule], lane) for lane, schedule in bars), default=0.0) or 1.0
        for place, (lane, schedule) in enumerate(bars):
            left = 0.0
            for kind in WORDS:
                size = moved[schedule].get((lane, kind), 0) / GIB
                if size:
                    label = None if kind in named else WORDS[kind]
                    axes.barh(place, size, left=left, color=COLOURS[kind], height=0.66, label=label)
                    left, named = left + size, named | {kind}
            axes.text(left + 0.02 * most, place, f"{left:.1f}", va="center", fontsize=8.5)
        axes.set_yticks(range(len(bars)), [f"{LANES[lane]}, {schedule}" for lane, schedule in bars])
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.invert_yaxis()
        axes.set_xlim(0, most * 1.15)
        axes.set_xlabel("GiB a step")
    drawn.legend(frameon=False, fontsize=8.5, ncols=len(named), loc="outside lower center")
    drawn.suptitle(
        f"GPT-2 medium, bf16, {MICRO_BATCHES} micro-batches of {SEQUENCE} tokens, everything on SSD: counted",
        x=0.01,
        ha="left",
        fontsize=11,
    )


def total(moved: Mapping[tuple[str, str], int], lane: str) -> float:
    return sum(nbytes for (where, _), nbytes in moved.items() if where == lane) / GIB


if __name__ == "__main__":
    for name, nbytes in counted().items():
        for lane, words in LANES.items():
            print(f"{name}: {total(nbytes, lane):.2f} GiB {words}")
