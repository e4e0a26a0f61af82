"""A model of a few numbers with everything a step can have, as units for the reference and as plain PyTorch; and the same
with its parameters as flat parts and an optimizer, for a step with tiers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from gs_compile.placement.placement import Placement
from gs_compile.placement.shards import QUANTUM
from gs_compile.placement.units import Group
from gs_compile.program.ir import StepShape, Unit, Value, homed

# Shapes: B samples of a micro-batch, D width of the model.
SAMPLES, WIDTH = 2, 3
LEARNING_RATE, MOMENTUM, MAX_NORM = 0.015625, 0.5, 0.25


class Batch(NamedTuple):
    features: Tensor  # BD
    target: Tensor  # BD
    weight: Tensor  # B


@st.composite
def steps(draw: st.DrawFn, max_layers: int = 5, max_micro_batches: int = 4) -> tuple[int, int, StepShape]:
    """Numbers of layers and micro-batches, and a shape that fits."""
    num_layers = draw(st.integers(1, max_layers))
    units: list[Unit] = ["e", *range(num_layers), "h"]
    frozen = draw(st.frozensets(st.sampled_from(units), max_size=len(units) - 1))
    joints = draw(st.frozensets(st.integers(1, num_layers - 2), max_size=2)) if num_layers > 2 else frozenset()
    sides = draw(st.frozensets(st.sampled_from(["e", *joints])))
    shape = StepShape(
        training=draw(st.booleans()),
        has_loss=draw(st.booleans()),
        has_total=draw(st.booleans()),
        joints=joints,
        sides=sides,
        side_gradients=draw(st.frozensets(st.sampled_from(sorted(sides, key=str)))) if sides else sides,
        emits=draw(st.frozensets(st.sampled_from(units))),
        outside=draw(st.frozensets(st.sampled_from([*range(num_layers + 1), "h"]))),
        frozen=frozen,
        first_grad=next(unit for unit in units if unit not in frozen),
    )
    return num_layers, draw(st.integers(1, max_micro_batches)), shape


def embed(batch: Batch, w: list[Tensor]) -> dict[str, Tensor]:
    x = torch.tanh(batch.features @ w[0])
    return {"x": x, "side": torch.sigmoid(batch.features @ w[1]), "y": x.sum(1)}


def layer(x: Tensor, side: Tensor | None, w: list[Tensor]) -> dict[str, Tensor]:
    inner = x @ w[0] if side is None else (x @ w[0]) * side
    return {"x": x + torch.tanh(inner), "y": inner.sum(1)}


def join(x: Tensor, side: Tensor | None, batch: Batch, w: list[Tensor]) -> dict[str, Tensor]:
    """What comes in goes on as a side input, and another stack begins with the batch."""
    inner = x @ w[0] if side is None else x @ w[0] + side
    return {"x": torch.tanh(batch.features @ w[0]) + 0.5 * x, "side": torch.sigmoid(inner), "y": inner.sum(1)}


def head(x: Tensor, side: Tensor | None, batch: Batch, total: Tensor | None, w: list[Tensor]) -> dict[str, Tensor]:
    y = (x if side is None else x + side) @ w[0]
    loss = (batch.weight[:, None] * (y - batch.target).square()).sum()
    return {"loss": loss if total is None else loss / total, "y": y}


@dataclass
class Toy:
    """Weights, batches and outside gradients, drawn from a seed; `units` of the reference in its methods."""

    num_layers: int
    num_micro_batches: int
    shape: StepShape
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def random(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=self.dtype)

        def batch() -> Batch:
            return Batch(random(SAMPLES, WIDTH), random(SAMPLES, WIDTH), random(SAMPLES).abs() + 0.5)

        units: list[Unit] = ["e", *range(self.num_layers), "h"]
        self.weights = {unit: [random(WIDTH, WIDTH) for _ in range(1 + (unit == "e"))] for unit in units}
        self.batches = [batch() for _ in range(self.num_micro_batches)]
        self.outside: dict[Unit, list[Any]] = {
            unit: [
                (random(1)[0], random(SAMPLES, WIDTH)) if unit == "h" else random(SAMPLES, WIDTH) for _ in self.batches
            ]
            for unit in sorted(self.shape.outside, key=str)
        }

    def inputs(self) -> dict[Value, Any]:
        """What the reference is given."""
        return (
            {Value("batch", None, j, None): batch for j, batch in enumerate(self.batches)}
            | {Value("w", unit): w for unit, w in self.weights.items()}
            | {Value("dy", unit, j): dy for unit, dys in self.outside.items() for j, dy in enumerate(dys)}
        )

    # The units.

    def count(self, batches: list[Batch]) -> Tensor:
        return torch.stack([batch.weight.sum() for batch in batches]).sum()

    def zeros(self, value: Value) -> Any:
        if value.kind == "dw":
            assert value.unit is not None
            return [torch.zeros_like(w) for w in self.weights[value.unit]]
        return torch.zeros(SAMPLES, WIDTH, dtype=self.dtype)

    def embed(self, unit: Unit, micro_batch: int, *, wants: Iterable[str], batch: Batch, w: Any) -> tuple[Any, ...]:
        return _pick(embed(batch, w), wants)

    def forward(self, unit: Unit, micro_batch: int, *, wants: Iterable[str], x, w, side=None) -> tuple[Any, ...]:
        return _pick({**layer(x, side, w), "a": x}, wants)

    def join(self, unit: Unit, micro_batch: int, *, wants: Iterable[str], x, batch, w, side=None) -> tuple[Any, ...]:
        return _pick(join(x, side, batch, w), wants)

    def head(self, unit: Unit, micro_batch: int, *, wants, x, batch, w, side=None, total=None, dw=None, dsides=None):
        x, side, *w = leaves = _leaves(x, side, *w)
        made = head(x, side, batch, total, w)
        if "dx" in wants or dw is not None or dsides is not None:
            made["dx"] = _pull([made["loss"]], [torch.ones_like(made["loss"])], leaves, dw, dsides)
        return _pick(made, wants)

    def head_backward(self, unit, micro_batch, *, wants, x, batch, dy, w, side=None, total=None, dw=None, dsides=None):
        x, side, *w = leaves = _leaves(x, side, *w)
        made = head(x, side, batch, total, w)
        return _pick({"dx": _pull([made["loss"], made["y"]], dy, leaves, dw, dsides)}, wants)

    def backward(
        self, unit, micro_batch, *, wants, w, x=None, a=None, dx=None, dy=None, side=None, dw=None, dsides=None
    ):
        x, side, *w = leaves = _leaves(x if a is None else a, side, *w)
        above = layer(x, side, w)["x"]
        return _pick({"dx": _pull([above], [_sum(dx, dy)], leaves, dw, dsides)}, wants)

    def join_backward(
        self, unit, micro_batch, *, wants, x, batch, w, dx=None, dy=None, dside=None, side=None, dw=None, dsides=None
    ):
        x, side, *w = leaves = _leaves(x, side, *w)
        return _pick({"dx": _pull(*_arriving(join(x, side, batch, w), dx, dy, dside), leaves, dw, dsides)}, wants)

    def embed_backward(self, unit, micro_batch, *, wants, batch, w, dw, dx=None, dy=None, dside=None):
        w = _leaves(*w)
        _pull(*_arriving(embed(batch, w), dx, dy, dside), [None, None, *w], dw, None)
        return _pick({}, wants)

    def plain(self) -> tuple[Tensor, dict[Unit, list[Tensor | None]]]:
        """The loss of the whole batch, and each trainable unit's gradients, by ordinary autograd; None: no path."""
        shape = self.shape
        weights = {
            unit: [w.clone().requires_grad_(unit not in shape.frozen) for w in ws] for unit, ws in self.weights.items()
        }
        whole = Batch(*map(torch.cat, zip(*self.batches, strict=True)))
        first = embed(whole, weights["e"])
        side, xs = self._side("e", first), [first["x"]]
        for i in range(self.num_layers):
            made = join(xs[-1], side, whole, weights[i]) if i in shape.joints else layer(xs[-1], side, weights[i])
            xs.append(made["x"])
            side = self._side(i, made) if i in shape.joints else side
        total = whole.weight.sum() if shape.has_total else None
        last = head(xs[-1], side, whole, total, weights["h"])
        objective = torch.zeros((), dtype=self.dtype)
        for unit, dys in self.outside.items():
            if unit != "h":
                objective = objective + (torch.cat(dys) * xs[int(unit)]).sum()
        if "h" in shape.outside:
            sides = [None] * self.num_micro_batches if side is None else side.split(SAMPLES)
            slices = zip(xs[-1].split(SAMPLES), sides, self.batches, self.outside["h"], strict=True)
            for x, side_j, batch, (d_loss, d_y) in slices:
                made = head(x, side_j, batch, total, weights["h"])
                objective = objective + d_loss * made["loss"] + (d_y * made["y"]).sum()
        elif shape.has_loss:
            objective = objective + last["loss"]
        trainable = [unit for unit in weights if unit not in shape.frozen]
        leaves = [w for unit in trainable for w in weights[unit]]
        if not objective.requires_grad:
            return last["loss"], {unit: [None] for unit in trainable}
        found = iter(torch.autograd.grad(objective, leaves, allow_unused=True))
        return last["loss"].detach(), {unit: [next(found) for _ in weights[unit]] for unit in trainable}

    def _side(self, unit: Unit, made: Mapping[str, Tensor]) -> Tensor | None:
        """The side inputs that a unit makes, which its stack reads."""
        side = made["side"] if unit in self.shape.sides else None
        return side if side is None or unit in self.shape.side_gradients else side.detach()


# With tiers ------------------------------------------------------------------------------------------------------------


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
    """Units of the reference for a step with tiers; its state between steps is `home`.

    A weight of a few numbers is the sum of several tensors, and their numbers lie far apart in tensors of thousands of
    elements: wherever a unit is cut, the cut goes through a weight.
    """

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

    def join(self, unit, micro_batch, *, wt=None, w, **rest):
        return super().join(unit, micro_batch, w=_tie(w, wt), **rest)

    def join_backward(self, unit, micro_batch, *, wt=None, dwt=None, w, dw=None, **rest):
        return _with_gradients(super().join_backward, unit, micro_batch, w, wt, dw, dwt, rest)

    def embed_backward(self, unit, micro_batch, *, wt=None, dwt=None, w, dw=None, **rest):
        return _with_gradients(super().embed_backward, unit, micro_batch, w, wt, dw, dwt, rest)

    def head(self, unit, micro_batch, *, wt=None, dwt=None, w, dw=None, **rest):
        return _with_gradients(super().head, unit, micro_batch, w, wt, dw, dwt, rest)

    def head_backward(self, unit, micro_batch, *, wt=None, dwt=None, w, dw=None, **rest):
        return _with_gradients(super().head_backward, unit, micro_batch, w, wt, dw, dwt, rest)


# Helpers ---------------------------------------------------------------------------------------------------------------


def _pick(made: dict[str, Tensor], wants: Iterable[str]) -> tuple[Tensor, ...]:
    return tuple(made[kind].detach() for kind in wants)


def _leaves(*tensors: Tensor | None) -> list[Any]:
    return [tensor if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]


def _sum(*gradients: Tensor | None) -> Tensor | None:
    present = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(present).sum(0) if present else None


def _arriving(made: Mapping[str, Tensor], dx: Any, dy: Any, dside: Any) -> Iterable[Sequence[Tensor]]:
    """Of what begins a stack, the results that a gradient arrives for, and these gradients."""
    pairs = [(made["x"], _sum(dx, dy)), (made["side"], dside)]
    return zip(*(pair for pair in pairs if pair[1] is not None), strict=True)


def _pull(outputs: Any, gradients: Any, leaves: list[Any], dw: list[Tensor] | None, dsides: Tensor | None) -> Any:
    """Gradients of x, side and w: the first is returned, the others are added to their accumulators."""
    present = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad(outputs, present, gradients, materialize_grads=True))
    dx, side, *w = [None if leaf is None else next(found) for leaf in leaves]
    if dw is not None:
        for total, gradient in zip(dw, w, strict=True):
            total += gradient
    if dsides is not None:
        dsides += side
    return dx


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
