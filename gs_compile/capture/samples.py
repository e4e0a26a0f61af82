"""samples: which operations keep the samples of a batch apart, and why others mix them.

Samples are along the dimensions that grow with the batch, laid out as `sample_layout` says. An operation that works
along one of these, or computes with the indices or the number of samples, gives a micro-batch other values than the
whole batch. Inside a block, integers route tokens to experts: indexing and sorting by them is trusted there if the
samples' data decides it; computing with them is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from gs_compile.capture.graph import TensorSpec, block_of
from gs_compile.capture.in_place import in_memory_of, mutated
from gs_compile.capture.internals import tree_leaves
from gs_compile.capture.operations import (
    AVERAGING,
    COMPARING,
    FILLING,
    PICKING,
    REGROUPING,
    SHAPING,
    WRITING,
    argument,
    arguments_of,
    computes,
    computes_with_sizes,
    has_samples,
    is_sized,
    maker_of,
    normalises_by_batch,
    of_values,
    operation,
    spec_made,
    tensor_spec,
)
from gs_compile.capture.sample_layout import INDEXING, PAIRING, PART, in_order, index_along, start_and_step

# Operations along dimensions: the place of these among the arguments, and their default (None: all).
_LAST = (1, (-1,))
_FIXED = 99  # a place that no argument has
ALONG_DIMENSIONS: dict[str, tuple[int, tuple[int, ...] | None]] = {
    **dict.fromkeys("softmax log_softmax softmin _softmax _log_softmax _safe_softmax glu flip unfold".split(), _LAST),
    **dict.fromkeys("cumsum cumprod logcumsumexp cummax cummin".split(), _LAST),
    **{
        f"fft_{kind}{end}": (2, dims)
        for kind in "fft ifft rfft irfft hfft ihfft".split()
        for end, dims in (("", (-1,)), ("2", (-2, -1)), ("n", None))
    },
    **dict.fromkeys(("fft_fftshift", "fft_ifftshift"), (1, None)),
    **dict.fromkeys(("conv_tbc", "ctc_losses"), (_FIXED, (0, 2))),
    "diff": (2, (-1,)),
    **dict.fromkeys(("fill_diagonal", "diagonal_scatter", "put"), (_FIXED, None)),  # by numbers of rows
    "fliplr": (_FIXED, (1,)),
    "flipud": (_FIXED, (0,)),
    "gumbel_softmax": (4, (-1,)),
    "msort": (_FIXED, (0,)),
    "normalize": (2, (1,)),
    # losses, along classes or the entries of a row; of one dimension, that is the one
    **dict.fromkeys(
        "cross_entropy nll_loss multi_margin_loss multilabel_margin_loss cosine_embedding_loss".split(), (_FIXED, (1,))
    ),
    **dict.fromkeys(("triplet_margin_loss", "multilabel_soft_margin_loss"), (_FIXED, (-1,))),
    **dict.fromkeys(("quantile", "nanquantile"), (2, None)),
    "renorm": (2, (0,)),
    "roll": (2, None),
    "rot90": (2, (0, 1)),
    "searchsorted": (_FIXED, (-1,)),
    **dict.fromkeys(("select_scatter", "slice_scatter"), (2, (0,))),
    "take": (_FIXED, None),  # counts entries from the first one of the first sample
    **dict.fromkeys("tril triu".split(), (_FIXED, (-2, -1))),  # by numbers of rows
    # of matrices
    **dict.fromkeys(
        "qr svd inverse pinverse cholesky matrix_exp det svd_lowrank pca_lowrank".split(), (_FIXED, (-2, -1))
    ),
}
IMPLICIT = frozenset("softmax log_softmax softmin".split())  # their default depends on the rank
# Operations of linear algebra work on matrices, in the last two dimensions; these do not.
OF_VECTORS = frozenset("norm vector_norm matrix_norm vecdot cross matmul multi_dot vander diagonal".split())
ORDERING = {"sort": _LAST, "argsort": _LAST, "topk": (2, (-1,))}
# These tell the place of an entry.
POINTING: dict[str, tuple[int, tuple[int, ...] | None]] = {
    **dict.fromkeys("argmax argmin max min median nanmedian".split(), (1, None)),
    "mode": _LAST,
    "kthvalue": (2, (-1,)),
}
BY_INDICES = {**dict.fromkeys(PICKING - {"take"}, _LAST), "take_along_dim": (2, None)}
LAST_DIMENSIONS = frozenset("layer_norm rms_norm native_layer_norm".split())  # as many of these as they are given
# These read neighbours along the dimensions from this one on, or normalise over them.
OF_IMAGES = {
    **dict.fromkeys("unfold fold local_response_norm group_norm native_group_norm".split(), 1),
    **dict.fromkeys("instance_norm interpolate upsample upsample_nearest upsample_bilinear".split(), 2),
}
SCANS = {"scan": 2, "associative_scan": 1}  # over the first dimension of the tensors at this place of the arguments
NUMBERING = frozenset("arange eye randperm linspace logspace".split())  # they number samples, if their result grows

_FIRST = (slice(None, 1), slice(0, 1), slice(None, 1, 1), slice(0, 1, 1))
ALONG_SAMPLES = "runs along the batch dimension"
TO_FLOATS = frozenset("to type type_as float double half bfloat16".split())
COUNTED = "computes with what is counted over the samples"
SIZE = "computes with the batch size"
REDUCES = "reduces over the samples of the batch"
NUMBERED = "computes with the numbers of the samples, which every micro-batch counts from 0"


class Provenance:
    """What the values of a graph depend on; `follow` is called with each node, in the graph's order.

    numbers: values that depend only on the samples' indices. data: those that depend on the samples' data.
    ranks: those that depend on the order among several samples, on counts, or on indices together with data.
    is_count: whether a value belongs to all samples of a micro-batch together, and depends on them.
    """

    def __init__(self, is_count: Callable[[fx.Node], bool]) -> None:
        self.is_count = is_count
        self.numbers, self.data, self.ranks = set[fx.Node](), set[fx.Node](), set[fx.Node]()

    def follow(self, node: fx.Node) -> None:
        name, read, spec = operation(node), maker_of(node).all_input_nodes, node.meta.get("spec")
        if self._is_number(node, name):
            self.numbers.add(node)
        decide = of_values(maker_of(node))
        if (node.op == "placeholder" and has_samples(node)) or not self.data.isdisjoint(decide):
            self.data |= {node, *chain.from_iterable(map(in_memory_of, mutated(node)))}
        read = read[: 1 if _picks(name) else None]
        is_whole = isinstance(spec, TensorSpec) and not spec.dtype.is_floating_point
        is_counted = has_samples(node) and any(map(self.is_count, read))
        is_counted |= node not in self.numbers and not self.numbers.isdisjoint({*read}.intersection(decide))
        is_counted |= computes_with_sizes(node, name)
        if (is_whole and (is_counted or not self.ranks.isdisjoint(read))) or _is_order(node):
            self.ranks.add(node)

    def _is_number(self, node: fx.Node, name: str) -> bool:
        made_from = list(filter(has_samples, maker_of(node).all_input_nodes))
        if not has_samples(node) or name in FILLING - NUMBERING or name.endswith("_like"):
            return False
        return name in NUMBERING or (bool(made_from) and all(source in self.numbers for source in made_from))


def why_it_mixes(node: fx.Node, provenance: Provenance) -> str:
    """Why an operation on samples mixes them; empty: it keeps them apart."""
    maker, spec = maker_of(node), spec_made(node)
    name = operation(maker)
    read: Sequence[Any] = node.args[:1] if name == "cond" else ()
    if spec is not None and spec.dtype.is_floating_point:
        read = [each for each in node.all_input_nodes if computes(name) or _is_of_floats(each)]
        if computes_with_sizes(node, name):
            return COUNTED
    if any(isinstance(each, fx.Node) and provenance.is_count(each) for each in read):
        return COUNTED
    return why_it_runs_along(node, name) if spec is None else _why_rows_mix(maker, name, spec, provenance)


def no_shares(name: str) -> str:
    """Why an operation that is not linear (`LINEAR_IN`) mixes samples if its operand was reduced over the batch."""
    return f"`{name}` of values reduced over the batch is not a sum of shares"


def _why_rows_mix(node: fx.Node, name: str, spec: TensorSpec, provenance: Provenance) -> str:
    read = node.all_input_nodes
    if normalises_by_batch(node):
        return "normalises by the statistics of the batch (use LayerNorm, or put it in eval mode)"
    if any(len(each.batch_dims) > 1 for each in (spec, *map(tensor_spec, read)) if each is not None):
        return PAIRING
    if name in ("isin", "bucketize", "cartesian_prod") and any(map(has_samples, read[1:])):
        return PAIRING
    if name == "embedding" and arguments_of(node)["scale_grad_by_freq"]:
        return "divides gradients by how often the batch has an index (leave scale_grad_by_freq=True out)"
    if name == "embedding" and has_samples(arguments_of(node)["weight"]) and block_of(node) is None:
        return "looks rows up among the samples of the batch (a table with as many rows needs a dimension before them)"
    if name.startswith("masked_scatter") and not has_samples(read[-1]):
        return "deals the entries of a tensor without samples out to those of the batch, one after another"
    if node.meta.get("uneven"):
        return PART
    of_floats = spec.dtype.is_floating_point or (name in COMPARING and any(map(_is_of_floats, read)))
    of_data = block_of(node) is None and not provenance.data.isdisjoint(read)  # in blocks, experts count tokens so
    if (of_floats or of_data) and computes_with_batch(node, name):
        return SIZE
    given = [source for source in read if source in provenance.numbers and node not in provenance.numbers]
    if given and (not _picks_own_rows(node, name, given) if _picks(name) else spec.dtype.is_floating_point):
        return NUMBERED
    looks_up = block_of(node) is None and (name == "embedding" or _picks(name))
    is_value = spec.dtype.is_floating_point and (computes(name) or name in TO_FLOATS or looks_up)
    if is_value and not provenance.ranks.isdisjoint(read):
        return "computes with the places of entries in the order of those of all samples, or with their numbers"
    if name == "einsum" and spec.batch_dims and not set(letters_of_samples(node)) <= set(_equation(node)[1]):
        return "sums over the samples of the batch for each of them"
    if name == "embedding_bag" and has_samples(arguments_of(node)["offsets"]):
        return "sums over bags that begin at places in the row of all samples (give each bag a row of indices)"
    return why_it_runs_along(node, name) or _why_it_writes(node, name) or _why_it_picks(node, name, provenance)


def why_values_mix(node: fx.Node, name: str) -> str:
    """Why an operation mixes samples if values decide a size of its result or operands; empty: it does not.

    Inside a block such values route tokens to experts.
    """
    if not is_sized(node) and block_of(node) is None:
        return "has a size that values decide"
    if name in AVERAGING and is_sized(node) and not all(map(is_sized, node.all_input_nodes)):
        return "averages over as many elements as values decide"
    return ""


def why_sizes_mix(node: fx.Node, name: str) -> str:
    """Why a value that depends only on numbers and parameters differs for a micro-batch; empty: it does not."""
    if node.meta.get("uneven") and name in REGROUPING:
        return "deals the rows of a tensor without samples out to those of the batch: give each its own"
    grows, numbers = has_samples(node), node.meta.get("batch_numbers")
    is_of_size = computes_with_batch(node, name) if grows else numbers and name not in SHAPING
    return SIZE if is_of_size else ""


def computes_with_batch(node: fx.Node, name: str) -> bool:
    """Whether an operation computes with a number that depends on the batch size; others use it as a shape."""
    numbers = node.meta.get("batch_numbers", {})
    is_filled = name in ("full", "new_full") and node.meta.get("is_filled_with_batch", False)
    return bool(numbers) and (computes(name) or is_filled or any(isinstance(each, float) for each in numbers))


def _is_of_floats(node: fx.Node) -> bool:
    return (spec := tensor_spec(node)) is not None and spec.dtype.is_floating_point


def aligned(*values: Any) -> bool:
    """Whether values that are broadcast together have their samples in the same dimension."""
    specs = [each.meta["spec"] for each in values if isinstance(each, fx.Node) and has_samples(each)]
    return len({tuple(dim - len(spec.shape) for dim in spec.batch_dims) for spec in specs}) < 2


def why_it_runs_along(node: fx.Node, name: str) -> str:
    """Why an operation along dimensions mixes samples: one of them is the samples'; empty: none is."""
    if why := node.meta.get("misplaces", ""):
        return str(why)
    if name in SCANS:
        scanned = tree_leaves(node.args[SCANS[name]])
        return ALONG_SAMPLES if any(has_samples(each) and 0 in each.meta["spec"].batch_dims for each in scanned) else ""
    spec = next(filter(None, map(tensor_spec, node.all_input_nodes)), None)
    if spec is None or not spec.shape:
        return ""
    if name in POINTING and not _points_among_floats(node, spec):
        return ""
    is_pick = name in INDEXING and block_of(node) is None and _picks_samples(node, spec)
    is_by_indices = name in BY_INDICES or (name in ORDERING and not spec.dtype.is_floating_point)
    is_trusted = is_by_indices and block_of(node) is not None
    if not is_pick and (is_trusted or not _are_samples(spec, _dimensions(node, name, spec))):
        return ""
    is_attention = node.target is functional.multi_head_attention_forward
    return ALONG_SAMPLES + (" (give the module batch_first=True)" if is_attention else "")


def _points_among_floats(node: fx.Node, spec: TensorSpec) -> bool:
    """Whether an operation of `POINTING` is inside a block, where its place is trusted, and reads one tensor of floats:
    outside of blocks no operation by that place is trusted, and integers are of experts.
    """
    return block_of(node) is not None and spec.dtype.is_floating_point and len(node.all_input_nodes) == 1


def picks_of_equals(node: fx.Node, name: str) -> bool:
    """Whether it is ``x[:1]`` or ``x[0]`` of one row that is expanded to all samples, such as a learned prompt."""
    spec = node.all_input_nodes[0].meta.get("spec")
    if name != "getitem" or not isinstance(spec, TensorSpec) or spec.batch_dims != (0,):
        return False
    first = node.args[1][:1] if isinstance(node.args[1], tuple) else (node.args[1],)
    is_first = [(type(index) is int and index == 0) or index in _FIRST for index in first] == [True]
    return is_first and spec.stride[0] == 0


def letters_of_samples(einsum: fx.Node) -> Iterator[str]:
    """The letters of an einsum's samples, one for each factor with samples."""
    letters, _ = _equation(einsum)
    for each, value in zip(letters, tree_leaves(einsum.args[1:]), strict=False):
        if has_samples(value) and "." not in each:
            yield from (each[dim] for dim in value.meta["spec"].batch_dims)


def _equation(einsum: fx.Node) -> tuple[list[str], str]:
    """The letters of an einsum's factors, and of its result."""
    equation = einsum.args[0] if isinstance(einsum.args[0], str) else ""
    factors, _, made = equation.replace(" ", "").replace("...", ".").partition("->")
    return factors.split(","), made


# Indices --------------------------------------------------------------------------------------------------------------


def _picks(name: str) -> bool:
    return name in INDEXING | {"embedding_bag", "take"} or name in BY_INDICES


def _picks_samples(node: fx.Node, spec: TensorSpec) -> bool:
    """Whether it is ``x[index]`` along the samples by neither a mask nor their own indices, such as ``arange(B)``."""
    index = index_along(node, spec.batch_dims[0]) if spec.batch_dims else None
    if not isinstance(index, fx.Node) or not has_samples(index) or _is_in_order(index):
        return False
    is_mask = index.meta["spec"].dtype is torch.bool
    return index.meta.get("storage") is not None and not is_mask  # inside a vmap masks are looked up by sample


def _picks_own_rows(node: fx.Node, name: str, numbers: Sequence[fx.Node]) -> bool:
    """Whether an index of the samples' own numbers selects for each sample what belongs to it."""
    if not all(map(_is_in_order, numbers)):
        return False
    target = tensor_spec(node.args[0])
    if target is None or len(target.batch_dims) != 1:
        return True
    if name in BY_INDICES:
        return _are_samples(target, _dimensions(node, name, target))
    if name in INDEXING:
        used = [each for each in tree_leaves(node.args[1]) if each in numbers]
        return used in ([], [index_along(node, target.batch_dims[0])])
    return True


def _why_it_picks(node: fx.Node, name: str, provenance: Provenance) -> str:
    """Why the selection of an operation inside a block mixes samples: their data does not decide it; else empty."""
    if block_of(node) is None:
        return ""
    target = node.args[0] if name != "embedding" else arguments_of(node)["weight"]
    spec, index = tensor_spec(target), None
    if spec is None or len(spec.batch_dims) != 1:
        return ""
    if name == "embedding":
        index = arguments_of(node)["input"]
    elif name in INDEXING:
        index = index_along(node, spec.batch_dims[0])
    elif name in BY_INDICES and _are_samples(spec, _dimensions(node, name, spec)):
        named = [node.kwargs[key] for key in ("index", "indices") if key in node.kwargs]
        index = [*named, *node.args[1 if name.startswith("take") else 2 :]][0]
    is_own = isinstance(index, fx.Node) and has_samples(index) and _is_in_order(index)
    is_fixed = isinstance(index, fx.Node) and index not in provenance.data and not is_own
    return "picks among the samples by indices that none of them decides" if is_fixed else ""


def _why_it_writes(node: fx.Node, name: str) -> str:
    """Why an operation writes to some of the samples alone, or to places in all samples that one sample names; empty:
    it does neither.
    """
    target = tensor_spec(node.args[0]) if name in WRITING or name == "setitem" else None
    if target is None or len(target.batch_dims) != 1:
        return ""
    row, named = None, node.args[1] if name in INDEXING else argument(node, 2, "index")
    if name in INDEXING:
        row = index_along(node, target.batch_dims[0])
    elif name.startswith("scatter"):
        row = named
    elif name not in PICKING or _are_samples(target, _dimensions(node, name, target)):
        return ""
    if isinstance(row, fx.Node):
        return "" if has_samples(row) else PART
    return PAIRING if any(map(has_samples, tree_leaves(named))) else ""


def _is_order(node: fx.Node) -> bool:
    """Whether a node gives the places of entries of several samples, as a sort or a search does."""
    maker = maker_of(node)
    kind, spec = operation(maker), next(filter(None, map(tensor_spec, maker.all_input_nodes)), None)
    if kind in ("nonzero", "argwhere") or (kind == "where" and len(maker.args) == 1):
        return any(map(has_samples, maker.all_input_nodes))
    is_indices = kind == "argsort" if maker is node else node.args[1] == 1
    if not is_indices or kind not in ORDERING or spec is None or not spec.shape:
        return False
    return _are_samples(spec, _dimensions(maker, kind, spec))


def _is_in_order(node: fx.Node) -> bool:
    """Whether a node holds the numbers 0, 1, ... in order, in any shape, or those of each sample's rows."""
    *_, numbers = in_order(node)
    if operation(numbers) != "arange":
        return False
    start, step = start_and_step(numbers)
    return bool(start == 0 and step > 0)


# Dimensions -----------------------------------------------------------------------------------------------------------


def _dimensions(node: fx.Node, name: str, spec: TensorSpec) -> tuple[int, ...]:
    """The dimensions of its first input along which an operation works; empty: it does not work along any."""
    rank = len(spec.shape)
    if "scaled_dot_product" in name:
        return (-2,)
    if node.target is functional.multi_head_attention_forward:  # batch_first modules transpose before
        return (0,)
    if name in LAST_DIMENSIONS:
        shape = argument(node, 1, "normalized_shape", ())
        return tuple(range(-len(shape), 0)) if isinstance(shape, (tuple, list)) else ()
    if found := _neighbours(node, name, rank):
        return found
    if name.startswith("linalg_") and name.removeprefix("linalg_") not in OF_VECTORS:
        return (-2, -1) if rank > 1 else ()
    if (known := {**ALONG_DIMENSIONS, **ORDERING, **POINTING, **BY_INDICES}.get(name)) is None:
        return ()
    place, otherwise = known
    named: list[Any] = [node.kwargs[key] for key in ("dim", "dims", "dimension", "axis") if key in node.kwargs]
    is_given = bool(named or node.args[place:])
    given = node.args[1:] if name == "flip" and not named else [*named, *node.args[place:], otherwise][0]
    if name in IMPLICIT and (given is None or not is_given):
        return (0,) if rank in (1, 3) else (1,)
    if given is None:
        return tuple(range(rank))
    dims = tuple(dim for dim in tree_leaves(given) if isinstance(dim, int))
    return tuple({*range(rank)} - {dim % rank for dim in dims}) if name == "renorm" else dims


def _are_samples(spec: TensorSpec, dims: tuple[int, ...]) -> bool:
    """Whether samples are along one of these dimensions."""
    return any(dim % len(spec.shape) in spec.batch_dims for dim in dims)


def _neighbours(node: fx.Node, name: str, rank: int) -> tuple[int, ...]:
    """The dimensions along which entries are read or normalised together, such as an image's and its channels'."""
    if name in ("pad", "constant_pad_nd"):
        pad = argument(node, 1, "pad", ())
        return tuple(-1 - index // 2 for index, number in enumerate(pad) if number)
    if name in OF_IMAGES and node.op == "call_function":  # a tensor's `unfold` is another
        return tuple(range(OF_IMAGES[name], rank))
    if (found := re.search(r"(conv|pool)\w*?(\d)d", name)) is None:
        return ()
    groups = argument(node, 6, "groups", 1)
    are_apart = found[1] == "pool" or groups in node.meta.get("batch_numbers", ())  # channels
    return tuple(range(-int(found[2]) - (not are_apart), 0))
