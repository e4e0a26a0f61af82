"""storage: is a directory fit to hold a run? Its filesystem, its drive, its room, and direct I/O as it is used.

A directory that is not there yet is looked at where it would be made; nothing is left behind.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from gs_compile.cli.doctor.check import Check
from gs_compile.cli.stored.runs import found_in
from gs_compile.errors import ManifestError, StorageError, StorageLockedError
from gs_compile.machine import format_bytes, free_storage
from gs_compile.planner.measure.probe_drive import existing
from gs_compile.runtime.storage.drive import Drive
from gs_compile.runtime.storage.folder import Folder, folder_in, leftovers
from gs_compile.runtime.storage.last_commit import names_in

NBYTES_PER_ELEMENT = 14  # a parameter in bf16, and AdamW's fp32 master and moments
LITTLE_NBYTES = 20 << 30  # a model of 1.5 billion parameters: smaller ones hardly need the tier
SLOW = {  # kinds of filesystems, and what to do about them
    "tmpfs|ramfs": "its files are in host memory, beside host_memory: name a drive",
    r"nfs\d?|cifs|smb\d?|9p|virtiofs|ceph|lustre|gpfs|beegfs|glusterfs|afs|fuse(\..*)?": (
        "as fast as its network at best: name a local drive if there is one"
    ),
    "overlay": "a container's own layer: mount a drive into the container",
    "btrfs|zfs|bcachefs": (
        "every write makes a copy and a checksum: prefer ext4 or xfs, or `chattr +C` an empty folder"
    ),
}
CLOUD = re.compile(r"Elastic Block Store|PersistentDisk|nvme_card-pd|Virtual|VBOX|VMware|QEMU", re.I)


def direct_io(directory: Path) -> Check:
    """Whether a file can be read and written around the page cache, tried with the run's own code."""
    try:
        with (
            tempfile.TemporaryDirectory(prefix=".greedysnake-doctor-", dir=existing(directory)) as folder,
            warnings.catch_warnings(action="ignore"),
            closing(Drive(Path(folder), threads=1)) as drive,
        ):
            if drive.is_direct:
                return Check("works")
    except OSError as error:  # no permission, no room, a broken drive
        advice = "name a directory that can be written: --storage"
        return Check(f"{type(error).__name__}: {error}", advice, is_bad=True)
    advice = "choose a directory on a local drive, ext4 or xfs: through the page cache it is slower and takes memory"
    return Check("refused: storage will work through the page cache", advice)


def run_folder(directory: Path) -> Check:
    """Whether a run could begin here now."""
    folder = folder_in(directory)
    try:
        if not folder.exists():
            return Check("none")
        locked = Folder.lock(folder)
        if locked is None:
            return Check(f"{folder} is in use by this process")
        try:
            found = leftovers(folder, names_in(locked.committed(), folder))
        finally:
            locked.release()
    except StorageLockedError:
        return Check(f"{folder} is in use", "one run at a time: give each its own directory")
    except ManifestError:
        return Check(f"{folder} has a damaged commit", f"greedysnake store ls {directory} tells more", is_bad=True)
    except StorageError as error:
        return Check(str(error), f"delete {folder}, or name another directory", is_bad=True)
    return Check(f"{folder}: {found}; the next run removes them" if found else "none")


def durable_runs(directory: Path) -> Check:
    """The commits that durable runs have left, of all ranks and models."""
    runs = found_in(directory) if directory.is_dir() else []
    words, idle = [], False
    for each in runs:
        if (made := each.commit) is not None:
            state = f"in use by {each.user}" if each.user else format_bytes(made.nbytes)
            words.append(f"run {made.run} at step {made.step} of {made.written} in {each.folder.name}, {state}")
            idle |= not each.user
    advice = f'resume="auto" goes on from it; greedysnake store gc {directory} --all removes it' if idle else ""
    return Check("; ".join(words) or "none", advice)


def room(directory: Path) -> Check:
    """Whether a model worth the effort fits, as far as the drive goes."""
    nbytes = free_storage(existing(directory))
    number = nbytes // NBYTES_PER_ELEMENT
    words = f"{number / 1e9:.1f} billion" if number >= 1e9 else f"{number / 1e6:.0f} million"
    advice = "make room, or name a directory on a larger drive" if nbytes < LITTLE_NBYTES else ""
    return Check(f"{format_bytes(nbytes)} free: parameters and states of {words} parameters", advice)


def filesystem(directory: Path) -> Check:
    """Whether the filesystem is one of a local drive, and mounted to be written."""
    mount = _mount(directory)
    kind, options = mount["fstype"], set(mount["vfs-options"].split(","))
    found = f"{kind} on {mount['target']}, {mount['vfs-options']}"
    if "ro" in options:
        return Check(found, "it is mounted read-only: name another directory", is_bad=True)
    waits = "every write waits for the drive: mount without sync" if {"sync", "dirsync"} & options else ""
    return Check(found, next((advice for kinds, advice in SLOW.items() if re.fullmatch(kinds, kind)), waits))


def drive(directory: Path) -> Check:
    """The kinds of the drives under a directory, below RAID, LVM and encryption, where the system tells."""
    columns = "NAME,TYPE,MODEL,ROTA,TRAN"
    blocks = _rows("lsblk", "--inverse", "--list", "--json", "--output", columns, _mount(directory)["source"])
    found = dict(_described(block) for block in blocks if block["type"] == "disk")
    if not found:
        return Check("not told by the system; `greedysnake probe` measures it")
    advice = "" if all(found.values()) else "a local NVMe drive is several times as fast"
    return Check("; ".join(found), advice)


LOOKS = {  # at a directory, in the order they are shown
    "direct I/O in": direct_io,
    "runs in": run_folder,
    "durable runs in": durable_runs,
    "room in": room,
    "filesystem of": filesystem,
    "drive of": drive,
}


# The system -----------------------------------------------------------------------------------------------------------


def _mount(directory: Path) -> dict[str, Any]:
    """The mount that a directory is on, or would be made on: the last, where it hides others."""
    columns = "SOURCE,FSTYPE,TARGET,VFS-OPTIONS"
    place = str(existing(directory))
    return _rows("findmnt", "--nofsroot", "--json", "--output", columns, "--target", place)[-1]


def _rows(*command: str) -> list[dict[str, Any]]:
    """The rows that a tool of util-linux prints as JSON; none where it fails."""
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    (rows,) = json.loads(printed or '{"none": []}').values()
    return list(rows)


def _described(block: Mapping[str, Any]) -> tuple[str, bool]:
    """A drive in words, and whether it is fast."""
    name, model, bus = block["name"], (block["model"] or "").strip(), block["tran"] or ""
    called = f"{name} ({model})" if model else name
    if name.startswith(("vd", "xvd")) or CLOUD.search(model):
        return f"{called}, virtual: what is behind it is not told; `greedysnake probe` measures it", True
    if name.startswith("zram"):
        return f"{called}, compressed host memory", False
    if bus == "nvme":
        return f"{called}, NVMe", True
    if block["rota"]:
        return f"{called}, a hard disk", False
    return (f"{called}, an SSD on {bus.upper()}", False) if bus else (called, True)
