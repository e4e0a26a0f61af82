"""pieces: a unit whose token-wise parts run on some tokens at a time, so that their values for all tokens, such as the
logits, are never in memory at once.

    forward    part by part
    backward   the forward of those parts whose results a later part's backward reads; then backward from the last part

A head whose loss is a sum over tokens runs once: the gradient of a sum does not depend on its value, so each piece runs
forward and backward together. A piece is as large as fits in the memory that the other units' code needs anyway, and
has at least `LEAST` tokens, on any device.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from functools import cache, cached_property
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from gs_compile.capture.graph import UnitGraph
from gs_compile.capture.inductor import Generator
from gs_compile.codegen.costs import Cost
from gs_compile.codegen.differentiate import Cuts, Differentiated, Function, SharedCode
from gs_compile.codegen.parts import Gradients, PartInPieces, Values, WholePart
from gs_compile.codegen.token_forms import NotInPiecesError
from gs_compile.codegen.token_wise import Chain, Subgraph, TokenPart, chain
from gs_compile.program.ir import EPILOGUE

LEAST = 192  # tokens of a piece: with fewer, reading the weights takes longer than multiplying with them
STEP = 64  # in tokens: sizes of pieces above LEAST

log = logging.getLogger(__name__)


class InPieces(Differentiated):
    """The code of a class of units, in pieces if that is requested or saves memory.

    num_tokens: the most tokens of a piece; 0: never in pieces; None: in pieces if the whole needs more memory than each
        of `beside`, the other units' code, and then as many tokens as need no more than the largest of these.
    """

    def __init__(
        self,
        unit: UnitGraph,
        generator: Generator,
        common: SharedCode | None,
        beside: Collection[Differentiated],
        num_tokens: int | None,
    ) -> None:
        super().__init__(unit, generator, common)
        self._beside, self._asked = beside, num_tokens
        self.whole_reason = ""  # why it cannot run in pieces, if it should
        self._taking: dict[tuple[int, ...], InPieces] = {}
        # Cached as long as this object lives.
        self._parts_of, self._taken_by = cache(self._made_of), cache(self._taken)

    def _made(self, name: str, level: int) -> Function:
        if not self.tokens_per_piece:
            return super()._made(name, level)
        for part, taken in zip(self._parts, self._taken_by(self._seeds(name)), strict=True):
            if name != "forward":
                part.compile_code(taken)
            if name == "forward" or part.is_ahead or isinstance(part, WholePart):
                part.compile_code(None)
        function: Function = getattr(self, f"_{name}_in_pieces")
        return function

    def trace_step(self) -> None:
        if not self._asked:
            super().trace_step()

    def taking(self, results: tuple[int, ...]) -> InPieces:
        """The code whose backward takes the gradients of only these results, not of all `differentiated`.

        What leads to the others is not run: zeros as their gradients might be multiplied by infinity.
        """
        if results == self.unit.differentiated:
            return self
        if results not in self._taking:
            unit = replace(self.unit, taken=results)
            self._taking[results] = InPieces(unit, self._generator, self.common.of(results), self._beside, self._asked)
        return self._taking[results]

    @cached_property
    def fingerprint(self) -> str:
        return f"{super().fingerprint} {self._asked}"

    def cost(self, name: str) -> Cost:
        whole, size = super().cost(name), self.tokens_per_piece
        if not size:
            return whole
        twice = [part for part in self._parts if isinstance(part, PartInPieces) and part.is_ahead and name != "forward"]
        return Cost(whole.flops + sum(part.forward_flops for part in twice), self._nbytes(name, self._parts))

    @cached_property
    def tokens_per_piece(self) -> int | None:
        """The most tokens of a piece, at this length; None: it runs whole. Pieces share their code over all lengths."""
        try:
            with self._making():
                return self._chosen()
        except Exception as error:  # noqa: BLE001 (of any kind, from any of torch's operations)
            self.whole_reason = shorten(str(error), 200) or type(error).__name__
            log.info("unit %s runs on all tokens at a time: %s", self.unit.unit, self.whole_reason)
        return None

    @property
    def on_all(self) -> tuple[str, ...]:
        return self.chain.on_all if self.unit.unit != EPILOGUE and self.tokens_per_piece else ()

    @cached_property
    def _cuts(self) -> Cuts:
        return Cuts(self, (), "it runs in pieces of tokens") if self.tokens_per_piece else super()._cuts

    def _chosen(self) -> int | None:
        """The requested number, or as many as fit; on a CPU, where larger pieces gain nothing, about `LEAST`."""
        name, room = self.last_name, max((each.workspace_nbytes for each in self._beside), default=0)
        if self._asked == 0 or (self._asked is None and super().cost(name).nbytes <= room):
            return None
        num_tokens = max((part.num_tokens for part in self.chain.parts if isinstance(part, TokenPart)), default=0)
        if not num_tokens:
            raise NotInPiecesError("nothing in it acts on tokens one by one")
        if self._asked:
            return self._asked
        size, most = LEAST, num_tokens // LEAST  # the most pieces that all have LEAST tokens
        if most > 1 and self.unit.device_type != "cpu":
            one, two = (self._nbytes(name, self._parts_of(size)) for size in (LEAST, 2 * LEAST))
            size += max(int((room - one) / max((two - one) / LEAST, 1.0)) // STEP * STEP, 0)
        if (number := min(-(-num_tokens // size), most)) < 2:
            return None
        size = -(-num_tokens // number)
        return size if self._nbytes(name, self._parts_of(size)) < super().cost(name).nbytes else None

    # Its parts -------------------------------------------------------------------------------------------------------

    @cached_property
    def chain(self) -> Chain:
        return chain(self.unit, 1 if self.unit.unit == EPILOGUE else 3)

    @cached_property
    def _parts(self) -> list[WholePart | PartInPieces]:
        assert self.tokens_per_piece
        return self._parts_of(self.tokens_per_piece)

    def _made_of(self, size: int) -> list[WholePart | PartInPieces]:
        parts = list[WholePart | PartInPieces]()
        for place, part in enumerate(self.chain.parts):
            if isinstance(part, Subgraph):
                parts.append(WholePart(part))
            else:
                parts.append(some := PartInPieces(part, size, self._generator, self.common.parts))
                if self.costs:
                    some.know(self.costs, place)
        read = set[str]()
        for one in reversed(parts):  # a part runs ahead if the backward of a later one reads its results
            one.is_ahead = not read.isdisjoint(one.part.outputs)
            read |= one.reads.union(one.part.inputs if one.is_ahead else ())
        return parts

    def _nbytes(self, name: str, parts: Sequence[WholePart | PartInPieces]) -> int:
        """A function's peak of live bytes, without its inputs, the results of a forward, and the gradient of x."""
        if name == "forward":
            return self._nbytes_forward(parts)[1]
        keep, results = self._late(parts)[1] if name == "both" else set[str](), set(self.chain.made)
        alive, peak = self._nbytes_forward([part for part in parts if part.is_ahead])
        pulled = {self.chain.x: 0}  # the gradient of x is a result
        for part in reversed(parts):
            if part.is_ahead:
                alive -= _total(part.made_nbytes, set(part.part.outputs) - keep - results)
            new = set(part.pulled_nbytes) - pulled.keys()
            pulled |= {taken: part.pulled_nbytes[taken] for taken in new}
            added = _total(part.pulled_nbytes, new)
            if isinstance(part, PartInPieces):
                alive += added + (0 if part.is_ahead else _total(part.made_nbytes, keep - results))
                added = 0
            peak = max(peak, alive + part.inside_nbytes(backward=True))
            alive += added - part.saved_nbytes - _total(pulled, set(part.part.outputs))
        return peak

    def _nbytes_forward(self, parts: Sequence[WholePart | PartInPieces]) -> tuple[int, int]:
        """The bytes that are alive after these parts, without results, and their peak."""
        alive = peak = 0
        for part in parts:
            peak = max(peak, alive + part.inside_nbytes(backward=False))
            alive += part.saved_nbytes
            alive += _total(part.made_nbytes, set(part.part.outputs) - set(self.chain.made))
            peak = max(peak, alive)
        return alive, peak

    # How it runs -----------------------------------------------------------------------------------------------------

    def _forward_in_pieces(self, *inputs: Tensor) -> tuple[Any, ...]:
        values = self._named(inputs)
        for part in self._parts:
            part.forward(values)
        return self._results(values)

    def _both_in_pieces(self, *inputs: Tensor) -> tuple[Any, ...]:
        values, gradients = self._named(inputs), Gradients()
        loss = self.unit.results.index("loss")
        spec = self.unit.result_specs[loss]
        gradients.add(self.chain.made[loss], torch.ones((), dtype=spec.dtype, device=spec.device))
        late, keep = self._late(self._parts)
        found = self._pulled(values, gradients, keep)
        for part in late:
            part.forward(values)
        return (*self._results(values), *found)

    def _backward_in_pieces(self, *arguments: Tensor) -> tuple[Any, ...]:
        number, gradients = len(self.chain.given), Gradients()
        for index, gradient in zip(self.unit.differentiated, arguments[number:], strict=True):
            gradients.add(self.chain.made[index], gradient)
        return self._pulled(self._named(arguments[:number]), gradients, frozenset())

    def _seeds(self, name: str) -> frozenset[str]:
        """The results at which a function's backward begins."""
        unit, made = self.unit, self.chain.made
        if name == "forward":
            return frozenset()
        return frozenset(made[i] for i in ([unit.results.index("loss")] if name == "both" else unit.differentiated))

    def _taken(self, seeds: frozenset[str]) -> list[tuple[int, ...]]:
        """The results of each part that have a gradient if these values have one."""
        names, found = set(seeds), list[tuple[int, ...]]()
        for part in reversed(self._parts):
            found.append(taken := part.part.taken_of(names))
            if taken:
                names.update(part.part.inputs[index] for index in part.part.taking(taken).graph.differentiable)
        return found[::-1]

    def _named(self, inputs: Sequence[Tensor]) -> Values:
        return dict(zip(self.chain.given, inputs, strict=True))

    def _results(self, values: Values) -> tuple[Any, ...]:
        return tuple(values[each] if isinstance(each, str) else each for each in self.chain.made)

    def _late(self, parts: Sequence[WholePart | PartInPieces]) -> tuple[list[WholePart], set[str]]:
        """The parts that run only after the backward, for the results, and the values that must be kept until then."""
        late = [part for part in parts if isinstance(part, WholePart) and not part.is_ahead]
        read = {name for part in late for name in part.part.inputs}
        return late, read.union(each for each in self.chain.made if isinstance(each, str))

    def _pulled(self, values: Values, gradients: Gradients, keep: Set[str]) -> tuple[Tensor, ...]:
        """The inputs' gradients, from those of the results. keep: the values to leave in `values`."""
        taken = self._taken_by(frozenset(gradients))
        for part, results in zip(self._parts, taken, strict=True):
            if part.is_ahead:
                part.forward(values, results)
        for part, results in zip(reversed(self._parts), reversed(taken), strict=True):
            for name in part.part.outputs if part.is_ahead else ():
                if name not in keep:
                    del values[name]  # all of its readers have run
            part.pull(values, gradients, keep, results)
        names = (self.chain.given[index] for index in self.unit.differentiable)
        return tuple(gradients[name] if name in gradients else torch.zeros_like(values[name]) for name in names)


def _total(nbytes: Mapping[str, int], names: Set[str]) -> int:
    return sum(size for name, size in nbytes.items() if name in names)
