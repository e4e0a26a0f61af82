"""known_times: the seconds of code that were timed on this machine before, in a file beside the machine's figures.

The same code takes the same time in the next process, so measured times are kept. A process that uses them times a part
again, and all of it if that part has changed by more than `SAME`: the machine was busy then, or is now.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

from gs_compile.planner.measure.machines import write_whole

UnitSeconds = Sequence[float | None]  # forward, backward; None: unknown
Timings = Sequence[UnitSeconds]

log = logging.getLogger(__name__)

SAME = 0.25  # the relative difference of two timings that count as the same
MOST = 1000  # models, sizes and levels that are kept: the latest


class KnownTimes:
    """Rows of seconds, by a text that identifies code. path: of the file; None: nothing is kept."""

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._rows = path, _read(path)

    def get(self, key: str) -> Timings | None:
        return self._rows.get(key)

    def get_or(self, key: str, number: int, measure: Callable[[], Timings]) -> Timings:
        """The `number` rows of a key, measured if they are not known; rows with None are not kept."""
        rows = self._rows.pop(key, None)
        if rows is None or len(rows) != number:
            rows = measure()
        self._rows = {**dict(list(self._rows.items())[1 - MOST :]), key: rows}
        self._keep()
        return rows

    def forget(self) -> None:
        """Forget all times: the machine's speed has changed."""
        self._rows = {}

    def _keep(self) -> None:
        if self._path is None:
            return
        whole = {key: rows for key, rows in self._rows.items() if all(map(_is_row, rows))}
        try:
            write_whole(self._path, json.dumps(whole))
        except OSError as error:
            log.warning("the timings of the code could not be stored: %s", error)


def _read(path: Path | None) -> dict[str, Timings]:
    """The rows in a file; none if there is no file, or one of another form."""
    try:
        found: Any = json.loads(path.read_text()) if path is not None else {}
    except (OSError, ValueError):
        return {}
    is_ours = isinstance(found, dict) and all(isinstance(rows, list) for rows in found.values())
    return found if is_ours and all(map(_is_row, chain(*found.values()))) else {}


def _is_row(row: Any) -> bool:
    return isinstance(row, list | tuple) and all(type(each) is float and isfinite(each) and each >= 0 for each in row)
