from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu_work import work
from hypothesis import given
from hypothesis import strategies as st
from tiers import Options, in_order, lowered, options, place, tiered_steps, train

from gs_compile.errors import ProgramError
from gs_compile.passes import lower as lower_module
from gs_compile.passes.lower import StepSpec, flush, lower
from gs_compile.program.ir import StepShape, Value

WORK = 700  # for the largest program of the paper's models, which takes 170
ON_TIERS = ["vertical", "snake", "overlap", "offload", "pipeline", "free"]


def names(snapshots):
    return [program.made_by for program in snapshots]


def test_every_snapshot_is_there_and_snake_can_be_left_out():
    placement = place(3, 2)
    assert names(lowered((3, 2))) == ["vertical", "snake", "free"]
    assert names(lowered((3, 2), snake=False)) == ["vertical", "free"]
    assert names(lowered((3, 2), placement)) == ON_TIERS
    assert names(lowered((3, 2), placement, snake=False)) == ON_TIERS[:1] + ON_TIERS[2:]
    assert names(flush(placement)) == ON_TIERS[:1] + ON_TIERS[2:]


def test_nothing_to_flush_is_an_empty_program():
    assert flush(place(3, 2))[-1].ops == ()


def test_the_shape_arrives():
    last = lower(StepSpec(2, 2, shape=StepShape(training=False)))[-1]
    assert not any(op.stage.phase == "backward" for op in last.ops)
    freed = {op.reads[0] for op in last.ops if op.verb == "free"}
    assert {Value("x", 1, 0), Value("x", 1, 1)} <= freed


def test_every_pass_is_verified(monkeypatch):
    def forget(program):
        return program.with_ops(program.ops[1:], made_by="forget")

    monkeypatch.setattr(lower_module, "passes", lambda step: (forget,))
    complaint = r"after forget, line 3: x1_0.device = forward.*: x0_0.device is not defined"
    with pytest.raises(ProgramError, match=complaint):
        lower(StepSpec(3, 1))


@pytest.mark.parametrize("on_tiers", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_large_program_takes_little_work(on_tiers):
    chosen = Options(parameter_ratio=0.3, optimizer_ratio=0.3, checkpoint_ratio=0.3, alpha=0.25)
    shape = StepShape(sides=frozenset("e"), side_gradients=frozenset("e"), has_total=True, tied=frozenset("eh"))
    step = 96, 16, shape
    placement = place(*step, chosen) if on_tiers else None
    times, snapshots = work(lambda: lowered(step, placement, late=on_tiers))
    assert times < WORK
    assert sum(op.verb == "backward" for op in snapshots[-1].ops) == 96 * 16


@given(
    tiered_steps(),
    options(),
    st.sampled_from(("vertical", "horizontal")),
    st.sampled_from((0.0, 0.5, 1.0)),
    st.lists(st.booleans(), min_size=1, max_size=3),
)
def test_every_pass_keeps_every_bit(step, chosen, schedule, gradient_ratio, modes):
    """Neither what steps give, evaluation among them, nor what they leave depends on where data is or on alpha."""

    def scheduled(chosen):
        return in_order(place(*step, chosen), gradient_ratio, schedule)

    resident = replace(chosen, parameter_ratio=1.0, optimizer_ratio=1.0, alpha=1.0 if chosen.clip else 0.0)
    expected = train(*step, scheduled(resident), "overlap", modes)
    for made_by in ON_TIERS[2:]:
        found = train(*step, scheduled(chosen), made_by, modes)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
