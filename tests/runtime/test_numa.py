"""Pinned memory comes in turn to the memory nodes of this process's cores."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from test_memory import Pinning, nbytes_of

from gs_compile.runtime import numa
from gs_compile.runtime.slab import map_memory

NBYTES = 2**26


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Of two nodes with four cores each, and one of memory alone; all of its cores are this process's."""
    for node, cores in enumerate(("0-1,4-5\n", "2-3,6,7\n", "\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores)
    monkeypatch.setattr(numa, "NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    return tmp_path


@pytest.fixture
def calls(monkeypatch):
    """The system's calls, which are not made, with what was resident then; `policy`: what it answers."""
    found, before = [], nbytes_of("VmRSS")

    def called(number, *given):
        if number.value == numa.CALLS["x86_64"][1]:
            given[0]._obj.value = called.policy
            return 0
        assert number.value == numa.CALLS["x86_64"][0]
        address, nbytes, mode, words, num_bits, flags = given
        found.append((address.value, nbytes.value, mode.value, list(words), num_bits.value, flags.value))
        assert nbytes_of("VmRSS") - before < NBYTES // 2, "pages that are there stay where they are"
        return 0

    called.policy = numa.MPOL_DEFAULT
    called.found = found
    monkeypatch.setattr(numa, "_syscall", called)
    monkeypatch.setattr(numa.platform, "machine", lambda: "x86_64")
    return called


def test_pages_come_to_both_nodes_in_turn_before_they_are_touched(machine, calls):
    memory = map_memory(NBYTES, Pinning())
    assert calls.found == [(memory.data_ptr(), NBYTES, numa.MPOL_INTERLEAVE, [0b11], 65, 0)]


def test_where_they_stay_as_they_come(machine, calls, monkeypatch):
    """What is not pinned; one node; a policy of the user's; another processor; a system that does not say."""
    map_memory(NBYTES)
    with monkeypatch.context() as patched:
        patched.setattr(os, "sched_getaffinity", lambda _: {2, 6})
        map_memory(NBYTES, Pinning())
    with monkeypatch.context() as patched:
        patched.setattr(calls, "policy", 2)
        map_memory(NBYTES, Pinning())
    with monkeypatch.context() as patched:
        patched.setattr(numa.platform, "machine", lambda: "riscv64")
        map_memory(NBYTES, Pinning())
    monkeypatch.setattr(numa, "NODES", machine / "missing")
    map_memory(NBYTES, Pinning())
    assert calls.found == []


def test_the_system_does_as_it_is_asked():
    """By its own word, or it refuses; here one node is enough for pages to come to it in turn."""
    (node, *_) = numa.nodes_here() or [0]
    memory = map_memory(2**21)
    accepted = numa.interleave(memory.data_ptr(), memory.nbytes, [node])
    memory.fill_(1)
    policies = re.findall(rf"^{memory.data_ptr():x} (\S+)", Path("/proc/self/numa_maps").read_text(), re.MULTILINE)
    assert policies == ([f"interleave:{node}"] if accepted else policies)
    assert not numa.interleave(memory.data_ptr(), memory.nbytes, [1023]), "there is no such node"


def test_nodes_beyond_a_word(calls):
    numa.interleave(4096, 4096, [0, 64, 66])
    assert calls.found[0][3:5] == ([1, 0b101], 129)
