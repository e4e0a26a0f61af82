"""Bytes of boundaries: in few numbers, and in parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gs_compile.placement.boundaries import at, in_parts, part_nbytes, scaled, shortest, total


@given(st.lists(st.integers(0, 3).map(lambda size: 512 * size), min_size=1, max_size=6))
def test_few_numbers_and_parts_say_the_same(nbytes):
    """Also where nothing is there: side inputs of stacks that are frozen have no gradient."""
    short, parts = shortest(nbytes), in_parts(shortest(nbytes))
    assert [at(short, boundary) for boundary in range(len(nbytes))] == nbytes
    assert total(short, len(nbytes)) == sum(nbytes)
    assert scaled(parts, part_nbytes(short, parts)) == short or not any(nbytes)
    assert short[-2:-1] != short[-1:]
