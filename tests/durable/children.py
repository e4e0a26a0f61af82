"""Durable runs in processes of their own that are killed, asked to end, and resumed: a process that has captured the
model forks one for each run, so that a run costs what its steps cost.

As a script, it reads a run as a line of JSON (`Run`), and answers with a line (`Ended`) when the run is over.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import figures
import torch
from tiered import (
    Harness,
    adamw,
    capture_cheaply,
    collect_seldom,
    gpt2,
    options,
    our_threads,
    outcome,
    step,
    tokens,
)

from gs_compile.runtime.signals import end_by_exit
from gs_compile.runtime.storage import manifest, store, system
from gs_compile.runtime.storage.folder import folder_in

SECONDS = 60  # of a run that takes one; what is more is a hang
POINTS = ("fallocate", "pwritev", "datasync", "open_file", "rename", "sync_folder", "unlink", "preadv")
PLACES: dict[str, dict[str, Any]] = {
    "on storage": {"alpha": 0.5},
    "mixed": {"alpha": 0.3, "ratios": {"optimizer": 0.4, "parameter": 0.3}},
    "speculative": {"alpha": 0.3, "clip": "speculative", "ratios": {"optimizer": 0.3}},
    "in memory": {"alpha": 0.0, "ratios": {"optimizer": 1.0, "parameter": 1.0}},
    "saving": {"alpha": 0.3, "recompute": "none", "ratios": {"optimizer": 0.4}},
}
NUM_STEPS = 5
MAX_NORM = 1.1  # some steps are clipped, some are not


@dataclass
class Run:
    """One process of a run. kill_after: seconds; at: a call of the system, and whether it is killed before or after it.

    signals: with seconds between them, the first as many after the run has begun to mind them (`armed`). slow: seconds
    that each sync takes.
    """

    directories: list[str]
    place: str = "on storage"
    num_steps: int = NUM_STEPS
    durability: int = 1
    kill_after: float | None = None
    at: tuple[str, int, str] | None = None
    signals: list[tuple[str, float]] = field(default_factory=list)
    slow: float = 0.0


@dataclass
class Ended:
    """code: as of `subprocess`; found: the step that the run began from, -1 before it knows; done: of those it has closed, the last.

    armed: a signal does not end it as it ends any process. losses: by step; digests: of values in the end, by name; calls: of the system, by name; seconds: since the last
    signal, or in all.
    """

    code: int = 0
    found: int = -1
    done: int = 0
    armed: bool = False
    losses: dict[str, float] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    threads: list[str] = field(default_factory=list)


# In the forked process ------------------------------------------------------------------------------------------------


class Points:
    """Counts the calls of the system, and kills this process at one of them."""

    def __init__(self, run: Run) -> None:
        self.calls = dict.fromkeys(POINTS, 0)
        self._run, self._guard = run, threading.Lock()
        for name in POINTS:
            setattr(system, name, partial(self._call, name, getattr(system, name)))

    def _call(self, name: str, real: Any, *arguments: Any) -> Any:
        with self._guard:
            number = self.calls[name]
            self.calls[name] += 1
        at = self._run.at if self._run.at and tuple(self._run.at[:2]) == (name, number) else None
        if at and at[2] == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "datasync" and self._run.slow:
            time.sleep(self._run.slow)
        if at and at[2] == "half" and name == "pwritev":
            fd, memory, offset = arguments
            real(fd, memory[: memory.nbytes // 8192 * 4096], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        found = real(*arguments)
        if at:
            os.kill(os.getpid(), signal.SIGKILL)
        return found


def train(harness: Harness, run: Run, tell: Any) -> None:
    """Steps from the last commit on, each told when it is closed, and what they have come to."""
    points, directories = Points(run), [Path(each) for each in run.directories]
    commits = [each for path in directories if folder_in(path).is_dir() and (each := manifest.read(folder_in(path)))]
    found = max((each.step for each in commits), default=0)
    tell(found=found, done=found)
    store.end_by_exit = lambda: (end_by_exit(), tell(armed=True))
    changes = {"durability": run.durability, "resume": "auto"} if run.durability else {}
    given = {**options(directories, **PLACES[run.place]), **changes}
    torch.manual_seed(1)
    with harness.fresh(partial(adamw, max_grad_norm=MAX_NORM), given) as optimizer:
        for number in range(
            found, max(run.num_steps, found + 1)
        ):  # a run that has ended shows its values with one more
            loss = step(harness.model, optimizer, tokens(number))
            tell(done=number + 1, loss=loss)
        if not run.signals:
            values = outcome(harness.model, optimizer, [], []).values
            digests = {name: hashlib.sha256(each.numpy().tobytes()).hexdigest() for name, each in values.items()}
            if run.durability:
                optimizer.commit()
            tell(digests=digests, calls=points.calls)
    tell(threads=our_threads())


# In the process that forks --------------------------------------------------------------------------------------------


def serve() -> None:
    """Returns in the forked processes, which end as a script does."""
    torch.set_num_threads(1)
    capture_cheaply()
    figures.give()
    harness = Harness(partial(gpt2, 2, 16, dropout=0.1))
    harness.train(partial(adamw, max_grad_norm=MAX_NORM), options(sys.argv[1], clip="delayed"), num_steps=1)
    collect_seldom()
    print("ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        run = Run(**json.loads(line))
        reading, writing = os.pipe()
        if not (pid := os.fork()):
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent's run has taken it
            os.close(reading)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            train(harness, run, partial(tell, writing))
            return
        os.close(writing)
        print(json.dumps(dataclasses.asdict(watch(run, pid, reading))), flush=True)  # noqa: T201


def tell(writing: int, **told: Any) -> None:
    os.write(writing, (json.dumps(told) + "\n").encode())


def watch(run: Run, pid: int, reading: int) -> Ended:
    """Read what a process tells, until it has ended, and send it what it is to be sent."""
    ended, start, data = Ended(), time.monotonic(), b""
    due = [(start + SECONDS, "SIGKILL")]
    if run.kill_after is not None:
        due.append((start + run.kill_after, "SIGKILL"))
    begun, signals = start, run.signals
    while True:
        due.sort()
        wait = max(0.0, due[0][0] - time.monotonic()) if due else None
        if not select.select([reading], [], [], wait)[0]:
            begun = time.monotonic()
            os.kill(pid, getattr(signal, due.pop(0)[1]))
            continue
        if not (piece := os.read(reading, 1 << 16)):
            break
        data += piece
        if signals and b'"armed"' in data:
            moments = accumulate((after for _, after in signals), initial=time.monotonic())
            due += zip(list(moments)[1:], (name for name, _ in signals), strict=True)
            signals = []
    _, status = os.waitpid(pid, 0)
    os.close(reading)
    ended.code, ended.seconds = os.waitstatus_to_exitcode(status), time.monotonic() - begun
    for line in data.splitlines():
        told = json.loads(line)
        if "loss" in told:
            ended.losses[str(told["done"])] = told.pop("loss")
        for name, value in told.items():
            setattr(ended, name, value)
    return ended


# In the tests ---------------------------------------------------------------------------------------------------------


class Server:
    """The process that forks, seen from the tests."""

    def __init__(self, directory: Path) -> None:
        root = Path(__file__).resolve().parent.parent.parent
        environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}", "OMP_NUM_THREADS": "1"}
        self.errors = (directory / "errors").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(directory)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", self.said()

    def run(self, *directories: Path, **how: Any) -> Ended:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.errors.truncate(0)
        run = Run([str(each) for each in directories], **how)
        self.process.stdin.write(json.dumps(dataclasses.asdict(run)) + "\n")
        self.process.stdin.flush()
        return Ended(**json.loads(self.process.stdout.readline()))

    def said(self) -> str:
        """What the last run has written to stderr."""
        self.errors.seek(0)
        return self.errors.read().lstrip("\0")

    def close(self) -> None:
        self.process.communicate(timeout=SECONDS)
        self.errors.close()


if __name__ == "__main__":
    serve()
