"""settings: checks of what optimizers of this package are given."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from gs_compile.errors import ABSENT, OptimizerError
from gs_compile.placement.placement import Placement
from gs_compile.runtime.formats import StateType

OF_PARAMETERS = ("params", "param_names")  # of a param group, in an order that may be each rank's own
HOW_TORCH_COMPUTES = ("foreach", "fused", "capturable")
OTHER_RULES = ("amsgrad", "differentiable", "decoupled_weight_decay")  # of torch's optimizers, where they are true
FOLLOWED = {("AdamW", "decoupled_weight_decay")}  # param groups of torch's AdamW have it


def check_torch_settings(name: str, given: Mapping[str, Any]) -> None:
    """Accept settings that say how torch's optimizer computes; OptimizerError if they change what it computes."""
    for key in given:
        if key not in HOW_TORCH_COMPUTES + OTHER_RULES:
            raise TypeError(f"{name}.__init__() got an unexpected keyword argument {key!r}")
    refuse_other_rules(name, given)


def check_settings(name: str, keys: Iterable[str], group: Mapping[str, Any]) -> None:
    """Raise OptimizerError for settings, with the names `keys`, that are not numbers, or out of range."""
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


def check_norm(max_grad_norm: float | None, placement: Placement | None) -> None:
    """Raise OptimizerError for an invalid `max_grad_norm`. placement: of the run, once there is one."""
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise OptimizerError(f"max_grad_norm must be more than 0; got {max_grad_norm}")
    if max_grad_norm is not None and placement is not None and not placement.clip:
        raise OptimizerError(
            "max_grad_norm was None when the model first ran, so updates do not wait for a norm: give it when the "
            "optimizer is made (math.inf clips nothing), and change it between steps from then on"
        )


def check_groups(now: Mapping[torch.Tensor, int], before: Mapping[torch.Tensor, int]) -> None:
    """Raise OptimizerError if param groups have other parameters than at the first call, which settles updates."""
    for parameter in now.keys() | before.keys():
        if now.get(parameter) != before.get(parameter):
            words = [f"in param group {each[parameter]}" if parameter in each else "in none" for each in (before, now)]
            raise OptimizerError(
                f"a parameter of shape {tuple(parameter.shape)} was {words[0]} of the optimizer when the model first "
                f"ran, and is now {words[1]}, but updates follow the first call. Make another optimizer with the new "
                "groups, which takes the parameters over at the next call, or freeze parameters that are not to be "
                "trained (requires_grad_(False))"
            )


def refuse_other_rules(name: str, given: Mapping[str, Any]) -> None:
    """Raise OptimizerError for settings that change what torch's optimizer computes, and are not supported here."""
    for key in OTHER_RULES:
        if given.get(key) and (name, key) not in FOLLOWED:
            raise OptimizerError(f"{name}: {key} is not supported by greedysnake's optimizers; leave it out")


def check_kind(parameter: torch.Tensor) -> None:
    """Raise OptimizerError for a parameter without memory of its own, such as DTensors and weights of torchao."""
    if hasattr(parameter, "__tensor_flatten__"):
        raise OptimizerError(
            f"a parameter of shape {tuple(parameter.shape)} is a {type(parameter).__name__}, which is made of other "
            "tensors and cannot go to the tiers: make it an ordinary parameter, or use a torch.optim optimizer, which "
            "leaves parameters in memory. Frozen weights are quantized by the option frozen"
        )


def check_parameter(parameter: torch.Tensor) -> None:
    """Raise OptimizerError for a parameter without values or a shape."""
    check_kind(parameter)
    if parameter.is_meta:
        raise OptimizerError(ABSENT)
    if is_lazy(parameter):
        raise OptimizerError(
            "a parameter has no shape yet, because its module is lazy, so its state has no size: call the model once "
            "on a batch, under torch.no_grad(), before you make the optimizer and compile the model"
        )


def check_state_dtype(state_dtype: Any) -> StateType:
    """The type in which an optimizer stores moments. Raises OptimizerError for one that is not supported."""
    if state_dtype not in (None, torch.float32, torch.bfloat16, "8bit"):
        raise OptimizerError(f'state_dtype must be None, torch.float32, torch.bfloat16 or "8bit"; got {state_dtype!r}')
    found: StateType = state_dtype
    return found
