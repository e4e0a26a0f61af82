"""What checksums cost: the store with them and without, in turns; then steps of training with everything on SSD.

The store is measured on the disk, and on simulated drives that move a fixed number of bytes a second in each direction
and take no processor for it, as drives do whose transfers are no copies. A virtual disk is memory of its host, and
copies of it want the same memory bandwidth as the hashes.

Without means the same requests and system calls, and no hash. Processor time is that of all threads of the process: it
tells the cost where other users of a machine make times noisy. A figure is the median of its rounds, a ratio the
median of the rounds' ratios: what runs with checksums and without stands next to each other in time.

    python -m benchmarks.checksums --storage /mnt/nvme0 --output benchmarks/results/checksums.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import xxhash

from benchmarks.common import conditions, in_turns, medians, parser_of, ratio_of_rounds, save
from benchmarks.ssd import LOADS, MIB, Lanes, mapped_pages
from benchmarks.tiers import Run
from gs_compile.runtime.storage import grid, ssd, system
from gs_compile.runtime.storage.grid import Block
from gs_compile.runtime.storage.ssd import File, Memory
from gs_compile.runtime.storage.store import Store

STATES = ("with", "without")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--storage", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--disk", default="unsaid", help="what it is, for the record")
    parser.add_argument("--rounds", type=int, default=15)
    drive = parser.add_argument_group("the store")
    drive.add_argument("--request-mib", type=int, default=256)
    drive.add_argument("--simulated", type=float, nargs="*", default=[2, 3.5, 7], help="simulated drives, in GB/s")
    drive.add_argument("--requests", type=int, default=4, help="in each direction; 0: none")
    step = parser.add_argument_group("steps")
    step.add_argument("--micro-batches", type=int, nargs="*", default=[1, 2])
    step.add_argument("--steps", type=int, default=1, help="that are timed together")
    fixed = {"layers": 8, "hidden": 768, "vocabulary": 8192, "sequence": 128, "micro_batch_size": 2}
    for name, default in fixed.items():
        step.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    step.add_argument("--alpha", type=float, default=0.25)
    parser.set_defaults(precision="model", compiler="auto")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        **conditions(),
        "disk": arguments.disk,
        "scheduling_policy": os.sched_getscheduler(0),  # 1: real time, where others use the processors too
        "setting": {"block_bytes": grid.BLOCK, "threads": ssd.THREADS, "rounds": arguments.rounds, **fixed},
        "hash_bytes_per_second": hash_rate(),
        "store": of_the_store(arguments) if arguments.requests else {},
        "simulated": {gbs: of_the_store(arguments, Simulated(gbs * 10**9)) for gbs in arguments.simulated},
        "steps": {},
    }
    for number in arguments.micro_batches:
        result["steps"][number] = of_steps(arguments, number)
    print(json.dumps(result, indent=1))
    save(result, arguments.output)


@contextlib.contextmanager
def checksums(state: str) -> Iterator[None]:
    """Blocks are hashed, or moved as they are."""

    def read(file: File, block: Block, memory: Memory, label: str) -> None:
        ssd._move_pages("read", file, memory, block.start, label)

    def write(file: File, block: Block, whole: Memory, memory: Memory, offset: int, label: str) -> None:
        ssd._move_pages("write", file, memory, offset, label)

    with mock.patch.multiple(ssd, _read=read, _write=write) if state == "without" else contextlib.nullcontext():
        yield


def hash_rate() -> float:
    """Of one thread, of memory that is in no cache."""
    memory, rates = mapped_pages(256 * MIB).numpy(), []
    for _ in range(5):
        begin = time.perf_counter()
        for start in range(0, memory.nbytes, grid.BLOCK):
            xxhash.xxh3_64_intdigest(memory[start : start + grid.BLOCK].data)
        rates.append(memory.nbytes / (time.perf_counter() - begin))
    return statistics.median(rates)


class Simulated:
    """A drive that serves the requests of each direction one after the other, and moves nothing."""

    def __init__(self, bytes_per_second: float) -> None:
        self.bytes_per_second = bytes_per_second
        self.busy_until = {"preadv": 0.0, "pwritev": 0.0}
        self.lock = threading.Lock()

    def serve(self, verb: str, fd: int, memory: Memory, offset: int) -> int:
        with self.lock:
            begin = max(self.busy_until[verb], time.perf_counter())
            end = self.busy_until[verb] = begin + memory.nbytes / self.bytes_per_second
        time.sleep(max(0.0, end - time.perf_counter()))
        return memory.nbytes

    def __enter__(self) -> None:
        self.patch = mock.patch.multiple(system, **{verb: partial(self.serve, verb) for verb in self.busy_until})
        self.patch.start()

    def __exit__(self, *exception: object) -> None:
        self.patch.stop()


def of_the_store(arguments: argparse.Namespace, drive: Simulated | None = None) -> dict[str, Any]:
    """Bytes a second and processor seconds a GiB for each load, on the disk or another drive."""
    with (
        tempfile.TemporaryDirectory(dir=arguments.storage) as folder,
        Store([folder]) as store,
        drive or contextlib.nullcontext(),
    ):
        lanes = Lanes(store, arguments, mapped_pages)
        nbytes = arguments.request_mib * arguments.requests * MIB
        found = {}
        for load in LOADS:
            in_all = nbytes * (2 if load == "mixed" else 1)
            work = partial(lanes.bytes_per_second, load)
            seconds, processor = measured(arguments.rounds, dict.fromkeys(STATES, work))
            found[load] = {
                "bytes_per_second": {state: in_all / middle for state, middle in medians(seconds).items()},
                "seconds_ratio": ratio_of_rounds(seconds["with"], seconds["without"]),
                "processor_seconds_a_gib": {
                    state: middle / (in_all / 2**30) for state, middle in medians(processor).items()
                },
                "seconds": seconds,
            }
    return found


def of_steps(arguments: argparse.Namespace, micro_batches: int) -> dict[str, Any]:
    """Seconds and processor seconds of a step, of two runs that take turns."""
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory(dir=arguments.storage) as folder:
        runs = {}
        for state in STATES:
            with checksums(state):
                runs[state] = Run(arguments, micro_batches, f"{folder}/{state}")
                runs[state].timed(2)
        works = {state: partial(run.timed, arguments.steps) for state, run in runs.items()}
        rounds = max(5, arguments.rounds // micro_batches)  # of longer steps
        seconds, processor = measured(rounds, works)
        last = runs["with"].optimizer.last_step
        assert last is not None
        nbytes = {lane: total.nbytes for lane, total in last.lanes.items() if lane.startswith("ssd")}
        for run in runs.values():
            run.close()
    return {
        "rounds": rounds,
        "bytes_a_step": nbytes,
        "seconds_a_step": {state: middle / arguments.steps for state, middle in medians(seconds).items()},
        "seconds_ratio": ratio_of_rounds(seconds["with"], seconds["without"]),
        "processor_seconds_a_step": {state: middle / arguments.steps for state, middle in medians(processor).items()},
        "processor_seconds_ratio": ratio_of_rounds(processor["with"], processor["without"]),
        "seconds": seconds,
    }


def measured(rounds: int, works: Mapping[str, Callable[[], object]]) -> tuple[dict[str, list[float]], ...]:
    """Seconds, and processor seconds of all threads, of each round, by state."""

    def work(state: str) -> tuple[float, float]:
        with checksums(state):
            begin, begin_processor = time.perf_counter(), time.process_time()
            works[state]()
            return time.perf_counter() - begin, time.process_time() - begin_processor

    both = in_turns(rounds, {state: partial(work, state) for state in works})
    return tuple({state: [each[which] for each in found] for state, found in both.items()} for which in (0, 1))


if __name__ == "__main__":
    main()
