"""A model and its optimizer on one of several ranks."""

from __future__ import annotations

import torch
from tiered import gpt2, options, step, tokens, two_groups

import gs_compile
from gs_compile.model.files import whole
from gs_compile.model.materialize import whole_states


class Learner:
    """A model and its optimizer on one rank."""

    def __init__(self, info, folder, seed=0, build=gpt2, **changes):
        self.info = info
        self.model = build(seed=seed)
        self.optimizer = gs_compile.AdamW(two_groups(self.model), lr=1e-3, max_grad_norm=1.0)
        self.model.compile(backend="greedysnake", options=options(folder, alpha=0.5, **changes))

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
