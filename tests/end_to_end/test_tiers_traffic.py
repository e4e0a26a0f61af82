"""The bytes a step moves: measured, counted on the program, and written out from first principles, all the same."""

from __future__ import annotations

import re

import pytest
from tiered import LENGTH, Harness, adamw, gpt2, moved, options, step, tokens

from gs_compile.placement.shards import QUANTUM
from gs_compile.planner.step_plan import nbytes_by_home
from gs_compile.runtime.storage.folder import LOCK
from gs_compile.runtime.storage.manifest import NAME

KEEPS_CAPTURES = True
NUM_LAYERS, WIDTH, VOCABULARY = 3, 32, 301
MOMENTS = 2  # of AdamW, in fp32
MICRO_BATCH = 2
# How often a step needs the parameters of a unit: the prologue and a layer once forward and once backward, the epilogue
# once, as its backward follows at once, and what prologue and epilogue share with each of them.
LOADS = {"e": 2, **dict.fromkeys(range(NUM_LAYERS), 2), "h": 1, "t": 3}


@pytest.fixture(scope="module")
def harnesses():
    return {
        precision: Harness(lambda: gpt2(num_layers=NUM_LAYERS, width=WIDTH, vocab_size=VOCABULARY), precision)
        for precision in ("model", "bf16")
    }


def measured(harness, directory, num_micro_batches, **chosen):
    """Bytes by lane and kind of a step with another before it: the lanes, the program and storage say the same."""
    with harness.fresh(adamw, options(directory, micro_batch_size=MICRO_BATCH, **chosen)) as optimizer:
        for number in range(2):
            step(harness.model, optimizer, tokens(number, MICRO_BATCH * num_micro_batches))
        optimizer.synchronize()
        step(harness.model, optimizer, tokens(2, MICRO_BATCH * num_micro_batches))
        found = moved(harness.model, optimizer, tokens(3, MICRO_BATCH * num_micro_batches))
        assert {unit.unit: unit.numel for unit in optimizer.engine.placement.units} == units_of(harness)
        assert stored_in(directory) == optimizer.engine.planning.ssd_nbytes - checkpoints_on_ssd(optimizer)
    assert found.traced == found.planned
    assert {key: nbytes for key, nbytes in found.traced.items() if key[0].startswith("ssd")} == found.asked
    return found.traced


def stored_in(directory):
    """The bytes of all files of parameters and states."""
    files = (path for path in directory.rglob("*") if path.is_file() and path.name not in (LOCK, NAME))
    return sum(path.stat().st_size for path in files if not re.search(r"x\d+_\d+-", path.name))


def checkpoints_on_ssd(optimizer):
    return nbytes_by_home(optimizer.engine.placement).get(("checkpoints", "ssd"), 0)


def units_of(harness):
    """Elements of each unit: its tensors in whole quanta, and what it shares in a unit of its own."""
    numel = dict.fromkeys(LOADS, 0)
    for (name, _), values in zip(harness.model.named_parameters(), harness.initial, strict=True):
        layer = re.search(r"\.h\.(\d)\.", name)
        unit = int(layer[1]) if layer else {"wte": "t", "wpe": "e", "ln_f": "h"}[name.split(".")[1]]
        numel[unit] += -(-values.numel() // QUANTUM) * QUANTUM
    return numel


def closed_form(harness, n, *, separate_device, checkpoint, alpha):
    """Everything that can be on SSD is there, but for the share `checkpoint` of the checkpoints."""
    has_master = harness.precision == "bf16"
    itemsize = 2 if has_master else 4
    units = units_of(harness)
    numel = sum(units.values())
    loads = sum(units[unit] * LOADS[unit] for unit in units) * itemsize
    x = MICRO_BATCH * LENGTH * WIDTH * itemsize
    num_checkpoints = NUM_LAYERS * n
    on_ssd = num_checkpoints - int(num_checkpoints * checkpoint)
    made_anew = numel * itemsize if has_master and alpha == 1.0 else 0  # from masters, before the first use
    form = {
        ("ssd_read", "w"): loads - made_anew,
        ("ssd_write", "w"): numel * itemsize,
        ("ssd_read", "s"): numel * 4 * (MOMENTS + has_master),
        ("ssd_write", "s"): numel * 4 * (MOMENTS + has_master),
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
@pytest.mark.parametrize("precision", ["model", "bf16"])
@pytest.mark.parametrize(("alpha", "checkpoint"), [(0.0, 0.0), (1.0, 0.5)])
def test_a_step_moves_what_it_has_to(
    harnesses, tmp_path, num_micro_batches, precision, separate_device, alpha, checkpoint
):
    harness, chosen = harnesses[precision], {"separate_device": separate_device, "alpha": alpha}
    found = measured(harness, tmp_path, num_micro_batches, ratios={"checkpoint": checkpoint}, **chosen)
    assert found == closed_form(harness, num_micro_batches, checkpoint=checkpoint, **chosen)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_what_lives_on_the_device_goes_there_once_it_is_updated(harnesses, tmp_path, alpha):
    ratios = {"device_parameter": 1.0, "device_checkpoint": 1.0}
    found = measured(harnesses["bf16"], tmp_path, 3, alpha=alpha, separate_device=True, ratios=ratios)
    everything = closed_form(harnesses["bf16"], 3, separate_device=True, checkpoint=0.0, alpha=alpha)
    head = {("d2h", "x"): 2, ("h2d", "x"): 2}  # micro-batches of the head's inputs: the third is still there
    x = MICRO_BATCH * LENGTH * WIDTH * 2
    there = {("h2d", "w"): sum(units_of(harnesses["bf16"]).values()) * 2} | {key: n * x for key, n in head.items()}
    gone = [("ssd_read", "w"), ("ssd_write", "w"), ("ssd_read", "x"), ("ssd_write", "x")]
    assert found == {key: nbytes for key, nbytes in (everything | there).items() if key not in gone}


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
    everything = closed_form(harnesses[precision], 3, separate_device=separate_device, checkpoint=0.0, alpha=0.5)
    for key in [key for key in found if key[0].startswith("ssd")]:
        assert 0 < found[key] < everything[key]


@pytest.mark.parametrize("separate_device", [False, True])
@pytest.mark.parametrize("precision", ["model", "bf16"])
@pytest.mark.parametrize(("ratio", "alpha"), [(0.0, 0.5), (0.5, 0.0), (0.5, 0.5)])
def test_a_durable_step_writes_what_lives_in_memory_too(harnesses, tmp_path, precision, separate_device, ratio, alpha):
    """Once, but for parameters that follow from masters; what lives on SSD costs room and no traffic."""
    harness, ratios = harnesses[precision], {"parameter": ratio, "optimizer": ratio}
    chosen = {"alpha": alpha, "separate_device": separate_device, "ratios": ratios}
    usual, durable = (measured(harness, tmp_path, 2, durability=each, **chosen) for each in ("off", "step"))
    numel, has_master = sum(units_of(harness).values()), precision == "bf16"
    in_memory = numel * 4 * (MOMENTS + has_master) - usual["ssd_write", "s"]
    in_memory += 0 if has_master else numel * 4 - usual["ssd_write", "w"]
    assert durable == usual | ({("ssd_write", "seal"): in_memory} if ratio else {})
