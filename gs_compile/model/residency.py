"""residency: where the value of each parameter is, and what the user holds while it is elsewhere.

resident       in memory, as PyTorch has it
stashed        detached from the model: in a file that `init_on_storage` has made, or in memory during the first call
tiered         in a parameter store, the engine of one model
materialized   in memory for the time of a `materialize`; the store keeps its own

A stashed or tiered parameter is offloaded: it is an `OffloadedParameter`, and its memory is a placeholder. Strides of a
placeholder are 0, and Dynamo guards strides. So the backend detaches parameters in its first call and has Dynamo trace
again: the model is compiled once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gs_compile.capture.internals import changes
from gs_compile.errors import ReleasedParameterError
from gs_compile.model.mapped import mapped
from gs_compile.model.parameter_store import ParameterStore
from gs_compile.model.placeholder import UnavailableGradient, placeholder
from gs_compile.runtime.tiers import Slice

Tensor = torch.Tensor


@dataclass(eq=False)
class Residency:
    """Where one parameter's value is. An attribute of the parameter, so that both end together."""

    optimizer: weakref.ref[Any] | None = None  # of this package, made for the parameter
    place: tuple[ParameterStore, Slice] | None = None  # the store, and the span in it
    is_trained: bool = False  # by the store
    stash: Tensor | None = None  # the value of a stashed parameter, in a file or in memory
    folder: Path | None = None  # of the file; None: the parameter was resident, and its value is in memory
    placeholder: Tensor | None = None  # one NaN
    moved: tuple[Tensor, Tensor] | None = None  # placeholder and stash of a conversion, if it is taken up
    gradient: Tensor | None = None  # to be shown as .grad
    kind: type = nn.Parameter  # of the resident parameter
    is_materialized: bool = False
    shown: tuple[weakref.ref[Tensor], int, int] | None = None  # what `shown_value` gave, of when

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of a parameter has a value of its own

    @property
    def tiered(self) -> tuple[ParameterStore, Slice] | None:
        """The store and the span in it, while it is open."""
        return None if self.place is None or self.place[0].closed else self.place

    def stashed_value(self, parameter: Tensor) -> Tensor:
        """The value of a stashed parameter: read from storage where it is touched."""
        if self.stash is None:
            raise ReleasedParameterError(
                f"a parameter of shape {tuple(parameter.shape)} has no value: the run that had it failed or was closed"
            )
        return self.stash

    def value(self, parameter: Tensor, *, master: bool = False) -> Tensor:
        """The value of an offloaded parameter, on the CPU: in its dtype, or in that of its master."""
        if self.tiered is not None:
            store, span = self.tiered
            return store.read(span, master=master)
        values = self.stashed_value(parameter)
        return values if master else values.to(parameter.dtype)

    def shown_value(self, parameter: Tensor) -> Tensor:
        """`value`; the same tensor again while it is in use and true, so that tied entries of state dicts stay tied."""
        if self.tiered is None:
            return self.value(parameter)
        store, _ = self.tiered
        known, of, own = self.shown or (lambda: None, -1, -1)
        values = known()
        if values is None or (of, own) != (store.version, changes(values)):
            values = self.value(parameter)
            self.shown = weakref.ref(values), store.version, changes(values)
        return values

    def write(self, parameter: Tensor, values: Tensor) -> None:
        """Give an offloaded parameter another value."""
        if self.tiered is not None:
            store, span = self.tiered
            store.write(span, values)
            return
        own = self.stashed_value(parameter)
        if own.data_ptr() != values.data_ptr():
            with torch.no_grad():
                own.copy_(values)

    def convert(self, parameter: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A placeholder of that dtype and device: it counts from when the parameter gets it as `.data`."""
        if (dtype, device) == (parameter.dtype, parameter.device):
            return parameter
        future = torch.__future__
        replaced = future.get_swap_module_params_on_conversion() or future.get_overwrite_module_params_on_conversion()
        if self.tiered is not None or device.type == "meta" or replaced:
            raise ReleasedParameterError(
                f"a parameter of shape {tuple(parameter.shape)} lives on the tiers and cannot become {dtype} on "
                f"{device}. Convert the model before its first call, to a device that computes, and in the way that is "
                "torch's default (.data); a state_dict() has the values at any time"
            )
        values = self.stashed_value(parameter)
        if self.folder is None:
            values = values.to(dtype)
        elif dtype != parameter.dtype:
            flat = values.reshape(-1)
            values = mapped(values.shape, dtype, self.folder, lambda start, stop: flat[start:stop].to(dtype))
        self.moved = placeholder(dtype, device), values
        return self.moved[0].expand(parameter.shape)

    def release(self, parameter: Tensor, dtype: torch.dtype) -> None:
        """Put a placeholder of that dtype in the place of the parameter's memory."""
        self.placeholder = placeholder(dtype, parameter.device)
        parameter.data = self.placeholder.expand(parameter.shape)
        parameter.__class__ = OffloadedParameter


def residency_of(parameter: Tensor) -> Residency:
    """The parameter's entry, made when it is first asked for."""
    found = getattr(parameter, "_greedysnake", None)
    if not isinstance(found, Residency):
        found = Residency()
        parameter._greedysnake = found  # type: ignore[attr-defined]
    return found


def is_offloaded(parameter: Tensor) -> bool:
    """Whether the parameter is stashed or tiered: it has a placeholder, and nobody gave it other `.data` since."""
    if not isinstance(parameter, OffloadedParameter):
        return False
    residency, address = residency_of(parameter), parameter.untyped_storage().data_ptr()
    if residency.moved is not None and address == residency.moved[0].data_ptr():
        (residency.placeholder, residency.stash), residency.moved = residency.moved, None
    return residency.placeholder is not None and address == residency.placeholder.data_ptr()


# The parameter --------------------------------------------------------------------------------------------------------


def _conversion(name: str) -> Callable[..., Any]:
    """A tensor's method `name` for an offloaded parameter: a tensor without elements tells what it leads to."""
    plain = getattr(Tensor, name)

    def convert(self: OffloadedParameter, *args: Any, **kwargs: Any) -> Any:
        if self._residency is None:
            return plain(self, *args, **kwargs)
        kwargs.pop("memory_format", None)  # values are kept in one order
        like = plain(torch.empty(0, dtype=self.dtype, device=self.device), *args, **kwargs)
        return self._residency.convert(self, like.dtype, like.device)

    return convert


class OffloadedParameter(nn.Parameter):
    """A parameter whose value is elsewhere. A resident one becomes this, and is an ordinary one again afterwards.

    Its value is read and written through its own methods: `detach`, with which `state_dict` reads, and `copy_`, with
    which `load_state_dict` writes. `.to(...)` and its like change where and in what dtype the model computes; no value
    is lost or brought into memory.
    """

    @property
    def _residency(self) -> Residency | None:
        """Where the value is; None while Dynamo traces, and where somebody gave other `.data`: an ordinary tensor."""
        return None if torch.compiler.is_dynamo_compiling() or not is_offloaded(self) else residency_of(self)

    to = _conversion("to")
    cpu = _conversion("cpu")
    cuda = _conversion("cuda")
    float = _conversion("float")
    double = _conversion("double")
    half = _conversion("half")
    bfloat16 = _conversion("bfloat16")

    def detach(self) -> Tensor:
        """The value, in a tensor that takes memory only where it is touched."""
        return Tensor.detach(self) if self._residency is None else self._residency.shown_value(self)

    def copy_(self, other: Tensor, non_blocking: bool = False) -> Tensor:
        """Write `other` to wherever the value is."""
        if self._residency is None or torch.is_grad_enabled():
            return Tensor.copy_(self, other, non_blocking)
        if other is not self:
            self._residency.write(self, other.detach().expand(self.shape))
        return self

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        kept = f"shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'"
        return f"OffloadedParameter({kept}, requires_grad={self.requires_grad})"

    def __deepcopy__(self, memo: Any) -> Any:
        self._refuse_copy()
        return super().__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse_copy()
        return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _refuse_copy(self) -> None:
        if self._residency is not None:
            raise ReleasedParameterError(
                "this model cannot be copied or pickled: its parameters live on the tiers. Take its state_dict(), or "
                "copy it inside `with gs_compile.materialize(model):`"
            )


# Changes of state -----------------------------------------------------------------------------------------------------


def stash(
    parameter: Tensor, dtype: torch.dtype | None = None, *, values: Tensor | None = None, folder: Path | None = None
) -> None:
    """Detach a resident parameter from its value. It takes `dtype`; `values` are the same, in a file in `folder`."""
    residency = residency_of(parameter)
    if not is_offloaded(parameter):
        residency.kind = type(parameter)
        residency.stash, residency.folder = parameter.data if values is None else values, folder
        residency.place = None
    residency.release(parameter, dtype or parameter.dtype)


def adopt(parameter: Tensor, store: ParameterStore, span: Slice) -> None:
    """The store has the value of a stashed parameter now."""
    residency = residency_of(parameter)
    residency.stash, residency.place = None, (store, span)
    residency.is_trained = parameter.requires_grad


def hand_back(parameter: Tensor) -> None:
    """Take a value out of a store that failed at its start: the parameter is stashed again, in memory."""
    residency = residency_of(parameter)
    residency.stash, residency.folder = residency.value(parameter, master=True), None
    residency.place = None


def roll_back(arguments: Iterable[Any]) -> None:
    """After a first call that failed: parameters that were resident before are so again, and have their dtype."""
    for parameter in arguments:
        residency = residency_of(parameter) if isinstance(parameter, OffloadedParameter) else None
        if residency is None or residency.stash is None or not is_offloaded(parameter):
            continue
        if residency.folder is None:
            restore(parameter, residency.stash)
        else:
            residency.release(parameter, residency.stash.dtype)


def restore(parameter: Tensor, values: Tensor) -> None:
    """Make a parameter resident: it has `values` itself, not a copy."""
    residency = residency_of(parameter)
    parameter.data = values
    parameter.__class__ = residency.kind
    residency.placeholder = residency.stash = residency.place = None


def mark_gradient_unavailable(parameter: Tensor) -> None:
    """After a backward: the gradient of an offloaded parameter has gone to its update, and nobody else can use it."""
    if is_offloaded(parameter):
        residency = residency_of(parameter)
        if residency.gradient is None:
            whole = placeholder(parameter.dtype, parameter.device).expand(parameter.shape)
            residency.gradient = whole.as_subclass(UnavailableGradient)
        parameter.grad = residency.gradient


@contextmanager
def in_memory(parameter: Tensor, *, master: bool) -> Iterator[None]:
    """An offloaded parameter, materialized."""
    residency, dtype = residency_of(parameter), parameter.dtype
    parameter.data = residency.value(parameter, master=master).to(parameter.device)
    parameter.__class__ = residency.kind
    residency.is_materialized = True
    try:
        yield
    finally:
        residency.is_materialized = False
        residency.release(parameter, dtype)
