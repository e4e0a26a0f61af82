"""freezing: from some step on, other parameters are trained, for example because a schedule unfreezes layers.

Another engine takes the place of the present one. Values and states move by files in the storage directory. A parameter
that was not trained before begins with the state that it had when it was frozen, or with none; as with torch's
optimizers, the steps of others do not count for it. An optimizer that is made later for the same parameters, as in a
second phase of training, gets them in the same way, without states.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NoReturn

import torch

from gs_compile.capture.internals import without_overrides
from gs_compile.errors import OptimizerError, StepOrderError
from gs_compile.model.call import Call
from gs_compile.model.engine import Engine
from gs_compile.model.first_call import plan_tiers
from gs_compile.model.first_step import FirstStep
from gs_compile.model.residency import bring_out, residency_of
from gs_compile.model.tiered_optimizer import optimizers_of
from gs_compile.progress import stage
from gs_compile.runtime.spans import Slice

log = logging.getLogger(__name__)


def trains_others(engine: Engine, args: Sequence[Any]) -> bool:
    """Whether a call trains other parameters than its engine does, or none, or is for another optimizer."""
    own = [args[index] for index in engine.spans_of(args)]
    with without_overrides():
        is_other = any(each.requires_grad != residency_of(each).is_trained for each in own)
        is_of_none = bool(own) and not any(each.requires_grad for each in own)  # without any the run has failed
    return is_other or is_of_none or is_passed_on(engine, own)


def is_passed_on(engine: Engine, parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Whether another optimizer was made for the parameters since the engine was."""
    return next(optimizers_of(parameters), engine.optimizer) is not engine.optimizer


def train_others(engine: Engine, call: Call) -> Engine:
    """Another engine, for a call before which `requires_grad` of some parameters has changed, or their optimizer.

    Raises `StepOrderError` within a step, `OptimizerError` if the run cannot change or nothing would be trained, and
    `MemoryBudgetError` if the new engine does not fit; then the engine is unchanged.
    """
    read = [call.args[index] for index in engine.spans_of(call.args)]
    if not any(each.requires_grad for each in read):
        _refuse_frozen(call.args)
    what = "the optimizer of the parameters" if is_passed_on(engine, read) else "requires_grad of a parameter"
    reason = f"{what} has changed"
    spans = _spans_to_move(engine, reason)
    optimizer = next(optimizers_of(read), None)
    if optimizer is None:
        raise OptimizerError("the optimizer of this model is gone, so the model cannot be trained: keep it")
    with ExitStack() as undo:  # also where the user interrupts it: the engine is as it was
        undo.callback(setattr, optimizer.steps, "missed", optimizer.steps.missed)
        undo.callback(optimizer.state.update, dict(optimizer.state))
        optimizer.note_missed(each for each in read if each.requires_grad and not residency_of(each).is_trained)
        prepared = plan_tiers(optimizer, call, engine.planning.planner.whole_nbytes)
        log.info(
            "%s: %d parameters are trained in the place of %d. The run is planned anew%s",
            reason,
            sum(each.requires_grad for each in read),
            sum(residency_of(each).is_trained for each in spans),
            "" if optimizer is not engine.optimizer else "; parameters that stay trained keep their states",
        )
        with stage("moving parameters to their new plan", len(spans)) as advance, torch.inference_mode(False):
            for parameter, span in spans.items():
                residency = residency_of(parameter)
                before = {name: getattr(residency, name) for name in ("stash", "folder", "codec")}
                undo.callback(vars(residency).update, before)
                optimizer.keep_state(parameter)
                bring_out(engine, parameter, span)
                advance()
        undo.pop_all()
    engine.end(reason)
    return FirstStep().begin(optimizer, call, prepared)


def _refuse_frozen(args: Sequence[Any]) -> NoReturn:
    """Raise `OptimizerError` for a call that trains nothing of what its engine has. args: of the call."""
    if any(isinstance(each, torch.nn.Parameter) and each.requires_grad for each in args):
        raise OptimizerError(
            "what this call trains, such as a new adapter, was no part of this run's first step, and all else is "
            "frozen: save the model, load it again, and train the new parameters in a run of their own"
        )
    raise OptimizerError(
        "this call asks for gradients of the model's inputs, but all of its parameters are frozen: leave them trained, "
        "and drop their gradients after the backward, with zero_grad() and without step()"
    )


def _spans_to_move(engine: Engine, reason: str) -> dict[torch.nn.Parameter, Slice]:
    """The spans of all parameters of an engine, after all pending updates; raises within a step."""
    words = (
        f"{reason} since the first call, which settles what is trained "
        f"{'on several ranks' if engine.ranks else 'in a durable run' if engine.durable else 'in this step'}"
    )
    if engine.ranks is not None or engine.durable is not None:
        raise OptimizerError(
            f"{words}. Save the model and the optimizer (state_dict() has values and states), and start a new run with "
            "the parameters that are to be trained"
        )
    engine.open.refuse_other_threads(has_gradients=engine.record is not None)
    if engine.record is not None:
        raise StepOrderError(f"{words}: change it between optimizer.step() and the next call")
    engine.synchronize()
    return engine.spans
