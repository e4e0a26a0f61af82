"""flops: floating-point operations of ATen graphs, counted without running them.

Operations are those of matrix products, convolutions and attention, two for each multiply-add; the rest is a fraction
of a per cent of a transformer. Attention is counted in full: a kernel that leaves out what the causal mask hides does
half of it. Its backward is five products to the forward's two, as the fused kernels compute the scores again.
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
    """Floating-point operations of an ATen graph. number: what a symbolic size comes to."""
    return float(sum(node_flops(node, number) for node in module.graph.nodes if node.op == "call_function"))


def node_flops(node: fx.Node, number: Callable[[Any], int] = hint) -> float:
    """The operations of one node; 0 of what torch does not count."""
    packet = packet_of(node)
    formula = _UNCOUNTED.get(packet) or flop_registry.get(packet)
    if formula is None:
        return 0.0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta.get("val"))
    return float(number(formula(*args, **kwargs, out_val=node.meta.get("val"))))


def _grouped(left: Any, right: Any, *_: Any, **__: Any) -> Any:
    """Products of groups, as of tokens with their experts: of rows, of columns, or of what is summed over."""
    batch = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2 * batch * math.prod(left.shape[-2:]) * right.shape[-1]


# What torch's counter leaves out.
_UNCOUNTED: Mapping[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[aten._scaled_dot_product_flash_attention],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
    aten._grouped_mm: _grouped,
}
