from __future__ import annotations

import expecttest
import torch
from hypothesis import given, settings
from toy import Toy, steps

from gs_compile.passes.free import Free
from gs_compile.passes.snake import Snake
from gs_compile.passes.vertical import vertical
from gs_compile.placement.kinds import ends_in_step
from gs_compile.placement.placement import Placement
from gs_compile.placement.verify import verify
from gs_compile.program.ir import StepShape, Value
from gs_compile.program.reference import reference
from gs_compile.program.text import parse


class TestText(expecttest.TestCase):
    def test_three_layers(self):
        self.assertExpectedInline(
            str(Free()(Snake()(vertical(3, 2)))),
            """\
# gs_compile 0.1   after free   3 layers x 2 micro-batches
# forward e   micro-batches 1 0
x0_1.device = embed(batch_1, we.device)
x0_0.device = embed(batch_0, we.device)
# forward 0   micro-batches 0 1
x1_0.device = forward(x0_0.device, w0.device)
x1_1.device = forward(x0_1.device, w0.device)
# forward 1   micro-batches 1 0
x2_1.device = forward(x1_1.device, w1.device)
x2_0.device = forward(x1_0.device, w1.device)
# forward 2   micro-batches 0 1
x3_0.device = forward(x2_0.device, w2.device)
x3_1.device = forward(x2_1.device, w2.device)
# backward h   micro-batches 1 0
dwh.device = zeros()
loss_1.device, dx3_1.device = head(x3_1.device, batch_1, wh.device, into=dwh.device)
free(x3_1.device)
loss_0.device, dx3_0.device = head(x3_0.device, batch_0, wh.device, into=dwh.device)
free(x3_0.device)
# backward 2   micro-batches 0 1
dw2.device = zeros()
dx2_0.device = backward(x2_0.device, dx3_0.device, w2.device, into=dw2.device)
free(x2_0.device)
free(dx3_0.device)
dx2_1.device = backward(x2_1.device, dx3_1.device, w2.device, into=dw2.device)
free(x2_1.device)
free(dx3_1.device)
# backward 1   micro-batches 1 0
dw1.device = zeros()
dx1_1.device = backward(x1_1.device, dx2_1.device, w1.device, into=dw1.device)
free(x1_1.device)
free(dx2_1.device)
dx1_0.device = backward(x1_0.device, dx2_0.device, w1.device, into=dw1.device)
free(x1_0.device)
free(dx2_0.device)
# backward 0   micro-batches 0 1
dw0.device = zeros()
dx0_0.device = backward(x0_0.device, dx1_0.device, w0.device, into=dw0.device)
free(x0_0.device)
free(dx1_0.device)
dx0_1.device = backward(x0_1.device, dx1_1.device, w0.device, into=dw0.device)
free(x0_1.device)
free(dx1_1.device)
# backward e   micro-batches 1 0
dwe.device = zeros()
embed_backward(batch_1, dx0_1.device, we.device, into=dwe.device)
free(dx0_1.device)
embed_backward(batch_0, dx0_0.device, we.device, into=dwe.device)
free(dx0_0.device)
""",
        )

    def test_forward_only(self):
        shape = StepShape(training=False, has_side=True, has_total=True)
        self.assertExpectedInline(
            str(Free()(vertical(2, 1, shape=shape))),
            """\
# gs_compile 0.1   after free   2 layers x 1 micro-batches
# forward e   micro-batches 0
total.device = count(batch_0)
x0_0.device, side_0.device = embed(batch_0, we.device)
# forward 0   micro-batches 0
x1_0.device = forward(x0_0.device, side_0.device, w0.device)
free(x0_0.device)
# forward 1   micro-batches 0
x2_0.device = forward(x1_0.device, side_0.device, w1.device)
free(x1_0.device)
# forward h   micro-batches 0
loss_0.device = head(x2_0.device, side_0.device, batch_0, total.device, wh.device)
free(x2_0.device)
free(side_0.device)
free(total.device)
""",
        )


@settings(deadline=None, max_examples=60)
@given(steps())
def test_keeps_every_bit_of_what_survives(step):
    num_layers, num_micro_batches, shape = step
    toy = Toy(num_layers, num_micro_batches, shape, torch.float32)
    program = vertical(num_layers, num_micro_batches, shape=shape)
    before, after = (reference(p, toy, toy.inputs()) for p in (program, Free()(program)))
    assert set(after) == {value for value in before if not ends_in_step(Placement(), value)}
    torch.testing.assert_close(after, {value: before[value] for value in after}, rtol=0, atol=0)


@settings(deadline=None)
@given(steps())
def test_frees_each_transient_value_right_after_its_last_use(step):
    num_layers, num_micro_batches, shape = step
    program = Free()(Snake()(vertical(num_layers, num_micro_batches, shape=shape)))
    verify(program)
    freed = [op.reads[0] for op in program.ops if op.verb == "free"]
    used = {v for op in program.ops for v in (*op.reads, *op.into, *op.results) if ends_in_step(Placement(), v)}
    assert sorted(map(str, freed)) == sorted(map(str, used))
    last_user = None
    for op in program.ops:
        if op.verb != "free":
            last_user = op
        else:
            assert op.reads[0] in (*last_user.reads, *last_user.into, *last_user.results)


def test_a_value_that_nothing_reads_ends_where_it_is_defined():
    program = vertical(1, 1, shape=StepShape(training=False, has_side=True))
    deaf = parse(
        str(program)
        .replace("x0_0.device, side_0.device, w0", "x0_0.device, w0")
        .replace("x1_0.device, side_0.device, b", "x1_0.device, b")
    )
    verify(Free()(deaf))
    assert "= embed(batch_0, we.device)\nfree(side_0.device)\n" in str(Free()(deaf))


def test_kept_values_are_never_freed():
    x2 = Value("x", 2, 0)
    program = vertical(3, 2)
    freed = {op.reads[0] for op in Free(outputs=frozenset({x2}))(program).ops if op.verb == "free"}
    assert x2 in {op.reads[0] for op in Free()(program).ops if op.verb == "free"}
    assert x2 not in freed
    assert Value("x", 2, 1) in freed
