"""Random walks over what scripts do, each action as in plain PyTorch in float64: what is refused changes nothing."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch
from tiered import LENGTH, VOCABULARY, Harness, gpt2, loss_of, options, tokens, two_groups

import gs_compile
from gs_compile.errors import GreedySnakeError

KEEPS_CAPTURES = True
NUM_ACTIONS = 40
TOLERANCE = 1e-7  # of all values; clipping finds its factor in float32, as torch's does
KINDS = {
    "AdamW": {"lr": 1e-2, "eps": 1e-3},
    "Adam": {"lr": 1e-2, "eps": 1e-3},
    "SGD": {"lr": 0.3, "momentum": 0.9},
}


class Side:
    """A model and its optimizer, ours or torch's; `norm` clips."""

    def __init__(self, model, optimizer, norm, *, is_ours):
        self.model, self.optimizer, self.is_ours = model, optimizer, is_ours
        self.set_norm(norm)

    def set_norm(self, norm):
        self.norm = norm
        if self.is_ours:
            self.optimizer.max_grad_norm = norm

    def step(self):
        """The steps that count, so far."""
        if self.is_ours:
            self.optimizer.step()
            return
        grads = [each.grad for each in self.model.parameters() if each.grad is not None]
        norm = torch.stack([each.square().sum() for each in grads]).sum().sqrt() if grads else torch.zeros(())
        if not norm.isfinite():
            return
        factor = min(1.0, (self.norm / (norm.float() + 1e-6)).item()) if self.norm is not None else 1.0
        for each in grads:
            each.mul_(factor)
        self.optimizer.step()

    def states(self):
        found = self.optimizer.state_dict()["state"]
        return {(number, name): value for number, state in found.items() for name, value in state.items()}

    def evaluated(self, ids):
        with torch.no_grad():
            return loss_of(self.model, ids)

    def penalty(self):
        (0.003 * sum((each - 0.1).square().sum() for each in self.model.parameters())).backward()

    def write(self, name, how):
        parameter = self.model.get_parameter(name)
        with torch.no_grad():
            if how == "in place":
                parameter.mul_(0.5)
            elif how == "by data":
                parameter.data = parameter.data * 0.75
            else:
                parameter[0] = 0.125

    def load(self, values, states):
        self.model.load_state_dict(values)
        self.optimizer.load_state_dict(states)


class Walk:
    """Both sides; `losses` are pairs that have had no backward. is_open: gradients wait for a step."""

    def __init__(self, chance, ours, plain):
        self.chance, self.ours, self.plain = chance, ours, plain
        self.losses, self.saved, self.is_open, self.has_trained = [], None, False, False
        self.told = []

    def both(self, what, do):
        """What both sides give, in a pair; None: ours has refused it, and goes on."""
        self.told.append(what)
        try:
            found = do(self.ours)
        except GreedySnakeError as error:
            self.told.append(f"refused: {error}"[:200])
            assert self.ours.optimizer.engine is None or not self.ours.optimizer.engine.closed
            return None
        return found, do(self.plain)

    def ids(self):
        return tokens(self.chance.randrange(10**6), self.chance.choice([2, 3, 5, 6]))

    def call(self):
        ids = self.ids()
        if pair := self.both("call", lambda side: loss_of(side.model, ids)):
            alike(*(loss.detach() for loss in pair))
            self.losses.append(pair)
            self.has_trained = True

    def bad_call(self):
        ids = torch.full((2, LENGTH), VOCABULARY + 1)
        for side in (self.ours, self.plain):
            with pytest.raises((IndexError, GreedySnakeError)):
                loss_of(side.model, ids)

    def drop(self):
        if self.losses:
            self.losses.pop(self.chance.randrange(len(self.losses)))

    def backward(self):
        number = self.chance.choice([1, 1, 1, 2])
        chosen = [self.losses.pop() for _ in range(min(number, len(self.losses)))]
        factors = [self.chance.choice([1.0, 0.5, -2.0]) for _ in chosen]
        if not chosen:
            return
        whole = zip(
            *([factor * loss for loss in pair] for factor, pair in zip(factors, chosen, strict=True)), strict=True
        )
        ours, plain = map(sum, whole)
        if self.both(f"backward {factors}", lambda side: (ours if side.is_ours else plain).backward()):
            self.is_open = True
        elif len(chosen) > 1:
            self.zero()  # one of them may have had its own

    def evaluate(self):
        ids = self.ids()
        if pair := self.both("evaluate", lambda side: side.evaluated(ids)):
            alike(*pair)

    def zero(self):
        if self.both("zero_grad", lambda side: side.optimizer.zero_grad()):
            self.is_open = False

    def step(self):
        if self.both("step", Side.step):
            self.losses.clear()
        self.zero()

    def set_rate(self):
        factor = self.chance.choice([0.5, 2.0])
        if self.is_open and not self.ours.optimizer.engine.accumulates:
            return  # `test_late_settings`

        def change(side):
            side.optimizer.param_groups[1]["lr"] *= factor

        self.both(f"rate {factor}", change)

    def write(self):
        name = self.chance.choice([name for name, _ in self.plain.model.named_parameters()])
        how = self.chance.choice(["in place", "by data", "an entry"])
        if not self.is_open and self.both(f"write {name} {how}", lambda side: side.write(name, how)):
            self.losses.clear()

    def penalty(self):
        if self.has_trained and self.both("penalty", Side.penalty):
            self.is_open = True

    def look(self):
        if pair := self.both("look", lambda side: dict(side.model.state_dict())):
            found, wanted = pair
            for name, value in wanted.items():
                alike(found[name], value)
        if pair := self.both("look at states", Side.states):
            found, wanted = pair
            for key, value in found.items():
                if value.dim():  # torch's SGD does not count
                    alike(value, wanted.get(key, torch.zeros_like(value)))

    def save(self):
        def both(side):
            values = {name: value.clone() for name, value in side.model.state_dict().items()}
            return values, torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, side.optimizer.state_dict())

        self.saved = self.both("save", both) or self.saved

    def load(self):
        if self.saved and not self.is_open:
            ours, plain = self.saved
            self.both("load", lambda side: side.load(*(ours if side.is_ours else plain)))
            self.losses.clear()


WEIGHTS = {
    Walk.call: 8,
    Walk.backward: 9,
    Walk.step: 6,
    Walk.zero: 1,
    Walk.bad_call: 1,
    Walk.drop: 1,
    Walk.evaluate: 2,
    Walk.set_rate: 1,
    Walk.write: 1,
    Walk.penalty: 1,
    Walk.look: 2,
    Walk.save: 1,
    Walk.load: 1,
}


def alike(found, wanted):
    distance = (found.double() - wanted.double()).norm() / max(float(wanted.double().norm()), 1e-3)
    assert distance < TOLERANCE, f"{float(distance)}"


def place(chance):
    """Where data is, and when updates are."""
    ratios = {name: chance.choice([0.0, 0.5, 1.0]) for name in ("parameter", "checkpoint", "optimizer")}
    given = {"micro_batch_size": chance.choice([1, 2, 3]), "separate_device": chance.random() < 0.3}
    if chance.random() < 0.4:
        return {**given, "accumulate": True, "ratios": {**ratios, "gradient": chance.choice([0.0, 1.0])}}
    if chance.random() < 0.3:
        return {**given, "clip": "delayed", "ratios": ratios}
    return {**given, "alpha": chance.choice([0.0, 0.5, 1.0]), "ratios": ratios, "durability": chance.choice([0, 1, 2])}


@pytest.fixture(scope="module")
def harness():
    return Harness(lambda: gpt2().double())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 40))])
def test_a_walk_is_that_of_plain_pytorch(seed, harness, tmp_path):
    chance = random.Random(seed)
    kind, norm = chance.choice(list(KINDS)), chance.choice([None, 0.05, 1e3, math.inf])
    plain = gpt2().double()
    theirs = getattr(torch.optim, kind)(two_groups(plain), **KINDS[kind])
    make = partial(getattr(gs_compile, kind), max_grad_norm=norm, **KINDS[kind])
    with harness.fresh(make, options(tmp_path, **place(chance))) as optimizer:
        ours = Side(harness.model, optimizer, norm, is_ours=True)
        walk = Walk(chance, ours, Side(plain, theirs, norm, is_ours=False))
        try:
            for _ in range(NUM_ACTIONS):
                chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0](walk)
            walk.zero()
            walk.look()
        except AssertionError as error:
            error.add_note("\n".join(walk.told))
            raise
