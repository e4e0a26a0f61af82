"""timm_models: classifiers of images from timm, by the name of a registered model, shrunk."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.zoo.case import CLASSES, HEADS, LAYERS, PIXELS, WIDTH, Case, Example, classification

STACK: Mapping[str, Any] = {
    "img_size": PIXELS,
    "patch_size": 8,
    "embed_dim": WIDTH,
    "depth": LAYERS,
    "num_heads": HEADS,
}
MODELS: Mapping[str, tuple[int, Mapping[str, Any]]] = {  # and the number of blocks, or of stages
    "vit_tiny_patch16_224": (LAYERS, STACK),
    "vit_base_patch16_siglip_224": (LAYERS, STACK),
    "vit_small_patch14_reg4_dinov2": (LAYERS, STACK),
    "deit_tiny_patch16_224": (LAYERS, STACK),
    "deit_tiny_distilled_patch16_224": (LAYERS, STACK),
    "beit_base_patch16_224": (LAYERS, STACK),
    "eva02_tiny_patch14_224": (LAYERS, STACK),
    "cait_xxs24_224": (LAYERS + 2, STACK),
    "xcit_nano_12_p8_224": (LAYERS + 2, STACK),
    "vit_relpos_small_patch16_224": (LAYERS, STACK),
    "swin_tiny_patch4_window7_224": (
        2,
        {"img_size": PIXELS, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4},
    ),
    "swinv2_tiny_window8_256": (
        2,
        {"img_size": PIXELS, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4},
    ),
    "convnext_atto": (4, {"depths": (1, 1, 3, 1), "dims": (8, 16, 32, 64)}),
    "mambaout_femto": (4, {"depths": (1, 1, 3, 1), "dims": (8, 16, 32, 64)}),
    "resnet18": (8, {}),
}


def make(name: str) -> Example:
    """A model that returns logits of classes."""
    import timm

    return Example(timm.create_model(name, num_classes=CLASSES, **MODELS[name][1]), classification)


def mixer(layer: str, mlp_ratio: Any) -> Example:
    """Networks that mix patches by matrices."""
    from timm.models import mlp_mixer

    sizes = {"img_size": PIXELS, "patch_size": 8, "embed_dim": WIDTH, "num_blocks": LAYERS, "num_classes": CLASSES}
    model = mlp_mixer.MlpMixer(**sizes, mlp_ratio=mlp_ratio, block_layer=getattr(mlp_mixer, layer))
    return Example(model, classification)


def pool_former() -> Example:
    """Poolformer: stages whose blocks average their neighbours."""
    from timm.models.metaformer import MetaFormer

    return Example(MetaFormer(depths=(1, 1, 3, 1), dims=(8, 16, 32, 64), num_classes=CLASSES), classification)


def conv_mixer() -> Example:
    """ConvMixer, with batch norms."""
    from timm.models.convmixer import ConvMixer

    return Example(ConvMixer(WIDTH, LAYERS, kernel_size=3, patch_size=8, num_classes=CLASSES), classification)


CASES = [
    *(Case("timm", name, partial(make, name), num_blocks) for name, (num_blocks, _) in MODELS.items()),
    Case("timm", "MlpMixer of MixerBlock", partial(mixer, "MixerBlock", (0.5, 4.0))),
    Case("timm", "MlpMixer of ResBlock", partial(mixer, "ResBlock", 4)),
    Case("timm", "MetaFormer (poolformer)", pool_former, 4),
    Case("timm", "ConvMixer", conv_mixer),
]
