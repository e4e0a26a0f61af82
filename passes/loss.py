"""loss: rewrite the model's outputs so that micro-batches add up to what the user wrote for the whole batch.

Every value of the graph is one of

    local    one row or more for each sample; a micro-batch has the rows of its own samples
    sum      the whole batch's value is the sum of the micro-batches' values
    mean     ... is their sum weighted by size:  sum_j (m_j / B) value_j
    same     does not depend on the samples
    mixed    none of these: batch statistics, products of means

and the classes follow from the operations:  sum(local) = sum,  mean(local) = mean,  sum + sum = sum,  same * sum = sum,
sum + (m_j / B) mean = sum, ...  A denominator made from the inputs alone, as the count of labels in a cross-entropy
mean, is a sum that can be known before any layer runs: the `count` verb adds it over all micro-batches, and the head
reads the total. So  cross_entropy(mean)  becomes  cross_entropy(sum) / total,  which is right for uneven labels and
for micro-batches without any. What ends as a mean is multiplied by the micro-batch's `fraction` m_j / B.

A mixed value that reaches an output is refused by name. (Contract: the loss of the global batch.)
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx
from torch.nn import functional

from gs_compile.errors import SeparationError
from gs_compile.graph import Captured, LossTerm, TensorSpec, source_line

from .blocks import block_of

FRACTION = "fraction"
TOTAL = "total"

Kind = Literal["local", "sum", "mean", "same", "mixed"]


@dataclass(frozen=True, slots=True)
class State:
    """How a value of the whole batch follows from the micro-batches' values."""

    kind: Kind
    from_inputs: bool = False  # made from the user's inputs alone, so it can be known before the step
    cause: fx.Node | None = None  # of "mixed"
    why: str = ""


@dataclass(frozen=True, slots=True)
class Separated:
    """The rewritten graph, and how its outputs combine."""

    module: fx.GraphModule  # with new placeholders total_0 ... and fraction where they are needed
    totals: tuple[fx.Node, ...]  # nodes of `module` whose sum over micro-batches is total_k
    kinds: dict[fx.Node, Kind]  # of every output node: "local", "sum" or "same"
    terms: tuple[LossTerm, ...]  # the derivation, for people


def loss(module: fx.GraphModule, captured: Captured, *, kept: Sequence[bool], alone: bool) -> Separated:
    """Rewrite the outputs of `module` that are `kept` (one truth for each); raise `SeparationError` for one that does not separate.

    `alone`: the micro-batch is the whole batch, so there is nothing to combine.
    """
    if alone:
        return Separated(module, (), dict.fromkeys(module.graph.output_node().all_input_nodes, "sum"), ())
    return _Separation(module, captured).run(kept)


LINEAR = frozenset(
    [
        "neg",
        "to",
        "float",
        "double",
        "half",
        "bfloat16",
        "type",
        "type_as",
        "view",
        "reshape",
        "squeeze",
        "unsqueeze",
        "contiguous",
        "clone",
        "detach",
        "flatten",
        "expand",
        "getitem",
        "select",
        "sum",
        "mean",
        "transpose",
        "permute",
    ]
)
JOINING = frozenset(("stack", "cat", "concat"))
ADDING = frozenset(("add", "iadd", "sub", "isub"))
SCALING = frozenset(("mul", "imul", "multiply"))
DIVIDING = frozenset(("truediv", "itruediv", "div", "divide", "true_divide"))
ALONG_A_DIMENSION = frozenset(
    [
        "softmax",
        "log_softmax",
        "softmin",
        "gumbel_softmax",
        "cumsum",
        "cumprod",
        "logcumsumexp",
        "cummax",
        "cummin",
        "normalize",
    ]
)
COUNTED_LOSSES = frozenset(("cross_entropy", "nll_loss"))
AVERAGED_LOSSES = frozenset(
    [
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "kl_div",
        "poisson_nll_loss",
        "gaussian_nll_loss",
        "soft_margin_loss",
        "hinge_embedding_loss",
        "margin_ranking_loss",
        "cosine_embedding_loss",
        "triplet_margin_loss",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "multilabel_soft_margin_loss",
    ]
)
COUNTING = frozenset(("histc", "bincount"))
SHAPING = frozenset(
    [
        "view",
        "reshape",
        "expand",
        "size",
        "unflatten",
        "zeros",
        "ones",
        "empty",
        "full",
        "arange",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
        "repeat",
        "broadcast_to",
        "split",
        "chunk",
        "narrow",
    ]
)


def operation(node: fx.Node) -> str:
    """The plain name of a node's operation: ``add`` for torch.add, operator.add, Tensor.add and Tensor.add_."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", str(node.target))
    return name.rstrip("_") if not name.startswith("__") else name


class _Separation:
    def __init__(self, module: fx.GraphModule, captured: Captured) -> None:
        self.module = module
        self.graph = module.graph
        self.batch = captured.names("batch")
        self.data = captured.names("batch", "constant", "buffer")
        self.states: dict[fx.Node, State] = {}
        self.totals: dict[fx.Node, fx.Node] = {}  # a value of one micro-batch -> the placeholder of the total
        self.terms: list[LossTerm] = []
        self.fraction: fx.Node | None = None

    def run(self, kept: Sequence[bool]) -> Separated:
        for node in list(self.graph.nodes):
            if node.op == "output":
                break
            self.states[node] = self._state(node)
        output = self.graph.output_node()
        given = zip(output.args[0], kept, strict=True)
        made = [self._output(value) if keep and isinstance(value, fx.Node) else value for value, keep in given]
        output.args = (tuple(made),)
        self.module.recompile()
        kinds = {value: self.states[value].kind for value in made if isinstance(value, fx.Node)}
        return Separated(self.module, tuple(self.totals), kinds, tuple(self.terms))

    def _output(self, node: fx.Node) -> fx.Node:
        state = self.states[node]
        if state.kind == "mixed":
            raise SeparationError(_refusal(node, state))
        if state.kind == "mean":
            self._say(node, "mean", "micro-batches are weighted by their size, m_j / B")
            return self._as_sum(node, self.graph.output_node())
        if state.kind == "sum":
            self._say(node, "sum", "micro-batches add")
        return node

    # The classes -----------------------------------------------------------------------------------------------------

    def _state(self, node: fx.Node) -> State:
        if node.op in ("placeholder", "get_attr"):
            return State("local" if node.name in self.batch else "same", from_inputs=node.name in self.data)
        sources = [self.states[source] for source in node.all_input_nodes]
        mixed = next((state for state in sources if state.kind == "mixed"), None)
        if mixed is not None:
            return mixed
        inside = block_of(node) is not None
        from_inputs = all(state.from_inputs for state in sources) and not inside
        state = self._rule(node, sources, inside)
        return State(state.kind, from_inputs, state.cause, state.why)

    def _rule(self, node: fx.Node, sources: Sequence[State], inside: bool) -> State:
        name = operation(node)
        combined = any(state.kind in ("sum", "mean") for state in sources)
        if name in COUNTED_LOSSES or name in AVERAGED_LOSSES:
            return self._functional_loss(node, name)
        if combined:
            return self._combine(node, name)
        if not any(state.kind == "local" for state in sources):
            return self._made_from_sizes(node, name)
        spec = node.meta.get("spec")
        if not isinstance(spec, TensorSpec):
            return State("local")
        statistics = self._statistics(node, name)
        if statistics:
            return State("mixed", cause=node, why=statistics)
        if len(spec.batch_dims) > 1:
            return State("mixed", cause=node, why="pairs the samples of the batch with each other")
        if spec.batch_dims or (inside and (not spec.dtype.is_floating_point or name in COUNTING)):
            return State("local")  # integers inside a block are indices: the order of tokens, counts per expert
        if name in ("sum", "mean", "count_nonzero"):
            return State("mean" if name == "mean" else "sum")
        return State("mixed", cause=node, why="reduces over the samples of the batch")

    def _made_from_sizes(self, node: fx.Node, name: str) -> State:
        spec = node.meta.get("spec")
        grows = isinstance(spec, TensorSpec) and bool(spec.batch_dims)
        if node.meta.get("batch_numbers") and not grows and name not in SHAPING:
            return State("mixed", cause=node, why="computes with the batch size")
        return State("local" if grows else "same")

    def _statistics(self, node: fx.Node, name: str) -> str:
        """Why an operation that keeps its rows still mixes samples; empty where it does not."""
        if name == "batch_norm":
            bound = inspect.signature(functional.batch_norm).bind(*node.args, **node.kwargs)
            training = bound.arguments.get("training", False)
            return (
                "normalises by the statistics of the batch (use LayerNorm, or put it in eval mode)" if training else ""
            )
        if name in ALONG_A_DIMENSION and node.args and isinstance(node.args[0], fx.Node):
            spec = node.args[0].meta.get("spec")
            dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
            if (
                isinstance(spec, TensorSpec)
                and isinstance(dim, int)
                and dim % max(len(spec.shape), 1) in spec.batch_dims
            ):
                return "runs along the batch dimension"
        return ""

    def _combine(self, node: fx.Node, name: str) -> State:
        """An operation on sums or means."""
        if name in LINEAR and len(node.all_input_nodes) == 1:
            return self.states[node.all_input_nodes[0]]
        if name in ADDING and len(node.args) >= 2 and not node.kwargs:
            return self._add(node)
        if name in JOINING:
            return self._join(node)
        if name in SCALING and len(node.args) == 2:
            left, right = node.args
            for one, other in ((left, right), (right, left)):
                if self._kind(one, node) in ("sum", "mean") and self._is_same(other, node):
                    return State(self._scaled(self._kind(one, node), other, node, multiply=True))
        if name in DIVIDING and len(node.args) == 2 and not node.kwargs.get("rounding_mode"):
            kind = self._kind(node.args[0], node)
            if kind in ("sum", "mean", "local") and self._is_same(node.args[1], node):
                return State(self._scaled(kind, node.args[1], node, multiply=False))
        if self._globalise(node):
            return self._rule(
                node, [self.states[source] for source in node.all_input_nodes], block_of(node) is not None
            )
        return State("mixed", cause=node, why=f"`{name}` of values reduced over the batch is not a sum of shares")

    def _kind(self, value: Any, node: fx.Node) -> str:
        if isinstance(value, fx.Node):
            return self.states[value].kind
        return "batch" if value in node.meta.get("batch_numbers", {}) else "same"

    def _is_same(self, value: Any, node: fx.Node) -> bool:
        """Whether `value` is one for all micro-batches; a total of the inputs is made so."""
        kind = self._kind(value, node)
        if kind in ("sum", "mean") and isinstance(value, fx.Node) and self.states[value].from_inputs:
            node.replace_input_with(value, self._total(value))
            return True
        return kind == "same" or (kind == "batch" and bool(node.meta["batch_numbers"][value]))

    def _scaled(self, kind: str, by: Any, node: fx.Node, *, multiply: bool) -> Kind:
        """Sums divided by the batch size are means, and means times the batch size are sums."""
        if self._kind(by, node) != "batch":
            return kind  # type: ignore[return-value]
        wanted = ("mean", "sum") if multiply else ("sum", "mean")
        return wanted[1] if kind == wanted[0] else "mixed"  # type: ignore[return-value]

    def _add(self, node: fx.Node) -> State:
        operands = [argument for argument in node.args[:2]]
        kinds = {self._kind(operand, node) for operand in operands}
        if "local" in kinds:
            if self._globalise(node):
                return State("local")
            return State("mixed", cause=node, why="adds a value reduced over the batch to every sample")
        if kinds == {"sum"} or kinds == {"mean"}:
            return State("sum" if kinds == {"sum"} else "mean")
        if kinds == {"mean", "same"}:
            return State("mean")
        if "batch" in kinds:
            return State("mixed", cause=node, why="computes with the batch size")
        node.args = tuple(
            operand if self._kind(operand, node) == "sum" else self._as_sum(operand, node) for operand in node.args[:2]
        )
        return State("sum")

    def _join(self, node: fx.Node) -> State:
        kinds = {self.states[source].kind for source in node.all_input_nodes}
        if "local" in kinds:
            return State("mixed", cause=node, why="joins values reduced over the batch with values of samples")
        if len(kinds) == 1:
            return State(kinds.pop())
        for source in node.all_input_nodes:
            if self.states[source].kind != "sum":
                node.replace_input_with(source, self._as_sum(source, node))
        return State("sum")

    def _functional_loss(self, node: fx.Node, name: str) -> State:
        function = getattr(functional, name)
        bound = inspect.signature(function).bind(*node.args, **node.kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        values = [self._kind(value, node) for value in arguments.values() if isinstance(value, fx.Node)]
        if "local" not in values:
            return self._combine(node, name) if {"sum", "mean"} & set(values) else State("same")
        reduction = str(arguments["reduction"])
        if reduction == "none":
            return State("local")
        if reduction == "sum":
            return State("sum")
        target = arguments.get("target")
        if name in AVERAGED_LOSSES or (isinstance(target, fx.Node) and target.meta["spec"].dtype.is_floating_point):
            return State("mean")
        if not isinstance(target, fx.Node) or not self.states[target].from_inputs:
            return State("mixed", cause=node, why="averages over labels that the model makes itself")
        return self._counted(node, arguments, target)

    def _counted(self, node: fx.Node, arguments: dict[str, Any], target: fx.Node) -> State:
        """cross_entropy(mean) -> cross_entropy(sum) / total of the counted labels' weights."""
        weight, ignored = arguments["weight"], arguments["ignore_index"]
        logits = arguments["input"]
        with self.graph.inserting_before(node):
            counted = self._new(torch.ne, (target, ignored), like=target)
            if weight is not None:
                labels = self._new(torch.clamp, (target,), {"min": 0}, like=target)
                weights = self._new(torch.nn.functional.embedding, (labels, self._column(weight)), like=target)
                counted = self._new(
                    torch.mul, (self._new(torch.squeeze, (weights, -1), like=target), counted), like=target
                )
            count = self._new(torch.sum, (counted,), {"dtype": torch.float32}, like=node)
            count.meta["spec"] = replace(node.meta["spec"], dtype=torch.float32, requires_grad=False)
            self.states[count] = State("sum", from_inputs=True)
            if logits.meta["spec"].dtype == torch.float16:  # a sum over all tokens does not fit its range
                logits = self._new(torch.Tensor.float, (logits,), like=logits)
        with self.graph.inserting_after(node):
            shares = self._new(torch.div, (node, self._total(count)), like=node)
        node.replace_all_uses_with(shares, delete_user_cb=lambda user: user is not shares)
        node.args, node.kwargs = (), {**arguments, "input": logits, "reduction": "sum"}
        self.states[shares] = State("sum")
        self.terms.append(
            LossTerm(
                node.name,
                "sum",
                f"{operation(node)}(mean) = {operation(node)}(sum) / total, the counted labels of the whole batch",
                source_line(node),
            )
        )
        return State("sum")

    def _column(self, weight: fx.Node) -> fx.Node:
        return self._new(torch.unsqueeze, (weight, -1), like=weight)

    # New nodes -------------------------------------------------------------------------------------------------------

    def _new(
        self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, like: fx.Node
    ) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs or {})
        node.meta = {**like.meta, "batch_numbers": {}}
        self.states[node] = State("local", from_inputs=True)
        return node

    def _globalise(self, node: fx.Node) -> bool:
        """Replace operands that are totals of the inputs by the total of the whole batch."""
        totals = [source for source in node.all_input_nodes if self.states[source].kind in ("sum", "mean")]
        if not all(self.states[source].from_inputs for source in totals):
            return False
        for source in totals:
            node.replace_input_with(source, self._total(source))
        return bool(totals)

    def _total(self, value: fx.Node) -> fx.Node:
        """The placeholder that holds the sum of `value` over all micro-batches."""
        if self.states[value].kind == "mean":
            value = self._as_sum(value, value.next)
        if value not in self.totals:
            placeholder = self._placeholder(f"{TOTAL}_{len(self.totals)}", value)
            self.totals[value] = placeholder
            self.terms.append(
                LossTerm(
                    value.name, "total", "made from the inputs alone: counted over the whole batch", source_line(value)
                )
            )
        return self.totals[value]

    def _as_sum(self, value: Any, before: fx.Node) -> fx.Node:
        """`value`, a mean or the same everywhere, as shares that add: value * m_j / B, in fp32 at least."""
        if self.fraction is None:
            self.fraction = self._placeholder(FRACTION, value if isinstance(value, fx.Node) else before)
        with self.graph.inserting_before(before):
            share = self.graph.call_function(torch.mul, (self.fraction, value))
        share.meta = {**(value if isinstance(value, fx.Node) else before).meta, "batch_numbers": {}}
        from_inputs = self.states[value].from_inputs if isinstance(value, fx.Node) else True
        self.states[share] = State("sum", from_inputs)
        return share

    def _placeholder(self, name: str, like: fx.Node) -> fx.Node:
        first = next(iter(self.graph.nodes))
        with self.graph.inserting_before(first):
            placeholder = self.graph.placeholder(name)
        spec: TensorSpec = like.meta["spec"]
        if name == FRACTION:
            spec = replace(spec, shape=(), stride=(), dtype=torch.float32)
        placeholder.meta = {"spec": replace(spec, requires_grad=False, batch_dims=()), "batch_numbers": {}}
        self.states[placeholder] = State("same", from_inputs=True)
        return placeholder

    def _say(self, node: fx.Node, kind: str, why: str) -> None:
        self.terms.append(LossTerm(node.name, kind, why, source_line(node)))


def _refusal(output: fx.Node, state: State) -> str:
    assert state.cause is not None
    where = source_line(state.cause)
    return (
        f"output `{output.name}` of the whole batch cannot be computed from micro-batches: `{state.cause.name}` "
        f"({operation(state.cause)}) {state.why}{f', at {where}' if where else ''}. "
        "Compute it outside of the model from its other outputs, leave it out (options={'outputs': 'loss'} drops all "
        "but the loss), or set micro_batch_size to the whole batch"
    )
