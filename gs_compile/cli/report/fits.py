"""fits: how fast a machine trains a model, with a row for each way of training, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gs_compile.machine import format_bytes
from gs_compile.planner.fit import Fit
from gs_compile.planner.step_plan import time_text
from gs_compile.planner.summary import rate_text, table


def fits_report(found: Sequence[Fit], tokens: float, asked: str) -> str:
    """A table of the ways that fit, for a number of tokens, and a sentence for each that does not; asked: the model and
    machine.
    """
    rows = [_row(each, tokens) for each in found if not each.missing]
    parts = [f"{each.way}: {each.missing}" for each in found if each.missing]
    if rows:
        title = f"{asked}: {tokens:,.0f} tokens, by the linear program; batch: samples of a step; `plan` simulates one"
        ranks = max(each.ranks for each in found)
        title += f"; memory, SSD and what is written are those of each of {ranks} ranks" if ranks > 1 else ""
        headings = [name for name in rows[0] if any(row[name] for row in rows)]
        parts = [title, table(headings, [[row[name] for name in headings] for row in rows], right=headings[1:]), *parts]
    return "\n\n".join(parts)


def _row(fit: Fit, tokens: float) -> dict[str, str]:
    """The cells of a way, by their headings."""
    days, ssd = fit.drive_days, fit.peaks.get("ssd", 0)
    return {
        "": fit.way,
        "tokens/s": rate_text(fit.tokens_per_second),
        "batch": str(fit.batch_size),
        "hours": rate_text(fit.hours(tokens)),
        "host memory": format_bytes(fit.peaks.get("host", 0)),
        "device memory": format_bytes(fit.peaks["device"]) if fit.peaks.get("device") else "-",
        "SSD": format_bytes(ssd) if ssd else "-",
        "written": format_bytes(int(fit.written_for(tokens))) if fit.written_nbytes else "-",
        "drives last": "-" if days is None else time_text(days),
        "largest micro-batch": str(fit.largest_micro_batch),
        "longest sequence": str(fit.longest or ""),
    }


def fits_dict(found: Sequence[Fit], tokens: float) -> dict[str, Any]:
    """The same for programs."""
    entries = []
    for fit in found:
        entry = {**asdict(fit), "peaks": dict(fit.peaks), "drive_days": fit.drive_days}
        if not fit.missing:
            entry |= {"hours": fit.hours(tokens), "written_nbytes_for_tokens": int(fit.written_for(tokens))}
        entries.append(entry)
    return {"tokens": tokens, "ways": entries}
