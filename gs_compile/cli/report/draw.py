"""draw: figures of plans: throughput under its rooflines, traffic of two orders side by side, the lanes of a step.

Needs matplotlib, `pip install 'greedysnake[plot]'`. A path that ends in .svg or .png says what is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gs_compile.cli.report.timeline import KINDS, kind_of
from gs_compile.errors import PlanError
from gs_compile.placement.workload import Workload
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.simulate.prices import backward_seconds, forward_seconds
from gs_compile.program.ir import EPILOGUE, LANES

if TYPE_CHECKING:
    from gs_compile.planner.simulate.simulator import Simulation
    from gs_compile.planner.step_plan import StepPlan

# Colours that most people can tell apart, whatever their sight (Okabe and Ito); the page of `timeline` has the same.
COLOURS = {"w": "#0072b2", "x": "#56b4e9", "dx": "#009e73", "s": "#e69f00", "dw": "#d55e00", "update": "#cc79a7"}
COLOURS |= {"forward": "#aab2bd", "backward": "#69727f", "other": "#f0e442"}
NAMES = {"w": "parameters", "x": "checkpoints", "dx": "gradients of layer inputs", "s": "optimizer state"}
NAMES |= {"dw": "gradients of parameters"}
SERIES = (("#0072b2", "o"), ("#e69f00", "s"), ("#009e73", "^"), ("#d55e00", "D"), ("#cc79a7", "v"), ("#56b4e9", "P"))
INK, SOFT = "#1c2128", "#6b7480"
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "text.color": INK,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "greedysnake",  # the same figure is the same file
}
SHOWN = {"h2d": "load", "d2h": "offload"}  # lanes between host and device
GIB = 2**30


@dataclass(frozen=True)
class Point:
    """A step of so many samples; `note` stands beside it."""

    samples: int
    tokens_per_second: float
    note: str = ""

    @classmethod
    def of(cls, plan: StepPlan) -> Point:
        """A plan's, with its alpha where there is one."""
        samples = plan.num_micro_batches * plan.workload.micro_batch_size
        return cls(samples, plan.tokens_per_second, f"{plan.alpha:.0%}" if plan.alpha else "")


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The bounds that no order of a step exceeds (arXiv 2512.17570, section 3.1).

    io_seconds: of a step, for all optimizer states from the SSD and back.
    compute_tokens_per_second: of the computation alone, what is recomputed included.
    tokens: of a sample.
    """

    io_seconds: float
    compute_tokens_per_second: float
    tokens: int

    @classmethod
    def of(cls, workload: Workload, profile: Profile) -> Roofline:
        seconds = sum(
            backward_seconds(cost, workload, profile)
            + (forward_seconds(cost, workload, profile) if unit != EPILOGUE else 0.0)  # the head's backward is all
            for unit, cost in workload.costs.items()
        )
        return cls(
            io_seconds=_both_ways_seconds(workload.states_nbytes, profile),
            compute_tokens_per_second=workload.tokens / seconds,
            tokens=workload.sequence,
        )


def throughput(
    series: Mapping[str, Sequence[Point]], path: str | Path, *, roofline: Roofline | None = None, title: str = ""
) -> None:
    """Tokens a second over the batch size, one line for each of `series`, below the rooflines."""
    with _figure(path, (7.2, 4.4)) as axes:
        points = [point for each in series.values() for point in each]
        widest = max((point.samples for point in points), default=1)
        highest = max((point.tokens_per_second for point in points), default=1.0)
        for (name, each), (colour, marker) in zip(series.items(), cycle(SERIES), strict=False):
            xs, ys = [point.samples for point in each], [point.tokens_per_second for point in each]
            axes.plot(xs, ys, color=colour, marker=marker, markersize=4, linewidth=1.6, clip_on=False, label=name)
            for x, y, point in zip(xs, ys, each, strict=True):
                look = {"textcoords": "offset points", "ha": "right", "fontsize": 7.5, "color": colour}
                axes.annotate(point.note, (x, y), (-4, 5), **look)
        if roofline is not None:
            highest = max(highest, roofline.compute_tokens_per_second)
            _draw_roofline(axes, roofline, widest, highest * 1.08)
        axes.set_xlim(0, widest)
        axes.set_ylim(0, highest * 1.08)
        axes.set_xlabel("batch size (samples a step)")
        axes.set_ylabel("throughput (tokens/s)")
        axes.set_title(title, loc="left", fontsize=11)
        axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))


def traffic_bars(schedules: Mapping[str, Mapping[tuple[str, str], int]], path: str | Path, *, title: str = "") -> None:
    """Draw the bytes that each schedule moves in a step: a bar for each lane, in pieces by kind.

    schedules: bytes by lane and kind, as `traffic` counts them.
    """
    bars = [(lane, schedule) for lane in SHOWN for schedule in schedules]
    with _figure(path, (9.0, 0.9 + 0.55 * len(bars))) as axes:
        most = max((_total(schedules[schedule], lane) for lane, schedule in bars), default=0) / GIB or 1.0
        named: set[str] = set()
        for row, (lane, schedule) in enumerate(bars):
            left = 0.0
            for kind in KINDS:
                size = schedules[schedule].get((lane, kind), 0) / GIB
                if size:
                    label = NAMES.get(kind, kind) if kind not in named else None
                    axes.barh(row, size, left=left, color=COLOURS[kind], height=0.62, label=label)
                    named.add(kind)
                    if size > 0.06 * most:
                        ink = "white" if kind in ("w", "dx", "dw") else INK
                        axes.text(left + size / 2, row, f"{size:,.0f}", ha="center", va="center", fontsize=8, color=ink)
                    left += size
            axes.text(left + 0.01 * most, row, f"{left:,.0f} GiB", va="center", fontsize=9)
        axes.set_yticks(range(len(bars)), [f"{SHOWN[lane]}, {schedule}" for lane, schedule in bars])
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.invert_yaxis()
        axes.set_xlim(0, most * 1.14)
        axes.set_xlabel("GiB a step, between host and device")
        axes.set_title(title, loc="left", fontsize=11)
        if named:
            axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))


def lanes(
    simulation: Simulation, path: str | Path, *, since: float = 0.0, until: float | None = None, title: str = ""
) -> None:
    """Draw what runs when, from `since` to `until` in seconds of the step: `timeline_html` as a still picture.

    What reaches over an edge of the step comes in at the other, paler: such steps follow one another.
    """
    until = simulation.seconds if until is None else until
    rows = [lane for lane in LANES if any(span.lane == lane for span in simulation.spans)]
    with _figure(path, (9.6, 0.9 + 0.42 * len(rows))) as axes:
        named: set[str] = set()
        for (row, kind, of_others), pieces in sorted(_bars(simulation, rows, since, until).items()):
            name = NAMES.get(KINDS[kind], KINDS[kind])
            axes.broken_barh(
                pieces,
                (row - 0.36, 0.72),
                facecolors=COLOURS[KINDS[kind]],
                edgecolor="white",
                linewidths=[0.4 if length > (until - since) / 200 else 0.0 for _, length in pieces],
                alpha=0.45 if of_others else 1.0,
                label=name if name not in named and not of_others else None,
            )
            named |= set() if of_others else {name}
        waits = list(_gaps(simulation, since, until))
        if waits:
            axes.broken_barh(waits, (-0.3, 0.6), fc="none", ec=SOFT, hatch="//////", linewidth=0, label="waits")
        axes.set_yticks(range(len(rows)), rows)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.set_xlim(since, until)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlabel("seconds of the step")
        axes.set_title(title, loc="left", fontsize=11)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


# ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def _figure(path: str | Path, inches: tuple[float, float]) -> Iterator[Any]:
    """The axes of a figure that is written to `path` at the end."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError("figures need matplotlib: pip install 'greedysnake[plot]'") from error
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=inches, layout="constrained")
        yield figure.subplots()
        metadata = {"Date": None} if Path(path).suffix == ".svg" else None
        figure.savefig(path, dpi=160, metadata=metadata)


def _draw_roofline(axes: Any, roofline: Roofline, widest: float, top: float) -> None:
    """Both bounds, dashed, each with its name along it."""
    look = {"color": SOFT, "linewidth": 1.1, "linestyle": (0, (5, 3)), "zorder": 1}
    words = {"color": SOFT, "fontsize": 8.5}
    limit = roofline.compute_tokens_per_second
    axes.axhline(limit, **look)
    axes.annotate("computation roofline", (0, limit), (4, 4), textcoords="offset points", **words)
    slope = roofline.tokens / roofline.io_seconds
    end = min(widest, top / slope)
    axes.plot([0, end], [0, end * slope], **look)
    axes.annotate("I/O roofline", (end, end * slope), (6, 0), textcoords="offset points", va="top", **words)


def _bars(
    simulation: Simulation, rows: Sequence[str], since: float, until: float
) -> dict[tuple[int, int, bool], list[tuple[float, float]]]:
    """Start and length of what is in view, by row, kind and whether it is the step before's or the next one's."""
    found: dict[tuple[int, int, bool], list[tuple[float, float]]] = {}
    for span in simulation.spans:
        for shift in (0.0, -simulation.seconds, simulation.seconds):
            start, stop = span.start_seconds + shift, span.stop_seconds + shift
            if stop > max(since, 0.0) and start < min(until, simulation.seconds):
                where = rows.index(span.lane), KINDS.index(kind_of(span.op)), bool(shift)
                found.setdefault(where, []).append((start, stop - start))
    return found


def _gaps(simulation: Simulation, since: float, until: float) -> Iterator[tuple[float, float]]:
    """Where nothing computes: start and length."""
    now = max(0.0, since)
    for span in simulation.spans:
        if span.lane == "compute":
            if span.start_seconds > now and now < until:
                yield now, span.start_seconds - now
            now = max(now, span.stop_seconds)


def _both_ways_seconds(nbytes: int, profile: Profile) -> float:
    """To read so much from the SSD and write as much, at once while both last."""
    read, write = profile.ssd_read_mixed_bytes_per_second, profile.ssd_write_mixed_bytes_per_second
    together = nbytes / max(read, write)
    rest = nbytes - together * min(read, write)
    return together + rest / (profile.ssd_read_bytes_per_second if read < write else profile.ssd_write_bytes_per_second)


def _total(moved: Mapping[tuple[str, str], int], lane: str) -> int:
    return sum(nbytes for (where, _), nbytes in moved.items() if where == lane)
