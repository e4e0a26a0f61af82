"""bodies: what a `torch.autograd.Function` of the model's own computes, forward and backward, keeps samples apart too.

A gradient of parameters is a sum over the samples, to which micro-batches add theirs.
"""

from __future__ import annotations

from torch import fx

from gs_compile.capture.graph import TensorSpec
from gs_compile.capture.operations import (
    ADDING,
    ARITHMETIC,
    DIVIDING,
    FILLING,
    JOINING,
    LINEAR,
    SCALING,
    SHAPING,
    has_samples,
    operation,
)
from gs_compile.capture.samples import follows_numbers, why_it_mixes, why_it_runs_along, why_values_mix

# What reduces otherwise than by a sum; others than these are taken for sums in a backward.
_NO_SUMS = "mean max min amax amin aminmax norm vector_norm var std prod median quantile logsumexp all any".split()


def why_a_body_mixes(body: fx.GraphModule, *, is_backward: bool) -> tuple[fx.Node, str] | None:
    """The operation that mixes samples, and why; None: there is none."""
    found = _Body(is_backward)
    for node in body.graph.nodes:
        if node.op in ("call_function", "call_method") and (why := found.look_at(node)):
            return _maker(node), why
    return None


class _Body:
    def __init__(self, is_backward: bool) -> None:
        self.is_backward = is_backward
        self.numbers, self.sums, self.counts = set[fx.Node](), set[fx.Node](), set[fx.Node]()

    def look_at(self, node: fx.Node) -> str:
        """Why the next operation mixes samples; empty: it does not."""
        maker = _maker(node)
        name, spec, read = operation(maker), node.meta.get("spec"), maker.all_input_nodes
        if follows_numbers(node, self.numbers):
            self.numbers.add(node)
        if not self.sums.isdisjoint(read):
            self.sums.add(node)
            keeps = self._keeps_sums(node, name)
            return "" if keeps else f"`{name}` of values reduced over the batch is no sum of shares"
        if not any(map(has_samples, read)) and self.counts.isdisjoint(read):
            of_batch = node.meta.get("batch_numbers") and not has_samples(node) and name not in SHAPING
            return "computes with the batch size" if of_batch else ""
        if not isinstance(spec, TensorSpec):
            return why_it_runs_along(node, name)
        if why := why_values_mix(node, name) or why_it_mixes(maker, name, spec, self.numbers):
            return why
        if name in ARITHMETIC and spec.dtype.is_floating_point and not self.counts.isdisjoint(read):
            return "computes with what is counted over the samples"
        if spec.batch_dims or name in FILLING:
            return ""
        return self._reduced(node, name, spec)

    def _keeps_sums(self, node: fx.Node, name: str) -> bool:
        """Whether sums stay sums: they are added to each other, or scaled by what is the same for all samples."""
        given = [each in self.sums for each in node.args if isinstance(each, (fx.Node, int, float))]
        if node.meta.get("batch_numbers") or any(map(has_samples, node.all_input_nodes)):
            return False
        scales = (name in SCALING and given.count(True) == 1) or (name in DIVIDING and given == [True, False])
        joins = name in JOINING and self.sums.issuperset(node.all_input_nodes)
        return name in LINEAR or scales or joins or (name in ADDING and all(given))

    def _reduced(self, node: fx.Node, name: str, spec: TensorSpec) -> str:
        if not spec.dtype.is_floating_point:
            self.counts.add(node)
            return ""
        if not self.is_backward or name in _NO_SUMS:
            return "reduces over the samples of the batch"
        self.sums.add(node)
        return ""


def _maker(node: fx.Node) -> fx.Node:
    """The operation that makes a value: of one of several results the one that has them all."""
    source = node.args[0] if operation(node) == "getitem" else None
    return source if isinstance(source, fx.Node) and isinstance(source.meta.get("spec"), tuple) else node
