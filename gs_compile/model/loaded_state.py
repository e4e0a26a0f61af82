"""loaded_state: which parameter of an optimizer each entry of a state dict belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from gs_compile.errors import OptimizerError

Groups = Sequence[Mapping[str, Any]]  # of an optimizer, or of a state dict, which has numbers for parameters


def numbers_of(own: Groups, given: Groups) -> list[Any]:
    """The number that each parameter of `own` has in a state dict with the groups `given`.

    Parameters are told by name where both have names, as optimizers made with `named_parameters()` do, else by their
    place in groups of equal sizes. Raises OptimizerError where neither is possible.
    """
    known = {name: number for group in given for name, number in zip(_names(group), group["params"], strict=False)}
    names = list(chain.from_iterable(map(_names, own)))
    if names and all(name in known for name in names):
        return [known[name] for name in names]
    mine, theirs = ([len(group["params"]) for group in groups] for groups in (own, given))
    if mine != theirs:
        raise OptimizerError(
            f"the state dict has other param groups than this optimizer: groups of {theirs} parameters, here {mine}. "
            "Make the optimizer with the groups of the one that was saved, in the same order; or make both with "
            "model.named_parameters() in the place of model.parameters(), and states are found by name"
        )
    return list(chain.from_iterable(group["params"] for group in given))


def are_alike(own: Groups, given: Groups) -> bool:
    """Whether each group has the parameters of the one in its place, so that it can take that one's settings."""
    pairs = zip(own, given, strict=False)
    named = all(_names(mine) == _names(theirs) for mine, theirs in pairs if _names(mine) and _names(theirs))
    return named and [len(group["params"]) for group in own] == [len(group["params"]) for group in given]


def _names(group: Mapping[str, Any]) -> Sequence[str]:
    found: Sequence[str] = group.get("param_names", ())
    return found


def num_steps(states: Iterable[Mapping[str, Any]]) -> int:
    """The steps taken so far. torch's SGD does not count: with a momentum, there was one."""
    states = list(states)
    steps = {int(state["step"]) for state in states if "step" in state}
    if len(steps) > 1:
        raise OptimizerError(
            f"the state dict has parameters after {min(steps)} steps and others after {max(steps)}; greedysnake counts "
            "for all of them together"
        )
    return steps.pop() if steps else int(any(state.get("momentum_buffer") is not None for state in states))
