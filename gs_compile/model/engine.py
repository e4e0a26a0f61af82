"""engine: a model whose parameters and optimizer states live on the tiers, from the first call of its backend on.

begin        one call of the model: a program with its transfers, on an executor
forward      its first half, together with the late updates of the step before
backward     the rest of the program, with the optimizer's current settings
finish       optimizer.step() has closed the step: late updates may run in the next forward
flush        run all pending updates: before an evaluation, a save or a read

Parameters and optimizer hold the engine, and it holds neither: when they are gone, it closes the tiers, and its threads
and files end.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gs_compile.codegen.layout import bind, tied_units
from gs_compile.errors import MemoryBudgetError, OptimizerError, StepOrderError, StorageFullError
from gs_compile.model.call import Call
from gs_compile.model.commits import Durable, give_back_rest
from gs_compile.model.first_call import Prepared, open_tiers, plan_tiers, refuse_inputs, refuse_unread
from gs_compile.model.gradients import forget_gradients, is_zeroed, mark_gradient_unavailable, take_given
from gs_compile.model.idle import Idle
from gs_compile.model.in_memory import begin
from gs_compile.model.moving import move_in, take_up
from gs_compile.model.open_calls import OpenCalls
from gs_compile.model.optimizer import Optimizer
from gs_compile.model.parameter_store import ParameterStore, in_turn
from gs_compile.model.reporting import report_on, tell_what_calls_cost
from gs_compile.model.residency import hand_back, refuse_lost, residency_of
from gs_compile.placement.placement import Placement, StepContext
from gs_compile.program.ir import Program, Unit, Value
from gs_compile.runtime.coordinators import Bindings
from gs_compile.runtime.executor import Executor
from gs_compile.runtime.issue import TieredExecutor
from gs_compile.runtime.ranks import failing_together
from gs_compile.runtime.spans import Slice
from gs_compile.runtime.step_record import StepRecord
from gs_compile.runtime.sums import Sums
from gs_compile.runtime.units import CompiledUnits

AGAIN = "the model was called again"
KEPT = (
    "Several calls can wait for their backward only if the first step of the run had several backwards, or with "
    'options={"accumulate": True}'
)


class Beginning(Protocol):
    """The first step of a run, as an engine and its calls use it (`first_step.FirstStep`)."""

    def engine_for_training(self, engine: Engine, call: Call) -> Engine: ...
    def engine_for_forward(self, engine: Engine, call: Call) -> Engine: ...
    def engine_for_backward(self, engine: Engine, call: Call) -> Engine: ...
    def engine_for_gradient(self, engine: Engine, *, zeroed: bool) -> Engine: ...
    def engine_for_step(self, engine: Engine, record: StepRecord, *, dropped: bool) -> Engine: ...
    def engine_with_room(self, engine: Engine, call: Call, error: MemoryBudgetError) -> Engine: ...
    def note(self, call: Call, repeat: Callable[[Engine], None], *, adds: bool) -> None: ...
    def close(self) -> None: ...
    def let_go(self) -> None: ...


class Engine(ParameterStore):
    """One model's parameters, and the updates of them."""

    def __init__(self, optimizer: Optimizer, call: Call, first_step: Beginning, prepared: Prepared | None) -> None:
        """first_step: makes this engine; prepared: the result of `plan_tiers`, if it is known."""
        gc.collect()  # earlier models may still hold memory, which counts against the budget, and locks of storage
        self._optimizer = weakref.ref(optimizer)
        self.options, self.ranks, self.first_step = call.compilation.options, call.ranks, first_step
        self.open = OpenCalls()
        self.record: StepRecord | None = None  # of backwards that optimizer.step() has not closed yet
        self.num_backwards = 0  # of the step under way
        self._makes_way = False  # another engine takes its place
        self.snapshots: tuple[Program, ...] = ()  # of the program of the latest call
        self.accepted_factor = 1.0  # of the loss: no GradScaler's
        begun_with = prepared or plan_tiers(optimizer, call)
        layout, stored, self.planning = begun_with
        self.latest = self.planning.placement, self.planning.builder.shape  # of the latest call
        self.stepped = self.planning.planned_step, self.planning.placement  # the program of the latest backward
        tiers = open_tiers(begun_with, optimizer)
        try:
            super().__init__(tiers, self.options.storage[0], optimizer.components, optimizer.turn)
            self.sums = Sums(tiers)
            spans = {call.args[index]: span for index, span in layout.spans.items()}
            self._parameters = [weakref.ref(each) for each in spans]
            trained = {i: span for i, span in layout.spans.items() if call.args[i].requires_grad}
            self.idle = Idle(trained, call.models[0].split.idle, counts=self.ranks is None)
            self.began_to_train = call.training  # with the call that it begins with
            placed, plan = tuple(zip(layout.spans.values(), stored, strict=True)), self.planning.planned.facts
            told = placed, self.idle, plan, call.compilation.captured, call.compilation.buffers(call.args)
            self.durable = Durable(optimizer, tiers.commits, *told) if tiers.commits else None
            if self.durable is not None and self.durable.former is not None:
                rest = take_up(self, spans, stored)
                give_back_rest(optimizer, rest, call.args, self.durable.buffers)
            else:
                move_in(self, spans, self.planning.planner.whole_nbytes, self.options.storage[0])
            self.reporter = report_on(self.planning, tiers, sum(span.numel for span in spans.values()))
        except BaseException:  # also if the user has interrupted it: no later call may use half of a run
            tiers.close()
            raise
        self.is_changed = False  # the user has changed a value or a state since the engine was made, or since commit()
        weakref.finalize(self, self.tiers.close).atexit = False

    @property
    def failed_at_start(self) -> bool:
        """Whether the run has ended before its first step, or another has taken its place, and all first values and
        states are there: it can begin again.
        """
        is_at_start = self._makes_way or not (self.num_steps or self.has_loaded_state)
        return self.closed and self.ranks is None and is_at_start

    @property
    def optimizer(self) -> Optimizer | None:
        return self._optimizer()

    @property
    def placement(self) -> Placement:
        return self.planning.placement

    @property
    def never(self) -> Set[Slice]:
        return self.idle.never

    @property
    def accumulates(self) -> bool:
        """Whether a step has several backwards, and updates wait for `optimizer.step()`."""
        return self.placement.accumulates

    @property
    def num_calls(self) -> int:
        """The number of open calls for which memory is planned."""
        return self.planning.planner.num_calls

    @property
    def room_nbytes(self) -> int:
        """The memory, of the tier that the model computes from, that steps leave of the budget."""
        device = self.tiers.setting.device
        if device.has_own_memory:
            return device.memory_nbytes()[0] // 2  # the other half for what is computed
        return max(0, self.planning.planner.whole_nbytes - self.tiers.slab.nbytes)

    # Steps -----------------------------------------------------------------------------------------------------------

    def begin(self, call: Call, inputs: Mapping[Value, Any]) -> TieredExecutor:
        """The executor of one call, with its program; raises `StepOrderError` if a step has not been closed.

        If calls that wait for their backward leave no room, they are given up.
        """
        self._refuse_unfinished()
        self.open.let_lost_go()
        models, args, units, shape = call.models, call.read, call.units, call.shape
        refuse_lost(args)
        spans = self.spans_of(args)
        if shape.training:
            self.refuse_masters()
            self.open.refuse_other_threads(has_gradients=self.record is not None)
            if not self.accumulates:
                self.open.abandon(AGAIN, by_call=True)  # its loss was never differentiated
        else:
            self.flush()
        bindings = bind(models[0].split, args, spans, self._units)
        tied = tied_units(models[0].split, spans)
        shape = replace(self.planning.shape(models[0], tied, training=shape.training), outside=shape.outside)
        if shape.training:
            refuse_unread(self.tiers.placement.by_unit, tied)
            read = (index for unit in models[0].split.units for index in unit.arguments)
            refuse_inputs(args, read, units.micro_batches[0].inputs)
            if self.reporter is not None:
                self.reporter.record.begin(self.optimizer.num_steps + 1 if self.optimizer is not None else 1)
        placement = self.planning.sized(models, shape)
        self.latest, self.reader = (placement, shape), None  # whose memory the step may need
        pending = self.tiers.pending if shape.training and placement.has_late else None
        marks = self.durable.marks(self.num_steps) if self.durable and shape.training else {}
        warm = shape.training and self.tiers.finds_carried(placement)
        self.snapshots = self.planning.snapshots(placement, shape, _after(pending, placement, warm=warm, **marks))
        arguments = self.tiers, placement, self.snapshots[-1], units, inputs, bindings
        try:
            if shape.training:
                self.open.refuse_full_device(self.snapshots[-1], self.planning.planner.whole_device_nbytes)
            return TieredExecutor(*arguments, number=self.open.free_number)
        except (MemoryBudgetError, StorageFullError) as error:  # files of one that waits serve another, too
            if not self.open or not shape.training or self.closed:
                raise
            self.open.abandon(f"{AGAIN}, and there is no room for both ({error.message})", by_call=True)
            return TieredExecutor(*arguments)

    def forward(self, executor: TieredExecutor, call: Call) -> None:
        """Run the forward half, and all late updates with it, even if the model's own code fails."""
        try:
            self.open.begin(executor, call)
        finally:
            if self.durable is not None:
                self.durable.end_call(training=call.training)
        self.first_step.let_go()

    def refuse_given_up(self, executor: Executor) -> None:
        """Raise `StepOrderError` if the call of a backward was given up."""
        self.tiers.check()
        if executor not in self.open:
            raise StepOrderError(
                f"this loss belongs to a step that was dropped when {self.open.refusal}: call backward before that, or "
                f"pass both batches in one call. {KEPT}"
            )

    @contextmanager
    def backward(
        self, executor: TieredExecutor, losses: Sequence[Tensor], reached: Collection[Slice], *, zeroed: bool = False
    ) -> Iterator[None]:
        """The backward half runs inside the block, with the optimizer's current settings.

        losses: those of the backward; reached: the parameters that get gradients; zeroed: the gradients of the step's
        earlier backwards were dropped. An error inside the block ends the run: the step has a part of its gradients.
        """
        record = self._new_record(losses, reached, zeroed=zeroed)
        self.announce("one more backward" if record.adds else "the backward", f", {record.told}")
        with self.tiers.whole():
            self._take(record, zeroed=zeroed)
            executor.record = record
            self.num_backwards += 1
            yield

    def _new_record(self, losses: Sequence[Tensor], reached: Collection[Slice], *, zeroed: bool) -> StepRecord:
        """The record of the current step, with the optimizer's current settings."""
        optimizer = self.optimizer
        if optimizer is None:
            raise OptimizerError("the optimizer of this model is gone, so the model cannot be trained: keep it")
        record = optimizer.begin_step()
        begin(optimizer.param_groups, record, self.ranks)
        record.losses = [self.tiers.setting.device.read(loss.double().sum()) for loss in losses]
        record.num_losses = len(losses)
        self.idle.tell(record, optimizer, reached)
        if self.record is not None and not zeroed:
            record.adds, record.earlier = True, (*self.record.earlier, *self.record.losses)
            record.idle &= self.record.idle
            record.num_losses += self.record.num_losses
            record.num_tokens = self.record.num_tokens
        return record

    def _take(self, record: StepRecord, *, zeroed: bool) -> None:
        """Make a record that of the current step; zeroed: see `backward`."""
        if zeroed and self.optimizer is not None:
            forget_gradients(self.optimizer.group_of)
        self.record = record

    def end_backward(self, executor: TieredExecutor, call: Call, repeat: Callable[[Engine], None]) -> None:
        """The backward of a call has run; repeat: runs the call and its backward on another engine."""
        self.open.end(executor, call)
        self.stepped = executor.program, executor.placement
        self.sums.counted()
        assert self.record is not None, "the backward has made it"
        self.record.num_tokens += call.num_tokens
        self.first_step.note(call, repeat, adds=self.record.adds)

    @in_turn
    def add_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a gradient from outside to the sums of the step, after what is given in `.grad`."""
        take_given([parameter])
        optimizer, home = self.optimizer, residency_of(parameter).home
        zeroed = is_zeroed([parameter]) and (optimizer is None or is_zeroed(optimizer.group_of))
        assert home is not None
        assert isinstance(home.store, Engine), "this one, or what has taken its place"
        engine = home.store.first_step.engine_for_gradient(home.store, zeroed=zeroed)
        span = residency_of(parameter).trained_span(engine)
        assert span is not None
        assert engine.record is not None, "sums are of a step"
        engine.idle.reach(engine.record, optimizer, {span})
        with engine.tiers.whole():
            engine.sums.add(span, gradient, engine.record)
        mark_gradient_unavailable(parameter)

    def begin_sums(self) -> None:
        """Begin a step with a gradient from outside; the gradients of its backwards so far are dropped."""
        self.flush()
        record = self._new_record([], (), zeroed=True)
        with self.tiers.whole():
            self.sums.clear()
            self._take(record, zeroed=True)

    def end(self, refusal: str) -> None:
        """Close the tiers, for another engine, and give up the parameters. refusal: the words for backwards of open
        calls.
        """
        self._makes_way = True
        self.open.abandon(refusal)
        self.record = None
        try:
            self.tiers.close()
        finally:  # also where the user interrupts it
            for parameter in self.spans:
                hand_back(parameter)

    def step_to_finish(self, *, dropped: bool) -> StepRecord | None:
        """The record of the step whose backward has run, for `finish` of the optimizer's engine, which may be another
        one afterwards. None: there was no backward. dropped: its gradients were dropped.
        """
        self.tiers.wait_for_commit()  # of the step before: a kill costs one closed step at most
        if (record := self.record) is None:
            return None
        if not self.num_backwards and dropped:
            self.record, self.sums.has_outside = None, False
            return None
        if not self.num_backwards:
            raise StepOrderError(
                "gradients have come only from outside of the compiled model: a step needs a backward of the model"
            )
        if (engine := self.first_step.engine_for_step(self, record, dropped=dropped)) is not self:
            return engine.step_to_finish(dropped=dropped)
        return record

    def finish(self, record: StepRecord) -> None:
        """Close a step; late updates may follow."""
        self.record = None
        record.predicted_seconds = self._predicted_seconds
        self.sums.end_step(record)
        self.num_steps += 1
        if self.num_steps == 1:
            tell_what_calls_cost(self.num_backwards, *self.stepped)
        self.num_backwards = 0
        self.first_step.close()
        self.open.abandon("optimizer.step() was called")
        if self.placement.has_late:
            self.tiers.leave(record)

    @property
    def _predicted_seconds(self) -> float:
        """The simulated seconds of the current step; nan if this step was not planned and simulated."""
        plan, is_planned = self.planning.planned.plan, self.stepped[1] is self.placement
        return plan.seconds if plan and plan.is_solved and is_planned and self.num_backwards == 1 else math.nan

    def flush(self, *, commit: bool = False) -> None:
        """Run all pending updates, as an evaluation or a read needs; `commit`: the last step is made durable."""
        self._refuse_unfinished()
        pending = self.tiers.pending
        durable = self.durable if commit or self.record is None else None  # within a step nothing is of the one before
        seals = durable is not None and durable.seals_between_calls(self.num_steps, always=commit)
        if pending is not None and (self.optimizer is not None and self.optimizer.orthogonalizes):
            self.announce("updates between steps")  # in which ranks exchange matrices
        if pending is not None or seals:
            self.tiers.let_carried_go()  # late updates also need its memory
            program = self.planning.flush(_after(pending, self.placement, seals=seals))
            nothing = Bindings(dict.fromkeys(self._units, ()), {})
            TieredExecutor(self.tiers, self.placement, program, CompiledUnits((), None), {}, nothing).backward()

    # Values ----------------------------------------------------------------------------------------------------------

    @in_turn
    def commit(self) -> None:
        """Return when the last step is durable, with all that belongs to it now."""
        self._refuse_unfinished()
        self.announce("a commit")
        with failing_together(self.ranks):  # the others wait on their lanes for this one's part in it
            self.open.abandon("optimizer.commit() was called")
            self.flush(commit=True)
            super().synchronize()
        self.is_changed = False

    @in_turn
    def synchronize(self) -> None:
        """Return when all updates are done and written; raises `StepOrderError` where a step is still to be closed."""
        self.flush()
        super().synchronize()
        self.first_step.let_go()

    @in_turn
    def write(self, span: Slice, values: Tensor) -> None:
        """A new value for a parameter; a step whose backward has not begun is given up."""
        self.flush()
        self.open.abandon("a parameter was given another value")
        super().write(span, values)
        self.is_changed = True

    @in_turn
    def load_state(self, span: Slice, state: Mapping[str, Any]) -> None:
        """An optimizer's state; a step whose backward has not begun is given up."""
        self.flush()
        if self.open.undone:  # given-up ones too, which could be repeated otherwise; an engine that begins has none
            self.open.abandon("a state of the optimizer was loaded")
        super().load_state(span, state)
        self.is_changed = True

    @property
    def _units(self) -> list[Unit]:
        return [unit.unit for unit in self.placement.units]

    @property
    def spans(self) -> dict[torch.nn.Parameter, Slice]:
        """The spans of all parameters of this store that are still alive."""
        alive = [each for reference in self._parameters if (each := reference()) is not None]
        return {alive[index]: span for index, span in self.spans_of(alive).items()}

    def spans_of(self, args: Sequence[Any]) -> dict[int, Slice]:
        """The spans of the arguments that are parameters of this store, by index."""
        homes = {i: residency_of(arg).home for i, arg in enumerate(args) if isinstance(arg, torch.nn.Parameter)}
        return {index: home.span for index, home in homes.items() if home is not None and home.store is self}

    def _refuse_unfinished(self) -> None:
        """Raise `StepOrderError` if a step has not been closed. One whose gradients were dropped is closed here."""
        self.tiers.check_late()
        if self.record is None or self.accumulates:
            return
        if self.num_steps and self.optimizer is not None and is_zeroed(self.optimizer.group_of):
            self.optimizer.close_step(is_late=True)  # without its gradients
            return
        early = self.placement.has_early and not self.placement.speculative
        if early and (self.record.updated or not self.record.skipped):
            found = "some parameters are updated and some are not. Call step() of the gs_compile optimizer first"
        else:
            found = "nothing is updated yet. Call step() of the gs_compile optimizer first, or drop all gradients"
        raise StepOrderError(
            f"a backward has run and optimizer.step() has not: {found}. The first step of this run had one backward, "
            "so updates run beside it: pass the model the whole batch in one call, or give "
            'options={"accumulate": True}, with which updates wait for optimizer.step(), and start the run again'
        )


def _after(pending: StepRecord | None, placement: Placement, **marks: bool) -> StepContext:
    """The context of a program that runs after a step; `pending`: the step's record, if it has pending late updates."""
    redo = pending is not None and placement.rolls_back(confirmed=pending.confirmed)
    return StepContext(late=pending is not None, redo=redo, **marks)
