"""The oracle itself is held against ordinary autograd of the same model over the whole batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from reference import reference
from toy import Toy, steps

from gs_compile.passes.free import free
from gs_compile.passes.vertical import vertical
from gs_compile.program.ir import StepShape, Value


@given(steps())
def test_equals_autograd_over_the_whole_batch(step):
    """float64, a few dozen terms a sum: rounding stays far below 1e-9 of the sums' size."""
    num_layers, num_micro_batches, shape = step
    toy = Toy(num_layers, num_micro_batches, shape)
    values = reference(vertical(num_layers, num_micro_batches, shape=shape), toy, toy.inputs())
    loss, gradients = toy.plain()
    if shape.has_loss:
        total = sum(values[Value("loss", None, j)] for j in range(num_micro_batches))
        torch.testing.assert_close(total, loss, rtol=1e-9, atol=1e-9)
    found = {value.unit: dw for value, dw in values.items() if value.kind == "dw"}
    expected = {unit: dw for unit, dw in gradients.items() if shape.training and any(g is not None for g in dw)}
    assert found.keys() == expected.keys()
    for unit, dw in expected.items():
        whole = [torch.zeros_like(f) if g is None else g for f, g in zip(found[unit], dw, strict=True)]
        torch.testing.assert_close(found[unit], whole, rtol=1e-9, atol=1e-9)


def test_other_outputs_are_those_of_the_units():
    shape = StepShape(emits=frozenset({"e", 1, "h"}))
    toy = Toy(2, 2, shape)
    values = reference(vertical(2, 2, shape=shape), toy, toy.inputs())
    for j, batch in enumerate(toy.batches):
        x0 = torch.tanh(batch.features @ toy.weights["e"][0])
        torch.testing.assert_close(values[Value("y", "e", j)], x0.sum(1))
        torch.testing.assert_close(values[Value("y", 1, j)], (values[Value("x", 1, j)] @ toy.weights[1][0]).sum(1))
        torch.testing.assert_close(values[Value("y", "h", j)], values[Value("x", 2, j)] @ toy.weights["h"][0])


def test_a_freed_value_is_gone():
    toy = Toy(1, 1, StepShape())
    program = free(vertical(1, 1))
    read_again = program.with_ops((*program.ops, next(op for op in program.ops if op.verb == "head")), "odd")
    with pytest.raises(KeyError):
        reference(read_again, toy, toy.inputs())
