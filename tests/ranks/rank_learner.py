"""A model and its optimizer on one of several ranks."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import torch
from tiered import gpt2, options, shared, step, tokens, two_groups

import gs_compile
from gs_compile.model.files import whole
from gs_compile.model.materialize import whole_states

make = partial(gs_compile.AdamW, lr=1e-3, max_grad_norm=1.0)


@contextmanager
def learner(info, folder, harness=None, seed=0, **changes):
    """With the usual model, or that of another harness: `warm` has captured it."""
    harness = harness or shared()
    if seed:
        for parameter, value in zip(harness.model.parameters(), gpt2(seed=seed).parameters(), strict=True):
            parameter.data.copy_(value.detach())
    with harness.fresh(make, options(folder, alpha=0.5, **changes)) as optimizer:
        yield Learner(info, harness.model, optimizer)


def compiled(info, folder, build, seed=0, **changes):
    """With a model of its own, which is captured for it."""
    optimizer = make(two_groups(model := build(seed=seed)))
    model.compile(backend="greedysnake", options=options(folder, alpha=0.5, **changes))
    return Learner(info, model, optimizer)


class Learner:
    """A model and its optimizer on one rank."""

    def __init__(self, info, model, optimizer):
        self.info, self.model, self.optimizer = info, model, optimizer

    def train(self, *numbers):
        """A step on each batch, of which every rank has some rows."""
        return [
            step(self.model, self.optimizer, tokens(number, 12).chunk(self.info.number)[self.info.rank])
            for number in numbers
        ]

    def call(self):
        with torch.no_grad():
            self.model(input_ids=tokens(0), labels=tokens(0))

    def values(self):
        """All that state dicts have, whole."""
        with whole_states(self.model):  # each is read once, and not shared out first
            found = dict(self.model.state_dict())
            for number, state in self.optimizer.state_dict()["state"].items():
                found |= {f"{number}.{key}": value for key, value in state.items()}
        return {name: whole(value).clone() for name, value in found.items()}
