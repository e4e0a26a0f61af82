"""Random numbers of a unit's computation: they begin with a seed, and nobody else's draws change them."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import fx

from gs_compile.capture.draws import drawing, drawn_from
from gs_compile.capture.graph import TensorSpec
from gs_compile.capture.inductor import Generator
from gs_compile.runtime.stream_random import OwnNumbers

EAGER = Generator("eager")
ONES = torch.ones(50)
DRAWS = (
    lambda ones: torch.ops.aten.native_dropout(ones, 0.5, True)[0],
    lambda ones: ones.new_empty(5).uniform_(),
    lambda ones: torch.rand(5),
    lambda ones: torch.bernoulli(ones, 0.5),
    lambda ones: torch.randint(9, (5,)),
    lambda ones: torch.multinomial(ones, 3),
)


def traced(draw):
    return EAGER.trace(draw, [TensorSpec((50,), (1,), torch.float32, torch.device("cpu"), False, ())])


def as_traced(draw):
    return EAGER.generate(traced(draw))


def drawn(numbers, between=lambda: None, code=drawing):
    found = []
    for run in map(code, DRAWS):
        with drawn_from(numbers):
            found.append(run(ONES))
        between()
    return torch.cat([each.double() for each in found])


def test_code_as_it_was_traced_draws_the_same_and_no_operation_of_it_is_looked_at(monkeypatch):
    numbers = OwnNumbers()
    numbers.seed(3)
    expected = drawn(numbers)
    monkeypatch.setattr(OwnNumbers, "__torch_dispatch__", lambda *_: pytest.fail("a mode is on"))
    numbers.seed(3)
    assert torch.equal(drawn(numbers, code=as_traced), expected)


def test_a_graph_that_another_runs_draws_the_same():
    """As torch.cond's: traced code has it as a module."""
    outer = fx.Graph()
    ones, body = outer.placeholder("ones"), outer.get_attr("body")
    outer.output(outer.call_function(torch.ops.higher_order.cond, (True, body, body, (ones,))))
    inner = traced(lambda ones: (torch.bernoulli(ones, 0.5),))
    run = EAGER.generate(fx.GraphModule({"body": inner}, outer))
    numbers = OwnNumbers()
    found = []
    for _ in range(2):
        numbers.seed(3)
        with drawn_from(numbers):
            found += run(ONES)
    assert torch.equal(*found)
    assert not torch.equal(run(ONES)[0], found[0])


@pytest.mark.parametrize("code", [drawing, as_traced])
def test_a_thread_that_draws_changes_nothing_and_nobody_elses_numbers_are_used(code):
    def disturb():
        thread = threading.Thread(target=torch.rand, args=(7,))
        thread.start()
        thread.join()

    numbers = OwnNumbers()
    numbers.seed(3)
    before = torch.get_rng_state()
    alone = drawn(numbers, code=code)
    assert torch.equal(torch.get_rng_state(), before)
    numbers.seed(3)
    assert torch.equal(drawn(numbers, disturb, code), alone)
    numbers.seed(4)
    assert not torch.equal(drawn(numbers, code=code), alone)


def test_numbers_go_on_where_they_had_come_to():
    numbers = OwnNumbers()
    numbers.seed(3)
    drawn(numbers)
    state = numbers.state()
    first = drawn(numbers)
    numbers.go_on(state)
    assert torch.equal(drawn(numbers), first)


def test_a_device_has_one_sequence_of_numbers_with_and_without_its_index():
    numbers = OwnNumbers()
    numbers.seed(3)
    with numbers:
        first, second = torch.rand(5), torch.rand(5, device="cpu:0")
    assert not torch.equal(first, second)


def test_dropout_is_torchs_bit_for_bit():
    numbers = OwnNumbers()
    numbers.seed(5)
    with numbers:
        found = torch.ops.aten.native_dropout(ONES, 0.3, True)
    torch.manual_seed(5)
    expected = torch.ops.aten.native_dropout(ONES, 0.3, True)
    assert all(map(torch.equal, found, expected))
