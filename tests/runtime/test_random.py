"""Random numbers of a unit's computation: they begin with a seed, and nobody else's draws change them."""

from __future__ import annotations

import threading

import torch

from gs_compile.runtime.stream_random import OwnNumbers

ONES = torch.ones(50)


def drawn(numbers, between=lambda: None):
    found = []
    for draw in (
        lambda: torch.ops.aten.native_dropout(ONES, 0.5, True)[0],
        lambda: torch.rand(5),
        lambda: torch.bernoulli(ONES, 0.5),
        lambda: torch.randint(9, (5,)),
        lambda: torch.multinomial(ONES, 3),
    ):
        with numbers:
            found.append(draw())
        between()
    return torch.cat([each.double() for each in found])


def test_a_thread_that_draws_changes_nothing_and_nobody_elses_numbers_are_used():
    def disturb():
        thread = threading.Thread(target=torch.rand, args=(7,))
        thread.start()
        thread.join()

    numbers = OwnNumbers()
    numbers.seed(3)
    before = torch.get_rng_state()
    alone = drawn(numbers)
    assert torch.equal(torch.get_rng_state(), before)
    numbers.seed(3)
    assert torch.equal(drawn(numbers, disturb), alone)
    numbers.seed(4)
    assert not torch.equal(drawn(numbers), alone)


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
