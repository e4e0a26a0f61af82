"""A run whose steps have several backwards, killed between two of them, goes on from its last step, bit for bit."""

from __future__ import annotations

import shutil
from contextlib import contextmanager

import pytest
import torch
from killed import resumed
from setups import SetUp, Tiny
from tiered import Harness, adamw, gpt2, options, outcome, tokens

from gs_compile.errors import StepOrderError
from gs_compile.runtime.storage.manifest import read
from gs_compile.runtime.storage.stored import FOLDER

KEEPS_CAPTURES = True
NUM_BACKWARDS, NUM_STEPS = 3, 4
ON_DEVICE = {"ratios": {"parameter": 1.0, "optimizer": 0.5}, "separate_device": True}


@pytest.fixture(scope="module")
def harness():
    return Harness(lambda: gpt2(dropout=0.1))


def train(harness, optimizer, first=0, between=lambda number, backwards: None):
    """The steps from `first` on; `between` is told the step and how many backwards of it have run."""
    for number in range(first, NUM_STEPS):
        for each in range(NUM_BACKWARDS):
            ids = tokens(NUM_BACKWARDS * number + each)
            (harness.model(input_ids=ids, labels=ids).loss / NUM_BACKWARDS).backward()
            between(number, each + 1)
        optimizer.step()
        optimizer.zero_grad()
    return outcome(harness.model, optimizer, [], [])


@pytest.mark.parametrize(
    ("known", "place"),
    [
        pytest.param(True, {}, marks=pytest.mark.slow),
        (True, ON_DEVICE),
        (False, {}),
        pytest.param(False, ON_DEVICE, marks=pytest.mark.slow),
    ],
)
def test_killed_between_two_backwards(harness, tmp_path, known, place):
    given = options(tmp_path / "run", durability="step", accumulate=known, **place)
    torch.manual_seed(1)

    def kill(number, backwards):
        if (number, backwards) == (2, 2):
            optimizer.engine.tiers.synchronize()
            shutil.copytree(tmp_path / "run" / FOLDER, tmp_path / "aside")

    with harness.fresh(adamw, given) as optimizer:
        wanted = train(harness, optimizer, between=kill)
    shutil.rmtree(tmp_path / "run" / FOLDER)
    shutil.copytree(tmp_path / "aside", tmp_path / "run" / FOLDER)
    made = read(tmp_path / "run" / FOLDER)
    assert (made.step, made.plan["accumulates"], made.plan["num_calls"]) == (2, True, 1)
    with resumed(harness, adamw, given) as optimizer:
        assert not train(harness, optimizer, first=2).differences(wanted)


def test_a_run_that_goes_on_begins_its_first_step_again_from_the_commit(harness, tmp_path, monkeypatch):
    """The commit is of a run that has not shown yet what its loop does."""
    given = options(tmp_path / "run", durability="step", alpha=None)
    torch.manual_seed(1)
    with harness.fresh(adamw, given) as optimizer:
        train(harness, optimizer, between=lambda number, backwards: None)
        optimizer.commit()
    shutil.copytree(tmp_path / "run" / FOLDER, tmp_path / "aside")
    found = []
    for known in (True, False):
        shutil.rmtree(tmp_path / "run" / FOLDER, ignore_errors=True)
        shutil.copytree(tmp_path / "aside", tmp_path / "run" / FOLDER)
        with monkeypatch.context() as patched, resumed(harness, adamw, given | {"accumulate": known}) as optimizer:
            patched.setattr("gs_compile.model.first_call.ACCUMULATES", "unknown")
            found.append(train(harness, optimizer, first=NUM_STEPS - 1))
            assert optimizer.num_steps == NUM_STEPS + 1
    assert not found[0].differences(found[1])


def test_an_evaluation_between_two_backwards_changes_no_commit(harness, tmp_path):
    """The commit has the random state that the step behind it began with: its dropout is drawn again from there."""
    found = []
    with harness.fresh(adamw, options(tmp_path, durability="step", accumulate=True)) as optimizer:

        def evaluate(number, backwards):
            optimizer.engine.tiers.synchronize()
            found.extend([read(tmp_path / FOLDER).random] if number == NUM_STEPS - 1 else [])
            with torch.no_grad():
                harness.model(input_ids=tokens(0), labels=tokens(0))

        train(harness, optimizer, first=NUM_STEPS - 2, between=evaluate)
    assert found == NUM_BACKWARDS * found[:1]


class Shifted(Tiny):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, ids):
        return super().forward(ids) * (1 + self.shift)


@contextmanager
def goes_on(folder, model=Tiny):
    """A run that resumes, if there is one, and is committed in the end."""
    torch.manual_seed(0)
    run = SetUp(folder, model(), {"storage": folder, "durability": "step", "resume": "auto"})
    yield run
    run.optimizer.commit()
    run.optimizer.engine.tiers.close()


def take_step(run):
    (run.model(run.batch) if run.optimizer else run.call()).backward()
    run.optimizer.step()


def halve(model, optimizer):
    with torch.no_grad():
        model.head.mul_(0.5)


def forget(model, optimizer):
    optimizer.load_state_dict(optimizer.state_dict() | {"state": {}})


def test_what_a_resumed_run_was_given_is_not_lost_where_its_first_step_begins_again(tmp_path):
    """The commit has not what a script has written since: the step began again from values and states without it."""
    with goes_on(tmp_path) as run:
        take_step(run)
    for change in (halve, forget):
        with goes_on(tmp_path) as run:
            with torch.no_grad():
                run.call()
            change(run.model, run.optimizer)
            run.model(run.batch).backward()
            with pytest.raises(StepOrderError, match='"accumulate": True'):
                run.model(run.batch).backward()
            run.optimizer.step()


def test_a_buffer_that_changes_behind_the_evaluation_that_a_resumed_run_begins_with(tmp_path):
    """Its first step has another plan, and not the commit's buffer."""
    losses = []
    for evaluates in (True, False):
        with goes_on(tmp_path / str(evaluates), Shifted) as run:
            take_step(run)
            run.model.shift += 1
        with goes_on(tmp_path / str(evaluates), Shifted) as run, torch.no_grad():
            run.call()
            run.model.shift += evaluates
            with torch.enable_grad():
                losses.append(run.model(run.batch).item() / (3 if evaluates else 2))
    assert losses[0] == pytest.approx(losses[1])
