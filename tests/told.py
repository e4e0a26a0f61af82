"""A run's status with given figures: sixty steps of a planned run, the next one under way."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from gs_compile.runtime.trace import Total
from gs_compile.status import file
from gs_compile.status.form import FORMAT, About, PastStep, Status, UnderWay
from gs_compile.status.step import StepInfo

GIB = 1 << 30
WRITTEN = 1_800_000_000.0
NUM_STEPS = 60


def total(seconds: float, **nbytes: float) -> Total:
    """A lane's work, with gibibytes by kind."""
    kinds = Counter({kind: int(each * GIB) for kind, each in nbytes.items()})
    return Total(seconds, sum(kinds.values()), kinds)


LANES = {
    "compute": total(12.4),
    "ssd_read": total(26.5, w=14.2, s=28.4, x=1.5),
    "ssd_write": total(19.0, w=7.1, s=28.4, x=0.5),
    "cpu": total(8.0),
}
PREDICTED = {
    "compute": total(13.0),
    "ssd_read": total(24.0, w=14.2, s=28.4, x=1.5),
    "ssd_write": total(20.0, w=7.1, s=28.4, x=0.5),
    "cpu": total(7.5),
}
ABOUT = About(
    pid=1,
    process_start=0,
    process_space=0,
    began=WRITTEN - 1900.0,
    rank=0,
    num_ranks=1,
    versions={"greedysnake": "0.2.0", "torch": "2.11.0", "python": "3.12.3"},
    machine="a machine <of two>",
    device="cpu",
    num_cores=2,
    memory_nbytes=16 * GIB,
    num_parameters=3_821_000_000,
    num_layers=36,
    plan="Plan of model on a machine <of two>, vertical: 4 micro-batches of 2 samples of 128 tokens, alpha 0.25. "
    "A step takes 28.0 s: 36.6 tokens/s. What would make it faster: a second SSD like the first: 41% faster.",
    binding=("2.0 GiB more host memory: 3% faster", "a second SSD like the first: 41% faster"),
    predicted=PREDICTED,
    predicted_seconds=28.0,
    homes={"w": {"ssd": int(7.1 * GIB)}, "s": {"host": 2 * GIB, "ssd": int(28.4 * GIB)}, "x": {"host": GIB}},
    budgets={"host": 8 * GIB},
    drives={"/mnt/a": 0.6, "/mnt/b": 0.4},
    rated_nbytes=600 * 1024 * GIB,
)
LAST = StepInfo(
    number=NUM_STEPS,
    grad_norm=1.25,
    skipped=False,
    rolled_back=False,
    num_skipped=0,
    lanes=LANES,
    seconds=31.2,
    num_tokens=1024,
    loss=5.523,
    predicted_seconds=28.0,
)
UNDER_WAY = UnderWay(
    number=NUM_STEPS + 1,
    call=1,
    stage="backward of layer 20",
    done=700,
    total=1000,
    seconds=21.4,
    expected_seconds=31.2,
    lanes={"compute": total(8.0), "ssd_read": total(18.0, w=9.0, s=17.0), "ssd_write": total(9.0, s=12.0)},
)


def status(**changes: Any) -> Status:
    """Of a run that goes on; `changes` are of its entries."""
    losses = [5.0 + 6.0 * math.exp(-step / 15) for step in range(1, NUM_STEPS + 1)]
    seconds = [math.nan, *(31.0 + math.sin(step) for step in range(2, NUM_STEPS + 1))]
    points = zip(range(1, NUM_STEPS + 1), seconds, losses, strict=True)
    number = NUM_STEPS - 1
    sums = {
        lane: Total(
            number * one.seconds, number * one.nbytes, Counter({k: number * n for k, n in one.nbytes_by_kind.items()})
        )
        for lane, one in LANES.items()
    }
    found = Status(
        format=FORMAT,
        state="running",
        reason="",
        written=WRITTEN,
        about=ABOUT,
        step=UNDER_WAY,
        last=LAST,
        history=tuple(PastStep(step, each, loss, 1024) for step, each, loss in points),
        num_steps=number,
        seconds=number * 31.2,
        num_tokens=number * 1024,
        lanes=sums,
        used={"host": int(5.9 * GIB), "ssd": int(35.5 * GIB)},
        free={"/mnt/a": 120 * GIB, "/mnt/b": 400 * GIB},
    )
    return replace(found, **changes)


def write(path: Path, told: Status) -> None:
    """As a run writes its status file."""
    file.replace(path, file.text_of(told))
