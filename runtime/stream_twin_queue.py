"""stream_twin_queue: the streams, events and memory of the twin of a device (`stream_twin`), and who watches them."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

POISON = 0xFF


class State:
    """What the streams of one twin share: the delays, who watches, and the first error on any of them."""

    def __init__(self, seed: int, delay_seconds: float, observer: Observer) -> None:
        self.seed = seed
        self.delay_seconds = delay_seconds
        self.observer = observer
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raise what has failed on a stream."""
        if self.error is not None:
            raise self.error


class Span(NamedTuple):
    """Bytes of memory."""

    start: int
    stop: int


class Observer:
    """Who is told what happens, by the thread that launches; this one does not mind."""

    def launched(self, stream: TwinStream, name: str, reads: Sequence[Span], writes: Sequence[Span]) -> None: ...

    def recorded(self, stream: TwinStream, event: TwinEvent) -> None: ...

    def stream_waits(self, stream: TwinStream, event: TwinEvent) -> None: ...

    def thread_waited(self, event: TwinEvent) -> None: ...


class TwinEvent:
    """A point in a stream."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.happened = threading.Event()
        self.seconds = 0.0

    def happen(self) -> None:
        self.seconds = time.perf_counter()
        self.happened.set()

    def wait(self) -> None:
        self.happened.wait()

    def query(self) -> bool:
        if not self.happened.is_set():
            return False
        self.state.observer.thread_waited(self)
        return True

    def synchronize(self) -> None:
        self.happened.wait()
        self.state.check()
        self.state.observer.thread_waited(self)


class TwinStream:
    """A queue with a thread of its own."""

    def __init__(self, state: State, name: str) -> None:
        self.name = name
        self.state = state
        self._random = random.Random(f"{state.seed} {name}")
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"twin {name}", daemon=True)
        self._thread.start()

    def launch(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def wait_event(self, event: TwinEvent) -> None:
        self.state.observer.stream_waits(self, event)
        self.launch(event.wait)

    def close(self) -> None:
        self._tasks.put(None)
        self._thread.join()

    def _work(self) -> None:  # [1]
        while (task := self._tasks.get()) is not None:
            if self.state.delay_seconds and self._random.random() < 0.3:
                time.sleep(self._random.random() * self.state.delay_seconds)
            try:
                with torch.no_grad():
                    task()
            except BaseException as error:  # noqa: BLE001  it is raised where somebody waits
                self.state.error = self.state.error or error


class Block:
    """Memory of the device: one tensor's, or nobody's."""

    def __init__(self, nbytes: int, stream: TwinStream) -> None:
        self.bytes = np.full(nbytes, POISON, dtype=np.uint8)
        self.stream = stream  # on which it is taken, again and again
        self.used_on: set[TwinStream] = set()  # other streams, since it was taken

    @property
    def span(self) -> Span:
        return Span(self.bytes.ctypes.data, self.bytes.ctypes.data + len(self.bytes))

    def poison(self) -> None:
        self.bytes.fill(POISON)
