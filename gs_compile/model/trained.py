"""trained: the parameters of a captured model that its optimizer trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gs_compile.capture.internals import backward_hooks
from gs_compile.codegen.compiled import Compilation, SpecializedModel
from gs_compile.errors import OptimizerError


def param_groups(
    compilation: Compilation, model: SpecializedModel, args: Sequence[Any], group_of: Mapping[Tensor, int]
) -> dict[int, int]:
    """The param group of each trained parameter, by input index; raises `OptimizerError` for none, and for a hook."""
    captured = compilation.captured
    read = {index for graph in model.split.units for index in graph.parameters(captured) if args[index].requires_grad}
    for index in read:
        if args[index] not in group_of:
            raise OptimizerError(
                f"{captured.inputs[index].path} is trained, but the gs_compile optimizer does not have it; give the "
                "optimizer all parameters that require a gradient, or freeze this one"
            )
        if found := backward_hooks(args[index]):
            raise OptimizerError(
                f"{captured.inputs[index].path} has a hook on its gradient, {found[0]}, which would never be called: a "
                "parameter on the tiers gives its gradient to its update alone. Remove the hook"
            )
    return {index: group_of[args[index]] for index in read}
