"""The horizontal order trains as the vertical one does, on real models, wherever their data lives."""

from __future__ import annotations

import copy
from functools import cache, partial

import pytest
import torch
from tiered import LENGTH, Rig, adamw, gpt2, moved, options, sgd, step, tokens
from zoo import assert_same_gradients, batch, gradients, huggingface

KEEPS_CAPTURES = True
NUM_LAYERS, WIDTH, MICRO_BATCH = 2, 32, 2
RATIOS = (0.0, 0.4, 1.0)


@pytest.fixture(scope="module")
def rigs():
    dropout = {"model": 0.1, "bf16": 0.0}
    return cache(lambda precision: Rig(partial(gpt2, NUM_LAYERS, WIDTH, dropout[precision]), precision))


def chosen(storage, schedule="horizontal", ratio=1.0, gradient=1.0, separate=False, **others):
    ratios = dict.fromkeys(("parameter", "checkpoint", "optimizer"), ratio)
    ratios |= {"gradient": gradient} if schedule == "horizontal" else {}
    return options(storage, schedule=schedule, ratios=ratios, separate_device=separate, **others)


# Values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_size", "ratio", "gradient", "separate", "scale"),
    [(2, 0.0, 0.0, True, 1.0), (4, 1.0, 1.0, True, 1.0), (5, 0.4, 0.4, False, 1.0), (5, 0.0, 0.0, True, 0.3)],
)
def test_gradients_are_those_of_the_vertical_order(rigs, storage, batch_size, ratio, gradient, separate, scale):
    """On the same dropout masks, the last micro-batch smaller than the others, the loss scaled."""
    rig, ids, found = rigs("model"), tokens(0, batch_size), {}
    for schedule in ("vertical", "horizontal"):
        torch.manual_seed(1)
        with rig.fresh(sgd, chosen(storage, schedule, ratio, gradient, separate)) as optimizer:
            loss = rig.model(input_ids=ids, labels=ids).loss
            (scale * loss).backward()
            optimizer.step()
            optimizer.synchronize()
            found[schedule] = loss, [parameter.detach().clone() for parameter in rig.model.parameters()]
    (expected, vertical), (loss, horizontal) = found.values()
    assert torch.equal(loss, expected)
    for initial, was, now in zip(rig.initial, vertical, horizontal, strict=True):
        rounding = torch.finfo().eps * initial.norm()  # of a parameter that its gradient was taken from
        assert (now - was).norm() <= 1e-6 * (initial - was).norm() + rounding
        assert not torch.equal(initial, now)


# Bytes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "gradient", "separate", "n"),
    [
        ("model", 0.0, True, 3),
        ("bf16", 0.0, True, 5),
        ("bf16", 1.0, True, 3),
        ("model", 1.0, False, 1),
        ("bf16", 0.0, False, 2),
    ],
)
def test_a_step_moves_what_the_paper_says(rigs, storage, precision, gradient, separate, n):
    """Measured, counted on the program, and by the formulas of section 3.3; everything else is on SSD."""
    rig = rigs(precision)
    given = chosen(storage, ratio=0.0, gradient=gradient, separate=separate)
    with rig.fresh(adamw, given) as optimizer:
        step(rig.model, optimizer, tokens(0, MICRO_BATCH * n))
        optimizer.synchronize()
        found = moved(rig.model, optimizer, tokens(1, MICRO_BATCH * n))
        units = {unit.unit: unit.numel for unit in optimizer.engine.placement.units}
    numel, itemsize = sum(units.values()), 4 if precision == "model" else 2
    loads = {"e": 2, "h": 1, "t": 3}  # the head's backward follows at once; it shares the embedding with the prologue
    loaded = sum(units[unit] * loads.get(unit, 2) for unit in units) * itemsize * n
    checkpoints = NUM_LAYERS * MICRO_BATCH * LENGTH * WIDTH * itemsize * n
    state = numel * 4 * (2 if precision == "model" else 3)
    form = {("ssd_read", "w"): loaded, ("ssd_write", "w"): numel * itemsize}
    form |= {(lane, "s"): state for lane in ("ssd_read", "ssd_write")}
    form |= {(lane, "x"): checkpoints for lane in ("ssd_read", "ssd_write", "d2h")}
    if not gradient:
        form |= {(lane, "dw"): (n - 1) * numel * 4 for lane in ("ssd_read", "ssd_write")}
    if separate:
        form |= {("h2d", "w"): loaded, ("h2d", "x"): checkpoints}
        form |= {("h2d", "dw"): (n - 1) * numel * 4, ("d2h", "dw"): n * numel * 4}  # (2 n - 1) times together
    assert found.traced == found.planned == form
    assert {key: nbytes for key, nbytes in form.items() if key[0].startswith("ssd")} == found.asked


# Models that are captured for one test: last, as a rig is captured once -----------------------------------------------


def test_llama_is_the_same_to_the_bit(storage):
    """No unit shares parameters with another, so all sums are added in the order of the micro-batches."""
    rig = Rig(partial(gpt2, 3, tied=False))
    expected = rig.train(adamw, chosen(storage, "vertical", snake=False), num_steps=3)
    for ratio, separate in ((0.0, True), (0.4, False)):
        found = rig.train(adamw, chosen(storage, ratio=ratio, gradient=ratio, separate=separate), num_steps=3)
        assert not found.differences(expected)


def test_a_forward_without_gradients_comes_between_steps(storage):
    model = gpt2()
    optimizer = adamw(list(model.parameters()))
    model.compile(backend="greedysnake", options=chosen(storage, ratio=0.0, gradient=0.0, separate=True))
    step(model, optimizer, tokens(0))
    with torch.no_grad():
        alone = model(input_ids=tokens(1), labels=tokens(1)).loss
    assert optimizer.engine.programs[-1].order == "vertical"
    assert step(model, optimizer, tokens(1)) == float(alone)
    assert optimizer.engine.programs[-1].order == "horizontal"
    optimizer.engine.tiers.close()


# Without tiers -------------------------------------------------------------------------------------------------------


def use_all(model, ids, labels):
    output = model(input_ids=ids, labels=labels, output_hidden_states=True)
    return 3 * output.loss + output.logits.square().mean() + output.hidden_states[1].square().mean()


USES = {
    "its own loss": lambda model, ids, labels: model(input_ids=ids, labels=labels).loss,
    "a loss outside": lambda model, ids, labels: model(input_ids=ids).logits.square().mean(),
    "hidden states": use_all,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_model_in_memory_has_the_same_gradients(name, use):
    model, losses, found = huggingface(name), {}, {}
    ids, labels = batch()
    if use == "hidden states":
        model(ids, output_hidden_states=True)  # transformers installs its hooks, which Dynamo cannot
    for schedule in ("vertical", "horizontal"):
        compiled = copy.deepcopy(model)
        expert = {"schedule": schedule, "snake": False, "compiler": "eager"}
        compiled.compile(backend="greedysnake", options={"micro_batch_size": MICRO_BATCH, "expert": expert})
        losses[schedule] = USES[use](compiled, ids, labels)
        losses[schedule].backward()
        found[schedule] = gradients(compiled)
    assert torch.equal(losses["horizontal"], losses["vertical"])
    assert_same_gradients(found["horizontal"], found["vertical"], tolerance=0.0 if use == "its own loss" else 1e-6)
