"""The toy with its parameters as flat parts and an optimizer: units for the reference of a step with tiers.

A weight of a few numbers is the sum of several tensors, and their numbers lie far apart in tensors of thousands of
elements: wherever a unit is cut, the cut goes through a weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from toy import WIDTH, Toy

from gs_compile.placement.placement import Placement
from gs_compile.placement.shards import QUANTUM
from gs_compile.placement.units import Group
from gs_compile.program.ir import Unit, Value, homed

LEARNING_RATE, MOMENTUM, MAX_NORM = 0.015625, 0.5, 0.25


def tensors(unit: Unit) -> list[tuple[int, int]]:
    """The tensors of a unit: which of its weights each is added to, and how many quanta it has."""
    if unit == "e":
        return [(0, 2), (1, 4), (1, 2)]
    return [(0, 5), (0, 3)] if unit != "h" else [(0, 1), (0, 7)]


def frozen_quanta(unit: Unit) -> list[int]:
    """Odd layers have a tensor that is not trained."""
    return [2] if isinstance(unit, int) and unit % 2 else []


@dataclass
class TieredToy(Toy):
    """Units of the reference for a step with tiers; its state between steps is `home`."""

    placement: Placement = field(default_factory=Placement)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape.tied:
            self.weights["t"] = [torch.zeros(WIDTH, WIDTH, dtype=self.dtype)]

    def given(self) -> dict[Value, Any]:
        """What a step is given beside what is at home."""
        return {value: content for value, content in self.inputs().items() if value.kind != "w"}

    def home(self, on_device: bool = False) -> dict[Value, Tensor]:
        """Initial parameters and states, the same numbers wherever they are; `on_device`: not at home yet."""
        found = {}
        for unit in self.placement.units:
            flat = self._initial(unit.unit)
            for part in unit.w.values():
                value = unit.value("w", part, "device" if on_device else None)
                found[value] = flat[part.start : part.stop].to(torch.float32 if unit.has_master else self.dtype)
            for group in unit.groups:
                master = torch.cat([flat[part.start : part.stop] for part in group.w])
                for part in group.s:
                    rows = [torch.zeros_like(master)] * (unit.state_itemsize // 8 - unit.has_master)
                    rows += [master] * unit.has_master
                    state = torch.stack([row[part.start : part.stop] for row in rows])
                    found[unit.value("s", part, "device" if on_device else None)] = state
            for value in self.placement.sums(unit):
                numel = unit.dw[value.part].numel
                found[value._replace(tier="device") if on_device else value] = torch.zeros(numel, dtype=self.dtype)
        others = {value for value in self.placement.homes(late=False) if homed(value) != value}
        parts = {value._replace(tier=None): content for value, content in found.items()}
        for value in (value._replace(tier="device") if on_device else value for value in others):
            found[value] = torch.full_like(parts[homed(value)._replace(tier=None)], torch.nan)
        return {value: content.clone() for value, content in found.items()}

    def whole(self, home: Mapping[Value, Tensor], on_device: bool = False) -> dict[str, Tensor]:
        """Parameters and states of each unit in one piece: what does not depend on where the cuts are."""
        found = {}
        for unit in self.placement.units:
            tier = "device" if on_device else None
            flat = torch.cat([home[unit.value("w", p, tier)] for p in sorted(unit.w.values(), key=lambda p: p.start)])
            found[f"w{unit.unit}"] = flat
            if unit.s:
                state = torch.zeros(unit.state_itemsize // 8, unit.numel, dtype=self.dtype)
                for group in unit.trained():
                    parts = torch.cat([home[unit.value("s", part, tier)] for part in group.s], 1)
                    state[:, _elements(group)] = parts
                found[f"s{unit.unit}"] = state
        return found

    def _initial(self, unit: Unit) -> Tensor:
        generator = torch.Generator().manual_seed(sum(map(ord, str(unit))))
        flat = torch.zeros(self.placement.by_unit[unit].numel, dtype=self.dtype)
        for _, places in _places(unit):
            flat[places] = torch.randn(len(places), generator=generator, dtype=self.dtype)
        return flat

    # The units of a step with tiers.

    def gather(self, value: Value, parts: Mapping[str, Tensor]) -> list[Tensor]:
        unit = self.placement.by_unit[value.unit]
        assert parts.keys() == unit.w.keys()
        flat = torch.full((unit.numel,), torch.nan, dtype=self.dtype)
        for letter, content in parts.items():
            flat[unit.w[letter].start : unit.w[letter].stop] = content.to(self.dtype)
        weights = [torch.zeros_like(weight) for weight in self.weights[value.unit]]
        for index, places in _places(value.unit):
            weights[index] += flat[places].view(WIDTH, WIDTH)
        return weights

    def split(self, value: Value, gradient: Sequence[Tensor]) -> Tensor:
        return self._cut(self.placement.by_unit[value.unit].dw[value.part], value.unit, gradient)

    def empty(self, value: Value) -> Tensor:
        unit = self.placement.by_unit[value.unit]
        dtype = torch.float32 if unit.has_master else self.dtype
        return torch.full((unit.w[value.part].numel,), torch.nan, dtype=dtype)

    def norm(self, gradient: Sequence[Tensor]) -> Tensor:
        return torch.stack([part.square().sum() for part in gradient]).sum()

    def clip(self, norms: Sequence[Tensor]) -> Tensor:
        return (MAX_NORM / torch.stack(list(norms)).sum().sqrt()).clamp(max=1.0)

    def confirmed(self, scale: Tensor) -> bool:
        return bool(scale == 1.0)

    def update(self, reads: Mapping[Value, Any], into: Mapping[Value, Tensor]) -> None:
        (value, gradient), *scales = reads.items()
        unit = self.placement.by_unit[value.unit]
        changed = {(part.kind, part.part): content for part, content in into.items()}
        (group,) = (g for g in unit.trained() if ("w", g.w[0].letter) in changed)
        assert set(changed) == {("w", part.letter) for part in group.w} | {("s", part.letter) for part in group.s}
        assert value.part in ("", group.letter)
        gradient = gradient if value.part else self._cut(group, value.unit, gradient)
        for _, scale in scales:
            gradient = gradient * scale
        if not group.s:
            new = torch.cat([changed["w", part.letter] for part in group.w]) - LEARNING_RATE * gradient
        else:
            state = torch.cat([changed["s", part.letter] for part in group.s], 1)
            old = state[-1] if unit.has_master else torch.cat([changed["w", part.letter] for part in group.w])
            if unit.state_itemsize // 8 > unit.has_master:
                gradient = state[0] = MOMENTUM * state[0] + gradient
            new = old - LEARNING_RATE * gradient
            if unit.has_master:
                state[-1] = new
            for part, content in zip(group.s, state.split([part.numel for part in group.s], 1), strict=True):
                changed["s", part.letter].copy_(content)
        for part, content in zip(group.w, new.split([part.numel for part in group.w]), strict=True):
            changed["w", part.letter].copy_(content)

    def _cut(self, group: Group, unit: Unit | None, gradient: Sequence[Tensor]) -> Tensor:
        flat = torch.zeros(self.placement.by_unit[unit].num_trained, dtype=self.dtype)
        for index, places in _places(unit):
            if places[-1] < len(flat):
                flat[places] = gradient[index].flatten()
        return flat[_elements(group)]

    # The computations, with the tied weights added to the unit's own.

    def embed(self, unit, micro_batch, *, wt=None, w, **rest):
        return super().embed(unit, micro_batch, w=_tie(w, wt), **rest)

    def embed_backward(self, unit, micro_batch, *, wt=None, dwt=None, w, dw=None, **rest):
        return _with_gradients(super().embed_backward, unit, micro_batch, w, wt, dw, dwt, rest)

    def head(self, unit, micro_batch, *, wt=None, dwt=None, w, dw=None, **rest):
        return _with_gradients(super().head, unit, micro_batch, w, wt, dw, dwt, rest)

    def head_backward(self, unit, micro_batch, *, wt=None, dwt=None, w, dw=None, **rest):
        return _with_gradients(super().head_backward, unit, micro_batch, w, wt, dw, dwt, rest)


def _tie(w: list[Tensor], wt: list[Tensor] | None) -> list[Tensor]:
    return w if wt is None else [w[0] + wt[0], *w[1:]]


def _with_gradients(function, unit, micro_batch, w, wt, dw, dwt, rest):
    found = None if dw is None and dwt is None else [torch.zeros_like(weight) for weight in w]
    results = function(unit, micro_batch, w=_tie(w, wt), dw=found, **rest)
    for sums in (dw, dwt):
        for total, gradient in zip(sums or (), found or (), strict=False):
            total += gradient
    return results


@cache
def _places(unit: Unit) -> list[tuple[int, Tensor]]:
    """Where the numbers of each tensor lie in the unit's space, and the weight they are added to."""
    found, start = [], 0
    for index, quanta in (*tensors(unit), *((0, quanta) for quanta in frozen_quanta(unit))):
        numel = quanta * QUANTUM
        found.append((index, start + torch.arange(WIDTH * WIDTH) * numel // (WIDTH * WIDTH)))
        start += numel
    return found


def _elements(group: Group) -> Tensor:
    return torch.cat([torch.arange(part.start, part.stop) for part in group.w])
