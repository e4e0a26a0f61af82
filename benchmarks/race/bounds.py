"""bounds: what the race must show, each with the results that tell whether it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import le
from typing import Any

from benchmarks.race.curves import NOISE_FACTOR, noise

SATURATED = 16  # micro-batches
IO_BOUND = (1, 2)
SLOW = {
    1: 2.53,
    2: 2.53,
    4: 3.8,
    8: 2.53,
    16: 5.5,
}  # times ZeRO-Infinity's throughput on a slowed drive, by micro-batches
IN_MEMORY = "parameters=cpu"
PLANNED = {"110m": "half", "350m": "quarter"}  # host memory, in bytes of parameters and states
MOST_SHARE = 1.1  # of a roofline; where more is reached, the roofline was measured wrong


@dataclass(frozen=True)
class Claim:
    """One line: what, how much it has to be, what was found and whether that is enough; "" where nothing was."""

    what: str
    bound: str
    found: str = ""
    holds: bool | None = None

    @property
    def verdict(self) -> str:
        return {True: "holds", False: "**missed**", None: ""}[self.holds]


def bounds(files: Mapping[str, Any]) -> list[Claim]:
    """All claims; `files`: results by the names of their files."""
    sizes = {size: files[f"race-{size}"] for size in ("110m", "350m") if f"race-{size}" in files}
    planned = {size: files[f"race-{size}-planned"] for size in PLANNED if f"race-{size}-planned" in files}
    found = [*_slow(files.get("race-110m-slow")), *_planned(planned), *_against_plain(sizes)]
    found += [*_against_zero(sizes), *_shares(sizes)]
    return [*found, _memory(sizes.get("350m")), _orders(files.get("race-orders")), _curves(files.get("race-curves"))]


def _slow(found: Any) -> Iterator[Claim]:
    """On a drive that is slowed, so that it binds; and how near to it our steps come, and to what was predicted."""
    slowed = "110m, drive slowed to 200 MB/s"
    where = f"{slowed}, everything on SSD, compiled"
    for number in _numbers(found):
        timed = _timed(found, number)
        on_ssd = {name: each for name, each in timed.items() if IN_MEMORY not in name}
        ratio, least = _against(on_ssd, "vertical/ssd/inductor", "zero-infinity"), SLOW.get(number, 2.53)
        what = f"{where}, n = {number}: throughput against ZeRO-Infinity"
        yield Claim(what, f">= {least} x", *_answer(ratio, partial(le, least)))
        ratio = _against(timed, "vertical/parameters/inductor", f"zero-infinity/{IN_MEMORY}")
        what = f"{slowed}, both with their parameters in host memory, compiled, n = {number}: the same"
        yield Claim(what, ">= 2.53 x", *_answer(ratio, partial(le, 2.53)))
        share = timed.get("vertical/ssd/inductor", {}).get("share")
        least = 0.9 if number == 1 else 0.95
        yield Claim(f"{where}, n = {number}: share of the roofline", f">= {least}", *_answer(share, partial(le, least)))


def _planned(sizes: Mapping[str, Any]) -> Iterator[Claim]:
    """Against the best that anyone does with as many micro-batches, with all choices of what is computed again."""
    for size, part in PLANNED.items():
        timed = _timed(sizes.get(size), SATURATED)
        for others, name, least in (("zero-infinity", "ZeRO-Infinity", 2.53), ("plain", "plain PyTorch", 1.0)):
            ratio = _against(timed, f"vertical/{part}/inductor", others)
            what = f"{size}, n = {SATURATED}, planned in {part} of its bytes, compiled: throughput against {name}"
            yield Claim(f"{what}, at its best", f">= {least} x", *_answer(ratio, partial(le, least)))


def _against_plain(sizes: Mapping[str, Any]) -> Iterator[Claim]:
    for size in ("110m", "350m"):
        what = f"{size}, n = {SATURATED}, everything on SSD, eager: step time against plain PyTorch in memory"
        each = _timed(sizes.get(size), SATURATED).get("vertical/ssd/eager", {})
        ratio = each.get("times_plain")
        yield Claim(what, "<= 1.05 x", *_answer(ratio, lambda value: value <= 1.05))


def _against_zero(sizes: Mapping[str, Any]) -> Iterator[Claim]:
    for size in ("110m", "350m"):
        for number, least in ((SATURATED, 2.5), *((number, 2.0) for number in IO_BOUND)):
            timed = _timed(sizes.get(size), number)
            ratio = _against(timed, "vertical/ssd/inductor", "zero-infinity")
            what = f"{size}, n = {number}, everything on SSD, compiled: throughput against ZeRO-Infinity"
            yield Claim(what, f">= {least} x", *_answer(ratio, partial(le, least)))


def _shares(sizes: Mapping[str, Any]) -> Iterator[Claim]:
    for size in ("110m", "350m"):
        shares = [
            (timed["vertical/ssd/eager"]["share"], number)
            for number in _numbers(sizes.get(size))
            if "share" in (timed := _timed(sizes[size], number)).get("vertical/ssd/eager", {})
        ]
        what = f"{size}, everything on SSD, eager: least share of the roofline over all n"
        if not shares:
            yield Claim(what, ">= 0.9")
            continue
        least, number = min(shares)
        if max(shares)[0] > MOST_SHARE:
            yield Claim(what, ">= 0.9", f"{max(shares)[0]:.2f}: the drive was measured too slow", None)
            continue
        yield Claim(what, ">= 0.9", f"{least:.2f} (n = {number})", least >= 0.9)


def _memory(found: Any) -> Claim:
    """At the largest n that both were timed at."""
    what, bound = "350m: peak resident memory against ZeRO-Infinity's", "below"
    for number in reversed(_numbers(found)):
        timed = _timed(found, number)
        theirs = [each["step_peak_rss"] for name, each in timed.items() if name.startswith("zero-infinity")]
        if theirs and "vertical/ssd/eager" in timed:
            ratio = timed["vertical/ssd/eager"]["step_peak_rss"] / min(theirs)
            return Claim(what, bound, f"{ratio:.2f} x (n = {number})", ratio < 1)
    return Claim(what, bound)


def _orders(found: Any) -> Claim:
    what, bound = "vertical against horizontal: simulated ratio against measured, worst n", "within 10 %"
    if not found:
        return Claim(what, bound)
    row = max(found["rows"], key=lambda row: abs(row["apart"]))
    return Claim(what, bound, f"{row['apart']:+.1%} (n = {row['micro_batches']})", abs(row["apart"]) <= 0.1)


def _curves(found: Any) -> Claim:
    what = "loss over 200 steps on real text, vertical and horizontal: largest difference from plain, in noises"
    bound = f"<= {NOISE_FACTOR:g}"
    differences = found["largest_difference"] if found else {}
    ours = [differences[name] for name in ("vertical", "horizontal") if name in differences]
    if not ours or not noise(differences):
        return Claim(what, bound)
    ratio = max(ours) / noise(differences)
    return Claim(what, bound, f"{ratio:.2f}", ratio <= NOISE_FACTOR)


# ----------------------------------------------------------------------------------------------------------------------


def _numbers(found: Any) -> list[int]:
    return [run["micro_batches"] for run in found["heats"]] if found else []


def _timed(found: Any, number: int) -> dict[str, Any]:
    """The contestants of one run that were timed, and right."""
    for run in found["heats"] if found else ():
        if run["micro_batches"] == number:
            return {
                name: each
                for name, each in run["contestants"].items()
                if "median_seconds" in each and each["verdict"] == "right"
            }
    return {}


def _fastest(timed: Mapping[str, Any], begin: str) -> float | None:
    """The least time, in plain's of the same rounds, of contestants whose names begin so."""
    return min((each.get("times_plain") or 1.0 for name, each in timed.items() if name.startswith(begin)), default=None)


def _against(timed: Mapping[str, Any], ours: str, theirs: str) -> float | None:
    """Of two systems at their fastest, how often ours is as fast; None where one was not timed."""
    mine, others = _fastest(timed, ours), _fastest(timed, theirs)
    return others / mine if mine and others else None


def _answer(ratio: float | None, holds: Any) -> tuple[str, bool | None]:
    return ("", None) if ratio is None else (f"{ratio:.2f} x", holds(ratio))
