"""page: a run as one self-contained HTML page without scripts: its results, its steps, and the reasons.

All numbers are those of its status, which the page also contains.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from gs_compile.machine import format_bytes
from gs_compile.planner.summary import rate_text, seconds_text
from gs_compile.program.ir import TIERS, WORDS
from gs_compile.runtime.storage.folder import date_of
from gs_compile.runtime.trace import Total
from gs_compile.status.file import text_of
from gs_compile.status.form import Status
from gs_compile.status.step import StepInfo
from gs_compile.status.words import (
    LaneRow,
    binding,
    compared,
    condition,
    kinds_words,
    lane_rows,
    plan_words,
    step_words,
    wear,
)

TEMPLATE = Path(__file__).with_name("page.html")
REFRESH_SECONDS = 10
COLOURED = ("w", "s", "x", "a", "dx", "dw", "seal")  # kinds with a colour of their own
ON = {"device": "device memory", "host": "host memory", "ssd": "SSD"}
Curve = Sequence[tuple[int, float]]


def page(status: Status, now: float | None = None) -> str:
    """The page. It reloads itself while the run goes on. now: seconds since 1970."""
    about, words = status.about, condition(status, time.time() if now is None else now)
    sections = {
        "Loss and step time": _curves(status),
        "What each lane does in a step": _lanes(status),
        "Where bytes go in a step": _bytes(status),
        "Where data is stored": _homes(status),
        "Plan, and why": _plan(status),
        "Machine and versions": _machine(status),
    }
    rank = f", rank {about.rank} of {about.num_ranks}" if about.num_ranks > 1 else ""
    parts = {
        "title": escape(f"{count_text(about.num_parameters)} parameters in {about.num_layers} layers{rank}"),
        "refresh": f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">' if status.state == "running" else "",
        "mood": "bad" if status.state == "failed" or "killed" in words else "soft",
        "state": escape(f"This run {words}. Begun {date_of(about.began)}, written {date_of(status.written)}."),
        "cards": _cards(status),
        "body": "\n".join(f"<h2>{title}</h2>\n{text}" for title, text in sections.items()),
        "data": text_of(status).replace("<", "\\u003c"),
    }
    return re.sub(r"@(title|refresh|mood|state|cards|body|data)\b", lambda found: parts[found[1]], TEMPLATE.read_text())


def count_text(number: int) -> str:
    """``3.8 B``, ``11 M``"""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


# Sections -------------------------------------------------------------------------------------------------------------


def _cards(status: Status) -> str:
    last, mean = status.last, status.seconds / max(status.num_steps, 1)
    if last is None:
        return '<p class="soft">No step has ended yet.</p>'
    predicted = last.predicted_seconds
    rows = [("steps", f"{last.number:,}", f"{last.num_skipped} skipped" if last.num_skipped else "none skipped")]
    if status.num_steps:
        rows += [
            ("tokens a second", rate_text(status.num_tokens / status.seconds), f"over {status.num_steps:,} steps"),
            ("a step", seconds_text(mean), compared(mean, predicted)),
        ]
    if not math.isnan(last.loss):
        rows.append(("loss", f"{last.loss:.4g}", f"gradient norm {last.grad_norm:.3g}"))
    rows.append(("binds", last.binds or "no lane alone", _busiest(last)))
    cells = (f"<div><dt>{escape(a)}</dt><dd>{escape(b)}<small>{escape(c)}</small></dd></div>" for a, b, c in rows)
    return f'<dl class="cards">{"".join(cells)}</dl>\n<p>Last step: {escape(step_words(last))}.</p>'


def _busiest(info: StepInfo) -> str:
    longest = sorted(info.busy.items(), key=lambda each: -each[1])[:2]
    return ", ".join(f"{lane} {busy:.0%}" for lane, busy in longest)


def _curves(status: Status) -> str:
    losses = [(each.step, each.loss) for each in status.history if math.isfinite(each.loss)]
    seconds = [(each.step, each.seconds) for each in status.history if not math.isnan(each.seconds)]
    without = "The loss is not known to the backend: it is computed outside of the model, or has not been finite."
    loss = _chart("Loss of the whole batch", losses) if losses else f'<p class="soft">{without}</p>'
    predicted = status.about.predicted_seconds
    known = "" if math.isnan(predicted) else f", dashed: predicted, {seconds_text(predicted)}"
    times = "Seconds of a step are known from the second one on."
    time_ = _chart(f"Seconds of a step{known}", seconds, predicted) if seconds else f'<p class="soft">{times}</p>'
    return f'<div class="charts">{loss}{time_}</div>'


def _chart(title: str, curve: Curve, rule: float = math.nan) -> str:
    """A curve over steps. rule: a height to compare with."""
    heights = [height for _, height in curve] + ([] if math.isnan(rule) else [rule])
    low, high = min(heights), max(heights)
    low, high = (low, high) if high > low else (low - 0.5 * abs(low or 1), high + 0.5 * abs(high or 1))
    first, last = curve[0][0], curve[-1][0]

    def at(step: float, height: float) -> str:
        x = 100 * (step - first) / (last - first) if last > first else 50.0
        return f"{x:.2f},{4 + 92 * (high - height) / (high - low):.2f}"

    points = " ".join(at(*each) for each in curve)
    drawn = f'<polyline class="is" points="{points}"/>' if len(curve) > 1 else f'<path class="is" d="M{points}h.01"/>'
    if not math.isnan(rule):
        y = at(first, rule).partition(",")[2]
        drawn = f'<path class="was" d="M0,{y}H100"/>{drawn}'
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><div class="plot">'
        f'<div class="y"><span>{high:.3g}</span><span>{(high + low) / 2:.3g}</span><span>{low:.3g}</span></div>'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">{drawn}</svg>'
        f'<div class="x"><span>step {first}</span><span>{last if last > first else ""}</span></div></div></figure>'
    )


def _lanes(status: Status) -> str:
    if not status.num_steps or status.last is None:
        return '<p class="soft">Known from the second step on.</p>'
    rows = list(lane_rows(status, status.lanes, status.seconds, status.num_steps))
    predicted = status.about.predicted_seconds
    body = "".join(_lane(row, predicted, status.last.binds) for row in rows)
    key = '<span class="key"><i style="background:var(--line)"></i>busy, measured</span>'
    key += "" if math.isnan(predicted) else '<span class="key"><i class="tick"></i>predicted</span>'
    numbers = ((word, "n") for word in ("works", "predicted", "moves", "rate"))
    heads = _row("th", [("lane", ""), ("", ""), ("busy", "n"), *numbers])
    words = f"Means of {status.num_steps:,} steps. What binds, by the last step: {binding(status.last)}."
    return f'<p>{escape(words)}</p>\n<p>{key}</p>\n<div class="scroll"><table>{heads}{body}</table></div>'


def _lane(row: LaneRow, predicted_seconds: float, binds: str) -> str:
    width = 100 * min(row.busy, 1.0)
    tick = ""
    if not math.isnan(row.predicted_seconds) and predicted_seconds > 0:
        tick = f'<b style="left:{100 * min(row.predicted_seconds / predicted_seconds, 1.0):.1f}%"></b>'
    busy, works, predicted, moves, _, speed = row.cells
    made = _row("td", [(row.lane, ""), *((cell, "n") for cell in (busy, works, predicted, moves, speed))])
    bar = f'<td><span class="bar"><i style="width:{width:.1f}%"></i>{tick}</span></td>'
    made = made.replace("</td>", f"</td>{bar}", 1)
    return made.replace("<tr>", '<tr class="binds">', 1) if row.lane == binds else made


def _bytes(status: Status) -> str:
    """The bytes of each lane that moves data, by kind, measured and as predicted."""
    lanes = {lane: total for lane, total in status.lanes.items() if total.nbytes}
    if not lanes:
        return '<p class="soft">Nothing has moved between tiers in a step whose length is known.</p>'
    most = max(total.nbytes for total in lanes.values())
    known = {kind for total in lanes.values() for kind in total.nbytes_by_kind}
    keys = [(kind, WORDS[kind]) for kind in COLOURED if kind in known]
    keys += [("other", "other")] if known - set(COLOURED) else []
    key = "".join(f'<span class="key"><i style="background:var(--{kind})"></i>{words}</span>' for kind, words in keys)
    rows = "".join(_moved(status, lane, total, most) for lane, total in lanes.items())
    return f"<p>{key}</p>\n{rows}\n<p>Written to SSD: {escape(wear(status))}.</p>"


def _moved(status: Status, lane: str, total: Total, most: int) -> str:
    parts = "".join(
        f'<i style="width:{100 * nbytes / most:.2f}%;background:var(--{kind if kind in COLOURED else "other"})"></i>'
        for kind, nbytes in total.nbytes_by_kind.most_common()
    )
    number, plan = status.num_steps, status.about.predicted.get(lane)
    beside = f", predicted {format_bytes(plan.nbytes)}" if plan is not None else ""
    words = f"{lane}: {format_bytes(total.nbytes // number)}{beside} ({kinds_words(total, number)})"
    return f'<div class="stack">{parts}</div><p class="soft">{escape(words)}</p>'


def _homes(status: Status) -> str:
    about = status.about
    tiers = [tier for tier in TIERS if any(tier in each for each in about.homes.values()) or tier in about.budgets]
    heads = _row("th", [("", ""), *((ON[tier], "n") for tier in tiers)])

    def row(name: str, nbytes: Mapping[str, int]) -> str:
        return _row("td", [(name, ""), *((format_bytes(nbytes[t]) if nbytes.get(t) else "-", "n") for t in tiers)])

    rows = [row(WORDS.get(kind, kind), each) for kind, each in about.homes.items()]
    rows += [row("in use now, working memory too", status.used), row("may be used", about.budgets)]
    drives = [f"{path}: {share:.0%} of the bytes, {_free(status, path)}" for path, share in about.drives.items()]
    return f'<div class="scroll"><table>{heads}{"".join(rows)}</table></div>{_list(drives)}'


def _free(status: Status, path: str) -> str:
    return f"{format_bytes(status.free[path])} free" if path in status.free else "no longer in use"


def _plan(status: Status) -> str:
    about = status.about
    more = about.binding
    heading = "<p>What would make it faster, by the linear program:</p>" if more else ""
    mean = status.seconds / status.num_steps if status.num_steps else math.nan
    against = compared(mean, about.predicted_seconds)
    return f"<p>{escape(plan_words(status))}</p>\n<p>Against it: {escape(against)}.</p>\n{heading}{_list(more)}"


def _machine(status: Status) -> str:
    about = status.about
    facts = {
        "machine": f"{about.machine}, computing on {about.device}",
        "host": f"{about.num_cores} cores, {format_bytes(about.memory_nbytes)}",
        "process": f"{about.pid}" + (f", rank {about.rank} of {about.num_ranks}" if about.num_ranks > 1 else ""),
        **about.versions,
    }
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in facts.items())
    return f'<dl class="facts">{rows}</dl>'


# Parts ----------------------------------------------------------------------------------------------------------------


def _row(tag: str, cells: Iterable[tuple[str, str]]) -> str:
    made = (f'<{tag} class="{kind}">{escape(words)}</{tag}>' for words, kind in cells)
    return f"<tr>{''.join(made)}</tr>"


def _list(entries: Iterable[str]) -> str:
    made = "".join(f"<li>{escape(each)}</li>" for each in entries)
    return f"<ul>{made}</ul>" if made else ""
