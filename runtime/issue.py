"""tiered: runs a step program whose data is on the tiers: every operation on its lane, as soon as it can start.

The program's order is the order of issue. The thread that walks through it gives each transfer and update to its lane
with the tickets it has to wait for, takes memory for what is about to be defined, and computes itself. So a program
that has its transfers early enough computes without a wait.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from gs_compile.placement.placement import Placement
from gs_compile.program.ir import Op, Program, Unit, Value, homed
from gs_compile.program.reference import Units, perform
from gs_compile.runtime.coordinators import Binding
from gs_compile.runtime.executor import turn
from gs_compile.runtime.lanes import Ticket
from gs_compile.runtime.optimizer import StepRecord
from gs_compile.runtime.tiers import Board, Tiers
from gs_compile.runtime.values import Gathered, Gradient, Kept, Region

UNIT_KINDS = frozenset({"w", "s", "dw", "scale"})  # of units, not of micro-batches


@dataclass(frozen=True)
class Bindings:
    """How one capture of the model reads its inputs: the parameters of each unit, and what is no parameter."""

    parameters: Mapping[Unit, Sequence[Binding]]
    others: Mapping[Unit, Mapping[int, torch.Tensor]]


class TieredExecutor:
    """One step under way. `record` is of this step's own updates; late ones are of the step in `tiers.pending`."""

    def __init__(
        self,
        tiers: Tiers,
        placement: Placement,
        program: Program,
        units: Units,
        inputs: Mapping[Value, Any],
        bindings: Bindings,
        record: StepRecord | None = None,
    ) -> None:
        self.tiers = tiers
        self.placement = placement
        self.program = program
        self.units = units
        self.bindings = bindings
        self.record = record
        self.board = Board()
        for value, content in inputs.items():
            self.board.define(value, content)
        self._before = tiers.pending
        self._factor: torch.Tensor | None = None  # of sums that are scaled once they are complete
        self._device = tiers.setting.device

    @property
    def env(self) -> dict[Value, Any]:
        """What is alive of the step's own."""
        return self.board.contents

    def forward(self) -> None:
        self._run(0, turn(self.program))

    def backward(self) -> None:
        self._run(turn(self.program), len(self.program.ops))

    def scale(self, factor: torch.Tensor) -> None:
        """Multiply all gradients there are: between forward and backward, the head's own.

        In the horizontal order there are sums of whole micro-batches by then, some of them on their way: all sums are
        multiplied when they are complete.
        """
        if self.placement.order == "horizontal":
            self._factor = factor
            return
        for value, content in list(self.env.items()):
            for ticket in self.board.idle(value):
                ticket.wait()
            if value.kind in ("dw", "dside"):
                content.scale(factor)
            elif value.kind == "dx" and isinstance(content, Kept):
                assert content.flat is not None
                content.flat.mul_(factor.cpu())
            elif value.kind == "dx":
                self.board.define(value, content * factor)

    def close(self) -> None:
        """Let go of a step that will not be finished."""
        for value in list(self.env):
            self.board.free(value)

    # Issuing ---------------------------------------------------------------------------------------------------------

    def _run(self, start: int, stop: int) -> None:
        self._computing = False
        at = start
        try:
            for at in range(start, stop):
                self.tiers.failure.check()
                self._issue(self.program.ops[at])
        except BaseException as error:
            forward = self._computing and stop == turn(self.program)
            if forward and self.tiers.failure.first is None:  # the model's own error: nothing of the run is lost
                self._give_up(at)
            else:
                self.tiers.fail(error)
            raise

    def _give_up(self, at: int) -> None:
        """End a forward that has failed: late updates still run, the rest is let go of."""
        for op in self.program.ops[at : turn(self.program)]:
            values = (*op.reads, *op.into, *op.results)
            is_gone = op.verb == "free" and op.reads[0] not in self._on(op.reads[0]).contents
            if all(value.kind in UNIT_KINDS for value in values) and not is_gone:
                self._issue(op)
        self.close()

    def _issue(self, op: Op) -> None:
        match op.lane:
            case "memory" if op.verb == "free":
                self._on(op.reads[0]).free(op.reads[0])
            case "memory" if op.verb == "commit":
                self._commit(op)
            case "memory":
                self._hand(op)
            case "compute":
                self._compute(op)
            case _:
                self._submit(op)

    def _on(self, value: Value) -> Board:
        return self.tiers.board if value in self.tiers.homes else self.board

    def _content(self, value: Value) -> Any:
        return self._on(value).contents[value]

    def _hand(self, op: Op) -> None:
        """What takes no time: memory, and old memory under a new name."""
        contents: list[Any] = []
        reads = [self._content(value) for value in op.reads]
        ready = [ticket for value in op.reads for ticket in self._on(value).ready(value)]
        for value in op.results:
            match op.verb, value.kind:
                case "gather", _:
                    unit = value.unit
                    assert unit is not None
                    others = self.bindings.others.get(unit, {})
                    gathered = self.tiers.parameters.gather(op, reads, self.bindings.parameters[unit], others)
                    contents.append(gathered)
                case "empty", _:
                    contents.append(self.tiers.parameters.allocate(value))
                case "zeros", "dw" if value.unit in self.placement.by_unit:
                    assert value.unit is not None
                    contents.append(self.tiers.optimizer.zeros(value, self.bindings.parameters[value.unit]))
                case "zeros", _:
                    contents.append(self.units.zeros(value))
                case "alias", "dw" if value.tier == "device":
                    assert value.unit is not None
                    contents.append(
                        self.tiers.optimizer.keep_sum(value, reads[0], self.bindings.parameters[value.unit])
                    )
                case "alias", "dw":
                    contents.append(self.tiers.optimizer.keep(value, reads[0]))
                case _:
                    contents.append(self.tiers.inter_layer.keep(value, reads[0]))
        for value, content in zip(op.results, contents, strict=True):
            self._on(value).define(value, content, _joined(op, ready))

    def _commit(self, op: Op) -> None:
        """Make shadow copies the homes if they are confirmed; parameters in a zone are copied, beside what follows."""
        assert self.record is not None
        board = self.tiers.board
        for home, other in zip(op.into[::2], op.into[1::2], strict=True) if self.record.confirmed else ():
            if home.kind == "s" or home.tier == "ssd" or self.placement.separate:
                board.swap(home, other)
                continue
            contents = board.contents[home], board.contents[other]
            ticket = self.tiers.lane("cpu").submit(
                f"commit {home}",
                partial(self.tiers.parameters.commit, *contents),
                board.idle(home) + board.ready(other),
                nbytes=0,
                kind="w",
                stage=str(op.stage),
            )
            board.change(home, ticket)
            board.use(other, ticket)

    def _compute(self, op: Op) -> None:
        self._computing = True
        stream = self._device.current_stream()
        for value in (*op.reads, *op.into):
            for ticket in self._on(value).ready(value):
                ticket.join(stream)
        for value in op.into:
            for ticket in self._on(value).idle(value):
                ticket.join(stream)
        start = time.perf_counter()
        results = self._result(op)
        self.tiers.trace.add("compute", _name(op), start, time.perf_counter(), 0, op.verb, str(op.stage))
        launched = self._launched(stream)
        for value, result in zip(op.results, results, strict=True):
            self._on(value).define(value, result, launched)
        if launched is not None:
            for value in op.reads:
                self._on(value).use(value, launched)
            for value in op.into:
                self._on(value).change(value, launched)
        self._computing = False

    def _result(self, op: Op) -> tuple[Any, ...]:
        match op.verb:
            case "norm":
                assert self.record is not None
                assert op.reads[0].unit is not None
                if self._factor is not None:
                    self._content(op.reads[0]).scale(self._factor)
                return (self.tiers.optimizer.norm(op.reads[0].unit, self._content(op.reads[0]), self.record),)
            case "clip":
                assert self.record is not None
                self.record.clip()
                return (self.record,)
        reads = [_for_units(self._content(value)) for value in op.reads]
        return perform(op, self.units, reads, [self._content(value) for value in op.into])

    def _launched(self, stream: Any) -> Ticket | None:
        """On a stream: a ticket for all that was launched so far. Elsewhere the computation is over."""
        if stream is None:
            return None
        ticket = Ticket("compute")
        ticket.event = self._device.record(stream)
        ticket.finish()
        return ticket

    def _submit(self, op: Op) -> None:
        reads = [self._content(value) for value in op.reads]
        after = [ticket for value in op.reads for ticket in self._on(value).ready(value)]
        after += [ticket for value in op.into for ticket in self._on(value).idle(value)]
        targets = [self._allocate(value, source) for value, source in zip(op.results, _sources(op, reads), strict=True)]
        targets += [self._content(value) for value in op.into]
        if op.lane == "h2d":  # the memory was someone else's on the stream that computes
            launched = self._launched(self._device.current_stream())
            after += [launched] if launched else []
        kind, record = homed((*op.results, *op.into, *op.reads)[0]).kind, self._record_of(op)

        def run() -> None:
            if kind in ("x", "dx"):
                self.tiers.inter_layer.carry_out(op, reads, targets)
            elif kind == "w" and op.verb != "update":
                self.tiers.parameters.carry_out(op, reads, targets, self.placement.num_pieces)
            else:
                self.tiers.optimizer.carry_out(op, reads, targets, record)

        ticket = self.tiers.lane(op.lane).submit(
            _name(op), run, after, nbytes=self._nbytes(op, targets), kind=kind, stage=str(op.stage)
        )
        for value in op.reads:
            self._on(value).use(value, ticket)
        for value, content in zip(op.results, targets, strict=False):
            self._on(value).define(value, content, ticket)
        for value in op.into:
            self._on(value).change(value, ticket)

    def _allocate(self, value: Value, source: Any) -> Any:
        if value.kind in ("x", "dx"):
            return self.tiers.inter_layer.allocate(value, source, self.placement)
        if value.kind == "w":
            return self.tiers.parameters.allocate(value)
        if value.kind == "dw" and not value.part:
            assert value.unit is not None
            return self.tiers.optimizer.allocate_sum(value, source, self.bindings.parameters[value.unit])
        return self.tiers.optimizer.allocate(value)

    def _record_of(self, op: Op) -> StepRecord | None:
        """Whose update: a late one belongs to the step before. What an early one reads is what is known by now."""
        if op.verb != "update":
            return None
        unit = self.tiers.unit_of(op)
        is_late = unit.group_of(op.into[0]).when == "late" or any(value.kind == "scale" for value in op.reads)
        record = self._before if is_late else self.record
        assert record is not None, f"{_name(op)}: no step has left this update"
        if is_late:
            return record
        if not record.skipped and not self.placement.speculative:
            record.updated.append(unit.unit)
        return replace(record)

    def _nbytes(self, op: Op, targets: Sequence[Any]) -> int:
        """What the operation moves."""
        if op.verb == "update":
            return 0
        if op.results and op.results[0].piece is not None:
            start, stop = self.tiers.parameters.share(op.results[0], self.placement.num_pieces)
            return (stop - start) * self.tiers.setting.unit(op.results[0]).itemsize
        return sum(_size(target) for target in targets)


def _sources(op: Op, reads: Sequence[Any]) -> Sequence[Any]:
    """What each result is like: the read it corresponds to, or the one they all come from."""
    return reads if len(reads) == len(op.results) else [reads[0] if reads else None] * len(op.results)


def _for_units(content: Any) -> Any:
    return content.tensors if isinstance(content, Gathered) else content


def _size(content: Any) -> int:
    if isinstance(content, Region):
        return content.nbytes
    if isinstance(content, Kept):
        return content.like.untyped_storage().nbytes()
    if isinstance(content, torch.Tensor):
        return content.nbytes
    if isinstance(content, Gradient):
        return content.flat.nbytes
    return content.tensor.nbytes if content is not None else 0


def _joined(op: Op, tickets: Sequence[Ticket]) -> Ticket | None:
    """One ticket for all of `tickets`."""
    waiting = [ticket for ticket in tickets if not ticket.done]
    return _All(op, waiting) if waiting else None


class _All(Ticket):
    """Done when all of several are."""

    def __init__(self, op: Op, tickets: Sequence[Ticket]) -> None:
        super().__init__(_name(op))
        self.tickets = tickets

    @property
    def done(self) -> bool:
        return all(ticket.done for ticket in self.tickets)

    def wait(self) -> None:
        for ticket in self.tickets:
            ticket.wait()

    def join(self, stream: Any) -> None:
        for ticket in self.tickets:
            ticket.join(stream)


def _name(op: Op) -> str:
    first = (*op.results, *op.into, *op.reads)[0]
    return f"{op.verb} {op.unit}_{op.micro_batch}" if op.micro_batch is not None else f"{op.verb} {first}"
