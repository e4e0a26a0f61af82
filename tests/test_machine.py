from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from gs_compile.machine import (
    PROC,
    available_memory,
    file_system,
    format_bytes,
    free_storage,
    in_groups,
    usable_cores,
    usable_memory,
)

GiB = 2**30
UNLIMITED = "9223372036854771712"  # what v1 says for none


class Machine:
    """A faked /proc and /sys/fs/cgroup: 64 GiB, of which 48 are available."""

    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        self.cgroup.mkdir()
        self.write(self.proc / "meminfo", f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {48 * 2**20} kB\n")
        self.belongs("0::/")

    def belongs(self, *lines: str) -> None:
        self.write(self.proc / "self/cgroup", "\n".join(lines) + "\n")

    def group(self, path: str, **files: object) -> None:
        for name, content in files.items():
            self.write(self.cgroup / path / name.replace("__", "."), f"{content}\n")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    @property
    def paths(self) -> dict[str, Path]:
        return {"proc": self.proc, "cgroup": self.cgroup}

    @property
    def found(self) -> tuple[int, int, int]:
        """Usable and available memory, and cores."""
        return usable_memory(**self.paths), available_memory(**self.paths), usable_cores(**self.paths)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


@pytest.fixture(autouse=True)
def _sixteen_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))


def test_no_groups(machine):
    (machine.proc / "self/cgroup").unlink()
    assert machine.found == (64 * GiB, 48 * GiB, 16)


def test_v2_the_tightest_group_up_the_tree_binds(machine):
    machine.belongs("0::/slurm/job/step")
    machine.group("slurm", memory__max=30 * GiB, cpu__max="400000 100000")
    machine.group("slurm/job", memory__max=20 * GiB, memory__current=5 * GiB, cpu__max="max 100000")
    machine.group("slurm/job", memory__stat=f"anon 1\ninactive_file {GiB}\nactive_file 7")
    machine.group("slurm/job/step", memory__max="max", cpu__max="650000 100000")
    assert machine.found == (20 * GiB, 16 * GiB, 4)


def test_v1_in_a_container_the_path_is_the_hosts(machine):
    machine.belongs("5:cpu,cpuacct:/docker/f00", "4:memory:/docker/f00", "1:name=systemd:/docker/f00")
    machine.group("memory", memory__limit_in_bytes=8 * GiB, memory__usage_in_bytes=3 * GiB)
    machine.group("memory", memory__stat=f"inactive_file 5\ntotal_inactive_file {GiB}")
    machine.group("cpu,cpuacct", cpu__cfs_quota_us=300000, cpu__cfs_period_us=100000)
    assert machine.found == (8 * GiB, 6 * GiB, 3)


def test_v1_the_tree_is_walked(machine):
    machine.belongs("4:memory:/pbs/job", "3:cpu:/pbs/job")
    machine.group("memory/pbs/job", memory__limit_in_bytes=UNLIMITED)
    machine.group("memory/pbs", memory__limit_in_bytes=16 * GiB)
    machine.group("memory", memory__limit_in_bytes=UNLIMITED)
    machine.group("cpu/pbs/job", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert usable_memory(**machine.paths) == 16 * GiB
    assert usable_cores(**machine.paths) == 16


def test_v1_and_v2_side_by_side(machine):
    machine.belongs("4:memory:/a", "0::/b")
    machine.group("memory/a", memory__limit_in_bytes=16 * GiB)
    machine.group("unified/b", cpu__max="500000 100000")
    assert usable_memory(**machine.paths) == 16 * GiB
    assert usable_cores(**machine.paths) == 5


def test_v2_in_a_container_a_path_outside_its_tree_is_not_followed(machine):
    machine.belongs("0::/../other")
    machine.group("../other", memory__max=GiB)
    machine.group("", memory__max=8 * GiB, memory__current=2 * GiB, cpu__max="250000 100000")
    assert machine.found == (8 * GiB, 6 * GiB, 2)


def test_a_group_over_its_limit_has_nothing_left_and_one_thread_at_least(machine):
    machine.group("", memory__max=2 * GiB, memory__current=3 * GiB, cpu__max="50000 100000")
    assert available_memory(**machine.paths) == 0
    assert usable_cores(**machine.paths) == 1


def test_a_file_system_is_known_by_its_number(machine):
    mounts = (
        "30 29 0:27 / /dev/shm rw shared:4 - tmpfs tmpfs rw",
        "31 29 259:2 /a\\040b /mnt rw - ext4 /dev/nvme0n1p2 rw",
    )
    machine.write(machine.proc / "self/mountinfo", "\n".join(mounts))
    kinds = [file_system(os.makedev(*number), proc=machine.proc) for number in ((0, 27), (259, 2), (0, 2))]
    assert kinds == ["tmpfs", "ext4", ""]


def test_a_file_system_without_a_size_has_room_for_what_memory_has():
    """As ramfs, which read as full."""
    assert not os.statvfs(PROC).f_blocks
    assert 0 < free_storage(PROC) <= usable_memory()


def test_this_machine():
    assert 0 < available_memory() <= usable_memory()
    assert usable_cores() >= 1


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (6 * GiB, "6.0 GiB"),
        (1536 * 2**30, "1.5 TiB"),
        (5000 * 2**50, "5000.0 PiB"),
    ],
)
def test_format_bytes(nbytes, text):
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(("nbytes", "text"), [(6 * GiB, "6.0 GiB"), (6 * GiB + 1, "6.1 GiB"), (100, "100 B")])
def test_bytes_that_are_needed_are_no_fewer(nbytes, text):
    assert format_bytes(nbytes, up=True) == text


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([], []),
        ([4, 4, 2, 1], [[4, 4, 2], [1]]),
        ([6, 6, 3], [[6], [6, 3]]),
        ([1, 99, 1, 9], [[1], [99], [1, 9]]),  # what is too large is alone
        ([99], [[99]]),
    ],
)
def test_neighbours_come_in_groups(sizes, groups):
    items = [SimpleNamespace(nbytes=size) for size in sizes]
    assert [[each.nbytes for each in group] for group in in_groups(items, 10)] == groups
