"""words: texts about a run that bar, screen and page share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from gs_compile.machine import format_bytes
from gs_compile.planner.step_plan import SECONDS_PER_DAY, wear_text
from gs_compile.planner.summary import rate_text, seconds_text
from gs_compile.program.ir import LANES, WORDS
from gs_compile.progress import bar
from gs_compile.runtime.storage.folder import date_of
from gs_compile.runtime.trace import Total
from gs_compile.status.file import STALE_SECONDS, is_alive
from gs_compile.status.form import Status, UnderWay
from gs_compile.status.step import StepInfo

MOVING = ("ssd_read", "ssd_write", "h2d", "d2h", "net")  # lanes whose rate a bar shows


def under_way_text(step: UnderWay) -> str:
    """``step 12 ━━━━━━──── backward of layer 3, 42 s, about 31 s left``"""
    call = f"call {step.call}, " if step.call > 1 else ""
    left = "" if math.isnan(step.left_seconds) else f", about {duration(step.left_seconds)} left"
    return f"step {step.number} {bar(step.part)} {call}{step.stage}, {duration(step.seconds)}{left}"


def bar_text(step: UnderWay) -> str:
    """The same with rates: ``..., ssd_read 1.1 GiB/s``"""
    moved = ((lane, step.lanes[lane].nbytes) for lane in MOVING if lane in step.lanes)
    rates = (f"{lane} {rate(nbytes, step.seconds)}" for lane, nbytes in moved if nbytes)
    return ", ".join([under_way_text(step), *rates])


def condition(status: Status, now: float) -> str:
    """Whether a run goes on, and if not, how and when it ended: as a clock time, because a page may be read later."""
    age, when = now - status.written, date_of(status.written)
    if status.state == "failed":
        return f"failed at {when}: {status.reason}"
    if status.state == "ended":
        return f"ended at {when}"
    if not is_alive(status):
        return f"was killed: its process is gone, and wrote this at {when}"
    if age > STALE_SECONDS:
        return f"has written nothing for {duration(age)}: its process is stopped, or its drive does not answer"
    return f"has run for {duration(now - status.about.began)}"


def plan_words(status: Status) -> str:
    """The plan and its reasons, in a paragraph."""
    return status.about.plan or "The plan was made by another rank, or by the run that is resumed here."


def step_words(info: StepInfo) -> str:
    """``31.2 s, 256 tokens, 8.2 tokens/s, loss 5.52, gradient norm 1.3``"""
    words = [] if math.isnan(info.seconds) else [seconds_text(info.seconds)]
    words.append(f"{info.num_tokens:,} tokens")
    words += [] if math.isnan(info.seconds) else [f"{rate_text(info.tokens_per_second)} tokens/s"]
    words += [] if math.isnan(info.loss) else [f"loss {info.loss:.4g}"]
    words.append(
        "gradients were not finite, or were dropped" if info.skipped else f"gradient norm {info.grad_norm:.3g}"
    )
    words += ["skipped"] if info.skipped else []
    words += ["updates rolled back"] if info.rolled_back else []
    return ", ".join(words)


def compared(seconds: float, predicted_seconds: float) -> str:
    """A step's seconds, compared with the plan's prediction."""
    if math.isnan(predicted_seconds):
        return "no prediction: the plan was not simulated, or was made for another batch"
    if math.isnan(seconds):
        return f"{seconds_text(predicted_seconds)} predicted"
    change = seconds / predicted_seconds - 1
    words = "as measured" if abs(change) < 0.005 else f"measured {abs(change):.0%} {'longer' if change > 0 else 'less'}"
    return f"{seconds_text(predicted_seconds)} predicted, {words}"


def binding(info: StepInfo) -> str:
    """What limits the step, by the work of its lanes."""
    if not info.busy:
        return "not known before the second step"
    if info.binds:
        return f"{info.binds}, busy for {info.busy[info.binds]:.0%} of the step"
    lane, busy = max(info.busy.items(), key=lambda each: each[1])
    return f"no lane by itself ({lane} is busy for {busy:.0%}): they wait for each other, or for what is between steps"


class LaneRow(NamedTuple):
    """What a lane does in a step, measured and predicted; seconds nan, bytes -1: not known."""

    lane: str
    busy: float
    seconds: float
    predicted_seconds: float
    nbytes: int
    predicted_nbytes: int
    bytes_per_second: float

    @property
    def cells(self) -> tuple[str, ...]:
        """For a table: busy, works, predicted to work, moves, predicted to move, rate."""
        return (
            f"{self.busy:.0%}",
            seconds_text(self.seconds),
            "-" if math.isnan(self.predicted_seconds) else seconds_text(self.predicted_seconds),
            format_bytes(self.nbytes) if self.nbytes else "-",
            format_bytes(self.predicted_nbytes) if self.predicted_nbytes > 0 else "-",
            rate(self.bytes_per_second, 1.0) if self.nbytes else "-",
        )


def lane_rows(status: Status, lanes: Mapping[str, Total], seconds: float, num_steps: int = 1) -> Iterator[LaneRow]:
    """A row for each lane with work, measured or predicted: means of `num_steps` steps of `seconds` together."""
    predicted = status.about.predicted
    for lane in (each for each in LANES if each in lanes or each in predicted):
        total, plan = lanes.get(lane, Total()), predicted.get(lane)
        yield LaneRow(
            lane,
            total.seconds / seconds,
            total.seconds / num_steps,
            math.nan if plan is None else plan.seconds,
            total.nbytes // num_steps,
            -1 if plan is None else plan.nbytes,
            total.nbytes / total.seconds if total.seconds else 0.0,
        )


def wear(status: Status) -> str:
    """What the run has written to SSD, what that is in a day, and for how long its drives are rated for that."""
    written = status.lanes.get("ssd_write", Total()).nbytes
    if not written or not status.seconds:
        return "nothing is written to SSD" if status.num_steps else "not known before the second step"
    words = wear_text(written / status.seconds * SECONDS_PER_DAY, status.about.rated_nbytes)
    return f"{format_bytes(written)} so far; {words}"


def kinds_words(total: Total, num_steps: int) -> str:
    """``parameters 1.2 GiB, checkpoints 3.4 MiB``, the most first, of a mean step"""
    kinds = total.nbytes_by_kind.most_common()
    return ", ".join(f"{WORDS.get(kind, kind)} {format_bytes(nbytes // num_steps)}" for kind, nbytes in kinds)


def rate(nbytes: float, seconds: float) -> str:
    """``1.2 GiB/s``"""
    return f"{format_bytes(int(nbytes / seconds)) if seconds else '0 B'}/s"


def duration(seconds: float) -> str:
    """``42 s``, ``3 min 20 s``, ``5 h 2 min``, ``3 days 4 h``"""
    whole = max(round(seconds), 0)
    for size, unit, below, lower in ((86400, "days", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            number, rest = divmod(whole, size)
            unit = "day" if number == 1 and unit == "days" else unit
            return f"{number} {unit}" + (f" {rest // below} {lower}" if rest // below else "")
    return f"{whole} s"
