"""Plans of steps with several backwards: all updates wait, and gradient sums are where memory has room."""

from __future__ import annotations

import re

import pytest
from planned import gpt
from standin import fails

from gs_compile.errors import NoFitError, PlanError
from gs_compile.planner import fit
from gs_compile.planner.fit import longest_sequence
from gs_compile.planner.plan import Planner, plan
from gs_compile.planner.reasons import STORES_GRADIENTS
from gs_compile.planner.request import Request

GIVEN = {"machine": "a100", "micro_batch_size": 1, "num_micro_batches": 4, "recompute": "all", "host_memory": "400MiB"}
WORKLOAD = gpt(6, 1024, vocabulary=5000)  # whose sums take 316 MiB


@pytest.mark.parametrize("clip", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sums_go_to_ssd_where_host_memory_has_no_room(clip):
    """Delayed clipping alone would not fit, so where nobody asks for it a step with clipping is planned so too."""
    one = plan(WORKLOAD, **GIVEN, alpha=0.0)
    with pytest.raises(NoFitError, match="of host memory"):
        plan(WORKLOAD, **GIVEN, clip=True, clipping="delayed")
    found = plan(WORKLOAD, **GIVEN, accumulate=not clip, clip=clip)
    assert (STORES_GRADIENTS in found.notes) == clip
    assert (found.alpha, found.placement.clip, found.placement.speculative) == (1.0, clip, False)
    assert 0 < found.ratios["gradient"] < 0.9
    assert found.seconds > one.seconds
    assert found.placement.accumulates


def test_the_longest_sequence_is_looked_for_as_the_plan_was_made(monkeypatch):
    """`plan --clip --longest` had made a plan, and was refused by what its way to clip did not need."""
    monkeypatch.setattr(fit, "_largest", lambda planner, size: size)
    asked = Request(**GIVEN, clip=True)
    assert longest_sequence(WORKLOAD, asked) == asked.sequence
    monkeypatch.setattr(Planner, "searched", fails(NoFitError("by the linear program")))
    assert longest_sequence(WORKLOAD, asked) == asked.sequence


def test_a_refusal_names_what_is_enough_with_sums_on_ssd():
    """With clipping that nobody asks to delay: it named what delayed clipping needs, which is half as much again."""
    asked = GIVEN | {"clip": True, "host_memory": "100MiB"}
    with pytest.raises(NoFitError, match="of host memory") as refusal:
        plan(WORKLOAD, **asked)
    enough = re.search(r"it needs (\S+) (\S+) of host memory", str(refusal.value))
    found = plan(WORKLOAD, **asked | {"host_memory": "".join(enough.groups())})
    assert STORES_GRADIENTS in found.notes


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"alpha": 0.5}, "alpha is 0.5, but a step that accumulates updates everything after its last backward"),
        ({"schedule": "horizontal"}, 'a step that accumulates has the "vertical" order alone'),
    ],
)
def test_what_contradicts_it_is_refused(given, words):
    with pytest.raises(PlanError, match=words):
        Request(accumulate=True, **given)
