"""operations: what torch's functions do to samples and to memory, by name.

Dynamo's graph calls Python functions, operators and tensor methods; `operation` gives all spellings of one operation
the same plain name, and the tables below say what is known of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from keyword import iskeyword
from typing import Any

from torch import fx
from torch.nn import functional
from torch.nn._reduction import legacy_get_string

from gs_compile.capture.graph import TensorSpec, block_of

LINEAR = frozenset(
    "neg to float double half bfloat16 type type_as view reshape squeeze unsqueeze contiguous clone detach flatten "
    "expand getitem select sum mean transpose permute".split()
)
JOINING = frozenset("stack cat concat".split())
ADDING = frozenset("add iadd sub isub".split())
SCALING = frozenset("mul imul multiply".split())
DIVIDING = frozenset("truediv itruediv div divide true_divide".split())
# With a number, these compute with its value; other operations take numbers as shapes.
ARITHMETIC = (
    ADDING | SCALING | DIVIDING | frozenset("pow ipow rsub floordiv mod clamp fill masked_fill full_like where".split())
)
# These run along one dimension, which must not be the samples'.
ALONG_A_DIMENSION = frozenset(
    "softmax log_softmax softmin gumbel_softmax cumsum cumprod logcumsumexp cummax cummin normalize flip roll".split()
)
# So do these; inside a block they order tokens for experts.
REORDERING = frozenset(
    "sort argsort topk gather take_along_dim index_select index_add index_copy scatter scatter_add "
    "scatter_reduce".split()
)
DIMENSION_AT = {"roll": 2, "topk": 2, "normalize": 2, "take_along_dim": 2, "gumbel_softmax": 4}  # else argument 1
RESHAPING = frozenset("getitem view reshape unsqueeze expand to long float double contiguous clone".split())
LAST_DIMENSIONS = frozenset("layer_norm rms_norm".split())  # these normalise the last ones, as many as are given
# These choose among the elements of a tensor: their result has any number of them, and no more.
CHOOSING = frozenset("nonzero argwhere where masked_select getitem unique unique_consecutive".split())
COUNTING = frozenset("histc bincount".split())
CASTING = frozenset("to type_as".split())  # of another tensor these take its kind alone
FILLING = frozenset("zeros ones empty arange new_zeros new_ones new_empty".split())
SHAPING = FILLING | frozenset("view reshape expand size unflatten repeat broadcast_to split chunk narrow".split())
# Losses whose "mean" divides by counted labels, and those whose "mean" divides by the number of elements.
COUNTED_LOSSES = frozenset("cross_entropy nll_loss".split())
AVERAGED_LOSSES = frozenset(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "poisson_nll_loss gaussian_nll_loss soft_margin_loss hinge_embedding_loss margin_ranking_loss "
    "cosine_embedding_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss "
    "multilabel_soft_margin_loss".split()
)
AVERAGING = AVERAGED_LOSSES | COUNTED_LOSSES | {"mean"}
# These name places in a tensor's memory, which begins elsewhere where the tensor is a part of more.
IN_MEMORY = frozenset("as_strided as_strided_copy as_strided_scatter".split())
IN_PLACE_OPERATORS = frozenset(
    "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul".split()
)


def operation(node: fx.Node) -> str:
    """The plain name of a node's operation: ``add`` for torch.add, operator.add, Tensor.add and Tensor.add_."""
    name = _name(node)
    return name if name.startswith("__") else name.rstrip("_")


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments by name, defaults included; of a builtin or a method those that are given by name."""
    parameters = _parameters(node.target) if node.op == "call_function" else {}
    return {**parameters, **dict(zip(parameters, node.args, strict=False)), **node.kwargs}


def reduction_of(arguments: Mapping[str, Any]) -> str:
    """How a loss of torch.nn.functional reduces, its two old switches included: none, mean or sum."""
    old = arguments.get("size_average"), arguments.get("reduce")
    return str(arguments["reduction"]) if old == (None, None) else legacy_get_string(*old, emit_warning=False)


# Changes in place -----------------------------------------------------------------------------------------------------


def is_mutation(node: fx.Node) -> bool:
    """Whether a node changes a tensor in place: ``x.add_``, ``x[i] = y``, ``x += y``, ``out=``, running statistics."""
    if node.op not in ("call_method", "call_function"):
        return False
    name = _name(node)
    ends = name.split(".")[0].endswith("_") and not name.startswith("_")
    in_place = ends and not iskeyword(name[:-1])  # ``x & y`` is operator.and_
    named = in_place or name in IN_PLACE_OPERATORS or "out" in node.kwargs
    return named or bool(arguments_of(node).get("inplace")) or _tracks_statistics(node)


def mutated(node: fx.Node) -> fx.Node:
    """The node whose tensor a mutation changes."""
    given = (*node.args, *node.kwargs.values())
    target = node.kwargs["out"] if "out" in node.kwargs else given[1 if _tracks_statistics(node) else 0]
    assert isinstance(target, fx.Node)
    return target


def _tracks_statistics(node: fx.Node) -> bool:
    """Batch normalisation in training changes its running statistics, where it has them."""
    return normalises_by_batch(node) and isinstance(node.args[1], fx.Node)


def normalises_by_batch(node: fx.Node) -> bool:
    """Whether a node is batch normalisation in training."""
    return node.target is functional.batch_norm and bool(arguments_of(node)["training"])


# Samples --------------------------------------------------------------------------------------------------------------

_FIRST = (slice(None, 1), slice(0, 1), slice(None, 1, 1), slice(0, 1, 1))
ALONG_SAMPLES = "runs along the batch dimension"


def why_it_mixes(node: fx.Node, name: str, spec: TensorSpec) -> str:
    """Why an operation on samples mixes them; empty where it keeps them apart."""
    if normalises_by_batch(node):
        return "normalises by the statistics of the batch (use LayerNorm, or put it in eval mode)"
    if len(spec.batch_dims) > 1:
        return "pairs the samples of the batch with each other"
    if name == "embedding" and arguments_of(node)["scale_grad_by_freq"]:
        return "divides gradients by how often the batch has an index (leave scale_grad_by_freq=True out)"
    if name.startswith("masked_scatter") and not has_samples(node.all_input_nodes[-1]):
        return "deals the entries of a tensor without samples out to those of the batch, one after another"
    if node.meta.get("uneven"):
        return "takes a part of the samples"
    if node.meta.get("batch_numbers") and name in ARITHMETIC and spec.dtype.is_floating_point:
        return "computes with the batch size"
    numbers = (source for source in node.all_input_nodes if _is_arange(source) and has_samples(source))
    if spec.dtype.is_floating_point and name in (*ARITHMETIC, "embedding") and any(numbers):
        return "computes with the numbers of the samples, which every micro-batch counts from 0"
    return ALONG_SAMPLES if works_along_samples(node, name) else ""


def why_values_mix(node: fx.Node, name: str) -> str:
    """Why the values that decide a size, of the operation's result or what it reads, mix samples; empty: they do not.

    Inside a block they send tokens to experts.
    """
    if not is_sized(node) and block_of(node) is None:
        return "has a size that values decide"
    if name in AVERAGING and is_sized(node) and not all(map(is_sized, node.all_input_nodes)):
        return "averages over as many elements as values decide"
    return ""


def is_sized(node: fx.Node) -> bool:
    """Whether no size of a value depends on values."""
    spec = node.meta.get("spec")
    return not isinstance(spec, TensorSpec) or spec.is_sized


def has_samples(node: fx.Node) -> bool:
    """Whether a value grows with the batch."""
    spec = node.meta.get("spec")
    return isinstance(spec, TensorSpec) and bool(spec.batch_dims)


def works_along_samples(node: fx.Node, name: str) -> bool:
    """Whether an operation that works along a dimension, or several, does so along the samples'."""
    spec = node.all_input_nodes[0].meta.get("spec")
    if not isinstance(spec, TensorSpec) or not spec.shape:
        return False
    if name == "getitem" and block_of(node) is None and _picks_samples(node, spec):
        return True
    return any(dim % len(spec.shape) in spec.batch_dims for dim in _dimensions(node, name, len(spec.shape)))


def _picks_samples(node: fx.Node, spec: TensorSpec) -> bool:
    """``x[index]`` with an index for the samples other than their own numbers, as in ``x[arange(B), last]``."""
    index = node.args[1]
    first = index[0] if isinstance(index, tuple) and index else index
    if 0 not in spec.batch_dims or not isinstance(first, fx.Node) or _is_arange(first):
        return False
    return first.meta.get("storage") is not None and has_samples(first)  # inside a vmap masks are looked up by sample


def picks_of_equals(node: fx.Node, name: str) -> bool:
    """``x[:1]`` or ``x[0]`` of one row that is expanded to all samples, as prompts that are learned are: that row."""
    spec = node.all_input_nodes[0].meta.get("spec")
    if name != "getitem" or not isinstance(spec, TensorSpec) or spec.batch_dims != (0,):
        return False
    first = node.args[1][:1] if isinstance(node.args[1], tuple) else (node.args[1],)
    is_first = [(type(index) is int and index == 0) or index in _FIRST for index in first] == [True]
    return is_first and spec.stride[0] == 0


def _is_arange(node: fx.Node) -> bool:
    """Whether a node holds the numbers 0, 1, ... in order, in whatever shape."""
    while operation(node) in RESHAPING and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return operation(node) == "arange"


def _dimensions(node: fx.Node, name: str, rank: int) -> tuple[int, ...]:
    """The dimensions of its first input, of `rank`, along which an operation works, where it is one that does."""
    if node.target is functional.scaled_dot_product_attention:
        return (-2,)
    if name in LAST_DIMENSIONS:
        shape = node.kwargs.get("normalized_shape", node.args[1] if len(node.args) > 1 else ())
        return tuple(range(-len(shape), 0)) if isinstance(shape, (tuple, list)) else ()
    if name not in ALONG_A_DIMENSION and (name not in REORDERING or block_of(node) is not None):
        return ()
    at = DIMENSION_AT.get(name, 1)
    otherwise = {"roll": tuple(range(rank)), "normalize": 1}.get(name, -1)
    given = node.kwargs.get("dim", node.kwargs.get("dims", node.args[at] if len(node.args) > at else otherwise))
    found = given if isinstance(given, (tuple, list)) else (given, *node.args[at + 1 :]) if name == "flip" else (given,)
    return tuple(dim for dim in found if isinstance(dim, int))


# ----------------------------------------------------------------------------------------------------------------------


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))


@cache
def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    except (TypeError, ValueError):  # a builtin
        return {}
