"""commits: steps that survive their process. No file that a commit names is written until the next commit is made.

A part on SSD has one file more than it has contents: its own, and its shadow copy's if it has one. A part in memory has
a copy on SSD with two files. The file of a write is chosen when the write is issued, in the order of the program: one
that neither the last commit nor a content is in. A commit takes the contents at the moment when it is issued.

    step 7     s3a.ssd is in s3-a.0    the commit of step 7 names s3-a.0
    step 8     s3a.ssd is in s3-a.1    s3-a.0 stays as it is until the commit of step 8 is made
    step 9     s3a.ssd is in s3-a.0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial

import torch

from gs_compile.placement.kinds import nbytes_of
from gs_compile.program.ir import COPIES, SHADOWS, Op, Value, homed
from gs_compile.runtime.coordinators import Setting
from gs_compile.runtime.lanes import Ticket
from gs_compile.runtime.rest import Rest, Tensors
from gs_compile.runtime.slab import map_memory
from gs_compile.runtime.storage.store import Extent
from gs_compile.runtime.storage.stored import REST, Manifest
from gs_compile.runtime.values import ValueTable

BLOCK = 8 << 20  # bytes that are copied at a time
Snapshot = Callable[[], tuple[Manifest, Tensors]]


def part_of(value: Value) -> Value:
    """The part that is committed, wherever it and its copies are."""
    return homed(value)._replace(tier=None)


class Commits:
    """The files of all parts of a durable run.

    snapshot: takes everything else that a commit has, as it is now: the manifest without parts, whose files are known
        later, and the tensors that are beside the tiers. Set before the first step.
    alike: names of parts of the resumed run that stay in their files.
    """

    def __init__(self, setting: Setting, values: ValueTable, alike: Set[str]) -> None:
        self.setting = setting
        self.values = values
        self.snapshot: Snapshot | None = None
        self.under_way: Ticket | None = None  # the commit that was issued last
        self.copies: dict[Value, tuple[Value, Value]] = {  # of a part in memory: its home, and its copy
            part_of(home): (home, copy)
            for unit in setting.placement.units
            for group in unit.groups
            for home, copy in unit.copies(group)
        }
        self._stale = set(self.copies)  # those whose copy is older than what is at home
        self.alike = alike
        self.takes_up = bool(alike)  # for as long as values come from the former run
        assert setting.store is not None, "commits need storage"
        self.store = setting.store
        self._rest = Rest(self.store)
        self._files: dict[Value, list[Extent]] = {}  # by part
        self._issued: dict[Value, Extent] = {}  # of the commit that was issued last
        self._made: Mapping[Value, Extent] = {}  # of the commit that was made last

    # Files -----------------------------------------------------------------------------------------------------------

    def define(self, value: Value) -> Extent:
        """The first file of a part at home on SSD, of its shadow copy, or of the copy of one in memory."""
        part, name = part_of(value), f"{value.kind}{value.unit}-{value.part}"
        new: list[Extent] = []
        if part.name in self.alike and value.kind not in SHADOWS.values():
            new.append(self.store.adopt(part.name, goes_on=True))
            self._issued[part] = new[0]
            self._stale.discard(part)
        while len(new) < self.setting.placement.num_extents(value):
            new.append(self.store.allocate(f"{name}.{len(new)}", nbytes_of(self.setting.placement, value)))
        self._files.setdefault(part, []).extend(new)
        return new[0]

    def has(self, value: Value) -> bool:
        """Whether a part at home is a file of the former run, which has its values already."""
        former = self._issued.get(part_of(value)) if self.takes_up else None
        return former is not None and self.values.contents.get(value) is former

    def to_change(self, value: Value) -> torch.Tensor | Extent | None:
        """The content of a part at home that is about to be changed between steps: a committed file is copied first.

        None: nothing needs to be written, because the file of the former run has these values.
        """
        now: torch.Tensor | Extent = self.values.contents[value]
        if not isinstance(now, Extent):
            if self.takes_up and part_of(value) in self._issued:
                return now  # its copy has the values
            self._stale.update({part_of(value)} & self.copies.keys())
        elif now is self._issued.get(part_of(value)):
            if self.takes_up:
                return None
            before, now = now, self._uncommitted(value)
            for start in range(0, now.nbytes, BLOCK):
                block = map_memory(min(BLOCK, now.nbytes - start))
                before.read(block, start).wait()
                now.write(block, start).wait()
            self.values.contents[value] = now  # and not before, as the copy may fail
        return now

    def writable(self, value: Value) -> Extent:
        """The file for a new content of a value; it is the value's from now on."""
        now = self.values.contents[value] = self._uncommitted(value)
        return now

    def _uncommitted(self, value: Value) -> Extent:
        """A value's file, or if a commit names that, another file of its part."""
        part, now = part_of(value), self.values.contents[value]
        if now is self._issued.get(part):
            taken = [now, *(self.values.contents.get(holder) for holder in _holders(part))]
            now = next(each for each in self._files[part] if each not in taken)
        assert isinstance(now, Extent)
        return now

    # Commits ---------------------------------------------------------------------------------------------------------

    def note(self, op: Op) -> None:
        """An operation is about to be issued: choose the files that it writes, and note which copies become stale."""
        for value in op.into:
            part = part_of(value)
            if value.tier == "ssd" and part in self._files:
                self.writable(value)
            if value.kind in COPIES.values():
                self._stale.discard(part)
            elif op.verb == "update" and part in self.copies:
                self._stale.add(part)

    def stale(self) -> list[tuple[Value, Value]]:
        """The parts in memory that the next commit has to write itself, each with its copy: frozen ones, and what was
        changed between steps.
        """
        return [self.copies[part] for part in sorted(self._stale, key=str)]

    def seal(self) -> Callable[[], None]:
        """Issue a commit of all parts as they are now. Returns the rest of its work, for the lane `ssd_write`."""
        assert self.snapshot is not None, "there is nothing to commit yet"
        writes = [(self.writable(copy), self.values.contents[home]) for home, copy in self.stale()]
        self._stale.clear()
        self._issued = {part: self._current(part) for part in self._files}
        manifest, rest = self.snapshot()
        old: Sequence[Extent] = ()
        if any(each.nbytes for each in rest.values()):
            extent, content, old = self._rest.take(rest)
            self._issued[Value(REST, tier=None)] = extent
            writes.append((extent, content))
        return partial(self._make, manifest, writes, self._issued, old)

    def _current(self, part: Value) -> Extent:
        found = (self.values.contents.get(each) for each in _holders(part) if each.kind not in SHADOWS.values())
        return next(each for each in found if isinstance(each, Extent))

    def _make(
        self,
        manifest: Manifest,
        writes: list[tuple[Extent, torch.Tensor]],
        issued: Mapping[Value, Extent],
        old: Sequence[Extent],
    ) -> None:
        for extent, content in writes:
            extent.write(content.cpu()).wait()
        changed = [extent for part, extent in issued.items() if self._made.get(part) is not extent]
        together = self.setting.ranks.commit_together if self.setting.ranks else None

        def whole() -> Manifest:
            return replace(manifest, parts=tuple(extent.stored(part.name) for part, extent in issued.items()))

        self.store.commit(changed, whole, together, old)
        self._made = issued


def _holders(part: Value) -> tuple[Value, Value, Value]:
    """The values of a part that are on SSD: it itself, its shadow copy, its copy."""
    on_ssd = part._replace(tier="ssd")
    return on_ssd, on_ssd._replace(kind=SHADOWS[part.kind]), on_ssd._replace(kind=COPIES[part.kind])
