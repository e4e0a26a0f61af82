"""stand_in: tensors that stand for other tensors, to which torch's functions are then applied."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gs_compile.capture.internals import changes, tree_map_only
from gs_compile.errors import SharedMemoryWarning


class StandIn(Tensor):
    """A tensor that stands for another one: `applied` passes that one to functions, and returns what callers get."""

    def taken(self, name: str = "") -> Tensor:
        """The tensor that a function of that name gets instead; "pickle": for any code that pickles it."""
        raise NotImplementedError

    def changed(self, taken: Tensor) -> None:
        """Called when the result of `taken` was changed in place."""

    def seen(self, result: Tensor, taken: Tensor) -> Tensor:
        """What the caller gets if a function's result is a view of the result of `taken`."""
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.taken("pickle").__reduce_ex__(protocol)


Used = list[tuple[StandIn, Tensor, int]]  # what was taken for each, and its version then


def applied(
    kind: type[StandIn], function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], used: Used | None = None
) -> Any:
    """The function's result for the tensors that arguments stand for; `used` is filled before the call."""
    used = [] if used is None else used

    def take(each: StandIn) -> Tensor:
        taken = each.taken(function.__name__)
        used.append((each, taken, changes(taken)))
        return taken

    args, kwargs = tree_map_only(kind, take, (args, kwargs))
    result = function(*args, **kwargs)
    for each, taken, before in used:
        if changes(taken) != before:
            each.changed(taken)
    if function.__name__ in ("numpy", "__array__"):
        result.flags.writeable = False  # nobody learns of what is written to an array
    return tree_map_only(Tensor, lambda found: _seen(found, used), result)


def _seen(result: Tensor, used: Used) -> Tensor:
    for each, taken, _ in used:
        if result is taken:
            return each
        if shares_memory(result, taken):
            return each.seen(result, taken)
    return result


def address(tensor: Tensor) -> int:
    """Of all that a tensor's memory is a part of; nothing else has it while that lives. 0: it has none of its own."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a wrapper of functorch's
        return 0


def shares_memory(first: Tensor, second: Tensor) -> bool:
    """Whether one is a view of the other, or both of a third tensor; False if one has no memory of its own."""
    if first.layout is not torch.strided or DTensor in (type(first), type(second)):
        return False
    return address(first) == address(second) != 0


def plain(tensor: Tensor) -> Tensor:
    """An ordinary tensor of the same memory."""
    return cast(Tensor, nn.Parameter.__torch_function__(Tensor.as_subclass, (), (tensor, Tensor), {}))


def warn_of_two(shape: Sequence[int]) -> None:
    """Warn that two parameters on the tiers share no memory, although ``parameter.data = other.data`` asks for it."""
    warnings.warn(
        f"a parameter of shape {tuple(shape)} on the tiers is given the memory of another one (parameter.data = "
        "other.data), but each has its own there: it gets the values of now, and what changes one from now on does not "
        "change the other. To tie both, assign the Parameter (head.weight = words.weight) before the model's first "
        "call; to copy values, use copy_()",
        SharedMemoryWarning,
        stacklevel=5,
    )
