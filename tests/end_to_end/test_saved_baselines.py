"""Saved activations in the schedules that the vertical one is compared with: the same bits, and the bytes and memory
that are planned.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest
import torch
from closed_forms import of_saved, saved_items
from saving import saving
from test_choice import MACHINE
from tiered import adamw, moved, options, outcome, shared, step, tokens

import gs_compile
from gs_compile.machine import format_bytes
from gs_compile.placement.levels import Share
from gs_compile.planner.builder import planned_peak

KEEPS_CAPTURES = True
SCHEDULES = ("horizontal", "single")
NUM_BLOCKS = 3
ITEMS = {"horizontal": 9, "single": 6}  # pairs of a layer and a micro-batch: of a half-layer and the batch
SAVING = {"horizontal": 9, "single": 3}  # an attention half of this model has nothing to compute again
FREE = dict.fromkeys(("parameter", "checkpoint", "optimizer"), 0.0)


def harness_of(schedule):
    return shared(halved=schedule == "single", num_layers=NUM_BLOCKS, dropout=0.1)


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    """What training comes to where every layer runs again, by schedule."""
    found = tmp_path_factory.mktemp("usual")
    return {each: harness_of(each).train(adamw, options(found, schedule=each), num_steps=3) for each in SCHEDULES}


def checked(given, usual):
    """A run of the usual bits, whose last step moves what its plan and its program say: the placement, the most host
    memory that its programs take, the most that it had mapped, and what `inspect` shows.
    """
    harness = harness_of(given["expert"]["schedule"])
    torch.manual_seed(1)
    with harness.fresh(adamw, given) as optimizer:
        losses = [step(harness.model, optimizer, tokens(number)) for number in range(2)]
        optimizer.synchronize()
        found = moved(harness.model, optimizer, tokens(2))
        engine = optimizer.engine
        placement, plan, program = engine.placement, engine.planning.planned.plan, engine.snapshots[-1]
        shown = gs_compile.inspect(harness.model).tiers
        come_to = outcome(harness.model, optimizer, losses, usual.norms)
        mapped_nbytes = engine.tiers.slab.nbytes
    assert come_to.differences(replace(usual, losses=usual.losses[:2])) == []
    assert placement.layout.schedule == given["expert"]["schedule"]
    assert found.traced == found.planned
    assert found.asked == {key: n for key, n in found.planned.items() if key[0].startswith("ssd")}
    assert {lane: n for (lane, kind), n in found.planned.items() if kind == "a"} == of_saved(placement)
    if plan is not None and plan.is_solved and plan.placement == placement:
        assert plan.traffic == found.planned
        assert plan.peaks["host"] == planned_peak(program, "host")
    return placement, planned_peak(program, "host"), mapped_nbytes, shown


@pytest.mark.parametrize("separate", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_on_each_tier(usual, tmp_path, schedule, separate):
    """A third of what can save on each tier there is, late updates beside it, within exactly the memory planned."""
    tiers = ("device", "host", "ssd") if separate else ("host", "ssd")
    third = SAVING[schedule] / 3 / ITEMS[schedule]
    given = options(tmp_path, schedule=schedule, separate_device=separate, alpha=0.5)
    with saving(*(Share(1, tier, third) for tier in tiers)):
        placement, nbytes, *_ = checked(given, usual[schedule])
        _, _, mapped_nbytes, _ = checked(given | {"host_memory": nbytes}, usual[schedule])
    assert mapped_nbytes <= nbytes
    assert saved_items(placement)[1] == dict.fromkeys(tiers, SAVING[schedule] // 3)


@pytest.mark.parametrize(
    ("recompute", "ratios", "part"),
    [("none", {**FREE, "checkpoint": None}, 1.0), ("auto", FREE, 1.0), ("auto", {**FREE, "activation": 1 / 3}, 1 / 3)],
    ids=["none", "auto", "given"],
)
@pytest.mark.parametrize(
    ("schedule", "separate"),
    [pytest.param(*each, marks=pytest.mark.slow) for each in (("horizontal", True), ("single", False))]
    + [("single", True)],
)
def test_as_options_ask(usual, tmp_path, slow_code, caplog, schedule, separate, recompute, ratios, part):
    """All, what is faster, or a part; the log and `inspect` tell how many."""
    caplog.set_level(logging.INFO, "gs_compile.planner.run")
    chosen = {"recompute": recompute, "ratios": ratios, "separate_device": separate, "alpha": 0.0}
    given = options(tmp_path, schedule=schedule, **chosen) | {"machine": str(MACHINE)}
    placement, _, _, shown = checked(given, usual[schedule])
    count, number = min(SAVING[schedule], round(part * ITEMS[schedule])), ITEMS[schedule]
    nbytes, found = saved_items(placement)
    assert found == {"host": count}
    assert f"activations: {format_bytes(nbytes['host'])} on host, 0 B on SSD" in shown
    said = caplog.messages[-1]
    if said.startswith("Plan of"):
        assert f", {schedule}: " in said
        assert f"{count / number:.0%} of activations saved" in said
    if recompute == "auto" and part == 1.0:
        assert re.search(rf"{count} of {number} layer inputs keep their activations in host memory: \d+% faster", said)
    assert ("layers 0, 2, 4 can save the input alone" in said) == (schedule == "single")
