"""draw: the figures of docs/race.md, from the results that are there.

    python -m benchmarks.race.draw                        # all, into docs/figures
    python -m benchmarks.race.draw race-curves race-homes # these

A figure whose results are missing is not drawn, and said so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.race.curves import NOISE
from benchmarks.race.measures import normalised
from benchmarks.race.registry import FIGURES, PLAIN, RESULTS
from benchmarks.race.traffic import draw_traffic
from gs_compile.cli.report.draw import COLOURS, INK, SERIES, SOFT, STYLE

COLUMNS = 3  # of the panels
KNOWN = {PLAIN: "#1c2128", "fsdp2": "#8c6bb1", "zero-infinity": "#d55e00"}  # ours take the other colours in turn
OURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#b8a000", "#7f5539", "#40798c")


def contestants(found: dict[str, Any], path: Path) -> None:
    """Throughput over the number of micro-batches, everyone in one picture."""
    series = throughputs(found)
    with figure(path, (7.6, 4.6)) as drawn:
        axes = drawn.subplots()
        for name, points in series.items():
            axes.plot(*zip(*points, strict=True), color=colour(name, series), **line(name))
        over_micro_batches(axes, series)
        axes.set_title(title_of(found), loc="left", fontsize=11)
        axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))


def panels(found: dict[str, Any], path: Path) -> None:
    """A panel for each contestant, below what its own step could reach; the others are pale."""
    series = throughputs(found)
    computed = throughputs(found, "compute_seconds")
    rows = -(-len(series) // COLUMNS)
    with figure(path, (9.6, 0.5 + 2.3 * rows)) as drawn:
        grid = drawn.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
        for axes in grid.flat[len(series) :]:
            axes.set_visible(False)
        for axes, (name, points) in zip(grid.flat, series.items(), strict=False):
            for other in series.values():
                axes.plot(*zip(*other, strict=True), color="#d7dbe0", linewidth=0.9, zorder=1)
            for key, look in {"compute_seconds": (0, (5, 3)), "io_seconds": (0, (1, 2))}.items():
                bound = throughputs(found, key).get(name)
                if bound:
                    axes.plot(*zip(*bound, strict=True), color=SOFT, linewidth=1.1, linestyle=look, zorder=2)
            axes.plot(*zip(*points, strict=True), color=colour(name, series), **line(name))
            over_micro_batches(
                axes, {**series, **{f"{key} alone": each for key, each in computed.items()}}, labels=False
            )
            axes.set_title(name, loc="left", fontsize=9)
        drawn.supxlabel("micro-batches a step", fontsize=10)
        drawn.supylabel("tokens/s", fontsize=10)
        drawn.suptitle(
            f"{title_of(found)}; dashed: computation alone, dotted: its bytes at the drive's bandwidth",
            x=0.01,
            ha="left",
            fontsize=10,
        )


def some(names: Mapping[str, str]) -> Callable[[dict[str, Any], Path], None]:
    """A picture of those whose names end so, under other names."""

    def draw(found: dict[str, Any], path: Path) -> None:
        every = throughputs(found)
        series = {
            label: points
            for ending, label in names.items()
            for name, points in every.items()
            if name == ending or name.endswith(f"/{ending}")
        }
        with figure(path, (7.2, 4.0)) as drawn:
            axes = drawn.subplots()
            for (name, points), (shade, marker) in zip(series.items(), SERIES, strict=False):
                axes.plot(*zip(*points, strict=True), color=shade, label=name, marker=marker, markersize=4)
            over_micro_batches(axes, series)
            axes.set_title(title_of(found), loc="left", fontsize=11)
            axes.legend(frameon=False, fontsize=8.5, loc="lower right")

    return draw


def curves(found: dict[str, Any], path: Path) -> None:
    """The losses, and how far each is from plain's."""
    losses = found["losses"]
    with figure(path, (7.6, 5.6)) as drawn:
        above, below = drawn.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        for name, values in losses.items():
            look = look_of(name)
            above.plot(values, label=name, **look)
            if name != PLAIN:
                apart = accumulate((abs(a - b) / b for a, b in zip(values, losses[PLAIN], strict=True)), max)
                below.plot(*zip(*[(step, value) for step, value in enumerate(apart) if value], strict=True), **look)
        below.set_yscale("log")
        below.set_xlabel("step")
        below.set_ylabel("largest relative difference\nfrom plain so far")
        above.set_ylabel("loss")
        above.set_title(f"{title_of(found)}, real text", loc="left", fontsize=11)
        above.legend(frameon=False, fontsize=8.5)


def breakdown(found: dict[str, Any], path: Path) -> None:
    """A bar for each contestant: what the seconds of its step are made of."""
    bars = [
        (place + group, f"{name}, n = {row['micro_batches']}", each)
        for place, (group, row, name, each) in enumerate(
            (group, row, name, each)
            for group, row in enumerate(found["rows"])
            for name, each in row["contestants"].items()
            if "why" not in each
        )
    ]
    shades = {"computing": COLOURS["backward"], "waiting for reads": COLOURS["x"], "waiting for writes": COLOURS["s"]}
    shades |= {"waiting for updates": COLOURS["update"], "waiting, other": COLOURS["other"], "Python": COLOURS["dx"]}
    with figure(path, (8.6, 1.1 + 0.32 * (len(bars) + len(found["rows"])))) as drawn:
        axes = drawn.subplots()
        for place, _, each in bars:
            left = 0.0
            for part, value in parts_of(each).items():
                share = value / each["seconds"]
                axes.barh(place, share, left=left, color=shades[part], height=0.74)
                left += share
            axes.text(left + 0.01, place, f"{each['seconds']:.3g} s", va="center", fontsize=8.5)
        axes.set_yticks([place for place, *_ in bars], [name for _, name, _ in bars])
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.1)
        axes.set_xlabel("share of a step")
        axes.set_title(title_of(found), loc="left", fontsize=11)
        patches = [Patch(color=shade, label=part) for part, shade in shades.items()]
        axes.legend(handles=patches, frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))


# ----------------------------------------------------------------------------------------------------------------------

HOMES = {
    "vertical/host/eager": "all in host memory",
    "vertical/0.75/eager": "planned, three quarters of it as host memory",
    "vertical/ssd/eager": "all on SSD",
}
FIGURE_OF: dict[str, tuple[str, Callable[[dict[str, Any], Path], None]]] = {
    **{f"race-{size}": (f"race-{size}", contestants) for size in ("25m", "110m", "350m")},
    "race-110m-bounds": ("race-110m", panels),
    "race-homes": ("race-110m", some(HOMES)),
    "race-curves": ("race-curves", curves),
    "race-breakdown": ("race-breakdown", breakdown),
}


def throughputs(found: dict[str, Any], key: str = "median_seconds") -> dict[str, list[tuple[int, float]]]:
    """Tokens a second by contestant: what it reached, or what one of its bounds allows."""
    series: dict[str, list[tuple[int, float]]] = {}
    for run in found["heats"]:
        for name, each in run["contestants"].items():
            if each.get(key) and each["verdict"] == "right":
                series.setdefault(name, []).append((run["micro_batches"], run["tokens"] / each[key]))
    return series


def over_micro_batches(axes: Any, series: Mapping[str, Sequence[tuple[int, float]]], *, labels: bool = True) -> None:
    """Powers of two, evenly; from nothing up to a little more than the fastest."""
    numbers = sorted({number for points in series.values() for number, _ in points})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(numbers))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels(map(str, numbers))
    axes.set_ylim(0, 1.12 * max((speed for points in series.values() for _, speed in points), default=1.0))
    if labels:
        axes.set_xlabel("micro-batches a step")
        axes.set_ylabel("tokens/s")


def colour(name: str, series: Mapping[str, Any]) -> str:
    peer = name.split("/")[0]
    ours = [each for each in series if each.split("/")[0] not in KNOWN]
    return KNOWN[peer] if peer in KNOWN else OURS[ours.index(name) % len(OURS)]


def line(name: str) -> dict[str, Any]:
    """Peers' lines are broken."""
    style = "--" if name.split("/")[0] in KNOWN else "-"
    return {"label": name, "linewidth": 1.6, "marker": "o", "markersize": 3.5, "linestyle": style, "zorder": 3}


def look_of(name: str) -> dict[str, Any]:
    if name in NOISE:
        return {"color": "#9aa3ad", "linewidth": 1.0, "linestyle": ("--", ":")[NOISE.index(name)]}
    return {"color": {"vertical": "#0072b2", "horizontal": "#e69f00"}.get(name, INK), "linewidth": 1.3}


def parts_of(each: dict[str, Any]) -> dict[str, float]:
    """Seconds by what they were spent on."""
    lanes = {"ssd_read": "waiting for reads", "ssd_write": "waiting for writes", "cpu": "waiting for updates"}
    found = {"computing": each["compute"]} | dict.fromkeys([*lanes.values(), "waiting, other"], 0.0)
    for cause, value in each["waits"].items():
        found[lanes.get(cause.split(" ")[0], "waiting, other")] += value
    return {part: value for part, value in (found | {"Python": each["python"]}).items() if value}


def title_of(found: dict[str, Any]) -> str:
    setting = found["setting"]
    micro_batch = f"micro-batches of {setting['micro_batch_size']} x {setting['sequence']} tokens"
    return f"GPT-2, {setting['layers']} x {setting['hidden']}, {micro_batch}, {setting['precision']}"


@contextmanager
def figure(path: Path, inches: tuple[float, float]) -> Iterator[Figure]:
    """A figure that is written to `path` at the end."""
    with matplotlib.rc_context(STYLE):
        drawn = Figure(figsize=inches, layout="constrained")
        yield drawn
        drawn.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figures", nargs="*", choices=[[], *FIGURE_OF, "race-traffic"])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--into", type=Path, default=FIGURES)
    parser.add_argument("--normalised", action="store_true", help="draw seconds at the machine's median speed")
    arguments = parser.parse_args()
    change = normalised if arguments.normalised else dict
    wanted = arguments.figures or [*FIGURE_OF, "race-traffic"]
    arguments.into.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        path = arguments.into / f"{name}.svg"
        if name == "race-traffic":
            with figure(path, (8.6, 4.2)) as drawn:
                draw_traffic(drawn)
            continue
        stem, draw = FIGURE_OF[name]
        source = arguments.results / f"{stem}.json"
        if source.exists():
            draw(change(json.loads(source.read_text())), path)
        else:
            print(f"{name}: not drawn, there is no {source.name}")


if __name__ == "__main__":
    main()
