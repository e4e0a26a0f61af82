"""reporter: a thread that reports a run once a second: its status file, its bar, its page.

It only reads the run's record, and holds neither the model nor its optimizer. What it cannot write is logged once: the
run does not fail.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gs_compile.progress import Line
from gs_compile.status import file
from gs_compile.status.form import Status
from gs_compile.status.page import page
from gs_compile.status.record import RunRecord
from gs_compile.status.step import StepInfo
from gs_compile.status.words import bar_text

log = logging.getLogger(__name__)

SECONDS = 1.0  # between two status files
PAGE_SECONDS = 10  # between two pages of a running run
BAR_SECONDS = 2.0  # a step that ends sooner gets no bar
LINE_SECONDS = 10  # between two bars if standard error is not a terminal


class Outlets(NamedTuple):
    """Where a run is reported. status, page: files; line: for the bar. keeps: whether the status file stays at the end.
    entry: among the runs of this machine; it does not stay.
    """

    status: Path | None = None
    page: Path | None = None
    line: Line | None = None
    keeps: Callable[[], bool] = lambda: True
    entry: Path | None = None


class Reporter:
    """Reports one run, until it is closed. failure: why the run has failed, in words; "": it has not."""

    def __init__(self, record: RunRecord, outlets: Outlets, failure: Callable[[], str] = str) -> None:
        self.record = record
        self.outlets, self._failure = outlets, failure
        self._pid = os.getpid()
        self._over, self._is_closed = threading.Event(), False
        self._on_line = threading.Lock()
        self._failed: set[Path] = set()  # files that could not be written, and that the log has named
        if outlets.status is not None:  # at once, which takes its name
            self._write(outlets.status, file.text_of, record.status())
        self._thread = threading.Thread(target=self._report, name="greedysnake status", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # runs before the storage's own end, which was registered earlier

    def note(self, info: StepInfo) -> None:
        """A step has ended."""
        with self._on_line:
            self.record.note(info)
            self._show("")

    def close(self) -> None:
        """End the thread. The last status says how the run ended, or is removed if nothing of the run stays."""
        if os.getpid() != self._pid or self._is_closed:
            return  # a forked child's copy, or closed already
        self._over.set()
        atexit.unregister(self.close)
        self._thread.join()
        self._show("")
        reason = self._failure()
        status = self.record.status("failed" if reason else "ended", reason)
        self._write(self.outlets.page, page, status)
        gone = [self.outlets.entry]
        if self.outlets.keeps():
            self._write(self.outlets.status, file.text_of, status)
        else:
            gone.append(self.outlets.status)
        for path in filter(None, gone):
            with suppress(OSError):  # the file system has become read-only, which was reported before
                path.unlink()
        self._is_closed = True  # last: after an interruption this is called again

    def _report(self) -> None:
        seconds = 0
        while not self._over.wait(SECONDS):
            seconds += 1
            self._tick(seconds)

    def _tick(self, seconds: int) -> None:
        outlets = self.outlets
        if outlets.status is not None or (outlets.page is not None and seconds % PAGE_SECONDS == 0):
            status = self.record.status()
            self._write(outlets.status, file.text_of, status)
            if seconds % PAGE_SECONDS == 0:
                self._write(outlets.page, page, status)
        if outlets.line is not None and (outlets.line.is_terminal or seconds % LINE_SECONDS == 0):
            with self._on_line:  # a step that ends meanwhile takes its bar away behind this
                step = self.record.under_way()
                if step is not None and step.seconds > BAR_SECONDS:
                    self._show(bar_text(step))

    def _show(self, words: str) -> None:
        if self.outlets.line is not None:
            self.outlets.line.show(words)

    def _write(self, path: Path | None, draw: Callable[[Status], str], status: Status) -> None:
        if path is None:
            return
        try:
            file.replace(path, draw(status))
        except OSError as error:
            if path not in self._failed:
                log.warning("%s cannot be written: %s; the run goes on without it", path, error.strerror)
            self._failed.add(path)
