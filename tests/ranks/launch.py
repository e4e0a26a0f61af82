"""Ranks for tests: processes of one machine that run one case after the other, over gloo.

    def case(info, tmp_path, factor):                    # a function of a test module, run on every rank at once
        ranks = ranks_of(Options())
        return torch.ones(2) * factor * info.rank        # what torch.save takes

    @pytest.fixture(scope="module")
    def pair():
        with Fleet(2) as fleet:
            yield fleet

    def test_it(pair, tmp_path):
        first, second = pair.run(case, tmp_path, factor=3)

The processes are forked from a server that has made one step (`warm`): the first fleet of a session takes some seconds,
later ones tenths. A case may do what it likes with its process: after one that fails, or that ends its
process, the next case gets new ones. What a rank raises or prints is shown by the test. `outcomes` is for cases whose
ranks are meant to fail.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import figures
import pytest
import torch
import torch.distributed as dist
from tiered import Harness

context: Any = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["warm"])


class Info(NamedTuple):
    rank: int
    number: int


class Outcome(NamedTuple):
    """Of one rank: what the case gave back, or the text of what it raised or printed before its process ended."""

    value: Any
    failure: str
    seconds: float  # until then, from the start of the case


class Fleet:
    """A number of ranks. initialize: torch.distributed is; otherwise torchrun's variables are set alone.

    fresh: processes that nothing has run in, which take seconds more: autograd knows the kinds of devices that there were
        at its first backward, and the server has made one.
    """

    def __init__(self, number: int, *, initialize: bool = True, fresh: bool = False) -> None:
        self.number, self._initialize = number, initialize
        self._context: Any = multiprocessing.get_context("spawn") if fresh else context
        self.processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._held: list[socket.socket] = []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def run(self, case: Callable[..., Any], tmp_path: Path, timeout: float = 120, **given: Any) -> list[Any]:
        """What `case(info, tmp_path, **given)` gives back on each rank; raises where one fails."""
        found = self.outcomes(case, tmp_path, timeout, **given)
        words = [f"rank {rank}:\n{each.failure}" for rank, each in enumerate(found) if each.failure]
        assert not words, "\n".join(words)
        return [each.value for each in found]

    def outcomes(self, case: Callable[..., Any], tmp_path: Path, timeout: float = 120, **given: Any) -> list[Outcome]:
        """How the case ends on each rank. What has not ended after `timeout` seconds is killed."""
        self.begin(case, tmp_path, **given)
        return self.end(tmp_path, timeout)

    def begin(self, case: Callable[..., Any], tmp_path: Path, **given: Any) -> None:
        if not self.processes:
            self._start(tmp_path)
        self._begun = time.monotonic()
        for pipe in self._pipes:
            pipe.send((case, tmp_path, given))

    def wait_for(self, tmp_path: Path, pattern: str, timeout: float = 120) -> None:
        """Return once the case has made as many such files as there are ranks."""
        while len(list(tmp_path.glob(pattern))) < self.number:
            assert time.monotonic() < self._begun + timeout, f"no {pattern} after {timeout:.0f} s"
            time.sleep(0.02)

    def end(self, tmp_path: Path, timeout: float = 120) -> list[Outcome]:
        found: dict[int, Outcome] = {}
        pending = dict(enumerate(self._pipes))
        while pending:
            left = self._begun + timeout - time.monotonic()
            ends = {rank: {pipe, self.processes[rank].sentinel} for rank, pipe in pending.items()}
            ready = multiprocessing.connection.wait([*itertools.chain(*ends.values())], max(0, left))
            for rank in [rank for rank, each in ends.items() if not each.isdisjoint(ready) or not ready]:
                found[rank] = self._outcome(rank, tmp_path, is_late=not ready)
                del pending[rank]
        if any(each.failure for each in found.values()):
            self.stop()
        return [found[rank] for rank in range(self.number)]

    def stop(self) -> None:
        """End the processes; those that do not end by themselves are killed."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()
            process.join()
        for each in self._held:
            each.close()
        self.processes, self._pipes, self._held = [], [], []

    def _start(self, tmp_path: Path) -> None:
        with pytest.MonkeyPatch.context() as meanwhile:  # the server finds what it is to import
            meanwhile.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
            multiprocessing.forkserver.ensure_running()
        self._held.append(held := held_port())
        port = held.getsockname()[1]
        for rank in range(self.number):
            ours, theirs = self._context.Pipe()
            variables = {
                **dict.fromkeys(("RANK", "LOCAL_RANK"), rank),
                **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), self.number),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": 1,
            }
            environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
            arguments = theirs, Info(rank, self.number), environment, self._initialize
            self.processes.append(self._context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()
            theirs.close()
            self._pipes.append(ours)

    def _outcome(self, rank: int, tmp_path: Path, *, is_late: bool) -> Outcome:
        seconds = time.monotonic() - self._begun
        process, printed = self.processes[rank], tmp_path / f"rank{rank}.txt"
        text = printed.read_text() if printed.exists() else ""
        if is_late:
            os.kill(process.pid, signal.SIGUSR1)  # its threads' stacks
            time.sleep(0.5)
            process.kill()
            return Outcome(None, f"{printed.read_text()}\nnot ended after {seconds:.0f} s", seconds)
        try:
            if not self._pipes[rank].poll():  # a process that it has forked holds the other end
                raise EOFError
            failure = self._pipes[rank].recv()
        except (EOFError, OSError):
            process.join()
            return Outcome(None, f"{text}\nthe process ended with {process.exitcode}", seconds)
        if failure:
            return Outcome(None, f"{text}\n{failure}", seconds)
        return Outcome(torch.load(tmp_path / f"rank{rank}.pt", weights_only=False), "", seconds)


def held_port() -> socket.socket:
    """A socket that keeps its port from all who ask for any one, until it is closed; who names the port listens there."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def _serve(pipe: Connection, info: Info, environment: dict[str, str], initialize: bool) -> None:
    """One rank's process: cases until there are no more."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    figures.give()
    warnings.simplefilter("error")
    deprecated, slow = "`torch.jit.script_method` is deprecated", "Guards may run slower on Python 3.13.0"
    for harmless in (deprecated, "The .grad attribute of a Tensor that is not a leaf", slow):
        warnings.filterwarnings("ignore", harmless)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if initialize:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    Harness.are_kept = True  # in a case, and the usual model's, which the server has made
    while (job := pipe.recv()) is not None:
        case, tmp_path, given = job
        with (tmp_path / f"rank{info.rank}.txt").open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        gc.collect()
        gc.freeze()
        try:
            torch.save(case(info, tmp_path, **given), tmp_path / f"rank{info.rank}.pt")
        except Exception:  # noqa: BLE001  the test shows it
            pipe.send(traceback.format_exc())
        else:
            pipe.send("")
