"""samples: which operations keep the samples of a batch apart, and why others mix them.

Samples are along the dimensions that grow with the batch. An operation that works along one of these, or computes with
the numbers of samples or how many there are, gives a micro-batch other values than the whole batch. Inside a block
integers send tokens to experts: there what they pick and order is trusted, but not numbers that are computed with.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from gs_compile.capture.graph import TensorSpec, block_of
from gs_compile.capture.internals import tree_leaves
from gs_compile.capture.operations import (
    ARITHMETIC,
    AVERAGING,
    FILLING,
    arguments_of,
    has_samples,
    is_sized,
    normalises_by_batch,
    operation,
)

# Operations along dimensions: the place of these among the arguments, and which they are otherwise (None: all).
_LAST = (1, (-1,))
ALONG_DIMENSIONS: dict[str, tuple[int, tuple[int, ...] | None]] = {
    **dict.fromkeys("softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin flip unfold".split(), _LAST),
    **{
        f"fft_{kind}{end}": (2, dims)
        for kind in "fft ifft rfft irfft hfft ihfft".split()
        for end, dims in (("", (-1,)), ("2", (-2, -1)), ("n", None))
    },
    **dict.fromkeys(("fft_fftshift", "fft_ifftshift"), (1, None)),
    "diff": (2, (-1,)),
    "flipud": (1, (0,)),
    "gumbel_softmax": (4, (-1,)),
    "normalize": (2, (1,)),
    "roll": (2, None),
    "rot90": (2, (0, 1)),
    **dict.fromkeys(("tril", "triu"), (2, (-2, -1))),  # by numbers of rows
}
ORDERING = {"sort": _LAST, "argsort": _LAST, "topk": (2, (-1,))}
PICKING = {  # by indices
    **dict.fromkeys("gather index_select index_add index_copy scatter scatter_add scatter_reduce".split(), _LAST),
    **dict.fromkeys(("take", "take_along_dim"), (2, None)),
}
LAST_DIMENSIONS = frozenset("layer_norm rms_norm".split())  # these normalise the last ones, as many as are given
# These read neighbours along the dimensions from this one on, or normalise over them.
OF_IMAGES = {"unfold": 1, "fold": 1, "local_response_norm": 1, "group_norm": 1, "instance_norm": 2, "interpolate": 2}
SCANS = frozenset("scan associative_scan".split())  # over the first dimension
NUMBERING = frozenset("arange eye randperm".split())  # of samples, where what these make grows with them
# With one tensor, these leave numbers in their order, or give those of rows of each sample.
IN_ORDER = frozenset(
    "view reshape flatten squeeze unsqueeze expand contiguous clone detach to type int long float double getitem "
    "repeat tile repeat_interleave add mul floordiv".split()
)

_FIRST = (slice(None, 1), slice(0, 1), slice(None, 1, 1), slice(0, 1, 1))
ALONG_SAMPLES = "runs along the batch dimension"
PAIRING = "pairs the samples of the batch with each other"


def why_it_mixes(node: fx.Node, name: str, spec: TensorSpec, numbers: Collection[fx.Node]) -> str:
    """Why an operation on samples mixes them; empty where it keeps them apart. numbers: as `follows_numbers` finds."""
    if normalises_by_batch(node):
        return "normalises by the statistics of the batch (use LayerNorm, or put it in eval mode)"
    if len(spec.batch_dims) > 1:
        return PAIRING
    if name == "embedding" and arguments_of(node)["scale_grad_by_freq"]:
        return "divides gradients by how often the batch has an index (leave scale_grad_by_freq=True out)"
    if name == "embedding" and has_samples(arguments_of(node)["weight"]) and block_of(node) is None:
        return "looks rows up among the samples of the batch (a table with as many rows needs a dimension before them)"
    if name.startswith("masked_scatter") and not has_samples(node.all_input_nodes[-1]):
        return "deals the entries of a tensor without samples out to those of the batch, one after another"
    if node.meta.get("uneven"):
        return "takes a part of the samples"
    if node.meta.get("regroups"):
        return "takes rows of several samples for one (transpose, or permute, before it)"
    if node.meta.get("batch_numbers") and name in ARITHMETIC and spec.dtype.is_floating_point:
        return "computes with the batch size"
    given = [source for source in node.all_input_nodes if source in numbers and node not in numbers]
    if given and (not all(map(_is_in_order, given)) if _picks(name) else spec.dtype.is_floating_point):
        return "computes with the numbers of the samples, which every micro-batch counts from 0"
    if name == "einsum" and isinstance(node.args[0], str) and _sums_samples(node, node.args[0]):
        return "sums over the samples of the batch for each of them"
    return why_it_runs_along(node, name)


def why_values_mix(node: fx.Node, name: str) -> str:
    """Why the values that decide a size, of the operation's result or what it reads, mix samples; empty: they do not.

    Inside a block they send tokens to experts.
    """
    if not is_sized(node) and block_of(node) is None:
        return "has a size that values decide"
    if name in AVERAGING and is_sized(node) and not all(map(is_sized, node.all_input_nodes)):
        return "averages over as many elements as values decide"
    return ""


def follows_numbers(node: fx.Node, numbers: Collection[fx.Node]) -> bool:
    """Whether a value is made of the numbers of the samples alone; numbers: the values before it that are."""
    name, made_from = operation(node), list(filter(has_samples, node.all_input_nodes))
    if not has_samples(node) or name in FILLING - NUMBERING or name.endswith("_like"):
        return False
    return name in NUMBERING or (bool(made_from) and all(source in numbers for source in made_from))


def aligned(one: Any, other: Any) -> bool:
    """Whether two values that are broadcast together have their samples in the same dimension."""
    specs = [each.meta["spec"] for each in (one, other) if isinstance(each, fx.Node) and has_samples(each)]
    return len({tuple(dim - len(spec.shape) for dim in spec.batch_dims) for spec in specs}) < 2


def why_it_runs_along(node: fx.Node, name: str) -> str:
    """Why an operation that works along a dimension, or several, mixes samples: it does so along theirs; else empty."""
    spec = next((n.meta["spec"] for n in node.all_input_nodes if isinstance(n.meta.get("spec"), TensorSpec)), None)
    if spec is None or not spec.shape:
        return ""
    is_pick = name in ("getitem", "setitem", "index_put") and block_of(node) is None and _picks_samples(node, spec)
    if not is_pick and all(dim % len(spec.shape) not in spec.batch_dims for dim in _dimensions(node, name, spec)):
        return ""
    is_attention = node.target is functional.multi_head_attention_forward
    return ALONG_SAMPLES + (" (give the module batch_first=True)" if is_attention else "")


def picks_of_equals(node: fx.Node, name: str) -> bool:
    """``x[:1]`` or ``x[0]`` of one row that is expanded to all samples, as prompts that are learned are: that row."""
    spec = node.all_input_nodes[0].meta.get("spec")
    if name != "getitem" or not isinstance(spec, TensorSpec) or spec.batch_dims != (0,):
        return False
    first = node.args[1][:1] if isinstance(node.args[1], tuple) else (node.args[1],)
    is_first = [(type(index) is int and index == 0) or index in _FIRST for index in first] == [True]
    return is_first and spec.stride[0] == 0


def _sums_samples(node: fx.Node, equation: str) -> bool:
    """Whether an einsum leaves out the dimension of a factor's samples, as ``"btd,ctd->bd"`` does."""
    factors, _, made = equation.replace(" ", "").replace("...", ".").partition("->")
    pairs = zip(factors.split(","), tree_leaves(node.args[1:]), strict=False)
    places = ((letters, each.meta["spec"]) for letters, each in pairs if has_samples(each) and "." not in letters)
    return bool(made) and any(letters[dim] not in made for letters, spec in places for dim in spec.batch_dims)


# Indices --------------------------------------------------------------------------------------------------------------


def _picks(name: str) -> bool:
    return name in ("getitem", "setitem", "index_put", "embedding_bag") or name in PICKING


def _picks_samples(node: fx.Node, spec: TensorSpec) -> bool:
    """``x[index]`` by an index for the samples that is neither a mask nor their own numbers, as ``arange(B)``."""
    index = node.args[1]
    first = index[0] if isinstance(index, (tuple, list)) and index else index
    if 0 not in spec.batch_dims or not isinstance(first, fx.Node) or not has_samples(first) or _is_in_order(first):
        return False
    is_mask = first.meta["spec"].dtype is torch.bool
    return first.meta.get("storage") is not None and not is_mask  # inside a vmap masks are looked up by sample


def _is_in_order(node: fx.Node) -> bool:
    """Whether a node holds the numbers 0, 1, ... in order, in whatever shape, or those of rows of each sample."""
    while len(node.all_input_nodes) == 1 and operation(node) in IN_ORDER:
        (node,) = node.all_input_nodes
    given: Any = node.args if len(node.args) > 1 else (0, *node.args)  # where it begins, and ends, and its step
    return operation(node) == "arange" and given[0] == 0 and min(given[2:], default=1) > 0


# Dimensions -----------------------------------------------------------------------------------------------------------


def _dimensions(node: fx.Node, name: str, spec: TensorSpec) -> tuple[int, ...]:
    """The dimensions of its first input along which an operation works, where it is one that does."""
    if node.target is functional.scaled_dot_product_attention:
        return (-2,)
    if node.target is functional.multi_head_attention_forward or name in SCANS:  # batch_first modules transpose before
        return (0,)
    if name in LAST_DIMENSIONS:
        shape = node.kwargs.get("normalized_shape", node.args[1] if len(node.args) > 1 else ())
        return tuple(range(-len(shape), 0)) if isinstance(shape, (tuple, list)) else ()
    if found := _neighbours(node, name, len(spec.shape)):
        return found
    is_by_indices = name in PICKING or (name in ORDERING and not spec.dtype.is_floating_point)
    if block_of(node) is not None and is_by_indices:
        return ()
    if (known := {**ALONG_DIMENSIONS, **ORDERING, **PICKING}.get(name)) is None:
        return ()
    place, otherwise = known
    named: list[Any] = [node.kwargs[key] for key in ("dim", "dims", "dimension", "axis") if key in node.kwargs]
    given = node.args[1:] if name == "flip" and not named else [*named, *node.args[place:], otherwise][0]
    if given is None:
        return tuple(range(len(spec.shape)))
    return tuple(dim for dim in tree_leaves(given) if isinstance(dim, int))


def _neighbours(node: fx.Node, name: str, rank: int) -> tuple[int, ...]:
    """The dimensions along which entries are read or normalised together, as those of an image and its channels."""
    if name == "pad":
        pad: Any = node.kwargs.get("pad", node.args[1] if len(node.args) > 1 else ())
        return tuple(-1 - index // 2 for index, number in enumerate(pad) if number)
    if name in OF_IMAGES and node.op == "call_function":  # a tensor's `unfold` is another
        return tuple(range(OF_IMAGES[name], rank))
    if (found := re.search(r"(conv|pool)\w*?(\d)d", name)) is None:
        return ()
    groups = node.kwargs.get("groups", node.args[6] if len(node.args) > 6 else 1)
    are_apart = found[1] == "pool" or groups in node.meta.get("batch_numbers", ())  # channels
    return tuple(range(-int(found[2]) - (not are_apart), 0))
