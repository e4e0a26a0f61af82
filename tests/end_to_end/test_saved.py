"""Saved activations on the tiers: the same bits whatever is saved and wherever it lives."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from saving import saving
from tiered import Harness, adamw, files_in, gpt2, moved, options, outcome, step, tokens

from gs_compile.placement.levels import Share
from gs_compile.planner.builder import peak

IN_MEMORY = dict.fromkeys(("parameter", "checkpoint", "optimizer"), 1.0)
PLACES = {
    "host": [Share(1, "host", 1.0)],
    "all that is read, host": [Share(2, "host", 0.6)],
    "ssd": [Share(2, "ssd", 1.0)],
    "some of all": [Share(1, "host", 0.4), Share(2, "ssd", 0.3)],
    "device": [Share(2, "device", 0.5), Share(1, "host", 0.3)],
}


@pytest.fixture(scope="module")
def harness():
    return Harness(lambda: gpt2(num_layers=3, dropout=0.1))


@pytest.fixture(scope="module")
def usual(harness, tmp_path_factory):
    """What training comes to where every layer runs again."""
    return harness.train(adamw, options(tmp_path_factory.mktemp("usual")), num_steps=3)


@pytest.mark.parametrize(
    ("place", "separate", "alpha"),
    [
        ("host", False, 0.0),
        ("all that is read, host", False, 0.0),
        ("some of all", False, 0.0),
        ("some of all", True, 0.5),
        ("ssd", True, 0.5),
        ("device", True, 0.5),
    ],
)
def test_the_same_bits_and_the_bytes_that_are_planned(harness, usual, tmp_path, place, separate, alpha):
    """With dropout: masks are drawn as ever."""
    given = options(tmp_path, separate_device=separate, alpha=alpha)
    with saving(*PLACES[place]):
        assert harness.train(adamw, given, num_steps=3).differences(usual) == []
        with harness.fresh(adamw, given) as optimizer:
            step(harness.model, optimizer, tokens(0))
            found = moved(harness.model, optimizer, tokens(1))
    assert found.traced == found.planned
    assert found.asked == {key: n for key, n in found.planned.items() if key[0].startswith("ssd")}
    assert (("ssd_write", "a") in found.planned) == any(share.tier == "ssd" for share in PLACES[place])


def trained(harness, given, sizes):
    """What steps on batches of these sizes come to, what each has saved, and the memory that they take."""
    torch.manual_seed(1)
    losses, saved, nbytes = [], [], 0
    with harness.fresh(adamw, given) as optimizer:
        for number, size in enumerate(sizes):
            losses.append(step(harness.model, optimizer, tokens(number, size)))
            program = optimizer.engine.programs[-1]
            saved.append(len({value for op in program.ops for value in op.results if value.kind == "a"}))
            nbytes = max(nbytes, peak(program, "host"))
        assert optimizer.engine.tiers.setting.store is None
        return outcome(harness.model, optimizer, losses, []), saved, nbytes


def test_batches_of_other_sizes(harness, tmp_path):
    """With nothing on SSD: where items come to other whole numbers all of them have homes in memory."""
    sizes, given = (5, 3, 1, 5), options(tmp_path, ratios=IN_MEMORY, recompute="all")
    usual, none, _ = trained(harness, given, sizes)
    assert not any(none)
    with saving(Share(1, "host", 4 / 9), Share(2, "host", 5 / 9)):
        found, saved, _ = trained(harness, given, sizes)
    assert found.differences(usual) == []
    assert saved[::3] == [18, 18]
    assert all(saved)


@pytest.mark.parametrize("tier", ["host", "device"])
def test_a_larger_batch_that_has_no_room_computes_again(harness, slow_code, tmp_path, tier):
    """The first one has filled what memory had left, or has what the device is planned to hold."""
    given = options(tmp_path, ratios=IN_MEMORY, recompute="auto", separate_device=tier == "device")
    usual, _, nbytes = trained(harness, {**given, "expert": {**given["expert"], "recompute": "all"}}, (2, 5))
    with saving(Share(2, "device", 1.0)) if tier == "device" else nullcontext():
        found, saved, _ = trained(harness, {**given, "host_memory": nbytes}, (2, 5))
    assert found.differences(usual) == []
    assert saved[0] > 0 == saved[1]


def test_batches_of_many_sizes_take_no_more_storage(harness, tmp_path):
    with saving(Share(2, "ssd", 1.0)), harness.fresh(adamw, options(tmp_path)) as optimizer:
        for number, size in enumerate((5, 3, 1, 4)):
            step(harness.model, optimizer, tokens(number, size))
            assert sum(Path(name).name.startswith("a") for name in files_in(tmp_path)) == 9


@pytest.mark.parametrize(("separate_device", "checkpoint"), [(False, 0.0), (True, 1.0)])
def test_given_ratios_are_kept_and_what_is_saved_is_planned(
    harness, slow_code, caplog, tmp_path, separate_device, checkpoint
):
    """With all on SSD, or but for checkpoints: what memory has left holds activations."""
    changes = {"separate_device": separate_device, "alpha": 0.0}
    changes["ratios"] = {"parameter": 0.0, "checkpoint": checkpoint, "optimizer": 0.0}
    torch.manual_seed(1)
    with (
        caplog.at_level(logging.INFO, "gs_compile.planner.run"),
        harness.fresh(adamw, options(tmp_path, recompute="auto", **changes)) as optimizer,
    ):
        losses = [step(harness.model, optimizer, tokens(number)) for number in range(2)]
        placement, program = optimizer.engine.placement, optimizer.engine.programs[-1]
        found = outcome(harness.model, optimizer, losses, [])
    assert sum(share.part for share in placement.shares) == 1.0
    assert {part.tier for unit in placement.units for parts in (unit.w, unit.s) for part in parts.values()} == {"ssd"}
    assert all(value.tier != "ssd" for op in program.ops for value in op.values if value.kind in ("a", "x"))
    assert "9 of 9 layer inputs keep their activations in host memory" in caplog.text
    usual = harness.train(adamw, options(tmp_path, **changes), num_steps=2)
    assert found.differences(replace(usual, norms=[])) == []
