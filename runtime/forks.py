"""forks: what a forked child, such as a DataLoader's worker, has of its parent and is not to use.

    folders, connections    descriptors, by which it would hold what its parent has locked or opened, after the parent
    signals                 they would be told to the parent
    pages                   addresses, at which it may have mapped memory of its own

One hook serves all, as Python takes no hook back; it holds nothing that has ended in the parent.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Protocol


class Held(Protocol):
    def leave(self) -> None:
        """Let go, in a forked child, of what is its parent's."""


class _Parent:
    """What a child of this process leaves, and what this process has left as a child: that stays, and ends nothing."""

    def __init__(self) -> None:
        self.held: weakref.WeakSet[Held] = weakref.WeakSet()
        self._left: list[Held] = []
        os.register_at_fork(after_in_child=self._leave)

    def _leave(self) -> None:
        left = list(self.held)
        self.held.clear()
        self._left += left
        for each in left:
            with suppress(OSError):  # the others are left all the same
                each.leave()


_parent = _Parent()


def leave_in_children(held: Held) -> None:
    """Have each child that is forked from now on leave something, for as long as it is there."""
    _parent.held.add(held)
