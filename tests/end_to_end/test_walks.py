"""Random walks of scripts: each action as in plain PyTorch in float64, and the same bits wherever data is.

A failing walk is named by its seed, and its note tells what it has done: `[7-40]` is seed 7, of 40 actions.
"""

from __future__ import annotations

import math
import random
from functools import cache, partial
from typing import Any

import pytest
import torch
from tiered import Harness, gpt2, options, two_groups
from walks import Side, Walk

import gs_compile

KEEPS_CAPTURES = True
NUM_ACTIONS, FEW = 40, 20
TOLERANCE = 3e-7  # of all values; clipping finds its factor in float32, as torch does, and each side rounds twice
SETTINGS = {
    "AdamW": {"lr": 1e-2, "eps": 1e-3},
    "Adam": {"lr": 1e-2, "eps": 1e-3},
    "SGD": {"lr": 0.3, "momentum": 0.9},
}
NORMS = (None, 0.05, 1e3, math.inf)
OURS = {  # with settings that PyTorch has not, too
    "AdamW": [SETTINGS["AdamW"], {"lr": 1e-2, "state_dtype": torch.bfloat16}, {"lr": 1e-2, "state_dtype": "8bit"}],
    "Adam": [SETTINGS["Adam"]],
    "SGD": [SETTINGS["SGD"]],
    "Lion": [{"lr": 1e-3}, {"lr": 1e-3, "state_dtype": torch.bfloat16}],
}


def walks(number: int, *, fast: int) -> list[Any]:
    """Seeds and numbers of actions: few of the fast one."""
    slow = (pytest.param(seed, NUM_ACTIONS, marks=pytest.mark.slow) for seed in range(number))
    return [(fast, FEW), *slow]


def place(chance: random.Random, precision: str = "model", *, accumulates: bool) -> dict[str, Any]:
    """Where data is, and when updates are."""
    ratios = {name: chance.choice([0.0, 0.5, 1.0]) for name in ("parameter", "checkpoint", "optimizer")}
    given = {"separate_device": chance.random() < 0.3, "outputs": "all"}
    if precision == "bf16":
        given["masters"] = chance.choice(["whole", "split"])
    if accumulates:
        return {**given, "accumulate": True, "ratios": {**ratios, "gradient": chance.choice([0.0, 1.0])}}
    if chance.random() < 0.3:
        return {**given, "clip": "delayed", "ratios": ratios}
    return {**given, "alpha": chance.choice([0.0, 0.5, 1.0]), "ratios": ratios, "durability": chance.choice([0, 1, 2])}


@cache
def harness_of(build: Any, precision: str = "model", number: int = 0) -> Harness:
    return Harness(build, precision)


def double() -> torch.nn.Module:
    return gpt2().double()


@pytest.mark.parametrize(("seed", "num_actions"), walks(40, fast=4))
def test_a_walk_is_that_of_plain_pytorch(seed, num_actions, tmp_path):
    chance = random.Random(seed)
    kind, norm = chance.choice(list(SETTINGS)), chance.choice(NORMS)
    given = place(chance, accumulates=chance.random() < 0.4) | {"micro_batch_size": chance.choice([1, 2, 3])}
    plain, harness = double(), harness_of(double)
    theirs = getattr(torch.optim, kind)(two_groups(plain), **SETTINGS[kind])
    make = partial(getattr(gs_compile, kind), max_grad_norm=norm, **SETTINGS[kind])
    with harness.fresh(make, options(tmp_path, **given)) as optimizer:
        sides = Side(0, harness.model, optimizer, norm), Side(1, plain, theirs, norm)
        Walk(chance, *sides, TOLERANCE).go(num_actions)


@pytest.mark.parametrize(("seed", "num_actions"), walks(20, fast=0))
def test_a_walk_with_an_optimizer_of_torch_is_that_of_plain_pytorch(seed, num_actions):
    """Its parameters stay in memory."""
    torch._dynamo.reset()
    chance = random.Random(seed)
    kind, norm = chance.choice(list(SETTINGS)), chance.choice(NORMS)
    models = double(), double()
    models[0].compile(
        backend="greedysnake", options={"micro_batch_size": chance.choice([1, 2, 3]), "expert": {"compiler": "eager"}}
    )
    optimizers = [getattr(torch.optim, kind)(two_groups(model), **SETTINGS[kind]) for model in models]
    sides = (Side(index, models[index], optimizers[index], norm) for index in range(2))
    Walk(chance, *sides, TOLERANCE).go(num_actions)


@pytest.mark.parametrize(("seed", "num_actions"), walks(24, fast=9))
def test_a_walk_has_the_same_bits_wherever_data_is(seed, num_actions, tmp_path):
    chance = random.Random(seed)
    kind, norm, precision = chance.choice(list(OURS)), chance.choice(NORMS), chance.choice(["model", "model", "bf16"])
    make = partial(getattr(gs_compile, kind), max_grad_norm=norm, **chance.choice(OURS[kind]))
    accumulates, size = chance.random() < 0.4, chance.choice([1, 2, 3])
    harnesses = [harness_of(gpt2, precision, number) for number in range(2)]
    given = [
        options(tmp_path / f"{number}", **place(chance, precision, accumulates=accumulates), micro_batch_size=size)
        for number in range(2)
    ]
    with harnesses[0].fresh(make, given[0]) as first, harnesses[1].fresh(make, given[1]) as second:
        sides = Side(0, harnesses[0].model, first, norm), Side(1, harnesses[1].model, second, norm)
        Walk(chance, *sides, tolerance=0.0).go(num_actions)
