"""strands: functions that run side by side, one at a time, so that what they ask for is answered at once.

Each has a thread of its own, as autograd and autocast keep their modes by thread; a thread that has asked waits for its
answer while others run.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from typing import Any

_current: contextvars.ContextVar[_Strand | None] = contextvars.ContextVar("strand", default=None)


class _Abandoned(BaseException):
    """Ends a strand that nobody waits for."""


@dataclass(eq=False)
class _Strand:
    function: Callable[[], Any]
    to: SimpleQueue[Any] = field(default_factory=SimpleQueue)  # answers
    back: SimpleQueue[bool] = field(default_factory=SimpleQueue)  # the strand has asked, or come to its end
    question: Any = None
    result: Any = None
    error: BaseException | None = None
    thread: Thread | None = None

    def resume(self, answer: Any = None) -> bool:
        """Run on to the next question; False where the function has come to its end."""
        if self.thread is None:
            self.thread = Thread(target=contextvars.copy_context().run, args=(self._run,), daemon=True)
            self.thread.start()
        else:
            self.to.put(answer)
        return self.back.get()

    def end(self) -> None:
        """Return when the thread has come to its end, wherever it is."""
        if self.thread is not None:
            self.to.put(_Abandoned())
            self.thread.join()

    def _run(self) -> None:
        _current.set(self)
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
    strand = _current.get()
    assert strand is not None
    strand.question = question
    strand.back.put(True)
    found = strand.to.get()
    if isinstance(found, _Abandoned):
        raise found
    return found


def in_strand() -> bool:
    """Whether a strand runs."""
    return _current.get() is not None
