"""rest: a commit's tensors that are not on the tiers, such as parameters of an eager head: one part, in two files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gs_compile.runtime.homes import bytes_of
from gs_compile.runtime.storage.store import Extent, Store
from gs_compile.runtime.storage.stored import REST, StoredTensor

Tensors = Mapping[str, torch.Tensor]


class Rest:
    """The two files between which commits alternate."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._files: list[Extent] = []
        self._made = 0

    def take(self, tensors: Tensors) -> tuple[Extent, torch.Tensor, Sequence[Extent]]:
        """The file for the next commit, the bytes to write to it (the tensors as they are now), and the files that no
        commit names once that commit is made.
        """
        old: Sequence[Extent] = ()
        content = torch.cat([bytes_of(each.detach().cpu()) for each in tensors.values()])
        if not self._files or self._files[0].nbytes != content.nbytes:  # the first step has made their states
            old = self._files
            self._files = [self._store.allocate(f"{REST}.{self._made + at}", content.nbytes) for at in range(2)]
            self._made += 2
        self._files.reverse()
        return self._files[0], content, old


def laid_out(tensors: Tensors) -> tuple[StoredTensor, ...]:
    """The place of each tensor in the part."""
    found, offset = [], 0
    for name, each in tensors.items():
        found.append(StoredTensor(name, str(each.dtype).removeprefix("torch."), tuple(each.shape), offset))
        offset += each.nbytes
    return tuple(found)


def read_rest(store: Store) -> dict[str, torch.Tensor]:
    """The tensors of the former run's commit."""
    assert store.former is not None, "there was no run before"
    return {each.name: read_tensor(store, each) for each in store.former.rest}


def read_tensor(store: Store, stored: StoredTensor) -> torch.Tensor:
    found = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    if found.nbytes:
        store.adopt(REST).read(found, stored.offset).wait()
    return found
