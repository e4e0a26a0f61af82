"""forks: what a forked child, such as a DataLoader's worker, inherits from its parent and must not use.

    folders, connections    descriptors: the child would keep locks and connections open after the parent has ended
    signals                 the parent would be told of the child's signals
    pages                   addresses: the child may have mapped its own memory there

One hook serves all objects, because Python cannot remove a hook. It keeps no object alive in the parent.
"""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Protocol


class Inherited(Protocol):
    def leave(self) -> None:
        """Release, in a forked child, what belongs to its parent."""


class _Parent:
    """The objects that children of this process release. A child keeps them alive, so that their ends free nothing of
    its parent's.
    """

    def __init__(self) -> None:
        self.held: weakref.WeakSet[Inherited] = weakref.WeakSet()
        self._left: list[Inherited] = []
        os.register_at_fork(after_in_child=self._leave)

    def _leave(self) -> None:
        left = list(self.held)
        self.held.clear()
        self._left += left
        for each in left:
            with suppress(OSError):  # the others are released all the same
                each.leave()


_parent = _Parent()


def leave_in_children(held: Inherited) -> None:
    """Have each child that is forked from now on call `held.leave`, as long as `held` is alive."""
    _parent.held.add(held)
