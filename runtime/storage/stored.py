"""stored: what a manifest says of stored bytes: files, parts, units, parameters; and that all of it agrees.

unit         [ group a          | group b     ]      each element once in w, each trained one once in s
group        w [ part | part ]    s [ part   ]       of a narrow trained part in memory the master alone is stored
part         rows of chunks, one for each file       a file has blocks with a checksum each
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from annotated_types import Interval

from gs_compile.runtime.storage.grid import PAGE, Grid, lengths

FOLDER = "greedysnake-run"
FORMAT = 1
MAX_DIMENSIONS = 64
MAX_PATH = 4096
REST = "rest"  # the part of the tensors beside the tiers
RUN = re.compile(r"[0-9a-f]{8}")
# Names of extents, of a durable run with its name before
OURS = re.compile(r"(([0-9a-f]{8})-[0-9a-f]{4}-)?(rest|(dw|[sc]?[ws]|x)(\d+|e|h|t)[-_0-9a-z]*)(\.\d+)?")
LETTER = re.compile(r"[a-z]{1,8}")
SUMS = re.compile(r"(?:[0-9a-f]{16})*")
FOLDERS = re.compile(rf"{FOLDER}(-[0-9]+)?(\.[0-9]+)?")
WIDTHS = {
    16: "complex128",
    8: "float64 complex64 int64",
    4: "float32 int32",
    2: "float16 bfloat16 int16",
    1: "int8 uint8 bool",
}
ITEMSIZES = {name: nbytes for nbytes, names in WIDTHS.items() for name in names.split()}

T = TypeVar("T")


class FirstError:
    """Of a list with a million wrong entries the first is told, and the others are not looked at."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), "fail_fast": True}


Many = Annotated[tuple[T, ...], FirstError()]
Count = Annotated[int, Interval(ge=0, le=1 << 60)]
Unit = Annotated[int, Interval(ge=0, le=1 << 20)] | Literal["e", "h", "t"]


@dataclass(frozen=True)
class StoredFile:
    """One drive's share of a part. sums: of each block, 16 hex digits, one after the other."""

    folder: str
    name: str
    nbytes: Count
    sums: str


@dataclass(frozen=True)
class StoredPart:
    """`nbytes` of values, in `num_rows` rows of a chunk for each file. value: such as "s3a", or `REST`."""

    value: str
    nbytes: Count
    chunks: Many[Count]
    num_rows: Count
    files: Many[StoredFile]


@dataclass(frozen=True)
class StoredRange:
    """A `Part` of the placement: elements, and where they lived."""

    letter: str
    tier: Literal["device", "host", "ssd"]
    start: Count
    stop: Count


@dataclass(frozen=True)
class StoredGroup:
    """A `Group` of the placement."""

    letter: str
    when: Literal["early", "late", "never"]
    w: Many[StoredRange]
    s: Many[StoredRange]

    @property
    def numel(self) -> int:
        return sum(each.stop - each.start for each in self.w)


@dataclass(frozen=True)
class StoredUnit:
    """A `UnitPlacement`, and the type of the parameters."""

    unit: Unit
    dtype: str
    groups: Many[StoredGroup]
    itemsize: Count
    gradient_itemsize: Count
    state_itemsize: Count
    has_master: bool

    def numel(self, *when: str) -> int:
        return sum(group.numel for group in self.groups if not when or group.when in when)

    def parts(self) -> Iterator[tuple[str, int, bool]]:
        """The name and the least bytes of every part, and whether a commit needs it: a narrow copy follows from its
        master.
        """
        for group in self.groups:
            follows = self.has_master and group.when != "never"
            for each in group.w:
                nbytes = (each.stop - each.start) * self.itemsize
                yield f"w{self.unit}{each.letter}", nbytes, each.tier == "ssd" or not follows
            for each in group.s:
                yield f"s{self.unit}{each.letter}", (each.stop - each.start) * self.state_itemsize, True


@dataclass(frozen=True)
class StoredParameter:
    """Where a parameter is in the whole space of its unit, all ranks' shares together."""

    name: str
    unit: Unit
    offset: Count
    shape: Many[Count]
    trained: bool


@dataclass(frozen=True)
class StoredTensor:
    """A tensor beside the tiers, from `offset` of the part `REST` on: a parameter in memory, or its state."""

    name: str
    dtype: str
    shape: Many[Count]
    offset: Count


@dataclass(frozen=True)
class Manifest:
    """One commit of one rank. components: of the optimizer's state, the master aside; written: ISO 8601."""

    format: Count
    run: str
    step: Count
    num_skipped: Count
    written: str
    versions: dict[str, str]
    optimizer: str
    components: Many[str]
    groups: Many[dict[str, Any]]
    random: dict[str, str]
    states: dict[str, Any]
    user: Any
    plan: dict[str, Any]
    units: Many[StoredUnit]
    parameters: Many[StoredParameter]
    parts: Many[StoredPart]
    rest: Many[StoredTensor]
    rank: Count
    world: Annotated[int, Interval(ge=1, le=1 << 20)]

    @property
    def nbytes(self) -> int:
        """Of its files."""
        return sum(file.nbytes for file in self.files())

    def files(self) -> Iterator[StoredFile]:
        return chain.from_iterable(part.files for part in self.parts)


# Checked --------------------------------------------------------------------------------------------------------------


class Span(NamedTuple):
    start: int
    stop: int
    name: str


def check(manifest: Manifest) -> None:
    """Raise a ValueError that names the first entry that does not agree with the others."""
    _demand(manifest.format == FORMAT, "format", manifest.format, "is not", FORMAT)
    _demand(RUN.fullmatch(manifest.run), "run: not 8 hex digits")
    _demand(manifest.rank < manifest.world, "rank: of", manifest.world, "there is no", manifest.rank)
    _distinct("units", (unit.unit for unit in manifest.units))
    _distinct("parts", (part.value for part in manifest.parts))
    _distinct("parameters", (each.name for each in manifest.parameters))
    _distinct("rest", (each.name for each in manifest.rest))
    _distinct("files", ((file.folder, file.name) for file in manifest.files()))
    for unit in manifest.units:
        _check_unit(unit)
    for part in manifest.parts:
        _check_part(part, manifest.run)
    _check_parts(manifest)
    _check_parameters(manifest)


def _check_unit(unit: StoredUnit) -> None:
    name = f"unit {unit.unit}"
    wide = max(4, unit.itemsize)
    _demand("float" in unit.dtype and ITEMSIZES.get(unit.dtype) == unit.itemsize, name, "dtype and itemsize")
    _demand(unit.gradient_itemsize == wide and unit.state_itemsize in range(0, 64 * wide, wide), name, "itemsizes")
    _demand(unit.state_itemsize or not unit.has_master, name, "has a master, and no state")
    w, s = ([each for group in unit.groups for each in getattr(group, kind)] for kind in "ws")
    for letters in ([each.letter for each in found] for found in (w, s, unit.groups)):
        _distinct(name, letters)
        _demand(all(map(LETTER.fullmatch, letters)), name, "letters")
    _check_tiles(name, w, unit.numel())
    for group in unit.groups:
        has_state = unit.state_itemsize and group.when != "never"
        _check_tiles(f"{name}, state of group {group.letter}", group.s, group.numel if has_state else 0)


def _check_tiles(name: str, ranges: Iterable[StoredRange], numel: int) -> None:
    """That ranges make up the elements from 0 to `numel`."""
    end = 0
    for each in sorted(ranges, key=lambda each: each.start):
        _demand(each.start == end < each.stop, name, f"part {each.letter} begins at {each.start}, not at {end}")
        end = each.stop
    _demand(end == numel, name, f"{end} elements, not {numel}")


def _check_part(part: StoredPart, run: str) -> None:
    name, row = f"part {part.value}", sum(part.chunks)
    _demand(0 < part.nbytes <= part.num_rows * row, name, f"{part.nbytes} bytes in {part.num_rows} rows of {row}")
    _demand(len(part.files) == len(part.chunks), name, f"{len(part.files)} files for {len(part.chunks)} chunks")
    sizes = lengths(part.nbytes, part.chunks)
    for file, chunk, size in zip(part.files, part.chunks, sizes, strict=True):
        _demand(chunk % PAGE == 0 and file.nbytes == size, name, "its rows and the sizes of its files")
        named = OURS.fullmatch(file.name)
        _demand(named and named[2] == run, name, "name of a file")
        _demand(len(file.folder) <= MAX_PATH and file.folder.isprintable(), name, "folder")
        is_ours = FOLDERS.fullmatch(Path(file.folder).name) and Path(file.folder).is_absolute()
        _demand(is_ours and os.path.normpath(file.folder) == file.folder, name, "folder")
        is_summed = SUMS.fullmatch(file.sums) and len(file.sums) == 16 * len(Grid.of(size, chunk))
        _demand(is_summed, name, "sums")


def _check_parts(manifest: Manifest) -> None:
    """That there are the parts that the units and the rest need, and no others, as large as their elements."""
    parts = {part.value: part.nbytes for part in manifest.parts}
    for unit in manifest.units:
        for value, nbytes, is_needed in unit.parts():
            found = parts.pop(value, 0 if is_needed else nbytes)
            _demand(found >= nbytes, f"part {value}: {found} bytes, and its elements take {nbytes}")
    spans = []
    for each in manifest.rest:
        _demand(each.dtype in ITEMSIZES, "rest", each.name, "has an unknown dtype")
        spans.append(Span(each.offset, each.offset + _numel(each) * ITEMSIZES[each.dtype], each.name))
    _check_spans(REST, spans, parts.pop(REST, 0))
    _demand(not parts, "parts that are of no unit:", *sorted(parts)[:1])


def _check_parameters(manifest: Manifest) -> None:
    units = {unit.unit: unit for unit in manifest.units}
    num_trained = {unit: manifest.world * units[unit].numel("early", "late") for unit in units}
    spans: dict[int | str, list[Span]] = {unit: [] for unit in units}
    for each in manifest.parameters:
        _demand(each.unit in units, "parameter", each.name, "is of no unit")
        spans[each.unit].append(Span(each.offset, each.offset + _numel(each), each.name))
        is_trained = each.offset < num_trained[each.unit]
        _demand(each.trained == is_trained or not _numel(each), "parameter", each.name, "trained?")
    for name, unit in units.items():
        _check_spans(f"unit {name}", spans[name], manifest.world * unit.numel())


def _check_spans(name: str, spans: Iterable[Span], stop: int) -> None:
    """That no two overlap, but where one has two names, and all end in time."""
    found = sorted({each[:2]: each for each in spans if each.start < each.stop}.values())
    for one, other in pairwise([*found, Span(stop, stop, "its end")]):
        _demand(one.stop <= other.start, name, one.name, "reaches into", other.name)


def _numel(each: StoredParameter | StoredTensor) -> int:
    _demand(len(each.shape) <= MAX_DIMENSIONS, each.name, "has too many dimensions")
    return math.prod(each.shape)


def _distinct(name: str, entries: Iterable[object]) -> None:
    found = list(entries)
    _demand(len(set(found)) == len(found), name, "one stands twice")


def _demand(holds: object, *what: object) -> None:
    if not holds:
        raise ValueError(" ".join(map(str, what)))
