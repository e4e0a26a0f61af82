"""Released parameters: their values live elsewhere, and what is left in memory reads as NaN.

A placeholder is one NaN seen in every place of the shape: it takes no memory, can be read without a crash, and has the
device and dtype that Dynamo's guards ask for. Its strides are 0, and Dynamo guards strides too: a model whose
parameters are released before its first call is compiled once; one that was compiled with its parameters in memory is
compiled once more when it is first called without them, and then both codes are kept. A backend that releases them
itself, in its first call, and has Dynamo trace again, saves that (`tests/test_placeholders.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from types import CellType
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakTensorKeyDictionary

from gs_compile.errors import ReleasedParameterError

# Parameter -> its placeholder. By identity; an entry ends with its parameter.
_placeholders: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def release(parameter: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Let go of the parameter's values: it keeps shape, device and requires_grad, takes `dtype`, and reads as NaN."""
    dtype = dtype or parameter.dtype
    placeholder = torch.full((), _unreal(dtype), dtype=dtype, device=parameter.device)
    parameter.data = placeholder.expand(parameter.shape)
    _placeholders[parameter] = placeholder
    _watch_clipping()


def is_released(parameter: torch.Tensor) -> bool:
    """Whether this very tensor has a placeholder for values; not so if anyone gave it other data since."""
    placeholder = _placeholders.get(parameter)
    return placeholder is not None and parameter.untyped_storage()._cdata == placeholder.untyped_storage()._cdata


def restore(parameter: torch.Tensor, values: torch.Tensor) -> None:
    """Give a parameter values in memory: `values` itself, not a copy."""
    assert values.shape == parameter.shape, f"{tuple(values.shape)} for a parameter of {tuple(parameter.shape)}"
    assert values.dtype == parameter.dtype, f"{values.dtype} for a parameter of {parameter.dtype}"
    parameter.data = values
    _placeholders.pop(parameter, None)


def _unreal(dtype: torch.dtype) -> float | int:
    """What reads as a value that nobody computed: NaN, or the least integer where there is none."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


# Clipping -------------------------------------------------------------------------------------------------------------
#
# A released parameter has no .grad, and torch's clipping passes over such parameters without a word: the user would
# believe the gradients clipped. So clipping refuses them. The functions may have been imported by name long before;
# each is a closure around the one that works (torch's `_no_grad`), so the guard goes into the closure's cell, which
# every name of it reaches. `clip_grad_norm_` ends in `_clip_grads_with_norm_`.

_GUARDED = ("_clip_grads_with_norm_", "clip_grad_value_")


def _watch_clipping() -> None:
    """Make torch's gradient clipping refuse released parameters; done once, and without effect on all others."""
    for name in _GUARDED:
        cell = _cell(getattr(clip_grad, name))
        if not hasattr(cell.cell_contents, "refuses_released"):
            cell.cell_contents = _refusing(cell.cell_contents)


def _cell(function: Any) -> CellType:
    """Where the wrapper of torch's `_no_grad` keeps the function that it calls."""
    found: CellType = function.__closure__[function.__code__.co_freevars.index("func")]
    return found


def _refusing(clip: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(clip)
    def refusing(parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(is_released(parameter) for parameter in parameters):
            raise ReleasedParameterError(
                "gradients of parameters that live on the tiers cannot be clipped from outside: they never are in "
                "p.grad. Use max_grad_norm= of the gs_compile optimizer, which clips by the same global norm, and "
                "leave this call out"
            )
        return clip(parameters, *args, **kwargs)

    refusing.refuses_released = True  # type: ignore[attr-defined]
    return refusing
