"""trace: what ran when, on which lane, and how many bytes it moved.

Sums are always recorded, as they cost next to nothing; single operations only if asked for. `chrome` writes these in
the Trace Event Format, which ui.perfetto.dev and chrome://tracing open. `planner/simulate/measured.py` finds out from
them what the computation waited for.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict, deque
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gs_compile.program.ir import LANES, Program

if TYPE_CHECKING:
    from gs_compile.runtime import stream

MAX_EVENTS = 500_000  # the latest are kept: hundreds of steps of a small model, a few of a large one, 100 MB


class Label(NamedTuple):
    """The lane and name of an operation, and what it moves."""

    lane: str
    name: str
    nbytes: int = 0
    kind: str = ""  # of the value that it moves or makes
    stage: str = ""
    number: int = -1  # of its `Issue`


class TraceEvent(NamedTuple):
    """One operation; seconds are those of one clock, such as `time.perf_counter`."""

    start_seconds: float
    end_seconds: float
    label: Label


class Issue(NamedTuple):
    """An operation of a program as it was issued; `number` counts all that a trace has seen."""

    number: int
    seconds: float
    program: Program
    op_index: int


@dataclass
class Total:
    """The work of a lane so far."""

    seconds: float = 0.0
    nbytes: int = 0
    nbytes_by_kind: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Total) -> Total:
        kinds = self.nbytes_by_kind + other.nbytes_by_kind
        return Total(self.seconds + other.seconds, self.nbytes + other.nbytes, kinds)


class Trace:
    """The record of a run; any thread may add to it."""

    def __init__(self, *, events: bool = False) -> None:
        self.enabled = events
        self.at: tuple[Program, int] | None = None  # the operation of a step that was issued last
        self.number = -1  # of its `Issue`, where operations are recorded
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        with self._lock:
            self._events: deque[TraceEvent] = deque(maxlen=MAX_EVENTS)
            self._issues: deque[Issue] = deque(maxlen=MAX_EVENTS)
            self._totals = defaultdict[str, Total](Total)
            self._launched: deque[tuple[Label, stream.Clock, stream.Event, stream.Event]] = deque()  # maybe not over

    def issue(self, program: Program, index: int) -> None:
        """An operation is issued now; labels of what it does have its number."""
        if program.trains:
            self.at = program, index
        if self.enabled:
            self.number += 1
            self._issues.append(Issue(self.number, time.perf_counter(), program, index))

    def add(self, label: Label, start_seconds: float, end_seconds: float) -> None:
        """Record one operation on one of `LANES`."""
        with self._lock:
            self._add(label, start_seconds, end_seconds)

    def add_later(self, label: Label, clock: stream.Clock, start: stream.Event, end: stream.Event) -> None:
        """Record one operation of a stream, between two of its events, once these have happened."""
        with self._lock:
            self._launched.append((label, clock, start, end))
            self._take_launched()

    def _add(self, label: Label, start_seconds: float, end_seconds: float) -> None:
        assert label.lane in LANES, f"no lane {label.lane}"
        assert start_seconds <= end_seconds, f"{label.name} ends before it starts"
        total = self._totals[label.lane]
        total.seconds += end_seconds - start_seconds
        total.nbytes += label.nbytes
        if label.nbytes:
            total.nbytes_by_kind[label.kind] += label.nbytes
        if self.enabled:
            self._events.append(TraceEvent(start_seconds, end_seconds, label))

    def _take_launched(self) -> None:
        """Record what was launched and has ended, in the order of launching over all lanes."""
        while self._launched and self._launched[0][-1].query():
            label, clock, start, end = self._launched.popleft()
            self._add(label, *clock.seconds(start, end))

    def totals(self, *, reset: bool = False) -> dict[str, Total]:
        """The totals of the lanes that did something, in the order of `LANES`; later operations do not change it.

        `reset` sets the sums to zero at the same moment, so that nothing is lost or counted twice. Events stay.
        """
        with self._lock:
            self._take_launched()
            found = {lane: self._totals[lane] for lane in LANES if lane in self._totals}
            if reset:
                self._totals = defaultdict(Total)
            return deepcopy(found)

    def events(self) -> list[TraceEvent]:
        """The operations in the order of their starts; none unless recording them was asked for."""
        with self._lock:
            self._take_launched()
            return sorted(self._events)

    def issues(self) -> list[Issue]:
        """All operations in the order of issue; none unless recording them was asked for."""
        return list(self._issues)

    def chrome(self) -> dict[str, Any]:
        """The events in Chrome's Trace Event Format, microseconds from the first.

        Each lane is a row; its operations follow each other.
        """
        events = self.events()
        rows = [_metadata("process_name", 0, name="greedysnake")]
        for row, lane in enumerate(LANES):
            rows += [_metadata("thread_name", row, name=lane), _metadata("thread_sort_index", row, sort_index=row)]
        slices = [_slice(event, events[0].start_seconds) for event in events]
        return {"traceEvents": rows + slices, "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> None:
        """Write `chrome()` as JSON."""
        Path(path).write_text(json.dumps(self.chrome()))


def _metadata(what: str, row: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": 1, "tid": row, "args": args}


def _slice(event: TraceEvent, origin: float) -> dict[str, Any]:
    # Both ends are rounded to nanoseconds, so that an operation that ends when the next starts does not overlap it.
    start, end = (round((seconds - origin) * 1e6, 3) for seconds in event[:2])
    label = event.label
    return {
        "ph": "X",
        "name": label.name,
        "cat": label.lane,
        "pid": 1,
        "tid": LANES.index(label.lane),
        "ts": start,
        "dur": round(end - start, 3),
        "args": {"kind": label.kind, "stage": label.stage, "bytes": label.nbytes},
    }
