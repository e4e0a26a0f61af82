"""draws: where units' code gets its random numbers.

    as traced   each operation that draws is a call of `draw`; others are unchanged
    compiled    code that draws runs under a dispatch mode, which sees each of its calls of torch

A mode costs Python time for each operation, several times that of a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol


class Numbers(AbstractContextManager[Any], Protocol):
    """The random numbers of one computation; a context manager in which all operations draw from them."""

    def draw(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of an ATen operator that draws."""


NUMBERS: ContextVar[Numbers | None] = ContextVar("numbers", default=None)  # of the code that this thread runs


@contextmanager
def drawn_from(numbers: Numbers) -> Iterator[None]:
    """In the block, units' code draws from these numbers; elsewhere from torch's generator."""
    before = NUMBERS.set(numbers)
    try:
        yield
    finally:
        NUMBERS.reset(before)


def draw(operator: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Replaces a call of an operator that draws, in a traced graph."""
    numbers = NUMBERS.get()
    return operator(*args, **kwargs) if numbers is None else numbers.draw(operator, args, kwargs)


def drawing(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled code that draws, under the mode of `NUMBERS`."""

    def run(*arguments: Any) -> Any:
        with NUMBERS.get() or nullcontext():
            return compiled(*arguments)

    return run
