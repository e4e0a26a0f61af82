"""gpu_page: the results of `benchmarks.gpu` as one page of Markdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.common import table
from gs_compile.machine import format_bytes


def page(found: dict[str, Any]) -> str:
    """All parts that were run; one that failed or had no time says so."""
    machine, case = found["machine"], found["case"]
    lines = [
        f"# Measured on {machine['device']}",
        "",
        f"{machine['date']}, torch {found['torch']}, {machine['cores']} cores of {machine['processor']}, "
        f"{format_bytes(machine['memory_bytes'])} of host memory.",
        f"GPT-2 shape: {case['layers']} layers of {case['hidden']}, {case['sequence']} tokens, micro-batches of "
        f"{case['micro_batch_size']}, {case['precision']}.",
    ]
    for name, part in found["parts"].items():
        lines += ["", f"## {name} ({part['part_seconds']:.0f} s)", ""]
        problem = part.get("error") or part.get("incomplete")
        lines += [problem, ""] if problem else []
        lines += [] if part.get("error") else SECTIONS[name](part)
    return "\n".join(lines) + "\n"


def _smoke(part: dict[str, Any]) -> list[str]:
    placements = part.get("placements", [])
    return [f"{part['steps']} steps learn the same bits: {', '.join(placements)}."] if placements else []


def _tests(part: dict[str, Any]) -> list[str]:
    if "passed" not in part:
        return []
    counts = f"{part['passed']} passed, {len(part['failed'])} failed, {part['skipped']} skipped."
    return [counts, *(f"* failed: {name}" for name in part["failed"])]


def _lanes(part: dict[str, Any]) -> list[str]:
    rows = [
        (
            lane,
            f"{each['seconds']:.3g}",
            format_bytes(int(each["nbytes"])) if each["nbytes"] else "-",
            f"{each['bytes_per_second'] / 1e9:.3g}" if each["nbytes"] else "-",
            f"{each['beside_compute']:.0%}",
        )
        for lane, each in part.get("lanes", {}).items()
    ]
    return [table(("lane", "seconds at work", "moved", "GB/s at work", "beside the computation"), rows)]


def _steps(part: dict[str, Any]) -> list[str]:
    def row(each: dict[str, Any]) -> tuple[str, ...]:
        start = str(each["micro_batches"]), each["run"]
        if "refused" in each:
            return (*start, each["refused"], "", "", "")
        peaks = ", ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in each["planned_nbytes"].items())
        seen = "-"
        if each["allocated_nbytes"]:
            allocated, reserved = (format_bytes(each[f"{kind}_nbytes"]) for kind in ("allocated", "reserved"))
            seen = f"{allocated} allocated, {reserved} reserved, {each['retries']} retries"
        return (*start, f"{each['seconds']:.3g}", f"{each['tokens_per_second']:,.0f}", peaks, seen)

    headings = ("n", "run", "seconds a step", "tokens/s", "planned peaks", "device memory")
    return [table(headings, map(row, part.get("rows", [])))]


def _race(part: dict[str, Any]) -> list[str]:
    rows = [
        (
            str(run["micro_batches"]),
            name,
            f"{each['median_seconds']:.3g}" if "median_seconds" in each else "-",
            f"{run['tokens'] / each['median_seconds']:,.0f}" if "median_seconds" in each else "-",
            each["verdict"].splitlines()[0],
        )
        for run in part.get("heats", [])
        for name, each in run["contestants"].items()
    ]
    return [table(("n", "contestant", "seconds a step", "tokens/s", "verdict"), rows)]


SECTIONS: dict[str, Callable[[dict[str, Any]], list[str]]] = {
    "smoke": _smoke,
    "tests": _tests,
    "lanes": _lanes,
    "steps": _steps,
    "race": _race,
}
