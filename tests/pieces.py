"""Layers of tokens, and the code of a unit in pieces of them, beside that of the whole."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from alive import Alive
from captured import captured
from torch import nn
from torch.nn.functional import cross_entropy

from gs_compile.capture.inductor import Generator
from gs_compile.codegen.pieces import InPieces

EAGER = Generator("eager")
COMPILERS = [EAGER, pytest.param(Generator("inductor"), marks=pytest.mark.slow)]
SAMPLES, TOKENS, WIDTH, WORDS = 4, 9, 8, 96
PIECE = 5  # tokens: 18 or 9 are no multiple


def flat_loss(logits, labels, **how):
    return cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1), **how)


def in_pieces(unit, generator=EAGER, tokens=PIECE):
    return InPieces(unit, generator, None, (), tokens)


def equal(found, expected, generator=EAGER):
    """Sums of fp32 in another order: rounding of some terms at 6e-8 each of the largest.

    Compiled exponentials are others, too: the whole head's gradients are then up to 5e-6 away from autograd's.
    """
    tolerance = 2e-6 if generator is EAGER else 1e-5
    found = [term if isinstance(term, torch.Tensor) else term.dense() for term in found]
    for one, other in zip(found, expected, strict=True):
        most = other.abs().max().item() if other.is_floating_point() else 0.0
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * most)


class Stack(nn.Module):
    def __init__(self, layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.words = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, ids, turn):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, turn)
        return flat_loss(self.words(x), ids)


@cache
def layer_of(layer, size, tokens=TOKENS):
    ids = torch.randint(WORDS, (SAMPLES, tokens))
    return captured(Stack(layer), ids, torch.rand(SAMPLES, tokens)).split(size, alone=size == SAMPLES).units[1]


def hold_memory(unit):
    """What a layer of 80 tokens has alive in pieces is what is planned, and much less than whole."""
    inputs = [torch.rand(spec.shape) for spec in unit.specs]
    gradients = [torch.rand(unit.result_specs[index].shape) for index in unit.differentiated]
    nbytes = {}
    for tokens in (8, 0):
        code = in_pieces(unit, tokens=tokens)
        function, alive = code.function("backward"), Alive()
        with torch.no_grad(), alive:
            results = function(*inputs, *gradients)
        x = next(i for i, index in enumerate(unit.differentiable) if unit.sources[index].kind == "x")
        nbytes[tokens] = code.cost("backward").nbytes
        if tokens:
            assert alive.most - results[x].nbytes == pytest.approx(nbytes[tokens], rel=0.03)
    assert nbytes[8] < 0.6 * nbytes[0]
