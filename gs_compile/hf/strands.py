"""strands: functions that run side by side, one at a time, so that what they ask for is answered at once.

Each has a thread of its own, as autograd and autocast keep their modes by thread; a thread that has asked waits for its
answer while others run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any


class _Abandoned(BaseException):
    """Ends a strand that nobody waits for, whatever it asks."""


class _Strand(threading.Thread):
    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.function = function
        self.to: SimpleQueue[Any] = SimpleQueue()  # answers
        self.back: SimpleQueue[bool] = SimpleQueue()  # the strand has asked, or come to its end
        self.question: Any = None
        self.is_abandoned = False
        self.result: Any = None
        self.error: BaseException | None = None

    def resume(self, answer: Any = None) -> bool:
        """Run on to the next question; False where the function has come to its end."""
        if self.ident is None:
            self.start()
        else:
            self.to.put(answer)
        return self.back.get()

    def end(self) -> None:
        """Return when the thread has come to its end, wherever it is."""
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
    """The results of all functions. `answer` gets the questions of all that have one, and gives each its answer.

    An error of a function, or of `answer`, is raised here; the other functions end where they are.
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
    """The answer to a question of the strand that runs."""
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
    """Whether a strand runs."""
    return isinstance(threading.current_thread(), _Strand)
