"""residency: where the value of each parameter is.

resident       in memory, as PyTorch has it
stashed        detached from the model: in a file that `init_on_storage` has made, or in memory during the first call
tiered         in a parameter store, the engine of one model
materialized   in memory for the time of a `materialize`; the store keeps its own

A stashed or tiered parameter is offloaded: the user holds a placeholder (`gs_compile.model.placeholder`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from gs_compile.capture.internals import changes
from gs_compile.errors import ReleasedParameterError
from gs_compile.model.mapped import mapped
from gs_compile.model.placeholder import OffloadedParameter, UnavailableGradient, placeholder
from gs_compile.runtime.tiers import Slice

Tensor = torch.Tensor
State = Literal["resident", "stashed", "tiered", "materialized"]


class ParameterStore(Protocol):
    """What holds the values of tiered parameters, each in its span."""

    @property
    def closed(self) -> bool: ...

    @property
    def version(self) -> int:
        """Another number whenever a value has changed."""

    def read(self, span: Slice, *, master: bool = False) -> Tensor:
        """The value after all updates, in a CPU tensor of the caller's; with `master` in fp32 where it is kept so."""

    def write(self, span: Slice, values: Tensor) -> None:
        """A new value, in the parameter's dtype or the master's."""


@dataclass(frozen=True)
class Stash:
    """The value of a detached parameter, and the directory of its file; None: it was resident, and is in memory."""

    values: Tensor
    folder: Path | None = None


@dataclass(eq=False)
class Residency:
    """Where one parameter's value is. An attribute of the parameter, so that both end together."""

    optimizer: weakref.ref[Any] | None = None  # of this package, made for the parameter
    store: ParameterStore | None = None
    span: Slice | None = None  # in the store
    is_trained: bool = False  # by the store
    stash: Stash | None = None
    placeholder: Tensor | None = None  # one NaN
    moved: tuple[Tensor, Stash] | None = None  # placeholder and stash of a conversion, if it is taken up
    gradient: Tensor | None = None  # to be shown as .grad
    kind: type = nn.Parameter  # of the resident parameter
    is_materialized: bool = False
    shown: tuple[weakref.ref[Tensor], int, int] | None = None  # what `shown_value` gave, of when

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of a parameter has a value of its own

    def is_offloaded(self, parameter: Tensor) -> bool:
        """Whether the parameter's memory is its placeholder, and not what somebody gave it as `.data` since."""
        address = parameter.untyped_storage().data_ptr()
        if self.moved is not None and address == self.moved[0].data_ptr():
            (self.placeholder, self.stash), self.moved = self.moved, None
        return self.placeholder is not None and address == self.placeholder.data_ptr()

    @property
    def tiered(self) -> tuple[ParameterStore, Slice] | None:
        """The store and the place in it, while it is open."""
        if self.store is None or self.span is None or self.store.closed:
            return None
        return self.store, self.span

    def stashed_value(self, parameter: Tensor) -> Tensor:
        """The value of a stashed parameter: read from storage where it is touched."""
        if self.stash is None:
            raise ReleasedParameterError(
                f"a parameter of shape {tuple(parameter.shape)} has no value: the run that had it failed or was closed"
            )
        return self.stash.values

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
        folder = self.stash.folder if self.stash is not None else None
        if dtype != parameter.dtype:
            flat = values.reshape(-1)
            values = (
                values.to(dtype)
                if folder is None
                else mapped(values.shape, dtype, folder, lambda start, stop: flat[start:stop].to(dtype))
            )
        self.moved = placeholder(dtype, device), Stash(values, folder)
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
    """Whether the parameter is stashed or tiered."""
    return isinstance(parameter, OffloadedParameter) and residency_of(parameter).is_offloaded(parameter)


def state_of(parameter: Tensor) -> State:
    """Where the parameter's value is."""
    if residency_of(parameter).is_materialized:
        return "materialized"
    if not is_offloaded(parameter):
        return "resident"
    return "tiered" if residency_of(parameter).tiered is not None else "stashed"


# Changes of state -----------------------------------------------------------------------------------------------------


def stash(parameter: Tensor, dtype: torch.dtype | None = None, on_storage: Stash | None = None) -> None:
    """Detach a resident parameter from its value, or from what is the same on storage. It takes `dtype`."""
    residency = residency_of(parameter)
    if not is_offloaded(parameter):
        residency.kind = type(parameter)
        residency.stash = on_storage or Stash(parameter.data)
        residency.store = residency.span = None
    residency.release(parameter, dtype or parameter.dtype)


def adopt(parameter: Tensor, store: ParameterStore, span: Slice) -> None:
    """The store has the value of a stashed parameter now."""
    residency = residency_of(parameter)
    residency.stash, residency.store, residency.span = None, store, span
    residency.is_trained = parameter.requires_grad


def hand_back(parameter: Tensor) -> None:
    """Take a value out of a store that failed at its start: the parameter is stashed again, in memory."""
    residency = residency_of(parameter)
    assert residency.store is not None
    assert residency.span is not None
    residency.stash = Stash(residency.store.read(residency.span, master=True))
    residency.store = residency.span = None


def roll_back(arguments: Iterable[Any]) -> None:
    """After a first call that failed: parameters that were resident before are so again, and have their dtype."""
    for parameter in arguments:
        if isinstance(parameter, OffloadedParameter) and state_of(parameter) == "stashed":
            residency = residency_of(parameter)
            if residency.stash is not None and residency.stash.folder is None:
                restore(parameter, residency.stash.values)
            elif residency.stash is not None:
                residency.release(parameter, residency.stash.values.dtype)


def restore(parameter: Tensor, values: Tensor) -> None:
    """Make a parameter resident: it has `values` itself, not a copy."""
    assert values.shape == parameter.shape, f"{tuple(values.shape)} for a parameter of {tuple(parameter.shape)}"
    residency = residency_of(parameter)
    parameter.data = values
    parameter.__class__ = residency.kind
    residency.placeholder = residency.stash = residency.store = residency.span = None


def mark_gradient_unavailable(parameter: Tensor) -> None:
    """After a backward: the gradient of an offloaded parameter has gone to its update, and nobody else can use it."""
    if is_offloaded(parameter):
        residency = residency_of(parameter)
        residency.gradient = residency.gradient if residency.gradient is not None else UnavailableGradient.of(parameter)
        parameter.grad = residency.gradient


def bring_into_memory(parameter: Tensor, *, master: bool) -> Callable[[], None]:
    """Materialize an offloaded parameter; what is returned ends that."""
    residency, dtype = residency_of(parameter), parameter.dtype
    parameter.data = residency.value(parameter, master=master).to(parameter.device)
    parameter.__class__ = residency.kind
    residency.is_materialized = True

    def leave() -> None:
        residency.is_materialized = False
        residency.release(parameter, dtype)

    return leave
