"""speech: CTC losses and SpecAugment, in operations that can be captured.

torch's CTC makes a tensor as long as the longest target, at which Dynamo breaks the graph; here it gives one loss for
each sample. transformers draws the spans that SpecAugment masks by numpy; here torch draws them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten


@torch.library.custom_op("greedysnake::ctc_losses", mutates_args=())
def _ctc_losses(
    log_p: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """The loss of each sample. log_p: (frames, samples, classes); targets: (samples, most targets)."""
    losses, _ = aten._ctc_loss.Tensor(log_p, targets, input_lengths, target_lengths, blank, zero_infinity)
    return losses.masked_fill_(losses == inf, 0) if zero_infinity else losses  # type: ignore[no-any-return]


@_ctc_losses.register_fake
def _(log_p: Tensor, *_: Any) -> Tensor:
    return log_p.new_empty(log_p.shape[1])


@torch.library.custom_op("greedysnake::ctc_gradient", mutates_args=())
def _ctc_gradient(
    gradient: Tensor,
    log_p: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The gradient of `log_p`, from that of the losses, which are computed again."""
    settings = blank, zero_infinity
    read = log_p, targets, input_lengths, target_lengths
    losses, log_alpha = aten._ctc_loss.Tensor(*read, *settings)
    if zero_infinity:
        gradient = gradient.masked_fill(losses == inf, 0)
    return aten._ctc_loss_backward.Tensor(gradient, *read, losses, log_alpha, *settings)  # type: ignore[no-any-return]


@_ctc_gradient.register_fake
def _(_: Tensor, log_p: Tensor, *__: Any) -> Tensor:
    return torch.empty_like(log_p)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.settings = inputs[4:]


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    found = torch.ops.greedysnake.ctc_gradient.default(gradient, *ctx.saved_tensors, *ctx.settings)
    return (found, *5 * (None,))


_ctc_losses.register_autograd(_differentiate, setup_context=_keep)


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """As in torch.nn.functional, for targets of shape (samples, most targets)."""
    lengths = input_lengths, target_lengths
    if log_probs.dim() != 3 or targets.dim() != 2 or not all(isinstance(each, Tensor) for each in lengths):
        torch._dynamo.graph_break(
            "CTC with the targets of all samples in one row, or with lengths that are numbers: give it targets of "
            "shape (samples, targets), padded, and lengths as tensors of shape (samples,)"
        )
    read = log_probs, targets, input_lengths, target_lengths
    losses: Tensor = torch.ops.greedysnake.ctc_losses.default(*read, blank, zero_infinity)
    if reduction == "mean":
        losses = losses / target_lengths.to(losses.dtype).clamp(min=1)
        return losses.mean()
    return losses.sum() if reduction == "sum" else losses


def of_ctc_model(
    logits: Tensor,
    labels: Tensor,
    logit_lengths: Tensor,
    blank_token_id: int,
    reduction: str = "mean",
    zero_infinity: bool = False,
    ignore_index: int = -100,
    **_: Any,
) -> Tensor:
    """The loss of transformers' CTC models: ignored labels are moved behind the others of their sample."""
    labels = labels.to(logits.device)
    is_ignored = (labels == ignore_index) | (labels == blank_token_id)
    targets = labels.gather(-1, is_ignored.to(torch.int8).argsort(dim=-1, stable=True))
    log_probs = functional.log_softmax(logits, dim=-1, dtype=torch.float32).transpose(0, 1)
    target_lengths = is_ignored.logical_not().sum(-1)
    return ctc_loss(log_probs, targets, logit_lengths, target_lengths, blank_token_id, reduction, zero_infinity)


# SpecAugment ----------------------------------------------------------------------------------------------------------


def masked_states(
    original: Callable[..., Tensor],
    model: Any,
    hidden_states: Tensor,
    mask_time_indices: Tensor | None = None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """`_mask_hidden_states` of transformers' models; hidden_states: (samples, frames, features)."""
    config = model.config
    if not getattr(config, "apply_spec_augment", True):
        return hidden_states
    if mask_time_indices is None and config.mask_time_prob > 0 and model.training:
        mask_time_indices = _in_time(config, hidden_states, attention_mask)
    if mask_time_indices is not None:
        embedded = model.masked_spec_embed.to(hidden_states.dtype)
        hidden_states = torch.where(mask_time_indices.unsqueeze(-1), embedded, hidden_states)
    return _without_features(model, hidden_states)


def masked_inputs(
    original: Callable[..., Tensor], model: Any, input_features: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    """`_mask_input_features` of Whisper, out of place; input_features: (samples, features, frames)."""
    config, frames = model.config, input_features.transpose(1, 2)
    if not getattr(config, "apply_spec_augment", True):
        return input_features
    if config.mask_time_prob > 0 and model.training:
        frames = frames.masked_fill(_in_time(config, frames, attention_mask).unsqueeze(-1), 0)
    return _without_features(model, frames).transpose(1, 2)


def _in_time(config: Any, frames: Tensor, attention_mask: Tensor | None) -> Tensor:
    settings = config.mask_time_prob, config.mask_time_length, config.mask_time_min_masks
    return spans(frames, frames.shape[1], *settings, attention_mask)


def _without_features(model: Any, frames: Tensor) -> Tensor:
    config = model.config
    if not (config.mask_feature_prob > 0 and model.training):
        return frames
    settings = config.mask_feature_prob, config.mask_feature_length, config.mask_feature_min_masks
    return frames.masked_fill(spans(frames, frames.shape[2], *settings).unsqueeze(1), 0)


def spans(
    like: Tensor, size: int, probability: float, length: int, least: int, attention_mask: Tensor | None = None
) -> Tensor:
    """The places to mask, (samples, size): as many spans as transformers draws, at random places of each sample.

    The number of spans is rounded at random, for each sample. like: a tensor with the samples first.
    """
    if not 0 < length <= size:
        raise ValueError(f"a span of {length} places of {size} cannot be masked")
    own = like.new_full((like.shape[0],), size, dtype=torch.long) if attention_mask is None else attention_mask.sum(-1)
    drawn = probability * own.double() / length + torch.rand_like(own, dtype=torch.float64)
    number = drawn.long().clamp(min=least).clamp(max=size // length)
    number = number.minimum((own - (length - 1)).clamp(min=0))
    is_beyond = torch.arange(size, device=like.device) > (own - length).unsqueeze(-1)
    scores = torch.rand_like(is_beyond, dtype=torch.float32).masked_fill(is_beyond, 2)
    begins = scores.argsort(-1).argsort(-1) < number.unsqueeze(-1)
    begun = begins.long().cumsum(-1)
    return begun > functional.pad(begun, (length, 0))[:, :size]
