"""A small model with the interface of the language models of Qwen2-VL and later."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, PLACE = 8, 0  # PLACE: the token of an image's places


class Block(nn.Linear):
    def forward(self, x, turn):
        return x + super().forward(x * turn).tanh()


class Seeing(nn.Module):
    """As Qwen3-VL's: the first layers' results get further features of images at the places of these."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, WIDTH) for _ in range(4))

    def forward(self, ids, positions, rows):
        """positions: (3, samples, tokens). rows: of all images, for the embeddings and each of the first layers."""
        x, places = self.words(ids), (ids == PLACE)[..., None]
        first, *others = [torch.cat(each) if isinstance(each, tuple) else each for each in rows]
        torch._check_tensor_all(places.sum() == first.shape[0])
        x = x.masked_scatter(places.expand_as(x), first)
        turn = positions[1:].sum(0)[..., None].to(x.dtype).cos() * positions[0, ..., None]
        for number, block in enumerate(self.blocks):
            x = block(x, turn)
            if number < len(others):
                x = torch.where(places, x + torch.zeros_like(x).masked_scatter(places, others[number]), x)
        return x.square().mean()
