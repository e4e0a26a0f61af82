"""torchtune_models: torchtune's builders of components."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.zoo.case import HEADS, LAYERS, VOCABULARY, WIDTH, Case, Example, language

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "num_kv_heads": 2,
    "embed_dim": WIDTH,
    "max_seq_len": 64,
}
WIDE = {"intermediate_dim": 48}
BUILDERS: Mapping[str, Mapping[str, Any]] = {
    "llama2.llama2": WIDE,
    "llama3.llama3": WIDE,
    "llama3_2.llama3_2": WIDE,
    "mistral.mistral": WIDE,
    "gemma.gemma": {**WIDE, "head_dim": WIDTH // HEADS, "num_kv_heads": 1},
    "gemma2.gemma2": {**WIDE, "head_dim": WIDTH // HEADS, "sliding_window_size": 4},
    "phi3.phi3": {**WIDE, "num_kv_heads": HEADS},
    "qwen2.qwen2": WIDE,
    "llama3.lora_llama3": {**WIDE, "lora_attn_modules": ["q_proj", "v_proj"], "lora_rank": 4, "lora_alpha": 8},
}


def make(name: str) -> Example:
    """A model that returns logits."""
    module, _, builder = name.partition(".")
    build = getattr(importlib.import_module(f"torchtune.models.{module}"), builder)
    return Example(build(**{**SIZES, **BUILDERS[name]}), language)


CASES = [Case("torchtune", name, partial(make, name)) for name in BUILDERS]
