from __future__ import annotations

import expecttest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import reference
from tiers import lowered, options, place, stages, tiered_steps
from toy import Toy, steps

from gs_compile.passes.free import free
from gs_compile.passes.snake import snake
from gs_compile.passes.vertical import vertical
from gs_compile.placement.kinds import ends_in_step
from gs_compile.placement.placement import Placement
from gs_compile.placement.verify import verify
from gs_compile.program.ir import StepShape
from gs_compile.program.text import parse


class TestText(expecttest.TestCase):
    def test_resident(self):
        self.assertExpectedInline(
            stages(free(snake(vertical(2, 2))), "backward h", "backward 1", frees=True),
            """\
# backward h   micro-batches 0 1
dwh.device = zeros()
loss_0.device, dx2_0.device = head(x2_0.device, batch_0, wh.device, into=dwh.device)
free(x2_0.device)
loss_1.device, dx2_1.device = head(x2_1.device, batch_1, wh.device, into=dwh.device)
free(x2_1.device)
# backward 1   micro-batches 1 0
dw1.device = zeros()
dx1_1.device = backward(x1_1.device, dx2_1.device, w1.device, into=dw1.device)
free(x1_1.device)
free(dx2_1.device)
dx1_0.device = backward(x1_0.device, dx2_0.device, w1.device, into=dw1.device)
free(x1_0.device)
free(dx2_0.device)
""",
        )


@given(steps())
def test_keeps_every_bit_of_what_survives(step):
    num_layers, num_micro_batches, shape = step
    toy = Toy(num_layers, num_micro_batches, shape, torch.float32)
    program = vertical(num_layers, num_micro_batches, shape=shape)
    before, after = (reference(p, toy, toy.inputs()) for p in (program, free(program)))
    assert set(after) == {value for value in before if not ends_in_step(Placement(), value)}
    torch.testing.assert_close(after, {value: before[value] for value in after}, rtol=0, atol=0)


@given(steps())
def test_frees_each_transient_value_right_after_its_last_use(step):
    num_layers, num_micro_batches, shape = step
    program = free(snake(vertical(num_layers, num_micro_batches, shape=shape)))
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
    program = vertical(1, 1, shape=StepShape(training=False, sides=frozenset("e")))
    deaf = parse(
        str(program)
        .replace("x0_0.device, side_0.device, w0", "x0_0.device, w0")
        .replace("x1_0.device, side_0.device, b", "x1_0.device, b")
    )
    verify(free(deaf))
    assert "= embed(batch_0, we.device)\nfree(side_0.device)\n" in str(free(deaf))


@given(tiered_steps(), options(), st.booleans())
def test_only_what_is_at_home_and_results_are_left(step, options, late):
    placement = place(*step, options)
    late = late and placement.has_late
    program = lowered(step, placement, late=late)[-1]
    alive = set(placement.homes(late=late))
    for op in program.ops:
        alive |= set(op.results)
        alive -= set(op.reads) if op.verb == "free" else set()
    left = {value for value in alive if value.kind not in ("loss", "y", "norm")}
    assert left == placement.homes(late=placement.has_late and step[2].training, warm=step[2].training)
