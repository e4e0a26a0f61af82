"""traffic: what a step moves, by kind of data and schedule: counted on the step programs, nothing runs.

GPT-2 medium in bf16 on a device with memory of its own, everything on SSD: what is between host and device, and what
between host and SSD. The runtime counts the same bytes (`tests/end_to_end/test_tiers_traffic.py` holds it to that).
`lifetime` leaves on the device what there is room for, so it is given 1 GiB of it.

    python -m benchmarks.race.traffic
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import transformers

from benchmarks.common import ON_SSD
from benchmarks.race.protocol import PRESETS
from gs_compile.errors import PlanError
from gs_compile.planner.plan import plan
from gs_compile.program.ir import Schedule

PRESET, MICRO_BATCHES, SEQUENCE = "350m", 8, 1024
MACHINE = "rtx4090"  # its link and drives do not matter here: bytes are counted
DEVICE_MEMORY = {"lifetime": "1GiB"}  # of all of it this one would make use, and leave the model there
LANES = {"h2d": "to the device", "d2h": "from the device", "ssd_read": "from SSD", "ssd_write": "to SSD"}
GIB = 2**30
TITLE = f"GPT-2 medium, bf16, {MICRO_BATCHES} micro-batches of {SEQUENCE} tokens, everything on SSD: counted"


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
                ratios=ON_SSD,
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


def total(moved: Mapping[tuple[str, str], int], lane: str) -> float:
    return sum(nbytes for (where, _), nbytes in moved.items() if where == lane) / GIB


if __name__ == "__main__":
    for name, nbytes in counted().items():
        for lane, words in LANES.items():
            print(f"{name}: {total(nbytes, lane):.2f} GiB {words}")
