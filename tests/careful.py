"""A model that checks its values as it runs; not in a test module, whose asserts pytest rewrites."""

from __future__ import annotations

import torch
from torch import nn

NUM_WORDS, BIG = 90, 1e3


class Block(nn.Linear):
    """Checks what comes in and, as the last that it does, what it hands on."""

    def __init__(self, where: str) -> None:
        super().__init__(8, 8)
        self.where = where

    def forward(self, x):
        if self.where == "in a block":
            assert (x.abs() < BIG).all(), "too big"
        x = x + super().forward(x).relu()
        if self.where == "behind a block":
            torch._check_tensor_all_with(ValueError, x.abs() < BIG)
        return x


class Careful(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.words = nn.Embedding(NUM_WORDS, 8)
        self.blocks = nn.ModuleList(Block(where) for _ in range(2))

    def forward(self, ids, scale):
        if self.where == "of inputs":
            torch._check_tensor_all(scale.abs() < BIG)
        if self.where == "of a count":  # as models compare images with their places
            torch._check_tensor_all((scale.abs() < BIG).sum() == scale.numel())
        if self.where == "by a branch" and scale is not None and scale.abs().max() >= BIG:
            raise ValueError(f"too big: {len(scale)}")
        if self.where == "by a branch that is not taken" and not (scale.abs() < BIG).all():
            raise ValueError("too big")
        if self.where == "by one of two" and (scale.isnan().any() or scale.abs().max() >= BIG):
            words = "no number, or too big"
            raise ValueError(words)
        if self.where == "by the last branch":
            self.refuse_first(scale)
        x = self.words(ids) * scale[:, None, None]
        if self.where == "ahead of blocks":
            assert (x.abs() < BIG).all(), "too big"
        for block in self.blocks:
            x = block(x)
        losses = x.square().mean((1, 2))
        if self.where == "of what is returned":
            assert (losses < BIG).all(), "too big"
        loss = losses.mean()
        if self.where == "of the loss":
            assert loss < BIG, "too big"
        return loss

    def refuse_first(self, scale):
        """As pytorch-crf checks its mask: where the code ends, Python jumps past the end of other branches."""
        if scale is not None:
            is_new = self.where is None and scale.isnan().any()
            is_small = self.where is not None and scale.abs().max() < BIG
            if not is_new and not is_small:
                raise ValueError("too big")
