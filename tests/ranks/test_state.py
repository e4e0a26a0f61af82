"""State dicts of several ranks: DTensors, saved on some ranks and loaded on as many others."""

from __future__ import annotations

import pytest
import torch
from launch import Fleet
from learner import same_tensors
from tiered import gpt2, options, step, tokens, two_groups
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

import gs_compile

KEEPS_CAPTURES = True  # each process captures its own


@pytest.fixture(scope="module")
def pair():
    with Fleet(2) as fleet:
        yield fleet


class Learner:
    """A model and its optimizer on one rank."""

    def __init__(self, info, folder, seed=0, **changes):
        self.info = info
        self.model = gpt2(seed=seed)
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
        found = dict(self.model.state_dict())
        for number, state in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{key}": value for key, value in state.items()}
        return {
            name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
            for name, value in found.items()
        }


def saves(info, tmp_path, precision):
    one = Learner(info, tmp_path, precision=precision)
    one.train(0, 1)
    model, optimizer = get_state_dict(one.model, one.optimizer)
    checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / "2")
    found = {"saved": one.values()}
    one.train(2)
    return found | {"trained": one.values()}


def loads(info, tmp_path, precision, source, target=None):
    folder = tmp_path / f"on{info.number}"
    folder.mkdir(exist_ok=True)
    one = Learner(info, folder, seed=1 + info.rank, precision=precision)
    one.call()
    model, optimizer = get_state_dict(one.model, one.optimizer)
    checkpoint.load(state := {"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / source)
    set_state_dict(one.model, one.optimizer, model_state_dict=model, optim_state_dict=state["optimizer"])
    found = {"loaded": one.values()}
    if target:
        model, optimizer = get_state_dict(one.model, one.optimizer)
        checkpoint.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path / target)
    one.train(2)
    return found | {"trained": one.values()}


@pytest.mark.parametrize(
    ("precision", "numbers"), [("bf16", (1, 3)), pytest.param("model", (1, 4), marks=pytest.mark.slow)]
)
def test_from_two_ranks_to_others_and_back(precision, numbers, pair, tmp_path):
    saved, other = pair.run(saves, tmp_path, precision=precision)
    same_tensors(other["trained"], saved["trained"])
    for number in numbers:
        with Fleet(number) as fleet:
            for each in fleet.run(loads, tmp_path, precision=precision, source="2", target=f"{number}"):
                same_tensors(each["loaded"], saved["saved"])
    for each in pair.run(loads, tmp_path, precision=precision, source=f"{number}"):
        same_tensors(each["loaded"], saved["saved"])
        same_tensors(each["trained"], saved["trained"])
