"""The executor and the simulator have one rule: what is simulated from a run's own durations is that run."""

from __future__ import annotations

import time
import zlib
from functools import partial

import pytest
import torch
from tiered import Harness, adamw, gpt2, options, step, tokens

from gs_compile.planner.simulate.event_loop import LaneRule
from gs_compile.planner.simulate.simulator import simulate
from gs_compile.program.ir import LANES
from gs_compile.runtime.issue import TieredExecutor
from gs_compile.runtime.lanes import Lane

NUM_STEPS = 6  # a machine that stalls between the operations of one step shows in another what the rule is
OP_SECONDS = 1e-4  # what a line of the program costs the walk beside its work, about
HALF = {"parameter": 0.5, "checkpoint": 0.5, "optimizer": 0.5}


@pytest.fixture
def executors(monkeypatch):
    """Of a run whose operations sleep, each for a time of its own, so that the lanes wait for each other."""
    found = []
    submit, compute, begin = Lane.submit, TieredExecutor._results, TieredExecutor.__init__

    def sleep(name):
        time.sleep(0.005 * (1 + zlib.crc32(name.encode()) % 5))

    def slow_submit(self, name, run, after=(), **told):
        return submit(self, name, lambda: (sleep(name), run()), after, **told)

    def slow_compute(self, op):
        sleep(str(op.results))
        return compute(self, op)

    def noted(self, *arguments, **named):
        begin(self, *arguments, **named)
        found.append(self)

    monkeypatch.setattr(Lane, "submit", slow_submit)
    monkeypatch.setattr(TieredExecutor, "_results", slow_compute)
    monkeypatch.setattr(TieredExecutor, "__init__", noted)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"alpha": 0.5, "ratios": HALF}, {"separate_device": True, "alpha": 0.25}])
def test_a_run_takes_what_is_simulated(tmp_path, executors, changes):
    torch._dynamo.reset()
    harness = Harness(partial(gpt2, num_layers=4))
    roomy, host_nbytes = run(harness, executors, options(tmp_path, trace=True, **changes))
    tight, _ = run(harness, executors, options(tmp_path, trace=True, host_memory=host_nbytes, **changes))
    for ratios in (roomy, tight):
        assert min(abs(ratio - 1) for ratio in ratios) < 0.1, ratios


def run(harness, executors, given):
    """Of each step that has two before it, its seconds over those simulated; the host memory that would be enough."""
    executors.clear()
    with harness.fresh(adamw, given) as optimizer:
        for number in range(NUM_STEPS):
            step(harness.model, optimizer, tokens(number, 4))
        optimizer.engine.tiers.synchronize()
        tiers = optimizer.engine.tiers
        placement, events = tiers.placement, tiers.trace.events()
    programs = [executor.program for executor in executors[:NUM_STEPS]]
    lanes = {lane: iter([each for each in events if each.label.lane == lane]) for lane in LANES}
    seconds, ends = [], []
    for program in programs:
        events = [next(lanes[op.lane]) if op.lane != "memory" else None for op in program.ops]
        seconds.append([event.end_seconds - event.start_seconds if event else 0.0 for event in events])
        ends.append(max(event.end_seconds for event in events if event and event.label.lane == "compute"))
    ratios = []
    for count in range(3, NUM_STEPS + 1):
        given = programs[:count], seconds[:count]
        found = simulate(*given, placement=placement, rule=LaneRule(inline=True, op_seconds=OP_SECONDS))
        ratios.append((ends[count - 1] - ends[count - 2]) / found.seconds)
    return ratios, dict(programs[-1].peaks)["host"]
