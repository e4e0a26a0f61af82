"""x_transformers_models: x-transformers' stacks under its options. A layer there is attention or feed-forward alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.zoo.case import (
    CLASSES,
    HEADS,
    LAYERS,
    PIXELS,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Case,
    Example,
    classification,
    ids,
    language,
)

STACK: Mapping[str, Any] = {
    "dim": WIDTH,
    "depth": LAYERS,
    "heads": HEADS,
    "attn_dim_head": WIDTH // HEADS,
    "verbose": False,
}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "Decoder": {},
    "Decoder, rotary_pos_emb": {"rotary_pos_emb": True},
    "Decoder, rotary_xpos": {"rotary_xpos": True},
    "Decoder, alibi_pos_bias": {"alibi_pos_bias": True},
    "Decoder, rel_pos_bias": {"rel_pos_bias": True},
    "Decoder, dynamic_pos_bias": {"dynamic_pos_bias": True},
    "Decoder, use_rmsnorm": {"use_rmsnorm": True},
    "Decoder, use_dynamic_tanh": {"use_dynamic_tanh": True},
    "Decoder, ff_glu, ff_swish": {"ff_glu": True, "ff_swish": True, "ff_no_bias": True},
    "Decoder, sandwich_norm": {"sandwich_norm": True},
    "Decoder, post-norm": {"pre_norm": False},
    "Decoder, macaron": {"macaron": True},
    "Decoder, shift_tokens": {"shift_tokens": 1},
    "Decoder, attn_flash": {"attn_flash": True},
    "Decoder, attn_qk_norm": {"attn_qk_norm": True},
    "Decoder, attn_num_mem_kv": {"attn_num_mem_kv": 4},
    "Decoder, gate_residual": {"gate_residual": True},
    "Decoder, use_layerscale": {"use_layerscale": True, "layerscale_init_value": 0.1},
    "Decoder, residual_attn": {"residual_attn": True},
    "Decoder, add_value_residual": {"add_value_residual": True},
    "Decoder, unet_skips": {"unet_skips": True, "depth": 4},
    "Decoder, num_residual_streams": {"num_residual_streams": 2},
    "Decoder, weight_tie_layers": {"weight_tie_layers": True},
}
BLOCKS = {"Decoder, macaron": 9, "Decoder, unet_skips": 8}  # others: 6


def make(name: str) -> Example:
    """A decoder that returns logits."""
    from x_transformers import Decoder, TransformerWrapper

    stack = Decoder(**{**STACK, **OPTIONS[name]})
    return Example(TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=TOKENS, attn_layers=stack), language)


def encoder() -> Example:
    """An encoder that returns logits."""
    from x_transformers import Encoder, TransformerWrapper

    stack = Encoder(**STACK)
    return Example(TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=TOKENS, attn_layers=stack), language)


def memory_tokens() -> Example:
    """A decoder with learned tokens ahead of the others."""
    from x_transformers import Decoder, TransformerWrapper

    settings = {"num_tokens": VOCABULARY, "max_seq_len": TOKENS, "num_memory_tokens": 2, "tie_embedding": True}
    return Example(TransformerWrapper(**settings, attn_layers=Decoder(**STACK)), language)


def image() -> Example:
    """An encoder of image patches."""
    from x_transformers import Encoder, ViTransformerWrapper

    model = ViTransformerWrapper(image_size=PIXELS, patch_size=8, num_classes=CLASSES, attn_layers=Encoder(**STACK))
    return Example(model, classification)


def autoregressive() -> Example:
    """The wrapper that computes the loss of a decoder."""
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    model = TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=TOKENS, attn_layers=Decoder(**STACK))
    return Example(AutoregressiveWrapper(model), lambda model, step: model(ids(step)))


def encoder_decoder() -> Example:
    """Encoder and decoder, each with its own embedding."""
    from x_transformers import XTransformer

    sizes = {"num_tokens": VOCABULARY, "depth": LAYERS, "heads": HEADS, "max_seq_len": TOKENS, "attn_dim_head": 8}
    given = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in sizes.items()}
    return Example(XTransformer(dim=WIDTH, **given), lambda model, step: model(ids(step), ids(step + 10)))


CASES = [
    *(Case("x-transformers", name, partial(make, name), BLOCKS.get(name, 2 * LAYERS)) for name in OPTIONS),
    Case("x-transformers", "Decoder, memory tokens, tied", memory_tokens, 2 * LAYERS),
    Case("x-transformers", "Encoder", encoder, 2 * LAYERS),
    Case("x-transformers", "ViTransformerWrapper", image, 2 * LAYERS),
    Case("x-transformers", "AutoregressiveWrapper", autoregressive, 2 * LAYERS),
    Case("x-transformers", "XTransformer", encoder_decoder, 5 * LAYERS),
]
