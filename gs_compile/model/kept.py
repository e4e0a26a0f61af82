"""kept: what commits store for the user in addition to parameters and states, and the commit that is resumed."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from gs_compile.errors import OptimizerError, ResumeError, StepOrderError
from gs_compile.model.optimizer_state import settings_of
from gs_compile.model.residency import await_value
from gs_compile.runtime.storage.manifest import check_plain, check_room


@dataclass
class Kept:
    """What commits store for the user of one optimizer.

    states: objects with `state_dict` and `load_state_dict`, such as schedulers; user: anything that JSON can hold.

    storage: the directories of the run to resume, if the script has named them; step: of the commit there, 0: none was
        found; ranks: by torch's numbers, those that have looked for it together.
    num_batches: that the run has trained, including skipped ones.
    has_norm: the run has changed the optimizer's `max_grad_norm`, so that commits store it.
    begins_anew: the run resumes from elsewhere, and a commit in its storage stays until it makes one.
    has_random_state: the random state was restored already, so the first call leaves it as it is.
    positions: the states of samplers and data loaders at the end of the last step. The call that commits the step comes
        after the next batch was taken.
    refusals: end the refusal of state dicts, and of parameters that are used, before the commit's values have come.
    first_buffers: by name, the buffers that commits store once they are other tensors, or have changed; `commits.KEPT`:
        from the start.
    """

    states: dict[str, Any] = field(default_factory=dict)
    user: Any = None
    storage: Sequence[Path] = ()
    step: int | None = None
    num_batches: int = 0
    has_norm: bool = False
    ranks: tuple[int, ...] = ()
    begins_anew: bool = False
    has_random_state: bool = False
    positions: dict[str, Any] = field(default_factory=dict)
    refusals: list[Callable[[], None]] = field(default_factory=list)
    first_buffers: dict[str, tuple[Callable[[], Tensor | None], tuple[int, int]]] = field(default_factory=dict)

    def await_values(self, model: nn.Module, parameters: Iterable[Tensor]) -> None:
        """Refuse state dicts, and reads and writes of these parameters, until `values_have_come`. Otherwise a script
        that is started again after its last step would save first values over the trained ones.
        """
        self.values_have_come()
        refuse = weakref.WeakMethod(self.check_values)

        def hook(*_: Any) -> None:
            if (check := refuse()) is not None:
                check()

        self.refusals += [module.register_state_dict_pre_hook(hook).remove for module in model.modules()]
        self.refusals += [await_value(parameter, refuse) for parameter in parameters]

    def values_have_come(self) -> None:
        """The model's first call has brought them."""
        while self.refusals:
            self.refusals.pop()()

    def check_values(self) -> None:
        """Raise StepOrderError if the commit's values have not come yet."""
        if self.refusals:
            raise StepOrderError(
                f"the values of step {self.step}, which gs_compile.resume has found, come with the model's first call, "
                "and until then it has those that it was made with: call it once before you read or write them, or "
                "take a state dict, under torch.no_grad() where no step is left"
            )

    def note_modules(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Commits have the extra state of these modules, each behind a prefix of names, if any has one."""
        if extra := ExtraState(modules):
            self.states.setdefault(EXTRA, extra)

    @property
    def has_lost(self) -> bool:
        """Whether one of the objects says that the owner of its state, such as a Trainer, is gone."""
        return any(getattr(each, "is_gone", False) for each in self.states.values())

    def end_step(self) -> None:
        """A step has ended, and the next batch has not been taken yet."""
        self.positions = {name: _plain(each.state_dict()) for name, each in self._positioned}

    def begin_at(self, saved: Mapping[str, Any]) -> None:
        """The same for the step of a commit that has these states."""
        self.positions = {name: saved[name] for name, _ in self._positioned if name in saved}

    @property
    def _positioned(self) -> Iterator[tuple[str, Any]]:
        return ((name, each) for name, each in self.states.items() if isinstance(each, Sampler | DataLoader))

    def snapshot(self, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Copies of `states`, `user` and the optimizer's param groups, as they are now, by a manifest's names.

        Raises OptimizerError for what JSON cannot hold.
        """
        others = {name: each for name, each in self.states.items() if name not in self.positions}
        states = {name: _plain(each.state_dict()) for name, each in others.items()} | self.positions
        live = {"user": self.user, "groups": tuple(map(settings_of, groups))}
        try:
            for name, each in {"states": states, **live}.items():
                check_plain(each, name)
            check_room({**states, **live})
        except ValueError as error:
            raise OptimizerError(f"a commit cannot keep this: {error}") from None
        return {"states": states, **deepcopy(live)}

    def give_back(self, saved: Mapping[str, Any]) -> None:
        """Load each object's state from a snapshot, if that has one.

        Raises ResumeError if an object cannot load its state; then all have their states from before, except data
        loaders, whose state cannot be asked for without beginning to load.
        """
        with ExitStack() as undo:
            for name in sorted(self.states.keys() & saved.keys()):
                each = self.states[name]
                try:
                    if not isinstance(each, DataLoader):
                        undo.callback(_load_again, each, deepcopy(each.state_dict()))
                    each.load_state_dict(_as_it_was(saved[name]))
                except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                    raise ResumeError(f"the commit's state of {name} cannot be loaded: {error!r}") from error
            undo.pop_all()


class ExtraState:
    """What modules return by `get_extra_state`, which state dicts have in addition to tensors; false if none does."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        own = ((name, each) for name, each in modules if type(each).get_extra_state is not nn.Module.get_extra_state)
        self._modules = weakref.WeakValueDictionary({f"{name}_extra_state": each for name, each in own})

    def __len__(self) -> int:
        return len(self._modules)

    def state_dict(self) -> dict[str, Any]:
        return {name: each.get_extra_state() for name, each in self._modules.items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        for name, each in self._modules.items():
            each.set_extra_state(saved[name])


def _load_again(holder: Any, state: Any) -> None:
    """Restore a state as far as possible, while an error is being raised."""
    with suppress(Exception):
        holder.load_state_dict(state)


EXTRA = "extra_state"  # the name of an `ExtraState` among the states
_SCALARS = {type(None), bool, int, float, str}
# JSON has no keys other than strings, such as the milestones of torch's MultiStepLR, which are a Counter.
_PAIRS, _COUNTED = "greedysnake.pairs", "greedysnake.counted"


def _plain(value: Any) -> Any:
    """A copy that JSON can hold. (Fast: loaders' states may have a hundred thousand numbers, and each step asks.)"""
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
        name = _COUNTED if isinstance(value, Counter) else _PAIRS
        return {name: [[_plain(key), _plain(each)] for key, each in value.items()]}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return list(value) if _SCALARS.issuperset(map(type, value)) else [_plain(each) for each in value]
    return value


def _as_it_was(value: Any) -> Any:
    """The inverse of `_plain`; tuples are lists."""
    if isinstance(value, Mapping) and value.keys() in ({_PAIRS}, {_COUNTED}):
        (name, pairs), *_ = value.items()
        found = {key: _as_it_was(each) for key, each in pairs}
        return Counter(found) if name == _COUNTED else found
    if isinstance(value, Mapping):
        return {key: _as_it_was(each) for key, each in value.items()}
    return [_as_it_was(each) for each in value] if isinstance(value, list) else value
