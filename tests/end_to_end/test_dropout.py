"""Dropout: what is drawn is a function of (step, unit, micro-batch), so recomputation draws what the forward drew."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from zoo import GPT, WIDTH, Feed, accumulate, assert_same_gradients, batch, compile_model, small, train

from gs_compile.runtime.units import seed_of

KEEPS_CAPTURES = True

SEED = 7


def seed_each_unit(model, seed):
    """Have every unit of the plain `model` draw the numbers of the micro-batch in the list that is returned."""
    micro_batch = [0]

    def before(module, unit):
        module.register_forward_pre_hook(lambda *_: torch.manual_seed(seed_of(seed, unit, micro_batch[0])) and None)

    before(model, "e")
    for layer, block in enumerate(model.transformer.h):
        before(block, layer)
    before(model.transformer.ln_f, "h")
    return micro_batch


def test_gradients_are_those_of_the_masks_drawn():
    reference = small("gpt2", dropout=None)  # as the configuration has it
    model = compile_model(copy.deepcopy(reference), 2)
    ids, labels = batch()

    torch.manual_seed(SEED)
    micro_batch = seed_each_unit(reference, int(torch.randint(2**62, ())))
    expected = accumulate(reference, ids, labels, 2, before=lambda number: micro_batch.__setitem__(0, number))

    torch.manual_seed(SEED)
    _, found = train(model, ids, labels)
    assert_same_gradients(found, expected)


class Gate(nn.Module):
    """x + dropout(gate): the gradient of `gate` is the mask, summed over samples and tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(4, WIDTH))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return x_BTD + self.dropout(self.gate.expand(x_BTD.shape[0], -1, -1))


class Gates(nn.Module):
    """Its output shows the sum of all masks that its blocks drew."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(WIDTH))
        self.blocks = nn.ModuleList(Gate() for _ in range(3))

    def forward(self, x_BTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x_BTD = x_BTD + self.embedding
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return x_BTD, x_BTD.sum()


@pytest.mark.parametrize(("compiler", "through_logits"), [("eager", False), ("eager", True), ("inductor", False)])
def test_recomputation_draws_what_the_forward_drew(compiler, through_logits):
    model = compile_model(Gates(), 2, compiler=compiler)
    seen, loss = model(torch.zeros(5, 4, WIDTH))
    (seen.sum() if through_logits else loss).backward()
    masks = sum(block.gate.grad for block in model.blocks)
    torch.testing.assert_close(seen.detach().sum(0), masks)
    assert set(seen.detach().unique().tolist()) == {0.0, 2.0, 4.0, 6.0}  # three masks of 0 and 2, not one thrice
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])  # of another micro-batch


def test_one_seed_gives_one_result_in_any_order_of_micro_batches():
    def run(seed, **options):
        torch.manual_seed(0)
        model = compile_model(GPT(lambda: Feed(dropout=0.3)), 2, **options)
        torch.manual_seed(seed)
        return train(model, *batch(4))

    (loss, first), (_, second), (straight, third) = run(SEED), run(SEED), run(SEED, snake=False)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert loss == straight
    for name in first:  # a sum goes on while a product is added, and rounds as it comes; another mask is far away
        torch.testing.assert_close(first[name], third[name], rtol=1e-5, atol=1e-7)
    assert loss != run(SEED + 1)[0]


def test_every_step_draws_anew_and_leaves_the_generator_to_its_user():
    model = compile_model(GPT(lambda: Feed(dropout=0.3)), 2)
    ids, labels = batch(4)
    torch.manual_seed(SEED)
    loss = model(ids, labels)[1]
    after_forward = torch.get_rng_state()
    loss.backward()
    assert torch.equal(after_forward, torch.get_rng_state())
    assert model(ids, labels)[1] != loss
    torch.manual_seed(SEED)
    torch.randint(2**62, ())
    assert torch.equal(after_forward, torch.get_rng_state())  # a step takes one number, whatever it draws

    model = compile_model(GPT(), 2)  # nothing to draw
    before = torch.get_rng_state()
    train(model, ids, labels)
    assert torch.equal(before, torch.get_rng_state())
