"""tiered_optimizer: the base of this package's optimizers.

They are torch optimizers to everyone else: param groups, schedulers, hooks and state dicts work. The difference is
when and where they work: the backend updates each unit's parameters as soon as its gradient is complete, or in the next
forward, on the CPU. `step()` closes the step and returns at once.

Settings are those of the moment the backward begins: a learning rate that a scheduler sets after `step()` counts for
the next one.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gs_compile.capture.dynamo import absorb_libraries
from gs_compile.capture.given_up import watch
from gs_compile.capture.internals import untraced, without_overrides
from gs_compile.errors import NonFiniteWarning, OptimizerError, ReleasedParameterError, ResumeError
from gs_compile.model import in_memory, optimizer_state
from gs_compile.model.engine import Engine
from gs_compile.model.gradients import are_dropped, end_gradients, take_given
from gs_compile.model.kept import Kept
from gs_compile.model.optimizer import Group, Loop
from gs_compile.model.parameter_store import in_turn
from gs_compile.model.residency import is_offloaded, residency_of
from gs_compile.model.settings import check_groups, check_norm, check_parameter, check_settings, check_state_dtype
from gs_compile.model.step_count import StepCount
from gs_compile.planner.simulate.measured import mean_bubbles, measured
from gs_compile.runtime.formats import moment_types, wide_of
from gs_compile.runtime.groups import tell_of_end
from gs_compile.runtime.kernels import Rule
from gs_compile.runtime.muon import Matrices
from gs_compile.runtime.step_record import StepRecord
from gs_compile.runtime.storage.stored import Manifest
from gs_compile.status.step import StepInfo


class TieredOptimizer(torch.optim.Optimizer):
    """The base of the optimizers of this package; `max_grad_norm` clips the norm of all gradients together.

    With `max_grad_norm`, updates wait for that norm and run in the next forward, or run earlier and are rolled back if
    necessary (`expert.clip`). A step whose gradients are not finite is skipped as a whole, and its state is unchanged.
    Infinity clips nothing, but skips such steps.
    """

    rule: Rule
    orthogonalizes = False  # updates of some parameters, as `matrices` says
    tells_of_given_up = True  # forwards, where `step` finds no backward

    def __init__(self, params: Any, defaults: dict[str, Any], max_grad_norm: float | None, state_dtype: Any) -> None:
        self._state_dtype = check_state_dtype(state_dtype)
        self.engine: Engine | None = None
        self.turn: AbstractContextManager[Any] = threading.RLock()  # of the thread that uses the model
        self.max_grad_norm = max_grad_norm
        self.loss_scale: Callable[[], float] = lambda: 1.0  # a LossScaler's
        check_norm(max_grad_norm, None)
        self.steps = StepCount()
        self.num_skipped = 0
        self.first_group_of: Mapping[Tensor, int] = {}  # `group_of` as the engine was made
        self.last_step: StepInfo | None = None
        self._ended = math.nan  # when it was closed
        self.kept = Kept()
        self.loop = Loop()
        super().__init__(params, defaults)
        tell_of_end()
        absorb_libraries()  # the model is built, so its libraries are there: Dynamo need not meet a break first
        watch()

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

    def _count_missed(self, record: StepRecord) -> None:
        """Leave a step that others have taken out of the counts of parameters that got no gradient in it.

        Updates leave these as they are, as torch does.
        """
        if record.skipped or not record.idle:
            return
        idle = [each for each in self._parameters if self.engine and self.engine.trained_span(each) in record.idle]
        self.steps.missed = {**self.steps.missed, **{each: self.steps.missed.get(each, 0) + 1 for each in idle}}
        for each in idle:
            self.show_state(each)

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the tensors of a parameter's state; all parameters have them if any param group needs them."""
        found = [self.rule.components(group) for group in self.param_groups]
        return max(found, key=len, default=())

    def components_of(self, parameter: Tensor, group: Group | None = None) -> tuple[str, ...]:
        """Those of one parameter. group: its own, before the model's first call: as far as that is known then."""
        return self.components

    def matrices(self, parameter: Tensor, group: Group, path: str = "", *, of_layer: bool = False) -> Matrices | None:
        """The matrices of a parameter that are orthogonalized; None: it has none. of_layer: layers alone read it."""
        return None

    def settings(self, group: Group) -> dict[str, Any]:
        """What the rule is told of a param group."""
        return {key: value for key, value in group.items() if key != "params"}

    @property
    def moments(self) -> tuple[torch.dtype | None, ...]:
        """What each component is stored in; None: as wide as the master."""
        return moment_types(self._state_dtype, self.components)

    @property
    def hypers(self) -> list[dict[str, Any]]:
        """What the rule is told of all param groups, as they are set now."""
        return list(map(self.settings, self.param_groups))

    def begin_step(self) -> StepRecord:
        """A record for the updates of the next step, with the settings as they are now."""
        record = self.as_set()
        optimizer_state.check_shown(self.state, filter(self._is_trained, self._parameters))
        in_memory.count(self.param_groups, record, self.engine.ranks if self.engine is not None else None)
        return record

    def as_set(self) -> StepRecord:
        """The same, of no gradient so far."""
        for group in self.param_groups:
            self._check(group)
        check_norm(self.max_grad_norm, None if self.engine is None else self.engine.placement)
        if self.engine is not None:
            check_groups(self.group_of, self.first_group_of)
            if self.components != self.engine.components:
                raise OptimizerError("momentum was 0 in the model's first call, so it has no state: set it before")
        groups = [{key: group[key] for key in self.defaults} for group in self.param_groups]
        record = StepRecord(self.steps.taken + 1, self.hypers, self.max_grad_norm, groups)
        record.loss_scale = self.loss_scale()
        return record

    @property
    def group_of(self) -> Mapping[Tensor, int]:
        """The number of each parameter's param group."""
        return {p: number for number, group in enumerate(self.param_groups) for p in group["params"]}

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Close the step whose backward has run; without one since the last step, do nothing."""
        optimizer_state.refuse_passed_on(self)
        with torch.enable_grad():
            loss = None if closure is None else closure()
        if self.engine is None:
            if any(parameter.grad is not None for parameter in self._parameters):
                optimizer_state.refuse_replaced(self)
                raise OptimizerError(
                    "gradients have arrived in p.grad: the model did not run with the greedysnake backend, or was "
                    'called before this optimizer was made. Compile it, model.compile(backend="greedysnake"), or by '
                    "torch.compile where it is itself a module of torch.nn; call model(...), not model.forward(...); "
                    "make the optimizer before the first call, or use a torch.optim optimizer"
                    + watch().why(self._parameters)
                )
            return loss
        self._close()
        return loss

    @in_turn
    def _close(self) -> None:
        """Another thread that reads or commits finds all of a step, or nothing."""
        assert self.engine is not None, "there was a call"
        take_given(self._parameters)
        finished = self.engine.finish(dropped=are_dropped(self._parameters))
        record = finished or self._step_in_memory()
        if record is not None:
            in_memory.average_late(self.param_groups, record, self.engine.ranks)
            in_memory.update(self, in_memory.with_gradients(self.param_groups), record)
            end_gradients(self._parameters, dropped=record.is_dropped)
            if finished is not None:  # steps of parameters in memory alone are theirs
                self.num_skipped += record.skipped
                self._count_missed(record)
                self.steps.become(self.steps.taken + (not record.skipped))
                if self.engine.durable is not None:
                    self.kept.end_step()
            is_bad = record.skipped and not record.is_dropped
            if is_bad and (record.loss_scale == 1.0 or record.is_loss_bad):  # else the scale was too large
                self._warn(record)
            self._note(self.engine, record)

    def _note(self, engine: Engine, record: StepRecord) -> None:
        """The step that is closed is the last one, for all who tell of it."""
        now = time.perf_counter()
        self.last_step = StepInfo(
            number=self.steps.taken,
            grad_norm=record.grad_norm,
            skipped=record.skipped,
            rolled_back=engine.placement.rolls_back(confirmed=record.confirmed),
            num_skipped=self.num_skipped,
            lanes=engine.tiers.trace.totals(reset=True),
            seconds=now - self._ended,
            num_tokens=record.num_tokens,
            loss=record.loss,
            predicted_seconds=record.predicted_seconds,
        )
        self._ended = now
        if engine.reporter is not None:
            engine.reporter.note(self.last_step)

    @property
    def grad_norm(self) -> float:
        """The norm of all gradients before clipping: of the backward that `step` will close, or of the last step."""
        record = self.engine.record if self.engine is not None else None
        if record is not None:
            return record.grad_norm
        return math.nan if self.last_step is None else self.last_step.grad_norm

    @property
    def will_skip(self) -> bool:
        """Whether `step` is to close a step that changes nothing."""
        record = self.engine.record if self.engine is not None else None
        return record is not None and record.skipped

    def _step_in_memory(self) -> StepRecord | None:
        """The record of a step whose backward has not met the compiled model."""
        record = self.begin_step() if in_memory.with_gradients(self.param_groups) else None
        if record is not None and self.max_grad_norm is not None:
            record.clip()
        return record

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        with without_overrides() if set_to_none else nullcontext():  # else the marks in `.grad` note it
            super().zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Return when all updates are done and written; `step` alone leaves some to the next forward."""
        if self.engine is not None:
            self.engine.synchronize()

    def commit(self) -> None:
        """Return when the last step is durable, with the current states of schedulers and values.

        Without this call, it is durable after the next forward. A loss whose backward has not begun is dropped. Raises
        OptimizerError if the run has no durable steps.
        """
        if self.engine is None and self.kept.step:
            return  # a run that is resumed has a commit of its last step
        if self.engine is None or self.engine.durable is None:
            raise OptimizerError("no step is durable: compile the model with the option durability, and take a step")
        self.engine.commit()

    def go_on(self, former: Manifest) -> None:
        """Have the steps of a commit behind it: their number, and the settings that they have left.

        Raises ResumeError where these are no settings of its param groups.
        """
        settings = list(map(optimizer_state.settings_read, former.groups))
        try:
            for mine, theirs in zip(self.param_groups, settings, strict=True):
                self._check({**mine, **theirs})
        except (LookupError, TypeError, ValueError) as error:
            raise ResumeError(
                f"the commit of step {former.step} has other settings than this optimizer: {error}"
            ) from error
        self.num_skipped = former.num_skipped
        self.steps.become(former.step - former.num_skipped)
        for mine, theirs in zip(self.param_groups, settings, strict=True):
            mine.update(theirs)

    def save_trace(self, path: str | Path) -> None:
        """Write which operation ran when, on which lane, as JSON for Perfetto and chrome://tracing.

        Needs ``expert={"trace": True}`` among the options of the backend.
        """
        self._recorded().tiers.trace.save(path)

    def waits(self) -> dict[str, float]:
        """Seconds of a step in which nothing was computed, by cause: the mean of all recorded steps like the latest.

        The cause is a lane and what it moved, such as "ssd_write s": what the computation waited for, directly or
        indirectly. "issue" is Python between operations, "fill" the time before a step's first computation, and "turn"
        the time before the first one of its backward. {} before the second such step. Needs ``expert={"trace": True}``,
        as `save_trace` does.
        """
        engine = self._recorded()
        engine.tiers.synchronize()
        inline = engine.tiers.setting.device.current_stream() is None
        return mean_bubbles(list(measured(engine.tiers.trace, engine.latest[0], engine.snapshots[-1], inline=inline)))

    def _recorded(self) -> Engine:
        if self.engine is None or not self.engine.tiers.trace.enabled:
            raise OptimizerError(
                'there is no trace: compile the model with options={"expert": {"trace": True}}, and take a step'
            )
        return self.engine

    def _warn(self, record: StepRecord) -> None:
        spoiled, units = "the loss" if record.is_loss_bad else "a gradient", ", ".join(map(str, record.updated))
        done = f"; units {units} were updated before it showed" if units else ""
        warnings.warn(
            f"{spoiled} is not finite: step {self.steps.taken + 1} was skipped{done}"
            + (". With max_grad_norm= (inf to clip nothing) such a step is skipped as a whole" if done else ""),
            NonFiniteWarning,
            stacklevel=5,
        )

    # State -----------------------------------------------------------------------------------------------------------
    #
    # `state` shows what there is, as tensors on the meta device: they take no memory, and tell others, such as
    # torch.distributed.checkpoint, that the state has been made. Values are put there for as long as a state dict is
    # made of them, and from `load_state_dict` to the model's first call.

    @untraced
    @in_turn
    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's optimizers do, zeros before a step; its tensors are mapped from files."""
        optimizer_state.refuse_passed_on(self)
        self.kept.check_values()
        self.synchronize()
        shown = self.state
        if self.engine is not None or not self.steps.taken:
            states = {p: self.stored_state(p) for p in self._parameters}
            self.state = defaultdict(dict, {p: state for p, state in states.items() if state is not None})
        try:
            return super().state_dict()
        finally:
            self.state = shown

    @untraced
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of an optimizer of this package, or of a torch optimizer of the same kind.

        fp32 masters, which only the former has, must round to the model's values when the next step begins.
        """
        optimizer_state.refuse_passed_on(self)
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
        for mine, theirs in zip(self.param_groups, groups, strict=True) if alike else ():  # others keep their settings
            taken = optimizer_state.settings_of(theirs)
            self._check({**mine, **taken, "amsgrad": theirs.get("amsgrad", False)})
            mine.update(taken)
        self.steps.missed = missed
        self.steps.become(num_steps)
        self.state.update(states)
        self.load_into_engine()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def stored_state(self, parameter: Tensor) -> dict[str, Any] | None:
        """A parameter's state as torch has it, its tensors mapped from files; None where it is not trained."""
        span = self.engine.trained_span(parameter) if self.engine is not None else None
        if self.engine is not None and span is not None:
            return self.engine.state(span, self.steps.of(parameter))
        state = self.state.get(parameter, {})
        is_shown = any(isinstance(value, Tensor) and value.is_meta for value in state.values())
        if is_offloaded(parameter) and not is_shown:  # it was trained; in files
            return dict(state)
        if self.engine is not None and not state:
            return None
        return optimizer_state.zeros(parameter, state) if is_shown else in_memory.copied(state)

    def keep_state(self, parameter: Tensor) -> None:
        """Have the state of a parameter in files, before another engine has it, or none does as it is frozen."""
        if self._is_trained(parameter):
            self.state[parameter] = self.stored_state(parameter) or {}

    def _has_values(self, parameter: Tensor) -> bool:
        """Whether a parameter has a state that is not on the tiers."""
        return optimizer_state.has_values(self.state.get(parameter, {}))

    def _of_trained(self, missed: Mapping[Tensor, int]) -> dict[Tensor, int]:
        return {p: n for p, n in missed.items() if self._is_trained(p)}

    def _is_trained(self, parameter: Tensor) -> bool:
        return self.engine is not None and self.engine.trained_span(parameter) is not None

    def load_into_engine(self) -> None:
        """Bring a loaded state to the tiers, once there are any."""
        if self.engine is None:
            return
        optimizer_state.warn_of_masters(self.engine, self.state)
        for parameter, state in list(self.state.items()):
            span = self.engine.trained_span(parameter)
            if span is None:
                if not is_offloaded(parameter) and not self._has_values(parameter):
                    del self.state[parameter]  # the model does not read it: as with torch, until it has a gradient
                elif not is_offloaded(parameter):
                    self.state[parameter] = {"step": self.steps.shown(parameter).clone(), **in_memory.copied(state)}
                continue
            if self._has_values(parameter) or not state:  # none: it begins at zeros
                self.engine.load_state(span, state or dict.fromkeys(self.components_of(parameter)))
                if not self.engine.num_steps:
                    self.engine.first_step.states[parameter] = state
            self.show_state(parameter)

    def show_state(self, parameter: Tensor, group: Group | None = None) -> None:
        """Show a parameter's state. group: as of `components_of`."""
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


def metrics(model: torch.nn.Module) -> dict[str, float]:
    """Numbers of the last step of a model that an optimizer of this package trains, as a flat dict for any logger.

    It is empty before the first step. ``wandb.log(gs_compile.metrics(model))`` logs it.

    step, num_skipped: steps taken so far, and skipped.
    loss: of the batch, if the step trains one.
    grad_norm: before clipping.
    skipped, rolled_back: 1.0 if the step was skipped, or its updates rolled back.
    tokens: of this rank, including padding.
    seconds, tokens_per_second: since the end of the step before; not for the first step.
    predicted_seconds: if the step was planned.
    ssd_read_seconds, ssd_read_busy, ssd_read_bytes: for each lane: the seconds it worked, the part of the step that
        this is, and the bytes it moved. The lane with the largest `_busy` is the bottleneck.
    """
    optimizer = next(optimizers_of(model.parameters()), None)
    return {} if optimizer is None or optimizer.last_step is None else optimizer.last_step.metrics()


def optimizers_of(parameters: Iterable[Tensor]) -> Iterator[TieredOptimizer]:
    """Of each parameter the gs_compile optimizer that was made for it, and is alive."""
    references = (residency_of(parameter).optimizer for parameter in parameters)
    return (found for reference in references if reference is not None and (found := reference()) is not None)
