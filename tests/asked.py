"""What storage is asked to move."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gs_compile.runtime.storage.movers import Transfer
from gs_compile.runtime.storage.store import Extent


@contextmanager
def asked_of_storage() -> Iterator[Counter[tuple[str, str]]]:
    """The bytes of the transfers in the block, by direction and extent."""
    found, transfer, guard = Counter[tuple[str, str]](), Extent._transfer, threading.Lock()

    def counted(extent: Extent, verb: str, tensor: torch.Tensor, offset: int) -> Transfer:
        with guard:
            found[verb, extent.label] += tensor.nbytes
        return transfer(extent, verb, tensor, offset)

    Extent._transfer = counted
    try:
        yield found
    finally:
        Extent._transfer = transfer
