"""split: the graph cut into prologue, layers and epilogue.

Dynamo names the module around every node, so the blocks are found, not guessed. What stands between two blocks goes
with the later one; what depends on the last block, or only feeds what does, is the epilogue; the rest is the
prologue.

    prologue "e"  --x0-->  layer 0  --x1-->  ...  layer L-1  --xL-->  epilogue "h"
        \\------------ side inputs: masks, rotary tables ------/------/

Exactly one tensor goes from a layer to the next, its checkpoint. Anything else that crosses is refused by name. The
single schedule has each block as two layers, its attention half and its feed-forward half (`halve`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import fx

from gs_compile.capture.arrange import arrange, is_free
from gs_compile.capture.extract import extract
from gs_compile.capture.graph import Captured, OutputSpec, Source, TensorSpec, UnitGraph, layer_name, source_line
from gs_compile.capture.halve import halve
from gs_compile.capture.loss import Separated
from gs_compile.capture.operations import is_mutation, mutated, operation
from gs_compile.capture.regions import live_nodes
from gs_compile.capture.shares import FRACTION, TOTAL
from gs_compile.errors import CaptureError, MutationError, UniformityError
from gs_compile.program.ir import EPILOGUE, PROLOGUE, Unit


@dataclass(frozen=True, slots=True)
class Split:
    """The units in order, prologue first and epilogue last, and what the step gives back."""

    units: tuple[UnitGraph, ...]
    outputs: tuple[OutputSpec, ...]
    sides: tuple[TensorSpec, ...]
    count: fx.GraphModule | None  # the totals of one micro-batch, from `count_sources`
    count_sources: tuple[Source, ...]
    halved: bool = False  # layer 2 i is the attention half of block i, layer 2 i + 1 its feed-forward half

    @property
    def num_layers(self) -> int:
        return len(self.units) - 2


def split(separated: Separated, captured: Captured, *, outputs: Sequence[Any], halved: bool = False) -> Split:
    """Cut the graph of `separated` into units; `outputs` are its output values, None for those not kept.

    halved: every block is two layers.
    """
    return _Cut(separated, captured, list(outputs), halved=halved).run()


class _Cut:
    def __init__(self, separated: Separated, captured: Captured, outputs: list[Any], *, halved: bool) -> None:
        self.halved = False  # until each block is known to hand on one tensor
        self.separated = separated
        self.graph = separated.module.graph
        self.outputs = outputs
        self.inputs = {entry.name: index for index, entry in enumerate(captured.inputs)}
        self.batch = captured.names("batch")
        self.nodes = live_nodes(self.graph, [value for value in outputs if isinstance(value, fx.Node)])
        self.arrangement = arrange(self.graph, self.nodes)
        self.carried = self._carried()
        if halved:
            self.arrangement = halve(self.graph, self.nodes, self.arrangement, self.carried)
            self.halved = True
            self.carried = self._carried()

    @property
    def at(self) -> Mapping[fx.Node, int]:
        return self.arrangement.position

    @property
    def num_layers(self) -> int:
        return self.arrangement.num_layers

    def run(self) -> Split:
        carried = self.carried
        sides = self._sides(carried)
        outputs, emitted = self._outputs(carried)
        units = tuple(self._unit(position, carried, sides, emitted) for position in range(self.num_layers + 2))
        count, count_sources = self._count()
        side_specs = tuple(node.meta["spec"] for node in sides)
        return Split(units, tuple(outputs), side_specs, count, count_sources, self.halved)

    def _crossing(self) -> dict[fx.Node, set[int]]:
        """The values made in one unit and read in others, with the readers' positions."""
        live, crossing = set(self.nodes), defaultdict[fx.Node, set[int]](set)
        for node in self.nodes:
            if not is_free(node):
                readers = {self.at[user] for user in node.users if user in live and user.op != "output"}
                crossing[node] = readers - {self.at[node]}
        return {node: readers for node, readers in crossing.items() if readers}

    # What crosses ----------------------------------------------------------------------------------------------------

    def _carried(self) -> list[fx.Node]:
        """x0 ... xL: what goes from each unit to the next."""
        crossing = self._crossing()
        self._refuse_shared_memory(crossing)
        carried: list[fx.Node] = []
        for position in range(1, self.num_layers + 1):
            leaving = [node for node, readers in crossing.items() if self.at[node] == position]
            far = [node for node in leaving if crossing[node] != {position + 1}]
            if len(leaving) != 1 or far:
                raise UniformityError(self._not_one(position - 1, leaving, far, crossing))
            carried.append(leaving[0])
        first = self._first_carried(carried[0], crossing)
        return [self._embedded(first) if is_free(first) else first, *carried]

    def _first_carried(self, second: fx.Node, crossing: Mapping[fx.Node, set[int]]) -> fx.Node:
        """Which of the prologue's values is the first layer's input: the one that is like the second layer's."""
        spec = second.meta["spec"]
        like = [
            node for node, readers in crossing.items() if self.at[node] == 0 and 1 in readers and _is_like(node, spec)
        ]
        read = dict.fromkeys(chain.from_iterable(n.all_input_nodes for n in self.nodes if self.at[n] == 1))
        like = like or [n for n in read if self._is_batch(n) and _is_like(n, spec)]
        if not like:
            raise UniformityError(
                f"the first block reads nothing like what blocks pass on ({second.name}: {spec}); the embedding must "
                "have the shape and dtype of the blocks' outputs"
            )
        return min(like, key=lambda node: (len(crossing.get(node, ())), not node.meta["spec"].requires_grad))

    def _embedded(self, given: fx.Node) -> fx.Node:
        """A prologue that hands on the input which the first block reads as it was given."""
        with self.graph.inserting_after(given):
            copied = self.graph.call_function(torch.clone, (given,))
        copied.meta = {**given.meta, "storage": None}
        for node in [node for node in self.nodes if self.at[node] == 1]:
            node.replace_input_with(given, copied)
        self.nodes = [copied, *self.nodes]
        self.arrangement = replace(self.arrangement, position={**self.at, copied: 0})
        return copied

    def _not_one(
        self, layer: int, leaving: list[fx.Node], far: list[fx.Node], crossing: Mapping[fx.Node, set[int]]
    ) -> str:
        def reader(position: int) -> str:
            return "the epilogue" if position > self.num_layers else layer_name(position - 1, halved=self.halved)

        name = layer_name(layer, halved=self.halved)
        if not leaving:
            return f"{name} passes nothing on to what follows; its block does not feed the model's output"
        found = "; ".join(
            f"`{node.name}` {node.meta['spec']} read by {', '.join(map(reader, sorted(crossing[node])))}"
            f"{f' at {line}' if (line := source_line(node)) else ''}"
            for node in (far or leaving)
        )
        return (
            f"{name} must pass exactly one tensor, to the next layer; found {found}. Carry it inside the hidden "
            "state, or compute it in the embedding so that it becomes a side input"
        )

    def _sides(self, carried: Sequence[fx.Node]) -> list[fx.Node]:
        sides = []
        for node, readers in self._crossing().items():
            if self.at[node] == 0 and not (node is carried[0] and readers <= {1}):
                if not isinstance(node.meta["spec"], TensorSpec):
                    raise CaptureError(f"`{node.name}` goes from the embedding to the blocks but is not a tensor")
                sides.append(node)
        in_layers = [node for node in self.nodes if 0 < self.at[node] <= self.num_layers]
        read = dict.fromkeys(chain.from_iterable(node.all_input_nodes for node in in_layers))
        return sides + [node for node in read if self._is_batch(node)]  # layers see the batch as a side input

    def _is_batch(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and node.name in self.batch

    def _refuse_shared_memory(self, crossing: Mapping[fx.Node, set[int]]) -> None:
        """A unit may change its own values in place, and copies of what it reads, never what others still read."""
        free = {node.meta.get("storage"): node for node in self.nodes if is_free(node)}
        for change in filter(is_mutation, self.nodes):
            storage = mutated(change).meta.get("storage")
            if storage is None:
                continue
            if storage in free:
                raise MutationError(
                    f"the model changes its input or buffer `{free[storage].name}` in place "
                    f"({source_line(change) or operation(change)}): micro-batches and recomputation would do it again; "
                    "make it a result of forward, or freeze it (eval mode)"
                )
            returned = [v for v in self.outputs if isinstance(v, fx.Node) and v.meta.get("storage") == storage]
            for value in returned:
                if self.at[value] != self.at[change]:
                    raise MutationError(
                        f"the model returns `{value.name}`, which a later unit changes in place at "
                        f"{source_line(change) or operation(change)}; use the out-of-place form there"
                    )
            seen = [value for value in crossing if value.meta.get("storage") == storage]
            read = [value for value in seen if self.at[value] != self.at[change] and self.at[change] in crossing[value]]
            for value in seen:
                if len(read) > 1 or self._is_seen_elsewhere(change, value):
                    raise MutationError(
                        f"`{value.name}` is read by several units and changed in place at "
                        f"{source_line(change) or operation(change)}; use the out-of-place form there"
                    )

    def _is_seen_elsewhere(self, change: fx.Node, value: fx.Node) -> bool:
        """Whether another unit reads `value` on the wrong side of `change`: each sees its maker's last version."""
        order = {node: index for index, node in enumerate(self.nodes)}
        readers = [user for user in value.users if user in order and self.at[user] != self.at[value]]
        if self.at[change] == self.at[value]:
            return any(order[reader] < order[change] for reader in readers)
        late = [reader for reader in readers if order[reader] > order[change]]
        return order[value] < order[change] and any(self.at[reader] != self.at[change] for reader in late)

    # Outputs ---------------------------------------------------------------------------------------------------------

    def _outputs(self, carried: Sequence[fx.Node]) -> tuple[list[OutputSpec], dict[int, list[fx.Node]]]:
        emitted: dict[int, list[fx.Node]] = defaultdict(list)
        main: fx.Node | None = None
        specs: list[OutputSpec] = []
        for value in self.outputs:
            if not isinstance(value, fx.Node):
                specs.append(OutputSpec("none" if value is None else "constant", value=value))
                continue
            if value.op == "placeholder" and value.name in self.inputs:
                specs.append(OutputSpec("input", index=self.inputs[value.name]))
                continue
            kind, spec = self.separated.kinds[value], value.meta["spec"]
            position = self.at[value] if not is_free(value) else self.num_layers + 1
            unit = self._unit_of(position)
            dim = spec.batch_dims[0] if kind == "local" else 0
            combine: Any = {"local": "concat", "sum": "sum", "same": "same"}[kind]
            if main is None and not spec.shape and spec.requires_grad and unit == EPILOGUE and combine == "sum":
                main = value
                specs.append(OutputSpec("loss", unit, spec=spec))
            elif value in carried:
                specs.append(OutputSpec(combine, carried.index(value), dim=dim, is_layer_input=True, spec=spec))
            else:
                if value not in emitted[position]:
                    emitted[position].append(value)
                specs.append(OutputSpec(combine, unit, emitted[position].index(value), dim, spec=spec))
        self.main = main
        return specs, emitted

    def _unit_of(self, position: int) -> Unit:
        return PROLOGUE if position == 0 else EPILOGUE if position > self.num_layers else position - 1

    # Units -----------------------------------------------------------------------------------------------------------

    def _unit(
        self, position: int, carried: Sequence[fx.Node], sides: Sequence[fx.Node], emitted: Mapping[int, list[fx.Node]]
    ) -> UnitGraph:
        x = carried[position - 1] if position > 0 else None
        results: list[tuple[str, fx.Node]] = []
        if position <= self.num_layers:
            results.append(("x", carried[position]))
        if position == 0:
            results += [("side", node) for node in sides]
        if position > self.num_layers and self.main is not None:
            results.append(("loss", self.main))
        results += [("y", node) for node in emitted.get(position, [])]
        nodes = [node for node in self.nodes if self.at[node] == position and not is_free(node)]
        unit = self._unit_of(position)

        def source(node: fx.Node) -> Source:
            if position == 0:
                return self._source(node)
            if node is x:
                return Source("x")
            if node in sides and (position <= self.num_layers or not self._is_batch(node)):
                return Source("side", list(sides).index(node))
            return self._source(node)

        module, sources, specs = extract(nodes, [node for _, node in results], source)
        return UnitGraph(unit, module, sources, specs, tuple(kind for kind, _ in results))

    def _source(self, node: fx.Node) -> Source:
        if node.name.startswith(f"{TOTAL}_") and node.name not in self.inputs:
            return Source("total", int(node.name.removeprefix(f"{TOTAL}_")))
        if node.name == FRACTION and node.name not in self.inputs:
            return Source("fraction")
        return Source("input", self.inputs[node.name])

    def _count(self) -> tuple[fx.GraphModule | None, tuple[Source, ...]]:
        totals = list(self.separated.totals)
        if not totals:
            return None, ()
        nodes = [node for node in live_nodes(self.graph, totals) if not is_free(node)]
        module, sources, _ = extract(nodes, totals, self._source)
        return module, sources


def _is_like(node: fx.Node, spec: TensorSpec) -> bool:
    found = node.meta["spec"]
    return isinstance(found, TensorSpec) and (found.shape, found.dtype) == (spec.shape, spec.dtype)
