"""idle: trained parameters that no gradient comes to, in a step or in all so far, and the steps that they have missed.

As with torch's optimizers, these keep values and states, and steps of others do not count for them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

from gs_compile.errors import OptimizerError
from gs_compile.model.gradients import have_zeros
from gs_compile.model.optimizer import Optimizer
from gs_compile.runtime.spans import Slice
from gs_compile.runtime.step_record import StepRecord


class Idle:
    """Of one engine.

    trained: all that it trains, by number; none on several ranks, which may differ in what they train, and count
    nothing: such a parameter has zeros for a gradient. never: those that no gradient comes to, as far as the first call
    shows.
    """

    def __init__(self, trained: Mapping[int, Slice], never: Set[int], *, is_durable: bool) -> None:
        self._counts, self._is_durable = bool(trained), is_durable
        self._never = frozenset(span for number, span in trained.items() if number in never)
        self._may_be = frozenset(trained.values()) - self._never
        self.num_steps = 0  # that those missed and none has counted, until one gets a gradient: most never do

    def tell(self, record: StepRecord, optimizer: Optimizer, reached: Collection[Slice]) -> None:
        """Have the record of a step, whose backward brings gradients to some, name the others."""
        self.reach(record, optimizer, self._never.intersection(reached))
        zeros = map(optimizer.trained_span, have_zeros(optimizer.group_of))
        record.idle = self._may_be.difference(reached, zeros)

    def reach(self, record: StepRecord | None, optimizer: Optimizer | None, spans: Set[Slice]) -> None:
        """Gradients come to some in the step of a record: of those that had none in any step, it is the first one.

        Raises OptimizerError in a durable run.
        """
        if optimizer is not None and record is not None:
            self._wake(optimizer, self._never & spans)
            counts = optimizer.steps.missed.items() if self._counts else ()
            found = ((optimizer.trained_span(parameter), number) for parameter, number in counts)
            record.missed = {span: number for span, number in found if span is not None}

    def _wake(self, optimizer: Optimizer, spans: Set[Slice]) -> None:
        if not spans:
            return
        if self._is_durable and self.num_steps:
            first = min(spans, key=str)
            raise OptimizerError(
                f"{len(spans)} of the trained parameters get their first gradient in step {optimizer.steps.taken + 1}, "
                f"for example one of shape {first.shape} in unit {first.unit}, but a commit does not store how many "
                "steps they have missed: in a durable run the first step trains all that later ones do. Freeze them "
                "before the model's first call, or give them a gradient from the first step on. Nothing was updated"
            )
        missed = optimizer.steps.missed
        woken = [each for each in optimizer.group_of if optimizer.trained_span(each) in spans]
        optimizer.steps.missed = {**missed, **{each: missed.get(each, 0) + self.num_steps for each in woken}}
        self._never, self._may_be = self._never - spans, self._may_be | spans
        for each in woken:
            optimizer.show_state(each)
