"""Rows as text: nothing is lost, whatever is in a cell."""

from __future__ import annotations

import io

from gs_compile.cli.report import tables


def test_numbers_end_together():
    assert tables.text(("lane", "works"), [("compute", "300 s"), ("h2d", "1 s")], right=("works",)).splitlines() == [
        "lane     works",
        "compute  300 s",
        "h2d        1 s",
    ]


def test_text_is_not_folded_and_not_read_as_markup():
    long = "[bold]" + "x" * 500 + "[/]"
    assert tables.text(("a",), [(long,)]).splitlines() == ["a", long]


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


def test_a_pipe_hears_nothing_of_waiting(capsys):
    with tables.busy("measuring"):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_terminal_sees_what_takes_so_long(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with tables.busy("measuring"):
        pass
    assert "measuring ..." in terminal.getvalue()
