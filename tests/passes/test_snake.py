from __future__ import annotations

import itertools

import expecttest
import torch
from hypothesis import given
from reference import reference
from tiers import stages
from toy import Toy, steps

from gs_compile.passes.snake import snake
from gs_compile.passes.vertical import vertical
from gs_compile.placement.verify import verify


class TestText(expecttest.TestCase):
    def test_three_layers(self):
        self.assertExpectedInline(
            stages(snake(vertical(3, 2)), "forward 0", "forward 1"),
            """\
# forward 0   micro-batches 0 1
x1_0.device = forward(x0_0.device, w0.device)
x1_1.device = forward(x0_1.device, w0.device)
# forward 1   micro-batches 1 0
x2_1.device = forward(x1_1.device, w1.device)
x2_0.device = forward(x1_0.device, w1.device)
""",
        )


@given(steps())
def test_neighbouring_stages_share_a_micro_batch(step):
    num_layers, num_micro_batches, shape = step
    program = snake(vertical(num_layers, num_micro_batches, shape=shape))
    verify(program)
    orders = [[op.micro_batch for op in ops if op.micro_batch is not None] for _, ops in program.stages()]
    for before, after in itertools.pairwise(orders):
        assert after == before[::-1]
    assert orders[1] == list(range(num_micro_batches))  # layer 0


@given(steps(max_micro_batches=2))
def test_two_micro_batches_keep_every_bit(step):
    """a + b is b + a."""
    before, after = _both(*step)
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@given(steps(max_micro_batches=6))
def test_more_micro_batches_keep_all_but_the_order_of_addition(step):
    """Only dw sums over micro-batches: six float64 terms in another order differ by a few 2**-53 of their size."""
    before, after = _both(*step)
    sums = {value for value in before if value.kind == "dw"}
    torch.testing.assert_close(_only(after, sums), _only(before, sums), rtol=1e-9, atol=1e-9)
    rest = set(before) - sums
    torch.testing.assert_close(_only(after, rest), _only(before, rest), rtol=0, atol=0)


def test_twice_is_once():
    once = snake(vertical(3, 3))
    assert snake(once) == once


def _both(num_layers, num_micro_batches, shape, dtype=torch.float64):
    toy = Toy(num_layers, num_micro_batches, shape, dtype)
    program = vertical(num_layers, num_micro_batches, shape=shape)
    return reference(program, toy, toy.inputs()), reference(snake(program), toy, toy.inputs())


def _only(values, keys):
    return {value.name: values[value] for value in keys}
