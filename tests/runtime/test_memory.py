from __future__ import annotations

import gc
import itertools
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gs_compile.runtime import memory
from gs_compile.runtime.memory import PAGE_NBYTES, Pages, PinnedBlocks, RegisteredPages, memory_for, pack, pinned_memory
from gs_compile.runtime.stream import device_of


def exhaustive(count: int, nbytes: int, block_sizes: tuple[int, ...]) -> tuple[int, int]:
    """The least (memory, blocks) over every multiset of at most `count` blocks."""
    costs = []
    for num_blocks in range(count + 1):
        for blocks in itertools.combinations_with_replacement(block_sizes, num_blocks):
            if sum(size // nbytes for size in blocks) >= count:
                costs.append((sum(blocks), num_blocks))
    return min(costs)


@settings(deadline=None, max_examples=200)
@given(count=st.integers(0, 6), nbytes=st.integers(1, 64), powers=st.sets(st.integers(0, 8), min_size=1, max_size=5))
def test_pack_is_the_best_there_is(count, nbytes, powers):
    sizes = tuple(2**power for power in sorted({*powers, 6}))
    packing = pack(count, nbytes, sizes)
    assert sum(size // nbytes for size in packing.blocks) >= count
    assert set(packing.blocks) <= set(sizes)
    assert (sum(packing.blocks), len(packing.blocks)) == exhaustive(count, nbytes, sizes)
    assert packing.waste == sum(packing.blocks) - count * nbytes


def test_pack_wastes_less_than_one_block_a_buffer():
    nbytes = 50 * 2**20
    assert pack(1, nbytes) == ((64 * 2**20,), 14 * 2**20)
    packing = pack(28, nbytes)  # 1400 MiB
    assert packing.blocks == (2**30, 256 * 2**20, 128 * 2**20, 64 * 2**20)
    assert packing.waste == 72 * 2**20  # of 392 MiB one by one


def test_pack_of_a_power_of_two_wastes_nothing_and_takes_one_block():
    assert pack(4, 2**20) == ((2**22,), 0)


def test_pack_needs_a_block_that_is_large_enough():
    with pytest.raises(AssertionError, match="no block holds 9 bytes"):
        pack(1, 9, (4, 8))


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
    assert list(found.block_sizes(4, 2**20 + 1)) == [2**22, 2**21]


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
