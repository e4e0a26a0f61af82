"""Ranks that share encoded matrices learn the bits of ranks that share their decoded values."""

from __future__ import annotations

from tiered import Harness, adamw, gpt2, options, outcome, step, tokens

from gs_compile.runtime.codecs import CODECS

KEEPS_CAPTURES = True  # each process captures its own
PLACES = {"ssd": {}, "copied": {"separate_device": True, "ratios": {"parameter": 0.4}}}


def build(name=None):
    model = gpt2()
    for path, parameter in model.named_parameters():
        if ".h." in path and parameter.dim() == 2:
            parameter.requires_grad_(False)
            if name:
                codec = CODECS[name]
                parameter.data = codec.decode(codec.encode(parameter.data), parameter.shape, parameter.dtype)
    return model


def learn(info, tmp_path):
    """By place, where what is learned differs from the twin's, and whether units are smaller."""
    found, name = {}, "nf4"
    harness, twin = Harness(build), Harness(lambda: build(name))

    def train(own, given):
        with own.fresh(adamw, given) as optimizer:
            losses = [step(own.model, optimizer, tokens(number, 4 + info.rank)) for number in range(3)]
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
