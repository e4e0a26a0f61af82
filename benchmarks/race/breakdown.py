"""breakdown: where each second of a step goes: computed, waited for which lane, spent in Python between operations.

Ours are asked by `breakdown`: the runtime's own sums tell what was computed, and its trace what the computation waited
for (`optimizer.waits`). The rest is Python: issuing operations, taking memory, autograd, guards. Plain PyTorch only
computes. Of ZeRO-Infinity DeepSpeed's own calls are timed (`zero_breakdown`). Nothing is profiled, so nothing is slower
than in the race.

    python -m benchmarks.race.breakdown --preset 110m --output benchmarks/results/race-breakdown.json
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.race.measures import MachineSpeed, machine_facts
from benchmarks.race.protocol import Case
from benchmarks.race.registry import Entry
from benchmarks.race.run import CHECKED_STEPS, START_SECONDS, STEP_SECONDS, warmed_up
from benchmarks.race.settings import (
    Settings,
    add_case_arguments,
    add_rows,
    add_settings_arguments,
    asked_of,
    case_of,
    command_line,
    end_gently,
    load,
    settings_of,
)
from benchmarks.race.worker import Worker, WorkerError

CONTESTANTS = (
    "plain",
    "zero-infinity",
    "vertical/host/eager",
    "vertical/ssd/eager",
    "vertical/half/eager",
    "horizontal/ssd/eager",
)
TELLING = ("zero-infinity",)  # of the peers, who tells where its seconds go


def break_down(case: Case, names: list[str], settings: Settings) -> dict[str, Any]:
    """One number of micro-batches: a contestant after the other takes its steps, while the others sleep."""
    speed, found = MachineSpeed(), {}
    with tempfile.TemporaryDirectory(dir=settings.storage, prefix="race-") as storage:
        for name in names:
            entry = Entry.parse(name)
            with ExitStack() as stack:
                worker = stack.enter_context(
                    entry.start(case, Path(storage), peers_python=settings.peers_python, machine=settings.machine)
                )
                speed.sample()
                try:
                    found[name] = one(worker, entry, settings)
                except WorkerError as error:
                    found[name] = {"why": str(error)}
                print(f"  {name}: {in_words(found[name])}", flush=True)
    return {"micro_batches": case.micro_batches, "contestants": found, "matmul_spread": speed.spread}


def one(worker: Worker, entry: Entry, settings: Settings) -> dict[str, Any]:
    """The seconds of one of several steps, in parts."""
    worker.ready(START_SECONDS)
    count = settings.num_steps(warmed_up(worker) / 2)
    if entry.is_ours or entry.name.split("/")[0] in TELLING:
        return worker.ask(f"breakdown {CHECKED_STEPS} {count}", STEP_SECONDS * count)
    seconds = worker.ask(f"steps {CHECKED_STEPS} {count}", STEP_SECONDS * count)["seconds"] / count
    return {"seconds": seconds, "compute": seconds, "waits": {}, "python": 0.0, "busy": {}, "bytes": {}}


def in_words(found: dict[str, Any]) -> str:
    if "why" in found:
        return found["why"].splitlines()[0]
    waits = sum(found["waits"].values())
    parts = {"computed": found["compute"], "waited": waits, "in Python": found["python"]}
    return f"{found['seconds']:.3f} s: " + ", ".join(f"{value:.3f} {name}" for name, value in parts.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_case_arguments(parser)
    add_settings_arguments(parser)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--contestants", default=",".join(CONTESTANTS))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    end_gently()
    case, names = case_of(arguments), arguments.contestants.split(",")
    found = load(arguments.output, {**asked_of(case, arguments), "contestants": names}, again=arguments.again)

    def measured(number: int) -> dict[str, Any]:
        print(f"{number} micro-batches:", flush=True)
        return break_down(replace(case, micro_batches=number), names, settings)

    with settings_of(arguments) as (settings, _):
        found |= {"commands": [*found.get("commands", []), command_line()], "machine": machine_facts()}
        add_rows(found, arguments.micro_batches, settings, arguments.output, measured)


if __name__ == "__main__":
    main()
