"""commits: the commits of one engine's steps, and a later process that goes on from one.

    optimizer.step()       the step is over; a scheduler may move on
    the model is called    [1] the random state that this call finds
                           [2] all else that a commit keeps, when the program issues `seal`
    a later process        [3] its first call takes parameters and states from the files, and goes on from [1]

What never changes is described once; a snapshot [2] takes the rest, with what the user has commits keep (`Kept`).
"""

from __future__ import annotations

import platform
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Sampler

from gs_compile.capture.internals import changes
from gs_compile.errors import OptimizerError, ResumeError
from gs_compile.model.in_memory import parameters_in_memory
from gs_compile.model.optimizer_state import settings_of
from gs_compile.runtime.former import stored_units
from gs_compile.runtime.muon import Matrices
from gs_compile.runtime.random_state import random_state
from gs_compile.runtime.rest import Tensors, laid_out
from gs_compile.runtime.storage.manifest import check_plain
from gs_compile.runtime.storage.stored import BUFFER, FORMAT, Manifest, StoredParameter, StoredPart
from gs_compile.runtime.tiers import Tiers
from gs_compile.version import __version__


class OptimizerLike(Protocol):
    """The part of an optimizer that plans and commits ask for."""

    num_skipped: int
    num_steps_read: int | None
    param_groups: list[dict[str, Any]]
    state: Any
    kept: Kept
    accumulates: bool
    num_calls: int
    max_grad_norm: float | None
    orthogonalizes: bool

    @property
    def step(self) -> Callable[..., Any]: ...
    def matrices(self, parameter: torch.Tensor, path: str, *, of_layer: bool) -> Matrices | None: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def group_of(self) -> Mapping[torch.Tensor, int]: ...
    @property
    def hypers(self) -> list[dict[str, Any]]: ...
    @property
    def missed(self) -> Mapping[torch.Tensor, int]: ...
    @property
    def components(self) -> tuple[str, ...]: ...
    @property
    def moments(self) -> tuple[torch.dtype | None, ...]: ...


class Durable:
    """Which steps are committed, with what.

    optimizer: gives it, while it lives. plan: what commits keep of the plan. buffers: by name, those that calls have
    read, as the latest of them had them. former: the commit that the run has gone on from.
    """

    def __init__(
        self,
        optimizer: Callable[[], OptimizerLike | None],
        tiers: Tiers,
        parameters: Sequence[StoredParameter],
        plan: Mapping[str, Any],
        buffers: Mapping[str, torch.Tensor],
    ) -> None:
        assert tiers.commits is not None, "no step is durable"
        self.every = tiers.placement.durability
        self.random: Mapping[str, str] | None = None  # that the call under way has found
        self.buffers: dict[str, torch.Tensor] = {}
        self._first_buffers: dict[str, tuple[weakref.ref[torch.Tensor], int]] = {}  # as they were when they came
        self.read(buffers)
        self._optimizer = optimizer
        self._tiers = tiers
        setting = tiers.setting
        self._fixed = {
            "format": FORMAT,
            "versions": {"greedysnake": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "plan": dict(plan),
            "units": tuple(stored_units(setting.placement, setting.types)),
            "parameters": tuple(parameters),
            "rank": setting.ranks.rank if setting.ranks else 0,
            "world": setting.placement.world,
            "together": _name_of_run(tiers),
        }
        self._num_steps = self._num_committed = 0  # of this process: that are over, and the last of them committed
        self._is_open = False  # that commit was made between two calls: schedulers and values may change after it
        self.former = setting.store.former if setting.store else None
        tiers.commits.snapshot = self.snapshot

    def goes_on(self) -> Mapping[str, str] | None:
        """The random state that the run goes on from, once: for the first call."""
        former, self.former = self.former, None
        optimizer = self._optimizer()
        return former.random if former and optimizer and not optimizer.kept.has_random_state else None

    def read(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """A call reads these: what a script makes of them from now on is in commits."""
        self.buffers.update(buffers)
        for name, each in buffers.items():
            self._first_buffers.setdefault(name, (weakref.ref(each), changes(each)))

    def find(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Find what the commit has of buffers among all of the model: the first call may be an evaluation, of others.

        Raises ResumeError where the model has none of a name, or of another shape.
        """
        for each in self.former.rest if self.former else ():
            name = each.name.removeprefix(BUFFER)
            if name == each.name:
                continue
            buffer = self.buffers.get(name, buffers.get(name))
            if buffer is None or tuple(buffer.shape) != tuple(each.shape):
                here = "the model has none" if buffer is None else f"here it is {tuple(buffer.shape)}"
                raise ResumeError(f"the commit has a {each.name} of shape {tuple(each.shape)}, and {here}")
            self.read({name: buffer})

    def marks(self, num_steps: int) -> dict[str, bool]:
        """For the program of a step after `num_steps`: is it to be committed, and does it commit the one before.

        That is done again where it was done between the calls: what has changed since belongs to the step before.
        """
        self._num_steps = num_steps
        is_due = num_steps > max(0, self._num_committed - self._is_open) and num_steps % self.every == 0
        return {"copies": (num_steps + 1) % self.every == 0, "seals": is_due}

    def take(self, num_steps: int, *, always: bool = False) -> bool:
        """Whether a program between two calls commits what `num_steps` have left; `always`: it is asked for.

        On ranks it has to be asked for, and they leave it at that commit: one of them alone may have asked for values.
        """
        self._num_steps, self._is_open = num_steps, self._tiers.setting.ranks is None
        is_due = self._is_open and num_steps > self._num_committed and num_steps % self.every == 0
        return is_due or (always and num_steps > max(0, self._num_committed - self._is_open))

    def leave(self, *, training: bool) -> None:
        """A call has issued what it was to."""
        self.random = None
        self._is_open = self._is_open and not training

    def snapshot(self) -> tuple[Callable[[tuple[StoredPart, ...]], Manifest], Tensors]:
        """All of a commit but its files, as it is now: it is issued."""
        self._num_committed = self._num_steps
        optimizer, store = self._optimizer(), self._tiers.setting.store
        assert optimizer is not None, "an optimizer is there until its engine is closed"
        assert store is not None, "commits need storage"
        rest = {**rest_of(optimizer), **self._changed_buffers}
        facts = {
            **self._fixed,
            "run": store.run,
            "step": optimizer.num_steps + optimizer.num_skipped,
            "num_skipped": optimizer.num_skipped,
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "optimizer": type(optimizer).__name__,
            "components": optimizer.components,
            "random": dict(self.random or random_state()),
            **optimizer.kept.snapshot(optimizer.param_groups),
            "rest": laid_out(rest),
        }
        return lambda parts: Manifest(parts=parts, **facts), rest

    @property
    def _changed_buffers(self) -> dict[str, torch.Tensor]:
        """Those that a script changes between steps, as no forward does, by their names in `rest`."""
        known = ((name, self.buffers[name], *first) for name, first in self._first_buffers.items())
        return {
            f"{BUFFER}{name}": each
            for name, each, first, number in known
            if first() is not each or number != changes(each)
        }


def _name_of_run(tiers: Tiers) -> str:
    """That it has on all ranks; of one process its storage has one. All ranks call it."""
    ranks, store = tiers.setting.ranks, tiers.setting.store
    if ranks is None or store is None:
        return ""
    return store.former.together if store.former else ranks.from_first("the name of the run", lambda: store.run)


def rest_of(optimizer: OptimizerLike) -> dict[str, torch.Tensor]:
    """Parameters in memory beside the compiled model, and their states, by their places in the optimizer."""
    found = {}
    for number, parameter in _beside(optimizer):
        found[f"{number}"] = parameter
        state = optimizer.state.get(parameter, {}).items()
        found |= {f"{number}.{name}": each for name, each in state if torch.is_tensor(each) and not each.is_meta}
    return found


@torch.no_grad()
def give_back_rest(optimizer: OptimizerLike, rest: Tensors, buffers: Mapping[str, torch.Tensor]) -> None:
    """The inverse; buffers: by name, get what a script has made of them."""
    beside = dict(_beside(optimizer))
    for name, values in rest.items():
        number, _, component = name.partition(".")
        if name.startswith(BUFFER):
            buffers[name.removeprefix(BUFFER)].copy_(values)
        elif component:
            optimizer.state[beside[int(number)]][component] = values
        else:
            beside[int(number)].copy_(values)


def _beside(optimizer: OptimizerLike) -> Iterator[tuple[int, torch.Tensor]]:
    """Parameters in memory that the optimizer trains, and their places in it."""
    return ((place, each) for place, each in parameters_in_memory(optimizer.param_groups) if each.requires_grad)


def check_alike(
    former: Manifest, optimizer: OptimizerLike, parameters: Sequence[StoredParameter], world: int, rank: int = 0
) -> None:
    """Raise ResumeError where a commit is of another model, optimizer, number of ranks or place among them."""
    check_parameters(former, {each.name: each.shape for each in parameters}, is_all=True)
    trained = {each.name: each.trained for each in parameters}
    states = {each.name: tuple(each.components) for each in parameters}
    others = [each.name for each in former.parameters if tuple(each.components) != states[each.name]]
    changed = [each.name for each in former.parameters if each.trained != trained[each.name]]
    here = {each.name: each for each in parameters}
    moved = [each for each in former.parameters if each.group not in (None, here[each.name].group)]
    late = [each for each in former.parameters if each.missed not in (None, here[each.name].missed)]
    if changed:
        what = f"{changed[0]} was {'frozen' if trained[changed[0]] else 'trained'} there"
    elif (former.optimizer, tuple(former.components)) != (type(optimizer).__name__, optimizer.components):
        what = f"its optimizer is {former.optimizer}, with {', '.join(former.components)} of each parameter"
    elif others:
        what = f"{others[0]} was {'no' if states[others[0]] else 'a'} matrix that updates orthogonalize there"
    elif len(former.groups) != len(optimizer.param_groups):
        what = f"its optimizer has {len(former.groups)} param groups, and {len(optimizer.param_groups)} here"
    elif {each.name: tuple(each.shape) for each in former.rest if each.name.isdigit()} != {
        str(number): tuple(each.shape) for number, each in _beside(optimizer)
    }:
        what = "it has other parameters beside the compiled model"
    elif moved:
        what = f"{moved[0].name} was in param group {moved[0].group} there, and is in {here[moved[0].name].group} here"
    elif late:
        what = (
            f"{late[0].name} took {late[0].missed} steps fewer than others there, and {here[late[0].name].missed} here "
            "(`gs_compile.resume` takes them up, the option resume alone does not)"
        )
    elif former.rank != rank:
        what = f"it is of rank {former.rank} of those that share the model, and this is rank {rank} of them"
    elif former.world != world:
        what = f"it is of {former.world} ranks, this run of {world}, which can load a checkpoint of state dicts"
    else:
        return
    raise _other(former, what)


def check_parameters(former: Manifest, shapes: Mapping[str, tuple[int, ...]], *, is_all: bool = False) -> None:
    """Raise ResumeError where parameters have other shapes than those of a commit; `is_all`: or there are more."""
    stored = {each.name: tuple(each.shape) for each in former.parameters}
    names = stored.keys() | shapes.keys() if is_all else stored.keys()
    differ = sorted(name for name in names if stored.get(name) != shapes.get(name))
    if differ:
        found, wanted = (each.get(differ[0], "absent") for each in (stored, shapes))
        what = f"{len(differ)} of {len(names)} parameters differ: {differ[0]} is {found} there, and {wanted} here"
        raise _other(former, what)


def _other(former: Manifest, what: str) -> ResumeError:
    return ResumeError(
        f"run {former.run} at step {former.step}, which is to be resumed, is not of this model and optimizer: {what}. "
        "Build what was trained, choose another storage=, or export its values with greedysnake store export"
    )


# What the user has them keep ------------------------------------------------------------------------------------------


@dataclass
class Kept:
    """states: objects with `state_dict` and `load_state_dict`, such as schedulers; user: whatever JSON can hold.

    storage: the directories of the run that is to go on, where somebody has named them; step: of its commit there,
        0: none was found; ranks: by torch's numbers, those that have looked for it together.
    begins_anew: the run goes on from elsewhere, and a commit in its storage stays until it makes one.
    has_random_state: random numbers go on already, so the first call leaves them as they are.
    positions: the states of samplers and data loaders as the last step has ended. The call that commits it comes behind
        the next batch.
    """

    states: dict[str, Any] = field(default_factory=dict)
    user: Any = None
    storage: Sequence[Path] = ()
    step: int | None = None
    ranks: tuple[int, ...] | None = None
    begins_anew: bool = False
    has_random_state: bool = False
    positions: dict[str, Any] = field(default_factory=dict)

    def end_step(self) -> None:
        """A step has ended, and nobody has taken the next batch yet."""
        among = ((name, each) for name, each in self.states.items() if isinstance(each, Sampler | DataLoader))
        self.positions = {name: _plain(each.state_dict()) for name, each in among}  # type: ignore[union-attr]

    def snapshot(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Copies of both, and of the optimizer's param groups, as they are now, by the names that a manifest has.

        Raises OptimizerError for what no JSON can hold.
        """
        others = {name: each for name, each in self.states.items() if name not in self.positions}
        states = {name: _plain(each.state_dict()) for name, each in others.items()} | self.positions
        live = {"user": self.user, "groups": tuple(map(settings_of, groups))}
        try:
            for name, each in {"states": states, **live}.items():
                check_plain(each, name)
        except ValueError as error:
            raise OptimizerError(f"a commit cannot keep this: {error}") from None
        return {"states": states, **deepcopy(live)}

    def give_back(self, found: Mapping[str, Any]) -> None:
        """Have each object take up its state of a snapshot, where that has one.

        Raises ResumeError where an object cannot take its state.
        """
        for name in sorted(self.states.keys() & found.keys()):
            try:
                self.states[name].load_state_dict(_as_it_was(found[name]))
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise ResumeError(f"the commit's state of {name} cannot be loaded: {error!r}") from error


# What JSON has not: keys that are no text, as in the milestones of torch's MultiStepLR, which are a Counter.
_PAIRS, _COUNTED = "greedysnake.pairs", "greedysnake.counted"


def _plain(value: Any) -> Any:
    """A copy as JSON has it. Loaders may have a hundred thousand numbers, and each step asks for their state."""
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
        name = _COUNTED if isinstance(value, Counter) else _PAIRS
        return {name: [[_plain(key), _plain(each)] for key, each in value.items()]}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _as_it_was(value: Any) -> Any:
    """The inverse of `_plain`; tuples are lists."""
    if isinstance(value, Mapping) and value.keys() in ({_PAIRS}, {_COUNTED}):
        (name, pairs), *_ = value.items()
        found = {key: _as_it_was(each) for key, each in pairs}
        return Counter(found) if name == _COUNTED else found
    if isinstance(value, Mapping):
        return {key: _as_it_was(each) for key, each in value.items()}
    return [_as_it_was(each) for each in value] if isinstance(value, list) else value
