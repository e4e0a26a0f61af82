"""A drive that moves so many bytes a second and no more, for this process and those that it starts: Linux's cgroups.

    with slowed("/mnt/nvme0", read=200e6, write=200e6):
        ...

Needs root, and the controller blkio (cgroup v1) or io (v2); raises `OSError` with words where there is none of it. The
kernel bounds what reaches the drive: direct I/O as it is, other writes when the page cache writes them back.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
NAME = "greedysnake-slow-drive"
OPTION = "--drive-bytes-per-second"


def add_drive_argument(parser: argparse.ArgumentParser) -> None:
    """The option that slows the drive; `rates_of` reads it."""
    words = "slow the drive: bytes a second that are read, and written where that differs; Linux, as root"
    parser.add_argument(OPTION, type=float, nargs="+", metavar=("R", "W"), help=words)


def rates_of(arguments: argparse.Namespace) -> tuple[float, float] | None:
    """Bytes a second that are read and written; None: as fast as the drive is."""
    given = arguments.drive_bytes_per_second
    if given and (len(given) > 2 or min(given) <= 0):
        raise SystemExit(f"{OPTION} takes one or two rates above 0, not {given}")
    return (given[0], given[-1]) if given else None


def bounded(figures: Mapping[str, float], limits: tuple[float, float] | None) -> dict[str, float]:
    """Measured figures of a slowed drive, by the profile's names: no rate is above its limit, as the kernel lets bursts
    by, and transfers beside computation are as fast as they were measured, now in parts of the rate that is left.
    """
    found = dict(figures)
    for way, limit in zip(("read", "write"), limits or (), strict=False):
        found |= {name: min(rate, limit) for name, rate in figures.items() if name.startswith(f"ssd_{way}")}
        alone, beside = f"ssd_{way}_bytes_per_second", f"{way}_compute_speed"
        if beside in figures:
            found[beside] = min(1.0, figures[beside] * figures[alone] / found[alone])
    return found


@contextlib.contextmanager
def slowed(directory: str | os.PathLike[str], *, read: float, write: float) -> Iterator[None]:
    """Bound this process's bytes a second on the drive that has a directory, until the end of the block."""
    numbers = _whole_drive(Path(directory).stat().st_dev)
    is_first = (ROOT / "blkio").is_dir()
    parent = ROOT / "blkio" if is_first else ROOT
    group = parent / f"{NAME}-{os.getpid()}"
    try:
        group.mkdir()
        if is_first:
            (group / "blkio.throttle.read_bps_device").write_text(f"{numbers} {int(read)}")
            (group / "blkio.throttle.write_bps_device").write_text(f"{numbers} {int(write)}")
        else:
            (parent / "cgroup.subtree_control").write_text("+io")
            (group / "io.max").write_text(f"{numbers} rbps={int(read)} wbps={int(write)}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise OSError(f"{directory} cannot be slowed: {error}; that needs root and cgroups with blkio or io") from error
    try:
        yield
    finally:
        (parent / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):  # others of this process's children may still be in it
            group.rmdir()


def _whole_drive(number: int) -> str:
    """The numbers of the drive that a partition is of: limits are those of whole drives."""
    place = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    drive = place.parent if (place / "partition").exists() else place
    return (drive / "dev").read_text().strip()
