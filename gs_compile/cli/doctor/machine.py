"""machine: what this process gets of the machine's memory and cores, and who else may have a hand on them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from gs_compile.cli.doctor.check import Finding, Problem, check
from gs_compile.machine import CGROUP, PROC, available_memory, format_bytes, usable_cores, usable_memory

SYS = Path("/sys")
LITTLE_NBYTES = 4 << 30  # torch and a layer's activations take this much
OPENMP = re.compile(r"(OMP|GOMP|KMP|MKL)_\w+")


@check("host memory")
def memory(*, proc: Path = PROC, cgroup: Path = CGROUP) -> Finding:
    """The memory that a run may take, and whether a group allows less than the machine has."""
    total, usable = _kibibytes("MemTotal", proc), usable_memory(proc=proc, cgroup=cgroup)
    available = available_memory(proc=proc, cgroup=cgroup)
    found = f"{format_bytes(available)} free of {format_bytes(usable)}"
    if usable < total:
        found += f", this container's or job's limit; the machine has {format_bytes(total)}"
    if available < LITTLE_NBYTES:
        return Problem(found, "end what else runs here, or ask for a larger limit")
    return found


@check("swap")
def swap(*, proc: Path = PROC) -> Finding:
    """Whether memory is being swapped out: what a run keeps in memory on purpose must stay there."""
    total = _kibibytes("SwapTotal", proc)
    used = total - _kibibytes("SwapFree", proc)
    if not total:
        return "none"
    found = f"{format_bytes(used)} used of {format_bytes(total)}"
    if used > total // 10:
        return Problem(found, "memory is short: set host_memory lower, or `swapoff -a` before a run")
    return found


@check("threads")
def threads(count: int, *, proc: Path = PROC, cgroup: Path = CGROUP) -> Finding:
    """Whether torch, which computes with `count` threads, uses the cores that this process has."""
    cores = usable_cores(proc=proc, cgroup=cgroup)
    found = f"torch computes with {count} threads on {cores} usable cores"
    if count > cores:
        return Problem(found, f"they wait for each other: set OMP_NUM_THREADS={cores}")
    if count < cores // 2:  # two logical cores are often one of the hardware
        return Problem(found, f"cores are idle: set OMP_NUM_THREADS={cores}")
    return found


@check("OpenMP")
def openmp(environment: Mapping[str, str] = os.environ) -> Finding:
    """Whether threads wait or are bound in a way that the lanes of a step suffer from."""
    settings = {key: value for key, value in sorted(environment.items()) if OPENMP.fullmatch(key)}
    found = " ".join(f"{key}={value}" for key, value in settings.items()) or "nothing is set"
    if settings.get("OMP_WAIT_POLICY", "").lower() == "active":
        return Problem(found, "waiting threads take the optimizer's cores: OMP_WAIT_POLICY=passive")
    if settings.get("OMP_PROC_BIND", "false").lower() != "false":
        advice = "the optimizer's threads are bound to the same cores as the model's: unset OMP_PROC_BIND"
        return Problem(found, advice)
    return found


@check("NUMA")
def numa(*, sys: Path = SYS) -> Finding:
    """Whether this process's cores are all near one memory."""
    nodes = {
        folder.name: cores
        for folder in sorted((sys / "devices/system/node").glob("node[0-9]*"))
        if (cores := _cores((folder / "cpulist").read_text()))
    }
    if not nodes:
        return "not told by the system"
    mine = [name for name, cores in nodes.items() if cores & os.sched_getaffinity(0)]
    found = f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}; this process runs on {', '.join(mine)}"
    if len(mine) > 1:
        advice = "bind it to the node of its GPU and drives: numactl --cpunodebind=0 --membind=0, if memory suffices"
        return Problem(found, advice)
    return found


def _cores(text: str) -> set[int]:
    """The numbers of a list such as "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _kibibytes(key: str, proc: Path) -> int:
    """An entry of /proc/meminfo, in bytes."""
    (found,) = re.findall(rf"^{key}:\s+(\d+) kB$", (proc / "meminfo").read_text(), re.MULTILINE)
    return int(found) * 1024
