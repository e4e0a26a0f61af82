"""checked: the entries of a manifest agree with each other."""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from gs_compile.placement.shards import QUANTUM
from gs_compile.runtime.codecs import CODECS
from gs_compile.runtime.formats import EIGHT_BITS, state_itemsize
from gs_compile.runtime.storage.grid import PAGE, Grid, lengths
from gs_compile.runtime.storage.stored import (
    FOLDERS,
    OURS,
    REST,
    Manifest,
    StoredParameter,
    StoredPart,
    StoredRange,
    StoredTensor,
    StoredUnit,
)

MAX_DIMENSIONS = 64
MAX_PATH = 4096
RUN = re.compile(r"[0-9a-f]{8}")
LETTER = re.compile(r"[a-z]{1,8}")
SUMS = re.compile(r"(?:[0-9a-f]{16})*")
WIDTHS = {
    16: "complex128",
    8: "float64 complex64 int64",
    4: "float32 int32",
    2: "float16 bfloat16 int16",
    1: "int8 uint8 bool",
}
ITEMSIZES = {name: nbytes for nbytes, names in WIDTHS.items() for name in names.split()}


class NamedRange(NamedTuple):
    start: int
    stop: int
    name: str


def check(manifest: Manifest) -> None:
    """Raise a ValueError that names the first entry that does not agree with the others."""
    _demand(RUN.fullmatch(manifest.run), "run: not 8 hex digits")
    _demand(not manifest.together or RUN.fullmatch(manifest.together), "together: not 8 hex digits")
    _demand(manifest.rank < manifest.world, "rank: of", manifest.world, "there is no", manifest.rank)
    _distinct("units", (unit.unit for unit in manifest.units))
    _distinct("parts", (part.value for part in manifest.parts))
    _distinct("parameters", (each.name for each in manifest.parameters))
    _distinct("rest", (each.name for each in manifest.rest))
    _distinct("files", ((file.folder, file.name) for file in manifest.files()))
    members = defaultdict[int | str, list[StoredParameter]](list)
    for each in manifest.parameters:
        members[each.unit].append(each)
    for unit in manifest.units:
        _check_unit(unit)
        _check_state(unit, _num_moments(members[unit.unit], len(manifest.components)))
    for part in manifest.parts:
        _check_part(part, manifest.run)
    _check_parts(manifest)
    _check_parameters(manifest)


def _check_unit(unit: StoredUnit) -> None:
    name = f"unit {unit.unit}"
    wide = max(4, unit.itemsize)
    _demand("float" in unit.dtype and ITEMSIZES.get(unit.dtype) == unit.itemsize, name, "dtype and itemsize")
    _demand(unit.gradient_itemsize == wide, name, "itemsizes")
    w, s = ([each for group in unit.groups for each in getattr(group, kind)] for kind in "ws")
    for letters in ([each.letter for each in found] for found in (w, s, unit.groups)):
        _distinct(name, letters)
        _demand(all(map(LETTER.fullmatch, letters)), name, "letters")
    _check_tiles(name, w, unit.numel())
    for group in unit.groups:
        has_state = unit.state_itemsize and group.when != "never"
        _check_tiles(f"{name}, state of group {group.letter}", group.s, group.numel if has_state else 0)


def _num_moments(members: Sequence[StoredParameter], in_general: int) -> int:
    """Moments of each element of a unit with these parameters: as many as the one has that has most."""
    trained = [each for each in members if each.trained]
    return max((1 if each.second else len(each.components) or in_general for each in trained), default=in_general)


def _check_state(unit: StoredUnit, num_moments: int) -> None:
    name, wide = f"unit {unit.unit}", unit.gradient_itemsize
    _demand(unit.state_itemsize or not unit.has_master, name, "has a master, and no state")
    dtypes = [getattr(torch, each) for each in unit.state if each in ITEMSIZES]
    is_sized = len(dtypes) == len(unit.state) and unit.state_itemsize == state_itemsize(dtypes)
    _demand(is_sized, name, "itemsizes of its state")
    is_pair = unit.state[:1] == ("int16",)
    master, moments = (unit.state[:1], unit.state[1:]) if wide > unit.itemsize else ((), unit.state)
    _demand(len(moments) == num_moments, name, "components of its state")
    _demand(unit.has_master == bool(master and not is_pair), name, "its master")
    _demand(not is_pair or unit.dtype == "bfloat16", name, "its masters' halves")
    wides = {f"float{8 * wide}"}
    narrow = {"bfloat16", "int8", "uint8"}
    _demand({*moments} <= wides | narrow and (is_pair or {*master} <= wides), name, "dtypes of its state")
    cuts = (cut for group in unit.groups for each in (*group.w, *group.s) for cut in (each.start, each.stop))
    is_whole = EIGHT_BITS.isdisjoint(dtypes) or not any(cut % QUANTUM for cut in cuts)
    _demand(is_whole, name, "quanta of its state in 8 bits")


def _check_tiles(name: str, ranges: Iterable[StoredRange], numel: int) -> None:
    """Check that ranges make up the elements from 0 to `numel`."""
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
    """Check that there are the parts that the units and the rest need, and no others, as large as their elements."""
    parts = {part.value: part.nbytes for part in manifest.parts}
    for unit in manifest.units:
        for value, nbytes, is_needed in unit.parts():
            found = parts.pop(value, 0 if is_needed else nbytes)
            _demand(found >= nbytes, f"part {value}: {found} bytes, and its elements take {nbytes}")
    spans = []
    for each in manifest.rest:
        _demand(each.dtype in ITEMSIZES, "rest", each.name, "has an unknown dtype")
        spans.append(NamedRange(each.offset, each.offset + _numel(each) * ITEMSIZES[each.dtype], each.name))
    _check_spans(REST, spans, parts.pop(REST, 0))
    _demand(not parts, "parts that are of no unit:", *sorted(parts)[:1])


def _check_parameters(manifest: Manifest) -> None:
    units = {unit.unit: unit for unit in manifest.units}
    num_trained = {unit: manifest.world * units[unit].numel("early", "late") for unit in units}
    spans: dict[int | str, list[NamedRange]] = {unit: [] for unit in units}
    for each in manifest.parameters:
        _demand(each.unit in units, "parameter", each.name, "is of no unit")
        stop = each.offset + _num_taken(each, units[each.unit].itemsize)
        if each.second:
            stop += each.second
            _demand(each.trained and each.second % QUANTUM == 0, "parameter", each.name, "its second moments")
            _demand(stop <= each.offset + 2 * each.second, "parameter", each.name, "reaches into its second moments")
        spans[each.unit].append(NamedRange(each.offset, stop, each.name))
        is_trained = each.offset < num_trained[each.unit]
        _demand(each.trained == is_trained or not _numel(each), "parameter", each.name, "trained?")
    for name, unit in units.items():
        _check_spans(f"unit {name}", spans[name], manifest.world * unit.numel())


def _num_taken(parameter: StoredParameter, itemsize: int) -> int:
    """The elements of its unit that a parameter takes."""
    if parameter.codec:
        is_known = parameter.codec in CODECS and ITEMSIZES.get(parameter.dtype) and len(parameter.shape) > 1
        _demand(is_known and not parameter.trained, "parameter", parameter.name, "its codec")
        return CODECS[parameter.codec].nbytes(parameter.shape) // itemsize
    width, left = divmod(ITEMSIZES.get(parameter.dtype, 0), itemsize) if parameter.dtype else (1, 0)
    is_wide = parameter.dtype and parameter.trained
    is_alike = parameter.dtype == "float32" and width == 2 if is_wide else width and not left
    _demand(is_alike, "parameter", parameter.name, "its dtype in its unit")
    return width * _numel(parameter)


def _check_spans(name: str, spans: Iterable[NamedRange], stop: int) -> None:
    """Check that no two overlap, but where one has two names, and all end in time."""
    found = sorted({each[:2]: each for each in spans if each.start < each.stop}.values())
    for one, other in pairwise([*found, NamedRange(stop, stop, "its end")]):
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
