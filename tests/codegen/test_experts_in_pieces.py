"""Experts run in pieces of tokens where these can be followed through a sort and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 (which makes an operation of products of groups)
import zoo
from captured import captured
from parts import code_and_autograd
from pieces import COMPILERS, EAGER, SAMPLES, TOKENS, WIDTH, equal, hold_memory, in_pieces, layer_of
from torch import nn
from torch.nn import functional

from gs_compile.codegen.parts import PartInPieces

EXPERTS, CHOSEN, INNER = 4, 2, 6
products_of_groups = torch.ops.transformers.grouped_mm_fallback


class Experts(nn.Module):
    """A layer whose tokens go to two of four experts each: `way(layer, rows, weights, ids)`."""

    way: Callable[..., torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, *s) / 3) for s in ((WIDTH, INNER), (INNER, WIDTH)))
        self.bias = nn.Parameter(torch.randn(EXPERTS, INNER))

    def forward(self, x, turn):
        rows = self.norm(x).flatten(0, 1)
        weights, ids = self.gate(rows).softmax(-1).topk(CHOSEN)
        return x + type(self).way(self, rows, weights / weights.sum(-1, keepdim=True), ids).view_as(x)


def grouped(ids, keys=None, **how):
    """Sorted ids, the rows that they were, and where those of each expert end."""
    found, rows = torch.sort(ids.flatten(), **how)
    counts = torch.histc((found if keys is None else keys).float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    return found, rows, counts.cumsum(0, dtype=torch.int32)


def inner(layer, rows, found, ends):
    return functional.gelu(products_of_groups(rows, layer.up, ends) + layer.bias[found])


def back(rows):
    """The inverse of a permutation."""
    return torch.empty_like(rows).index_put((rows,), torch.arange(len(rows)))


def as_transformers(layer, x, weights, ids):
    found, rows, ends = grouped(ids)
    made = products_of_groups(inner(layer, x[rows // CHOSEN], found, ends), layer.down, ends)
    return (made * weights.flatten()[rows, None])[back(rows)].view(-1, CHOSEN, WIDTH).sum(1)


def added(layer, x, weights, ids):
    """Counted before they are sorted, brought back by adding, and weights of experts picked for each row."""
    rows = ids.flatten().argsort(stable=True)
    found = ids.flatten()[rows]
    ends = torch.histc(ids.int().float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
    made = torch.bmm(inner(layer, x.index_select(0, rows // CHOSEN), found, ends)[:, None], layer.down[found])
    made = made.squeeze(1) * weights.reshape(-1)[rows].unsqueeze(-1)
    return torch.zeros_like(x).index_add(0, rows.div(CHOSEN, rounding_mode="floor"), made)


def unsorted(layer, x, weights, ids):
    rows, of = x.repeat_interleave(CHOSEN, 0), ids.flatten()
    made = functional.gelu(torch.bmm(rows[:, None], layer.up[of]).squeeze(1) + layer.bias[of])
    made = torch.bmm(made[:, None], layer.down[of]).squeeze(1) * weights.view(-1, 1)
    return made.view(-1, CHOSEN, WIDTH).sum(1)


def of_one(layer, x, weights, ids):
    """One expert for each token: rows are as many as tokens."""
    found, rows, ends = grouped(ids[:, 0])
    made = products_of_groups(inner(layer, x[rows], found, ends), layer.down, ends)
    return made[rows.argsort()] * weights[:, :1]


def in_groups(layer, x, weights, ids):
    """Experts of the better half alone, as a mask says that is written by places."""
    scores = layer.gate(x).sigmoid()
    halves = scores.view(-1, 2, EXPERTS // 2).amax(-1)
    mask = torch.zeros_like(halves).scatter(1, halves.topk(1).indices, 1.0)
    mask = mask.unsqueeze(-1).expand(-1, 2, EXPERTS // 2).reshape(-1, EXPERTS)
    ids = scores.masked_fill(mask == 0, -1.0).topk(CHOSEN, sorted=False).indices
    return as_transformers(layer, x, scores.gather(1, ids), ids)


def with_few_places(layer, x, weights, ids):
    """Those that come last find no place, so what others are there matters."""
    found, rows, ends = grouped(ids)
    first = functional.pad(ends, (1, 0))[:-1]
    is_early = torch.arange(len(rows)) - first[found] < 7
    made = products_of_groups(inner(layer, x[rows // CHOSEN], found, ends), layer.down, ends)
    made = made * weights.flatten()[rows, None] * is_early[:, None]
    return made[back(rows)].view(-1, CHOSEN, WIDTH).sum(1)


def by_number(layer, x, weights, ids):
    """The number of a token matters."""
    _, rows, _ = grouped(ids)
    chosen = torch.zeros(len(ids), EXPERTS).index_put((torch.arange(len(ids)), ids[:, 0]), weights[:, 0])
    made = as_transformers(layer, x, weights, ids) + chosen.sum(1, keepdim=True)
    return made + (rows[back(rows)].view(-1, CHOSEN) % 5).sum(1, keepdim=True)


def falling(layer, x, weights, ids):
    """Experts in the order of their numbers, and tokens in the contrary one."""
    found, rows, ends = grouped(ids, descending=True)
    made = products_of_groups(inner(layer, x[rows // CHOSEN], found, ends), layer.down, ends)
    return made[back(rows)].view(-1, CHOSEN, WIDTH).sum(1)


def counted_otherwise(layer, x, weights, ids):
    found, rows, ends = grouped(ids, keys=EXPERTS - 1 - ids)
    made = products_of_groups(inner(layer, x[rows // CHOSEN], found, ends), layer.down, ends)
    return made[back(rows)].view(-1, CHOSEN, WIDTH).sum(1)


OF_TRANSFORMERS = [("mixtral", "batched_mm"), ("gpt_oss", "grouped_mm")]
APART = [as_transformers, added, unsorted, of_one, in_groups]
TOGETHER = [with_few_places, by_number, falling, counted_otherwise]


@cache
def experts(way):
    return type(way.__name__, (Experts,), {"way": staticmethod(way)})


@pytest.mark.parametrize("generator", COMPILERS, ids=["eager", "inductor"])
@pytest.mark.parametrize("size", [2, pytest.param(1, marks=pytest.mark.slow)], ids=["two samples", "one sample"])
@pytest.mark.parametrize("way", [*APART, *TOGETHER], ids=lambda way: way.__name__)
def test_experts_are_in_pieces_where_their_tokens_stay_apart(way, size, generator):
    of_all = way in (by_number, with_few_places)  # micro-batches would have other numbers, and other places
    unit = layer_of(experts(way), SAMPLES if of_all else size)
    code = in_pieces(unit, generator)
    equal(*code_and_autograd(unit, generator, code=code), generator)
    if way in APART:
        assert [isinstance(part, PartInPieces) for part in code._parts] == [True]
        assert code.on_all == ()
    else:
        assert "sort" in code.on_all


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    [("mixtral", "grouped_mm"), *OF_TRANSFORMERS],
)
def test_experts_of_transformers_are_in_pieces(name, way):
    """With what the loss that balances them reads of the router."""
    model, ids = zoo.small(name, output_router_logits=True), torch.randint(zoo.VOCAB, (SAMPLES, TOKENS))
    model.config._experts_implementation = way
    model(input_ids=ids)  # its own hooks are there from the first call on
    unit = captured(model, input_ids=ids, labels=ids).split(2).units[2]
    code = in_pieces(unit)
    equal(*code_and_autograd(unit, EAGER, code=code))
    assert "sort" not in code.on_all
    assert [isinstance(part, PartInPieces) for part in code._parts][-1]


def test_what_experts_have_alive_is_what_is_planned():
    hold_memory(layer_of(experts(as_transformers), 2, 40))
