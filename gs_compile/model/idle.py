"""idle: trained parameters that no gradient comes to, in a step or in all so far.

As with torch's optimizers, these keep values and states, and steps of others do not count for them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

from gs_compile.model.gradients import have_zeros
from gs_compile.model.optimizer import Optimizer
from gs_compile.runtime.spans import Slice
from gs_compile.runtime.step_record import StepRecord


class Idle:
    """Of one engine.

    trained: all that it trains, by number; none on several ranks, which may differ in what they train, and count
    nothing: such a parameter has zeros for a gradient. never: at first those that no gradient comes to, as far as the
    first call shows; of these, those that none has come to so far.
    """

    def __init__(self, trained: Mapping[int, Slice], never: Set[int]) -> None:
        self._counts = bool(trained)
        self.never = frozenset(span for number, span in trained.items() if number in never)
        self._may_be = frozenset(trained.values()) - self.never

    def tell(self, record: StepRecord, optimizer: Optimizer, reached: Collection[Slice]) -> None:
        """Have the record of a step, whose backward brings gradients to some, name the others."""
        self.reach(record, optimizer, self.never.intersection(reached))
        zeros = map(optimizer.trained_span, have_zeros(optimizer.group_of))
        record.idle = self._may_be.difference(reached, zeros)

    def reach(self, record: StepRecord | None, optimizer: Optimizer | None, spans: Set[Slice]) -> None:
        """Gradients come to some in the step of a record: of those that had none in any step, it is the first one."""
        if optimizer is not None and record is not None:
            self._may_be, self.never = self._may_be | (self.never & spans), self.never - spans
            counts = optimizer.steps.missed.items() if self._counts else ()
            found = ((optimizer.trained_span(parameter), number) for parameter, number in counts)
            record.missed = {span: n for span, n in found if span is not None and span not in self.never}
