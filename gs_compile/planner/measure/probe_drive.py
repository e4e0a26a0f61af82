"""probe_drive: what the drives of a run give, through the store and by requests such as a run makes.

    ssd_read     one request of a unit's size after the other, each cut into blocks that are in flight together
    ssd_write    the same; beside the first lane, or alone

Drives with a write cache are fast until it is full. Everything is written once before anything is timed, which fills a
small cache; one of a hundred gigabytes outlasts any probe, and its drive's rate has to be declared.
"""

from __future__ import annotations

import errno
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import torch

from gs_compile.errors import StorageFullError
from gs_compile.machine import free_storage
from gs_compile.planner.measure.rates import Figure, Load, Work, medians, new_lane, pair
from gs_compile.runtime.slab import map_memory
from gs_compile.runtime.ssd import PAGE, Transfer
from gs_compile.runtime.store import Extent, Store
from gs_compile.runtime.stream import Device

REQUEST_NBYTES = 64 << 20  # as large as a small layer's part: many blocks, and short beside a round
NUM_REQUESTS = 8  # of each direction: half a gigabyte each
SMALL_FILE_SHARE = 0.25  # of what is free, where that is less
NUM_ROUNDS = 5
NUM_LATENCIES = 40


def drive_rates(
    storage: Sequence[Path], seconds: float, products: Work, device: Device | None = None
) -> dict[str, Figure]:
    """The profile's figures of the drives together.

    `products` is computation on the thread that asks, whose speed beside transfers is measured too. Memory is mapped as
    for a run on `device`: huge pages are read into faster than small ones (benchmarks/ssd.py --pages).

    Takes about `seconds`, longer where one request does. Raises the store's errors: a directory that cannot be written,
    that another run uses, that is full. Leaves nothing behind.
    """
    begin = time.perf_counter()
    with _made_directories_removed(storage), Store(storage) as store:
        request_nbytes = _request_nbytes(storage)
        read, write = (store.allocate(verb, request_nbytes * NUM_REQUESTS) for verb in ("read", "write"))
        sizes = request_nbytes, request_nbytes, PAGE
        into, source, page = (map_memory(nbytes, device).random_() for nbytes in sizes)  # for drives that compress
        num_requests = _fill((read, write), source, seconds / 4)
        offsets = [index * request_nbytes for index in range(num_requests)]
        latency = _latency(read, page, offsets[-1] + request_nbytes)
        works = _requests(read.read, into, offsets), _requests(write.write, source, offsets)
        how = f"requests of {request_nbytes >> 20} MiB, up to {NUM_ROUNDS} rounds"
        figures = _lane_rates(works, products, seconds - (time.perf_counter() - begin), how)
    return figures | {"request_seconds": Figure(latency, f"{NUM_LATENCIES} reads of {PAGE} bytes")}


def _lane_rates(works: tuple[Work, Work], products: Work, seconds: float, how: str) -> dict[str, Figure]:
    """Reads and writes, each alone, both, and beside `products`."""
    with closing(new_lane("ssd_read")) as reader, closing(new_lane("ssd_write")) as writer:
        both: Load = dict(zip((reader, writer), works, strict=True))
        alone_read, alone_write, mixed, compute, all_three = medians(
            [{reader: works[0]}, {writer: works[1]}, both, {None: products}, {None: products, **both}],
            seconds,
            NUM_ROUNDS,
        )
    compute_speed = min(1.0, all_three[None] / compute[None])
    transfer_speed = min(1.0, sum(all_three[lane] / mixed[lane] for lane in both) / 2)
    return {
        **pair("ssd_read_bytes_per_second", alone_read[reader], mixed[reader], how),
        **pair("ssd_write_bytes_per_second", alone_write[writer], mixed[writer], how),
        "compute_transfer_speed": Figure(compute_speed, "fp32 products beside reads and writes, and alone"),
        "transfer_compute_speed": Figure(transfer_speed, "reads and writes beside fp32 products, and alone"),
    }


def room_nbytes(storage: Sequence[Path]) -> int:
    """The bytes that extents over all directories may take, as if their drives were equally fast.

    Directories of one filesystem share its room, and the directory with the least room binds.
    """
    places = [existing(directory) for directory in storage]
    devices = [place.stat().st_dev for place in places]
    rooms = [free_storage(place) // devices.count(device) for place, device in zip(places, devices, strict=True)]
    return min(rooms) * len(rooms)


def existing(directory: Path) -> Path:
    """The directory, or the nearest above it that is there: what it is made in."""
    place = directory.absolute()
    while not _is_there(place):
        place = place.parent
    return place


def _is_there(path: Path) -> bool:
    """Whether a path exists and can be read; the store raises the error where it cannot."""
    try:
        path.stat()
    except OSError:
        return False
    return True


@contextmanager
def _made_directories_removed(storage: Sequence[Path]) -> Iterator[None]:
    """Remove the directories that the store had to make."""
    missing = [path for each in storage for path in (each, *each.parents) if not _is_there(path)]
    try:
        yield
    finally:
        for path in sorted(missing, key=lambda path: -len(path.parts)):
            with suppress(OSError):  # two directories had it in common, or it was never made, or someone moved in
                path.rmdir()


def _request_nbytes(storage: Sequence[Path]) -> int:
    """As large as a run's, or what leaves most of a small filesystem free."""
    room = room_nbytes(storage)
    nbytes = min(REQUEST_NBYTES, int(room * SMALL_FILE_SHARE) // (2 * NUM_REQUESTS)) // PAGE * PAGE
    if nbytes < PAGE:
        raise StorageFullError(
            errno.ENOSPC, f"{room} bytes are free: make room or choose another storage=", str(storage[0])
        )
    return nbytes


def _fill(extents: Sequence[Extent], memory: torch.Tensor, seconds: float) -> int:
    """Write the extents side by side, request by request, for as long as there is time: how many requests each has."""
    deadline = time.perf_counter() + seconds
    for index in range(NUM_REQUESTS):
        for extent in extents:
            extent.write(memory, index * memory.nbytes).wait()
        if time.perf_counter() > deadline:
            break
    return index + 1


def _latency(extent: Extent, page: torch.Tensor, nbytes: int) -> float:
    """Seconds of reading one page, at places all over the extent."""
    seconds = []
    for index in range(NUM_LATENCIES):
        begin = time.perf_counter()
        extent.read(page, index * (nbytes - PAGE) // NUM_LATENCIES // PAGE * PAGE).wait()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _requests(request: Callable[[torch.Tensor, int], Transfer], memory: torch.Tensor, offsets: Sequence[int]) -> Work:
    """One request after the other, all over the extent."""
    places = itertools.cycle(offsets)

    def one() -> float:
        request(memory, next(places)).wait()
        return memory.nbytes

    return one
