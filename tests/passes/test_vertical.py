from __future__ import annotations

import expecttest
import pytest
from hypothesis import given
from tiers import stages, tiered_steps

from gs_compile.errors import ProgramError
from gs_compile.passes.vertical import vertical
from gs_compile.placement.verify import verify
from gs_compile.program.ir import StepShape, Value

EVERYTHING = StepShape(
    has_total=True,
    sides=frozenset("e"),
    side_gradients=frozenset("e"),
    emits=frozenset({"e", 0, "h"}),
    outside=frozenset({0, 2, "h"}),
    frozen=frozenset({1}),
)


class TestText(expecttest.TestCase):
    def test_plain(self):
        self.assertExpectedInline(
            str(vertical(1, 2)),
            """\
# gs_compile program 0.1   after vertical   1 layers x 2 micro-batches
# forward e   micro-batches 0 1
x0_0.device = embed(batch_0, we.device)
x0_1.device = embed(batch_1, we.device)
# forward 0   micro-batches 0 1
x1_0.device = forward(x0_0.device, w0.device)
x1_1.device = forward(x0_1.device, w0.device)
# backward h   micro-batches 0 1
dwh.device = zeros()
loss_0.device, dx1_0.device = head(x1_0.device, batch_0, wh.device, into=dwh.device)
loss_1.device, dx1_1.device = head(x1_1.device, batch_1, wh.device, into=dwh.device)
# backward 0   micro-batches 0 1
dw0.device = zeros()
dx0_0.device = backward(x0_0.device, dx1_0.device, w0.device, into=dw0.device)
dx0_1.device = backward(x0_1.device, dx1_1.device, w0.device, into=dw0.device)
# backward e   micro-batches 0 1
dwe.device = zeros()
embed_backward(batch_0, dx0_0.device, we.device, into=dwe.device)
embed_backward(batch_1, dx0_1.device, we.device, into=dwe.device)
""",
        )

    def test_everything(self):
        self.assertExpectedInline(
            str(vertical(2, 1, shape=EVERYTHING)),
            """\
# gs_compile program 0.1   after vertical   2 layers x 1 micro-batches
# forward e   micro-batches 0
total.device = count(batch_0)
x0_0.device, side_0.device, ye_0.device = embed(batch_0, we.device)
# forward 0   micro-batches 0
x1_0.device, y0_0.device = forward(x0_0.device, side_0.device, w0.device)
# forward 1   micro-batches 0
x2_0.device = forward(x1_0.device, side_0.device, w1.device)
# forward h   micro-batches 0
loss_0.device, yh_0.device = head(x2_0.device, side_0.device, batch_0, total.device, wh.device)
# backward h   micro-batches 0
dwh.device = zeros()
dside_0.device = zeros()
dx2_0.device = head_backward(x2_0.device, side_0.device, batch_0, total.device, dyh_0.device, wh.device, into=(dwh.device, dside_0.device))
# backward 1   micro-batches 0
dx1_0.device = backward(x1_0.device, dx2_0.device, dy2_0.device, side_0.device, w1.device, into=dside_0.device)
# backward 0   micro-batches 0
dw0.device = zeros()
dx0_0.device = backward(x0_0.device, dx1_0.device, side_0.device, w0.device, into=(dw0.device, dside_0.device))
# backward e   micro-batches 0
dwe.device = zeros()
embed_backward(batch_0, dx0_0.device, dy0_0.device, dside_0.device, we.device, into=dwe.device)
""",
        )

    def test_backward_ends_at_the_lowest_unit_that_needs_a_gradient(self):
        shape = StepShape(frozen=frozenset({"e", 0}), first_grad=1, sides=frozenset("e"), side_gradients=frozenset("e"))
        text = str(vertical(3, 1, shape=shape))
        self.assertExpectedInline(
            text[text.index("# backward h") :],
            """\
# backward h   micro-batches 0
dwh.device = zeros()
loss_0.device, dx3_0.device = head(x3_0.device, side_0.device, batch_0, wh.device, into=dwh.device)
# backward 2   micro-batches 0
dw2.device = zeros()
dx2_0.device = backward(x2_0.device, dx3_0.device, side_0.device, w2.device, into=dw2.device)
# backward 1   micro-batches 0
dw1.device = zeros()
backward(x1_0.device, dx2_0.device, side_0.device, w1.device, into=dw1.device)
""",
        )

    def test_tied_parameters(self):
        """Read by both; one sum, from the head's stage to the prologue's."""
        self.assertExpectedInline(
            stages(vertical(1, 1, shape=StepShape(tied=frozenset("eh"))), "forward e", "backward h", "backward e"),
            """\
# forward e   micro-batches 0
x0_0.device = embed(batch_0, we.device, wt.device)
# backward h   micro-batches 0
dwh.device = zeros()
dwt.device = zeros()
loss_0.device, dx1_0.device = head(x1_0.device, batch_0, wh.device, wt.device, into=(dwh.device, dwt.device))
# backward e   micro-batches 0
dwe.device = zeros()
embed_backward(batch_0, dx0_0.device, we.device, wt.device, into=(dwe.device, dwt.device))
""",
        )


@given(tiered_steps())
def test_is_well_formed(step):
    num_layers, num_micro_batches, shape = step
    program = vertical(num_layers, num_micro_batches, shape=shape)
    verify(program)
    readers = {op.unit for op in program.ops if Value("w", "t") in op.reads}
    assert readers - {"e", "h"} <= shape.joints
    assert readers == shape.tied


def test_no_gradient_without_a_source():
    text = vertical(2, 1, shape=StepShape(has_loss=False)).text()
    assert "forward h" in text
    assert "backward" not in text


def test_a_frozen_unit_cannot_end_the_backward():
    with pytest.raises(ProgramError, match="first_grad is e, which is frozen"):
        StepShape(frozen=frozenset({"e"}))


def test_side_gradient_needs_side_inputs():
    with pytest.raises(ProgramError, match="side_gradients without sides"):
        StepShape(side_gradients=frozenset("e"))


def test_what_begins_a_stack_makes_side_inputs_and_nothing_else():
    with pytest.raises(ProgramError, match="made by what begins a stack"):
        StepShape(joints=frozenset({2}), sides=frozenset({1}))
