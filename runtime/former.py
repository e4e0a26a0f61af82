"""former: the last commit of a former run, read like the homes of a run; and units as manifests have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gs_compile.placement.placement import Layout, Placement
from gs_compile.placement.units import Group, Part, UnitPlacement
from gs_compile.program.ir import Unit, Value
from gs_compile.runtime.coordinators import Setting
from gs_compile.runtime.formats import Types
from gs_compile.runtime.homes import Homes
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.spans import Slice, encoded_slice
from gs_compile.runtime.storage.store import Store
from gs_compile.runtime.storage.stored import Manifest, StoredGroup, StoredParameter, StoredRange, StoredUnit
from gs_compile.runtime.stream import device_of


class FormerHomes(Homes):
    """The parts of the last commit of a store's former run, for reading only.

    A trained parameter may not be stored if its master is: then the master is read.
    """

    def __init__(self, store: Store, ranks: Ranks | None) -> None:
        assert store.former is not None, "there was no run before"
        units = [unit_of(each) for each in store.former.units]
        placement = Placement(tuple(units), Layout(separate=True, world=store.former.world))
        types = {each.unit: types_in(each) for each in store.former.units}
        super().__init__(Setting(placement, types, store, device_of(torch.device("cpu")), ranks))
        self.spans = {each.name: _span(each, types[each.unit]) for each in store.former.parameters}
        self._store = store

    def at_home(self, value: Value) -> Any:
        return self._store.adopt(value._replace(tier=None).name)


def _span(stored: StoredParameter, types: Types) -> Slice:
    shape = tuple(stored.shape)
    state: dict[str, Any] = {"components": tuple(stored.components), "second": stored.second}
    if not stored.dtype:
        return Slice(stored.unit, stored.offset, shape, **state)
    dtype: torch.dtype = getattr(torch, stored.dtype)
    if stored.codec:
        return encoded_slice(stored.unit, stored.offset, shape, dtype, stored.codec, types.parameter.itemsize)
    return Slice(stored.unit, stored.offset, shape, dtype, types.width(dtype), **state)


def alike(
    former: Manifest,
    placement: Placement,
    types: Mapping[Unit, Types],
    parameters: Sequence[StoredParameter],
    folders: Sequence[Path],
) -> frozenset[str]:
    """The names of the stored parts that can stay in their files: the units are laid out the same, and the files are in
    these folders.
    """
    same = {each.unit for each in {*former.units} & {*stored_units(placement, types)}}
    there, here = ({replace(each, missed=0) for each in found} for found in (former.parameters, parameters))
    moved = {each.unit for each in there ^ here}
    named = {
        value._replace(tier=None).name
        for unit in placement.units
        if unit.unit in same - moved
        for value in unit.parts()
    }
    names = [str(each) for each in folders]
    return frozenset(named & {each.value for each in former.parts if [file.folder for file in each.files] == names})


def unit_of(stored: StoredUnit) -> UnitPlacement:
    groups = tuple(
        Group(each.letter, each.when, tuple(map(_part, each.w)), tuple(map(_part, each.s))) for each in stored.groups
    )
    sizes = {name: getattr(stored, name) for name in ("itemsize", "gradient_itemsize", "state_itemsize", "has_master")}
    numels = (stored.numel("early", "late"),), (stored.numel("never"),)
    return UnitPlacement(stored.unit, *numels, **sizes, groups=groups)


def types_in(stored: StoredUnit) -> Types:
    return Types(getattr(torch, stored.dtype), tuple(getattr(torch, each) for each in stored.state))


def _part(stored: StoredRange) -> Part:
    return Part(stored.letter, stored.tier, stored.start, stored.stop)


def stored_units(placement: Placement, types: Mapping[Unit, Types]) -> Iterator[StoredUnit]:
    """The inverse of `unit_of`, for all units."""
    for unit in placement.units:
        sizes = unit.itemsize, unit.gradient_itemsize, unit.state_itemsize
        found = types[unit.unit]
        dtype, *state = (str(each).removeprefix("torch.") for each in (found.parameter, *found.state))
        groups = (StoredGroup(each.letter, each.when, _ranges(each.w), _ranges(each.s)) for each in unit.groups)
        yield StoredUnit(unit.unit, dtype, tuple(groups), *sizes, unit.has_master, tuple(state))


def _ranges(parts: Sequence[Part]) -> tuple[StoredRange, ...]:
    return tuple(StoredRange(each.letter, each.tier, each.start, each.stop) for each in parts)
