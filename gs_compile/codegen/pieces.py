"""pieces: the head's part that acts on tokens one by one runs on some of them at a time, so that what it makes of all
tokens, such as the logits, is never in memory.

    forward    before; the tokens, piece by piece; after
    backward   before; the gradients of what `after` reads; the tokens, forward and backward of each piece together;
               the gradients of what `before` reads

Where the gradients of what `after` reads follow from its values (of a loss that is no sum over tokens), the pieces run
forward first, and again with their backward. Gradients of what all pieces read, such as the head's weight, are summed
in fp32 at least (`capture.gradients`).

A piece is as large as the memory that the code of other units takes anyway allows, and has `LEAST` tokens at least.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gs_compile.capture.gradients import tensors_of
from gs_compile.capture.graph import TensorSpec, UnitGraph
from gs_compile.capture.inductor import Generator
from gs_compile.capture.memory import peak_nbytes
from gs_compile.codegen.differentiate import Cost, Differentiated, Function, OfAllLengths, OfPieces
from gs_compile.codegen.token_wise import NotInPiecesError, Part, Region, region
from gs_compile.runtime.units import Accumulator, laid_out

LEAST = 256  # tokens of a piece: with fewer, products with the weights wait for the weights
STEP = 64  # by which pieces grow
Values = dict[str, Any]


class InPieces(Differentiated):
    """The code of the epilogue, in pieces where it would need more memory than any of `beside`, the other units' code.

    num_tokens: of a piece at most; None: as many as that memory allows; 0: it is never cut.
    """

    def __init__(
        self,
        unit: UnitGraph,
        generator: Generator,
        common: OfAllLengths | None,
        beside: Collection[Differentiated],
        num_tokens: int | None,
    ) -> None:
        super().__init__(unit, generator, common)
        self._beside, self._asked = beside, num_tokens
        self._pieces: dict[int, tuple[Part, Differentiated]] = {}
        self._in_pieces: dict[str, Function] = {}

    def function(self, name: str, level: int = 0) -> Function:
        if not self.tokens_per_piece:
            return super().function(name, level)
        if name not in self._in_pieces:
            with self._timed():
                for part in (self._before, self._after):
                    for function in ("forward", "backward")[: 1 + (name != "forward" and part.is_trained)]:
                        part.function(function)
                for begin, end in self._ranges:
                    self._piece(end - begin)[1].function("forward" if name == "forward" else "joint")
            self._in_pieces[name] = getattr(self, f"_{name}_in_pieces")
        return self._in_pieces[name]

    def has_function(self, name: str, level: int = 0) -> bool:
        return name in self._in_pieces or super().has_function(name, level)

    def cost(self, name: str) -> Cost:
        whole, number = super().cost(name), self.tokens_per_piece
        if not number:
            return whole
        again = 0.0 if name == "forward" or self._is_one_pass else super().cost("forward").flops
        return Cost(whole.flops + again, self._nbytes(name, number))

    @property
    def tokens_per_piece(self) -> int | None:
        """The most tokens of a piece; None: it runs whole. What the first length has is for all."""
        if self.common.pieces is None:
            self.common.pieces = OfPieces()
            self.common.pieces.num_tokens = None if self._asked == 0 or self.whole_reason else self._chosen()
        return self.common.pieces.num_tokens

    @cached_property
    def whole_reason(self) -> str:
        """Why it cannot run in pieces; "" where it can."""
        try:
            self._piece(self._least)[1].graph("joint" if self.is_trained else "forward")
        except NotInPiecesError as error:
            return str(error)
        return ""

    def _chosen(self) -> int | None:
        """As asked for, or the tokens for which there is room, `LEAST` at least."""
        if self._asked:
            return self._asked
        room = max((each.workspace_nbytes for each in self._beside), default=0)
        if self._whole_nbytes <= room:
            return None
        one, two = (self._nbytes(self.last_name, number) for number in (self._least, 2 * self._least))
        per_token = max((two - one) / self._least, 1.0)
        most = self._least + max(int((room - one) / per_token) // STEP * STEP, 0)
        return most if self._nbytes(self.last_name, min(most, self.region.num_tokens)) < self._whole_nbytes else None

    @property
    def _whole_nbytes(self) -> int:
        return super().cost(self.last_name).nbytes

    # The parts -------------------------------------------------------------------------------------------------------

    @cached_property
    def region(self) -> Region:
        return region(self.unit)

    @cached_property
    def _before(self) -> Differentiated:
        return Differentiated(self.region.before.graph, Generator("eager"))

    @cached_property
    def _after(self) -> Differentiated:
        return Differentiated(self.region.after.graph, Generator("eager"))

    def _piece(self, num_tokens: int) -> tuple[Part, Differentiated]:
        if num_tokens not in self._pieces:
            assert self.common.pieces is not None
            part = self.region.tokens(num_tokens)
            self._pieces[num_tokens] = part, Differentiated(part.graph, self._generator, self.common.pieces)
        return self._pieces[num_tokens]

    @property
    def _least(self) -> int:
        return min(LEAST, self.region.num_tokens)

    @property
    def _ranges(self) -> list[tuple[int, int]]:
        """The tokens of each piece, as even as can be: of two sizes at most."""
        assert self.tokens_per_piece
        total = self.region.num_tokens
        number = -(-total // self.tokens_per_piece)
        bounds = [total * place // number for place in range(number + 1)]
        return list(zip(bounds[:-1], bounds[1:], strict=True))

    @cached_property
    def _is_one_pass(self) -> bool:
        """Whether no gradient of what `after` reads follows from what the pieces make."""
        if not self._after.is_trained:
            return True
        made = self._piece(self._least)[0].outputs
        placeholders = self._after.graph("backward").graph.find_nodes(op="placeholder")
        pairs = zip(self.region.after.inputs, placeholders, strict=False)
        return not any(placeholder.users for name, placeholder in pairs if name in made)

    def _nbytes(self, name: str, number: int) -> int:
        """The most bytes that a function has alive beside its inputs, results of a forward, and the gradient of x."""
        (part, code), region = self._piece(number), self.region
        total = region.num_tokens
        before, after = (each.cost("forward").nbytes for each in (self._before, self._after))
        kept = sum(spec.nbytes for spec in region.before.graph.result_specs)
        collects = name != "backward" or not self._is_one_pass
        exits = [*zip(part.outputs, part.graph.result_specs, strict=True)]
        kept += sum(_of(total, spec) for made, spec in exits if collects and made not in region.made)
        entries = [*zip(part.inputs, part.graph.specs, strict=True)]
        kept += sum(_of(total, spec) for entry, spec in entries if region.is_cut(entry))
        if name == "forward":
            return kept + max(before, after, peak_nbytes(code.graph("forward")))
        kept += sum(_of(total, spec) for _, spec in exits if spec.requires_grad)
        for entry, spec in entries:
            if spec.requires_grad and entry in region.forms:
                kept += _of(total, spec) if entry != region.x or region.is_cut(entry) else 0
            elif spec.requires_grad:
                kept += spec.numel * torch.promote_types(spec.dtype, torch.float32).itemsize
        apart = [each.cost("backward").nbytes for each in (self._before, self._after) if each.is_trained]
        return kept + max(before, after, *apart, peak_nbytes(code.factored("joint")[0]))

    # How it runs -----------------------------------------------------------------------------------------------------

    def _forward_in_pieces(self, *inputs: Tensor) -> tuple[Any, ...]:
        values = self._begun(inputs)
        self._run_pieces(values)
        return self._results(values)

    def _both_in_pieces(self, *inputs: Tensor) -> tuple[Any, ...]:
        values = self._begun(inputs)
        loss = self.unit.results.index("loss")
        spec = self.unit.result_specs[loss]
        found = self._pulled(values, {self.region.made[loss]: torch.ones((), dtype=spec.dtype, device=spec.device)})
        return (*self._results(values), *found)

    def _backward_in_pieces(self, *arguments: Tensor) -> tuple[Any, ...]:
        number = len(self.region.given)
        values, gradients = self._begun(arguments[:number]), dict[str, Tensor]()
        for index, gradient in zip(self.unit.differentiated, arguments[number:], strict=True):
            _add(gradients, self.region.made[index], gradient)
        return self._pulled(values, gradients)

    def _begun(self, inputs: Sequence[Tensor]) -> Values:
        """The inputs by name, and what does not need x."""
        values: Values = dict(zip(self.region.given, inputs, strict=True))
        return values | _called(self.region.before, self._before, values)

    def _results(self, values: Values) -> tuple[Any, ...]:
        values = values | _called(self.region.after, self._after, values)
        return tuple(values[each] if isinstance(each, str) else each for each in self.region.made)

    def _pulled(self, values: Values, gradients: Values) -> tuple[Tensor, ...]:
        """The gradients of the inputs, of those of the results; `values` has what the pieces have made after it."""
        if not self._is_one_pass:
            self._run_pieces(values)
        _pull(self.region.after, self._after, values, gradients)
        self._pull_pieces(values, gradients)
        _pull(self.region.before, self._before, values, gradients)
        names = (self.region.given[index] for index in self.unit.differentiable)
        return tuple(gradients[name] if name in gradients else torch.zeros_like(values[name]) for name in names)

    def _run_pieces(self, values: Values) -> None:
        flat, made = self._flat(values), dict[str, Tensor]()
        for begin, end in self._ranges:
            part, code = self._piece(end - begin)
            outputs = code.function("forward")(*self._taken(part, flat, begin, end))
            self._write(made, zip(part.outputs, outputs, strict=True), begin)
        values |= {name: self.region.shaped(name, tensor) for name, tensor in made.items()}

    def _pull_pieces(self, values: Values, gradients: Values) -> None:
        """Forward and backward of each piece; adds to `gradients`, and to `values` what the pieces have made."""
        part, region = self._piece(self._least)[0], self.region
        outer = []
        for index in part.graph.differentiated:
            name, spec = part.outputs[index], part.graph.result_specs[index]
            gradient = gradients.pop(name, None)
            zeros = (region.num_tokens, *spec.shape[1:])
            outer.append(
                torch.zeros(zeros, dtype=spec.dtype, device=spec.device)
                if gradient is None
                else region.flat(name, gradient)
            )
        flat, made, pulled, shared = self._flat(values), dict[str, Tensor](), dict[str, Tensor](), Accumulator()
        for begin, end in self._ranges:
            self._pull_piece(begin, end, flat, outer, (made, pulled, shared))
        values |= {name: region.shaped(name, tensor) for name, tensor in made.items()}
        for name, tensor in {**{name: region.shaped(name, t) for name, t in pulled.items()}, **shared.sums}.items():
            _add(gradients, name, tensor)

    def _pull_piece(
        self, begin: int, end: int, flat: Values, outer: Sequence[Tensor], into: tuple[Values, Values, Accumulator]
    ) -> None:
        (part, code), (made, pulled, shared) = self._piece(end - begin), into
        taken = self._taken(part, flat, begin, end)
        found = code.function("joint")(*taken, *(gradient[begin:end].contiguous() for gradient in outer))
        outputs, terms = found[: len(part.outputs)], found[len(part.outputs) :]
        self._write(made, zip(part.outputs, outputs, strict=True), begin)
        names = [part.inputs[index] for index in part.graph.differentiable]
        of_tokens = [(name, term) for name, term in zip(names, terms, strict=True) if name in self.region.forms]
        self._write(pulled, of_tokens, begin)
        alive = [*taken, *outputs, *(tensor for term in terms for tensor in tensors_of(term))]
        shared.add(dict(each for each in zip(names, terms, strict=True) if each[0] not in self.region.forms), alive)

    def _flat(self, values: Values) -> Values:
        """What the pieces take, those with tokens as [tokens, ...]."""
        names, forms = self._piece(self._least)[0].inputs, self.region.forms
        return {name: self.region.flat(name, values[name]) if name in forms else values[name] for name in names}

    def _taken(self, part: Part, flat: Values, begin: int, end: int) -> list[Tensor]:
        pairs = zip(part.inputs, part.graph.specs, strict=True)
        forms = self.region.forms
        return [laid_out(flat[name][begin:end] if name in forms else flat[name], spec) for name, spec in pairs]

    def _write(self, into: Values, tensors: Iterable[tuple[str, Tensor]], begin: int) -> None:
        """Put those of a piece to their place among all."""
        for name, tensor in tensors:
            if name not in into:
                into[name] = tensor.new_empty(self.region.num_tokens, *tensor.shape[1:])
            into[name][begin : begin + len(tensor)] = tensor


def _called(part: Part, code: Differentiated, values: Values) -> Values:
    """What a part makes."""
    given = zip(part.inputs, part.graph.specs, strict=True)
    made = code.function("forward")(*(laid_out(values[name], spec) for name, spec in given))
    return dict(zip(part.outputs, made, strict=True))


def _pull(part: Part, code: Differentiated, values: Values, gradients: Values) -> None:
    """Add to `gradients` those of what a part takes; what its backward does not read may be missing in `values`."""
    if not code.is_trained:
        return
    given = []
    for index in part.graph.differentiated:
        spec, gradient = part.graph.result_specs[index], gradients.pop(part.outputs[index], None)
        given.append(torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device) if gradient is None else gradient)
    pairs = zip(part.inputs, part.graph.specs, strict=True)
    taken = (laid_out(values[name], spec) if name in values else None for name, spec in pairs)
    terms = code.function("backward")(*taken, *given)
    for index, term in zip(part.graph.differentiable, terms, strict=True):
        _add(gradients, part.inputs[index], term if isinstance(term, Tensor) else term.dense())


def _add(gradients: Values, name: str, gradient: Tensor) -> None:
    gradients[name] = gradients[name] + gradient if name in gradients else gradient


def _of(total: int, spec: TensorSpec) -> int:
    """Bytes for so many tokens of a value of a piece."""
    return spec.nbytes // spec.shape[0] * total
