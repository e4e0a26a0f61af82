"""values: the parameters and states of a commit, by name: where their bytes are, and their values."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gs_compile.runtime.former import FormerHomes
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.rest import read_tensor
from gs_compile.runtime.spans import Slice
from gs_compile.runtime.storage.drive import Drive
from gs_compile.runtime.storage.last_commit import folders_of, names_in, order
from gs_compile.runtime.storage.ssd import THREADS
from gs_compile.runtime.storage.store import Store
from gs_compile.runtime.storage.stored import REST, Manifest, StoredTensor


class OneRank(NamedTuple):
    """A rank whose commit is read alone: a whole parameter has this rank's elements, and zeros elsewhere."""

    rank: int
    number: int

    def broadcast(self, *_: Any) -> None:
        """Do nothing: there are no other ranks here."""


class Values(FormerHomes):
    """The values in one rank's commit."""

    def __init__(self, store: Store) -> None:
        assert store.former is not None
        self.commit: Manifest = store.former
        ranks = OneRank(self.commit.rank, self.commit.world) if self.commit.world > 1 else None
        super().__init__(store, cast("Ranks | None", ranks))

    def bytes_of(self, name: str) -> Iterator[tuple[str, int, int]]:
        """Each part that holds some of a parameter or its state: its name, and where the bytes start and stop there."""
        span = self.spans[name]
        spans = dict.fromkeys((span, span.moment(1)[0]))
        for each, component in product(spans, (None, *range(len(self.setting.types[span.unit].state)))):
            for value, start, target in self._pieces(each, component):
                yield value._replace(tier=None).name, start, start + len(target)

    def names_at(self, part: str, first: int, last: int) -> list[str]:
        """The parameters, or tensors outside the tiers, that have some of these bytes of a part."""
        return list(dict.fromkeys(name for start, stop, name in self._spans[part] if start < last and first < stop))

    @cached_property
    def _spans(self) -> dict[str, list[tuple[int, int, str]]]:
        """Which names are where, by part."""
        found = defaultdict(list)
        for name in self.spans:
            for part, start, stop in self.bytes_of(name):
                found[part].append((start, stop, name))
        for each in self.commit.rest:
            found[REST].append((each.offset, each.offset + nbytes_of(each), each.name))
        return found

    def component(self, span: Slice, number: int) -> Tensor:
        """A component of a parameter's state, counted without the master."""
        return self.read_state(span, number + self.has_master(span))

    def beside(self, stored: StoredTensor) -> Tensor:
        """A tensor outside the tiers."""
        assert self.setting.store is not None
        return read_tensor(self.setting.store, stored)


def nbytes_of(stored: StoredTensor) -> int:
    return math.prod(stored.shape) * int(getattr(torch, stored.dtype).itemsize)


@contextmanager
def unchanged(commits: Sequence[Manifest], find: Callable[[], Sequence[Manifest]]) -> Iterator[list[Values]]:
    """The values of commits whose runs are locked inside the block. If a run has made another commit since they were
    found, those of `find`.
    """
    with ExitStack() as stack:
        values, now = [_opened(stack, each) for each in commits], find()
        before, after = ([(each.run, *order(each)) for each in found] for found in (commits, now))
        if before == after:
            yield values
            return
    with unchanged(now, find) as values:
        yield values


def _opened(stack: ExitStack, commit: Manifest) -> Values:
    """The values of a commit, until the stack is closed, which removes no file."""
    store = stack.enter_context(Store(()))
    store.former = commit
    for folder in folders_of(commit):
        drive = stack.enter_context(closing(Drive(folder.parent, THREADS, folder)))
        drive.lasting = names_in(commit, folder)
        store.drives.append(drive)
    return Values(store)
