from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch

from gs_compile.runtime import memory
from gs_compile.runtime.memory import PAGE_NBYTES, Pages, PinnedBlocks, RegisteredPages, memory_for, pinned_memory
from gs_compile.runtime.stream import device_of


def test_pages_are_unmapped_with_the_last_tensor():
    pages = Pages().map(2**21)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    start = f"{tensor.data_ptr():x}"
    part = tensor[5:].fill_(7)
    del pages, tensor
    assert part[-1] == 7
    assert mapped(start)
    del part
    assert not mapped(start)


def mapped(start: str) -> bool:
    address = int(start, 16)
    ranges = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) ", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


class Driver:
    """Registers nothing, and remembers what it was asked; each page must be mapped when it is unregistered."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> None:
        self.registered[address] = nbytes

    def unregister(self, address: int) -> None:
        assert mapped(f"{address:x}")
        del self.registered[address]


def test_registered_pages_are_unregistered_before_they_are_unmapped():
    driver = Driver()
    pages = RegisteredPages(driver.register, driver.unregister).map(8 * PAGE_NBYTES)
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    address = tensor.data_ptr()
    assert driver.registered == {address: 8 * PAGE_NBYTES}
    del pages
    assert driver.registered
    del tensor
    gc.collect()
    assert not driver.registered


def test_pinned_memory_is_registered_pages_where_that_works():
    driver = Driver()
    assert isinstance(pinned_memory(driver.register, driver.unregister), RegisteredPages)
    assert not driver.registered


def test_pinned_memory_is_torchs_blocks_where_it_does_not():
    def refuse(address: int, nbytes: int) -> None:
        raise RuntimeError("operation not supported")

    found = pinned_memory(refuse, lambda address: pytest.fail("was never registered"))
    assert isinstance(found, PinnedBlocks)
    assert [found.block_nbytes(nbytes) for nbytes in (2**20, 2**20 + 1)] == [2**20, 2**21]


def test_pages_without_huge_pages(monkeypatch):
    monkeypatch.setattr(memory.mmap, "MADV_HUGEPAGE", -1)
    assert len(Pages().map(2**21)) == 2**21


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_registers_pages():
    found = memory_for(device_of(torch.device("cuda", 0)))
    assert isinstance(found, RegisteredPages)
    tensor = torch.frombuffer(found.map(2**21), dtype=torch.uint8)
    assert tensor.is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_torchs_blocks_are_pinned():
    assert torch.frombuffer(PinnedBlocks().map(2**21), dtype=torch.uint8).is_pinned()
