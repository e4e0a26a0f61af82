"""Random walks over what scripts do, on two sides that must stay alike: ours and plain PyTorch's, or two of ours.

What is refused changes nothing: both sides go on without it. A walk that fails tells what it has done.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiered import LENGTH, VOCABULARY, loss_of, tokens
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils._pytree import tree_map_only

from gs_compile.errors import GreedySnakeError
from gs_compile.model.tiered_optimizer import TieredOptimizer


class Side:
    """A model and its optimizer. index: of the two sides; norm: to clip by, which an optimizer of ours does itself."""

    def __init__(self, index: int, model: nn.Module, optimizer: torch.optim.Optimizer, norm: float | None) -> None:
        self.index, self.model, self.optimizer, self.norm = index, model, optimizer, norm
        self.is_tiered = isinstance(optimizer, TieredOptimizer)
        self.views: list[Tensor] = []
        self.averages: list[Tensor] = []
        self.scheduler: Any = None

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        if closure is not None:
            self.optimizer.step(closure)
        elif self.is_tiered or self.clip():
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def clip(self) -> bool:
        """Whether the gradients are finite: a step with others is skipped."""
        grads = [each.grad for each in self.parameters() if each.grad is not None]
        norm = torch.stack([each.square().sum() for each in grads]).sum().sqrt() if grads else torch.zeros(())
        if norm.isfinite() and self.norm is not None:
            torch._foreach_mul_(grads, min(1.0, (self.norm / (norm.float() + 1e-6)).item())) if grads else None
        return bool(norm.isfinite())

    def step_with_closure(self, ids: Tensor) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = loss_of(self.model, ids)
            loss.backward()
            if not self.is_tiered:
                self.clip()
            return loss

        self.step(closure)

    def loss_of_logits(self, ids: Tensor) -> Tensor:
        logits = self.model(input_ids=ids).logits
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def penalty(self) -> None:
        (0.003 * sum((each - 0.1).square().sum() for each in self.parameters())).backward()

    def states(self) -> dict[tuple[Any, str], Tensor]:
        found = self.optimizer.state_dict()["state"]
        return {(number, name): value for number, state in found.items() for name, value in state.items()}

    def saved(self, *, pickled: bool) -> tuple[Any, Any]:
        states = self.model.state_dict(), self.optimizer.state_dict()
        if not pickled:
            return copied(states)
        torch.save(states, file := io.BytesIO())
        file.seek(0)
        return torch.load(file)

    def load(self, values: Any, states: Any) -> None:
        self.optimizer.load_state_dict(copied(states))  # torch's go on with what they are given
        self.model.load_state_dict(values)  # of which torch would put a refusal into an error of its own

    def average(self) -> list[Tensor]:
        if not self.averages:
            self.averages = [each.detach().clone() for each in self.parameters()]
        for average, parameter in zip(self.averages, self.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.3)
        return self.averages


def copied(states: Any) -> Any:
    return tree_map_only(Tensor, torch.clone, states)


# How scripts read, write and evaluate -------------------------------------------------------------------------------


def in_eval_mode(side: Side, ids: Tensor) -> Tensor:
    side.model.eval()
    try:
        return in_training_mode(side, ids)
    finally:
        side.model.train()


@torch.no_grad()
def in_training_mode(side: Side, ids: Tensor) -> Tensor:
    return loss_of(side.model, ids)


@torch.inference_mode()
def in_inference_mode(side: Side, ids: Tensor) -> Tensor:
    return loss_of(side.model, ids).clone()


@torch.no_grad()
def with_other_values(side: Side, ids: Tensor) -> Tensor:
    """As averages of weights are evaluated."""
    parameter = side.parameters()[2]
    before = parameter.detach().clone()
    parameter.zero_()
    try:
        return loss_of(side.model, ids)
    finally:
        parameter.copy_(before)


def by_data(parameter: nn.Parameter, _: Side) -> None:
    parameter.data = parameter.data * 0.75


def an_entry(parameter: nn.Parameter, _: Side) -> None:
    parameter[0] = 0.125


def drawn(parameter: nn.Parameter, _: Side) -> None:
    torch.manual_seed(5)
    nn.init.normal_(parameter, std=0.05)


def swapped(parameter: nn.Parameter, side: Side) -> None:
    other = next(each for each in side.parameters() if each.shape == parameter.shape)
    before = parameter.clone()
    parameter.copy_(other)
    other.copy_(before)


def noise(_: nn.Parameter, side: Side) -> None:
    torch.manual_seed(6)
    for each in side.parameters():
        each.add_(torch.randn_like(each), alpha=0.01)


EVALUATIONS = (in_training_mode, in_eval_mode, in_inference_mode, with_other_values)
READINGS: dict[str, Callable[[Side], Tensor]] = {
    "in a vector": lambda side: parameters_to_vector(side.parameters()).detach(),
    "by norms": lambda side: torch.stack([each.detach().norm() for each in side.parameters()]),
    "copied": lambda side: torch.cat([each.detach().clone().flatten() for each in side.parameters()]),
    "averaged": lambda side: torch.cat([each.flatten() for each in side.average()]),
}
WRITES: dict[str, Callable[[nn.Parameter, Side], Any]] = {
    "in place": lambda parameter, _: parameter.mul_(0.5),
    "copied": lambda parameter, _: parameter.copy_(torch.full(parameter.shape, 0.01)),
    "in place, by data": lambda parameter, _: parameter.data.add_(0.01),
    "all at once": lambda _, side: torch._foreach_mul_(side.parameters(), 0.99),
    **{each.__name__: each for each in (by_data, an_entry, drawn, swapped, noise)},
}
SETTINGS: dict[str, Callable[[Any], Any]] = {
    "lr": lambda rate: rate * 0.5,
    "weight_decay": lambda _: 0.2,
    "betas": lambda _: (0.8, 0.9),
    "momentum": lambda _: 0.5,
}


class Walk:
    """Both sides; `losses` are pairs that have had no backward. tolerance: of the norm of a tensor; 0: the same bits."""

    def __init__(self, chance: random.Random, ours: Side, other: Side, tolerance: float) -> None:
        self.chance, self.ours, self.other, self.tolerance = chance, ours, other, tolerance
        self.losses: list[tuple[Tensor, Tensor]] = []
        self.saved: Any = None
        self.is_open = self.has_trained = False  # is_open: gradients wait for a step
        self.told: list[str] = []

    def go(self, num_actions: int) -> None:
        actions, weights = list(WEIGHTS), list(WEIGHTS.values())
        try:
            for action in self.chance.choices(actions, weights, k=num_actions):
                action(self)
            self.zero()
            self.look()
        except Exception as error:
            error.add_note("\n".join(self.told))
            raise

    def both(self, what: str, do: Callable[[Side], Any]) -> Any:
        """What both sides give, in a pair; None: ours has refused it, and goes on."""
        self.told.append(what)
        try:
            found = do(self.ours)
        except GreedySnakeError as error:
            self.told.append(f"refused: {error}"[:200])
            self.refuse(type(error), do)
            return None
        return found, do(self.other)

    def refuse(self, kind: type[GreedySnakeError], do: Callable[[Side], Any]) -> None:
        """A run that has refused goes on; another of ours refuses it too."""
        if self.other.is_tiered:
            with pytest.raises(kind):
                do(self.other)
        for side in (self.ours, self.other):
            assert not side.is_tiered or side.optimizer.engine is None or not side.optimizer.engine.closed

    def alike(self, found: Tensor, wanted: Tensor) -> None:
        assert found.shape == wanted.shape
        if not self.tolerance:
            assert torch.equal(found, wanted)
            return
        distance = (found.double() - wanted.double()).norm() / max(float(wanted.double().norm()), 1e-3)
        assert distance < self.tolerance, f"{float(distance)}"

    @property
    def may_change(self) -> bool:
        """Whether gradients that wait are of no update that has begun: `test_late_settings` has the others."""
        return not self.is_open or not self.ours.is_tiered or self.ours.optimizer.engine.accumulates

    @property
    def may_drop(self) -> bool:
        """Whether gradients may be dropped: of some places their updates are still to come, and of others not."""
        return not self.other.is_tiered or self.may_change

    def ids(self) -> Tensor:
        return tokens(self.chance.randrange(10**6), self.chance.choice([2, 3, 5, 6]))

    def name(self) -> str:
        return self.chance.choice([name for name, _ in self.other.model.named_parameters()])

    # Steps -----------------------------------------------------------------------------------------------------------

    def call(self) -> None:
        ids = self.ids()
        of_logits = self.chance.random() < 0.2
        if pair := self.both("call", lambda side: side.loss_of_logits(ids) if of_logits else loss_of(side.model, ids)):
            self.alike(*(loss.detach() for loss in pair))
            self.losses.append(pair)
            self.has_trained = True

    def bad_call(self) -> None:
        ids = torch.full((2, LENGTH), VOCABULARY + 1)
        for side in (self.ours, self.other):
            with pytest.raises((IndexError, GreedySnakeError)):
                loss_of(side.model, ids)

    def drop(self) -> None:
        if self.losses:
            self.losses.pop(self.chance.randrange(len(self.losses)))

    def backward(self) -> None:
        if not self.losses:
            return
        may_be_refused = not self.other.is_tiered or self.ours.optimizer.engine.accumulates  # and then gradients drop
        number = self.chance.choice([1, 1, 1, 2]) if may_be_refused else 1
        chosen = [self.losses.pop() for _ in range(min(number, len(self.losses)))]
        factors = [self.chance.choice([1.0, 0.5, -2.0]) for _ in chosen]
        sums = [
            sum(factor * loss for factor, loss in zip(factors, of, strict=True)) for of in zip(*chosen, strict=True)
        ]
        if self.both(f"backward {factors}", lambda side: sums[side.index].backward()):
            self.is_open = True
        elif len(chosen) > 1:
            self.zero()  # one of them may have had its own

    def penalty(self) -> None:
        if self.has_trained and self.both("penalty", Side.penalty):
            self.is_open = True

    def zero(self) -> None:
        if self.both("zero_grad", lambda side: side.optimizer.zero_grad()):
            self.is_open = False

    def step(self) -> None:
        if self.both("step", Side.step):
            self.losses.clear()
        self.zero()

    def drop_gradients(self) -> None:
        if self.may_drop:
            self.zero()

    def step_with_closure(self) -> None:
        ids = self.ids()
        if not self.may_drop:
            return
        self.losses.clear()
        self.zero()
        self.both("step with a closure", lambda side: side.step_with_closure(ids))
        self.zero()

    # Between steps, or within ------------------------------------------------------------------------------------------

    def evaluate(self) -> None:
        ids, how = self.ids(), self.chance.choice(EVALUATIONS)
        if how is not with_other_values or self.may_change:
            if pair := self.both(how.__name__, lambda side: how(side, ids)):
                self.alike(*pair)
            if how is with_other_values:
                self.losses.clear()

    def set(self) -> None:
        name, number = self.chance.choice(list(SETTINGS)), self.chance.choice([0, 1])

        def change(side: Side) -> None:
            group = side.optimizer.param_groups[number]
            if name in group:
                group[name] = SETTINGS[name](group[name])

        if self.may_change:
            self.both(f"{name} of group {number}", change)

    def schedule(self) -> None:
        for side in (self.ours, self.other) if self.may_change else ():
            side.scheduler = side.scheduler or CosineAnnealingLR(side.optimizer, 10)

    def write(self) -> None:
        name, how = self.name(), self.chance.choice(list(WRITES))

        @torch.no_grad()
        def write(side: Side) -> None:
            WRITES[how](side.model.get_parameter(name), side)

        if self.may_change and self.both(f"write {name}: {how}", write):
            self.losses.clear()

    def read(self) -> None:
        how = self.chance.choice(list(READINGS))
        if pair := self.both(f"read {how}", READINGS[how]):
            self.alike(*pair)

    def look(self) -> None:
        if pair := self.both("look", lambda side: dict(side.model.state_dict())):
            found, wanted = pair
            for name, value in wanted.items():
                self.alike(found[name], value)
        if pair := self.both("look at states", Side.states):
            found, wanted = pair
            for key, value in found.items():
                if value.dim():  # torch's SGD does not count
                    self.alike(value, wanted.get(key, torch.zeros_like(value)))

    def keep_a_view(self) -> None:
        name, by_data = self.name(), self.chance.random() < 0.5

        def view(side: Side) -> Tensor:
            parameter = side.model.get_parameter(name)
            return parameter.data if by_data else parameter.detach()

        if self.has_trained and (pair := self.both(f"keep a view of {name}", view)):
            for side, kept in zip((self.ours, self.other), pair, strict=True):
                side.views.append(kept)

    def look_at_views(self) -> None:
        for pair in zip(self.ours.views, self.other.views, strict=True):
            self.alike(*(view.clone() for view in pair))

    def save(self) -> None:
        pickled = self.chance.random() < 0.5
        self.saved = self.both("save", lambda side: side.saved(pickled=pickled)) or self.saved

    def load(self) -> None:
        if self.saved and not self.is_open:
            self.both("load", lambda side: side.load(*self.saved[side.index]))
            self.losses.clear()

    def move(self) -> None:
        self.both("move", lambda side: side.model.to("cpu"))


WEIGHTS = {
    Walk.call: 8,
    Walk.backward: 9,
    Walk.step: 6,
    **dict.fromkeys((Walk.evaluate, Walk.look, Walk.read, Walk.look_at_views), 2),
    **dict.fromkeys((Walk.drop_gradients, Walk.bad_call, Walk.drop, Walk.penalty, Walk.step_with_closure), 1),
    **dict.fromkeys((Walk.set, Walk.schedule, Walk.write, Walk.keep_a_view, Walk.save, Walk.load, Walk.move), 1),
}
