"""call: one call of the model as the user's autograd sees it.

The call runs the forward half of a step program and hands back tensors that belong to one autograd node; the
backward of that node runs the other half and returns the parameters' gradients. So scaling, hooks, accumulation,
several forwards before a backward and losses made outside of the model behave as with plain PyTorch.

`Call` is of a model whose parameters are in memory, `TieredCall` (tiered_call.py) of one that has them on the tiers.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch.autograd.function import once_differentiable

from gs_compile.capture.exchange import first_exchange
from gs_compile.capture.internals import without_modes, without_overrides, without_packing
from gs_compile.codegen.compiled import Compilation, SpecializedModel
from gs_compile.errors import GreedySnakeError, OutputGradientError, StepOrderError
from gs_compile.model.aliases import is_plain
from gs_compile.model.given import state_of
from gs_compile.model.in_memory import averaged_of_any
from gs_compile.model.inspection import report
from gs_compile.model.outputs import Gradients, Outputs
from gs_compile.model.stand_in import address
from gs_compile.program.ir import EPILOGUE, StepShape, Unit, Value
from gs_compile.runtime.executor import Executor
from gs_compile.runtime.ranks import Ranks, failing_together
from gs_compile.runtime.stream import deterministic, is_in_host_memory, without_autocast
from gs_compile.runtime.units import CompiledUnits, WholeBatch

log = logging.getLogger(__name__)

SECOND_ORDER = (
    "a gradient of gradients was asked for (create_graph=True), as of a gradient penalty, but a step computes those of "
    "first order alone: leave the penalty out, or run the model without the backend"
)


@dataclass(eq=False)
class Call:
    """One call of the model: its arguments cut into micro-batches, and the step under way."""

    compilation: Compilation
    models: Sequence[SpecializedModel]  # one for each micro-batch
    args: Sequence[Any]
    units: CompiledUnits
    training: bool
    ranks: Ranks | None  # that train together
    shape: StepShape = field(init=False)  # the parts of the step, as the forward has begun
    executor: Executor = field(init=False, repr=False)  # that has run the forward
    losses: Sequence[torch.Tensor] = field(init=False, default=())
    contents: Sequence[Any] = field(init=False, default=())  # of what the forward has read, by `_contents`
    node: weakref.ref[Any] | None = field(init=False, default=None)  # of autograd, which the call lives with
    returned: Sequence[weakref.ref[torch.Tensor]] = field(init=False, default=())  # the outputs that lead to it

    @property
    def outputs(self) -> Outputs:
        """The results of the call, and their gradients."""
        return Outputs(self.models, self.args)

    @property
    def num_tokens(self) -> int:
        """The tokens of its batch, including padding; samples, if a layer's input has no dimension of tokens."""
        return sum(model.num_tokens for model in self.models)

    @cached_property
    def trained_numbers(self) -> list[int]:
        """The indices of the arguments that get a gradient: they required one when the forward began."""
        with without_overrides():
            return [n for n, arg in enumerate(self.args) if isinstance(arg, torch.Tensor) and arg.requires_grad]

    @property
    def trained(self) -> list[torch.Tensor]:
        return [self.args[number] for number in self.trained_numbers]

    @cached_property
    def read(self) -> list[Any]:
        """The arguments as the forward reads them, also when it runs again."""
        return list(map(_held, self.args))

    def run(self) -> list[Any]:
        """The model's outputs, connected to a backward if this call trains."""
        if not self.training:
            # Lanes change tensors of a step, which torch refuses where inference mode has made them
            with torch.inference_mode(False), torch.no_grad():
                return self.outputs.assemble(self.forward())
        made = list(_Step.apply(self, *self.trained))  # type: ignore[no-untyped-call]
        self.returned = list(map(weakref.ref, made))
        return self.outputs.assemble(made)

    def forward(self) -> list[torch.Tensor]:
        """The outputs that the step makes, in the order of `Outputs.made`."""
        is_first = self.compilation.latest is None
        self.shape = self._shape()
        self.units.drop_gradients()
        executor = self.executor = self._begin()
        executor.wanted = self.models[0].split.inner(len(self.models))
        if is_first:
            report(self.compilation)
        with without_autocast():  # the units' code has it in it
            self._run_forward()
        tensors = self.outputs.collect({**executor.env, **executor.returned})
        executor.returned.clear()
        # Detached: an output refers to the autograd node, which refers to this call: such a cycle is never collected.
        # Copied: scripts change a loss in place before the backward: they divide it, or sum it over ranks.
        pairs = zip(tensors, self.outputs.made, strict=True)
        self.losses = [content.detach().clone() for content, output in pairs if output.kind == "loss"]
        for value in [v for v in executor.env if v.kind in ("y", "loss")]:
            del executor.env[value]
        self.contents = self._contents if self.training else ()
        return tensors

    @property
    def _contents(self) -> list[Any]:
        """An object for each tensor in host memory that units read. It differs once the tensor was changed, also
        where torch does not count it; if that is not of the batch, once its memory or its first element differs.
        """
        batch = self.models[0].batch
        used = {*batch, *(index for unit in self.models[0].split.units for index in unit.arguments)}
        read = [(index, each) for index, each in enumerate(self.read) if index in used and is_plain(each)]
        return [state_of(each) if index in batch else _look_of(each) for index, each in read if is_in_host_memory(each)]

    @property
    def turn(self) -> AbstractContextManager[Any]:
        """The lock that a backward holds: other threads that use the model wait for its end."""
        return nullcontext()

    def check(self, node: Any, gradients: Gradients) -> None:
        """Raise if a backward asks for gradients that the call cannot give, or if what it has read is another now."""
        if self.contents != self._contents:
            raise StepOrderError(
                "the batch, a parameter or a buffer was changed between the forward and its backward, by .data or as "
                "an array of numpy: layers run their forward again in the backward, and would read other values. Pass "
                "the model tensors that keep their memory, as batch.clone() makes them, and change what the model has "
                "after the backward. Nothing was updated"
            )
        self.outputs.refuse_watched([each() for each in self.returned], gradients, self.compilation.captured)

    def prepare(self, gradients: Gradients) -> None:
        """If gradients have arrived for outputs for which the program has none, run the forward of one that has.

        In that program the epilogue returns what a layer or the embedding makes. Later steps begin with it.
        """
        if untapped := self.outputs.untapped(gradients):
            self.compilation.tapped |= untapped
            self.models = [
                self.compilation.specialized(m.micro_batch_size, m.sizes, alone=m.alone, loss_alone=m.loss_alone)
                for m in self.models
            ]
            pairs = zip(self.units.micro_batches, self.models, strict=True)
            parts = [replace(part, split=model.split, codes=model.codes) for part, model in pairs]
            whole = whole_batch(self.compilation, self.models, self.read)
            self.units = CompiledUnits(parts, self.units.seed, whole)
        outside = self.outputs.outside(gradients, is_head_apart=EPILOGUE in self.shape.outside)
        if untapped or not outside <= self.shape.outside:
            log.info("a gradient has arrived for another output than the loss, so this step's forward runs once more")
            self.compilation.outside |= outside
            self._forward_again()

    def backward(self, gradients: Gradients) -> list[torch.Tensor | None]:
        """The gradients of the trained arguments, in order, given those of `made`; once, as it uses up the step."""
        found = self._run_backward(gradients, self.outputs.reached(gradients))
        return found if self.ranks is None else self._averaged(self.ranks, found)

    def _run_backward(self, gradients: Gradients, reached: Container[int]) -> list[torch.Tensor | None]:
        """The gradients of the trained arguments; None for those whose index is not in `reached`."""
        with without_autocast():
            if self.shape.outside:
                self.executor.give(self.outputs.cut(gradients, self.shape.outside))
            else:
                self._scale(gradients)
            self.executor.backward()
        return self.outputs.argument_gradients(self.executor.env, self.units, self.trained_numbers, reached)

    def _shape(self) -> StepShape:
        """The shape of the step, with the gradients from outside that steps have had so far."""
        shape = self.models[0].shape
        if not self.training:
            return shape.forward_alone
        return replace(shape, outside=shape.outside | self.compilation.outside)

    def _scale(self, gradients: Gradients) -> None:
        """Multiply the results of the head's backward by the gradient of the loss, for which it took 1."""
        factor = self.outputs.loss_gradient(gradients)
        assert factor is not None
        if float(factor) != 1.0:
            self.executor.scale(factor)

    def _averaged(self, ranks: Ranks, gradients: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients, those of parameters in memory averaged over all ranks; None if no rank has one."""
        ever, inputs = self.models[0].split.reached(), self.compilation.captured.inputs
        own = {
            place: (inputs[number].path, arg)
            for place, number in enumerate(self.trained_numbers)
            if isinstance(arg := self.args[number], torch.nn.Parameter) and number in ever
        }
        return averaged_of_any(ranks, gradients, own)

    def _forward_again(self) -> None:
        """Run the forward once more. RankError on all ranks if only some repeat one in which values are exchanged."""
        if self.ranks is not None and first_exchange(self.compilation.captured.module) is not None:
            self.ranks.agree_on("one more forward, for a gradient of another output than the loss")
        with torch.no_grad():
            self.forward()

    def _begin(self) -> Executor:
        """The executor of this call; nothing has run."""
        program = self.compilation.program(self.models[0], len(self.models), self.shape)[-1]
        executor = Executor(program, self.units, self._inputs())
        self._compile(self.models, {})
        return executor

    def _compile(self, models: Sequence[SpecializedModel], levels: Mapping[Unit, Iterable[int]]) -> None:
        for specialized in dict.fromkeys(models):  # of most micro-batches the same
            specialized.compile_code(self.shape, levels)

    def _run_forward(self) -> None:
        self.executor.forward()

    def _inputs(self) -> dict[Value, Any]:
        """The batch by micro-batch, and the other inputs of each unit."""
        batches, args = [part.inputs for part in self.units.micro_batches], self.read
        inputs: dict[Value, Any] = {Value("batch", micro_batch=j, tier=None): each for j, each in enumerate(batches)}
        for unit in self.models[0].split.units:
            read = {index: args[index] for index in unit.arguments if index not in batches[0]}
            inputs[Value("w", unit.unit)] = read
        return inputs


def whole_batch(compilation: Compilation, models: Sequence[SpecializedModel], args: Sequence[Any]) -> WholeBatch | None:
    """The code that a call runs on all of its samples at once, if there is any."""
    if (found := compilation.whole(models)) is None:
        return None
    unit, code = found
    for name in ("forward", *(("backward",) if code.is_trained else ())):
        code.function(name)  # backwards run in a thread of autograd's, which must not compile
    return WholeBatch(unit, code, {index: _held(args[index]) for index in unit.arguments})


def _held(arg: Any) -> Any:
    """An argument; a buffer as an alias of its present memory: ``buffer.data = ...`` before the backward gives it other
    memory, which the recomputation must not read.
    """
    is_buffer = isinstance(arg, torch.Tensor) and not isinstance(arg, torch.nn.Parameter) and not arg.requires_grad
    return arg.detach() if is_buffer else arg


def _look_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor's memory is, and its first element."""
    return address(tensor), repr(tensor.as_strided((), ()).item()) if tensor.numel() else ""


class _Step(torch.autograd.Function):
    """The autograd node of one call."""

    @staticmethod
    def forward(ctx: Any, call: Call, *trained: torch.Tensor) -> tuple[torch.Tensor, ...]:
        call.node = weakref.ref(ctx)
        outputs = call.forward()
        ctx.call = call
        ctx.num_trained = len(trained)
        ctx.set_materialize_grads(False)
        # Saved: autograd then raises its usual errors if these are used twice, or were changed in place meanwhile.
        ctx.save_for_backward(*(arg for arg in call.args if isinstance(arg, torch.Tensor)))
        pairs = zip(outputs, call.outputs.made, strict=True)
        ctx.mark_non_differentiable(
            *(tensor for tensor, output in pairs if not (output.spec and output.spec.requires_grad))
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        read = [each for each in ctx.saved_tensors if each.requires_grad] if torch.is_grad_enabled() else []
        found = _Step.of_first_order(ctx, *gradients)
        if not torch.is_grad_enabled():
            return found
        # Without that, a penalty on gradients would learn nothing, and their gradients for what was read be zero.
        error = OutputGradientError(SECOND_ORDER)
        return tuple(each if each is None else refusing(each, error, *read) for each in found)

    @staticmethod
    @once_differentiable
    def of_first_order(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        if ctx.call is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: greedysnake frees the checkpoints of a step when "
                "its backward uses them, also with retain_graph=True: add the losses of a call, or call the model again"
            )
        if all(gradient is None for gradient in gradients):
            return (None, *ctx.num_trained * (None,))
        call: Call = ctx.call
        call.check(ctx, gradients)
        with (
            call.turn,
            without_modes(),
            without_packing(),
            failing_together(call.ranks),
            deterministic(call.compilation.options.deterministic),
        ):
            call.prepare(gradients)
            ctx.call = None  # a loss that lives on keeps nothing of its step
            return (None, *call.backward(gradients))


def refusing(tensor: torch.Tensor, error: GreedySnakeError, *sources: torch.Tensor) -> torch.Tensor:
    """A tensor with the same values, whose backward raises an error, also if it is only for some of the sources."""
    given = (torch.ones((), requires_grad=True), *sources)
    found: torch.Tensor = _Refusing.apply(error, tensor, *given)  # type: ignore[no-untyped-call]
    return found


class _Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, error: GreedySnakeError, tensor: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        ctx.error = error
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor | None) -> NoReturn:
        raise ctx.error
