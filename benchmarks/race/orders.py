"""orders: the vertical order against the horizontal, measured and simulated, with everything on SSD.

The drives are the limit here: short sequences, so that a step computes little beside what it moves. For each number of
micro-batches both orders take steps in turn, and the simulator says what it thinks they take; what is compared is the
ratio of the two orders' seconds. The simulator is given this machine's figures, the layers' code timed at the time, and
the drive's rates right before and after the steps.

    python -m benchmarks.race.orders --output benchmarks/results/race-orders.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.race.measures import DriveSpeed, MachineSpeed, spread
from benchmarks.race.protocol import Case
from benchmarks.race.registry import Entry
from benchmarks.race.run import CHECKED_STEPS, START_SECONDS, STEP_SECONDS, warmed_up
from benchmarks.race.settings import (
    MOST_STEPS,
    Settings,
    add_case_arguments,
    add_output_arguments,
    add_rows,
    add_settings_arguments,
    asked_of,
    begin,
    case_of,
    settings_of,
    started,
)
from gs_compile.planner.measure.profile import Profile

ORDERS = ("vertical", "horizontal")
SHORT = 32  # tokens of a sequence where none is given


def compare(case: Case, settings: Settings, home: str, compiler: str, machine: Profile) -> dict[str, Any]:
    """Both orders at one number of micro-batches."""
    speed = MachineSpeed()
    with tempfile.TemporaryDirectory(dir=settings.storage, prefix="race-") as storage, ExitStack() as stack:
        workers = {
            order: stack.enter_context(
                Entry.parse(f"{order}/{home}/{compiler}").start(case, Path(storage), machine=settings.machine)
            )
            for order in ORDERS
        }
        for worker in workers.values():
            worker.ready(START_SECONDS)
        drive, profile = DriveSpeed(Path(storage) / "drive", settings.drive_seconds), Path(storage) / "machine.json"
        warm = {order: warmed_up(worker) for order, worker in workers.items()}
        count = settings.num_steps(min(warm.values()))
        seconds: dict[str, list[float]] = {order: [] for order in ORDERS}
        simulated: dict[str, list[float]] = {order: [] for order in ORDERS}
        for number in range(settings.rounds):
            for order, worker in workers.items():
                speed.sample()
                drive.sample()
                found = worker.ask(f"steps {CHECKED_STEPS + number * count} {count}", STEP_SECONDS * MOST_STEPS)
                seconds[order].append(found["seconds"] / count)
                drive.sample()
                replace(machine, **drive.mean(2)).save(profile)
                simulated[order].append(worker.ask(f"predict {profile}", STEP_SECONDS)["predict"])
    measured = statistics.median(h / v for v, h in zip(*seconds.values(), strict=True))
    predicted = statistics.median(h / v for v, h in zip(*simulated.values(), strict=True))
    return {
        "micro_batches": case.micro_batches,
        "seconds": seconds,
        "simulated_seconds": simulated,
        "spread": {order: spread(values) for order, values in seconds.items()},
        "measured_ratio": measured,
        "simulated_ratio": predicted,
        "apart": predicted / measured - 1,
        "drive_samples": drive.samples,
        "matmul_spread": speed.spread,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_case_arguments(parser)
    add_settings_arguments(parser)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--home", default="ssd")
    parser.add_argument("--compiler", default="eager")
    add_output_arguments(parser)
    arguments = parser.parse_args()
    begin()
    case = case_of(arguments)
    case = replace(case, sequence=SHORT) if arguments.sequence is None else case
    asked = asked_of(case, arguments)
    asked["setting"] |= {"home": arguments.home, "compiler": arguments.compiler}
    found = started(asked, arguments)

    def measured(number: int) -> dict[str, Any]:
        row = compare(replace(case, micro_batches=number), settings, arguments.home, arguments.compiler, machine)
        medians = {order: statistics.median(values) for order, values in row["seconds"].items()}
        print(
            f"{number} micro-batches: {medians['vertical']:.3f} s vertical, {medians['horizontal']:.3f} s "
            f"horizontal: {row['measured_ratio']:.3f} x, simulated {row['simulated_ratio']:.3f} x "
            f"({row['apart']:+.1%})",
            flush=True,
        )
        return row

    with settings_of(arguments) as (settings, machine):
        found["profile"] = machine.as_dict()
        add_rows(found, arguments.micro_batches, settings, arguments.output, measured)


if __name__ == "__main__":
    main()
