"""draw: a plan's step in files: its trace, its timeline as a page, and figures.

Figures show throughput under its rooflines, traffic of two orders side by side, and the lanes of a step. They need
matplotlib, `pip install 'greedysnake[plot]'`. A path that ends in .svg or .png says what is written.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, cycle, product
from pathlib import Path
from typing import Any, NamedTuple

from gs_compile.cli.report.explain import headline, report, step_report
from gs_compile.cli.report.timeline import KINDS, kind_of, timeline_html
from gs_compile.errors import MemoryBudgetError, PlanError
from gs_compile.passes.baselines.registry import SCHEDULES
from gs_compile.placement.workload import Workload
from gs_compile.planner.measure.profile import Profile
from gs_compile.planner.request import SILENT
from gs_compile.planner.simulate.prices import code_seconds
from gs_compile.planner.simulate.simulator import Simulation
from gs_compile.planner.step_plan import StepPlan
from gs_compile.planner.summary import rate_text
from gs_compile.planner.workloads import IN_A_WORKLOAD
from gs_compile.program.ir import EPILOGUE, WORDS
from gs_compile.schedules import BASELINE, BY_MICRO_BATCH, Schedule

# Colours that colour-blind readers can distinguish, too (Okabe and Ito); the page of `timeline` has the same.
COLOURS = {"w": "#0072b2", "x": "#56b4e9", "dx": "#009e73", "s": "#e69f00", "dw": "#d55e00", "update": "#cc79a7"}
COLOURS |= {"forward": "#aab2bd", "backward": "#69727f", "a": "#882255", "seal": "#000000", "other": "#f0e442"}
SERIES = (("#0072b2", "o"), ("#e69f00", "s"), ("#009e73", "^"), ("#d55e00", "D"), ("#cc79a7", "v"), ("#56b4e9", "P"))
INK, SOFT = "#1c2128", "#6b7480"
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "greedysnake",  # the same figure is the same file
}
SHOWN = {"h2d": "load", "d2h": "offload", "ssd_read": "SSD read", "ssd_write": "SSD write", "net": "network"}
GIB = 2**30
APART = 0.08  # of a figure's width, between two notes on a line
ONE_RANK = {name: SILENT[name] for name in chain(("gpus", "nodes", "network"), *IN_A_WORKLOAD.values())}
COMPARED: tuple[Schedule, ...] = ("vertical", BASELINE)  # that figures show side by side


def save(plan: StepPlan, *, trace: Path | None, page: Path | None, figures: Path | None) -> dict[str, Path]:
    """Write the files that are asked for. Returns the paths by kind of file."""
    files: dict[str, Path] = {}
    if trace is not None:
        plan.simulation.trace().save(trace)
        files["trace"] = trace
    if page is not None:
        texts = {"The plan": report(plan), "The step": step_report(plan, {}), "The program": str(plan.program)}
        note = "; ".join(headline(plan).splitlines()[1:])  # its first line is the title
        html = timeline_html(plan.simulation, title=_title(plan), note=note, texts=texts)
        page.write_text(html, encoding="utf-8")
        files["timeline"] = page
    return files if figures is None else files | _figures(plan, figures)


def _figures(plan: StepPlan, folder: Path) -> dict[str, Path]:
    """Figures of the step's lanes and, if layers are whole blocks, of throughput over the batch size and of bytes
    moved, in both orders.
    """
    paths = {name: folder / f"{name}.svg" for name in ("throughput", "traffic", "lanes")}
    title, number = _title(plan), plan.num_micro_batches
    lanes(plan.simulation, paths["lanes"], title=title)
    if SCHEDULES[plan.schedule].block_cut:  # both orders run whole blocks
        return {"lanes": paths["lanes"]}
    sizes = sorted({2**power for power in range(number.bit_length())} | {number})
    every = {schedule: list(_plans(plan, schedule, sizes)) for schedule in COMPARED}
    plans: dict[str, list[StepPlan]] = {schedule: found for schedule, found in every.items() if found}
    points = {schedule: [_point(each) for each in found] for schedule, found in plans.items()}
    roofline = Roofline.of(plan.workload, plan.profile, host_nbytes=plan.budgets.host_nbytes)
    throughput(points, paths["throughput"], roofline=roofline, title=title)
    moved = {schedule: found[-1].traffic for schedule, found in plans.items()}
    traffic_bars(moved, paths["traffic"], title=f"{title}, {number} micro-batches")
    return paths


def _plans(plan: StepPlan, schedule: Schedule, sizes: Iterable[int]) -> Iterator[StepPlan]:
    """Plans of the same model and request, for other numbers of micro-batches, as far as they fit; with several ranks
    those of one, with its share of the machine.
    """
    from gs_compile.planner.plan import plan as make

    asked = plan.problem.request
    has_sums = schedule in BY_MICRO_BATCH or asked.accumulate
    ratios = asked.ratios if has_sums else replace(asked.ratios, gradient=None)
    size = plan.workload.micro_batch_size
    changes: dict[str, Any] = {"batch_size": None, "micro_batch_size": size, "ratios": ratios, **ONE_RANK}
    try:
        request = replace(asked, machine=replace(plan.profile, num_ranks=1), schedule=schedule, **changes)
    except PlanError:  # a step with several backwards has only the vertical order
        return
    for number in sizes:
        try:
            yield make(plan.workload, request, num_micro_batches=number)
        except MemoryBudgetError:
            return


def _point(plan: StepPlan) -> Point:
    """The point of a plan, with its alpha as a note if there is one."""
    samples = plan.ranks * plan.num_micro_batches * plan.workload.micro_batch_size
    return Point(samples, plan.tokens_per_second, f"α {plan.alpha:.0%}" if plan.alpha else "")


def _title(plan: StepPlan) -> str:
    """A short title: without the details that a machine's name ends with."""
    return f"{plan.workload.name} on {re.split('[:,(]', plan.profile.name)[0].strip()}"


class Point(NamedTuple):
    """The throughput of a step of some number of samples, with a `note` beside it."""

    samples: int
    tokens_per_second: float
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Upper bounds for any order of a step whose layers save only their inputs (arXiv 2512.17570, section 3.1).

    io_seconds: of a step, for the optimizer states that host memory cannot hold, from the SSD and back.
    compute_tokens_per_second: of the computation alone, what is recomputed included.
    tokens: of a sample.
    """

    io_seconds: float
    compute_tokens_per_second: float
    tokens: int

    @classmethod
    def of(cls, workload: Workload, profile: Profile, *, host_nbytes: int = 0) -> Roofline:
        """The roofline of a machine with so much host memory; by default, as in the paper, all states are on SSD."""
        seconds = sum(
            code_seconds(unit, workload, profile, backward=backward)
            for unit, backward in product(workload.costs, (False, True))
            if backward or unit != EPILOGUE  # its backward is all of its work
        )
        return cls(
            io_seconds=_both_ways_seconds(max(0, workload.states_nbytes - host_nbytes), profile),
            compute_tokens_per_second=workload.tokens / seconds,
            tokens=workload.sequence,
        )


def throughput(
    series: Mapping[str, Sequence[Point]], path: str | Path, *, roofline: Roofline | None = None, title: str = ""
) -> None:
    """Tokens a second over the batch size, one line for each of `series`, below the rooflines."""
    widest = max((point.samples for points in series.values() for point in points), default=0)
    with _figure(path, (7.2, 4.4), title) as axes:
        for (name, points), (colour, marker) in zip(series.items(), cycle(SERIES), strict=False):
            xs, ys = [point.samples for point in points], [point.tokens_per_second for point in points]
            axes.plot(xs, ys, color=colour, marker=marker, markersize=4, linewidth=1.6, clip_on=False, label=name)
            last = -widest
            for x, y, point in zip(xs, ys, points, strict=True):
                if point.note and x - last >= APART * widest:  # nearer ones would overlap
                    look = {"textcoords": "offset points", "fontsize": 7.5, "color": colour}
                    axes.annotate(point.note, (x, y), (5, -9), **look)
                    last = x
        if roofline is not None:
            look = {"color": SOFT, "linewidth": 1.1, "zorder": 1}
            rate, words = roofline.compute_tokens_per_second, "computation roofline if all is recomputed"
            axes.axhline(rate, linestyle="dashed", label=words, **look)
            if roofline.io_seconds:
                slope = roofline.tokens / roofline.io_seconds
                axes.axline((0, 0), slope=slope, linestyle="dotted", label="I/O roofline", **look)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.set_major_formatter("{x:,.10g}")
        axes.set(xlim=(0, None), xlabel="batch size (samples a step)")
        axes.set(ylim=(0, None), ylabel="throughput (tokens/s)")


def traffic_bars(schedules: Mapping[str, Mapping[tuple[str, str], int]], path: str | Path, *, title: str = "") -> None:
    """Draw the bytes that each schedule moves in a step: a bar for each lane, in pieces by kind.

    schedules: bytes by lane and kind, as `traffic` counts them.
    """
    used = {lane for moved in schedules.values() for (lane, _), nbytes in moved.items() if nbytes}
    shown = {lane: words for lane, words in SHOWN.items() if lane in used}
    bars = {f"{words}, {name}": (lane, moved) for lane, words in shown.items() for name, moved in schedules.items()}
    with _figure(path, (9.0, 0.9 + 0.55 * len(bars)), title) as axes:
        lefts = [0.0] * len(bars)
        totals = [sum(moved.get((lane, kind), 0) for kind in KINDS) / GIB for lane, moved in bars.values()]
        most = max(totals, default=0.0) or 1.0
        for kind in KINDS:
            sizes = [moved.get((lane, kind), 0) / GIB for lane, moved in bars.values()]
            if any(sizes):
                pieces = axes.barh(list(bars), sizes, 0.62, lefts, color=COLOURS[kind], label=WORDS.get(kind, kind))
                texts = [rate_text(size) if size > 0.09 * most else "" for size in sizes]
                axes.bar_label(pieces, texts, label_type="center")
                lefts = [left + size for left, size in zip(lefts, sizes, strict=True)]
        for row, total in enumerate(totals):
            axes.text(total, row, f"  {rate_text(total)} GiB", va="center")
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.set(xlim=(0, 1.14 * most), ylim=(max(len(bars), 1) - 0.5, -0.5))
        axes.set_xlabel("GiB a step")


def lanes(
    simulation: Simulation, path: str | Path, *, since: float = 0.0, until: float | None = None, title: str = ""
) -> None:
    """Draw what runs when, from `since` to `until` in seconds of the step: `timeline_html` as a still picture.

    What extends over one edge of the step enters at the other: such steps follow each other.
    """
    until, rows = until or simulation.seconds, list(simulation.busy)
    with _figure(path, (9.6, 0.9 + 0.42 * len(rows)), title) as axes:
        in_view = bars(simulation, since, until)
        for lane, kind in sorted(in_view, key=lambda each: KINDS.index(each[1])):
            pieces = in_view[lane, kind]
            axes.broken_barh(
                pieces,
                (rows.index(lane) - 0.36, 0.72),
                facecolors=COLOURS[kind],
                edgecolor="white",
                linewidths=[0.4 if length > (until - since) / 200 else 0.0 for _, length in pieces],
                label=WORDS.get(kind, kind),
            )
        look = {"facecolors": "none", "edgecolor": SOFT, "hatch": "//////", "linewidth": 0, "label": "waits"}
        axes.broken_barh(list(_gaps(simulation, since, until)), (rows.index("compute") - 0.3, 0.6), **look)
        axes.set_yticks(range(len(rows)), rows)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.set(xlim=(since, until), ylim=(len(rows) - 0.5, -0.5), xlabel="seconds of the step")


# ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def _figure(path: str | Path, inches: tuple[float, float], title: str) -> Iterator[Any]:
    """The axes of a figure, which is written to `path` at the end, with a legend that says each name once."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError("figures need matplotlib: pip install 'greedysnake[plot]'") from error
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=inches, layout="constrained")
        axes = figure.subplots()
        yield axes
        axes.set_title(title)
        handles, names = axes.get_legend_handles_labels()
        named = dict(zip(names, handles, strict=True))
        axes.legend(named.values(), named.keys(), loc="center left", bbox_to_anchor=(1.0, 0.5))
        metadata = {"Date": None} if Path(path).suffix == ".svg" else None
        figure.savefig(path, dpi=160, metadata=metadata)


def bars(simulation: Simulation, since: float, until: float) -> Mapping[tuple[str, str], list[tuple[float, float]]]:
    """Start and length of what is in view, of this step or of those before and after it, by lane and kind."""
    found: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for span in simulation.spans:
        for shift in (0.0, -simulation.seconds, simulation.seconds):
            start, stop = span.start_seconds + shift, span.stop_seconds + shift
            if stop > max(since, 0.0) and start < min(until, simulation.seconds):
                found[span.lane, kind_of(span.op)].append((start, stop - start))
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
    """Seconds to read so much from the SSD and write as much, at once while both last."""
    read, write = profile.ssd_read_mixed_bytes_per_second, profile.ssd_write_mixed_bytes_per_second
    together = nbytes / max(read, write)
    rest = nbytes - together * min(read, write)
    return together + rest / (profile.ssd_read_bytes_per_second if read < write else profile.ssd_write_bytes_per_second)
