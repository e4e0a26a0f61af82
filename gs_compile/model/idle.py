"""idle: parameters that are trained and that no gradient comes to in a step, as of a head that the step does not train.

Updates leave them as they are, as torch does. Their own numbers of steps, by which moments are corrected, fall behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from gs_compile.errors import OptimizerError
from gs_compile.model.optimizer import Optimizer
from gs_compile.runtime.spans import Slice
from gs_compile.runtime.step_record import StepRecord

Tensor = torch.Tensor


class Idle:
    """The parameters of one engine that may be idle, by their places.

    spans, never: of all parameters, and which of them never get a gradient and are left out here, by input index.
    is_durable: nobody keeps how many steps a parameter has missed. is_shared: by several ranks, which may differ in
    what they train: what has no gradient has zeros.
    """

    def __init__(
        self, spans: Mapping[int, Slice], args: Sequence[Any], never: Collection[int], is_shared: bool, is_durable: bool
    ) -> None:
        trained = (span for index, span in spans.items() if args[index].requires_grad and index not in never)
        self._trained = frozenset(() if is_shared else trained)
        self._keeps_numbers, self._is_durable = not is_shared, is_durable

    def refuse(self, record: StepRecord | None) -> None:
        """Raise `OptimizerError` where a step leaves out parameters, and a run that goes on would not know of it."""
        if self._is_durable and record is not None and record.idle:
            first = min(record.idle, key=str)
            raise OptimizerError(
                f"{len(record.idle)} of the trained parameters get no gradient, for example one of shape {first.shape} "
                f"in unit {first.unit}, but in a durable run each step updates all of them. Freeze parameters that are "
                "never trained (requires_grad_(False)) before the model's first call. Or add 0.0 * output.sum() of "
                "their output to the loss: they get zeros then, and weight decay. Nothing was updated"
            )

    def note(
        self,
        record: StepRecord,
        reached: Collection[Slice],
        missed: Mapping[Tensor, int],
        span_of: Callable[[Tensor], Slice | None],
        *,
        is_alone: bool,
    ) -> None:
        """Have in the record of a backward what it does not reach, and what steps parameters have missed before it.

        is_alone: the step has no other backward.
        """
        record.idle = self._trained.difference(reached)
        if self._keeps_numbers:
            places = ((span_of(parameter), number) for parameter, number in missed.items())
            record.missed = {span: number for span, number in places if span is not None}
        if is_alone:
            self.refuse(record)


def count_missed(optimizer: Optimizer, record: StepRecord) -> None:
    """A step that others have taken is one more that parameters without a gradient have missed."""
    if record.idle and not record.skipped:
        idle = [each for each in optimizer.group_of if optimizer.engine.trained_span(each) in record.idle]
        optimizer.missed = {**optimizer.missed, **{each: optimizer.missed.get(each, 0) + 1 for each in idle}}
        for each in idle:
            optimizer.show_state(each)
