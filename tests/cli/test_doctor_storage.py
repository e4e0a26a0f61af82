"""The doctor's words of directories and drives; drives are made of files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from test_doctor import write

from gs_compile.cli.doctor import storage
from gs_compile.cli.doctor.check import Check
from gs_compile.errors import StorageError
from gs_compile.runtime import ssd
from gs_compile.runtime.drive import FOLDER
from gs_compile.runtime.store import Store


@pytest.fixture
def proc(tmp_path):
    """A machine on which ext4 is the only filesystem."""
    mounted(tmp_path / "proc", "/", "ext4")
    return tmp_path / "proc"


def mounted(proc: Path, point: Path | str, kind: str, options: str = "rw,relatime", source: str = "none") -> None:
    """As Linux lists it, after what is mounted before; spaces in octal."""
    line = f"27 1 0:21 / {str(point).replace(' ', chr(92) + '040')} {options} shared:1 - {kind} {source} rw"
    path = proc / "self/mountinfo"
    write(path, (path.read_text() if path.exists() else "") + line)


def test_direct_io_is_tried_and_leaves_nothing(tmp_path):
    check = storage.direct_io(tmp_path / "not" / "there")
    assert (check.state, check.found) in {
        ("ok", "works"),
        ("warn", "refused: storage will work through the page cache"),
    }
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("refused", "error", "state", "found", "advice"),
    [
        (os.O_DIRECT, OSError(errno.EINVAL, "Invalid argument"), "warn", "through the page cache", "ext4 or xfs"),
        (~0, PermissionError(errno.EACCES, "Permission denied"), "bad", "Permission denied", "--storage"),
        (
            ~0,
            StorageError(errno.EIO, "the drive is gone", "x"),
            "bad",
            "StorageError: [Errno 5] the drive",
            "--storage",
        ),
    ],
    ids=["direct I/O is refused", "nothing can be written", "the drive is broken"],
)
def test_a_directory_that_is_not_fit(tmp_path, monkeypatch, refused, error, state, found, advice):
    def open_file(name, flags, folder_fd):
        if flags & refused:
            raise error
        return os.open(name, flags, 0o600, dir_fd=folder_fd)

    monkeypatch.setattr(ssd, "_open", open_file)
    check = storage.direct_io(tmp_path)
    assert check.state == state
    assert found in check.found
    assert advice in check.advice


def test_a_directory_with_runs(tmp_path):
    folder = tmp_path / FOLDER
    assert storage.run_folder(tmp_path) == Check("none")
    with Store([tmp_path]):
        check = storage.run_folder(tmp_path)
    assert (check.state, check.found) == ("warn", f"{folder} is in use")
    folder.mkdir(mode=0o700)
    assert storage.run_folder(tmp_path) == Check("none")
    write(folder / "w3", "")  # of a run that was killed
    folder.chmod(0o700)
    check = storage.run_folder(tmp_path)
    assert (check.state, check.advice) == ("bad", f"delete {folder}")
    (folder / "w3").unlink()
    folder.chmod(0o755)
    check = storage.run_folder(tmp_path)
    assert check.state == "bad"
    assert "others can get at this folder" in check.found


@pytest.mark.parametrize(
    ("nbytes", "state", "found"),
    [
        (140 * 10**9, "ok", "130.4 GiB free: parameters and states of 10.0 billion parameters"),
        (14 * 10**8, "warn", "1.3 GiB free: parameters and states of 100 million parameters"),
    ],
)
def test_room(tmp_path, monkeypatch, nbytes, state, found):
    monkeypatch.setattr(storage, "free_storage", lambda _: nbytes)
    check = storage.room(tmp_path)
    assert (check.state, check.found, bool(check.advice)) == (state, found, state == "warn")


@pytest.mark.parametrize(
    ("kind", "options", "state", "advice"),
    [
        ("ext4", "rw,relatime", "ok", ""),
        ("xfs", "rw", "ok", ""),
        ("ext4", "ro,relatime", "bad", "read-only"),
        ("ext4", "rw,sync", "warn", "without sync"),
        ("tmpfs", "rw", "warn", "in host memory"),
        ("nfs4", "rw", "warn", "network"),
        ("fuse.sshfs", "rw", "warn", "network"),
        ("overlay", "rw", "warn", "mount a drive into the container"),
        ("btrfs", "rw", "warn", "chattr +C"),
    ],
)
def test_filesystems(tmp_path, proc, kind, options, state, advice):
    (tmp_path / "a drive").mkdir()
    mounted(proc, tmp_path, "squashfs", "ro")
    mounted(proc, tmp_path / "a drive", "vfat", "ro")
    mounted(proc, tmp_path / "a drive", kind, options)  # over the one before
    mounted(proc, tmp_path / "a drivel", "squashfs", "ro")
    check = storage.filesystem(tmp_path / "a drive" / "later", proc=proc)
    assert (check.state, check.found) == (state, f"{kind} on {tmp_path / 'a drive'}, {options}")
    assert advice in check.advice
    assert bool(advice) == bool(check.advice)


def block(sys: Path, number: str, name: str, *, rotational: int = 0, model: str = "", bus: str = "pci0", at: str = ""):
    """A drive as sysfs has it; `at` names its partition, which then has the number."""
    folder = sys / "devices" / bus / "block" / name
    write(folder / "queue/rotational", rotational)
    if model:
        write(folder / "device/model", model)
    if at:
        write(folder / at / "partition", 1)
    link = sys / "dev/block" / number
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(folder / at)
    return folder / at


@pytest.mark.parametrize(
    ("described", "state", "found"),
    [
        ({"name": "nvme0n1", "model": "PM9A3"}, "ok", "nvme0n1 (PM9A3), NVMe"),
        ({"name": "nvme0n1", "at": "nvme0n1p2"}, "ok", "nvme0n1, NVMe"),
        ({"name": "nvme1n1", "model": "Amazon Elastic Block Store"}, "ok", "nvme1n1 (Amazon Elastic Block Store), v"),
        ({"name": "vda", "bus": "virtio1", "rotational": 1}, "ok", "vda, virtual: what is behind it is not told"),
        ({"name": "sda", "model": "ST4000", "rotational": 1}, "warn", "sda (ST4000), a hard disk"),
        ({"name": "sda"}, "warn", "sda, an SSD on SATA, SAS or USB"),
        ({"name": "zram0"}, "warn", "zram0, compressed host memory"),
        ({"name": "pmem0"}, "ok", "pmem0"),
    ],
)
def test_drives(tmp_path, proc, described, state, found):
    block(tmp_path / "sys", "8:1", **described)
    check = storage.drive(tmp_path, proc=proc, sys=tmp_path / "sys", device=(8, 1))
    assert (check.state, check.found[: len(found)]) == (state, found)
    assert bool(check.advice) == (state == "warn")


def test_a_drive_made_of_drives_and_one_that_is_not_told(tmp_path, proc):
    sys = tmp_path / "sys"
    assert storage.drive(tmp_path, proc=proc, sys=sys) == Check(
        "not told by the system; `greedysnake probe` measures it"
    )
    parts = [
        block(sys, "259:1", "nvme0n1", model="PM9A3", at="nvme0n1p1"),
        block(sys, "259:2", "nvme1n1", model="PM9A3"),
        block(sys, "8:1", "sda", rotational=1),
    ]
    for array, members in (("9:0", parts[:2]), ("9:1", parts)):
        folder = block(sys, array, f"md{array[-1]}", bus="virtual")
        (folder / "slaves").mkdir()
        for part in members:
            (folder / "slaves" / part.name).symlink_to(part)
    fast = storage.drive(tmp_path, proc=proc, sys=sys, device=(9, 0))
    mixed = storage.drive(tmp_path, proc=proc, sys=sys, device=(9, 1))
    assert (fast.state, fast.found) == ("ok", "nvme0n1 (PM9A3), NVMe; nvme1n1 (PM9A3), NVMe")
    assert (mixed.state, mixed.found) == ("warn", f"{fast.found}; sda, a hard disk")
