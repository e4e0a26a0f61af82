"""hf_others: encoders, encoder-decoders and models of images and sound of transformers, each with its own loss."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.zoo.case import (
    BATCH,
    CLASSES,
    HEADS,
    LAYERS,
    PIXELS,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Case,
    Example,
    Loss,
    classes,
    generator,
    ids,
    images,
    labels,
    returned,
)

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
STACK: Mapping[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
}
TEXT: Mapping[str, Any] = {**STACK, "vocab_size": VOCABULARY, "max_position_embeddings": 64, **SPECIAL}
VISION: Mapping[str, Any] = {**STACK, "image_size": PIXELS, "patch_size": 8}
BART: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    **{f"{side}_layers": LAYERS for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
    "max_position_embeddings": 64,
    **SPECIAL,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
T5: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    **SPECIAL,
    "decoder_start_token_id": 0,
}
IMAGE = 3  # the token in whose place features of an image come


def targets(step: int) -> Tensor:
    """Labels of the batch's own tokens."""
    return labels(ids(step))


def other_targets(step: int) -> Tensor:
    """Labels that are not the tokens of the source."""
    return labels(ids(step + 10))


def spectrum(step: int) -> Tensor:
    """Features of sound."""
    return torch.randn(BATCH, 8, 2 * TOKENS, generator=generator(step))


def wave(step: int) -> Tensor:
    """Samples of sound."""
    return torch.randn(BATCH, 800, generator=generator(step))


def with_images(step: int, num_image_tokens: int) -> Tensor:
    """Tokens of which the first stand for an image."""
    tokens = ids(step, num_image_tokens + TOKENS, VOCABULARY).clamp(min=IMAGE + 1)
    tokens[:, :num_image_tokens] = IMAGE
    return tokens


def noise(step: int) -> Tensor:
    """What chooses the patches of each image that are left out."""
    return torch.rand(BATCH, (PIXELS // 8) ** 2, generator=generator(step))


SEQUENCE_LOSS = returned(input_ids=ids, labels=targets)
TRANSLATION = returned(input_ids=ids, labels=other_targets)
IMAGE_LOSS = returned(pixel_values=images, labels=classes)
PAIRS = returned(input_ids=ids, pixel_values=images, return_loss=lambda _: True)


def about_images(num_image_tokens: int) -> Loss:
    """The loss of a language model that reads an image too."""
    tokens = partial(with_images, num_image_tokens=num_image_tokens)
    return returned(input_ids=tokens, pixel_values=images, labels=lambda step: labels(tokens(step)))


def make(name: str, kind: str, sizes: Mapping[str, Any], loss: Loss) -> Example:
    """The class `kind` of transformers, with the configuration called `name`."""
    import transformers

    config = transformers.AutoConfig.for_model(name, **sizes)
    build = getattr(transformers, kind)
    model = build.from_config(config) if kind.startswith("AutoModel") else build(config)
    return Example(model, loss, outputs="loss")


def case(name: str, kind: str, sizes: Mapping[str, Any], loss: Loss = SEQUENCE_LOSS, num_blocks: int = LAYERS) -> Case:
    """A case whose name is the configuration's and the class's."""
    return Case("transformers", f"{name}, {kind}", partial(make, name, kind, sizes, loss), num_blocks)


MASKED = "AutoModelForMaskedLM"
SEQ2SEQ = "AutoModelForSeq2SeqLM"
CLASSIFIER = "AutoModelForImageClassification"
LLAMA: Mapping[str, Any] = {"model_type": "llama", **TEXT, "num_key_value_heads": 2, "head_dim": 8}

ENCODERS = [
    case("bert", MASKED, TEXT),
    case("roberta", MASKED, TEXT),
    case("distilbert", MASKED, {**TEXT, "dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 48}),
    case("electra", MASKED, {**TEXT, "embedding_size": WIDTH}),
    case("deberta", MASKED, {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    case("deberta-v2", MASKED, {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
    case("modernbert", MASKED, {**TEXT, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 4}),
    case("albert", MASKED, {**TEXT, "embedding_size": 16}),
    case("roformer", MASKED, TEXT),
    case("convbert", MASKED, {**TEXT, "embedding_size": WIDTH}),
    case(
        "funnel",
        MASKED,
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "block_sizes": [2, 2], "n_head": HEADS},
        num_blocks=6,  # two of them of the decoder
    ),
    case("fnet", MASKED, {**TEXT, "tpu_short_seq_length": TOKENS}),
    case("big_bird", MASKED, {**TEXT, "attention_type": "original_full"}),
    case("esm", MASKED, {**TEXT, "mask_token_id": 3, "position_embedding_type": "rotary"}),
    case("mobilebert", MASKED, {**TEXT, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16}),
    case("squeezebert", MASKED, {**TEXT, "embedding_size": WIDTH}),
    case("megatron-bert", MASKED, TEXT),
    case("eurobert", MASKED, {**TEXT, "num_key_value_heads": 2, "head_dim": 8}),
]
ENCODER_DECODERS = [
    case("t5", SEQ2SEQ, T5, TRANSLATION, 2 * LAYERS),
    case("bart", SEQ2SEQ, BART, TRANSLATION, 2 * LAYERS),
    case("mbart", SEQ2SEQ, BART, TRANSLATION, 2 * LAYERS),
    case("m2m_100", SEQ2SEQ, BART, TRANSLATION, 2 * LAYERS),
    case(
        "led", SEQ2SEQ, {**BART, "attention_window": 4, "max_encoder_position_embeddings": 64}, TRANSLATION, 2 * LAYERS
    ),
    case(
        "whisper",
        "WhisperForConditionalGeneration",
        {**BART, "num_mel_bins": 8, "max_source_positions": TOKENS, "max_target_positions": 64},
        returned(input_features=spectrum, labels=targets),
        2 * LAYERS,
    ),
]
PICTURES = [
    case("vit", CLASSIFIER, {**VISION, "num_labels": CLASSES}, IMAGE_LOSS),
    case("deit", "DeiTForImageClassification", {**VISION, "num_labels": CLASSES}, IMAGE_LOSS),
    case("dinov2", CLASSIFIER, {**VISION, "num_labels": CLASSES}, IMAGE_LOSS),
    case("beit", CLASSIFIER, {**VISION, "num_labels": CLASSES}, IMAGE_LOSS),
    case("ijepa", CLASSIFIER, {**VISION, "num_labels": CLASSES}, IMAGE_LOSS),
    case(
        "swin",
        CLASSIFIER,
        {
            "image_size": PIXELS,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "num_labels": CLASSES,
        },
        IMAGE_LOSS,
        2,
    ),
    case(
        "convnext",
        CLASSIFIER,
        {
            "hidden_sizes": [8, 16, 32],
            "depths": [1, 3, 1],
            "num_stages": 3,
            "image_size": PIXELS,
            "num_labels": CLASSES,
        },
        IMAGE_LOSS,
        3,
    ),
    case(
        "vit_mae",
        "ViTMAEForPreTraining",
        {
            **VISION,
            "decoder_hidden_size": WIDTH,
            "decoder_num_hidden_layers": 2,
            "decoder_num_attention_heads": HEADS,
            "decoder_intermediate_size": 48,
        },
        returned(pixel_values=images, noise=noise),
        LAYERS + 2,
    ),
]
BOTH = [
    case("clip", "CLIPModel", {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16}, PAIRS, 2 * LAYERS),
    case(
        "siglip",
        "SiglipModel",
        {"text_config": {**TEXT, "projection_size": WIDTH}, "vision_config": VISION},
        PAIRS,
        2 * LAYERS,
    ),
    case(
        "llava",
        "LlavaForConditionalGeneration",
        {"text_config": LLAMA, "vision_config": {"model_type": "clip_vision_model", **VISION}, "image_token_id": IMAGE},
        about_images(16),
        2 * LAYERS,
    ),
    case(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {
                **TEXT,
                "model_type": "gemma3_text",
                "num_key_value_heads": 2,
                "head_dim": 8,
                "sliding_window": 4,
            },
            "vision_config": {"model_type": "siglip_vision_model", **VISION},
            "image_token_id": IMAGE,
            "mm_tokens_per_image": 4,
        },
        about_images(4),
        2 * LAYERS,
    ),
]
SOUND = [
    case(
        "wav2vec2",
        "Wav2Vec2ForCTC",
        {
            **TEXT,
            "conv_dim": [8, 8],
            "conv_stride": [5, 2],
            "conv_kernel": [10, 3],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "mask_time_prob": 0.0,
            "layerdrop": 0.0,
        },
        returned(input_values=wave, labels=ids),
    ),
]
CASES = [*ENCODERS, *ENCODER_DECODERS, *PICTURES, *BOTH, *SOUND]
