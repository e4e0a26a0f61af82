"""A tiny model of which the matrices of layers are frozen, as they are or as a codec makes them."""

from __future__ import annotations

import torch
from tiered import gpt2
from torch import nn

from gs_compile.runtime.codecs import CODECS


class Experts(nn.Module):
    """The mean of what two matrices make, which are one parameter, [experts, inputs, outputs]."""

    def __init__(self, weight_OI: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.stack([weight_OI.T, weight_OI.T.flip(0)]).detach())

    def forward(self, x_BTI: torch.Tensor) -> torch.Tensor:
        return (x_BTI.unsqueeze(1) @ self.weight).mean(1)


def gpt2_with_frozen(codec: str = "", **sizes: int) -> torch.nn.Module:
    """Matrices of layers, some of them two in one, are frozen; with a codec they are the values that it makes of them."""
    model = gpt2(**sizes)
    for block in model.transformer.h:
        block.up = Experts(block.up.weight)
    for name, parameter in model.named_parameters():
        if ".h." in name and parameter.dim() > 1:
            parameter.requires_grad_(False)
            if codec:
                known = CODECS[codec]
                parameter.data = known.decode(known.encode(parameter.data), parameter.shape, parameter.dtype)
    return model
