"""Of what a model returns a step trains some: what leads to the rest alone has no gradient, and is left as it is."""

from __future__ import annotations

import copy

import pytest
import torch
from tiered import options
from torch import nn
from torch.nn import functional
from zoo import VOCAB, WIDTH, Feed, batch, compile_model

import gs_compile
from gs_compile.errors import OptimizerError, OutputGradientError, UncapturedWarning

ADAMW = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.5}
OURS = {"torch": torch.optim.AdamW, "tiers": gs_compile.AdamW}


class Heads(nn.Module):
    """Two losses, of a head each; a hidden state, and what has no finite derivative."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Feed() for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, VOCAB) for _ in range(2))
        self.zero = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, ids, first, second, num_layers=3, both=True):
        states = [self.embedding(ids)]
        for block in self.blocks[:num_layers]:
            states.append(block(states[-1]))
        one, other = (functional.cross_entropy(head(states[-1]).flatten(0, 1), labels.flatten())
                      for head, labels in zip(self.heads, (first, second), strict=True))  # fmt: skip
        if not both:
            return one
        return one, other, states[1], (self.zero * states[-1]).square().mean(-1).sqrt()


def first_and_second(model, ids, labels):
    one, other, *_ = model(ids, labels, ids)
    return one + other


def first(model, ids, labels):
    return model(ids, labels, ids)[0]


def second_beside_nan(model, ids, labels):
    return model(ids, torch.full_like(labels, -100), labels)[1]


def hidden_state(model, ids, labels):
    return model(ids, labels, ids)[2].square().mean()


def without_the_second(model, ids, labels):
    return model(ids, labels, ids, both=False)


STEPS = [first_and_second, first, second_beside_nan, hidden_state, without_the_second, first_and_second, first]


def trained(model, optimizer, steps, start=0):
    for seed, loss_of in enumerate(steps, start):
        loss_of(model, *batch(4, seed=seed)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=seed < 4)  # at last what gets no gradient is updated by zeros
    steps_taken = {number: float(state["step"]) for number, state in optimizer.state_dict()["state"].items()}
    return {name: value.clone() for name, value in model.state_dict().items()}, steps_taken


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("torch", {}),
        pytest.param("tiers", {}, marks=pytest.mark.slow),
        pytest.param("tiers", {"alpha": 0.5, "piece_tokens": 8}, marks=pytest.mark.slow),
        ("tiers", {"accumulate": True}),
    ],
    ids=str,
)
def test_each_step_trains_what_a_gradient_comes_to(name, changes, tmp_path):
    model = Heads()
    plain = copy.deepcopy(model)
    optimizer = OURS[name](model.parameters(), **ADAMW)
    if name == "torch":
        compile_model(model, 2)
    else:
        model.compile(backend="greedysnake", options=options(tmp_path, outputs="all", **changes))
    if "accumulate" in changes:  # nor does a first call without gradients say what gets one
        with torch.no_grad():
            model(*batch(4), batch(4)[0])
    values, taken = trained(model, optimizer, STEPS)
    expected, expected_taken = trained(plain, torch.optim.AdamW(plain.parameters(), **ADAMW), STEPS)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)
    assert {number: taken[number] for number in expected_taken} == expected_taken
    torch.testing.assert_close(values["zero"], torch.zeros(WIDTH), rtol=0, atol=0)


@pytest.mark.parametrize("accumulate", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_durable_run_knows_what_each_parameter_has_missed(accumulate, tmp_path):
    """Fault: such steps were refused."""
    plain = Heads()
    given = options(tmp_path, outputs="all", durability="step", accumulate=accumulate)
    for start, stop in ((0, 2), (2, 5), (5, 7)):
        model = Heads()
        optimizer = gs_compile.AdamW(model.parameters(), **ADAMW)
        model.compile(backend="greedysnake", options=given)
        assert gs_compile.resume(model, optimizer, storage=tmp_path).step == start
        values, taken = trained(model, optimizer, STEPS[start:stop], start)
        optimizer.engine.tiers.close()
    expected, expected_taken = trained(plain, torch.optim.AdamW(plain.parameters(), **ADAMW), STEPS)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)
    assert {number: taken[number] for number in expected_taken} == expected_taken


def test_fewer_layers_than_the_first_call(tmp_path):
    model, (ids, labels) = Heads(), batch(4)
    plain = copy.deepcopy(model)
    optimizer = gs_compile.AdamW(model.parameters(), **ADAMW)
    model.compile(backend="greedysnake", options=options(tmp_path, outputs="all"))
    trained(model, optimizer, [first_and_second])
    expected = trained(plain, torch.optim.AdamW(plain.parameters(), **ADAMW), [first_and_second])[0]
    with torch.no_grad(), pytest.warns(UncapturedWarning, match="this call runs 2 layers, and the first call .* 3"):
        torch.testing.assert_close(model(ids, labels, ids, 2)[:2], plain(ids, labels, ids, 2)[:2])
    with pytest.raises(OptimizerError, match="this call runs 2 layers, and the first call of the run 3"):
        model(ids, labels, ids, 2)
    torch.testing.assert_close(model.state_dict(), expected, rtol=1e-5, atol=1e-6)


def test_gradients_of_outputs_are_seen_where_they_come_from_outside(tmp_path):
    """What flows from one output to another inside of the call is not, and a hook that waits for it is refused."""
    model, (ids, labels) = Heads(), batch(4)
    compile_model(model, 2)
    one, _, state, _ = model(ids, labels, ids)
    state.retain_grad()
    with pytest.raises(
        OutputGradientError, match=r"output `.*` of the model has a hook on its gradient, or retains it"
    ):
        one.backward()
    one, other, state, _ = model(ids, labels, ids)
    for each in (one, other, state):
        each.retain_grad()
    state.sum().backward()
    torch.testing.assert_close(state.grad, torch.ones_like(state))
    one, other, _, _ = model(ids, labels, ids)
    one.retain_grad(), other.register_hook(lambda gradient: 2 * gradient)
    (one + other).backward()
    assert one.grad == 1.0


class Counting(nn.Module):
    """Returns numbers that follow from the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Feed() for _ in range(2))

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        size, length = ids.shape
        return x, size, size - 1, (size + 1) // 2, size**2, size * length, size > 3, length


def test_numbers_are_those_of_the_whole_batch():
    model = Counting()
    plain = copy.deepcopy(model)
    compile_model(model, 2)
    for shape in ((5, 12), (4, 12), (5, 9), (3, 7)):
        ids = torch.zeros(shape, dtype=torch.long)
        with torch.no_grad():
            found, expected = model(ids)[1:], plain(ids)[1:]
        assert found == expected
        assert isinstance(found[5], bool)
