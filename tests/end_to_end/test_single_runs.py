"""The single schedule trains as the vertical one does on the same batch, and moves twice its checkpoints."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from learner import distance
from tiered import adamw, options, sgd, shared
from torch import nn
from zoo import GPT, WARNINGS, assert_same_gradients, batch, gradients, huggingface, loss_of, small, train

import gs_compile

KEEPS_CAPTURES = True
pytestmark = WARNINGS
WIDTH, BATCH = 32, 4
HALVES = {"vertical": 1, "single": 2}  # layers of a block
PLACES = [
    pytest.param({"ratio": 0.0, "separate": True}, id="ssd", marks=pytest.mark.slow),  # test_same_bits.py has it
    pytest.param({"ratio": 0.4, "separate": False}, id="mixed", marks=pytest.mark.slow),
    pytest.param({"ratio": 1.0, "separate": False}, id="host"),
]


BUILDS = {"tied": {"dropout": 0.1}, "untied": {"tied": False}}


def chosen(storage, schedule, ratio=1.0, separate=False, **others):
    """Micro-batches of the whole batch for the vertical order; the single one must not look at their size."""
    size = BATCH if schedule == "vertical" else 1
    ratios = dict.fromkeys(("parameter", "checkpoint", "optimizer"), ratio)
    return options(storage, schedule=schedule, ratios=ratios, separate_device=separate, micro_batch_size=size, **others)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["tied", pytest.param("untied", marks=pytest.mark.slow)])
def test_learns_what_the_vertical_order_learns(storage, name, place):
    """Parameters after 5 steps, and the gradients of one; on the same dropout masks."""
    harness = shared(**BUILDS[name])

    def learned(schedule, make, num_steps):
        own = shared(halved=schedule == "single", **BUILDS[name])
        return own.train(make, chosen(storage, schedule, **place), num_steps, BATCH)

    expected, found = (learned(schedule, adamw, 5) for schedule in HALVES)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    names = [name for name, _ in harness.model.named_parameters()]
    assert distance(*({name: each.values[name] for name in names} for each in (found, expected))) <= 1e-6
    was, now = (learned(schedule, sgd, 1) for schedule in HALVES)
    for name, initial in zip(names, harness.initial, strict=True):
        gradient = initial - was.values[name]
        assert (now.values[name] - was.values[name]).norm() <= 1e-6 * gradient.norm() + 1e-9


# Without tiers -------------------------------------------------------------------------------------------------------


def on(schedule, model, micro_batch_size, compiler="eager"):
    """A copy of the model that runs in this schedule."""
    compiled = copy.deepcopy(model)
    expert = {"schedule": schedule, "compiler": compiler}
    compiled.compile(backend="greedysnake", options={"micro_batch_size": micro_batch_size, "expert": expert})
    return compiled


class Drops(nn.Module):
    """A block that drops in both halves."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.dropout(self.mix(x_BTD))
        return x_BTD + self.dropout(self.up(x_BTD))


@pytest.mark.parametrize(
    ("build", "compiler"),
    [
        (partial(GPT, Drops), "eager"),
        pytest.param(partial(GPT, Drops), "inductor", marks=pytest.mark.slow),
        *(
            pytest.param(partial(small, name, dropout=None), "eager", marks=pytest.mark.slow)
            for name in ("gpt2", "opt")
        ),
    ],
    ids=["eager", "inductor", "gpt2", "opt"],
)
def test_the_halves_draw_the_masks_of_the_block(build, compiler):
    """The second half goes on where the first has stopped, in an evaluation too."""
    torch._dynamo.reset()
    model, (ids, labels), found = build(), batch(), {}
    for schedule, size in (("vertical", len(ids)), ("single", 2)):
        compiled = on(schedule, model, size, compiler)
        torch.manual_seed(7)
        with torch.no_grad():
            alone = loss_of(compiled, ids, labels)
        torch.manual_seed(7)
        loss, gradient = train(compiled, ids, labels)
        torch.testing.assert_close(alone, loss, rtol=1e-6, atol=0)
        found[schedule] = loss, gradient
        assert gs_compile.inspect(compiled).num_layers == 2 * HALVES[schedule]
    torch.testing.assert_close(found["single"][0], found["vertical"][0], rtol=1e-6, atol=0)
    assert_same_gradients(found["single"][1], found["vertical"][1], 1e-6)


def test_hidden_states_and_gradients_from_outside():
    torch._dynamo.reset()
    model, found = small("llama"), {}
    ids, labels = batch()
    for schedule in ("vertical", "single"):
        compiled = on(schedule, model, len(ids))
        output = compiled(input_ids=ids, labels=labels, output_hidden_states=True)
        (output.loss + output.hidden_states[1].square().mean()).backward()
        found[schedule] = gradients(compiled)
        assert gs_compile.inspect(compiled).num_layers == 2 * HALVES[schedule]
    assert_same_gradients(found["single"], found["vertical"], 1e-6)
    names_the_halves(gs_compile.inspect(compiled))


def names_the_halves(found):
    assert found.headline.startswith("4 half-layers of 2 classes, 1 micro-batch of 5, ")
    assert found.uniformity.splitlines() == [
        "class 0: the attention halves of 2 layers: 0-1",
        "class 1: the feed-forward halves of 2 layers: 0-1",
    ]
    assert "half of class 1:" in found.report()
    assert found.programs[0].made_by == "single"
    assert found.as_dict()["halved"]


ALL = ["bert", "bloom", "gemma2", "gpt_oss", "mistral", "mixtral", "olmo2", "opt", "phi3", "qwen3"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_family_with_two_residuals(name):
    model, (ids, labels), found = huggingface(name), batch(), {}
    for schedule in ("vertical", "single"):
        torch._dynamo.reset()
        compiled = on(schedule, model, len(ids))
        found[schedule] = train(compiled, ids, labels)[1]
    assert_same_gradients(found["single"], found["vertical"], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["falcon", "gpt_neox", "gptj", "mamba"])
def test_blocks_with_one_residual_are_refused_by_name(name):
    model, (ids, labels) = huggingface(name), batch()
    model = on("single", model, 1)
    with pytest.raises(
        gs_compile.errors.UniformityError, match=r"layer 0 \(.*\.0\) cannot be cut in two.*there is one"
    ):
        train(model, ids, labels)
