"""as_written: calls that do not run in layers: the captured graph runs as in plain PyTorch, operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from gs_compile.capture.dynamo import forget_code
from gs_compile.errors import GraphBreakError
from gs_compile.model.call import refusing
from gs_compile.model.materialize import evaluating


def run_as_written(module: fx.GraphModule, args: Sequence[Any]) -> list[Any]:
    """The results of a call without gradients that cannot run in layers."""
    with evaluating(args):
        return list(module(*args))


def run_until_it_raises(module: fx.GraphModule, args: Sequence[Any], broken: GraphBreakError) -> list[Any]:
    """The results of the part of a forward before an exception that the forward itself raises next, as Dynamo has seen.

    broken: the error of a backward, if the exception does not come. The next call is captured again.
    """
    forget_code()
    with torch.no_grad():
        results = run_as_written(module, args)
    is_float = [isinstance(each, torch.Tensor) and each.is_floating_point() for each in results]
    return [refusing(each, broken) if is_so else each for each, is_so in zip(results, is_float, strict=True)]
