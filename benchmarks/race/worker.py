"""worker: a contestant's process as the race sees it: a question a line, an answer a line.

What a contestant says to nobody (warnings, build logs) goes to a file, whose end is shown when it fails.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

TAIL = 1500  # characters of its log that tell why a contestant has failed
PATIENCE = 20.0  # seconds to end by itself


class WorkerError(RuntimeError):
    """A contestant ended, hung, or said what it cannot do."""


class Worker:
    """One contestant from its start to its end; raises `WorkerError` where it does not answer in time.

    Its process leads a group of its own, so that no worker of it outlives the race.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = log
        self._partial = b""
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # the race is over: nobody is asked
            self._kill()

    def ready(self, timeout: float) -> dict[str, Any]:
        """Its settings and versions, once it can take a step."""
        return self.answer(timeout)

    def ask(self, question: str, timeout: float) -> dict[str, Any]:
        """Its answer to a line such as ``step 3``."""
        self.tell(question)
        return self.answer(timeout)

    def tell(self, question: str) -> None:
        """Ask, and do not wait."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{question}\n".encode())
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerError(self._ended()) from error

    def answer(self, timeout: float) -> dict[str, Any]:
        """Its next answer."""
        return self._checked(self._answer(timeout))

    def close(self) -> None:
        """End it, by asking first."""
        assert self._process.stdin is not None
        with suppress(OSError, ValueError, subprocess.TimeoutExpired):  # ValueError: it is closed already
            self._process.stdin.write(b"quit\n")
            self._process.stdin.close()
            self._process.wait(PATIENCE)
        self._kill()

    def _checked(self, answer: dict[str, Any]) -> dict[str, Any]:
        if "cannot" in answer:
            raise WorkerError(f"does not run here: {answer['why']}")
        if "error" in answer:
            raise WorkerError(f"failed at {answer['where']}: {answer['error']}")
        return answer

    def _kill(self) -> None:
        """The whole group: a worker may be left where its leader has ended."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):  # what it was told last, and has not read
                pipe.close()

    def _answer(self, timeout: float) -> dict[str, Any]:
        """The next line that is a JSON object; a library may print others."""
        deadline = time.monotonic() + timeout
        while True:
            line = self._line(deadline)
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._partial:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    self._kill()
                    raise WorkerError(f"no answer in time; its log ends with:\n{self._tail()}")
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise WorkerError(self._ended())
                self._partial += chunk
        line, _, self._partial = self._partial.partition(b"\n")
        return line

    def _ended(self) -> str:
        self._kill()
        return f"it ended with {self._process.returncode}; its log ends with:\n{self._tail()}"

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-TAIL:].strip().replace(f"{Path.cwd()}/", "")


class Team:
    """A contestant of several ranks, each a process: asked and answering as one `Worker`."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = workers

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            for worker in self.workers:
                stack.push(worker.__exit__)
            if kind is None:
                self.close()

    def ready(self, timeout: float) -> dict[str, Any]:
        """The first rank's settings, once all can take a step."""
        first, *_ = [worker.ready(timeout) for worker in self.workers]
        return first

    def ask(self, question: str, timeout: float) -> dict[str, Any]:
        """Seconds are those of the slowest rank, losses the mean, memory and bytes all ranks' together."""
        for worker in self.workers:
            worker.tell(question)
        answers = [worker.answer(timeout) for worker in self.workers]
        found = dict(answers[0])
        for key, combine in _COMBINED.items():
            if key in found:
                found[key] = combine([each[key] for each in answers])
        return found

    def close(self) -> None:
        """End them all: none ends before all are told."""
        for worker in self.workers:
            with suppress(WorkerError):
                worker.tell("quit")
        for worker in self.workers:
            worker.close()


def _means(losses: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.fmean(each) for each in zip(*losses, strict=True)]


_COMBINED: dict[str, Callable[[Sequence[Any]], Any]] = {
    "seconds": max,
    "loss": statistics.fmean,
    "losses": _means,
    "peak_rss": sum,
    "peak_device": sum,
    "read_bytes": sum,
    "write_bytes": sum,
}
