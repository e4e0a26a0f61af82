"""record: the state of a run, updated by the thread that trains; any thread may ask for its status."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gs_compile.program.ir import Stage
from gs_compile.runtime.trace import Total, Trace
from gs_compile.status.form import FORMAT, About, PastStep, State, Status, UnderWay
from gs_compile.status.step import StepInfo

MOST_POINTS = 200  # of the history: a curve can show no more, and all are written every second


@dataclass(frozen=True)
class _Sums:
    """Sums over the steps with a known length."""

    lanes: Mapping[str, Total]
    num_steps: int = 0
    seconds: float = 0.0
    num_tokens: int = 0


class RunRecord:
    """The record of one run. measure: bytes in use of each tier, and free on each drive."""

    def __init__(
        self, about: About, trace: Trace, measure: Callable[[], tuple[Mapping[str, int], Mapping[str, int]]]
    ) -> None:
        self.about = about
        self._trace, self._measure = trace, measure
        self._lock = threading.Lock()
        self._last: StepInfo | None = None
        self._history: list[PastStep] = []
        self._every = 1  # one of so many steps is in the history
        self._num_noted = self._num_calls = 0
        self._sums = _Sums(lanes={})
        self._began, self._number = math.nan, 0  # of the running step

    def begin(self, number: int) -> None:
        """A call of the step of that number begins."""
        with self._lock:
            self._number = number
            if not self._num_calls:
                self._began, self._trace.at = time.perf_counter(), None  # the last operation was the step before's
            self._num_calls += 1

    def note(self, info: StepInfo) -> None:
        """The running step has ended."""
        with self._lock:
            self._last, self._num_calls = info, 0
            if self._num_noted % self._every == 0:
                self._history.append(PastStep(info.number, info.seconds, info.loss, info.num_tokens))
            self._num_noted += 1
            if len(self._history) > MOST_POINTS:
                self._history, self._every = self._history[::2], 2 * self._every
            if not math.isnan(info.seconds):
                before, none = self._sums, Total()
                lanes = {**before.lanes, **info.lanes}
                self._sums = _Sums(
                    {lane: before.lanes.get(lane, none) + info.lanes.get(lane, none) for lane in lanes},
                    before.num_steps + 1,
                    before.seconds + info.seconds,
                    before.num_tokens + info.num_tokens,
                )

    def under_way(self) -> UnderWay | None:
        """The running step; None: there is none."""
        with self._lock:
            call, began, last, at = self._num_calls, self._began, self._last, self._trace.at
            number = self._number
        if not call or at is None:
            return None
        (program, index), about = at, self.about
        predicted = about.predicted_seconds if last is None else last.predicted_seconds
        is_known = last is not None and not math.isnan(last.seconds)
        return UnderWay(
            number=number,
            call=call,
            stage=stage_words(program.ops[index].stage),
            done=index + 1,
            total=len(program.ops),
            seconds=time.perf_counter() - began,
            expected_seconds=last.seconds if last is not None and is_known else predicted,
            lanes=self._trace.totals(),
        )

    def status(self, state: State = "running", reason: str = "") -> Status:
        """The current status of the run."""
        step = self.under_way() if state == "running" else None
        used, free = self._measure()
        with self._lock:
            return Status(
                format=FORMAT,
                state=state,
                reason=reason,
                written=time.time(),
                about=self.about,
                step=step,
                last=self._last,
                history=tuple(self._history),
                **vars(self._sums),
                used=used,
                free=free,
            )


def stage_words(stage: Stage) -> str:
    """``backward of layer 3``"""
    units = {"e": "the embedding", "h": "the head", "layer": f"layer {stage.unit}"}
    if unit := units.get(stage.unit_class):
        return f"{stage.phase} of {unit}"
    return "reading ahead" if stage.phase == "fill" else "the last updates"
