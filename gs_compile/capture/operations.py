"""operations: what torch's functions do to samples, by name.

Dynamo's graph calls Python functions, operators and tensor methods. `operation` gives all spellings of an operation the
same plain name, and the tables below say what is known about it.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import fx
from torch.nn import functional
from torch.nn._reduction import legacy_get_string
from torch.overrides import get_testing_overrides

from gs_compile.capture.graph import TensorSpec, packet_of

REGROUPING = frozenset("view reshape flatten unflatten ravel view_as reshape_as".split())
LINEAR = REGROUPING | frozenset(
    "neg to float double half bfloat16 type type_as squeeze unsqueeze contiguous clone detach expand expand_as getitem "
    "select index_select narrow split chunk unbind sum mean transpose permute t movedim swapaxes tril triu flip "
    "roll".split()
)
JOINING = frozenset("stack cat concat concatenate hstack vstack dstack column_stack row_stack".split())
ADDING = frozenset("add iadd sub isub subtract".split())
SCALING = frozenset("mul imul multiply".split())
DIVIDING = frozenset("truediv itruediv div divide true_divide".split())
SUMMING = ADDING | SCALING | DIVIDING
# The operands in which an operation is linear: with sums over samples there, its result is such a sum, if all other
# operands are the same for all samples.
LINEAR_IN: Mapping[str, Literal["the one", "all", "either", "the first"]] = {
    **dict.fromkeys(LINEAR, "the one"),
    **dict.fromkeys(JOINING | ADDING, "all"),
    **dict.fromkeys(SCALING, "either"),
    **dict.fromkeys(DIVIDING, "the first"),
}
# These compute with the value of a number, as do those of `computes`; others take numbers as shapes.
ARITHMETIC = (
    SUMMING
    | frozenset("pow ipow float_power rsub floordiv floor_divide mod remainder fmod".split())
    | frozenset("clamp clamp_min clamp_max clip fill masked_fill full_like where copy".split())
)
COMPARING = frozenset("eq ne lt le gt ge equal not_equal less less_equal greater greater_equal".split())
# These write to some places of a tensor and keep the others.
WRITING = frozenset(
    "index_add index_copy index_fill index_reduce index_put scatter scatter_add scatter_reduce masked_scatter "
    "select_scatter slice_scatter".split()
)
# By indices along one dimension.
PICKING = frozenset("gather index_select take take_along_dim".split()) | frozenset(
    "index_add index_copy index_fill index_reduce scatter scatter_add scatter_reduce".split()
)
FUNCTION = "autograd_function_apply"  # of a user's autograd.Function, with its two graphs as arguments
# These select elements of a tensor: their result has any number of them, but no more.
CHOOSING = frozenset("nonzero argwhere where masked_select getitem unique unique_consecutive".split())
COUNTING = frozenset("histc bincount".split())
CASTING = frozenset("to type_as".split())  # of another tensor these use only dtype and device
FILLING = frozenset("zeros ones empty arange new_zeros new_ones new_empty".split())
OF_A_KIND = FILLING | frozenset(
    "new_full new_tensor new_empty_strided zeros_like ones_like empty_like full_like rand_like randn_like "
    "randint_like".split()
)  # of all tensors these use only shape, dtype and device
OF_A_SHAPE = CASTING | frozenset("expand_as view_as reshape_as".split())  # these do so of all but the first
SHAPING = FILLING | frozenset("view reshape expand size unflatten repeat broadcast_to split chunk narrow".split())
# Losses whose "mean" divides by counted labels, and those whose "mean" divides by the number of elements.
COUNTED_LOSSES = frozenset("cross_entropy nll_loss".split())
AVERAGED_LOSSES = frozenset(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "poisson_nll_loss gaussian_nll_loss soft_margin_loss hinge_embedding_loss margin_ranking_loss "
    "cosine_embedding_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss "
    "multilabel_soft_margin_loss".split()
)
# The argument of a loss that has one entry for each row of the others.
OF_ROWS = {"multi_margin_loss": "target", "cosine_embedding_loss": "target"}
WEIGHTED_LOSSES = frozenset("mse_loss l1_loss".split())  # whose mean is over their `weight`, where one is given
AVERAGING = AVERAGED_LOSSES | COUNTED_LOSSES | {"mean"}
# These address a tensor's memory, which begins elsewhere if the tensor is a part of another.
IN_MEMORY = frozenset("as_strided as_strided_copy as_strided_scatter".split())


def operation(node: fx.Node) -> str:
    """The plain name of a node's operation: ``add`` for torch.add, operator.add, aten.add.Tensor and Tensor.add_."""
    name = spelling(node).removeprefix("special_")
    return name if name.startswith("__") else name.rstrip("_")


def computes(name: str) -> bool:
    """Whether an operation computes with the values of its operands, elementwise."""
    return name in ARITHMETIC | COMPARING or _is_tagged(name, torch.Tag.pointwise)


def maker_of(node: fx.Node) -> fx.Node:
    """The operation that makes a value; for one of several results, the operation that returns them all."""
    source = node.args[0] if operation(node) == "getitem" else None
    return source if isinstance(source, fx.Node) and isinstance(source.meta.get("spec"), tuple) else node


def of_values(node: fx.Node) -> list[fx.Node]:
    """The inputs whose values the result depends on; of others an operation uses only dtype, device or shape."""
    name, read = operation(node), node.all_input_nodes
    return [] if name in OF_A_KIND else read[:1] if name in OF_A_SHAPE else read


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments by name, with defaults; for a builtin or a method only those that are passed by name."""
    parameters = _parameters(node.target) if node.op == "call_function" else {}
    return {**parameters, **dict(zip(parameters, node.args, strict=False)), **node.kwargs}


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """An argument that is passed by its place or by its name."""
    return [*node.args[place : place + 1], node.kwargs.get(name, default)][0]


def named(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a library's operator by the names in its schema, with defaults."""
    schema = operator._schema.arguments
    defaults = {each.name: each.default_value for each in schema if each.has_default_value()}
    return defaults | dict(zip((each.name for each in schema), args, strict=False)) | dict(kwargs)


def place_first(graph: fx.Graph) -> None:
    """Pass first arguments by position, if a model names all: ``linear(input=x, weight=w)``."""
    for node in graph.nodes:
        if node.op == "call_function" and node.kwargs and not node.args:
            first = next(iter(_parameters(get_testing_overrides().get(node.target, node.target))), None)
            if first in node.kwargs:
                node.args = (node.kwargs[first],)
                node.kwargs = {key: value for key, value in node.kwargs.items() if key != first}


def reduction_of(arguments: Mapping[str, Any]) -> str:
    """The reduction of a loss of torch.nn.functional, also by its two old arguments: none, mean or sum."""
    old = arguments.get("size_average"), arguments.get("reduce")
    return str(arguments["reduction"]) if old == (None, None) else legacy_get_string(*old, emit_warning=False)


def is_free(node: fx.Node) -> bool:
    """Whether a node is an input or a constant, which belongs to every unit that reads it."""
    return node.op in ("placeholder", "get_attr")


def draws(node: fx.Node) -> bool:
    """Whether a node draws random numbers, which differ if it runs again elsewhere."""
    name, arguments = operation(node), arguments_of(node)
    if "attention" in name:  # tagged because of its dropout
        return bool(arguments.get("dropout_p", 0))
    is_random = _is_tagged(name, torch.Tag.nondeterministic_seeded) or name == "gumbel_softmax" or "dropout" in name
    return is_random and bool(arguments.get("training", True)) and arguments.get("p") != 0


def normalises_by_batch(node: fx.Node) -> bool:
    """Whether a node is batch normalisation in training."""
    if node.target is functional.batch_norm:
        return bool(arguments_of(node)["training"])
    return "batch_norm" in spelling(node) and True in node.args[5:6]  # of torch itself


# Sizes ----------------------------------------------------------------------------------------------------------------


def tensor_spec(value: Any) -> TensorSpec | None:
    """The spec of a node's result, if that is one tensor; None for others, and for what is not a node."""
    spec = value.meta.get("spec") if isinstance(value, fx.Node) else None
    return spec if isinstance(spec, TensorSpec) else None


def spec_made(node: fx.Node) -> TensorSpec | None:
    """The spec of an operation's result; that of ``x[i] = y`` is `x`."""
    return tensor_spec(node.args[0] if operation(node) == "setitem" else node)


def computes_with_sizes(node: fx.Node, name: str) -> bool:
    """Whether an operation computes with a number that values decide, such as how many tokens an expert gets; others
    take it as a shape.
    """
    numbers, filling = ((each, each.meta.get("number")) for each in node.all_input_nodes), filled_with(node, name)
    return any(kind is float or (kind is int and (computes(name) or each is filling)) for each, kind in numbers)


def filled_with(node: fx.Node, name: str) -> Any:
    """The value that an operation fills a new tensor with; None: it fills none with one that it is given."""
    place = {"full": 1, "new_full": 2}.get(name)
    return argument(node, place, "fill_value") if place else None


def is_sized(node: fx.Node) -> bool:
    """Whether no size of a node's result depends on values."""
    return (spec := tensor_spec(node)) is None or spec.is_sized


def has_samples(node: fx.Node) -> bool:
    """Whether a value grows with the batch."""
    return (spec := tensor_spec(node)) is not None and bool(spec.batch_dims)


# ----------------------------------------------------------------------------------------------------------------------


def spelling(node: fx.Node) -> str:
    """The name of a node's operation as in the graph; ``x.__eq__(y)`` has that of ``x == y``."""
    target = packet_of(node)
    if node.op == "call_method":
        target = getattr(operator, target, target) if target.startswith("__") else target
    return getattr(target, "__name__", str(target))


@cache
def _is_tagged(name: str, tag: torch.Tag) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):  # a Python method, such as `__init__`
        return False
    return any(tag in getattr(packet, each).tags for each in packet.overloads())


@cache
def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
    except (TypeError, ValueError):  # a builtin
        return {}
