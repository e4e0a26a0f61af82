"""What takes seconds before a first step is shown."""

from __future__ import annotations

import io
import logging
import os
import re
import sys

import pytest
import torch
from captured import Tiny, batch

import gs_compile
from gs_compile import progress
from gs_compile.codegen import codes


class Terminal(io.StringIO):
    def isatty(self):
        return True


STAGES = [
    "tracing the model",
    "compiling the layers' code",  # that of saved activations with it
    "timing the layers' code",
    "timing the code of saved activations",
    "moving parameters",
]


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_first_step(stream, measured, tmp_path, monkeypatch, caplog):
    """On a terminal a line is written over and over, and is gone at the end; the log has a line for each stage: what was
    compiled to be timed is not compiled again.
    """
    monkeypatch.setattr(progress, "LOGGED_SECONDS", 0.0)
    monkeypatch.setattr(codes, "_codes", codes.Codes())  # nothing is compiled
    monkeypatch.setattr(sys, "stderr", shown := stream())
    model = Tiny()
    optimizer = gs_compile.SGD(model.parameters(), lr=0.1)
    expert = {"compiler": "eager"}
    model.compile(backend="greedysnake", options={"micro_batch_size": 2, "storage": tmp_path, "expert": expert})
    with caplog.at_level(logging.INFO, progress.log.name):
        for _ in range(2):  # the second has nothing to wait for
            model(*batch(4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    logged = [message.split(" took ")[0] for message in caplog.messages if " took " in message]
    assert logged == STAGES
    if stream is Terminal:
        assert shown.getvalue().startswith(f"{progress.CLEAR}greedysnake: tracing the model ...{progress.CLEAR}")
        assert (
            f"{progress.CLEAR}greedysnake: moving parameters {'━' * progress.WIDTH}{progress.CLEAR}" in shown.getvalue()
        )
        for words in STAGES[1:4]:  # what takes longest: a bar by functions, and by classes of layers
            bars = set(re.findall(rf"{words} (━*─*)", shown.getvalue()))
            assert {"─" * progress.WIDTH, "━" * progress.WIDTH} <= bars, words
        assert shown.getvalue().endswith(progress.CLEAR)
    else:
        assert shown.getvalue() == ""


def test_a_stage_that_fails_leaves_no_line(monkeypatch):
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with pytest.raises(ZeroDivisionError), progress.stage("dividing"):
        torch.tensor(1 / 0)
    assert shown.getvalue() == f"{progress.CLEAR}greedysnake: dividing ...{progress.CLEAR}"


def test_a_line_is_no_wider_than_the_terminal(monkeypatch):
    """Of two lines one would stay when the next is shown."""
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    progress.Line().show("step 12 " + 99 * "━")
    monkeypatch.setattr(Terminal, "fileno", lambda self: 2)
    for columns in (40, 0):  # 0: it does not tell
        monkeypatch.setattr(os, "get_terminal_size", lambda _, found=columns: os.terminal_size((found, 24)))
        progress.Line().show("step 12 " + 99 * "━")
    assert [len(line) for line in shown.getvalue().split(progress.CLEAR)] == [0, 79, 39, 79]


class Tee:
    """As scripts have it in the place of a stream."""

    def write(self, words):
        pass


@pytest.mark.parametrize("kind", ["none", "of the script's own", "closed"])
def test_a_stream_that_is_none_costs_no_step(kind, monkeypatch):
    """There is none in a script that was started with 2>&-."""
    stream = {"none": None, "of the script's own": Tee(), "closed": io.StringIO()}[kind]
    if kind == "closed":
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    line = progress.Line(always=True)
    assert not line.is_terminal
    line.show("step 1")


def test_a_terminal_that_is_gone_costs_no_step(monkeypatch):
    """Its session has ended, and the run goes on."""

    class Gone(Terminal):
        def write(self, words):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Gone())
    line = progress.Line()
    line.show("step 1")
    assert not line.is_terminal
    line.show("step 2")
    line.show("")
