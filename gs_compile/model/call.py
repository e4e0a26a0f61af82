"""call: one call of the model as the user's autograd sees it.

The call runs the forward half of a step program and hands back tensors that belong to one autograd node; the
backward of that node runs the other half and returns the parameters' gradients. So scaling, hooks, accumulation,
several forwards before a backward and losses made outside of the model behave as with plain PyTorch.
"""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from gs_compile.capture.internals import attribute, changes, wants_all
from gs_compile.codegen.compiled import Compilation, SpecializedModel, Step
from gs_compile.errors import MemoryBudgetError, OptimizerError, StepOrderError
from gs_compile.model.engine import KEPT, Engine
from gs_compile.model.first_step import begin_again
from gs_compile.model.in_memory import averaged_of_any
from gs_compile.model.inspection import report
from gs_compile.model.outputs import Gradients, Outputs
from gs_compile.model.residency import (
    forget_gradients,
    is_offloaded,
    is_zeroed,
    mark_gradient_unavailable,
    refuse_left,
    take_given,
)
from gs_compile.program.ir import EPILOGUE, StepShape, Unit, Value
from gs_compile.runtime.executor import Executor
from gs_compile.runtime.issue import TieredExecutor
from gs_compile.runtime.ranks import Ranks, told
from gs_compile.runtime.stream import deterministic, without_autocast
from gs_compile.runtime.units import Accumulator, CompiledUnits, WholeBatch

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Call:
    """One call of the model: its arguments cut into micro-batches, and the step under way."""

    compilation: Compilation
    models: Sequence[SpecializedModel]  # of every micro-batch
    args: Sequence[Any]
    units: CompiledUnits
    training: bool
    engine: Engine | None = None  # where the parameters are on the tiers
    ranks: Ranks | None = None  # that train together
    executor: Executor | None = None
    losses: Sequence[torch.Tensor] = ()
    changes: Sequence[int] = ()  # in place, of the arguments, when the forward ran
    node: weakref.ref[Any] | None = None  # of autograd, which the call lives with
    returned: Sequence[weakref.ref[torch.Tensor]] = ()  # the outputs that lead to it

    @cached_property
    def outputs(self) -> Outputs:
        """The results of the call, and their gradients."""
        return Outputs(self.models, self.args)

    @cached_property
    def shape(self) -> StepShape:
        """The parts of the step, with the gradients from outside that the latest step had."""
        shape = self.models[0].shape
        if not self.training:
            return shape.forward_alone
        return replace(shape, outside=(self.engine.outside if self.engine else None) or shape.outside)

    @property
    def num_tokens(self) -> int:
        """Of its batch, padding too; samples, where a layer's input has no dimension of tokens."""
        return sum(model.num_tokens for model in self.models)

    @cached_property
    def trained_numbers(self) -> list[int]:
        """Which arguments get a gradient: those that required one as the forward began."""
        return [n for n, arg in enumerate(self.args) if isinstance(arg, torch.Tensor) and arg.requires_grad]

    @property
    def trained(self) -> list[torch.Tensor]:
        """These."""
        return [self.args[number] for number in self.trained_numbers]

    def run(self) -> list[Any]:
        """The model's outputs, tied to a backward where this call is a training step."""
        if not self.training:
            with torch.no_grad():
                return self.outputs.assemble(self.forward())
        made = list(_Step.apply(self, *self.trained))  # type: ignore[no-untyped-call]
        self.returned = list(map(weakref.ref, made))
        return self.outputs.assemble(made)

    def forward(self) -> list[torch.Tensor]:
        """The outputs that the step makes, in the order of `Outputs.made`."""
        self.changes = self._changes
        self.units.of_batch = Accumulator()
        executor = self._begin()
        with without_autocast():  # the units' code has it in it
            if isinstance(executor, TieredExecutor) and self.engine is not None:
                self.engine.forward(executor, self)
            else:
                executor.forward()
        made = self.outputs.collect({**executor.env, **executor.returned})
        executor.returned.clear()
        # Detached: an output leads to the autograd node, which leads to this call, and nobody would collect the three.
        pairs = zip(made, self.outputs.made, strict=True)
        self.losses = [content.detach() for content, output in pairs if output.kind == "loss"]
        for value in [v for v in executor.env if v.kind in ("y", "loss")]:
            del executor.env[value]
        self.executor = executor
        return made

    def backward(self, gradients: Gradients, outside: frozenset[Unit]) -> list[torch.Tensor | None]:
        """The gradients of the trained arguments, in their order, given those of `made`; once, as it uses up the step.

        `outside` is what the method of that name makes of the same gradients. On the tiers the parameters' gradients go
        to their updates, and to no one else.
        """
        if self.engine is not None:
            self._refuse_on_tiers(self.engine, gradients)
        executor, reached = self.executor, self.outputs.reached(gradients)
        assert executor is not None
        if isinstance(executor, TieredExecutor) and self.engine is not None:
            if executor in self.engine.open and outside != self.shape.outside:
                executor = self._begun_again(self.engine, executor, outside)
            zeroed = self.engine.record is not None and is_zeroed(self.trained)
            losses = () if self.outputs.loss_gradient(gradients) is None else self.losses
            spans = self.engine.spans_of(self.args).items()
            self.engine.backward(executor, losses, [span for index, span in spans if index in reached], zeroed=zeroed)
        with without_autocast():
            if not outside:
                factor = self.outputs.loss_gradient(gradients)
                assert factor is not None
                if float(factor) != 1.0:  # which the head's backward has assumed
                    executor.scale(factor)
            elif isinstance(executor, TieredExecutor):
                for value, content in self.outputs.cut(gradients, outside).items():
                    executor.values.define(value, content)
            else:
                executor = self._from_outside(executor, gradients, outside)
            executor.backward()
        found = self.outputs.argument_gradients(executor.env, self.units, self.trained_numbers, reached)
        if self.engine is None:
            return found if self.ranks is None else self._averaged(self.ranks, found)
        assert isinstance(executor, TieredExecutor)
        self.engine.end_backward(executor, self, gradients)
        for number in self.trained_numbers:
            if number in reached:
                mark_gradient_unavailable(self.args[number])
        return found

    def look_at_parameters(self) -> None:
        """Before a backward on the tiers, add what somebody has put in `.grad`, as torch adds to it.

        Raises `StepOrderError` where a parameter was frozen since the forward, and as `refuse_left` where updates would
        run before anybody could zero what is left.
        """
        if self.engine is None:
            return
        for parameter in self.trained:
            if is_offloaded(parameter) and not attribute(parameter, "requires_grad"):
                raise StepOrderError(
                    f"a parameter of shape {tuple(parameter.shape)} was frozen between the forward and its backward, "
                    "which updates all that the forward has found to be trained: call requires_grad_(False) before the "
                    "model is called, or after optimizer.step(). Nothing was updated"
                )
        if self.engine.placement.has_early:
            refuse_left(self.trained)
        take_given(self.trained)

    def find_engine(self) -> None:
        """Begin again where the backward under way shows that a step has several, or go where somebody has.

        Raises `StepOrderError` where that is too late.
        """
        engine = self.engine
        if engine is None or not isinstance(self.executor, TieredExecutor):
            return
        number, is_given_up = engine.open.number_in_backward, self.executor not in engine.open
        is_several = number > 1 or (is_given_up and engine.open.may_be_repeated)
        if is_several and engine.may_begin_again and (is_given_up or not engine.accumulates):
            self.begin_again(engine)
        elif number > 1 and not engine.accumulates and engine.successor is None:
            raise StepOrderError(
                f"this backward comes to {number} calls of the model. The first step of this run had one backward of "
                f"one call, so updates run beside it; nothing was updated. {KEPT}: begin the run anew"
            )
        while engine.successor is not None:
            engine = engine.successor
        if engine is not self.engine:
            self.move_to(engine)

    def begin_again(self, engine: Engine) -> None:
        """Have another engine in the place of one whose steps have one backward, or fewer calls at a time."""
        begin_again(engine, self, accumulates=True, num_calls=max(engine.open.number, engine.num_calls))

    def repeat(self, gradients: Gradients, engine: Engine) -> None:
        """Run forward and backward once more, on another engine."""
        self.move_to(engine)
        self.backward(gradients, self.outside(gradients))

    def move_to(self, engine: Engine) -> None:
        """Run the forward once more, on another engine; raises `StepOrderError` where its inputs have changed."""
        if self.changes != self._changes:
            raise StepOrderError(
                "the first step of this run has several backwards, and the inputs of its first call were changed in "
                'place since then, so it cannot be done again: give options={"accumulate": True}, or each call tensors '
                "of its own"
            )
        self.engine = engine
        vars(self).pop("shape", None)
        with torch.no_grad():
            self.forward()

    @property
    def _changes(self) -> list[int]:
        """How often each argument that is no parameter was changed in place."""
        return [changes(arg) for arg in self.args if isinstance(arg, torch.Tensor) and not is_offloaded(arg)]

    def _averaged(self, ranks: Ranks, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of parameters in memory over all ranks, None where none has one, and others as they are."""
        ever = self.outputs.ever_reached
        trained = zip(self.trained_numbers, self.trained, strict=True)
        own = [arg if isinstance(arg, torch.nn.Parameter) and number in ever else None for number, arg in trained]
        return averaged_of_any(ranks, gradients, own)

    def tap(self, gradients: Gradients) -> None:
        """Where a gradient has arrived for what a layer or the embedding makes, have the epilogue return that.

        This step's forward runs once more; later ones know.
        """
        untapped = self.outputs.untapped(gradients)
        if not untapped:
            return
        log.info("a gradient has arrived for what is made inside of a layer, so this step's forward runs once more")
        self.compilation.tapped |= untapped
        self.models = [self.compilation.specialized(m.micro_batch_size, m.sizes, alone=m.alone) for m in self.models]
        pairs = zip(self.units.micro_batches, self.models, strict=True)
        parts = [replace(part, split=model.split, codes=model.codes) for part, model in pairs]
        whole = whole_batch(self.compilation, self.models, self.args)
        self.units = CompiledUnits(parts, self.units.seed, whole)
        for name in ("outputs", "shape"):
            vars(self).pop(name, None)
        if self.engine is not None and isinstance(self.executor, TieredExecutor):
            self.engine.open.give_up(self.executor)
            self.engine.outside = self.outside(gradients)
        with torch.no_grad():
            self.forward()

    def outside(self, gradients: Gradients) -> frozenset[Unit]:
        """The units whose outputs get a gradient that the program's heads have not made: see `Outputs.outside`."""
        return self.outputs.outside(gradients, is_head_apart=EPILOGUE in self.shape.outside)

    def _begin(self) -> Executor:
        """The executor of this call; nothing has run."""
        is_first = self.compilation.latest is None
        executor: Executor
        models = self.models
        if self.engine is None:
            program = self.compilation.program(self.models[0], len(self.models), self.shape)[-1]
            executor = Executor(program, self.units, self._inputs())
        else:
            executor = self._executor(self.engine)
            models = [model.in_pieces(executor.placement.decision.layer_tokens) for model in models]
            parts = zip(self.units.micro_batches, models, strict=True)
            self.units.micro_batches = [replace(part, codes=model.codes) for part, model in parts]
            describe = partial(self.engine.planning.describe, executor.program)
            self.compilation.latest = Step(models[0], self.shape, self.engine.snapshots, describe)
        placement = executor.placement if isinstance(executor, TieredExecutor) else None
        for specialized in {id(each): each for each in models}.values():  # of most micro-batches the same
            specialized.compile_code(self.shape, placement.levels_in_use if placement else {})
        executor.wanted = self.outputs.inner
        if is_first:
            report(self.compilation)
        return executor

    def _executor(self, engine: Engine) -> TieredExecutor:
        """That of this call. In the first step it may show that a step has several, or that several need memory."""
        engine.announce("the forward" if self.training else "an evaluation")
        may_begin_again = engine.may_begin_again and engine.is_of_this_thread
        if engine.record is not None and not engine.accumulates and may_begin_again:
            if is_zeroed(self.args):
                engine.done.clear()
                forget_gradients(engine.optimizer.group_of if engine.optimizer else ())
            engine = self.engine = begin_again(engine, self, accumulates=True, num_calls=engine.num_calls)
        try:
            return engine.begin(self.models, self.args, self.units, self._inputs(), self.shape)
        except MemoryBudgetError as error:
            if not (engine.open and may_begin_again):
                raise
            try:
                self.engine = begin_again(engine, self, accumulates=engine.accumulates, num_calls=engine.num_calls + 1)
            except MemoryBudgetError:
                raise error from None
        return self.engine.begin(self.models, self.args, self.units, self._inputs(), self.shape)

    def _inputs(self) -> dict[Value, Any]:
        """The batch by micro-batch, and what each unit reads that is not on the tiers."""
        batches = [part.inputs for part in self.units.micro_batches]
        inputs: dict[Value, Any] = {Value("batch", micro_batch=j, tier=None): each for j, each in enumerate(batches)}
        for unit in self.models[0].split.units:
            if self.engine is None or unit.unit not in self.engine.placement.by_unit:
                read = {index: self.args[index] for index in unit.arguments if index not in batches[0]}
                inputs[Value("w", unit.unit)] = {
                    index: arg
                    for index, arg in read.items()
                    if self.engine is None or not isinstance(arg, torch.nn.Parameter)
                }
        return inputs

    def _from_outside(self, executor: Executor, gradients: Gradients, outside: frozenset[Unit]) -> Executor:
        """The executor of another program, whose backward takes gradients from outside; it has what the first made."""
        shape = replace(self.shape, outside=outside)
        program = self.compilation.program(self.models[0], len(self.models), shape)[-1]
        env = {value: content for value, content in executor.env.items() if value.kind not in ("dx", "dw", "dside")}
        self.units.of_batch = Accumulator()
        redo = Executor(program, self.units, {**env, **self.outputs.cut(gradients, outside)})
        if executor.program.by_micro_batch and executor.program is not program:
            redo.forward()  # its checkpoints went with the backwards that the first half has run
        return redo

    def _begun_again(self, engine: Engine, executor: TieredExecutor, outside: frozenset[Unit]) -> TieredExecutor:
        """The step after its forward once more, by a program whose backward takes gradients from outside.

        The head's backward has run with the forward, for the loss alone. From now on it waits for such gradients.
        """
        log.info("a gradient has arrived for another output than the loss, so this step's forward runs once more")
        engine.open.give_up(executor)
        engine.outside = outside
        del self.shape
        self.forward()
        assert isinstance(self.executor, TieredExecutor)
        return self.executor

    def _refuse_on_tiers(self, engine: Engine, gradients: Gradients) -> None:
        """Raise `OptimizerError` for gradients of which updates cannot be made.

        A GradScaler multiplies the loss, and updates run before it could divide again. A scaled loss looks like any
        other that the user has multiplied, or computed outside of the model. So where the factor may be a scale, which
        is more than 1, the scalers are looked up among all objects; once for each factor.
        """
        gradient = self.outputs.loss_gradient(gradients)
        factor = math.inf if gradient is None else float(gradient)
        if factor <= 1 or factor in engine.accepted_factors:
            return
        scalers = [each for each in gc.get_objects() if issubclass(type(each), torch.amp.GradScaler)]
        if any(scaler.is_enabled() and scaler.get_scale() > 1 for scaler in scalers):
            raise OptimizerError(
                "a torch.amp.GradScaler is in use, and multiplies the loss: with parameters on the tiers updates run "
                "during the backward, before it can divide the gradients. Put gs_compile.LossScaler(optimizer) in its "
                "place, or train in bf16 or fp32, which need no loss scale; nothing was updated"
            )
        engine.accepted_factor = factor


def whole_batch(compilation: Compilation, models: Sequence[SpecializedModel], args: Sequence[Any]) -> WholeBatch | None:
    """What a call computes of all its samples at once."""
    if (found := compilation.whole(models)) is None:
        return None
    unit, code = found
    for name in ("forward", *(("backward",) if code.is_trained else ())):
        code.function(name)  # backwards run in a thread of autograd's, which must not compile
    return WholeBatch(unit, code, {index: args[index] for index in unit.arguments})


class _Step(torch.autograd.Function):
    """The autograd node of one call."""

    @staticmethod
    def forward(ctx: Any, call: Call, *trained: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call.node = weakref.ref(ctx)
        made = call.forward()
        ctx.call = call
        ctx.num_trained = len(trained)
        ctx.set_materialize_grads(False)
        # All that the recomputation reads: the usual errors where it is used twice, or was changed in place meanwhile.
        ctx.save_for_backward(*(arg for arg in call.args if isinstance(arg, torch.Tensor)))
        pairs = zip(made, call.outputs.made, strict=True)
        ctx.mark_non_differentiable(
            *(tensor for tensor, output in pairs if not (output.spec and output.spec.requires_grad))
        )
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        if ctx.call is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: greedysnake frees a step's checkpoints as its "
                "backward uses them, also with retain_graph=True; call the model again"
            )
        if all(gradient is None for gradient in gradients):
            return (None, *ctx.num_trained * (None,))
        call: Call = ctx.call
        if call.engine is not None and not wants_all(ctx):
            raise OptimizerError(
                "backward(inputs=...) leaves out parameters that the optimizer trains: on the tiers a backward updates "
                "all of them. Leave inputs= out; freeze what is not to be trained (requires_grad_(False)) before the "
                "model's first call; or use a torch.optim optimizer. Nothing was updated"
            )
        call.outputs.refuse_watched([each() for each in call.returned], gradients, call.compilation.captured)
        asked = call.compilation.options.deterministic
        with nullcontext() if call.engine is None else call.engine.turn, told(call.ranks), deterministic(asked):
            call.look_at_parameters()
            call.find_engine()
            call.tap(gradients)
            outside = call.outside(gradients)
            ctx.call = None  # a loss that lives on keeps nothing of its step
            with nullcontext() if call.engine is None else call.engine.tiers.failure.issued():
                return (None, *call.backward(gradients, outside))
