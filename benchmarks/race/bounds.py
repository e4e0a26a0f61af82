"""bounds: what the race must show, each with the results that tell whether it does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import ge, le
from statistics import median
from typing import Any

from benchmarks.race.curves import NOISE_FACTOR, noise

SATURATED = 16  # micro-batches
FREE = {1: 2.0, SATURATED: 2.5}  # times ZeRO-Infinity's throughput, by micro-batches
SLOWED = {"race-110m-slow": "200 MB/s", "race-110m-paper": "80 MB/s"}
SLOW = {("200 MB/s", 4): 3.8, ("200 MB/s", SATURATED): 5.5}  # the same on a slowed drive
LEAST_SLOW = 2.53  # on a slowed drive with any other number, or with parameters in host memory
LEAST_SHARES = {1: 0.9}  # of the roofline
LEAST_SHARE = 0.95
IN_MEMORY = "parameters=cpu"
ON_SSD = "vertical/ssd/inductor"
PLANNED = {"110m": "half", "350m": "quarter"}  # host memory, in bytes of parameters and states
MEDIAN_ERROR, WORST_ERROR = 0.05, 0.1  # of predictions
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
    found = [claim for name, speed in SLOWED.items() for claim in _slow(files.get(name), speed)]
    found += [*_planned(sizes), *_all_on_ssd(sizes.get("110m"))]
    found += [_memory(sizes.get("350m")), *_predictions(files.values()), _orders(files.get("race-orders"))]
    return [*found, _curves(files.get("race-curves"))]


def _slow(found: Any, speed: str) -> Iterator[Claim]:
    """On a drive that is slowed, so that it binds; and how near to it our steps come."""
    slowed = f"110m, drive slowed to {speed}"
    where = f"{slowed}, everything on SSD, compiled"
    for number in _numbers(found):
        timed = _timed(found, number)
        on_ssd = {name: each for name, each in timed.items() if IN_MEMORY not in name}
        ratio, least = _against(on_ssd, ON_SSD, "zero-infinity"), SLOW.get((speed, number), LEAST_SLOW)
        what = f"{where}, n = {number}: throughput against ZeRO-Infinity"
        yield Claim(what, f">= {least} x", *_answer(ratio, partial(le, least)))
        if f"zero-infinity/{IN_MEMORY}" in found["contestants"]:
            ours = "vertical/parameters/inductor"
            ratio = _against(timed, ours, f"zero-infinity/{IN_MEMORY}")
            what = f"{slowed}, both with their parameters in host memory, compiled, n = {number}: the same"
            if _computation_binds(timed.get(ours, {})):
                yield Claim(what, "where the drive binds", "" if ratio is None else f"{ratio:.2f} x: computation binds")
            else:
                yield Claim(what, f">= {LEAST_SLOW} x", *_answer(ratio, partial(le, LEAST_SLOW)))
        yield _share(where, timed, number)


def _planned(sizes: Mapping[str, Any]) -> Iterator[Claim]:
    """Against the best that anyone does with as many micro-batches, with all choices of what is computed again."""
    for size, part in PLANNED.items():
        timed = _timed(sizes.get(size), SATURATED)
        for others, name, least in (("zero-infinity", "ZeRO-Infinity", 2.53), ("plain", "plain PyTorch", 1.0)):
            ratio = _against(timed, f"vertical/{part}/inductor", others)
            what = f"{size}, n = {SATURATED}, planned in {part} of its bytes, compiled: throughput against {name}"
            yield Claim(f"{what}, at its best", f">= {least} x", *_answer(ratio, partial(le, least)))


def _all_on_ssd(found: Any) -> Iterator[Claim]:
    """On a drive as fast as it is."""
    where = "110m, everything on SSD, compiled"
    for number, least in FREE.items():
        timed = _timed(found, number)
        ratio = _against(timed, ON_SSD, "zero-infinity")
        what = f"{where}, n = {number}: throughput against ZeRO-Infinity"
        yield Claim(what, f">= {least} x", *_answer(ratio, partial(le, least)))
    ratio = _against(_timed(found, SATURATED), "plain", ON_SSD)
    what = f"{where}, n = {SATURATED}: step time against plain PyTorch in memory, at its best"
    yield Claim(what, "<= 1.05 x", *_answer(ratio, partial(ge, 1.05)))
    for number in _numbers(found):
        yield _share(where, _timed(found, number), number)


def _share(where: str, timed: Mapping[str, Any], number: int) -> Claim:
    """How near to its roofline a step with everything on SSD comes."""
    what, least = f"{where}, n = {number}: share of the roofline", LEAST_SHARES.get(number, LEAST_SHARE)
    share = timed.get(ON_SSD, {}).get("share")
    if share is not None and share > MOST_SHARE:
        return Claim(what, f">= {least}", f"{share:.2f}: the drive was measured too slow")
    return Claim(what, f">= {least}", *_answer(share, partial(le, least)))


def _memory(found: Any) -> Claim:
    """At the largest n that both were timed at."""
    what, bound = "350m: peak resident memory against ZeRO-Infinity's", "below"
    for number in reversed(_numbers(found)):
        timed = _timed(found, number)
        theirs = [each["step_peak_rss"] for name, each in timed.items() if name.startswith("zero-infinity")]
        if theirs and (ours := timed.get(f"vertical/{PLANNED['350m']}/inductor")):
            ratio = ours["step_peak_rss"] / min(theirs)
            return Claim(what, bound, f"{ratio:.2f} x (n = {number})", ratio < 1)
    return Claim(what, bound)


def _predictions(every: Iterable[Any]) -> Iterator[Claim]:
    """Of all runs of ours that were predicted: the simulator's seconds against those measured."""
    timed = [each for found in every for number in _numbers(found) for each in _timed(found, number).values()]
    pairs = [(each["predicted_seconds"], each["median_seconds"]) for each in timed if "predicted_seconds" in each]
    errors = [abs(predicted / measured - 1) for predicted, measured in pairs]
    for word, bound, of in (("median", MEDIAN_ERROR, median), ("worst", WORST_ERROR, max)):
        what = f"seconds of a step, predicted against measured, {len(errors)} runs: {word} error"
        error = of(errors) if errors else None
        found = "" if error is None else f"{error:.1%}"
        yield Claim(what, f"<= {bound:.0%}", found, None if error is None else error <= bound)


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
    return [run["micro_batches"] for run in found.get("heats", ())] if found else []


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


def _computation_binds(found: Mapping[str, Any]) -> bool:
    """Whether the drive could be done with the contestant's bytes while its step is computed."""
    return found.get("io_seconds", 0.0) < found.get("compute_seconds", 0.0)


def _fastest(timed: Mapping[str, Any], begin: str) -> float | None:
    """The least time, in plain's of the same rounds, of contestants whose names begin so."""
    return min((each.get("times_plain") or 1.0 for name, each in timed.items() if name.startswith(begin)), default=None)


def _against(timed: Mapping[str, Any], ours: str, theirs: str) -> float | None:
    """Of two systems at their fastest, how often ours is as fast; None where one was not timed."""
    mine, others = _fastest(timed, ours), _fastest(timed, theirs)
    return others / mine if mine and others else None


def _answer(ratio: float | None, holds: Any) -> tuple[str, bool | None]:
    return ("", None) if ratio is None else (f"{ratio:.2f} x", holds(ratio))
