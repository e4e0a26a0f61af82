"""measures: what the race measures beside its contestants: the machine's speed of the moment, its drives, its bounds.

Seconds of a shared machine change from minute to minute. A fixed product of matrices, timed between the rounds, tells
by how much: `MachineSpeed.normalised` gives the seconds that a round would have taken at the race's median speed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.slow_drive import AS_IT_IS, SlowDrive, bounded
from gs_compile.planner.measure.probe import work_of
from gs_compile.planner.measure.probe_drive import drive_rates
from gs_compile.planner.measure.profile import Profile

MOST_BUSY = 0.2  # core seconds a second of an idle machine
MOST_SECTORS = 20_000  # of 512 bytes, a second
ROWS = 768  # of the product: it fits a core's cache, so that it tells the processor's speed and no one's traffic
REPEATS = 12
IN_MEMORY = {
    "eager": ("vertical/host/eager", "plain"),
    "inductor": ("vertical/host/inductor", "plain/compile=blocks", "plain/compile=model"),
}


@dataclass
class MachineSpeed:
    """Seconds of the fixed product, one entry for each `sample`."""

    seconds: list[float] = field(default_factory=list)

    def sample(self) -> float:
        """Time the product now; the first call also warms up."""
        if not self.seconds:
            _product()
        self.seconds.append(_product())
        return self.seconds[-1]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Slowest over fastest: 1.0 is a quiet machine."""
        return max(self.seconds) / min(self.seconds)

    def normalised(self, seconds: float, before: float, after: float) -> float:
        """`seconds` between two samples as they would be at the median speed."""
        return seconds * self.median / ((before + after) / 2)


@dataclass
class DriveSpeed:
    """The figures of the drive of a directory, by the profile's names, one entry for each `sample`.

    A drive that others share does not give the same from minute to minute, so one measurement tells little.
    """

    storage: Path
    seconds: float  # of one sample
    slow: SlowDrive = AS_IT_IS
    samples: list[dict[str, float]] = field(default_factory=list)

    def sample(self) -> None:
        if self.seconds:
            with self.slow.as_it_is(), work_of(torch.device("cpu")) as works:
                figures = drive_rates([self.storage], self.seconds, works)
            self.samples.append(bounded({name: each.value for name, each in figures.items()}, self.slow.limits))

    @property
    def median(self) -> dict[str, float]:
        names = self.samples[0] if self.samples else ()
        return {name: statistics.median(sample[name] for sample in self.samples) for name in names}

    def mean(self, count: int) -> dict[str, float]:
        """Of the last samples: what the drive gave between them, as far as anyone knows."""
        last = self.samples[-count:]
        return {name: statistics.mean(sample[name] for sample in last) for name in (last[0] if last else ())}


def _product() -> float:
    """Seconds of the fixed product."""
    matrix = torch.full((ROWS, ROWS), 0.5)
    start = time.perf_counter()
    for _ in range(REPEATS):
        matrix @ matrix
    return time.perf_counter() - start


def spread(values: Sequence[float]) -> float:
    """Half of the range over the median: 0.03 is plus or minus 3 %."""
    return (max(values) - min(values)) / 2 / statistics.median(values)


def io_seconds(read: float, written: float, profile: Profile) -> float:
    """The least time that the drives need for so many bytes: in turn, or both directions at once while both last."""
    alone = profile.ssd_read_bytes_per_second, profile.ssd_write_bytes_per_second
    mixed = profile.ssd_read_mixed_bytes_per_second, profile.ssd_write_mixed_bytes_per_second
    in_turn = read / alone[0] + written / alone[1]
    together = min(read / mixed[0], written / mixed[1])
    rest = (read - together * mixed[0]) / alone[0] + (written - together * mixed[1]) / alone[1]
    return min(in_turn, together + rest)


def normalised(found: dict[str, Any]) -> dict[str, Any]:
    """The results of a race with each contestant's seconds at the machine's median speed in place of those measured."""
    if "heats" not in found:
        return found
    runs = [
        run
        | {
            "contestants": {
                name: each | {"median_seconds": each["median_normalised_seconds"]} if "median_seconds" in each else each
                for name, each in run["contestants"].items()
            }
        }
        for run in found["heats"]
    ]
    return found | {"heats": runs}


def add_bounds(results: dict[str, dict[str, Any]], profile: Profile) -> None:
    """Enters for every contestant that was timed the least seconds its step could take, and what share it reaches.

    compute_seconds: of the fastest that moves nothing and has the same compiler: our own step with everything in host
        memory, or plain PyTorch; none where neither was in the race.
    io_seconds: of the bytes that the contestant itself has moved, by the operating system's count.
    share: of the roofline, the larger of both, in the seconds it took.
    """
    right = {name: found for name, found in results.items() if found["verdict"] == "right"}
    timed = {name: found for name, found in right.items() if "median_seconds" in found}
    for found in timed.values():
        names = IN_MEMORY["inductor" if is_compiled(found["settings"]) else "eager"]
        computed = [timed[name]["median_seconds"] for name in names if name in timed]
        found["io_seconds"] = io_seconds(found["read_bytes"], found["write_bytes"], profile)
        if computed:
            found["compute_seconds"] = min(computed)
            found["share"] = max(min(computed), found["io_seconds"]) / found["median_seconds"]


def is_compiled(settings: Mapping[str, Any]) -> bool:
    """Whether a contestant with these settings runs generated code."""
    return settings.get("compiler", settings.get("compile", "eager")) not in ("eager", "none")


def wait_until_idle(seconds: float = 180.0, *, quiet: int = 3) -> bool:
    """Return when the machine has been idle for `quiet` seconds; False if it is not within `seconds`, or cannot tell.

    What has just ended still gives its files and memory back, and a drive measured beside that is too slow.
    """
    end, idle_for = time.monotonic() + seconds, 0
    try:
        before = _work_done()
        while idle_for < quiet and time.monotonic() < end:
            time.sleep(1.0)
            now = _work_done()
            busy, sectors = (new - old for new, old in zip(now, before, strict=True))
            idle_for = idle_for + 1 if busy <= MOST_BUSY and sectors <= MOST_SECTORS else 0
            before = now
    except (OSError, ValueError):
        return False
    return idle_for >= quiet


def _work_done() -> tuple[float, int]:
    """Seconds of all cores and sectors of all drives since the machine has started, as Linux counts them."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    busy = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # without idle and waiting
    fields = [line.split() for line in Path("/proc/diskstats").read_text().splitlines()]
    return busy, sum(int(words[5]) + int(words[9]) for words in fields if not words[2].startswith(("loop", "ram")))
