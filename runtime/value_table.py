"""value_table: what the values of a program hold, who made, reads or changes them, and their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from gs_compile.program.ir import Value
from gs_compile.runtime.lanes import Ticket
from gs_compile.runtime.slab import Place

T = TypeVar("T")


class ValueTable:
    """Contents of values, and the tickets of those who made, read or change them."""

    def __init__(self) -> None:
        self.contents: dict[Value, Any] = {}
        self.places: dict[Value, Place] = {}  # of those in the slab
        self._made: dict[Value, Sequence[Ticket]] = {}
        self._used: dict[Value, list[Ticket]] = {}

    def define(self, value: Value, content: Any, tickets: Sequence[Ticket] = (), *, place: Place | None = None) -> None:
        """A new value, ready when all of `tickets` are done."""
        self.contents[value] = content
        self._made[value] = tickets
        self._used[value] = []
        if place is not None:
            self.places[value] = place

    def ready(self, value: Value) -> list[Ticket]:
        """What a reader waits for."""
        return list(self._made[value])

    def idle(self, value: Value) -> list[Ticket]:
        """What an operation that changes it, or takes its memory, waits for."""
        return [*self._made[value], *self._used[value]]

    def use(self, value: Value, ticket: Ticket) -> None:
        """An operation reads the value until its ticket is done."""
        self._used[value] = [each for each in self._used[value] if not each.done] + [ticket]

    def change(self, value: Value, ticket: Ticket) -> None:
        """An operation changes the value; it has waited for all who use it."""
        self._made[value], self._used[value] = (ticket,), []

    def swap(self, one: Value, other: Value) -> None:
        """Exchange contents and tickets of two values that live on."""
        for table in (self.contents, self._made, self._used):
            _swap(table, one, other)

    def free(self, value: Value) -> None:
        """The end of a value: its memory is for others once all who use it are done."""
        users = [ticket for ticket in self.idle(value) if not ticket.done]
        del self.contents[value], self._made[value], self._used[value]
        place = self.places.pop(value, None)
        if place is not None:
            place.end(users)


def _swap(table: dict[Value, T], one: Value, other: Value) -> None:
    table[one], table[other] = table[other], table[one]
