"""operations: what torch's functions do to samples and to memory, by name.

Dynamo's graph calls Python functions, operators and tensor methods; `operation` gives all spellings of one operation
the same plain name, and the tables below say what is known of it.
"""

from __future__ import annotations

import inspect

import torch
from torch import fx
from torch.nn import functional

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
REORDERING = frozenset("sort argsort topk".split())  # so do these; inside a block they order tokens for experts
COUNTING = frozenset("histc bincount".split())
SHAPING = frozenset(
    "view reshape expand size unflatten zeros ones empty full arange new_zeros new_ones new_empty new_full "
    "repeat broadcast_to split chunk narrow".split()
)
# Losses whose "mean" divides by counted labels, and those whose "mean" divides by the number of elements.
COUNTED_LOSSES = frozenset("cross_entropy nll_loss".split())
AVERAGED_LOSSES = frozenset(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "poisson_nll_loss gaussian_nll_loss soft_margin_loss hinge_embedding_loss margin_ranking_loss "
    "cosine_embedding_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss "
    "multilabel_soft_margin_loss".split()
)
IN_PLACE_OPERATORS = frozenset(
    "setitem iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul".split()
)


def operation(node: fx.Node) -> str:
    """The plain name of a node's operation: ``add`` for torch.add, operator.add, Tensor.add and Tensor.add_."""
    name = _name(node)
    return name if name.startswith("__") else name.rstrip("_")


def _name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))


def is_mutation(node: fx.Node) -> bool:
    """Whether a node changes a tensor in place: ``x.add_``, ``x[i] = y``, ``x += y``, ``out=``, running statistics."""
    if node.op not in ("call_method", "call_function"):
        return False
    name = _name(node)
    in_place = name.endswith("_") and not name.startswith("_")
    return in_place or name in IN_PLACE_OPERATORS or "out" in node.kwargs or tracks_statistics(node)


def mutated(node: fx.Node) -> fx.Node:
    """What a mutation changes."""
    target = node.kwargs["out"] if "out" in node.kwargs else node.args[1 if tracks_statistics(node) else 0]
    assert isinstance(target, fx.Node)
    return target


def normalises_by_batch(node: fx.Node) -> bool:
    """Whether a node is batch normalisation in training."""
    if node.target is not functional.batch_norm:
        return False
    bound = inspect.signature(functional.batch_norm).bind(*node.args, **node.kwargs)
    return bool(bound.arguments.get("training"))


def tracks_statistics(node: fx.Node) -> bool:
    """Batch normalisation in training changes its running statistics, where it has them."""
    return normalises_by_batch(node) and isinstance(node.args[1], fx.Node)


def is_attention(node: fx.Node) -> bool:
    return node.target is torch.nn.functional.scaled_dot_product_attention
