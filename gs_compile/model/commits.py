"""commits: the commits of one engine's steps, and a later process that resumes from one.

    optimizer.step()       the step is over; a scheduler may step
    the model is called    [1] the random state at the beginning of this call is noted
                           [2] everything else of a commit is taken, when the program issues `seal`
    a later process        [3] its first call takes parameters and states from the files, and begins with [1]

What never changes is described once. A snapshot [2] takes the rest, including what the user stores (`Kept`).
"""

from __future__ import annotations

import platform
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from gs_compile.capture.graph import Captured, buffers_of
from gs_compile.errors import ResumeError
from gs_compile.model.aliases import is_plain
from gs_compile.model.drawn import Drawn, first_state
from gs_compile.model.given import mark_of, state_of
from gs_compile.model.idle import Idle
from gs_compile.model.in_memory import modules_beside, parameters_in_memory
from gs_compile.model.optimizer import Optimizer
from gs_compile.model.optimizer_state import forget_shown, has_values
from gs_compile.model.parameter_store import as_step
from gs_compile.model.replaced import replaced
from gs_compile.model.residency import residency_of
from gs_compile.runtime.commits import Commits
from gs_compile.runtime.former import stored_units
from gs_compile.runtime.random_state import random_state
from gs_compile.runtime.ranks import Ranks
from gs_compile.runtime.rest import Tensors, laid_out
from gs_compile.runtime.spans import Slice
from gs_compile.runtime.storage.manifest import refuse_large
from gs_compile.runtime.storage.store import Store
from gs_compile.runtime.storage.stored import BUFFER, FORMAT, Manifest, StoredParameter
from gs_compile.version import __version__

MOST_BUFFERS_NBYTES = 64 << 20  # that each commit writes: codebooks and projections, and no model's quantized weights
KEPT: tuple[Callable[[], None], tuple[int, int]] = (lambda: None, (0, 0))  # in `first_buffers`: it has changed
VERSIONS = {"greedysnake": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


class Durable:
    """Which steps are committed, and what commits hold.

    optimizer: is not kept alive. placed: the parameters; idle: those that no gradient has come to, which commits name.
    plan: what commits hold of the plan. captured, read: see `note_buffers`, for the first call. former: the commit from
    which the run was resumed. Raises as `check_buffers`.
    """

    _is_open = False  # the last commit was made between two calls: schedulers and values may change after it
    _random: Mapping[str, str] | None = None  # that the call under way has found

    def __init__(
        self,
        optimizer: Optimizer,
        commits: Commits,
        placed: Sequence[tuple[Slice, StoredParameter]],
        idle: Idle,
        plan: Mapping[str, Any],
        captured: Captured,
        read: Mapping[str, torch.Tensor],
    ) -> None:
        setting, store = commits.setting, commits.store
        self.every = setting.placement.durability
        self.former, self.goes_on = store.former, store.former is not None
        self._optimizer, self._ranks = weakref.ref(optimizer), setting.ranks
        self._placed, self._idle = placed, idle
        self._kept: Mapping[str, Any] = {}  # by the user, for the commit that is due
        self._captures: list[Captured] = []  # of the calls so far
        self._read: dict[str, torch.Tensor] = {}  # the buffers that these have read, as the latest of them had them
        self._resting: dict[str, weakref.ref[torch.Tensor]] = {}  # frozen parameters that these have in memory
        outside = list(_beside(optimizer, captured))
        self._beside = [(name, weakref.ref(each)) for name, each in outside]
        self._left: dict[str, torch.Tensor] = {}  # the buffers of these at the end of the last step
        optimizer.kept.first_buffers |= dict.fromkeys(kept_buffers(outside), KEPT)
        self.note_buffers(captured, read)
        self._fixed: dict[str, Any] = {
            "format": FORMAT,
            "run": store.run,
            "versions": VERSIONS,
            "plan": dict(plan),
            "units": tuple(stored_units(setting.placement, setting.types)),
            "rank": setting.ranks.rank if setting.ranks else 0,
            "world": setting.placement.world,
            "together": _name_of_run(setting.ranks, store),
        }
        refuse_large({**self._fixed, "parameters": [each for _, each in placed]}, len(placed))
        self._num_steps = self._num_committed = 0  # of this process: that are over, and the last of them committed
        self._drawn = Drawn()
        commits.snapshot = self.snapshot
        if store.former is not None:
            self._follow(store.former, optimizer)

    def _follow(self, former: Manifest, optimizer: Optimizer) -> None:
        """All commits have the buffers of the one that the run goes on from; what had a gradient then has had one."""
        known = self.buffers
        if optimizer.kept.step is not None:  # they have their values, also those that an evaluation reads on the tiers
            known = dict(chain.from_iterable(_parameters_of(each.modules) for each in self._captures)) | known
        optimizer.kept.first_buffers |= dict.fromkeys(check_buffers(former, known), KEPT)
        never = former.never
        self._idle.wake({span for span, each in self._placed if never is not None and each.name not in never})

    def take_random_state(self, now: Mapping[str, str] | None = None) -> Mapping[str, str] | None:
        """The random state with which a resumed run begins; only the first caller gets it. now: see `first_state`."""
        former, self.former = self.former, None
        optimizer = self._optimizer()
        return first_state(former, now) if former and optimizer and not optimizer.kept.has_random_state else None

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """All buffers of the model, and of modules outside of it that the optimizer trains, by name, as they are. The
        model's frozen parameters that no step reads are among them.
        """
        found = {name: each for name, known in self._resting.items() if is_plain(each := known())} | self._read
        for captured in self._captures:
            found |= captured.buffers()
        return found | self._buffers_beside

    @property
    def _buffers_beside(self) -> dict[str, torch.Tensor]:
        return buffers_of((name, module) for name, each in self._beside if (module := each()) is not None)

    def end_step(self) -> None:
        """A step has ended. What is ahead of the model may change its buffers before the call that commits the step."""
        self._drawn.end_step()
        optimizer = self._optimizer()
        kept = optimizer.kept.first_buffers if optimizer is not None else {}
        self._left = {f"{BUFFER}{n}": each.clone() for n, each in self._buffers_beside.items() if n in kept}

    def note_buffers(self, captured: Captured, read: Mapping[str, torch.Tensor]) -> None:
        """A call reads these buffers. If a script changes them, or others that state dicts have, commits hold the new
        values from now on.

        Their first values are those for the first engine of a run: a later engine may find them changed.
        """
        self._read.update(read)
        if any(each is captured for each in self._captures) or (optimizer := self._optimizer()) is None:
            return
        self._captures.append(captured)
        always = kept_buffers(captured.modules)
        frozen = resting(captured.modules)
        self._resting |= {name: weakref.ref(each) for name, each in frozen.items()}
        for name, each in {**read, **captured.buffers(persistent=True), **frozen}.items():
            first = KEPT if name in always else (weakref.ref(each), _state_of(each))
            optimizer.kept.first_buffers.setdefault(name, first)

    def marks(self, num_steps: int) -> dict[str, bool]:
        """For the program of the step after `num_steps`: is that step to be committed, and is the one before sealed.

        A step that was committed between two calls is committed again: what has changed since then belongs to it.
        """
        self._num_steps, self._drawn.is_between_calls = num_steps, False
        is_due = num_steps > max(0, self._num_committed - self._is_open) and num_steps % self.every == 0
        return {"copies": (num_steps + 1) % self.every == 0, "seals": self._keeps(is_due=is_due)}

    def seals_between_calls(self, num_steps: int, *, always: bool) -> bool:
        """Whether a program between two calls commits what `num_steps` have left; `always`: it is asked for.

        On ranks it has to be asked for, as all do together: one of them alone may have asked for values; and where an
        object of the user's is gone, which a commit needs. A run that goes on may have changed what it has taken up,
        before its first step.
        """
        optimizer = self._optimizer()
        has_lost = optimizer is not None and optimizer.kept.has_lost
        is_unasked = self._ranks is None and not has_lost
        self._num_steps, self._is_open = num_steps, self._is_open or always or is_unasked
        self._drawn.is_between_calls = True
        is_due = is_unasked and num_steps > self._num_committed and num_steps % self.every == 0
        first = -1 if self.goes_on else 0
        is_asked = always and num_steps > max(first, self._num_committed - self._is_open)
        return self._keeps(is_due=is_due or is_asked)

    def _keeps(self, *, is_due: bool) -> bool:
        """Whether a commit that is due is made, which needs the optimizer. What the user stores is taken now, so that
        it is refused before anything has run if no commit can hold it.
        """
        optimizer = self._optimizer()
        if not is_due or optimizer is None:
            return False
        self._kept = optimizer.kept.snapshot(optimizer.param_groups)
        return True

    def within(self, random: Mapping[str, str] | None) -> AbstractContextManager[None]:
        """Commits that are issued inside the block, in a call, hold the random state at the beginning of the call."""
        return replaced(vars(self), _random=random)

    def end_call(self, *, training: bool) -> None:
        """A call has issued its program."""
        self._is_open = self._is_open and not training
        if training:
            self._drawn.end_call(self._random)

    def snapshot(self) -> tuple[Manifest, Tensors]:
        """Everything of a commit except its parts, as it is when the commit is issued."""
        self._num_committed = self._num_steps
        optimizer = self._optimizer()
        assert optimizer is not None, "it was there as the call began"
        rest = {**rest_of(optimizer), **self._changed_buffers(optimizer)}
        rest |= self._left if self._random is not None else {}
        step = optimizer.num_steps + optimizer.num_skipped
        optimizer.kept.has_norm |= optimizer.max_grad_norm != optimizer.first_norm
        if optimizer.kept.step is not None:  # where the first step begins again, it is from this commit
            optimizer.kept.step = step
        manifest = Manifest(
            **self._fixed,
            **self._kept,
            step=step,
            num_skipped=optimizer.num_skipped,
            written=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            optimizer=type(optimizer).__name__,
            components=optimizer.components,
            parameters=self._parameters(optimizer),
            never=tuple(each.name for span, each in self._placed if span in self._idle.untouched),
            random=dict(self._random or random_state()),
            drawn=self._drawn.told(self._random),
            num_batches=optimizer.kept.num_batches,
            norm=(optimizer.max_grad_norm,) if optimizer.kept.has_norm else (),
            rest=laid_out(rest),
            parts=(),
        )
        return manifest, rest

    def _parameters(self, optimizer: Optimizer) -> tuple[StoredParameter, ...]:
        """The parameters, with the number of steps that each has missed; frozen ones miss none."""
        missed = {optimizer.trained_span(parameter): number for parameter, number in optimizer.steps.missed.items()}
        numbers = ((each, missed.get(span, 0) if each.trained else each.missed) for span, each in self._placed)
        return tuple(each if each.missed == number else replace(each, missed=number) for each, number in numbers)

    def missed(self, optimizer: Optimizer, former: Manifest) -> dict[torch.Tensor, int]:
        """The inverse: the steps that the optimizer's parameters have missed, according to a commit."""
        known = {each.name: each.missed for each in former.parameters}
        numbers = {span: known.get(each.name, 0) for span, each in self._placed}
        found = ((parameter, optimizer.trained_span(parameter)) for parameter in optimizer.group_of)
        return {parameter: numbers[span] for parameter, span in found if span is not None}

    def _changed_buffers(self, optimizer: Optimizer) -> dict[str, torch.Tensor]:
        """The buffers that all commits have, and those that a script has changed between steps, by their names in
        `rest`. (No forward changes any.)
        """
        firsts = optimizer.kept.first_buffers
        known = ((name, each, *firsts[name]) for name, each in self.buffers.items() if name in firsts)
        return {
            f"{BUFFER}{name}": each
            for name, each, first, state in known
            if first() is not each or state != _state_of(each)
        }


def resting(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, torch.Tensor]:
    """The frozen parameters in memory that modules have, by name: no step reads them, and a script may change them, as
    those of a target network.
    """
    return {name: each for name, each in _parameters_of(modules) if is_plain(each) and not each.requires_grad}


def _parameters_of(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in modules:
        for name, each in module.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{prefix}{name}", each


def _state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Numbers that differ once a tensor was changed: of parameters, which may be many bytes, as each commit asks."""
    return mark_of(tensor) if isinstance(tensor, nn.Parameter) else state_of(tensor)


def _name_of_run(ranks: Ranks | None, store: Store) -> str:
    """The name that the run has on all ranks; "" for one process, whose storage names it. All ranks call this."""
    if ranks is None:
        return ""
    return store.former.together if store.former else ranks.from_first("the name of the run", lambda: store.run)


def rest_of(optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's parameters that are in memory, outside the compiled model, and their states, by their places in
    the optimizer: those that are trained, or were.
    """
    tensors: dict[str, torch.Tensor] = {}
    for number, parameter in parameters_in_memory(optimizer.param_groups):
        state = optimizer.state.get(parameter, {}).items()
        own = {f"{number}.{name}": each for name, each in state if torch.is_tensor(each) and not each.is_meta}
        if own or parameter.requires_grad:
            tensors |= {f"{number}": parameter, **own}
    return tensors


def _beside(optimizer: Optimizer, captured: Captured) -> Iterator[tuple[str, nn.Module]]:
    return modules_beside(optimizer, (module for _, module in captured.modules))


def kept_buffers(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, torch.Tensor]:
    """The buffers that all commits have, by name: those of state dicts, which may have been made at random, where they
    are few bytes.
    """
    found = {name: each for name, each in buffers_of(modules, persistent=True).items() if is_plain(each)}
    return found if sum(each.nbytes for each in found.values()) <= MOST_BUFFERS_NBYTES else {}


def rest_nbytes(optimizer: Optimizer, stored: Container[torch.Tensor], captured: Captured) -> int:
    """The bytes of `rest_of` from the first step on, which makes the states, and of buffers that all commits have.
    stored: parameters that the plan has.

    What another plan before it had, of an evaluation, is in memory again then, unless it was built on storage.
    """
    trained = (each for each in optimizer.group_of if each.requires_grad and each not in stored)
    beside = [each for each in trained if residency_of(each).folder is None]
    nbytes = sum((1 + len(optimizer.components)) * each.nbytes + as_step(0).nbytes for each in beside)
    buffers = (*kept_buffers(captured.modules).values(), *kept_buffers(_beside(optimizer, captured)).values())
    return nbytes + sum(each.nbytes for each in buffers)


def give_back_rest(
    optimizer: Optimizer, rest: Tensors, args: Sequence[Any], buffers: Mapping[str, torch.Tensor]
) -> None:
    """The inverse, in a call with these arguments with which a run goes on. buffers: by name.

    What `resume` has given back, or the engine before, a script may have changed since, as steps of their own may have
    changed states.
    """
    if is_first := optimizer.kept.step is None:
        _refuse_made_before(args, optimizer, rest)
        give_back_values(optimizer, rest)
        give_back_buffers(buffers, rest)
    forget_shown(optimizer.state)  # the commit may have none
    give_back_states(optimizer, rest, anew=is_first)


def _refuse_made_before(args: Sequence[Any], optimizer: Optimizer, rest: Tensors) -> None:
    """Raise ResumeError if an argument of the first call was computed from parameters that get their values in it."""
    made = [each for each in args if isinstance(each, torch.Tensor) and each.requires_grad and not each.is_leaf]
    if made and not all(torch.equal(parameter, values) for parameter, values in _values_in(optimizer, rest)):
        raise ResumeError(
            f"an input of shape {tuple(made[0].shape)} was made by parameters outside of the compiled model, as of an "
            "encoder ahead of it, which get their values of the commit with the model's first call: call "
            "`run = gs_compile.resume(model, optimizer, storage=...)` before it, which gives them these values"
        )


@torch.no_grad()
def give_back_values(optimizer: Optimizer, rest: Tensors) -> None:
    """The inverse of `rest_of`, for the values of parameters."""
    for parameter, values in _values_in(optimizer, rest):
        parameter.copy_(values)


def _values_in(optimizer: Optimizer, rest: Tensors) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    beside = list(optimizer.group_of)
    return ((beside[int(name)], values) for name, values in rest.items() if name.isdecimal())


def give_back_states(optimizer: Optimizer, rest: Tensors, *, anew: bool) -> None:
    """The inverse of `rest_of`, for states; anew: also in place of existing states, which steps may have changed."""
    known = {each for each, state in optimizer.state.items() if has_values(state)}
    for parameter in known if anew else ():
        del optimizer.state[parameter]
    beside, found = list(optimizer.group_of), defaultdict[torch.Tensor, dict[str, torch.Tensor]](dict)
    for name, values in rest.items():
        number, _, component = name.partition(".")
        if component and number.isdecimal():
            found[beside[int(number)]][component] = values
    optimizer.state.update({each: state for each, state in found.items() if anew or each not in known})


def check_buffers(former: Manifest, buffers: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of the buffers that a commit has; raises ResumeError where there is none of a name, or of another
    shape.
    """
    stored = {each.name.removeprefix(BUFFER): each.shape for each in former.rest if each.name.startswith(BUFFER)}
    for name, shape in stored.items():
        buffer = buffers.get(name)
        if buffer is None or tuple(buffer.shape) != tuple(shape):
            here = "the model has none" if buffer is None else f"here it is {tuple(buffer.shape)}"
            raise ResumeError(f"the commit has a {BUFFER}{name} of shape {tuple(shape)}, and {here}")
    return list(stored)


@torch.no_grad()
def give_back_buffers(buffers: Mapping[str, torch.Tensor], rest: Tensors) -> None:
    """Give buffers, by name, the values that a commit has."""
    for name, values in rest.items():
        buffer = buffers[name.removeprefix(BUFFER)] if name.startswith(BUFFER) else None
        if buffer is not None and state_of(buffer)[1] != state_of(values)[1]:  # an expanded one takes none
            buffer.copy_(values)
