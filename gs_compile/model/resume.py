"""resume: continue training from the last durable step, in a new process; and batches that follow from the step alone.

    run = gs_compile.resume(model, optimizer, storage="/mnt/nvme0/me", scheduler=scheduler)
    for batch in DataLoader(data, batch_sampler=gs_compile.StepSampler(len(data), 8, start=run.step)):
        ...

Each can be used alone: `resume` works with any loader, and `StepSampler` with any loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import Sampler

from gs_compile.capture.graph import buffers_of
from gs_compile.errors import OPTIMIZERS, OptimizerError, OptionError, ResumeError, StepOrderError
from gs_compile.model.commits import check_buffers, give_back_buffers, give_back_states, give_back_values, resting
from gs_compile.model.former_run import check_beside, check_parameters, rest_left
from gs_compile.model.in_memory import modules_beside
from gs_compile.model.kept import EXTRA, ExtraState, Kept
from gs_compile.model.tiered_optimizer import TieredOptimizer
from gs_compile.options import Options
from gs_compile.runtime.groups import gathered, team_of
from gs_compile.runtime.storage.folder import folder_in
from gs_compile.runtime.storage.last_commit import commits_in, newest_of
from gs_compile.runtime.storage.stored import Manifest

Named = TypeVar("Named")  # a tensor or a module


@dataclass(frozen=True)
class Resumed:
    """Where a run resumes. step: batches that were trained, including skipped ones; 0: a new run.

    user: the value of `optimizer.kept.user`.
    """

    step: int = 0
    user: Any = None


def resume(
    model: nn.Module,
    optimizer: TieredOptimizer,
    *,
    storage: Any = None,
    group: Any = None,
    mesh: Any = None,
    **states: Any,
) -> Resumed:
    """Let the model's first call resume from the last durable step in `storage`, if there is one.

    Call it before the model's first call, with model and optimizer made as before, and with the option `durability`.
    `storage` is as in `Options`. If the model is compiled with another storage, the run moves there. All ranks that
    train together call this; if these are not all ranks, pass the model's option `group` or `mesh`.

    `states` are objects with `state_dict` and `load_state_dict`, such as schedulers and samplers. Each commit stores
    their states by name, and that of the optimizer's LossScaler, and this loads them; None: resume without that state.
    States of torch's samplers and data loaders are those at `optimizer.step()`, before the next batch is drawn. The
    optimizer's settings are those of that step. Buffers, extra states of modules, and parameters and buffers outside of
    the compiled model, as of an encoder ahead of it, have their values when this returns. The model's come with its
    first call; until then `state_dict`, and what reads or writes them, raises StepOrderError.

    Raises ResumeError if the run is of another model or optimizer, or has other states, ManifestError for a damaged
    commit, and StepOrderError after the model's first call. Then nothing has changed.
    """
    _check(optimizer)
    every, states = _with_extra(model, {**optimizer.kept.states, **states}), _given(states)
    for name, each in states.items():
        if not (callable(getattr(each, "state_dict", None)) and callable(getattr(each, "load_state_dict", None))):
            raise OptionError(f"{name} has no state_dict and load_state_dict: a {type(each).__name__}")
    options, kept = Options(storage=storage, group=group, mesh=mesh), optimizer.kept
    team, former = team_of(options), last_of(options)
    rest: Mapping[str, torch.Tensor] = {}
    if former is not None:
        named = _by_name(model.named_parameters(remove_duplicate=False))
        check_parameters(former, {name: tuple(each.shape) for name, each in named.items()})
        _check_states(former, states.keys(), every.keys())
        optimizer.settings_left(former)
        check_beside(former, optimizer)
        check_buffers(former, buffers := _buffers(model, optimizer))
        rest = rest_left(former, options.storage, team)  # before anything is changed
        Kept(_given(every)).give_back(former.states)
    kept.storage, kept.ranks = options.storage, team.everyone if team else ()
    kept.states.update(states)
    kept.step = former.step if former is not None else 0
    if former is None:
        return Resumed()
    optimizer.steps.missed = {named[each.name]: each.missed for each in former.parameters}
    optimizer.go_on(former)
    give_back_values(optimizer, rest)
    give_back_states(optimizer, rest, anew=True)
    give_back_buffers(buffers, rest)
    kept.user, kept.num_batches = former.user, former.position
    kept.begin_at(former.states)
    kept.await_values(model, [named[each.name] for each in former.parameters])
    return Resumed(former.position, former.user)


def _with_extra(model: nn.Module, states: dict[str, Any]) -> dict[str, Any]:
    """The states, with the extra state of the model's modules, if there is any."""
    extra = ExtraState(_by_name(model.named_modules(remove_duplicate=False), end=".").items())
    return {**states, EXTRA: states.get(EXTRA) or extra} if extra else states


def _buffers(model: nn.Module, optimizer: TieredOptimizer) -> dict[str, torch.Tensor]:
    """By the names in commits: the buffers of a model, and of modules outside of it that the optimizer trains, and the
    model's frozen parameters in memory.
    """
    modules = _by_name(model.named_modules(remove_duplicate=False), end=".").items()
    return buffers_of(modules) | resting(modules) | buffers_of(modules_beside(optimizer, model.modules()))


def _by_name(named: Iterable[tuple[str, Named]], end: str = "") -> dict[str, Named]:
    """What a model has, by the names that commits have for it; end: of names that are not empty."""
    return {f"{name}{name and end}".removeprefix("_orig_mod."): each for name, each in named}


def _check_states(former: Manifest, given: Set[str], every: Set[str]) -> None:
    """Raise ResumeError if a commit lacks a given state, or has one that is not among `every` known one."""
    if missing := sorted(given - former.states.keys()):
        known = ", ".join(sorted(former.states)) or "none"
        raise ResumeError(f"the commit of step {former.step} has no state of {', '.join(missing)}; it has {known}")
    if left := sorted(former.states.keys() - every):
        raise ResumeError(
            f"the commit of step {former.step} has a state of {', '.join(left)}, which would not be restored: pass "
            f"it as {left[0]}=..., or pass {left[0]}=None to resume without it"
        )


def _given(states: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in states.items() if each is not None}


def _check(optimizer: Any) -> None:
    """Raise for an optimizer that has no durable steps, or has taken some already."""
    if not isinstance(optimizer, TieredOptimizer):
        raise OptimizerError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} keeps its states in memory, so no step is "
            f"durable: make one of {OPTIMIZERS}, or save state dicts"
        )
    if optimizer.engine is not None:
        raise StepOrderError(
            "the model has already run: call resume before its first call, which moves the values to the tiers"
        )


def last_of(options: Options) -> Manifest | None:
    """The last commit in `storage` that this process has, or, with several ranks, that all have."""
    team = team_of(options)
    left = commits_in(map(folder_in, options.storage), prepared=team is not None)
    return newest_of(left, partial(gathered, team) if team else None)


class StepSampler(Sampler[list[int]]):
    """A batch sampler whose batches depend only on the number of the step, so that a run can resume at any step.

    Each `iter` returns the remaining batches of one epoch, in an order given by `seed`, and the next `iter` those of
    the next epoch. Fewer than `batch_size` rows at the end of an epoch are left out.

    start: the step of the first batch. stop: the step before which the batches end, also within an epoch; None: never.
    rank, world: each of several ranks takes its share of every batch; `batch_size` counts the rows of all.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        *,
        seed: int = 0,
        start: int = 0,
        stop: int | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        if not 1 <= batch_size <= num_rows or not 0 <= rank < world <= batch_size or start < 0:
            raise OptionError(
                f"there are no batches of {batch_size} of {num_rows} rows for rank {rank} of {world}, from step {start}"
            )
        self.num_rows, self.batch_size, self.seed, self.step = num_rows, batch_size, seed, start
        self.stop, self.rank, self.world = stop, rank, world

    @property
    def epoch(self) -> int:
        return self.step // self._per_epoch

    @property
    def _per_epoch(self) -> int:
        return self.num_rows // self.batch_size

    def __len__(self) -> int:
        """The batches that the next `iter` gives."""
        end = (self.epoch + 1) * self._per_epoch
        return max(0, (end if self.stop is None else min(end, self.stop)) - self.step)

    def __iter__(self) -> Iterator[list[int]]:
        (epoch, first), count = divmod(self.step, self._per_epoch), len(self)
        self.step += count
        numbers = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(self.num_rows, generator=numbers, device="cpu").tolist()
        for number in range(first, first + count):
            yield order[number * self.batch_size :][: self.batch_size][self.rank :: self.world]
