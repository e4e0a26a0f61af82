"""Saved activations on the tiers: what batches of other sizes save, and what is chosen.

That the same is learned whatever is saved and wherever it lives, test_same_bits.py has.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from saving import saving
from tiered import adamw, files_in, loss_of, options, step, tokens

from gs_compile.placement.levels import Share
from gs_compile.planner.builder import planned_peak

KEEPS_CAPTURES = True
IN_MEMORY = dict.fromkeys(("parameter", "checkpoint", "optimizer"), 1.0)
MODEL = {"num_layers": 3, "dropout": 0.1}


def trained(harness, given, sizes):
    """What steps on batches of these sizes come to, what each has saved, and the memory that they take."""
    saved, nbytes = [], []

    def look(number, optimizer):
        program = optimizer.engine.snapshots[-1]
        saved.append(len({value for op in program.ops for value in op.results if value.kind == "a"}))
        nbytes.append(planned_peak(program, "host"))
        assert optimizer.engine.tiers.setting.store is None

    return harness.train(adamw, given, sizes=sizes, look=look), saved, max(nbytes)


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


@pytest.mark.parametrize("recompute", ["auto", "none"])
def test_steps_save_what_they_would_without_an_evaluation_ahead(harness, slow_code, tmp_path, recompute):
    """The run kept the plan of that, whose layers have nothing to save; it was refused where all was to be saved."""
    found = []
    for evaluates in (False, True):
        ratios = IN_MEMORY | {"checkpoint": None}
        with harness.fresh(adamw, options(tmp_path, ratios=ratios, recompute=recompute)) as optimizer:
            if evaluates:
                with torch.no_grad():
                    loss_of(harness.model, tokens(1, 2))
            torch.manual_seed(1)
            losses = [step(harness.model, optimizer, tokens(number)) for number in range(2)]
            found.append((losses, optimizer.engine.placement))
    assert found[0] == found[1]
    assert found[0][1].decision.shares


def test_batches_of_many_sizes_take_no_more_storage(harness, tmp_path):
    with saving(Share(2, "ssd", 1.0)), harness.fresh(adamw, options(tmp_path)) as optimizer:
        for number, size in enumerate((5, 3, 1, 4)):
            step(harness.model, optimizer, tokens(number, size))
            assert sum(Path(name).name.startswith("a") for name in files_in(tmp_path)) == 9


@pytest.mark.parametrize(
    ("separate_device", "checkpoint"), [pytest.param(False, 0.0, marks=pytest.mark.slow), (True, 1.0)]
)
def test_given_ratios_are_kept_and_what_is_saved_is_planned(
    harness, slow_code, caplog, tmp_path, separate_device, checkpoint
):
    """With all on SSD, or but for checkpoints: what memory has left holds activations."""
    changes = {"separate_device": separate_device, "alpha": 0.0}
    changes["ratios"] = {"parameter": 0.0, "checkpoint": checkpoint, "optimizer": 0.0}
    seen = []
    with caplog.at_level(logging.INFO, "gs_compile.planner.run"):
        found = harness.train(
            adamw,
            options(tmp_path, recompute="auto", **changes),
            num_steps=2,
            look=lambda _, optimizer: seen.append((optimizer.engine.placement, optimizer.engine.snapshots[-1])),
        )
    placement, program = seen[-1]
    assert sum(share.part for share in placement.decision.shares) == 1.0
    assert {part.tier for unit in placement.units for parts in (unit.w, unit.s) for part in parts.values()} == {"ssd"}
    assert all(value.tier != "ssd" for op in program.ops for value in op.values if value.kind in ("a", "x"))
    assert "9 of 9 layer inputs keep their activations in host memory" in caplog.text
    usual = harness.train(adamw, options(tmp_path, **changes), num_steps=2)
    assert found.differences(usual) == []
