"""States that a commit keeps come back from JSON as they were."""

from __future__ import annotations

import json

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import Sampler

from gs_compile.errors import OptimizerError
from gs_compile.model import kept as kept_module
from gs_compile.model.kept import Kept
from gs_compile.runtime.storage import manifest
from gs_compile.runtime.storage.manifest import LARGEST

SCHEDULERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5),
    "milestones, a Counter": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5, 5, 7]),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 20),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, 1, 4), lr_scheduler.MultiStepLR(optimizer, [3])],
        [4],
    ),
}


def made(name):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    return optimizer, SCHEDULERS[name](optimizer)


def rates(optimizer, scheduler, number):
    found = []
    for _ in range(number):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on(name):
    optimizer, scheduler = made(name)
    before = rates(optimizer, scheduler, 4)
    states = Kept({"scheduler": scheduler}).snapshot([])["states"]
    stored, rate = json.loads(json.dumps(states)), optimizer.param_groups[0]["lr"]
    expected = rates(optimizer, scheduler, 8)
    optimizer, scheduler = made(name)
    assert rates(optimizer, scheduler, 4) == before
    optimizer, scheduler = made(name)
    Kept({"scheduler": scheduler}).give_back(stored)
    optimizer.param_groups[0]["lr"] = rate  # which the commit's settings have
    assert rates(optimizer, scheduler, 8) == expected


def test_what_json_cannot_hold_is_refused_by_name():
    with pytest.raises(OptimizerError, match=r"a commit cannot keep this: user\.mean: Tensor"):
        Kept(user={"mean": torch.zeros(1)}).snapshot([])


def test_more_than_a_commit_has_room_for_is_refused_by_name(monkeypatch):
    """Fault: the commit of the first step failed, and with it the run, and it did not say of what there was too much."""
    monkeypatch.setattr(manifest, "MAX_ENTRIES", 1000)
    Kept(user={"order": [0] * 900, "words": "a" * 5000}).snapshot([])
    for large in ([0] * 1000, {"a": [[0]] * 500}, "," * 1001):
        with pytest.raises(
            OptimizerError, match=r"user has 1\d\d\d entries, and a commit 1000 at most: keep what these"
        ):
            Kept(user=large).snapshot([])


@pytest.mark.parametrize(("among", "words"), [(-LARGEST, "int"), (torch.zeros(1), "Tensor"), ([[LARGEST]], "int")])
def test_a_list_of_numbers_is_looked_through_as_one(monkeypatch, among, words):
    """Each commit of a durable run does so: of 40,000 numbers one by one in 12 ms."""
    look, looked = manifest.check_plain, []
    monkeypatch.setattr(manifest, "check_plain", lambda value, *of: looked.append(value) or look(value, *of))
    for numbers in ([*range(1000), True], [0.5] * 1000, (), [1 - LARGEST, LARGEST - 1]):
        look([numbers], "user")
    assert len(looked) == 4
    with pytest.raises(ValueError, match=f"user: {words}: not of JSON, or too large"):
        look([*range(9), among], "user")


def test_a_list_of_numbers_is_copied_as_one(monkeypatch):
    """Each step of a durable run takes the states of loaders: of 40,000 numbers one by one in 20 ms."""

    class Batches(Sampler):
        def state_dict(self):
            return {"order": order, "nested": [(1, 2), [3]]}

    order, copied, made = [*range(100), 0.5, None, "x"], kept_module._plain, []
    monkeypatch.setattr(kept_module, "_plain", lambda value: made.append(value) or copied(value))
    kept = Kept({"batches": Batches()})
    kept.end_step()
    assert kept.positions == {"batches": {"order": order, "nested": [[1, 2], [3]]}}
    assert kept.positions["batches"]["order"] is not order
    assert len(made) < 10


def test_the_states_of_loaders_are_copied_once():
    """They may have a hundred thousand numbers, and each step took them twice."""

    class Word(str):
        __slots__ = ()

        def __deepcopy__(self, memo):
            pytest.fail("it is copied again")

    class Batches(Sampler):
        def state_dict(self):
            return {"taken": [1, 2], "order": Word("shuffled")}

    kept = Kept({"batches": Batches()}, user=(user := [1]))
    kept.end_step()
    found = kept.snapshot([{"lr": 0.1}])
    user.append(2)
    assert found == {
        "states": {"batches": {"taken": [1, 2], "order": "shuffled"}},
        "user": [1],
        "groups": ({"lr": 0.1},),
    }
