"""first_step: the first step of a run shows how steps have to be planned. If the plan was another, it begins again.

It is not known in advance how many backwards come before `optimizer.step()`, how many calls wait for theirs at a time,
or whether settings change after them; nor, from an evaluation before the first step, what steps read and save. So the
plan is made for what the first call does, updates run beside the first backward, and one call has memory, until there
is

[0] a first training call behind an evaluation, or that reads more than the first did; in a durable run, or less
[1] a call after a backward
[2] a backward of several calls, or of one that was given up for another
[3] a gradient from outside of the model
[4] another setting, no gradient, or another norm to clip by, at `optimizer.step()`
[5] a call that has no room, as it is larger than the first, or beside those that wait.

Then another engine takes the place of the first one: it has other parameters, its updates wait for `optimizer.step()`,
or more calls have memory. First values and states are kept until the step has ended, and the backwards so far run once
more, with the same inputs, random numbers and gradients. What the first step has shown holds from then on.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch

from gs_compile.capture.given_up import watch
from gs_compile.capture.internals import without_overrides
from gs_compile.errors import MemoryBudgetError, OptimizerError, ReleasedParameterError, StepOrderError
from gs_compile.model.aliases import aliases_of, refuse_overlaps
from gs_compile.model.call import Call
from gs_compile.model.engine import KEPT, Engine
from gs_compile.model.files import trim
from gs_compile.model.first_call import Prepared, may_plan_again, plan_tiers
from gs_compile.model.gradients import forget_gradients, is_zeroed
from gs_compile.model.meeting import agree
from gs_compile.model.offloaded import Alias
from gs_compile.model.optimizer import Loop, Optimizer
from gs_compile.model.residency import Residency, is_offloaded, residency_of, roll_back
from gs_compile.runtime.step_record import StepRecord

log = logging.getLogger(__name__)

LATE = "gradients that the norm has came behind the model's backward, to parameters that it does not read"


class FirstStep:
    """What it began with, what it has done so far, and the engine that does it.

    under way   `engine()` runs it; it may begin again
    closed      by `optimizer.step()`; first values are kept until its updates are known to have succeeded
    over        nothing of it is kept
    """

    def __init__(self) -> None:
        self.engine: Callable[[], Engine | None] = lambda: None  # weakly held
        self.done: list[tuple[Call, Callable[[Engine], None]]] = []  # had their backward, with what repeats it
        self._values: weakref.WeakSet[Residency] = weakref.WeakSet()  # whose first values are there

    def begin(self, optimizer: Optimizer, call: Call, prepared: Prepared | None = None) -> Engine:
        """The engine of an optimizer, with the state that was loaded into it or that a durable run has left."""
        with torch.inference_mode(False):  # what is made lives longer than this call
            if call.ranks is not None:
                agree(call.ranks, call, optimizer)
            refuse_overlaps(call.compilation.captured.inputs, call.args)
            aliases = aliases_of(call.args)
            optimizer.first_group_of, optimizer.first_norm = optimizer.group_of, optimizer.max_grad_norm
            optimizer.kept.note_modules(call.compilation.captured.modules)
            optimizer.engine = engine = Engine(optimizer, call, self, prepared)
            self.engine = weakref.ref(engine)
            self._values.update(residency_of(call.args[index]) for index in engine.spans_of(call.args))
            with engine.tiers.whole():
                _bring_states(optimizer, engine)
        for each in aliases:
            Alias.follow(*each)
        # `model.compile` ties a module into a reference cycle; it often goes with its optimizer, and its files with it.
        weakref.finalize(optimizer, gc.collect).atexit = False
        return engine

    # Where it shows another plan -------------------------------------------------------------------------------------

    def engine_for_training(self, engine: Engine, call: Call) -> Engine:
        """The engine that is planned for a training call, with the parameters that it reads [0]: commits name exactly
        the parameters that steps read.
        """
        if self.engine() is not engine or engine.open or engine.record is not None or self.done:
            return engine
        is_provisional = engine.planning.planner.model.is_provisional
        captured, had = call.compilation.captured, engine.spans_of(call.args)
        if engine.ranks is not None and not engine.began_to_train:
            _refuse_idle(call)
        read = {index for graph in call.models[0].split.units for index in graph.parameters(captured)}
        has_all = engine.durable is None or len(had) == len(engine.spans)
        if not is_provisional and read <= had.keys() and has_all:
            return engine
        if is_provisional and has_all and _has_uncommitted(engine):
            engine.commit()  # from which it may begin again
        if not self.may_begin_again:
            return engine
        return self.begin_again(engine, call, Loop(engine.accumulates, engine.num_calls))

    def engine_for_forward(self, engine: Engine, call: Call) -> Engine:
        """The engine that runs the forward of a call [1]."""
        if engine.record is None or engine.accumulates or not (self.may_begin_again and engine.open.is_of_this_thread):
            return engine
        return self.begin_again(engine, call, Loop(True, engine.num_calls))

    def engine_for_backward(self, engine: Engine, call: Call) -> Engine:
        """The engine that runs the backward of a call [2]; raises `StepOrderError` if the step has been closed."""
        if (latest := self.engine()) is not None and latest is not engine:
            if not latest.open.may_be_repeated:
                latest.refuse_given_up(call.executor)
            return latest
        number, is_given_up = engine.open.number_in_backward, call.executor not in engine.open
        is_several = number > 1 or (is_given_up and engine.open.may_be_repeated)
        if is_several and self.may_begin_again and (is_given_up or not engine.accumulates):
            return self.begin_again(engine, call)
        if number > 1 and not (engine.accumulates or engine.closed):
            raise StepOrderError(
                f"this backward comes to {number} calls of the model. The first step of this run had one backward of "
                f"one call, so updates run beside it. Nothing was updated. {KEPT}: start the run again"
            )
        return engine

    def engine_for_gradient(self, engine: Engine, *, zeroed: bool) -> Engine:
        """The engine that adds a gradient from outside to the sums of the step [3]; zeroed: the sums are dropped.

        Later steps refuse such a gradient if the first one had none.
        """
        engine.tiers.check()
        if engine.ranks is not None:
            raise ReleasedParameterError(
                "a gradient has come to a parameter that several ranks share from a computation outside of the "
                "compiled model, or in p.grad, which several ranks do not support: compute this under torch.no_grad(), "
                "or inside of the model's forward"
            )
        if not engine.accumulates:
            calls = [*engine.open.undone, *(call for call, _ in self.done)]
            if not (calls and self.may_begin_again):
                raise ReleasedParameterError(
                    "a gradient has come to a parameter that lives on the tiers from a computation outside of the "
                    "compiled model, or in p.grad, but the first step of this run had none, so the parameter only "
                    "takes gradients from the compiled model's own backward. Compute this under torch.no_grad(), call "
                    'the compiled model, or give options={"accumulate": True}, with which updates wait, and start the '
                    "run again" + watch().why(engine.optimizer.group_of if engine.optimizer else ())
                )
            return self.engine_for_gradient(self.begin_again(engine, calls[0]), zeroed=zeroed)
        if engine.record is None or zeroed:
            engine.begin_sums()
        return engine

    def engine_for_step(self, engine: Engine, record: StepRecord, *, dropped: bool) -> Engine:
        """The engine that closes a step with the current settings and norm [4]; dropped: its gradients were dropped.

        Many scripts set the learning rate for a step after its backward, or drop the gradients if a loss jumps. An
        encoder before the model gets its gradients after the model does, and they count in the norm that clips. Updates
        that have waited take all this into account. Raises `StepOrderError` if they have run, and the step cannot begin
        again.
        """
        optimizer, placement = engine.optimizer, engine.placement
        assert optimizer is not None, "it closes the step"
        now = optimizer.as_set()
        record.number = now.number  # where a state was loaded since, another
        is_norm_new = placement.clip and record.grad_norm != record.scale_norm
        changed = _changed(record, now, anew=self.may_begin_again) or (LATE if is_norm_new else "")
        if not (changed or dropped):
            return engine
        news = "dropped gradients" if dropped else "new gradients" if is_norm_new else "new settings"
        engine.announce(news, f", {now.told_settings}")
        if placement.has_early and self.may_begin_again:
            return self.begin_again(engine, self.done[0][0], ends=True)
        is_scale_kept = record.max_grad_norm == now.max_grad_norm and not is_norm_new
        rolls_back = placement.rolls_back(confirmed=record.confirmed) and (is_scale_kept or dropped)
        waits = not placement.has_early or rolls_back
        if not (waits or (record.skipped and not is_norm_new)):  # else they have run, and what came since is not finite
            what = "the gradients were dropped after the backward" if dropped else changed
            give = "Give" if dropped or what is LATE else "Set it before the backward or after step(), or give"
            raise StepOrderError(
                f"{what}: updates have already run beside the backward, because the first step did not show that they "
                f"must wait. {give} "
                'options={"accumulate": True}, with which updates wait for step(), and start the run again'
            )
        record.is_dropped, record.hypers = dropped and waits, now.hypers
        if not is_scale_kept:
            record.max_grad_norm = now.max_grad_norm
            record.clip()
        return engine

    def engine_with_room(self, engine: Engine, call: Call, error: MemoryBudgetError) -> Engine:
        """An engine with memory for a larger call than the first, or for one more [5]; else raises the error."""
        if self.may_begin_again and engine.open.is_of_this_thread:
            with suppress(MemoryBudgetError):
                return self.begin_again(engine, call, Loop(engine.accumulates, engine.num_calls + bool(engine.open)))
        raise error

    @property
    def may_begin_again(self) -> bool:
        """Whether the step is under way, and all of its first values and states are there."""
        if (engine := self.engine()) is None or engine.sums.has_outside or engine.closed:
            return False
        if _has_uncommitted(engine):
            return False  # another engine would take up what the commit has, without these changes
        return may_plan_again(engine.ranks, engine.placement.layout.schedule)

    def begin_again(self, engine: Engine, call: Call, loop: Loop | None = None, *, ends: bool = False) -> Engine:
        """Another engine in place of one, with what the step has done so far.

        call: one of the step; the one that reads most parameters is planned for. Parameters that only an evaluation has
        read return to where they were. loop: the script's; None: updates wait, and all calls that have had no backward
        have memory at the same time. ends: the step ends, and is skipped if its gradients were dropped; a step that
        goes on has none of the dropped gradients. Raises `MemoryBudgetError` if there is no room, `StepOrderError` if
        other parameters are trained now; then the engine is unchanged.
        """
        calls = (call, *(other for other, _ in self.done))
        for each in calls:
            _refuse_changed(each)
        call = max(calls, key=lambda each: len(engine.spans_of(each.args)))
        optimizer = engine.optimizer
        assert optimizer is not None, "its first step is under way"
        drops = not ends and is_zeroed(optimizer.group_of)
        loop = loop or Loop(True, max(engine.open.most_undone, engine.num_calls))
        prepared = plan_tiers(optimizer, call, engine.planning.planner.whole_nbytes, loop)
        optimizer.loop = loop
        if drops:
            self.done.clear()
            forget_gradients(optimizer.group_of)
        waits = "updates wait for step(), as several backwards, settings or gradients come before it"
        words = [waits] if loop.accumulates else []
        words += [f"{loop.num_calls} calls are between forward and backward at a time"] if loop.num_calls > 1 else []
        words = words or ["a call is no evaluation, is larger than the first, or reads other parameters"]
        log.info("in this loop %s: the first step starts again", ", and ".join(words))
        had = engine.spans
        try:
            engine.end("optimizer.step() was called")  # until then its calls go where the step goes
        finally:  # also where the user interrupts it: the first step may begin once more
            optimizer.state.update(optimizer.first_states)
        done, self.done = self.done, []
        successor = self.begin(optimizer, call, prepared)
        roll_back(had)  # what it has not taken
        if successor.durable is not None:
            successor.durable.take_random_state()  # random numbers go on already
        with successor.tiers.whole():  # or a later step() would find no gradients, and pass over them
            for _, repeat in done:
                repeat(successor)
        return successor

    def note(self, call: Call, repeat: Callable[[Engine], None], *, adds: bool) -> None:
        """A call has had its backward. repeat: runs both on another engine; adds: earlier gradients are not dropped."""
        if self.may_begin_again:
            self.done = [*(self.done if adds else ()), (call, repeat)]

    def close(self) -> None:
        """`optimizer.step()` has closed it."""
        self.engine = lambda: None
        self.done.clear()

    def let_go(self) -> None:
        """Drop the first values, once the updates of the step are known to have succeeded."""
        if self.engine() is None and self._values:
            while self._values:
                residency = self._values.pop()
                if residency.tiered is not None:  # else an evaluation has read it, and no call of the step
                    residency.stash = None
            trim()


def _bring_states(optimizer: Optimizer, engine: Engine) -> None:
    """Give an engine and its optimizer the same states: those that were loaded, or those of the resumed run."""
    durable = engine.durable
    former = durable.former if durable is not None else None
    optimizer.kept.values_have_come()
    if durable is None or former is None:
        optimizer.load_into_engine()
    elif optimizer.kept.step is None:  # else `resume` has done so; what was set since then counts
        optimizer.go_on(former)
        optimizer.steps.missed = durable.missed(optimizer, former)
        optimizer.kept.step, optimizer.kept.num_batches = former.step, former.position
        if optimizer.kept.user is None:
            optimizer.kept.user = former.user
    for parameter in filter(optimizer.trained_span, optimizer.group_of):
        # In place of one that was loaded, where the run has its own; or the engine before had no use for it.
        if former is not None or parameter not in optimizer.state:
            optimizer.show_state(parameter)


def _has_uncommitted(engine: Engine) -> bool:
    """Whether the run was resumed from a commit, and the user has changed values since."""
    return engine.is_changed and engine.durable is not None and engine.durable.goes_on


def _refuse_idle(call: Call) -> None:
    """Raise `OptimizerError` where a step behind an evaluation, with which ranks have settled all, has no gradient for
    a trained parameter.
    """
    for index in call.models[0].split.idle:
        if isinstance(call.args[index], torch.nn.Parameter):
            raise OptimizerError(
                f"{call.compilation.captured.inputs[index].path} gets no gradient in this first step, which the "
                "evaluation ahead of it has not shown: on several ranks moments and weight decay would move it. Start "
                "again, and freeze it, requires_grad_(False), or let the first evaluation follow the first step"
            )


def _changed(record: StepRecord, now: StepRecord, *, anew: bool) -> str:
    """In words, a setting whose value has changed since the backward began; anew: or was assigned again."""
    pairs = [("max_grad_norm", record.max_grad_norm, now.max_grad_norm)]
    for number, (before, after) in enumerate(zip(record.groups, now.groups, strict=True)):
        pairs += [(f'"{key}" of param group {number}', value, after[key]) for key, value in before.items()]
    for name, value, set_since in pairs:
        is_assigned = set_since is not value and not isinstance(value, list)  # a record has copies of lists
        if set_since != value or (anew and is_assigned):
            return f"{name} was set to {set_since!r} after the backward, and {value!r} before"
    return ""


def _refuse_changed(call: Call) -> None:
    """Raise `StepOrderError` if `requires_grad` of parameters has changed since the forward of a call."""
    trained = set(call.trained_numbers)
    offloaded = ((number, arg) for number, arg in enumerate(call.args) if is_offloaded(arg))
    with without_overrides():
        changed = [arg for number, arg in offloaded if arg.requires_grad != (number in trained)]
    if changed:
        raise StepOrderError(
            f"requires_grad of a parameter of shape {tuple(changed[0].shape)} was changed between the forward and "
            "optimizer.step(), but this first step has to begin again, because its updates have to wait: change it "
            'before the model is called or after optimizer.step(), or give options={"accumulate": True}'
        )
