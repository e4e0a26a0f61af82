"""first_call: a model that an optimizer of this package trains goes to the tiers when it is first called.

detach       while Dynamo captures: parameters become placeholders
engine_for   when the capture runs: the engine of the parameters, made for their optimizer
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from gs_compile.codegen.compiled import Compilation, SpecializedModel
from gs_compile.codegen.parameters import kept_dtype
from gs_compile.errors import OptimizerError, OptionError, StepOrderError
from gs_compile.model.engine import Engine
from gs_compile.model.residency import is_offloaded, residency_of, stash
from gs_compile.model.tiered_optimizer import TieredOptimizer
from gs_compile.options import Options


def detach(parameters: Sequence[Any], *, options: Options) -> bool:
    """Stash parameters of gs_compile optimizers before they are captured: what is captured are placeholders.

    So the model is captured once, not once more when its parameters have left. Returns whether there were any.
    """
    if any(_has_other_values(parameter) for parameter in parameters):
        return False  # their call will be refused
    if not _optimizers_of(parameters):
        if options.precision == "bf16" and not any(is_offloaded(parameter) for parameter in parameters):
            raise OptionError(
                'precision="bf16" keeps fp32 masters, so it needs an optimizer of gs_compile, made before the call'
            )
        return False
    changed = False
    for parameter in parameters:
        dtype = kept_dtype(parameter, options)
        if not is_offloaded(parameter) or parameter.dtype != dtype:
            stash(parameter, dtype)
            changed = True
    return changed


def engine_for(compilation: Compilation, models: Sequence[SpecializedModel], args: Sequence[Any]) -> Engine | None:
    """The engine of the parameters that a call reads, made at the first call; None where they are the user's."""
    parameters = [arg for arg in args if isinstance(arg, torch.nn.Parameter)]
    _refuse_in_memory(parameters)
    if not any(is_offloaded(parameter) for parameter in parameters):
        return None
    engines = {found[0] for parameter in parameters if (found := residency_of(parameter).tiered) is not None}
    optimizers = _optimizers_of(parameters)
    if len(engines) == 1 and len(optimizers) < 2:
        (engine,) = engines
        assert isinstance(engine, Engine)
        return engine
    if len(optimizers) != 1:
        raise OptimizerError(
            f"the parameters of this model belong to {len(optimizers)} gs_compile optimizers; they need one: make it "
            "before the first call, with all parameters that are trained"
        )
    (optimizer,) = optimizers
    if optimizer.engine is None:
        with torch.inference_mode(False):  # what is made lives longer than this call
            optimizer.engine = Engine(optimizer, compilation, models, args)
            optimizer.load_into_engine()
        # `model.compile` ties a module into a reference cycle; it often goes with its optimizer, and its files with it.
        weakref.finalize(optimizer, gc.collect).atexit = False
    return optimizer.engine


def _optimizers_of(parameters: Sequence[torch.Tensor]) -> set[TieredOptimizer]:
    """The gs_compile optimizers that were made for the parameters, and are alive."""
    references = [residency_of(parameter).optimizer for parameter in parameters]
    return {found for reference in references if reference is not None and (found := reference()) is not None}


def _refuse_in_memory(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Parameters that are on the tiers must not have other values beside."""
    if any(residency_of(parameter).is_materialized for parameter in parameters):
        raise StepOrderError(
            "inside gs_compile.materialize() the compiled model does not run: leave the block, or call the module that "
            "was materialized under torch.no_grad()"
        )
    for parameter in filter(_has_other_values, parameters):
        raise OptimizerError(
            f"a parameter of shape {tuple(parameter.shape)} lives on the tiers, but was given other values "
            "(.data): change it in `with gs_compile.materialize(model, write=True):`"
        )


def _has_other_values(parameter: torch.Tensor) -> bool:
    return not is_offloaded(parameter) and residency_of(parameter).tiered is not None
