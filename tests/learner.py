"""A tiny model with an optimizer of this package, trained on the tiers as long as a context lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiered import Harness, Make, adamw, gpt2, loss_of, options, outcome, shared, step, tokens, two_groups

import gs_compile
from gs_compile.model.tiered_optimizer import TieredOptimizer

EVERY = {
    "AdamW": gs_compile.AdamW,
    "Adam": gs_compile.Adam,
    "SGD": partial(gs_compile.SGD, momentum=0.9),
    "Lion": gs_compile.Lion,
    "Muon": gs_compile.Muon,
}

# Where values and states are when they are read and written, and how late the updates are.
PLACES = [
    pytest.param({"alpha": 0.0}, id="early", marks=pytest.mark.slow),
    pytest.param({"alpha": 0.5}, id="half"),
    pytest.param({"alpha": 1.0, "separate_device": True}, id="late", marks=pytest.mark.slow),
    pytest.param({"alpha": 0.5, "precision": "bf16", "separate_device": True}, id="bf16"),
]


@dataclass
class Learner:
    """A model and its optimizer."""

    model: torch.nn.Module
    optimizer: TieredOptimizer

    def train(self, *numbers: int) -> list[float]:
        """The losses of a step on each of these batches."""
        return [step(self.model, self.optimizer, tokens(number)) for number in numbers]

    def loss(self, number: int) -> torch.Tensor:
        return loss_of(self.model, tokens(number))

    def values(self) -> dict[str, torch.Tensor]:
        """All parameters' masters and states, copied."""
        return outcome(self.model, self.optimizer, [], []).values


@contextmanager
def learner(
    folder: Path, make: Make = adamw, build: Callable[[], torch.nn.Module] = gpt2, **changes: Any
) -> Iterator[Learner]:
    """A learner with its storage in `folder`; `changes` are those of `tiered.options`.

    The usual model is captured once for all tests of a module that says KEEPS_CAPTURES.
    """
    precision = changes.get("precision", "model")
    if build is gpt2:
        harness = shared(precision)
    else:
        Harness.forget_captures()
        harness = Harness(build, precision)
    torch.manual_seed(1)
    with harness.fresh(make, options(folder, **changes)) as optimizer:
        yield Learner(harness.model, optimizer)


def plain(
    num_steps: int,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    max_norm: float | None = None,
    **settings: Any,
) -> tuple[list[float], list[float], torch.nn.Module, torch.optim.Optimizer]:
    """Losses, gradient norms, the model and the optimizer of the same training with plain PyTorch."""
    model = gpt2()
    made = optimizer(two_groups(model), **settings)
    losses, norms = [], []
    for number in range(num_steps):
        loss = loss_of(model, tokens(number))
        loss.backward()
        bound = torch.inf if max_norm is None else max_norm
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), bound).item())
        made.step()
        made.zero_grad()
        losses.append(loss.item())
    return losses, norms, model, made


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The relative error over all tensors together, in the 2-norm."""
    difference = sum((found[name] - wanted[name]).double().square().sum() for name in wanted)
    return float((difference / sum(value.double().square().sum() for value in wanted.values())).sqrt())


def same_tensors(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Bit for bit, in the same types, with the name of the first that is not."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What the parameters hold now, copied."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def inside(learner: Learner, **given: Any) -> dict[str, torch.Tensor]:
    """What they hold while they are materialized."""
    with gs_compile.materialize(learner.model, **given):
        return values(learner.model)
