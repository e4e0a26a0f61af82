"""What it costs a run to tell of itself: CPU seconds of the thread that does, and of steps with and without it.

    python -m benchmarks.status [--storage DIR] [--rounds 6]

A status file is written with a full history. Steps are of a tiny model on SSD, in turns with the thread and without
it: a turn is three seconds, and its figure the CPU seconds of the process for a step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import gs_compile
from gs_compile.model.tiered_optimizer import TieredOptimizer
from gs_compile.status import file
from gs_compile.status.form import Status
from gs_compile.status.page import page
from gs_compile.status.record import MOST_POINTS
from gs_compile.status.reporter import Reporter

TIMES = 200
TURN_SECONDS = 3.0
WIDTH = 256


class Block(nn.Linear):
    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return x_BD + torch.tanh(super().forward(x_BD))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(WIDTH, WIDTH) for _ in range(8))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_BD = block(x_BD)
        return self.head(x_BD).mean()


def thread_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this thread for doing something once."""
    begin = time.thread_time()
    for _ in range(TIMES):
        work()
    return (time.thread_time() - begin) / TIMES


def step_seconds(model: nn.Module, optimizer: TieredOptimizer) -> float:
    """CPU seconds of the process for a step, over a turn."""
    begin, end, number = time.process_time(), time.perf_counter() + TURN_SECONDS, 0
    while time.perf_counter() < end:
        model(torch.ones(8, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
        number += 1
    return (time.process_time() - begin) / number


def full(status: Status) -> Status:
    """The same with a history as long as it gets."""
    return replace(status, history=(status.history * MOST_POINTS)[:MOST_POINTS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.storage) as folder:
        model = Model()
        optimizer = gs_compile.AdamW(model.parameters(), lr=1e-3)
        ratios = dict.fromkeys(("parameter", "checkpoint", "optimizer"), 0.0)
        expert = {"compiler": "eager", "recompute": "all", "alpha": 0.0, "ratios": ratios}
        options = {"micro_batch_size": 2, "storage": folder, "host_memory": "100MiB", "expert": expert}
        model.compile(backend="greedysnake", options=options)
        step_seconds(model, optimizer)
        engine = optimizer.engine
        assert engine is not None
        assert engine.reporter is not None
        record, path = engine.reporter.record, Path(folder) / "status.json"
        print(f"a status file: {thread_seconds(lambda: file.write(path, full(record.status()))) * 1e3:.2f} ms of CPU")
        print(f"a page: {thread_seconds(lambda: page(full(record.status()))) * 1e3:.2f} ms of CPU")
        engine.reporter.close()
        outlets, turns = engine.reporter.outlets, {"with": [], "without": []}
        for name, seconds in list(turns.items()) * args.rounds:
            engine.reporter = reporter = Reporter(record, outlets) if name == "with" else None
            seconds.append(step_seconds(model, optimizer))
            if reporter is not None:
                reporter.close()
        for name, seconds in turns.items():
            middle, low, high = statistics.median(seconds), min(seconds), max(seconds)
            print(f"a step {name} it: {middle * 1e3:.2f} ms of CPU ({low * 1e3:.2f} to {high * 1e3:.2f})")
        engine.tiers.close()


if __name__ == "__main__":
    main()
