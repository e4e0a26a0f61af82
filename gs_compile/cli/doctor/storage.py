"""storage: is a directory fit to hold a run? Its filesystem, its drive, its room, and direct I/O as it is used.

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

from gs_compile.cli.doctor.check import Finding, Problem, check
from gs_compile.errors import LeftoverError, StorageError, StorageLockedError
from gs_compile.machine import PROC, format_bytes, free_storage
from gs_compile.planner.measure.probe_drive import existing
from gs_compile.runtime.drive import FOLDER, Drive

SYS = Path("/sys")
NBYTES_PER_ELEMENT = 14  # a parameter in bf16, and AdamW's fp32 master and moments
LITTLE_NBYTES = 20 << 30  # a model of 1.5 billion parameters: smaller ones hardly need the tier
SLOW = (  # kinds of filesystems, and what to do about them
    (re.compile("tmpfs|ramfs"), "its files are in host memory, beside host_memory: name a drive"),
    (
        re.compile(r"nfs\d?|cifs|smb\d?|9p|virtiofs|ceph|lustre|gpfs|beegfs|glusterfs|afs|fuse(\..*)?"),
        "as fast as its network at best: name a local drive if there is one",
    ),
    (re.compile("overlay"), "a container's own layer: mount a drive into the container"),
    (
        re.compile("btrfs|zfs|bcachefs"),
        "every write makes a copy and a checksum: prefer ext4 or xfs, or `chattr +C` an empty folder",
    ),
)
CLOUD = re.compile(r"Elastic Block Store|PersistentDisk|nvme_card-pd|Virtual|VBOX|VMware|QEMU", re.I)


@check("direct I/O in {0}")
def direct_io(directory: Path) -> Finding:
    """Whether a file can be read and written around the page cache, tried with the run's own code."""
    try:
        with (
            tempfile.TemporaryDirectory(prefix=".greedysnake-doctor-", dir=existing(directory)) as folder,
            warnings.catch_warnings(action="ignore"),
            closing(Drive(Path(folder), threads=1)) as drive,
        ):
            if drive.is_direct:
                return "works"
    except OSError as error:  # no permission, no room, a broken drive
        return Problem(f"{type(error).__name__}: {error}", "name a directory that can be written: --storage", "bad")
    advice = "choose a directory on a local drive, ext4 or xfs: through the page cache it is slower and takes memory"
    return Problem("refused: storage will work through the page cache", advice)


@check("runs in {0}")
def run_folder(directory: Path) -> Finding:
    """Whether a run could begin here now."""
    folder = directory / FOLDER
    if not folder.exists():
        return "none"
    try:
        with warnings.catch_warnings(action="ignore"), closing(Drive(directory, threads=1)):
            return "none"
    except StorageLockedError:
        return Problem(f"{folder} is in use", "one run at a time: give each its own directory")
    except LeftoverError:
        return Problem(f"{folder} holds files of a run that was killed", f"delete {folder}", "bad")
    except StorageError as error:
        return Problem(str(error), f"delete {folder}, or name another directory", "bad")


@check("room in {0}")
def room(directory: Path) -> Finding:
    """Whether a model worth the effort fits, as far as the drive goes."""
    nbytes = free_storage(existing(directory))
    found = f"{format_bytes(nbytes)} free: parameters and states of {_count(nbytes // NBYTES_PER_ELEMENT)} parameters"
    if nbytes < LITTLE_NBYTES:
        return Problem(found, "make room, or name a directory on a larger drive")
    return found


@check("filesystem of {0}")
def filesystem(directory: Path, *, proc: Path = PROC) -> Finding:
    """Whether the filesystem is one of a local drive, and mounted to be written."""
    mount = _mount(existing(directory), proc)
    found, options = f"{mount.kind} on {mount.point}, {mount.options}", set(mount.options.split(","))
    if "ro" in options:
        return Problem(found, "it is mounted read-only: name another directory", "bad")
    advice = next((advice for kinds, advice in SLOW if kinds.fullmatch(mount.kind)), "")
    if not advice and {"sync", "dirsync"} & options:
        advice = "every write waits for the drive: mount without sync"
    return Problem(found, advice) if advice else found


@check("drive of {0}")
def drive(directory: Path, *, proc: Path = PROC, sys: Path = SYS, device: tuple[int, int] | None = None) -> Finding:
    """The kind of the drive, where the system tells; `device` is its number, if not the directory's own."""
    found = list(_drives(_block(device or _device(existing(directory), proc), sys)))
    if not found:
        return "not told by the system; `greedysnake probe` measures it"
    words = "; ".join(dict.fromkeys(drive.words for drive in found))
    return (
        words if all(drive.good for drive in found) else Problem(words, "a local NVMe drive is several times as fast")
    )


LOOKS = (direct_io, run_folder, room, filesystem, drive)  # at a directory, in the order they are shown


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
