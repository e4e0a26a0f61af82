"""The budget of a run; and what it has planned and timed goes with it: a notebook makes many, with large graphs."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import torch
from planned import gpt

from gs_compile.options import Options
from gs_compile.planner import run
from gs_compile.planner.at_hand import ModelAtHand
from gs_compile.planner.cost import timing as module
from gs_compile.planner.cost.timing import LayerLevels
from gs_compile.planner.measure.machines import Where
from gs_compile.planner.run import CallBudgets, RunPlanner
from gs_compile.program.ir import StepShape


def test_a_budget_beyond_the_machine_is_told(monkeypatch, caplog):
    """Else the system kills the run without a word."""
    monkeypatch.setattr(run, "usable_memory", lambda: 8 << 30)
    assert run.host_budget(Options(host_memory="8GiB")) == 8 << 30
    assert caplog.text == ""
    assert run.host_budget(Options(host_memory="48GiB")) == 48 << 30
    assert "host_memory is 48.0 GiB, and this process may use 8.0 GiB: it is killed if it needs more" in caplog.text


def test_nothing_else_holds_the_planner_of_a_run():
    layout: Any = SimpleNamespace(
        x_nbytes=(1,), side_nbytes=(0,), dside_nbytes=(0,), split=SimpleNamespace(num_layers=2)
    )
    layout.num_tokens = 8
    layout.shape_of = lambda *_, **__: StepShape()
    options = Options.of({"host_memory": 10**9})
    given = {"sizes": {"split": ()}, "layouts": [layout], "tied": frozenset(), "clip": False}
    planner = RunPlanner(ModelAtHand(options=options, where=Where(torch.device("cpu")), **given))
    budgets = CallBudgets(planner.whole_nbytes, planner.whole_device_nbytes)
    assert planner.problem(budgets, "split") is planner.problem(budgets, "split")
    gone = weakref.ref(planner)
    del planner
    gc.collect()
    assert gone() is None


def test_nothing_else_holds_what_layers_may_save(monkeypatch):
    timed, calls = gpt(2, 64), []
    monkeypatch.setattr(module, "levelled", lambda workload, _: calls.append(workload) or workload)
    levels = LayerLevels([None], lambda: timed, compiled=False)
    assert levels.workload(timed, last=False) == levels.workload(timed, last=False) == timed
    assert calls == [timed], "once"
    levels.workload(timed, last=True)
    assert len(calls) == 2, "for another question"
    gone = weakref.ref(levels)
    del levels
    gc.collect()
    assert gone() is None
