"""packed: several tensors that one unit passes to the next, as one tensor.

    layer 0                                     layer 1
    image --> reshape --.                      .--> split --> reshape --> image
                         cat --> checkpoint --|
    text  --> reshape --'                      '--> split --> reshape --> text

Image and text of a diffusion model are such tensors: each of its blocks takes and returns both.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import reduce
from itertools import product
from typing import Any

import torch
from torch import fx

from gs_compile.capture.graph import Length, TensorSpec
from gs_compile.capture.residual_stream import fit, is_like

_MARK = "packed"  # in the meta of nodes that pack several tensors into one, or unpack it


def together(
    crossing: Mapping[fx.Node, Set[int]], at: Mapping[fx.Node, int], num_layers: int, begins: Iterable[int]
) -> dict[int, Sequence[fx.Node]]:
    """For each unit, those of the values that it makes for the next one only that are to be packed into one tensor.

    The last layer's are those of the same kind as its own input. Those of a unit that begins a stack correspond to what
    the stack's first layer makes of them, so that this layer's code equals the others'. crossing: values that other
    units read, with these units. at: the unit of each node. begins: the units that begin a stack.
    """
    units = defaultdict[int, list[fx.Node]](list)
    for value, readers in crossing.items():
        if at[value] + 1 in readers <= {at[value] + 1, num_layers + 1}:
            units[at[value]].append(value)
    ends = {*begins, num_layers}
    found = {unit: values for unit, values in units.items() if unit not in ends and fit(values)}
    above = [value.meta["spec"] for value in found.get(num_layers - 1, ())]
    last = [value for value in units[num_layers] if any(is_like(value, spec) for spec in above)]
    first = {unit: _in_place_of(found.get(unit + 1, ()), units[unit]) for unit in begins}
    found |= {unit: values for unit, values in (*first.items(), (num_layers, last)) if fit(values)}
    return {unit: values for unit, values in found.items() if _are_made_first(values, unit, at)}


def pack(values: Sequence[fx.Node], readers: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Add a tensor of all values to their graph, after the last of them, and make `readers` read its parts.

    Returns the nodes that make the tensor, itself last, and those that unpack it.
    """
    graph, specs = values[0].graph, [value.meta["spec"] for value in values]
    sizes = [reduce(Length.product, spec.shape[1:], 1) for spec in specs]
    requires_grad = any(spec.requires_grad for spec in specs)
    whole = _rows(replace(specs[0], requires_grad=requires_grad), reduce(Length.sum, sizes))
    made, taken, found = list[fx.Node](), list[fx.Node](), dict[fx.Node, fx.Node]()

    def add(nodes: list[fx.Node], spec: Any, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
        nodes.append(graph.call_function(function, args, kwargs))
        nodes[-1].meta = {"spec": spec, "storage": None}
        return nodes[-1]

    with graph.inserting_before(max(values).next):
        rows = [
            add(made, _rows(spec, size), torch.reshape, value, (spec.shape[0], size))
            for value, spec, size in zip(values, specs, sizes, strict=True)
        ]
        packed = add(made, whole, torch.cat, rows, 1)
        parts = tuple(replace(whole, shape=(whole.shape[0], size)) for size in sizes)
        split = add(taken, parts, torch.split, packed, sizes, 1)
        packed.meta[_MARK] = split.meta[_MARK] = True
        for number, (value, spec) in enumerate(zip(values, specs, strict=True)):
            part = add(taken, parts[number], operator.getitem, split, number)
            shaped = replace(spec.contiguous, requires_grad=requires_grad)
            part = add(taken, shaped, torch.reshape, part, spec.shape)
            found[value] = add(taken, shaped, torch.clone, part, memory_format=torch.contiguous_format)
    for node, value in product(readers, values):
        node.replace_input_with(value, found[value])
    return made, taken


def parts_of(value: fx.Node) -> list[fx.Node]:
    """The values that `pack` has packed into this one, and it last; only it, if it is not such a tensor."""
    return [*(value.all_input_nodes if _MARK in value.meta else ()), value]


def parts_read(entry: fx.Node, nodes: Container[fx.Node]) -> set[int]:
    """The indices in `parts_of` of the parts that some nodes unpack from a unit's input; -1: they read it whole."""
    taken = (part for user in entry.users if _MARK in user.meta for part in user.users if part in nodes)
    whole = {-1 for user in entry.users if _MARK not in user.meta and user in nodes}
    return whole | {int(str(part.args[1])) for part in taken}


def _are_made_first(values: Sequence[fx.Node], unit: int, at: Mapping[fx.Node, int]) -> bool:
    """Whether the unit above reads each of these values only after all of them are made."""
    return all(max(values) < user for value in values for user in value.users if at.get(user) == unit + 1)


def _in_place_of(values: Sequence[fx.Node], others: Sequence[fx.Node]) -> list[fx.Node]:
    """Those of `others` that are of the same kinds as `values`, one for each; empty, if one has none."""
    found = list[fx.Node]()
    for value in values:
        like = (each for each in others if each not in found and is_like(each, value.meta["spec"]))
        found += [each] if (each := next(like, None)) is not None else []
    return found if len(found) == len(values) else []


def _rows(spec: TensorSpec, size: int) -> TensorSpec:
    """The spec of a tensor [samples, size]."""
    return replace(spec, shape=(spec.shape[0], size)).contiguous
