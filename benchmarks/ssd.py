"""Bandwidth of the store against fio on the same disk, in the same run: read, write, and both at once.

Ours: whole requests one after the other through `Store`, as a lane issues them; "mixed" is one lane that reads and one
that writes. fio: libaio with O_DIRECT, one job for each direction, at the best of several block sizes and queue depths,
which a first sweep finds. Rounds alternate between the two; a figure is the median of its rounds. Both move the same
bytes of files that were written before, to and from small pages: a run has huge ones, and what those bring is measured
by itself. Nothing else should use the disk meanwhile.

    python -m benchmarks.ssd --directory /mnt/nvme0 --output benchmarks/results/ssd.json
    python -m benchmarks.ssd --directory /mnt/nvme0 --sweep       # why grid.BLOCK and ssd.THREADS are what they are
    python -m benchmarks.ssd --directory /mnt/nvme0 --pages --output benchmarks/results/ssd-pages.json
    python -m benchmarks.ssd --directory /mnt/nvme0 --sizes --output benchmarks/results/ssd-sizes.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import conditions, medians, parser_of, save
from gs_compile.planner.measure import rates as measuring
from gs_compile.planner.measure.probe import products_on
from gs_compile.runtime.slab import map_memory
from gs_compile.runtime.storage import grid, movers, ssd
from gs_compile.runtime.storage.store import Store

MIB = 1 << 20
LOADS = ("read", "write", "mixed")
FIO_BLOCKS = (1, 4, 16, 64)  # MiB
FIO_DEPTHS = (1, 4, 16)
SIZES = (4, 8, 16, 64)  # MiB
SIZE_SECONDS = 0.5  # of a round of one size


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--request-mib", type=int, default=256)
    parser.add_argument("--requests", type=int, default=4, help="in each direction; files have as much")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--disk", default="unsaid", help="what it is, for the record")
    parser.add_argument("--sweep", action="store_true", help="the store's block sizes and threads instead")
    parser.add_argument("--pages", action="store_true", help="the store with huge pages and with small ones instead")
    parser.add_argument("--sizes", action="store_true", help="reads of several sizes, also beside computation, instead")
    arguments = parser.parse_args()
    chosen = sweep if arguments.sweep else pages if arguments.pages else sizes if arguments.sizes else compare
    result = chosen(arguments)
    print(json.dumps(result, indent=1))
    save(result, arguments.output)


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed")
    before = asked(arguments)
    folder = Path(tempfile.mkdtemp(dir=arguments.directory))
    try:
        with Store([folder]) as store:
            ours = Lanes(store, arguments, small_pages)
            fio = Fio(folder, arguments)
            settings = {load: fio.best(load) for load in LOADS}
            rates: dict[str, dict[str, list[float]]] = {load: {"store": [], "fio": []} for load in LOADS}
            for _ in range(arguments.rounds):
                for load in LOADS:
                    rates[load]["store"].append(ours.bytes_per_second(load))
                    rates[load]["fio"].append(fio.bytes_per_second(load, *settings[load]))
    finally:
        shutil.rmtree(folder)
    middle = {load: medians(rates[load]) for load in LOADS}
    return {
        **before,
        "load_after": os.getloadavg()[0],
        "fio_settings": {load: f"{block} MiB x {depth}" for load, (block, depth) in settings.items()},
        "median_bytes_per_second": middle,
        "ratio": {load: middle[load]["store"] / middle[load]["fio"] for load in LOADS},
        "bytes_per_second": rates,
    }


def sweep(arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians over rounds for each block size and number of threads; small blocks stay as small as asked."""
    cases = [(block, threads) for block in (1, 2, 4, 8, 16) for threads in (1, 2, 4, 8)]
    rates: dict[str, dict[str, list[float]]] = {load: {} for load in LOADS}
    for _ in range(arguments.rounds):
        for block, threads in cases:
            grid.BLOCK = block * MIB
            folder = Path(tempfile.mkdtemp(dir=arguments.directory))
            with Store([folder], threads=threads) as store:
                ours = Lanes(store, arguments, mapped_pages)
                for load in LOADS:
                    each = rates[load].setdefault(f"{block} MiB x {threads}", [])
                    each.append(ours.bytes_per_second(load))
            folder.rmdir()
    return {**asked(arguments), "median_bytes_per_second": {load: medians(rates[load]) for load in LOADS}}


def pages(arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians of rounds with huge pages, as a run has, and with small ones; they take turns in being first."""
    before = asked(arguments)
    folder = Path(tempfile.mkdtemp(dir=arguments.directory))
    rates: dict[str, dict[str, list[float]]] = {load: {"huge": [], "small": []} for load in LOADS}
    try:
        with Store([folder]) as store:
            lanes = {
                "huge": Lanes(store, arguments, mapped_pages),
                "small": Lanes(store, arguments, small_pages, label="small-"),
            }
            for number in range(arguments.rounds):
                for load in LOADS:
                    for size in sorted(lanes, reverse=number % 2 == 1):
                        rates[load][size].append(lanes[size].bytes_per_second(load))
    finally:
        shutil.rmtree(folder)
    middle = {load: medians(rates[load]) for load in LOADS}
    return {
        **before,
        "load_after": os.getloadavg()[0],
        "median_bytes_per_second": middle,
        "ratio": {load: middle[load]["huge"] / middle[load]["small"] for load in LOADS},
        "bytes_per_second": rates,
    }


def sizes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians of rounds of reads of each size, one after the other on a lane: alone, and beside matrix products."""
    before, products = asked(arguments), products_on(torch.device("cpu"))
    folder = Path(tempfile.mkdtemp(dir=arguments.directory))
    try:
        with Store([folder]) as store, closing(measuring.new_lane("ssd_read")) as lane:
            extent = Lanes(store, arguments, mapped_pages).extents["read"]
            loads: list[measuring.Load] = []
            for size in SIZES:
                read = reads(extent.read, mapped_pages(size * MIB), extent.nbytes)
                loads += [{lane: read}, {lane: read, None: products}]
            seconds = SIZE_SECONDS * len(loads) * arguments.rounds
            found = [each[lane] for each in measuring.medians(loads, seconds, arguments.rounds)]
    finally:
        shutil.rmtree(folder)
    by_size = {size: {"alone": found[2 * at], "beside": found[2 * at + 1]} for at, size in enumerate(SIZES)}
    middle = {f"{size} MiB": rates for size, rates in by_size.items()}
    ratio = {name: rates["beside"] / rates["alone"] for name, rates in middle.items()}
    return {**before, "load_after": os.getloadavg()[0], "median_bytes_per_second": middle, "ratio": ratio}


def reads(read: Callable[..., movers.Transfer], memory: torch.Tensor, nbytes: int) -> measuring.Work:
    """Reads of this memory's size, through all of so many bytes, again and again."""
    places = itertools.cycle(range(0, nbytes - memory.nbytes + 1, memory.nbytes))

    def one() -> float:
        read(memory, next(places)).wait()
        return memory.nbytes

    return one


class Lanes:
    """The store as the runtime uses it: a lane that reads and a lane that writes, a request at a time each."""

    def __init__(
        self,
        store: Store,
        arguments: argparse.Namespace,
        memory: Callable[[int], torch.Tensor],
        label: str = "",
    ) -> None:
        self.nbytes = arguments.request_mib * MIB
        self.requests = arguments.requests
        self.extents = {verb: store.allocate(label + verb, self.nbytes * self.requests) for verb in ("read", "write")}
        self.memory = {verb: memory(self.nbytes) for verb in self.extents}
        for verb, extent in self.extents.items():  # blocks are laid out before anything is timed
            for index in range(self.requests):
                extent.write(self.memory[verb], index * self.nbytes).wait()

    def bytes_per_second(self, load: str) -> float:
        verbs = ("read", "write") if load == "mixed" else (load,)
        lanes = [threading.Thread(target=self.run, args=(verb, getattr(self.extents[verb], verb))) for verb in verbs]
        begin = time.perf_counter()
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        return len(verbs) * self.requests * self.nbytes / (time.perf_counter() - begin)

    def run(self, verb: str, request: Callable[..., movers.Transfer]) -> None:
        for index in range(self.requests):
            request(self.memory[verb], index * self.nbytes).wait()


class Fio:
    """The same bytes moved by fio, on files of its own."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.files = {"read": folder / "fio-read", "write": folder / "fio-write"}
        self.nbytes = arguments.request_mib * MIB * arguments.requests
        for file in self.files.values():
            self.run([self.job("write", file, 4, 4)])

    def best(self, load: str) -> tuple[int, int]:
        """The block size, in MiB, and the queue depth of the greatest median of three."""
        cases = [(block, depth) for block in FIO_BLOCKS for depth in FIO_DEPTHS]
        rates: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
        for _ in range(3):
            for case in cases:
                rates[case].append(self.bytes_per_second(load, *case))
        return max(cases, key=lambda case: statistics.median(rates[case]))

    def bytes_per_second(self, load: str, block: int, depth: int) -> float:
        verbs = ("read", "write") if load == "mixed" else (load,)
        jobs = self.run([self.job(verb, self.files[verb], block, depth) for verb in verbs])
        seconds = max(job[verb]["runtime"] for job, verb in zip(jobs, verbs, strict=True)) / 1000
        return len(verbs) * self.nbytes / seconds

    def job(self, verb: str, file: Path, block: int, depth: int) -> list[str]:
        fixed = ["--direct=1", "--ioengine=libaio", "--overwrite=1", f"--size={self.nbytes}"]
        return [f"--name={verb}", f"--filename={file}", f"--rw={verb}", f"--bs={block}M", f"--iodepth={depth}", *fixed]

    def run(self, jobs: list[list[str]]) -> list[dict[str, Any]]:
        command = ["fio", "--output-format=json", *(option for job in jobs for option in job)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        result: list[dict[str, Any]] = json.loads(output)["jobs"]
        return result


def mapped_pages(nbytes: int) -> torch.Tensor:
    """Memory that is there, mapped as the runtime maps it: in huge pages."""
    return map_memory(nbytes).random_()


def small_pages(nbytes: int) -> torch.Tensor:
    """The same in pages of 4 KiB, whatever the system prefers."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8).random_()


def asked(arguments: argparse.Namespace) -> dict[str, Any]:
    """Under which conditions a drive was measured."""
    tool = shutil.which("fio")
    fio = subprocess.run([tool, "--version"], check=True, capture_output=True, text=True).stdout.strip() if tool else ""
    options = {name: getattr(arguments, name) for name in ("request_mib", "requests", "rounds")}
    return {
        **conditions(),
        "disk": arguments.disk,
        "fio": fio,
        "setting": {**options, "block_bytes": grid.BLOCK, "threads": ssd.THREADS},
    }


if __name__ == "__main__":
    main()
