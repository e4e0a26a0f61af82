"""repair: bad blocks written anew, from bytes that have their checksum; nothing else is taken.

Bytes that may be the same are in another version of the file, which an earlier or later step has left, and, of
parameters that are rounded copies of their masters, in the masters.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_hexdigest

from gs_compile.cli.stored.blocks import Bad
from gs_compile.cli.stored.values import Values
from gs_compile.errors import StorageError
from gs_compile.runtime.formats import narrow
from gs_compile.runtime.storage import system
from gs_compile.runtime.storage.drive import Drive
from gs_compile.runtime.storage.grid import Grid
from gs_compile.runtime.storage.ssd import Memory, Transfer, as_bytes
from gs_compile.runtime.storage.stored import OURS


def repaired(values: Values, bad: Bad) -> bool:
    """Whether a bad block could be written anew; it is on the medium then."""
    if not bad.is_block:
        return False
    store = values.setting.store
    assert store is not None
    drive = next(each for each in store.drives if each.folder == Path(bad.file.folder))
    chunk = bad.part.chunks[bad.number]
    at = 16 * Grid.of(bad.file.nbytes, chunk).at(bad.start).number
    for found in (*_versions(drive, bad), *_rounded(values, bad)):
        if xxh3_64_hexdigest(found.data) == bad.file.sums[at : at + 16]:
            file = drive.adopt(bad.file.name, bad.file.nbytes, chunk, bad.file.sums)
            Transfer(drive.submit("write", file, found, bad.start, bad.part.value)).wait()
            drive.sync(file, bad.part.value).result()
            drive.leave(file)
            return True
    return False


def _versions(drive: Drive, bad: Bad) -> Iterator[Memory]:
    """The same block in the files of other versions."""
    label = _label(bad.file.name)
    for name in sorted(path.name for path in drive.folder.iterdir()):
        if name != bad.file.name and OURS.fullmatch(name) and _label(name) == label:
            with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
                fd = system.open_file(name, os.O_RDONLY | os.O_NONBLOCK, drive.own.fd)
                opened.callback(os.close, fd)
                found = np.empty(bad.stop - bad.start, np.uint8)
                if system.preadv(fd, found, bad.start) == len(found):
                    yield found


def _label(name: str) -> str:
    """Of a part: what the names of its versions, copies and shadow copies have in common."""
    named = OURS.fullmatch(name)
    return re.sub("^[sc](?=[ws])", "", named[3]) if named else ""


def _rounded(values: Values, bad: Bad) -> Iterator[Memory]:
    """The block of parameters as their masters give it, where these are sound."""
    of_part = (
        (unit, each)
        for unit in values.placement.units
        for group in (unit.trained() if unit.has_master else ())
        for each in group.w
        if bad.part.value == f"w{unit.unit}{each.letter}"
    )
    for unit, part in of_part:
        first, last = (part.start + at // unit.itemsize for at in bad.range)
        with contextlib.suppress(StorageError):
            masters, dtype = values.masters(unit, first, last), values.setting.dtype(unit.unit)
            yield from map(as_bytes, (narrow(masters, dtype), masters.to(dtype)))  # format 1 has ties to even
