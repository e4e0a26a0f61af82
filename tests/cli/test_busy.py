"""A terminal is told what takes long; a pipe hears nothing of it."""

from __future__ import annotations

import io
import logging
import time

import pytest

from gs_compile.cli import plan


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Takes the place of stderr when it is called: a fixture would do so before pytest begins to capture."""

    def take_over():
        made = Terminal()
        monkeypatch.setattr("sys.stderr", made)
        monkeypatch.setenv("TERM", "xterm")
        return made

    return take_over


def wait_for(text, terminal):
    for _ in range(6000):
        if text in terminal.getvalue():
            return
        time.sleep(0.01)
    pytest.fail(f"{text!r} is not in {terminal.getvalue()[-200:]!r}")


def test_a_terminal_sees_what_takes_so_long(monkeypatch, terminal):
    monkeypatch.setattr(plan, "QUIET_SECONDS", 0.0)
    screen = terminal()
    with plan.busy("measuring"):
        wait_for("measuring ...", screen)
        logging.getLogger("gs_compile.planner.lp").info("the %s drive", "second")
        wait_for("measuring: the second drive", screen)
    assert not logging.getLogger("gs_compile.planner").handlers


def test_a_terminal_sees_nothing_of_what_is_quick(monkeypatch, terminal):
    monkeypatch.setattr(plan, "QUIET_SECONDS", 600.0)
    screen = terminal()
    with plan.busy("measuring"):
        pass
    assert "measuring" not in screen.getvalue()


def test_a_pipe_hears_nothing(capsys, monkeypatch):
    monkeypatch.setattr(plan, "QUIET_SECONDS", 0.0)
    with plan.busy("measuring"):
        logging.getLogger("gs_compile.planner.lp").info("the first drive")
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "")
