"""A budget that is too small: the error says what would have been enough, and that is true."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gs_compile.errors import MemoryBudgetError
from gs_compile.runtime.arena import Arena

PAGE = 4096


class DoneWhenWaitedFor:
    done = False

    def wait(self) -> None:
        self.done = True


def play(budget_nbytes: int, moves: list[tuple[bool, int]]) -> int:
    """Takes and releases buffers; how many moves there were when the budget was found too small is in the error."""
    arena, held = Arena(budget_nbytes), []
    for index, (takes, number) in enumerate(moves):
        if takes:
            try:
                held.append(arena.take(PAGE * number, "checkpoint"))
            except MemoryBudgetError as error:
                error.add_note(f"{index} moves")
                raise
        elif held:
            held.pop(number % len(held)).release([DoneWhenWaitedFor()])
    return arena.ledger.peak_total


@settings(deadline=None, max_examples=200)
@given(
    budget=st.integers(0, 12),
    moves=st.lists(st.tuples(st.sampled_from([True, True, False]), st.integers(1, 6)), max_size=30),
)
def test_what_the_error_says_is_enough_is_enough_and_no_less(budget, moves):
    try:
        assert play(PAGE * budget, moves) <= PAGE * budget
    except MemoryBudgetError as error:
        needed = int(re.search(r"would make it .*? \((\d+) bytes\)", str(error))[1])
        until = moves[: int(error.__notes__[0].split()[0]) + 1]
        assert needed > PAGE * budget
        assert play(needed, until) == needed
        with pytest.raises(MemoryBudgetError):
            play(needed - PAGE, until)


def test_the_arena_works_on_after_a_refusal():
    arena = Arena(2 * PAGE)
    buffer = arena.take(PAGE, "parameter")
    with pytest.raises(MemoryBudgetError):
        arena.take(2 * PAGE, "checkpoint")
    assert arena.ledger.total == PAGE
    buffer.release()
    arena.take(2 * PAGE, "checkpoint").tensor.fill_(1)
