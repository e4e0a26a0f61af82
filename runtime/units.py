"""units: the computations of one training step, on the tensors of one call.

The program says what runs when; this says what it computes: which tensors go into a unit's code, where its gradients
are added, and which random numbers it draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gs_compile.capture.gradients import Term, add_term, tensors_of
from gs_compile.capture.graph import Source, TensorSpec, UnitCode, UnitGraph
from gs_compile.program.ir import EPILOGUE, PROLOGUE, Unit, Value
from gs_compile.runtime.stream_random import OwnNumbers

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sized:
    """The model's units compiled for one size of the micro-batch."""

    units: Mapping[Unit, UnitGraph]
    codes: Mapping[Unit, UnitCode]
    count: fx.GraphModule | None
    count_sources: tuple[Source, ...]
    halved: bool = False  # layers 2 i and 2 i + 1 are the halves of block i


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One slice of the batch: its code, the batch inputs sliced (by input index), and its share of the samples."""

    sized: Sized
    inputs: Mapping[int, torch.Tensor]
    fraction: torch.Tensor
    counted: Mapping[int, torch.Tensor]  # what the count reads beside the batch: class weights


class Accumulator:
    """A gradient summed over micro-batches, in fp32 whatever the parameters' dtype (fp64 stays)."""

    def __init__(self) -> None:
        self.sums: dict[Any, torch.Tensor] = {}

    def add(self, gradients: Mapping[Any, Term], among: Tensors) -> None:
        """Add gradients; the first of a key is kept itself where no other tensor `among` all alive has its memory."""
        known = {key: gradient for key, gradient in gradients.items() if key in self.sums}
        whole = {key: gradient for key, gradient in known.items() if isinstance(gradient, torch.Tensor)}
        if whole:
            torch._foreach_add_([self.sums[key] for key in whole], list(whole.values()))
        for key in known.keys() - whole.keys():
            add_term(self.sums[key], known[key])
        memory = [tensor.untyped_storage().data_ptr() for tensor in among]
        for key in gradients.keys() - known.keys():
            self.sums[key] = _kept(gradients[key], memory)

    def scale(self, factor: torch.Tensor) -> None:
        for total in self.sums.values():
            total.mul_(factor)


def _kept(gradient: Term, memory: Sequence[int]) -> torch.Tensor:
    """A gradient as the first of a sum; `memory`: what all tensors that are alive have, itself among them."""
    if not isinstance(gradient, torch.Tensor):
        return gradient.dense()
    wide = torch.promote_types(gradient.dtype, torch.float32)
    storage = gradient.untyped_storage()
    alone = memory.count(storage.data_ptr()) == 1 and storage.nbytes() == gradient.nbytes
    return gradient if alone and gradient.dtype == wide else gradient.to(wide, copy=True)


class CompiledUnits:
    """`gs_compile.program.reference.Units` for a captured model: see there for how each verb is called.

    Contents of values: `w` and `batch` map input indices to tensors; `side` and `y` are tuples; `total` is a tuple;
    `dw` is an `Accumulator` by input index, `dside` one by index of the side input. `dy` of the head is a tuple, one
    gradient for each of its differentiated results; that of a layer input is a tensor.
    """

    def __init__(self, micro_batches: Sequence[MicroBatch], seed: int | None) -> None:
        self.micro_batches = micro_batches
        self.seed = seed  # of this step; None where nothing is drawn
        self._numbers = OwnNumbers()
        self._drawn: dict[tuple[Unit, int], Any] = {}  # the random numbers after the first half of a block

    def count(self, batches: list[Any], **_: Any) -> tuple[torch.Tensor, ...]:
        shares = []
        for micro_batch, batch in zip(self.micro_batches, batches, strict=True):
            count = micro_batch.sized.count
            assert count is not None
            sources, reads = micro_batch.sized.count_sources, {"batch": batch, "w": micro_batch.counted}
            shares.append(count(*(self._input(s, micro_batch, reads) for s in sources)))
        return tuple(torch.stack(share).sum(0) for share in zip(*shares, strict=True))

    def zeros(self, value: Value) -> Accumulator:
        return Accumulator()

    def embed(self, unit: Unit, micro_batch: int, *, wants: tuple[str, ...], **reads: Any) -> tuple[Any, ...]:
        return self._forward(unit, micro_batch, wants, reads)

    def forward(self, unit: Unit, micro_batch: int, *, wants: tuple[str, ...], **reads: Any) -> tuple[Any, ...]:
        return self._forward(unit, micro_batch, wants, reads)

    def head(self, unit: Unit, micro_batch: int, *, wants: tuple[str, ...], **reads: Any) -> tuple[Any, ...]:
        """The epilogue; together with its backward where a gradient is asked for."""
        if "dx" not in wants and not {"dw", "dwt", "dside"} & reads.keys():
            return self._forward(unit, micro_batch, wants, reads)
        part = self.micro_batches[micro_batch]
        graph = part.sized.units[unit]
        inputs = self._inputs(unit, micro_batch, reads)
        with self._drawing(unit, part):
            outcome = part.sized.codes[unit].both(*inputs)
        results, gradients = outcome[: len(graph.results)], outcome[len(graph.results) :]
        dx = self._spread(graph, micro_batch, gradients, reads, held=inputs)
        return tuple(dx if kind == "dx" else _result(graph, results, kind) for kind in wants)

    def head_backward(self, unit: Unit, micro_batch: int, *, wants: tuple[str, ...], **reads: Any) -> tuple[Any, ...]:
        return self._backward(unit, micro_batch, wants, reads, list(reads["dy"]))

    def backward(self, unit: Unit, micro_batch: int, *, wants: tuple[str, ...], **reads: Any) -> tuple[Any, ...]:
        return self._backward(unit, micro_batch, wants, reads, [_sum(reads.get("dx"), reads.get("dy"))])

    def embed_backward(self, unit: Unit, micro_batch: int, *, wants: tuple[str, ...], **reads: Any) -> tuple[Any, ...]:
        graph = self.micro_batches[micro_batch].sized.units[unit]
        dside = reads["dside"].sums if "dside" in reads else {}
        sides = [index for index, kind in enumerate(graph.results) if kind == "side"]
        gradients: list[torch.Tensor] = []
        for index in graph.differentiated:
            spec = graph.result_specs[index]
            arrived = dside.get(sides.index(index)) if index in sides else _sum(reads.get("dx"), reads.get("dy"))
            gradients.append(
                torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
                if arrived is None
                else arrived.to(spec.dtype)
            )
        return self._backward(unit, micro_batch, wants, {k: v for k, v in reads.items() if k != "dside"}, gradients)

    # How a unit's code is called -------------------------------------------------------------------------------------

    def _forward(
        self, unit: Unit, micro_batch: int, wants: tuple[str, ...], reads: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        part = self.micro_batches[micro_batch]
        inputs = self._inputs(unit, micro_batch, reads)
        with self._drawing(unit, part):
            results = part.sized.codes[unit].forward(*inputs)
        if part.sized.halved and self._draws(unit, part) and isinstance(unit, int) and unit % 2 == 0:
            self._drawn[unit, micro_batch] = self._numbers.state()
        return tuple(_result(part.sized.units[unit], results, kind) for kind in wants)

    def _backward(
        self, unit: Unit, micro_batch: int, wants: tuple[str, ...], reads: Mapping[str, Any], gradients: Tensors
    ) -> tuple[Any, ...]:
        part = self.micro_batches[micro_batch]
        graph = part.sized.units[unit]
        specs = [graph.result_specs[index] for index in graph.differentiated]
        gradients = [_laid_out(gradient, spec) for gradient, spec in zip(gradients, specs, strict=True)]
        inputs = self._inputs(unit, micro_batch, reads)
        with self._drawing(unit, part):
            outcome = part.sized.codes[unit].backward(*inputs, *gradients)
        dx = self._spread(graph, micro_batch, outcome, reads, held=(*inputs, *gradients))
        return (dx,) if "dx" in wants else ()

    def _inputs(self, unit: Unit, micro_batch: int, reads: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors for the placeholders of a unit's graph; also begins this unit's random numbers."""
        part = self.micro_batches[micro_batch]
        if self._draws(unit, part):
            self._seed(unit, micro_batch)
        graph = part.sized.units[unit]
        inputs = [self._input(source, part, reads) for source in graph.sources]
        return [
            _laid_out(tensor, spec) if source.kind == "input" and source.index in part.inputs else tensor
            for tensor, source, spec in zip(inputs, graph.sources, graph.specs, strict=True)
        ]

    def _draws(self, unit: Unit, part: MicroBatch) -> bool:
        return self.seed is not None and part.sized.codes[unit].draws_random

    def _drawing(self, unit: Unit, part: MicroBatch) -> AbstractContextManager[Any]:
        return self._numbers if self._draws(unit, part) else nullcontext()

    def _seed(self, unit: Unit, micro_batch: int) -> None:
        """Begin the random numbers of a unit.

        The halves of a block draw together what the whole block does: the second goes on where the first's forward,
        which always comes before it, has stopped.
        """
        assert self.seed is not None
        if not (isinstance(unit, int) and self.micro_batches[micro_batch].sized.halved):
            self._numbers.seed(seed_of(self.seed, unit, micro_batch))
        elif unit % 2 and (unit - 1, micro_batch) in self._drawn:
            self._numbers.go_on(self._drawn[unit - 1, micro_batch])
        else:
            self._numbers.seed(seed_of(self.seed, unit // 2, micro_batch))

    def _input(self, source: Source, part: MicroBatch, reads: Mapping[str, Any]) -> torch.Tensor:
        match source.kind:
            case "x":
                tensor = reads["x"]
            case "side":
                tensor = reads["side"][source.index]
            case "total":
                tensor = reads["total"][source.index]
            case "fraction":
                tensor = part.fraction
            case "input":
                found = (reads[kind] for kind in ("batch", "w", "wt") if source.index in reads.get(kind, ()))
                tensor = next(found)[source.index]
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def _spread(
        self,
        graph: UnitGraph,
        micro_batch: int,
        gradients: Sequence[Term],
        reads: Mapping[str, Any],
        held: Tensors = (),
    ) -> torch.Tensor | None:
        """Add gradients to the accumulators they belong to; returns that of x.

        What passes a gradient on unchanged, as an addition does, gives one tensor for several inputs, or the one it
        was given (`held`): an accumulator must not add to that in place.
        """
        dx, parameters, sides = None, dict[Any, Term](), dict[Any, Term]()
        for index, gradient in zip(graph.differentiable, gradients, strict=True):
            source = graph.sources[index]
            if source.kind == "x":
                assert isinstance(gradient, torch.Tensor)
                dx = gradient
            elif source.kind == "side":
                sides[source.index] = gradient
            elif source.index in self.micro_batches[micro_batch].inputs:
                parameters[source.index, micro_batch] = gradient
            else:
                parameters[source.index] = gradient
        alive = [*(tensor for gradient in gradients for tensor in tensors_of(gradient)), *held]
        if "dwt" in reads:  # the unit's own, and those that it shares with others
            shared = {key: parameters.pop(key) for key in list(parameters) if key in reads["dwt"].views}
            reads["dwt"].add(shared, among=alive)
        if "dw" in reads:
            reads["dw"].add(parameters, among=alive)
        if "dside" in reads:
            reads["dside"].add(sides, among=alive)
        return dx


def _result(graph: UnitGraph, results: Sequence[Any], kind: str) -> Any:
    """One result, or all of a kind that comes in groups."""
    found = tuple(result for result, name in zip(results, graph.results, strict=True) if name == kind)
    return found if kind in ("side", "y") else found[0]


def _laid_out(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """`tensor` with the strides that the unit was compiled for.

    The gradient of a sum arrives expanded, without memory; a slice of a transposed batch has the strides of the whole.
    """
    if tensor.stride() == spec.stride:
        return tensor
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=tensor.device).copy_(tensor)


def _sum(left: torch.Tensor | None, right: torch.Tensor | None) -> Any:
    if left is None or right is None:
        return right if left is None else left
    return left + right


def seed_of(seed: int, unit: Unit, micro_batch: int) -> int:
    """The seed of one unit's random numbers for one micro-batch.

    A function of (step, unit, micro-batch) alone, `seed` being the step's: recomputation draws what the forward drew,
    and the order in which units and micro-batches run does not matter.
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
