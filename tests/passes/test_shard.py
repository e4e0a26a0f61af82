"""Units that ranks share: gathered in pieces, reduced once, in an order that no number of micro-batches changes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tiers import lowered, options, place, tiered_steps


def collectives(program):
    return [str(op) for op in program.ops if op.lane == "net"]


@given(tiered_steps(), options(), st.booleans(), st.sampled_from((2, 3)))
def test_the_same_collectives_in_the_same_order_for_any_number_of_micro_batches(step, options, late, world):
    num_layers, _, shape = step

    def of(number):
        placement = place(num_layers, number, shape, replace(options, world=world))
        return collectives(lowered((num_layers, number, shape), placement, late=late)[-1])

    expected = of(1)
    assert expected
    for number in (2, 3, 5):
        assert of(number) == expected
