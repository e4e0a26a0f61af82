"""A model of HuggingFace's classes that Dynamo soon has read: for tests of what is around a model, not of the model."""

from __future__ import annotations

from typing import Any

import torch
from tiered import Block
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from zoo import VOCAB, WIDTH


class TinyConfig(PretrainedConfig):
    model_type = "tiny"

    def __init__(self, vocab_size: int = VOCAB, dropout: float = 0.0, **others: Any) -> None:
        super().__init__(**others)
        self.vocab_size, self.dropout = vocab_size, dropout


class Tiny(PreTrainedModel):
    """Two blocks that mix no tokens, so that no attention mask is needed; the loss is HuggingFace's own."""

    config_class = TinyConfig
    _input_embed_layer = "words"

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.words, self.places = nn.Embedding(config.vocab_size, WIDTH), nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, config.dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor, attention_mask: Any = None, labels: torch.Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutput:
        x_BTD = self.words(input_ids) + self.places.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits = self.head(self.norm(x_BTD))
        if labels is None:
            return CausalLMOutput(logits=logits)
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutput(loss=loss, logits=logits)


def tiny(dropout: float = 0.0) -> Tiny:
    torch.manual_seed(0)
    return Tiny(TinyConfig(dropout=dropout)).train()
