"""The schedule `lifetime` learns what the horizontal one does, to the bit, whatever stays, and moves what it says."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache, partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_choice import MACHINE
from tiered import BATCH, Rig, adamw, gpt2, moved, options, step, tokens

import gs_compile
from gs_compile.placement.placement import Room
from gs_compile.planner import planner
from gs_compile.planner.builder import peak
from gs_compile.planner.lifetimes import EVERYTHING

KEEPS_CAPTURES = True
NUM_LAYERS, WIDTH, MICRO_BATCH = 2, 32, 2
NUM_STEPS = 3
SHARES = (0.0, 0.4, 1.0)  # of the way from plain horizontal's peaks to those with everything kept
RATES = EVERYTHING.bytes_per_second


@pytest.fixture(scope="module")
def rigs():
    dropout = {"model": 0.1, "bf16": 0.0}
    return cache(lambda precision: Rig(partial(gpt2, NUM_LAYERS, WIDTH, dropout[precision]), precision))


def given_for(storage, schedule="lifetime", **others):
    """Everything on SSD, gradient sums too."""
    ratios = dict.fromkeys(("parameter", "checkpoint", "optimizer", "gradient"), 0.0)
    return options(storage, schedule=schedule, ratios=ratios, **others)


def with_room(share):
    """What stands for the choice by the simulator: a room of a size that the test wants."""

    def prolonged(self, plain, reason):
        least, most = (self.builder.program(replace(plain, room=room)) for room in (None, EVERYTHING))
        sizes = {
            f"{tier}_nbytes": int((1 - share) * peak(least, tier) + share * peak(most, tier))
            for tier in ("device", "host")
        }
        return replace(plain, room=Room(**sizes, bytes_per_second=RATES)), reason

    return prolonged


def train(rig, share, make, chosen, batch_size=BATCH):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(planner.Planner, "_prolonged", with_room(share))
        return rig.train(make, chosen, num_steps=NUM_STEPS, batch_size=batch_size)


@settings(deadline=None, max_examples=6)
@given(
    precision=st.sampled_from(("model", "bf16")),
    batch_size=st.sampled_from((4, 5)),
    updates=st.sampled_from(("clipped", 0.0, 0.5)),
    separate=st.booleans(),
    share=st.sampled_from(SHARES),
)
def test_any_room_learns_what_the_horizontal_order_learns(
    rigs, storage, precision, batch_size, updates, separate, share
):
    rig, make = rigs(precision), partial(adamw, max_grad_norm=0.3) if updates == "clipped" else adamw
    others = {"separate_device": separate, "alpha": None if updates == "clipped" else updates}
    plain = given_for(storage, "horizontal", **others)
    expected = rig.train(make, plain, num_steps=NUM_STEPS, batch_size=batch_size)
    assert not train(rig, share, make, given_for(storage, **others), batch_size).differences(expected)


@pytest.mark.parametrize(("share", "separate"), [(0.0, True), (0.4, False), (1.0, False), (1.0, True)])
def test_moves_what_it_says_and_no_more_than_the_horizontal_order(rigs, storage, monkeypatch, share, separate):
    """Within exactly the memory that is planned."""
    monkeypatch.setattr(planner.Planner, "_prolonged", with_room(share))
    found, budget = {}, 0
    for schedule, keeps in (("horizontal", False), ("lifetime", False), ("lifetime", True)):
        chosen = given_for(storage, schedule, separate_device=separate)
        if keeps:
            chosen["host_memory"] = budget
        with rigs("model").fresh(adamw, chosen) as optimizer:
            model = rigs("model").model
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
def test_by_the_simulator(rigs, storage, monkeypatch, caplog, separate):
    """As users have it: the machine's profile, the code timed, and the choice logged."""
    caplog.set_level("INFO", logger="gs_compile.planner.planner")
    chosen = given_for(storage, separate_device=separate) | {"machine": str(MACHINE)}
    with rigs("model").fresh(adamw, chosen) as optimizer:
        step(rigs("model").model, optimizer, tokens(0))
        placement, programs = optimizer.engine.placement, optimizer.engine.programs
        assert placement.schedule == "lifetime"
        assert "lifetime" in [program.made_by for program in programs]
        assert programs[-1].order == "horizontal"
        shown = gs_compile.inspect(rigs("model").model).tiers
    if placement.room is not None:
        assert re.search(r"^\W*checkpoints .* (host|device) .* from forward to backward", shown, re.M)
    assert "stays where it is" in caplog.text or "nothing is kept" in caplog.text
