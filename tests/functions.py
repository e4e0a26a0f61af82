"""Every function of torch that takes a tensor, with arguments for one call: those that PyTorch's own tests use, and of
functions that are no operators a matrix for each argument that has no default."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import get_testing_overrides, resolve_name
from torch.utils._pytree import tree_leaves, tree_map

MOST_ELEMENTS = 500  # of an argument


class Use(NamedTuple):
    """A function, and the arguments of a call; the floating strided tensors among them are to be parameters."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Uses(nn.Module):
    """A block that adds a number of each function's results to its input."""

    def __init__(self, uses: Sequence[Use]) -> None:
        super().__init__()
        self.weights = nn.ParameterList()
        self.calls = [(use.function, *tree_map(self._kept, (use.args, use.kwargs))) for use in uses]

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach().clone()
        if value.is_floating_point() and value.layout is torch.strided:
            value = nn.Parameter(value)
            self.weights.append(value)
        return value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for function, args, kwargs in self.calls:
            for result in tree_leaves(function(*args, **kwargs)):
                if isinstance(result, torch.Tensor):
                    x = x + number_of(result)
        return x


def number_of(result: torch.Tensor) -> torch.Tensor:
    """A number between -1 and 1 for a tensor of any kind."""
    real = torch.view_as_real(result.resolve_conj()) if result.is_complex() else result.float()
    return torch.tanh(torch.nan_to_num(real)).sum() / max(real.numel(), 1)


@cache
def every_use() -> dict[str, Callable[[], Use]]:
    """By name, what makes a call of each function; operators first, as functions and as methods."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db  # which takes seconds
    from torch.testing._internal.opinfo import core

    for each in (common_utils, core):  # for each sample they would read the source of all frames, for unittest's test
        each.extract_test_fn = lambda: None
    found = dict[str, Callable[[], Use]]()
    functions = set[Any]()
    for op in op_db:
        if op.supports_dtype(torch.float32, "cpu"):
            name = f"{op.name}{'.' * bool(op.variant_test_name)}{op.variant_test_name}"
            for kind, function in (("", op.get_op()), ("method ", op.get_method())):
                if function is not None:
                    functions.add(function)
                    found[kind + name] = partial(_operator, kind + name, function, op)
    for function, dummy in get_testing_overrides().items():
        if function not in functions:
            name = f"override {resolve_name(function) or function.__name__}"
            found[name] = partial(_other, name, function, dummy)
    return found


def _operator(name: str, function: Callable[..., Any], op: Any) -> Use:
    """With the first sample that is neither empty nor large, else the first."""
    torch.manual_seed(0)
    first = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        samples = op.sample_inputs("cpu", torch.float32, requires_grad=True)
        for sample in islice(samples, 20):
            first = first or sample
            tensors = [leaf for leaf in tree_leaves((sample.input, sample.args)) if isinstance(leaf, torch.Tensor)]
            if tensors and all(1 < tensor.numel() < MOST_ELEMENTS for tensor in tensors):
                first = sample
                break
    assert first is not None, name
    return Use(name, function, (first.input, *first.args), dict(first.kwargs))


def _other(name: str, function: Callable[..., Any], dummy: Callable[..., Any]) -> Use:
    """Attributes, methods in place, questions, quantisation and the like: with a matrix for each that is wanted."""
    wanted = [each for each in inspect.signature(dummy).parameters.values() if each.default is each.empty]
    number = sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in wanted)
    args = tuple(torch.linspace(0.1, 0.9, 9).reshape(3, 3) for _ in range(max(number, 1)))
    return Use(name, _callable(name, function), args, {})


def _callable(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """An attribute is read as code reads it."""
    *_, attribute, method = ("", *name.split("."))
    return (lambda tensor, *_: getattr(tensor, attribute)) if method == "__get__" else function
