"""shares: graph edits that turn a value of the whole batch into shares of the micro-batches, which add up to it.

total     a placeholder: a sum that depends on inputs alone, added over all micro-batches before the head runs
whole     a value that depends on inputs and on what layers make for each sample, of all samples, before the head runs
fraction  a placeholder: the micro-batch's part of the samples, m_j / B
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from gs_compile.capture.dealing import IS_EXACT, ONE_PLACE_EACH, operands
from gs_compile.capture.graph import LossTerm, Source, TensorSpec, at_line, block_of, origin, source_line
from gs_compile.capture.operations import WEIGHTED_LOSSES, operation
from gs_compile.capture.whole_batch import of_whole_batch

SUM = {"reduction": "sum", "size_average": None, "reduce": None}  # the last two are deprecated and take precedence

Kind = Literal["local", "sum", "mean", "same", "mixed"]


@dataclass(frozen=True, slots=True)
class State:
    """How a value of the whole batch follows from the micro-batches' values."""

    kind: Kind
    from_inputs: bool = False  # depends on the user's inputs alone, so it can be known before the step
    source: Literal["", "inputs", "taps"] = ""  # outside blocks: what it depends on; "taps": also on what blocks make
    cause: fx.Node | None = None  # of "mixed"
    why: str = ""


class ShareEditor:
    """Edits one graph; keeps the state of every node, also of new ones, and a record of the edits to be shown."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.states: dict[fx.Node, State] = {}
        self.totals: dict[fx.Node, fx.Node] = {}  # by value of one micro-batch, the placeholder of its total
        self.terms: list[LossTerm] = []
        self.wholes: dict[fx.Node, fx.Node] = {}  # by value that does not separate, its node `of_whole_batch`
        self.fraction: fx.Node | None = None

    def of(self, value: Any, before: fx.Node) -> fx.Node:
        """`value`, a "mean" or "same", as shares that add: value * m_j / B, in fp32 or wider."""
        like = value if isinstance(value, fx.Node) else before
        fraction = self._fraction(like)
        with self.graph.inserting_before(before):
            share = self._new(torch.mul, (fraction, value), like=like)
        if block_of(before) is None:  # else it would be one of the block that has made the mean
            share.meta.pop("nn_module_stack", None)
        self.states[share] = State("sum", self.states[value].from_inputs if isinstance(value, fx.Node) else True)
        return share

    def total(self, value: fx.Node) -> fx.Node:
        """The placeholder that holds the sum of `value` over all micro-batches."""
        if self.states[value].kind == "mean":
            value = self.of(value, value.next)
        if value not in self.totals:
            source = Source("total", len(self.totals))
            self.totals[value] = self._placeholder(f"total_{source.index}", source, value.meta["spec"])
            self.say(value, "total", "made from the inputs alone: counted over the whole batch")
        return self.totals[value]

    def whole(self, value: fx.Node) -> fx.Node:
        """The node that stands for `value` of the whole batch, the same for all micro-batches."""
        if value not in self.wholes:
            with self.graph.inserting_after(value):
                found = self._new(of_whole_batch, (value,), like=value)
            self.states[found] = State("same")
            self.wholes[value] = found
            self.say(value, "whole", "made from what layers make beside their hidden states, of all samples at once")
        return self.wholes[value]

    def counted(self, loss: fx.Node, arguments: Mapping[str, Any]) -> None:
        """Rewrite loss(mean) as loss(sum) / total. The total is of the counted labels' weights, or of all weights for a
        loss that has one for each value.
        """
        logits, name = arguments["input"], operation(loss)
        with self.graph.inserting_before(loss):
            count = self._count(loss, arguments)
            if logits.meta["spec"].dtype == torch.float16:  # a sum over all tokens would overflow
                logits = self._new(torch.Tensor.float, (logits,), like=logits)
        with self.graph.inserting_after(loss):
            shares = self._new(torch.div, (loss, self.total(count)), like=loss)
        self.states[shares] = State("sum")
        loss.replace_all_uses_with(shares, delete_user_cb=lambda user: user is not shares)
        loss.args, loss.kwargs = (), {**arguments, **SUM, "input": logits}
        counted = "weights" if name in WEIGHTED_LOSSES else "counted labels"
        self.say(loss, "sum", f"{name}(mean) = {name}(sum) / total, the {counted} of the whole batch")

    def checked_places(self, scatter: fx.Node) -> None:
        """Make a masked_scatter raise if a micro-batch does not have as many places as entries."""
        target, mask, source = operands(scatter)
        with self.graph.inserting_before(scatter):
            detached = self._new(torch.Tensor.detach, (source,), like=source)
            detached.meta["spec"] = replace(source.meta["spec"], requires_grad=False)
            is_exact = scatter.meta.get(IS_EXACT, False)
            args = (mask, target, detached, self._fraction(target), is_exact, at_line(scatter))
            checked = self._new(ONE_PLACE_EACH, args, like=mask)
        checked.meta.pop("storage", None)
        scatter.args, scatter.kwargs = (target, checked, source), {}
        self.say(scatter, "local", "each micro-batch must have as many places as entries")

    def checked(self, value: fx.Node, operation: Any, check: fx.Node, words: str) -> fx.Node:
        """`value`, which comes after a check of the model, read through that check."""
        with self.graph.inserting_before(check):
            checked = self._new(operation, (value, check.args[0], self._fraction(value), words), like=value)
        checked.meta |= origin(check)
        checked.meta |= {"spec": value.meta["spec"].contiguous, "storage": None}
        return checked

    def say(self, node: fx.Node, kind: str, why: str) -> None:
        self.terms.append(LossTerm(node.name, kind, why, source_line(node)))

    def _fraction(self, like: fx.Node) -> fx.Node:
        """m_j / B, to be used with `like`: in fp64 if that is fp64, else in fp32."""
        spec = replace(like.meta["spec"], shape=(), stride=(), dtype=torch.float32)
        if self.fraction is None:
            wide = any(getattr(node.meta.get("spec"), "dtype", None) == torch.float64 for node in self.graph.nodes)
            own = replace(spec, dtype=torch.float64) if wide else spec
            self.fraction = self._placeholder("fraction", Source("fraction"), own)
        if self.fraction.meta["spec"].dtype == torch.float64 != like.meta["spec"].dtype:
            with self.graph.inserting_before(next(n for n in self.graph.nodes if n.op != "placeholder")):
                narrow = self._new(torch.Tensor.float, (self.fraction,), like=self.fraction)
            narrow.meta["spec"] = replace(self.fraction.meta["spec"], dtype=torch.float32)
            self.states[narrow] = self.states[self.fraction]
            return narrow
        return self.fraction

    def _count(self, loss: fx.Node, arguments: Mapping[str, Any]) -> fx.Node:
        target, weight = arguments["target"], arguments["weight"]
        if operation(loss) in WEIGHTED_LOSSES:
            counted = weight
        else:
            counted = self._new(torch.ne, (target, arguments["ignore_index"]), like=target)
            if weight is not None:
                last = weight.meta["spec"].shape[0] - 1  # ignored labels may be out of range
                labels = self._new(torch.clamp, (target, 0, last), like=target)
                of_labels = self._new(torch.take, (weight, labels), like=target)
                counted = self._new(torch.mul, (of_labels, counted), like=target)
        dtype = torch.promote_types(loss.meta["spec"].dtype, torch.float32)
        count = self._new(torch.sum, (counted,), {"dtype": dtype}, like=loss)
        spec = replace(loss.meta["spec"], dtype=dtype, requires_grad=False)
        count.meta |= {"spec": spec, "storage": None}  # not the loss's memory: the loss may be changed in place
        self.states[count] = State("sum", from_inputs=True)
        return count

    def _new(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, like: fx.Node
    ) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs or {})
        node.meta = {**like.meta, "batch_numbers": {}}
        self.states[node] = State("local", from_inputs=True)
        return node

    def _placeholder(self, name: str, source: Source, spec: TensorSpec) -> fx.Node:
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            placeholder = self.graph.placeholder(name)
        spec = replace(spec, requires_grad=False, batch_dims=())
        placeholder.meta = {"spec": spec, "batch_numbers": {}, "source": source}
        is_fraction = source.kind == "fraction"  # a total is not known while counting
        self.states[placeholder] = State("same", from_inputs=is_fraction, source="inputs")
        return placeholder
