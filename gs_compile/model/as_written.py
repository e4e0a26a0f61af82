"""as_written: calls that are no step: a captured graph runs as plain PyTorch runs it, its operations one by one."""

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
    """The results of a call without gradients of what is no model in layers."""
    with evaluating(args):
        return list(module(*args))


def run_until_it_raises(module: fx.GraphModule, args: Sequence[Any], broken: GraphBreakError) -> list[Any]:
    """The results of a part of a forward, behind which the exception comes that Dynamo has seen, as itself.

    broken: what a backward raises, where none comes. The next call is captured anew.
    """
    forget_code()
    with torch.no_grad():
        results = run_as_written(module, args)
    is_float = [isinstance(each, torch.Tensor) and each.is_floating_point() for each in results]
    return [refusing(each, broken) if is_so else each for each, is_so in zip(results, is_float, strict=True)]
