"""step: one call of the model as the user's autograd sees it.

The call runs the forward half of a step program and hands back tensors that belong to one autograd node; the
backward of that node runs the other half and returns the parameters' gradients. So scaling, hooks, accumulation,
several forwards before a backward and losses made outside of the model behave as with plain PyTorch.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from gs_compile.codegen.compiled import Compilation, SpecializedModel
from gs_compile.errors import OptimizerError, OutputGradientError
from gs_compile.model.engine import Engine, Request
from gs_compile.model.outputs import Gradients, Outputs
from gs_compile.model.report import report
from gs_compile.model.residency import mark_gradient_unavailable
from gs_compile.program.ir import EPILOGUE, StepShape, Value
from gs_compile.runtime.executor import Executor
from gs_compile.runtime.issue import TieredExecutor
from gs_compile.runtime.stream import without_autocast
from gs_compile.runtime.units import CompiledUnits


@dataclass
class Call:
    """One call of the model: its arguments cut into micro-batches, and the step under way."""

    compilation: Compilation
    models: Sequence[SpecializedModel]  # of every micro-batch
    args: Sequence[Any]
    units: CompiledUnits
    training: bool
    engine: Engine | None = None  # where the parameters are on the tiers
    executor: Executor | TieredExecutor | None = None
    losses: Sequence[torch.Tensor] = ()

    @property
    def model(self) -> SpecializedModel:
        """Of the first micro-batch, for what all share."""
        return self.models[0]

    @cached_property
    def outputs(self) -> Outputs:
        """What the call returns, and its gradients."""
        return Outputs(self.models, self.args)

    @property
    def trained(self) -> list[torch.Tensor]:
        """The arguments that get a gradient."""
        return [arg for arg in self.args if isinstance(arg, torch.Tensor) and arg.requires_grad]

    def run(self) -> list[Any]:
        """The model's outputs, tied to a backward where this call is a training step."""
        if not self.training:
            with torch.no_grad():
                return self.outputs.assemble(self.forward())
        return self.outputs.assemble(list(_Step.apply(self, *self.trained)))  # type: ignore[no-untyped-call]

    def forward(self) -> list[torch.Tensor]:
        """The outputs that the step makes, in the order of `Outputs.made`."""
        self.executor = executor = self._executor()
        failed = True
        try:
            with self._device_state():
                executor.forward()
            failed = False
        finally:
            if isinstance(executor, TieredExecutor) and self.engine is not None:
                self.engine.forwarded(executor, failed=failed)
        made = self.outputs.collect(executor.env)
        # Detached: an output leads to the autograd node, which leads to this call, and nobody would collect the three.
        pairs = zip(made, self.outputs.made, strict=True)
        self.losses = [content.detach() for content, output in pairs if output.combine == "loss"]
        for value in [v for v in executor.env if v.kind in ("y", "loss")]:
            del executor.env[value]
        return made

    def backward(self, gradients: Gradients, outside: frozenset[Any]) -> list[torch.Tensor | None]:
        """The gradients of the trained arguments, in their order, given those of `made`; once, as it uses up the step.

        `outside` is what `Outputs.outside` made of the same gradients.
        """
        executor = self.executor
        assert executor is not None
        if isinstance(executor, TieredExecutor):
            self._backward_on_tiers(executor, gradients, outside)
            return [None for _ in self.trained]
        with self._device_state():
            if outside:
                executor = self._backward_from_outside(executor, gradients, outside)
            else:
                self._scale(executor, self.outputs.loss_gradient(gradients))
                executor.backward()
        return self.outputs.argument_gradients(executor.env, self.units.micro_batches)

    def _executor(self) -> Executor | TieredExecutor:
        first = not self.compilation.steps
        shape = self._shape()
        for specialized in self.models:
            specialized.compile_code(shape)
        executor: Executor | TieredExecutor
        if self.engine is None:
            program = self.compilation.program(self.model, len(self.models), shape)[-1]
            executor = Executor(program, self.units, self._inputs())
        else:
            apart = EPILOGUE in shape.outside
            request = Request(self.models, self.args, self.units, self._inputs(), self.training, apart)
            executor = self.engine.begin(request)
            self.compilation.remember(self.model, shape, self.engine.programs)
            self.compilation.describe_tiers = partial(self.engine.planning.describe, self.engine.programs[-1])
        if first:
            report(self.compilation)
        return executor

    def _backward_on_tiers(self, executor: TieredExecutor, gradients: Gradients, outside: frozenset[Any]) -> None:
        """The parameters' gradients go to their updates, and to no one else."""
        assert self.engine is not None
        apart = any(op.verb == "head_backward" for op in executor.program.ops)
        if outside - {EPILOGUE} or (outside and not apart):
            raise OutputGradientError(
                "a gradient arrived for another output than the loss; with parameters on the tiers greedysnake "
                "differentiates the loss that the model itself computes (give it labels)"
            )
        self._refuse_loss_scaler(gradients)
        self.engine.backward(executor, self.losses)
        with self._device_state():
            if outside:
                for value, content in self.outputs.cut(gradients, outside).items():
                    executor.values.define(value, content)
            else:
                self._scale(executor, self.outputs.loss_gradient(gradients))
            executor.backward()
        self.engine.open = None
        for parameter in self.trained:
            mark_gradient_unavailable(parameter)

    def _refuse_loss_scaler(self, gradients: Gradients) -> None:
        """Raise `OptimizerError` where a GradScaler has multiplied the loss: updates run before it could divide again.

        A scaled loss looks like any other that the user has multiplied, or computed outside of the model. So where the
        factor may be a scale, which is more than 1, the scalers are looked up among all objects; once for each factor.
        """
        assert self.engine is not None
        computed = any(output.combine == "loss" for output in self.outputs.made)
        factor = float(self.outputs.loss_gradient(gradients)) if computed else math.inf
        if factor <= 1 or factor == self.engine.accepted_factor:
            return
        scalers = [each for each in gc.get_objects() if issubclass(type(each), torch.amp.GradScaler)]
        if any(scaler.is_enabled() and scaler.get_scale() > 1 for scaler in scalers):
            raise OptimizerError(
                "a torch.amp.GradScaler is in use, and multiplies the loss: with parameters on the tiers updates run "
                "during the backward, before it can divide the gradients. Train in bf16 or fp32, which need no loss "
                "scale, and leave the scaler out or make it with enabled=False; nothing was updated"
            )
        self.engine.accepted_factor = factor

    def _shape(self) -> StepShape:
        shape = self.model.shape
        if not self.training:
            return replace(shape, training=False)
        apart = not shape.has_loss or self.model.scales_gradients
        return replace(shape, outside=frozenset({EPILOGUE})) if apart else shape

    def _scale(self, executor: Executor | TieredExecutor, factor: torch.Tensor) -> None:
        """The head's backward assumed a gradient of one for the loss."""
        if float(factor) != 1.0:
            executor.scale(factor)

    def _backward_from_outside(self, executor: Executor, gradients: Gradients, outside: frozenset[Any]) -> Executor:
        shape = replace(self.model.shape, outside=outside)
        program = self.compilation.program(self.model, len(self.models), shape)[-1]
        env = {value: content for value, content in executor.env.items() if value.kind not in ("dx", "dw", "dside")}
        redo = Executor(program, self.units, {**env, **self.outputs.cut(gradients, outside)})
        if executor.program.order == "horizontal" and executor.program is not program:
            redo.forward()  # its checkpoints went with the backwards that the first half has run
        redo.backward()
        return redo

    @contextmanager
    def _device_state(self) -> Iterator[None]:
        """The units' code has autocast in it."""
        with without_autocast():
            yield

    def _inputs(self) -> dict[Value, Any]:
        """The batch by micro-batch, and what each unit reads that is not on the tiers."""
        inputs: dict[Value, Any] = {
            Value("batch", micro_batch=j, tier=None): part.inputs for j, part in enumerate(self.units.micro_batches)
        }
        batch = self.units.micro_batches[0].inputs
        for unit in self.model.split.units:
            if self.engine is None or unit.unit not in self.engine.placement.by_unit:
                indices = [source.index for source in unit.sources if source.kind == "input"]
                inputs[Value("w", unit.unit)] = {
                    i: self.args[i] for i in indices if i not in batch and not self._is_on_tiers(i)
                }
        return inputs

    def _is_on_tiers(self, index: int) -> bool:
        """Whether an argument is a parameter on the tiers: what stands for it here has no values."""
        return self.engine is not None and isinstance(self.args[index], torch.nn.Parameter)


class _Step(torch.autograd.Function):
    """The autograd node of one call."""

    @staticmethod
    def forward(ctx: Any, call: Call, *trained: torch.Tensor) -> tuple[torch.Tensor, ...]:
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
        assert call.executor is not None
        outside = call.outputs.outside(gradients, call.executor.program)
        ctx.call = None  # a loss that lives on keeps nothing of its step
        return (None, *call.backward(gradients, outside))
