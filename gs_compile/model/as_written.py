"""as_written: calls that are no step: a captured graph runs as plain PyTorch runs it, its operations one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gs_compile.capture.dynamo import forget_code
from gs_compile.errors import GraphBreakError
from gs_compile.model.call import refusing
from gs_compile.model.materialize import evaluating
from gs_compile.runtime.ranks import Ranks


@dataclass
class AsWritten:
    """A call without gradients of what is no model in layers."""

    module: fx.GraphModule
    args: Sequence[Any]
    ranks: Ranks | None

    def run(self) -> list[Any]:
        with evaluating(self.args):
            return list(self.module(*self.args))


def run_until_it_raises(module: fx.GraphModule, args: Sequence[Any], broken: GraphBreakError) -> list[Any]:
    """The results of a part of a forward, behind which the exception comes that Dynamo has seen, as itself.

    broken: what a backward raises, where none comes. The next call is captured anew.
    """
    forget_code()
    with torch.no_grad():
        results = AsWritten(module, args, None).run()
    is_float = [isinstance(each, torch.Tensor) and each.is_floating_point() for each in results]
    return [refusing(each, broken) if is_so else each for each, is_so in zip(results, is_float, strict=True)]
