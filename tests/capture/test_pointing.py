"""pointing: inside of a block, the place of a largest, smallest or middle value among the samples is refused."""

from __future__ import annotations

import pytest
import torch
from captured import TOKENS, WIDTH, Each, captured, run
from torch import nn

from gs_compile.capture.loss import loss
from gs_compile.errors import SeparationError


def flat(x):
    return x.reshape(-1, WIDTH)


MIXES = {
    "the largest": lambda x: x.gather(0, x.argmax(0, keepdim=True).expand_as(x)),
    "the largest, beside its value": lambda x: x.gather(0, torch.max(x, dim=0, keepdim=True).indices.expand_as(x)),
    "entries counted from the first sample": lambda x: x + x.take(x.argmax(-1))[..., None],
    "the middle": lambda x: flat(x)[flat(x).median(0).indices[0].expand(len(flat(x)))].view_as(x),
}
KEEPS = {
    "the largest token of each": lambda x: x.gather(1, x.max(1, keepdim=True).indices.expand_as(x)),
    "the smallest token of each": lambda x: x + x.gather(1, x.argmin(1, keepdim=True)),
    "the larger of two": lambda x: x.max(x.flip(-1)),
}


class Block(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return x + self.function(x)


def test_what_points_among_the_samples_is_refused():
    """Fault: rows that were picked so were those of each micro-batch, without a word."""
    torch.manual_seed(0)
    case = captured(Each(map(Block, MIXES.values())), torch.randn(4, TOKENS, WIDTH))
    module = case.specialized(2)
    for name in MIXES:
        with pytest.raises(SeparationError, match="runs along the batch"):
            loss(module, case.captured, kept=[each == name for each in MIXES], alone=False)


def test_what_points_within_a_sample_is_right():
    torch.manual_seed(0)
    case = captured(Each(map(Block, KEEPS.values())), torch.randn(4, TOKENS, WIDTH))
    module = case.separated(2).module
    parts = zip(*(run(module, case.named(start, 2)) for start in (0, 2)), strict=True)
    for name, found, whole in zip(KEEPS, parts, run(case.specialized(4), case.named()), strict=True):
        torch.testing.assert_close(torch.cat(found), whole, msg=lambda words, name=name: f"{name}: {words}")
