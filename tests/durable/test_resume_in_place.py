"""What a run that goes on does not do: plan again what it was planned for, or copy what stays where it is."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial

import pytest
import torch
from asked import asked_of_storage
from killed import Killed, Taken, clean, resumed, seed, steps
from tiered import adamw, loss_of, options, shared, step, tokens

from gs_compile.errors import StorageFullError
from gs_compile.model import engine
from gs_compile.planner import at_hand, run
from gs_compile.runtime.storage import drive
from gs_compile.runtime.storage.last_commit import names_in
from gs_compile.runtime.storage.stored import FOLDER

KEEPS_CAPTURES = True
BUDGET = 1300 << 10
MODEL = {"num_layers": 3, "width": 64}
FREE = {"parameter": None, "checkpoint": None, "optimizer": None}


@pytest.fixture
def moved(monkeypatch):
    """What storage has been asked for when all parameters and states were taken up: bytes by direction."""
    found = Counter()

    def counted(store, *args, take_up=engine.take_up):
        with asked_of_storage() as asked:
            rest = take_up(store, *args)
        for (verb, _), nbytes in asked.items():
            found[verb] += nbytes
        return rest

    monkeypatch.setattr(engine, "take_up", counted)
    return found


def life(harness, make, given, aside, numbers, former=None):
    """Steps of these numbers, and what a kill after the last but one leaves."""
    found = Killed(aside, given["storage"], Taken(0))
    seed()
    goes_on = resumed(harness, make, given) if former else harness.fresh(make, given | {"durability": "step"})
    if former:
        assert former.put_back(numbers[0] + 1).step == numbers[0]
    with goes_on as optimizer:
        found.taken = steps(harness, optimizer, numbers, after=found.keep_at(numbers[-1]))
        found.placement = optimizer.engine.placement
        found.plan = optimizer.engine.planning.planned.facts
    return found


@pytest.mark.parametrize("clip", [None, "speculative"], ids=str)
def test_what_stays_in_its_files_is_not_even_read(harness, moved, tmp_path, clip):
    make = partial(adamw, max_grad_norm=0.5 if clip else None)
    given = options([tmp_path / "a", tmp_path / "b"], alpha=0.5, clip=clip)
    first = life(harness, make, given, tmp_path / "first", range(3))
    clean(given)
    again = life(harness, make, given, tmp_path / "again", range(1, 3), former=first)
    assert not moved
    assert not again.taken.differences(first.taken)


@pytest.mark.parametrize(("before", "after"), [("whole", "split"), ("split", "whole")])
def test_a_run_goes_on_with_masters_of_the_other_kind(tmp_path, before, after):
    harness, storage = shared("bf16"), tmp_path / "a"
    first = life(harness, adamw, options([storage], alpha=0.5, masters=before), tmp_path / "first", range(3))
    given = options([storage], alpha=0.5, masters=after, ratios={"optimizer": 0.5})
    clean(given)
    again = life(harness, adamw, given, tmp_path / "again", range(1, 3), former=first)
    assert {unit.state_itemsize for unit in again.placement.units} == {10 if after == "split" else 12}
    assert not again.taken.differences(first.taken)


def test_a_run_goes_on_with_states_of_another_type(tmp_path):
    """They are rounded to nearest; a run that has had them in 8 bits goes on bit for bit, wherever they are."""
    harness, storage = shared("bf16"), tmp_path / "a"
    eight = partial(adamw, state_dtype="8bit")
    first = life(harness, adamw, options([storage], alpha=0.5), tmp_path / "first", range(3))
    given = options([storage], alpha=0.5, ratios={"optimizer": 0.5})
    clean(given)
    again = life(harness, eight, given, tmp_path / "again", range(1, 4), former=first)
    assert {unit.state_itemsize for unit in again.placement.units} == {2 + 2 * (1 + 4 / 256)}
    clean(given)
    other = options([storage], alpha=0.0, ratios={"optimizer": 0.2})
    assert not life(harness, eight, other, tmp_path / "other", range(2, 4), former=again).taken.differences(again.taken)


def nbytes_in_memory(placement):
    """Of parameters and states."""
    return sum(
        part.numel * (unit.state_itemsize if part in group.s else unit.itemsize)
        for unit in placement.units
        for group in unit.groups
        for part in (*group.w, *group.s)
        if part.tier == "host"
    )


@pytest.mark.usefixtures("given_figures")
def test_a_plan_is_taken_again_where_nothing_has_changed(harness, moved, tmp_path, monkeypatch, caplog):
    """Nothing is measured, timed or solved; what is in memory is read, and nothing is written."""
    make, ratios = partial(adamw, max_grad_norm=0.5), FREE | {"parameter": 0.5}
    given = options([tmp_path / "a"], ratios=ratios, host_memory=BUDGET)
    first = life(harness, make, given, tmp_path / "first", range(3))
    assert first.plan["decision"]["ratios"][0]["parameter"] < 1, "there is something on storage"
    assert nbytes_in_memory(first.placement) > 0, "and something in memory"
    clean(given)
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "gs_compile"):
        for module, name in ((at_hand, "measured_profile"), (at_hand, "timed"), (run, "decide")):
            patch.setattr(module, name, lambda *_, name=name, **__: pytest.fail(f"{name} was asked for"))
        again = life(harness, make, given, tmp_path / "again", range(1, 3), former=first)
    assert "the plan of the resumed run is used again" in caplog.text
    assert "resumes from step 1 (" in caplog.text
    assert (again.placement, again.plan) == (first.placement, first.plan)
    assert not again.taken.differences(first.taken)
    assert moved.keys() == {"read"}
    assert 0 < moved["read"] <= nbytes_in_memory(again.placement)
    moved.clear()
    smaller = given | {"host_memory": BUDGET - (64 << 10)}
    clean(given)
    other = life(harness, make, smaller, tmp_path / "other", range(1, 3), former=first)
    assert other.plan["made_for"] != first.plan["made_for"]
    assert not other.taken.differences(again.taken)


@pytest.mark.usefixtures("given_figures")
def test_no_commit_has_the_plan_of_an_evaluation(harness, tmp_path):
    """A process that went on took it again, and its layers saved nothing."""
    given = options([tmp_path], alpha=0.0, ratios=FREE, host_memory=BUDGET + (200 << 10), durability="step")
    with harness.fresh(adamw, given) as optimizer:
        with torch.no_grad():
            loss_of(harness.model, tokens(0))
        planned = optimizer.engine.planning.planned
        assert planned.plan.is_solved
        assert "decision" not in planned.facts
        step(harness.model, optimizer, tokens(0))
        assert "decision" in optimizer.engine.planning.planned.facts


def test_room_for_both_sets_is_asked_for_by_name(harness, tmp_path, monkeypatch):
    """What is copied is there twice until the first commit; the commit is what it was, and so are the files."""
    given = options([tmp_path / "a"], alpha=0.5)
    first = life(harness, adamw, given, tmp_path / "first", range(3))
    clean(given)
    commit = first.put_back(2)
    folder = tmp_path / "a" / FOLDER
    found = {name: (folder / name).read_bytes() for name in names_in(commit, folder)}
    monkeypatch.setattr(drive, "free_storage", lambda _: 100_000)
    with (
        resumed(harness, adamw, options([tmp_path / "a"], alpha=0.5, ratios={"optimizer": 0.5})) as optimizer,
        pytest.raises(
            StorageFullError,
            match=r"\d \w*B are needed beside those of step 1, which stay until the next commit, and 97\.7 KiB are free",
        ),
    ):
        steps(harness, optimizer, (1,))
    assert {name: (folder / name).read_bytes() for name in found} == found
