"""litgpt_models: named configurations of litgpt, shrunk."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.zoo.case import HEADS, LAYERS, VOCABULARY, WIDTH, Case, Example, language

SIZES: Mapping[str, Any] = {
    "n_layer": LAYERS,
    "n_embd": WIDTH,
    "n_head": HEADS,
    "head_size": WIDTH // HEADS,
    "intermediate_size": 48,
    "block_size": 64,
    "vocab_size": VOCABULARY,
    "padded_vocab_size": 72,
}
GROUPED = {"n_query_groups": 2}
EXPERTS = {**GROUPED, "n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 48}
NAMES: Mapping[str, Mapping[str, Any]] = {
    "pythia-14m": {},
    "Llama-3.2-1B": {**GROUPED, "rope_adjustments": None},
    "Gemma-2b": {"n_query_groups": 1},
    "Gemma-2-2b": {**GROUPED, "sliding_window_size": 4},
    "Gemma-3-1b-it": {**GROUPED, "sliding_window_size": 4},
    "phi-2": {},
    "Phi-3-mini-4k-instruct": {},
    "Mixtral-8x7B-v0.1": EXPERTS,
    "falcon-7b": {"n_query_groups": 1},
    "Qwen2.5-0.5B": GROUPED,
    "Qwen3-0.6B": GROUPED,
    "OLMo-2-1124-7B": {"n_query_groups": HEADS},
}


def make(name: str) -> Example:
    """A model that returns logits."""
    from litgpt.config import Config
    from litgpt.model import GPT

    model = GPT(Config.from_name(name, **SIZES, **NAMES[name]))
    model.apply(model._init_weights)
    return Example(model, language)


CASES = [Case("litgpt", name, partial(make, name)) for name in NAMES]
