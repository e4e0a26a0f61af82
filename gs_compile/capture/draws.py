"""draws: where the code of units has its random numbers from.

    as traced   each operation that draws is a call of `draw`; all others run as they are
    compiled    a dispatch mode sees each call of torch that the code makes, while code runs that draws

Under a mode each operation takes Python's time, several times that of a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol


class Numbers(AbstractContextManager[Any], Protocol):
    """The random numbers of one computation. Inside of it, as a context, all operations that draw take them."""

    def draw(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call an operator of ATen that draws."""


NUMBERS: ContextVar[Numbers | None] = ContextVar("numbers", default=None)  # of the code that this thread runs


@contextmanager
def drawn_from(numbers: Numbers) -> Iterator[None]:
    """The code of a unit that runs inside draws these numbers; elsewhere it draws torch's."""
    before = NUMBERS.set(numbers)
    try:
        yield
    finally:
        NUMBERS.reset(before)


def draw(operator: Any, /, *args: Any, **kwargs: Any) -> Any:
    """What stands in a traced graph for a call of an operator that draws."""
    numbers = NUMBERS.get()
    return operator(*args, **kwargs) if numbers is None else numbers.draw(operator, args, kwargs)


def drawing(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled code that draws."""

    def run(*arguments: Any) -> Any:
        with NUMBERS.get() or nullcontext():
            return compiled(*arguments)

    return run
