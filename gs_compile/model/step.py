"""bridge: one call of the model as the user's autograd sees it.

The call runs the forward half of a step program and hands back tensors that belong to one autograd node; the
backward of that node runs the other half and returns the parameters' gradients. So scaling, hooks, accumulation,
several forwards before a backward and losses made outside of the model behave as with plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from gs_compile.capture.graph import OutputSpec, layer_name
from gs_compile.codegen.compiled import Compilation, SpecializedModel
from gs_compile.errors import OutputGradientError
from gs_compile.model.engine import Engine
from gs_compile.model.report import report
from gs_compile.program.ir import EPILOGUE, Program, StepShape, Value
from gs_compile.runtime.executor import Executor
from gs_compile.runtime.issue import TieredExecutor
from gs_compile.runtime.stream import without_autocast
from gs_compile.runtime.units import Accumulator, CompiledUnits

Gradients = Sequence[torch.Tensor | None]


@dataclass
class Call:
    """One call of the model: its arguments cut into micro-batches, and the step under way."""

    compilation: Compilation
    layout: SpecializedModel  # of the first micro-batch, for what all share
    layouts: Sequence[SpecializedModel]  # of every micro-batch
    args: Sequence[Any]
    units: CompiledUnits
    training: bool
    engine: Engine | None = None  # where the parameters are on the tiers
    executor: Executor | TieredExecutor | None = None
    program: Program | None = None
    losses: Sequence[torch.Tensor] = ()

    @property
    def num_micro_batches(self) -> int:
        return len(self.layouts)

    def run(self) -> list[Any]:
        """The model's outputs, tied to a backward where this call is a training step."""
        if not self.training:
            with torch.no_grad():
                return self._assemble(self.forward())
        trained = [arg for arg in self.args if isinstance(arg, torch.Tensor) and arg.requires_grad]
        return self._assemble(list(_Step.apply(self, *trained)))  # type: ignore[no-untyped-call]

    # The two halves --------------------------------------------------------------------------------------------------

    def forward(self) -> list[torch.Tensor]:
        """The outputs that the step makes, in the order of `made`."""
        self.executor = self._executor()
        self.program = self.executor.program
        try:
            with self._device_state():
                self.executor.forward()
        except BaseException:
            self._forwarded(failed=True)
            raise
        self._forwarded()
        outputs = [self._output(output) for output in self.made]
        # Detached: an output leads to the autograd node, which leads to this call, and nobody would collect the three.
        pairs = zip(outputs, self.made, strict=True)
        self.losses = [output.detach() for output, made in pairs if made.combine == "loss"]
        for value in [v for v in self.executor.env if v.kind in ("y", "loss")]:
            del self.executor.env[value]
        return outputs

    def backward(self, gradients: Gradients, outside: frozenset[Any]) -> list[torch.Tensor | None]:
        """The gradients of the trained arguments, in their order, given those of `made`; once, as it uses up the step.

        `outside` is what `outside` made of the same gradients.
        """
        executor = self.executor
        assert executor is not None
        if isinstance(executor, TieredExecutor):
            return self._backward_on_tiers(executor, gradients, outside)
        with self._device_state():
            if outside:
                self._backward_from_outside(executor, gradients, outside)
            else:
                self._scale(executor, gradients)
                executor.backward()
        return self._collect(executor.env)

    def _forwarded(self, *, failed: bool = False) -> None:
        if isinstance(self.executor, TieredExecutor) and self.engine is not None:
            self.engine.forwarded(self.executor, failed=failed)

    def _executor(self) -> Executor | TieredExecutor:
        first = not self.compilation.steps
        for specialized in self.layouts:
            specialized.compile_code(self._shape())
        inputs = self._inputs()
        executor: Executor | TieredExecutor
        if self.engine is None:
            program = self.compilation.program(self.layout, self.num_micro_batches, self._shape())[-1]
            executor = Executor(program, self.units, inputs)
        else:
            shape = self._shape()
            executor = self.engine.begin(
                self.layouts, self.args, self.units, inputs, training=self.training, apart=EPILOGUE in shape.outside
            )
            self.compilation.remember(self.layout, shape, self.engine.programs)
            self.compilation.tiers = self.engine.describe()
        if first:
            report(self.compilation)
        return executor

    def _backward_on_tiers(
        self, executor: TieredExecutor, gradients: Gradients, outside: frozenset[Any]
    ) -> list[torch.Tensor | None]:
        """The same, where the parameters' gradients go to their updates, and to no one else."""
        assert self.engine is not None
        assert self.program is not None
        apart = any(op.verb == "head_backward" for op in self.program.ops)
        if outside - {EPILOGUE} or (outside and not apart):
            raise OutputGradientError(
                "a gradient arrived for another output than the loss; with parameters on the tiers greedysnake "
                "differentiates the loss that the model itself computes (give it labels)"
            )
        self.engine.backward(executor, self.losses)
        with self._device_state():
            if outside:
                for value, content in self._dy(gradients, outside).items():
                    executor.values.define(value, content)
            else:
                self._scale(executor, gradients)
            executor.backward()
        self.engine.open = None
        return [None for arg in self.args if isinstance(arg, torch.Tensor) and arg.requires_grad]

    def _shape(self) -> StepShape:
        shape = self.layout.shape
        if not self.training:
            return replace(shape, training=False)
        apart = not shape.has_loss or self.layout.scales_gradients
        return replace(shape, outside=frozenset({EPILOGUE})) if apart else shape

    def outside(self, gradients: Gradients) -> frozenset[Any]:
        """What gets a gradient that the head's own backward did not know of: units for `StepShape.outside`.

        Raises `OutputGradientError` for an output that has no gradient here.
        """
        assert self.program is not None
        arrived = [output for output, gradient in zip(self.made, gradients, strict=True) if gradient is not None]
        for output in arrived:
            if not output.is_layer_input and output.unit != EPILOGUE and output.combine != "loss":
                maker = self._name(output)
                raise OutputGradientError(
                    f"a gradient arrived for an output made inside {maker} (a cache or attention weights); "
                    "greedysnake differentiates the loss, what the head makes, and hidden states"
                )
        apart = all(op.verb != "head" or op.stage.phase == "forward" for op in self.program.ops)
        if not apart and all(output.combine == "loss" for output in arrived):
            return frozenset()
        return frozenset({EPILOGUE}) | {output.unit for output in arrived if output.is_layer_input}

    def _name(self, output: OutputSpec) -> str:
        halved = self.layout.split.halved
        return layer_name(output.unit, halved=halved) if isinstance(output.unit, int) else "the embedding"

    def _scale(self, executor: Executor | TieredExecutor, gradients: Gradients) -> None:
        """The head's backward assumed a gradient of one for the loss."""
        scale = next(g for output, g in zip(self.made, gradients, strict=True) if output.combine == "loss")
        assert scale is not None
        if scale.item() != 1.0:
            executor.scale(scale)

    def _backward_from_outside(self, executor: Executor, gradients: Gradients, outside: frozenset[Any]) -> None:
        shape = replace(self.layout.shape, outside=outside)
        program = self.compilation.program(self.layout, self.num_micro_batches, shape)[-1]
        env = {value: content for value, content in executor.env.items() if value.kind not in ("dx", "dw", "dside")}
        again = Executor(program, self.units, {**env, **self._dy(gradients, outside)})
        if executor.program.order == "horizontal" and executor.program is not program:
            again.forward()  # its checkpoints went with the backwards that the first half has run
        again.backward()
        executor.env = again.env

    @contextmanager
    def _device_state(self) -> Iterator[None]:
        """The units' code has autocast in it and draws from generators of its own; the user's stay as they are."""
        units = self.units
        with without_autocast(), torch.random.fork_rng(units.devices, enabled=units.seed is not None):
            yield

    def _inputs(self) -> dict[Value, Any]:
        inputs: dict[Value, Any] = {
            Value("batch", micro_batch=j, tier=None): part.inputs for j, part in enumerate(self.units.micro_batches)
        }
        batch = self.units.micro_batches[0].inputs
        for unit in self.layout.split.units:
            if self.engine is None or unit.unit not in self.engine.placement.by_unit:
                indices = [source.index for source in unit.sources if source.kind == "input"]
                inputs[Value("w", unit.unit)] = {
                    i: self.args[i] for i in indices if i not in batch and not self._is_on_tiers(i)
                }
        return inputs

    def _is_on_tiers(self, index: int) -> bool:
        """Whether an argument is a parameter on the tiers: what stands for it here has no values."""
        return self.engine is not None and isinstance(self.args[index], torch.nn.Parameter)

    # Outputs ---------------------------------------------------------------------------------------------------------

    @property
    def made(self) -> list[OutputSpec]:
        """The outputs that the step computes; the others are arguments, constants, or not kept."""
        return [output for output in self.layout.outputs if output.combine in ("loss", "sum", "concat", "same")]

    def _assemble(self, made: Sequence[torch.Tensor]) -> list[Any]:
        computed = iter(made)
        outputs: list[Any] = []
        for output in self.layout.outputs:
            match output.combine:
                case "none" | "constant":
                    outputs.append(output.value)
                case "input":
                    outputs.append(self.args[output.index])
                case _:
                    outputs.append(next(computed))
        return outputs

    def _output(self, output: OutputSpec) -> torch.Tensor:
        parts = self._parts(output)
        assert output.spec is not None
        match output.combine:
            case "loss" | "sum":
                return torch.stack(parts).sum(0).to(output.spec.dtype) if len(parts) > 1 else parts[0].clone()
            case "same":
                return parts[0].clone()
            case _:
                return torch.cat(parts, output.dim) if len(parts) > 1 else parts[0].clone()

    def _parts(self, output: OutputSpec) -> list[torch.Tensor]:
        """What each micro-batch made of an output."""
        assert self.executor is not None
        env, parts = self.executor.env, []
        for j in range(self.num_micro_batches):
            if output.combine == "loss":
                parts.append(env[Value("loss", micro_batch=j)])
            elif output.is_layer_input:
                parts.append(env[Value("x", output.unit, j)])
            else:
                parts.append(env[Value("y", output.unit, j)][output.index])
        return parts

    # Gradients -------------------------------------------------------------------------------------------------------

    def _dy(self, gradients: Gradients, outside: frozenset[Any]) -> dict[Value, Any]:
        """The outputs' gradients, cut as the outputs were put together."""
        arrived = {id(output): gradient for output, gradient in zip(self.made, gradients, strict=True)}
        dy: dict[Value, Any] = {}
        offsets = dict.fromkeys(arrived, 0)
        for j, layout in enumerate(self.layouts):
            slices: dict[tuple[str, Any, int], torch.Tensor] = {}
            for output, own in zip(self.layout.outputs, layout.outputs, strict=True):
                gradient = arrived.get(id(output))
                if gradient is None or own.spec is None:
                    continue
                if output.combine == "concat":
                    length = own.spec.shape[output.dim]
                    gradient = gradient.narrow(output.dim, offsets[id(output)], length)
                    offsets[id(output)] += length
                elif output.combine == "same" and j > 0:
                    continue
                kind = "loss" if output.combine == "loss" else "x" if output.is_layer_input else "y"
                key = (kind, output.unit, output.index)
                slices[key] = slices[key] + gradient if key in slices else gradient
            dy |= self._dy_of(j, layout, slices, outside)
        return dy

    def _dy_of(
        self, j: int, layout: SpecializedModel, slices: Mapping[Any, torch.Tensor], outside: frozenset[Any]
    ) -> dict[Value, Any]:
        head = layout.split.units[-1]
        places = [(kind, EPILOGUE, head.results[:index].count(kind)) for index, kind in enumerate(head.results)]
        given = []
        for index in head.differentiated:
            spec, slice_ = head.result_specs[index], slices.get(places[index])
            given.append(
                torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
                if slice_ is None
                else slice_.to(spec.dtype)
            )
        dy: dict[Value, Any] = {Value("dy", EPILOGUE, j): tuple(given)}
        for unit in outside - {EPILOGUE}:
            dy[Value("dy", unit, j)] = slices["x", unit, 0]
        return dy

    def _collect(self, env: Mapping[Value, Any]) -> list[torch.Tensor | None]:
        """Gradients of the trained arguments; a parameter that several units share gets the sum."""
        sums: dict[Any, torch.Tensor] = {}
        for value, content in env.items():
            if value.kind == "dw":
                assert isinstance(content, Accumulator)
                for key, gradient in content.sums.items():
                    sums[key] = sums[key].add_(gradient) if key in sums else gradient
        gradients: list[torch.Tensor | None] = []
        for index, arg in enumerate(self.args):
            if isinstance(arg, torch.Tensor) and arg.requires_grad:
                whole = sums.get(index) if index in sums else self._batch_gradient(index, arg, sums)
                gradients.append(None if whole is None else whole.to(arg.dtype))
        return gradients

    def _batch_gradient(self, index: int, arg: torch.Tensor, sums: Mapping[Any, torch.Tensor]) -> torch.Tensor | None:
        parts = [sums.get((index, j)) for j in range(self.num_micro_batches)]
        if all(part is None for part in parts):
            return None
        sizes = [part.inputs[index].shape for part in self.units.micro_batches]
        return torch.cat([p if p is not None else arg.new_zeros(s) for p, s in zip(parts, sizes, strict=True)])


class _Step(torch.autograd.Function):
    """The autograd node of one call."""

    @staticmethod
    def forward(ctx: Any, call: Call, *trained: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = call.forward()
        ctx.call = call
        ctx.num_trained = len(trained)
        ctx.set_materialize_grads(False)
        # All that the recomputation reads: the usual errors where it is used twice, or was changed in place meanwhile.
        ctx.save_for_backward(*(arg for arg in call.args if isinstance(arg, torch.Tensor)))
        made = zip(outputs, call.made, strict=True)
        ctx.mark_non_differentiable(
            *(tensor for tensor, output in made if not (output.spec and output.spec.requires_grad))
        )
        return tuple(outputs)

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
        outside = ctx.call.outside(gradients)
        call: Call = ctx.call
        ctx.call = None  # a loss that lives on keeps nothing of its step
        return (None, *call.backward(gradients, outside))
