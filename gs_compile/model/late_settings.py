"""late_settings: what a script does between the last backward of a step and `optimizer.step()`.

Many set the learning rate there, and mean this step, or drop the gradients where a loss jumps. Updates that wait for
`step()` see it. Of those that run beside the backward nobody knows before: the first step of a run shows it, and begins
again.
"""

from __future__ import annotations

from gs_compile.errors import StepOrderError
from gs_compile.model.parameter_store import ParameterStore
from gs_compile.runtime.step_record import StepRecord


def are_too_late(
    store: ParameterStore, record: StepRecord, now: StepRecord, *, may_begin_again: bool, dropped: bool
) -> bool:
    """Whether the first step is to begin again, as its updates have run with what does not hold any more.

    now: as the optimizer is set. dropped: the gradients were, and nothing is to be updated. Updates that
    have waited take up that, and settings that have changed. Raises StepOrderError where they have not waited, and the
    step cannot begin again.
    """
    placement = store.tiers.placement
    changed = _changed(record, now, anew=may_begin_again)
    if not (changed or dropped):
        return False
    store.announce("dropped gradients" if dropped else "new settings", f", {now.told_settings}")
    if placement.has_early and may_begin_again:
        return True
    is_norm_kept = record.max_grad_norm == now.max_grad_norm
    rolls_back = placement.rolls_back(confirmed=record.confirmed) and (is_norm_kept or dropped)
    waits = not placement.has_early or rolls_back
    if not (waits or record.skipped):
        what = "the gradients were dropped after the backward" if dropped else changed
        raise StepOrderError(
            f"{what}: updates have already run beside the backward, because the first step did not show that they must "
            f"wait. {'Give' if dropped else 'Set it before the backward or after step(), or give'} "
            'options={"accumulate": True}, with which updates wait for step(), and start the run again'
        )
    record.is_dropped, record.hypers = dropped and waits, now.hypers
    if not is_norm_kept:
        record.max_grad_norm, record.scale = now.max_grad_norm, 1.0
        record.clip()
    return False


def _changed(record: StepRecord, now: StepRecord, *, anew: bool) -> str:
    """A setting with another value than as the backward began, in words; anew: or with an equal one, assigned since."""
    pairs = [("max_grad_norm", record.max_grad_norm, now.max_grad_norm)]
    for number, (before, after) in enumerate(zip(record.groups, now.groups, strict=True)):
        pairs += [(f'"{key}" of param group {number}', value, after[key]) for key, value in before.items()]
    for name, value, set_since in pairs:
        if set_since != value or (anew and set_since is not value):
            return f"{name} was set to {set_since!r} after the backward, and {value!r} before"
    return ""
