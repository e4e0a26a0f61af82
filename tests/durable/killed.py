"""Durable runs in this process: what a kill after a step would leave is copied aside, and put back for another run.

Processes that are killed are in children.py.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiered import Harness, Make, Outcome, outcome, step, tokens

from gs_compile.model.tiered_optimizer import TieredOptimizer
from gs_compile.runtime.storage.folder import NEXT_STATUS
from gs_compile.runtime.storage.manifest import read
from gs_compile.runtime.storage.stored import FOLDER, Manifest

Hook = Callable[[int, TieredOptimizer], None]


@dataclass
class Taken:
    """What training has come to: losses, norms of gradients and random numbers, and what is left after the last step."""

    first: int  # the number of steps before the first one
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    drawn: list[tuple[float, ...]] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)  # by the number of steps before

    def differences(self, reference: Taken) -> list[str]:
        """Where this run is not bitwise a stretch of another."""
        stretch = slice(self.first - reference.first, self.first - reference.first + len(self.losses))
        found = [
            name
            for name in ("losses", "norms", "drawn")
            if repr(getattr(self, name)) != repr(getattr(reference, name)[stretch])
        ]
        for number, after in self.outcomes.items():
            found += [f"{name} after {number}" for name in after.differences(reference.outcomes[number])]
        return found


def steps(
    harness: Harness,
    optimizer: TieredOptimizer,
    numbers: Sequence[int],
    *,
    after: Hook = lambda number, optimizer: None,
    reads: bool = False,
) -> Taken:
    """Steps on the batches of these numbers; random numbers are drawn after each. reads: all is read after each."""
    taken = Taken(numbers[0])
    for number in numbers:
        taken.losses.append(step(harness.model, optimizer, tokens(number)))
        assert optimizer.last_step is not None
        taken.norms.append(optimizer.last_step.grad_norm)
        taken.drawn.append((float(torch.rand(())), random.random(), float(np.random.rand())))
        after(number + 1, optimizer)
        if reads or number == numbers[-1]:  # which brings late updates to an end, and commits
            taken.outcomes[number + 1] = outcome(harness.model, optimizer, [], [])
    return taken


def seed(number: int = 1) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def storage_of(given: Mapping[str, Any]) -> list[Path]:
    found = given["storage"]
    return [found] if isinstance(found, Path) else list(found)


@dataclass
class Killed:
    """What kills leave of one run: copies of its folders, by the number of steps that it had taken."""

    aside: Path
    directories: Sequence[Path]
    taken: Taken

    def put_back(self, number: int) -> Manifest:
        """The directories as a kill would have left them; gives the commit there."""
        for directory, each in zip(self.directories, self._copies(number), strict=True):
            shutil.rmtree(directory / FOLDER, ignore_errors=True)
            shutil.copytree(each, directory / FOLDER)
        found = read(self.directories[0] / FOLDER)
        assert found is not None, "there was no commit"
        return found

    def keep(self, number: int, optimizer: TieredOptimizer) -> None:
        """Copy the folders aside as they are once all that was begun is done; what is to come later is not."""
        assert optimizer.engine is not None
        optimizer.engine.tiers.synchronize()
        for directory, each in zip(self.directories, self._copies(number), strict=True):
            copied(directory / FOLDER, each)

    def keep_at(self, *numbers: int) -> Hook:
        return lambda number, optimizer: self.keep(number, optimizer) if number in numbers else None

    def _copies(self, number: int) -> Iterator[Path]:
        return (self.aside / str(number) / str(place) for place in range(len(self.directories)))


def copied(folder: Path, to: Path) -> None:
    """The folder of a run that goes on; the thread that tells of it may rename what it writes meanwhile."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns(NEXT_STATUS))


@contextmanager
def resumed(
    harness: Harness, make: Make, given: Mapping[str, Any], former: Sequence[Path] = ()
) -> Iterator[TieredOptimizer]:
    """A model and an optimizer that go on; `former`: from these directories, and not from the storage that is given."""
    seed(7)  # nothing of it is seen

    def make_known(groups: list[dict[str, Any]]) -> TieredOptimizer:
        optimizer = make(groups)
        optimizer.kept.storage = former
        return optimizer

    with harness.fresh(make_known, {"durability": "step", "resume": "auto", **given}) as optimizer:
        yield optimizer


def clean(given: Mapping[str, Any]) -> None:
    for directory in storage_of(given):
        shutil.rmtree(directory / FOLDER, ignore_errors=True)
