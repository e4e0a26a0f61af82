"""split: the graph cut into prologue, layers and epilogue.

Dynamo names the module around every node, so the blocks are found, not guessed. What stands between two blocks goes
with the later one; what depends on the last block, or only feeds what does, is the epilogue; the rest is the
prologue.

    prologue "e"  --x0-->  layer 0  --x1-->  ...  layer L-1  --xL-->  epilogue "h"
        \\------------ side inputs: masks, rotary tables ------/------/

Exactly one tensor goes from a layer to the next, its checkpoint. Anything else that crosses is refused by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import fx

from gs_compile.errors import CaptureError, MutationError, UniformityError
from gs_compile.graph import Captured, OutputSpec, Source, TensorSpec, UnitGraph, source_line
from gs_compile.program import EPILOGUE, PROLOGUE, Unit

from .blocks import block_of
from .loss import FRACTION, TOTAL, Separated
from .operations import is_mutation, mutated, operation
from .specialize import ENTER_AUTOCAST, EXIT_AUTOCAST


@dataclass(frozen=True, slots=True)
class Split:
    """The units in order, prologue first and epilogue last, and what the step gives back."""

    units: tuple[UnitGraph, ...]
    outputs: tuple[OutputSpec, ...]
    sides: tuple[TensorSpec, ...]
    count: fx.GraphModule | None  # the totals of one micro-batch, from `count_sources`
    count_sources: tuple[Source, ...]

    @property
    def num_layers(self) -> int:
        return len(self.units) - 2


def split(separated: Separated, captured: Captured, *, outputs: Sequence[Any]) -> Split:
    """Cut the graph of `separated` into units; `outputs` are its output values, None for those not kept."""
    return _Cut(separated, captured, list(outputs)).run()


def _position(unit: Unit, num_layers: int) -> int:
    """0 for the prologue, 1 ... L for the layers, L + 1 for the epilogue."""
    return 0 if unit == PROLOGUE else num_layers + 1 if unit == EPILOGUE else int(unit) + 1


class _Cut:
    def __init__(self, separated: Separated, captured: Captured, outputs: list[Any]) -> None:
        self.separated = separated
        self.graph = separated.module.graph
        self.outputs = outputs
        self.inputs = {entry.name: index for index, entry in enumerate(captured.inputs)}
        self.batch = captured.names("batch")
        self.nodes = self._live()
        self.at, self.num_layers = self._positions()

    def run(self) -> Split:
        carried = self._carried()
        sides = self._sides(carried)
        outputs, emitted = self._outputs(carried)
        units = tuple(self._unit(position, carried, sides, emitted) for position in range(self.num_layers + 2))
        count, count_sources = self._count()
        side_specs = tuple(node.meta["spec"] for node in sides)
        return Split(units, tuple(outputs), side_specs, count, count_sources)

    # Which nodes, and where ------------------------------------------------------------------------------------------

    def _live(self) -> list[fx.Node]:
        """The nodes that an output needs, in order; changes in place of what is needed are needed too."""
        return live_nodes(self.graph, [value for value in self.outputs if isinstance(value, fx.Node)])

    def _positions(self) -> tuple[dict[fx.Node, int], int]:
        blocks = {node: block for node in self.nodes if (block := block_of(node)) is not None}
        stacks: dict[str, set[int]] = defaultdict(set)
        for path, number in blocks.values():
            stacks[path].add(number)
        if not stacks or max(len(numbers) for numbers in stacks.values()) < 2:
            found = ", ".join(f"{path} ({len(n)} block)" for path, n in stacks.items()) or "no numbered modules at all"
            raise UniformityError(
                f"the model has no repeated block: {found}. greedysnake schedules a stack of equal blocks layer by "
                "layer; keep the blocks in an nn.ModuleList (or nn.Sequential) of two or more"
            )
        stack = max(stacks, key=lambda path: len(stacks[path]))
        order = {number: index for index, number in enumerate(sorted(stacks[stack]))}
        last = len(order) + 1
        at: dict[fx.Node, int] = {}
        for node in self.nodes:  # the earliest unit in which a node can run
            sources = [at[source] for source in node.all_input_nodes if not self._is_free(source)]
            path, number = blocks.get(node, ("", 0))
            at[node] = order[number] + 1 if path == stack else max(sources, default=0)
        readers, brackets = self._readers(), vmap_regions(self.graph)
        for node in reversed(self.nodes):  # what no block holds goes with what reads it
            users = [at[user] for user in readers[node]]
            in_stack = blocks.get(node, ("", 0))[0] == stack
            if not in_stack and not self._is_free(node):
                first_user = min(users, default=last)
                if first_user == last or at[node] > 0 or node in brackets:
                    at[node] = max(first_user, at[node])
            if not self._is_free(node) and any(at[node] > position for position in users):
                raise UniformityError(self._not_in_order(node))
        return at, len(order)

    def _readers(self) -> dict[fx.Node, list[fx.Node]]:
        """What reads each node; a change in place is read by all later readers of the same memory."""
        live = set(self.nodes)
        readers = {node: [user for user in node.users if user in live] for node in self.nodes}
        for bracket, inside in vmap_regions(self.graph).items():
            if bracket in live:
                readers[bracket] = [node for node in inside if node in live]
        later = defaultdict[Any, list[fx.Node]](list)
        for node in reversed(self.nodes):
            if is_mutation(node):
                readers[node] += [user for user in later[mutated(node).meta.get("storage")] if user is not node]
            for source in node.all_input_nodes:
                later[source.meta.get("storage")].append(node)
        return readers

    def _not_in_order(self, node: fx.Node) -> str:
        return (
            f"the blocks do not run one after the other: `{node.name}` ({source_line(node) or operation(node)}) is made "
            "after a block that reads it"
        )

    def _is_free(self, node: fx.Node) -> bool:
        """Inputs and constants belong to every unit that reads them."""
        return node.op in ("placeholder", "get_attr")

    def _crossing(self) -> dict[fx.Node, set[int]]:
        """The values made in one unit and read in others, with the readers' positions."""
        live, crossing = set(self.nodes), defaultdict[fx.Node, set[int]](set)
        for node in self.nodes:
            if not self._is_free(node):
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
        return [self._first_carried(carried[0], crossing), *carried]

    def _first_carried(self, second: fx.Node, crossing: Mapping[fx.Node, set[int]]) -> fx.Node:
        """Which of the prologue's values is the first layer's input: the one that is like the second layer's."""
        spec = second.meta["spec"]
        like = [
            node
            for node, readers in crossing.items()
            if self.at[node] == 0
            and 1 in readers
            and isinstance(found := node.meta["spec"], TensorSpec)
            and (found.shape, found.dtype) == (spec.shape, spec.dtype)
        ]
        if not like:
            raise UniformityError(
                f"the first block reads nothing like what blocks pass on ({second.name}: {spec}); the embedding must "
                "have the shape and dtype of the blocks' outputs"
            )
        return min(like, key=lambda node: (len(crossing[node]), not node.meta["spec"].requires_grad))

    def _not_one(
        self, layer: int, leaving: list[fx.Node], far: list[fx.Node], crossing: Mapping[fx.Node, set[int]]
    ) -> str:
        def reader(position: int) -> str:
            return "the epilogue" if position > self.num_layers else f"layer {position - 1}"

        if not leaving:
            return f"layer {layer} passes nothing on to what follows; its block does not feed the model's output"
        found = "; ".join(
            f"`{node.name}` {node.meta['spec']} read by {', '.join(map(reader, sorted(crossing[node])))}"
            f"{f' at {line}' if (line := source_line(node)) else ''}"
            for node in (far or leaving)
        )
        return (
            f"layer {layer} must pass exactly one tensor, to the next layer; found {found}. Carry it inside the hidden "
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
        changed: dict[int, fx.Node] = {}
        for node in self.nodes:
            if is_mutation(node) and (storage := mutated(node).meta.get("storage")) is not None:
                changed.setdefault(storage, node)
        free = {node.meta.get("storage"): node for node in self.nodes if self._is_free(node)}
        for storage, node in changed.items():
            if storage in free:
                raise MutationError(
                    f"the model changes its input or buffer `{free[storage].name}` in place "
                    f"({source_line(node) or operation(node)}): micro-batches and recomputation would do it again; "
                    "make it a result of forward, or freeze it (eval mode)"
                )
            for value, readers in crossing.items():
                elsewhere = self.at[node] != self.at[value] and readers != {self.at[node]}
                if value.meta.get("storage") == storage and elsewhere:
                    raise MutationError(
                        f"`{value.name}` is read by several units and changed in place at "
                        f"{source_line(node) or operation(node)}; use the out-of-place form there"
                    )

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
            position = self.at[value] if not self._is_free(value) else self.num_layers + 1
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
        nodes = [node for node in self.nodes if self.at[node] == position and not self._is_free(node)]
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
        nodes = [node for node in live_nodes(self.graph, totals) if not self._is_free(node)]
        module, sources, _ = extract(nodes, totals, self._source)
        return module, sources


# Building a unit's module ---------------------------------------------------------------------------------------------


def live_nodes(graph: fx.Graph, wanted: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes that `wanted` need, in graph order; a change in place is needed by whatever shares its memory."""
    needed = set(wanted)
    memory = {node.meta.get("storage") for node in needed}
    nodes = [node for node in graph.nodes if node.op != "output"]
    regions = vmap_regions(graph)
    for node in reversed(nodes):
        if not needed.isdisjoint(regions.get(node, ())):
            needed.add(node)
        if node not in needed and is_mutation(node) and mutated(node).meta.get("storage") in memory - {None}:
            needed.add(node)
        if node in needed:
            needed.update(node.all_input_nodes)
            memory.update(source.meta.get("storage") for source in (node, *node.all_input_nodes))
    return [node for node in nodes if node in needed]


def vmap_regions(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that open and close a vmap, which no data connects to what they enclose, with what they enclose."""
    regions: dict[fx.Node, list[fx.Node]] = {}
    opened: list[tuple[list[fx.Node], list[fx.Node]]] = []  # brackets, and what is inside
    before: list[fx.Node] = []
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if name == "lazy_load_decompositions":
            before.append(node)
        elif name == "_vmap_increment_nesting":
            opened.append(([*before, node], []))
            before = []
        elif name == "_vmap_decrement_nesting":
            brackets, inside = opened.pop()
            regions |= dict.fromkeys([*brackets, node], inside)
            if opened:
                opened[-1][1].extend([*brackets, *inside, node])
        elif opened:
            opened[-1][1].append(node)
    return regions


def extract(
    nodes: Sequence[fx.Node], results: Sequence[fx.Node], source: Any
) -> tuple[fx.GraphModule, tuple[Source, ...], tuple[TensorSpec, ...]]:
    """A graph module of `nodes` that returns `results`; what they read from elsewhere becomes placeholders.

    Placeholders are in order of first use, so that layers of equal code have equal graphs. What a unit reads and
    changes in place is copied first, and autocast regions are opened and closed again around their nodes.
    """
    graph = fx.Graph()
    own, known = set(nodes), dict[fx.Node, fx.Node]()
    read = dict.fromkeys(chain(chain.from_iterable(node.all_input_nodes for node in nodes), results))
    inputs = [node for node in read if node not in own and node.op != "get_attr"]
    changed = {mutated(node).meta.get("storage") for node in nodes if is_mutation(node)} - {None}
    sources, specs = [], []
    owner = nodes[0].graph.owning_module if nodes else results[0].graph.owning_module
    root = torch.nn.Module()
    for node in inputs:
        known[node] = graph.placeholder(node.name)
        sources.append(source(node))
        is_checkpoint = sources[-1].kind == "x"  # whose gradient always passes on, even where nothing below needs it
        specs.append(replace(node.meta["spec"], requires_grad=is_checkpoint or node.meta["spec"].requires_grad))
        known[node].meta = {"spec": specs[-1]}
    for node in inputs:
        if node.meta.get("storage") in changed:
            known[node] = graph.call_method("clone", (known[node],))
    for node in read:
        if node.op == "get_attr" and node not in own:
            known[node] = _attribute(graph, root, owner, node)
    opened: list[fx.Node] = []
    regions: tuple[Any, ...] = ()
    for node in nodes:
        wanted = node.meta.get("autocast", ())
        if wanted != regions:
            _close(graph, opened)
            opened = [graph.call_function(ENTER_AUTOCAST, tuple(args)) for args in wanted]
            regions = wanted
        known[node] = graph.node_copy(node, known.__getitem__)
    _close(graph, opened)
    graph.output(tuple(known[node] for node in results))
    module = fx.GraphModule(root, graph)
    return module, tuple(sources), tuple(specs)


def _close(graph: fx.Graph, opened: list[fx.Node]) -> None:
    for entered in reversed(opened):
        graph.call_function(EXIT_AUTOCAST, (entered,))


def _attribute(graph: fx.Graph, root: torch.nn.Module, owner: Any, node: fx.Node) -> fx.Node:
    setattr(root, str(node.target), getattr(owner, str(node.target)))
    copied = graph.get_attr(str(node.target))
    copied.meta = dict(node.meta)
    return copied
