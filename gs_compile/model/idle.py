"""idle: trained parameters that get no gradient, in one step or in all so far.

As with torch's optimizers, their values and states do not change, and the steps of others do not count for them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

from gs_compile.model.gradients import have_zeros
from gs_compile.model.optimizer import Optimizer
from gs_compile.runtime.spans import Slice
from gs_compile.runtime.step_record import StepRecord


class Idle:
    """The idle parameters of one engine.

    trained: all that it trains, by number. never: those that get no gradient, as far as the first call shows.
    counts: whether steps are counted for each parameter. Not on several ranks, which may differ in what they train:
        there such parameters get zeros.
    untouched: those of `never` that have got no gradient so far.
    """

    def __init__(self, trained: Mapping[int, Slice], never: Set[int], *, counts: bool) -> None:
        self._counts = counts
        self._trained = frozenset(trained.values())
        self._never = self.untouched = frozenset(span for number, span in trained.items() if number in never)

    @property
    def never(self) -> frozenset[Slice]:
        """Those of `never` that have got no gradient so far, if steps are counted."""
        return self.untouched if self._counts else frozenset()

    def wake(self, spans: Set[Slice]) -> None:
        """Some parameters have got gradients; for those of `never` it is the first one."""
        self.untouched -= spans

    def tell(self, record: StepRecord, optimizer: Optimizer, reached: Collection[Slice]) -> None:
        """Name in a step's record the parameters that its backward brings no gradient."""
        zeros = map(optimizer.trained_span, have_zeros(optimizer.group_of))
        come = {*reached, *(span for span in zeros if span is not None)}
        self.reach(record, optimizer, come)
        record.idle = self._trained - self.untouched - come if self._counts else frozenset()

    def reach(self, record: StepRecord, optimizer: Optimizer | None, spans: Set[Slice]) -> None:
        """Some parameters get gradients in the step of a record."""
        if optimizer is not None:
            self.wake(spans)
            counts = optimizer.steps.missed.items() if self._counts else ()
            found = ((optimizer.trained_span(parameter), number) for parameter, number in counts)
            record.missed = {span: n for span, n in found if span is not None and span not in self.untouched}
            record.woken, record.idle = self._never - self.untouched, record.idle - spans
