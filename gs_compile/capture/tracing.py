"""tracing: functions of tensors as ATen graphs, on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from gs_compile.capture.graph import TensorSpec


class Tracer:
    """Traces the functions of one unit; tensors without memory of one tracer know each other."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def tensors(self, specs: Iterable[TensorSpec]) -> list[torch.Tensor]:
        """Tensors without memory in the place of real ones."""
        with self._mode:
            return [torch.empty_strided(s.shape, s.stride, dtype=s.dtype, device=s.device) for s in specs]

    def trace(
        self, function: Callable[..., Any], inputs: Sequence[torch.Tensor], decompositions: Mapping[Any, Any]
    ) -> fx.GraphModule:
        """The ATen graph of `function`, which may call autograd, without what its results do not need.

        Autograd would run the backward of tensors on a GPU in a thread of its own, where nothing is traced.
        """
        one_thread = torch.autograd.set_multithreading_enabled(False)
        with self._mode, one_thread, torch.enable_grad(), torch._C._DisableAutocast():
            graph = make_fx(function, decomposition_table=dict(decompositions))(*inputs)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return graph


def tensors_of_node(node: fx.Node) -> list[torch.Tensor]:
    """The tensors without memory that a node of a traced graph makes."""
    return [value for value in tree_leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]


def draws_random(node: fx.Node) -> bool:
    """Whether a node of an ATen graph draws random numbers; attention is marked as if, but with no dropout does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = {a.name: a.default_value for a in node.target._schema.arguments if a.has_default_value()}
    arguments |= dict(zip((a.name for a in node.target._schema.arguments), node.args, strict=False)) | node.kwargs
    return arguments.get("dropout_p") != 0
