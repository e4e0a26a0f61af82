"""Rows as text: nothing is lost, whatever is in a cell."""

from __future__ import annotations

import io
import logging
import time

import pytest

from gs_compile.cli.report import tables
from gs_compile.planner.summary import table


def test_numbers_end_together():
    assert table(("lane", "works"), [("compute", "300 s"), ("h2d", "1 s")], right=("works",)).splitlines() == [
        "lane     works",
        "compute  300 s",
        "h2d        1 s",
    ]


def test_text_is_not_folded_and_not_read_as_markup():
    long = "[bold]" + "x" * 500 + "[/]"
    assert table(("a",), [(long,)]).splitlines() == ["a", long]


def test_in_a_pipe_a_row_is_a_line_without_colours(capsys):
    tables.show(("a", "b"), [("bad", "word " * 60)], styles={"bad": "red"})
    assert capsys.readouterr().out == "a    b\nbad  " + ("word " * 60).strip() + "\n"


def test_a_terminal_gets_long_cells_folded(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "70")
    tables.show(("a", "b"), [("bad", "word " * 60)])
    printed = capsys.readouterr().out
    assert printed.count("word") == 60
    assert len(printed.splitlines()) > 4


def test_a_terminal_gets_colours(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    tables.show(("a",), [("bad",), ("ok",)], styles={"bad": "red"})
    assert "\x1b[31mbad" in capsys.readouterr().out


def test_a_pipe_hears_nothing_of_waiting(capsys, monkeypatch):
    monkeypatch.setattr(tables, "QUIET_SECONDS", 0.0)
    with tables.busy("measuring"):
        logging.getLogger("gs_compile.planner.lp").info("the first drive")
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal_of(monkeypatch):
    """A terminal that takes the place of stderr; a fixture would do so before pytest begins to capture."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    return terminal


def wait_for(text, terminal):
    for _ in range(1000):
        if text in terminal.getvalue():
            return
        time.sleep(0.01)
    pytest.fail(f"{text!r} is not in {terminal.getvalue()[-200:]!r}")


def test_a_terminal_sees_what_takes_so_long(monkeypatch):
    monkeypatch.setattr(tables, "QUIET_SECONDS", 0.0)
    terminal = terminal_of(monkeypatch)
    with tables.busy("measuring"):
        wait_for("measuring ...", terminal)
        logging.getLogger("gs_compile.planner.lp").info("the %s drive", "second")
        wait_for("measuring: the second drive", terminal)
    assert not logging.getLogger("gs_compile.planner").handlers


def test_a_terminal_sees_nothing_of_what_is_quick(monkeypatch):
    terminal = terminal_of(monkeypatch)
    with tables.busy("measuring"):
        pass
    assert "measuring" not in terminal.getvalue()
