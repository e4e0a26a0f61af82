"""probe_drive: the rates of a run's drives, through the store and by requests such as a run makes.

    ssd_read     one request of a unit's size after the other, each cut into blocks that are in flight together
    ssd_write    the same; beside the first lane, or alone

Drives with a write cache are fast until it is full. Everything is written once before anything is timed, which fills a
small cache; one of a hundred gigabytes outlasts any probe, and its drive's rate has to be declared.
"""

from __future__ import annotations

import errno
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import permutations, product
from pathlib import Path
from typing import TypeAlias

import torch

from gs_compile.errors import StorageFullError
from gs_compile.machine import format_bytes, free_storage
from gs_compile.planner.measure.rates import Figure, Placed, Work, at_once, medians, new_lane, own_generator, pair
from gs_compile.runtime.slab import map_memory
from gs_compile.runtime.storage import system
from gs_compile.runtime.storage.folder import TO_BE
from gs_compile.runtime.storage.grid import PAGE
from gs_compile.runtime.storage.movers import Transfer
from gs_compile.runtime.storage.store import Extent, Store
from gs_compile.runtime.stream import Device

RatesBeside: TypeAlias = dict[tuple[str, ...], float]  # amounts a second of the first work, beside the others

REQUEST_NBYTES = 64 << 20  # as large as a small layer's part: many blocks, but much shorter than a round
NUM_REQUESTS = 8  # of each direction: half a gigabyte each
SMALL_FILE_SHARE = 0.25  # of the free bytes: requests take no more than this
NUM_ROUNDS = 5
NUM_LATENCIES = 24
SMALL_NBYTES = 8 << 20  # of a request that is too short for the rate: its blocks fill no queue for long


def drive_rates(
    storage: Sequence[Path], seconds: float, works: Mapping[str, Placed], device: Device | None = None
) -> dict[str, Figure]:
    """The profile's figures of the drives together.

    `works` is what a run does beside transfers, by its name in a profile (`probe.work_of`): how much each slows the
    other down is measured too. Memory is mapped as for a run on `device`: huge pages are read into faster than small
    ones (benchmarks/ssd.py --pages).

    Takes about `seconds`, longer if one request does. Raises the store's errors: a directory that cannot be written,
    that another run uses, that is full. Leaves nothing behind.
    """
    begin = time.perf_counter()
    with _made_directories_removed(storage), Store(storage) as store:
        request_nbytes = _request_nbytes(storage)
        store.reserve(2 * NUM_REQUESTS * request_nbytes)
        sizes = request_nbytes, request_nbytes, PAGE
        generator = own_generator()  # not of zeros, for drives that compress
        into, source, page = (map_memory(nbytes, device).random_(generator=generator) for nbytes in sizes)
        read, write = _filled(store, source, seconds / 4)
        first_byte = _read_seconds(store, page)
        reads, writes = [each.read for each in read], [each.write for each in write]
        requests = {
            "read": _requests(reads, into),
            "small read": _requests(reads, into[:SMALL_NBYTES]),
            "write": _requests(writes, source),
        }
        rates = _rates(requests, works, seconds - (time.perf_counter() - begin))
    return _figures(rates, works, f"requests of {request_nbytes >> 20} MiB, up to {NUM_ROUNDS} rounds") | {
        "request_seconds": _request_seconds(rates, min(SMALL_NBYTES, request_nbytes), first_byte)
    }


def _rates(requests: Mapping[str, Work], works: Mapping[str, Placed], seconds: float) -> RatesBeside:
    """Reads and writes: each alone, beside each other, and beside each of `works`; small reads beside computation.

    These are timed alone after reads: after writes, the host of a virtual machine may be busy with them for some time.
    """
    with closing(new_lane("ssd_read")) as reader, closing(new_lane("ssd_write")) as writer:
        lanes = {"read": reader, "small read": reader, "write": writer}
        placed: dict[str, Placed] = {name: (lanes[name], work) for name, work in requests.items()}
        placed |= works
        sets = [{"write"}, {"read", "write"}, *({each, "write"} for each in works)]
        sets += [{"read"}, *({each} for each in works), *({each, "read"} for each in works), {"small read", "compute"}]
        at_once(dict(works.values()), seconds / 10)  # the first ones are slow
        found = medians([dict(placed[name] for name in names) for names in sets], seconds * 0.9, NUM_ROUNDS)
    return {
        (name, *(names - {name})): rate[placed[name][0]]
        for names, rate in zip(sets, found, strict=True)
        for name in names
    }


def _request_seconds(rates: RatesBeside, nbytes: int, first_byte: float) -> Figure:
    """What a request takes beyond its bytes at the lane's rate, where the device computes meanwhile, as in a run.

    Beside computation on a CPU, reads of 8 MiB have four fifths of the rate of large ones (`benchmarks.ssd --sizes`).
    The simulator slows all of a request down there, so the figure is that of a lane alone.
    """
    speed = min(1.0, rates["read", "compute"] / rates["read",])
    beyond = nbytes * (speed / rates["small read", "compute"] - 1 / rates["read",])
    how = f"reads of {nbytes >> 20} MiB beside computation, less their bytes at the rate there, or of {PAGE} bytes"
    return Figure(max(first_byte, beyond), how)


def _figures(rates: RatesBeside, works: Mapping[str, Placed], how: str) -> dict[str, Figure]:
    speeds = {
        f"{name}_{other}_speed": Figure(min(1.0, rates[name, other] / rates[name,]), f"{name} beside {other} and alone")
        for pair_of in product(works, ("read", "write"))
        for name, other in permutations(pair_of)
    }
    return {
        **pair("ssd_read_bytes_per_second", rates["read",], rates["read", "write"], how),
        **pair("ssd_write_bytes_per_second", rates["write",], rates["write", "read"], how),
        **speeds,
    }


def room_nbytes(storage: Sequence[Path]) -> int:
    """The bytes that extents over all directories may take (`Store.reserve`). Directories of one file system share its
    room. Raises StorageError, as the store does, for a directory that is a file.
    """
    places = [existing(directory) for directory in storage]
    for place in itertools.filterfalse(Path.is_dir, places):
        with system.as_storage_error("open", place, TO_BE):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return sum({place.stat().st_dev: free_storage(place) for place in places}.values())


def existing(directory: Path) -> Path:
    """The directory, or the nearest one above it that exists, in which it will be made."""
    place = directory.absolute()
    while not os.access(place, os.F_OK):  # or is not accessible: then the store raises the error
        place = place.parent
    return place


@contextmanager
def _made_directories_removed(storage: Sequence[Path]) -> Iterator[None]:
    """Remove the directories that the store had to make."""
    missing = [path for each in storage for path in (each, *each.parents) if not os.access(path, os.F_OK)]
    try:
        yield
    finally:
        for path in sorted(missing, key=lambda path: -len(path.parts)):
            with suppress(OSError):  # two directories share it, or it was not made, or it is not empty
                path.rmdir()


def _request_nbytes(storage: Sequence[Path]) -> int:
    """The bytes of a request: as many as in a run, or fewer, so that most of a small file system stays free."""
    room = room_nbytes(storage)
    nbytes = min(REQUEST_NBYTES, int(room * SMALL_FILE_SHARE) // (2 * NUM_REQUESTS)) // PAGE * PAGE
    if nbytes < PAGE:
        raise StorageFullError(
            errno.ENOSPC, f"{format_bytes(room)} are free: make room or choose another storage=", str(storage[0])
        )
    return nbytes


def _filled(store: Store, memory: torch.Tensor, seconds: float) -> tuple[list[Extent], list[Extent]]:
    """Extents of a request each, written as long as there is time: to read from and, side by side, to write to."""
    deadline = time.perf_counter() + seconds
    pairs: list[tuple[Extent, Extent]] = []
    while not pairs or (len(pairs) < NUM_REQUESTS and time.perf_counter() < deadline):
        read, write = (store.allocate(f"{verb}{len(pairs)}", memory.nbytes) for verb in ("read", "write"))
        pairs.append((read, write))
        for extent in pairs[-1]:
            extent.write(memory).wait()
    return [read for read, _ in pairs], [write for _, write in pairs]


def _read_seconds(store: Store, memory: torch.Tensor) -> float:
    """Of one request that reads so many bytes, with nothing before and behind it."""
    extents = [store.allocate(f"{memory.nbytes} bytes, {index}", memory.nbytes) for index in range(NUM_REQUESTS)]
    for extent in extents:
        extent.write(memory).wait()
    seconds = []
    for extent in itertools.islice(itertools.cycle(extents), NUM_LATENCIES):
        begin = time.perf_counter()
        extent.read(memory).wait()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _requests(requests: Sequence[Callable[[torch.Tensor], Transfer]], memory: torch.Tensor) -> Work:
    """One whole extent after the other."""
    places = itertools.cycle(requests)

    def one() -> float:
        next(places)(memory).wait()
        return memory.nbytes

    return one
