"""fused_head: TRL's head of log-probabilities, in operations that can be captured.

TRL's trainers replace the forward of their model: called with `fused_lm_head=True` it returns the log-probabilities of
the labels, and works through the logits in tiles, so that they need no memory. Dynamo cannot capture that. So the same
results are computed here from all logits; `codegen.pieces` runs this on some tokens at a time.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gs_compile.errors import OptionError, VersionError
from gs_compile.hf.gather import IGNORED

_SETTINGS = frozenset({"cast_lm_head_to_fp32", "original_forward", "outputs", "temperature"})  # of `add_fused_lm_head`


def has_fused_head(model: Any) -> bool:
    """Whether the model's forward takes `fused_lm_head`."""
    return _takes_switch(_fused(model))


def make_capturable(model: Any) -> None:
    """Replace a model's fused head by one that computes the same and can be captured.

    Raises OptionError for a head that computes in another dtype than the rest of the model, and VersionError if its
    settings are not where TRL 1.16 has them.
    """
    fused = _fused(model)
    settings = inspect.getclosurevars(fused).nonlocals
    if missing := _SETTINGS - settings.keys():
        raise VersionError(
            f"this release of TRL keeps {', '.join(sorted(missing))} of its head elsewhere: use trl 1.16"
        )
    if settings["cast_lm_head_to_fp32"]:
        raise OptionError("cast_lm_head_to_fp32=True: leave it out, the head computes in the dtype of the model")
    results, temperature, forward = settings["outputs"], settings["temperature"], settings["original_forward"]

    @functools.wraps(fused)
    def capturable(self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return forward(*args, **kwargs, **({} if labels is None else {"labels": labels}))
        from trl.trainer.utils import FusedCausalLMOutput

        found = forward(*args, **kwargs)
        made = log_probabilities(found.logits[:, :-1], labels[:, 1:], results, temperature)
        return FusedCausalLMOutput(**made, aux_loss=getattr(found, "aux_loss", None))

    model.forward = types.MethodType(capturable, model)


def _takes_switch(function: Any) -> bool:
    return "fused_lm_head" in inspect.signature(function, follow_wrapped=False).parameters


def _fused(model: Any) -> Any:
    """The function that TRL has made the model's forward; Accelerate may have wrapped it, to set autocast."""
    return inspect.unwrap(getattr(model.forward, "__func__", model.forward), stop=_takes_switch)


def log_probabilities(logits: Tensor, labels: Tensor, results: tuple[str, ...], temperature: float) -> dict[str, Any]:
    """The results of a fused head for each token, with TRL's names; 0 if the label is ignored.

    logits: (samples, tokens, vocabulary); labels: (samples, tokens). In float32.
    """
    counted = labels != IGNORED
    logits = logits.float() if temperature == 1 else logits.float() / temperature
    log_p = functional.log_softmax(logits, -1)
    targets = labels.clamp(min=0)
    made: dict[str, Callable[[], Tensor]] = {
        "log_probs": lambda: log_p.gather(-1, targets[..., None])[..., 0],
        "entropy": lambda: -(log_p.exp() * log_p).sum(-1),
        "log_sum_sq_probs": lambda: torch.logsumexp(2 * log_p.detach(), -1),
        "mean_logits": lambda: logits.detach().mean(-1),
        "is_top1": lambda: logits.argmax(-1) == targets,
    }
    found = {name: make().masked_fill(~counted, 0) for name, make in made.items() if name in ("log_probs", *results)}
    return {"label_mask": counted, **found}
