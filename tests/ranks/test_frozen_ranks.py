"""Ranks that share encoded matrices learn the bits of ranks that share their decoded values; what gets its first
gradient in a later step is trained.
"""

from __future__ import annotations

import torch
from frozen_models import gpt2_with_frozen
from rank_learner import Learner
from tiered import Harness, adamw, gpt2, options, outcome, step, tokens

KEEPS_CAPTURES = True  # each process captures its own
PLACES = {"ssd": {}, "copied": {"separate_device": True, "ratios": {"parameter": 0.4}}}


def learn(info, tmp_path):
    """By place, where what is learned differs from the twin's, and whether units are smaller."""
    found, name = {}, "nf4"
    harness, twin = Harness(gpt2_with_frozen), Harness(lambda: gpt2_with_frozen(name))

    def train(own, given):
        with own.fresh(adamw, given) as optimizer:
            losses = [step(own.model, optimizer, tokens(number, 4 + info.rank)) for number in range(2)]
            numel = sum(unit.numel for unit in optimizer.engine.placement.units)
            return outcome(own.model, optimizer, losses, []), numel

    reference, whole = train(twin, options(tmp_path))
    for place, changes in PLACES.items():
        own, numel = train(harness, options(tmp_path, frozen=name, **changes))
        found[place] = own.differences(reference), numel < whole
    return found


def test_two_ranks(pair, tmp_path):
    for found in pair.run(learn, tmp_path):
        assert found == dict.fromkeys(PLACES, ([], True))


class Shifted(torch.nn.LayerNorm):
    """It has a parameter that no gradient comes to until it is used."""

    is_used = False

    def __init__(self, width):
        super().__init__(width)
        self.shift = torch.nn.Parameter(torch.ones(1, width))

    def forward(self, x_BTD):
        return super().forward(x_BTD) + (self.shift if self.is_used else self.shift.detach())


def shifted(seed=0):
    model = gpt2(seed=seed)
    model.transformer["ln_f"] = Shifted(model.transformer.ln_f.normalized_shape[0])
    return model


def uses_later(info, tmp_path):
    learner, found = Learner(info, tmp_path, build=shifted), []
    for number in range(2):
        learner.model.transformer.ln_f.is_used = bool(number)
        learner.train(number)
        found.append(learner.values()["transformer.ln_f.shift"])
    learner.optimizer.engine.tiers.close()
    return found


def test_what_gets_its_first_gradient_later_is_trained_from_then_on(pair, tmp_path):
    """Fault: what no gradient came to in the first step stayed as it was in all steps."""
    for first, second in pair.run(uses_later, tmp_path):
        assert bool((first == 1).all())  # nor has weight decay moved it
        assert bool((second != 1).all())
