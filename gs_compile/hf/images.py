"""images: models of images and texts, whose images are encoded ahead of each call.

Qwen2-VL and its like loop over the sizes of images, as numbers (`image_grid_thw`), where they encode them and where
they give tokens their positions; Idefics3 leaves images of padding out. No graph has that. But models of transformers
also take what an encoder gives, as `mm_encoder_outputs`, and `position_ids`. So a hook makes these ahead of a call, as
the model's own code does, in memory, and the call is of embeddings, layers, head and loss. There the rows of all images
are one tensor, which `capture.ahead` deals out to the samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gs_compile.capture.internals import untraced
from gs_compile.errors import OptionError
from gs_compile.planner.cost.model import base_model

_KINDS = {"image": "pixel_values", "video": "pixel_values_videos"}
_SIZES = {"image_grid_thw", "pixel_attention_mask"}  # which no graph reads
_BESIDE = {"mm_token_type_ids", "second_per_grid_ts"}  # of which positions are made


def encode_ahead(
    model: nn.Module, *, around: Callable[[], AbstractContextManager[Any]] | None = None
) -> RemovableHandle:
    """Have a model of transformers encode its images and videos ahead of each call, in memory, so that it compiles.

    Call it before `model.compile`; `attach` does so itself. The encoder's parameters stay in memory. If they are
    trained, their gradients come behind the model's backward, which the optimizer's `max_grad_norm` refuses: freeze
    them, or leave it out. around: a context to encode in, such as autocast, where calls are not in it.

    Returns a handle, whose `remove()` ends it. Raises OptionError for a model without `mm_encoder_outputs`.
    """
    base = base_model(model)
    names = [*inspect.signature(base.forward).parameters]
    if "mm_encoder_outputs" not in names:
        raise OptionError(
            f"{type(base).__name__}.forward takes no mm_encoder_outputs, so its images cannot be encoded ahead of it: "
            "compile the part of it that has the layers, or encode images outside of the model"
        )

    def encode(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with (around or nullcontext)():
            return (), _encoded(base, {**dict(zip(names, args, strict=False)), **named})

    return model.register_forward_pre_hook(untraced(encode), with_kwargs=True)


def encode_for(accelerator: Any, model: nn.Module) -> None:
    """`encode_ahead` of a model that has to have it, in the autocast of Accelerate."""
    if reads_sizes(model):
        encode_ahead(model, around=accelerator.autocast)


def reads_sizes(model: Any) -> bool:
    """Whether a model reads the sizes of its images as numbers, and can be given what its encoder makes."""
    base = base_model(model)
    takes = "mm_encoder_outputs" in inspect.signature(base.forward).parameters
    return takes and not _SIZES.isdisjoint(_parameters(getattr(base, "get_image_features", None)))


def _parameters(method: Any) -> set[str]:
    return {*inspect.signature(method).parameters} if callable(method) else set()


def _encoded(base: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with what is made of images in their place; a call without images as it is."""
    outputs, read = dict(given.get("mm_encoder_outputs") or {}), set(_BESIDE)
    for kind, values in _KINDS.items():
        method = getattr(base, f"get_{kind}_features", None)
        names = _parameters(method)
        if method is not None and given.get(values) is not None:
            own = {name: given[name] for name in names & given.keys()}
            outputs[kind] = _rows(method(**{**own, "return_dict": True}))
        read |= names
    if not outputs:
        return given
    position = getattr(getattr(base, "model", base), "compute_3d_position_ids", None)
    if position is not None and given.get("position_ids") is None:
        given["position_ids"] = position(**{name: given.get(name) for name in _parameters(position)})
    return {**{name: each for name, each in given.items() if name not in read}, "mm_encoder_outputs": outputs}


def _rows(found: Any) -> SimpleNamespace:
    """What an encoder gives, with the rows of all images in one tensor: how many there are is no part of the graph."""
    features = getattr(found, "deepstack_features", None) or []
    rows = found.pooler_output
    rows = (torch.cat([*rows]),) if isinstance(rows, (list, tuple)) else rows
    return SimpleNamespace(pooler_output=rows, deepstack_features=[(torch.cat([*each]),) for each in features])
