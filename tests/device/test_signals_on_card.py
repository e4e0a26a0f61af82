"""A signal that comes while autograd's thread runs a backward, and the main one waits for it in C++."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from carded import to
from signalled import DURABLE
from tiered import Harness, adamw, files_in, gpt2, options, outcome, step, tokens

HERE = Path(__file__).parent
SECONDS = 60.0  # a signal is answered at once; what is more is a wait for the backward


@contextmanager
def in_the_backward(*arguments):
    """A process of signalled.py that has said so; gone with the block."""
    path = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parent.parent)])
    command, environment = [sys.executable, str(HERE / "signalled.py"), *arguments], {**os.environ, "PYTHONPATH": path}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            assert process.stdout.readline() == "in the backward\n", process.stderr.read()
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        pytest.param(signal.SIGTERM, 143, "SystemExit (143,)", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, "SystemExit (129,)", marks=pytest.mark.slow),
        (signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt ()"),
    ],
)
def test_a_signal_inside_a_backward_is_answered(tmp_path, number, code, words):
    """Long before its minutes are over; once; and no files are left."""
    with in_the_backward(str(tmp_path)) as process:
        begin = time.monotonic()
        process.send_signal(number)
        assert process.stdout.readline() == f"ended: {words}, True\n"
        assert time.monotonic() - begin < SECONDS
        _, errors = process.communicate(timeout=240)
    assert process.returncode == code, errors
    assert files_in(tmp_path) == []


@pytest.mark.slow
def test_a_durable_run_that_is_killed_goes_on(tmp_path):
    """From the step before, in another process: its third and fourth steps are those of a run that nobody kills."""
    with in_the_backward(str(tmp_path / "card"), "durable") as process:
        process.kill()
    expected = Harness(gpt2).train(adamw, options(tmp_path / "cpu", alpha=0.0), 4)
    harness = Harness(lambda: to(gpt2()))
    with harness.fresh(adamw, options(tmp_path / "card", alpha=0.0, **DURABLE)) as optimizer:
        losses = [step(harness.model, optimizer, tokens(number)) for number in range(2, 4)]
        optimizer.commit()
        found = outcome(harness.model, optimizer, losses, expected.norms)
    assert found.losses == expected.losses[2:]
    assert found.differences(replace(expected, losses=losses)) == []
