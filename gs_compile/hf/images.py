"""images: models of images and texts, whose images are encoded before each call.

Qwen2-VL and similar models loop over the sizes of images, as numbers (`image_grid_thw`), when they encode images and
when they compute positions; Idefics3 skips images that are padding. A graph cannot do that. But models of transformers
also take an encoder's outputs, as `mm_encoder_outputs`, and `position_ids`. So a hook computes these before a call,
with the model's own code, in memory, and the call consists of embeddings, layers, head and loss. The rows of all images
are one tensor, which `capture.ahead` distributes to the samples.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gs_compile.capture.internals import tree_leaves, untraced
from gs_compile.errors import CheckError, OptionError
from gs_compile.model.residency import bring_back
from gs_compile.model.tiered_optimizer import optimizers_of
from gs_compile.planner.cost.model import base_model

_KINDS = {"image": "pixel_values", "video": "pixel_values_videos"}
_SIZES = {"image_grid_thw", "pixel_attention_mask"}  # that a graph cannot read
_BESIDE = {"mm_token_type_ids", "second_per_grid_ts"}  # from which positions are computed


def encode_ahead(
    model: nn.Module, *, around: Callable[[], AbstractContextManager[Any]] | None = None
) -> RemovableHandle:
    """Have a model of transformers encode its images and videos ahead of each call, in memory, so that it compiles.

    Call it before `model.compile`; `attach` does so itself. The encoder's parameters stay in memory. If they are
    trained, their gradients come behind the model's backward. With the optimizer's `max_grad_norm` they are in the
    norm, so all updates wait for `optimizer.step()`. around: a context to encode in, such as autocast, where calls are
    not in it.

    Returns a handle, whose `remove()` ends it. Raises OptionError for a model without `mm_encoder_outputs`.
    """
    base = base_model(model)
    names = [*inspect.signature(base.forward).parameters]
    if not _takes_encoded(base):
        raise OptionError(
            f"{type(base).__name__}.forward takes no mm_encoder_outputs, so its images cannot be encoded ahead of it: "
            "compile the part of it that has the layers, or encode images outside of the model"
        )

    has_begun = False  # to train

    def encode(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        nonlocal has_begun
        given = {**dict(zip(names, args, strict=False)), **named}
        if torch.is_grad_enabled() and not has_begun:
            has_begun = True
            _have_updates_wait(base)
        with (around or nullcontext)():
            made = _encoded(base, {**given})
            if bring_back(_tensors(made)):  # the encoder's trained parameters are in memory from now on
                made = _encoded(base, given)
        return (), made

    return model.register_forward_pre_hook(untraced(encode), with_kwargs=True)


def _have_updates_wait(base: Any) -> None:
    """Before the first step: an encoder's gradients count for clipping, so all updates wait, even without images."""
    decoder, head = (getattr(base, f"get_{part}", lambda: None)() for part in ("decoder", "output_embeddings"))
    others = {each for part in (decoder, head) if part is not None for each in part.parameters()}
    trained = [each for each in base.parameters() if each.requires_grad and each not in others] if others else []
    for optimizer in dict.fromkeys(optimizers_of(trained)):
        if optimizer.engine is None and optimizer.max_grad_norm is not None:
            optimizer.loop = optimizer.loop._replace(accumulates=True)


def encode_for(accelerator: Any, model: nn.Module) -> None:
    """Call `encode_ahead` for a model that needs it, in Accelerate's autocast."""
    if reads_sizes(model):
        encode_ahead(model, around=accelerator.autocast)


def reads_sizes(model: Any) -> bool:
    """Whether a model reads the sizes of its images as numbers, and takes its encoder's outputs as arguments."""
    base = base_model(model)
    return _takes_encoded(base) and not _SIZES.isdisjoint(_parameters(getattr(base, "get_image_features", None)))


def _takes_encoded(base: Any) -> bool:
    return "mm_encoder_outputs" in _parameters(getattr(base, "forward", None))


def entries_of(model: Any) -> frozenset[str]:
    """The entries of a batch for images and videos, if a model puts these at places in its texts, in their order."""
    base = base_model(model)
    methods = (getattr(base, f"get_{kind}_features", None) for kind in _KINDS)
    return frozenset().union(*map(_parameters, methods)) if _takes_encoded(base) else frozenset()


def _parameters(method: Any) -> set[str]:
    return {*inspect.signature(method).parameters} if callable(method) else set()


def _encoded(base: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with the encoder's outputs in place of images; without images as they are."""
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
    left = {name: each for name, each in given.items() if name not in read}
    if len(outputs) > 1 and all(each.deepstack_features for each in outputs.values()):
        left, outputs = _as_images(base.config, left, outputs)
    return {**left, "mm_encoder_outputs": outputs}


def _as_images(
    config: Any, given: dict[str, Any], outputs: dict[str, SimpleNamespace]
) -> tuple[dict[str, Any], dict[str, SimpleNamespace]]:
    """Images and videos, as images alone: to merge the features of both, models count places, which a graph cannot.

    The places of videos get their features, whichever token is there.
    """
    ids = given["input_ids"]
    tokens = {kind: getattr(config, f"{kind}_token_id") for kind in outputs}
    places = {kind: ids == token for kind, token in tokens.items()}
    every = torch.stack([*places.values()]).any(0)
    for kind, each in outputs.items():
        if (number := int(places[kind].sum())) != len(each.pooler_output[0]):
            raise CheckError(
                f"the batch has {number} tokens for {kind}s, and the encoder has made {len(each.pooler_output[0])} rows"
            )

    def ordered(parts: Sequence[tuple[torch.Tensor]]) -> tuple[torch.Tensor]:
        rows = parts[0][0].new_zeros(int(every.sum()), parts[0][0].shape[1])
        for mask, (part,) in zip(places.values(), parts, strict=True):
            rows = rows.masked_scatter(mask[every][:, None], part)
        return (rows,)

    features = zip(*(each.deepstack_features for each in outputs.values()), strict=True)
    found = SimpleNamespace(
        pooler_output=ordered([each.pooler_output for each in outputs.values()]),
        deepstack_features=list(map(ordered, features)),
    )
    return {**given, "input_ids": ids.masked_fill(every, tokens["image"])}, {"image": found}


def _tensors(given: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of a call that an encoder has made."""
    for each in (given.get("mm_encoder_outputs") or {}).values():
        made = tree_leaves((each.pooler_output, getattr(each, "deepstack_features", None)))
        yield from (rows for rows in made if isinstance(rows, torch.Tensor))


def _rows(found: Any) -> SimpleNamespace:
    """An encoder's outputs, with the rows of all images in one tensor: the graph does not depend on their number."""
    features = getattr(found, "deepstack_features", None) or []
    rows = found.pooler_output
    rows = (torch.cat([*rows]),) if isinstance(rows, (list, tuple)) else rows
    return SimpleNamespace(pooler_output=rows, deepstack_features=[(torch.cat([*each]),) for each in features])
