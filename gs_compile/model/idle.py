"""idle: parameters that are trained and that no gradient comes to in a step, as of a head that the step does not train.

Updates leave them as they are, as torch does. Their own numbers of steps, by which moments are corrected, fall behind.
"""

from __future__ import annotations

from gs_compile.errors import OptimizerError
from gs_compile.model.optimizer import Optimizer
from gs_compile.runtime.step_record import StepRecord


def refuse_idle(record: StepRecord) -> None:
    """Raise `OptimizerError` where a step leaves out parameters, and a run that goes on would not know of it."""
    if record.idle:
        first = min(record.idle, key=str)
        raise OptimizerError(
            f"{len(record.idle)} of the trained parameters get no gradient, for example one of shape {first.shape} "
            f"in unit {first.unit}, but in a durable run each step updates all of them. Freeze parameters that are "
            "never trained (requires_grad_(False)) before the model's first call. Or add 0.0 * output.sum() of "
            "their output to the loss: they get zeros then, and weight decay. Nothing was updated"
        )


def count_missed(optimizer: Optimizer, record: StepRecord) -> None:
    """A step that others have taken is one more that parameters without a gradient have missed."""
    if record.idle and not record.skipped:
        idle = [each for each in optimizer.group_of if optimizer.engine.trained_span(each) in record.idle]
        optimizer.steps.missed = {
            **optimizer.steps.missed,
            **{each: optimizer.steps.missed.get(each, 0) + 1 for each in idle},
        }
        for each in idle:
            optimizer.show_state(each)
