"""What a script sets between the last backward and `step()`, as nanochat does the learning rate, is of this step."""

from __future__ import annotations

import pytest
import torch
from learner import distance
from tiered import Harness, gpt2, options, sgd, tokens

import gs_compile
from gs_compile.errors import StepOrderError
from gs_compile.model.residency import residency_of

KEEPS_CAPTURES = True
CLIP = 0.05


def clipped(groups):
    return gs_compile.SGD([{"params": group["params"]} for group in groups], lr=1.0, max_grad_norm=CLIP)


def slowed(optimizer, number):
    """In the first step it is set to the value that it has."""
    for group in optimizer.param_groups:
        group["lr"] = 1.0 / (1 + number)


def train(model, optimizer, num_calls, clip=None):
    for number in range(3):
        for each in range(num_calls):
            ids = tokens(num_calls * number + each)
            model(input_ids=ids, labels=ids).loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        slowed(optimizer, number)
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture(scope="module")
def harness():
    return Harness(gpt2)


@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("make", [sgd, clipped])
def test_what_is_set_before_the_step_is_of_this_step(make, num_calls, harness, tmp_path):
    """Speculative updates too, that are rolled back; and where updates beside the backward have the run begin again."""
    places = [{"alpha": 0.5}, {"accumulate": True}] + [{"alpha": 0.5, "clip": "speculative"}] * (make is clipped)
    plain = gpt2()
    train(plain, torch.optim.SGD(plain.parameters(), lr=1.0), num_calls, CLIP if make is clipped else None)
    for number, place in enumerate(places):
        with harness.fresh(make, options(tmp_path / f"{number}", **place)) as optimizer:
            train(harness.model, optimizer, num_calls)
            optimizer.synchronize()
            named = harness.model.named_parameters()
            values = {name: residency_of(each).value(each, master=True).clone() for name, each in named}
        assert distance(values, {name: each.detach() for name, each in plain.named_parameters()}) < 2e-6


def test_what_is_set_too_late_is_refused(harness, tmp_path):
    """The first step has set nothing between, so that updates have run beside the backward."""
    with harness.fresh(sgd, options(tmp_path, alpha=0.5)) as optimizer:
        for number in range(2):
            harness.model(input_ids=tokens(number), labels=tokens(number)).loss.backward()
            if number == 0:
                optimizer.step()
        slowed(optimizer, 1)
        with pytest.raises(StepOrderError, match=r'"lr" of param group 0 was set to 0.5 after .*"accumulate": True'):
            optimizer.step()
