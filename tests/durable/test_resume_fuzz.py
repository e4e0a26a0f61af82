"""What a commit keeps of a run's own is read as what anybody may have written: any value is taken or refused by name."""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import A100, gpt, problem, ratios

import gs_compile
from gs_compile.errors import ResumeError
from gs_compile.model.kept import Kept
from gs_compile.placement.placement import Decision, Placement
from gs_compile.planner.resumed import as_before, num_calls_of
from gs_compile.runtime.random_state import random_state, set_random_state

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([1 << 40, 10**45, 0.5]) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
FREELY = settings(max_examples=100, deadline=None)
SECONDS = 10  # of the processor, for what takes a tenth of one

PROBLEM = problem(gpt(2, 64, vocabulary=500), replace(A100, device="cpu", device_nbytes=0), 2)
DECISION = json.loads(json.dumps(Decision(ratios=(ratios(0.0, 0.0, 0.0),)).as_dict()))
HOST_NBYTES = 10**12
FORMER = {"made_for": "it", "host_nbytes": HOST_NBYTES, "values_nbytes": None, "decision": DECISION}


@pytest.fixture(autouse=True, scope="module")
def the_same_random_numbers_after_it():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def test_the_sound_plan_is_taken():
    assert isinstance(as_before(PROBLEM, FORMER, "it", HOST_NBYTES), Placement)


@FREELY
@given(st.sampled_from(sorted(DECISION)), VALUES)
def test_any_decision_is_taken_or_made_again(name, value):
    former = FORMER | {"decision": DECISION | {name: value}}
    start = time.process_time()
    found = as_before(PROBLEM, former, "it", HOST_NBYTES)
    assert found is None or isinstance(found, Placement)
    assert time.process_time() - start < SECONDS, "it is bounded before it is used"


@FREELY
@given(st.sampled_from(sorted(FORMER)), VALUES)
def test_any_plan_is_taken_or_made_again(name, value):
    found = as_before(PROBLEM, FORMER | {name: value}, "it", HOST_NBYTES)
    assert found is None or isinstance(found, Placement)
    assert 1 <= num_calls_of({"num_calls": value}) <= 1 << 16


@FREELY
@given(st.sampled_from(sorted(random_state())), st.text(max_size=20) | VALUES.map(json.dumps))
def test_any_random_state_is_taken_or_refused(name, text):
    with suppress(ResumeError):
        set_random_state({name: text})


@pytest.mark.parametrize("name", ["cpu", "python", "numpy"])
def test_a_state_of_no_generator_names_it(name):
    with pytest.raises(ResumeError, match=f"the commit's state of the random numbers of '{name}' cannot be loaded"):
        set_random_state({name: "7"})


@FREELY
@given(st.sampled_from(["lr", "betas", "eps", "weight_decay", "maximize", "params", "x"]), VALUES)
def test_any_settings_are_taken_or_refused(name, value):
    """Parameters are none of the settings; a refusal leaves the optimizer as it was."""
    optimizer = gs_compile.AdamW([parameter := torch.nn.Parameter(torch.ones(2))], lr=0.5)
    before = dict(optimizer.param_groups[0])
    try:
        optimizer.go_on(SimpleNamespace(step=3, num_skipped=1, groups=({name: value},), norm=()))
    except ResumeError:
        assert optimizer.param_groups == [before]
        assert optimizer.num_steps == 0
    else:
        assert optimizer.num_steps == 2
    assert optimizer.param_groups[0]["params"] == [parameter]


def test_param_groups_too_many_are_refused():
    optimizer = gs_compile.AdamW([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ResumeError, match="the commit of step 3 has other settings than this optimizer"):
        optimizer.go_on(SimpleNamespace(step=3, num_skipped=0, groups=({}, {}), norm=()))


@FREELY
@given(VALUES)
def test_any_state_of_a_scheduler_is_taken_or_refused(value):
    optimizer = gs_compile.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5)
    kept = Kept(states={"scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2])})
    for state in (value, {"milestones": {"greedysnake.counted": value}}, {"x": {"greedysnake.pairs": value}}):
        with suppress(ResumeError):
            kept.give_back({"scheduler": state})
    with pytest.raises(ResumeError, match="the commit's state of scheduler cannot be loaded"):
        kept.give_back({"scheduler": 7})
