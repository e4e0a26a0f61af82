"""updates: what one update does to the parts of a unit, in host memory.

Elements are updated in pieces, independently of each other, with two exceptions: a matrix that is orthogonalized, and a
parameter with two moments in a unit that stores one for each element. All elements of such a one are in one update.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gs_compile.placement.shards import owned, place_of
from gs_compile.placement.units import Stretch, UnitPlacement
from gs_compile.program.ir import SHADOWS, Op, Unit, homed
from gs_compile.runtime.coordinators import Setting
from gs_compile.runtime.formats import Types, firsts, narrow, with_firsts
from gs_compile.runtime.kernels import CHUNK, Hyper, Rule
from gs_compile.runtime.muon import BLEND, DESCEND, Matrices, Orthogonalizer
from gs_compile.runtime.step_record import StepRecord
from gs_compile.runtime.values import flat_of


class Run(NamedTuple):
    """Trained elements of one param group, in a unit.

    With several ranks, `start` and `stop` are in this rank's shard; for a parameter that is orthogonalized, in the
    whole space. missed: the optimizer's steps before their first. is_idle: the model's loss does not depend on them
    in a way that torch differentiates. is_wide: two of them are one element of the parameter.
    matrices: of a parameter that is orthogonalized. second: as of `Slice`.
    """

    start: int
    stop: int
    group: int
    missed: int = 0
    is_idle: bool = False
    is_wide: bool = False
    matrices: Matrices | None = None
    second: int = 0


@dataclass(frozen=True)
class UpdateRules:
    """How units are updated: the rule for elements that are in no matrix, and each unit's runs of trained elements."""

    rule: Rule
    runs: Mapping[Unit, Sequence[Run]]

    def largest_nbytes(self, types: Mapping[Unit, Types]) -> int:
        """The bytes of the largest parameter that is orthogonalized, in the dtype of masters."""
        found = ((run, types[unit].wide) for unit, runs in self.runs.items() for run in runs if run.matrices)
        return max(((run.stop - run.start) * wide.itemsize for run, wide in found), default=0)


class Piece(NamedTuple):
    """One stretch of an update: its parameters and the components of its state, which change, and its gradient."""

    stretch: Stretch
    w: Tensor
    gradient: Tensor
    state: list[Tensor]


class Update:
    """One update of a unit: a group of its elements, whose parts are `targets`."""

    def __init__(
        self, setting: Setting, rules: UpdateRules, op: Op, reads: Sequence[Any], targets: Sequence[Tensor]
    ) -> None:
        self._rules = rules
        self._unit: UnitPlacement = setting.unit(op.into[0])
        self._group = self._unit.group_of(op.into[0])
        self._types = setting.types[self._unit.unit]
        self._flats = {(homed(value).kind, value.part): flat for value, flat in zip(op.into, targets, strict=True)}
        shadowed = zip(op.reads, reads, strict=True)
        self._kept = {(v.kind, v.part): flat for v, flat in shadowed if v.kind in SHADOWS}
        self._is_whole = not op.reads[0].part or setting.placement.keeps_gradient(self._unit)
        self._sums = flat_of(reads[0])
        self._rank, self._world = (ranks.rank, ranks.number) if (ranks := setting.ranks) else (0, 1)

    def run(self, record: StepRecord, orthogonalizer: Orthogonalizer) -> None:
        """Update all of it, as the record of the step says."""
        self._record, is_skipped = record, record.skipped  # once: it reads each norm so far from the device
        for run in self._runs():
            self._skipped = is_skipped or run.is_idle
            if run.matrices is not None:
                self._matrices(run, run.matrices, orthogonalizer)
            elif run.second:
                self._two_moments(run)
            else:
                for stretch in self._stretches(run, run.start, run.stop):
                    self._elements(run, self._opened(stretch))

    def _runs(self) -> Iterator[Run]:
        """The runs of the unit, cut at parameters that got no gradient in this step, or in others before it."""
        idle, missed = self._record.idle, self._record.missed
        own = (each for each in idle.union(missed) if each.unit == self._unit.unit)
        spans = sorted(own, key=lambda each: (each.offset, each.padded))  # one without elements is ahead of the next
        for planned in self._rules.runs[self._unit.unit]:
            run = planned._replace(is_idle=planned.is_idle and not self._is_woken(planned))
            at = run.start
            for span in spans:
                number, is_idle = missed.get(span, run.missed), run.is_idle or span in idle
                if run.start <= span.offset < run.stop and (number, is_idle) != (run.missed, run.is_idle):
                    if at < span.offset:
                        yield run._replace(start=at, stop=span.offset)
                    at = span.offset + span.padded
                    yield run._replace(start=span.offset, stop=at, missed=number, is_idle=is_idle)
            if at < run.stop:
                yield run._replace(start=at)

    def _is_woken(self, run: Run) -> bool:
        """Whether a gradient has come to the parameter of this run, although by the first call none would."""
        woken = [each for each in self._record.woken if each.unit == self._unit.unit]
        if not woken or run.start == run.stop:
            return False
        at = run.start if run.matrices else place_of(self._unit.pieces, self._rank, self._world, run.start)
        return any(each.offset <= at < each.offset + each.padded for each in woken)

    def _elements(self, run: Run, piece: Piece) -> None:
        """Update elements by the rule, independently of all others."""
        w, master, low = self._master(piece, run)
        if not self._skipped:
            hyper = self._hyper(self._record.hypers[run.group], piece)
            self._rules.rule.update(master, piece.gradient, piece.state, hyper, self._number(run), low)
        self._close(w, master, run)

    def _matrices(self, run: Run, matrices: Matrices, orthogonalizer: Orthogonalizer) -> None:
        """Update a parameter by its momentum, orthogonalized. If ranks share it, this rank's elements change."""
        shares = [list(owned(self._unit.pieces, rank, self._world, run.start, run.stop)) for rank in range(self._world)]
        opened = []
        for each in shares[self._rank]:
            for stretch in self._unit.stretches(self._group, each.local, each.local + each.numel):
                at = each.whole - run.start + stretch.unit_start - each.local
                piece = self._opened(stretch)
                opened.append((slice(at, at + stretch.numel), piece, *self._master(piece, run)))
        if not opened and self._world == 1:
            return
        numel = sum(each.numel for each in shares[self._rank])
        assert sum(piece.stretch.numel for _, piece, *_ in opened) == numel, "a part of a matrix"
        if not self._skipped:
            settings: Hyper = self._record.hypers[run.group]["matrices"]
            mixed = orthogonalizer.mixed(run.stop - run.start, self._types.wide)
            for where, piece, *_ in opened:
                hyper = self._hyper(settings, piece)
                BLEND.update(mixed[where], piece.gradient, piece.state[:1], hyper, self._number(run))
            if self._world > 1:
                places = [[(each.whole - run.start, each.numel) for each in own] for own in shares]
                orthogonalizer.gather(mixed, [[(at, at + size) for at, size in own] for own in places])
            width = 1 + run.is_wide
            whole = mixed[: width * torch.Size(matrices.shape).numel()].view(*matrices.shape, width)[..., 0]
            orthogonalizer.step(whole, matrices, settings)
            for where, _, _, master, low in opened:
                DESCEND.update(master, mixed[where], [], settings, self._number(run), low)
        for _, _, w, master, _ in opened:
            self._close(w, master, run)

    def _two_moments(self, run: Run) -> None:
        """Update a parameter whose second moments are stored as the moments of the elements that follow it."""
        pieces = [self._opened(each) for each in self._unit.stretches(self._group, run.start, run.stop)]
        assert sum(len(each.gradient) for each in pieces) in (0, run.stop - run.start), "a part of two moments"
        if not pieces:
            return
        moments = torch.cat([each.state[-1] for each in pieces])
        for stretch in self._stretches(run, run.start, run.start + run.second):
            piece, at = self._opened(stretch), stretch.unit_start - run.start
            both = [moments[first : first + stretch.numel] for first in (at, run.second + at)]
            self._elements(run, piece._replace(state=[*piece.state[:-1], *both]))
        for each in () if self._skipped else pieces:
            each.state[-1].copy_(moments[each.stretch.unit_start - run.start :][: each.stretch.numel])

    # Parts -----------------------------------------------------------------------------------------------------------

    def _opened(self, stretch: Stretch) -> Piece:
        """A stretch that is ready to be changed. What stays unchanged at home is copied to its shadow copy first."""
        w, state = _parameters(self._flats, stretch), self._components(self._flats, stretch)
        if stretch.s is not None and ("s", stretch.s.letter) in self._kept:
            for new, old in zip(state, self._components(self._kept, stretch), strict=True):
                new.copy_(old)
        if ("w", stretch.w.letter) in self._kept:
            w.copy_(_parameters(self._kept, stretch))
        return Piece(stretch, w, self._gradient(stretch), state)

    def _gradient(self, stretch: Stretch) -> Tensor:
        start = stretch.unit_start if self._is_whole else stretch.start
        return self._sums[start:][: stretch.numel]

    def _master(self, piece: Piece, run: Run) -> tuple[Tensor, Tensor, Tensor | None]:
        """The parameters; the masters to update, taken out of `piece.state` if they are there; and the narrow
        parameters that are rounded from these.
        """
        w = piece.w.view(self._types.wide) if run.is_wide else piece.w
        stored = piece.state.pop(0) if self._types.has_master else w
        if run.is_wide:
            return w, (with_firsts(w) if self._types.is_pair else stored), None
        return w, stored, w if self._types.has_master else None

    def _close(self, w: Tensor, master: Tensor, run: Run) -> None:
        """Make the parameters follow their masters, if the update has not done so."""
        if run.is_wide:
            w.copy_(firsts(master))
        elif self._skipped and self._unit.has_master:
            w.copy_(narrow(master, w.dtype))

    def _hyper(self, settings: Hyper, piece: Piece) -> Hyper:
        """The settings with the gradient's factor, and with the first element's place among the random numbers."""
        stream = zlib.crc32(str(self._unit.unit).encode())
        place = stream, place_of(self._unit.pieces, self._rank, self._world, piece.stretch.unit_start)
        return {**settings, "scale": self._record.factor, "place": place}

    def _number(self, run: Run) -> int:
        """The number of the step, among those of a parameter."""
        return self._record.number - run.missed

    def _components(self, flats: Mapping[tuple[str, str], Tensor], piece: Stretch) -> list[Tensor]:
        if piece.s is None:
            return []
        start, whole = piece.start - piece.s.start, flats["s", piece.s.letter]
        return self._types.components(whole, start, start + piece.numel)

    def _stretches(self, run: Run, start: int, stop: int) -> Iterator[Stretch]:
        """The group's elements of a run, in pieces that stay in the cache while they are copied and updated; if nothing
        is copied, in one piece.
        """
        most = CHUNK * torch.get_num_threads()
        for found in self._unit.stretches(self._group, start, stop):
            size = found.numel if not self._kept and not run.is_wide else most
            for at in range(0, found.numel, size):
                numel = min(size, found.numel - at)
                yield Stretch(found.w, found.s, found.start + at, found.unit_start + at, numel)


def _parameters(flats: Mapping[tuple[str, str], Tensor], piece: Stretch) -> Tensor:
    return flats["w", piece.w.letter][piece.unit_start - piece.w.start :][: piece.numel]
