"""checks_storage: is a directory fit to hold a run? Its filesystem, its drive, its room, and direct I/O as it is used.

A directory that is not there yet is looked at where it would be made; nothing is left behind.
"""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from gs_compile.cli.doctor.check import Check, State
from gs_compile.errors import LeftoverError, StorageError, StorageLockedError
from gs_compile.machine import PROC, format_bytes, free_storage
from gs_compile.planner.measure.probe_drive import existing
from gs_compile.runtime.store import FOLDER, Drive

SYS = Path("/sys")
NBYTES_PER_ELEMENT = 14  # a parameter in bf16, and AdamW's fp32 master and moments
LITTLE_NBYTES = 20 << 30  # a model of 1.5 billion parameters: smaller ones hardly need the tier
NETWORK = re.compile(r"nfs\d?|cifs|smb\d?|9p|virtiofs|ceph|lustre|gpfs|beegfs|glusterfs|afs|fuse(\..*)?")
ON_WRITE = ("btrfs", "zfs", "bcachefs")
IN_MEMORY = ("tmpfs", "ramfs")
CLOUD = re.compile(r"Elastic Block Store|PersistentDisk|nvme_card-pd|Virtual|VBOX|VMware|QEMU", re.I)


def direct_io(directory: Path) -> Check:
    """Whether a file can be read and written around the page cache, tried with the run's own code."""
    name = f"direct I/O in {directory}"
    try:
        with (
            tempfile.TemporaryDirectory(prefix=".greedysnake-doctor-", dir=existing(directory)) as folder,
            warnings.catch_warnings(action="ignore"),
            closing(Drive(Path(folder), threads=1)) as drive,
        ):
            if drive.is_direct:
                return Check(name, "ok", "works")
    except OSError as error:  # no permission, no room, a broken drive
        return Check(name, "bad", f"{type(error).__name__}: {error}", "name a directory that can be written: --storage")
    advice = "choose a directory on a local drive, ext4 or xfs: through the page cache it is slower and takes memory"
    return Check(name, "warn", "refused: storage will work through the page cache", advice)


def run_folder(directory: Path) -> Check:
    """Whether a run could begin here now."""
    name, folder = f"runs in {directory}", directory / FOLDER
    if not folder.exists():
        return Check(name, "ok", "none")
    try:
        with warnings.catch_warnings(action="ignore"), closing(Drive(directory, threads=1)):
            return Check(name, "ok", "none")
    except StorageLockedError:
        return Check(name, "warn", f"{folder} is in use", "one run at a time: give each its own directory")
    except LeftoverError:
        return Check(name, "bad", f"{folder} holds files of a run that was killed", f"delete {folder}")
    except StorageError as error:
        return Check(name, "bad", str(error), f"delete {folder}, or name another directory")


def room(directory: Path) -> Check:
    """Whether a model worth the effort fits, as far as the drive goes."""
    name, nbytes = f"room in {directory}", free_storage(existing(directory))
    found = f"{format_bytes(nbytes)} free: parameters and states of {_count(nbytes // NBYTES_PER_ELEMENT)} parameters"
    if nbytes < LITTLE_NBYTES:
        return Check(name, "warn", found, "make room, or name a directory on a larger drive")
    return Check(name, "ok", found)


def filesystem(directory: Path, *, proc: Path = PROC) -> Check:
    """Whether the filesystem is one of a local drive, and mounted to be written."""
    mount = _mount(existing(directory), proc)
    name, found = f"filesystem of {directory}", f"{mount.kind} on {mount.point}, {mount.options}"
    options = mount.options.split(",")
    match mount.kind:
        case _ if "ro" in options:
            return Check(name, "bad", found, "it is mounted read-only: name another directory")
        case kind if kind in IN_MEMORY:
            return Check(name, "warn", found, "its files are in host memory, beside host_memory: name a drive")
        case kind if NETWORK.fullmatch(kind):
            return Check(name, "warn", found, "as fast as its network at best: name a local drive if there is one")
        case "overlay":
            return Check(name, "warn", found, "a container's own layer: mount a drive into the container")
        case kind if kind in ON_WRITE:
            advice = "every write makes a copy and a checksum: prefer ext4 or xfs, or `chattr +C` an empty folder"
            return Check(name, "warn", found, advice)
        case _ if {"sync", "dirsync"} & set(options):
            return Check(name, "warn", found, "every write waits for the drive: mount without sync")
    return Check(name, "ok", found)


def drive(directory: Path, *, proc: Path = PROC, sys: Path = SYS, device: tuple[int, int] | None = None) -> Check:
    """What kind of drive it is, where the system tells; `device` is its number, if not the directory's own."""
    name, place = f"drive of {directory}", existing(directory)
    found = list(_drives(_block(device or _device(place, proc), sys)))
    if not found:
        return Check(name, "ok", "not told by the system; `greedysnake probe` measures it")
    state: State = "ok" if all(drive.good for drive in found) else "warn"
    words = "; ".join(dict.fromkeys(drive.words for drive in found))
    return Check(name, state, words, "" if state == "ok" else "a local NVMe drive is several times as fast")


# The system -----------------------------------------------------------------------------------------------------------


class _Mount(NamedTuple):
    point: Path
    kind: str
    source: str
    options: str


def _mount(place: Path, proc: Path) -> _Mount:
    """The mount that a path is on: the longest, and of equal ones the last, which hides the others."""
    found, resolved = [], place.resolve()
    for line in (proc / "self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4]))
        kind, source, *_ = after.split()
        if resolved.is_relative_to(point):
            found.append(_Mount(point, kind, source, before.split()[5]))
    return sorted(found, key=lambda mount: len(mount.point.parts))[-1]


def _device(place: Path, proc: Path) -> tuple[int, int]:
    """The number of the block device under a path; some filesystems have none of their own, but name theirs."""
    number = place.stat().st_dev
    source = Path(_mount(place, proc).source)
    if os.major(number) == 0 and source.is_block_device():
        number = source.stat().st_rdev
    return os.major(number), os.minor(number)


def _block(device: tuple[int, int], sys: Path) -> Path | None:
    """The folder that describes a whole drive."""
    folder = sys / "dev/block/{}:{}".format(*device)
    if not folder.exists():
        return None
    folder = folder.resolve()
    return folder.parent if (folder / "partition").exists() else folder


class _Drive(NamedTuple):
    good: bool
    words: str


def _drives(block: Path | None) -> Iterator[_Drive]:
    """The drive, or those that it is made of."""
    if block is None:
        return
    parts = sorted((block / "slaves").iterdir()) if (block / "slaves").is_dir() else []
    if parts:  # RAID, LVM, encryption
        for part in parts:
            whole = part.resolve()
            yield from _drives(whole.parent if (whole / "partition").exists() else whole)
        return
    model, name = _read(block / "device/model"), block.name
    called = f"{name} ({model})" if model else name
    if "virtio" in str(block) or name.startswith(("vd", "xvd")) or CLOUD.search(model):
        yield _Drive(True, f"{called}, virtual: what is behind it is not told; `greedysnake probe` measures it")
    elif name.startswith("zram"):
        yield _Drive(False, f"{called}, compressed host memory")
    elif name.startswith("nvme"):
        yield _Drive(True, f"{called}, NVMe")
    elif _read(block / "queue/rotational") == "1":
        yield _Drive(False, f"{called}, a hard disk")
    elif name.startswith("sd"):
        yield _Drive(False, f"{called}, an SSD on SATA, SAS or USB")
    else:
        yield _Drive(True, called)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _count(number: int) -> str:
    """Of parameters, for people."""
    return f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.0f} million"
