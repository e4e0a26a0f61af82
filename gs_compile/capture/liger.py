"""liger: the losses of Liger, in operations that can be captured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Those of the arguments that a model passes to its loss that are for the loss.
_SETTINGS = ("label_smoothing", "lse_square_scale", "use_token_scaling", "return_token", "return_predicted")


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *others: Any,
    ignore_index: int = -100,
    softcap: float | None = None,
    **settings: Any,
) -> Tensor:
    """As of torch. logits: (tokens, vocabulary); target: (tokens,)."""
    reduction = settings.pop("reduction", "mean")
    if any([*others, *settings.values()]):
        torch._dynamo.graph_break(f"Liger's loss with {[*others]} {settings}: leave them out")
    logits = logits.float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = functional.log_softmax(logits, -1)  # Liger may have replaced `functional.cross_entropy`
    return functional.nll_loss(log_p, target, weight, ignore_index=ignore_index, reduction=reduction)


def of_causal_model(
    hidden_states: Tensor,
    lm_head_weight: Tensor,
    labels: Tensor,
    hidden_size: int,
    num_items_in_batch: Any = None,
    **named: Any,
) -> Tensor:
    """The loss of a head. hidden_states: (samples, tokens, hidden_size); labels: (samples, tokens), not moved."""
    ignored, targets = named.get("ignore_index", -100), named.get("shift_labels")
    if targets is None:
        targets = functional.pad(labels, (0, 1), value=ignored)[..., 1:]
    logits = functional.linear(hidden_states, lm_head_weight, named.get("bias")).flatten(0, -2)
    loss = cross_entropy(
        logits,
        targets.flatten().to(logits.device),
        named.get("ce_weight"),
        ignore_index=ignored,
        softcap=named.get("final_logit_softcapping"),
        reduction="mean" if num_items_in_batch is None else "sum",
        **{name: value for name, value in named.items() if name.startswith(_SETTINGS)},
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch
