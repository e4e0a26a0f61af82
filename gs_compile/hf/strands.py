"""strands: functions that run interleaved, one at a time, so that all of their questions are answered together.

Each has a thread of its own, as autograd and autocast keep their modes by thread. A thread that has asked a question
waits for the answer while others run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any


class _Abandoned(BaseException):
    """Ends a strand that is abandoned, at its question."""


class _Strand(threading.Thread):
    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.function = function
        self.to: SimpleQueue[Any] = SimpleQueue()  # answers
        self.back: SimpleQueue[bool] = SimpleQueue()  # True: the strand has asked; False: it has ended
        self.question: Any = None
        self.is_abandoned = False
        self.result: Any = None
        self.error: BaseException | None = None

    def resume(self, answer: Any = None) -> bool:
        """Run to the next question; False if the function has ended."""
        if self.ident is None:
            self.start()
        else:
            self.to.put(answer)
        return self.back.get()

    def end(self) -> None:
        """End the thread, wherever it is; returns when it has ended."""
        if self.ident is not None:
            self.is_abandoned = True
            self.to.put(None)
            self.join()

    def run(self) -> None:
        try:
            self.result = self.function()
        except BaseException as error:  # noqa: BLE001  (`run` raises it again)
            self.error = error
        self.back.put(False)


def run(functions: Sequence[Callable[[], Any]], answer: Callable[[Sequence[Any]], Sequence[Any]]) -> list[Any]:
    """The results of all functions. `answer` gets the questions of all that have one, and returns their answers.

    An error of a function, or of `answer`, is raised here; the other functions are ended where they are.
    """
    strands = asking = [_Strand(function) for function in functions]
    answers: Sequence[Any] = [None] * len(strands)
    try:
        while asking:
            asking = [strand for strand, each in zip(asking, answers, strict=True) if strand.resume(each)]
            for strand in strands:
                if strand.error is not None:
                    raise strand.error
            answers = answer([strand.question for strand in asking]) if asking else []
        return [strand.result for strand in strands]
    finally:
        for strand in strands:
            strand.end()


def ask(question: Any) -> Any:
    """The answer to a question of the running strand."""
    strand = threading.current_thread()
    assert isinstance(strand, _Strand)
    if not strand.is_abandoned:  # else it asks as it ends
        strand.question = question
        strand.back.put(True)
        found = strand.to.get()
    if strand.is_abandoned:
        raise _Abandoned
    return found


def in_strand() -> bool:
    """Whether the calling code runs in a strand."""
    return isinstance(threading.current_thread(), _Strand)
