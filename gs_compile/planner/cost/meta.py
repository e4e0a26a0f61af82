"""meta: a model without its weights, as shallow as its capture allows.

The model is copied to the meta device: of its parameters and buffers only shapes are looked at. A stack of blocks that
are alike can be captured with two of them, so that depth costs nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import nn

from gs_compile.codegen.layout import kept_dtype
from gs_compile.errors import InspectionError
from gs_compile.options import Options

SAMPLES = 2  # of the batch that is captured: a dimension of one would be taken for a constant
DEPTH = 2  # blocks of a shortened stack: the fewest that can be seen to be alike
PLAIN = (bool, int, float, str, tuple, list, dict, set, frozenset, torch.dtype, torch.device, torch.Size)


def meta_copy(model: nn.Module, options: Options) -> nn.Module:
    """The model on the meta device, in the dtype it is trained in; its tensors are neither changed nor read."""
    memo: dict[int, Any] = {}
    attributes = (value for module in model.modules() for value in vars(module).values())
    for value in chain(model.parameters(), model.buffers(), attributes):
        if isinstance(value, nn.Parameter):
            like = torch.empty(value.shape, dtype=kept_dtype(value, options), device="meta")
            memo[id(value)] = nn.Parameter(like, value.requires_grad)
        elif isinstance(value, torch.Tensor):
            memo[id(value)] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return deepcopy(model, memo)


def meta_tokens(model: nn.Module, sequence: int) -> dict[str, Any]:
    """Token ids, and labels, for what forward asks for; no cache of what is only of use in generation."""
    parameters = inspect.signature(model.forward).parameters.values()
    names = [p.name for p in parameters if p.default is p.empty and p.kind == p.POSITIONAL_OR_KEYWORD]
    names += [p.name for p in parameters if p.name in ("input_ids", "labels", "targets") and p.name not in names]
    if not names:
        raise InspectionError(
            f"{type(model).__name__}.forward has no required argument, and none called input_ids: a plan calls it with "
            "token ids"
        )
    options = {p.name: False for p in parameters if p.name == "use_cache"}
    return options | {name: torch.zeros(SAMPLES, sequence, dtype=torch.long, device="meta") for name in names}


def repeated(model: nn.Module) -> nn.ModuleList | nn.Sequential | None:
    """The one list of more than `DEPTH` modules that are alike, not inside another; None without, or with several."""
    found = list(_stacks(model))
    return found[0] if len(found) == 1 else None


def _stacks(module: nn.Module) -> Iterator[nn.ModuleList | nn.Sequential]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential) and len(child) > DEPTH and are_alike(list(child)):
            yield child
        else:
            yield from _stacks(child)


def are_alike(blocks: Sequence[nn.Module]) -> bool:
    """Whether nothing that can be seen tells one block from the next, but for numbers that count the blocks."""
    modules = [module for block in blocks for module in block.modules()]
    if len(set(modules)) < len(modules):
        return False  # they share some
    rows = [list(_traits(block)) for block in blocks]
    return len(set(map(len, rows))) == 1 and all(map(_is_shared, zip(*rows, strict=True)))


def _traits(block: nn.Module) -> Iterator[Any]:
    """All that can be seen of a block: of each module its place, type and attributes, of tensors no content."""
    for path, module in block.named_modules():
        yield path, type(module)
        for name, value in vars(module).items():
            yield name
            if name in ("_parameters", "_buffers"):
                yield [(key, None if t is None else (t.shape, t.dtype, t.requires_grad)) for key, t in value.items()]
            elif name != "_modules":
                yield value


def _is_shared(values: Sequence[Any]) -> bool:
    """Whether a trait is the same in all blocks, or their number."""
    first = values[0]
    counts = all(type(value) is int and value == place + first for place, value in enumerate(values))
    return counts or all(value is first or _is_equal(value, first) for value in values)


def _is_equal(left: Any, right: Any) -> bool:
    with suppress(RuntimeError):  # of tensors in a list, which have no one answer
        return type(left) is type(right) and isinstance(left, PLAIN) and bool(left == right)
    return False
