"""optimizer_state: how an optimizer shows states on the tiers, and checks of state dicts."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from gs_compile.capture.internals import tree_map_only, without_overrides
from gs_compile.errors import MasterWarning, OptimizerError, ReleasedParameterError
from gs_compile.model.files import mapped_rows
from gs_compile.model.given import Given, Place
from gs_compile.model.offloaded import LOOKS, sends
from gs_compile.model.parameter_store import MASTER, ParameterStore, component
from gs_compile.model.residency import residency_of
from gs_compile.model.settings import HOW_TORCH_COMPUTES, OF_PARAMETERS, OTHER_RULES
from gs_compile.model.step_count import StepCount

Groups = Sequence[Mapping[str, Any]]  # of an optimizer, or of a state dict, which has numbers for parameters

CHANGE_STATE = "Take optimizer.state_dict(), change its tensors, and pass it to optimizer.load_state_dict()"
OTHER_STEPS = (
    "in the state dict some parameters have taken fewer steps than others, but not in this run: load it before the "
    "model's first call"
)

_NOT_SETTINGS = {*OF_PARAMETERS, *HOW_TORCH_COMPUTES, *OTHER_RULES}  # what torch's state dicts have in groups beside


def parts_of(state_dict: Any) -> tuple[Groups, Mapping[Any, Mapping[str, Any]]]:
    """The param groups and the states of a state dict; raises OptimizerError if it is not an optimizer's."""
    if not isinstance(state_dict, Mapping) or not {"param_groups", "state"} <= state_dict.keys():
        found = sorted(map(str, state_dict))[:5] if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise OptimizerError(
            f'an optimizer\'s state dict has "param_groups" and "state"; this one has {found or "nothing"}'
        )
    groups, states = state_dict["param_groups"], state_dict["state"]
    if not isinstance(groups, Sequence) or not all(
        isinstance(group, Mapping) and "params" in group for group in groups
    ):
        raise OptimizerError('"param_groups" of a state dict must be a list of dicts, each with its "params"')
    if not isinstance(states, Mapping) or not all(isinstance(state, Mapping) for state in states.values()):
        raise OptimizerError('"state" of a state dict must have a dict for each parameter, by its number')
    return groups, states


def numbers_of(ours: Groups, saved: Groups) -> list[Any]:
    """The number that each parameter of `ours` has in a state dict with the groups `saved`.

    Parameters are matched by name if both have names (of `named_parameters()`), otherwise by their place in groups of
    equal sizes. Raises OptimizerError if neither is possible.
    """
    known = {name: number for group in saved for name, number in zip(_names(group), group["params"], strict=False)}
    names = list(chain.from_iterable(map(_names, ours)))
    if names and all(name in known for name in names):
        return [known[name] for name in names]
    mine, theirs = ([len(group["params"]) for group in groups] for groups in (ours, saved))
    if mine != theirs:
        raise OptimizerError(
            f"the state dict has other param groups than this optimizer: groups of {theirs} parameters, here {mine}. "
            "Make the optimizer with the groups of the one that was saved, in the same order; or make both with "
            "model.named_parameters() instead of model.parameters(), and states are found by name"
        )
    return list(chain.from_iterable(group["params"] for group in saved))


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_SETTINGS}


def settings_read(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group from JSON, which has lists for tuples."""
    return {key: tuple(each) if isinstance(each, list) else each for key, each in settings_of(group).items()}


def are_alike(ours: Groups, saved: Groups) -> bool:
    """Whether the groups at the same place have the same parameters, so that settings can be copied."""
    pairs = zip(ours, saved, strict=False)
    named = all(_names(mine) == _names(theirs) for mine, theirs in pairs if _names(mine) and _names(theirs))
    return named and [len(group["params"]) for group in ours] == [len(group["params"]) for group in saved]


def _names(group: Mapping[str, Any]) -> Sequence[str]:
    found: Sequence[str] = group.get("param_names", ())
    return found


def steps_of(states: Mapping[torch.Tensor, Mapping[str, Any]]) -> tuple[int, dict[torch.Tensor, int]]:
    """The steps taken so far, and how many fewer some parameters have taken, for example because they were frozen.

    A parameter without a state has taken none. torch's SGD does not count steps: with a momentum, it is one.
    """
    taken = {parameter: whole_step(state) for parameter, state in states.items() if "step" in state}
    has_momentum = any(state.get("momentum_buffer") is not None for state in states.values())
    most = max(taken.values(), default=int(has_momentum))
    taken |= dict.fromkeys((parameter for parameter, state in states.items() if not state), 0)
    return most, {parameter: most - number for parameter, number in taken.items() if number < most}


def whole_step(state: Mapping[str, Any]) -> int:
    """The number of steps in a state."""
    step = state["step"]
    try:
        number = float(step)
    except (RuntimeError, TypeError, ValueError):  # several elements, None, text
        number = math.nan
    if not (number >= 0 and number.is_integer()):
        raise OptimizerError(f"a state's step is {step}, which is not a number of steps: the state dict is damaged")
    return int(number)


_ASSIGNS = frozenset("__set__ __setitem__ __iadd__ __isub__ __imul__ __idiv__ __itruediv__".split())
_VALUES = frozenset("item tolist numpy __array__ __bool__ __float__ __int__ __contains__ equal allclose".split())


class StoredState(torch.Tensor):
    """A tensor of `optimizer.state` that is on the tiers: it is on the meta device, and stays there if it is moved.

    (Trainers move states to the model's device.) Raises `ReleasedParameterError` for a change in place, which would be
    lost, and if a result computed from it is read, as in ``state["exp_avg"].norm().item()``.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.__name__
        if function is torch.Tensor.detach or sends(name, function, args):
            return args[0]
        if name in _ASSIGNS or (name.endswith("_") and not name.endswith("__") and name not in LOOKS):
            raise ReleasedParameterError(
                f"{name}: optimizer.state only shows a state that lives on the tiers. {CHANGE_STATE}"
            )
        if name in _VALUES:
            raise ReleasedParameterError(f"{name}: optimizer.state shows no values: read it in optimizer.state_dict()")
        found = torch.nn.Parameter.__torch_function__(function, (), args, kwargs or {})
        return tree_map_only(torch.Tensor, lambda each: each.as_subclass(cls) if each.is_meta else each, found)


def has_values(state: Mapping[str, Any]) -> bool:
    """Whether a state has values, and is not only the view of one on the tiers."""
    with without_overrides():
        return not all(torch.is_tensor(each) and each.is_meta for name, each in state.items() if name != "step")


def forget_shown(states: MutableMapping[torch.Tensor, Mapping[str, Any]]) -> None:
    """Drop the views of states whose parameters are not on the tiers: as with torch, these have none until there is a
    gradient.
    """
    for parameter, state in list(states.items()):
        if residency_of(parameter).tiered is None and not has_values(state):
            del states[parameter]


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state, in memory of its own."""
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def refuse_others(
    states: Mapping[torch.Tensor, Mapping[str, Any]], names_of: Callable[[torch.Tensor], Sequence[str]]
) -> None:
    """Raise OptimizerError for the state of another parameter, or of another kind of optimizer.

    names_of: the components that a parameter's state must have, as far as that is known.
    """
    for parameter, state in states.items():
        tensors = [name for name, each in state.items() if torch.is_tensor(each) and each.dim() and name != "step"]
        for name in {*tensors, *(names_of(parameter) if state else ())}:
            component(state, name, parameter.shape)


def check_shown(
    states: Mapping[torch.Tensor, dict[str, Any]], stored: Iterable[torch.Tensor], steps: StepCount
) -> None:
    """Raise OptimizerError where states on the tiers are shown no more: somebody has changed what shows them.

    A number of steps that was sent elsewhere is shown again.
    """
    for parameter in stored:
        state = states.get(parameter, {})
        if not state or has_values(state) or whole_step({"step": None, **state}) != steps.of(parameter):
            raise OptimizerError(
                "the state of a parameter that lives on the tiers, or its step, was removed from optimizer.state, or "
                f"assigned there, but optimizer.state only shows it. {CHANGE_STATE}"
            )
        state["step"] = steps.shown(parameter)


def given(
    states: Mapping[torch.Tensor, Mapping[str, Any]], own: Mapping[torch.Tensor, Mapping[str, Any]]
) -> list[Given]:
    """The tensors of a state dict's states that are copies, and not the optimizer's own. (Those that ranks share cannot
    be changed.)
    """
    found, tries = list[Given](), iter(range(4))
    for parameter, state in states.items():
        shown, first = own.get(parameter, {}), None
        for name, each in state.items():
            if isinstance(each, torch.Tensor) and not isinstance(each, DTensor) and each is not shown.get(name):
                found.append(Given(each, None if first is None else Place(id(state), name, first, tries)))
                first = first or weakref.ref(each)
    return found


def refuse_lost(optimizer: Any) -> None:
    """Raise ReleasedParameterError, once, if the script has changed a state dict's copy, and not the state itself."""
    if any(each.is_changed for each in optimizer.given):
        optimizer.given = []
        raise ReleasedParameterError(
            "a tensor of optimizer.state_dict() was changed in place, or another one was assigned there, and the "
            "optimizer's state was not changed: it lives on the tiers, and a state dict has a copy. Pass the state "
            "dict to optimizer.load_state_dict(). Values that are to differ from the optimizer's are made in a "
            "value.clone()"
        )


def refuse_passed_on(optimizer: Any) -> None:
    """Raise OptimizerError if the parameters of an optimizer are trained by one that was made later."""
    if optimizer.engine is not None and optimizer.engine.closed and _is_replaced(optimizer):
        raise OptimizerError(
            "another optimizer was made for these parameters later, and has trained them since: use that one. The "
            "states of this one are gone"
        )


def refuse_replaced(optimizer: Any) -> None:
    """Raise for an optimizer that was replaced before it trained anything, if gradients have arrived."""
    if _is_replaced(optimizer):
        raise OptimizerError(
            "another optimizer was made for these parameters after this one, and the model's calls have been for that "
            "one: use it, or make one anew, which is the last then"
        )


def _is_replaced(optimizer: Any) -> bool:
    references = (residency_of(parameter).optimizer for parameter in optimizer.group_of)
    return any(reference is not None and reference() is not optimizer for reference in references)


def zeros(parameter: torch.Tensor, shown: Mapping[str, Any]) -> dict[str, Any] | None:
    """A state of zeros, into which torch.distributed.checkpoint reads; None if the parameter is not trained."""
    folder, mesh = residency_of(parameter).folder, residency_of(parameter).mesh

    def made(like: torch.Tensor) -> torch.Tensor:
        if not like.is_meta:
            return like.clone()
        if folder is None:
            return torch.zeros(like.shape, dtype=like.dtype)
        zero = torch.zeros((), dtype=like.dtype)
        return mapped_rows(like.shape, like.dtype, folder, lambda start, stop: zero.expand(stop - start), mesh)

    return {name: made(like) for name, like in shown.items()} if parameter.requires_grad else None


def warn_of_masters(store: ParameterStore, states: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
    """Warn if loaded states have no fp32 masters: masters then begin at the bf16 values."""
    given = [p for p, state in states.items() if has_values(state) and MASTER not in state]
    homes = [home for p in given if (home := residency_of(p).tiered) is not None]
    if homes and all(store.is_rounded(home.span) for home in homes):
        warnings.warn(
            "the optimizer's state has no fp32 masters, and the model's values are those of bf16: the masters begin at "
            "these values. If the saved run had masters, and torch.distributed.checkpoint loads them: call the model "
            "once, under torch.no_grad(), before you make the state dicts to load into",
            MasterWarning,
            stacklevel=3,
        )
