"""A run whose steps have several backwards, killed between two of them, goes on from its last step, bit for bit."""

from __future__ import annotations

import shutil
from contextlib import contextmanager

import pytest
import torch
from killed import copied, resumed
from learner import same_tensors
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
            copied(tmp_path / "run" / FOLDER, tmp_path / "aside")

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
    """The calls read one buffer, a script alone another, and nobody saves the third."""

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(1 << 10), persistent=False)

    def forward(self, ids):
        return super().forward(ids) * (1 + self.shift)


@contextmanager
def goes_on(folder, model=Tiny, *, accumulates=False):
    """A run that resumes, if there is one, and is committed in the end."""
    torch.manual_seed(0)
    given = {"storage": folder, "durability": "step", "resume": "auto", "accumulate": accumulates}
    run = SetUp(folder, model(), given, {"alpha": None} if accumulates else {})
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
            run.call()
            change(run.model, run.optimizer)
            run.model(run.batch).backward()
            with pytest.raises(StepOrderError, match='"accumulate": True'):
                run.model(run.batch).backward()
            run.optimizer.step()


@pytest.mark.parametrize("change", [halve, pytest.param(forget, marks=pytest.mark.slow)])
def test_what_a_resumed_run_was_given_behind_an_evaluation_is_in_the_plan_of_its_first_step(tmp_path, change):
    """The run kept the plan of the evaluation, which saves nothing, and had one backward in each step."""
    found = []
    for evaluates in (True, False):
        with goes_on(tmp_path / str(evaluates)) as run:
            take_step(run)
        with goes_on(tmp_path / str(evaluates), accumulates=not evaluates) as run:
            with torch.set_grad_enabled(not evaluates):
                run.call()
            change(run.model, run.optimizer)
            for _ in range(2):
                run.model(run.batch).backward()
            assert not run.optimizer.engine.planning.planner.model.is_provisional
            run.optimizer.step()
            states = run.optimizer.state_dict()["state"]
            named = {f"{number} {name}": each for number, state in states.items() for name, each in state.items()}
            found.append(run.model.state_dict() | named)
    same_tensors(*found)


def test_buffers_that_a_script_changes_are_in_all_commits_that_follow(tmp_path):
    """Those that no call reads, that are other tensors since the last call, or were changed by `.data`, were in none; the
    others in none of a process that evaluates first, and does not change them again.
    """
    with goes_on(tmp_path, Shifted) as run:
        with torch.no_grad():
            run.call()
        run.model.shift += 1
        take_step(run)
        run.model.seen.data[1] = 2
        run.model.cache += 1
    rest = {each.name for each in read(tmp_path / FOLDER).rest}
    assert rest == {"buffer shift", "buffer seen"}
    for number in range(2):
        with goes_on(tmp_path, Shifted) as run:
            with torch.no_grad():
                run.call()
            assert (run.model.shift.item(), run.model.seen.tolist()) == (1 + number, [0, 2])
            take_step(run)
            run.model.shift = torch.tensor(2.0)
    assert {each.name for each in read(tmp_path / FOLDER).rest} == rest


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
