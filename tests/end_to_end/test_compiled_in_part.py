"""Models of which not all can be captured, as Qwen2.5-VL, which reads sizes of images as numbers: the part that has the
layers is compiled, or images are encoded ahead of the call."""

from __future__ import annotations

import re

import pytest
import torch
from learner import distance
from pictures import collated, qwen, samples
from tiered import options
from torch import nn
from zoo import GPT

import gs_compile
from gs_compile.errors import GraphBreakError
from gs_compile.hf import encode_ahead

# Qwen3-VL's first layers get features of images, the others none
pytestmark = pytest.mark.filterwarnings("ignore::gs_compile.errors.UniformityWarning")
SETTINGS = {"lr": 1e-2, "eps": 1e-3}
KINDS = ["qwen2_5", pytest.param("qwen3", marks=pytest.mark.slow)]  # of which the first layers get features of images


def learned(model, optimizer):
    losses = []
    for step in range(2):
        losses.append(model(**collated(samples(step))).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**model.state_dict(), "losses": torch.stack(losses).detach()}


def learned_plainly(kind, *, trains_images=True):
    model = qwen(kind)
    model.model.visual.requires_grad_(trains_images)
    return learned(model, torch.optim.AdamW(model.parameters(), **SETTINGS))


def test_a_model_that_reads_sizes_of_images_is_refused(tmp_path):
    model = qwen()
    model.compile(backend="greedysnake", options=options(tmp_path))
    with pytest.raises(GraphBreakError, match=r"(?s)is not one graph.*encode_ahead\(model\)"):
        model(**collated(samples(0)))


@pytest.mark.parametrize("kind", KINDS)
def test_its_language_model_learns_what_it_learns_in_plain_pytorch(tmp_path, kind):
    model = qwen(kind)
    optimizer = gs_compile.AdamW(model.parameters(), **SETTINGS)
    model.model.language_model.compile(backend="greedysnake", options=options(tmp_path, micro_batch_size=1))
    assert distance(learned(model, optimizer), learned_plainly(kind)) < 1e-5
    optimizer.engine.tiers.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5", "qwen3"])
@pytest.mark.parametrize("trains_images", [False, True])
def test_it_is_one_graph_where_images_are_encoded_ahead(tmp_path, kind, trains_images):
    model = qwen(kind)
    model.model.visual.requires_grad_(trains_images)
    handle = encode_ahead(model)
    optimizer = gs_compile.AdamW(model.parameters(), **SETTINGS)
    model.compile(backend="greedysnake", options=options(tmp_path))
    found = learned(model, optimizer)
    assert distance(found, learned_plainly(kind, trains_images=trains_images)) < 1e-5
    with torch.no_grad():
        own = float(model(**collated(samples(2))).loss)
        plain = qwen(kind)
        plain.load_state_dict(model.state_dict())
        assert own == pytest.approx(float(plain(**collated(samples(2))).loss), abs=1e-5)
    handle.remove()
    with pytest.raises(GraphBreakError, match="is not one graph"):
        model(**collated(samples(0)))
    optimizer.engine.tiers.close()


class Disabled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    @torch.compiler.disable
    def chunked(self, x):
        return x.chunk(2, dim=1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.chunked(x)


def test_a_disabled_function_in_the_forward():
    model = Disabled()
    model.compile(backend="greedysnake", options={"expert": {"compiler": "eager"}})
    with pytest.raises(GraphBreakError, match=re.escape("torch.compiler.disable")):
        model(torch.ones(2, 4))


def test_a_step_that_is_compiled_as_a_whole_is_refused():
    model, ids = GPT(), torch.ones(2, 3, dtype=torch.long)

    @torch.compile(backend="greedysnake", options={"expert": {"compiler": "eager"}})
    def step(ids):
        _, loss = model(ids, ids)
        loss.backward()
        return loss

    with pytest.raises(GraphBreakError, match="compile the model alone"):
        step(ids)
