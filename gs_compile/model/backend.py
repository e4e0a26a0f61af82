"""The backend: ``torch.compile(model, backend="greedysnake", options={"micro_batch_size": 2})``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from gs_compile.capture.dynamo import capture, current_compile_id, ignore_logging, note_last_compile
from gs_compile.capture.graph import Captured
from gs_compile.codegen.compiled import Compilation, SpecializedModel, compilations_of, is_float_scalar
from gs_compile.errors import GreedySnakeError, NothingRequiresGradError
from gs_compile.model.first_call import detach, engine_for
from gs_compile.model.micro_batches import cut_batch, lengths_of
from gs_compile.model.residency import roll_back
from gs_compile.model.step import Call
from gs_compile.options import Options
from gs_compile.runtime.units import CompiledUnits

ignore_logging()


def greedysnake(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | Options | None = None,
) -> Callable[..., Any]:
    """Compile a model's graph, which Dynamo hands over; returns what runs in its place.

    An error of this package is raised at the model's call, as itself: raised here, Dynamo would wrap it in one of its
    own.
    """
    try:
        checked = Options.of(options, mode)
        return CompiledModel(capture(module, example_inputs, partial(detach, options=checked)), checked)
    except GreedySnakeError as error:
        kind, message = type(error), str(error)  # not the error: its traceback holds the model
    compile_id = current_compile_id()

    def refuse(*args: Any) -> Any:
        roll_back(args)
        refusal = kind(message)
        note_last_compile(refusal, compile_id)
        raise refusal

    return refuse


class CompiledModel:
    """A captured model that runs layer-major; one for each graph that Dynamo captures."""

    def __init__(self, captured: Captured, options: Options) -> None:
        self.compilation = Compilation(captured, options)

    def __call__(self, *args: Any) -> list[Any]:
        """The model's outputs for the arguments of the captured graph."""
        try:
            call = self._call(args)
        except BaseException as error:
            roll_back(args)
            note_last_compile(error, self.compilation.compile_id)
            raise
        return call.run()

    def _call(self, args: Sequence[Any]) -> Call:
        """The call, before anything has run."""
        self._register(args)
        inputs = self.compilation.captured.inputs
        batch = [index for index, entry in enumerate(inputs) if entry.role == "batch"]
        sizes = {entry.name: int(arg) for entry, arg in zip(inputs, args, strict=True) if entry.role == "size"}
        lengths = lengths_of(self.compilation, int(args[batch[0]].shape[0]))
        layouts = [self.compilation.layout(length, sizes, alone=len(lengths) == 1) for length in lengths]
        training = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        if torch.is_grad_enabled() and not training:
            _refuse_a_loss(layouts[0])
        parts = list(cut_batch(args, batch, lengths, layouts))
        seed = int(torch.randint(2**62, (), device="cpu")) if any(layout.draws_random for layout in layouts) else None
        units = CompiledUnits(parts, seed)
        engine = engine_for(self.compilation, layouts, args)
        return Call(self.compilation, layouts, args, units, training, engine)

    def _register(self, args: Sequence[Any]) -> None:
        """Make this known for the model that calls: Dynamo runs one capture for all models that are alike."""
        for entry, arg in zip(self.compilation.captured.inputs, args, strict=True):
            if entry.role == "parameter":
                known = compilations_of.setdefault(arg, [])
                if any(compilation is self.compilation for compilation in known):
                    return
                known.append(self.compilation)


def _refuse_a_loss(layout: SpecializedModel) -> None:
    if any(output.spec is not None and is_float_scalar(output.spec) for output in layout.outputs):
        raise NothingRequiresGradError(
            "the model computes a loss, but no parameter requires a gradient: unfreeze what is to be trained "
            "(requires_grad_()), or evaluate under torch.no_grad()"
        )
