"""Gradients from outside of the compiled model, as continual learning has them: added before the update."""

from __future__ import annotations

import pytest
import torch
from learner import distance
from tiered import gpt2, loss_of, options, step, tokens

import gs_compile
from gs_compile.errors import StepOrderError

KEEPS_CAPTURES = True
NUM_STEPS = 3


def orthogonality(model, first):
    """How far the matrices of layers are from having orthogonal rows."""
    matrices = [each for name, each in model.named_parameters() if name.endswith("mix.weight")]
    return sum((each @ each.T - torch.eye(len(each))).square().sum() for each in matrices)


def elastic(model, first):
    """Elastic weight consolidation: each value is held to its first one by how much that mattered."""
    named = dict(model.named_parameters())
    return sum((value.square() * (named[name] - value).square()).sum() for name, value in first.items())


def learned(model, optimizer, penalty, is_apart):
    """The parameters after some steps; the penalty is in one sum with the loss, or has a backward of its own."""
    first = {name: each.detach().clone() + 0.1 for name, each in model.named_parameters()}
    for number in range(NUM_STEPS):
        ids = tokens(number)
        loss = model(input_ids=ids, labels=ids).loss
        extra = 0.01 * penalty(model, first)
        if is_apart:
            loss.backward()
            extra.backward()
        else:
            (loss + extra).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def make(groups):
    return gs_compile.SGD([parameter for group in groups for parameter in group["params"]], lr=0.5)


@pytest.mark.parametrize("is_apart", [False, True], ids=["in the loss", "a backward of its own"])
@pytest.mark.parametrize("penalty", [orthogonality, elastic])
def test_a_penalty_of_weights_is_added_before_the_update(harness, tmp_path, penalty, is_apart):
    plain = gpt2()
    wanted = learned(plain, torch.optim.SGD(plain.parameters(), lr=0.5), penalty, is_apart)
    without = gpt2()
    without = learned(
        without, torch.optim.SGD(without.parameters(), lr=0.5), lambda *_: torch.zeros(()).requires_grad_(), False
    )
    with harness.fresh(make, options(tmp_path)) as optimizer:
        found = learned(harness.model, optimizer, penalty, is_apart)
    assert distance(wanted, without) > 1e-3
    assert distance(found, wanted) < 2e-6


READS = {
    "a value": lambda model: model.lm_head.weight.detach() + 0,
    "a norm": lambda model: model.transformer.h[0].mix.weight.norm(),
    "a state dict": lambda model: model.state_dict()["lm_head.weight"] + 0,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_between_backward_and_step_names_the_option_with_which_it_works(harness, tmp_path, read):
    model, ids = harness.model, tokens(0)
    for accumulates in (False, True):
        given = {"accumulate": True} if accumulates else {}
        with harness.fresh(make, options(tmp_path / str(accumulates), **given)) as optimizer:
            step(model, optimizer, ids)
            before = read(model).detach().clone()
            loss_of(model, ids).backward()
            if accumulates:
                assert torch.equal(read(model).detach(), before)
            else:
                with pytest.raises(StepOrderError, match=r'gs_compile optimizer first.*options={"accumulate": True}'):
                    read(model)
            optimizer.step()
            assert not torch.equal(read(model), before)


def test_a_penalty_alone_that_is_dropped_is_no_step(harness, tmp_path):
    """Fault: step() was refused as if the gradient of the penalty were there."""
    with harness.fresh(make, options(tmp_path, accumulate=True)) as optimizer:
        step(harness.model, optimizer, tokens(0))
        before = {name: value.clone() for name, value in harness.model.state_dict().items()}
        orthogonality(harness.model, {}).backward()
        optimizer.zero_grad()
        optimizer.step()
        assert (optimizer.num_steps, optimizer.num_skipped) == (1, 0)
        assert all(torch.equal(value, before[name]) for name, value in harness.model.state_dict().items())
        step(harness.model, optimizer, tokens(1))
        assert optimizer.num_steps == 2
