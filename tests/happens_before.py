"""A run on the CPU twin of a device, or on the CPU itself, with a record of which accesses to memory are ordered, and by
what.

Every thread and every stream has a vector clock. Waits for tickets and events, and launches, order what comes after
them behind what came before. Two accesses to the same bytes, one of which writes, must be ordered; else a run on a GPU
may read what is not there yet or overwrite what is still needed, whatever this run has come to.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from stream_twin import Twin, TwinTensor, span_of
from torch.utils._pytree import tree_leaves

from gs_compile.runtime import coordinators, stream, tiers
from gs_compile.runtime.commits import Commits
from gs_compile.runtime.coordinators import Activations, Parameters
from gs_compile.runtime.issue import TieredExecutor
from gs_compile.runtime.lanes import Lane, Ticket
from gs_compile.runtime.optimizer import OptimizerStep
from gs_compile.runtime.slab import Segment
from gs_compile.runtime.step_record import StepRecord
from gs_compile.runtime.storage.store import Extent
from gs_compile.runtime.values import Gradient, Saved, flat_of

Clock = dict[Any, int]


class Access(NamedTuple):
    name: str
    actor: Any
    time: int
    is_write: bool
    start: int
    stop: int


class RaceError(Exception):
    """Ends a run that is of no interest beyond its first race."""


class Checker:
    """Clocks, accesses, and the pairs of accesses that nothing orders. to_first: the first of them ends the run."""

    twin: Any  # whose accesses these are

    def __init__(self, *, to_first: bool = False) -> None:
        self.to_first = to_first
        self.clocks: dict[Any, Clock] = {}
        self.marks: dict[Any, Clock] = {}  # of events and tickets
        self.accesses: dict[Any, list[Access]] = {}  # by memory: the process's, or an extent
        self.races: set[str] = set()
        self.named: set[str] = set()  # the files of the last commit: they stay as they are until the next is made
        self.lock = threading.RLock()

    def clock(self, actor: Any = None) -> Clock:
        actor = threading.get_ident() if actor is None else actor
        return self.clocks.setdefault(actor, {actor: 0})

    def join(self, clock: Clock, other: Clock) -> None:
        for actor, time in other.items():
            clock[actor] = max(clock.get(actor, 0), time)

    def found(self, race: str) -> None:
        self.races.add(race)
        if self.to_first:
            raise RaceError(race)

    def mark(self, key: Any, actor: Any = None) -> None:
        """What `actor` has done so far is before whatever waits for `key`."""
        with self.lock:
            self.marks.setdefault(key, {})
            self.join(self.marks[key], self.clock(actor))

    def wait(self, key: Any, actor: Any = None) -> None:
        with self.lock:
            self.join(self.clock(actor), self.marks.get(key, {}))

    def access(self, name: str, spans: Sequence[tuple[Any, int, int]], *, is_write: bool, actor: Any = None) -> None:
        with self.lock:
            actor = threading.get_ident() if actor is None else actor
            clock = self.clock(actor)
            clock[actor] += 1
            for memory, start, stop in spans:
                kept = []
                for old in self.accesses.get(memory, []):
                    if old.start < stop and start < old.stop:
                        is_before = clock.get(old.actor, 0) >= old.time
                        if (is_write or old.is_write) and not is_before:
                            self.found(f"{old.name} and {name}")
                        is_inside = start <= old.start and old.stop <= stop
                        if is_before and is_inside and (is_write or not old.is_write):
                            continue  # whatever is behind this access is behind the old one too
                    kept.append(old)
                kept.append(Access(name, actor, clock[actor], is_write, start, stop))
                self.accesses[memory] = kept

    def foresee(self, name: str, content: Any, tickets: Sequence[Ticket], *, is_write: bool) -> None:
        """Whoever uses memory of the twin next, behind `tickets`, comes after what was computed there so far."""
        computing = self.twin.current_stream()
        with self.lock:
            clock = dict(self.clock())
            for ticket in tickets:
                self.join(clock, self.marks.get(ticket.event, {}))
            for start, stop in (span_of(each) for each in _tensors(content) if isinstance(each, TwinTensor)):
                for old in self.accesses.get("memory", []):
                    is_alike = old.actor is computing and old.start < stop and start < old.stop
                    if is_alike and (is_write or old.is_write) and clock.get(computing, 0) < old.time:
                        self.found(f"{old.name} and who comes after {name}")

    # What the twin tells ---------------------------------------------------------------------------------------------

    def launched(
        self, stream: Any, name: str, reads: Sequence[tuple[int, int]], writes: Sequence[tuple[int, int]]
    ) -> None:
        with self.lock:
            self.join(self.clock(stream), self.clock())
            for spans, is_write in ((reads, False), (writes, True)):
                self.access(name, [("memory", *span) for span in spans], is_write=is_write, actor=stream)

    def freed(self, stream: Any, block: Any, span: tuple[int, int]) -> None:
        """Memory was let go of by a thread that has marked `block`; whoever takes it orders nothing."""
        with self.lock:
            self.join(self.clock(stream), self.marks.pop(block))
            self.access("free", [("memory", *span)], is_write=True, actor=stream)

    def recorded(self, stream: Any, event: Any) -> None:
        with self.lock:
            self.join(self.clock(stream), self.clock())
            self.mark(event, stream)

    def stream_waits(self, stream: Any, event: Any) -> None:
        self.wait(event, stream)

    def thread_waited(self, event: Any) -> None:
        self.wait(event)

    # What lanes without a stream do ----------------------------------------------------------------------------------

    def work(self, name: str, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        for contents, is_write in ((reads, False), (writes, True)):
            spans = [_memory(content) for content in contents if not isinstance(content, StepRecord)]
            self.access(name, spans, is_write=is_write)


def _tensors(content: Any) -> list[torch.Tensor]:
    if isinstance(content, Gradient | Saved):
        return [flat_of(content)] if isinstance(content, Gradient) else list(content.tensors)
    return [each for each in tree_leaves(content) if isinstance(each, torch.Tensor)]


def _memory(content: Any) -> tuple[Any, int, int]:
    if isinstance(content, Extent):
        return content.label, 0, content.nbytes
    return ("memory", *span_of(content.flat if isinstance(content, Gradient) else content))


@contextmanager
def on_twin(seed: int = 0, delay_seconds: float = 1e-3, **how: bool) -> Iterator[Checker]:
    """Every run inside the block computes on a twin; accesses that nothing orders fail the block, by name."""
    checker = Checker(**how)
    checker.twin = twin = Twin(seed, delay_seconds, checker)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stream, "DEVICES", {"cpu": lambda _: twin})
        _watch_threads(checker, patched)
        _watch_lanes(checker, patched)
        _watch_launches(checker, patched)
        try:
            yield checker
        finally:
            twin.close()
    assert not checker.races, "nothing orders " + "; ".join(sorted(checker.races)[:5])


@contextmanager
def on_host(**how: bool) -> Iterator[Checker]:
    """Every run inside the block computes on the CPU; accesses to its slab that nothing orders fail the block, by name.

    Nobody sees that an operation is done: a wait orders, and not what lanes happen to have come to.
    """
    checker = Checker(**how)
    with pytest.MonkeyPatch.context() as patched:
        _watch_threads(checker, patched)
        patched.setattr(Ticket, "done", False)
        _watch_lanes(checker, patched)
        _watch_computation(checker, patched)
        yield checker
    assert not checker.races, "nothing orders " + "; ".join(sorted(checker.races)[:5])


def _watch_threads(checker: Checker, patched: Any) -> None:
    submit, finish, launched, done = Lane.submit, Ticket.finish, Ticket._wait_for_launch, Ticket.done

    def submit_marked(lane: Lane, name: str, run: Any, after: Any = (), **labels: Any) -> Ticket:
        key = object()
        checker.mark(key)

        def run_after() -> None:
            checker.wait(key)
            run()

        return submit(lane, name, run_after, after, **labels)

    def finish_marked(ticket: Ticket, error: BaseException | None = None) -> None:
        checker.mark(ticket)
        finish(ticket, error)

    def wait_for_launch(ticket: Ticket) -> None:
        launched(ticket)
        checker.wait(ticket)

    def is_done(ticket: Ticket) -> bool:
        found = done.fget(ticket)
        if found:
            checker.wait(ticket)
        return found

    patched.setattr(Lane, "submit", submit_marked)
    patched.setattr(Ticket, "finish", finish_marked)
    patched.setattr(Ticket, "_wait_for_launch", wait_for_launch)
    patched.setattr(Ticket, "done", property(is_done))


def _watch_lanes(checker: Checker, patched: Any) -> None:
    transfer, update, commit, home = coordinators.transfer, OptimizerStep.update, Parameters.commit, tiers.Tiers.at_home
    seal, scale = Commits._make, TieredExecutor.scale

    def watched_transfer(reads: Sequence[Any], targets: Sequence[Any]) -> None:
        checker.work(threading.current_thread().name, reads, targets)
        written = {target.label for target in targets if isinstance(target, Extent)} & checker.named
        for label in written:
            checker.found(f"the last commit and a write to {label}")
        transfer(reads, targets)

    def watched_update(self: OptimizerStep, op: Any, reads: Any, targets: Any, record: Any) -> None:
        checker.work(f"update {op.into[0]}", reads, targets)
        update(self, op, reads, targets, record)

    def watched_commit(self: Parameters, one: Any, other: Any) -> None:
        checker.work("commit", [other], [one])
        commit(self, one, other)

    def watched_home(self: tiers.Tiers, value: Any) -> Any:
        content = home(self, value)
        checker.work(f"read {value}", [content], [])
        return content

    def watched_seal(self: Commits, manifest_of: Any, writes: Any, issued: Mapping[Any, Extent], old: Any) -> None:
        checker.work("seal", [content for _, content in writes], [extent for extent, _ in writes])
        checker.work("seal", list(issued.values()), [])
        seal(self, manifest_of, writes, issued, old)
        checker.named = {extent.label for extent in issued.values()}

    def watched_scale(self: TieredExecutor, factor: Any) -> None:
        scale(self, factor)
        scaled = [value for value in self.env if value.kind in ("dw", "dside", "dx") and value.tier == "host"]
        if not self.placement.by_micro_batch:
            checker.work("scale", [], [self.env[value] for value in scaled])

    patched.setattr(TieredExecutor, "scale", watched_scale)
    patched.setattr(Commits, "_make", watched_seal)
    patched.setattr(coordinators, "transfer", watched_transfer)
    patched.setattr(OptimizerStep, "update", watched_update)
    patched.setattr(Parameters, "commit", watched_commit)
    patched.setattr(tiers.Tiers, "at_home", watched_home)


def _watch_launches(checker: Checker, patched: Any) -> None:
    """What is computed with is known to those who come after, on whatever stream they are."""
    compute, scale = TieredExecutor._compute, TieredExecutor.scale

    def foresee(self: TieredExecutor, name: str, values: Sequence[Any]) -> None:
        for value in values:
            for tickets, is_write in ((self._users(value).ready(value), False), (self._users(value).idle(value), True)):
                checker.foresee(name, self._content(value), tickets, is_write=is_write)

    def watched_compute(self: TieredExecutor, op: Any) -> None:
        compute(self, op)
        foresee(self, op.name, (*op.reads, *op.into, *op.results))

    def watched_scale(self: TieredExecutor, factor: Any) -> None:
        scale(self, factor)
        foresee(self, "scale", [value for value in self.env if value.kind in ("dw", "dside", "dx")])

    patched.setattr(TieredExecutor, "_compute", watched_compute)
    patched.setattr(TieredExecutor, "scale", watched_scale)


def _watch_computation(checker: Checker, patched: Any) -> None:
    """What the thread that issues does itself in the slab; what else it computes with is in nobody else's hands."""
    results, keep, init = TieredExecutor._results, Activations.keep, Segment.__init__
    slabs: list[tuple[int, int]] = []

    def watched_segment(self: Segment, start: int, nbytes: int, device: Any) -> None:
        init(self, start, nbytes, device)
        slabs.append(span_of(self._memory))

    def in_slab(contents: Sequence[Any]) -> list[torch.Tensor]:
        spans = {tensor: span_of(tensor) for content in contents for tensor in _tensors(content)}
        return [
            tensor
            for tensor, (start, stop) in spans.items()
            if any(first <= start and stop <= last for first, last in slabs)
        ]

    def watched_results(self: TieredExecutor, op: Any) -> Any:
        reads, into = ([self._content(value) for value in values] for values in (op.reads, op.changes))
        checker.work(op.name, in_slab(reads), in_slab(into))
        return results(self, op)

    def watched_keep(self: Activations, value: Any, source: Any, memory: Any) -> Any:
        kept = keep(self, value, source, memory)
        checker.work(f"alias {value}", [], in_slab([] if kept is source else [kept]))
        return kept

    patched.setattr(Segment, "__init__", watched_segment)
    patched.setattr(TieredExecutor, "_results", watched_results)
    patched.setattr(Activations, "keep", watched_keep)
