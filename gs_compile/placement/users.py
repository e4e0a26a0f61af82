"""users: who made each value and who has used it since, for the runtime, the simulator and `pipeline` alike.

An operation that reads a value waits for its maker (`ready`). One that changes it in place, or takes its memory, also
waits for all who use it (`idle`). Users are tickets in the runtime, and numbers of operations elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import chain
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
User = TypeVar("User")


class Users(Generic[Key, User]):
    """The users of each value. A value that was there from the start has none.

    latest: of several users, those that it suffices to wait for.
    """

    def __init__(self, latest: Callable[[Sequence[User]], Sequence[User]]) -> None:
        self._latest = latest
        self._made: dict[Key, Sequence[User]] = {}
        self._used: dict[Key, Sequence[User]] = {}

    def ready(self, value: Key) -> Sequence[User]:
        """What a reader waits for."""
        return self._made.get(value, ())

    def idle(self, value: Key) -> Sequence[User]:
        """What an operation that changes the value, or takes its memory, waits for."""
        return (*self._made.get(value, ()), *self._used.get(value, ()))

    def awaited(self, reads: Iterable[Key], into: Iterable[Key]) -> list[User]:
        """What an operation waits for."""
        return [*chain.from_iterable(map(self.ready, reads)), *chain.from_iterable(map(self.idle, into))]

    def use(self, value: Key, user: User) -> None:
        """An operation reads the value until it is done."""
        users = self._used.get(value)
        self._used[value] = self._latest((*users, user)) if users else (user,)

    def define(self, value: Key, makers: Sequence[User]) -> None:
        """A new value: it is ready when all of `makers` are done."""
        self._made[value] = makers
        self._used.pop(value, None)

    def change(self, value: Key, user: User) -> None:
        """An operation changes the value; it has waited for all who use it."""
        self.define(value, (user,))

    def swap(self, one: Key, other: Key) -> None:
        """Exchange two values."""
        for table in (self._made, self._used):
            users = {to: table.pop(value) for value, to in ((one, other), (other, one)) if value in table}
            table.update(users)

    def free(self, value: Key) -> Sequence[User]:
        """End a value. Returns who may still use it."""
        users = self._latest(self.idle(value))
        self._made.pop(value, None)
        self._used.pop(value, None)
        return users
