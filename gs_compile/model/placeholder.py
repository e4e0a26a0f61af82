"""placeholder: memory that stands for a parameter whose value is elsewhere, and for its gradient.

A placeholder is one NaN that is seen in every place of a shape. It has the device and dtype that the model computes
with, as Dynamo's guards ask.
"""

from __future__ import annotations

from typing import Any

import torch

from gs_compile.errors import ReleasedParameterError

# What looks at a tensor, as Dynamo does; names that begin with "is_" or "_is_" do so too.
_HARMLESS = frozenset("__get__ detach_ requires_grad_ size dim numel stride storage_offset untyped_storage".split())


def placeholder(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """NaN, which nobody computed, or the least integer where there is none."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full((), float("nan"), dtype=dtype, device=device)
    return torch.full((), 0 if dtype == torch.bool else torch.iinfo(dtype).min, dtype=dtype, device=device)


class UnavailableGradient(torch.Tensor):
    """The `.grad` of an offloaded parameter between backward and optimizer.step(); nobody can compute with it.

    Without it, clipping and other optimizers would pass over the parameter without a word.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """To be looked at, zeroed and dropped is what it allows."""
        name = getattr(function, "__name__", "")
        if name in ("zero_", "_foreach_zero_"):
            return args[0]
        if name in _HARMLESS or name.lstrip("_").startswith("is_"):
            return super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise ReleasedParameterError(
            f"{name}: gradients of parameters that live on the tiers cannot be clipped or used from outside: they "
            "never are in p.grad. Use max_grad_norm= of the gs_compile optimizer, which clips by the same global norm, "
            "and leave this call out"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "UnavailableGradient()"
