"""dealing: ``masked_scatter`` deals the entries of its source out to the places of its mask, one after another.

Micro-batches deal as the whole batch does where each has as many places as entries. That depends on values, so an
operation of the graph looks at them as it runs.
"""

from __future__ import annotations

import torch
from torch import fx

from gs_compile.capture.operations import operation
from gs_compile.errors import SeparationError


@torch.library.custom_op("greedysnake::one_place_each", mutates_args=())
def _one_place_each(
    mask: torch.Tensor, target: torch.Tensor, source: torch.Tensor, fraction: torch.Tensor, where: str
) -> torch.Tensor:
    """A copy of `mask`, which has one place in `target` for each entry of `source`, or raises `SeparationError`.

    `fraction`: the micro-batch's part of the samples; the whole batch may have other numbers. `where`: the user's line.
    On an accelerator the host waits for the number of places.
    """
    num_places = int(mask.expand(target.shape).sum())
    if num_places != source.numel() and float(fraction) < 1:
        raise SeparationError(
            f"masked_scatter has {num_places} places in a micro-batch for {source.numel()} entries{where}: in the "
            "whole batch some of the entries go to the places of other micro-batches. Give each sample as many places "
            "as it has entries, or set micro_batch_size to the whole batch"
        )
    return mask.clone()


@_one_place_each.register_fake
def _(
    mask: torch.Tensor, target: torch.Tensor, source: torch.Tensor, fraction: torch.Tensor, where: str
) -> torch.Tensor:
    return torch.empty_like(mask)


ONE_PLACE_EACH = torch.ops.greedysnake.one_place_each.default


def operands(scatter: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Target, mask and source of a ``masked_scatter``."""
    given = {**dict(zip(("input", "mask", "source"), scatter.args, strict=False)), **scatter.kwargs}
    target, mask, source = given["input"], given["mask"], given["source"]
    assert isinstance(target, fx.Node)
    assert isinstance(mask, fx.Node)
    assert isinstance(source, fx.Node)
    return target, mask, source


def masks_of(graph: fx.Graph) -> set[fx.Node]:
    """The placeholders that masks of a ``masked_scatter`` are, or views of."""
    found = set()
    for scatter in graph.nodes:
        if operation(scatter).startswith("masked_scatter"):
            _, mask, _ = operands(scatter)
            while mask.all_input_nodes:
                mask = mask.all_input_nodes[0]
            found.add(mask)
    return found
