"""loss: rewrites the model's outputs so that micro-batches add up to what the user wrote for the whole batch.

Every value of the graph has one of these classes:

    local    one row or more for each sample; a micro-batch has the rows of its own samples
    sum      the whole batch's value is the sum of the micro-batches' values
    mean     ... is their sum weighted by size:  sum_j (m_j / B) value_j
    same     does not depend on the samples
    mixed    none of these: batch statistics, products of means

The classes follow from the operations:  sum(local) = sum,  mean(local) = mean,  sum + sum = sum,  same * sum = sum,
sum + (m_j / B) mean = sum, ...  A denominator that depends on the inputs alone, such as the number of labels in a
cross-entropy mean, is a sum that can be known before any layer runs: the `count` verb adds it over all micro-batches,
and the head reads the total. So  cross_entropy(mean)  becomes  cross_entropy(sum) / total,  which is right for uneven
labels and for micro-batches without any. An output that is a mean is multiplied by the micro-batch's `fraction`
m_j / B.

A mixed value that depends only on the inputs and on what blocks make for each sample, such as the loss that balances
experts, is computed from all samples at once, before the head runs (`whole_batch`); then it is the same for all
micro-batches. Any other mixed value that reaches an output is refused by name. (Contract: the loss of the global
batch.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import fx
from torch.fx.node import map_aggregate, map_arg
from torch.nn import functional

from gs_compile.capture.bodies import why_bodies_mix
from gs_compile.capture.checks import CHECKED, OF_A_CHECK, place_checks
from gs_compile.capture.dealing import deal_by_index
from gs_compile.capture.exchange import is_collective, read_results
from gs_compile.capture.graph import Captured, LossTerm, at_line, block_of, output_values
from gs_compile.capture.in_place import in_memory_of, mutated
from gs_compile.capture.operations import (
    AVERAGED_LOSSES,
    CASTING,
    COUNTED_LOSSES,
    COUNTING,
    FILLING,
    JOINING,
    LINEAR_IN,
    OF_ROWS,
    WEIGHTED_LOSSES,
    arguments_of,
    draws,
    has_samples,
    maker_of,
    operation,
    reduction_of,
    spec_made,
    tensor_spec,
)
from gs_compile.capture.sample_layout import PAIRING
from gs_compile.capture.samples import (
    NUMBERED,
    REDUCES,
    SIZE,
    Provenance,
    aligned,
    no_shares,
    picks_of_equals,
    why_it_mixes,
    why_it_runs_along,
    why_sizes_mix,
    why_values_mix,
)
from gs_compile.capture.shares import Kind, ShareEditor, State
from gs_compile.capture.whole_batch import is_of_samples
from gs_compile.errors import CaptureError, SeparationError


@dataclass(frozen=True, slots=True)
class Separated:
    """The rewritten graph, and how its outputs combine."""

    module: fx.GraphModule  # with new placeholders total_0 ... and fraction, if needed
    outputs: tuple[Any, ...]  # what `module` returns: nodes, constants, and None for what is not kept
    totals: tuple[fx.Node, ...]  # nodes of `module` whose sum over micro-batches is total_k
    kinds: dict[fx.Node, Kind]  # of every output node: "local", "sum" or "same"
    terms: tuple[LossTerm, ...]  # the derivation, to be shown
    wholes: Mapping[fx.Node, str] = field(default_factory=dict)  # values of the whole batch, with the refusal of each
    samples: frozenset[fx.Node] = frozenset()  # nodes with one row or more for each sample, along one dimension
    has_loss: bool = True  # the first scalar output is the loss; else the loss is computed from outputs


def loss(
    module: fx.GraphModule, captured: Captured, *, kept: Sequence[bool], alone: bool, layer_major: bool = True
) -> Separated:
    """Rewrite the outputs of `module` that are `kept` (one bool for each).

    Raises `SeparationError` for an output that does not separate, and `CaptureError` for sparse gradients. `alone`: the
    micro-batch is the whole batch, so there is nothing to combine. layer_major: all layers run for all micro-batches
    before the head.
    """
    _refuse_sparse(module)
    _refuse_kernels(module)
    dealt, shares = _checked(module, kept)
    if alone:
        for scatter in dealt:
            shares.checked_places(scatter)
        outputs = _kept(module, kept)
        kinds: dict[fx.Node, Kind] = dict.fromkeys((value for value in outputs if isinstance(value, fx.Node)), "sum")
        return Separated(module, outputs, (), kinds, ())
    read_results(module.graph)
    return _Separation(module, captured, shares, layer_major).run(kept)


def refused(
    module: fx.GraphModule, captured: Captured, kept: Sequence[bool]
) -> tuple[list[fx.Node], Mapping[fx.Node, State]]:
    """The outputs among those `kept` that do not separate, and the classes of all values."""
    _, shares = _checked(module, kept)
    read_results(module.graph)
    separation = _Separation(module, captured, shares, layer_major=False)
    separation.classify()
    outputs = dict.fromkeys(value for value in _kept(module, kept) if isinstance(value, fx.Node))
    return [each for each in outputs if separation.of_output(each).kind == "mixed"], separation.states


def _checked(module: fx.GraphModule, kept: Sequence[bool]) -> tuple[list[fx.Node], ShareEditor]:
    """Put the module's checks in place; returns the nodes of `deal_by_index`, and the editor of its outputs."""
    dealt, shares = deal_by_index(module.graph), ShareEditor(module.graph)
    place_checks(shares, _kept(module, kept))
    return dealt, shares


def _refuse_sparse(module: fx.GraphModule) -> None:
    for node in module.graph.find_nodes(op="call_function", target=functional.embedding):
        if arguments_of(node)["sparse"]:
            raise CaptureError(
                f"the embedding `{node.name}` makes a sparse gradient, which greedysnake cannot "
                f"sum{at_line(node)}: leave sparse=True out"
            )


def _refuse_kernels(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        if operation(node) == "triton_kernel_wrapper_mutation":
            raise CaptureError(
                f"`{node.name}` is a Triton kernel that forward calls itself{at_line(node)}, so nothing says what it "
                "writes: make an operator of it (torch.library.custom_op)"
            )


class _Separation:
    def __init__(self, module: fx.GraphModule, captured: Captured, shares: ShareEditor, layer_major: bool) -> None:
        self.module, self.layer_major = module, layer_major
        self.batch = captured.names("batch")
        self.data = captured.names("batch", "constant", "buffer")
        self.shares = shares
        self.states = self.shares.states
        self.provenance = Provenance(self._is_count)

    def run(self, kept: Sequence[bool]) -> Separated:
        output = self.module.graph.output_node()
        self.classify()
        outputs = _kept(self.module, kept)  # only now: shares have replaced the losses
        made = tuple(self._output(value, output) if isinstance(value, fx.Node) else value for value in outputs)
        output.args = (made,)
        self.module.recompile()
        kinds = {value: self.states[value].kind for value in made if isinstance(value, fx.Node)}
        wholes = {node: _refusal(value, self.states[value]) for value, node in self.shares.wholes.items()}
        local = (node for node, state in self.states.items() if state.kind == "local")
        samples = frozenset(filter(is_of_samples, local))
        return Separated(self.module, made, tuple(self.shares.totals), kinds, tuple(self.shares.terms), wholes, samples)

    def classify(self) -> None:
        """Find the classes of all values."""
        output = self.module.graph.output_node()
        for node in [node for node in self.module.graph.nodes if node not in (output, self.shares.fraction)]:
            self.provenance.follow(node)
            self.states[node] = self._state(node)
            for target in mutated(node):
                self._change(node, target)

    def of_output(self, node: fx.Node) -> State:
        """The class of an output."""
        why = self._why_not_in_rows(node, self.states[node])
        return _mixed(node, why) if why else self.states[node]

    def _output(self, node: fx.Node, output: fx.Node) -> fx.Node:
        state = self.of_output(node)
        if state.kind == "mixed" and self._is_of_whole(node):
            return self.shares.whole(node)
        if state.kind == "mixed":
            raise SeparationError(_refusal(node, state))
        if state.kind == "mean":
            self.shares.say(node, "mean", "micro-batches are weighted by their size, m_j / B")
            return self.shares.of(node, output)
        if state.kind == "sum":
            self.shares.say(node, "sum", "micro-batches add")
        return node

    def _why_not_in_rows(self, node: fx.Node, state: State) -> str:
        """Why the micro-batches' rows, concatenated, are not the batch's value of an output; empty: they are."""
        if node in self.provenance.numbers:
            return "is of the numbers of the samples, which every micro-batch counts from 0"
        if state.kind != "local" or (spec := tensor_spec(node)) is None:
            return ""
        if not spec.batch_dims:
            return "is counted over the samples of the batch"
        return PAIRING if len(spec.batch_dims) > 1 else ""

    # The classes -----------------------------------------------------------------------------------------------------

    def _state(self, node: fx.Node) -> State:
        if node.op in ("placeholder", "get_attr"):
            spec = tensor_spec(node)
            is_data = node.op == "get_attr" or (node.name in self.data and not (spec and spec.requires_grad))
            kind: Kind = "local" if node.name in self.batch else "same"
            return State(kind, from_inputs=is_data, source="inputs" if is_data else "")
        if node.meta.get(OF_A_CHECK):
            return State("local")
        if is_collective(node):
            return replace(_mixed(node, "exchanges values with other ranks"), source=self._source(node))
        if node.target is CHECKED:
            return self.states[node.all_input_nodes[0]]
        made_from = self._source(node)
        mixed = [source for source in node.all_input_nodes if self.states[source].kind == "mixed"]
        for source in sorted(mixed, key=self._is_mixed_behind_blocks):
            if made_from or not self._is_of_whole(source):
                return replace(self.states[source], source=made_from)
            node.replace_input_with(source, self.shares.whole(source))
        state = self._rule(node)  # it may replace the node's inputs by totals
        from_inputs = all(self.states[source].from_inputs for source in node.all_input_nodes)
        if block_of(node) is not None:
            made_from = "taps" if state.kind == "local" and is_of_samples(node) else ""
        is_known = from_inputs and block_of(node) is None and not draws(node)
        return replace(state, from_inputs=is_known, source=made_from)

    def _source(self, node: fx.Node) -> Literal["", "inputs", "taps"]:
        sources = {self.states[source].source for source in node.all_input_nodes}
        if block_of(node) is not None or "" in sources:
            return ""
        return "taps" if "taps" in sources else "" if draws(node) else "inputs"

    def _is_mixed_behind_blocks(self, node: fx.Node) -> bool:
        """Whether a value is mixed outside blocks. What blocks mix is reported first: no other loss would help."""
        cause = self.states[node].cause
        return cause is None or block_of(cause) is None

    def _is_of_whole(self, node: fx.Node) -> bool:
        """Whether a value that does not separate can be computed from all samples at once, before the head runs."""
        spec = tensor_spec(node)
        is_fit = spec is not None and not spec.batch_dims and spec.is_sized
        state = self.states[node]
        is_exchanged = state.source == "inputs" and state.cause is not None and is_collective(state.cause)
        return self.layer_major and is_fit and (is_exchanged or state.source == "taps")

    def _change(self, node: fx.Node, target: fx.Node) -> None:
        """After a change in place that gives memory another class, its earlier names have neither class."""
        state, mixed = self.states[node], None
        if state.kind == "mixed":
            mixed = state
        elif state.kind != self.states[target].kind:
            mixed = _mixed(node, "is changed in place and read by its old name")
        for other in in_memory_of(target) & self.states.keys() - {node}:
            own = replace(self.states[other], from_inputs=state.from_inputs, source=state.source)
            self.states[other] = mixed or own

    def _rule(self, node: fx.Node) -> State:
        name, kinds = operation(node), self._kinds(node)
        if mixes := why_values_mix(node, name):
            return _mixed(node, mixes)
        if name in COUNTED_LOSSES or name in AVERAGED_LOSSES:
            return self._functional_loss(node, name)
        if kinds & {"sum", "mean"}:
            return self._combine(node, name)
        if found := why_bodies_mix(node):
            return _mixed(*found)
        if "local" not in kinds:
            mixes = why_sizes_mix(node, name)
            return _mixed(node, mixes) if mixes else State("local" if has_samples(node) else "same")
        if mixes := why_it_mixes(node, self.provenance):
            return _mixed(maker_of(node), mixes)
        if (spec := spec_made(node)) is None:
            return State("local")
        if name.startswith("masked_scatter"):
            self.shares.checked_places(node)
        inside = block_of(node) is not None
        if spec.batch_dims or (inside and (not spec.dtype.is_floating_point or name in COUNTING)):
            return State("local")  # integers inside a block are indices: the order of tokens, counts per expert
        if name in FILLING or picks_of_equals(node, name):
            return State("same")  # x.new_ones(()): uses only the dtype and device of x
        if name in ("sum", "mean", "count_nonzero") and not node.all_input_nodes[0].meta.get("uneven"):
            return State("mean" if name == "mean" else "sum")
        return _mixed(node, REDUCES)

    def _is_count(self, node: fx.Node) -> bool:
        """Whether a value belongs to all samples of a micro-batch together, and depends on them."""
        return self.states[node].kind == "local" and tensor_spec(node) is not None and not has_samples(node)

    def _kinds(self, node: fx.Node) -> set[Kind]:
        sources = node.all_input_nodes[: 1 if operation(node) in CASTING else None]
        return {self.states[source].kind for source in sources}

    # Values that are reduced over the batch ---------------------------------------------------------------------------

    def _combine(self, node: fx.Node, name: str) -> State:
        """An operation on sums or means."""
        state: State | None = None
        is_binary = len(node.args) == 2 and not node.kwargs
        is_scaled = (
            len(node.args) == 2 and {*node.kwargs} == {"alpha"} and self._kind(node.kwargs["alpha"], node) == "same"
        )
        match LINEAR_IN.get(name):
            case "the one" if len(node.all_input_nodes) == 1:
                state = self._linear(node)
            case "all" if is_binary or is_scaled or name in JOINING:
                state = self._add(node, joins=name in JOINING)
            case ("either" | "the first") as where if is_binary:
                state = self._scale(node, *node.args, commutes=where == "either")
            case None if name == "setitem":
                state = self._write(node, *node.args)
        if state is None and self._globalise(node, node.all_input_nodes):
            state = self._rule(node)
        return state or _mixed(node, no_shares(name))

    def _linear(self, node: fx.Node) -> State | None:
        source = node.all_input_nodes[0]
        before, after = tensor_spec(source), tensor_spec(node)
        if before is None or after is None or after.batch_dims:
            return None
        rounds = before.dtype.is_floating_point and not after.dtype.is_floating_point
        return None if rounds or after.dtype is torch.bool else self.states[source]

    def _scale(self, node: fx.Node, left: Any, right: Any, *, commutes: bool) -> State | None:
        """same * sum = sum; sum / B = mean; mean * B = sum; and a sum of inputs alone becomes a total, so "same"."""
        for one, other in ((left, right), (right, left))[: 2 if commutes else 1]:
            kind = self._kind(one, node)
            if kind in ("sum", "mean", "local") and self._make_same(other, node):
                if self._kind(other, node) != "batch":
                    return State(kind)
                if kind == ("mean" if commutes else "sum"):
                    return State("sum" if commutes else "mean")
                return None
        return None

    def _kind(self, value: Any, node: fx.Node) -> Any:
        """The class of an operand; "batch" for the batch size."""
        if isinstance(value, fx.Node):
            return self.states[value].kind
        return "batch" if value in node.meta.get("batch_numbers", {}) else "same"

    def _make_same(self, value: Any, node: fx.Node) -> bool:
        """Whether `value` is "same", or can be made so: a sum of inputs alone is replaced by its total."""
        kind = self._kind(value, node)
        if kind == "batch":
            return bool(node.meta["batch_numbers"][value])
        return kind == "same" or (isinstance(value, fx.Node) and self._globalise(node, [value]))

    def _add(self, node: fx.Node, *, joins: bool) -> State | None:
        """Add or join values: means and "same" give a mean; if one is a sum, all become shares that add."""
        kinds = {self._kind(operand, node) for operand in (node.all_input_nodes if joins else node.args)}
        spec = tensor_spec(node)
        if kinds & {"local", "batch"} or (kinds != {"sum"} and spec and not spec.dtype.is_floating_point):
            return None  # a share of "same" is a fraction, and no integer
        if kinds <= {"mean", "same"}:
            return State("mean")

        share = partial(self._share, before=node)
        node.args = (map_arg if joins else map_aggregate)(node.args, share)
        if joins:  # else a factor
            node.kwargs = map_arg(node.kwargs, share)
        return State("sum")

    def _share(self, operand: Any, before: fx.Node) -> Any:
        return operand if self._kind(operand, before) == "sum" else self.shares.of(operand, before)

    def _write(self, node: fx.Node, target: Any, _: Any, value: Any) -> State | None:
        """x[i] = y: shares of y are written to shares of x, which whatever reads x later reads instead."""
        spec, others = tensor_spec(target), in_memory_of(target) - {target}
        is_seen = any(other < node < user for other in others for user in other.users)
        kinds = {self.states[each].kind for each in (target, value) if isinstance(each, fx.Node)}
        places = {self.states[each].kind for each in node.all_input_nodes if each not in (target, value)}
        is_fit = spec is not None and spec.dtype.is_floating_point and isinstance(value, fx.Node)
        if is_seen or not is_fit or "local" in kinds or places - {"same"} or node.meta.get("batch_numbers"):
            return None
        later = [user for user in target.users if node < user]
        shares = self._share(target, node)
        node.args = (shares, node.args[1], self._share(value, node))
        for user in later:
            user.replace_input_with(target, shares)
        return State("sum")

    def _functional_loss(self, node: fx.Node, name: str) -> State:
        if self._kinds(node) & {"sum", "mean"} and not self._globalise(node, node.all_input_nodes):
            return _mixed(node, no_shares(name))
        if "local" not in self._kinds(node):
            return State("same")
        if mixes := why_it_runs_along(node, name) or (SIZE if node.meta.get("batch_numbers") else ""):
            return _mixed(node, mixes)
        if not self.provenance.numbers.isdisjoint(node.all_input_nodes):
            return _mixed(node, NUMBERED)
        arguments = arguments_of(node)
        reduction, target = reduction_of(arguments), arguments.get("target")
        is_of_values = isinstance(target, fx.Node) and target.meta["spec"].dtype.is_floating_point
        alike = [value for key, value in arguments.items() if key != OF_ROWS.get(name)]
        if name in AVERAGED_LOSSES and not aligned(*alike):
            return _mixed(node, PAIRING)
        if reduction == "batchmean" and 0 not in arguments["input"].meta["spec"].batch_dims:
            return State("sum")  # divided by the size of another dimension
        if reduction in ("none", "sum"):
            return State("local" if reduction == "none" else "sum")
        weight = arguments.get("weight")
        if not (name in WEIGHTED_LOSSES and weight is not None):
            if name in AVERAGED_LOSSES or is_of_values:
                return State("mean")
            if not isinstance(target, fx.Node) or not self.states[target].from_inputs:
                return _mixed(node, "averages over labels that the model makes itself")
        if isinstance(weight, fx.Node) and not self.states[weight].from_inputs:
            return _mixed(node, "averages over weights that are not known before the step")
        self.shares.counted(node, arguments)
        return State("sum")

    def _globalise(self, node: fx.Node, values: Sequence[fx.Node]) -> bool:
        """Replace those of `values` that are sums of inputs alone by their totals; whether no other sum is left."""
        sums = [value for value in values if self.states[value].kind in ("sum", "mean")]
        if not all(self.states[value].from_inputs for value in sums):
            return False
        for value in sums:
            node.replace_input_with(value, self.shares.total(value))
        return bool(sums)


def _kept(module: fx.GraphModule, kept: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(value if keep else None for value, keep in zip(output_values(module), kept, strict=True))


def _mixed(node: fx.Node, why: str) -> State:
    return State("mixed", cause=node, why=why)


def _refusal(output: fx.Node, state: State) -> str:
    assert state.cause is not None
    return (
        f"output `{output.name}` of the whole batch cannot be computed from micro-batches: `{state.cause.name}` "
        f"({operation(state.cause)}) {state.why}{at_line(state.cause)}. "
        "Compute it outside of the model from its other outputs, leave it out (options={'outputs': 'loss'} drops all "
        "but the loss), or set micro_batch_size to the whole batch"
    )
