"""The toy with its parameters as flat parts and an optimizer: units for the reference of a step with tiers.

A weight of a few numbers is the sum of several tensors, and their numbers lie far apart in tensors of thousands of
elements: wherever a unit is cut, the cut goes through a weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from toy import WIDTH, Toy, steps

from gs_compile.passes.lower import StepSpec, flush, lower
from gs_compile.passes.vertical import vertical
from gs_compile.placement.cut import cut
from gs_compile.placement.placement import QUANTUM, Group, Placement
from gs_compile.program.ir import Program, StepShape, Unit, Value, homed
from gs_compile.program.reference import reference

LEARNING_RATE, MOMENTUM, MAX_NORM = 0.015625, 0.5, 0.25
X_NBYTES, SIDE_NBYTES = 1000, 10


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a placement follows from."""

    parameter_ratio: float = 0.0
    optimizer_ratio: float = 0.0
    checkpoint_ratio: float = 0.0
    alpha: float = 0.0
    most_numel: int = 1 << 30
    separate: bool = True
    has_master: bool = True
    has_state: bool = True
    clip: bool = False
    device_parameter: float = 0.0
    device_checkpoint: float = 0.0
    speculative: bool = False


RESIDENT = Options(parameter_ratio=1.0, optimizer_ratio=1.0, checkpoint_ratio=1.0, separate=False)
PLAIN = StepShape()
RATIOS = (0.0, 0.3, 1.0)


@st.composite
def options(draw: st.DrawFn) -> Options:
    clip, separate = draw(st.booleans()), draw(st.booleans())
    checkpoint = draw(st.sampled_from(RATIOS))
    return Options(
        parameter_ratio=draw(st.sampled_from(RATIOS)),
        optimizer_ratio=draw(st.sampled_from(RATIOS)),
        checkpoint_ratio=checkpoint,
        alpha=1.0 if clip else draw(st.sampled_from((0.0, 0.25, 0.5, 1.0))),
        most_numel=draw(st.sampled_from((2 * QUANTUM, 1 << 30))),
        separate=separate,
        has_master=draw(st.booleans()),
        has_state=draw(st.booleans()),
        clip=clip,
        device_parameter=draw(st.sampled_from((0.0, 0.6, 1.0))) if separate else 0.0,
        device_checkpoint=draw(st.sampled_from((0.0, (1 - checkpoint) / 2, 1 - checkpoint))) if separate else 0.0,
    )


@st.composite
def tiered_steps(draw: st.DrawFn) -> tuple[int, int, StepShape]:
    """`steps`, and some with a unit "t" that others read."""
    num_layers, num_micro_batches, shape = draw(steps(max_layers=4, max_micro_batches=3))
    tied = draw(st.sampled_from([frozenset(), frozenset({"e", "h"}), frozenset({"h"})]))
    frozen = shape.frozen | ({"t"} if tied and draw(st.booleans()) else frozenset())
    units: list[Unit] = ["e", *range(num_layers), "h"]
    first = next(u for u in units if u not in frozen or (u in tied and "t" not in frozen))
    return num_layers, num_micro_batches, replace(shape, tied=tied, frozen=frozen, first_grad=first)


def tensors(unit: Unit) -> list[tuple[int, int]]:
    """The tensors of a unit: which of its weights each is added to, and how many quanta it has."""
    if unit == "e":
        return [(0, 2), (1, 4), (1, 2)]
    return [(0, 5), (0, 3)] if unit != "h" else [(0, 1), (0, 7)]


def frozen_quanta(unit: Unit) -> list[int]:
    """Odd layers have a tensor that is not trained."""
    return [2] if isinstance(unit, int) and unit % 2 else []


@cache
def with_gradient(num_layers: int, shape: StepShape) -> frozenset[Unit | None]:
    """The units that a step of this shape, in training, makes a gradient for."""
    ops = vertical(num_layers, 1, shape=replace(shape, training=True)).ops
    return frozenset(value.unit for op in ops for value in op.into if value.kind == "dw")


@cache
def place(num_layers: int, num_micro_batches: int, shape: StepShape = PLAIN, options: Options = RESIDENT) -> Placement:
    """The placement of a toy; what gets no gradient is not trained. Nothing lives on a device that is the host."""
    options = options if options.separate else replace(options, device_parameter=0.0, device_checkpoint=0.0)
    units: list[Unit] = ["e", *range(num_layers), "h", *(["t"] if shape.tied else [])]
    state = 8 * (options.has_state + options.has_master)

    def placed(unit: Unit) -> Any:
        sizes = [quanta * QUANTUM for _, quanta in tensors(unit)]
        rest = [quanta * QUANTUM for quanta in frozen_quanta(unit)]
        trained, frozen = (sizes, rest) if unit in with_gradient(num_layers, shape) else ([], sizes + rest)
        may_reside = options.has_master or not trained
        return cut(
            unit,
            trained,
            frozen,
            parameter_ratio=options.parameter_ratio,
            optimizer_ratio=options.optimizer_ratio,
            alpha=options.alpha,
            most_numel=options.most_numel,
            separate=options.separate,
            itemsize=4 if options.has_master else 8,
            gradient_itemsize=8,
            state_itemsize=state,
            has_master=options.has_master,
            device_numel=int(options.device_parameter * sum(sizes + rest)) if may_reside else 0,
        )

    return Placement(
        tuple(map(placed, units)),
        options.separate,
        options.clip,
        options.checkpoint_ratio,
        (X_NBYTES,) * num_micro_batches,
        (SIDE_NBYTES,) * num_micro_batches,
        num_layers,
        device_checkpoint_ratio=options.device_checkpoint,
        speculative=options.speculative,
    )


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
        others = {value for value in self.placement.homes(late=False) if homed(value) != value}
        for value in (replace(value, tier="device") if on_device else value for value in others):
            found[value] = torch.full_like(found[homed(value)], torch.nan)
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


# Steps in a row ------------------------------------------------------------------------------------------------------


def after(snapshots: Iterable[Program], made_by: str) -> Program:
    return next(program for program in snapshots if program.made_by == made_by)


def train(
    num_layers: int,
    num_micro_batches: int,
    shape: StepShape,
    placement: Placement,
    made_by: str = "free",
    modes: Sequence[bool] = (True, True),
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Steps in a row and what brings them to an end: what each gave, and the parameters and states after all.

    `modes`: of each step, whether it trains or evaluates. Each step is the program that the pass `made_by` makes.
    """
    on_device = made_by == "overlap"
    late, redo = False, True
    results = []
    toy = TieredToy(num_layers, num_micro_batches, shape, placement=placement)
    home = toy.home(on_device)
    for number, training in enumerate((*modes, None)):
        if training is None:
            snapshots = flush(num_layers, placement, redo=redo) if late else []
        else:
            mode = replace(shape, training=training)
            toy = TieredToy(num_layers, num_micro_batches, mode, seed=number, placement=placement)
            snapshots = lower(
                StepSpec(num_layers, num_micro_batches, shape=mode, placement=placement, late=late, redo=redo)
            )
        if snapshots:
            late = bool(training) and placement.has_late
            values = reference(after(snapshots, made_by), toy, home | toy.given())
            results.append({value.name: content for value, content in values.items() if value.kind in ("loss", "y")})
            there = {**home, **values}
            redo = not placement.speculative or not late or bool(there[_scale(on_device)] != 1.0)
            homes = placement.homes(late=late, redo=redo)
            late = late and any(value.kind == "dw" for value in homes)
            if on_device:  # no memory is reclaimed there
                homes = {replace(value, tier="device") for value in homes | placement.homes(late=False)}
            elif not late:
                homes -= {_scale(on_device)}
            home = {value: there[value] for value in homes}
    return [result for result in results if result], toy.whole(home, on_device)


def _scale(on_device: bool) -> Value:
    return Value("scale", tier="device" if on_device else "host")
