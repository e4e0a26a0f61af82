"""dealing: ``masked_scatter``, which deals the entries of its source out to the places of its mask, in order.

Micro-batches give the same result as the whole batch if each has as many places as entries. That depends on values, so
an operation in the graph checks it at run time. ``x[mask] = y`` is similar, but must have as many places as entries for
the whole batch, too.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from gs_compile.capture.graph import TensorSpec, at_line, origin
from gs_compile.capture.in_place import in_memory_of
from gs_compile.capture.operations import is_free, operation, tensor_spec
from gs_compile.errors import CaptureError, SeparationError


@torch.library.custom_op("greedysnake::one_place_each", mutates_args=())
def _one_place_each(
    mask: torch.Tensor, target: torch.Tensor, source: torch.Tensor, fraction: torch.Tensor, is_exact: bool, where: str
) -> torch.Tensor:
    """A copy of `mask`. Raises `SeparationError` unless it has one place in `target` for each entry of `source`.

    `fraction`: the micro-batch's part of the samples; the whole batch may have other numbers, unless `is_exact`.
    `where`: the user's line. On an accelerator the host waits for the number of places.
    """
    num_places = int(mask.expand(target.shape).sum())
    if num_places != source.numel() and float(fraction) < 1:
        raise SeparationError(
            f"masked_scatter has {num_places} places in a micro-batch for {source.numel()} entries{where}: in the "
            "whole batch some of the entries go to the places of other micro-batches. Give each sample as many places "
            "as it has entries, or set micro_batch_size to the whole batch"
        )
    if num_places != source.numel() and is_exact and float(fraction) == 1:
        raise SeparationError(f"x[mask] = y has {num_places} places for {source.numel()} entries{where}")
    return mask.clone()


@_one_place_each.register_fake
def _(mask: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(mask)


ONE_PLACE_EACH = torch.ops.greedysnake.one_place_each.default
IS_EXACT = "is_exact"  # in the meta of a ``masked_scatter`` that has as many places as entries in any batch


def operands(scatter: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Target, mask and source of a ``masked_scatter``."""
    given: dict[str, Any] = {**dict(zip(("input", "mask", "source"), scatter.args, strict=False)), **scatter.kwargs}
    return given["input"], given["mask"], given["source"]


def masks_of(graph: fx.Graph) -> set[fx.Node]:
    """The placeholders that are masks of a ``masked_scatter``, or of which masks are views."""
    found = set()
    for scatter in graph.nodes:
        if scatter.op.startswith("call_") and operation(scatter).startswith("masked_scatter"):  # an input has any name
            _, mask, _ = operands(scatter)
            while mask.all_input_nodes:
                mask = mask.all_input_nodes[0]
            found.add(mask)
    return found


def deal_by_index(graph: fx.Graph) -> list[fx.Node]:
    """Replace each ``x[mask] = y`` whose `y` has a known number of rows by a ``masked_scatter``; returns these.

    Raises `CaptureError` if `x` shares memory, the mask is one of several indices, or a row has fewer entries than its
    place.
    """
    found = []
    for node in graph.find_nodes(op="call_function", target=operator.setitem):
        target, index, rows = node.args
        mask = index[0] if isinstance(index, tuple) and index else index
        own, places, given = tensor_spec(target), tensor_spec(mask), tensor_spec(rows)
        if own is None or places is None or given is None or not _deals(own, places, given):
            continue
        assert isinstance(target, fx.Node)
        assert isinstance(mask, fx.Node)
        rank, before = len(places.shape), [each for each in in_memory_of(target) if each < node]
        if before != [target] or is_free(target) or given.shape[1:] != own.shape[rank:] or index not in (mask, (mask,)):
            raise CaptureError(
                f"`{node.name}` distributes the rows of a tensor to the places of a mask, whose number depends on "
                f"values{at_line(node)}: write x.masked_scatter(mask[..., None], y)"
            )
        ones = (1,) * (len(own.shape) - rank)
        widening: Any = (..., *[None for _ in ones])
        with graph.inserting_before(node):
            wide = graph.call_function(operator.getitem, (mask, widening))
            scatter = graph.call_method("masked_scatter", (target, wide, rows))
        spec = replace(places, shape=(*places.shape, *ones), stride=(*places.stride, *ones))
        wide.meta = {**mask.meta, **origin(node), "spec": spec}
        scatter.meta = {**target.meta, **origin(node), "batch_numbers": {}, IS_EXACT: True}
        for user in [user for user in target.users if node < user]:
            user.replace_input_with(target, scatter)
        graph.erase_node(node)
        found.append(scatter)
    return found


def _deals(target: TensorSpec, mask: TensorSpec, rows: TensorSpec) -> bool:
    rank = 1 + len(target.shape) - len(mask.shape)
    return mask.dtype == torch.bool and rows.is_sized and len(rows.shape) >= rank and rows.shape[0] != 1
