"""flops: what a unit's code costs, counted on its graph: floating-point operations, and memory inside.

Nothing runs. The ATen graphs of forward and backward are those that are compiled, traced with tensors without memory.

Operations are those of matrix products, convolutions and attention, two for each multiply-add; the rest is a fraction
of a per cent of a transformer. Attention is counted in full: a kernel that leaves out what the causal mask hides does
half of it. Its backward is five products to the forward's two, as the fused kernels compute the scores again.

Memory is that of the graph as it is written, every tensor from the operation that makes it to its last reader. A
compiler that fuses operations needs less; what kernels take inside is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from gs_compile.capture.graph import TensorSpec, UnitGraph, output_values
from gs_compile.capture.inductor import Generator
from gs_compile.capture.internals import tree_leaves
from gs_compile.codegen.differentiate import Differentiated
from gs_compile.placement.workload import UnitCost
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


def count_flops(module: fx.GraphModule) -> float:
    """Floating-point operations of an ATen graph."""
    return float(sum(_flops(node) for node in module.graph.nodes if node.op == "call_function"))


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


def _flops(node: fx.Node) -> float:
    packet = getattr(node.target, "overloadpacket", node.target)
    formula = _ATTENTION.get(str(packet)) or flop_registry.get(packet)
    if formula is None:
        return 0.0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), _value)
    return float(formula(*args, **kwargs, out_val=_value(node)))


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> float:
    return float(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> float:
    return float(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


def _grouped(left: Any, right: Any, *_: Any, **__: Any) -> float:
    """Products of groups, as of tokens with their experts: of rows, of columns, or of what is summed over."""
    batch = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return float(2 * batch * math.prod(left.shape[-2:]) * right.shape[-1])


# What torch's counter leaves out.
_ATTENTION: Mapping[str, Callable[..., float]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten._grouped_mm": _grouped,
}


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
