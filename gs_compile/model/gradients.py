"""gradients: `.grad` of parameters on the tiers: what it shows, and what a script may do with it.

A backward leaves a mark there (`UnavailableGradient`), which a script may drop, set to zero or replace. A gradient that
it puts there is added to those of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor

from gs_compile.capture.internals import without_overrides
from gs_compile.errors import StepOrderError
from gs_compile.model.offloaded import UnavailableGradient, placeholder
from gs_compile.model.residency import is_offloaded, residency_of


def mark_gradient_unavailable(parameter: Tensor) -> None:
    """Mark a parameter after a backward: its gradient has gone to its update, and cannot be used otherwise."""
    if is_offloaded(parameter):
        residency = residency_of(parameter)
        if residency.gradient is None:
            whole = placeholder(parameter.shape, parameter.dtype, parameter.device)
            residency.gradient = whole.as_subclass(UnavailableGradient)
        mark = residency.gradient
        with without_overrides():
            mark.is_left &= parameter.grad is mark and not mark.is_zeroed
            mark.is_zeroed, mark.is_expected = False, True
            parameter.grad = mark


def end_gradients(parameters: Iterable[Tensor], *, dropped: bool) -> None:
    """After a step, marks stay until the script zeroes them; dropped: the gradients were dropped."""
    for parameter, grad, mark in _marks(parameters):
        mark.is_left, mark.is_expected = True, False
        if dropped and grad is mark:
            parameter.grad = None


def forget_gradients(parameters: Iterable[Tensor]) -> None:
    """The marks of the current step's backwards were zeroed, and that has been taken into account."""
    for *_, mark in _marks(parameters):
        mark.is_expected = False


def have_zeros(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parameters whose gradient was set to zero in place, or given as zeros: torch updates them, even if no other
    gradient comes. (Other given gradients have been taken by `take_given`.)
    """
    return [
        each
        for each, grad, mark in _grads(parameters)
        if grad is not None and (mark is None or grad is not mark or mark.is_zeroed)
    ]


def take_given(parameters: Iterable[Tensor], is_idle: Callable[[Tensor], bool] = lambda _: False) -> None:
    """Add the gradients that a script has put in `.grad` to the sums of the step: zeros only to those of parameters to
    which no backward of the step has brought any, as torch would not update these otherwise.
    """
    others = [(each, grad) for each, grad, mark in _grads(parameters) if grad is not None and grad is not mark]
    given = [(p, grad) for p, grad in others if isinstance(grad, UnavailableGradient) or is_idle(p) or bool(grad.any())]
    left = dict(given)
    try:
        for parameter in left:
            parameter.grad = None
        for parameter, gradient in given:
            residency_of(parameter).add_gradient(parameter, gradient)
            del left[parameter]
    except BaseException:  # a gradient that is refused is put back, so that `step()` does not run without it
        for parameter, gradient in left.items():
            parameter.grad = gradient
        raise


def refuse_left(parameters: Iterable[Tensor]) -> None:
    """Raise `StepOrderError` if gradients of a closed step have not been zeroed."""
    if any(mark.is_left and grad is mark and not mark.is_zeroed for _, grad, mark in _marks(parameters)):
        raise StepOrderError(
            "the gradients of the last step were not set to zero after optimizer.step(): torch would add to them in "
            "the next backward, but they no longer exist here. Call optimizer.zero_grad() in each step. Several "
            "backwards before one step() do add up"
        )


def refuse_alone(parameters: Collection[Tensor]) -> None:
    """Raise `StepOrderError` if a step comes without a backward, but there are gradients: zeros in place, or those of
    backwards that a first step could not repeat when it began again.
    """
    if any(mark.is_expected and grad is mark and not mark.is_zeroed for _, grad, mark in _marks(parameters)):
        raise StepOrderError(
            "the gradients of the backwards before this step() are lost: the first step had to begin again, as several "
            "backwards or settings come before step(), and that failed or was interrupted. Call optimizer.zero_grad() "
            "and repeat the batches of this step. Nothing was updated"
        )
    if have_zeros(parameters):
        raise StepOrderError(
            "optimizer.step() was called without a backward, and gradients of zeros are left from "
            "zero_grad(set_to_none=False): torch would update by them, so moments and weight decay would change "
            "parameters. Call optimizer.zero_grad(), which drops them, or leave this step() out"
        )


def are_dropped(parameters: Collection[Tensor]) -> bool:
    """Whether all gradients of the step that `optimizer.step()` closes were dropped.

    Raises `StepOrderError` if only some were dropped, or are zeros, and as `refuse_left`.
    """
    refuse_left(parameters)
    if not is_zeroed(parameters):
        return False
    with without_overrides():
        is_left = any(parameter.grad is not None for parameter in parameters)
    if is_left:
        raise StepOrderError(
            "between the backward and optimizer.step() gradients were set to zero in place, or only for the parameters "
            "on the tiers: torch would update the others, or update by zeros. To skip the step, drop all gradients: "
            "optimizer.zero_grad()"
        )
    return True


def is_zeroed(arguments: Iterable[Any]) -> bool:
    """Whether the gradients that backwards have left in `.grad` were dropped, or set to zero, since then.

    Raises `StepOrderError` where some were and some were not.
    """
    expected = [
        (each, grad is not mark or mark.is_zeroed) for each, grad, mark in _marks(arguments) if mark.is_expected
    ]
    with without_overrides():
        zeroed = {is_zero for each, is_zero in expected if each.requires_grad}
    if len(zeroed) > 1:
        raise StepOrderError(
            "since the last backward the gradients of some parameters were set to zero or replaced, and those of "
            "others were not: with parameters on the tiers call optimizer.zero_grad(), which drops all of them. To "
            "leave some parameters unchanged for some steps, freeze them, requires_grad_(False), before the model is "
            "called"
        )
    return True in zeroed


def _marks(arguments: Iterable[Any]) -> list[tuple[Tensor, Tensor | None, UnavailableGradient]]:
    """Those of `_grads` that a backward has marked."""
    return [(each, grad, mark) for each, grad, mark in _grads(arguments) if mark is not None]


def _grads(arguments: Iterable[Any]) -> list[tuple[Tensor, Tensor | None, UnavailableGradient | None]]:
    """The offloaded parameters among the arguments, with their current `.grad` and the mark that they have."""
    found = [(each, residency_of(each).gradient) for each in arguments if is_offloaded(each)]
    with without_overrides():
        return [(each, each.grad, mark) for each, mark in found]
