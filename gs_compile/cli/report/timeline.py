"""timeline: a simulated step as one self-contained HTML page: lanes as rows, time to the right.

Each operation is a rectangle, coloured by what it moves or computes. Waits of the computation are hatched and labelled
with their cause. The critical path is outlined; below is the memory of each tier. The page (`timeline.html`) draws only
what is in view, on a canvas, so that it can show tens of thousands of operations.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from gs_compile.planner.simulate.prices import runs_backward
from gs_compile.planner.simulate.simulator import Simulation, Span
from gs_compile.program.ir import TRANSFERS, WORDS, Op
from gs_compile.program.verbs import SIGNATURES

PAGE = Path(__file__).with_name("timeline.html")
KINDS = ("w", "x", "a", "dx", "s", "dw", "seal", "update", "forward", "backward", "other")
FIELDS = ("lane", "start", "stop", "kind", "nbytes", "text", "stage", "cause", "after", "critical")


def timeline_html(simulation: Simulation, *, title: str, note: str = "", texts: Mapping[str, str]) -> str:
    """The page. note: below the title; texts: folded sections below the picture, such as the program, by heading.

    A step's operations may begin before it and end after it: its edges are marked.
    """
    folded = "<details><summary>{}</summary><pre>{}</pre></details>"
    parts = {
        "title": html.escape(title),
        "note": html.escape(note),
        "details": "\n".join(folded.format(*map(html.escape, each)) for each in texts.items()),
        "data": json.dumps(_data(simulation), separators=(",", ":")).replace("<", "\\u003c"),
    }
    return re.sub(r"@(title|note|details|data)\b", lambda found: parts[found[1]], PAGE.read_text(encoding="utf-8"))


def _data(simulation: Simulation) -> dict[str, Any]:
    """The data that the page draws: a span is a list of what `FIELDS` names; times in whole nanoseconds."""
    lanes = list(simulation.busy)
    spans = sorted(simulation.spans, key=lambda span: lanes.index(span.lane))
    numbers = {(span.lane, span.stop_seconds): number for number, span in enumerate(spans)}
    critical = {(span.index, span.start_seconds) for span in simulation.critical_path}  # some are of the step before
    return {
        "seconds": _ns(simulation.seconds),
        "kinds": {kind: WORDS.get(kind, kind) for kind in KINDS},
        "lanes": [{"name": lane, "busy": round(simulation.busy[lane], 4)} for lane in lanes],
        "fields": FIELDS,
        "spans": [
            (
                lanes.index(span.lane),
                _ns(span.start_seconds),
                _ns(span.stop_seconds),
                kind_of(span.op),
                span.nbytes,
                str(span.op),
                str(span.op.stage),
                span.waited_for,
                numbers.get((span.waited_for.partition(" ")[0], span.start_seconds), -1),
                int((span.index, span.start_seconds) in critical),
            )
            for span in spans
        ],
        "stages": list(_stages(span for span in spans if span.lane == "compute")),
        "memory": [
            {"tier": tier, "times": [_ns(seconds) for seconds, _ in curve], "nbytes": [nbytes for _, nbytes in curve]}
            for tier, curve in simulation.memory.items()
        ],
    }


def kind_of(op: Op) -> str:
    """The kind that colours an operation: one of `KINDS`."""
    if op.verb in TRANSFERS or op.verb == "seal":
        return op.kind if op.kind in KINDS else "other"
    if op.verb in SIGNATURES:
        return "backward" if runs_backward(op) else "forward"
    return "update" if op.verb == "update" else "other"


def _stages(compute: Iterable[Span]) -> Iterator[dict[str, Any]]:
    """Each stage from its first computation to that of the next one."""
    groups = [(stage, list(spans)) for stage, spans in groupby(compute, key=lambda span: span.op.stage)]
    ends = [spans[0].start_seconds for _, spans in groups[1:]] + [spans[-1].stop_seconds for _, spans in groups[-1:]]
    for (stage, spans), end in zip(groups, ends, strict=True):
        unit = "" if stage.unit is None else str(stage.unit)
        yield {"phase": stage.phase, "unit": unit, "start": _ns(spans[0].start_seconds), "stop": _ns(end)}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
