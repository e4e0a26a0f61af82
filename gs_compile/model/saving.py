"""saving: `model.save_pretrained` of transformers on several ranks, where state dicts have DTensors."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gs_compile.model.files import whole
from gs_compile.model.residency import is_offloaded, residency_of

_GATHER = "gather_sharded_state_dict_for_save"  # of transformers' models: makes tensors that are sharded whole


def gather_when_saved() -> None:
    """Make transformers, if it is imported, gather what ranks share, as it gathers what it has sharded itself."""
    module = sys.modules.get("transformers.distributed.mixin")
    for kind in vars(module).values() if module else ():
        original = vars(kind).get(_GATHER) if isinstance(kind, type) else None
        if original is not None and not hasattr(original, "__wrapped__"):
            setattr(kind, _GATHER, _gathering(original))


def _gathering(original: Any) -> Any:
    @wraps(original)
    def gather(self: Any, model: nn.Module, state: dict[str, Any], config: Any, **given: Any) -> dict[str, Any]:
        if config is None and any(isinstance(value, DTensor) for value in state.values()):
            return _whole(model, state, is_kept=given.get("save_on_this_rank", True))
        found: dict[str, Any] = original(self, model, state, config, **given)
        return found

    return gather


def _whole(model: nn.Module, state: Mapping[str, Any], *, is_kept: bool) -> dict[str, Any]:
    """A state dict with whole values, which all ranks read in the same order; tied entries have one value.

    The values are mapped from files, so that memory need not hold all of them.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    known: dict[nn.Parameter, torch.Tensor | None] = {}
    whole_state: dict[str, Any] = {}
    for name, value in state.items():
        parameter = parameters.get(name)
        if isinstance(value, DTensor) and parameter is not None and is_offloaded(parameter):
            if parameter not in known:
                values = residency_of(parameter).value(parameter)
                known[parameter] = values if is_kept else None
            value = known[parameter]
        else:
            value = whole(value)
        if is_kept:
            whole_state[name] = value
    return whole_state
