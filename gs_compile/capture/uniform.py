"""uniform: groups layers into classes of equal code.

Two layers are of one class if their graphs are the same: operations, wiring, constants, and the shapes and dtypes of
what they read. Parameters and side inputs are bound per layer, so alternating masks or rotary tables (gemma2) make no
difference. Every class is compiled once, whatever the number of layers. If blocks are cut into several layers, a layer
is compared with the same part of block 0.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gs_compile.capture.graph import Captured, Length, TensorSpec, UnitGraph, layer_name, module_path
from gs_compile.capture.split import Split


@dataclass(frozen=True, slots=True)
class Uniform:
    """The classes of the units."""

    cut: Split
    keys: tuple[Hashable, ...]  # of every unit, in the order of the split; equal keys are one class
    layer_classes: tuple[tuple[int, ...], ...]  # the layers of each class
    differences: tuple[str, ...]  # how the first layer of each other class differs from layer 0, or from its part there

    @property
    def num_kinds(self) -> int:
        """The number of kinds of blocks in all stacks, without joints."""
        return sum(not self.cut.joints.issuperset(layers) for layers in self.layer_classes)

    @property
    def report(self) -> str:
        lines = [f"class {i}: {self._described(layers)}" for i, layers in enumerate(self.layer_classes)]
        return "\n".join([*lines, *self.differences])

    def _described(self, layers: Sequence[int]) -> str:
        if self.cut.joints.issuperset(layers):
            return f"layer {_ranges(layers)}, which joins two stacks"
        if (cut := self.cut.block_cut) is None:
            return f"{len(layers)} layers: {_ranges(layers)}"
        number = len(cut.names)
        of = _ranges([layer // number for layer in layers])
        return f"the {cut.names[layers[0] % number]} {cut.parts} of {len(layers)} layers: {of}"


def uniform(cut: Split, captured: Captured) -> Uniform:
    """Group the layers by equal code."""
    keys = tuple(map(structure, cut.units))
    members: dict[Hashable, list[int]] = {}
    for layer, key in enumerate(keys[1:-1]):
        members.setdefault((layer % cut.layers_per_block, key), []).append(layer)
    new = {joint + 1 for joint in cut.joints} | cut.joints  # are not compared with layers of another stack
    further = [layers[0] for layers in members.values() if layers[0] >= cut.layers_per_block and layers[0] not in new]
    differences = tuple(_difference(cut, layer, captured) for layer in further)
    return Uniform(cut, keys, tuple(map(tuple, members.values())), differences)


def structure(unit: UnitGraph) -> Hashable:
    """A key that is equal for units of one class; lengths count by their expressions, not by their numbers."""
    inputs = tuple((source.kind, _spec_key(spec)) for source, spec in zip(unit.sources, unit.specs, strict=True))
    facts = unit.results, unit.is_joint, unit.differentiated  # no_grad differentiates nothing
    return (*facts, inputs, _graph_key(unit.module))


def _spec_key(spec: TensorSpec) -> Hashable:
    return (_key((spec.shape, spec.stride), {}), spec.dtype, spec.device, spec.requires_grad, spec.batch_dims)


def _graph_key(module: fx.GraphModule) -> Hashable:
    number = {node: index for index, node in enumerate(module.graph.nodes)}
    lines = []
    for node in module.graph.nodes:
        target = _attribute_key(module, str(node.target)) if node.op == "get_attr" else node.target
        target = None if node.op == "placeholder" else target
        lines.append((node.op, target, _key(node.args, number), _key(sorted(node.kwargs.items()), number)))
    return tuple(lines)


def _key(value: Any, number: Mapping[fx.Node, int]) -> Hashable:
    """A key of an argument, or of several; `number`: the place of each node in its graph."""
    match value:
        case fx.Node():
            return ("node", number[value])
        case Length():
            return ("length", value.expression)
        case slice():
            return ("slice", *(_key(part, number) for part in (value.start, value.stop, value.step)))
        case float():
            return ("float", value.hex())  # nan equals itself, -0.0 is not 0.0
        case dict():
            return tuple((key, _key(part, number)) for key, part in value.items())
        case tuple() | list():
            return tuple(_key(part, number) for part in value)
        case Hashable():
            return (type(value).__name__, value)  # True is not 1
        case _:
            return repr(value)


def _attribute_key(module: fx.GraphModule, name: str) -> Hashable:
    value = getattr(module, name)
    if isinstance(value, fx.GraphModule):
        return _graph_key(value)
    if isinstance(value, torch.Tensor) and value.numel() <= 64 and value.device.type == "cpu":
        content = value.detach().contiguous().flatten().view(torch.uint8)  # bytes: nan equals itself, -0.0 is not 0.0
        return (str(value.dtype), tuple(value.shape), tuple(content.tolist()))
    return id(value)


# Describing the difference --------------------------------------------------------------------------------------------


def _difference(cut: Split, layer: int, captured: Captured) -> str:
    """Where `layer` first differs from layer 0, or from the same part of block 0, in the user's names."""
    like = max((joint + 1 for joint in cut.joints if joint < layer), default=layer % cut.layers_per_block)
    first, second = cut.by_unit[like], cut.by_unit[layer]
    which = f"{layer_name(layer, cut.block_cut)} differs from {layer_name(like, cut.block_cut)}"
    for mine, other, source in zip(first.specs, second.specs, second.sources, strict=False):
        if _spec_key(mine) != _spec_key(other):
            path = captured.inputs[source.index].path if source.kind == "input" else f"its {source.kind} input"
            words = ["trainable" if spec.requires_grad else "frozen" for spec in (other, mine)]
            grad = f" ({' against '.join(words)})" if words[0] != words[1] else ""
            if not grad and str(mine) == str(other):
                grad = f" (strides {list(other.stride)} against {list(mine.stride)})"
            return f"{which} at {path}: {other} against {mine}{grad}"
    ours, theirs = _operations(first), _operations(second)
    for (our, _), (their, place) in zip(ours, theirs, strict=False):
        if our != their:
            return f"{which} at {place}: {their} against {our}"
    return f"{which}: {len(theirs)} operations against {len(ours)}"


def _operations(unit: UnitGraph) -> list[tuple[str, str]]:
    """Each operation with its constants, and the module that it is in."""
    rows = []
    for node in unit.module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            constants = [str(arg) for arg in (*node.args, *node.kwargs.values()) if not isinstance(arg, fx.Node)]
            name = getattr(node.target, "__name__", str(node.target))
            stack = node.meta.get("nn_module_stack")
            place = module_path(list(stack.values())[-1][0]) if stack else node.name
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
