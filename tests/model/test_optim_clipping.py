"""Gradients that are clipped, and those that are not finite: a step is done or skipped as a whole."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from learner import distance, learner, plain, same_tensors, values
from tiered import gpt2, options, tokens, two_groups
from torch.nn import functional
from zoo import GPT, VOCAB

import gs_compile
from gs_compile.errors import NonFiniteWarning, OptimizerError

KEEPS_CAPTURES = True

# Clipping -------------------------------------------------------------------------------------------------------------


def test_clipping_is_exact(tmp_path):
    losses, norms, reference, _ = plain(5, max_norm=1.85, lr=3e-4)
    assert 0 < sum(norm > 1.85 for norm in norms) < 5

    def trained(**changes):
        found = []
        with learner(tmp_path, partial(gs_compile.AdamW, lr=3e-4, max_grad_norm=1.85), **changes) as one:
            for number in range(5):
                torch.testing.assert_close(one.train(number), losses[number : number + 1], rtol=1e-5, atol=0)
                found.append(one.optimizer.last_step.grad_norm)
            torch.testing.assert_close(found, norms, rtol=1e-6, atol=0)
            return one.values()

    first = trained()
    assert distance({name: first[name] for name in values(reference)}, values(reference)) < 1e-6
    same_tensors(trained(separate_device=True, ratios={"parameter": 0.5, "optimizer": 0.3, "checkpoint": 1.0}), first)


def test_clipping_in_float64_is_exact(tmp_path):
    """Fault: the scale was one of float32, and values were 1e-8 from plain PyTorch's."""
    model, plain = GPT().double(), GPT().double()
    optimizer = gs_compile.SGD(model.parameters(), lr=1.0, max_grad_norm=0.5)
    model.compile(backend="greedysnake", options=options(tmp_path, outputs="all"))
    ids = tokens(0) % VOCAB
    for each in (model, plain):
        each(ids, ids)[1].backward()
    assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5) > 0.5
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=1e-14)


def test_a_bound_that_comes_too_late_is_refused(tmp_path):
    with learner(tmp_path) as one:
        one.train(0)
        one.optimizer.max_grad_norm = 1.0
        with pytest.raises(OptimizerError, match="max_grad_norm was None when the model first ran"):
            one.train(1)


# Gradients that are not finite ----------------------------------------------------------------------------------------


def spoil(learner, number, factor):
    """A step whose loss, and with it every gradient, is multiplied."""
    (learner.loss(number) * factor).backward()
    learner.optimizer.step()
    learner.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("changes", "factor"),
    [({}, math.inf), ({"precision": "bf16"}, math.nan), ({"separate_device": True}, math.inf)],
    ids=str,
)
def test_a_bad_step_is_skipped_as_a_whole(changes, factor, tmp_path):
    make = partial(gs_compile.AdamW, lr=1e-3, max_grad_norm=1.0)
    with learner(tmp_path, make, **changes) as one:
        one.train(0, 1)
        before = one.values()
        with pytest.warns(NonFiniteWarning, match=r"step 3 was skipped \[non-finite-warning\]$"):
            spoil(one, 7, factor)
        info = one.optimizer.last_step
        assert (info.number, info.skipped, info.num_skipped) == (2, True, 1)
        same_tensors(one.values(), before)
        one.train(2)
        found = one.values()
        assert one.optimizer.last_step.num_skipped == 1
    with learner(tmp_path, make, **changes) as one:
        one.train(0, 1, 2)
        same_tensors(found, one.values())


def test_a_loss_that_is_not_finite_is_named(tmp_path):
    with learner(tmp_path, partial(gs_compile.AdamW, max_grad_norm=1.0)) as one:
        one.train(0)
        next(one.model.parameters()).data.fill_(math.nan)
        with pytest.warns(
            NonFiniteWarning, match=r"^the loss is not finite: step 2 was skipped \[non-finite-warning\]$"
        ):
            one.train(1)


@pytest.mark.parametrize(("bound", "changes"), [(None, {"alpha": 0.0}), (1.85, {"clip": "delayed"})], ids=str)
def test_a_batch_without_labels_is_an_update_by_zeros(tmp_path, bound, changes):
    """Its loss is nan, and moments and weight decay move the parameters, as with torch. Fault: the step was skipped."""
    make, reference = partial(gs_compile.AdamW, lr=1e-3, max_grad_norm=bound), gpt2()
    with learner(tmp_path, make, **changes) as one:
        for model, optimizer in (
            (one.model, one.optimizer),
            (reference, torch.optim.AdamW(two_groups(reference), lr=1e-3)),
        ):
            for number in range(3):
                ids = tokens(number)
                loss = model(input_ids=ids, labels=ids if number != 1 else torch.full_like(ids, -100)).loss
                loss.backward()
                if bound and model is reference:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
                optimizer.step()
                optimizer.zero_grad()
                assert bool(loss.isnan()) == (number == 1)
        assert (one.optimizer.num_steps, one.optimizer.num_skipped) == (3, 0)
        assert distance(values(one.model), values(reference)) < 1e-6


def test_without_a_norm_to_wait_for_nothing_bad_is_taken_in(tmp_path):
    with learner(tmp_path, alpha=0.5) as one:
        one.train(0)
        before = one.values()
        with pytest.warns(NonFiniteWarning, match=r"step 2 was skipped \[non-finite-warning\]$"):
            spoil(one, 7, math.inf)  # all gradients are bad, and the first of them shows it
        same_tensors(one.values(), before)
        one.train(1)
        found = one.values()
    with learner(tmp_path, alpha=0.5) as one:
        one.train(0, 1)
        same_tensors(found, one.values())


# A model of its own: last, as its capture ends those of the usual one --------------------------------------------------


class Steep(GPT):
    """The embedding's gradient is larger by far than all others, so it alone leaves the range of numbers."""

    def __init__(self):
        super().__init__(num_layers=3)
        self.embedding.weight.data *= 1e-30

    def forward(self, ids, labels):
        x_BTD = self.embedding(ids) * 1e30
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return functional.cross_entropy(self.head(self.norm(x_BTD)).flatten(0, 1), labels.flatten())


def test_without_a_norm_to_wait_for_the_warning_says_what_was_updated(tmp_path):
    make = partial(gs_compile.SGD, lr=1e-12)
    with learner(tmp_path, make, Steep, alpha=0.0) as one:
        ids = tokens(0) % VOCAB
        with torch.no_grad():
            one.model(ids, ids)
        before = one.values()
        (one.model(ids, ids) * 1e15).backward()
        with pytest.warns(NonFiniteWarning, match=r"step 1 was skipped; units h, 2, .*were updated before it showed"):
            one.optimizer.step()
        changed = {name for name, value in one.values().items() if not torch.equal(value, before[name])}
        assert "embedding.weight" not in changed
        assert {"head.weight", "blocks.2.up.weight"} <= changed
