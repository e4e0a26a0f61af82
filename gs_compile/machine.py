"""The memory and cores of this machine that this process may use, as Linux reports them; bytes as people write them.

A container or a batch job gets less than the machine has, and is killed if it takes more. So every figure is the least
of what the hardware has and what the control groups (v1 and v2) allow, from this process's group up to the root.
RLIMIT_AS is ignored: it limits addresses, of which file mappings and CUDA take hundreds of gigabytes.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Iterator
from math import ceil
from pathlib import Path
from typing import Protocol, TypeVar

from gs_compile.errors import OptionError

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
DEFAULT_SHARE = 0.8  # of the memory that is free at the start: the rest is for activations and the user's own
PREFIXES = "B KiB MiB GiB TiB PiB".split()

UNITS: dict[str, int] = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
BYTES_FORMS = 'a whole number of bytes, or text such as "6GiB", "512 MiB", "6 GB" or "80%"'


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


S = TypeVar("S", bound=Sized)


def usable_memory(*, proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """The most bytes of memory that this process may use, if no other process used any."""
    limits = [limit for group in _groups("memory", proc, cgroup) if (limit := _memory_limit(group)) is not None]
    return min([meminfo("MemTotal", proc), *limits])


def available_memory(*, proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """The bytes of memory this process could take now, without anything being swapped out or killed.

    The inactive file cache of a group counts as free: the kernel drops it first.
    """
    left = [meminfo("MemAvailable", proc)]
    for group in _groups("memory", proc, cgroup):
        limit = _memory_limit(group)
        used = _number(group / "memory.current", group / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            left.append(limit - used + _inactive_file(group))
    return max(0, min(left))


def usable_cores(*, proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """How many threads may run at once: the cores this process may run on, or fewer if a group has a quota of time.

    A quota is rounded down: one thread too many is throttled, and the others wait for it at the next barrier.
    """
    quotas = [quota for group in _groups("cpu", proc, cgroup) if (quota := _cpu_quota(group)) is not None]
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def processor() -> str:
    """The processor's name, or its architecture if Linux gives no name."""
    found = re.search(r"^model name\s*:\s*(.+)$", _text(PROC / "cpuinfo"), re.MULTILINE)
    return found[1] if found else platform.machine()


def num_ranks() -> int:
    """The number of processes that torchrun has started on this machine; 1 without it."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(count)) if count.isdecimal() else 1


def free_storage(folder: Path) -> int:
    """The bytes that this process may still write to the file system of `folder`. A file system without a size, such as
    ramfs, has room for as much as there is memory.
    """
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize if room.f_blocks else available_memory()


def is_there(path: Path) -> bool:
    """Whether a path exists; one with a name that is too long for a file does not (`Path.exists` raises for it)."""
    return os.access(path, os.F_OK)


def file_system(device: int, *, proc: Path = PROC) -> str:
    """The kind of the mounted file system that has this number, such as "ext4"; "" if none has."""
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = (line.partition(" - ") for line in _text(proc / "self" / "mountinfo").splitlines())
    return next((kind.split()[0] for mount, _, kind in mounts if mount.split()[2] == number), "")


def meminfo(key: str, proc: Path) -> int:
    """An entry of /proc/meminfo, which is about the whole machine, in bytes."""
    (found,) = re.findall(rf"^{key}:\s+(\d+) kB$", _text(proc / "meminfo"), re.MULTILINE)
    return int(found) * 1024


def format_bytes(nbytes: int, *, up: bool = False) -> str:
    """Bytes for people: "512 B", "6.0 GiB". up: rounded up, for a number of bytes that a user is asked to give."""
    if nbytes < 1024:
        return f"{nbytes} B"
    size, unit = float(nbytes), 0
    while round(size, 1) >= 1024 and unit < len(PREFIXES) - 1:
        size, unit = size / 1024, unit + 1
    return f"{ceil(10 * size) / 10 if up else size:.1f} {PREFIXES[unit]}"


def in_groups(items: Iterable[S], most_nbytes: int) -> Iterator[list[S]]:
    """Consecutive items in groups of at most `most_nbytes`; an item that is larger is a group of its own."""
    group: list[S] = []
    nbytes = 0
    for each in items:
        if group and nbytes + each.nbytes > most_nbytes:
            yield group
            group, nbytes = [], 0
        group.append(each)
        nbytes += each.nbytes
    if group:
        yield group


def parse_bytes(value: int | str, *, whole: int | None = None, name: str = "bytes") -> int:
    """The bytes that `value` stands for; `whole` is what a percentage is of, `name` what an `OptionError` calls it.

    "6 GB" is 6 * 10**9 and "6 GiB" 6 * 2**30; case and spaces do not matter. Text without a unit is refused: it may
    mean gigabytes as well as bytes.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    elif isinstance(value, str) and (found := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[a-z]+)\s*", value, re.I)):
        nbytes = _scaled(float(found[1]), found[2], value, whole, name)
    else:
        raise OptionError(f"{name} must be {BYTES_FORMS}; got {value!r}")
    if nbytes < 1:
        raise OptionError(f"{name} must be at least one byte; got {value!r}")
    return nbytes


def _scaled(number: float, unit: str, value: str, whole: int | None, name: str) -> int:
    if unit == "%":
        if not 0 < number <= 100:
            raise OptionError(f"{name} must be more than 0% and at most 100%; got {value!r}")
        if whole is None:
            raise OptionError(f"{name} cannot be a percentage here; got {value!r}")
        return int(whole * number / 100)
    for known, factor in UNITS.items():
        if known.lower() == unit.lower():
            return round(number * factor)
    raise OptionError(f"{name} has an unknown unit; got {value!r}; known: {', '.join(UNITS)}, %")


def _groups(controller: str, proc: Path, cgroup: Path) -> Iterator[Path]:
    """The directories of this process's group and of all groups above it, in both versions' trees; some may not exist.

    In a container the path may be the host's, although the container sees its own group as the root: the walk up ends
    there. Of a path that leaves the container's tree only the root is used.
    """
    for line in _text(proc / "self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mounts = [cgroup, cgroup / "unified"]  # alone, or beside v1
        elif controller in controllers.split(","):
            mounts = [cgroup / controllers, cgroup / controller]  # "cpu,cpuacct" is one mount, "cpu" a link to it
        else:
            continue
        inside = Path("." if "/.." in path else path.strip("/"))
        for mount in mounts:
            yield from (mount / each for each in (inside, *inside.parents))


def _memory_limit(group: Path) -> int | None:
    return _number(group / "memory.max", group / "memory.limit_in_bytes")  # v2, v1; "max": none


def _cpu_quota(group: Path) -> float | None:
    quota, period = _numbers(group / "cpu.max") or [None, None]  # v2
    if quota is None:
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")  # v1; -1: none
    return quota / period if quota and period and quota > 0 else None


def _inactive_file(group: Path) -> int:
    found = re.findall(r"^(?:total_)?inactive_file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
    return max(map(int, found), default=0)  # v1 lists the group's own, and a total with all groups below it


def _number(*paths: Path) -> int | None:
    """The number in the first of the files that holds one."""
    return next((number for path in paths for number in _numbers(path)[:1] if number is not None), None)


def _numbers(path: Path) -> list[int | None]:
    return [int(word) if word.lstrip("-").isdigit() else None for word in _text(path).split()]


def _text(path: Path) -> str:
    """The text of a file; "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
