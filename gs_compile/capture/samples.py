"""samples: whether an operation on values of samples keeps the samples apart."""

from __future__ import annotations

from torch import fx

from gs_compile.capture.graph import TensorSpec, block_of
from gs_compile.capture.operations import ARITHMETIC, dimensions, is_arange, normalises_by_batch

ALONG_SAMPLES = "runs along the batch dimension"


def why_it_mixes(node: fx.Node, name: str, spec: TensorSpec) -> str:
    """Why an operation on samples mixes them; empty where it keeps them apart."""
    if normalises_by_batch(node):
        return "normalises by the statistics of the batch (use LayerNorm, or put it in eval mode)"
    if len(spec.batch_dims) > 1:
        return "pairs the samples of the batch with each other"
    if node.meta.get("uneven"):
        return "takes a part of the samples"
    if node.meta.get("batch_numbers") and name in ARITHMETIC and spec.dtype.is_floating_point:
        return "computes with the batch size"
    if spec.dtype.is_floating_point and name in (*ARITHMETIC, "embedding") and any(map(_numbers, node.all_input_nodes)):
        return "computes with the numbers of the samples, which every micro-batch counts from 0"
    return ALONG_SAMPLES if works_along_samples(node, name) else ""


def works_along_samples(node: fx.Node, name: str) -> bool:
    """Whether an operation that works along a dimension, or several, does so along the samples'."""
    spec = node.all_input_nodes[0].meta.get("spec")
    if not isinstance(spec, TensorSpec) or not spec.shape:
        return False
    if name == "getitem" and block_of(node) is None and _picks_samples(node, spec):
        return True
    dims = dimensions(node, len(spec.shape), inside_block=block_of(node) is not None)
    return any(dim % len(spec.shape) in spec.batch_dims for dim in dims)


def _picks_samples(node: fx.Node, spec: TensorSpec) -> bool:
    """``x[index]`` with an index for the samples other than their own numbers, as in ``x[arange(B), last]``."""
    index = node.args[1]
    first = index[0] if isinstance(index, tuple) and index else index
    if 0 not in spec.batch_dims or not isinstance(first, fx.Node) or is_arange(first):
        return False
    if first.meta.get("storage") is None:  # inside a vmap, where masks are looked up sample by sample
        return False
    found = first.meta.get("spec")
    return isinstance(found, TensorSpec) and bool(found.batch_dims)


def _numbers(source: fx.Node) -> bool:
    """Whether a value holds the samples' numbers."""
    spec = source.meta.get("spec")
    return isinstance(spec, TensorSpec) and bool(spec.batch_dims) and is_arange(source)
