"""probe: this machine's profile, measured with the parts of the runtime that a step runs on.

Where ranks share a machine, the profile is one rank's share of its host memory and its drives; the optimizer's rate is
that of the rank's own threads. Pinned memory is not bounded by RLIMIT_MEMLOCK, which CUDA's driver does not ask.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from gs_compile.errors import ProfileError
from gs_compile.machine import DEFAULT_SHARE, available_memory, usable_cores
from gs_compile.planner.measure.probe_compute import compute_rates, link_rates, products_on
from gs_compile.planner.measure.probe_drive import drive_rates, room_nbytes
from gs_compile.planner.measure.profile import FORMAT, MIXED, Profile
from gs_compile.planner.measure.rates import Figure
from gs_compile.runtime.stream import default_device, device_of, has_own_memory

log = logging.getLogger(__name__)

SECONDS = 6.0
DRIVE_SHARE = 0.5  # of the time: nothing varies as drives do
LINK_SHARE = 0.1
BUSY_SHARE = 0.5  # of the cores: with as much other work, figures are not the machine's
# Of what is free of each tier. On a device the rest goes to fragments and libraries.
SHARES = {"host_nbytes": DEFAULT_SHARE, "ssd_nbytes": 1.0, "device_nbytes": 0.9}


def probe(
    storage: Sequence[Path],
    *,
    seconds: float = SECONDS,
    device: torch.device | None = None,
    sustained: Mapping[str, float] | None = None,
) -> Profile:
    """The profile of this machine, with these directories as its SSD tier; takes little more than `seconds`.

    `sustained` declares rates, by the profile's names, that no short measurement can find, such as what a drive writes
    once its cache is full; the same lane's rate beside another is lowered with it. Raises the store's errors where the
    storage cannot be used (another run has it, nobody may write it), and leaves nothing there. Other work on the
    machine lowers what is measured: the log warns of it, and the sources say how much there was.
    """
    device = device or default_device()
    load = os.getloadavg()[0]
    if load > BUSY_SHARE * usable_cores():
        log.warning("this machine was busy in the last minute (load %.1f): measure it again when it is idle", load)
    room = free_nbytes(storage, device)
    figures = _measured(storage, device, seconds)
    today = time.strftime("%Y-%m-%d")
    rates: dict[str, Any] = {name: figure.value for name, figure in figures.items()}
    sources = {name: f"{SHARES[name]:.0%} of what was free on {today}" for name in room}
    sources |= {name: f"measured {today} at load {load:.1f}, {figure.how}" for name, figure in figures.items()}
    _declare(sustained or {}, rates, sources)
    ranks = num_ranks()
    for name in rates:
        if name.startswith(("ssd_read", "ssd_write")):
            rates[name] /= ranks
    name = platform.node() or "this machine"
    fixed = {"format": FORMAT, "name": name, "device": "cuda" if has_own_memory(device) else "cpu", "num_ranks": ranks}
    return Profile.of({**fixed, **room, **rates, "sources": sources})


def _measured(storage: Sequence[Path], device: torch.device, seconds: float) -> dict[str, Figure]:
    own = device_of(device)
    link_share = LINK_SHARE if own.has_own_memory else 0.0
    figures = drive_rates(storage, seconds * DRIVE_SHARE, products_on(device), own)
    figures |= compute_rates(device, seconds * (1 - DRIVE_SHARE - link_share))
    return figures | (link_rates(device, seconds * link_share) if link_share else {})


def free_nbytes(storage: Sequence[Path], device: torch.device | None = None) -> dict[str, int]:
    """The bytes that one rank may use of each tier now, by the profile's names."""
    device = device or default_device()
    ranks = num_ranks()
    free = {"host_nbytes": available_memory() / ranks, "ssd_nbytes": room_nbytes(storage) / ranks}
    if has_own_memory(device):
        free["device_nbytes"] = device_of(device).memory_nbytes()[0]
    return {name: max(1, int(nbytes * SHARES[name])) for name, nbytes in free.items()}


def num_ranks() -> int:
    """The processes that torchrun has started on this machine; 1 without it."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(count)) if count.isdigit() else 1


def _declare(sustained: Mapping[str, float], rates: dict[str, Any], sources: dict[str, str]) -> None:
    """Put what is declared in the place of what was measured."""
    for name, declared in sustained.items():
        if not isinstance(rates.get(name), float):
            raise ProfileError(f"{name} cannot be declared: measured here are {', '.join(rates)}")
        mixed = MIXED.get(name)
        if mixed is not None and mixed not in sustained:
            rates[mixed] *= declared / rates[name]
            sources[mixed] += "; in proportion to the declared rate alone"
        rates[name], sources[name] = float(declared), "declared"
