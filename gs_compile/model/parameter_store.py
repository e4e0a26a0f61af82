"""parameter_store: read and write values and optimizer states on the tiers, piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gs_compile.capture.internals import without_modes
from gs_compile.errors import GreedySnakeError, OptimizerError, RankError
from gs_compile.model.files import CHUNK_NBYTES, copied, directory, leave_memory, mapped_rows, own_rows, whole
from gs_compile.model.stand_in import shares_memory
from gs_compile.runtime.codecs import Encoded
from gs_compile.runtime.formats import rounds_to
from gs_compile.runtime.spans import Slice
from gs_compile.runtime.tiers import Tiers

MASTER = "master"  # the entry of a state that is the parameter's fp32 value


Method = TypeVar("Method", bound=Callable[..., Any])


def in_turn(method: Method) -> Method:
    """A method of a store that waits for other threads that use the model."""

    @wraps(method)
    def run(store: ParameterStore, *args: Any, **kwargs: Any) -> Any:
        with store.turn, without_modes():
            return method(store, *args, **kwargs)

    return cast(Method, run)


def in_full(action: Callable[[], None], store: ParameterStore | None = None) -> None:
    """Complete an action that may run twice: if a signal's handler raises meanwhile (a DataLoader's does for a killed
    worker), the action runs again, and then the error is raised.

    store: the one that it changes. On ranks, which would have to repeat it together, the error is raised at once.
    """
    try:
        action()
    except GreedySnakeError:
        raise
    except BaseException:
        if store is None or store.tiers.setting.ranks is None:
            with suppress(Exception):  # the same once more, or of a run that has ended
                action()
        raise


@dataclass
class Reader:
    """Reads values for an evaluation, when no updates are pending, and keeps those for which there is room."""

    room_nbytes: int
    held: list[Tensor] = field(default_factory=list)

    def read(self, store: ParameterStore, span: Slice, device: torch.device) -> Tensor:
        """A value, not copied if it lives in memory in one piece, and is not half of its master."""
        here = store.tiers.here(span)
        values = (store.tiers.read(span) if here is None else here).to(device).detach()
        nbytes = 0 if here is not None and shares_memory(values, here) else values.nbytes
        if nbytes <= self.room_nbytes:
            self.room_nbytes -= nbytes
            self.held.append(values)
        return values


class ParameterStore:
    """Reads and writes the parameters and states of one model between steps, by their spans.

    What is read is mapped from files under `folder`, and belongs to the caller. `components` names the tensors of a
    parameter's optimizer state. The engine, which runs the steps, derives from this class.
    """

    def __init__(
        self, tiers: Tiers, folder: Path, components: Sequence[str], turn: AbstractContextManager[Any]
    ) -> None:
        self.tiers = tiers
        self.folder = folder
        self.components = components
        self.turn = turn  # of the thread that uses the model
        self.shows_whole = False  # state dicts have whole tensors, also on ranks
        self.num_steps = 0  # that have changed values
        self.has_loaded_state = False  # the user has loaded the state of an earlier run
        self.reader: Reader | None = None  # of evaluations since the last step that did not run in layers
        self._masters: dict[Slice, Tensor] = {}  # loaded before the values that they round to

    @property
    def closed(self) -> bool:
        return self.tiers.closed

    @property
    def never(self) -> Set[Slice]:
        """The spans of trained parameters that have got no gradient so far."""
        return frozenset()

    @property
    def mesh(self) -> DeviceMesh | None:
        """The mesh of the ranks that share the rows of tensors in state dicts; None: this rank has whole tensors."""
        ranks = self.tiers.setting.ranks
        return None if ranks is None or self.tiers.before_read or self.shows_whole else ranks.mesh

    def synchronize(self) -> None:
        """Return when all updates are done and written."""
        self.tiers.synchronize()

    @in_turn
    def read(self, span: Slice, *, master: bool = False) -> Tensor:
        """A parameter's value after all updates, on the CPU; with `master` in fp32, if it has a master."""
        self.synchronize()
        dtype = self.tiers.dtype(span, master=master)
        return self._mapped(span, dtype, lambda piece: self.tiers.read(piece, master=master), None)

    @in_turn
    def encoded(self, span: Slice) -> Tensor | None:
        """The bytes of a parameter that is stored encoded; None for others."""
        if not span.codec:
            return None
        self.synchronize()
        found = self.tiers.stored(span)
        assert isinstance(found, Encoded)
        return copied(found.stored, found.stored.dtype, directory(self.folder))

    @in_turn
    def rows(self, span: Slice) -> Tensor:
        """A parameter's value after all updates, for a state dict: with several ranks a DTensor, sharded by rows."""
        self.synchronize()
        return self._mapped(span, self.tiers.dtype(span), self.tiers.read, self.mesh)

    @property
    def room_nbytes(self) -> int:
        """The memory that values may take during an evaluation."""
        return 0

    @in_turn
    def write(self, span: Slice, values: Tensor) -> None:
        """Write a new value, in the parameter's dtype or the master's. A master that rounds to it does not change."""
        self.synchronize()
        self._agree_on("a new value", span)
        values = whole(values)
        own, wide = self.tiers.dtype(span), self.tiers.dtype(span, master=True)
        early = self._masters.get(span)
        for piece in pieces_of(span, wide.itemsize):
            new = _part(values, span, piece)
            if own != wide and new.dtype == own:
                master = self.tiers.read(piece, master=True) if early is None else _part(early, span, piece).to(wide)
                new = torch.where(rounds_to(master, new), master, new.to(wide))
            in_full(partial(self.tiers.fill, piece, new))  # half of it would make another `new`
            leave_memory(values.untyped_storage())
        if early is not None and self._rounds_to_value(early, span):
            del self._masters[span]

    @in_turn
    def state(self, span: Slice, num_steps: int) -> dict[str, Any]:
        """A parameter's optimizer state after all updates, as torch has it, and its master, if it has one.

        With several ranks its tensors are sharded as in `rows`.
        """
        self.synchronize()
        self.refuse_masters()
        dtype = self.tiers.setting.wide(span.unit)
        found: dict[str, Any] = {"step": as_step(num_steps)}
        for number, name in enumerate(self._components(span)):
            found[name] = self._mapped(span, dtype, partial(self.tiers.read_state, component=number), self.mesh)
        return found

    def is_rounded(self, span: Slice) -> bool:
        """Whether there is a master, and it equals the value."""
        pieces = pieces_of(span, 4) if self.tiers.has_master(span) else []
        return bool(pieces) and all(
            torch.equal(self.tiers.read(piece, master=True), self.tiers.read(piece).float()) for piece in pieces
        )

    @in_turn
    def load_state(self, span: Slice, state: Mapping[str, Any]) -> None:
        """The inverse of `state`; a master that is not in `state` stays.

        A master that does not round to the parameter's value waits for a value to which it does. Raises OptimizerError
        if another component is missing, or has another shape.
        """
        self.synchronize()
        self._agree_on("a state", span)
        self.has_loaded_state = True
        self._masters.pop(span, None)
        for number, name in enumerate(self._components(span)):
            if (found := component(state, name, span.shape)) is None:
                continue
            values = whole(found)
            if name == MASTER and not self._rounds_to_value(values, span):
                self._masters[span] = values
                continue
            for piece in pieces_of(span, 4):
                self.tiers.write_state(piece, number, _part(values, span, piece))
                leave_memory(values.untyped_storage())

    def announce(self, what: str, how: str = "") -> None:
        """Check that all ranks do the same next, before they exchange anything; `RankError` on all if not."""
        if (ranks := self.tiers.setting.ranks) is not None:
            words = f"{what} in step {self.num_steps + 1}{how}"
            try:
                compare = ranks.announce(words)
            except RankError:
                self.tiers.check()  # if this rank has failed, this raises its own error
                raise
            self.tiers.lane("net").submit(words, compare)

    def _agree_on(self, what: str, span: Slice) -> None:
        """Raise unless all ranks write the value: each writes its share."""
        if (ranks := self.tiers.setting.ranks) is not None:
            ranks.agree_on(f"{what} of shape {tuple(span.shape)} in unit {span.unit} at {span.offset}")

    def add_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a parameter's gradient from outside of the model to its own."""
        raise NotImplementedError

    def refuse_masters(self) -> None:
        """Raise OptimizerError if masters still wait for values that they round to."""
        if self._masters:
            raise OptimizerError(
                f"the state that was loaded has masters of {len(self._masters)} parameters that do not round to the "
                "parameters' values: also load the model's state dict (or load the optimizer's without its entries "
                f"{MASTER!r}, if the masters are to start from other values)"
            )

    def _rounds_to_value(self, master: Tensor, span: Slice) -> bool:
        def is_alike(piece: Slice) -> bool:
            found = bool(rounds_to(_part(master, span, piece), self.tiers.read(piece)).all())
            leave_memory(master.untyped_storage())
            return found

        return all(map(is_alike, pieces_of(span, 4)))

    def _components(self, span: Slice) -> Sequence[str]:
        """Names of the tensors of a parameter's state, in their order."""
        return (MASTER, *self.moments_of(span)) if self.tiers.has_master(span) else self.moments_of(span)

    def moments_of(self, span: Slice) -> Sequence[str]:
        """Names of the tensors of a parameter's state, without the master."""
        return span.components or self.components

    def _mapped(
        self, span: Slice, dtype: torch.dtype, read: Callable[[Slice], Tensor], mesh: DeviceMesh | None
    ) -> Tensor:
        ranks = self.tiers.setting.ranks
        return mapped_rows(span.shape, dtype, directory(self.folder), _stretches(span, read), mesh, ranks)


def as_step(number: int) -> Tensor:
    """A number of steps as torch's states have it, but in float32 whatever the default dtype: that may be narrow."""
    return torch.tensor(float(number), dtype=torch.float32, device="cpu")


def component(state: Mapping[str, Any], name: str, shape: Sequence[int]) -> Tensor | None:
    """One tensor of a parameter's state, zeros if torch has none yet; None: the master, which may be missing.

    Raises OptimizerError if it has another shape than the parameter, or another component is missing.
    """
    values = state.get(name)
    if values is None and name == MASTER:
        return None
    if values is None and name in state:  # torch's momentum before it has any
        return torch.zeros((), dtype=torch.float32).expand(shape)
    if not isinstance(values, Tensor) or values.shape != shape:
        found = f"{name} of shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"no {name}"
        raise OptimizerError(
            f"the state of a parameter of shape {tuple(shape)} has {found}: load the state dict of an optimizer of the "
            "same kind and model"
        )
    return own_rows(values)


def _stretches(span: Slice, read: Callable[[Slice], Tensor]) -> Callable[[int, int], Tensor]:
    """A function that reads a range of a parameter's elements; an encoded one is decoded once, as a whole."""
    if span.codec:
        whole = read(span).reshape(-1)
        return lambda start, stop: whole[start:stop]
    return lambda start, stop: read(span.within(start, stop))


def pieces_of(span: Slice, itemsize: int) -> list[Slice]:
    """A parameter in pieces of CHUNK_NBYTES; an encoded one as a whole."""
    if span.codec:
        return [span]
    step = CHUNK_NBYTES // itemsize
    return [span.within(start, min(start + step, span.numel)) for start in range(0, span.numel, step)]


def _part(values: Tensor, span: Slice, piece: Slice) -> Tensor:
    """A piece of a parameter's values, flat and on the CPU."""
    return values.detach().reshape(-1).narrow(0, (piece.offset - span.offset) // span.width, piece.numel).cpu()
