"""A captured model as compiled units and step programs: the passes in order, each result kept for its sizes.

captured --specialize--> --loss--> --split--> --uniform--> --differentiate-->  units' code
                                                                 vertical, snake, free -->  step program
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import product, takewhile
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from gs_compile.capture.chosen import chosen_later
from gs_compile.capture.dynamo import current_compile_id
from gs_compile.capture.exchange import first_exchange
from gs_compile.capture.graph import Captured, TensorSpec, UnitGraph, output_values
from gs_compile.capture.listed import listed_samples
from gs_compile.capture.loss import Separated, loss
from gs_compile.capture.off_meta import off_meta
from gs_compile.capture.specialize import specialize
from gs_compile.capture.split import Split, split
from gs_compile.capture.tail import Tail, cut_tail
from gs_compile.capture.uniform import Uniform, structure, uniform
from gs_compile.codegen.codes import MOST_MODELS, code_of, codes_of, global_settings, let_oldest_go
from gs_compile.codegen.costs import AllSizes
from gs_compile.codegen.levels import SavedLevel
from gs_compile.codegen.pieces import InPieces
from gs_compile.codegen.side_by_side import Wanted, compile_all
from gs_compile.errors import UniformityWarning
from gs_compile.options import Options
from gs_compile.passes.baselines.registry import SCHEDULES
from gs_compile.passes.baselines.spec import ScheduleSpec
from gs_compile.passes.lower import StepSpec, lower
from gs_compile.placement.boundaries import BoundaryNbytes, shortest
from gs_compile.placement.levels import Level
from gs_compile.placement.workload import UnitSize
from gs_compile.program.ir import EPILOGUE, PROLOGUE, TIED, Program, StepShape, Unit, height
from gs_compile.schedules import BY_MICRO_BATCH
from gs_compile.version import __version__

# For inspection: the compilations of each parameter's model. Keyed by identity: `==` of two tensors is a tensor.
compilations_of: MutableMapping[torch.nn.Parameter, list[Compilation]] = WeakTensorKeyDictionary()

MOST_PROGRAMS = 64  # of one capture: numbers of micro-batches, in training and in evaluation


@dataclass(frozen=True, eq=False)
class SpecializedModel:
    """A captured model at one micro-batch size: its graph, its units and their code.

    batch: the batch dimension of each input of the captured graph that has one, by the input's index.
    costs: what is known about its units at all micro-batch sizes.
    loss_alone: it computes only the loss, none of the model's other outputs, also in an evaluation.
    whole_numbers: the integer inputs of its first micro-batch, by index, on the CPU. Code is timed with them, because
        made-up ones could lead to invalid indices, such as of the last token of an empty sequence.
    """

    micro_batch_size: int
    separated: Separated
    split: Split
    uniform: Uniform
    options: Options
    batch: Mapping[int, int]
    sizes: Mapping[str, int] = field(default_factory=dict)  # of the call
    alone: bool = False  # the micro-batch is the whole batch
    costs: dict[Unit, AllSizes] = field(default_factory=dict, repr=False)
    loss_alone: bool = False
    whole_numbers: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def codes(self) -> Mapping[Unit, InPieces]:
        return codes_of(self.split.units, self.uniform.keys, self.options)

    @cached_property
    def counted(self) -> Mapping[Unit, InPieces]:
        """The code whose costs are counted; a model on the meta device counts as if it were on a CPU."""
        if not any(unit.is_meta for unit in self.split.units):
            return self.codes
        as_traced = _with_expert(self.options, compiler="eager")
        codes = codes_of(list(map(off_meta, self.split.units)), self.uniform.keys, as_traced)
        for unit, code in codes.items():
            code.costs = code.costs or self.costs.setdefault(unit, AllSizes()).of(code.unit, self.micro_batch_size)
        return codes

    def note_inputs(self, inputs: Mapping[int, torch.Tensor]) -> None:
        """Set `whole_numbers`, if this is its first micro-batch."""
        for index, each in inputs.items() if not self.whole_numbers else ():
            has_numbers = not (each.dtype == torch.bool or each.is_floating_point() or each.is_complex())
            if has_numbers and not each.is_meta:
                self.whole_numbers[index] = each.to("cpu", copy=True)

    def in_pieces(self, num_tokens: int | None) -> SpecializedModel:
        """The model with layers that run on `num_tokens` at a time, as a plan says; None: as the options say."""
        if num_tokens is None:
            return self
        if num_tokens not in self._in_pieces:
            options = _with_expert(self.options, layer_tokens=num_tokens)
            self._in_pieces[num_tokens] = replace(self, options=options)
        return self._in_pieces[num_tokens]

    @cached_property
    def _in_pieces(self) -> dict[int, SpecializedModel]:
        return {}

    @cached_property
    def shape(self) -> StepShape:
        """The parts of a training step of this model."""
        graphs = self.split.units
        return self._shape({g.unit for g in graphs if any(g.sources[i].kind == "input" for i in g.differentiable)})

    def shape_of(self, sizes: Iterable[UnitSize], tied: Set[Unit], *, training: bool = True) -> StepShape:
        """The parts of a step whose parameters on the tiers are those of `sizes`; tied: the units that share some."""
        trained = {size.unit for size in sizes if size.trained_numels}
        shape = self._shape(trained | (tied if TIED in trained else set()))
        frozen = frozenset({TIED, *self.split.by_unit} - trained)
        found = replace(shape, tied=frozenset(tied), frozen=frozen)
        return found if training else found.forward_alone

    def _shape(self, trained: Set[Unit]) -> StepShape:
        """The parts of a step in which the parameters of the units `trained` have gradients.

        The head's backward is separate from its forward if the user computes the loss, or scales it.
        """
        units, sides = self.split.by_unit, self.split.sides
        of_batch = {unit for unit in sides if units[unit].differentiates(self.batch)}
        first = min((trained & units.keys()) | of_batch, key=height, default=EPILOGUE)
        trains, has_loss = bool(trained & units.keys()), "loss" in units[EPILOGUE].results
        is_head_apart = trains and (not has_loss or self.scales_gradients)
        return StepShape(
            training=trains,
            has_loss=has_loss,
            has_total=self.split.count is not None,
            joints=self.split.joints,
            sides=frozenset(unit for unit, specs in sides.items() if specs),
            side_gradients=frozenset(u for u, specs in sides.items() if any(spec.requires_grad for spec in specs)),
            emits=frozenset(u for u, graph in units.items() if "y" in graph.results),
            outside=frozenset({EPILOGUE} if is_head_apart else ()),
            frozen=frozenset(units.keys() - trained),
            first_grad=first,
            input_gradient=bool(of_batch),
        )

    @cached_property
    def checkpoints(self) -> tuple[TensorSpec, ...]:
        """The inputs of the layers and of the epilogue."""
        return tuple(graph.result_specs[graph.results.index("x")] for graph in self.split.units[:-1])

    @property
    def num_tokens(self) -> int:
        """Tokens of a micro-batch, with padding; samples, if a layer's input has no dimension of tokens."""
        return prod(self.checkpoints[0].shape[:-1])

    @cached_property
    def x_nbytes(self) -> BoundaryNbytes:
        """Bytes of the checkpoints of one micro-batch."""
        return shortest([spec.nbytes for spec in self.checkpoints])

    @cached_property
    def side_nbytes(self) -> BoundaryNbytes:
        """Bytes of all side inputs of one micro-batch, at each boundary above the unit that makes them. With those of
        the prologue, the bytes of the taps and their gradients, which live no longer.
        """
        units = self.split.units
        made = [each for unit in units for each in zip(unit.results, unit.result_specs, strict=True)]
        taps = sum(spec.nbytes * (1 + spec.requires_grad) for kind, spec in made if kind == "tap")
        return self._of_sides(lambda spec: spec.nbytes, beside=taps)

    @cached_property
    def dside_nbytes(self) -> BoundaryNbytes:
        """Bytes of the sums of the side inputs' gradients."""
        return self._of_sides(lambda spec: spec.summed_nbytes if spec.requires_grad else 0)

    def _of_sides(self, count: Callable[[TensorSpec], int], *, beside: int = 0) -> BoundaryNbytes:
        found = [sum(map(count, self.split.sides.get(unit.unit, ()))) for unit in self.split.units[:-1]]
        found[0] += beside if self.split.sides.get(PROLOGUE) else 0
        return shortest(found) if self.split.joints else (found[0],)

    def compile_code(self, shape: StepShape, levels: Mapping[Unit, Iterable[int]] = MappingProxyType({})) -> None:
        """Compile what a step of this shape runs, now: backwards run in autograd's threads, which must not compile.

        levels: the levels in use, of each layer whose items do not all have level 0.
        """
        wanted = []
        for unit, code in self.codes.items():
            runs_backward = shape.training and code.is_trained and height(unit) >= height(shape.first_grad)
            together = runs_backward and code.last_name == "both" and EPILOGUE not in shape.outside
            names = ("both",) if together else ("forward", "backward")[: 1 + runs_backward]
            own = sorted(levels.get(unit, ())) if runs_backward else ()
            wanted += [Wanted(code, *each) for each in product(names, own or (0,))]
        compile_all(wanted)

    def trace_step(self) -> None:
        """Trace the code of a training step, where none is traced."""
        for code in self.codes.values():
            code.trace_step()

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the code of all units under the current settings (see `Differentiated.fingerprint`)."""
        codes = dict.fromkeys(code.fingerprint for code in self.codes.values())
        return sha256(repr((__version__, global_settings(), [*codes])).encode()).hexdigest()

    @cached_property
    def draws_random(self) -> bool:
        return any(code.draws_random for code in self.codes.values())

    @cached_property
    def scales_gradients(self) -> bool:
        """Whether the epilogue computes in fp16: its gradients need the user's loss scale from the start."""
        nodes = self.split.units[-1].module.graph.nodes
        return any(getattr(node.meta.get("spec"), "dtype", None) == torch.float16 for node in nodes)


@dataclass(frozen=True)
class Step:
    """A step that was requested: the code it runs, every snapshot of its program, and where its data is stored."""

    model: SpecializedModel
    shape: StepShape
    snapshots: Sequence[Program]
    describe_tiers: Callable[[], str] = lambda: "everything is on the device"


@dataclass
class Compilation:
    """Everything made from one capture; grows with each call of a new size."""

    captured: Captured
    options: Options
    models: dict[Hashable, SpecializedModel] = field(default_factory=dict)
    wholes: dict[Hashable, tuple[UnitGraph, InPieces]] = field(default_factory=dict)
    costs: dict[Hashable, dict[Unit, AllSizes]] = field(default_factory=dict)
    programs: dict[StepSpec, list[Program]] = field(default_factory=dict)
    latest: Step | None = None
    seconds: float = 0.0  # spent in the passes
    compile_id: Any = field(default_factory=current_compile_id)  # for traces
    has_tail: bool = False  # a tail reads all outputs of the captured graph (see `without_tail`)
    tapped: frozenset[int] = frozenset()  # indices of the outputs that got a gradient, except the epilogue's
    outside: frozenset[Unit] = frozenset()  # units whose outputs got gradients that are not from the loss
    _warned: bool = False

    @property
    def schedule(self) -> ScheduleSpec:
        return SCHEDULES[self.options.expert.schedule]

    def specialized(
        self, micro_batch_size: int, sizes: Mapping[str, int], *, alone: bool, loss_alone: bool = False
    ) -> SpecializedModel:
        """The model at one micro-batch size; `alone`: this micro-batch is the whole batch."""
        key = (*self._key(sizes, micro_batch_size), alone, loss_alone)
        if key not in self.models:
            start = time.perf_counter()
            self.models[key] = self._specialize(micro_batch_size, sizes, alone, loss_alone)
            let_oldest_go(self.models, MOST_MODELS)
            self.seconds += time.perf_counter() - start
        return self.models[key]

    def buffers(self, args: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The buffers among a call's arguments, by their names in the model."""
        pairs, root = zip(self.captured.inputs, args, strict=True), self.captured.root
        return {entry.path.removeprefix(root): arg for entry, arg in pairs if entry.role == "buffer"}

    def _key(self, sizes: Mapping[str, int], num_samples: int) -> tuple[Hashable, ...]:
        lengths = tuple(sorted((name, sizes[name]) for name in sizes.keys() - self._of_batch))
        return num_samples, lengths, self.tapped

    def whole(self, models: Sequence[SpecializedModel]) -> tuple[UnitGraph, InPieces] | None:
        """What a loss computes from all samples at once, and its code; None: all is computed by micro-batch."""
        model, num_samples = models[0], sum(each.micro_batch_size for each in models)
        if model.split.whole is None:
            return None
        key = (*self._key(model.sizes, num_samples), model.loss_alone)
        if key not in self.wholes:
            unit = model.split.whole.graph(specialize(self.captured, num_samples, model.sizes))
            self.wholes[key] = unit, code_of(unit, structure(unit), _with_expert(self.options, compiler="eager"))
            let_oldest_go(self.wholes, MOST_MODELS)
        return self.wholes[key]

    @cached_property
    def listed(self) -> tuple[str, int]:
        """As `listed_samples`."""
        return listed_samples(self.captured)

    @cached_property
    def exchange(self) -> fx.Node | None:
        """The forward's first collective that reads something other than the batch and constants, if there is one."""
        known = self.captured.names("batch", "constant", "size")
        return first_exchange(self.captured.module, known)

    @cached_property
    def counts_over_ranks(self) -> bool:
        """Whether there are collectives, and none of them is such an `exchange`. All ranks run them equally often,
        whatever batch each has.
        """
        return self.exchange is None and first_exchange(self.captured.module) is not None

    @cached_property
    def _of_batch(self) -> frozenset[str]:
        """Inputs that hold the size of the whole batch, on which no micro-batch depends."""
        captured = self.captured
        return frozenset(name for name, symbol in captured.symbols.items() if symbol in captured.batch_symbols)

    def program(self, model: SpecializedModel, num_micro_batches: int, shape: StepShape) -> list[Program]:
        """Every snapshot of the step program, from `vertical` to the last, which runs."""
        expert, num_layers = self.options.expert, model.split.num_layers
        spec = StepSpec(num_layers, num_micro_batches, shape, schedule=expert.schedule, snake=expert.snake)
        if spec not in self.programs:
            start = time.perf_counter()
            self.programs[spec] = lower(spec)
            let_oldest_go(self.programs, MOST_PROGRAMS)
            self.seconds += time.perf_counter() - start
        self.latest = Step(model, shape, self.programs[spec])
        return self.programs[spec]

    def _specialize(
        self, micro_batch_size: int, sizes: Mapping[str, int], alone: bool, loss_alone: bool
    ) -> SpecializedModel:
        captured = self.captured
        module = specialize(captured, micro_batch_size, sizes)
        kept = self._kept(module, loss_alone)
        layer_major = self.options.expert.schedule not in BY_MICRO_BATCH
        separated = loss(module, captured, kept=kept, alone=alone, layer_major=layer_major)
        separated = replace(separated, has_loss=not self.has_tail)
        block_cut = self.schedule.block_cut
        cut = split(separated, captured, block_cut() if block_cut else None, self.tapped)
        alike = uniform(cut, captured)
        self._warn(alike)
        costs = self.costs.setdefault((*self._key(sizes, 0), alone, loss_alone), {})
        batch = {index: entry.dim for index, entry in enumerate(captured.inputs) if entry.role == "batch"}
        return SpecializedModel(
            micro_batch_size, separated, cut, alike, self.options, batch, sizes, alone, costs, loss_alone
        )

    def without_tail(self, sizes: Mapping[str, int]) -> tuple[Compilation, Tail] | None:
        """The compilation of the model without the outputs that need all samples at once, and the tail that computes
        these from its other results; None: there are no such outputs, or no tail can compute them.
        """
        captured = chosen_later(self.captured)
        module = specialize(captured, self.options.micro_batch_size, sizes)
        kept = self._kept(module, loss_alone=False)
        found = cut_tail(captured, module, kept)
        if found is None:
            return None
        captured, tail = found
        empty: dict[str, Any] = {"models": {}, "wholes": {}, "costs": {}, "programs": {}}
        return replace(self, captured=captured, has_tail=True, **empty), tail

    def _kept(self, module: fx.GraphModule, loss_alone: bool) -> list[bool]:
        """For each output, whether it is requested."""
        given = output_values(module)
        losses = losses_among(given, in_evaluation=loss_alone)
        all_are = self.has_tail or not losses or not (loss_alone or self.options.outputs == "loss")
        needed = {*losses, *(given[number] for number in self.captured.stored)}
        return [all_are or value in needed or not isinstance(value, fx.Node) for value in given]

    def _warn(self, alike: Uniform) -> None:
        if alike.differences and not self._warned:
            self._warned = True
            blocks = f"{cut.part}-blocks" if (cut := alike.cut.block_cut) else "blocks"
            warnings.warn(
                f"the model's {blocks} are of {alike.num_kinds} kinds, each compiled once: "
                + "; ".join(alike.differences),
                UniformityWarning,
                stacklevel=2,
            )


def _with_expert(options: Options, **changes: Any) -> Options:
    return replace(options, expert=replace(options.expert, **changes))


def levels_of(models: Sequence[SpecializedModel]) -> tuple[tuple[Level, ...], ...]:
    """What levels 1, 2, ... of each layer save, for micro-batches of these sizes: those levels that all sizes have."""
    return tuple(
        _levels([model.codes[layer].levels for model in models]) for layer in range(models[0].split.num_layers)
    )


def _levels(sizes: Sequence[Sequence[SavedLevel]]) -> tuple[Level, ...]:
    alike = takewhile(lambda each: len({level.reads_input for level in each}) == 1, zip(*sizes, strict=False))
    return tuple(Level(tuple(level.nbytes for level in each), each[0].reads_input) for each in alike)


def losses_among(outputs: Sequence[Any], *, in_evaluation: bool) -> list[Any]:
    """The scalar outputs that require a gradient; in_evaluation: all scalar outputs, if none requires one."""
    nodes = [value for value in outputs if isinstance(value, fx.Node)]
    scalars = [n for n in nodes if isinstance(n.meta["spec"], TensorSpec) and is_float_scalar(n.meta["spec"])]
    return [node for node in scalars if node.meta["spec"].requires_grad] or (scalars if in_evaluation else [])


def is_float_scalar(spec: TensorSpec) -> bool:
    return not spec.shape and spec.dtype.is_floating_point
