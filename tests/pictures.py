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

PAD, VIDEO, BEGIN, IMAGE, FIRST, VOCABULARY = 0, 1, 2, 3, 4, 48  # tokens; from FIRST on they are words
SIZES = ((4, 4), (4, 8), (8, 4), (4, 4))  # of the images of a batch, in patches, of which four are one place
PATCH = 96  # numbers


def qwen(kind: str = "qwen2_5") -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    heads = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    text = {**sizes, **heads, "vocab_size": VOCABULARY, "rope_parameters": rope, "pad_token_id": PAD}
    vision = {**sizes, "patch_size": 4, "num_heads": 4, "out_hidden_size": 32}
    tokens = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN}
    if kind == "qwen3":
        text |= {"head_dim": 8}
        vision |= {"depth": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)).train()
    vision |= {"depth": 1, "window_size": 16, "fullatt_block_indexes": [0]}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    return Qwen2_5_VLForConditionalGeneration(config).train()


def samples(
    step: int, num_tokens: int = 12, *, has_video: bool = False, num_seen: int = len(SIZES)
) -> list[dict[str, torch.Tensor]]:
    """A text for each of the sizes, which has an image of that, and a video of 1 x 2 places; the second is shorter.

    num_seen: so many have an image, and the others none.
    """
    draw, found = torch.Generator().manual_seed(step), []
    for number, (height, width) in enumerate(SIZES):
        tokens = torch.randint(FIRST, VOCABULARY, (num_tokens + 2 * has_video - 2 * (number == 1),), generator=draw)
        stop = 1 + height * width // 4
        tokens[0], tokens[1:stop] = BEGIN, IMAGE
        if has_video:
            begin = stop + number % 2  # at once behind the image, or with a word between
            tokens[begin : begin + 2] = VIDEO
        are_seen = (tokens == IMAGE) | (tokens == VIDEO)
        sample = {
            "input_ids": tokens,
            "labels": tokens.masked_fill(are_seen, -100),
            "attention_mask": torch.ones_like(tokens),
            "mm_token_type_ids": (tokens == IMAGE).int() + 2 * (tokens == VIDEO).int(),
            "pixel_values": torch.randn(height * width, PATCH, generator=draw),
            "image_grid_thw": torch.tensor([[1, height, width]]),
        }
        if number >= num_seen:
            words = tokens.masked_fill(are_seen, FIRST)
            sample = {"input_ids": words, "labels": words, "attention_mask": sample["attention_mask"]}
            sample["mm_token_type_ids"] = torch.zeros_like(words).int()
        elif has_video:
            sample["pixel_values_videos"] = torch.randn(8, PATCH, generator=draw)
            sample["video_grid_thw"] = torch.tensor([[1, 2, 4]])
        found.append(sample)
    return found


def collated(batch: list[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Texts are padded, and images are behind one another, as the models' processors have it."""
    filling = {"input_ids": PAD, "labels": -100}
    names = dict.fromkeys(name for each in batch for name in each)
    found = {name: [each[name] for each in batch if name in each] for name in names}
    return {
        name: torch.cat(each)
        if name.startswith("pixel_values") or name.endswith("_grid_thw")
        else nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=filling.get(name, 0))
        for name, each in found.items()
    }
