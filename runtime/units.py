"""units: the computations of one training step, on the tensors of one call.

The program says what runs when. This module says what is computed: which tensors a unit's code gets, where its
gradients are added, and which random numbers it draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gs_compile.capture.draws import drawn_from
from gs_compile.capture.gradients import Term, put_terms, tensors_of
from gs_compile.capture.graph import Source, TensorSpec, UnitCode, UnitGraph
from gs_compile.capture.split import Split
from gs_compile.program.ir import EPILOGUE, PROLOGUE, Unit, Value
from gs_compile.runtime.stream_random import OwnNumbers
from gs_compile.runtime.values import Saved

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One slice of the batch: its code, its slices of the batch inputs (by index), and its share of the samples."""

    split: Split  # at this size
    codes: Mapping[Unit, UnitCode]
    inputs: Mapping[int, torch.Tensor]
    fraction: torch.Tensor  # fp64
    counted: Mapping[int, torch.Tensor]  # what `count` reads in addition to the batch: class weights


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """What a loss computes of all samples at once: its code, and the inputs that it reads, whole (by input index)."""

    graph: UnitGraph
    code: UnitCode
    inputs: Mapping[int, torch.Tensor]


class Accumulator:
    """A gradient summed over micro-batches, in fp32 whatever the parameters' dtype (fp64 stays)."""

    def __init__(self) -> None:
        self.sums: dict[Any, torch.Tensor] = {}

    def add(self, gradients: Mapping[Any, Term], among: Tensors) -> None:
        """Add gradients. The first one of a key is not copied, unless another of the tensors alive (`among`) shares its
        memory.
        """
        fresh = gradients.keys() - self.sums.keys()
        memory = [tensor.untyped_storage().data_ptr() for tensor in among] if fresh else []
        put_terms(self.sums, {key: gradients[key] for key in gradients.keys() - fresh}, self.sums.keys())
        self.sums |= {key: _first_term(gradient, memory) for key, gradient in gradients.items() if key in fresh}

    def scale(self, factor: torch.Tensor) -> None:
        for total in self.sums.values():
            total.mul_(factor)


def _first_term(gradient: Term, memory: Sequence[int]) -> torch.Tensor:
    """A gradient as the first term of a sum; `memory`: the storages of all tensors that are alive, its own included."""
    if not isinstance(gradient, torch.Tensor):
        return gradient.dense()
    wide = torch.promote_types(gradient.dtype, torch.float32)
    storage = gradient.untyped_storage()
    alone = memory.count(storage.data_ptr()) == 1 and storage.nbytes() == gradient.nbytes
    return gradient if alone and gradient.dtype == wide else gradient.to(wide, copy=True)


class CompiledUnits:
    """The computations of a captured model's units, one method for each verb.

    `count` and `zeros` are called as written. The others are called as

        embed("e", micro_batch, wants=("x", "side"), batch=..., w=...)

    with one keyword for each value that is read and for each accumulator that is added to (`dw`, `dsides`), by
    `Op.keywords`, and with `level` if a layer saves activations. They return one entry for each kind in `wants`.

    Contents of values: `w` and `batch` map input indices to tensors; `side` and `y` are tuples; `total` is a tuple;
    `a` is a `Saved`; `dw` is an `Accumulator` by input index, `dside` one by index of the side input
    among its maker's. `dy` of the head is a tuple, one gradient for each of its differentiated results, None where none
    came; that of a layer input is a tensor.
    """

    def __init__(self, micro_batches: Sequence[MicroBatch], seed: int | None, whole: WholeBatch | None = None) -> None:
        self.micro_batches = micro_batches
        self.whole = whole  # None: nothing is computed of all micro-batches at once
        self.seed = seed  # of this step; None if nothing draws random numbers
        self.of_batch = Accumulator()  # the gradients of batch inputs, by input index and micro-batch
        self.taps: dict[tuple[int, int], torch.Tensor] = {}  # by number and micro-batch, until the layer's backward
        self.of_whole: Tensors = ()  # the results of the code that reads all taps, once the head runs
        self._tap_gradients: dict[tuple[int, int], torch.Tensor] = {}  # from the epilogue
        self._whole_gradients: dict[tuple[int, int], torch.Tensor] = {}  # of `of_whole`, from the epilogue
        self._numbers = OwnNumbers()
        self._drawn: dict[tuple[Unit, int], Any] = {}  # the generators' states after the first half of a block

    def count(self, batches: list[Any]) -> tuple[torch.Tensor, ...]:
        shares, specs = list[Tensors](), tuple[TensorSpec, ...]()
        for micro_batch, batch in zip(self.micro_batches, batches, strict=True):
            count = micro_batch.split.count
            assert count is not None
            reads = _by_source({"batch": batch, "w": micro_batch.counted})
            pairs = zip(count.sources, count.specs, strict=True)
            shares.append(count.module(*(_input(source, spec, micro_batch, reads) for source, spec in pairs)))
            specs = count.result_specs
        made = zip(zip(*shares, strict=True), specs, strict=True)
        return tuple(torch.stack(share).sum(0).to(spec.dtype) for share, spec in made)

    def zeros(self, value: Value) -> Accumulator:
        return Accumulator()

    def forward(
        self, unit: Unit, micro_batch: int, *, wants: tuple[str, ...], level: int = 0, **reads: Any
    ) -> tuple[Any, ...]:
        graph, inputs = self._inputs(unit, micro_batch, reads)
        outcome = self._run("forward", unit, micro_batch, inputs, level)
        results, saved = outcome[: len(graph.results)], Saved(outcome[len(graph.results) :])
        self.taps |= zip(self._taps_of(graph, micro_batch), _results(graph, results, "tap"), strict=True)
        if unit != EPILOGUE:
            self.of_whole = ()
        return tuple(saved if kind == "a" else _result(graph, results, kind) for kind in wants)

    embed = join = forward

    def head(self, unit: Unit, micro_batch: int, *, wants: tuple[str, ...], **reads: Any) -> tuple[Any, ...]:
        """The epilogue; together with its backward if a gradient is wanted."""
        if "dx" not in wants and not {"dw", "dwt", "dsides"} & reads.keys():
            return self.forward(unit, micro_batch, wants=wants, **reads)
        graph, inputs = self._inputs(unit, micro_batch, reads)
        outcome = self._run("both", unit, micro_batch, inputs)
        results, gradients = outcome[: len(graph.results)], outcome[len(graph.results) :]
        dx = self._spread(graph, micro_batch, gradients, reads, held=inputs)
        return tuple(dx if kind == "dx" else _result(graph, results, kind) for kind in wants)

    def backward(
        self, unit: Unit, micro_batch: int, *, wants: tuple[str, ...], level: int = 0, **reads: Any
    ) -> tuple[Any, ...]:
        """Recompute what a unit's forward has not saved, and run its backward."""
        graph, inputs = self._inputs(unit, micro_batch, reads)
        if unit != EPILOGUE and self._whole_gradients:
            self._pull_whole()
        taps = self._taps_of(graph, micro_batch)
        of_taps = [self._tap_gradients.pop(tap, None) for tap in taps]
        for tap in taps:
            self.taps.pop(tap, None)
        arrived = list(zip(graph.differentiated, _arrived(graph, reads, of_taps), graph.gradient_specs, strict=True))
        taken = tuple(index for index, gradient, _ in arrived if gradient is not None)
        if not taken:  # of the head: other outputs alone have gradients
            return (torch.zeros_like(reads["x"]),) if "dx" in wants else ()
        saved = reads["a"].tensors if "a" in reads else ()
        gradients = [laid_out(gradient, spec) for _, gradient, spec in arrived if gradient is not None]
        held = [*inputs, *saved, *gradients]
        outcome = self._run("backward", unit, micro_batch, held, level, taken)
        dx = self._spread(graph, micro_batch, outcome, reads, held)
        return (dx,) if "dx" in wants else ()

    head_backward = join_backward = embed_backward = backward

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply all gradients that are not values of a program."""
        self.of_batch.scale(factor)
        for found in (self._tap_gradients, self._whole_gradients):  # not in place: several may be one tensor
            found.update({key: gradient * factor for key, gradient in found.items()})

    def drop_gradients(self) -> None:
        """Drop all gradients that are not values of a program: the heads' backwards will run again."""
        self.of_batch = Accumulator()
        self._tap_gradients.clear()
        self._whole_gradients.clear()

    # What is made of all micro-batches at once -----------------------------------------------------------------------

    def _pull_whole(self) -> None:
        """Run the backward of the code that reads all taps, once all heads have run, and add the taps' gradients."""
        assert self.whole is not None
        graph, micro_batches = self.whole.graph, range(len(self.micro_batches))
        taken = tuple(sorted({index for index, _ in self._whole_gradients}))
        found, self._whole_gradients = self._whole_gradients, {}
        shares = [[found[index, j] for j in micro_batches if (index, j) in found] for index in taken]
        gradients = [torch.stack(each).sum(0) for each in shares]
        for index, gradient in zip(graph.differentiable, self._run_whole("backward", gradients, taken), strict=True):
            if (source := graph.sources[index]).kind == "tap":
                assert isinstance(gradient, torch.Tensor)
                (dim,) = graph.specs[index].batch_dims
                sizes = [self.taps[source.index, j].shape[dim] for j in micro_batches]
                for j, part in enumerate(gradient.split(sizes, dim)):
                    before = self._tap_gradients.get((source.index, j))
                    self._tap_gradients[source.index, j] = part if before is None else before + part

    def _run_whole(self, name: str, gradients: Tensors = (), taken: tuple[int, ...] | None = None) -> Sequence[Any]:
        """Call "forward" or "backward" of the code that reads the taps of all micro-batches; taken: see `_run`."""
        assert self.whole is not None
        graph, micro_batches = self.whole.graph, range(len(self.micro_batches))
        code = self.whole.code if taken is None else self.whole.code.taking(taken)
        inputs = []
        for source, spec in zip(graph.sources, graph.specs, strict=True):
            if source.kind == "tap":
                tensor = torch.cat([self.taps[source.index, j] for j in micro_batches], *spec.batch_dims)
            else:
                tensor = self.whole.inputs[source.index]
            inputs.append(laid_out(tensor, spec))
        if self.seed is None or not code.draws_random:
            return code.function(name)(*inputs, *gradients)
        self._numbers.seed(seed_of(self.seed, EPILOGUE, len(micro_batches)))
        with drawn_from(self._numbers):
            return code.function(name)(*inputs, *gradients)

    # How a unit's code is called -------------------------------------------------------------------------------------

    def _inputs(self, unit: Unit, micro_batch: int, reads: Mapping[str, Any]) -> tuple[UnitGraph, list[torch.Tensor]]:
        """A unit's graph, and the tensors for its placeholders."""
        part = self.micro_batches[micro_batch]
        graph = part.split.by_unit[unit]
        reads, inputs = _by_source(reads), list[torch.Tensor]()
        for source, spec in zip(graph.sources, graph.specs, strict=True):
            if source.kind == "x" and "x" not in reads:  # the backward reads saved activations instead
                continue
            if source.kind == "whole":
                self.of_whole = self.of_whole or self._run_whole("forward")
                tensor = self.of_whole[source.index]
            else:
                of_tap = source.kind == "tap"
                tensor = self.taps[source.index, micro_batch] if of_tap else _input(source, spec, part, reads)
            is_sliced = source.kind == "input" and source.index in part.inputs
            inputs.append(laid_out(tensor, spec) if is_sliced else tensor)
        return graph, inputs

    def _taps_of(self, graph: UnitGraph, micro_batch: int) -> list[tuple[int, int]]:
        """The taps that a layer makes for the epilogue, by number and micro-batch."""
        units = self.micro_batches[micro_batch].split.taps
        return [(number, micro_batch) for number, unit in enumerate(units) if unit == graph.unit]

    def _run(
        self,
        name: str,
        unit: Unit,
        micro_batch: int,
        arguments: Tensors,
        level: int = 0,
        taken: tuple[int, ...] | None = None,
    ) -> Sequence[Any]:
        """Call "forward", "backward" or "both" of a unit's code at a level, with the random numbers of the unit and
        micro-batch.

        taken: of a backward, the results whose gradients are given; None: all that may have one.

        If a block is several layers, they draw what the whole block would: each goes on from the state after the
        forward of the one before, which always ran earlier.
        """
        part = self.micro_batches[micro_batch]
        code = part.codes[unit]
        function = (code if taken is None else code.taking(taken)).function(name, level)
        if self.seed is None or not code.draws_random:
            return function(*arguments)
        number = part.split.layers_per_block
        block, place = divmod(unit, number) if isinstance(unit, int) else (unit, number - 1)
        if place > 0 and (unit, micro_batch) in self._drawn:
            self._numbers.go_on(self._drawn[unit, micro_batch])
        else:
            self._numbers.seed(seed_of(self.seed, block, micro_batch))
        with drawn_from(self._numbers):
            outcome = function(*arguments)
        if place < number - 1 and name == "forward":
            self._drawn[int(unit) + 1, micro_batch] = self._numbers.state()
        return outcome

    def _spread(
        self, graph: UnitGraph, micro_batch: int, gradients: Sequence[Term], reads: Mapping[str, Any], held: Tensors
    ) -> torch.Tensor | None:
        """Add gradients to their accumulators; returns the gradient of x.

        An operation that passes a gradient on unchanged, such as an addition, returns one tensor for several inputs, or
        the one that it was given (`held`): an accumulator must not add to that in place.
        """
        dx, parameters, sides, batch = None, dict[Any, Term](), dict[Any, Term](), dict[Any, Term]()
        for index, gradient in zip(graph.differentiable, gradients, strict=True):
            source = graph.sources[index]
            if source.kind == "x":
                assert isinstance(gradient, torch.Tensor)
                dx = gradient
            elif source.kind == "side":
                sides[source.index] = gradient
            elif source.kind == "tap":
                assert isinstance(gradient, torch.Tensor)
                self._tap_gradients[source.index, micro_batch] = gradient
            elif source.kind == "whole":
                assert isinstance(gradient, torch.Tensor)
                self._whole_gradients[source.index, micro_batch] = gradient
            elif source.index in self.micro_batches[micro_batch].inputs:
                batch[source.index, micro_batch] = gradient
            else:
                parameters[source.index] = gradient
        shared = {key: parameters.pop(key) for key in list(parameters) if "dwt" in reads and key in reads["dwt"].views}
        alive = [*(tensor for gradient in gradients for tensor in tensors_of(gradient)), *held]
        for kind, found in (("dwt", shared), ("dw", parameters), ("dsides", sides)):
            if kind in reads:
                reads[kind].add(found, among=alive)
        if batch:
            self.of_batch.add(batch, among=alive)
        return dx


def _by_source(reads: Mapping[str, Any]) -> dict[str, Any]:
    """`reads` by kinds of sources: all inputs of the model are together in "input"."""
    inputs = {index: tensor for kind in ("wt", "w", "batch") for index, tensor in reads.get(kind, {}).items()}
    return {**reads, "input": inputs}


def _input(source: Source, spec: TensorSpec, part: MicroBatch, reads: Mapping[str, Any]) -> torch.Tensor:
    """The tensor of a placeholder."""
    if source.kind == "fraction":
        return part.fraction.to(spec.dtype)
    tensor: torch.Tensor = reads["x"] if source.kind == "x" else reads[source.kind][source.index]
    return tensor


def _arrived(
    graph: UnitGraph, reads: Mapping[str, Any], taps: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """The gradient of each differentiated result: from the unit above; of a side input, from all layers; of a tap, from
    `taps`. None for an output of the head that has none.
    """
    dx, dy = reads.get("dx"), reads.get("dy")
    if isinstance(dy, tuple):
        return dy
    total = dx if dy is None else dy if dx is None else dx + dy
    dside = reads["dside"].sums if "dside" in reads else {}
    sides, of_taps = ([i for i, name in enumerate(graph.results) if name == kind] for kind in ("side", "tap"))
    arrived = {**dict(zip(of_taps, taps, strict=True)), **{i: dside.get(number) for number, i in enumerate(sides)}}
    gradients = []
    for index in graph.differentiated:
        spec, gradient = graph.result_specs[index], arrived.get(index, total)
        if gradient is None:
            gradient = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
        gradients.append(gradient.to(spec.dtype))
    return gradients


def _result(graph: UnitGraph, results: Sequence[Any], kind: str) -> Any:
    """One result, or all of a kind that comes in groups."""
    found = _results(graph, results, kind)
    return found if kind in ("side", "y") else found[0]


def _results(graph: UnitGraph, results: Sequence[Any], kind: str) -> tuple[Any, ...]:
    return tuple(result for result, name in zip(results, graph.results, strict=True) if name == kind)


def laid_out(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """`tensor` with the strides for which the unit was compiled.

    The gradient of a sum is an expanded tensor; a slice of a transposed batch has the strides of the whole.
    """
    if tensor.stride() == spec.stride:
        return tensor
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=tensor.device).copy_(tensor)


def seed_of(seed: int, unit: Unit, micro_batch: int) -> int:
    """The seed of one unit's random numbers for one micro-batch.

    It depends on step (`seed`), unit and micro-batch alone: recomputation draws what the forward drew, and the order in
    which units and micro-batches run does not matter.
    """
    place = {PROLOGUE: 0, EPILOGUE: 1}[unit] if isinstance(unit, str) else 2 + unit
    return _mix(_mix(_mix(seed) ^ place) ^ micro_batch)


def _mix(number: int) -> int:
    """A bijection of 64-bit integers that scatters neighbours (the finaliser of the splitmix64 generator)."""
    mask = (1 << 64) - 1
    number = (number + 0x9E3779B97F4A7C15) & mask
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & mask
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & mask
    return number ^ (number >> 31)
