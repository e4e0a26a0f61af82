"""The budget of a run; and what it has planned and timed goes with it: a notebook makes many, with large graphs."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planned import gpt

from gs_compile.options import Options
from gs_compile.placement.placement import Placement
from gs_compile.planner import run
from gs_compile.planner.at_hand import ModelAtHand
from gs_compile.planner.cost import timing as module
from gs_compile.planner.cost.timing import LayerLevels
from gs_compile.planner.measure.machines import Where
from gs_compile.planner.run import CallBudgets, Planned, RunPlanner
from gs_compile.program.ir import StepShape


def test_a_budget_beyond_the_machine_is_told(monkeypatch, caplog):
    """Else the system kills the run without a word."""
    monkeypatch.setattr(run, "usable_memory", lambda: 8 << 30)
    assert run.host_budget(Options(host_memory="8GiB")) == 8 << 30
    assert caplog.text == ""
    assert run.host_budget(Options(host_memory="48GiB")) == 48 << 30
    assert "host_memory is 48.0 GiB, and this process may use 8.0 GiB: it is killed if it needs more" in caplog.text


def planner_of_two_layers() -> RunPlanner:
    layout: Any = SimpleNamespace(
        x_nbytes=(1,), side_nbytes=(0,), dside_nbytes=(0,), split=SimpleNamespace(num_layers=2)
    )
    layout.num_tokens = 8
    layout.shape_of = lambda *_, **__: StepShape()
    options = Options.of({"host_memory": 10**9})
    given = {"sizes": {"split": ()}, "layouts": [layout], "tied": frozenset(), "clip": False}
    return RunPlanner(ModelAtHand(options=options, where=Where(torch.device("cpu")), **given))


@pytest.mark.parametrize("number", [2500, 2501])
def test_a_plan_that_takes_minutes_says_so_first(number, monkeypatch, caplog):
    """Fault: a first call with thousands of micro-batches seemed to hang."""
    planner = planner_of_two_layers()
    planner.batch = {name: each * number for name, each in planner.batch.items()}
    monkeypatch.setattr(run, "decide", lambda problem: SimpleNamespace(problem=problem))
    planner._decide(CallBudgets(10**9, None))
    assert ("2501 micro-batches in 2 layers takes minutes" in caplog.text) == (number == 2501)


def test_nothing_else_holds_the_planner_of_a_run():
    planner = planner_of_two_layers()
    budgets = CallBudgets(planner.whole_nbytes, planner.whole_device_nbytes)
    assert planner.problem(budgets, "split") is planner.problem(budgets, "split")
    gone = weakref.ref(planner)
    del planner
    gc.collect()
    assert gone() is None


def test_ranks_that_are_told_a_plan_share_the_device_out_as_the_first_rank_does(monkeypatch):
    """Else it plans once more, and the others go on without it."""
    planner, seen = planner_of_two_layers(), []
    planner.num_calls = 2
    budgets = CallBudgets(10**9, None)
    common = {"placement": Placement(), "masters": "split", "values_nbytes": None, "facts": {}}
    told = Planned(**common, budgets=budgets, device_nbytes=8 << 30)
    monkeypatch.setattr(planner, "_plan", lambda *_: told)
    monkeypatch.setattr(planner, "_shared_out", lambda _, whole, is_last: (seen.append(whole), (budgets, True))[1])
    assert planner.plan({}) == told
    assert seen == [8 << 30]


def test_nothing_else_holds_what_layers_may_save(monkeypatch):
    timed, calls = gpt(2, 64), []
    monkeypatch.setattr(module, "levelled", lambda workload, _: calls.append(workload) or workload)
    levels = LayerLevels([None], lambda: timed, compiled=False)
    assert levels.costs(last=False) == levels.costs(last=False) == timed.costs
    assert calls == [timed], "once"
    levels.costs(last=True)
    assert len(calls) == 2, "for another question"
    gone = weakref.ref(levels)
    del levels
    gc.collect()
    assert gone() is None
