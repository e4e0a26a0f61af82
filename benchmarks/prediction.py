"""Predicted against measured: seconds of a step, and the peak of host memory, of GPT-2s of three sizes.

Each model runs with its data on SSD, half and half, and in host memory, with 16 to 1 micro-batches. The machine is
probed before, the layers' code is timed before and after; the step's own program is simulated with these figures. What
is measured is the median of several consecutive steps. Each rank has so many micro-batches, and the first one reports.
A collective takes as long as on the rank that came to it last: the others have waited.

    python -m benchmarks.prediction --storage /path/on/an/nvme/drive --output benchmarks/results/prediction.json
    torchrun --nproc-per-node 2 -m benchmarks.prediction --output benchmarks/results/prediction-2-ranks.json
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gs_compile
from benchmarks.common import IN_MEMORY, conditions, gpt2, parser_of, save, setting_of, step
from gs_compile.model.backend import greedysnake
from gs_compile.planner.measure.machines import profile
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.simulate.simulator import Simulation
from gs_compile.runtime.trace import TraceEvent

SIZES = {"small": (4, 384), "middle": (6, 512), "large": (8, 768)}  # layers and hidden size
PLACES = {"ssd": 0.0, "mixed": 0.5, "host": 1.0}  # what part of every class is in host memory
VOCABULARY = 8192


def measure(
    arguments: argparse.Namespace, machine: Profile, size: str, place: str, storage: str
) -> list[dict[str, Any]]:
    """One model with its data in one place, for all numbers of micro-batches, the largest first."""
    torch._dynamo.reset()
    model, ratios = gpt2(*SIZES[size], arguments.sequence, VOCABULARY), dict.fromkeys(IN_MEMORY, PLACES[place])
    expert = {"compiler": arguments.compiler, "alpha": arguments.alpha, "ratios": ratios, "trace": True}
    options = {"outputs": "loss", "storage": storage, "machine": machine, "expert": expert}
    model.compile(backend=greedysnake, options=options)
    optimizer = gs_compile.AdamW(model.parameters(), lr=1e-4)
    rows = []
    for number in sorted(arguments.micro_batches, reverse=True):
        ids = torch.randint(VOCABULARY, (number, arguments.sequence))
        steps, busy = max(1, arguments.steps // number), Counter[str]()
        step(model, optimizer, ids)
        before = predict(optimizer)
        optimizer.synchronize()
        step(model, optimizer, ids)
        optimizer.engine.tiers.trace.reset()
        seconds = []
        for _ in range(arguments.rounds):
            start = time.perf_counter()
            for _ in range(steps):
                step(model, optimizer, ids)
            seconds.append((time.perf_counter() - start) / steps)
        optimizer.synchronize()
        for lane, start, stop in together(optimizer.engine.tiers.trace.events()):
            busy[lane] += (stop - start) / steps / arguments.rounds
        prediction = predict(optimizer)
        measured = statistics.median(seconds)
        predicted = (before.seconds + prediction.seconds) / 2
        rows.append(
            {
                "size": size,
                "place": place,
                "micro_batches": number,
                "seconds": seconds,
                "median_seconds": measured,
                "predicted_seconds": predicted,
                "error": predicted / measured - 1,
                "peak_nbytes": optimizer.engine.snapshots[-1].slab_nbytes,
                "predicted_peak_nbytes": prediction.program.slab_nbytes,
                "busy": dict(prediction.busy),
                "measured_busy_seconds": dict(busy),
                "bubbles": dict(prediction.bubbles),
            }
        )
        say(rows[-1])
    optimizer.engine.tiers.close()
    gc.collect()
    return rows


def predict(optimizer: Any) -> Simulation:
    """With the layers' code timed now: the speed of a shared machine changes from minute to minute."""
    optimizer.engine.planning.planner.measure_again()
    return optimizer.engine.planning.predict(*optimizer.engine.latest)


def together(events: Sequence[TraceEvent]) -> Iterator[tuple[str, float, float]]:
    """The lane, start and end of each operation; a collective starts when the last rank has come to it."""
    found = [(each.label.lane, each.start_seconds, each.end_seconds) for each in events]
    starts = [start for lane, start, _ in found if lane == "net"]
    every = [starts]
    if dist.is_initialized():
        dist.all_gather_object(every := [None] * dist.get_world_size(), starts)
    last = map(max, zip(*every, strict=True))
    for lane, start, stop in found:
        yield lane, next(last) if lane == "net" else start, stop


def say(row: dict[str, Any]) -> None:
    if int(os.environ.get("RANK", 0)):
        return
    lanes = (
        f"{lane} {row['measured_busy_seconds'].get(lane, 0):.3f}, predicted {share * row['predicted_seconds']:.3f}"
        for lane, share in row["busy"].items()
    )
    print(
        f"{row['size']} {row['place']} n={row['micro_batches']}: {row['median_seconds']:.3f} s, predicted "
        f"{row['predicted_seconds']:.3f} s, {row['error']:+.1%} ({'; '.join(lanes)}); peak "
        f"{row['peak_nbytes'] / 2**20:.1f} MiB, predicted {row['predicted_peak_nbytes'] / 2**20:.1f} MiB",
        flush=True,
    )


def of_first(made: Any) -> Any:
    """What the first rank has, on all."""
    if not dist.is_initialized():
        return made
    both = [made]
    dist.broadcast_object_list(both)
    return both[0]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--places", nargs="+", default=list(PLACES), choices=list(PLACES))
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--alpha", type=float, default=0.0)
    parser.add_argument("--compiler", default="eager")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a round at one micro-batch; fewer at more")
    parser.add_argument("--storage", type=Path)
    arguments = parser.parse_args()
    rows, rank = [], int(os.environ.get("RANK", 0))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(dir=arguments.storage) as storage:
        machine = of_first(None if rank else profile(None, (Path(storage),), refresh=True))
        for size in arguments.sizes:
            for place in arguments.places:
                rows += measure(arguments, machine, size, place, storage)
    if rank:
        return
    errors = sorted(abs(row["error"]) for row in rows)
    print(f"seconds: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}, of {len(rows)}")
    peaks = [row["predicted_peak_nbytes"] / row["peak_nbytes"] - 1 for row in rows]
    print(f"peak of host memory: predicted over measured {min(peaks):+.1%} to {max(peaks):+.1%}")
    result = {**conditions(), "profile": asdict(machine), "setting": setting_of(arguments), "rows": rows}
    save(result, arguments.output)


if __name__ == "__main__":
    main()
