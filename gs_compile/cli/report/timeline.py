"""timeline: a simulated step as one HTML page that needs nothing else: lanes as rows, time to the right.

Each operation is a rectangle, coloured by what it moves or computes. Where the computation waits, its lane is hatched,
and says for what. The critical path is outlined; below is the memory of each tier. The page (`timeline.html`) draws on
a canvas what is in view, so that tens of thousands of operations are no burden to it.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from gs_compile.planner.simulate.simulator import Simulation, Span
from gs_compile.program.ir import LANES, Op

PAGE = Path(__file__).with_name("timeline.html")
KINDS = ("w", "x", "dx", "s", "dw", "update", "forward", "backward", "other")
MOVED = frozenset({"w", "x", "dx", "s", "dw"})  # kinds that transfers have a colour for
MOST_CAUSES = 4  # of waiting, that are said in words
NUMBER = re.compile(r"\d+")


def timeline_html(
    simulation: Simulation,
    *,
    title: str,
    notes: Sequence[str] = (),
    texts: Mapping[str, str] | None = None,
) -> str:
    """The page. notes: lines below the title; texts: what is folded below the picture, such as the program, by heading.

    A step's operations may begin before it and end after it: its edges are marked.
    """
    parts = {
        "title": html.escape(title),
        "notes": "\n".join(f"<p>{html.escape(note)}</p>" for note in (*notes, summary(simulation))),
        "details": "\n".join(
            f"<details><summary>{html.escape(heading)}</summary><pre>{html.escape(text)}</pre></details>"
            for heading, text in (texts or {}).items()
        ),
        "data": json.dumps(_data(simulation), separators=(",", ":")).replace("<", "\\u003c"),
    }
    return re.sub(r"@(title|notes|details|data)\b", lambda found: parts[found[1]], PAGE.read_text())


def _data(simulation: Simulation) -> dict[str, Any]:
    """The data that the page draws; times in nanoseconds, in whole numbers."""
    rows = [[span for span in simulation.spans if span.lane == lane] for lane in LANES]
    spans = [span for row in rows for span in row]
    ends = {(span.lane, span.stop_seconds): number for number, span in enumerate(spans)}
    critical = {(span.index, span.start_seconds) for span in simulation.critical_path}  # some are of the step before
    tables = _Tables()
    lanes = [
        {
            "name": row[0].lane,
            "busy": round(simulation.busy[row[0].lane], 4),
            **_times(row),
            "kind": [KINDS.index(kind_of(span.op)) for span in row],
            "nbytes": [span.nbytes for span in row],
            "cause": [tables.number("causes", span.waited_for) for span in row],
            "after": [ends.get((span.waited_for.partition(" ")[0], span.start_seconds), -1) for span in row],
            "critical": [int((span.index, span.start_seconds) in critical) for span in row],
            "stage": [tables.number("stages", str(span.op.stage)) for span in row],
            **tables.texts(row),
        }
        for row in rows
        if row
    ]
    return {
        "seconds": _ns(simulation.seconds),
        "begin": min((_ns(span.start_seconds) for span in spans if span.start_seconds < 0), default=0),
        "end": max(_ns(simulation.seconds), *(_ns(span.stop_seconds) for span in spans)),
        "kinds": KINDS,
        "lanes": lanes,
        "words": tables.words(),
        "stages": list(_stages(rows[LANES.index("compute")])),
        "memory": [_memory(tier, curve) for tier, curve in simulation.memory.items()],
    }


def summary(simulation: Simulation) -> str:
    """``Simulated: 12.3 s a step, of which the computation works 78 %, and waits 20 % for ssd_read s, 2 % for cpu.``"""
    waits = sorted(simulation.bubbles.items(), key=lambda entry: -entry[1])
    shares = [f"{seconds / simulation.seconds:.1%} for {cause}" for cause, seconds in waits if seconds > 0]
    busy = simulation.busy.get("compute", 0.0)
    words = f"Simulated: {simulation.seconds:.4g} s a step, of which the computation works {busy:.1%}"
    return words + (f", and waits {', '.join(shares[:MOST_CAUSES])}." if shares else ".")


def kind_of(op: Op) -> str:
    """The kind that colours an operation: one of `KINDS`."""
    match op.verb:
        case "prefetch" | "offload":
            return op.reads[0].kind if op.reads[0].kind in MOVED else "other"
        case "embed" | "forward" | "head" if not op.into:
            return "forward"
        case "head" | "head_backward" | "backward" | "embed_backward":
            return "backward"
        case "update":
            return "update"
    return "other"


class _Tables:
    """Texts that come again, each once and then by its number; of lines of the program, all but their numbers."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, int]] = {"lines": {}, "causes": {}, "stages": {}}

    def number(self, table: str, text: str) -> int:
        return self.tables[table].setdefault(text, len(self.tables[table]))

    def texts(self, spans: Sequence[Span]) -> dict[str, list[int]]:
        """``x1_0.device = ...`` as the number of ``x#_#.device = ...``, and 1 and 0."""
        texts = [str(span.op) for span in spans]
        return {
            "line": [self.number("lines", NUMBER.sub("#", text)) for text in texts],
            "numbers": [int(number) for text in texts for number in NUMBER.findall(text)],
        }

    def words(self) -> dict[str, list[str]]:
        return {name: list(table) for name, table in self.tables.items()}


def _times(spans: Sequence[Span]) -> dict[str, list[int]]:
    """The gap before each operation and its length; a lane is first-in-first-out, so none overlaps the one before."""
    gaps, lengths, now = [], [], 0
    for span in spans:
        start, stop = _ns(span.start_seconds), _ns(span.stop_seconds)
        gaps.append(start - now)
        lengths.append(stop - start)
        now = stop
    return {"gap": gaps, "length": lengths}


def _stages(compute: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """Each stage from its first computation to that of the next one."""
    groups = [(stage, list(spans)) for stage, spans in groupby(compute, key=lambda span: span.op.stage)]
    ends = [spans[0].start_seconds for _, spans in groups[1:]] + [spans[-1].stop_seconds for _, spans in groups[-1:]]
    for (stage, spans), end in zip(groups, ends, strict=True):
        unit = "" if stage.unit is None else str(stage.unit)
        yield {"phase": stage.phase, "unit": unit, "start": _ns(spans[0].start_seconds), "stop": _ns(end)}


def _memory(tier: str, points: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """The steps of a tier's memory, as gaps in time and changes in bytes."""
    times = [_ns(seconds) for seconds, _ in points]
    levels = [nbytes for _, nbytes in points]
    return {"tier": tier, "times": _changes(times), "nbytes": _changes(levels)}


def _changes(values: Sequence[int]) -> list[int]:
    return [value - before for value, before in zip(values, [0, *values], strict=False)]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
