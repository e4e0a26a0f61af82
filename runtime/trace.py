"""trace: what ran when, on which lane, and how many bytes it moved.

Sums are always kept, for they cost next to nothing; single operations only when asked for. `chrome` writes them in the
Trace Event Format, which ui.perfetto.dev and chrome://tracing open.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gs_compile.runtime.stream import Device
    from gs_compile.runtime.stream import Event as DeviceEvent

LANES = ("compute", "h2d", "d2h", "ssd_read", "ssd_write", "cpu", "net")  # the rows of the picture, from the top
MAX_ROWS = 1000  # of one lane: more than a lane has operations in flight
PROCESS = 1  # all lanes are of one process; its number means nothing


class Label(NamedTuple):
    """What an operation is."""

    lane: str
    name: str
    nbytes: int = 0
    kind: str = ""  # of the value it moves or makes
    stage: str = ""


class Event(NamedTuple):
    """One operation; seconds are those of one clock, such as `time.perf_counter`."""

    start_seconds: float
    end_seconds: float
    lane: str
    name: str
    nbytes: int
    kind: str  # of the value it moves or makes
    stage: str


@dataclass
class Total:
    """What a lane has done: operations that overlap on one lane count their seconds each."""

    seconds: float = 0.0
    nbytes: int = 0
    nbytes_by_kind: Counter[str] = field(default_factory=Counter)


MOST_EVENTS = 500_000  # the latest are kept: hundreds of steps of a small model, a few of a large one, 100 MB


class Trace:
    """The record of a run; any thread may add to it."""

    def __init__(self, *, events: bool = False) -> None:
        self.enabled = events
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forgets all."""
        with self._lock:
            self._events: deque[Event] = deque(maxlen=MOST_EVENTS)
            self._totals: dict[str, Total] = {}
            self._launched: deque[tuple[Label, Device, DeviceEvent, DeviceEvent]] = deque()  # not known to be over

    def add(self, label: Label, start_seconds: float, end_seconds: float) -> None:
        """Records one operation on one of `LANES`."""
        with self._lock:
            self._add(label, start_seconds, end_seconds)

    def add_later(self, label: Label, device: Device, start: DeviceEvent, end: DeviceEvent) -> None:
        """Records one operation of a stream, between two events of it, when these have happened."""
        with self._lock:
            self._launched.append((label, device, start, end))
            self._take_launched()

    def _add(self, label: Label, start_seconds: float, end_seconds: float) -> None:
        assert label.lane in LANES, f"no lane {label.lane}"
        assert start_seconds <= end_seconds, f"{label.name} ends before it starts"
        total = self._totals.setdefault(label.lane, Total())
        total.seconds += end_seconds - start_seconds
        total.nbytes += label.nbytes
        if label.nbytes:
            total.nbytes_by_kind[label.kind] += label.nbytes
        if self.enabled:
            self._events.append(Event(start_seconds, end_seconds, *label))

    def _take_launched(self) -> None:
        """Record what was launched and is over by now: in the order of launching, one lane's behind another's."""
        while self._launched and self._launched[0][-1].query():
            label, device, start, end = self._launched.popleft()
            self._add(label, *device.seconds(start, end))

    def totals(self, *, reset: bool = False) -> dict[str, Total]:
        """By lane, those that did something, in the order of `LANES`; later operations do not change it.

        `reset` begins the sums anew in the same moment: what a lane adds meanwhile counts for later. Events stay.
        """
        with self._lock:
            self._take_launched()
            found = self._totals
            self._totals = {} if reset else found
            return {
                lane: Total(total.seconds, total.nbytes, Counter(total.nbytes_by_kind))
                for lane in LANES
                if (total := found.get(lane))
            }

    def events(self) -> list[Event]:
        """The operations in the order of their starts; none unless they were asked for."""
        with self._lock:
            self._take_launched()
            return sorted(self._events)

    def busy_share(self, lane: str, since_seconds: float, until_seconds: float) -> float:
        """The share of a period in which a lane had something under way, 0 to 1; needs the events.

        Overlapping operations count once, and those that reach out of the period only with the part inside.
        """
        assert self.enabled, "busy_share needs a Trace(events=True)"
        assert since_seconds < until_seconds, "an empty period"
        busy, reached = 0.0, since_seconds
        for event in self.events():
            if event.lane == lane:
                end = min(event.end_seconds, until_seconds)
                busy += max(0.0, end - max(event.start_seconds, reached))
                reached = max(reached, end)
        return busy / (until_seconds - since_seconds)

    def chrome(self) -> dict[str, Any]:
        """The events in Chrome's Trace Event Format, microseconds from the first.

        Each lane is a row. What overlaps on a lane, such as several reads in flight, goes to further rows below: on one
        row, viewers drop slices that overlap without nesting.
        """
        events = self.events()
        origin = events[0].start_seconds if events else 0.0
        ends: dict[str, list[float]] = {lane: [origin] for lane in LANES}  # of each row
        slices = [_slice(event, _row(ends[event.lane], event), origin) for event in events]
        return {"traceEvents": [*_rows(ends), *slices], "displayTimeUnit": "ms"}

    def save(self, path: str | Path) -> None:
        """Writes `chrome()` as JSON."""
        Path(path).write_text(json.dumps(self.chrome()))


def _row(ends: list[float], event: Event) -> int:
    """The first row that is free when the event starts, which it then takes."""
    row = next((row for row, end in enumerate(ends) if end <= event.start_seconds), len(ends))
    ends[row : row + 1] = [event.end_seconds]
    return row


def _thread(lane: str, row: int) -> int:
    return LANES.index(lane) * MAX_ROWS + row + 1


def _rows(ends: dict[str, list[float]]) -> list[dict[str, Any]]:
    def metadata(what: str, thread: int, key: str, value: str | int) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": PROCESS, "tid": thread, "args": {key: value}}

    rows = [metadata("process_name", 0, "name", "greedysnake")]
    for lane in LANES:
        for row in range(len(ends[lane])):
            thread = _thread(lane, row)
            rows.append(metadata("thread_name", thread, "name", f"{lane} {row + 1}" if row else lane))
            rows.append(metadata("thread_sort_index", thread, "sort_index", thread))
    return rows


def _slice(event: Event, row: int, origin: float) -> dict[str, Any]:
    # Both ends are rounded to nanoseconds alike: what ends when the next starts shall not overlap it by a rounding.
    start, end = (round((seconds - origin) * 1e6, 3) for seconds in event[:2])
    return {
        "ph": "X",
        "name": event.name,
        "cat": event.lane,
        "pid": PROCESS,
        "tid": _thread(event.lane, row),
        "ts": start,
        "dur": round(end - start, 3),
        "args": {"kind": event.kind, "stage": event.stage, "bytes": event.nbytes},
    }
