"""residency: where the value of each parameter is, and what the parameter is while its value is elsewhere.

resident       in memory, as PyTorch has it
stashed        detached from the model: in a file that `init_on_storage` has made, or in memory during the first call
tiered         in a parameter store, the engine of one model
materialized   in memory for the time of a `materialize`; the store keeps its own

A stashed or tiered parameter is offloaded: it is an `OffloadedParameter`, and its memory is a placeholder with strides
of 0. Dynamo guards strides. So the backend detaches parameters while their first call is compiled, and Dynamo guards
the placeholders: the model is compiled once.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gs_compile.capture.internals import changes
from gs_compile.errors import COMMITTED, LOST, SAVED, ReleasedParameterError
from gs_compile.model import files
from gs_compile.model.given import Given
from gs_compile.model.offloaded import OffloadedParameter, UnavailableGradient, placeholder, read_for
from gs_compile.model.parameter_store import ParameterStore, Reader, in_full
from gs_compile.model.stand_in import address, shares_memory
from gs_compile.runtime.codecs import CODECS, Encoded, dense
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.spans import Slice
from gs_compile.runtime.tiers import Tiers

ROUNDED = (
    "a frozen parameter of shape {} has got other values, which are quantized to {} as the first ones were. To merge "
    "adapters into weights that are not quantized, do it inside `with gs_compile.materialize(model):`, and save there"
)


class Home(NamedTuple):
    """Where a tiered parameter's value is."""

    store: ParameterStore
    span: Slice


@dataclass(frozen=True)
class Shown:
    """A tensor that has a parameter's value, as long as neither changes."""

    values: weakref.ref[Tensor]
    version: Any  # of the value
    changes: int  # of the tensor
    address: int  # of its memory, in whose place a script may give it other: ``values.data = ...``

    def is_true(self, tensor: Tensor, version: Any) -> bool:
        """Whether `tensor`, which is this one or a view of it, still has the value of that version."""
        values = self.values()
        known = values is not None and shares_memory(values, tensor)
        return known and (version, changes(tensor), address(tensor)) == (self.version, self.changes, self.address)


@dataclass(eq=False)
class Residency:
    """Where one parameter's value is. It is an attribute of the parameter, so that both end together."""

    optimizer: weakref.ref[Any] | None = None  # of this package, made for the parameter
    home: Home | None = None
    is_trained: bool = False  # by the store
    stash: Tensor | None = None  # the value of a stashed parameter, in a file or in memory
    folder: Path | None = None  # of the file; None: the parameter was resident, and its value is in memory
    codec: str = ""  # of `CODECS`: the stash is the bytes of an encoded matrix
    gradient: UnavailableGradient | None = None  # to be shown as .grad
    kind: type = nn.Parameter  # of the resident parameter
    is_materialized: bool = False
    shown: dict[tuple[torch.device, bool], Shown] = field(default_factory=dict)  # by device, and whether read in place
    left: list[weakref.ref[Tensor]] = field(default_factory=list)  # were shown before ``parameter.data = values``
    given: list[Given] = field(default_factory=list)  # to state dicts, and not overwritten since
    num_replaced: int = 0  # how often ``parameter.data = values`` was called
    reader: Reader | None = None  # during an evaluation
    num_writes: int = 0  # by the user
    warned_of: str = ""  # the reason for which an evaluation did not run in layers, once the user was warned
    name: str = ""  # of a resident parameter of several ranks: the same on all
    ranks: tuple[Ranks | None] | None = None  # over which a resident parameter's gradient is averaged, once known
    refusal: Callable[[], Any] | None = None  # returns what raises if the value is used before a commit replaces it

    def __reduce__(self) -> Any:
        return type(None), ()  # a copy of a parameter has a value of its own

    @property
    def tiered(self) -> Home | None:
        """The home of the value, while its store is open."""
        return None if self.home is None or self.home.store.closed else self.home

    def trained_span(self, store: ParameterStore) -> Slice | None:
        """The parameter's span in a store, if that trains it."""
        home = self.home if self.is_trained else None
        return home.span if home is not None and home.store is store else None

    def stashed_value(self, parameter: Tensor) -> Tensor:
        """The value of a stashed parameter, read from storage when it is used."""
        if self.stash is None:
            raise ReleasedParameterError(_lost(parameter, self.home.store.tiers if self.home else None))
        return self.stash

    def value(self, parameter: Tensor, *, master: bool = False) -> Tensor:
        """The value of an offloaded parameter, on the CPU: in its dtype, or in that of its master."""
        self.check()
        self.refuse_lost(parameter)
        if (home := self.tiered) is not None:
            return home.store.read(home.span, master=master)
        stash = self.stashed_value(parameter)
        values = dense(self.as_stashed(parameter, files.whole(stash)))
        if values is not stash and self.folder is not None:
            values = files.copied(values, values.dtype, self.folder)
        return values if master else values.to(parameter.dtype)

    def as_stashed(self, parameter: Tensor, stash: Tensor) -> Tensor | Encoded:
        """The value that a whole stash of the parameter holds, which may be encoded."""
        if not self.codec:
            return stash
        return Encoded(CODECS[self.codec], stash, tuple(parameter.shape), parameter.dtype)

    def rows(self, parameter: Tensor) -> Tensor:
        """The value as state dicts have it: with several ranks a DTensor, sharded by rows."""
        if (home := self.tiered) is not None and home.store.mesh is not None:
            return home.store.rows(home.span)
        if home is None and isinstance(self.stash, DTensor):  # never of what is encoded
            return self.stash.detach().to(parameter.dtype)
        values = self.shown_value(parameter, torch.device("cpu"), is_own=True)
        if home is not None:
            known = [each for each in self.given if each.is_changed or each.values() is not None]
            is_known = any(each.values() is values for each in known)
            self.given = known if is_known else [*known, Given(values)]
        return values

    def refuse_lost(self, parameter: Tensor) -> None:
        """Raise ReleasedParameterError, once, if the script has changed a state dict's copy, and not the parameter."""
        if any(each.is_changed for each in self.given):
            self.given = []
            raise ReleasedParameterError(
                f"a state dict's value of a parameter of shape {tuple(parameter.shape)} was changed in place, and the "
                "parameter was not: it lives on the tiers, and a state dict has a copy. Give the state dict to "
                "model.load_state_dict(), or change the parameter itself under torch.no_grad(), as by p.copy_(values). "
                "Values that are to differ from the model's, as of merged adapters, are made in a value.clone()"
            )

    def check(self) -> None:
        """Raise StepOrderError if the value still has to come from a commit."""
        if self.refusal is not None and (refuse := self.refusal()) is not None:
            refuse()

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the ranks that share the rows of tensors in state dicts; None: this rank has whole tensors."""
        if self.tiered is not None:
            return self.tiered.store.mesh
        return self.stash.device_mesh if isinstance(self.stash, DTensor) else None

    def master_dtype(self, parameter: Tensor) -> torch.dtype:
        """The dtype of `value` with `master`."""
        if (home := self.tiered) is not None:
            return home.store.tiers.dtype(home.span, master=True)
        return parameter.dtype if self.codec else self.stashed_value(parameter).dtype

    def shown_value(self, parameter: Tensor, device: torch.device, *, is_own: bool = False) -> Tensor:
        """`value` on a device; the same tensor again while it is in use and unchanged, so that tied entries stay tied.

        is_own: a copy that later steps do not change, even if an evaluation reads values where they live.
        """
        reader = None if is_own or self.tiered is None else self.reader
        known = self.shown.get((device, reader is not None))
        values = known.values() if known is not None else None
        if known is None or values is None or not known.is_true(values, self._state):
            with torch.inference_mode(False):  # its changes are counted
                if reader is not None and self.tiered is not None:
                    values = reader.read(*self.tiered, device)
                else:
                    values = self.value(parameter).to(device).detach()  # no view of another: views of it keep it alive
            self._show(values, reader is not None)
        return values

    def is_shown(self, values: Tensor) -> bool:
        """Whether a tensor of `shown_value`, or a view of it, still has the value."""
        return any(each.is_true(values, self._state) for each in self.shown.values())

    def forget(self, values: Tensor) -> None:
        """A tensor of `shown_value` has become an alias, without memory of its own."""
        self.shown = {where: each for where, each in self.shown.items() if each.values() is not values}

    def copied(self, parameter: Tensor) -> nn.Parameter | None:
        """Another parameter with the value in a file of its own, before the first call; None after it.

        The copy of an encoded parameter is not encoded, as it may be trained.
        """
        self.check()
        if self.stash is None or self.folder is None or self.tiered is not None:
            return None
        values = dense(self.as_stashed(parameter, self.stash))
        shown = placeholder(parameter.shape, parameter.dtype, parameter.device)
        copied = nn.Parameter(shown, parameter.requires_grad)
        stash(copied, values=files.copied(values, values.dtype, self.folder), folder=self.folder)
        return copied

    def write(self, parameter: Tensor, values: Tensor) -> None:
        """Give an offloaded parameter another value, for example that of a tensor of `shown_value` that was changed.

        An encoded parameter encodes other values, with a `RuntimeWarning`. The write is completed, as in torch, even if
        a signal comes; except on ranks, which would have to write together.
        """
        in_full(partial(self._write, parameter, values), self.tiered and self.tiered.store)

    def _write(self, parameter: Tensor, values: Tensor) -> None:
        self.check()
        home = self.tiered
        if codec := home.span.codec if home is not None else self.codec:
            if torch.equal(files.whole(values), self.value(parameter)):
                return
            warnings.warn(ROUNDED.format(tuple(parameter.shape), codec), RuntimeWarning, stacklevel=5)
        if home is not None:
            home.store.write(home.span, values)
        if home is None or self.stash is not None:  # until the first step has ended
            values_as_stashed = CODECS[self.codec].encode(values) if self.codec else values
            files.write(self.stashed_value(parameter), values_as_stashed)
        self.num_writes += 1
        self.given = [Given(held) for each in self.given if (held := each.values()) is not None]
        for (_, is_read), known in list(self.shown.items()):
            if (shown := known.values()) is not None and shares_memory(shown, values):
                self._show(shown, is_read)

    def replace(self, parameter: Tensor, values: Tensor) -> None:
        """Write values for ``parameter.data = values``: tensors that were shown before keep their memory, as in torch,
        and are shown again if they are assigned again.
        """
        is_shown = self.is_shown(values)
        if is_shown and values.stride() == self.shown_value(parameter, values.device).stride():
            self.write(parameter, values)
            return
        values = values.clone() if is_shown else values.contiguous()  # p.data.T has that memory in another order
        known = [*self.left, *(each.values for (_, is_read), each in self.shown.items() if not is_read)]
        kept = [own for each in known if (own := each()) is not None and (self.has_left(own) or self.is_shown(own))]

        def take() -> None:
            self._write(parameter, values)
            self.num_replaced += 1
            current = [each for each in (values, self.stash) if each is not None]
            self.left = [weakref.ref(own) for own in kept if not any(shares_memory(each, own) for each in current)]
            for own in kept:
                if shares_memory(own, values):
                    self._show(own, False)

        in_full(take, self.tiered and self.tiered.store)

    def has_left(self, values: Tensor) -> bool:
        """Whether a tensor was one of `shown_value`, or a view of one, before ``parameter.data = values``."""
        return any((own := each()) is not None and shares_memory(own, values) for each in self.left)

    def add_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a gradient from outside of the compiled model to the model's own.

        Raises `ReleasedParameterError` if updates do not wait for it, or there are none.
        """
        if self.tiered is None or not self.is_trained:
            raise ReleasedParameterError(
                "a gradient has come to a parameter of a model that has not been called yet, or does not train it: "
                "call the model first, or compute this under torch.no_grad()"
            )
        self.tiered.store.add_gradient(parameter, gradient)

    @property
    def _state(self) -> Any:
        """An object that differs once the value has changed."""
        return self.num_writes, self.home and self.home.store.num_steps

    def _show(self, values: Tensor, is_read: bool) -> None:
        self.shown[values.device, is_read] = Shown(weakref.ref(values), self._state, changes(values), address(values))

    def convert(self, parameter: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        """The model computes with the parameter in another dtype or on another device, before its first call.

        After that, only reads of the parameter go to another device; the compiled model stays where it is.
        """
        if self.tiered is not None and dtype == parameter.dtype:
            self.release(parameter, dtype, device)
            return
        if self.tiered is not None:
            raise ReleasedParameterError(
                f"a parameter of shape {tuple(parameter.shape)} lives on the tiers and cannot become {dtype} on "
                f"{device}. Convert the model before its first call; a state_dict() has the values at any time"
            )
        values = self.stashed_value(parameter)
        if self.folder is None:
            values = values.to(dtype)
        elif dtype != parameter.dtype and not self.codec:  # whose bytes are of any dtype
            values = files.copied(values, dtype, self.folder)
        self.stash = values
        self.release(parameter, dtype, device)

    def take(self, parameter: Tensor, values: Tensor) -> None:
        """Give the parameter values of another dtype, and that dtype, before its first call."""
        is_same = self.tiered is None and torch.equal(values.to(parameter.dtype), self.value(parameter))
        self.convert(parameter, values.dtype, values.device)
        if not is_same:
            self.write(parameter, values)

    def release(
        self,
        parameter: Tensor,
        dtype: torch.dtype,
        device: torch.device | None = None,
        shape: torch.Size | None = None,
    ) -> None:
        """Replace the parameter's memory by a placeholder of that dtype, on that device."""
        shape = parameter.shape if shape is None else shape
        self.set_data(parameter, placeholder(shape, dtype, device or parameter.device))
        parameter.__class__ = OffloadedParameter

    def set_data(self, parameter: Tensor, values: Tensor) -> None:
        """Make a parameter an ordinary one that has `values` itself, not a copy."""
        parameter.__class__ = self.kind
        parameter.data = values


def _lost(parameter: Tensor, tiers: Tiers | None) -> str:
    """How a value was lost, and from what the run can continue."""
    failed, store = tiers and tiers.failure.first, tiers and tiers.setting.store
    made = store and store.made
    left = COMMITTED.format(made.run, made.step, store.drives[0].folder.parent) if store and made else SAVED
    return LOST.format(tuple(parameter.shape), failed.error if failed else "a close()", left)


def residency_of(parameter: Tensor) -> Residency:
    """The parameter's entry, made when it is first asked for."""
    found = getattr(parameter, "_greedysnake", None)
    if not isinstance(found, Residency):
        found = Residency()
        parameter._greedysnake = found  # type: ignore[attr-defined]
    return found


def refuse_lost(arguments: Iterable[Any]) -> None:
    """Raise ReleasedParameterError as `Residency.refuse_lost`, for the parameters among some arguments."""
    for parameter in arguments:
        if isinstance(parameter, nn.Parameter):
            residency_of(parameter).refuse_lost(parameter)


def is_offloaded(parameter: Tensor) -> bool:
    """Whether the parameter is stashed or tiered."""
    return isinstance(parameter, OffloadedParameter)


def for_evaluation(parameter: Tensor) -> Tensor:
    """A parameter as an evaluation reads it: one that is not on the tiers, in memory or stashed, as a buffer is."""
    if not is_offloaded(parameter):
        return parameter.detach()
    residency = residency_of(parameter)
    return residency.shown_value(parameter, parameter.device) if residency.tiered is None else parameter


# Changes of state -----------------------------------------------------------------------------------------------------


def stash(
    parameter: Tensor, dtype: torch.dtype | None = None, *, values: Tensor | None = None, folder: Path | None = None
) -> None:
    """Detach a resident parameter from its value. It takes `dtype`; `values` are the same, in a file in `folder`."""
    residency = residency_of(parameter)
    if not is_offloaded(parameter):
        residency.kind = type(parameter)
        residency.stash, residency.folder = parameter.data if values is None else values, folder
        residency.home = None
    residency.release(parameter, dtype or parameter.dtype)


def await_value(parameter: Tensor, refusal: Callable[[], Any]) -> Callable[[], None]:
    """Stash a parameter, and call the result of `refusal` if its value is used. The function returned ends this."""
    if not is_offloaded(parameter):
        stash(parameter)
    residency = residency_of(parameter)
    residency.refusal = refusal
    residency.num_writes += 1  # views that were taken before have another value
    return partial(setattr, residency, "refusal", None)


def adopt(parameter: Tensor, store: ParameterStore, span: Slice, first: Tensor | None) -> None:
    """The store has the value of a stashed parameter now; `first` keeps it, in case the store fails."""
    residency = residency_of(parameter)
    residency.home, residency.stash = Home(store, span), first
    residency.is_trained = parameter.requires_grad


def bring_out(store: ParameterStore, parameter: Tensor, span: Slice) -> None:
    """Copy the value of a parameter, or its master if it has one, from its store to a file.

    An encoded value stays encoded, unless it is to be trained.
    """
    residency = residency_of(parameter)
    stored = None if parameter.requires_grad else store.encoded(span)
    residency.stash, residency.folder = store.read(span, master=True) if stored is None else stored, store.folder
    residency.codec = "" if stored is None else span.codec
    residency.shown.clear()


def hand_back(parameter: Tensor) -> None:
    """Stash a parameter again whose store failed at its start, or was replaced by another."""
    residency_of(parameter).home = None


def roll_back(arguments: Iterable[Any]) -> None:
    """After a first call that failed, make parameters resident again that were so before, in their dtype."""
    for parameter in arguments:
        residency = residency_of(parameter) if is_offloaded(parameter) else None
        if residency is None or residency.stash is None or residency.tiered is not None:
            continue
        if residency.folder is None and residency.refusal is None:
            restore(parameter, residency.stash.to(parameter.device))
        else:
            residency.release(parameter, residency.master_dtype(parameter))


def restore(parameter: Tensor, values: Tensor) -> None:
    """Make a parameter resident: it has `values` itself, not a copy."""
    residency = residency_of(parameter)
    residency.set_data(parameter, values)
    if (mark := residency.gradient) is not None and parameter.grad is mark:
        parameter.grad = None
    residency.stash = residency.home = residency.gradient = None


def bring_back(tensors: Iterable[Tensor]) -> bool:
    """Make stashed parameters resident that get gradients of these tensors, as no store trains them. Returns whether
    there were any.
    """
    found = [each for each in read_for(tensors) if residency_of(each).tiered is None]
    for parameter in found:
        restore(parameter, residency_of(parameter).value(parameter).to(parameter.device, copy=True))
    return bool(found)


@contextmanager
def as_masters(parameter: Tensor) -> Iterator[None]:
    """Inside the block, an offloaded parameter has the dtype of its master."""
    residency, dtype = residency_of(parameter), parameter.dtype
    residency.release(parameter, residency.master_dtype(parameter))
    try:
        yield
    finally:
        residency.release(parameter, dtype)


@contextmanager
def materialized(parameter: Tensor, *, master: bool) -> Iterator[None]:
    """Inside the block, an offloaded parameter is materialized."""
    residency, dtype, shape = residency_of(parameter), parameter.dtype, parameter.shape

    def put_away() -> None:
        residency.is_materialized = False
        residency.release(parameter, dtype, shape=shape)  # the script may have changed its shape

    try:
        residency.set_data(parameter, residency.value(parameter, master=master).to(parameter.device))
        residency.is_materialized = True
        yield
    finally:
        in_full(put_away)  # half of it would leave a parameter in memory with another value than its own
