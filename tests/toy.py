"""A model of a few numbers with everything a step can have, as units for the reference and as plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from gs_compile.program.ir import StepShape, Unit, Value

# Shapes: B samples of a micro-batch, D width of the model.
SAMPLES, WIDTH = 2, 3


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
    has_side = draw(st.booleans())
    shape = StepShape(
        training=draw(st.booleans()),
        has_loss=draw(st.booleans()),
        has_total=draw(st.booleans()),
        has_side=has_side,
        side_gradient=has_side and draw(st.booleans()),
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

    def forward(
        self, unit: Unit, micro_batch: int, *, wants: Iterable[str], x: Tensor, w: Any, side: Any = None
    ) -> Any:
        return _pick({**layer(x, side, w), "a": x}, wants)

    def head(self, unit: Unit, micro_batch: int, *, wants, x, batch, w, side=None, total=None, dw=None, dside=None):
        x, side, *w = leaves = _leaves(x, side, *w)
        made = head(x, side, batch, total, w)
        if "dx" in wants or dw is not None or dside is not None:
            made["dx"] = _pull([made["loss"]], [torch.ones_like(made["loss"])], leaves, dw, dside)
        return _pick(made, wants)

    def head_backward(self, unit, micro_batch, *, wants, x, batch, dy, w, side=None, total=None, dw=None, dside=None):
        x, side, *w = leaves = _leaves(x, side, *w)
        made = head(x, side, batch, total, w)
        return _pick({"dx": _pull([made["loss"], made["y"]], dy, leaves, dw, dside)}, wants)

    def backward(
        self, unit, micro_batch, *, wants, w, x=None, a=None, dx=None, dy=None, side=None, dw=None, dside=None
    ):
        x, side, *w = leaves = _leaves(x if a is None else a, side, *w)
        above = layer(x, side, w)["x"]
        return _pick({"dx": _pull([above], [_sum(dx, dy)], leaves, dw, dside)}, wants)

    def embed_backward(self, unit, micro_batch, *, wants, batch, w, dw, dx=None, dy=None, dside=None):
        w = _leaves(*w)
        made = embed(batch, w)
        gradients = {"x": _sum(dx, dy), "side": dside}
        arriving = [kind for kind, gradient in gradients.items() if gradient is not None]
        _pull([made[kind] for kind in arriving], [gradients[kind] for kind in arriving], [None, None, *w], dw, None)
        return _pick({}, wants)

    def plain(self) -> tuple[Tensor, dict[Unit, list[Tensor | None]]]:
        """The loss of the whole batch, and each trainable unit's gradients, by ordinary autograd; None: no path."""
        shape = self.shape
        weights = {
            unit: [w.clone().requires_grad_(unit not in shape.frozen) for w in ws] for unit, ws in self.weights.items()
        }
        whole = Batch(*map(torch.cat, zip(*self.batches, strict=True)))
        first = embed(whole, weights["e"])
        side = (first["side"] if shape.side_gradient else first["side"].detach()) if shape.has_side else None
        xs = [first["x"]]
        for i in range(self.num_layers):
            xs.append(layer(xs[-1], side, weights[i])["x"])
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


def _pick(made: dict[str, Tensor], wants: Iterable[str]) -> tuple[Tensor, ...]:
    return tuple(made[kind].detach() for kind in wants)


def _leaves(*tensors: Tensor | None) -> list[Any]:
    return [tensor if tensor is None else tensor.detach().requires_grad_() for tensor in tensors]


def _sum(*gradients: Tensor | None) -> Tensor | None:
    present = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(present).sum(0) if present else None


def _pull(outputs: Any, gradients: Any, leaves: list[Any], dw: list[Tensor] | None, dside: Tensor | None) -> Any:
    """Gradients of x, side and w: the first is returned, the others are added to their accumulators."""
    present = [leaf for leaf in leaves if leaf is not None]
    found = iter(torch.autograd.grad(outputs, present, gradients, materialize_grads=True))
    dx, side, *w = [None if leaf is None else next(found) for leaf in leaves]
    if dw is not None:
        for total, gradient in zip(dw, w, strict=True):
            total += gradient
    if dside is not None:
        dside += side
    return dx
