from __future__ import annotations

import time

import pytest
from tiers import Options, place

from gs_compile.errors import ProgramError
from gs_compile.passes import lower as lower_module
from gs_compile.passes.lower import StepSpec, flush, lower
from gs_compile.program.ir import StepShape, Value

SECONDS = 10.0  # for the largest program of the paper's models; it takes well under one


def test_every_snapshot_is_there():
    assert [program.made_by for program in lower(StepSpec(3, 2))] == ["vertical", "snake", "free"]


def test_snake_can_be_left_out():
    *_, last = snapshots = lower(StepSpec(3, 2, snake=False))
    assert [program.made_by for program in snapshots] == ["vertical", "free"]
    assert [op.micro_batch for op in last.ops if op.verb == "embed"] == [0, 1]


def test_shape_and_keep_arrive():
    kept = Value("x", 1, 0)
    last = lower(StepSpec(2, 1, shape=StepShape(training=False), outputs=frozenset({kept})))[-1]
    assert not any(op.stage.phase == "backward" for op in last.ops)
    assert kept not in {op.reads[0] for op in last.ops if op.verb == "free"}


def test_every_pass_is_verified(monkeypatch):
    def forget(program):
        return program.with_ops(program.ops[1:], made_by="forget")

    monkeypatch.setattr(lower_module, "passes", lambda step: (forget,))
    with pytest.raises(
        ProgramError, match=r"after forget, line 3: x1_0.device = forward.*: x0_0.device is not defined"
    ):
        lower(StepSpec(3, 1))


def test_a_large_program_takes_little_time():
    shape = StepShape(has_side=True, side_gradient=True, has_total=True, emits=frozenset({"h"}))
    start = time.perf_counter()
    last = lower(StepSpec(96, 16, shape=shape))[-1]
    assert time.perf_counter() - start < SECONDS
    assert sum(op.verb == "backward" for op in last.ops) == 96 * 16


def test_a_large_program_on_tiers_takes_little_time():
    options = Options(parameter_ratio=0.3, optimizer_ratio=0.3, checkpoint_ratio=0.3, alpha=0.25)
    shape = StepShape(has_side=True, side_gradient=True, has_total=True, tied=frozenset("eh"))
    placement = place(96, 16, shape, options)
    start = time.perf_counter()
    last = lower(StepSpec(96, 16, shape=shape, placement=placement, late=True))[-1]
    assert time.perf_counter() - start < SECONDS
    assert sum(op.verb == "backward" for op in last.ops) == 96 * 16


def test_every_snapshot_on_tiers_is_there():
    placement = place(3, 2)
    names = ["vertical", "snake", "overlap", "offload", "pipeline", "free"]
    assert [program.made_by for program in lower(StepSpec(3, 2, placement=placement))] == names
    assert [program.made_by for program in lower(StepSpec(3, 2, placement=placement, snake=False))] == names[
        :1
    ] + names[2:]
    assert [program.made_by for program in flush(3, placement)] == names[:1] + names[2:]


def test_nothing_to_flush_is_an_empty_program():
    assert flush(3, place(3, 2))[-1].ops == ()
