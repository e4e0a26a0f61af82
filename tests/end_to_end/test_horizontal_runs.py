"""The horizontal order trains as the vertical one does, on real models, wherever their data lives; the schedule
`lifetime` learns the same to the bit, whatever stays, and moves what it says.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_choice import MACHINE
from tiered import BATCH, LENGTH, Harness, adamw, gpt2, moved, options, sgd, step, tokens
from zoo import assert_same_gradients, batch, gradients, huggingface

import gs_compile
from gs_compile.passes.baselines.lifetime import EVERYTHING, Room
from gs_compile.planner import decide
from gs_compile.planner.builder import peak

KEEPS_CAPTURES = True
NUM_LAYERS, WIDTH, MICRO_BATCH = 2, 32, 2
SHARES = (0.0, 0.4, 1.0)  # of the way from plain horizontal's peaks to those with everything kept


@pytest.fixture(scope="module")
def harnesses():
    dropout = {"model": 0.1, "bf16": 0.0}
    return cache(lambda precision: Harness(partial(gpt2, NUM_LAYERS, WIDTH, dropout[precision]), precision))


def chosen(storage, schedule="horizontal", ratio=1.0, gradient=1.0, separate=False, **others):
    ratios = dict.fromkeys(("parameter", "checkpoint", "optimizer"), ratio)
    ratios |= {} if schedule == "vertical" else {"gradient": gradient}
    return options(storage, schedule=schedule, ratios=ratios, separate_device=separate, **others)


# Values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch_size", "ratio", "gradient", "separate", "scale"),
    [(4, 1.0, 1.0, True, 1.0), (5, 0.4, 0.4, False, 1.0), (5, 0.0, 0.0, True, 0.3)],
)
def test_gradients_are_those_of_the_vertical_order(harnesses, storage, batch_size, ratio, gradient, separate, scale):
    """On the same dropout masks, the last micro-batch smaller than the others, the loss scaled."""
    harness, ids, found = harnesses("model"), tokens(0, batch_size), {}
    for schedule in ("vertical", "horizontal"):
        torch.manual_seed(1)
        with harness.fresh(sgd, chosen(storage, schedule, ratio, gradient, separate)) as optimizer:
            loss = harness.model(input_ids=ids, labels=ids).loss
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
        ("model", 0.0, True, 3),
        ("bf16", 0.0, True, 5),
        ("bf16", 1.0, True, 3),
        ("model", 1.0, False, 1),
        ("bf16", 0.0, False, 2),
    ],
)
def test_a_step_moves_what_the_paper_says(harnesses, storage, precision, gradient, separate, n):
    """Measured, counted on the program, and by the formulas of section 3.3; everything else is on SSD."""
    harness = harnesses(precision)
    given = chosen(storage, ratio=0.0, gradient=gradient, separate=separate)
    with harness.fresh(adamw, given) as optimizer:
        step(harness.model, optimizer, tokens(0, MICRO_BATCH * n))
        optimizer.synchronize()
        found = moved(harness.model, optimizer, tokens(1, MICRO_BATCH * n))
        units = {unit.unit: unit.numel for unit in optimizer.engine.placement.units}
    numel, itemsize = sum(units.values()), 4 if precision == "model" else 2
    loads = {"e": 2, "h": 1, "t": 3}  # the head's backward follows at once; it shares the embedding with the prologue
    loaded = sum(units[unit] * loads.get(unit, 2) for unit in units) * itemsize * n
    checkpoints = NUM_LAYERS * MICRO_BATCH * LENGTH * WIDTH * itemsize * n
    state = numel * (8 if precision == "model" else 10)
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


# What stays in the schedule `lifetime` --------------------------------------------------------------------------------


def moving(storage, schedule="lifetime", **others):
    """Everything on SSD, gradient sums too."""
    return chosen(storage, schedule, ratio=0.0, gradient=0.0, **others)


def with_room(share):
    """What stands for the choice by the simulator: a room of a size that the test wants."""

    def with_variant(plan):
        plain, builder = plan.placement, plan.problem.builder
        least, most = (builder.program(plain.decided(own=own)) for own in (None, EVERYTHING))
        sizes = {
            f"{tier}_nbytes": int((1 - share) * peak(least, tier) + share * peak(most, tier))
            for tier in ("device", "host")
        }
        own = Room(**sizes, bytes_per_second=EVERYTHING.bytes_per_second)
        return replace(plan, placement=plain.decided(own=own))

    return with_variant


def train(harness, share, make, chosen, batch_size=BATCH):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(decide, "with_variant", with_room(share))
        return harness.train(make, chosen, num_steps=3, batch_size=batch_size)


@settings(deadline=None, max_examples=6)
@given(
    precision=st.sampled_from(("model", "bf16")),
    batch_size=st.sampled_from((4, 5)),
    updates=st.sampled_from(("clipped", 0.0, 0.5)),
    separate=st.booleans(),
    share=st.sampled_from(SHARES),
)
def test_any_room_learns_what_the_horizontal_order_learns(
    harnesses, storage, precision, batch_size, updates, separate, share
):
    harness, make = harnesses(precision), partial(adamw, max_grad_norm=0.3) if updates == "clipped" else adamw
    others = {"separate": separate, "alpha": None if updates == "clipped" else updates}
    plain = moving(storage, "horizontal", **others)
    expected = harness.train(make, plain, num_steps=3, batch_size=batch_size)
    assert not train(harness, share, make, moving(storage, **others), batch_size).differences(expected)


@pytest.mark.parametrize(("share", "separate"), [(0.0, True), (0.4, False), (1.0, False), (1.0, True)])
def test_moves_what_it_says_and_no_more_than_the_horizontal_order(harnesses, storage, monkeypatch, share, separate):
    """Within exactly the memory that is planned."""
    monkeypatch.setattr(decide, "with_variant", with_room(share))
    found, budget = {}, 0
    for schedule, keeps in (("horizontal", False), ("lifetime", False), ("lifetime", True)):
        chosen = moving(storage, schedule, separate=separate)
        if keeps:
            chosen["host_memory"] = budget
        with harnesses("model").fresh(adamw, chosen) as optimizer:
            model = harnesses("model").model
            step(model, optimizer, tokens(0, MICRO_BATCH * 3))
            optimizer.synchronize()
            engine = optimizer.engine
            measured = moved(model, optimizer, tokens(1, MICRO_BATCH * 3))
            assert measured.traced == measured.planned
            found[schedule] = measured.traced
            budget = peak(engine.programs[-1], "host")
            if keeps:
                assert engine.tiers.slab.nbytes <= chosen["host_memory"]
    assert all(nbytes <= found["horizontal"][key] for key, nbytes in found["lifetime"].items())
    if share == 1.0:
        assert not {key for key in found["lifetime"] if key[1] in ("x", "dw") and key[0].startswith("ssd")}


@pytest.mark.parametrize("separate", [False, True])
def test_by_the_simulator(harnesses, storage, monkeypatch, caplog, separate):
    """As users have it: the machine's profile, the code timed, and the choice logged."""
    caplog.set_level("INFO", logger="gs_compile.planner.run")
    chosen = moving(storage, separate=separate) | {"machine": str(MACHINE)}
    with harnesses("model").fresh(adamw, chosen) as optimizer:
        step(harnesses("model").model, optimizer, tokens(0))
        placement, programs = optimizer.engine.placement, optimizer.engine.programs
        assert placement.schedule == "lifetime"
        assert "lifetime" in [program.made_by for program in programs]
        assert programs[-1].by_micro_batch
        shown = gs_compile.inspect(harnesses("model").model).tiers
    if placement.own is not None:
        assert re.search(r"^\W*checkpoints .* (host|device) .* from forward to backward", shown, re.M)
    assert "stays where it is" in caplog.text or "nothing is kept" in caplog.text


# Models that are captured for one test: last, as a harness is captured once ------------------------------------------


def test_llama_is_the_same_to_the_bit(storage):
    """No unit shares parameters with another, so all sums are added in the order of the micro-batches."""
    harness = Harness(partial(gpt2, 3, tied=False))
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
    assert not optimizer.engine.programs[-1].by_micro_batch
    assert step(model, optimizer, tokens(1)) == float(alone)
    assert optimizer.engine.programs[-1].by_micro_batch
    optimizer.engine.tiers.close()


# Without tiers -------------------------------------------------------------------------------------------------------


def use_all(model, ids, labels):
    output = model(input_ids=ids, labels=labels, output_hidden_states=True)
    return 3 * output.loss + output.logits.square().mean() + output.hidden_states[1].square().mean()


USES = {
    "its own loss": lambda model, ids, labels: model(input_ids=ids, labels=labels).loss,
    "hidden states": use_all,
}


@pytest.mark.parametrize("use", USES)
def test_a_model_in_memory_has_the_same_gradients(use):
    model, losses, found = huggingface("llama"), {}, {}
    ids, labels = batch()
    for schedule in ("vertical", "horizontal"):
        compiled = copy.deepcopy(model)
        expert = {"schedule": schedule, "snake": False, "compiler": "eager"}
        compiled.compile(backend="greedysnake", options={"micro_batch_size": MICRO_BATCH, "expert": expert})
        losses[schedule] = USES[use](compiled, ids, labels)
        losses[schedule].backward()
        found[schedule] = gradients(compiled)
    assert torch.equal(losses["horizontal"], losses["vertical"])
    assert_same_gradients(found["horizontal"], found["vertical"], tolerance=0.0 if use == "its own loss" else 1e-6)
