"""Training in fp16, whose loss scale is divided out by the updates."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from learner import distance, gpt2, learner, same_tensors, values
from tiered import loss_of, tokens

import gs_compile
from gs_compile.errors import NonFiniteWarning, OptimizerError

KEEPS_CAPTURES = True
MAKE = partial(gs_compile.AdamW, lr=1e-2, max_grad_norm=0.5)


def train(one, scaler, *numbers):
    """As torch's guide of automatic mixed precision has it."""
    losses, norms = [], []
    for number in numbers:
        loss = one.loss(number)
        scaler.scale(loss).backward()
        scaler.unscale_(one.optimizer)
        scaler.step(one.optimizer)
        scaler.update()
        one.optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(one.optimizer.last_step.grad_norm)
    return losses, norms


@pytest.mark.parametrize(
    "changes",
    [{"alpha": 0.5, "clip": "speculative"}, pytest.param({"precision": "bf16"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_the_scale_changes_nothing(changes, tmp_path):
    """It is a power of two: bit for bit, wherever the updates run, also after a step that it has spoiled."""
    with learner(tmp_path, MAKE, **changes) as one:
        losses = one.train(0, 1, 2)
        norm, wanted = one.optimizer.last_step.grad_norm, one.values()
    with learner(tmp_path, MAKE, **changes) as one:
        scaler = gs_compile.LossScaler(one.optimizer, 2.0**140, backoff_factor=2.0**-130, growth_interval=2)
        hook = one.optimizer.register_step_post_hook(lambda *_: pytest.fail("as of an average of weights"))
        train(one, scaler, 0)
        hook.remove()
        assert one.optimizer.last_step.skipped
        assert scaler.get_scale() == 2.0**10
        found, norms = train(one, scaler, 0, 1, 2)
        assert (found, norms[-1]) == (losses, norm)
        assert scaler.get_scale() == 2.0**11
        same_tensors(one.values(), wanted)
        again = gs_compile.LossScaler()
        again.load_state_dict(scaler.state_dict())
        assert again.state_dict() == scaler.state_dict()


def in_fp16(model, number):
    with torch.autocast("cpu", torch.float16):
        return loss_of(model, tokens(number))


def test_fp16_as_with_torchs_scaler(tmp_path):
    """Gradients in fp16, which would vanish without a scale: the last loss is of weights that both have learned."""
    theirs = gpt2()
    optimizer, scaler = torch.optim.AdamW(theirs.parameters(), lr=1e-2), torch.amp.GradScaler("cpu")
    wanted = []
    for number in range(4):
        loss = in_fp16(theirs, number)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        wanted.append(loss.item())
    torch._dynamo.reset()
    with learner(tmp_path, partial(gs_compile.AdamW, lr=1e-2), gpt2) as one:
        own = gs_compile.LossScaler(one.optimizer)
        assert one.optimizer.max_grad_norm == math.inf
        one.loss = partial(in_fp16, one.model)
        found, _ = train(one, own, *range(4))
        assert own.state_dict() == pytest.approx(scaler.state_dict())
        assert found == pytest.approx(wanted, rel=1e-3)
        assert distance(values(one.model), values(theirs)) < 1e-2


def test_a_loss_that_is_bad_by_itself_is_told(tmp_path):
    with learner(tmp_path, MAKE) as one:
        scaler = gs_compile.LossScaler(one.optimizer)
        train(one, scaler, 0)
        next(one.model.parameters()).data.fill_(math.nan)
        with pytest.warns(NonFiniteWarning, match="^the loss is not finite"):
            train(one, scaler, 1)
        with pytest.raises(OptimizerError, match="belongs to another optimizer"):
            gs_compile.LossScaler().step(one.optimizer)
