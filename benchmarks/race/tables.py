"""tables: the tables of docs/race.md, docs/measured.md and docs/planner.md, from the results that are there.

    python -m benchmarks.race.tables            # prints them
    python -m benchmarks.race.tables --write    # puts them between the markers in the pages

A block of a page begins with a line `<!-- table: NAME -->`, or `<!-- figure: NAME -->`, and ends with `<!-- end -->`.
What has no results yet says that it has not been measured.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.chosen import BUDGETS, MOST_SLOWER, MOST_SLOWER_WITH_MORE, by_hand, planned
from benchmarks.common import FIGURES, RESULTS, ROOT, table
from benchmarks.measured import (
    checksums_table,
    drive_table,
    memory_table,
    step_table,
    turns_table,
    updates_table,
    wear_table,
)
from benchmarks.race.bounds import bounds
from benchmarks.race.curves import NOISE, noise
from benchmarks.race.measures import normalised
from gs_compile.machine import format_bytes

PAGES = [ROOT / "docs" / f"{name}.md" for name in ("race", "measured", "planner")]
MISSING = "*Not measured yet.*"
MARKERS = re.compile(r"(<!-- (table|figure): ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def race_table(found: dict[str, Any]) -> str:
    """A row for each contestant and number of micro-batches."""
    head = (
        *("n", "contestant", "s a step", "±", "predicted", "tokens/s", "x plain", "of its roofline"),
        *("peak", "read", "written", "nothing computed, by cause"),
    )
    rows, remarks = [], []
    for run in found["heats"]:
        for name, each in run["contestants"].items():
            if "median_seconds" not in each or each["verdict"] != "right":
                remarks.append(f"n = {run['micro_batches']}, `{name}`: {each['verdict'].splitlines()[0]}")
                continue
            rows.append(
                (
                    run["micro_batches"],
                    f"`{name}`",
                    f"{each['median_seconds']:.3g}",
                    f"{each['spread']:.0%}",
                    f"{each['predicted_seconds']:.3g}" if "predicted_seconds" in each else "",
                    f"{run['tokens'] / each['median_seconds']:.0f}",
                    f"{each['times_plain']:.2f}" if "times_plain" in each else "1" if name == "plain" else "",
                    f"{each['share']:.0%}" if "share" in each else "",
                    format_bytes(each["step_peak_rss"]),
                    format_bytes(int(each["read_bytes"])),
                    format_bytes(int(each["write_bytes"])),
                    waits_of(each),
                )
            )
    spreads = [run["matmul_spread"] for run in found["heats"] if run["matmul_spread"]]
    noisy = f"The machine's own speed went from 1 to {max(spreads):.2f} in a run. " if spreads else ""
    alone = [run for run in found["heats"] if len(run["groups"]) > 1]
    grouped = "Memory did not hold all at once: they raced in groups, each beside plain. " if alone else ""
    return "\n\n".join([table(head, rows), *remarks, *filter(None, [f"{noisy}{grouped}".strip()])])


def waits_of(each: dict[str, Any]) -> str:
    """Seconds of a step of ours in which nothing was computed, and those causes that took a hundredth of it or more."""
    waits = each.get("waits", {})
    causes = [f"`{cause}` {value:.2g}" for cause, value in waits.items() if value >= 0.01 * each["median_seconds"]]
    return f"{sum(waits.values()):.2g} s: {', '.join(causes)}".rstrip(": ") if waits else ""


def chosen_table(found: dict[str, Any]) -> str:
    """The planner's choice against the fastest by hand, and each budget against the next smaller one, by rounds."""
    head = (
        "n",
        "compiler",
        "planned, s",
        "predicted",
        "fastest by hand",
        "s",
        "planned / by hand",
        "by budget, s",
        "worst",
    )
    rows = []
    for run in found["heats"]:
        timed = {name: each for name, each in run["contestants"].items() if "seconds" in each}
        for compiler in ("eager", "inductor"):
            if (chosen := timed.get(planned(compiler))) is None:
                continue
            hands = [name for name in by_hand(compiler) if name in timed]
            fastest = min(hands, key=lambda name: timed[name]["median_seconds"])
            budgets = [timed[name] for part in BUDGETS if (name := planned(compiler, part)) in timed]
            steps = [times(more, less) for less, more in pairwise(budgets)]
            rows.append(
                (
                    run["micro_batches"],
                    compiler,
                    f"{chosen['median_seconds']:.3g}",
                    f"{chosen['predicted_seconds']:.3g}" if "predicted_seconds" in chosen else "",
                    f"`{fastest}`",
                    f"{timed[fastest]['median_seconds']:.3g}",
                    _within(times(chosen, timed[fastest]), MOST_SLOWER),
                    ", ".join(f"{each['median_seconds']:.3g}" for each in budgets),
                    _within(max(steps), MOST_SLOWER_WITH_MORE) if steps else "",
                )
            )
    return table(head, rows)


def _within(ratio: float, most: float) -> str:
    return f"{ratio:.3f}" if ratio <= most else f"{ratio:.3f} **missed**"


def times(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How many times as long one takes as another, by the rounds that both were in."""
    if len(one["seconds"]) == len(other["seconds"]):
        return statistics.median(a / b for a, b in zip(one["seconds"], other["seconds"], strict=True))
    return float(one["median_seconds"] / other["median_seconds"])


def orders_table(found: dict[str, Any]) -> str:
    """Seconds of both orders, and their ratios."""
    head = "n", "vertical, s", "horizontal, s", "measured ratio", "simulated ratio", "apart"
    rows = [
        (
            row["micro_batches"],
            *(f"{statistics.median(row['seconds'][order]):.3g}" for order in ("vertical", "horizontal")),
            f"{row['measured_ratio']:.3f}",
            f"{row['simulated_ratio']:.3f}",
            f"{row['apart']:+.1%}",
        )
        for row in found["rows"]
    ]
    return table(head, rows)


def curves_table(found: dict[str, Any]) -> str:
    """How far each curve is from plain's."""
    differences, scale = found["largest_difference"], noise(found["largest_difference"])
    head = "run", "first loss", "last loss", "largest relative difference from plain", "times the noise"
    rows = [
        (
            name,
            f"{losses[0]:.4f}",
            f"{losses[-1]:.4f}",
            f"{differences[name]:.1e}" if name in differences else "",
            f"{differences[name] / scale:.2f}" if name in differences and scale and name not in NOISE else "",
        )
        for name, losses in found["losses"].items()
    ]
    return table(head, rows)


def bounds_table(_: Any) -> str:
    """The bounds, and the figures that were measured."""
    files = {
        path.stem: json.loads(path.read_text())
        for stem in ("race", "chosen")
        for path in RESULTS.glob(f"{stem}-*.json")
    }
    rows = [(claim.what, claim.bound, claim.found or "not measured yet", claim.verdict) for claim in bounds(files)]
    return table(("figure", "bound", "measured", ""), rows)


TABLES: dict[str, tuple[str, Callable[..., str]]] = {  # the files of results, and what makes of them a table
    "race-25m": ("race-25m", race_table),
    "race-110m": ("race-110m", race_table),
    "race-350m": ("race-350m", race_table),
    "race-110m-slow": ("race-110m-slow", race_table),
    "race-110m-paper": ("race-110m-paper", race_table),
    "race-alpha": ("race-alpha", race_table),
    **{name: (name, chosen_table) for name in ("chosen-slow", "chosen-free", "chosen-110m-slow", "chosen-110m-free")},
    "orders": ("race-orders", orders_table),
    "curves": ("race-curves", curves_table),
    "step": ("step-cpu", step_table),
    **{name: (name, turns_table) for name in ("tiers", "tiers-io-bound", "durable", "durable-io-bound")},
    "memory": ("memory-*", memory_table),
    **{name: (name, drive_table) for name in ("ssd", "ssd-pages", "ssd-sizes")},
    "updates": ("optimizer*", updates_table),
    "checksums": ("checksums", checksums_table),
    "wear": ("wear", wear_table),
}


def filled(page: str) -> str:
    """The page with all blocks as they are now."""
    makers = {"table": make, "figure": picture}
    return MARKERS.sub(lambda found: f"{found[1]}{makers[found[2]](found[3])}\n{found[4]}", page)


def picture(name: str) -> str:
    """A figure, or that it is not there."""
    if not (FIGURES / f"{name}.svg").exists():
        return MISSING
    return f"![{name}](figures/{name}.svg)\n\n*`python -m benchmarks.race.draw {name}`*"


def make(name: str, change: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> str:
    """One block, with where it was measured and by what; `change` is done to the results before."""
    if name == "bounds":
        return bounds_table(None)
    pattern, build = TABLES[name]
    paths = sorted(RESULTS.glob(f"{pattern}.json"), key=lambda path: path.stem)
    results = [change(json.loads(path.read_text())) for path in paths]
    return f"{build(*results)}\n\n{origin(paths, results)}" if results else MISSING


def origin(paths: Sequence[Path], results: Sequence[dict[str, Any]]) -> str:
    """On what and when, and how again: of a file's commands the first, which tells the others."""
    machines = [run.get("machine", found["machine"]) for found in results for run in found.get("heats") or [found]]
    where = " and ".join(dict.fromkeys(named(each) for each in machines))
    dates = " and ".join(sorted({each["date"] for each in machines}))
    again = []
    for path, found in zip(paths, results, strict=True):
        first, *others = found.get("commands", [found.get("command")])
        more = f" and {len(others)} more like it, in `{path.relative_to(ROOT)}`" if others else ""
        again.append(f"`{first}`{more}")
    return f"{where}, {dates}. {'; '.join(again)}"


def named(machine: dict[str, Any]) -> str:
    """What a machine computes with, and its memory."""
    device, cores = machine["device"], f"{machine['cores']} cores of {machine['processor']}"
    return f"{device if device != 'cpu' else cores}, {format_bytes(machine['memory_bytes'])}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--normalised", action="store_true", help="print seconds at the machine's median speed")
    arguments = parser.parse_args()
    if arguments.write:
        for page in PAGES:
            page.write_text(filled(page.read_text()))
        return
    for name in ("bounds", *TABLES):
        print(f"## {name}\n\n{make(name, normalised if arguments.normalised else dict)}\n")


if __name__ == "__main__":
    main()
