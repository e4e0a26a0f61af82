"""What is done between two steps belongs to the step before: a commit has it, wherever somebody has read values."""

from __future__ import annotations

import math
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from killed import resumed
from safetensors.torch import load_file
from tiered import adamw, loss_of, options, step, tokens
from torch.utils.data import Sampler

import gs_compile
from gs_compile.cli.stored.export import export
from gs_compile.cli.stored.runs import found_in
from gs_compile.errors import OptimizerError, StepOrderError
from gs_compile.runtime.random_state import random_state
from gs_compile.runtime.storage.manifest import read
from gs_compile.runtime.storage.stored import FOLDER

KEEPS_CAPTURES = True
MODEL = {"tied": False}
NAME = "transformer.h.0.ln_1.weight"


class Batches(Sampler):
    """Numbers of batches, and how many were taken."""

    taken = 0

    def __iter__(self):
        while True:
            self.taken += 1
            yield self.taken - 1

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


def train(harness, folder, durability, change):
    """A step, values that somebody reads, and a change after it; then the next batch is taken, and `change` is told the
    optimizer and the model.
    """
    model, given = harness.model, options(folder, alpha=0.5, durability=durability)
    with harness.fresh(lambda _: gs_compile.AdamW(model.parameters(), lr=1e-2), given) as optimizer:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        gs_compile.resume(model, optimizer, storage=folder, schedule=schedule, batches=(batches := Batches()))
        numbers = iter(batches)
        step(model, optimizer, tokens(next(numbers)))
        optimizer.synchronize()
        schedule.step()
        with torch.no_grad():
            model.get_parameter(NAME).fill_(3.0)
        next(numbers)
        change(model, optimizer)
        optimizer.engine.tiers.synchronize()


@pytest.mark.parametrize(("durability", "how"), [("step", "the next call"), ("step", "commit()"), (2, "commit()")])
def test_a_commit_has_what_came_after_values_were_read(harness, tmp_path, durability, how):
    def change(model, optimizer):
        if how == "commit()":
            optimizer.commit()
        else:
            model(input_ids=tokens(1), labels=tokens(1))

    train(harness, tmp_path, durability, change)
    made = read(tmp_path / FOLDER)
    assert (made.step, made.states["schedule"]["last_epoch"], made.groups[0]["lr"]) == (1, 1, 5e-3)
    assert made.states["batches"] == {"taken": 1}, "the batch that is under way is none of the commit's steps"
    files = export(found_in(tmp_path), tmp_path / "out")["files"]
    found = {name: each for file in files for name, each in load_file(tmp_path / "out" / file).items()}
    assert bool((found[NAME] == 3).all())


def test_a_call_that_is_refused_leaves_commits_the_random_numbers_of_now(harness, tmp_path):
    """Fault: a commit had those that the call had found, which a run that was resumed then drew again."""
    with harness.fresh(adamw, options(tmp_path, alpha=0.5, durability="step")) as optimizer:
        step(harness.model, optimizer, tokens(0))
        loss_of(harness.model, tokens(1)).backward()
        with pytest.raises(StepOrderError, match="a backward has run"):
            loss_of(harness.model, tokens(2))
        optimizer.step()
        torch.rand(1)
        optimizer.commit()
        assert read(tmp_path / FOLDER).random == random_state()


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("draws", [False, True])
def test_numbers_that_a_script_draws_ahead_of_the_first_call_of_a_resumed_run_are_told(
    harness, tmp_path, caplog, draws, is_called
):
    """Fault: noise, or dropout of an encoder ahead of the model, was another than in an undisturbed run, without a
    word.
    """

    def call(number):
        if draws:
            torch.rand(1)
        return loss_of(harness.model, tokens(number))

    given = options(tmp_path, durability="step")
    with harness.fresh(adamw, given) as optimizer:
        for number in range(2):
            call(number).backward()
            optimizer.step()
            optimizer.zero_grad()
        if is_called:
            call(2)  # which commits
        else:
            optimizer.commit()
        optimizer.engine.tiers.synchronize()
    with resumed(harness, adamw, given):
        call(2)
    assert ("has drawn between step 2 and the next call" in caplog.text) == draws


def test_seeds_that_a_script_gives_in_each_step_hold_in_a_resumed_run(harness, tmp_path):
    """Fault: from a commit between two calls the first step drew what came after the seed of the step before."""

    def train(optimizer, *numbers):
        for number in numbers:
            torch.manual_seed(number)
            step(harness.model, optimizer, tokens(number))
        return float(torch.rand(()))

    given = options(tmp_path, durability="step")
    with harness.fresh(adamw, given) as optimizer:
        train(optimizer, 0, 1)
        optimizer.commit()
        wanted = train(optimizer, 2)
    with harness.fresh(adamw, given | {"storage": tmp_path / "other"}) as optimizer:
        train(optimizer, 0, 1)
        optimizer.commit()
    with resumed(harness, adamw, given | {"storage": tmp_path / "other"}) as optimizer:
        assert train(optimizer, 2) == wanted


def test_a_bound_that_a_run_has_changed_goes_on(harness, tmp_path):
    """Fault: a resumed run clipped by the first bound again, without a word. One that a script gives anew counts."""
    given, make = options(tmp_path, durability="step"), partial(adamw, max_grad_norm=1.0)
    with resumed(harness, make, given) as optimizer:
        step(harness.model, optimizer, tokens(0))
        optimizer.commit()
    with resumed(harness, partial(adamw, max_grad_norm=2.0), given) as optimizer:
        step(harness.model, optimizer, tokens(1))
        assert optimizer.max_grad_norm == 2.0
        optimizer.max_grad_norm = math.inf
        optimizer.commit()
    for number in range(2):
        with resumed(harness, make, given) as optimizer:
            step(harness.model, optimizer, tokens(2 + number))
            assert optimizer.max_grad_norm == math.inf
            optimizer.commit()


def test_a_state_that_a_run_loads_changes_no_position(harness, tmp_path):
    """Fault: `run.step` was the number of steps of that state, from which batches went on."""
    model, given = harness.model, options(tmp_path, durability="step")
    with harness.fresh(adamw, given) as optimizer:
        step(model, optimizer, tokens(0))
        state = optimizer.state_dict()
        for each in state["state"].values():
            each["step"] = torch.tensor(100.0)
        optimizer.load_state_dict(state)
        step(model, optimizer, tokens(1))
        optimizer.commit()
    with harness.fresh(adamw, given) as optimizer:
        assert gs_compile.resume(model, optimizer, storage=tmp_path).step == 2
        step(model, optimizer, tokens(2))
        assert optimizer.num_steps == 102
        optimizer.commit()
    with harness.fresh(adamw, given) as optimizer:
        assert gs_compile.resume(model, optimizer, storage=tmp_path).step == 3


def test_what_a_resumed_run_changes_before_its_first_step_is_committed(harness, tmp_path):
    """Fault: commit() did nothing then, without a word."""
    given, model = options(tmp_path, durability="step"), harness.model
    with harness.fresh(adamw, given) as optimizer:
        step(model, optimizer, tokens(0))
        optimizer.commit()
    with resumed(harness, adamw, given) as optimizer, torch.no_grad():
        loss_of(model, tokens(1))
        model.get_parameter(NAME).fill_(3.0)
        optimizer.kept.user = "changed"
        optimizer.commit()
    with resumed(harness, adamw, given) as optimizer, torch.no_grad():
        loss_of(model, tokens(1))
        assert (optimizer.num_steps, read(tmp_path / FOLDER).user, optimizer.kept.user) == (1, "changed", "changed")
        assert bool((model.get_parameter(NAME) == 3).all())


def test_a_resumed_run_commits_the_position_of_its_step_and_not_of_the_batch_under_way(harness, tmp_path):
    """It was left out by the process that went on from there."""
    train(harness, tmp_path, "step", lambda model, optimizer: optimizer.commit())
    model, given, batches = harness.model, options(tmp_path, durability="step"), Batches()
    with harness.fresh(lambda _: gs_compile.AdamW(model.parameters()), given) as optimizer:
        gs_compile.resume(model, optimizer, storage=tmp_path, schedule=None, batches=batches)
        assert next(iter(batches)) == 1
        with torch.no_grad():
            loss_of(model, tokens(1))
        optimizer.commit()
    assert read(tmp_path / FOLDER).states["batches"] == {"taken": 1}


def test_a_sampler_that_cannot_tell_its_state_leaves_the_step_as_it_is(harness, tmp_path):
    """Fault: it ended the run, and the values were lost."""
    batches, model = Batches(), harness.model
    with harness.fresh(adamw, options(tmp_path, durability="step")) as optimizer:
        gs_compile.resume(model, optimizer, storage=tmp_path, batches=batches)
        loss_of(model, tokens(next(iter(batches)))).backward()
        batches.state_dict = Mock(side_effect=RuntimeError("a worker has died"))
        with pytest.raises(RuntimeError, match="a worker has died"):
            optimizer.step()
        del batches.state_dict
        optimizer.step()
        optimizer.commit()
    made = read(tmp_path / FOLDER)
    assert (made.step, made.states["batches"]) == (1, {"taken": 1})


def test_a_batch_that_is_taken_before_a_dropped_step_is_closed_is_not_left_out(harness, tmp_path):
    """Fault: the next call closed that step, and its commit had its own batch as one of those that were trained."""
    batches, model = Batches(), harness.model
    with harness.fresh(adamw, options(tmp_path, alpha=1.0, durability="step")) as optimizer:
        gs_compile.resume(model, optimizer, storage=tmp_path, batches=batches)
        numbers = iter(batches)
        step(model, optimizer, tokens(next(numbers)))
        loss_of(model, tokens(next(numbers))).backward()
        optimizer.zero_grad()
        loss_of(model, tokens(next(numbers)))
        optimizer.engine.tiers.synchronize()
        made = read(tmp_path / FOLDER)
    assert (made.step, made.num_skipped, made.states["batches"]) == (2, 1, {"taken": 1})


def test_a_commit_inside_materialize_is_one_that_a_run_goes_on_from(harness, tmp_path):
    """Fault: it had all values once more, as those of parameters beside the model, and was of another model then."""
    given, model = options(tmp_path, durability="step"), harness.model
    with harness.fresh(adamw, given) as optimizer:
        step(model, optimizer, tokens(0))
        with gs_compile.materialize(model):
            optimizer.commit()
    assert read(tmp_path / FOLDER).rest == ()
    with resumed(harness, adamw, given) as optimizer, torch.no_grad():
        loss_of(model, tokens(1))
        assert optimizer.num_steps == 1


def test_what_no_commit_can_keep_is_refused_before_anything_has_run(harness, tmp_path):
    """Fault: it ended the run, which could not be gone on with in this process."""
    model = harness.model
    with harness.fresh(adamw, options(tmp_path, durability="step")) as optimizer:
        step(model, optimizer, tokens(0))
        optimizer.kept.user = {"best": torch.zeros(1)}
        for use in (lambda: loss_of(model, tokens(1)), model.state_dict, optimizer.commit):
            with pytest.raises(OptimizerError, match=r"a commit cannot keep this: user\.best: Tensor"):
                use()
        optimizer.kept.user = {"best": 0.5}
        step(model, optimizer, tokens(1))
        optimizer.commit()
    made = read(tmp_path / FOLDER)
    assert (made.step, made.user) == (2, {"best": 0.5})
