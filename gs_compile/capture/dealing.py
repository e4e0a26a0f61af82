"""dealing: ``masked_scatter`` deals the entries of its source out to the places of its mask, one after another.

Micro-batches deal as the whole batch does where each has as many places as entries. That depends on values, so an
operation of the graph looks at them as it runs. ``x[mask] = y`` does the same, but runs with no values that are made up
to be timed, so it is refused.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from gs_compile.capture.graph import TensorSpec, at_line
from gs_compile.capture.operations import operation
from gs_compile.errors import CaptureError, SeparationError


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


def refuse_dealing_by_index(graph: fx.Graph) -> None:
    """Raise `CaptureError` for ``x[mask] = y`` with rows of `y` whose number no values decide."""
    for node in graph.find_nodes(op="call_function", target=operator.setitem):
        target, index, rows = node.args
        mask = index[0] if isinstance(index, tuple) and index else index
        specs = [each.meta.get("spec") if isinstance(each, fx.Node) else None for each in (target, mask, rows)]
        if _deals(*specs):
            raise CaptureError(
                f"`{node.name}` distributes the rows of a tensor to the places of a mask, whose number depends on "
                f"values{at_line(node)}: write x.masked_scatter(mask[..., None], y)"
            )


def _deals(target: object, mask: object, rows: object) -> bool:
    if not isinstance(target, TensorSpec) or not isinstance(mask, TensorSpec) or not isinstance(rows, TensorSpec):
        return False
    rank = 1 + len(target.shape) - len(mask.shape)
    return mask.dtype == torch.bool and rows.is_sized and len(rows.shape) >= rank and rows.shape[0] != 1
