"""A plan by a model's config and the plan of its run are one, field by field, where they count on the same figures."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import partial
from itertools import chain

import pytest
import torch
import zoo
from figures import MACHINE
from tiered import Harness, adamw, muon, tokens

import gs_compile
from gs_compile.errors import MemoryBudgetError
from gs_compile.placement.placement import Decision
from gs_compile.planner.cost import timing

KEEPS_CAPTURES = True
BATCH, MICRO_BATCH = 4, 2
LENGTH = tokens(0).shape[1]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "qwen3", "gpt_neox", "mistral")]
MODELS = ["llama", *SLOW]
SETTINGS = {  # what is asked for, and host memory in multiples of the least
    "clip": ({"clip": True}, 1.3),
    "scarce memory": ({}, 1.02),
    "masters": ({"precision": "bf16"}, 1.3),
    "saved": ({"recompute": "none"}, 1.3),
    "muon": ({"optimizer": "muon", "recompute": "all"}, 1.3),
    "all of these": ({"clip": True, "precision": "bf16", "recompute": "none"}, 1.02),
}


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def harnesses(name):
    torch._dynamo.reset()  # it would give up a forward that several models here have in common
    build = partial(zoo.small, name)
    return {precision: Harness(build, precision) for precision in ("model", "bf16")}


def one_group(make, groups, **settings):
    """As plans by name have it: units are in the order of groups."""
    return make([{"params": [parameter for group in groups for parameter in group["params"]]}], **settings)


def seconds(cost):
    return cost.seconds or (None, None)


@pytest.mark.parametrize(
    "setting",
    [pytest.param(each, marks=[pytest.mark.slow] * (each != "all of these")) for each in SETTINGS],
)
def test_one_plan(name, harnesses, setting, storage, monkeypatch, given_figures):
    """The code is not timed: both price its operations by the rates of the machine."""
    monkeypatch.setattr(timing, "_timed", lambda workload, layout, unit, share: seconds(workload.costs[unit.unit]))
    monkeypatch.setattr(timing, "_timed_levels", lambda layout, unit, cost, *_: [*chain(*map(seconds, cost.levels))])
    asked, times = SETTINGS[setting]
    expert = {"compiler": "eager", "recompute": asked.get("recompute", "auto")}
    options = {"micro_batch_size": MICRO_BATCH, "outputs": "loss", "storage": storage, "expert": expert}
    harness = harnesses[asked.get("precision", "model")]
    optimizer_of = muon if "optimizer" in asked else adamw
    make = partial(one_group, optimizer_of, max_grad_norm=1.0 if asked.get("clip") else None)
    ids = tokens(0, BATCH)
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    call = {**tensors, "use_cache": False}  # as plans have it: the cache of GPT-2 would be saved too
    with harness.fresh(make, options | {"host_memory": 1}) as optimizer, pytest.raises(MemoryBudgetError) as refusal:
        harness.model(**call)
    least = int(re.search(r"\((\d+) bytes\) of it at least", str(refusal.value))[1])
    host = {"host_memory": int(least * times), "machine": MACHINE}
    with harness.fresh(make, options | host) as optimizer:
        harness.model(**call)
        ran = optimizer.engine.planning.planned.plan
    sizes = {"sequence": LENGTH, "batch_size": BATCH, "micro_batch_size": MICRO_BATCH}
    made = gs_compile.plan(harness.model.config, **{"precision": "model", **asked, **sizes, **host})
    of_made, of_run = made.placement.decision, ran.placement.decision
    for each in fields(Decision):
        assert getattr(of_made, each.name) == getattr(of_run, each.name), each.name
    assert made.placement == ran.priced  # what fits in memory was laid out before the machine was known
    assert [unit.groups for unit in made.placement.units] == [unit.groups for unit in ran.placement.units]
    assert (made.masters, made.num_micro_batches, made.peaks) == (ran.masters, ran.num_micro_batches, ran.peaks)
    assert bool(of_made.shares) == (asked.get("recompute") == "none")
    assert made.seconds == pytest.approx(ran.seconds, rel=1e-9)
