"""token_axes: the axes of a unit's values that hold tokens (`codegen.token_forms`), and where views move them.

A value may hold several rows for each token, such as one for each of its experts. It has them along one axis, with the
rows of a token next to each other: row r belongs to token r // each. After a sort along that axis, the rows of the
result, and of all that is computed from it row by row, are in the order of that sort (`codegen.token_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple, Never

import torch
from torch import fx

aten = torch.ops.aten


class MixesTokensError(Exception):
    """An operation does not act on tokens one by one."""


class Rows(NamedTuple):
    """The rows of an axis: `each` for a token, in the order of a sort; order None: in the order of the tokens."""

    each: int = 1
    order: fx.Node | None = None


OF_TOKENS = Rows()


class Form(NamedTuple):
    """Where a value has its tokens: along two axes (samples, tokens), or along one.

    start, length: which tokens of each sample. start None: of a value that does not depend on x, the tokens that are
        at the same places as those of a value that does.
    rows: what the one axis holds.
    places: if the value's elements are places of rows, these rows. In a piece the places have other numbers.
    groups: the value has no tokens; it gives for sorted rows the number with each key, or where those with each key
        end. `rows.order` is then the keys' value before they were sorted.
    """

    axes: tuple[int, ...]
    start: int | None
    length: int
    rows: Rows = OF_TOKENS
    places: Rows | None = None
    groups: Literal["counts", "ends"] | None = None

    @property
    def span(self) -> tuple[int | None, int]:
        """Which tokens of each sample it has."""
        return self.start, self.length

    @property
    def is_of_tokens(self) -> bool:
        """Whether it holds something of each token, in the tokens' order, that does not depend on the other tokens."""
        return self.rows == OF_TOKENS and self.places is None and self.groups is None


def mix() -> Never:
    raise MixesTokensError


def at(form: Form, axes: tuple[int, ...]) -> Form:
    return form._replace(axes=axes)


def shifted(form: Form, by: int) -> Form:
    return at(form, tuple(axis + by for axis in form.axes))


def without(form: Form, dims: Sequence[int]) -> Form:
    """The form without these dimensions."""
    return at(form, tuple(axis - sum(dim < axis for dim in dims) for axis in form.axes))


def viewed(form: Form, samples: int, before: Sequence[int], after: Sequence[int]) -> Form:
    """The form of a view with another shape: the tokens' axes still come after dimensions of the same total size."""
    sizes = (samples, form.length)
    if len(form.axes) == 1 or samples == 1:
        return _viewed_rows(form, samples, before, after)
    kept = [axis_behind(before, axis, after, size) for axis, size in zip(form.axes, sizes, strict=True)]
    if None not in kept:
        return at(form, tuple(axis for axis in kept if axis is not None))
    is_row = prod(before[form.axes[0] + 1 : form.axes[1]]) == 1 and form.axes[0] < form.axes[1]
    return _in_rows(form, prod(sizes), before, after) if is_row else mix()


def _viewed_rows(form: Form, samples: int, before: Sequence[int], after: Sequence[int]) -> Form:
    """The form of a view of tokens along one axis, or of one sample."""
    axis, number = form.axes[-1], samples * form.length
    if (form.rows.order, form.places) != (None, None):  # sorted rows, or places of rows: the axis must not be cut
        found = axis_behind(before, axis, after, number * form.rows.each)
        return at(form, (found,)) if found is not None else mix()
    try:
        return _in_rows(form, number, before, after)
    except MixesTokensError:
        found = axis_behind(before, axis, after, samples)
        fits = found is not None and found + 1 < len(after) and after[found + 1] == form.length
        return at(form, (found, found + 1))._replace(rows=OF_TOKENS) if found is not None and fits else mix()


def _in_rows(form: Form, number: int, before: Sequence[int], after: Sequence[int]) -> Form:
    """The form of a view with `number` tokens along one axis, with several rows of each if need be."""
    found = axis_behind(before, form.axes[0], after, number)
    if found is not None:
        return at(form, (found,))._replace(rows=OF_TOKENS)
    ahead = prod(before[: form.axes[0]])
    for axis, size in enumerate(after):
        if prod(after[:axis]) == ahead and size > number and size % number == 0:
            return at(form, (axis,))._replace(rows=Rows(size // number))
    return mix()


def axis_behind(before: Sequence[int], axis: int, after: Sequence[int], size: int) -> int | None:
    """The axis of the new shape `after` that begins where `axis` of the old one does and has this size."""
    ahead = prod(before[:axis])
    return next((b for b in range(len(after)) if prod(after[:b]) == ahead and after[b] == size), None)


def _permuted(form: Form, rank: int, dims: Sequence[int], **_: Any) -> Form:
    order = [dim % rank for dim in dims]
    return at(form, tuple(order.index(axis) for axis in form.axes))


def _transposed(form: Form, rank: int, dim0: int, dim1: int, **_: Any) -> Form:
    order = list(range(rank))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(form, rank, order)


def _unsqueezed(form: Form, rank: int, dim: int, **_: Any) -> Form:
    place = dim % (rank + 1)
    return at(form, tuple(axis + (axis >= place) for axis in form.axes))


def removed(form: Form, rank: int, dim: Any, **_: Any) -> Form:
    dims = [each % rank for each in (dim if isinstance(dim, (list, tuple)) else [dim])]
    return mix() if set(dims) & set(form.axes) else without(form, dims)


MOVING: Mapping[Any, Callable[..., Form]] = {
    aten.permute: _permuted,
    aten.transpose: _transposed,
    aten.t: lambda form, rank, **_: _transposed(form, rank, 0, rank - 1),
    aten.unsqueeze: _unsqueezed,
    aten.select: removed,
    aten.unbind: removed,
}


def args_of(node: fx.Node) -> Any:
    return node.args


def rank_of(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.dim() if isinstance(value, torch.Tensor) else -1
