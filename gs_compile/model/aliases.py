"""aliases: tensors that share the memory of a parameter whose value moves to the tiers at its model's first call.

Two parameters of the model, or a parameter and a buffer, would no longer share memory: they are refused. Other tensors,
such as those of a state dict that was made before, show the parameter's value from then on (`Alias`). A warning names
those that cannot.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from gs_compile.capture.graph import Input
from gs_compile.capture.internals import num_holders
from gs_compile.errors import OptimizerError, SharedMemoryWarning
from gs_compile.model.residency import is_offloaded, residency_of
from gs_compile.model.stand_in import address


def overlapping(tensors: Mapping[str, Tensor], matters: Callable[[str, str], bool]) -> tuple[str, str] | None:
    """The names of two tensors that overlap in memory, for which `matters` is true."""
    before: list[tuple[int, str]] = []  # the ends of tensors that begin before
    for start, end, name in sorted((*_span(each), name) for name, each in tensors.items() if each.numel()):
        before = [(stop, other) for stop, other in before if stop > start]
        for _, other in before:
            if matters(other, name):
                return other, name
        before.append((end, name))
    return None


def refuse_overlaps(inputs: Sequence[Input], args: Sequence[Any]) -> None:
    """Raise OptimizerError if, among the arguments of a call, another tensor shares a trained parameter's memory."""
    named = {entry.path: arg for entry, arg in zip(inputs, args, strict=True) if isinstance(arg, Tensor)}
    trained = {name for name, arg in named.items() if is_offloaded(arg) and arg.requires_grad}
    here = {name: values for name, arg in named.items() if (values := _in_memory(arg)) is not None}
    found = overlapping(here, lambda *names: not trained.isdisjoint(names))
    if found is not None:
        raise OptimizerError(
            f"{found[0]} and {found[1]} are two tensors in the same memory, but on the tiers each would have its own. "
            "Tie them by assigning the same Parameter to both modules (head.weight = words.weight), and remove a "
            "buffer that shares memory with a parameter"
        )


def aliases_of(args: Sequence[Any]) -> list[tuple[Tensor, Tensor, int]]:
    """Other tensors that share memory with parameters that are about to move, each with its parameter, and with the
    element of the value at which it begins.

    Warns of tensors that cannot follow, and will show the old values.
    """
    leaving: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)  # by the memory that they are in
    for parameter in filter(is_offloaded, args):
        if residency_of(parameter).folder is None and (values := _in_memory(parameter)) is not None:
            leaving[address(values)].append((parameter, values))
    known = [values for arg in args if (values := _in_memory(arg)) is not None]
    number = Counter(map(address, known))
    shared = {at for at, found in leaving.items() if any(num_holders(each) > number[at] for _, each in found)}
    if not shared:
        return []
    own = {id(each) for each in known}
    overlaps, stale = [], []
    all_tensors = [each for each in gc.get_objects() if type(each) in (Tensor, torch.nn.Parameter)]
    for other in all_tensors:
        if id(other) in own or not is_plain(other) or address(other) not in shared:
            continue
        start, end = _span(other)
        for parameter, values in leaving[address(other)]:
            first, last = _span(values)
            if not (first < end and start < last and other.numel() and other.dtype == values.dtype):
                continue  # bytes are of writes, as of those of a first call that has failed
            follows = first <= start and end <= last and _may_follow(other, parameter, values)
            if not follows or _is_of_array(other, all_tensors):
                stale.append(other)
            if follows:
                overlaps.append((other, parameter, (start - first) // values.itemsize))
            break
    if stale:
        warnings.warn(
            f"{len(stale)} tensors or arrays, the first of shape {tuple(stale[0].shape)}, share memory with parameters "
            "that go to the tiers now, and will keep the values from before training: arrays, tensors that contain "
            "several parameters, and tensors of a parameter that gets another dtype cannot follow. Make them again "
            "when you use them",
            SharedMemoryWarning,
            stacklevel=2,
        )
    return overlaps


def _may_follow(other: Tensor, parameter: Tensor, values: Tensor) -> bool:
    """Whether a tensor in a parameter's memory may be made an `Alias`."""
    is_alike = other.dtype == parameter.dtype and values.is_contiguous()
    return is_alike and type(other) is Tensor and not other.requires_grad


def _is_of_array(other: Tensor, all_tensors: list[Tensor]) -> bool:
    """Whether only a numpy array made from a tensor holds it: the garbage collector does not know such arrays."""
    known = (all_tensors, sys._getframe(), sys._getframe(1))
    return not other.untyped_storage().resizable() and all(
        any(each is one for one in known) for each in gc.get_referrers(other)
    )


def _in_memory(arg: Any) -> Tensor | None:
    """The tensor that holds an argument's value, if the value is in memory."""
    values = residency_of(arg).stash if is_offloaded(arg) else arg
    return values if is_plain(values) else None


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor with memory of its own: not fake, sparse or a wrapper of others."""
    if type(value) not in (Tensor, torch.nn.Parameter):
        return False
    assert isinstance(value, Tensor)
    return value.layout == torch.strided and not value.is_meta


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of its first byte and after its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
