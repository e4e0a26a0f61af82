"""arrange: the unit in which each node of the graph runs.

Units are counted from the bottom: 0 is the prologue, 1 ... L the layers, L + 1 the epilogue.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from gs_compile.capture.graph import Block, block_of, source_line
from gs_compile.capture.operations import operation
from gs_compile.capture.regions import readers_of, vmap_regions
from gs_compile.errors import UniformityError


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The position of every node, and the number of layers."""

    position: Mapping[fx.Node, int]
    num_layers: int


def arrange(graph: fx.Graph, nodes: Sequence[fx.Node]) -> Arrangement:
    """Give each of `nodes`, those of `graph` that are needed, its unit.

    A block's nodes are its layer's. Others run with what reads them where they depend on a layer or only feed the
    epilogue, and in the prologue else. Raises `UniformityError` where there is no stack of blocks, or its blocks do not
    run one after the other.
    """
    blocks = {node: block for node in nodes if (block := block_of(node)) is not None}
    layer = _layers(blocks)
    last = max(layer.values()) + 1
    position: dict[fx.Node, int] = {}
    for node in nodes:  # the earliest unit in which it can run
        sources = [position[source] for source in node.all_input_nodes if not is_free(source)]
        position[node] = layer.get(blocks.get(node), max(sources, default=0))
    regions = vmap_regions(graph)
    readers = readers_of(nodes, regions)
    for node in reversed(nodes):
        if is_free(node):
            continue
        users = [position[user] for user in readers[node]]
        first_user = min(users, default=last)
        if blocks.get(node) not in layer and (first_user == last or position[node] > 0 or node in regions):
            position[node] = max(first_user, position[node])
        if any(position[node] > user for user in users):
            raise UniformityError(
                f"the blocks do not run one after the other: `{node.name}` "
                f"({source_line(node) or operation(node)}) is made after a block that reads it"
            )
    return Arrangement(position, last - 1)


def is_free(node: fx.Node) -> bool:
    """Inputs and constants belong to every unit that reads them."""
    return node.op in ("placeholder", "get_attr")


def _layers(blocks: Mapping[fx.Node, Block]) -> dict[Block | None, int]:
    """The positions of the blocks of the longest stack."""
    stacks: dict[str, set[int]] = defaultdict(set)
    for path, number in blocks.values():
        stacks[path].add(number)
    stack = max(stacks, key=lambda path: len(stacks[path]), default="")
    if len(stacks[stack]) < 2:
        found = ", ".join(f"{path} ({len(n)} block)" for path, n in stacks.items() if n) or "no numbered modules at all"
        raise UniformityError(
            f"the model has no repeated block: {found}. greedysnake schedules a stack of equal blocks layer by layer; "
            "keep the blocks in an nn.ModuleList (or nn.Sequential) of two or more"
        )
    return {(stack, number): place for place, number in enumerate(sorted(stacks[stack]), start=1)}
