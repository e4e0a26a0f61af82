"""Memory is unmapped when nothing refers to it any more, and pinned as long as it is mapped."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

from gs_compile.errors import MemoryBudgetError
from gs_compile.runtime import slab
from gs_compile.runtime.slab import map_memory
from gs_compile.runtime.stream import Device, device_of


def is_mapped(address: int) -> bool:
    ranges = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) ", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


class Pinning(Device):
    """Pins nothing, and remembers what it was asked; pages must be mapped when it lets go of them."""

    has_own_memory = True
    fails = False

    def __init__(self):
        super().__init__(torch.device("cpu"))
        self.pinned = {}

    def pin(self, address, nbytes):
        if self.fails:
            raise RuntimeError("operation not supported")
        self.pinned[address] = nbytes

    def unpin(self, address):
        assert is_mapped(address)
        del self.pinned[address]


def test_memory_is_unmapped_with_the_last_tensor():
    whole = map_memory(2**21)
    address = whole.data_ptr()
    part = whole[5:].fill_(7)
    del whole
    assert part[-1] == 7
    assert is_mapped(address)
    del part
    assert not is_mapped(address)


def test_memory_is_pinned_as_long_as_it_is_mapped():
    device = Pinning()
    whole = map_memory(2**21, device)
    address = whole.data_ptr()
    assert device.pinned == {address: 2**21}
    del whole
    gc.collect()
    assert not device.pinned
    assert not is_mapped(address)


def test_memory_that_cannot_be_pinned_is_refused(monkeypatch):
    monkeypatch.setattr(Pinning, "fails", True)
    with pytest.raises(MemoryBudgetError, match=r"the system refuses 4\.0 KiB of host memory: .*not supported"):
        slab.Block(0, 4096, Pinning())


def test_no_memory_is_no_pages():
    assert len(map_memory(0, Pinning())) == 0


def test_without_huge_pages(monkeypatch):
    monkeypatch.setattr(slab.mmap, "MADV_HUGEPAGE", -1)
    assert len(map_memory(2**21)) == 2**21


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_pins_pages():
    assert map_memory(2**21, device_of(torch.device("cuda", 0))).is_pinned()
