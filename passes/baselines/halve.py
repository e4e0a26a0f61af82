"""halve: every block cut in two at the residual addition in its middle, as the single schedule wants it.

    x ----+---------------> add ----+--------------------> add --> next block
          '--> attention --'        '--> feed-forward ---'
                             |
          attention half     |     feed-forward half

Everything on its way from a block's input to its output passes through that addition, so it is all that goes from one
half to the other: a checkpoint (arXiv 2512.17570, section 3.2). It is found as the first of the two places where
branches are added and nothing passes by. Norms may stand before, inside or after the branches. Where attention and
feed-forward run side by side there is one such place, the end of the block, and the block is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from torch import fx

from gs_compile.capture.graph import BlockCut, block_of, source_line
from gs_compile.capture.operations import is_free, operation
from gs_compile.capture.residual_stream import Readers, is_like
from gs_compile.errors import UniformityError

NUM_RESIDUALS = 2  # of a block: around the attention, and around the feed-forward


def halve(readers: Readers, whole: Mapping[fx.Node, int], carried: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """`whole`, the units of the nodes, with two layers for each; `carried` is what goes from layer to layer.

    Raises `UniformityError` where a block has not exactly two residual additions.
    """
    position = {node: max(2 * at - 1, 0) for node, at in whole.items()}  # the first half's, and the ends
    for layer, (first, last) in enumerate(pairwise(carried)):
        block = [node for node in readers if whole[node] == layer + 1 and not is_free(node)]
        boundary = _boundary(layer, block, readers, first, last)
        for node in _after(boundary, block, readers):
            position[node] += 1
    return position


HALVES = BlockCut(names=("attention", "feed-forward"), part="half", parts="halves", units=halve)


def _boundary(layer: int, block: Sequence[fx.Node], readers: Readers, first: fx.Node, last: fx.Node) -> fx.Node:
    """The residual addition in the middle of a block that takes `first` to `last`."""
    additions, wanted = _residuals(block, readers, first, last), first.meta["spec"]
    names = ", ".join(f"`{node.name}`{f' at {line}' if (line := source_line(node)) else ''}" for node in additions)
    if len(additions) == 1:
        here = f"there is one, {names}: the two run side by side, or one of them is missing"
    elif len(additions) != NUM_RESIDUALS:
        here = f"there are {len(additions)}: {names}" if additions else "there is none"
    elif not is_like(additions[0], wanted):
        here = f"the first of two, `{additions[0].name}`, is {additions[0].meta['spec']} and the block's input {wanted}"
    else:
        return additions[0]
    path = next((f" ({'.'.join(map(str, name))})" for node in block if (name := block_of(node))), "")
    raise UniformityError(
        f"layer {layer}{path} cannot be cut in two: the single schedule keeps a checkpoint between attention and "
        f"feed-forward, at the first of two residual additions that all of the block passes through; here {here}. "
        'Choose expert.schedule="vertical"'
    )


def _residuals(block: Sequence[fx.Node], readers: Readers, first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """The additions that join branches on the way from `first` to `last`, and that no branch passes by."""
    leading = {last}
    for node in reversed(block):
        if not leading.isdisjoint(readers[node]):
            leading.add(node)
    order = {node: index for index, node in enumerate(block)}
    path, reached, furthest = set[fx.Node](), {first}, 0  # the last place where anything on the path is read
    additions = []
    for node in (first, *(node for node in block if node in leading)):
        if node in reached:
            joins = sum(source in path for source in node.all_input_nodes) > 1
            if joins and furthest <= order[node] and operation(node) in ("add", "iadd"):
                additions.append(node)
            onward = leading.intersection(readers[node])
            furthest = max([furthest, *(order[reader] for reader in onward)])
            reached |= onward
            path.add(node)
    return additions


def _after(boundary: fx.Node, block: Sequence[fx.Node], readers: Readers) -> set[fx.Node]:
    """The nodes of the second half: what depends on the boundary, and what is read there alone."""
    before, after = {boundary}, set(readers[boundary])
    for node in block:
        if node in after:
            after.update(readers[node])
    for node in reversed(block):
        users = readers[node]
        if not before.isdisjoint(users):
            before.add(node)
        elif node not in before and users and after.issuperset(users):
            after.add(node)
    return after.intersection(block)
