"""Memory is unmapped when nothing refers to it any more, and pinned as long as it is mapped."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from gs_compile import progress
from gs_compile.errors import MemoryBudgetError
from gs_compile.runtime import pages, slab
from gs_compile.runtime.muon import Orthogonalizer
from gs_compile.runtime.optimizer import PIECE, _square
from gs_compile.runtime.slab import map_memory
from gs_compile.runtime.storage.ssd import _pages
from gs_compile.runtime.stream import Device, device_of

MAP_FIXED = 0x10  # of Linux; not among mmap's names
FORKS = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12 on, where there are threads


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


def test_all_of_torchs_threads_take_what_is_pinned(monkeypatch, caplog):
    """Who pins pages that nobody has touched takes them one by one; while it lasts, a line says so."""
    monkeypatch.setattr(progress, "LOGGED_SECONDS", 0.0)
    pin, before, resident = Pinning.pin, nbytes_of("VmRSS"), []
    monkeypatch.setattr(Pinning, "pin", lambda *given: resident.append(nbytes_of("VmRSS") - before) or pin(*given))
    with caplog.at_level("INFO"):
        whole = map_memory(2**26, Pinning())
    assert resident[0] > 0.9 * len(whole)
    assert "pinning 64.0 MiB of host memory took" in caplog.text


@pytest.mark.parametrize("make", [partial(slab.Segment, 0, 4096), lambda device: Orthogonalizer(device, 8192)])
def test_memory_that_cannot_be_pinned_is_refused(monkeypatch, make):
    monkeypatch.setattr(Pinning, "fails", True)
    with pytest.raises(MemoryBudgetError, match=r"the system refuses 4\.0 KiB of host memory: .*not supported"):
        make(Pinning())


def test_no_memory_is_no_pages():
    assert len(map_memory(0, Pinning())) == 0


def test_pages_end_after_their_module(monkeypatch):
    """As where the interpreter ends: an error in it would be a warning, and so an error here."""
    unpinned, last = [], pages.Pages(4096)
    last.unpin = lambda: unpinned.append(True)
    monkeypatch.setattr(pages, "os", None)
    del last
    assert unpinned == [True]


def test_without_huge_pages(monkeypatch):
    monkeypatch.setattr(pages.mmap, "MADV_HUGEPAGE", -1)
    assert len(map_memory(2**21)) == 2**21


def nbytes_of(field, process="self", file="status"):
    """What the kernel says of a process, in bytes."""
    (kib,) = re.findall(rf"^{field}:\s+(\d+) kB", Path(f"/proc/{process}/{file}").read_text(), re.MULTILINE)
    return int(kib) << 10


def flags_of(address):
    """What the kernel says of the mapping at an address."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]
    bounds = [[int(each, 16) for each in mapping.split(" ", 1)[0].split("-")] for mapping in mappings]
    (found,) = [each for each, (low, high) in zip(mappings, bounds, strict=True) if low <= address < high]
    return re.findall(r"^VmFlags: (.*)$", found, re.MULTILINE)[0].split()


@pytest.mark.parametrize("make", [map_memory, _pages], ids=["slab", "bounce"])
def test_no_fork_has_the_pages(make):
    memory = torch.as_tensor(make(2**16))
    assert "dc" in flags_of(memory.data_ptr())


@FORKS
def test_a_fork_costs_no_memory():
    """A child that sleeps, as a DataLoader's worker does: what the parent writes meanwhile is not copied."""

    def both():
        return sum(nbytes_of("Pss", process, "smaps_rollup") for process in ("self", child))

    nbytes = 64 << 20
    memory = map_memory(nbytes).fill_(1)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.read(reading, 1)
        os._exit(0)
    try:
        before = both()
        memory.fill_(2)
        after = both()
    finally:
        os.write(writing, b"x")
        os.waitpid(child, 0)
        os.close(reading), os.close(writing)
    assert after - before < nbytes // 2


@FORKS
def test_a_child_unmaps_nothing():
    """Its own mapping may be where the parent's is."""
    memory = map_memory(2**21)
    address = memory.data_ptr()
    child = os.fork()
    if not child:
        try:
            libc = ctypes.CDLL(None)
            libc.mmap.restype = ctypes.c_void_p
            readable, fixed = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
            where, nbytes, offset = ctypes.c_void_p(address), ctypes.c_size_t(2**21), ctypes.c_size_t(0)
            assert libc.mmap(where, nbytes, readable, fixed, -1, offset) == address
            del memory
            os._exit(0 if is_mapped(address) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_norm_takes_little_memory():
    """torch would convert all of a gradient to float64 before it sums."""
    gradient = torch.ones(1 << 26)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = nbytes_of("VmRSS")
    assert _square(gradient) == gradient.numel()
    assert nbytes_of("VmHWM") - before < gradient.nbytes // 2


@pytest.mark.parametrize("position", [0, PIECE, 2 * PIECE - 1])
def test_a_norm_of_pieces_finds_what_is_not_finite(position):
    gradient = torch.ones(2 * PIECE)
    gradient[position] = torch.inf
    assert not _square(gradient).isfinite()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cuda_pins_pages():
    assert map_memory(2**21, device_of(torch.device("cuda", 0))).is_pinned()
