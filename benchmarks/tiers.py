"""Step time over the number of micro-batches, all data on SSD against all data in host memory, side by side in one run.

Both run the same program but for its transfers; steps alternate, and medians are compared. With few micro-batches the
drives are the limit, and a step takes as long as its bytes; with many, the computation is. The share of the time in
which the busier SSD lane works is read from the trace of consecutive steps.

--compare has the two runs differ in something else. durability: both have everything on SSD, and each step of the first
is committed; what a commit takes on its lane, the sync of all files and the manifest, is read from the trace. masters:
both have everything on SSD and compute in bf16; the masters of the first are whole, those of the second split between
parameters and states. recompute: both have everything in memory; the first recomputes all layers, the second what is
planned.

    python -m benchmarks.tiers --storage /path/on/an/nvme/drive --output benchmarks/results/tiers.json
    python -m benchmarks.tiers --compare masters --micro-batches 1 2 --storage /path/on/an/nvme/drive
    python -m benchmarks.tiers --compare recompute --compiler inductor --layers 12 --vocabulary 50257 --micro-batches 8
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import gs_compile
from benchmarks.common import (
    IN_MEMORY,
    conditions,
    gpt2,
    in_turns,
    medians,
    parser_of,
    ratio_of_rounds,
    save,
    setting_of,
    step,
)
from gs_compile.model.backend import greedysnake
from gs_compile.runtime.trace import TraceEvent

COMPARED: dict[str, dict[str, dict[str, Any]]] = {  # by name: how a run differs from one with everything on SSD
    "tiers": {"ssd": {}, "host": {"ratio": 1.0}},
    "durability": {"step": {"durability": "step"}, "off": {}},
    "masters": {"whole": {"masters": "whole"}, "split": {}},
    "recompute": {"all": {"ratio": 1.0}, "auto": {"ratio": 1.0, "recompute": "auto"}},
}


class Run:
    """One model with this ratio of its data in host memory, the rest on SSD, below a directory of its own."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        micro_batches: int,
        storage: str,
        *,
        ratio: float = 0.0,
        durability: str = "off",
        max_grad_norm: float | None = None,
        **expert: Any,
    ) -> None:
        self.model = gpt2(arguments.layers, arguments.hidden, arguments.sequence, arguments.vocabulary)
        options = {
            "micro_batch_size": arguments.micro_batch_size,
            "outputs": "loss",
            "storage": storage,
            "durability": durability,
            "precision": arguments.precision,
            "expert": {
                "compiler": arguments.compiler,
                "alpha": arguments.alpha,
                "ratios": dict.fromkeys(IN_MEMORY, ratio),
                "trace": True,
                "masters": "split",
                "recompute": "all",
                **expert,
            },
        }
        self.model.compile(backend=greedysnake, options=options)
        self.optimizer = gs_compile.AdamW(self.model.parameters(), lr=1e-4, max_grad_norm=max_grad_norm)
        size = arguments.micro_batch_size * micro_batches
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(arguments.vocabulary, (size, arguments.sequence), generator=generator)

    def step(self) -> None:
        step(self.model, self.optimizer, self.ids)

    def timed(self, steps: int) -> float:
        """Seconds of one of several consecutive steps, all of their transfers included."""
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.optimizer.synchronize()
        return (time.perf_counter() - start) / steps

    def traced(self, steps: int) -> dict[str, float]:
        """The share of the time of consecutive steps in which each lane works."""
        assert self.optimizer.engine is not None
        self.step()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        stop = time.perf_counter()
        self.optimizer.synchronize()
        events = self.optimizer.engine.tiers.trace.events()
        return {lane: busy_share(events, lane, start, stop) for lane in ("compute", "ssd_read", "ssd_write", "cpu")}

    def nbytes(self) -> dict[str, int]:
        """What each lane has moved in the last step."""
        last = self.optimizer.last_step
        assert last is not None
        return {lane: total.nbytes for lane, total in last.lanes.items() if total.nbytes}

    def commit_seconds(self) -> float:
        """The median time that a commit takes on the lane that writes; 0: there are none."""
        events = self.optimizer.engine.tiers.trace.events()
        found = [each.end_seconds - each.start_seconds for each in events if each.label.name.startswith("seal")]
        return statistics.median(found) if found else 0.0

    def close(self) -> None:
        self.optimizer.engine.tiers.close()


def busy_share(events: list[TraceEvent], lane: str, since_seconds: float, until_seconds: float) -> float:
    """The share of a period in which a lane had something under way, 0 to 1: what overlaps counts once."""
    busy, reached = 0.0, since_seconds
    for event in events:
        if event.label.lane == lane:
            end = min(event.end_seconds, until_seconds)
            busy += max(0.0, end - max(event.start_seconds, reached))
            reached = max(reached, end)
    return busy / (until_seconds - since_seconds)


def measure(arguments: argparse.Namespace, micro_batches: int, storage: str) -> dict[str, Any]:
    torch._dynamo.reset()
    compared = COMPARED[arguments.compare]
    runs = {name: Run(arguments, micro_batches, f"{storage}/{name}", **chosen) for name, chosen in compared.items()}
    first, second = runs
    for run in runs.values():
        run.timed(2)
    seconds = in_turns(arguments.rounds, {name: partial(run.timed, arguments.steps) for name, run in runs.items()})
    nbytes = {name: run.nbytes() for name, run in runs.items()}
    shares, commit_seconds = runs[first].traced(arguments.steps), runs[first].commit_seconds()
    for run in runs.values():
        run.close()
    middle = medians(seconds)
    return {
        "micro_batches": micro_batches,
        "seconds": seconds,
        "median_seconds": middle,
        "ratio": middle[first] / middle[second],
        "ratio_of_rounds": ratio_of_rounds(*seconds.values()),
        "commit_seconds": commit_seconds,
        "bytes_per_step": nbytes,
        "busy_share": shares,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--alpha", type=float, default=0.0)
    parser.add_argument("--precision", default="model")
    parser.add_argument("--compiler", default="eager")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--compare", choices=COMPARED, default="tiers")
    parser.add_argument("--storage", type=Path)
    arguments = parser.parse_args()
    if arguments.compare == "masters":
        arguments.precision = "bf16"
    rows = []
    for micro_batches in arguments.micro_batches:
        with tempfile.TemporaryDirectory(dir=arguments.storage) as storage:
            rows.append(measure(arguments, micro_batches, storage))
        row = rows[-1]
        shares = {lane: round(share, 2) for lane, share in row["busy_share"].items()}
        ratios = f"ratio {row['ratio']:.3f}, by rounds {row['ratio_of_rounds']:.3f}"
        commits = f", a commit {row['commit_seconds'] * 1000:.1f} ms" if arguments.compare == "durability" else ""
        print(f"n={micro_batches}: {row['median_seconds']} {ratios}, busy {shares}{commits}", flush=True)
    save({**conditions(), "setting": setting_of(arguments), "rows": rows}, arguments.output)


if __name__ == "__main__":
    main()
