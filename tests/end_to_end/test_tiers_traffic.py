"""The bytes a step moves: measured, counted on the program, and written out from first principles, all the same."""

from __future__ import annotations

import re

import pytest
from tiered import LENGTH, Harness, adamw, gpt2, moved, options, step, tokens

from gs_compile.placement.kinds import nbytes_of
from gs_compile.placement.shards import QUANTUM
from gs_compile.planner.step_plan import nbytes_by_home
from gs_compile.runtime.storage.folder import LOCK
from gs_compile.runtime.storage.manifest import NAME

KEEPS_CAPTURES = True
NUM_LAYERS, WIDTH, VOCABULARY = 3, 32, 301
STATE = {"model": 8, "split": 10, "whole": 12}  # bytes of AdamW's moments, and of bf16's masters or their rests
MICRO_BATCH = 2
# How often a step needs the parameters of a unit: the prologue and a layer once forward and once backward, the epilogue
# once, as its backward follows at once, and what prologue and epilogue share with each of them.
KEPT = {"t": 2}  # loads that a unit is spared where it is kept for the next step
LOADS = {"e": 2, **dict.fromkeys(range(NUM_LAYERS), 2), "h": 1, "t": 3}


@pytest.fixture(scope="module")
def harnesses():
    return {
        precision: Harness(lambda: gpt2(num_layers=NUM_LAYERS, width=WIDTH, vocab_size=VOCABULARY), precision)
        for precision in ("model", "bf16")
    }


def of_bf16(masters):
    """The precision, and options for such masters; "model": there are none."""
    return ("model", {}) if masters == "model" else ("bf16", {"masters": masters})


def measured(harness, directory, num_micro_batches, **chosen):
    """Bytes by lane and kind of a step with another before it: the lanes, the program and storage say the same.

    What was kept from the step before counts as if it were read, so that a closed form has it.
    """
    with harness.fresh(adamw, options(directory, micro_batch_size=MICRO_BATCH, **chosen)) as optimizer:
        for number in range(2):
            step(harness.model, optimizer, tokens(number, MICRO_BATCH * num_micro_batches))
        optimizer.synchronize()
        step(harness.model, optimizer, tokens(2, MICRO_BATCH * num_micro_batches))
        found = moved(harness.model, optimizer, tokens(3, MICRO_BATCH * num_micro_batches))
        placement = optimizer.engine.placement
        assert {unit.unit: unit.numel for unit in placement.units} == units_of(harness)
        kept = sum(nbytes_of(placement, value) * KEPT.get(value.unit, 1) for value in placement.carried_values)
        assert stored_in(directory) == optimizer.engine.planning.ssd_nbytes - checkpoints_on_ssd(optimizer)
    assert found.traced == found.planned
    assert {key: nbytes for key, nbytes in found.traced.items() if key[0].startswith("ssd")} == found.asked
    return {**found.traced, ("ssd_read", "w"): found.traced.get(("ssd_read", "w"), 0) + kept} if kept else found.traced


def stored_in(directory):
    """The bytes of all files of parameters and states."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name not in (LOCK, NAME))
    return sum(path.stat().st_size for path in files if not re.search(r"x\d+_\d+-", path.name))


def checkpoints_on_ssd(optimizer):
    return nbytes_by_home(optimizer.engine.placement).get(("x", "ssd"), 0)


def units_of(harness):
    """Elements of each unit: its tensors in whole quanta, and what it shares in a unit of its own."""
    numel = dict.fromkeys(LOADS, 0)
    for (name, _), values in zip(harness.model.named_parameters(), harness.initial, strict=True):
        layer = re.search(r"\.h\.(\d)\.", name)
        unit = int(layer[1]) if layer else {"wte": "t", "wpe": "e", "ln_f": "h"}[name.split(".")[1]]
        numel[unit] += -(-values.numel() // QUANTUM) * QUANTUM
    return numel


def closed_form(harness, n, *, separate_device, checkpoint, alpha, masters="model"):
    """Everything that can be on SSD is there, but for the share `checkpoint` of the checkpoints."""
    itemsize = 2 if harness.precision == "bf16" else 4
    units = units_of(harness)
    numel = sum(units.values())
    loads = sum(units[unit] * LOADS[unit] for unit in units) * itemsize
    x = MICRO_BATCH * LENGTH * WIDTH * itemsize
    num_checkpoints = NUM_LAYERS * n
    on_ssd = num_checkpoints - int(num_checkpoints * checkpoint)
    made_anew = numel * itemsize if masters == "whole" and alpha == 1.0 else 0  # from masters, before the first use
    form = {
        ("ssd_read", "w"): loads - made_anew,
        ("ssd_write", "w"): numel * itemsize,
        ("ssd_read", "s"): numel * STATE[masters],
        ("ssd_write", "s"): numel * STATE[masters],
        ("ssd_read", "x"): on_ssd * x,
        ("ssd_write", "x"): on_ssd * x,
        ("d2h", "x"): on_ssd * x,  # collected for the SSD
    }
    if separate_device:
        boundaries = (NUM_LAYERS + 1) * (n - 1)  # between stages, one micro-batch stays on the device
        form |= {
            ("h2d", "w"): loads,
            ("d2h", "dw"): numel * 4,
            ("d2h", "x"): (num_checkpoints + n - 1) * x,  # the epilogue's inputs too
            ("h2d", "x"): (num_checkpoints + boundaries) * x,
            ("d2h", "dx"): boundaries * x,
            ("h2d", "dx"): boundaries * x,
        }
    return {key: nbytes for key, nbytes in form.items() if nbytes}


@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize("separate_device", [False, True])
@pytest.mark.parametrize("masters", ["model", "split", "whole"])
@pytest.mark.parametrize(("alpha", "checkpoint"), [(0.0, 0.0), (1.0, 0.5)])
def test_a_step_moves_what_it_has_to(
    harnesses, tmp_path, num_micro_batches, masters, separate_device, alpha, checkpoint
):
    precision, of_masters = of_bf16(masters)
    harness, chosen = harnesses[precision], {"separate_device": separate_device, "alpha": alpha}
    found = measured(harness, tmp_path, num_micro_batches, ratios={"checkpoint": checkpoint}, **chosen, **of_masters)
    assert found == closed_form(harness, num_micro_batches, checkpoint=checkpoint, masters=masters, **chosen)


@pytest.mark.parametrize(("alpha", "masters"), [(0.0, "split"), (1.0, "split"), (1.0, "whole")])
def test_what_lives_on_the_device_goes_there_once_it_is_updated(harnesses, tmp_path, alpha, masters):
    ratios, chosen = {"device_parameter": 1.0, "device_checkpoint": 1.0}, {"alpha": alpha, "masters": masters}
    found = measured(harnesses["bf16"], tmp_path, 3, separate_device=True, ratios=ratios, **chosen)
    everything = closed_form(harnesses["bf16"], 3, separate_device=True, checkpoint=0.0, **chosen)
    head = {("d2h", "x"): 2, ("h2d", "x"): 2}  # micro-batches of the head's inputs: the third is still there
    x = MICRO_BATCH * LENGTH * WIDTH * 2
    w = sum(units_of(harnesses["bf16"]).values()) * 2
    there = {("h2d", "w"): w, ("d2h", "w"): w * (masters == "split")} | {key: n * x for key, n in head.items()}
    gone = [("ssd_read", "w"), ("ssd_write", "w"), ("ssd_read", "x"), ("ssd_write", "x")]
    assert found == {key: nbytes for key, nbytes in (everything | there).items() if key not in gone and nbytes}


@pytest.mark.parametrize("separate_device", [False, True])
@pytest.mark.parametrize("precision", ["model", "bf16"])
@pytest.mark.parametrize("ratio", [0.3, 0.7])
def test_what_is_cut_moves_in_part(harnesses, tmp_path, precision, separate_device, ratio):
    ratios = dict.fromkeys(("parameter", "checkpoint", "optimizer"), ratio)
    if separate_device:
        ratios["device_checkpoint"] = 0.2
    if separate_device and precision == "bf16":
        ratios["device_parameter"] = 0.2
    moves = {"alpha": 0.5, "separate_device": separate_device, "ratios": ratios}
    found = measured(harnesses[precision], tmp_path, 3, **moves)
    masters = "split" if precision == "bf16" else "model"
    chosen = {"checkpoint": 0.0, "alpha": 0.5, "masters": masters}
    everything = closed_form(harnesses[precision], 3, separate_device=separate_device, **chosen)
    for key in [key for key in found if key[0].startswith("ssd")]:
        assert 0 < found[key] < everything[key]


@pytest.mark.parametrize("separate_device", [False, True])
@pytest.mark.parametrize("masters", ["model", "split", "whole"])
@pytest.mark.parametrize(("ratio", "alpha"), [(0.0, 0.5), (0.5, 0.0), (0.5, 0.5)])
def test_a_durable_step_writes_what_lives_in_memory_too(harnesses, tmp_path, masters, separate_device, ratio, alpha):
    """Once, but for parameters that follow from masters; what lives on SSD costs room and no traffic."""
    precision, of_masters = of_bf16(masters)
    harness, ratios = harnesses[precision], {"parameter": ratio, "optimizer": ratio}
    chosen = {"alpha": alpha, "separate_device": separate_device, "ratios": ratios, **of_masters}
    usual, durable = (measured(harness, tmp_path, 2, durability=each, **chosen) for each in ("off", "step"))
    numel, itemsize = sum(units_of(harness).values()), 2 if precision == "bf16" else 4
    in_memory = numel * STATE[masters] - usual["ssd_write", "s"]
    in_memory += 0 if masters == "whole" else numel * itemsize - usual["ssd_write", "w"]
    assert durable == usual | ({("ssd_write", "seal"): in_memory} if ratio else {})
