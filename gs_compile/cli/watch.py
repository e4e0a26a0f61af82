"""watch: a live screen of runs, of a directory or of this machine, from the status files that they write."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import Any

from gs_compile.errors import StatusError
from gs_compile.machine import format_bytes
from gs_compile.planner.summary import rate_text, table
from gs_compile.program.ir import TIERS
from gs_compile.progress import bar
from gs_compile.status.file import find, is_alive, plain, read
from gs_compile.status.form import Status
from gs_compile.status.page import ON, count_text
from gs_compile.status.runs import going_on
from gs_compile.status.words import (
    binding,
    compared,
    condition,
    lane_rows,
    plan_words,
    rate,
    step_words,
    under_way_text,
    wear,
)

SECONDS = 1.0  # between two looks: a run writes as often
WIDTH = 100
HOME, REST, LINE_END = "\x1b[H", "\x1b[J", "\x1b[K"
HIDE, SHOW, CLEAR = "\x1b[?25l", "\x1b[?25h", "\x1b[2J"


def watch(directory: Path | None, show: Callable[[str], None], *, once: bool) -> None:
    """Show the runs of a directory until all have ended, or once. Raises StatusError if there are none.

    directory: None: this user's running runs on this machine.
    """
    if once:
        show(screen(_found(directory), time.time()))
        return
    sys.stdout.write(HIDE + CLEAR)
    try:
        found = list(_found(directory))
        while True:
            text = _fitted(screen(found, time.time()), *get_terminal_size())
            sys.stdout.write(HOME + text.replace("\n", f"{LINE_END}\n") + LINE_END + REST)
            sys.stdout.flush()
            if not any(isinstance(it, Status) and is_alive(it) for _, it in found):
                return
            time.sleep(SECONDS)
            try:
                found = list(_found(directory))
            except StatusError:  # all runs that were shown have gone
                left = f"the run has ended, and has left nothing in {directory}"
                sys.stdout.write(f"\n\n{left if directory else 'no run of this user goes on here any more'}")
                return
    finally:
        sys.stdout.write(f"\n{SHOW}")
        sys.stdout.flush()


def _fitted(text: str, columns: int, rows: int) -> str:
    """As many lines as a terminal has room for: of more it would scroll, and show the last ones."""
    lines = text.splitlines()
    ends = list(accumulate(max(1, -(-len(line) // columns)) for line in lines))
    if ends[-1] <= rows:
        return text
    shown = sum(end < rows for end in ends)
    more = f"{len(lines) - shown} lines more: make this terminal larger, or use --once"
    return "\n".join([*lines[:shown], more[:columns]])


def _found(directory: Path | None) -> Iterator[tuple[Path, Status | StatusError]]:
    """Each status file, and its status, or why that cannot be read. Raises StatusError if there is no file."""
    for path in going_on() if directory is None else find(directory):
        try:
            yield path, read(path)
        except StatusError as error:
            yield path, error


def statuses(directory: Path | None) -> dict[str, Any]:
    """Statuses by file, for programs; for one that cannot be read, the reason."""
    found = _found(directory)
    return {str(path): plain(it) if isinstance(it, Status) else {"problem": it.message} for path, it in found}


def screen(found: Iterable[tuple[Path, Status | StatusError]], now: float) -> str:
    """All runs that were found, one after the other."""
    texts = [
        f"{path.resolve()}\n{run_text(it, now)}" if isinstance(it, Status) else "\n".join(wrap(it.message, WIDTH))
        for path, it in found
    ]
    text = "\n\n".join(texts)
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in text)  # no file moves the cursor


def run_text(status: Status, now: float) -> str:
    """One run: its state, the step under way, the last one, its lanes, tiers and drives."""
    about, last = status.about, status.last
    rank = f", rank {about.rank} of {about.num_ranks}" if about.num_ranks > 1 else ""
    rows = [
        ("run", f"pid {about.pid}{rank} {condition(status, now)}"),
        ("model", f"{count_text(about.num_parameters)} parameters, {about.num_layers} layers, on {about.device}"),
        ("now", _step(status)),
    ]
    if last is not None:
        rows += [
            (f"step {last.number}", step_words(last)),
            ("mean", _mean(status)),
            ("plan", compared(last.seconds, last.predicted_seconds)),
            ("binds", binding(last)),
        ]
    else:
        rows.append(("plan", plan_words(status)))
    head = "\n".join(_entry(name, words) for name, words in rows)
    lanes = _lanes(status) if last is not None and not math.isnan(last.seconds) else ""
    return "\n\n".join(filter(None, [head, lanes, _tiers(status), _drives(status)]))


def _mean(status: Status) -> str:
    if not status.num_steps:
        return "known after the second step"
    return f"{rate_text(status.num_tokens / status.seconds)} tokens/s over {status.num_steps} steps"


def _entry(name: str, words: str) -> str:
    lines = wrap(words, WIDTH - 10) or [""]
    return "\n".join(f"{name if number == 0 else '':<10}{line}" for number, line in enumerate(lines))


def _step(status: Status) -> str:
    step = status.step
    if status.state != "running" or step is None:
        return "between two steps" if status.state == "running" else "over"
    return under_way_text(step)


def _lanes(status: Status) -> str:
    assert status.last is not None
    rows = [(row.lane, *row.cells) for row in lane_rows(status, status.last.lanes, status.last.seconds)]
    heads = ("last step", "busy", "works", "predicted", "moves", "predicted", "rate")
    return table(heads, rows, right=heads[1:])


def _tiers(status: Status) -> str:
    rows = []
    for tier in TIERS:
        used, most = status.used.get(tier, 0), status.about.budgets.get(tier, 0)
        if used or most:
            filled = f"{bar(used / most)} {used / most:.0%}" if most else ""
            rows.append((ON[tier], format_bytes(used), f"of {format_bytes(most)}" if most else "in files", filled))
    return table(("in use", "", "", ""), rows, right=("",)) if rows else ""


def _drives(status: Status) -> str:
    last, rows = status.last, []
    for path, share in status.about.drives.items():
        rates = []
        for lane in ("ssd_read", "ssd_write"):
            total = last.lanes.get(lane) if last is not None else None
            rates.append(rate(share * total.nbytes, last.seconds) if last and total and last.seconds > 0 else "-")
        free = format_bytes(status.free[path]) if path in status.free else "-"
        rows.append((path, f"{share:.0%}", *rates, free))
    if not rows:
        return ""
    heads = ("drive", "share", "reads", "writes", "free")
    return f"{table(heads, rows, right=heads[1:])}\nwear      {wear(status)}"


def newest(directory: Path) -> Status:
    """The first rank's status that was written last; raises StatusError if none can be read."""
    every = [each for _, each in _found(directory)]
    found = [each for each in every if isinstance(each, Status)]
    if not found:
        raise [each for each in every if isinstance(each, StatusError)][-1]
    return max(found, key=lambda status: (-status.about.rank, status.written))
