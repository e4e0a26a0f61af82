"""Fake tensors of symbolic sizes: what common operators make, without their decompositions.

Dynamo computes with such tensors as it traces. torch knows of sums and products at once what they make, and of most
others by their decompositions: of a layer norm that takes 40 ms, of a capture's second. `capture/test_fakes.py` holds
these here against the decompositions, which make what is not as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table, meta_table

aten = torch.ops.aten
Known = Callable[..., Any]  # of a mode and an operator's arguments: what it makes; None: the decomposition has to
KNOWN: dict[Any, Known] = {}


def known(*operators: Any) -> Callable[[Known], Known]:
    def register(function: Known) -> Known:
        KNOWN.update(dict.fromkeys(operators, function))
        return function

    return register


def give() -> None:
    """Of releases of torch that have no such table nothing is given."""
    with suppress(ImportError):
        from torch._subclasses.fake_impls import get_fast_op_impls

        slow = KNOWN.keys() & decomposition_table.keys() - meta_table.keys()
        get_fast_op_impls().update({operator: _or_decomposed(operator, KNOWN[operator]) for operator in slow})


def _or_decomposed(operator: Any, function: Known) -> Callable[..., Any]:
    def made(mode: Any, *arguments: Any, **named: Any) -> Any:
        found = function(mode, *arguments, **named)
        if found is not None:
            return found
        with mode:
            return decomposition_table[operator](*arguments, **named)

    return made


def is_plain(*tensors: Tensor) -> bool:
    """Whether all are contiguous, on one device, and floats of one type."""
    from torch._prims_common import is_contiguous_or_false

    first, *others = tensors
    return (
        first.dtype.is_floating_point
        and all((each.dtype, each.device) == (first.dtype, first.device) for each in others)
        and all(map(is_contiguous_or_false, tensors))
    )


def new(mode: Any, like: Tensor, shape: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensor

    return FakeTensor(mode, torch.empty(shape, dtype=dtype or like.dtype, device="meta"), device=like.device)


@known(
    aten.gelu.default,
    aten.tanh.default,
    aten.relu.default,
    aten.silu.default,
    aten.sigmoid.default,
    aten.exp.default,
    aten.log.default,
    aten.sqrt.default,
    aten.rsqrt.default,
    aten.sin.default,
    aten.cos.default,
    aten.neg.default,
)
def of_each_element(mode: Any, x: Tensor, **_: Any) -> Tensor | None:
    return new(mode, x, x.shape) if is_plain(x) else None


@known(aten.pow.Tensor_Scalar)
def power(mode: Any, x: Tensor, exponent: Any) -> Tensor | None:
    return new(mode, x, x.shape) if is_plain(x) and isinstance(exponent, int | float) else None


@known(aten.native_dropout.default)
def dropout(mode: Any, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor] | None:
    if not train or not 0 < p < 1 or not is_plain(x):
        return None
    return new(mode, x, x.shape), new(mode, x, x.shape, torch.bool)


@known(aten._softmax.default, aten._log_softmax.default)
def softmax(mode: Any, x: Tensor, dim: int, half_to_float: bool) -> Tensor | None:
    return new(mode, x, x.shape) if not half_to_float and is_plain(x) else None


@known(aten.native_layer_norm.default)
def layer_norm(
    mode: Any, x: Tensor, normalized: Sequence[Any], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    given = [each for each in (weight, bias) if each is not None]
    axis = x.ndim - len(normalized)
    shape = tuple(normalized)
    if not shape or not are_equal(x.shape[axis:], shape) or not all(are_equal(each.shape, shape) for each in given):
        return None
    if not is_plain(x, *given) or (x.device.type != "cpu" and x.dtype.itemsize < 4):  # which has wider statistics there
        return None
    each = (*x.shape[:axis], *[1] * len(shape))
    return new(mode, x, x.shape), new(mode, x, each), new(mode, x, each)


@known(aten.addmm.default)
def sum_with_product(mode: Any, bias: Tensor, x: Tensor, y: Tensor, beta: float = 1, alpha: float = 1) -> Tensor | None:
    if x.ndim != 2 or y.ndim != 2 or not are_equal([x.shape[1]], [y.shape[0]]):
        return None
    if not are_equal(bias.shape, y.shape[1:]) or {bias.dtype, y.dtype} != {x.dtype} or y.device != x.device:
        return None
    return new(mode, x, (x.shape[0], y.shape[1])) if x.dtype.is_floating_point and bias.device == x.device else None


@known(aten.embedding.default)
def rows(mode: Any, table: Tensor, numbers: Tensor, padding: int = -1, *others: bool) -> Tensor | None:
    from torch._prims_common import is_contiguous_or_false

    if table.ndim != 2 or numbers.ndim < 2 or not is_contiguous_or_false(numbers) or not is_plain(table):
        return None
    return new(mode, table, (*numbers.shape, table.shape[1])) if numbers.device == table.device else None


@known(aten.nll_loss_forward.default)
def loss(
    mode: Any, scores: Tensor, labels: Tensor, weight: Tensor | None, reduction: int, ignored: int
) -> tuple[Tensor, Tensor] | None:
    if weight is not None or scores.ndim != 2 or labels.ndim != 1 or reduction == 0 or not is_plain(scores):
        return None
    torch._check(scores.shape[0] == labels.shape[0])  # which may make two symbols one
    return new(mode, scores, ()), new(mode, scores, ())


@known(aten.mean.dim)
def mean(mode: Any, x: Tensor, dims: Sequence[int] | None, keepdim: bool = False, **named: Any) -> Tensor | None:
    if not dims or named or not is_plain(x):
        return None
    gone = {dim % x.ndim for dim in dims}
    each = [(place, 1 if place in gone else size) for place, size in enumerate(x.shape)]
    return new(mode, x, [size for place, size in each if keepdim or place not in gone])


@known(aten.constant_pad_nd.default)
def padded(mode: Any, x: Tensor, widths: Sequence[int], value: Any = 0) -> Tensor | None:
    from torch._prims_common import is_contiguous_or_false

    if not all(type(width) is int and width >= 0 for width in widths) or not is_contiguous_or_false(x):
        return None
    shape = list(x.shape)
    for place, width in enumerate(widths):
        shape[-1 - place // 2] += width
    return new(mode, x, shape)


@known(aten.view.default, aten._unsafe_view.default)
def view(mode: Any, x: Tensor, shape: Sequence[Any]) -> Tensor | None:
    from torch._prims_common import infer_size, is_contiguous_or_false, make_contiguous_strides_for

    if not x.ndim or not len(shape) or not is_contiguous_or_false(x):
        return None
    whole = infer_size(shape, x.numel())
    return in_its_memory(mode, x, whole, make_contiguous_strides_for(whole))


@known(aten.transpose.int)
def transposed(mode: Any, x: Tensor, one: int, other: int) -> Tensor | None:
    if not all(-x.ndim <= dim < x.ndim for dim in (one, other)):
        return None
    order = list(range(x.ndim))
    order[one], order[other] = order[other], order[one]
    return permuted(mode, x, order)


@known(aten.permute.default)
def permuted(mode: Any, x: Tensor, order: Sequence[int]) -> Tensor | None:
    if sorted(dim % max(x.ndim, 1) for dim in order) != list(range(x.ndim)):
        return None
    return in_its_memory(mode, x, [x.shape[dim] for dim in order], [x.stride(dim) for dim in order])


def in_its_memory(mode: Any, x: Tensor, shape: Sequence[Any], strides: Sequence[Any], offset: Any = None) -> Tensor:
    from torch._dispatch.python import no_python_dispatcher
    from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

    offset, device = x.storage_offset() if offset is None else offset, x.device
    with no_python_dispatcher(), in_kernel_invocation_manager(mode):
        made = aten.as_strided.default(x, shape, strides, offset)
    return FakeTensor(mode, made, device=device)


def are_equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether these are the same numbers, and no symbols."""
    return len(one) == len(other) and all(type(a) is type(b) is int and a == b for a, b in zip(one, other, strict=True))
