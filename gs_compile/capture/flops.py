"""flops: floating-point operations of ATen graphs, counted without running them.

Only matrix products, convolutions and attention are counted, as two operations per multiply-add; all else is a fraction
of a per cent in a transformer. Attention is counted in full, although a kernel that skips what the causal mask hides
does half of it. Its backward counts as five products, the forward as two: fused kernels compute the scores again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from gs_compile.capture.graph import hint, packet_of

aten = torch.ops.aten


def count_flops(module: fx.GraphModule, number: Callable[[Any], int] = hint) -> float:
    """Floating-point operations of an ATen graph. number: gives the number of a symbolic size."""
    return float(sum(node_flops(node, number) for node in module.graph.nodes if node.op == "call_function"))


def node_flops(node: fx.Node, number: Callable[[Any], int] = hint) -> float:
    """The operations of one node; 0 if torch does not count it."""
    packet = packet_of(node)
    formula = _UNCOUNTED.get(packet) or flop_registry.get(packet)
    if formula is None:
        return 0.0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
    return float(number(formula(*args, **kwargs, out_val=node.meta.get("val"))))


def _grouped(left: Any, right: Any, *_: Any, **__: Any) -> Any:
    """The operations of a grouped product, as of tokens with their experts; groups of rows, of columns, or of the inner
    dimension.
    """
    batch = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2 * batch * math.prod(left.shape[-2:]) * right.shape[-1]


# Operations that torch's counter omits.
_UNCOUNTED: Mapping[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
    aten._grouped_mm: _grouped,
}
