"""The figures that tests plan from, in place of what runs measure: a machine, the seconds of code, drives' bandwidth.

`give` puts them in place, in the process of the tests and in those that they start. Tests of a measurement itself take
the fixture `measured`. FIGURES_SEED=3 multiplies each figure by a factor between 1/8 and 8: a test that fails then hangs
on the speed of the machine, and takes the fixture `given_figures`, which undoes that.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gs_compile.capture.graph import UnitGraph
from gs_compile.codegen.compiled import SpecializedModel
from gs_compile.placement.workload import UnitCost, Workload
from gs_compile.planner import at_hand
from gs_compile.planner.cost import timing
from gs_compile.planner.cost.known_times import KnownTimes, UnitSeconds
from gs_compile.planner.measure.shipped import ENVIRONMENT
from gs_compile.runtime.storage.drive import Drive

SEED = "FIGURES_SEED"
MACHINE = Path(__file__).with_name("machine.json")
CODE_FLOPS_PER_SECOND, CALL_SECONDS = 2.5e9, 1e-4  # as measured of the tests' tiny models
DRIVE_BYTES_PER_SECOND = 1e9


def factor(name: str) -> float:
    """The factor of the figure with this name: 1.0, or the same one in every process with this seed."""
    seed = os.environ.get(SEED)
    return 8 ** random.Random(f"{seed} {name}").uniform(-1, 1) if seed else 1.0


def machine() -> Path:
    """The file of a profile, in a folder for what is kept beside it; of a machine with other rates where there is a
    seed.
    """
    figures = json.loads(MACHINE.read_text())
    for name, figure in figures.items() if os.environ.get(SEED) else ():
        if isinstance(figure, dict):
            figures[name] = {key: value * factor(f"{name} {key}") for key, value in figure.items()}
        elif name.endswith("_per_second"):
            figures[name] = figure * factor(name.replace("_mixed", ""))  # never faster than alone
        elif name.endswith("_seconds"):
            figures[name] = figure * factor(name)
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / MACHINE.name
    path.write_text(json.dumps(figures))
    return path


def code_seconds(workload: Workload, layout: SpecializedModel, unit: UnitGraph, share: float) -> UnitSeconds:
    """In place of `timing._timed`: what follows from the operations of the unit's code."""
    cost = workload.costs[unit.unit]
    kind = unit.unit if isinstance(unit.unit, str) else "layer"
    forward, backward = (
        factor(f"{kind} {way}") * (CALL_SECONDS + flops / CODE_FLOPS_PER_SECOND)
        for way, flops in (("forward", cost.forward_flops), ("backward", cost.backward_flops))
    )
    return forward, backward


def level_seconds(
    layout: SpecializedModel, unit: UnitGraph, cost: UnitCost, levels: Sequence[int], share: float
) -> UnitSeconds:
    """In place of `timing._timed_levels`: what was estimated from the operations of the levels' code."""
    slower = (factor(f"level {number}") for number in range(len(cost.levels)))
    pairs = zip(cost.levels, slower, strict=True)
    return [each for level, times in pairs for each in (level.seconds[0], level.seconds[1] * times)]


def bytes_per_second(drive: Drive) -> float:
    """In place of `Drive.bytes_per_second`: of each directory another one where there is a seed."""
    return DRIVE_BYTES_PER_SECOND * factor(drive.folder.parent.name)


GIVEN = (
    (timing, "_compile", lambda *_: None),
    (timing, "_timed", code_seconds),
    (timing, "_timed_levels", level_seconds),
    (Drive, "bytes_per_second", bytes_per_second),
)
MEASURED = tuple((owner, name, getattr(owner, name)) for owner, name, _ in GIVEN)


def give() -> None:
    at_hand.KnownTimes = lambda _: KnownTimes()  # a test takes none from another
    for owner, name, given in GIVEN:
        setattr(owner, name, given)
    if ENVIRONMENT not in os.environ:
        os.environ[ENVIRONMENT] = str(machine())
