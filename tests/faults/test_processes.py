"""Runs in processes of their own: what they leave behind when they end or are killed, and who may use a directory."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tiered import files_in

from gs_compile.errors import LeftoverError, StorageLockedError
from gs_compile.runtime.storage.store import Store
from gs_compile.runtime.storage.stored import FOLDER

MIB = 1 << 20
ROOT = Path(__file__).resolve().parent.parent.parent
HANG = 240  # seconds: a process that a loaded machine has not ended by then never ends
SCRIPT = """
import atexit, os, sys, torch
import gs_compile
from captured import Tiny, batch

torch.set_num_threads(1)
model = Tiny()
optimizer = gs_compile.AdamW(model.parameters())
ratios = {"parameter": 0.0, "checkpoint": 0.0, "optimizer": 0.0}
expert = {"compiler": "eager", "recompute": "all", "alpha": 0.5, "ratios": ratios}
options = {"micro_batch_size": 2, "storage": sys.argv[1], "host_memory": "100MiB", "expert": expert}
model.compile(backend="greedysnake", options=options)
for _ in range(2):
    loss = model(*batch())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", flush=True)

def late():
    for use in (model.state_dict, optimizer.state_dict, lambda: model(*batch())):
        try:
            use()
        except gs_compile.errors.GreedySnakeError as error:
            print(type(error).__name__, os.getpid() == parent, flush=True)

while sys.argv[2].startswith("SIG"):
    loss = model(*batch())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
parent = os.getpid()
if sys.argv[2] == "late":
    atexit.register(late)
    if not (child := os.fork()):
        late()
        raise SystemExit(5)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    loss = model(*batch())  # the parent goes on
    loss.backward()
    optimizer.step()
if sys.argv[2] in ("late", "raise"):
    raise SystemExit(3)
"""


def run(directory, what):
    command = [sys.executable, "-c", SCRIPT, str(directory), what]
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PATH": "/usr/bin:/bin", "HOME": str(directory)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=directory, env=environment, **pipes)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["end", "raise"])
def test_a_process_that_ends_leaves_nothing(tmp_path, what):
    """`test_a_process_without_the_threads_of_a_run_is_told_so` has one that raises, too, among the fast tests."""
    with run(tmp_path, what) as process:
        out, err = process.communicate(timeout=HANG)
    assert (out, process.returncode) == ("trained\n", {"end": 0, "raise": 3}[what]), err
    assert "Exception" not in err
    assert not [name for name in files_in(tmp_path) if "greedysnake-run" in name]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "code"), [("SIGTERM", 128 + 15), ("SIGINT", -2)])
def test_a_run_that_is_asked_to_end_leaves_nothing(tmp_path, what, code):
    """Fault 8: SIGTERM left its files. durable/test_kills.py has a process that is forked, among the fast tests."""
    with run(tmp_path, what) as process:
        assert process.stdout.readline() == "trained\n"
        time.sleep(random.uniform(0, 0.5))
        assert [name for name in files_in(tmp_path) if "greedysnake-run" in name]
        process.send_signal(getattr(signal, what))
        _, err = process.communicate(timeout=HANG)
    assert process.returncode == code, err
    assert ("Traceback" in err) == (what == "SIGINT")
    assert "Exception ignored" not in err
    assert not [name for name in files_in(tmp_path) if "greedysnake-run" in name]


def test_a_process_without_the_threads_of_a_run_is_told_so(tmp_path):
    """In a forked child, which ends cleanly and used to wait for ever, and at the exit of an interpreter that raised."""
    with run(tmp_path, "late") as process:
        out, err = process.communicate(timeout=HANG)
    in_child = "ForkError False\n" * 3
    assert (out, process.returncode) == (f"trained\n{in_child * 2}5\n" + "StepOrderError True\n" * 3, 3), err
    assert "Traceback" not in err
    assert "Exception" not in err
    assert not [name for name in files_in(tmp_path) if "greedysnake-run" in name]


@contextmanager
def another_process(directory):
    """The number of a process that has a store with one extent, until it is killed."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            Store([directory]).allocate("w3", MIB).write(torch.ones(MIB, dtype=torch.uint8)).wait()
            os.write(writing, b"ready")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 5) == b"ready"
        yield child
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_each_model_of_a_process_has_its_folder(tmp_path):
    """Files of the same names in one directory. A durable one would not be found there by later processes, or another:
    it trained, and could not be resumed.
    """
    with Store([tmp_path]) as first, Store([tmp_path]) as second:
        for store, value in ((first, 1), (second, 2)):
            store.allocate("w3", MIB).write(torch.full((MIB,), value, dtype=torch.uint8)).wait()
        assert sorted(path.name for path in tmp_path.iterdir()) == [FOLDER, f"{FOLDER}.2"]
        with pytest.raises(StorageLockedError, match="needs a directory of its own: give it another"):
            Store([tmp_path], durable=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_a_killed_run_has_left_is_removed(tmp_path, caplog):
    """Also the files of its second model; not while it lives, and not what others have put there."""
    (tmp_path / "theirs").write_text("kept")
    with (
        another_process(tmp_path) as pid,  # it is killed at the end
        pytest.raises(StorageLockedError, match=f"pid {pid}, started 20.*storage="),
    ):
        Store([tmp_path])
    assert (tmp_path / FOLDER / "w3").stat().st_size == MIB
    (tmp_path / FOLDER / "a1_0-4096").write_text("saved activations")
    (tmp_path / f"{FOLDER}.2").mkdir(mode=0o700)
    (tmp_path / f"{FOLDER}.2" / "w4").write_text("of its second model")
    with Store([tmp_path]):
        assert [path.name for path in (tmp_path / FOLDER).iterdir()] == [".lock"]
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
    words = "a run was killed and left 2 files, 1.0 MiB, last written 20"
    assert words in caplog.text
    (tmp_path / FOLDER / "folder").mkdir(parents=True)
    (tmp_path / FOLDER).chmod(0o700)
    with pytest.raises(LeftoverError, match="folder in this folder is of no run: move it"):
        Store([tmp_path])


def test_a_run_killed_before_it_had_files_is_no_obstacle(tmp_path):
    (tmp_path / FOLDER).mkdir(mode=0o700)
    for name in (".lock", ".probe"):
        (tmp_path / FOLDER / name).write_text("pid 1, started long ago")
    Store([tmp_path]).close()
    assert not list(tmp_path.iterdir())
