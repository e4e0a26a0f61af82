"""optimizer: gradients, optimizer states and the updates, early and late (arXiv 2512.17570, sections 4.3 and 4.4).

The state of a part is one stretch of memory, component after component (the master first, where the parameters are
narrower), so that one read serves one update.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from gs_compile.placement.kinds import nbytes_of
from gs_compile.placement.shards import place_of
from gs_compile.placement.units import Group, Stretch, UnitPlacement
from gs_compile.program.ir import SHADOWS, Op, Unit, Value, homed
from gs_compile.runtime.coordinators import Setting, flat
from gs_compile.runtime.formats import firsts, narrow, with_firsts
from gs_compile.runtime.kernels import CHUNK, Rule, sum_of_squares
from gs_compile.runtime.lanes import Ticket
from gs_compile.runtime.spans import Binding
from gs_compile.runtime.storage.store import Extent
from gs_compile.runtime.stream import Reading
from gs_compile.runtime.values import Gradient, flat_of

Tensor = torch.Tensor

PIECE = 1 << 22  # elements whose squares are summed at once: 32 MiB in float64


@dataclass
class SharedNorm:
    """The sum of squares of a gradient that ranks share, and the sum of their losses.

    losses: this rank's, with the first gradient of a step; factor: of the gradient.
    """

    losses: Sequence[Reading] = ()
    factor: Tensor | None = None
    ticket: Ticket | None = None  # of the exchange
    arrived: Sequence[Reading] = ()

    def reading(self, index: int) -> float:
        assert self.ticket is not None
        self.ticket.wait()
        return self.arrived[index]()


@dataclass
class StepRecord:
    """What the updates of one step need, early and late: captured when its backward begins."""

    number: int  # of the optimizer's steps, from 1; of a parameter's own, without those that it has missed
    hypers: Sequence[Mapping[str, Any]]  # by param group
    max_grad_norm: float | None = None
    squares: dict[Unit | str, Reading] = field(default_factory=dict)  # of gradients, in the order of norms
    losses: Sequence[Reading] = ()
    loss_scale: float = 1.0  # in all gradients
    num_ranks: int = 1  # over which gradients are summed: they are those of the mean of the ranks' losses
    scale: float = 1.0  # that clips
    is_too_large: bool = False  # the norm, for float32
    adds: bool = False  # to the sums of backwards before it
    issued: list[tuple[Unit, int]] = field(default_factory=list)  # an update, and how many norms were there before it

    @property
    def grad_norm(self) -> float:
        """The norm of all gradients, before clipping; infinite where an element is not finite."""
        squares = [square() for square in self.squares.values()]
        finite = all(map(math.isfinite, squares))
        return math.sqrt(math.fsum(squares)) / (self.loss_scale * self.num_ranks) if finite else math.inf

    @property
    def factor(self) -> float:
        """What gradients are multiplied by in updates."""
        return self.scale / (self.loss_scale * self.num_ranks)

    @property
    def skipped(self) -> bool:
        """Whether nothing is updated: a loss, or a gradient so far, is not finite."""
        readings = (*self.losses, *self.squares.values())
        return self.is_too_large or not all(math.isfinite(reading()) for reading in readings)

    @property
    def is_loss_bad(self) -> bool:
        """Whether the loss itself is not finite."""
        return not all(math.isfinite(loss()) for loss in self.losses)

    @property
    def updated(self) -> list[Unit]:
        """The units that have been updated before it was known that the step is skipped."""
        finite = [math.isfinite(square()) for square in self.squares.values()]
        return [unit for unit, number in self.issued if all(finite[:number])]

    def share(self, unit: Unit, norm: SharedNorm, factor: Tensor | None) -> None:
        """Read the norm of a unit from an exchange, and from the first of a step whether any rank's loss is bad."""
        norm.factor = factor
        if self.squares.keys() <= {"resident"}:
            norm.losses, self.losses = self.losses, (partial(norm.reading, 1),)
        self.squares[unit] = partial(norm.reading, 0)

    def so_far(self) -> StepRecord:
        """What is known when an update is issued; what comes later does not change it."""
        return replace(self, squares=dict(self.squares))

    def clip(self) -> None:
        """Find what torch's clip_grad_norm_ would multiply by, in its float32; skip where a gradient is not finite."""
        norm = torch.tensor(self.grad_norm, dtype=torch.float32)
        self.is_too_large = not bool(norm.isfinite())
        if self.max_grad_norm is not None and not self.skipped:
            self.scale = min(1.0, (self.max_grad_norm / (norm + 1e-6)).item())

    @property
    def confirmed(self) -> bool:
        """Whether what was updated before the scale was known is what it should be."""
        return not self.skipped and self.scale == 1.0


class Run(NamedTuple):
    """Trained elements of one param group, in a unit.

    missed: the optimizer's steps before their first. is_wide: two of them are one of a parameter's.
    """

    start: int
    stop: int
    group: int
    missed: int = 0
    is_wide: bool = False


@dataclass(frozen=True)
class Recipe:
    """How a unit is updated: the rule, and of what each stretch of its trained elements is."""

    rule: Rule
    runs: Mapping[Unit, Sequence[Run]]


class OptimizerStep:
    """Gradients and optimizer states, and the updates."""

    def __init__(self, setting: Setting, recipe: Recipe) -> None:
        self.setting = setting
        self.recipe = recipe
        self._added: dict[Unit, frozenset[Any]] = {}  # the parameters that have sums, of gradients that are away

    def gradient(
        self, verb: str, value: Value, source: Any, memory: Tensor | None, bindings: Sequence[Binding]
    ) -> Gradient | Tensor | Extent:
        """Memory of a unit's gradient: nothing added yet, a part of it, or a sum on its way to another tier or back.

        What an alias names is in the memory of its source. Parts on the device are sums of several backwards.
        """
        setting, unit = self.setting, self.setting.unit(value)
        if isinstance(source, Gradient):
            self._added[unit.unit] = frozenset(source.added)
        if verb == "alias":
            whole = flat_of(source)
        elif value.tier == "ssd":
            return setting.extent(f"dw{unit.unit}", nbytes_of(setting.placement, value))
        elif value.tier == "host":
            return setting.part(value, memory)
        elif value.part:
            return setting.device.empty((unit.dw[value.part].numel,), setting.wide(unit.unit))
        else:
            whole = self._on_device(unit, setting.placement.world * unit.num_trained, memory)
        if value.tier != "device":
            return whole
        trained = [binding for binding in bindings if binding.trained]
        views = {binding.input: binding.gradient(whole) for binding in trained}
        widths = {binding.input: binding.place.width for binding in trained if binding.place.dtype}
        return Gradient(whole, views, () if verb == "zeros" else self._added[unit.unit], widths)

    def shard(self, value: Value, memory: Tensor | None) -> Tensor:
        """Memory of this rank's share of a gradient."""
        unit = self.setting.unit(value)
        return self._on_device(unit, unit.num_trained, memory)

    def _on_device(self, unit: UnitPlacement, numel: int, memory: Tensor | None) -> Tensor:
        """Elements of a gradient; `memory`: where the device's is the host's."""
        dtype = self.setting.wide(unit.unit)
        if self.setting.placement.separate:
            return self.setting.device.empty((numel,), dtype)
        return flat(memory, numel, dtype)

    def split(self, op: Op, gradient: Gradient | Tensor, targets: Sequence[Tensor]) -> None:
        """Copy the parts of a gradient off the device."""
        whole = flat_of(gradient)
        for value, target in zip(op.results, targets, strict=True):
            at = 0
            for part in self.setting.unit(value).dw[value.part].w:
                self.setting.device.copy(target[at : at + part.numel], whole[part.start : part.stop])
                at += part.numel

    def norm(self, op: Op, gradient: Gradient, sums: Sequence[Tensor], record: StepRecord) -> Reading:
        """The sum of squares of a complete gradient; where it is not finite, nothing is updated from then on.

        sums: what it is added to, and becomes.
        """
        unit = self.setting.unit(op.reads[0]).unit
        gradient.complete()
        self._add(op, gradient.flat, sums, record)
        if self.setting.device.has_own_memory:
            record.squares[unit] = self.setting.device.read(_square(gradient.flat))
        else:
            total = sum_of_squares(gradient.flat)
            record.squares[unit] = lambda: total
        return record.squares[unit]

    def _add(self, op: Op, flat: Tensor, sums: Sequence[Tensor], record: StepRecord) -> None:
        """Add what earlier backwards of the step have left in `sums`, if any has, to a gradient, and leave it there."""
        for value, total in zip(op.into, sums, strict=True):
            at = 0
            for part in self.setting.unit(value).dw[value.part].w:
                new, old = flat[part.start : part.stop], total[at : at + part.numel]
                if record.adds:
                    new.add_(old.to(new.device))
                old.copy_(new)
                at += part.numel

    def reduce_scatter(
        self, op: Op, gradient: Gradient, shard: Tensor, norm: SharedNorm, sums: Sequence[Tensor], record: StepRecord
    ) -> None:
        """This rank's share of the sum over all ranks, the sum of squares of the whole, and the sum of the losses.

        sums: as of `norm`.
        """
        unit, ranks, device = self.setting.unit(op.reads[0]), self.setting.ranks, self.setting.device
        assert ranks is not None
        if norm.factor is not None:
            gradient.scale(norm.factor)
        gradient.complete()
        for start, stop in unit.pieces:
            if start < unit.num_trained:
                ranks.reduce_scatter(shard[start:stop], gradient.flat[ranks.number * start : ranks.number * stop])
        self._add(op, shard, sums, record)
        square = _square(shard) if device.has_own_memory else torch.tensor(sum_of_squares(shard), dtype=torch.float64)
        losses = torch.tensor(sum(loss() for loss in norm.losses)).to(square)
        numbers = torch.stack([square / ranks.replicas, losses])  # each replica has a shard's square, and own losses
        ranks.all_reduce(numbers)
        norm.arrived = [device.read(number) for number in numbers.unbind()]

    def update(self, op: Op, reads: Sequence[Any], targets: Sequence[Tensor], record: StepRecord) -> None:
        """Update parts of a unit, in place."""
        unit, gradient = self.setting.unit(op.into[0]), reads[0]
        group = unit.group_of(op.into[0])
        flats = {(homed(value).kind, value.part): flat for value, flat in zip(op.into, targets, strict=True)}
        kept = {(v.kind, v.part): flat for v, flat in zip(op.reads, reads, strict=True) if v.kind in SHADOWS}
        is_whole = not op.reads[0].part or self.setting.placement.keeps_gradient(unit)
        sums = flat_of(gradient)
        size = CHUNK * torch.get_num_threads()
        mine = (ranks.rank, ranks.number) if (ranks := self.setting.ranks) else (0, 1)
        skipped = record.skipped  # asks the device for each norm so far
        for piece, run in self._pieces(unit, group, size, whole=not kept):
            w = _parameters(flats, piece)
            g = sums[piece.unit_start if is_whole else piece.start :][: piece.numel]
            state = self._components(unit, flats, piece)
            if piece.s is not None and ("s", piece.s.letter) in kept:
                for new, old in zip(state, self._components(unit, kept, piece), strict=True):
                    new.copy_(old)
            if ("w", piece.w.letter) in kept:
                w.copy_(_parameters(kept, piece))
            if run.is_wide:
                w = w.view(self.setting.wide(unit.unit))
            master, low = self._master(unit, w, state, run)
            if not skipped:
                place = zlib.crc32(str(unit.unit).encode()), place_of(unit.pieces, *mine, piece.unit_start)
                hyper = {**record.hypers[run.group], "scale": record.factor, "place": place}
                self.recipe.rule.update(master, g, state, hyper, record.number - run.missed, low)
            if run.is_wide:
                w.copy_(firsts(master))
            elif skipped and unit.has_master:
                w.copy_(narrow(master, w.dtype))

    def _master(self, unit: UnitPlacement, w: Tensor, state: list[Tensor], run: Run) -> tuple[Tensor, Tensor | None]:
        """What is updated, taken out of `state` if it is there, and the narrow parameter that follows it."""
        types = self.setting.types[unit.unit]
        stored = state.pop(0) if types.has_master else w
        if run.is_wide:
            return (with_firsts(w) if types.is_pair else stored), None
        return stored, w if types.has_master else None

    def _components(self, unit: UnitPlacement, flats: Mapping[tuple[str, str], Tensor], piece: Stretch) -> list[Tensor]:
        if piece.s is None:
            return []
        start, whole = piece.start - piece.s.start, flats["s", piece.s.letter]
        return self.setting.types[unit.unit].components(whole, start, start + piece.numel)

    def _pieces(self, unit: UnitPlacement, group: Group, most: int, *, whole: bool) -> Iterator[tuple[Stretch, Run]]:
        """A group in pieces of one run each, and of at most so many elements, copied and updated while they are in
        cache; `whole`: where nothing is copied, in one piece.
        """
        for run in self.recipe.runs[unit.unit]:
            for found in unit.stretches(group, run.start, run.stop):
                size = found.numel if whole and not run.is_wide else most
                for at in range(0, found.numel, size):
                    numel = min(size, found.numel - at)
                    yield Stretch(found.w, found.s, found.start + at, found.unit_start + at, numel), run


def _parameters(flats: Mapping[tuple[str, str], Tensor], piece: Stretch) -> Tensor:
    return flats["w", piece.w.letter][piece.unit_start - piece.w.start :][: piece.numel]


def _square(flat: Tensor) -> Tensor:
    """The sum of squares in float64, which torch would convert the whole of `flat` to first: so in pieces."""
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in flat.split(PIECE)]
    return torch.stack(norms).square().sum()
