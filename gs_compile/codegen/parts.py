"""parts: the code of a unit's parts (`codegen.token_wise`), which run on all tokens or on some of them at a time.

Both kinds read their inputs from `values`, by name, and write their outputs there. `pull` is the backward: it removes
the gradients of the part's outputs from `gradients` and adds those of its inputs. taken: the indices of the outputs
that have a gradient; others get none, not zeros. In `pull`, a part in pieces runs its forward again, piece by piece,
and leaves in `values` only what is to be kept. Gradients of what all pieces read, such as a weight, are summed in fp32
or wider (`capture.gradients`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import pairwise
from typing import Any

from torch import Tensor, fx

from gs_compile.capture.gradients import tensors_of
from gs_compile.capture.graph import TensorSpec, output_values
from gs_compile.capture.inductor import Generator, memory_of
from gs_compile.capture.memory import peak_nbytes
from gs_compile.capture.uniform import structure
from gs_compile.codegen.costs import Costs
from gs_compile.codegen.differentiate import Differentiated, Function, SharedCode
from gs_compile.codegen.levels import subgraph
from gs_compile.codegen.token_wise import Subgraph, TokenPart
from gs_compile.runtime.units import Accumulator, laid_out

AS_TRACED = Generator("eager")
Values = dict[Any, Any]  # tensors by name, and by part those that it has saved


class Gradients(dict[str, Tensor]):
    """Gradients by name; rows: the memory [tokens, ...] of those that a part in pieces made, to add to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, Tensor] = {}

    def add(self, name: str, gradient: Tensor) -> None:
        self[name] = self[name] + gradient if name in self else gradient
        self.rows.pop(name, None)


class _Taking:
    """A part whose backward takes the gradients of only some results, and its code."""

    def __init__(self, part: Subgraph) -> None:
        self.part, self.code = part, Differentiated(part.graph, AS_TRACED)

    @cached_property
    def halves(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward of a part that runs ahead: the forward also returns what the backward reads."""
        return halves(self.code.graph("joint"), len(self.part.inputs), len(self.part.outputs))

    @cached_property
    def functions(self) -> tuple[Function, Function]:
        forward, backward = self.halves
        return AS_TRACED.generate(forward), AS_TRACED.generate(backward)


class WholePart:
    """A part that runs on all tokens; it is not compiled.

    is_ahead: its forward runs before any backward and saves what its own backward reads, as with attention.
    """

    def __init__(self, part: Subgraph) -> None:
        self.part, self.is_ahead = part, False
        self._taking = cache(lambda taken: _Taking(part.taking(taken)))  # cached as long as this object lives
        self._all = self._taking(part.graph.differentiated)
        self.code = self._all.code

    @cached_property
    def reads(self) -> frozenset[str]:
        """Those of its inputs that its backward reads."""
        if not self.code.is_trained:
            return frozenset()
        placeholders = self.code.graph("backward").graph.find_nodes(op="placeholder")
        return frozenset(name for name, node in zip(self.part.inputs, placeholders, strict=False) if node.users)

    @property
    def saves(self) -> bool:
        return self.is_ahead and self.code.is_trained

    def compile_code(self, taken: tuple[int, ...] | None) -> None:
        """Compile the backward that takes the gradients of these results; None: the forward."""
        if taken is None or (self.is_ahead and not taken):
            self.code.function("forward")
        elif taken and self.is_ahead:
            _ = self._taking(taken).functions
        elif taken:
            self._taking(taken).code.function("backward")

    def inside_nbytes(self, *, backward: bool) -> int:
        """The peak of live bytes, without what it takes, makes and saves."""
        if self.saves:
            graph = self._all.halves[backward]
            return peak_nbytes(graph, () if backward else range(len(output_values(graph))))
        if not backward:
            return self.code.cost("forward").nbytes
        return self.code.cost("backward").nbytes if self.code.is_trained else 0

    @property
    def saved_nbytes(self) -> int:
        """Bytes of what is saved, without what it takes."""
        return sum(self._saved.values()) if self.saves else 0

    @cached_property
    def made_nbytes(self) -> dict[str, int]:
        """Bytes of each result; 0 for a view of what it takes or saves."""
        graph = self._all.halves[0] if self.saves else self.part.graph.module
        known = self._taken_memory(graph) | (self._saved.keys() if self.saves else set())
        made = zip(self.part.outputs, output_values(graph), self.part.graph.result_specs, strict=False)
        return {name: 0 if memory_of(node) in known else spec.nbytes for name, node, spec in made}

    @cached_property
    def _saved(self) -> dict[Any, int]:
        """Bytes of what is saved, by memory, without what it takes."""
        forward = self._all.halves[0]
        taken, values = self._taken_memory(forward), output_values(forward)
        saved = {memory_of(node): node for node in values[len(self.part.outputs) :]}
        return {m: node.meta["val"].untyped_storage().nbytes() for m, node in saved.items() if m not in taken}

    @staticmethod
    def _taken_memory(module: fx.GraphModule) -> set[Any]:
        return {memory_of(node) for node in module.graph.find_nodes(op="placeholder")}

    @property
    def pulled_nbytes(self) -> dict[str, int]:
        """Bytes of the gradients that it adds."""
        taken = self.part.taken if self.code.is_trained else ()
        return {name: spec.nbytes for name, spec in taken if spec.requires_grad}

    def forward(self, values: Values, taken: tuple[int, ...] = ()) -> None:
        inputs = [_laid_out(values[name], spec) for name, spec in self.part.taken]
        made = (self._taking(taken).functions[0] if taken else self.code.function("forward"))(*inputs)
        values |= zip(self.part.outputs, made, strict=False)
        values[self] = made[len(self.part.outputs) :]

    def pull(self, values: Values, gradients: Gradients, keep: Set[str], taken: tuple[int, ...]) -> None:
        """The backward. Inputs that it does not read may be missing in `values`."""
        saved = values.pop(self, ())
        if not taken:
            return
        taking = self._taking(taken)
        part = taking.part
        pairs = zip(part.graph.differentiated, part.graph.gradient_specs, strict=True)
        given = [_laid_out(gradients.pop(part.outputs[index]), spec) for index, spec in pairs]
        inputs = [_laid_out(values[name], spec) if name in values else None for name, spec in part.taken]
        backward = taking.functions[1] if self.is_ahead else taking.code.function("backward")
        for index, term in zip(part.graph.differentiable, backward(*inputs, *saved, *given), strict=True):
            gradients.add(part.inputs[index], term if isinstance(term, Tensor) else term.dense())


@dataclass
class _Pulled:
    """What the pieces of a part have computed in its backward so far, by name.

    keep, kept: the names of the outputs to keep, and these outputs.
    known, rows: gradients [tokens, ...] of inputs with tokens: those to which other parts have added, and new ones.
    shared: gradients of what all pieces read.
    """

    keep: Set[str]
    known: Values
    kept: Values = field(default_factory=dict)
    rows: Values = field(default_factory=dict)
    shared: Accumulator = field(default_factory=Accumulator)


class PartInPieces:
    """A part that runs on at most `size` tokens at a time; pieces that compute the same share their code in `shared`.

    A number derived from the length, such as the divisor of each token's loss, is a constant of a piece.
    """

    def __init__(self, part: TokenPart, size: int, generator: Generator, shared: dict[Hashable, SharedCode]) -> None:
        self.tokens = part
        self._generator, self._shared = generator, shared
        self._pieces: dict[tuple[int, tuple[int, ...] | None], tuple[Subgraph, Differentiated]] = {}
        self.is_ahead, self.saved_nbytes = False, 0
        self._number = -(-part.num_tokens // size)  # of pieces, whose sizes differ by one at most
        self._of_piece = -(-part.num_tokens // self._number)
        self.part, self._code = self._piece(self._of_piece)

    @cached_property
    def _ranges(self) -> list[tuple[int, int]]:
        """Where pieces begin and end. Only code that runs needs it: a plan may count pieces of any size."""
        number, num_tokens = self._number, self.tokens.num_tokens
        return list(pairwise(num_tokens * place // number for place in range(number + 1)))

    @property
    def reads(self) -> frozenset[str]:
        return frozenset(self.part.inputs)

    @property
    def forward_flops(self) -> float:
        return self._code.cost_with_results("forward").flops * self.tokens.num_tokens / self._of_piece

    def compile_code(self, taken: tuple[int, ...] | None) -> None:
        """Compile the backward that takes the gradients of these results; None, or no results: the forward."""
        for begin, end in self._ranges:
            self._piece(end - begin, taken or None)[1].function("joint" if taken else "forward")

    def inside_nbytes(self, *, backward: bool) -> int:
        """The peak of live bytes, without what it takes and makes, and the gradients that it adds."""
        return self._code.cost_with_results("joint" if backward and self._code.is_trained else "forward").nbytes

    @property
    def made_nbytes(self) -> dict[str, int]:
        pairs = zip(self.part.outputs, self.part.graph.result_specs, strict=True)
        return {name: self._of_all(spec) for name, spec in pairs}

    @property
    def pulled_nbytes(self) -> dict[str, int]:
        """Bytes of the gradients that it adds."""
        return {
            name: self._of_all(spec) if name in self.tokens.forms else spec.summed_nbytes
            for name, spec in self.part.taken
            if spec.requires_grad
        }

    def forward(self, values: Values, taken: tuple[int, ...] = ()) -> None:
        rows, made = self._rows(values), Values()
        for begin, end in self._ranges:
            part, code = self._piece(end - begin)
            outputs = code.function("forward")(*self._taken_of(part, rows, begin, end))
            self._write(made, zip(part.outputs, outputs, strict=True), begin)
        values |= {name: self.tokens.shaped(name, tensor) for name, tensor in made.items()}

    def pull(self, values: Values, gradients: Gradients, keep: Set[str], taken: tuple[int, ...]) -> None:
        """The backward. keep: the outputs to write to `values`, unless the part has run ahead."""
        if not taken:
            if not keep.isdisjoint(self.part.outputs):
                self.forward(values)
            return
        names = [self.part.outputs[index] for index in taken]
        outer = [self.tokens.rows(name, gradients.pop(name)) for name in names]
        uncut = [name for name in self.part.inputs if not self.tokens.is_cut(name)]
        known = {name: gradients.rows[name] for name in uncut if name in gradients.rows}
        rows, into = self._rows(values), _Pulled(frozenset() if self.is_ahead else keep, known)
        for begin, end in self._ranges:
            self._pull_piece(begin, end, taken, rows, outer, into)
        values |= {name: self.tokens.shaped(name, tensor) for name, tensor in into.kept.items()}
        for name, tensor in into.rows.items():
            is_first = name not in gradients and name in uncut
            gradients.add(name, self.tokens.shaped(name, tensor))
            if is_first:
                gradients.rows[name] = tensor
        for name, tensor in into.shared.sums.items():
            gradients.add(name, tensor)

    def _pull_piece(
        self, begin: int, end: int, taken: tuple[int, ...], rows: Values, outer: Sequence[Tensor], into: _Pulled
    ) -> None:
        part, code = self._piece(end - begin, taken)
        inputs = self._taken_of(part, rows, begin, end)
        given = (self.tokens.piece(gradient, begin, end).contiguous() for gradient in outer)
        found = code.function("joint")(*inputs, *given)
        outputs, terms = found[: len(part.outputs)], found[len(part.outputs) :]
        pairs = zip(part.outputs, outputs, strict=True)
        self._write(into.kept, [(name, tensor) for name, tensor in pairs if name in into.keep], begin)
        named = dict(zip((part.inputs[index] for index in part.graph.differentiable), terms, strict=True))
        of_all = {name: named.pop(name) for name in list(named) if name not in self.tokens.forms}
        for name in named.keys() & into.known.keys():
            into.known[name][begin:end] += named.pop(name)
        self._write(into.rows, named.items(), begin)
        into.shared.add(of_all, among=[*inputs, *outputs, *(tensor for term in terms for tensor in tensors_of(term))])

    def _piece(self, size: int, taken: tuple[int, ...] | None = None) -> tuple[Subgraph, Differentiated]:
        """A piece of `size` tokens, and its code. taken: by its backward; None: all that may have a gradient."""
        taken = None if taken and taken == self.part.graph.differentiated else taken
        if (size, taken) not in self._pieces:
            part = self.tokens.of(size) if taken is None else self._piece(size)[0].taking(taken)
            common = self._shared.setdefault(structure(part.graph), SharedCode())
            self._pieces[size, taken] = part, Differentiated(part.graph, self._generator, common)
        return self._pieces[size, taken]

    def know(self, costs: Costs, place: int) -> None:
        """Use known costs. costs: of the unit; place: of this part in it."""
        self._code.costs = costs.of_part(place, self.part.graph, self._of_piece)

    def _rows(self, values: Values) -> Values:
        """Its inputs; those with tokens as [samples, tokens, ...]."""
        forms, names = self.tokens.forms, self.part.inputs
        return {name: self.tokens.rows(name, values[name]) if name in forms else values[name] for name in names}

    def _taken_of(self, part: Subgraph, rows: Values, begin: int, end: int) -> list[Tensor]:
        forms, piece = self.tokens.forms, self.tokens.piece
        return [
            _laid_out(piece(rows[name], begin, end) if name in forms else rows[name], spec) for name, spec in part.taken
        ]

    def _write(self, into: Values, tensors: Iterable[tuple[str, Any]], begin: int) -> None:
        """Write a piece's tensors to their place among those of all tokens."""
        for name, tensor in tensors:
            if name not in into:
                into[name] = tensor.new_empty(self.tokens.num_tokens, *tensor.shape[1:])
            into[name][begin : begin + len(tensor)] = tensor

    def _of_all(self, spec: TensorSpec) -> int:
        """Bytes of a piece's value, for all tokens."""
        return spec.nbytes // spec.shape[0] * self.tokens.num_tokens if spec.shape else spec.nbytes


def halves(joint: fx.GraphModule, num_inputs: int, num_results: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and backward of a joint graph: inputs -> results, saved; inputs, saved, gradients -> gradients."""
    nodes = [node for node in joint.graph.nodes if node.op != "output"]
    placeholders, values = joint.graph.find_nodes(op="placeholder"), output_values(joint)
    inputs, gradients = placeholders[:num_inputs], placeholders[num_inputs:]
    behind = set(gradients)
    for node in nodes:
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    last = {node for node in values[num_results:] if isinstance(node, fx.Node)}
    saved = [n for n in nodes if n.op == "call_function" and n not in behind and (n in last or behind & n.users.keys())]
    saved = [node for node in saved if isinstance(node.meta["val"], Tensor)]
    return (
        subgraph(joint, inputs, [*values[:num_results], *saved]),
        subgraph(joint, [*inputs, *saved, *gradients], values[num_results:]),
    )


def _laid_out(tensor: Tensor, spec: TensorSpec) -> Tensor:
    """`tensor` with the strides that a part was traced for; unchanged if these are of an expanded tensor."""
    return tensor if 0 in spec.stride else laid_out(tensor, spec)
