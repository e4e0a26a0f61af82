"""The doctor's words of directories and drives; drives are made of files."""

from __future__ import annotations

import errno
import os

import pytest
from stored_run import save, stored_folders, stored_run
from test_doctor import write
from tiered import another_run

from gs_compile.cli.doctor import storage
from gs_compile.cli.doctor.check import Check
from gs_compile.errors import StorageError
from gs_compile.runtime.storage import system
from gs_compile.runtime.storage.manifest import NAME
from gs_compile.runtime.storage.stored import FOLDER


@pytest.fixture
def told(monkeypatch):
    """What findmnt and lsblk tell, by their names; and the last argument of each call."""
    rows = {"findmnt": [], "lsblk": [], "asked": []}

    def tell(command, *arguments):
        rows["asked"].append(arguments[-1])
        return rows[command]

    monkeypatch.setattr(storage, "_rows", tell)
    return rows


def mounted(kind="ext4", options="rw,relatime", target="/"):
    return {"source": "/dev/sda1", "fstype": kind, "target": target, "vfs-options": options}


def block(name, kind="disk", *, model=None, rotational=False, bus=None):
    return {"name": name, "type": kind, "model": model, "rota": rotational, "tran": bus}


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

    monkeypatch.setattr(system, "open_file", open_file)
    check = storage.direct_io(tmp_path)
    assert check.state == state
    assert found in check.found
    assert advice in check.advice


def test_a_directory_with_runs(tmp_path):
    folder = tmp_path / FOLDER
    assert storage.run_folder(tmp_path) == Check("none")
    with another_run(tmp_path):
        check = storage.run_folder(tmp_path)
    assert (check.state, check.found) == ("warn", f"{folder} is in use")
    folder.mkdir(mode=0o700)
    assert storage.run_folder(tmp_path) == Check("none")
    write(folder / "w3", "")  # of a run that was killed
    folder.chmod(0o700)
    check = storage.run_folder(tmp_path)
    assert check.state == "ok"
    assert "a run was killed and left 1 files" in check.found
    (folder / "w3").unlink()
    folder.chmod(0o755)
    check = storage.run_folder(tmp_path)
    assert check.state == "bad"
    assert "others can get at this folder" in check.found


def test_a_directory_with_durable_runs(tmp_path):
    assert storage.durable_runs(tmp_path / "none") == storage.durable_runs(tmp_path) == Check("none")
    (folder,) = stored_folders(tmp_path, "drive")
    save(folder, stored_run(folder))
    check = storage.durable_runs(folder.parent)
    assert check.found == f"run 0123abcd at step 3 of 2026-01-02T03:04:05+00:00 in {FOLDER}, 136.0 KiB"
    assert check.advice == f'resume="auto" goes on from it; greedysnake store gc {folder.parent} --all removes it'
    (folder / NAME).write_bytes(b"{}")
    assert storage.durable_runs(folder.parent) == Check("none")
    check = storage.run_folder(folder.parent)
    assert (check.found, check.state) == (f"{folder} has a damaged commit", "bad")


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
def test_filesystems(tmp_path, told, kind, options, state, advice):
    told["findmnt"] = [mounted("squashfs", "ro"), mounted(kind, options, "/a drive")]  # the last hides the other
    check = storage.filesystem(tmp_path / "later")
    assert told["asked"] == [str(tmp_path)]
    assert (check.state, check.found) == (state, f"{kind} on /a drive, {options}")
    assert advice in check.advice
    assert bool(advice) == bool(check.advice)


@pytest.mark.parametrize(
    ("described", "state", "found"),
    [
        (block("nvme0n1", model="PM9A3 ", bus="nvme"), "ok", "nvme0n1 (PM9A3), NVMe"),
        (block("nvme1n1", model="Amazon Elastic Block Store", bus="nvme"), "ok", "nvme1n1 (Amazon Elastic Block Sto"),
        (block("vda", rotational=True), "ok", "vda, virtual: what is behind it is not told"),
        (block("sda", model="ST4000", rotational=True, bus="sata"), "warn", "sda (ST4000), a hard disk"),
        (block("sda", bus="usb"), "warn", "sda, an SSD on USB"),
        (block("zram0"), "warn", "zram0, compressed host memory"),
        (block("pmem0"), "ok", "pmem0"),
    ],
)
def test_drives(tmp_path, told, described, state, found):
    told["findmnt"], told["lsblk"] = [mounted()], [described]
    check = storage.drive(tmp_path)
    assert told["asked"] == [str(tmp_path), "/dev/sda1"]
    assert (check.state, check.found[: len(found)]) == (state, found)
    assert bool(check.advice) == (state == "warn")


def test_a_drive_made_of_drives_and_one_that_is_not_told(tmp_path, told):
    told["findmnt"] = [mounted()]
    assert storage.drive(tmp_path) == Check("not told by the system; `greedysnake probe` measures it")
    fast = [block("nvme0n1", model="PM9A3", bus="nvme"), block("nvme1n1", model="PM9A3", bus="nvme")]
    told["lsblk"] = [block("md0", "raid0"), block("nvme0n1p1", "part", bus="nvme"), *fast]
    words = "nvme0n1 (PM9A3), NVMe; nvme1n1 (PM9A3), NVMe"
    assert storage.drive(tmp_path) == Check(words)
    told["lsblk"].append(block("sda", rotational=True))
    mixed = storage.drive(tmp_path)
    assert (mixed.state, mixed.found) == ("warn", f"{words}; sda, a hard disk")


def test_what_a_tool_prints_is_rows():
    assert storage._rows("echo", '{"filesystems": [{"fstype": "ext4"}]}') == [{"fstype": "ext4"}]
    assert storage._rows("false") == []
