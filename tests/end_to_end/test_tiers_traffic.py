"""The bytes a step moves: measured, counted on the program, and written out from first principles, all the same."""

from __future__ import annotations

import re
from itertools import product

import pytest
from closed_forms import ITEMSIZE, STATE, both, spared, units_of, vertical
from pairs import covering
from tiered import LENGTH, adamw, moved, options, shared, step, tokens

from gs_compile.planner.step_plan import nbytes_by_home
from gs_compile.runtime.storage.folder import LOCK, OTHERS

KEEPS_CAPTURES = True
WIDTH, MICRO_BATCH = 32, 2


def meeting(**axes):
    """All settings; those that do not have a pair of settings that no other has are slow."""
    few = [tuple(row.values()) for row in covering(axes, lambda row: True)]
    rows = [pytest.param(*row, marks=[pytest.mark.slow] * (row not in few)) for row in product(*axes.values())]
    return pytest.mark.parametrize(tuple(axes), rows)


def of_bf16(masters):
    """The model, and options for such masters; "model": there are none."""
    harness = shared("model" if masters == "model" else "bf16", num_layers=3, width=WIDTH, vocab_size=301)
    return harness, {} if masters == "model" else {"masters": masters}


def measured(harness, directory, num_micro_batches, **chosen):
    """Bytes by lane and kind of a step with another before it: the lanes, the program and storage say the same.

    What was kept in memory counts as if it were moved, so that a closed form has it.
    """
    with harness.fresh(adamw, options(directory, micro_batch_size=MICRO_BATCH, **chosen)) as optimizer:
        for number in range(2):
            step(harness.model, optimizer, tokens(number, MICRO_BATCH * num_micro_batches))
        optimizer.synchronize()
        step(harness.model, optimizer, tokens(2, MICRO_BATCH * num_micro_batches))
        found = moved(harness.model, optimizer, tokens(3, MICRO_BATCH * num_micro_batches))
        placement = optimizer.engine.placement
        assert {unit.unit: unit.numel for unit in placement.units} == units_of(harness.model)
        kept = spared(placement)
        assert stored_in(directory) == optimizer.engine.planning.ssd_nbytes - checkpoints_on_ssd(optimizer)
    assert found.traced == found.planned
    assert {key: nbytes for key, nbytes in found.traced.items() if key[0].startswith("ssd")} == found.asked
    return both(found.traced, kept)


def stored_in(directory):
    """The bytes of all files of parameters and states."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name not in (LOCK, *OTHERS))
    return sum(path.stat().st_size for path in files if not re.search(r"x\d+_\d+-", path.name))


def checkpoints_on_ssd(optimizer):
    return nbytes_by_home(optimizer.engine.placement).get(("x", "ssd"), 0)


def closed_form(harness, n, masters="model", **chosen):
    x = MICRO_BATCH * LENGTH * WIDTH * ITEMSIZE[masters]
    return vertical(units_of(harness.model), x, n, masters=masters, **chosen)


@meeting(
    num_micro_batches=[1, 4],
    masters=["model", "split", "whole"],
    separate_device=[False, True],
    alpha=[0.0, 1.0],
    checkpoint=[0.0, 0.5],
)
def test_a_step_moves_what_it_has_to(tmp_path, num_micro_batches, masters, separate_device, alpha, checkpoint):
    (harness, of_masters), chosen = of_bf16(masters), {"separate_device": separate_device, "alpha": alpha}
    found = measured(harness, tmp_path, num_micro_batches, ratios={"checkpoint": checkpoint}, **chosen, **of_masters)
    assert found == closed_form(harness, num_micro_batches, checkpoint=checkpoint, masters=masters, **chosen)


@pytest.mark.parametrize(("alpha", "masters"), [(0.0, "split"), (1.0, "split"), (1.0, "whole")])
def test_what_lives_on_the_device_goes_there_once_it_is_updated(tmp_path, alpha, masters):
    ratios, chosen = {"device_parameter": 1.0, "device_checkpoint": 1.0}, {"alpha": alpha, "masters": masters}
    harness, _ = of_bf16(masters)
    found = measured(harness, tmp_path, 3, separate_device=True, ratios=ratios, **chosen)
    everything = closed_form(harness, 3, separate_device=True, **chosen)
    head = {("d2h", "x"): 2, ("h2d", "x"): 2}  # micro-batches of the head's inputs: the third is still there
    x = MICRO_BATCH * LENGTH * WIDTH * 2
    w = sum(units_of(harness.model).values()) * 2
    there = {("h2d", "w"): w, ("d2h", "w"): w * (masters == "split")} | {key: n * x for key, n in head.items()}
    gone = [("ssd_read", "w"), ("ssd_write", "w"), ("ssd_read", "x"), ("ssd_write", "x")]
    assert found == {key: nbytes for key, nbytes in (everything | there).items() if key not in gone and nbytes}


@meeting(masters=["model", "split"], separate_device=[False, True], ratio=[0.3, 0.7])
def test_what_is_cut_moves_in_part(tmp_path, masters, separate_device, ratio):
    ratios = dict.fromkeys(("parameter", "checkpoint", "optimizer"), ratio)
    if separate_device:
        ratios["device_checkpoint"] = 0.2
    if separate_device and masters == "split":
        ratios["device_parameter"] = 0.2
    (harness, of_masters), chosen = of_bf16(masters), {"alpha": 0.5, "separate_device": separate_device}
    found = measured(harness, tmp_path, 3, ratios=ratios, **chosen, **of_masters)
    everything = closed_form(harness, 3, masters, **chosen)
    for key in [key for key in everything if key[0].startswith("ssd")]:
        assert 0 < found[key] < everything[key], key


@meeting(masters=["model", "split", "whole"], separate_device=[False, True], ratio=[0.0, 0.5], alpha=[0.0, 0.5])
def test_a_durable_step_writes_what_lives_in_memory_too(tmp_path, masters, separate_device, ratio, alpha):
    """Once, but for parameters that follow from masters; what lives on SSD costs room and no traffic."""
    (harness, of_masters), ratios = of_bf16(masters), {"parameter": ratio, "optimizer": ratio}
    chosen = {"alpha": alpha, "separate_device": separate_device, "ratios": ratios, **of_masters}
    usual, durable = (measured(harness, tmp_path, 2, durability=each, **chosen) for each in ("off", "step"))
    numel = sum(units_of(harness.model).values())
    in_memory = numel * STATE[masters] - usual["ssd_write", "s"]
    in_memory += 0 if masters == "whole" else numel * ITEMSIZE[masters] - usual["ssd_write", "w"]
    assert durable == usual | ({("ssd_write", "seal"): in_memory} if ratio else {})
