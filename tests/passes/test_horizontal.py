"""The horizontal order: the vertical step's operations, one micro-batch after the other, and all passes after it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import expecttest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import reference
from tiers import Options, in_order, lowered, options, place, stages, tiered_steps, train
from toy import Toy, steps

from gs_compile.passes.baselines.horizontal import horizontal
from gs_compile.passes.vertical import vertical
from gs_compile.placement.verify import verify
from gs_compile.program.ir import StepShape, Value

ALL_SSD = Options(separate=True)
KEPT = ("loss", "y", "dw")  # what a step is run for


def homes(step, chosen, gradient_ratio=1.0):
    return in_order(place(*step, options=chosen), gradient_ratio)


class TestText(expecttest.TestCase):
    maxDiff = None

    def test_after_all_passes(self):
        """A stage of the forward with sums on their way, and one of the last backward; without the lines that free."""
        program = lowered((2, 2), homes((2, 2), ALL_SSD, 0.0))[-1]
        self.assertExpectedInline(
            stages(program, "forward 1 of 1", "backward 0 of 1"),
            """\
# forward 1 of 1
w1a.host, w1b.host = prefetch(w1a.ssd, w1b.ssd)
dw1.host = prefetch(dw1.ssd)
x1_1.ssd = offload(x1_1.host)
w1.device = gather(w1.device[0])
dwh.device = prefetch(dwh.host)
wh.device[0] = prefetch(wha.host)
x2_1.device = forward(x1_1.device, w1.device)
# backward 0 of 1
s1a.host = prefetch(s1a.ssd)
wha.host = empty()
update(dwha.host, into=(wha.host, sha.host))
dw1a.host = offload(dw1.device)
w0.device = gather(w0.device[0])
dwe.device = prefetch(dwe.host)
we.device[0] = prefetch(wea.host)
dx0_1.device = backward(x0_1.device, dx1_1.device, w0.device, into=dw0.device)
norm0.device = norm(dw0.device)
""",
        )


@given(steps())
def test_keeps_every_bit_of_the_vertical_step(step):
    num_layers, num_micro_batches, shape = step
    toy = Toy(num_layers, num_micro_batches, shape, torch.float32)
    program = horizontal(num_layers, num_micro_batches, shape=shape)
    verify(program)
    expected = reference(vertical(num_layers, num_micro_batches, shape=shape), toy, toy.inputs())
    torch.testing.assert_close(reference(program, toy, toy.inputs()), expected, rtol=0, atol=0)


@given(steps())
def test_the_same_operations_each_in_the_stage_of_its_micro_batch(step):
    num_layers, num_micro_batches, shape = step
    program = horizontal(num_layers, num_micro_batches, shape=shape)
    plain = [replace(op, stage=op.stage._replace(micro_batch=None)) for op in program.ops]
    assert Counter(plain) == Counter(vertical(num_layers, num_micro_batches, shape=shape).ops)
    for op in program.ops:
        assert op.micro_batch in (None, op.stage.micro_batch)
    order = [(bool(shape.outside) and op.stage.phase == "backward", op.stage.micro_batch) for op in program.ops]
    assert order == sorted(order)  # gradients from outside come after all forwards


@given(tiered_steps(), options(), st.sampled_from((0.0, 0.5, 1.0)))
def test_learns_what_the_vertical_order_learns(step, chosen, gradient_ratio):
    """To rounding: sums of parameters that are shared are added in another order."""
    found = train(*step, homes(step, chosen, gradient_ratio))
    torch.testing.assert_close(found, train(*step, place(*step, chosen)), rtol=1e-6, atol=1e-6)


def test_half_of_the_units_have_their_sums_on_ssd():
    placement = homes((3, 2), ALL_SSD, 0.4)
    assert [placement.gradient_home(unit) for unit in placement.units] == ["ssd", "ssd", "host", "ssd", "host"]


@given(tiered_steps(), options())
def test_checkpoints_of_one_micro_batch_are_alive(step, chosen):
    shape = replace(step[2], outside=frozenset())
    step = *step[:2], shape
    alive: set[Value] = set()
    for op in lowered(step, homes(step, chosen))[-1].ops:
        if shape.training and op.stage.unit is not None and op.verb not in ("free", "offload"):
            of = {value.micro_batch for value in alive if value.kind == "x"}
            assert len(of) <= 1
        alive.update(op.results)
        if op.verb == "free":
            alive.difference_update(op.reads)


@given(tiered_steps(), options(), st.sampled_from((0.0, 0.5, 1.0)))
def test_only_the_last_backward_is_beside_early_updates(step, chosen, gradient_ratio):
    updated = False
    for op in lowered(step, homes(step, chosen, gradient_ratio))[-1].ops:
        updated = updated or op.verb == "update"
        assert not (updated and op.micro_batch is not None and op.micro_batch < step[1] - 1)


def test_a_forward_alone_is_vertical():
    step = 2, 2, StepShape(training=False)
    for snapshots in (lowered(step, homes(step, ALL_SSD)), lowered(step, schedule="horizontal")):
        assert not snapshots[-1].by_micro_batch


def test_the_snake_is_left_out():
    assert [program.made_by for program in lowered((2, 2), schedule="horizontal")] == ["horizontal", "free"]
