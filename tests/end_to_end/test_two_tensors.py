"""Blocks that hand on two tensors, as of image and text, are the layers, whatever smaller stack could be cut as it is."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from zoo import WIDTH, assert_same_gradients, compile_model, gradients

from gs_compile.codegen.compiled import compilations_of

LAYERS, SAMPLES = 4, 5


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, image, text):
        mean = torch.cat([image, text], 1).mean(1, keepdim=True)
        return image + self.image(image + mean).tanh(), text + self.text(text - mean).tanh()


class Diffusion(nn.Module):
    """With a small stack ahead of the blocks, of what the time is embedded by."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.widen = nn.Linear(4, 4), nn.Linear(4, WIDTH)
        self.time = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, WIDTH))
        self.blocks = nn.ModuleList(Both() for _ in range(LAYERS))
        self.leave = nn.Linear(WIDTH, 4)

    def forward(self, image, text, time):
        image, text = self.widen(self.enter(image)), self.widen(self.enter(text)) + self.time(time)[:, None]
        for block in self.blocks:
            image, text = block(image, text)
        return self.leave(image) + text.mean()


class LooksUpItself(Diffusion):
    """As models of diffusers: Dynamo has other paths to its modules, by which all its linear ones were a stack."""

    def __init__(self):
        super().__init__()
        self.time = nn.Linear(4, WIDTH)

    def __getattr__(self, name):
        return super().__getattr__(name)


@pytest.mark.parametrize("kind", [Diffusion, LooksUpItself])
def test_they_are_the_layers(kind):
    model = kind().double()
    plain = copy.deepcopy(model)
    compile_model(model, 2)
    inputs = torch.randn(SAMPLES, 6, 4).double(), torch.randn(SAMPLES, 3, 4).double(), torch.randn(SAMPLES, 4).double()
    found, expected = model(*inputs), plain(*inputs)
    torch.testing.assert_close(found, expected)
    for each in (found, expected):
        each.square().mean().backward()
    assert_same_gradients(gradients(model), gradients(plain), 1e-12)
    (compilation,) = compilations_of[model.leave.weight]
    assert {each.split.num_layers for each in compilation.models.values()} == {LAYERS}
