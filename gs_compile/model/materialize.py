"""materialize: offloaded parameters in their model again, for whatever reads or changes them.

    with gs_compile.materialize(model):             with gs_compile.materialize(model, write=True):
        model.generate(ids)                             model.lm_head.weight.mul_(0.5)

The values are mapped from unnamed files, so that memory need not hold them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from gs_compile.errors import StepOrderError
from gs_compile.model.residency import bring_into_memory, is_offloaded, residency_of


@contextmanager
def materialize(model: nn.Module, *, write: bool = False, master: bool = False) -> Iterator[nn.Module]:
    """All parameters of `model` hold their values, every update done; at the end placeholders return.

    On a CPU they are mapped from files; a GPU has to have room for them. With `write`, what has changed is stored (not
    if the block fails), in fp32 masters too; otherwise changes are lost, but for those of a model that has not run yet.
    With `master`, parameters that are computed with in bf16 are their fp32 masters.

    In the block the model runs as plain PyTorch does, for evaluation: a call with gradients enabled raises
    StepOrderError, as it does between backward and optimizer.step(). Training goes on afterwards as if nothing had
    happened.
    """
    offloaded = [parameter for parameter in model.parameters() if is_offloaded(parameter)]
    with ExitStack() as stack:
        for parameter in offloaded:
            stack.callback(bring_into_memory(parameter, master=master))
        if offloaded:
            stack.enter_context(_plain_calls(model))
        yield model
        if write:
            for parameter in offloaded:
                residency_of(parameter).write(parameter, parameter.data)


@contextmanager
def _plain_calls(model: nn.Module) -> Iterator[None]:
    """Calls of the model, and of compiled modules in it, run as they are, and not as a step."""
    compiled = [each for each in model.modules() if each is model or each._compiled_call_impl is not None]
    before = {each: each.__dict__.get("_compiled_call_impl") for each in compiled}
    for module in compiled:  # past the __setattr__ of what torch.compile returns, which is its model's
        module.__dict__["_compiled_call_impl"] = _evaluation(module)
    try:
        yield
    finally:
        for module, call in before.items():
            module.__dict__["_compiled_call_impl"] = call


def _evaluation(module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            raise StepOrderError(
                "inside gs_compile.materialize() the model cannot be trained, only evaluated: call it under "
                "torch.no_grad(), or leave the block"
            )
        inner = getattr(module, "_orig_mod", module)  # of what torch.compile returned
        return inner._call_impl(*args, **kwargs)

    return call
