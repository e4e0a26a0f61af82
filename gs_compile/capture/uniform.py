"""uniform: which layers are one code, and what is bound to it in each.

Two layers are of one class when their graphs are the same: operations, wiring, constants, and the shapes and dtypes
of what they read. Parameters and side inputs are bound per layer, so alternating masks or rotary tables (gemma2) make
no difference. Every class is compiled once, whatever the number of layers. Where blocks are cut in halves, each half is
held against its like.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from gs_compile.capture.graph import Captured, UnitGraph, layer_name
from gs_compile.errors import UniformityError


@dataclass(frozen=True, slots=True)
class Uniform:
    """The classes of the units."""

    keys: tuple[Hashable, ...]  # of every unit, in the order of the split; equal keys are one class
    layer_classes: tuple[tuple[int, ...], ...]  # the layers of each class
    differences: tuple[str, ...]  # how the first layer of each further class differs from layer 0, or from its half
    halved: bool = False  # every block is two layers

    @property
    def report(self) -> str:
        lines = [f"class {i}: {self._described(layers)}" for i, layers in enumerate(self.layer_classes)]
        return "\n".join([*lines, *self.differences])

    def _described(self, layers: Sequence[int]) -> str:
        if not self.halved:
            return f"{len(layers)} layers: {_ranges(layers)}"
        half = "feed-forward" if layers[0] % 2 else "attention"
        return f"the {half} halves of {len(layers)} layers: {_ranges([layer // 2 for layer in layers])}"


def uniform(units: Sequence[UnitGraph], captured: Captured, *, halved: bool = False) -> Uniform:
    """Group the layers of `units` (prologue, layers, epilogue) by equal code; `halved`: every block is two of them.

    Raises `UniformityError` when no two layers are alike.
    """
    keys = tuple(structure(unit) for unit in units)
    members: dict[Hashable, list[int]] = {}
    for layer, key in enumerate(keys[1:-1]):
        members.setdefault((layer % 2 if halved else 0, key), []).append(layer)
    further = [layers[0] for layers in members.values() if layers[0] >= 1 + halved]
    differences = tuple(_difference(units, layer, captured, halved=halved) for layer in further)
    if all(len(layers) == 1 for layers in members.values()):
        number = len(members) // (1 + halved)
        raise UniformityError(
            f"the model has no repeated block: all {number} blocks differ, the first two thus: "
            f"{differences[0]}. greedysnake needs blocks of equal code and shapes"
        )
    return Uniform(keys, tuple(map(tuple, members.values())), differences, halved)


def structure(unit: UnitGraph) -> Hashable:
    """The key that two units of one class share."""
    inputs = tuple((source.kind, spec) for source, spec in zip(unit.sources, unit.specs, strict=True))
    return (unit.results, unit.differentiated, inputs, _graph_key(unit.module))  # no_grad differentiates nothing


def _graph_key(module: fx.GraphModule) -> Hashable:
    number = {node: index for index, node in enumerate(module.graph.nodes)}

    def local(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return ("node", number[value])
        if isinstance(value, slice):
            return ("slice", local(value.start), local(value.stop), local(value.step))
        if isinstance(value, float):
            return ("float", value.hex())  # nan equals itself, -0.0 is not 0.0
        return (type(value).__name__, value)  # True is not 1

    def frozen(value: Any) -> Hashable:
        mapped = map_aggregate(value, local)
        return _hashable(mapped)

    lines = []
    for node in module.graph.nodes:
        target = _attribute_key(module, str(node.target)) if node.op == "get_attr" else node.target
        target = None if node.op == "placeholder" else target
        lines.append((node.op, target, frozen(node.args), frozen(dict(sorted(node.kwargs.items())))))
    return tuple(lines)


def _hashable(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple((key, _hashable(part)) for key, part in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(_hashable(part) for part in value)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value  # type: ignore[no-any-return]


def _attribute_key(module: fx.GraphModule, name: str) -> Hashable:
    value = getattr(module, name)
    if isinstance(value, fx.GraphModule):
        return _graph_key(value)
    if isinstance(value, torch.Tensor) and value.numel() <= 64 and value.device.type == "cpu":
        content = value.detach().contiguous().flatten().view(torch.uint8)  # bytes: nan equals itself, -0.0 is not 0.0
        return (str(value.dtype), tuple(value.shape), tuple(content.tolist()))
    return id(value)


# Telling the difference -----------------------------------------------------------------------------------------------


def _difference(units: Sequence[UnitGraph], layer: int, captured: Captured, *, halved: bool) -> str:
    """Where `layer` first differs from layer 0, or from its half of block 0, in the user's names."""
    like = layer % 2 if halved else 0
    first, second = units[like + 1], units[layer + 1]
    which = f"{layer_name(layer, halved=halved)} differs from {layer_name(like, halved=halved)}"
    for mine, other in zip(_inputs(first, captured), _inputs(second, captured), strict=False):
        if mine[1:] != other[1:]:
            return f"{which} at {other[0]}: {other[1]} against {mine[1]}{_grad(mine, other)}"
    for ours, theirs in zip(_operations(first), _operations(second), strict=False):
        if ours[0] != theirs[0]:
            return f"{which} at {theirs[1]}: {theirs[0]} against {ours[0]}"
    counts = len(_operations(second)), len(_operations(first))
    return f"{which}: {counts[0]} operations against {counts[1]}"


def _inputs(unit: UnitGraph, captured: Captured) -> list[tuple[str, str, bool]]:
    rows = []
    for source, spec in zip(unit.sources, unit.specs, strict=True):
        path = captured.inputs[source.index].path if source.kind == "input" else f"its {source.kind} input"
        rows.append((path, str(spec), spec.requires_grad))
    return rows


def _grad(mine: tuple[str, str, bool], other: tuple[str, str, bool]) -> str:
    if mine[2] == other[2]:
        return ""
    return " (trainable against frozen)" if other[2] else " (frozen against trainable)"


def _operations(unit: UnitGraph) -> list[tuple[str, str]]:
    rows = []
    for node in unit.module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            constants = [str(arg) for arg in (*node.args, *node.kwargs.values()) if not isinstance(arg, fx.Node)]
            name = getattr(node.target, "__name__", str(node.target))
            stack = node.meta.get("nn_module_stack")
            place = str(list(stack.values())[-1][0]).replace("L['self'].", "") if stack else node.name
            rows.append((f"{name}({', '.join(constants)})", place))
    return rows


def _ranges(layers: Sequence[int]) -> str:
    """``0-5, 7, 9-11``"""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
