"""bodies: checks that the graphs inside an operation of the model keep samples apart.

A `torch.autograd.Function` has a forward and a backward; `torch.scan`, `torch.cond` and the like have graphs that they
repeat or choose. In a backward, a parameter's gradient must be a sum over the samples, as micro-batches' are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from gs_compile.capture.graph import output_values
from gs_compile.capture.in_place import in_memory_of, mutated
from gs_compile.capture.internals import tree_leaves
from gs_compile.capture.operations import (
    FILLING,
    FUNCTION,
    JOINING,
    LINEAR,
    LINEAR_IN,
    has_samples,
    maker_of,
    operation,
    spec_made,
    tensor_spec,
)
from gs_compile.capture.samples import (
    COUNTED,
    NUMBERED,
    REDUCES,
    Provenance,
    letters_of_samples,
    no_shares,
    why_it_mixes,
    why_sizes_mix,
    why_values_mix,
)

# A value without samples is a sum over them if it comes from one of these, from a derivative of torch's, or from an
# addition to zeros. Any other reduction or selection is not.
_SUMS = frozenset("sum nansum sum_to_size matmul mm bmm mv dot vdot inner tensordot linear einsum".split())
_ADDING_ROWS = frozenset("index_add scatter_add index_put".split())
_SPARING = frozenset("where masked_fill setitem".split())  # these keep values, or replace some by others
_ZEROS = frozenset("zeros zeros_like new_zeros".split())
_AS_THEY_ARE = frozenset("to type int long clone detach".split())


def why_bodies_mix(node: fx.Node) -> tuple[fx.Node, str] | None:
    """The operation that mixes samples in a graph that `node` runs, and why it does; None: there is none."""
    bodies = node.meta.get("bodies", ())
    if not bodies:
        return None
    if operation(node) == "flex_attention":
        return next(filter(None, (_Entry().why(body) for body in bodies)), None)
    if operation(node) == FUNCTION:
        forward, backward = bodies
        return _Body().why(forward) or _Backward(forward, node.args[2:]).why(backward)
    if operation(node) == "while_loop" and (counted := _Body().counted(bodies[0])) is not None:
        return counted, COUNTED
    return next(filter(None, (_Body().why(body) for body in bodies)), None)


class _Body:
    """Checks the operations of a graph in their order; no reduction over samples is allowed."""

    def __init__(self) -> None:
        self.sums, self.counts = set[fx.Node](), set[fx.Node]()
        self.provenance = Provenance(self.counts.__contains__)

    def why(self, body: fx.GraphModule) -> tuple[fx.Node, str] | None:
        for node in body.graph.nodes:
            self.provenance.follow(node)
            if node.op in ("call_function", "call_method"):
                if found := why_bodies_mix(node):
                    return found
                if why := self._look_at(node):
                    return maker_of(node), why
                if node in self.sums:
                    self.sums.update(*map(in_memory_of, mutated(node)))
        return None

    def counted(self, body: fx.GraphModule) -> fx.Node | None:
        """The first result of the graph that is counted over the samples."""
        self.why(body)
        return next((each for each in output_values(body) if each in self.counts), None)

    def _look_at(self, node: fx.Node) -> str:
        """Why the next operation mixes samples; empty: it does not."""
        maker = maker_of(node)
        name, read = operation(maker), maker.all_input_nodes
        if not self.sums.isdisjoint(read):
            self.sums.add(node)
            return "" if self._keeps_sums(node, name) else no_shares(name)
        reads = any(map(has_samples, read)) or not self.counts.isdisjoint(read)
        mixes = why_it_mixes(node, self.provenance) if reads else why_sizes_mix(node, name)
        if why := why_values_mix(node, name) or mixes:
            return why
        if not reads or (spec := spec_made(node)) is None or spec.batch_dims or name in FILLING:
            return ""
        if spec.dtype.is_floating_point or spec.dtype.is_complex:
            return self._reduced(node, name)
        self.counts.add(node)
        return ""

    def _keeps_sums(self, node: fx.Node, name: str) -> bool:
        """Whether the result is a sum if its operands are: these are added, or scaled by what all samples share."""
        read = node.all_input_nodes
        given = [self._is_sum(each) for each in node.args if isinstance(each, (fx.Node, int, float))]
        if node.meta.get("batch_numbers") or any(map(has_samples, read)):
            return False
        if name in _SPARING:  # by what is no sum
            values = [*node.args[:1], *node.args[2:]] if name != "where" else node.args[1:]
            return all(map(self._is_sum, values)) and given.count(False) <= 1
        match LINEAR_IN.get(name, "either" if name in _SUMS and len(read) == 2 else None):
            case "all":
                return all(map(self._is_sum, read) if name in JOINING else given)
            case "either":
                return sum(each in self.sums for each in read) == 1
            case "the first":
                return given == [True, False]
            case found:
                return found is not None

    def _is_sum(self, value: Any) -> bool:
        return value in self.sums if isinstance(value, fx.Node) and not _is_zero(value) else _is_zero(value)

    def _reduced(self, node: fx.Node, name: str) -> str:
        return REDUCES


class _Entry(_Body):
    """The body of a function that computes a score or a mask from the indices of a sample, a head, a query and a key.

    A sample's index starts at 0 in every micro-batch, so it may only be used to index along the samples.
    """

    def why(self, body: fx.GraphModule) -> tuple[fx.Node, str] | None:
        inputs = body.graph.find_nodes(op="placeholder")
        is_of_score = inputs[0].meta["spec"].dtype.is_floating_point  # the score comes before the indices
        self.numbers = {inputs[is_of_score]}
        made = [each for each in tree_leaves(body.graph.output_node().args) if isinstance(each, fx.Node)]
        return super().why(body) or next(((each, COUNTED) for each in made if each in self.counts), None)

    def _look_at(self, node: fx.Node) -> str:
        name, given = operation(node), self.numbers.intersection(node.all_input_nodes)
        if name in FILLING or name.endswith("_like") or (name in ("getitem", "index") and self._picks_own(node)):
            return ""
        if given and name not in _AS_THEY_ARE:
            return NUMBERED
        self.numbers |= {node} if given else set()
        return super()._look_at(node)

    def _picks_own(self, node: fx.Node) -> bool:
        """Whether the sample's index is used along the samples, and nowhere else."""
        spec, index = tensor_spec(node.args[0]), node.args[1]
        parts = tuple(index) if isinstance(index, tuple | list) else (index,)
        own = [dim for dim, part in enumerate(parts) if isinstance(part, fx.Node) and part in self.numbers]
        return spec is not None and tuple(own) == spec.batch_dims


class _Backward(_Body):
    """The body of a function's backward: gradients without samples, its arguments among them, are sums over samples.

    given: the function's inputs.
    """

    def __init__(self, forward: fx.GraphModule, given: Sequence[Any]) -> None:
        super().__init__()
        self.saved, self.given = output_values(forward)[-1], given

    def why(self, body: fx.GraphModule) -> tuple[fx.Node, str] | None:
        read = body.graph.find_nodes(op="placeholder")  # gradients, and what the forward has saved
        num_saved = sum(isinstance(each, fx.Node) for each in self.saved)
        gradients = read[: len(read) - num_saved]
        self.sums = {each for each in gradients if tensor_spec(each) is not None and not has_samples(each)}
        return super().why(body) or self._why_it_is_none(output_values(body))

    def _why_it_is_none(self, made: Iterable[Any]) -> tuple[fx.Node, str] | None:
        """Why the gradient of a value without samples is not a sum over them."""
        for value, gradient in zip(self.given, made, strict=False):
            spec = tensor_spec(value)
            is_trained = spec is not None and spec.requires_grad and not spec.batch_dims
            if is_trained and isinstance(gradient, fx.Node) and not self._is_sum(gradient):
                return gradient, "is a gradient that is the same for all micro-batches, of which each would add it"
        return None

    def _reduced(self, node: fx.Node, name: str) -> str:
        maker = maker_of(node)
        if name in _ADDING_ROWS:
            adds = name != "index_put" or True in (*maker.args[3:], *maker.kwargs.values())
            is_sum = adds and _is_zero(maker.all_input_nodes[0])
        elif name == "einsum":
            is_sum = len(set(letters_of_samples(maker))) < 2
        else:
            is_sum = name in _SUMS or (name.endswith("_backward") and "batch_norm" not in name)
        self.sums |= {node} if is_sum else set()
        return "" if is_sum else super()._reduced(node, name)


def _is_zero(value: Any) -> bool:
    while isinstance(value, fx.Node) and operation(value) in LINEAR and value.all_input_nodes:
        value = value.all_input_nodes[0]
    return operation(value) in _ZEROS if isinstance(value, fx.Node) else value == 0
