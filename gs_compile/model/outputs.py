"""outputs: the model's outputs are put together from micro-batches, and their gradients are cut into micro-batches."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gs_compile.capture.graph import Captured, Length, OutputSpec, layer_name, output_values
from gs_compile.capture.internals import watches_gradient
from gs_compile.capture.reached import made_of
from gs_compile.capture.specialize import OfBatch
from gs_compile.codegen.compiled import SpecializedModel
from gs_compile.errors import OutputGradientError
from gs_compile.program.ir import EPILOGUE, Unit, Value
from gs_compile.runtime.units import Accumulator, CompiledUnits

Gradients = Sequence[Tensor | None]
LOSS_ALONE: ContextVar[bool] = ContextVar("loss alone", default=False)  # of the calls that this thread makes


@contextmanager
def loss_alone() -> Iterator[None]:
    """In the block compiled models that compute a loss return it alone, also under torch.no_grad(): their other outputs
    are None, and logits that would be large are never in memory. Other threads' calls return what their options say.
    """
    before = LOSS_ALONE.set(True)
    try:
        yield
    finally:
        LOSS_ALONE.reset(before)


@dataclass(frozen=True)
class Outputs:
    """The outputs of one call; `models` are those of its micro-batches."""

    models: Sequence[SpecializedModel]
    args: Sequence[Any]

    @property
    def made(self) -> Sequence[OutputSpec]:
        """The outputs that the step computes."""
        return self.models[0].split.made

    def collect(self, env: Mapping[Value, Any]) -> list[Tensor]:
        """The contents of `made`, from the values of a step."""
        return [_combined(output, [_part(output, env, j) for j in range(len(self.models))]) for output in self.made]

    def assemble(self, made: Sequence[Tensor]) -> list[Any]:
        """All that the model returns."""
        computed, num_samples = iter(made), sum(model.micro_batch_size for model in self.models)
        outputs: list[Any] = []
        for output in self.models[0].split.outputs:
            given = self.args[output.index] if output.combine == "input" else output.value
            if isinstance(given, OfBatch):
                given = given.whole(num_samples)
            elif isinstance(given, Length):  # of another type than the model's it would be captured anew
                given = int(given)
            outputs.append(given if output.spec is None else next(computed))
        return outputs

    # Gradients -------------------------------------------------------------------------------------------------------

    def loss_gradient(self, gradients: Gradients) -> Tensor | None:
        """The gradient that has come to the loss that the model computes."""
        return next((g for output, g in zip(self.made, gradients, strict=True) if output.kind == "loss"), None)

    def outside(self, gradients: Gradients, *, is_head_apart: bool) -> frozenset[Unit]:
        """The units that get a gradient of which the head's own backward did not know, for `StepShape.outside`.

        is_head_apart: the head's backward has not run together with its forward.
        """
        arrived = [output for output, gradient in zip(self.made, gradients, strict=True) if gradient is not None]
        if not is_head_apart and all(output.kind == "loss" for output in arrived):
            return frozenset()
        return frozenset({EPILOGUE} | {output.unit for output in arrived if output.kind == "x"})

    def refuse_watched(self, returned: Sequence[Tensor | None], gradients: Gradients, captured: Captured) -> None:
        """Raise `OutputGradientError` if an output has a gradient hook, and a gradient comes to outputs made from it.

        returned: the outputs as the user has them, if they are alive.
        """
        if not (watched := [number for number, each in enumerate(returned) if watches_gradient(each)]):
            return
        pairs = zip(output_values(captured.module), self.models[0].split.outputs, strict=True)
        nodes = [node for node, output in pairs if output.spec is not None]
        given = [node for node, gradient in zip(nodes, gradients, strict=True) if gradient is not None]
        for node in (nodes[number] for number in watched):
            if node in made_of(other for other in given if other is not node):
                raise OutputGradientError(
                    f"output `{node.name}` of the model has a hook on its gradient, or retains it, and a gradient "
                    "arrives for another output that is computed from it: gradients inside of the call are not visible "
                    "outside. Compute the other output outside of the model, or run this step without the backend. "
                    "Nothing was updated"
                )

    def untapped(self, gradients: Gradients) -> frozenset[int]:
        """The numbers of the outputs that get a gradient and are made inside a layer or the embedding.

        Raises `OutputGradientError` if blocks are cut into several layers, which pass on hidden states only.
        """
        split = self.models[0].split
        numbers = [number for number, output in enumerate(split.outputs) if output.spec is not None]
        units = {
            number: output.unit
            for number, output, gradient in zip(numbers, self.made, gradients, strict=True)
            if gradient is not None and output.kind == "y" and output.unit != EPILOGUE
        }
        if units and split.block_cut:
            unit = next(iter(units.values()))
            maker = layer_name(unit, split.block_cut) if isinstance(unit, int) else "the embedding"
            raise OutputGradientError(
                f"a gradient arrived for an output made inside {maker} (a cache or attention weights), but this "
                "schedule cuts blocks into parts that only pass hidden states on: leave the option schedule out"
            )
        return frozenset(units)

    def cut(self, gradients: Gradients, outside: frozenset[Unit]) -> dict[Value, Any]:
        """The outputs' gradients by micro-batch: values `dy` of the units in `outside`, zeros if none arrived."""
        dy: dict[Value, Any] = {}
        starts = dict.fromkeys(range(len(gradients)), 0)  # of each output, where the next micro-batch has its part
        for j, model in enumerate(self.models):
            slices: dict[tuple[str, Any, int], Tensor] = {}
            for number, (output, gradient) in enumerate(zip(model.split.made, gradients, strict=True)):
                if gradient is None or (output.combine == "same" and j > 0):
                    continue
                if output.combine == "concat" and output.spec is not None:
                    length = output.spec.shape[output.dim]
                    gradient = _rows(output, gradient, starts[number], length)
                    starts[number] += length
                key = (output.kind, output.unit, output.index)
                slices[key] = slices[key] + gradient if key in slices else gradient
            dy[Value("dy", EPILOGUE, j)] = _for_head(model, slices)
            for output in model.split.made:
                if output.kind == "x" and output.unit in outside:
                    arrived = slices.get((output.kind, output.unit, output.index))
                    dy[Value("dy", output.unit, j)] = _zeros(output) if arrived is None else arrived
        return dy

    def reached(self, gradients: Gradients) -> frozenset[int]:
        """The indices of the trained arguments that get a gradient, if the outputs have got these gradients."""
        return self.models[0].split.reached(frozenset(i for i, g in enumerate(gradients) if g is not None))

    def argument_gradients(
        self, env: Mapping[Value, Any], units: CompiledUnits, trained: Sequence[int], reached: Container[int]
    ) -> list[Tensor | None]:
        """Gradients of the trained arguments, by number; a parameter that several units share gets the sum.

        None for a parameter on the tiers, whose gradient goes to its update, and for those whose index is not in
        `reached`.
        """
        sums: dict[Any, Tensor] = {}
        for value, content in env.items():
            if value.kind == "dw":
                assert isinstance(content, Accumulator)
                for key, gradient in content.sums.items():
                    sums[key] = sums[key].add_(gradient) if key in sums else gradient
        gradients, batch = list[Tensor | None](), self.models[0].batch
        for index in trained:
            whole = _of_batch(index, self.args[index], units, batch[index]) if index in batch else sums.get(index)
            gradients.append(None if whole is None or index not in reached else whole.to(self.args[index].dtype))
        return gradients


def _part(output: OutputSpec, env: Mapping[Value, Any], micro_batch: int) -> Tensor:
    """The part of an output that a micro-batch has made."""
    content = env[Value(output.kind, None if output.kind == "loss" else output.unit, micro_batch)]
    part: Tensor = content[output.index] if output.kind == "y" else content
    return part


def _combined(output: OutputSpec, parts: list[Tensor]) -> Tensor:
    assert output.spec is not None
    if len(parts) == 1 or output.combine == "same":
        return parts[0].clone()
    if output.combine == "concat":
        turns = zip(*(_turns(output, part) for part in parts), strict=True)
        return torch.cat([rows for turn in turns for rows in turn], output.dim)
    return torch.stack(parts).sum(0).to(output.spec.dtype)


def _turns(output: OutputSpec, rows: Tensor) -> Sequence[Tensor]:
    """The rows of an output in parts, each of which has rows of all samples."""
    number = rows.shape[output.dim] // sum(output.runs)
    return rows.split([run * number for run in output.runs], output.dim) if len(output.runs) > 1 else (rows,)


def _rows(output: OutputSpec, whole: Tensor, start: int, length: int) -> Tensor:
    """A micro-batch's rows of an output of all samples, of which earlier micro-batches have the first `start`."""
    places = [(run * start // sum(output.runs), run * length // sum(output.runs)) for run in output.runs]
    turns = zip(_turns(output, whole), places, strict=True)
    found = [rows.narrow(output.dim, first, number) for rows, (first, number) in turns]
    return found[0] if len(found) == 1 else torch.cat(found, output.dim)


def _zeros(output: OutputSpec) -> Tensor:
    assert output.spec is not None
    return torch.zeros(output.spec.shape, dtype=output.spec.dtype, device=output.spec.device)


def _for_head(model: SpecializedModel, slices: Mapping[Any, Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients of the head's differentiated results for one micro-batch; None where none arrived."""
    head = model.split.by_unit[EPILOGUE]
    gradients = []
    for index in head.differentiated:
        kind = head.results[index]
        found = slices.get((kind, EPILOGUE, head.results[:index].count(kind)))
        gradients.append(None if found is None else found.to(head.result_specs[index].dtype))
    return tuple(gradients)


def _of_batch(index: int, arg: Tensor, units: CompiledUnits, dim: int) -> Tensor | None:
    """The gradient of an input of the batch, from those of its micro-batches, along the dimension of the samples."""
    parts = [units.of_batch.sums.get((index, j)) for j in range(len(units.micro_batches))]
    if all(part is None for part in parts):
        return None
    sizes = [part.inputs[index].shape for part in units.micro_batches]
    return torch.cat([p if p is not None else arg.new_zeros(s) for p, s in zip(parts, sizes, strict=True)], dim)
