"""Models whose parts go where a test of `split` wants them."""

from __future__ import annotations

import torch
from captured import WIDTH, WORDS, Block, Tiny, captured, leaves, run_units
from torch import nn


def assert_units_equal_the_model(model, *args):
    case = captured(model, *args)
    found = run_units(case.split(len(args[0]), alone=True), case, 0, len(args[0]))
    torch.testing.assert_close(leaves(found), leaves(model(*args)))


class Reading(Block):
    """Layers that read more than the layer before."""

    def forward(self, x, *sides):
        for side in sides:
            x = x + side
        return super().forward(x)


class Sides(Tiny):
    """`make` gives values from the embedding and the batch; layer i reads those that `reads[i]` lists."""

    def __init__(self, make, reads, layer=Reading):
        super().__init__(lambda p, y: p, [layer() for _ in reads])
        self.make, self.reads = make, reads
        self.table = nn.Parameter(torch.randn(WORDS, WIDTH))

    def forward(self, ids, labels):
        x = self.embed(ids)
        made = self.make(self, x, ids)
        for block, reads in zip(self.blocks, self.reads, strict=True):
            x = block(x, *(made[index] for index in reads))
        return self.criterion(self.head(x), labels)


class Any(nn.Module):
    """A stack with what a draw says: glue, side inputs, in-place changes, taps."""

    def __init__(self, layers, glue, side, in_place, outputs):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(layers)])
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.glue, self.side, self.in_place, self.outputs = glue, side, in_place, outputs

    def forward(self, ids, labels):
        x = self.embed(ids)
        states = []
        mask = self.embed.weight.sum() + ids[..., None] if self.side == "made" else ids[..., None]
        for block in self.blocks:
            if self.glue == "before":
                x = x.sin()
            if self.side:
                x = x * mask
            x = block(x)
            if self.in_place:
                x.mul_(0.5)
                x[:, 0] += 1
            if self.glue == "after":
                x = x.cos()
            states.append(x)
        logits = self.head(x)
        return {"loss": (logits.sum(),), "logits": (logits, logits.mean()), "states": (logits, *states)}[self.outputs]
