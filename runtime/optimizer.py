"""optimizer: gradients, optimizer states and the updates, early and late (arXiv 2512.17570, sections 4.3 and 4.4).

The state of a part is contiguous, component after component (the master first, if parameters are narrower), so that one
read serves one update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gs_compile.placement.kinds import nbytes_of
from gs_compile.placement.units import UnitPlacement
from gs_compile.program.ir import Op, Unit, Value
from gs_compile.runtime.coordinators import Setting, flat
from gs_compile.runtime.kernels import sum_of_squares
from gs_compile.runtime.muon import Orthogonalizer
from gs_compile.runtime.spans import Binding
from gs_compile.runtime.step_record import SharedNorm, StepRecord
from gs_compile.runtime.storage.store import Extent
from gs_compile.runtime.stream import Reading
from gs_compile.runtime.updates import Update, UpdateRules
from gs_compile.runtime.values import Gradient, flat_of

PIECE = 1 << 22  # elements whose squares are summed at once: 32 MiB in float64


class OptimizerStep:
    """Gradients and optimizer states, and the updates."""

    def __init__(self, setting: Setting, rules: UpdateRules) -> None:
        self.setting = setting
        self.rules = rules
        self._orthogonalizer = Orthogonalizer(setting.device, rules.largest_nbytes(setting.types), setting.ranks)
        self._added: dict[Unit, frozenset[Any]] = {}  # the parameters that have sums, of gradients that are away

    def close(self) -> None:
        """Let go of all memory."""
        self._orthogonalizer.close()

    def gradient(
        self, verb: str, value: Value, source: Any, memory: Tensor | None, bindings: Sequence[Binding]
    ) -> Gradient | Tensor | Extent:
        """The content of a unit's gradient: nothing added yet, a part of it, or a sum that moves to another tier or
        back.

        An alias is in the memory of its source. Parts on the device are sums over several backwards.
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
        widths = {binding.input: binding.span.width for binding in trained if binding.span.dtype}
        return Gradient(whole, views, () if verb == "zeros" else self._added[unit.unit], widths)

    def shard(self, value: Value, memory: Tensor | None) -> Tensor:
        """Memory of this rank's share of a gradient."""
        unit = self.setting.unit(value)
        return self._on_device(unit, unit.num_trained, memory)

    def _on_device(self, unit: UnitPlacement, numel: int, memory: Tensor | None) -> Tensor:
        """Elements of a gradient; `memory`: used if the device's memory is the host's."""
        dtype = self.setting.wide(unit.unit)
        if self.setting.placement.separate:
            return self.setting.device.empty((numel,), dtype)
        return flat(memory, numel, dtype)

    def split(self, op: Op, gradient: Gradient | Tensor, targets: Sequence[Tensor]) -> None:
        """Copy the parts of a gradient off the device."""
        for source, target in self._shared(flat_of(gradient), op.results, targets):
            self.setting.device.copy(target, source)

    def norm(self, op: Op, gradient: Gradient, sums: Sequence[Tensor], record: StepRecord) -> Reading:
        """Complete a gradient, and return its sum of squares; once one is not finite, nothing is updated any more.

        sums: of earlier backwards; the gradient is added to them, and becomes their sum.
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
        """Add the sums of earlier backwards of the step, if there were any, to a gradient, and store it as the sum."""
        for new, old in self._shared(flat, op.into, sums):
            if record.adds:
                new.add_(old.to(new.device))
            old.copy_(new)

    def _shared(
        self, whole: Tensor, values: Sequence[Value], contents: Sequence[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The elements that a gradient shares with values of it, in the one and in the other."""
        for value, content in zip(values, contents, strict=True):
            at = 0
            for part in self.setting.unit(value).dw[value.part].w:
                yield whole[part.start : part.stop], content[at : at + part.numel]
                at += part.numel

    def reduce_scatter(
        self, op: Op, gradient: Gradient, shard: Tensor, norm: SharedNorm, sums: Sequence[Tensor], record: StepRecord
    ) -> None:
        """This rank's share of the sum over all ranks, the sum of squares of the whole, and the sum of the losses.

        sums: as in `norm`.
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
        losses = square.new_tensor(sum(loss() for loss in norm.losses))
        numbers = torch.stack([square / ranks.replicas, losses])  # each replica has a shard's square, and own losses
        ranks.all_reduce(numbers)
        norm.arrived = [device.read(number) for number in numbers.unbind()]

    def update(self, op: Op, reads: Sequence[Any], targets: Sequence[Tensor], record: StepRecord) -> None:
        """Update parts of a unit, in place."""
        Update(self.setting, self.rules, op, reads, targets).run(record, self._orthogonalizer)


def _square(flat: Tensor) -> Tensor:
    """The sum of squares in float64, in pieces, because torch would first convert all of `flat`."""
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in flat.split(PIECE)]
    return torch.stack(norms).square().sum()
