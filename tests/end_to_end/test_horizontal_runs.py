"""The horizontal order computes what the vertical one does, on real models, and moves what it says; so does the schedule
`lifetime`, whatever stays. That both learn the same wherever data lives, test_same_bits.py has.
"""

from __future__ import annotations

import copy
import re
from functools import partial

import pytest
import torch
from closed_forms import ITEMSIZE, horizontal
from saving import with_room
from test_choice import MACHINE
from tiered import LENGTH, adamw, gpt2, loss_of, moved, options, sgd, shared, step, tokens
from zoo import GPT, assert_same_gradients, batch, gradients, small

import gs_compile
from gs_compile.planner.builder import planned_peak

KEEPS_CAPTURES = True
WIDTH, MICRO_BATCH = 32, 2
DROPOUT = {"model": 0.1, "bf16": 0.0}


def harness_of(precision):
    return shared(precision, dropout=DROPOUT[precision])


def chosen(storage, schedule="horizontal", ratio=1.0, gradient=1.0, separate=False, **others):
    ratios = dict.fromkeys(("parameter", "checkpoint", "optimizer"), ratio)
    ratios |= {} if schedule == "vertical" else {"gradient": gradient}
    return options(storage, schedule=schedule, ratios=ratios, separate_device=separate, **others)


# Values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_size", "ratio", "gradient", "separate", "scale"),
    [(4, 1.0, 1.0, True, 1.0), (5, 0.4, 0.4, False, 1.0), (5, 0.0, 0.0, True, 0.3)],
)
def test_gradients_are_those_of_the_vertical_order(storage, batch_size, ratio, gradient, separate, scale):
    """On the same dropout masks, the last micro-batch smaller than the others, the loss scaled."""
    harness, ids, found = harness_of("model"), tokens(0, batch_size), {}
    for schedule in ("vertical", "horizontal"):
        torch.manual_seed(1)
        with harness.fresh(sgd, chosen(storage, schedule, ratio, gradient, separate)) as optimizer:
            loss = loss_of(harness.model, ids)
            (scale * loss).backward()
            optimizer.step()
            optimizer.synchronize()
            found[schedule] = loss, [parameter.detach().clone() for parameter in harness.model.parameters()]
    (expected, vertical), (loss, horizontal) = found.values()
    assert torch.equal(loss, expected)
    for initial, was, now in zip(harness.initial, vertical, horizontal, strict=True):
        rounding = torch.finfo().eps * initial.norm()  # of a parameter that its gradient was taken from
        assert (now - was).norm() <= 1e-6 * (initial - was).norm() + rounding
        assert not torch.equal(initial, now)


# Bytes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("precision", "gradient", "separate", "n"),
    [
        ("bf16", 0.0, True, 5),
        ("bf16", 1.0, True, 3),
        ("model", 1.0, False, 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("model", 0.0, True, 3), ("bf16", 0.0, False, 2))),
    ],
)
def test_a_step_moves_what_the_paper_says(storage, precision, gradient, separate, n):
    """Measured, counted on the program, and by the formulas of section 3.3; everything else is on SSD."""
    harness = harness_of(precision)
    given = chosen(storage, ratio=0.0, gradient=gradient, separate=separate)
    with harness.fresh(adamw, given) as optimizer:
        step(harness.model, optimizer, tokens(0, MICRO_BATCH * n))
        optimizer.synchronize()
        found = moved(harness.model, optimizer, tokens(1, MICRO_BATCH * n))
        units = {unit.unit: unit.numel for unit in optimizer.engine.placement.units}
    masters = "model" if precision == "model" else "split"
    x = MICRO_BATCH * LENGTH * WIDTH * ITEMSIZE[masters]
    form = horizontal(units, x, n, masters=masters, gradient=gradient, separate_device=separate)
    assert found.traced == found.planned == form
    assert {key: nbytes for key, nbytes in form.items() if key[0].startswith("ssd")} == found.asked


# What stays in the schedule `lifetime` --------------------------------------------------------------------------------


def moving(storage, schedule="lifetime", **others):
    """Everything on SSD, gradient sums too."""
    return chosen(storage, schedule, ratio=0.0, gradient=0.0, **others)


@pytest.mark.parametrize(
    ("share", "separate"),
    [(0.4, False), (1.0, True), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((0.0, True), (1.0, False)))],
)
def test_moves_what_it_says_and_no_more_than_the_horizontal_order(storage, share, separate):
    """Within exactly the memory that is planned."""
    harness, found, budget = harness_of("model"), {}, 0
    for schedule, keeps in (("horizontal", False), ("lifetime", False), ("lifetime", True)):
        chosen = moving(storage, schedule, separate=separate)
        if keeps:
            chosen["host_memory"] = budget
        with with_room(share), harness.fresh(adamw, chosen) as optimizer:
            model = harness.model
            step(model, optimizer, tokens(0, MICRO_BATCH * 3))
            optimizer.synchronize()
            engine = optimizer.engine
            measured = moved(model, optimizer, tokens(1, MICRO_BATCH * 3))
            assert measured.traced == measured.planned
            found[schedule] = measured.traced
            budget = planned_peak(engine.snapshots[-1], "host")
            if keeps:
                assert engine.tiers.slab.nbytes <= chosen["host_memory"]
    assert all(nbytes <= found["horizontal"][key] for key, nbytes in found["lifetime"].items())
    if share == 1.0:
        assert not {key for key in found["lifetime"] if key[1] in ("x", "dw") and key[0].startswith("ssd")}


@pytest.mark.parametrize("separate", [False, True])
def test_by_the_simulator(storage, caplog, separate):
    """As users have it: the machine's profile, the code timed, and the choice logged."""
    caplog.set_level("INFO", logger="gs_compile.planner.run")
    chosen = moving(storage, separate=separate) | {"machine": str(MACHINE)}
    harness = harness_of("model")
    with harness.fresh(adamw, chosen) as optimizer:
        step(harness.model, optimizer, tokens(0))
        placement, programs = optimizer.engine.placement, optimizer.engine.snapshots
        assert placement.layout.schedule == "lifetime"
        assert "lifetime" in [program.made_by for program in programs]
        assert programs[-1].by_micro_batch
        shown = gs_compile.inspect(harness.model).tiers
    if placement.decision.own is not None:
        assert re.search(r"^\W*checkpoints .* (host|device) .* from forward to backward", shown, re.M)
    assert "stays where it is" in caplog.text or "nothing is kept" in caplog.text


# Other models --------------------------------------------------------------------------------------------------------


def test_llama_is_the_same_to_the_bit(storage):
    """No unit shares parameters with another, so all sums are added in the order of the micro-batches."""
    harness = shared(num_layers=3, tied=False)
    expected = harness.train(adamw, chosen(storage, "vertical", snake=False), num_steps=3)
    for ratio, separate in ((0.0, True), (0.4, False)):
        found = harness.train(adamw, chosen(storage, ratio=ratio, gradient=ratio, separate=separate), num_steps=3)
        assert not found.differences(expected)


def test_a_forward_without_gradients_comes_between_steps(storage):
    model = gpt2()
    optimizer = adamw(list(model.parameters()))
    model.compile(backend="greedysnake", options=chosen(storage, ratio=0.0, gradient=0.0, separate=True))
    step(model, optimizer, tokens(0))
    with torch.no_grad():
        alone = model(input_ids=tokens(1), labels=tokens(1)).loss
    assert not optimizer.engine.snapshots[-1].by_micro_batch
    assert step(model, optimizer, tokens(1)) == float(alone)
    assert optimizer.engine.snapshots[-1].by_micro_batch
    optimizer.engine.tiers.close()


# Without tiers -------------------------------------------------------------------------------------------------------


def use_all(model, ids, labels):
    output = model(input_ids=ids, labels=labels, output_hidden_states=True)
    return 3 * output.loss + output.logits.square().mean() + output.hidden_states[1].square().mean()


USES = {
    "its own loss": (GPT, lambda model, ids, labels: model(ids, labels)[1]),
    "hidden states": (partial(small, "llama"), use_all),
}


@pytest.mark.parametrize("use", ["its own loss", pytest.param("hidden states", marks=pytest.mark.slow)])
def test_a_model_in_memory_has_the_same_gradients(use):
    build, compute = USES[use]
    model, losses, found = build(), {}, {}
    ids, labels = batch()
    for schedule in ("vertical", "horizontal"):
        compiled = copy.deepcopy(model)
        expert = {"schedule": schedule, "snake": False, "compiler": "eager"}
        compiled.compile(backend="greedysnake", options={"micro_batch_size": MICRO_BATCH, "expert": expert})
        losses[schedule] = compute(compiled, ids, labels)
        losses[schedule].backward()
        found[schedule] = gradients(compiled)
    assert torch.equal(losses["horizontal"], losses["vertical"])
    assert_same_gradients(found["horizontal"], found["vertical"], tolerance=0.0 if use == "its own loss" else 1e-6)
