"""optimizer: what a run needs of its optimizer: settings, counts of steps, and states.

`state` has tensors on the meta device: they take no memory, and show to others, such as torch.distributed.checkpoint,
that the state exists. It has values while a state dict is made, and from `load_state_dict` to the model's first call.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from copy import copy
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gs_compile.capture.internals import untraced, without_overrides
from gs_compile.errors import OptimizerError, ReleasedParameterError, ResumeError
from gs_compile.model import optimizer_state
from gs_compile.model.given import Given
from gs_compile.model.kept import Kept
from gs_compile.model.parameter_store import ParameterStore, in_full, in_turn
from gs_compile.model.replaced import replaced
from gs_compile.model.residency import is_offloaded, residency_of
from gs_compile.model.settings import check_groups, check_norm, check_parameter, check_settings, check_state_dtype
from gs_compile.model.step_count import StepCount
from gs_compile.runtime.formats import moment_types, wide_of
from gs_compile.runtime.kernels import Rule
from gs_compile.runtime.muon import Matrices
from gs_compile.runtime.spans import Slice
from gs_compile.runtime.step_record import StepRecord
from gs_compile.runtime.storage.stored import Manifest

Group = Mapping[str, Any]  # a param group


class Loop(NamedTuple):
    """What the first step has shown of a script's loop.

    accumulates: steps have several backwards. num_calls: the most calls between forward and backward at a time.
    """

    accumulates: bool = False
    num_calls: int = 1


class Optimizer(torch.optim.Optimizer):
    """Parameters in groups, with their settings and states. The states are on the tiers once there is an engine; before
    that, and if the compiled model does not read the parameter, in files or in memory.
    """

    rule: Rule
    orthogonalizes = False  # updates of some parameters, as `matrices` says

    def __init__(self, params: Any, defaults: dict[str, Any], max_grad_norm: float | None, state_dtype: Any) -> None:
        self._state_dtype = check_state_dtype(state_dtype)
        check_norm(max_grad_norm, None)
        self.max_grad_norm = max_grad_norm
        self.loss_scale: Callable[[], float] = lambda: 1.0  # a LossScaler's
        self.engine: ParameterStore | None = None
        self.turn: AbstractContextManager[Any] = threading.RLock()  # of the thread that uses the model
        self.steps = StepCount()
        self.num_skipped = 0
        self.first_group_of: Mapping[Tensor, int] = {}  # `group_of` as the engine was made
        self.first_norm = max_grad_norm  # the same of `max_grad_norm`
        self.first_states: dict[Tensor, Any] = {}  # that were loaded, until the first step has ended: it may begin anew
        self.given: list[Given] = []  # to state dicts
        self.kept = Kept()
        self.loop = Loop()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, before the first step."""
        if self.engine is not None:
            raise OptimizerError("parameters cannot be added after the first call: make another optimizer with them")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self._check(group)
        for parameter in group["params"]:
            check_parameter(parameter)
            residency_of(parameter).optimizer = weakref.ref(self)
            self.show_state(parameter, group)

    @property
    def num_steps(self) -> int:
        """Steps of the compiled model that were taken and not skipped, including those of a resumed run.

        `gs_compile.resume` sets the number. With only the option ``resume="auto"``, the model's first call sets it, and
        raises StepOrderError if another number was read before.
        """
        if self.engine is None:
            self.steps.read = self.steps.taken
        return self.steps.taken

    def note_missed(self, parameters: Iterable[Tensor]) -> None:
        """These are trained from the next step on, with the state that they had when they were frozen, if any."""
        taken = {p: optimizer_state.whole_step(self.state[p]) if self._has_values(p) else 0 for p in parameters}
        self.steps.missed = {**self.steps.missed, **{p: self.steps.taken - number for p, number in taken.items()}}

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the tensors of a parameter's state; all parameters have them if any param group needs them."""
        found = [self.rule.components(group) for group in self.param_groups]
        return max(found, key=len, default=())

    def components_of(self, parameter: Tensor, group: Group | None = None) -> tuple[str, ...]:
        """The components of one parameter. group: its own, before the model's first call, as far as it is known."""
        return self.components

    def matrices(self, parameter: Tensor, group: Group, path: str = "", *, of_layer: bool = False) -> Matrices | None:
        """The matrices of a parameter that are orthogonalized; None: it has none. of_layer: layers alone read it."""
        return None

    def settings(self, group: Group) -> dict[str, Any]:
        """The settings of a param group, as the rule takes them."""
        return {key: value for key, value in group.items() if key != "params"}

    @property
    def moments(self) -> tuple[torch.dtype | None, ...]:
        """The dtype in which each component is stored; None: that of the master."""
        return moment_types(self._state_dtype, self.components)

    def begin_step(self) -> StepRecord:
        """A record for the updates of the next step, with the settings as they are now."""
        record = self.as_set()
        optimizer_state.check_shown(self.state, filter(self._is_trained, self._parameters), self.steps)
        optimizer_state.refuse_lost(self)
        return record

    def as_set(self) -> StepRecord:
        """The record of `begin_step`, without its check of what `state` shows."""
        for group in self.param_groups:
            self._check(group)
        check_norm(self.max_grad_norm, None if self.engine is None else self.engine.tiers.placement)
        if self.engine is not None:
            check_groups(self.group_of, self.first_group_of)
            if self.components != self.engine.components:
                raise OptimizerError("momentum was 0 in the model's first call, so it has no state: set it before")
        # Copied: a script may change a list in place, such as betas, while updates run or are pending
        groups = [{key: copy(group[key]) for key in self.defaults} for group in self.param_groups]
        hypers = [self.settings({**group, **own}) for group, own in zip(self.param_groups, groups, strict=True)]
        record = StepRecord(self.steps.taken + 1, hypers, self.max_grad_norm, groups)
        record.loss_scale = self.loss_scale()
        with without_overrides():
            record.dtype = reduce(torch.promote_types, {each.dtype for each in self._parameters}, record.dtype)
        return record

    def close_step(self, *, is_late: bool = False) -> None:
        """Close the step whose backward has run. is_late: the next batch may have been taken already."""
        raise NotImplementedError

    @property
    def group_of(self) -> Mapping[Tensor, int]:
        """The number of each parameter's param group."""
        return {p: number for number, group in enumerate(self.param_groups) for p in group["params"]}

    def settings_left(self, former: Manifest) -> list[dict[str, Any]]:
        """The settings of the param groups at a commit; raises ResumeError if the optimizer has other groups."""
        settings = list(map(optimizer_state.settings_read, former.groups))
        try:
            for mine, theirs in zip(self.param_groups, settings, strict=True):
                self._check({**mine, **theirs})
            for norm in former.norm:
                check_norm(norm, None)
        except (LookupError, TypeError, ValueError) as error:
            raise ResumeError(
                f"the commit of step {former.step} has other settings than this optimizer: {error}"
            ) from error
        return settings

    def go_on(self, former: Manifest) -> None:
        """Continue after the steps of a commit, with its number of steps and `settings_left`; raises as that does."""
        settings = self.settings_left(former)
        self.num_skipped = former.num_skipped
        if former.norm:
            (self.max_grad_norm,), self.kept.has_norm = former.norm, True
        self.steps.become(former.step - former.num_skipped)
        for mine, theirs in zip(self.param_groups, settings, strict=True):
            mine.update(theirs)

    def synchronize(self) -> None:
        """Return when all updates are done and written; `step` alone leaves some to the next forward."""
        if self.engine is not None:
            self.engine.synchronize()

    @untraced
    @in_turn
    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's optimizers do, zeros before a step; its tensors are mapped from files."""
        optimizer_state.refuse_passed_on(self)
        self.kept.check_values()
        self.synchronize()
        if self.engine is None and self.steps.taken:
            return super().state_dict()
        with torch.inference_mode(False):  # changes are counted
            stored = {p: self.stored_state(p) for p in self._parameters}
        states = defaultdict(dict, {p: state for p, state in stored.items() if state is not None})
        self.given = [each for each in self.given if each.is_changed or each.values() is not None]
        self.given += optimizer_state.given(states, self.state)
        with replaced(vars(self), state=states):
            return super().state_dict()

    @untraced
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of an optimizer of this package, or of a torch optimizer of the same kind.

        fp32 masters, which only the former has, must round to the model's values when the next step begins.
        """
        optimizer_state.refuse_passed_on(self)
        self.kept.check_values()
        state_dict = dict(state_dict) if isinstance(state_dict, Mapping) else state_dict
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        groups, given = optimizer_state.parts_of(state_dict)
        numbers = optimizer_state.numbers_of(self.param_groups, groups)
        states = {p: dict(given.get(n, {})) for p, n in zip(self._parameters, numbers, strict=True)}
        optimizer_state.refuse_others(states, lambda p: self.components_of(p) if self._is_trained(p) else ())
        num_steps, missed = optimizer_state.steps_of(states)
        if self.engine is not None and self._of_trained(missed) != self._of_trained(self.steps.missed):
            raise OptimizerError(optimizer_state.OTHER_STEPS)
        alike = optimizer_state.are_alike(self.param_groups, groups)
        pairs = list(zip(self.param_groups, groups, strict=True)) if alike else []  # others keep their settings
        for mine, theirs in pairs:
            taken = optimizer_state.settings_of(theirs)
            self._check({**mine, **taken, "amsgrad": theirs.get("amsgrad", False)})
        if any(map(self._is_trained, self._parameters)):
            self.synchronize()  # before anything is changed: it raises within a step, and may commit the step before

        def take() -> None:
            for mine, theirs in pairs:
                mine.update(optimizer_state.settings_of(theirs))
            self.steps.missed = missed
            self.steps.become(num_steps)
            self.state.update(states)
            self.load_into_engine()
            self.given = [Given(held) for each in self.given if (held := each.values()) is not None]

        in_full(take, self.engine)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def stored_state(self, parameter: Tensor) -> dict[str, Any] | None:
        """A parameter's state as torch has it, its tensors mapped from files; None if it is not trained, or has got no
        gradient so far.
        """
        span, number = self.trained_span(parameter), self.steps.of(parameter)
        if self.engine is not None and span is not None:
            return self.engine.state(span, number) if number or not self.steps.taken else None
        state = self.state.get(parameter, {})
        is_shown = any(isinstance(value, Tensor) and value.is_meta for value in state.values())
        if self.engine is not None and not state:
            return None
        if is_offloaded(parameter) and not is_shown:  # it was trained; in files
            return dict(state)
        return optimizer_state.zeros(parameter, state) if is_shown else optimizer_state.copied(state)

    def keep_state(self, parameter: Tensor) -> None:
        """Put the state of a parameter into files, before another engine takes it, or the parameter is frozen."""
        if self._is_trained(parameter):
            self.state[parameter] = self.stored_state(parameter) or {}

    def _has_values(self, parameter: Tensor) -> bool:
        """Whether a parameter has a state that is not on the tiers."""
        return optimizer_state.has_values(self.state.get(parameter, {}))

    def _of_trained(self, missed: Mapping[Tensor, int]) -> dict[Tensor, int]:
        """`missed` without parameters that are not trained."""
        idle = {None, *(self.engine.never if self.engine is not None else ())}
        return {p: n for p, n in missed.items() if self.trained_span(p) not in idle}

    def trained_span(self, parameter: Tensor) -> Slice | None:
        """The span of a parameter that the engine trains; None for others, and if there is no engine."""
        return None if self.engine is None else residency_of(parameter).trained_span(self.engine)

    def _is_trained(self, parameter: Tensor) -> bool:
        return self.trained_span(parameter) is not None

    def load_into_engine(self) -> None:
        """Bring loaded states to the tiers, if there are any tiers."""
        if self.engine is None:
            return
        optimizer_state.warn_of_masters(self.engine, self.state)
        optimizer_state.forget_shown(self.state)
        for parameter, state in list(self.state.items()):
            if (span := self.trained_span(parameter)) is not None:
                if self._has_values(parameter) or not state:  # none: it begins at zeros
                    self.engine.load_state(span, state or dict.fromkeys(self.components_of(parameter)))
                    if not self.engine.num_steps:
                        self.first_states[parameter] = state
                self.show_state(parameter)
            elif not is_offloaded(parameter):
                self.state[parameter] = {"step": self.steps.shown(parameter).clone(), **optimizer_state.copied(state)}

    def show_state(self, parameter: Tensor, group: Group | None = None) -> None:
        """Show a parameter's state. group: see `components_of`."""
        like = torch.empty(parameter.shape, dtype=wide_of(parameter.dtype), device="meta")
        shown = dict.fromkeys(self.components_of(parameter, group), like.as_subclass(optimizer_state.StoredState))
        self.state[parameter] = {"step": self.steps.shown(parameter), **shown}

    @property
    def _parameters(self) -> list[Tensor]:
        """In the order in which state dicts number them."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _check(self, group: Mapping[str, Any]) -> None:
        check_settings(type(self).__name__, self.defaults, group)

    def __getstate__(self) -> dict[str, Any]:
        raise ReleasedParameterError("a gs_compile optimizer cannot be copied or pickled; use its state_dict()")
