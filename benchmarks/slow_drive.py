"""A drive that moves so many bytes a second and no more, for this process and those that it starts: Linux's cgroups.

    with slowed("/mnt/nvme0", read=200e6, write=200e6):
        ...

Needs root, and the controller blkio (cgroup v1) or io (v2); raises `OSError` with words where there is none of it. The
kernel bounds what reaches the drive: direct I/O as it is, other writes when the page cache writes them back.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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


def bounded(figures: Mapping[str, float], limits: tuple[float, float]) -> dict[str, float]:
    """What a drive whose figures are these gives with a limit, by the profile's names.

    A limit that is below a rate is the rate. Transfers beside computation and updates keep the rate that they have
    there, up to the limit, and take from these in proportion to it.
    """
    found = dict(figures)
    for way, limit in zip(("read", "write"), limits, strict=True):
        rates = {name: rate for name, rate in figures.items() if name.startswith(f"ssd_{way}")}
        found |= {name: min(rate, limit) for name, rate in rates.items()}
        alone = f"ssd_{way}_bytes_per_second"
        for work in ("compute", "update"):
            speed, taken = f"{way}_{work}_speed", f"{work}_{way}_speed"
            beside = rates[alone] * figures[speed]
            found[speed] = min(1.0, beside / found[alone])
            found[taken] = 1 - (1 - figures[taken]) * min(1.0, limit / beside)
    return found


@dataclass(frozen=True)
class SlowDrive:
    """A drive's limits and the cgroup that has them; `AS_IT_IS` has none."""

    limits: tuple[float, float] = (math.inf, math.inf)  # bytes a second that are read and written
    group: Path | None = None

    @contextlib.contextmanager
    def as_it_is(self) -> Iterator[None]:
        """Without limits for this process in the block. A limit is exact over seconds, not in a probe's requests: the
        kernel lets a burst by after each rest. So the drive is probed as it is, and its figures are `bounded`.
        """
        if self.group is None:
            yield
            return
        _move_to(self.group.parent)
        try:
            yield
        finally:
            _move_to(self.group)


AS_IT_IS = SlowDrive()


@contextlib.contextmanager
def slowed(directory: str | os.PathLike[str], *, read: float, write: float) -> Iterator[SlowDrive]:
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
        _move_to(group)
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise OSError(f"{directory} cannot be slowed: {error}; that needs root and cgroups with blkio or io") from error
    try:
        yield SlowDrive((read, write), group)
    finally:
        _move_to(parent)
        with contextlib.suppress(OSError):  # others of this process's children may still be in it
            group.rmdir()


def _move_to(group: Path) -> None:
    (group / "cgroup.procs").write_text(str(os.getpid()))


def _whole_drive(number: int) -> str:
    """The numbers of the drive that a partition is of: limits are those of whole drives."""
    place = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    drive = place.parent if (place / "partition").exists() else place
    return (drive / "dev").read_text().strip()
