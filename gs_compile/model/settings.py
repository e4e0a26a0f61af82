"""settings: what optimizers of this package refuse to be given."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from gs_compile.errors import ABSENT, OptimizerError
from gs_compile.runtime.formats import StateType

HOW_TORCH_COMPUTES = ("foreach", "fused", "capturable")
OTHER_RULES = ("amsgrad", "differentiable", "decoupled_weight_decay")  # of torch's optimizers, where they are true


def check_torch_settings(name: str, given: Mapping[str, Any]) -> None:
    """Pass over the settings that say how torch's optimizer computes. Raises OptimizerError where they change what."""
    for key in given:
        if key not in HOW_TORCH_COMPUTES + OTHER_RULES:
            raise TypeError(f"{name}.__init__() got an unexpected keyword argument {key!r}")
    refuse_other_rules(name, given)


def check_settings(name: str, keys: Iterable[str], group: Mapping[str, Any]) -> None:
    """Raise OptimizerError for settings, of the names `keys`, that are no numbers, or out of range."""
    refuse_other_rules(name, group)
    for key in keys:
        for number in group[key] if isinstance(group[key], tuple | list) else (group[key],):
            if not isinstance(number, int | float):
                raise OptimizerError(f"{name}: {key} must be a number, not {type(number).__name__}")
            if not 0 <= number < math.inf:
                raise OptimizerError(f"{name}: {key} must not be negative, and finite; got {group[key]}")
            if key == "betas" and number >= 1:
                raise OptimizerError(f"{name}: betas must be in [0, 1); got {group[key]}")
            if key == "eps" and number < torch.finfo(torch.float32).tiny:
                raise OptimizerError(f"{name}: eps must be more than 0, or zero gradients would divide by it")
    if group.get("nesterov") and (group["momentum"] <= 0 or group["dampening"] != 0):
        raise OptimizerError(f"{name}: nesterov needs momentum, and no dampening")


def refuse_other_rules(name: str, given: Mapping[str, Any]) -> None:
    """Raise OptimizerError for settings that change what torch's optimizer computes, and that none here follows."""
    for key in OTHER_RULES:
        if given.get(key):
            raise OptimizerError(f"{name}: {key} is not among what greedysnake's optimizers do; leave it out")


def check_parameter(parameter: torch.Tensor) -> None:
    """Raise OptimizerError for a parameter without values or a shape."""
    if parameter.is_meta:
        raise OptimizerError(ABSENT)
    if is_lazy(parameter):
        raise OptimizerError(
            "a parameter has no shape yet, as its module is lazy, so nothing says what its state is: call the model "
            "once on a batch, under torch.no_grad(), before the optimizer is made and the model compiled"
        )


def check_state_dtype(state_dtype: Any) -> StateType:
    """What an optimizer is to store moments in. Raises OptimizerError for what it cannot."""
    if state_dtype not in (None, torch.float32, torch.bfloat16, "8bit"):
        raise OptimizerError(f'state_dtype must be None, torch.float32, torch.bfloat16 or "8bit"; got {state_dtype!r}')
    found: StateType = state_dtype
    return found
