"""tiered_call: a call of a model whose parameters are on the tiers: their gradients go to updates only."""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from gs_compile.capture.internals import wants_all, without_overrides
from gs_compile.codegen.compiled import Step
from gs_compile.errors import MemoryBudgetError, OptimizerError, StepOrderError
from gs_compile.model.call import Call
from gs_compile.model.engine import Engine
from gs_compile.model.given import state_of
from gs_compile.model.gradients import is_zeroed, mark_gradient_unavailable, refuse_left, take_given
from gs_compile.model.outputs import Gradients
from gs_compile.model.residency import is_offloaded, residency_of
from gs_compile.program.ir import Value
from gs_compile.runtime.issue import TieredExecutor


@dataclass(eq=False)
class TieredCall(Call):
    """A call whose parameters are in an engine."""

    engine: Engine
    random: Mapping[str, str] | None  # the random state at its beginning, if steps are durable
    executor: TieredExecutor = field(init=False, repr=False)
    changes: Sequence[Any] = field(init=False, default=())  # the result of `_changes` at the forward of a first step

    def forward(self) -> list[torch.Tensor]:
        durable = self.engine.durable
        with nullcontext() if durable is None else durable.within(self.random):
            return super().forward()

    def _begin(self) -> TieredExecutor:
        executor = self._executor()
        placement = executor.placement
        models = [model.in_pieces(placement.decision.layer_tokens) for model in self.models]
        parts = zip(self.units.micro_batches, models, strict=True)
        self.units.micro_batches = [replace(part, codes=model.codes) for part, model in parts]
        describe = partial(self.engine.planning.describe, executor.program)
        self.compilation.latest = Step(models[0], self.shape, self.engine.snapshots, describe)
        self._compile(models, placement.activations.levels_in_use)
        return executor

    def _executor(self) -> TieredExecutor:
        """The engine's executor of this call. `self.engine` may be another one afterwards: see `first_step`."""
        self.engine.announce("the forward" if self.training else "an evaluation")
        self.engine = self.engine.first_step.engine_for_forward(self.engine, self)
        try:
            return self.engine.begin(self, self._inputs())
        except MemoryBudgetError as error:
            self.engine = self.engine.first_step.engine_with_room(self.engine, self, error)
        return self.engine.begin(self, self._inputs())

    def _inputs(self) -> dict[Value, Any]:
        """The batch by micro-batch, and each unit's inputs that are not on the tiers."""
        inputs = super()._inputs()
        for value in [value for value in inputs if value.kind == "w"]:
            read = inputs.pop(value)
            if value.unit not in self.engine.placement.by_unit:
                inputs[value] = {index: arg for index, arg in read.items() if not isinstance(arg, torch.nn.Parameter)}
        return inputs

    def _run_forward(self) -> None:
        if self.training and not self.engine.num_steps:  # later ones run once
            self.changes = self._changes
        self.engine.forward(self.executor, self)

    @property
    def _changes(self) -> list[Any]:
        """For each argument an object that differs once it was changed in place, or a parameter got another value."""
        tensors = (arg for arg in self.args if isinstance(arg, torch.Tensor))
        return [residency_of(each).num_writes if is_offloaded(each) else state_of(each) for each in tensors]

    @property
    def turn(self) -> AbstractContextManager[Any]:
        return self.engine.turn

    def check(self, node: Any, gradients: Gradients) -> None:
        if not wants_all(node):
            raise OptimizerError(
                "torch.autograd.grad or backward(inputs=...) leaves out parameters that the optimizer trains, but a "
                "backward updates all parameters on the tiers. Call loss.backward() alone, which leaves gradients of "
                "the model's inputs in their .grad; freeze the others (requires_grad_(False)) before the model's first "
                "call; or use a torch.optim optimizer. Nothing was updated"
            )
        super().check(node, gradients)

    def prepare(self, gradients: Gradients) -> None:
        self._look_at_parameters()
        engine = self.engine.first_step.engine_for_backward(self.engine, self)
        if engine is not self.engine:
            self.move_to(engine)
        self.engine.refuse_given_up(self.executor)
        super().prepare(gradients)

    def backward(self, gradients: Gradients) -> list[torch.Tensor | None]:
        engine, executor, reached = self.engine, self.executor, self.outputs.reached(gradients)
        with engine.tiers.failure.issued():
            self._refuse_scaled(gradients)
            zeroed = engine.record is not None and is_zeroed(self.trained)
            losses = () if self.outputs.loss_gradient(gradients) is None else self.losses
            spans = [span for index, span in engine.spans_of(self.args).items() if index in reached]
            with engine.backward(executor, losses, spans, zeroed=zeroed):
                found = self._run_backward(gradients, reached)
                engine.end_backward(executor, self, partial(self._repeat, gradients))
                for number in self.trained_numbers:
                    if number in reached:
                        mark_gradient_unavailable(self.args[number])
        return found

    def _repeat(self, gradients: Gradients, engine: Engine) -> None:
        self.move_to(engine)
        super().prepare(gradients)
        self.backward(gradients)

    def _forward_again(self) -> None:
        self.engine.open.give_up(self.executor)
        super()._forward_again()

    def _look_at_parameters(self) -> None:
        """Add what the script has put in `.grad`, as torch's backward would.

        Raises `StepOrderError` if a parameter was frozen since the forward, and as `refuse_left` if updates would run
        before the script could zero old gradients.
        """
        trained = list(filter(is_offloaded, self.trained))
        with without_overrides():
            frozen = [parameter for parameter in trained if not parameter.requires_grad]
        if frozen:
            raise StepOrderError(
                f"a parameter of shape {tuple(frozen[0].shape)} was frozen between the forward and its backward, "
                "but the backward updates all parameters that were trained in the forward: call "
                "requires_grad_(False) before the model is called, or after optimizer.step(). Nothing was updated"
            )
        if self.engine.placement.has_early:
            refuse_left(trained)
        take_given(trained)

    def _refuse_scaled(self, gradients: Gradients) -> None:
        """Raise `OptimizerError` for gradients that a GradScaler has scaled.

        It multiplies the loss, and updates would run before it could divide again. A scaled loss looks like one that
        the user has multiplied, or computed outside of the model. So if the factor is more than 1, and may be a scale,
        all objects are searched for scalers, once for each factor.
        """
        gradient = self.outputs.loss_gradient(gradients)
        factor = math.inf if gradient is None else float(gradient)
        own = self.engine.optimizer.loss_scale() if self.engine.optimizer is not None else 1.0
        if factor <= 1 or factor in (own, self.engine.accepted_factor):
            return
        scalers = [each for each in gc.get_objects() if issubclass(type(each), torch.amp.GradScaler)]
        if any(scaler.is_enabled() and scaler.get_scale() > 1 for scaler in scalers):
            raise OptimizerError(
                "a torch.amp.GradScaler multiplies the loss, but with parameters on the tiers updates run during the "
                "backward, before it can divide the gradients. Use gs_compile.LossScaler(optimizer) instead, or train "
                "in bf16 or fp32, which need no loss scale. Nothing was updated"
            )
        self.engine.accepted_factor = factor

    def move_to(self, engine: Engine) -> None:
        """Run the forward once more, on another engine; raises `StepOrderError` if its inputs have changed."""
        if self.changes != self._changes:
            raise StepOrderError(
                "the first step of this run has several backwards, but the inputs of its first call were changed in "
                "place since then, or its parameters were given other values, so that call cannot be repeated: give "
                'options={"accumulate": True}, or pass each call its own tensors'
            )
        self.engine = engine
        with torch.no_grad():
            self.forward()
