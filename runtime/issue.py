"""issue: runs a step program whose data is on the tiers: every operation on its lane, as soon as it can start.

The program's order is the order of issue. The issuing thread gives each transfer and update to its lane, with the
tickets that it has to wait for, and computes itself. An operation that writes to a value waits for the former users of
its memory. So a program that has its transfers early enough computes without waits. If the device computes
asynchronously, the thread is one computation ahead, or some milliseconds of short ones (`ahead.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from gs_compile.errors import MemoryBudgetError
from gs_compile.machine import format_bytes
from gs_compile.placement.device_memory import DeviceMemory
from gs_compile.placement.kinds import is_of_units
from gs_compile.placement.placement import Placement
from gs_compile.placement.users import Users
from gs_compile.program.ir import Op, Program, Value
from gs_compile.runtime.codecs import dense
from gs_compile.runtime.coordinators import Bindings
from gs_compile.runtime.executor import Executor
from gs_compile.runtime.handlers import Handlers
from gs_compile.runtime.lanes import Ticket, clear_frames, join_all
from gs_compile.runtime.signals import watch
from gs_compile.runtime.slab import Allocation
from gs_compile.runtime.step_record import StepRecord
from gs_compile.runtime.stream import Event, Stream
from gs_compile.runtime.tiers import Tiers, used_within_step
from gs_compile.runtime.trace import Label
from gs_compile.runtime.units import CompiledUnits
from gs_compile.runtime.values import ValueTable, unfinished


class TieredExecutor(Executor):
    """One step under way. `record` is for this step's own updates; late ones belong to the step in `tiers.pending`."""

    def __init__(
        self,
        tiers: Tiers,
        placement: Placement,
        program: Program,
        units: CompiledUnits,
        inputs: Mapping[Value, Any],
        bindings: Bindings,
        number: int = 0,
    ) -> None:
        """number: distinguishes steps that are under way at the same time, which have their own checkpoints on SSD.

        Raises `MemoryBudgetError` if another step is under way and both do not fit host memory, and `StorageFullError`
        if SSD has no room for the files of this step.
        """
        super().__init__(program, units, {})
        self.number = number
        self.tiers = tiers
        self.placement = placement
        self.values = ValueTable(tiers.held)
        self.env = self.values.contents
        self.give(inputs)
        self.record: StepRecord | None = None
        self._homes = tiers.homes | (placement.carried_values if program.trains else frozenset())
        self._before = tiers.pending
        self._factor: torch.Tensor | None = None  # that multiplies gradient sums once they are complete
        self._device = tiers.setting.device
        self._stream: Stream | None = None  # of this thread, that of a half of the step
        tiers.make_files(program, placement, number)
        self._segment = tiers.segment(program)
        self._places = tiers.places(program, placement)
        self._handlers = Handlers(tiers, placement, units, bindings, number)
        self._on_device = program.device and DeviceMemory(program.device, _has_left, tiers.ended_on_device)

    def give(self, values: Mapping[Value, Any]) -> None:
        for value, content in values.items():
            self.values.define(value, content)

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply all gradients that there are: between forward and backward, those of the head.

        In a micro-batch-major program there are sums of whole micro-batches by then, some of them in transfers: all
        sums are multiplied when they are complete.
        """
        if self.placement.by_micro_batch:
            self._factor = factor
            return
        self._stream = self._device.current_stream()
        for value, content in list(self.env.items()):
            if value.kind not in ("dw", "dside", "dx"):
                continue
            join_all(self.values.users.idle(value), None)
            if value.kind == "dx" and value.tier == "device":
                self.values.define(value, content * factor, self._launched())
                continue
            if value.tier == "host":
                content.mul_(factor.cpu())
            else:
                content.scale(factor)
            for ticket in self._launched():
                self.values.users.change(value, ticket)
        self.units.scale(factor)

    def backward(self) -> None:
        super().backward()
        if self._factor is not None:  # `norm` has scaled the sums
            self.units.of_batch.scale(self._factor)

    def close(self) -> None:
        """Release a step that will not be finished."""
        for value in list(self.env):
            self.values.free(value)
        self._keep_memory(waits=False)
        self._segment = self.tiers.slab.empty

    def _keep_memory(self, *, waits: bool) -> None:
        """Keep the step's host memory for its backward, or release it. An evaluation changes nothing: it may have run
        in the memory of a step that waits for its backward.
        """
        if self.program.trains:
            self._segment.waits = waits

    # Issuing ---------------------------------------------------------------------------------------------------------

    def _run(self, start: int, stop: int) -> None:
        if not start and self._before is not self.tiers.pending:  # a handler has made the late updates meanwhile
            raise used_within_step()
        self._computing, at = False, start
        try:
            self._stream = self._device.current_stream()
            self._device.set_clock()
            if self._device.has_own_memory:  # its backward is not on the main thread
                watch(self.tiers.failure)
            with self.tiers.failure.issued():
                for at in range(start, stop):
                    self.tiers.trace.issue(self.program, at)
                    self.tiers.failure.check()
                    self._wait_for_memory(at)
                    self._issue_at(at)
                self.tiers.pending = None  # late updates are issued with a program's first half
            self._keep_memory(waits=stop == self._half)
        except BaseException as error:
            if isinstance(error, torch.OutOfMemoryError):
                error = self._out_of_memory(self.program.ops[at], error)
            try:
                self._end(at, stop, error)
            finally:
                self.close()
            raise error

    def _end(self, at: int, stop: int, error: BaseException) -> None:
        """End the run after an error. After an error of the model's own code in a forward the run goes on without this
        step, if its late updates can still be issued.
        """
        forward = self._computing and stop == self._half and self.tiers.setting.ranks is None
        if forward and self.tiers.failure.first is None:
            with suppress(torch.OutOfMemoryError), self.tiers.whole():  # for late updates
                self._give_up(at)
                return
        self.tiers.fail(error)

    def _out_of_memory(self, op: Op, error: BaseException) -> MemoryBudgetError:
        """The error if the device has no memory for an operation. It holds no frames, and so none of their memory."""
        planned, (free, whole) = dict(self.program.peaks).get("device", 0), self._device.memory_nbytes()
        budget_error = MemoryBudgetError(
            f"{self._device.name} has no memory left in {op.name}: {format_bytes(whole - free)} of "
            f"{format_bytes(whole)} are in use, of which values are planned to take {format_bytes(planned)} at most. "
            "Give a smaller micro_batch_size; or device_memory= less, which leaves more for what code computes with; "
            "or end what else uses the device"
        )
        budget_error.__cause__ = error
        clear_frames(error)
        return budget_error

    def _give_up(self, at: int) -> None:
        """End a forward that has failed: its remaining late updates still run, and the rest is released."""
        for value in [value for value in self.env if not is_of_units(value)]:
            self.values.free(value)
        for index in range(at, self._half) if self._before is not None else ():
            op = self.program.ops[index]
            values = (*op.reads, *op.into, *op.results)
            is_gone = op.verb == "free" and op.reads[0] not in self._table(op.reads[0]).contents
            if all(map(is_of_units, values)) and not is_gone:
                self._issue_at(index)
        self.tiers.pending = None

    def _wait_for_memory(self, at: int) -> None:
        """Wait until the device has room for what an operation takes: lanes may lag behind this thread."""
        if self._on_device is not None and at in self._on_device.bound.takes:
            while users := self._on_device.awaited(at):
                join_all(users, None)
            self.tiers.held.let_go()
            self._on_device.take(at)

    def _issue_at(self, at: int) -> None:
        op = self.program.ops[at]
        match op.lane, op.verb:
            case "memory", "free":
                users = self._table(op.reads[0]).free(op.reads[0])
                if self._on_device is not None:
                    self._on_device.give(at, users)
            case "memory", "commit":
                assert self.record is not None
                if self.record.confirmed:
                    self._handlers.commit(op)
            case "memory", _:
                self._define(op, at)
            case "compute", _:
                self._compute(op)
            case "ssd_write", "seal":
                self._handlers.seal(op)
            case _:
                self._submit(op, at)

    def _table(self, value: Value) -> ValueTable:
        return self.tiers.values if value in self._homes else self.values

    def _content(self, value: Value) -> Any:
        return self._table(value).contents[value]

    def _users(self, value: Value) -> Users[Value, Ticket]:
        return self._table(value).users

    def _awaited(self, reads: Sequence[Value], into: Sequence[Value] = ()) -> list[Ticket]:
        """What an operation waits for."""
        ready = [ticket for value in reads for ticket in self._users(value).ready(value)]
        return ready + [ticket for value in into for ticket in self._users(value).idle(value)]

    def _define(self, op: Op, at: int) -> None:
        """Define values that need no lane: new memory, or old memory under a new name."""
        after = unfinished(self._awaited(op.reads))
        allocated, former = self._allocated(op, [self._content(value) for value in op.reads], at)
        if op.verb != "alias":  # `_allocated` has waited for these
            after += former
        for value, (content, allocation) in zip(op.results, allocated, strict=True):
            self._table(value).define(value, content, after, allocation=allocation)

    def _allocated(
        self, op: Op, reads: Sequence[Any], at: int
    ) -> tuple[list[tuple[Any, Allocation | None]], list[Ticket]]:
        """The content and allocation of each result, and the former users of its memory, for whom its writer waits.

        A result is made of the read at its own position, or all results are made of the first read.
        """
        sources = reads if len(reads) == len(op.results) else [reads[0] if reads else None] * len(op.results)
        allocated: list[tuple[Any, Allocation | None]] = []
        former: list[Ticket] = []
        for value, source, (where, offset, is_new) in zip(op.results, sources, self._places[at], strict=True):
            allocation = None
            if where is not None:
                fixed = self.tiers.slab.fixed
                allocation, users = (fixed if where.offset < fixed.nbytes else self._segment).begin(where, offset)
                former += users if is_new else ()
            if op.verb == "alias":
                join_all(former, None)  # a checkpoint is copied here and now
            content = self._handlers.allocate(op.verb, value, source, allocation.memory if allocation else None)
            allocated.append((content, allocation))
        return allocated, former

    # Computing -------------------------------------------------------------------------------------------------------

    def _compute(self, op: Op) -> None:
        self._computing, stream = True, self._stream
        join_all(self._awaited(op.reads, op.changes), stream)
        label = Label("compute", op.name, 0, op.verb, str(op.stage), self.tiers.trace.number)
        if stream is None:
            start = time.perf_counter()
            results, launched = self._results(op), list[Ticket]()
            self.tiers.trace.add(label, start, time.perf_counter())
        else:
            self.tiers.ahead.wait(self.tiers.failure.check)
            begin = self._device.record(stream)
            results = self._results(op)
            events = self._device.clock, begin, self._device.record(stream)
            launched = self._launched(events[-1])
            self.tiers.ahead.add((op.verb, op.stage.unit), *events)
            self.tiers.trace.add_later(label, *events)
        for value, result in zip(op.results, results, strict=True):
            self._table(value).define(value, result, launched)
        for ticket in launched:
            for value in op.reads:
                self._users(value).use(value, ticket)
            for value in op.changes:
                self._users(value).change(value, ticket)
        self._computing = False

    def _results(self, op: Op) -> tuple[Any, ...]:
        reads, into = [self._content(value) for value in op.reads], [self._content(value) for value in op.into]
        if op.verb == "decode":
            into[0].update({index: dense(values) for index, values in into[0].items()})
            return ()
        if op.verb not in ("norm", "clip"):
            return self._call(op, reads, into)
        assert self.record is not None
        if op.verb == "clip":
            self.record.clip()
            return (self.record,)
        if self._factor is not None:
            reads[0].scale(self._factor)
        return (self.tiers.optimizer.norm(op, reads[0], into, self.record),)

    def level(self, op: Op) -> int:
        share = self.placement.activations.share_of(Value("a", op.unit, op.micro_batch))
        assert share is not None, f"{op}: its layer saves its input alone"
        return share.level

    def _launched(self, event: Event | None = None) -> list[Ticket]:
        """A ticket for all computations launched so far, or before `event`; none if the device has no streams, as they
        have ended then.
        """
        if self._stream is None:
            return []
        event = event or self._device.record(self._stream)
        ticket = Ticket("compute", self.tiers.failure.check, is_in_order=True)
        ticket.event = event
        ticket.finish()
        return [ticket]

    # Transfers and updates -------------------------------------------------------------------------------------------

    def _submit(self, op: Op, at: int) -> None:
        if self.tiers.commits is not None:
            self.tiers.commits.note(op)
        reads = [self._content(value) for value in op.reads]
        allocated, former = self._allocated(op, reads, at)
        after = self._awaited(op.reads, op.changes) + former
        targets = [*(content for content, _ in allocated), *(self._content(value) for value in op.into)]
        if op.lane in ("h2d", "net"):
            after += self._launched()  # the memory was in use on the stream that computes
        if op.verb == "reduce_scatter" and self.record:
            self.record.share(op.reads[0].unit or 0, targets[1], self._factor)
        work: Callable[[], None]
        if op.verb == "prefetch" and self._begins_sums(op):
            work, targets = (lambda: None), []
        elif op.verb == "update":
            work = partial(self.tiers.optimizer.update, op, reads, targets, self._record_of(op))
        else:
            work = partial(self._handlers.move, op, reads, targets, self.record)
        ticket = self.tiers.submit(op, work, after, self._handlers.moved_nbytes(op, targets))
        if op.verb == "reduce_scatter":
            targets[1].ticket = ticket
        for value in op.reads:
            self._users(value).use(value, ticket)
        for value, (content, allocation) in zip(op.results, allocated, strict=True):
            self._table(value).define(value, content, (ticket,), allocation=allocation)
        for value in op.changes:
            self._users(value).change(value, ticket)

    def _begins_sums(self, op: Op) -> bool:
        """Whether an operation would fetch gradient sums in the first backward of a step: there are none yet."""
        is_sum = op.reads[0].kind == "dw" and bool(op.reads[0].part)
        return is_sum and self.record is not None and not self.record.adds

    def _record_of(self, op: Op) -> StepRecord:
        """The record of the step that an update belongs to: for a late one the step before. An early one gets what is
        known now.
        """
        unit = self.tiers.setting.unit(op.into[0])
        is_late = unit.is_late(op)
        record = self._before if is_late else self.record
        assert record is not None, f"{op.name}: no step has left this update"
        if is_late:
            return record
        if not self.placement.speculative:
            record.issued.append((unit.unit, len(record.squares)))
        return record.so_far()


def _has_left(user: Ticket) -> bool:
    """Whether later operations may take the device memory that an operation has used."""
    return user.is_in_order or user.done
