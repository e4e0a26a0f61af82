"""stacks: the repeated blocks of a model, in the order of their calls.

A block is one call of a module. Blocks form a stack if they are

    blocks.0  blocks.1  blocks.2             under numbers, as in an nn.ModuleList or nn.Sequential, of any class
    blocks.first  blocks.second              under names, of one class, in a container that is not called itself, or in
                                             an nn.Sequential
    block  block  block                      repeated calls of one module

A module under a number that is called several times has a block for each call. Containers inside a numbered block, such
as its experts, are parts of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import fx, nn

from gs_compile.capture.graph import block_of, module_path

Stack = Sequence[Sequence[fx.Node]]  # the nodes of each block, both in the order of the graph


class _Call(NamedTuple):
    """A call of a module, around a node."""

    path: str
    kind: Hashable  # the module's class
    number: int  # of earlier calls of this module


def stacks(nodes: Iterable[fx.Node]) -> list[Stack]:
    """The stacks of two or more blocks among `nodes`, the one with the most nodes first."""
    found: dict[Hashable, list[list[fx.Node]]] = defaultdict(list)
    latest: dict[Hashable, Hashable] = {}  # of each stack, the current block
    for node in nodes:
        for stack, block in _blocks(node):
            if latest.get(stack) != block:
                latest[stack] = block
                found[stack].append([])
            found[stack][-1].append(node)
    repeated = [blocks for blocks in found.values() if len(blocks) > 1]
    return sorted(repeated, key=lambda blocks: -sum(map(len, blocks)))


def _blocks(node: fx.Node) -> Iterator[tuple[Hashable, Hashable]]:
    """The stacks that a node is in, each with its block there."""
    calls, block = _calls(node), ""
    if (numbered := block_of(node)) is not None:
        path, number = numbered
        block = f"{path}.{number}".lstrip(".")
        yield path, (number, next((call.number for call in calls if call.path == block), 0))
    called = {"", *(call.path for call in calls)} - {call.path for call in calls if _is_sequence(call, block)}
    for path, kind, number in calls:
        container, _, name = path.rpartition(".")
        if container not in called:
            yield (container, kind), (name, number)
        else:
            yield (path, kind), number


def _is_sequence(call: _Call, block: str) -> bool:
    """Whether a module only calls its children one after another, and is not part of a numbered block."""
    is_inside = bool(block) and f"{call.path}.".startswith(f"{block}.")
    return isinstance(call.kind, type) and issubclass(call.kind, nn.Sequential) and not is_inside


def _calls(node: fx.Node) -> list[_Call]:
    """The calls of modules around a node, the outermost first."""
    stack = (node.meta.get("nn_module_stack") or {}).items()
    return [_Call(module_path(path), kind, int(str(key).partition("@")[2] or 0)) for key, (path, kind) in stack]
