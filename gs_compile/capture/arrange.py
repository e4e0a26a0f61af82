"""arrange: which nodes some values need, which nodes read each of them, and the unit in which each runs.

Units are counted from the bottom: 0 is the prologue, 1 ... L the layers, L + 1 the epilogue. Changes in place and vmap
regions act on values without being their inputs: a change is read by whoever later looks at the same memory, and what
opens or closes a vmap by what is inside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from gs_compile.capture.graph import TensorSpec, block_of, source_line
from gs_compile.capture.operations import is_mutation, mutated, operation
from gs_compile.errors import UniformityError

Readers = Mapping[fx.Node, Sequence[fx.Node]]  # nodes in graph order, each with those of them that read it
VMAP_BRACKETS = LOAD, ENTER, LEAVE = "lazy_load_decompositions", "_vmap_increment_nesting", "_vmap_decrement_nesting"


def needed_by(wanted: Iterable[fx.Node], graph: fx.Graph) -> Readers:
    """The nodes of `graph` that `wanted` need; a change in place is needed by whatever shares its memory."""
    live = set(wanted)
    memory = {storage_of(node) for node in live} - {None}
    nodes = [node for node in graph.nodes if node.op != "output"]
    readers = _readers(nodes)
    for node in reversed(nodes):
        changes_a_result = is_mutation(node) and storage_of(mutated(node)) in memory
        if changes_a_result or not live.isdisjoint((node, *readers[node])):
            live.update((node, *node.all_input_nodes))  # sources now: what closes a vmap comes before what is inside
    return {node: [reader for reader in readers[node] if reader in live] for node in nodes if node in live}


def arrange(readers: Readers) -> tuple[dict[fx.Node, int], int]:
    """The unit of each node, and the number of layers.

    A block's nodes are its layer's. Others run with what reads them where they depend on a layer or only feed the
    epilogue, and in the prologue else. Raises `UniformityError` where there is no stack of blocks, or its blocks do not
    run one after the other.
    """
    layer = _layers(readers)
    num_layers = max(layer.values())
    position: dict[fx.Node, int] = {}
    for node in readers:  # the earliest unit in which it can run
        sources = [position[source] for source in node.all_input_nodes if not is_free(source)]
        position[node] = layer.get(node, max(sources, default=0))
    for node in filter(lambda node: not is_free(node), reversed(list(readers))):
        users = [position[reader] for reader in readers[node]]
        first_user = min(users, default=num_layers + 1)
        moves = first_user > num_layers or position[node] > 0 or _name(node) in VMAP_BRACKETS
        if node not in layer and moves:
            position[node] = max(first_user, position[node])
        if any(position[node] > user for user in users):
            raise UniformityError(
                f"the blocks do not run one after the other: `{node.name}` "
                f"({source_line(node) or operation(node)}) is made after a block that reads it"
            )
    return position, num_layers


def is_free(node: fx.Node) -> bool:
    """Inputs and constants belong to every unit that reads them."""
    return node.op in ("placeholder", "get_attr")


def is_like(node: fx.Node, spec: TensorSpec) -> bool:
    """Whether a value is a tensor of this shape and dtype."""
    found = node.meta["spec"]
    return isinstance(found, TensorSpec) and (found.shape, found.dtype) == (spec.shape, spec.dtype)


def storage_of(node: fx.Node) -> int | None:
    """A number of the memory that a value is in; None where nothing is known of it."""
    storage: int | None = node.meta.get("storage")
    return storage


def _layers(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """The positions of the nodes in the blocks of the longest stack."""
    stacks: dict[str, dict[int, list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
    for node in nodes:
        if (block := block_of(node)) is not None:
            stacks[block[0]][block[1]].append(node)
    stack = max(stacks.values(), key=len, default={})
    if len(stack) < 2:
        found = ", ".join(f"{path} ({len(blocks)} block)" for path, blocks in stacks.items())
        raise UniformityError(
            f"the model has no repeated block: {found or 'no numbered modules at all'}. greedysnake schedules a stack "
            "of equal blocks layer by layer; keep the blocks in an nn.ModuleList (or nn.Sequential) of two or more"
        )
    return {node: place for place, number in enumerate(sorted(stack), start=1) for node in stack[number]}


def _readers(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    readers = {node: list(node.users) for node in nodes}
    later = defaultdict[Any, list[fx.Node]](list)  # the readers of each memory
    for node in reversed(nodes):
        if is_mutation(node):
            readers[node] += [user for user in later[storage_of(mutated(node))] if user is not node]
        for source in node.all_input_nodes:
            later[storage_of(source)].append(node)
    return readers | _inside_vmaps(nodes)


def _inside_vmaps(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that open and close a vmap, which no data connects to what they enclose, with what they enclose."""
    regions: dict[fx.Node, list[fx.Node]] = {}
    opened: list[tuple[list[fx.Node], list[fx.Node]]] = []  # brackets, and what is inside
    before: list[fx.Node] = []
    for node in nodes:
        name = _name(node)
        if name == LEAVE:
            brackets, inside = opened.pop()
            regions |= dict.fromkeys([*brackets, node], inside)
        for _, inside in opened:
            inside.append(node)
        if name in (LOAD, ENTER):
            before.append(node)
        if name == ENTER:
            opened.append((before, []))
            before = []
    return regions


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", ""))
