"""Several stacks in one program: a joint ends one and begins the next, and the order turns there as anywhere."""

from __future__ import annotations

from dataclasses import replace

import expecttest
import pytest
from tiers import Options, lowered, place, stages

from gs_compile.errors import ProgramError
from gs_compile.passes.snake import snake
from gs_compile.passes.vertical import vertical
from gs_compile.placement.verify import verify
from gs_compile.program.ir import FILL, StepShape
from gs_compile.program.text import parse


def two_stacks(joint: int) -> StepShape:
    """What the joint gives to the layers above it has a gradient, and what the prologue gives to those below has none."""
    return StepShape(joints=frozenset({joint}), sides=frozenset({"e", joint}), side_gradients=frozenset({joint}))


class TestText(expecttest.TestCase):
    def test_two_and_two_layers(self):
        """Layers 0 and 1 are one stack, 3 and 4 the other. The gradient of side2 is summed over the head, 4 and 3."""
        program = snake(vertical(5, 2, shape=two_stacks(2)))
        self.assertExpectedInline(
            program.text(fold=False),
            """\
# gs_compile program 0.1   after snake   5 layers x 2 micro-batches
# forward e   micro-batches 1 0
x0_1.device, side_1.device = embed(batch_1, we.device)
x0_0.device, side_0.device = embed(batch_0, we.device)
# forward 0   micro-batches 0 1
x1_0.device = forward(x0_0.device, side_0.device, w0.device)
x1_1.device = forward(x0_1.device, side_1.device, w0.device)
# forward 1   micro-batches 1 0
x2_1.device = forward(x1_1.device, side_1.device, w1.device)
x2_0.device = forward(x1_0.device, side_0.device, w1.device)
# forward 2   micro-batches 0 1
x3_0.device, side2_0.device = join(x2_0.device, side_0.device, batch_0, w2.device)
x3_1.device, side2_1.device = join(x2_1.device, side_1.device, batch_1, w2.device)
# forward 3   micro-batches 1 0
x4_1.device = forward(x3_1.device, side2_1.device, w3.device)
x4_0.device = forward(x3_0.device, side2_0.device, w3.device)
# forward 4   micro-batches 0 1
x5_0.device = forward(x4_0.device, side2_0.device, w4.device)
x5_1.device = forward(x4_1.device, side2_1.device, w4.device)
# backward h   micro-batches 1 0
dwh.device = zeros()
dside2_0.device = zeros()
dside2_1.device = zeros()
loss_1.device, dx5_1.device = head(x5_1.device, side2_1.device, batch_1, wh.device, into=(dwh.device, dside2_1.device))
loss_0.device, dx5_0.device = head(x5_0.device, side2_0.device, batch_0, wh.device, into=(dwh.device, dside2_0.device))
# backward 4   micro-batches 0 1
dw4.device = zeros()
dx4_0.device = backward(x4_0.device, dx5_0.device, side2_0.device, w4.device, into=(dw4.device, dside2_0.device))
dx4_1.device = backward(x4_1.device, dx5_1.device, side2_1.device, w4.device, into=(dw4.device, dside2_1.device))
# backward 3   micro-batches 1 0
dw3.device = zeros()
dx3_1.device = backward(x3_1.device, dx4_1.device, side2_1.device, w3.device, into=(dw3.device, dside2_1.device))
dx3_0.device = backward(x3_0.device, dx4_0.device, side2_0.device, w3.device, into=(dw3.device, dside2_0.device))
# backward 2   micro-batches 0 1
dw2.device = zeros()
dx2_0.device = join_backward(x2_0.device, side_0.device, batch_0, dx3_0.device, dside2_0.device, w2.device, into=dw2.device)
dx2_1.device = join_backward(x2_1.device, side_1.device, batch_1, dx3_1.device, dside2_1.device, w2.device, into=dw2.device)
# backward 1   micro-batches 1 0
dw1.device = zeros()
dx1_1.device = backward(x1_1.device, dx2_1.device, side_1.device, w1.device, into=dw1.device)
dx1_0.device = backward(x1_0.device, dx2_0.device, side_0.device, w1.device, into=dw1.device)
# backward 0   micro-batches 0 1
dw0.device = zeros()
dx0_0.device = backward(x0_0.device, dx1_0.device, side_0.device, w0.device, into=dw0.device)
dx0_1.device = backward(x0_1.device, dx1_1.device, side_1.device, w0.device, into=dw0.device)
# backward e   micro-batches 1 0
dwe.device = zeros()
embed_backward(batch_1, dx0_1.device, we.device, into=dwe.device)
embed_backward(batch_0, dx0_0.device, we.device, into=dwe.device)
""",
        )
        assert parse(program.text()) == program

    def test_around_the_joint_with_everything_on_ssd(self):
        program = lowered((5, 2, two_stacks(2)), place(5, 2, two_stacks(2), Options()))[-1]
        self.assertExpectedInline(
            stages(program, "forward 2", "backward 2"),
            """\
# forward 2   micro-batches 0 1
w4a.host = prefetch(w4a.ssd)
x2_0.ssd, x2_1.ssd = offload(x2_0.host, x2_1.host)
w2.device = gather(w2.device[0], w2.device[1])
x2_1.device = prefetch(x2_1.host)
w3.device[0] = prefetch(w3a.host, w3b.host)
x3_0.device, side2_0.device = join(x2_0.device, side_0.device, batch_0, w2.device)
x3_0.host = offload(x3_0.device)
w3.device[1] = prefetch(w3a.host, w3b.host)
x3_1.device, side2_1.device = join(x2_1.device, side_1.device, batch_1, w2.device)
x3_1.host = offload(x3_1.device)
# backward 2   micro-batches 0 1
x1_0.host, x1_1.host = prefetch(x1_0.ssd, x1_1.ssd)
w0a.host = prefetch(w0a.ssd)
s3a.host = prefetch(s3a.ssd)
offload(wha.host, into=wha.ssd)
offload(sha.host, into=sha.ssd)
w4a.host = empty()
update(dw4a.host, into=(w4a.host, s4a.host))
dw3a.host = offload(dw3.device)
w2.device = gather(w2.device[0], w2.device[1])
dw2.device = zeros()
x2_1.device = prefetch(x2_1.host)
dx3_1.device = prefetch(dx3_1.host)
w1.device[0] = prefetch(w1a.host, w1b.host)
dx2_0.device = join_backward(x2_0.device, side_0.device, batch_0, dx3_0.device, dside2_0.device, w2.device, into=dw2.device)
dx2_0.host = offload(dx2_0.device)
w1.device[1] = prefetch(w1a.host, w1b.host)
x1_1.device = prefetch(x1_1.host)
dx2_1.device = join_backward(x2_1.device, side_1.device, batch_1, dx3_1.device, dside2_1.device, w2.device, into=dw2.device)
norm2.device = norm(dw2.device)
""",
        )


def test_a_joint_runs_by_its_own_verbs():
    program = vertical(3, 1, shape=two_stacks(1))
    assert program.joints == {1}
    text = program.text().replace(
        "= join_backward(x1_0.device, side_0.device, batch_0, dx2", "= backward(x1_0.device, dx2"
    )
    with pytest.raises(ProgramError, match=r"backward.*in the stage of a joint"):
        verify(parse(text))


def test_side_inputs_are_those_of_the_own_stack():
    text = vertical(3, 1, shape=two_stacks(1)).text()
    with pytest.raises(ProgramError, match=r"not side_0\.device"):
        verify(parse(text.replace("forward(x2_0.device, side1_0.device", "forward(x2_0.device, side_0.device")))


def device_peak(num_layers: int, joint: int) -> int:
    step = num_layers, 3, two_stacks(joint)
    return dict(lowered(step, place(*step, Options()))[-1].peaks)["device"]


def test_device_memory_does_not_grow_with_the_depth_of_either_stack():
    assert device_peak(13, 4) == device_peak(13, 8) == device_peak(23, 11)


def test_a_joint_ahead_of_all_stages_is_refused():
    good = snake(vertical(5, 2, shape=two_stacks(2)))
    at = next(at for at, op in enumerate(good.ops) if op.verb == "join")
    broken = good.with_ops((replace(good.ops[at], stage=FILL), *good.ops[:at], *good.ops[at + 1 :]), "by hand")
    with pytest.raises(ProgramError, match="join"):
        verify(broken)
