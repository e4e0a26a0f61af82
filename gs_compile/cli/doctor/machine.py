"""machine: what this process gets of the machine's memory and cores, and who else may have a hand on them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from gs_compile.cli.doctor.check import Check
from gs_compile.machine import CGROUP, PROC, available_memory, format_bytes, meminfo, usable_cores, usable_memory

SYS = Path("/sys")
LITTLE_NBYTES = 4 << 30  # torch and a layer's activations take this much
OPENMP = re.compile(r"(OMP|GOMP|KMP|MKL)_\w+")


def memory(*, proc: Path = PROC, cgroup: Path = CGROUP) -> Check:
    """The memory that a run may take, and whether a group allows less than the machine has."""
    total, usable = meminfo("MemTotal", proc), usable_memory(proc=proc, cgroup=cgroup)
    available = available_memory(proc=proc, cgroup=cgroup)
    found = f"{format_bytes(available)} free of {format_bytes(usable)}"
    if usable < total:
        found += f", this container's or job's limit; the machine has {format_bytes(total)}"
    return Check(found, "end what else runs here, or ask for a larger limit" if available < LITTLE_NBYTES else "")


def swap(*, proc: Path = PROC) -> Check:
    """Whether memory is being swapped out: what a run keeps in memory on purpose must stay there."""
    total = meminfo("SwapTotal", proc)
    used = total - meminfo("SwapFree", proc)
    advice = "memory is short: set host_memory lower, or `swapoff -a` before a run" if used > total // 10 else ""
    return Check(f"{format_bytes(used)} used of {format_bytes(total)}" if total else "none", advice)


def threads(*, proc: Path = PROC, cgroup: Path = CGROUP) -> Check:
    """Whether the threads that torch computes with use the cores that this process has."""
    count, cores = import_module("torch").get_num_threads(), usable_cores(proc=proc, cgroup=cgroup)
    idle = count < cores // 2  # two logical cores are often one of the hardware
    problem = "they wait for each other" if count > cores else "cores are idle" if idle else ""
    found = f"torch computes with {count} threads on {cores} usable cores"
    return Check(found, f"{problem}: set OMP_NUM_THREADS={cores}" if problem else "")


def openmp(environment: Mapping[str, str] = os.environ) -> Check:
    """Whether threads wait or are bound in a way that the lanes of a step suffer from."""
    settings = {key: value for key, value in sorted(environment.items()) if OPENMP.fullmatch(key)}
    found = " ".join(f"{key}={value}" for key, value in settings.items()) or "nothing is set"
    if settings.get("OMP_WAIT_POLICY", "").lower() == "active":
        return Check(found, "waiting threads take the optimizer's cores: OMP_WAIT_POLICY=passive")
    if settings.get("OMP_PROC_BIND", "false").lower() != "false":
        return Check(found, "the optimizer's threads are bound to the same cores as the model's: unset OMP_PROC_BIND")
    return Check(found)


def numa(*, sys: Path = SYS) -> Check:
    """Whether this process's cores are all near one memory."""
    folders = sorted((sys / "devices/system/node").glob("node[0-9]*"))
    nodes = {folder.name: _cores((folder / "cpulist").read_text().strip()) for folder in folders}
    nodes = {name: cores for name, cores in nodes.items() if cores}  # some have memory alone
    if not nodes:
        return Check("not told by the system")
    mine = [name for name, cores in nodes.items() if cores & os.sched_getaffinity(0)]
    found = f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}; this process runs on {', '.join(mine)}"
    advice = "bind it to the node of its GPU and drives: numactl --cpunodebind=0 --membind=0, if memory suffices"
    return Check(found, advice if len(mine) > 1 else "")


def _cores(text: str) -> set[int]:
    """The numbers of a list such as "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
