"""tiered_optimizer: the base of this package's optimizers.

They are torch optimizers for all other code: param groups, schedulers, hooks and state dicts work. The difference is
when and where updates run: for each unit as soon as its gradient is complete, or in the next forward, on the CPU.
`step()` closes the step and returns at once.

Settings are those at the beginning of the backward: a learning rate that a scheduler sets after `step()` counts for the
next step.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gs_compile.capture.given_up import watch
from gs_compile.capture.internals import untraced, without_overrides
from gs_compile.errors import NonFiniteWarning, OptimizerError
from gs_compile.model import in_memory, optimizer_state
from gs_compile.model.engine import Engine
from gs_compile.model.gradients import are_dropped, end_gradients, refuse_alone, take_given
from gs_compile.model.optimizer import Optimizer
from gs_compile.model.parameter_store import in_turn
from gs_compile.model.residency import residency_of
from gs_compile.planner.simulate.measured import mean_bubbles, measured
from gs_compile.runtime.groups import tell_of_end
from gs_compile.runtime.step_record import StepRecord
from gs_compile.status.step import StepInfo


class TieredOptimizer(Optimizer):
    """The base of the optimizers of this package; `max_grad_norm` clips the norm of all gradients together.

    With `max_grad_norm`, updates wait for that norm and run in the next forward, or run earlier and are rolled back if
    necessary (`expert.clip`). A step whose gradients are not finite is skipped as a whole, and its state is unchanged.
    Infinity clips nothing, but skips such steps.
    """

    engine: Engine | None
    tells_of_given_up = True  # `step` without a backward says which forwards were given up

    def __init__(self, params: Any, defaults: dict[str, Any], max_grad_norm: float | None, state_dtype: Any) -> None:
        self.last_step: StepInfo | None = None
        self._ended = math.nan  # the time at which the last step was closed
        super().__init__(params, defaults, max_grad_norm, state_dtype)
        tell_of_end()
        watch()

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Close the step whose backward has run; without one since the last step, do nothing."""
        optimizer_state.refuse_passed_on(self)
        with torch.enable_grad():
            loss = None if closure is None else closure()
        if self.engine is None:
            if any(parameter.grad is not None for parameter in self._parameters):
                optimizer_state.refuse_replaced(self)
                raise OptimizerError(
                    "gradients have arrived in p.grad: the model did not run with the greedysnake backend, or was "
                    "called before this optimizer was made. Compile it, also where it is a copy of a compiled one, by "
                    'model.compile(backend="greedysnake"), or by torch.compile if it is itself a module of torch.nn; '
                    "call model(...), not model.forward(...); make the optimizer before the first call, or use a "
                    "torch.optim optimizer" + watch().why(self._parameters)
                )
            return loss
        self.close_step()
        return loss

    @in_turn
    def close_step(self, *, is_late: bool = False) -> None:
        """As in the base class; another thread that reads or commits finds all of a step, or nothing."""
        assert self.engine is not None, "there was a call"
        take_given(self._parameters, self._is_idle)
        self.count_late()
        finished = self.engine.step_to_finish(dropped=are_dropped(self._parameters))
        if finished is None:
            refuse_alone(self._parameters)
        if (record := finished or self._step_in_memory()) is None:
            return
        in_memory.refuse_other_gradients(self.param_groups)
        if finished is not None and self.engine.durable is not None and not is_late:
            self.kept.end_step()  # before anything changes, as objects of the user's may raise
            self.engine.durable.end_step()
        with self.engine.tiers.closing():
            if finished is not None:
                self.engine.finish(record)
            in_memory.update(self, in_memory.with_gradients(self.param_groups), record)
            end_gradients(self._parameters, dropped=record.is_dropped)
            if finished is not None:  # steps of parameters in memory alone are theirs
                self.first_states.clear()
                self.num_skipped += record.skipped
                self.kept.num_batches += 1
                self._count_missed(record)
                self.steps.become(self.steps.taken + (not record.skipped))
        self._note(self.engine, record)
        is_bad = record.skipped and not record.is_dropped
        if is_bad and (record.loss_scale == 1.0 or record.is_loss_bad):  # else the scale was too large
            self._warn(record)

    def _is_idle(self, parameter: Tensor) -> bool:
        """Whether the backwards of the current step have brought a parameter no gradient, and it is not updated."""
        engine = self.engine
        if engine is None or engine.record is None:
            return False
        return self.trained_span(parameter) in engine.record.idle | engine.never

    def count_late(self) -> None:
        """Include in the step's norm the gradients that parameters in memory have got since the model's backward, for
        example those of a module before the model. They are averaged over ranks, all of which call this.
        """
        engine = self.engine
        if engine is None or engine.record is None:
            return
        if engine.ranks is not None:
            with engine.tiers.whole():
                in_memory.average(self.param_groups, engine.record, engine.ranks, " since the model's backward")
        in_memory.count(self.param_groups, engine.record)

    def _count_missed(self, record: StepRecord) -> None:
        """Do not count a step for parameters that got no gradient in it: updates have not changed them."""
        assert self.engine is not None, "it has closed the step"
        spans = record.idle | self.engine.never
        if record.skipped or not spans:
            return
        idle = [each for each in self._parameters if self.trained_span(each) in spans]
        self.steps.missed = {**self.steps.missed, **{each: self.steps.missed.get(each, 0) + 1 for each in idle}}
        for each in idle:
            self.show_state(each)

    def _note(self, engine: Engine, record: StepRecord) -> None:
        """Note a closed step as the last one, for metrics and reports."""
        now = time.perf_counter()
        self.last_step = StepInfo(
            number=self.steps.taken,
            grad_norm=record.grad_norm,
            skipped=record.skipped,
            rolled_back=engine.placement.rolls_back(confirmed=record.confirmed),
            num_skipped=self.num_skipped,
            lanes=engine.tiers.trace.totals(reset=True),
            seconds=now - self._ended,
            num_tokens=record.num_tokens,
            loss=record.loss,
            predicted_seconds=record.predicted_seconds,
        )
        self._ended = now
        if engine.reporter is not None:
            engine.reporter.note(self.last_step)

    @property
    def grad_norm(self) -> float:
        """The norm of all gradients before clipping, in the step that `step` will close, or else in the last one."""
        if self.engine is not None and self.engine.ranks is None:
            self.count_late()
        record = self.engine.record if self.engine is not None else None
        if record is not None:
            return record.grad_norm
        return math.nan if self.last_step is None else self.last_step.grad_norm

    @property
    def will_skip(self) -> bool:
        """Whether the step that `step` will close changes nothing."""
        record = self.engine.record if self.engine is not None else None
        return record is not None and record.skipped

    def _step_in_memory(self) -> StepRecord | None:
        """The record of a step whose backward has not reached the compiled model."""
        if not in_memory.with_gradients(self.param_groups):
            return None
        record = self.begin_step()
        in_memory.begin(self.param_groups, record, self.engine.ranks if self.engine is not None else None)
        if self.max_grad_norm is not None:
            record.clip()
        return record

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        with without_overrides() if set_to_none else nullcontext():  # else the marks in `.grad` note it
            super().zero_grad(set_to_none)

    def commit(self) -> None:
        """Return when the last step is durable, with the current states of schedulers and values.

        Without this call, it is durable after the next forward. A loss whose backward has not begun is dropped. Raises
        OptimizerError if the run has no durable steps.
        """
        if self.engine is None and self.kept.step:
            return  # a run that is resumed has a commit of its last step
        if self.engine is None or self.engine.durable is None:
            raise OptimizerError("no step is durable: compile the model with the option durability, and take a step")
        self.engine.commit()

    def save_trace(self, path: str | Path) -> None:
        """Write which operation ran when, on which lane, as JSON for Perfetto and chrome://tracing.

        Needs ``expert={"trace": True}`` among the options of the backend.
        """
        self._recorded().tiers.trace.save(path)

    def waits(self) -> dict[str, float]:
        """Seconds of a step in which nothing was computed, by cause: the mean of all recorded steps like the latest.

        The cause is a lane and what it moved, such as "ssd_write s": what the computation waited for, directly or
        indirectly. "issue" is Python between operations, "fill" the time before a step's first computation, and "turn"
        the time before the first one of its backward. {} before the second such step. Needs ``expert={"trace": True}``,
        as `save_trace` does.
        """
        engine = self._recorded()
        engine.tiers.synchronize()
        inline = engine.tiers.setting.device.current_stream() is None
        program, placement = engine.stepped
        return mean_bubbles(list(measured(engine.tiers.trace, placement, program, inline=inline)))

    def _recorded(self) -> Engine:
        if self.engine is None or not self.engine.tiers.trace.enabled:
            raise OptimizerError(
                'there is no trace: compile the model with options={"expert": {"trace": True}}, and take a step'
            )
        return self.engine

    def _warn(self, record: StepRecord) -> None:
        spoiled, units = "the loss" if record.is_loss_bad else "a gradient", ", ".join(map(str, record.updated))
        done = f"; units {units} were updated before it showed" if units else ""
        warnings.warn(
            f"{spoiled} is not finite: step {self.steps.taken + 1} was skipped{done}"
            + (". With max_grad_norm, math.inf to clip nothing, such a step is skipped as a whole" if done else ""),
            NonFiniteWarning,
            stacklevel=5,
        )


def metrics(model: torch.nn.Module) -> dict[str, float]:
    """Numbers of the last step of a model that an optimizer of this package trains, as a flat dict for any logger.

    It is empty before the first step. ``wandb.log(gs_compile.metrics(model))`` logs it.

    step, num_skipped: steps taken so far, and skipped.
    loss: of the batch, if the step trains one.
    grad_norm: before clipping.
    skipped, rolled_back: 1.0 if the step was skipped, or its updates rolled back.
    tokens: of this rank, including padding.
    seconds, tokens_per_second: since the end of the step before; not for the first step.
    predicted_seconds: if the step was planned.
    ssd_read_seconds, ssd_read_busy, ssd_read_bytes: for each lane: the seconds it worked, the part of the step that
        this is, and the bytes it moved. The lane with the largest `_busy` is the bottleneck.
    """
    optimizer = next(optimizers_of(model.parameters()), None)
    return {} if optimizer is None or optimizer.last_step is None else optimizer.last_step.metrics()


def optimizers_of(args: Iterable[Any]) -> Iterator[TieredOptimizer]:
    """The gs_compile optimizers that were made for the parameters among `args`, and are alive."""
    references = (residency_of(arg).optimizer for arg in args if isinstance(arg, torch.nn.Parameter))
    return (found for reference in references if reference is not None and (found := reference()) is not None)
