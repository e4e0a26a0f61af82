"""late_settings: what an optimizer is set to between the last backward of a step and `optimizer.step()`.

Many scripts set the learning rate there, and mean this step. Updates that wait for `step()` see it. Of those that run
beside the backward nobody knows before: the first step of a run shows it, and begins again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from gs_compile.errors import StepOrderError
from gs_compile.runtime.step_record import StepRecord

AnEngine = TypeVar("AnEngine", bound=Any)


def begun_again(engine: AnEngine, record: StepRecord) -> AnEngine | None:
    """The engine of the step begun again, where its updates have run with other settings than those of now; else None.

    Updates that have waited take these up. Raises StepOrderError where they have not, and the step cannot begin again.
    """
    optimizer, placement = engine.optimizer, engine.placement
    if optimizer is None or not (changed := _changed(record, optimizer.param_groups, anew=engine.may_begin_again)):
        return None
    has_early = any(unit.trained("early") for unit in placement.units)
    if not has_early or record.skipped or placement.rolls_back(confirmed=record.confirmed):
        record.hypers = optimizer.hypers
        return None
    if not engine.may_begin_again:
        raise StepOrderError(
            f"{changed}: updates have run beside the backward, as nothing has shown that they should wait. Set it "
            'before the backward or after step(), or give options={"accumulate": True}, with which updates wait for '
            "step(), and begin the run anew"
        )
    engine.done[0][0].begin_again(engine)  # a call of the step
    successor: AnEngine = engine.successor
    return successor


def _changed(record: StepRecord, groups: Sequence[Mapping[str, Any]], *, anew: bool) -> str:
    """A setting with another value than as the backward began, in words; anew: or with an equal one, assigned since."""
    for number, (before, group) in enumerate(zip(record.groups, groups, strict=True)):
        for key, value in before.items():
            now = group.get(key)
            if now != value or (anew and now is not value):
                return f'"{key}" of param group {number} was set to {now!r} after the backward, and {value!r} before'
    return ""
