"""The doctor's words of memory and cores; the machine is made of files."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from gs_compile.cli.doctor import machine as checks_machine
from gs_compile.cli.doctor.check import Check

GiB = 2**30


def write(path: Path, text: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
    return path


@pytest.fixture
def proc(tmp_path):
    """A machine of 64 GiB without groups."""
    meminfo(tmp_path / "proc")
    return tmp_path / "proc"


def meminfo(proc: Path, *, available: int = 48, swap: int = 0, swapped: int = 0) -> None:
    entries = {"MemTotal": 64, "MemAvailable": available, "SwapTotal": swap, "SwapFree": swap - swapped}
    write(proc / "meminfo", "\n".join(f"{key}: {size << 20} kB" for key, size in entries.items()))
    write(proc / "self/cgroup", "0::/")


def test_memory(tmp_path, proc):
    look = partial(checks_machine.memory, proc=proc, cgroup=tmp_path / "cgroup")
    assert look() == Check("host memory", "ok", "48.0 GiB free of 64.0 GiB")
    write(tmp_path / "cgroup/memory.max", 16 * GiB)
    write(tmp_path / "cgroup/memory.current", 6 * GiB)
    limit = "10.0 GiB free of 16.0 GiB, this container's or job's limit; the machine has 64.0 GiB"
    assert look() == Check("host memory", "ok", limit)
    write(tmp_path / "cgroup/memory.current", 15 * GiB)
    assert look().state == "warn"


def test_swap(proc):
    assert checks_machine.swap(proc=proc) == Check("swap", "ok", "none")
    meminfo(proc, swap=8)
    assert checks_machine.swap(proc=proc) == Check("swap", "ok", "0 B used of 8.0 GiB")
    meminfo(proc, swap=8, swapped=3)
    check = checks_machine.swap(proc=proc)
    assert (check.state, check.found) == ("warn", "3.0 GiB used of 8.0 GiB")


@pytest.mark.parametrize(
    ("count", "state", "advice"),
    [(16, "ok", ""), (8, "ok", ""), (7, "warn", "idle: set OMP_NUM_THREADS=16"), (17, "warn", "wait for each other")],
)
def test_threads(tmp_path, proc, monkeypatch, count, state, advice):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    check = checks_machine.threads(count, proc=proc, cgroup=tmp_path / "cgroup")
    assert (check.state, check.found) == (state, f"torch computes with {count} threads on 16 usable cores")
    assert advice in check.advice


@pytest.mark.parametrize(
    ("environment", "state", "found"),
    [
        ({"PATH": "/bin"}, "ok", "nothing is set"),
        ({"OMP_NUM_THREADS": "4", "HOME": "/"}, "ok", "OMP_NUM_THREADS=4"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "warn", "OMP_WAIT_POLICY=ACTIVE"),
        ({"OMP_WAIT_POLICY": "passive"}, "ok", "OMP_WAIT_POLICY=passive"),
        ({"OMP_PROC_BIND": "close"}, "warn", "OMP_PROC_BIND=close"),
        ({"OMP_PROC_BIND": "FALSE"}, "ok", "OMP_PROC_BIND=FALSE"),
    ],
)
def test_openmp(environment, state, found):
    check = checks_machine.openmp(environment)
    assert (check.state, check.found) == (state, found)


def test_numa(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 9})
    assert checks_machine.numa(sys=tmp_path) == Check("NUMA", "ok", "not told by the system")
    nodes = tmp_path / "devices/system/node"
    write(nodes / "node0/cpulist", "0-3,8-11")
    write(nodes / "node1/cpulist", "4-7,12-15")
    write(nodes / "node2/cpulist", "")  # memory without cores
    assert checks_machine.numa(sys=tmp_path) == Check("NUMA", "ok", "2 nodes; this process runs on node0")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 4})
    check = checks_machine.numa(sys=tmp_path)
    assert (check.state, check.found) == ("warn", "2 nodes; this process runs on node0, node1")
