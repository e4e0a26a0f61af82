"""machines: the profile of a machine: `shipped`, from a file, or this machine's, measured once and remembered.

The rates of drives and processors do not change from day to day, so this machine's are kept in the user's cache, in a
file for each combination of processor, cores, memory, GPU, torch and the drives of the storage. Free memory and storage
do change, and are looked up at every use.

The probe uses the parts of the runtime that a step runs on. If ranks share a machine, the profile is one rank's share
of its host memory and its drives; the optimizer's rate is that of the rank's own threads. RLIMIT_MEMLOCK does not limit
pinned memory: CUDA's driver ignores it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gs_compile.errors import ProfileError
from gs_compile.machine import DEFAULT_SHARE, available_memory, num_ranks, processor, usable_cores, usable_memory
from gs_compile.options import Options, default_storage
from gs_compile.planner.measure.cluster import share_of
from gs_compile.planner.measure.probe import compute_rates, link_rates, network_rates, work_of
from gs_compile.planner.measure.probe_drive import drive_rates, existing, room_nbytes
from gs_compile.planner.measure.profile import FORMAT, Profile
from gs_compile.planner.measure.rates import Figure
from gs_compile.planner.measure.shipped import file_of, load, named
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.stream import default_device, device_of, has_own_memory
from gs_compile.runtime.threads import correct_thread_count

log = logging.getLogger(__name__)

CACHE = "machines"  # a folder beside the default storage
CODE = ".code"  # a file beside a machine's figures, which is removed when these are measured again
MEASURING = 6  # the version of the probe: the figures of older ones are measured again
SECONDS = 7.5
DRIVE_SHARE = 0.6  # of the time of measuring, for drives: their rates vary most
LINK_SHARE = 0.1
DAY = "%Y-%m-%d"
BUSY_SHARE = 0.5  # of the cores: with this much other work, figures are not the machine's own
# The usable part of what is free on each tier. On a device the rest goes to fragmentation and libraries.
SHARES = {"host_nbytes": DEFAULT_SHARE, "ssd_nbytes": 1.0, "device_nbytes": 0.9}


class Where(NamedTuple):
    """The device that a model is on, and the bytes of its parameters, which leave the device before the first step."""

    device: torch.device
    leaving_nbytes: int = 0


def profile(
    machine: str | Path | Profile | None = None,
    storage: str | Path | Sequence[str | Path] | None = None,
    *,
    refresh: bool = False,
    ranks: Ranks | None = None,
    where: Where | None = None,
) -> Profile:
    """The profile of `machine`: a name (see `shipped.known`), the path of a file, or a profile; None: this machine.

    `storage` is the directory, or directories, whose drives this machine's figures include; None: the default. The
    environment variable GREEDYSNAKE_MACHINE, a name or a path, replaces None. `refresh` measures this machine again,
    whatever is remembered or set. The first measurement takes some ten seconds. Raises `ProfileError` for a name or
    file that is not a machine's, and the store's errors if the storage cannot be used.

    ranks: all of them call this, and get the same figures: those of the first rank's machine, the least memory that any
        has, and the network between them, which is measured unless the profile has it.
    where: the device of a model; None: the default device, without a model.
    """
    where = where or Where(default_device())
    machine = machine if refresh else named(machine)
    directories = Options.of({"storage": storage}).storage

    def alone() -> Profile:
        if machine is None:
            return _this_machine(directories, where, refresh, ranks)
        return share_of(load(machine), num_ranks())  # it may have been measured by another number of ranks

    return alone() if ranks is None else _of_all(ranks, alone, where, directories if machine is None else ())


def remembered(storage: Sequence[Path], total: int = 1, device: torch.device | None = None) -> Path:
    """The file of this machine's figures with these directories and ranks, once it is measured.

    While the machine is busy and was never measured idle, it is another file: so the machine is measured once more when
    it is idle.
    """
    name = _fingerprint(storage, total, device or default_device())
    path = default_storage() / CACHE / f"{name}.json"
    return path.with_stem(f"{name}-busy") if _is_busy() and not path.exists() else path


def code_file(
    machine: str | Path | Profile | None, storage: Sequence[Path], total: int, device: torch.device
) -> Path | None:
    """The file of the seconds of code that was timed on this machine, beside its figures; None: these are in no file of
    the user's.
    """
    given = named(machine)
    figures = remembered(storage, total, device) if given is None else file_of(given)
    return _beside(figures) if figures else None


def forget_code(figures: Path) -> None:
    """Remove the seconds of code beside a file of figures that have changed. Raises OSError if that fails."""
    _beside(figures).unlink(missing_ok=True)


def _beside(figures: Path) -> Path:
    """Never the file itself, whatever its name."""
    return figures.with_name(figures.name + CODE)


# This machine ---------------------------------------------------------------------------------------------------------


def probe(storage: Sequence[Path], *, seconds: float = SECONDS, device: torch.device | None = None) -> Profile:
    """The profile of this machine, with these directories as its SSD tier; takes little more than `seconds`.

    Raises the store's errors if the storage cannot be used (another run uses it, it is read-only), and leaves nothing
    there. Other work on the machine lowers the figures: the log warns of it, and the sources say how much there was.
    Rates that no short measurement finds, such as what a drive writes once its cache is full, can be edited in the
    profile's file.
    """
    device = device or default_device()
    load = os.getloadavg()[0]
    if _is_busy():
        log.warning("this machine was busy in the last minute (load %.1f): measure it again when it is idle", load)
    room, here = free_nbytes(storage, Where(device)), device_of(device)
    link_share = LINK_SHARE if here.has_own_memory else 0.0
    with work_of(device) as works:
        figures = drive_rates(storage, seconds * DRIVE_SHARE, works, here)
        figures |= compute_rates(device, works, seconds * (1 - DRIVE_SHARE - link_share))
    figures |= link_rates(device, seconds * link_share) if here.has_own_memory else {}
    rates, sources = _rates_and_sources(figures, load)
    sources |= {name: f"{SHARES[name]:.0%} of what was free on {time.strftime(DAY)}" for name in room}
    ranks = num_ranks()
    for name in rates:
        if name.startswith(("ssd_read", "ssd_write")):
            rates[name] /= ranks
    name = platform.node() or "this machine"
    fixed = {"format": FORMAT, "name": name, "device": "cuda" if here.has_own_memory else "cpu", "num_ranks": ranks}
    return Profile.of({**fixed, **room, **rates, "sources": sources})


def _is_busy() -> bool:
    """Whether this machine had so much other work in the last minute that figures would not be its own."""
    return os.getloadavg()[0] > BUSY_SHARE * usable_cores()


def _rates_and_sources(figures: Mapping[str, Figure], load: float) -> tuple[dict[str, Any], dict[str, str]]:
    """The rates, and how they were measured, by the profile's names."""
    measured = f"measured {time.strftime(DAY)} at load {load:.1f}"
    sources = {name: f"{measured}, {figure.how}" for name, figure in figures.items()}
    return {name: figure.value for name, figure in figures.items()}, sources


def free_nbytes(storage: Sequence[Path], where: Where) -> dict[str, int]:
    """The bytes that one rank may use of each tier, by the profile's names: what is free now, or will be."""
    device, leaving_nbytes = where
    ranks = num_ranks()
    free = {"host_nbytes": available_memory() / ranks, "ssd_nbytes": room_nbytes(storage) / ranks}
    if has_own_memory(device):
        free["device_nbytes"] = device_of(device).memory_nbytes()[0] + leaving_nbytes
    return {name: max(1, int(nbytes * SHARES[name])) for name, nbytes in free.items()}


def _of_all(ranks: Ranks, alone: Callable[[], Profile], where: Where, storage: tuple[Path, ...]) -> Profile:
    """The profile for all ranks. storage: of this machine's figures; (): the profile is another machine's."""
    path = remembered(storage, ranks.total, where.device)
    found = ranks.from_first("the machine's figures", alone)
    now: dict[str, Any] = free_nbytes(storage, where) if storage else {}
    own = share_of(replace(found, **now), ranks.num_here)
    every = ranks.agree("memory that may be used", own)
    found = replace(own, **{name: min(getattr(each, name) for each in every) for name in SHARES})
    if found.net_bytes_per_second < inf:
        return found
    rates, sources = _rates_and_sources(network_rates(ranks, where.device), os.getloadavg()[0])
    measured = replace(found, **rates, sources={**found.sources, **sources})
    measured = ranks.from_first("the network's figures", lambda: measured)
    if storage and ranks.name == ranks.names[0] and ranks.num_here == num_ranks():
        _keep(measured, path)
    return measured


def _this_machine(storage: tuple[Path, ...], where: Where, refresh: bool, ranks: Ranks | None) -> Profile:
    path = remembered(storage, ranks.total if ranks else 1, where.device)
    now: dict[str, Any] = free_nbytes(storage, where)
    if not refresh and path.exists():
        try:
            return replace(Profile.load(path), **now)
        except ProfileError as error:
            log.warning("measuring this machine again: %s", error)
    log.info("measuring this machine, which takes some ten seconds; the result is kept in %s", path)
    measured = probe(storage, device=where.device)
    _keep(measured, path)
    return replace(measured, **now)


def _keep(measured: Profile, path: Path) -> None:
    try:
        write_whole(path, measured.text)
        forget_code(path)
    except OSError as error:
        log.warning("the measurements of this machine could not be stored: %s", error)


def _fingerprint(storage: Sequence[Path], total: int, device: torch.device) -> str:
    """A key of this machine, and of the settings of this process that change what it measures."""
    facts = {
        "format": FORMAT,
        "measuring": MEASURING,
        "processor": processor(),
        "cores": usable_cores(),
        "threads": correct_thread_count(),
        "gibibytes": usable_memory() >> 30,  # a new kernel leaves some pages more or less
        "device": device_of(device).name,
        "torch": torch.__version__,
        "ranks": num_ranks(),
        **({"total": total} if total > 1 else {}),  # what they give each other is measured too
        "drives": [existing(directory).stat().st_dev for directory in storage],
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: other processes may read it at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        unfinished.write_text(text)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
