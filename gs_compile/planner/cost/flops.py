"""flops: what a unit's code costs, counted on its graph: floating-point operations, and memory inside.

Nothing runs. The ATen graphs of forward and backward are those that are compiled, traced with tensors without memory.

Memory is that of the graph as it is written, every tensor from the operation that makes it to its last reader. A
compiler that fuses operations needs less; what kernels take inside is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.multiprocessing.reductions import StorageWeakRef

from gs_compile.capture.flops import count_flops
from gs_compile.capture.graph import TensorSpec, UnitGraph, output_values
from gs_compile.capture.inductor import Generator
from gs_compile.capture.internals import tree_leaves
from gs_compile.codegen.differentiate import Differentiated
from gs_compile.placement.workload import LevelCost, UnitCost
from gs_compile.program.ir import EPILOGUE

META, CPU = torch.device("meta"), torch.device("cpu")

Graphs = Callable[[str], fx.GraphModule]  # by name: "forward", "backward", "both"


def unit_cost(unit: UnitGraph, graphs: Graphs | None = None) -> UnitCost:
    """The cost of `unit` for one micro-batch. `graphs`: of its code; without them they are traced as for a CPU."""
    graphs = graphs or Differentiated(_off_meta(unit), Generator("eager")).graph
    forward = graphs("forward")
    flops, nbytes = count_flops(forward), peak_nbytes(forward, range(len(unit.results)))
    if not unit.differentiable or not unit.differentiated:
        is_head = unit.unit == EPILOGUE
        return UnitCost(forward_flops=flops, backward_flops=flops if is_head else 0.0, workspace_nbytes=nbytes)
    together = "loss" in unit.results
    backward = graphs("both" if together else "backward")
    results = range(len(unit.results)) if together else range(0)
    inputs = [unit.sources[index].kind for index in unit.differentiable]
    held = {*results, *(len(results) + i for i, kind in enumerate(inputs) if kind == "x")}
    nbytes = max(nbytes, peak_nbytes(backward, held))
    return UnitCost(forward_flops=flops, backward_flops=count_flops(backward), workspace_nbytes=nbytes)


def unit_levels(unit: UnitGraph, code: Differentiated | None = None) -> tuple[LevelCost, ...]:
    """What a unit may save beside its input, for one micro-batch. `code`: its own; None: it is traced for a CPU."""
    code = code or Differentiated(_off_meta(unit), Generator("eager"))
    return tuple(
        LevelCost(
            nbytes=level.nbytes,
            reads_input=level.reads_input,
            forward_flops=level.forward_flops,
            backward_flops=level.backward_flops,
        )
        for level in code.levels
    )


def peak_nbytes(module: fx.GraphModule, held: Collection[int] = ()) -> int:
    """The most bytes alive at once beside the graph's inputs and its results of the numbers `held`."""
    nodes = list(module.graph.nodes)
    given = {storage for node in nodes if node.op == "placeholder" for storage, _ in _storages(node)}
    values = output_values(module)
    apart = [value for index, value in enumerate(values) if index in held and isinstance(value, fx.Node)]
    given |= {storage for node in apart for storage, _ in _storages(node)}
    made: dict[StorageWeakRef, int] = {}
    sizes: dict[StorageWeakRef, int] = {}
    last: dict[StorageWeakRef, int] = {}
    for place, node in enumerate(nodes):
        for storage, nbytes in _storages(node):
            if storage not in given:
                made.setdefault(storage, place)
                sizes[storage] = nbytes
        for read in (node, *node.all_input_nodes):
            last |= dict.fromkeys((storage for storage, _ in _storages(read)), place)
    changes = [0] * (len(nodes) + 1)
    for storage, place in made.items():
        changes[place] += sizes[storage]
        changes[last[storage] + 1] -= sizes[storage]
    alive = peak = 0
    for change in changes:
        alive += change
        peak = max(peak, alive)
    return peak


# ----------------------------------------------------------------------------------------------------------------------


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _storages(node: fx.Node) -> Iterator[tuple[StorageWeakRef, int]]:
    """The memory a node's tensors are in, and its bytes; views share it."""
    for made in tree_leaves(_value(node)):
        if isinstance(made, torch.Tensor):
            storage = made.untyped_storage()
            yield StorageWeakRef(storage), storage.nbytes()


def _off_meta(unit: UnitGraph) -> UnitGraph:
    """`unit` as if captured on a CPU: on the meta device attention falls apart into the products of its definition."""
    if not unit.is_meta:
        return unit
    module = deepcopy(unit.module)
    for part in (part for part in module.modules() if isinstance(part, fx.GraphModule)):
        for node in list(part.graph.nodes):
            node.args, node.kwargs = map_aggregate(node.args, _moved), map_aggregate(node.kwargs, _moved)
            if isinstance(spec := node.meta.get("spec"), TensorSpec):
                node.meta["spec"] = replace(spec, device=CPU)
            # Code that counts the tokens of its experts has it of integers, and a CPU of floats alone.
            if node.target is torch.histc:
                with part.graph.inserting_before(node):
                    node.update_arg(0, part.graph.call_method("float", node.args[:1]))
            if node.op == "get_attr":
                setattr(part, node.target, _moved(getattr(part, node.target)))
        part.recompile()
    return replace(unit, module=module, specs=tuple(replace(spec, device=CPU) for spec in unit.specs))


def _moved(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device == META:
        return torch.zeros_like(value, device=CPU)
    return CPU if value in ("meta", META) else value
