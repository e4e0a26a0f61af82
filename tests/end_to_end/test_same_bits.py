"""Where data lives, when it is updated, and what is saved and kept does not change one bit of what is learned.

One table: the *task*, which the result depends on, and the *place*, which it does not. Its rows (`pairs.covering`) meet
each pair of settings that can meet. Each row is trained, and compared bit for bit with its task's reference, which is
trained once: all in host memory, with whole masters and late updates.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import Row, covering, pairs
from saving import saving, with_room
from tiered import Harness, Outcome, adamw, moved, muon, options, outcome, shared, step, tokens

import gs_compile
from gs_compile.errors import NonFiniteWarning
from gs_compile.passes.baselines.registry import SCHEDULES
from gs_compile.placement.levels import Share
from gs_compile.planner.boundary import FIRST
from gs_compile.planner.builder import planned_peak
from gs_compile.runtime.optimizer import OptimizerStep
from gs_compile.schedules import BY_MICRO_BATCH

KEEPS_CAPTURES = True
NUM_STEPS, READ = 3, 1
SOME, ALL = 1.6, 0.3  # bounds of the norm with which some steps are scaled, and all are
DROPOUT = {"model": 0.1, "bf16": 0.0, "mixed": 0.0}  # by precision
SPOILED = {0: ("e", math.nan), 2: (1, -math.inf)}  # steps, and what an element of a unit's gradient becomes
OPTIMIZERS = {
    "adamw": adamw,
    "adamw, bf16": partial(adamw, state_dtype=torch.bfloat16),
    "adamw, 8 bits": partial(adamw, state_dtype="8bit"),
    "sgd": partial(gs_compile.SGD, lr=0.05, momentum=0.9),
    "lion": partial(gs_compile.Lion, lr=1e-3),
    "muon": muon,
    "muon, bf16": partial(muon, state_dtype=torch.bfloat16),
}
SHARES = {
    "nothing": [],
    "host": [Share(1, "host", 1.0)],
    "ssd": [Share(2, "ssd", 1.0)],
    "host, ssd": [Share(1, "host", 0.4), Share(2, "ssd", 0.3)],
    "device, host": [Share(2, "device", 0.5), Share(1, "host", 0.3)],
}


class Task(NamedTuple):
    """What is learned: of each schedule and setting another result."""

    schedule: str
    precision: str
    optimizer: str
    bound: float | None
    spoiled: bool


TASK = {
    "schedule": ("vertical", "horizontal", "lifetime", "single"),
    "precision": ("model", "bf16", "mixed"),  # the last: bf16, with norms in fp32
    "optimizer": tuple(OPTIMIZERS),
    "bound": (None, math.inf, SOME, ALL),  # of the norm
    "spoiled": (False, True),
}
PLACE = {  # the first of each is the reference's
    "alpha": (1.0, 0.0, 0.3),
    "clip": ("delayed", "speculative"),
    "parameter": (1.0, 0.0, 0.4),  # in host memory; and so on
    "checkpoint": (1.0, 0.0, 0.4),
    "state": (1.0, 0.0, 0.4),
    "gradient": (1.0, 0.0, 0.4),  # sums, between micro-batches
    "on_device": (0.0, 0.6),  # of what is not in host memory
    "masters": ("whole", "split"),
    "saved": tuple(SHARES),
    "carried": ((), FIRST),
    "retained": ((), (1, 0, "t")),
    "room": (0.0, 0.4, 1.0),  # of `lifetime`
    "separate_device": (False, True),
    "durability": ("off", "step"),
    "num_directories": (1, 2),
    "threads": (1, 2),
    "reads": (False, True),  # all values are read between two steps
}
AXES = TASK | PLACE


def meets(row: Row) -> bool:
    """Whether the settings of a row can meet, whose other axes are filled later. Of an axis that means nothing beside
    others only the first setting does.
    """
    schedules = [row["schedule"]] if "schedule" in row else TASK["schedule"]
    bounds = [row["bound"]] if "bound" in row else TASK["bound"]
    return any(_meets({**row, "schedule": schedule, "bound": bound}) for schedule in schedules for bound in bounds)


def _meets(row: Row) -> bool:
    def can_be(axis: str, *settings: Any) -> bool:
        return row.get(axis, settings[0]) in settings

    schedule, has_bound = row["schedule"], row["bound"] is not None
    saves, is_separate = not can_be("saved", "nothing"), can_be("separate_device", True)
    return (
        (has_bound or (can_be("clip", "delayed") and can_be("spoiled", False)))
        and (not has_bound or can_be("clip", "speculative") or can_be("alpha", 1.0))
        and (can_be("precision", "bf16", "mixed") or can_be("masters", "whole"))
        and (is_separate or (can_be("on_device", 0.0) and can_be("saved", *list(SHARES)[:-1])))
        and (not saves or (can_be("checkpoint", 0.0) and schedule != "lifetime"))
        and (schedule in BY_MICRO_BATCH or can_be("gradient", 1.0))
        and (schedule == "lifetime" or can_be("room", 0.0))
        and (not SCHEDULES[schedule].as_published or (can_be("carried", ()) and can_be("retained", ())))
    )


def task_of(row: Row) -> Task:
    return Task(*(row[axis] for axis in TASK))


TASKS = covering(TASK, meets)  # few, so that few references are trained


def _is_of_a_task(row: Row) -> bool:
    tasks = (task for task in TASKS if all(row.get(axis, setting) == setting for axis, setting in task.items()))
    return any(meets(row | task) for task in tasks)


ROWS = covering(AXES, _is_of_a_task)


# A run --------------------------------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """What a run has come to, and what its steps say of themselves."""

    outcome: Outcome
    rolled_back: list[bool]
    warm: list[bool]  # whether the step has found parameters in memory
    keeps: bool  # whether steps leave any there


def train(task: Task, row: Mapping[str, Any], folder: Path) -> Trained:
    """Some steps, and another whose bytes are those of its program."""
    model, make = harness_of(task).model, partial(OPTIMIZERS[task.optimizer], max_grad_norm=task.bound)
    losses: list[float] = []
    norms, rolled_back, warm = [], [], []
    torch.manual_seed(1)
    with (
        saving(*SHARES[row["saved"]], carried=row["carried"], retained=row["retained"], held=row["retained"][:1]),
        with_room(row["room"]) if task.schedule == "lifetime" else nullcontext(),
        spoiling(SPOILED if task.spoiled else {}, losses),
        harness_of(task).fresh(make, given_of(task, row, folder)) as optimizer,
    ):
        for number in range(NUM_STEPS):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", NonFiniteWarning)
                losses.append(step(model, optimizer, tokens(number)))
            assert not any("updated" in str(warning.message) for warning in caught), "nothing is left half done"
            info, tiers, program = optimizer.last_step, optimizer.engine.tiers, optimizer.engine.snapshots[-1]
            is_spoiled = task.spoiled and number in SPOILED
            assert info.skipped == is_spoiled == any(warning.category is NonFiniteWarning for warning in caught)
            assert tiers.slab.nbytes <= max(planned_peak(program, "host"), program.slab_nbytes)
            norms.append(info.grad_norm)
            rolled_back.append(info.rolled_back)
            warm.append(bool(tiers.placement.carried_values & tiers.placement.present(program.ops)))
            if row["reads"] and number == READ:
                outcome(model, optimizer, losses, norms)
        bytes_of = moved(model, optimizer, tokens(NUM_STEPS))
        placement = optimizer.engine.placement
        found = Trained(outcome(model, optimizer, losses, norms), rolled_back, warm, bool(placement.carried_values))
    assert bytes_of.traced == bytes_of.planned
    assert bytes_of.asked == {key: nbytes for key, nbytes in bytes_of.planned.items() if key[0].startswith("ssd")}
    assert placement.layout.schedule == task.schedule
    assert placement.speculative == (row["clip"] == "speculative")
    assert placement.decision.shares == tuple(SHARES[row["saved"]])
    assert found.keeps or not row["carried"] or row["parameter"] == 1.0 or row["alpha"] == 1.0
    return found


def harness_of(task: Task) -> Harness:
    kind = "model" if task.precision == "mixed" else task.precision
    sizes = {"norms": torch.float32} if task.precision == "mixed" else {}
    return shared(kind, halved=task.schedule == "single", dropout=DROPOUT[task.precision], **sizes)


def given_of(task: Task, row: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    ratios = {"parameter": row["parameter"], "checkpoint": row["checkpoint"], "optimizer": row["state"]}
    ratios["device_checkpoint"] = row["on_device"] * (1 - row["checkpoint"])
    if task.precision != "model":  # without masters parameters go to the host to be updated
        ratios["device_parameter"] = row["on_device"] * (1 - row["parameter"])
    if task.schedule in BY_MICRO_BATCH:
        ratios["gradient"] = row["gradient"]
    return options(
        [folder / name for name in "ab"[: row["num_directories"]]],
        schedule=task.schedule,
        ratios=ratios,
        clip=None if task.bound is None else row["clip"],
        masters=row["masters"] if task.precision != "model" else None,
        **{name: row[name] for name in ("alpha", "separate_device", "durability", "threads")},
    )


@contextmanager
def spoiling(spoiled: Mapping[int, tuple[Any, float]], losses: list[float]) -> Iterator[None]:
    """Gradients of these steps are not finite; `losses`: of the steps so far."""
    norm = OptimizerStep.norm

    def spoil(self: OptimizerStep, op: Any, gradient: Any, sums: Any, record: Any) -> Any:
        if spoiled.get(len(losses), (None, 0.0))[0] == op.reads[0].unit:
            gradient.flat[5] = spoiled[len(losses)][1]
        return norm(self, op, gradient, sums, record)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OptimizerStep, "norm", spoil)
        yield


# The law ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What a task comes to; the schedule `lifetime` is to come to what the horizontal one does."""
    first = {axis: several[0] for axis, several in PLACE.items()}

    @cache
    def of(task: Task) -> Outcome:
        if task.schedule == "lifetime":
            return of(task._replace(schedule="horizontal"))
        return train(task, first, tmp_path_factory.mktemp("reference")).outcome

    return of


def check(row: Row, reference: Any, folder: Path) -> None:
    task, speculates = task_of(row), row["clip"] == "speculative" and row["alpha"] < 1.0
    found, expected = train(task, row, folder), reference(task)
    assert found.outcome.differences(expected) == []
    skipped = [task.spoiled and number in SPOILED for number in range(NUM_STEPS)]
    scaled = [task.bound is not None and norm > task.bound for norm in expected.norms]
    assert found.rolled_back == [speculates and any(both) for both in zip(skipped, scaled, strict=True)]
    ended = [row["reads"] and number == READ and is_late(row) for number in range(NUM_STEPS)]
    holds = [not any(both) for both in zip(found.rolled_back, ended, strict=True)]
    assert found.warm == [found.keeps and held for held in [False, *holds[:-1]]]


def is_late(row: Row) -> bool:
    """Whether a step leaves updates to the next one, which end early where values are read."""
    return row["alpha"] > 0.0 or row["bound"] is not None


def named(row: Row) -> str:
    """What of a row is not the first of its axis."""
    return ", ".join(f"{axis} {setting}" for axis, setting in row.items() if setting != AXES[axis][0])


def few_with_all_settings(rows: Sequence[Row]) -> list[Row]:
    """Rows that have each setting of each axis: those that are not slow."""
    missing, found = {(axis, str(setting)) for axis, several in AXES.items() for setting in several}, list[Row]()

    def new(row: Row) -> set[tuple[str, str]]:
        return missing & {(axis, str(setting)) for axis, setting in row.items()}

    while missing:
        found.append(max(rows, key=lambda row: len(new(row))))
        missing -= new(found[-1])
    return found


FAST = few_with_all_settings(ROWS)


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.slow] * (row not in FAST)) for row in ROWS],
    ids=map(named, ROWS),
)
def test_each_row_learns_what_the_reference_does(reference, tmp_path, row):
    check(row, reference, tmp_path)


FAST_TASKS = {task_of(row) for row in FAST}  # others' references are trained for slow rows alone


@pytest.mark.parametrize(
    "task",
    [
        pytest.param(task, marks=[pytest.mark.slow] * (task not in FAST_TASKS))
        for task in (Task(**each) for each in TASKS)
    ],
    ids=str,
)
def test_the_references_learn(reference, task):
    """Every parameter; and where gradients are finite every step is scaled that is to be."""
    found, harness = reference(task), harness_of(task)
    for (name, _), initial in zip(harness.model.named_parameters(), harness.initial, strict=True):
        assert not torch.equal(found.values[name], initial)
    assert all(value.isfinite().all() for value in found.values.values())
    finite = [norm for norm in found.norms if math.isfinite(norm)]
    assert len(finite) == NUM_STEPS - 2 * task.spoiled
    assert all(norm > ALL for norm in finite)


def test_of_some_tasks_some_steps_are_scaled(reference):
    tasks = [Task(**task) for task in TASKS if task["bound"] == SOME and not task["spoiled"]]
    assert {True, False} in [{norm > SOME for norm in reference(task).norms} for task in tasks]


def rows() -> st.SearchStrategy[Row]:
    """Any, also of tasks that the table has no row of."""
    return st.fixed_dictionaries({axis: st.sampled_from(several) for axis, several in AXES.items()}).map(repaired)


def repaired(drawn: Row) -> Row:
    """The settings that can meet those of the axes before, else the first that can."""
    row: Row = {}
    for axis, setting in drawn.items():
        row[axis] = next(each for each in (setting, *AXES[axis]) if meets(row | {axis: each}))
    return row


@given(rows())
def test_the_table_meets_each_pair_that_can_meet(row):
    assert set(pairs(row)) <= {pair for each in ROWS for pair in pairs(each)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=300)
@given(row=rows())
def test_any_row_learns_what_the_reference_does(reference, tmp_path_factory, row):
    check(row, reference, tmp_path_factory.mktemp("any"))
