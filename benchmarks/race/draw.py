"""draw: the figures of docs/race.md, from the results that are there.

    python -m benchmarks.race.draw                        # all, into docs/figures
    python -m benchmarks.race.draw race-curves race-110m # these

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
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks.common import FIGURES, RESULTS
from benchmarks.race.curves import NOISE
from benchmarks.race.measures import normalised
from benchmarks.race.registry import PLAIN
from benchmarks.race.traffic import TITLE, counted
from gs_compile.cli.report.draw import INK, STYLE, traffic_bars

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


# ----------------------------------------------------------------------------------------------------------------------

FIGURE_OF: dict[str, tuple[str, Callable[[dict[str, Any], Path], None]]] = {
    **{f"race-{size}": (f"race-{size}", contestants) for size in ("110m-slow", "110m")},
    "race-curves": ("race-curves", curves),
}


def throughputs(found: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Tokens a second by contestant."""
    series: dict[str, list[tuple[int, float]]] = {}
    for run in found["heats"]:
        for name, each in run["contestants"].items():
            if "median_seconds" in each and each["verdict"] == "right":
                series.setdefault(name, []).append((run["micro_batches"], run["tokens"] / each["median_seconds"]))
    return series


def over_micro_batches(axes: Any, series: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """Powers of two, evenly; from nothing up to a little more than the fastest."""
    numbers = sorted({number for points in series.values() for number, _ in points})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(numbers))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels(map(str, numbers))
    axes.set_ylim(0, 1.12 * max((speed for points in series.values() for _, speed in points), default=1.0))
    axes.set_xlabel("micro-batches a step")
    axes.set_ylabel("tokens/s")


def colour(name: str, series: Mapping[str, Any]) -> str:
    peer = name.split("/")[0]
    ours = [each for each in series if each.split("/")[0] not in KNOWN]
    return KNOWN[peer] if peer in KNOWN else OURS[ours.index(name) % len(OURS)]


def line(name: str) -> dict[str, Any]:
    """Peers' lines are broken, with settings of their own dotted."""
    peer, *settings = name.split("/")
    style = "-" if peer not in KNOWN else ":" if settings else "--"
    return {"label": name, "linewidth": 1.6, "marker": "o", "markersize": 3.5, "linestyle": style, "zorder": 3}


def look_of(name: str) -> dict[str, Any]:
    if name in NOISE:
        return {"color": "#9aa3ad", "linewidth": 1.0, "linestyle": ("--", ":")[NOISE.index(name)]}
    return {"color": {"vertical": "#0072b2", "horizontal": "#e69f00"}.get(name, INK), "linewidth": 1.3}


def title_of(found: dict[str, Any]) -> str:
    setting = found["setting"]
    micro_batch = f"micro-batches of {setting['micro_batch_size']} x {setting['sequence']} tokens"
    rates = found.get("drive_bytes_per_second")
    drive = f", drive of {rates[0] / 1e6:.0f} MB/s" if rates else ""
    return f"GPT-2, {setting['layers']} x {setting['hidden']}, {micro_batch}, {setting['precision']}{drive}"


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
            traffic_bars(counted(), path, title=TITLE)
            continue
        stem, draw = FIGURE_OF[name]
        source = arguments.results / f"{stem}.json"
        if source.exists():
            draw(change(json.loads(source.read_text())), path)
        else:
            print(f"{name}: not drawn, there is no {source.name}")


if __name__ == "__main__":
    main()
