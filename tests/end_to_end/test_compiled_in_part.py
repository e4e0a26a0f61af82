"""Models of which the part that has the layers is compiled, as Qwen2.5-VL, which reads sizes of images as numbers."""

from __future__ import annotations

import re

import pytest
import torch
from learner import distance
from tiered import options
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from zoo import GPT

import gs_compile
from gs_compile.errors import GraphBreakError

BEGIN, IMAGE, VOCABULARY = 2, 3, 48
SIZES, SETTINGS = {"hidden_size": 32, "intermediate_size": 64}, {"lr": 1e-2, "eps": 1e-3}


def qwen():
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    places = {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [0]}
    config = Qwen2_5_VLConfig(
        text_config={**SIZES, **heads, "vocab_size": VOCABULARY, "rope_parameters": rope, "pad_token_id": 0},
        vision_config={**SIZES, **places, "depth": 1, "num_heads": 4, "out_hidden_size": 32},
        image_token_id=IMAGE,
        vision_start_token_id=BEGIN,
    )
    return Qwen2_5_VLForConditionalGeneration(config).train()


def batch(step):
    """Four images of 16 patches, of which four are one place each."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(IMAGE + 1, VOCABULARY, (4, 10), generator=draw)
    tokens[:, 0], tokens[:, 1:5] = BEGIN, IMAGE
    return {
        "input_ids": tokens,
        "labels": tokens,
        "mm_token_type_ids": (tokens == IMAGE).int(),
        "pixel_values": torch.randn(64, 96, generator=draw),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 4),
    }


def learned(model, optimizer):
    losses = []
    for step in range(2):
        losses.append(model(**batch(step)).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**model.state_dict(), "losses": torch.stack(losses).detach()}


def test_a_model_that_reads_sizes_of_images_is_refused(tmp_path):
    model = qwen()
    model.compile(backend="greedysnake", options=options(tmp_path))
    with pytest.raises(GraphBreakError, match="is not one graph"):
        model(**batch(0))


def test_its_language_model_learns_what_it_learns_in_plain_pytorch(tmp_path):
    model, plain = qwen(), qwen()
    optimizer = gs_compile.AdamW(model.parameters(), **SETTINGS)
    model.model.language_model.compile(backend="greedysnake", options=options(tmp_path, micro_batch_size=4))
    found = learned(model, optimizer)
    assert distance(found, learned(plain, torch.optim.AdamW(plain.parameters(), **SETTINGS))) < 1e-5
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
