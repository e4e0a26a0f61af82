"""Tiny models of images and texts that read the sizes of images as numbers, and batches for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

PAD, BEGIN, IMAGE, FIRST, VOCABULARY = 0, 2, 3, 4, 48  # tokens; from FIRST on they are words
SIZES = ((4, 4), (4, 8), (8, 4), (4, 4))  # of the images of a batch, in patches, of which four are one place
PATCH = 96  # numbers


def qwen(kind: str = "qwen2_5") -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    text = {**sizes, **heads, "vocab_size": VOCABULARY, "rope_parameters": rope, "pad_token_id": PAD}
    vision = {**sizes, "patch_size": 4, "num_heads": 4, "out_hidden_size": 32}
    tokens = {"image_token_id": IMAGE, "vision_start_token_id": BEGIN}
    if kind == "qwen3":
        text |= {"head_dim": 8}
        vision |= {"depth": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)).train()
    vision |= {"depth": 1, "window_size": 16, "fullatt_block_indexes": [0]}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    return Qwen2_5_VLForConditionalGeneration(config).train()


def samples(step: int, num_tokens: int = 12) -> list[dict[str, torch.Tensor]]:
    """A text for each of the sizes, which has an image of that; the second is shorter."""
    draw, found = torch.Generator().manual_seed(step), []
    for number, (height, width) in enumerate(SIZES):
        tokens = torch.randint(FIRST, VOCABULARY, (num_tokens - 2 * (number == 1),), generator=draw)
        tokens[0], tokens[1 : 1 + height * width // 4] = BEGIN, IMAGE
        found.append(
            {
                "input_ids": tokens,
                "labels": tokens.masked_fill(tokens == IMAGE, -100),
                "attention_mask": torch.ones_like(tokens),
                "mm_token_type_ids": (tokens == IMAGE).int(),
                "pixel_values": torch.randn(height * width, PATCH, generator=draw),
                "image_grid_thw": torch.tensor([[1, height, width]]),
            }
        )
    return found


def collated(batch: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Texts are padded, and images are behind one another, as the models' processors have it."""
    filling = {"input_ids": PAD, "labels": -100}
    found = {name: [each[name] for each in batch] for name in batch[0]}
    return {
        name: torch.cat(each)
        if name in ("pixel_values", "image_grid_thw")
        else nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=filling.get(name, 0))
        for name, each in found.items()
    }
