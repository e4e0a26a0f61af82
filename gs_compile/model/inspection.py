"""inspect: everything that the backend made of a compiled model.

    inspection = gs_compile.inspect(model)      # after one call of the model
    print(inspection)                           # sizes, classes, the loss, and the program that runs
    print(inspection.program("vertical"))       # the same step before the other passes
    inspection.classes[0].backward.print_readable()

The first step of a capture is logged, in one line with TORCH_LOGS="gs_compile", as a program with "+gs_compile"; with
TORCH_TRACE=folder it has artifacts gs_compile_program, gs_compile_layers and gs_compile_loss, for tlparse.

(The file is not called inspect.py: importing that would put the module where `gs_compile.inspect` is.)
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from textwrap import indent
from typing import Any

import torch
from torch import fx

from gs_compile.capture.graph import Source, TensorSpec, UnitGraph
from gs_compile.capture.internals import add_artifact
from gs_compile.capture.nondeterministic import Nondeterministic
from gs_compile.codegen.compiled import Compilation, Step, compilations_of
from gs_compile.codegen.pieces import InPieces
from gs_compile.errors import InspectionError
from gs_compile.machine import format_bytes
from gs_compile.planner.request import several
from gs_compile.planner.summary import on_tokens
from gs_compile.program.fx import graph_module
from gs_compile.program.ir import EPILOGUE, PROLOGUE, Program, StepShape, Unit, height
from gs_compile.program.text import timetable

log = logging.getLogger(__name__)

ANSWERS = {"replaced": "takes another kernel", "refused": "raises", "unknown": "nothing, as it is not torch's"}


def inspect(model: torch.nn.Module) -> Inspection:
    """Show what the greedysnake backend made of `model`: its latest capture for training, or else its latest capture.

    `model` was compiled in place or is what torch.compile returned. Raises `InspectionError` if it has not been called
    since.
    """
    known = {id(compilation): compilation for p in model.parameters() for compilation in compilations_of.get(p, ())}
    compilations = [compilation for compilation in reversed(known.values()) if compilation.latest]
    if not compilations:
        raise InspectionError(
            f"there is nothing to inspect: this {type(model).__name__} has not run with the greedysnake backend. "
            'Compile it, model.compile(backend="greedysnake"), and call the model once with inputs of the size you '
            "are interested in"
        )
    compilations.sort(key=lambda compilation: not _latest(compilation).shape.training)
    return Inspection(compilations[0], tuple(compilations))


@dataclass(frozen=True)
class UnitClass:
    """Units of equal code, and their code: one forward and one backward, called with each unit's own parameters."""

    units: tuple[Unit, ...]
    graph: UnitGraph  # of the first: its module, in torch functions, and what is bound to the placeholders
    inputs: tuple[str, ...]  # of all graphs, as the first unit binds them: "x", "side 0", "h.0.mlp.c_fc.weight"
    code: InPieces

    @property
    def forward(self) -> fx.GraphModule:
        """The ATen graph of the forward; traced now if no call has needed it yet."""
        return self.code.graph("forward")

    @property
    def backward(self) -> fx.GraphModule | None:
        """The ATen graph of the forward again and its backward; None where nothing has a gradient.

        A layer's takes the gradient of its result after its other inputs; that of a head with a loss starts from the
        loss. Returns the gradients of the inputs that have one, the head's after its results.
        """
        return self.code.graph(self.code.last_name) if self.code.is_trained else None

    @property
    def num_operations(self) -> int:
        """Operations of the forward as the model's code has them, views included."""
        return sum(node.op.startswith("call_") for node in self.graph.module.graph.nodes)


@dataclass
class Inspection:
    """One capture of a model, and the latest step that has run with it.

    captured: the model's forward as Dynamo captured it, with a symbolic batch dimension.
    specialized: the same for the size of one micro-batch, its loss rewritten to a share of the whole batch's.
    classes: the classes of the layers; one, if all layers are equal. `uniformity` says how they differ.
    prologue, epilogue: the part before the layers (the embedding) and after them (the final norm, the head, the loss).
    loss_terms: how the shares of micro-batches were made to add up to the loss of the whole batch, operation by
        operation; empty if the micro-batch is the whole batch.
    shape: the parts of the step.
    programs: the step program after every pass; the last is the one that runs. `str` of a program is its text.
    num_layers: of the program; a schedule may make several of each block, such as its attention half and the other.
    micro_batch_size: samples in a micro-batch; the last of the `num_micro_batches` of a batch may have fewer.
    checkpoint: the input of the first layer for one micro-batch; layers of another stack may have another.
    seconds_in_passes: spent so far in the passes over this capture, for all sizes with which it was called.
    seconds_in_code: spent so far on tracing and compiling the units' code, which equal units of all captures share.
    """

    compilation: Compilation
    compilations: tuple[Compilation, ...]  # all captures of the model, in the order of `captures`

    def __post_init__(self) -> None:
        step = _latest(self.compilation)
        self._model = model = step.model
        self.captured = self.compilation.captured.module
        self.specialized = model.separated.module
        self.classes = tuple(map(self._class, model.uniform.layer_classes))
        self.prologue, self.epilogue = self._class((PROLOGUE,)), self._class((EPILOGUE,))
        self._unit_classes = (self.prologue, *self.classes, self.epilogue)
        self.uniformity = model.uniform.report
        self.loss_terms = model.separated.terms
        self.shape, self.programs = step.shape, step.snapshots
        self.num_layers = model.split.num_layers
        self.num_micro_batches = self.programs[-1].num_micro_batches
        self.micro_batch_size = model.micro_batch_size
        self.checkpoint = model.checkpoints[0]
        self.seconds_in_passes = self.compilation.seconds
        codes = {code for each in (*self.compilation.models.values(), model) for code in each.codes.values()}
        self.seconds_in_code = sum(code.seconds for code in codes)

    def __repr__(self) -> str:
        return f"<Inspection: {self.headline}>"

    def __str__(self) -> str:
        return self.report()

    @property
    def captures(self) -> tuple[Inspection, ...]:
        """Every capture of the model (lengths, gradient modes): those that train first, of these the latest first."""
        return tuple(replace(self, compilation=compilation) for compilation in self.compilations)

    @property
    def derivation(self) -> str:
        """`loss_terms` as text: a line for each operation, and one for the user's line that it stands in."""
        lines: list[str] = []
        for place, terms in groupby(self.loss_terms, lambda term: term.where):
            lines.append(f"at {place.rpartition('site-packages/')[2]}")
            lines += [f"  {term.node}: {term.kind}: {term.why}" for term in terms]
        return "\n".join(lines) or "the micro-batch is the whole batch: nothing to combine"

    def program(self, after: str | None = None) -> Program:
        """The step program after the pass called `after`, or the one that runs."""
        known = {program.made_by: program for program in self.programs}
        if after is not None and after not in known:
            raise InspectionError(f"no pass called {after!r} made this program; its passes: {', '.join(known)}")
        return self.programs[-1] if after is None else known[after]

    def timetable(self, after: str | None = None) -> str:
        """The step side by side: one row a compute operation, one column a lane."""
        return timetable(self.program(after))

    def graph_module(self, after: str | None = None) -> fx.GraphModule:
        """The step program for tools that read torch.fx."""
        return graph_module(self.program(after))

    @property
    def tiers(self) -> str:
        """Where everything is stored, with the planned peaks; all is on the device without an optimizer of ours."""
        return _latest(self.compilation).describe_tiers()

    def parameters(self, *units: Unit) -> dict[int, TensorSpec]:
        """The parameters that `units` (without any: the whole model) read, by index among the captured graph's inputs:
        each once, wherever it is tied to.
        """
        chosen = [graph for graph in self._model.split.units if graph.unit in units or not units]
        return {index: spec for graph in chosen for index, spec in graph.parameters(self.compilation.captured).items()}

    # For people ------------------------------------------------------------------------------------------------------

    @property
    def headline(self) -> str:
        """Layers, classes, micro-batches and sizes in one line."""
        num_parameters = sum(spec.numel for spec in self.parameters().values())
        return (
            f"{several(self.num_layers, self._layer)} of {several(len(self.classes), 'class')}, "
            f"{several(self.num_micro_batches)} of {self.micro_batch_size}, "
            f"{num_parameters:,} parameters of {format_bytes(self._nbytes())}, "
            f"checkpoints of {format_bytes(self.checkpoint.nbytes)}"
        )

    def report(self, after: str | None = None) -> str:
        """Sizes, classes, the derivation of the loss, times, and the program after the pass `after` or all passes."""
        rows = zip(self._names, self._unit_classes, strict=True)
        return "\n".join(
            [
                self.headline,
                *(f"  {name + ':':<19} {self._size(unit)}" for name, unit in rows),
                *self._pieces,
                f"  {'checkpoint:':<19} {self._checkpoints} for each {self._layer} and micro-batch",
                f"step: {_describe(self.shape)}",
                self.uniformity,
                "loss of the whole batch:",
                indent(self.derivation, "  "),
                "what may give other bits in another run on a GPU, and what deterministic=True does:",
                indent("\n".join(self._nondeterministic) or "nothing that torch knows of", "  "),
                f"seconds: {self.seconds_in_passes:.2f} in passes, {self.seconds_in_code:.2f} in compiling code",
                "tiers:",
                indent(self.tiers, "  "),
                "",
                str(self.program(after)),
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """The contents of `str(inspection)` as numbers and strings, for JSON."""
        return {
            "num_layers": self.num_layers,
            "halved": self._model.split.layers_per_block > 1,
            "num_micro_batches": self.num_micro_batches,
            "micro_batch_size": self.micro_batch_size,
            "parameters_nbytes": self._nbytes(),
            "checkpoint": {"spec": str(self.checkpoint), "nbytes": self.checkpoint.nbytes},
            "units": [
                {"units": list(each.units), "parameters_nbytes": self._nbytes(each.units[0])}
                for each in self._unit_classes
            ],
            "differences": list(self._model.uniform.differences),
            "loss": [asdict(term) for term in self.loss_terms],
            "nondeterministic": {
                name: [each._asdict() for each in found] for name, found in self.nondeterministic.items()
            },
            "shape": {key: _in_order(value) for key, value in asdict(self.shape).items()},
            "programs": {program.made_by: str(program) for program in self.programs},
            "seconds": {"passes": self.seconds_in_passes, "code": self.seconds_in_code},
        }

    @property
    def nondeterministic(self) -> dict[str, tuple[Nondeterministic, ...]]:
        """By class of units, as `report` names it, the operators that may give other bits in another run on a GPU.

        With the model's line, and what the option `deterministic` does about it: has another kernel, or raises.
        """
        return {name: each.code.nondeterministic for name, each in zip(self._names, self._unit_classes, strict=True)}

    @property
    def _nondeterministic(self) -> list[str]:
        """A line for each operator of `nondeterministic`."""
        return [
            f"{name}: {each.operator}: {ANSWERS[each.answer]}; {each.where.rpartition('site-packages/')[2]}"
            for name, found in self.nondeterministic.items()
            for each in found
        ]

    @property
    def _names(self) -> list[str]:
        """Of the classes of units."""
        layer, joints = self._layer.removesuffix("-layer"), self._model.split.joints
        layers = [
            "joint" if joints.issuperset(each.units) else f"{layer} of class {index}"
            for index, each in enumerate(self.classes)
        ]
        return ["embedding", *layers, "head"]

    @property
    def _checkpoints(self) -> str:
        """``float32[2, 5, 32]``, or those of all layers in their order where they differ."""
        return " or ".join(dict.fromkeys(map(str, self._model.checkpoints[:-1])))

    @property
    def _pieces(self) -> list[str]:
        """How units run in pieces, a line for each class that does."""
        classes = [("head", self.epilogue), *((f"class {index}", each) for index, each in enumerate(self.classes))]
        lines = []
        for name, each in classes:
            code = self._model.counted[each.units[0]]
            if size := code.tokens_per_piece:
                lines.append(f"  {'pieces:':<19} the {name} runs {on_tokens(size, code.on_all)}")
            elif code.whole_reason:
                lines.append(f"  {'pieces:':<19} the {name} runs on all tokens at a time: {code.whole_reason}")
        return lines

    def _nbytes(self, *units: Unit) -> int:
        return sum(spec.nbytes for spec in self.parameters(*units).values())

    def _size(self, unit: UnitClass) -> str:
        return f"{several(unit.num_operations, 'operation')}, {format_bytes(self._nbytes(unit.units[0]))}"

    @property
    def _layer(self) -> str:
        """The word for a layer of the program."""
        cut = self._model.split.block_cut
        return f"{cut.part}-layer" if cut else "layer"

    def _class(self, units: tuple[Unit, ...]) -> UnitClass:
        graph = self._model.split.by_unit[units[0]]
        return UnitClass(units, graph, tuple(map(self._name, graph.sources)), self._model.codes[units[0]])

    def _name(self, source: Source) -> str:
        if source.kind == "input":
            return self.compilation.captured.inputs[source.index].path
        return f"{source.kind} {source.index}" if source.kind in ("side", "tap", "whole", "total") else source.kind


def report(compilation: Compilation) -> None:
    """Log the latest step of `compilation`, and add its artifacts to torch's structured trace where one is written."""
    inspection = Inspection(compilation, (compilation,))
    log.info("%s", inspection.headline)
    log.debug("%s", inspection.program())
    add_artifact("gs_compile_program", lambda: str(inspection.program()), compilation.compile_id)
    add_artifact("gs_compile_layers", lambda: inspection.uniformity, compilation.compile_id)
    add_artifact("gs_compile_loss", lambda: inspection.derivation, compilation.compile_id)


def _latest(compilation: Compilation) -> Step:
    assert compilation.latest is not None
    return compilation.latest


def _describe(shape: StepShape) -> str:
    """``forward and backward, the head computes the loss, side inputs of e``"""
    units = {
        name: " ".join(map(str, _in_order(getattr(shape, name))))
        for name in ("joints", "sides", "emits", "outside", "frozen")
    }
    parts = {
        "forward and backward" if shape.training else "forward alone": True,
        "the head computes the loss": shape.has_loss,
        "divided by a total over the whole batch": shape.has_total,
        f"stacks joined by {units['joints']}": shape.joints,
        f"side inputs of {units['sides']}": shape.sides,
        f"other outputs of {units['emits']}": shape.emits,
        f"gradients from outside for {units['outside']}": shape.outside,
        f"frozen: {units['frozen']}": shape.frozen,
    }
    return ", ".join(part for part, holds in parts.items() if holds)


def _in_order(value: Any) -> Any:
    """Units in their order; other values as they are."""
    return sorted(value, key=height) if isinstance(value, frozenset) else value
