"""parts: the code of the parts of a unit (`codegen.token_wise`): on all tokens, or on some of them at a time.

Both take what they read from `values`, by name, and put there what they make. `pull` takes the gradients of what a part
makes out of `gradients`, and adds those of what it reads. A part in pieces runs forward again in it, piece by piece,
and leaves what it makes in `values`, too. Gradients of what all pieces read, such as the head's weight, are summed in
fp32 at least (`capture.gradients`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gs_compile.capture.gradients import tensors_of
from gs_compile.capture.graph import TensorSpec, output_values
from gs_compile.capture.inductor import Generator, memory_of
from gs_compile.capture.memory import peak_nbytes
from gs_compile.codegen.differentiate import Differentiated, OfAllLengths
from gs_compile.codegen.token_wise import Part, TokenPart
from gs_compile.runtime.units import Accumulator, laid_out

Values = dict[str, Any]


class OnAll:
    """A part that runs on all tokens; it is not compiled."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.code = Differentiated(part.graph, Generator("eager"))

    @property
    def is_trained(self) -> bool:
        return self.code.is_trained

    @cached_property
    def reads(self) -> frozenset[str]:
        """What its backward reads of the values that it takes."""
        if not self.is_trained:
            return frozenset()
        placeholders = self.code.graph("backward").graph.find_nodes(op="placeholder")
        return frozenset(name for name, node in zip(self.part.inputs, placeholders, strict=False) if node.users)

    def compile_code(self, *, backward: bool) -> None:
        if self.is_trained or not backward:
            self.code.function("backward" if backward else "forward")

    def inside_nbytes(self, *, backward: bool) -> int:
        """Bytes alive inside, beside what it takes and makes."""
        if not backward:
            return self.code.cost("forward").nbytes
        return self.code.cost("backward").nbytes if self.is_trained else 0

    @property
    def made_nbytes(self) -> dict[str, int]:
        """Of what it makes, without views of what it takes."""
        module = self.part.graph.module
        taken = {memory_of(node) for node in module.graph.find_nodes(op="placeholder")}
        made = zip(self.part.outputs, output_values(module), self.part.graph.result_specs, strict=True)
        return {name: 0 if memory_of(node) in taken else spec.nbytes for name, node, spec in made}

    @property
    def pulled_nbytes(self) -> dict[str, int]:
        """Of the gradients that it adds; its backward counts them among what is inside."""
        return {}

    def forward(self, values: Values) -> None:
        taken = (laid_out(values[name], spec) for name, spec in self._taken)
        values |= zip(self.part.outputs, self.code.function("forward")(*taken), strict=True)

    def pull(self, values: Values, gradients: Values) -> None:
        """What its backward does not read may be missing in `values`."""
        if not self.is_trained:
            return
        graph, given = self.part.graph, []
        for index in graph.differentiated:
            gradient, spec = gradients.pop(self.part.outputs[index], None), graph.result_specs[index]
            given.append(_zeros(spec.shape, spec) if gradient is None else laid_out(gradient, spec))
        taken = (laid_out(values[name], spec) if name in self.reads else None for name, spec in self._taken)
        terms = self.code.function("backward")(*taken, *given)
        for index, term in zip(graph.differentiable, terms, strict=True):
            add(gradients, self.part.inputs[index], term if isinstance(term, Tensor) else term.dense())

    @property
    def _taken(self) -> Iterable[tuple[str, TensorSpec]]:
        return zip(self.part.inputs, self.part.graph.specs, strict=True)


class OnSome:
    """A part that runs on `size` tokens at a time, at most; pieces share their code by `common`."""

    def __init__(self, part: TokenPart, size: int, generator: Generator, common: OfAllLengths) -> None:
        self.tokens = part
        self._generator, self._common = generator, common
        self._pieces: dict[int, tuple[Part, Differentiated]] = {}
        number = -(-part.num_tokens // size)  # of two sizes at most, as even as can be
        bounds = [part.num_tokens * place // number for place in range(number + 1)]
        self._ranges = list(pairwise(bounds))
        self.part, self._code = self._piece(max(end - begin for begin, end in self._ranges))

    @property
    def is_trained(self) -> bool:
        return self._code.is_trained

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(self.part.inputs)

    def compile_code(self, *, backward: bool) -> None:
        for begin, end in self._ranges:
            self._piece(end - begin)[1].function("joint" if backward and self.is_trained else "forward")

    def inside_nbytes(self, *, backward: bool) -> int:
        """Bytes alive inside, beside what it takes and makes, and the gradients that it adds."""
        if not backward or not self.is_trained:
            return peak_nbytes(self._code.graph("forward"))
        return peak_nbytes(self._code.factored("joint")[0])

    @property
    def made_nbytes(self) -> dict[str, int]:
        pairs = zip(self.part.outputs, self.part.graph.result_specs, strict=True)
        return {name: self._of_all(spec) for name, spec in pairs}

    @property
    def pulled_nbytes(self) -> dict[str, int]:
        """Of the gradients that it adds."""
        wide = {name: spec for name, spec in self._taken if spec.requires_grad}
        return {
            name: self._of_all(spec)
            if name in self.tokens.forms
            else spec.numel * torch.promote_types(spec.dtype, torch.float32).itemsize
            for name, spec in wide.items()
        }

    def forward(self, values: Values) -> None:
        rows, made = self._rows(values), Values()
        for begin, end in self._ranges:
            part, code = self._piece(end - begin)
            outputs = code.function("forward")(*self._taken_of(part, rows, begin, end))
            self._write(made, zip(part.outputs, outputs, strict=True), begin)
        values |= {name: self.tokens.shaped(name, tensor) for name, tensor in made.items()}

    def pull(self, values: Values, gradients: Values) -> None:
        if not self.is_trained:
            self.forward(values)
            return
        outer = []
        for index in self.part.graph.differentiated:
            name, spec = self.part.outputs[index], self.part.graph.result_specs[index]
            gradient = gradients.pop(name, None)
            zeros = (1, self.tokens.num_tokens, *spec.shape[1:])
            outer.append(_zeros(zeros, spec) if gradient is None else self.tokens.rows(name, gradient))
        rows, made, pulled, shared = self._rows(values), Values(), Values(), Accumulator()
        for begin, end in self._ranges:
            self._pull_piece(begin, end, rows, outer, (made, pulled, shared))
        values |= {name: self.tokens.shaped(name, tensor) for name, tensor in made.items()}
        for name, tensor in pulled.items():
            add(gradients, name, self.tokens.shaped(name, tensor))
        for name, tensor in shared.sums.items():
            add(gradients, name, tensor)

    def _pull_piece(
        self, begin: int, end: int, rows: Values, outer: Sequence[Tensor], into: tuple[Values, Values, Accumulator]
    ) -> None:
        (part, code), (made, pulled, shared) = self._piece(end - begin), into
        taken = self._taken_of(part, rows, begin, end)
        given = (self.tokens.piece(gradient, begin, end).contiguous() for gradient in outer)
        found = code.function("joint")(*taken, *given)
        outputs, terms = found[: len(part.outputs)], found[len(part.outputs) :]
        self._write(made, zip(part.outputs, outputs, strict=True), begin)
        named = dict(zip((part.inputs[index] for index in part.graph.differentiable), terms, strict=True))
        of_all = {name: named.pop(name) for name in list(named) if name not in self.tokens.forms}
        self._write(pulled, named.items(), begin)
        shared.add(of_all, among=[*taken, *outputs, *(tensor for term in terms for tensor in tensors_of(term))])

    def _piece(self, size: int) -> tuple[Part, Differentiated]:
        if size not in self._pieces:
            part = self.tokens.of(size)
            self._pieces[size] = part, Differentiated(part.graph, self._generator, self._common)
        return self._pieces[size]

    @property
    def _taken(self) -> Iterable[tuple[str, TensorSpec]]:
        return zip(self.part.inputs, self.part.graph.specs, strict=True)

    def _rows(self, values: Values) -> Values:
        """What it takes, what has tokens as [samples, tokens, ...]."""
        forms, names = self.tokens.forms, self.part.inputs
        return {name: self.tokens.rows(name, values[name]) if name in forms else values[name] for name in names}

    def _taken_of(self, part: Part, rows: Values, begin: int, end: int) -> list[Tensor]:
        forms, piece = self.tokens.forms, self.tokens.piece
        pairs = zip(part.inputs, part.graph.specs, strict=True)
        return [laid_out(piece(rows[name], begin, end) if name in forms else rows[name], spec) for name, spec in pairs]

    def _write(self, into: Values, tensors: Iterable[tuple[str, Any]], begin: int) -> None:
        """Put those of a piece to their place among all."""
        for name, tensor in tensors:
            if name not in into:
                into[name] = tensor.new_empty(self.tokens.num_tokens, *tensor.shape[1:])
            into[name][begin : begin + len(tensor)] = tensor

    def _of_all(self, spec: TensorSpec) -> int:
        """Bytes of a value of a piece, for all tokens."""
        return spec.nbytes // spec.shape[0] * self.tokens.num_tokens if spec.shape else spec.nbytes


def add(gradients: Values, name: str, gradient: Tensor) -> None:
    gradients[name] = gradients[name] + gradient if name in gradients else gradient


def _zeros(shape: Sequence[int], spec: TensorSpec) -> Tensor:
    return torch.zeros(shape, dtype=spec.dtype, device=spec.device)
