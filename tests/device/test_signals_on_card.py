"""A signal that comes while autograd's thread runs a backward, and the main one waits for it in C++."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiered import files_in

HERE = Path(__file__).parent
SECONDS = 20.0  # a signal is answered at once; what is more is a wait for the backward


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
    path = os.pathsep.join([str(HERE), str(HERE.parent), str(HERE.parent.parent)])
    command = [sys.executable, str(HERE / "signalled.py"), str(tmp_path)]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "in the backward\n", process.stderr.read()
            begin = time.monotonic()
            process.send_signal(number)
            assert process.stdout.readline() == f"ended: {words}, True\n"
            assert time.monotonic() - begin < SECONDS
            _, errors = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == code, errors
    assert files_in(tmp_path) == []
