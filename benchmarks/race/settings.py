"""settings: what all scripts of the race share: which case, how a race is run, and results that are gone on with."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from benchmarks.common import command_line, machine_facts, save
from benchmarks.race.measures import wait_until_idle
from benchmarks.race.protocol import PRESETS, Case
from benchmarks.race.registry import PEERS_PYTHON
from benchmarks.slow_drive import AS_IT_IS, SlowDrive, add_drive_argument, bounded, rates_of, slowed
from gs_compile.planner.measure.machines import probe, profile
from gs_compile.planner.measure.profile import BESIDE, MIXED, Profile

MOST_STEPS = 8  # of a round
DRIVE_FIGURES = [*BESIDE, *(name for each in MIXED.items() for name in each if name.startswith("ssd"))]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is run."""

    rounds: int = 3
    round_seconds: float = 2.0  # a round has as many steps as the fastest takes in that time, MOST_STEPS at most
    drive_seconds: float = 3.0  # in which the drive is measured before and after every round; 0: not at all
    storage: Path | None = None
    machine: Path | None = None  # the profile that ours plan with
    slow_drive: SlowDrive = AS_IT_IS
    peers_python: Path = PEERS_PYTHON
    deadline: float = math.inf  # of time.monotonic()
    most_together: int = 100  # contestants in memory at once
    start_together: bool = False  # all of them side by side: memory has to hold them, and their first steps say no time

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def num_steps(self, step_seconds: float) -> int:
        """Of a round, where the fastest takes so long for one."""
        return max(1, min(MOST_STEPS, round(self.round_seconds / step_seconds)))


def begin() -> None:
    """Whoever ends the race ends its contestants too; and threads of this process that wait sleep."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def case_of(arguments: argparse.Namespace) -> Case:
    """The preset with what was given changed."""
    given = {entry.name: getattr(arguments, entry.name, None) for entry in fields(Case)}
    return replace(
        PRESETS[arguments.preset],
        **{name: value for name, value in given.items() if value is not None and name != "micro_batches"},
    )


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of results that are gone on with."""
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--again", action="store_true", help="do not go on with what is in the output")


def add_case_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that choose a case."""
    parser.add_argument("--preset", choices=list(PRESETS), default="25m")
    for name in ("layers", "hidden", "heads", "vocabulary", "sequence"):
        parser.add_argument(f"--{name}", type=int, help="instead of the preset's")
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--ranks", type=int, help="processes of a contestant, each with micro-batches of its own")
    parser.add_argument("--precision", choices=["fp32", "bf16"])
    parser.add_argument("--max-grad-norm", type=float)
    parser.add_argument("--device", choices=["cpu", "cuda"], help="that computes")


def add_settings_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that say how a race is run."""
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-seconds", type=float, default=2.0, help="a round takes the fastest at least so long")
    parser.add_argument("--minutes", type=float, default=math.inf, help="what does not fit is skipped, and said so")
    parser.add_argument("--storage", type=Path, help="a directory on a fast drive (default: a temporary one)")
    parser.add_argument("--peers-python", type=Path, default=PEERS_PYTHON, help="of the environment of the peers")
    parser.add_argument("--machine", type=Path, help="a profile to plan with (default: this machine, probed now)")
    add_drive_argument(parser)
    parser.add_argument("--most-together", type=int, default=100, help="contestants in memory at once, without plain")
    parser.add_argument("--start-together", action="store_true", help="side by side, where memory holds all of them")


@contextmanager
def settings_of(arguments: argparse.Namespace) -> Iterator[tuple[Settings, Profile]]:
    """How runs are run, and the machine's profile, measured now or given; a drive that is to be slowed is so for all
    that is raced until the end of the block.
    """
    deadline = time.monotonic() + 60 * arguments.minutes
    if not wait_until_idle():
        print("other work keeps this machine busy, or it does not tell: what is measured may be too slow", flush=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        storage, path = arguments.storage or Path(folder), Path(folder) / "machine.json"
        slow_drive = AS_IT_IS
        if rates := rates_of(arguments):
            try:
                slow_drive = stack.enter_context(slowed(storage, read=rates[0], write=rates[1]))
            except OSError as error:
                raise SystemExit(str(error)) from error
        with slow_drive.as_it_is():
            found = profile(arguments.machine) if arguments.machine else probe((storage,))
        found = replace(found, **bounded({name: getattr(found, name) for name in DRIVE_FIGURES}, slow_drive.limits))
        found.save(path)
        settings = Settings(
            rounds=arguments.rounds,
            round_seconds=arguments.round_seconds,
            storage=arguments.storage,
            machine=path,
            slow_drive=slow_drive,
            peers_python=arguments.peers_python,
            deadline=deadline,
            most_together=arguments.most_together,
            start_together=arguments.start_together,
        )
        yield settings, found


def asked_of(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """What results in a file have to agree in, to be gone on with."""
    asked: dict[str, Any] = {"setting": {**asdict(case), "micro_batches": None}}
    if rates := rates_of(arguments):
        asked["drive_bytes_per_second"] = list(rates)
    return asked


def started(asked: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The results that are gone on with, by this command, on this machine."""
    found = load(arguments.output, asked, again=arguments.again)
    return found | {"commands": [*found.get("commands", []), command_line()], "machine": machine_facts()}


def load(output: Path, asked: dict[str, Any], *, again: bool) -> dict[str, Any]:
    """The results in the output of the same settings; `asked` alone at the start."""
    if again or not output.exists():
        return dict(asked)
    found = json.loads(output.read_text())
    if any(found.get(key) != value for key, value in asked.items()):
        raise SystemExit(f"{output} is of another case or other contestants: choose another --output, or --again")
    return dict(found)


def add_rows(
    found: dict[str, Any],
    numbers: list[int],
    settings: Settings,
    output: Path,
    measure: Callable[[int], dict[str, Any]],
) -> None:
    """A row for each number of micro-batches that has none yet, as far as time goes; each is in `output` at once."""
    rows = {row["micro_batches"]: row for row in found.get("rows", [])}
    for number in numbers:
        if number in rows or settings.left <= 0:
            print(f"{number} micro-batches: {'done before' if number in rows else 'the time is up'}", flush=True)
            continue
        rows[number] = measure(number)
        found["rows"] = [rows[each] for each in sorted(rows)]
        save(found, output)
