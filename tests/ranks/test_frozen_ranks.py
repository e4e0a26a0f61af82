"""Ranks that share encoded matrices learn the bits of ranks that share their decoded values."""

from __future__ import annotations

from frozen_models import gpt2_with_frozen
from tiered import Harness, adamw, options, outcome, step, tokens

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
