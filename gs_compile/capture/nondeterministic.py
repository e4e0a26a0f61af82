"""nondeterministic: operators of a unit's code that may give different bits from run to run on a GPU.

They are those listed by the documentation of `torch.use_deterministic_algorithms`: threads add or write to the same
place in memory in any order. torch does not tag them, so the table is here. The gradient of an embedding is not listed,
but inductor's code for it adds to rows in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from gs_compile.capture.graph import source_line
from gs_compile.capture.internals import TorchDispatchMode, tree_leaves
from gs_compile.capture.operations import named, operation

Answer = Literal["replaced", "refused", "unknown"]  # with deterministic=True, by another kernel; of another's operator

REPLACED = frozenset(
    "_index_put_impl _unsafe_index_put convolution convolution_backward index_add index_copy index_put "
    "max_pool3d_with_indices_backward replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward "
    "scatter scatter_add scatter_reduce".split()
)
REFUSED = frozenset(
    "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _ctc_loss_backward _embedding_bag_dense_backward "
    "_upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa_backward adaptive_max_pool2d_backward avg_pool3d_backward "
    "bincount cumsum fractional_max_pool2d_backward fractional_max_pool3d_backward grid_sampler_2d_backward "
    "grid_sampler_3d_backward histc max_unpool2d max_unpool3d median nll_loss2d_forward put reflection_pad1d_backward "
    "reflection_pad2d_backward reflection_pad3d_backward upsample_bicubic2d_backward upsample_bilinear2d_backward "
    "upsample_linear1d_backward upsample_trilinear3d_backward".split()
)
EMBEDDING = torch.ops.aten.embedding_dense_backward.default
ATTENTION = "scaled_dot_product_attention"  # its backward; which kernel it is follows from the device
TORCHS = frozenset(("aten", "prim", "prims"))

# Some of these are nondeterministic only with such arguments, by name.
ONLY: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "scatter": lambda given: "src" in given,
    "scatter_reduce": lambda given: given["reduce"] in ("sum", "mean", "prod"),
    "cumsum": lambda given: bool(given["self"].is_floating_point()),
    "bincount": lambda given: given.get("weights") is not None,
    "median": lambda given: "dim" in given,
    "_embedding_bag_dense_backward": lambda given: given["mode"] == 2,  # max
}


class Nondeterministic(NamedTuple):
    """A nondeterministic operator of ATen.

    where: the user's line that it computes or differentiates, as ``file:line: text``; or empty.
    answer: what `deterministic=True` does about it.
    """

    operator: str
    where: str
    answer: Answer


class NondeterminismMode(TorchDispatchMode):
    """A context in which nondeterministic operators are recorded, of a module that `run` runs and autograd then
    differentiates.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[Nondeterministic, None] = {}
        self._line = ""
        self._embeddings: list[str] = []  # their lines, in the order of their gradients
        self.run = _Lines(module, self).run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = _answer(func, args, kwargs or {})
        if answer is not None:
            self._note(_name(func), answer)
        if func is EMBEDDING:
            self._embeddings.append(self._line)
        return func(*args, **(kwargs or {}))

    def note_embeddings(self, traced: fx.GraphModule, compiled: fx.GraphModule) -> None:
        """Record embeddings whose gradient inductor computes. traced: under this mode; compiled: what inductor gets."""
        left = {node.name for node in compiled.graph.find_nodes(op="call_function", target=EMBEDDING)}
        known = traced.graph.find_nodes(op="call_function", target=EMBEDDING)
        for node, line in zip(known, self._embeddings, strict=False):
            if node.name in left:
                self._note(_name(EMBEDDING), "replaced", line)

    def _note(self, operator: str, answer: Answer, line: str | None = None) -> None:
        self.found[Nondeterministic(operator, self._line if line is None else line, answer)] = None

    def begin(self, line: str, *_: Any) -> None:
        self._line = line

    def end(self, node: fx.Node, result: Any) -> None:
        """Attribute what autograd will run for a node's result to the node's line."""
        begun: list[Any] = [
            each.grad_fn for each in tree_leaves(result) if isinstance(each, torch.Tensor) and each.grad_fn
        ]
        if begun and operation(node) == ATTENTION:
            self._note(f"{ATTENTION} backward", "replaced")
        while begun:
            function = begun.pop()
            if __name__ not in function.metadata:
                function.metadata[__name__] = True
                function.register_prehook(partial(self.begin, self._line))
                begun += [before for before, _ in function.next_functions if before is not None]


class _Lines(fx.Interpreter):
    """Runs a module, and reports each node's line, and then the node and its result, to a `NondeterminismMode`."""

    def __init__(self, module: fx.GraphModule, watch: NondeterminismMode) -> None:
        super().__init__(module)
        self._watch = watch

    def run_node(self, node: fx.Node) -> Any:
        self._watch.begin(source_line(node))
        result = super().run_node(node)
        self._watch.end(node, result)
        return result


def _name(func: Any) -> str:
    """The name of an operator, the same for its in-place form."""
    return str(func.overloadpacket.__name__).rstrip("_")


def _answer(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Answer | None:
    """What `deterministic=True` does about a call of an operator; None: every run gives the same bits."""
    if func.namespace not in TORCHS:
        return "unknown"
    name = _name(func)
    if name not in REPLACED | REFUSED:
        return None
    given = named(func, args, kwargs)
    if name in ONLY and not ONLY[name](given):
        return None
    is_product = name == "scatter_reduce" and given["reduce"] == "prod"
    return "refused" if name in REFUSED or is_product else "replaced"
