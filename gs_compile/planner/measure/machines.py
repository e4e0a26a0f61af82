"""profiles: the profile of a machine: one of those that ship, a file, or this machine, measured once and remembered.

What a drive or a processor gives does not change from day to day, so the figures of this machine are kept in the user's
cache, in a file for each combination of processor, cores, memory, GPU, torch and the drives of the storage. What is
free on them does change, and is looked up at every use.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from gs_compile.errors import ProfileError
from gs_compile.machine import usable_cores, usable_memory
from gs_compile.options import Options, default_storage
from gs_compile.planner.measure.probe import free_nbytes, num_ranks, probe
from gs_compile.planner.measure.probe_drive import existing
from gs_compile.planner.measure.profile import FORMAT, Profile
from gs_compile.runtime.stream import default_device, device_of
from gs_compile.runtime.threads import correct_thread_count

log = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent / "machines"
ENVIRONMENT = "GREEDYSNAKE_MACHINE"
CACHE = "machines"  # a folder beside the default storage
MEASURING = 2  # counts the ways in which the probe has measured: what an older one found is measured again


def profile(
    machine: str | Path | Profile | None = None,
    storage: str | Path | Sequence[str | Path] | None = None,
    *,
    refresh: bool = False,
) -> Profile:
    """The profile of `machine`: a name (see `known`), the path of a file, or a profile; None: this machine.

    `storage` is the directory, or directories, that this machine's figures are of; None: the default. The environment
    variable GREEDYSNAKE_MACHINE, a name or a path, takes the place of None. `refresh` measures this machine again,
    whatever is remembered or set. The first measurement takes some ten seconds. Raises `ProfileError` for a name or
    file that is none, and the store's errors where the storage cannot be used.
    """
    if machine is None and not refresh:
        machine = os.environ.get(ENVIRONMENT) or None
    if isinstance(machine, Profile):
        return machine
    if machine is not None:
        return Profile.load(_path(machine))
    return _this_machine(Options.of({"storage": storage}).storage, refresh)


def known() -> tuple[str, ...]:
    """The names of the machines that ship."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def remembered(storage: Sequence[Path]) -> Path:
    """The file that keeps this machine's figures with these directories, once it is measured."""
    return default_storage() / CACHE / f"{_fingerprint(storage)}.json"


def _path(machine: str | Path) -> Path:
    """The file of a name, with or without its ending, or of a path."""
    path = Path(machine).expanduser()
    if path.exists():
        return path
    name = path.name.removesuffix(".json")
    if path.name == str(path) and name in known():
        return SHIPPED / f"{name}.json"
    if path.name != str(path) or path.suffix == ".json":
        raise ProfileError(f"{path}: there is no such file; machines that ship: {', '.join(known())}")
    close = difflib.get_close_matches(name.lower(), known(), n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ProfileError(f"unknown machine {machine}; {hint}known: {', '.join(known())}, or the path of a profile")


def _this_machine(storage: tuple[Path, ...], refresh: bool) -> Profile:
    path = remembered(storage)
    if not refresh and path.exists():
        try:
            return replace(Profile.load(path), **free_nbytes(storage))  # type: ignore[arg-type]
        except ProfileError as error:
            log.warning("measuring this machine again: %s", error)
    log.info("measuring this machine, which takes some ten seconds; the result is kept in %s", path)
    measured = probe(storage)
    try:
        _write(measured, path)
    except OSError as error:
        log.warning("what was measured of this machine could not be kept: %s", error)
    return measured


def _fingerprint(storage: Sequence[Path]) -> str:
    """A key of this machine, and of the settings of this process that change what it measures."""
    device = default_device()
    facts = {
        "format": FORMAT,
        "measuring": MEASURING,
        "processor": _processor(),
        "cores": usable_cores(),
        "threads": correct_thread_count(),
        "gibibytes": usable_memory() >> 30,  # a new kernel leaves some pages more or less
        "device": device_of(device).name,
        "torch": torch.__version__,
        "ranks": num_ranks(),
        "drives": [existing(directory).stat().st_dev for directory in storage],
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def _write(measured: Profile, path: Path) -> None:
    """All of the file, or none of it: other processes read it at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    try:
        measured.save(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
