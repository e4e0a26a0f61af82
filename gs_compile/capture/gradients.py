"""gradients: how a unit's code returns a parameter's gradient: as a tensor, or as factors that are smaller.

    weight      dw = left @ right             Product     total += left @ right is one call of the matrix library
    embedding   dw[ids] += rows, else zero    SparseRows  only the rows that a micro-batch has used are touched

A gradient that is added to a sum as factors is never in memory itself: it is neither written nor read again.
`codegen.factor` finds the factors.
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
    """The gradient of a table of `num_rows`: `rows` [..., width], added at the places `ids` [...], which may repeat."""

    ids: Tensor
    rows: Tensor
    num_rows: int

    def dense(self) -> Tensor:
        dtype = torch.promote_types(self.rows.dtype, torch.float32)
        total = self.rows.new_zeros(self.num_rows, self.rows.shape[-1], dtype=dtype)
        self.put(total, add=True)
        return total

    def put(self, total: Tensor, *, add: bool) -> None:
        """Add in a fixed order: on CUDA index_put_ has one, because it sorts, on the CPU index_add_."""
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
    """Add `term` to `total`, in the dtype of `total`, or overwrite `total` with it."""
    if not isinstance(term, Tensor):
        term.put(total, add=add)
    elif add:
        total.add_(term)
    else:
        total.copy_(term)


def put_terms(totals: Mapping[Any, Tensor], terms: Mapping[Any, Term], added: Set[Any]) -> None:
    """`put_term` for each, with `add` for those of `added`. All tensors in one call: for small sums, calls dominate."""
    dense = {key: term for key, term in terms.items() if isinstance(term, Tensor)}
    for put, keys in ((torch._foreach_add_, dense.keys() & added), (torch._foreach_copy_, dense.keys() - added)):
        if keys:
            put([totals[key] for key in keys], [dense[key] for key in keys])
    for key in terms.keys() - dense.keys():
        put_term(totals[key], terms[key], add=key in added)


def tensors_of(term: Term) -> tuple[Tensor, ...]:
    """The tensors that a term consists of."""
    return (term,) if isinstance(term, Tensor) else tuple(part for part in term if isinstance(part, Tensor))
