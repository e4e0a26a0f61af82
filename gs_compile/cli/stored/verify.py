"""verify: compare every block of a commit with its checksum, and say which parameters are in bad ones.

Drives are read in parallel, each by its own threads, a few blocks ahead: only these blocks take memory.
"""

from __future__ import annotations

import mmap
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gs_compile.cli.stored.runs import found_in, look
from gs_compile.cli.stored.values import Values, unchanged
from gs_compile.errors import CorruptionError, StorageError
from gs_compile.machine import format_bytes
from gs_compile.planner.summary import table
from gs_compile.runtime.storage.drive import Drive
from gs_compile.runtime.storage.grid import BLOCK
from gs_compile.runtime.storage.movers import Transfer
from gs_compile.runtime.storage.ssd import THREADS, Memory
from gs_compile.runtime.storage.stored import Manifest, StoredFile, StoredPart

CHANGED = "not the bytes that were written"
AHEAD = THREADS  # blocks under way on a drive
MOST_NAMES = 4  # in a table
HEADINGS = ("file", "offset", "bytes", "unit", "parameters", "found")


@dataclass(frozen=True)
class Bad:
    """Bytes of a file of a part that differ from its commit: a block, or all if the file cannot be opened.

    number: of the file in its part; parameters: the names of those with elements there.
    """

    part: StoredPart
    number: int
    start: int
    stop: int
    reason: str
    is_block: bool = True
    parameters: Sequence[str] = ()

    @property
    def file(self) -> StoredFile:
        return self.part.files[self.number]

    @property
    def range(self) -> tuple[int, int]:
        """Where its bytes start and stop in the part. (A block is in one chunk; a file has a chunk of every row.)"""
        if not self.is_block:
            return 0, self.part.nbytes
        chunks = self.part.chunks
        row, inside = divmod(self.start, chunks[self.number])
        start = row * sum(chunks) + sum(chunks[: self.number]) + inside
        return start, start + self.stop - self.start

    def as_dict(self) -> dict[str, Any]:
        named = re.fullmatch("[ws]([0-9]+|[eht])[a-z]+", self.part.value)
        place = {"file": str(Path(self.file.folder) / self.file.name), "offset": self.start}
        found = {"nbytes": self.stop - self.start, "reason": self.reason, "unit": named[1] if named else ""}
        return {**place, **found, "parameters": list(self.parameters)}


def verify(directory: Path) -> list[dict[str, Any]]:
    """The bad blocks of each run in a directory.

    Raises StorageLockedError if a process uses one, ManifestError if a commit cannot be read.
    """
    runs: dict[str, Path] = {}
    for each in found_in(directory):
        for commit in each.known[:1]:
            runs.setdefault(commit.run, each.folder)
    reports: list[dict[str, Any]] = []
    for folder in runs.values():  # each is looked at again, as it may have changed
        for place in range(len(look(folder).known)):
            find = partial(_commit_at, folder, place)
            with unchanged(find(), find) as found:
                reports += map(_verified, found)
    return reports


def _commit_at(folder: Path, place: int) -> list[Manifest]:
    return look(folder).known[place : place + 1]


def _verified(values: Values) -> dict[str, Any]:
    begin = time.perf_counter()
    bad = bad_blocks(values)
    seconds = time.perf_counter() - begin
    facts = {name: getattr(values.commit, name) for name in ("run", "step", "nbytes")}
    return {**facts, "seconds": seconds, "bad": [each.as_dict() for each in bad]}


def bad_blocks(values: Values) -> list[Bad]:
    """All bad blocks in the files of a commit."""
    store = values.setting.store
    assert store is not None
    with ThreadPoolExecutor(len(store.drives) or 1, "greedysnake-verify") as pool:
        found = pool.map(lambda drive: list(_bad_on(drive, values.commit)), store.drives)
        bad = [each for of_drive in found for each in of_drive]
    return [replace(each, parameters=values.names_at(each.part.value, *each.range)) for each in bad]


def _bad_on(drive: Drive, commit: Manifest) -> Iterator[Bad]:
    memories = [np.frombuffer(mmap.mmap(-1, BLOCK), np.uint8) for _ in range(AHEAD)]
    for part in commit.parts:
        for number, file in enumerate(part.files):
            if Path(file.folder) == drive.folder:
                yield from _bad_in(drive, part, number, memories)


def _bad_in(drive: Drive, part: StoredPart, number: int, memories: Sequence[Memory]) -> Iterator[Bad]:
    stored = part.files[number]
    try:
        file = drive.adopt(stored.name, stored.nbytes, part.chunks[number], stored.sums)
    except StorageError as error:
        yield Bad(part, number, 0, stored.nbytes, error.strerror or str(error), is_block=False)
        return
    under_way = deque[tuple[int, int, Transfer]]()

    def finish() -> Iterator[Bad]:
        start, stop, transfer = under_way.popleft()
        try:
            transfer.wait()
        except CorruptionError:
            yield Bad(part, number, start, stop, CHANGED)
        except StorageError as error:
            yield Bad(part, number, start, stop, error.strerror or str(error))

    for index, (start, stop) in enumerate(file.grid.cut(0, stored.nbytes)):
        if len(under_way) == AHEAD:
            yield from finish()
        memory = memories[index % AHEAD][: stop - start]
        under_way.append((start, stop, drive.transfer("read", file, memory, start, part.value).begin()))
    while under_way:
        yield from finish()
    drive.leave(file)


# In words -------------------------------------------------------------------------------------------------------------


def words(report: dict[str, Any]) -> str:
    """A report in words."""
    rate = format_bytes(int(report["nbytes"] / report["seconds"]))
    told = f"run {report['run']}, step {report['step']}: {format_bytes(report['nbytes'])} read, {rate}/s"
    if not report["bad"]:
        return told
    cells = [
        list(map(str, (*list(row.values())[:2], row["nbytes"], row["unit"], _names(row), row["reason"])))
        for row in report["bad"]
    ]
    return "\n".join([told, "bad:", table(HEADINGS, cells, right=("offset", "bytes"))])


def _names(row: dict[str, Any]) -> str:
    """The first of the parameters, and the number of further ones."""
    names = row["parameters"]
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
