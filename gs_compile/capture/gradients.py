"""gradients: how a unit's code hands over a parameter's gradient: the tensor, or factors that are smaller.

    weight      dw = left @ right             Product     total += left @ right is one call of the matrix library
    embedding   dw[ids] += rows, else zero    SparseRows  only the rows that a micro-batch has used are touched

Added to a sum as factors, a gradient is never in memory by itself: neither written nor read again for the addition.
`codegen.factor` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Product(NamedTuple):
    """The gradient of a matrix, `left` [rows, inner] times `right` [inner, columns]."""

    left: Tensor
    right: Tensor

    def dense(self) -> Tensor:
        return torch.mm(self.left, self.right)

    def put(self, total: Tensor, *, add: bool) -> None:
        if total.dtype == self.left.dtype:
            torch.addmm(total, self.left, self.right, beta=int(add), out=total)
        else:  # summed in float64 with others
            put_term(total, self.dense(), add=add)


class SparseRows(NamedTuple):
    """The gradient of a table of `num_rows`: `rows` [..., width] add to the rows `ids` [...], which may repeat."""

    ids: Tensor
    rows: Tensor
    num_rows: int

    def dense(self) -> Tensor:
        dtype = torch.promote_types(self.rows.dtype, torch.float32)
        total = self.rows.new_zeros(self.num_rows, self.rows.shape[-1], dtype=dtype)
        self.put(total, add=True)
        return total

    def put(self, total: Tensor, *, add: bool) -> None:
        """Always in the same order: index_put_ sorts on CUDA, where index_add_ does not; on the CPU it is opposite."""
        ids, rows = self.ids.reshape(-1), self.rows.reshape(-1, self.rows.shape[-1]).to(total.dtype)
        if not add:
            total.zero_()
        if total.device.type == "cpu":
            total.index_add_(0, ids, rows)
        else:
            total.index_put_((ids,), rows, accumulate=True)


Factors = Product | SparseRows
Term = Tensor | Factors


def put_term(total: Tensor, term: Term, *, add: bool) -> None:
    """Add `term` to `total`, in the dtype of `total`, or put it in the place of whatever `total` was."""
    if not isinstance(term, Tensor):
        term.put(total, add=add)
    elif add:
        total.add_(term)
    else:
        total.copy_(term)


def put_terms(totals: Mapping[Any, Tensor], terms: Mapping[Any, Term], added: Set[Any]) -> None:
    """`put_term` for each, with `add` for those of `added`; tensors by one call, which takes longer than small sums."""
    dense = {key: term for key, term in terms.items() if isinstance(term, Tensor)}
    for put, keys in ((torch._foreach_add_, dense.keys() & added), (torch._foreach_copy_, dense.keys() - added)):
        if keys:
            put([totals[key] for key in keys], [dense[key] for key in keys])
    for key in terms.keys() - dense.keys():
        put_term(totals[key], terms[key], add=key in added)


def tensors_of(term: Term) -> tuple[Tensor, ...]:
    """The tensors that a term consists of."""
    return (term,) if isinstance(term, Tensor) else tuple(part for part in term if isinstance(part, Tensor))
