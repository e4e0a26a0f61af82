"""A run on the CPU twin of a device, with a record of which accesses to memory are ordered, and by what.

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
from stream_twin import Twin, span_of

from gs_compile.runtime import coordinators, stream, tiers
from gs_compile.runtime.commits import Commits
from gs_compile.runtime.coordinators import Parameters
from gs_compile.runtime.lanes import Lane, Ticket
from gs_compile.runtime.optimizer import OptimizerStep
from gs_compile.runtime.step_record import StepRecord
from gs_compile.runtime.storage.store import Extent
from gs_compile.runtime.values import Gradient

Clock = dict[Any, int]


class Access(NamedTuple):
    name: str
    actor: Any
    time: int
    is_write: bool
    start: int
    stop: int


class Checker:
    """Clocks, accesses, and the pairs of accesses that nothing orders."""

    twin: Any  # whose accesses these are

    def __init__(self) -> None:
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
                            self.races.add(f"{old.name} and {name}")
                        is_inside = start <= old.start and old.stop <= stop
                        if is_before and is_inside and (is_write or not old.is_write):
                            continue  # whatever is behind this access is behind the old one too
                    kept.append(old)
                kept.append(Access(name, actor, clock[actor], is_write, start, stop))
                self.accesses[memory] = kept

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


def _memory(content: Any) -> tuple[Any, int, int]:
    if isinstance(content, Extent):
        return content.label, 0, content.nbytes
    return ("memory", *span_of(content.flat if isinstance(content, Gradient) else content))


@contextmanager
def on_twin(seed: int = 0, delay_seconds: float = 1e-3) -> Iterator[Checker]:
    """Every run inside the block computes on a twin; accesses that nothing orders fail the block, by name."""
    checker = Checker()
    checker.twin = twin = Twin(seed, delay_seconds, checker)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(stream, "DEVICES", {"cpu": lambda _: twin})
        _watch_threads(checker, patched)
        _watch_lanes(checker, patched)
        try:
            yield checker
        finally:
            twin.close()
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
    seal = Commits._make

    def watched_transfer(reads: Sequence[Any], targets: Sequence[Any]) -> None:
        checker.work(threading.current_thread().name, reads, targets)
        written = {target.label for target in targets if isinstance(target, Extent)} & checker.named
        checker.races.update(f"the last commit and a write to {label}" for label in written)
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

    def watched_seal(self: Commits, manifest_of: Any, writes: Any, issued: Mapping[Any, Extent]) -> None:
        checker.work("seal", [content for _, content in writes], [extent for extent, _ in writes])
        checker.work("seal", list(issued.values()), [])
        seal(self, manifest_of, writes, issued)
        checker.named = {extent.label for extent in issued.values()}

    patched.setattr(Commits, "_make", watched_seal)
    patched.setattr(coordinators, "transfer", watched_transfer)
    patched.setattr(OptimizerStep, "update", watched_update)
    patched.setattr(Parameters, "commit", watched_commit)
    patched.setattr(tiers.Tiers, "at_home", watched_home)
