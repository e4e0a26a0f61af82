"""A run that cannot go on says so by name at the first call, and neither the commit nor the model is touched."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
from cpu_work import work
from killed import clean, resumed, seed, steps
from stored_run import save
from tiered import Harness, adamw, gpt2, options, sgd, tokens

import gs_compile
from gs_compile.errors import LeftoverError, ManifestError, OptimizerError, ResumeError, StepOrderError
from gs_compile.model.former_run import check_alike
from gs_compile.runtime.storage import manifest
from gs_compile.runtime.storage.manifest import read
from gs_compile.runtime.storage.stored import FOLDER

KEEPS_CAPTURES = True
WORK = 100  # that refusing a run may take; it takes a few


@pytest.fixture
def given(harness, tmp_path):
    """Options of a run that has committed two steps."""
    found = options(tmp_path, alpha=0.5)
    seed()
    with harness.fresh(adamw, found | {"durability": "step"}) as optimizer:
        steps(harness, optimizer, range(2))
    return found


def one_group(groups):
    return gs_compile.AdamW([parameter for group in groups for parameter in group["params"]])


def swapped(groups):
    return adamw(groups[::-1])


def half_frozen(seed=0):
    model = gpt2(seed=seed)
    model.transformer.wpe.weight.requires_grad = False
    return model


@pytest.mark.parametrize(
    ("build", "make", "words"),
    [
        (partial(gpt2, width=64), adamw, r"24 of 24 parameters differ: .*down.bias is \(32,\) there, and \(64,\) here"),
        (half_frozen, adamw, "transformer.wpe.weight was trained there"),
        (None, sgd, "its optimizer is AdamW, with exp_avg, exp_avg_sq of each parameter"),
        (None, one_group, "its optimizer has 2 param groups, and 1 here"),
        (None, swapped, "transformer.wte.weight was in param group 0 there, and is in 1 here"),
        (None, "2 ranks", "it is of 2 ranks, this run of 1"),
        (None, "the other rank", "it is of rank 1 of those that share the model, and this is rank 0 of them"),
    ],
    ids=["width", "frozen", "optimizer", "groups", "order", "ranks", "rank"],
)
def test_what_is_of_something_else_is_refused(harness, given, tmp_path, build, make, words):
    folder = tmp_path / FOLDER
    if isinstance(make, str):
        save(folder, replace(read(folder), world=2, rank=int(make == "the other rank")))
        make = adamw
    if build is not None:
        harness = Harness(build)
        with harness.fresh(adamw, options(tmp_path / "other")) as optimizer:  # captures it
            steps(harness, optimizer, (0,))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with resumed(harness, make, given) as optimizer:
        assert work(lambda: refuses(harness, optimizer, words))[0] < WORK
        values = harness.model.state_dict()
        for (name, _), initial in zip(harness.model.named_parameters(), harness.initial, strict=True):
            assert torch.equal(values[name], initial), name
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def refuses(harness, optimizer, words):
    with pytest.raises(ResumeError, match=f"at step 2, which is to be resumed, is not of this model and .*{words}"):
        steps(harness, optimizer, (2,))


def test_without_resume_a_commit_is_not_touched(harness, given, tmp_path):
    """What is said names the run, its step, its date, and all ways out."""
    commit = read(tmp_path / FOLDER)
    with (
        harness.fresh(adamw, given | {"durability": "step"}) as optimizer,
        pytest.raises(LeftoverError) as refusal,
    ):
        steps(harness, optimizer, (0,))
    ways = "gs_compile.resume(", 'resume="auto"', "another storage=", f"greedysnake store gc --all {tmp_path}"
    for words in (commit.run, "step 2", commit.written, *ways):
        assert words in str(refusal.value)
    assert read(tmp_path / FOLDER) == commit


def test_settings_are_those_of_the_commit(harness, given):
    """The optimizer that is made anew may have any."""
    with resumed(harness, partial(adamw, betas=(0.5, 0.6)), given) as optimizer:
        optimizer.param_groups[0]["lr"] = 7.0
        steps(harness, optimizer, (2,))
        found = [(group["lr"], group["betas"], group["weight_decay"]) for group in optimizer.param_groups]
        assert optimizer.num_steps == 3
    assert found == [(1e-2, (0.9, 0.999), 0.1), (1e-2, (0.9, 0.999), 0.0)]


def test_nothing_to_go_on_from_is_said(harness, given, tmp_path, caplog):
    clean(given)
    with caplog.at_level(logging.INFO, "gs_compile"), resumed(harness, adamw, given) as optimizer:
        steps(harness, optimizer, (0,))
    assert f"no durable run has left a commit in {tmp_path}: a new run starts" in caplog.text


def test_a_commit_that_resume_has_not_found_is_not_taken_up(harness, given, tmp_path):
    """It has given no state of it, and the loop begins with the first batch."""
    with resumed(harness, adamw, given) as optimizer:
        assert gs_compile.resume(harness.model, optimizer, storage=tmp_path / "empty").step == 0
        with pytest.raises(ResumeError, match=f"no commit in .*empty, but {tmp_path} has a commit of step 2"):
            steps(harness, optimizer, (0,))


def test_a_run_that_is_started_again_after_its_last_step_keeps_what_it_has_learned(harness, given, tmp_path):
    """Before the first call the model has the values that it was made with."""
    seed()
    with harness.fresh(adamw, options(tmp_path / "other", alpha=0.5)) as optimizer:
        steps(harness, optimizer, range(2))
        wanted = {name: value.clone() for name, value in harness.model.state_dict().items()}
        other = optimizer.state_dict()
    with resumed(harness, adamw, given) as optimizer:
        assert gs_compile.resume(harness.model, optimizer, storage=tmp_path).step == 2
        optimizer.commit()
        words = r"values of step 2, .* come with the model's first call"
        for each in (harness.model, harness.model.transformer, optimizer):
            with pytest.raises(StepOrderError, match=words):
                each.state_dict()
        weight = harness.model.lm_head.weight
        for use in (weight.detach, weight.norm, weight.tolist, gs_compile.materialize(harness.model).__enter__):
            with pytest.raises(StepOrderError, match=words):
                use()
        with pytest.raises(StepOrderError, match=words):  # it took the number of steps, and the commit's moments
            optimizer.load_state_dict({**other, "state": {}})
        with pytest.raises(RuntimeError, match=words):  # torch's own
            harness.model.load_state_dict({name: value + 1 for name, value in wanted.items()})
        with torch.no_grad():
            harness.model(input_ids=tokens(0), labels=tokens(0))
        optimizer.commit()
        assert optimizer.num_steps == 2
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], other["state"][0]["exp_avg"])
        found = harness.model.state_dict()
        assert [name for name, value in found.items() if not torch.equal(value, wanted[name])] == []


def test_an_optimizer_of_torch_has_no_durable_steps(tmp_path):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(OptimizerError, match=r"torch\.optim\.adamw\.AdamW keeps its states in memory, .* make one of"):
        gs_compile.resume(model, torch.optim.AdamW(model.parameters()), storage=tmp_path)


def test_a_number_of_steps_that_was_read_before_the_first_call_is_true_or_refused(harness, given, tmp_path):
    """Else the loop begins with the first batch again, and learns something else without a word."""
    commit = read(tmp_path / FOLDER)
    with resumed(harness, adamw, given) as optimizer:
        assert optimizer.num_steps == 0
        with pytest.raises(
            StepOrderError, match=r"num_steps was read as 0 before .* resumes from 2 steps: call .*resume"
        ):
            steps(harness, optimizer, (0,))
        assert read(tmp_path / FOLDER) == commit
    with resumed(harness, adamw, given) as optimizer:
        assert optimizer.num_steps == 0
        gs_compile.resume(harness.model, optimizer, storage=tmp_path)
        assert optimizer.num_steps == 2
        steps(harness, optimizer, (2,))
        assert optimizer.num_steps == 3
    clean(given)
    with resumed(harness, adamw, given) as optimizer:
        assert optimizer.num_steps == 0
        steps(harness, optimizer, (0,))
        assert optimizer.num_steps == 1


def test_what_would_begin_anew_is_refused(harness, given, tmp_path):
    """A schedule that nobody gives its state, and a state that nobody takes."""
    with resumed(harness, adamw, given) as optimizer:
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with pytest.raises(
            StepOrderError, match=r"a scheduler would not be restored: call .*resume\(.*scheduler=scheduler"
        ):
            steps(harness, optimizer, (2,))
    save(tmp_path / FOLDER, replace(read(tmp_path / FOLDER), states={"schedule": {"last_epoch": 2}}))
    refusal = pytest.raises(StepOrderError, match="the commit's state of schedule would not be restored")
    with resumed(harness, adamw, given) as optimizer, refusal:
        steps(harness, optimizer, (2,))
    with resumed(harness, adamw, given) as optimizer:
        words = "of step 2 has a state of schedule, .* pass it as schedule=..., or pass schedule=None"
        with pytest.raises(ResumeError, match=words):
            gs_compile.resume(harness.model, optimizer, storage=tmp_path)
        assert gs_compile.resume(harness.model, optimizer, storage=tmp_path, schedule=None).step == 2


@pytest.mark.parametrize("wrong", ["a state", "a setting"])
def test_a_resume_that_is_refused_changes_nothing(harness, given, tmp_path, wrong):
    """Fault: a schedule had its state of the commit, and the first call went on from there."""
    made, states = read(tmp_path / FOLDER), {"first": {"last_epoch": 2}, "last": {"last_epoch": 2}}
    if wrong == "a state":
        save(tmp_path / FOLDER, replace(made, states=states | {"last": 7}))
    else:
        save(tmp_path / FOLDER, replace(made, states=states, groups=(made.groups[0], {**made.groups[1], "lr": -1.0})))
    with harness.fresh(adamw, given | {"durability": "step"}) as optimizer:
        first, last = (torch.optim.lr_scheduler.StepLR(optimizer, 3) for _ in range(2))
        before = first.state_dict(), last.state_dict(), repr(optimizer.param_groups), repr(optimizer.kept)
        with pytest.raises(ResumeError, match="of last cannot be loaded" if wrong == "a state" else "other settings"):
            gs_compile.resume(harness.model, optimizer, storage=tmp_path, first=first, last=last)
        assert (first.state_dict(), last.state_dict(), repr(optimizer.param_groups), repr(optimizer.kept)) == before
        with pytest.raises(LeftoverError):
            steps(harness, optimizer, (0,))


def test_steps_that_a_parameter_has_missed_are_kept(harness, given, tmp_path):
    """A state dict has said it, which the process that goes on does not load again."""
    clean(given)
    name = "transformer.ln_f.bias"
    with harness.fresh(adamw, given | {"durability": "step"}) as optimizer:
        parameter = harness.model.get_parameter(name)
        zeros = {each: dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.zeros(each.shape)) for each in optimizer.group_of}
        states = {
            n: {"step": 1 if each is parameter else 5, **zeros[each]} for n, each in enumerate(optimizer.group_of)
        }
        optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
        steps(harness, optimizer, (0,))
    for number in (1, 2):
        with resumed(harness, adamw, given) as optimizer:
            if number == 1:
                gs_compile.resume(harness.model, optimizer, storage=tmp_path)
            steps(harness, optimizer, (number,))
            assert optimizer.steps.missed == {harness.model.get_parameter(name): 4}
            taken = {float(each["step"]) for each in optimizer.state_dict()["state"].values()}
            assert taken == {2.0 + number, 6.0 + number}
            made = read(tmp_path / FOLDER)
            here = [replace(each, missed=0) for each in made.parameters]
            with pytest.raises(ResumeError, match=f"{name} took 4 steps fewer than others there, and 0 here"):
                check_alike(replace(made, world=2), optimizer, here, world=2)  # several ranks plan with them


@pytest.mark.parametrize("what", ["groups", "states"])
def test_what_no_commit_can_keep_is_said_at_the_first_call(harness, tmp_path, what):
    with harness.fresh(adamw, options(tmp_path, durability="step")) as optimizer:
        if what == "groups":
            optimizer.param_groups[1]["layers"] = {1, 2}
        else:
            optimizer.kept.states["average"] = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1))
        with pytest.raises(OptimizerError, match=f"a commit cannot keep this: {what}[.].*"):
            steps(harness, optimizer, (0,))


def test_a_model_of_more_parameters_than_a_commit_has_room_for(harness, monkeypatch, tmp_path):
    """Fault: the run ended with the commit of its first step."""
    monkeypatch.setattr(manifest, "MAX_ENTRIES", 200)
    before = {name: each.clone() for name, each in harness.model.state_dict().items()}
    with harness.fresh(adamw, options(tmp_path, durability="step")) as optimizer:
        with pytest.raises(
            ManifestError, match=r"of 24 parameters cannot be durable: .* entries, .*Leave durability out"
        ):
            harness.model(input_ids=tokens(0), labels=tokens(0))
        assert optimizer.engine is None
        after = harness.model.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
    assert read(tmp_path / FOLDER) is None
