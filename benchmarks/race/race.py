"""race: every contestant on the same model, batches and drive: seconds, tokens a second, memory, bytes, and the bounds.

    python -m benchmarks.race.race --preset 110m --micro-batches 1 2 4 8 16 --output benchmarks/results/race-110m.json

Losses are compared with plain PyTorch's before anything is timed; whoever differs is shown as wrong. Rounds take the
contestants in turn, so that a machine that slows down slows all of them. A run that is in the output already is not
run again: a race that was interrupted, or whose `--minutes` were up, goes on where it stopped. `registry` tells how
contestants are named.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import save
from benchmarks.race.measures import add_bounds
from benchmarks.race.protocol import Case
from benchmarks.race.registry import PLAIN, Entry
from benchmarks.race.run import NO_FINALS, Finals, Run
from benchmarks.race.settings import (
    Settings,
    add_case_arguments,
    add_output_arguments,
    add_settings_arguments,
    asked_of,
    begin,
    case_of,
    settings_of,
    started,
)
from gs_compile.machine import format_bytes
from gs_compile.planner.measure.profile import Profile

CONTESTANTS = (
    "plain",
    "fsdp2",
    "zero-infinity",
    "vertical/ssd/eager",
    "vertical/0.75/eager",
    "vertical/host/eager",
    "vertical/ssd/inductor",
    "vertical/host/inductor",
    "horizontal/ssd/eager",
    "single/ssd/eager",
    "lifetime/ssd/eager",
)


def race(
    case: Case,
    numbers: list[int],
    found: dict[str, Any],
    settings: Settings,
    output: Path,
    *,
    machine: Profile,
    finals: Finals,
) -> dict[str, Any]:
    """All runs, one for each number of micro-batches; `found` is what is known already, and in `output` after each."""
    names = found["contestants"]
    found |= {"rounds": settings.rounds, "profile": machine.as_dict()}
    done = {run["micro_batches"]: run for run in found.get("heats", []) if run["complete"]}
    for number in numbers:
        if number in done:
            print(f"{number} micro-batches: done before", flush=True)
        elif settings.left <= 0:
            print(f"{number} micro-batches: not raced, the time is up", flush=True)
        else:
            print(f"{number} micro-batches:", flush=True)
            entries = [Entry.parse(name) for name in names]
            run = Run(replace(case, micro_batches=number), entries, settings, finals).run()
            add_bounds(run["contestants"], replace(machine, **run["drive"]))
            show(run)
            done[number] = run
            found["heats"] = [done[each] for each in sorted(done)]
            save(found, output)
    return found


def raced(arguments: argparse.Namespace, names: list[str], finals: Finals = NO_FINALS) -> None:
    """A race of these contestants, as a command line says."""
    begin()
    case = case_of(arguments)
    found = started({**asked_of(case, arguments), "contestants": names}, arguments)
    with settings_of(arguments) as (settings, machine):
        numbers = sorted(set(arguments.micro_batches))
        race(case, numbers, found, settings, arguments.output, machine=machine, finals=finals)


def add_race_arguments(parser: argparse.ArgumentParser, micro_batches: list[int]) -> None:
    """Options of every race; `micro_batches` are raced where no others are given."""
    add_case_arguments(parser)
    add_settings_arguments(parser)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=micro_batches)
    add_output_arguments(parser)


def show(run: dict[str, Any]) -> None:
    """A line for each contestant."""
    for name, found in run["contestants"].items():
        if "median_seconds" not in found:
            print(f"  {name:<28} {found['verdict'].splitlines()[0]}")
            continue
        speed = run["tokens"] / found["median_seconds"]
        share = f", {found['share']:.0%} of its roofline" if "share" in found else ""
        share += f", predicted {found['predicted_seconds']:.3f} s" if "predicted_seconds" in found else ""
        device = f" (device {format_bytes(found['step_peak_device'])})" if found["step_peak_device"] else ""
        note = "" if found["verdict"] == "right" else f"  {found['verdict']}"
        print(
            f"  {name:<28} {found['median_seconds']:8.3f} s ±{found['spread']:.0%} {speed:8.0f} tokens/s{share}, peak "
            f"{format_bytes(found['step_peak_rss'])}{device}, read {format_bytes(int(found['read_bytes']))}, "
            f"written {format_bytes(int(found['write_bytes']))}{note}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_race_arguments(parser, [1, 4, 16])
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="names, with commas between")
    arguments = parser.parse_args()
    names = [name.strip() for name in arguments.contestants.split(",")]
    for name in names:
        try:
            Entry.parse(name)
        except ValueError as error:
            parser.error(str(error))
    if not arguments.peers_python.exists():
        others = [name for name in names if not Entry.parse(name).is_ours]
        print(f"{arguments.peers_python} is not there: {', '.join(others)} run with {sys.executable}", flush=True)
    if PLAIN not in names:
        print("plain is not in the race: it only says which losses are right", flush=True)
    raced(arguments, names)


if __name__ == "__main__":
    main()
