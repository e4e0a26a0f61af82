from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import SIDE_NBYTES, Options, options, peaks_of, place, tiered_steps

from gs_compile.options import Ratios
from gs_compile.passes.lower import StepSpec, flush, lower
from gs_compile.placement import boundaries
from gs_compile.placement.placement import Decision, Layout, Placement, StepContext
from gs_compile.placement.shards import QUANTUM, owned, pieces, place_of
from gs_compile.program.ir import Value

SMALL = Options(parameter_ratio=0.3, optimizer_ratio=0.3, checkpoint_ratio=0.5, alpha=0.25)


def test_a_stale_late_part_gives_its_memory_to_the_gradient():
    """Where there is a master, and the device has memory of its own."""
    late = replace(SMALL, alpha=1.0, parameter_ratio=1.0)
    lost = [
        options
        for options in (late, replace(late, has_master=False), replace(late, separate=False))
        if not any(value.kind == "w" for value in place(1, 1, options=options).homes(late=True))
    ]
    assert lost == [late]


@given(st.integers(1, 20), st.integers(1, 8), st.floats(0, 1), st.just(0.0) | st.floats(0, 1))
def test_checkpoints_are_spread_evenly(num_layers, num_micro_batches, host, of_the_rest):
    x_nbytes, device = ((1,),) * num_micro_batches, of_the_rest * (1 - host)
    placement = Placement(
        (),
        Layout(separate=True, x_nbytes=x_nbytes, num_layers=num_layers),
        Decision(ratios=(Ratios(checkpoint=host, device_checkpoint=device),)),
    )
    homes = [placement.activations.home(Value("x", i, j)) for i in range(num_layers) for j in range(num_micro_batches)]
    for stop in range(len(homes) + 1):
        assert abs(homes[:stop].count("host") - host * stop) < 1 + 1e-6
        assert abs(homes[:stop].count("device") - device * stop) < 2 + 1e-6


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 4))
def test_an_element_has_one_place_whatever_number_of_ranks_there_is(trained, frozen, world):
    """It is what its random numbers follow from."""
    cuts = pieces(trained * QUANTUM, (trained + frozen) * QUANTUM)
    found = []
    for rank in range(world):
        for each in owned(cuts, rank, world, 0, world * (trained + frozen) * QUANTUM):
            for at in (0, each.numel - 1):
                assert place_of(cuts, rank, world, each.local + at) == each.whole + at
            found += range(each.whole, each.whole + each.numel, QUANTUM)
    assert sorted(found) == list(range(0, world * (trained + frozen) * QUANTUM, QUANTUM))


def test_nothing_lives_on_a_device_that_is_the_host():
    with pytest.raises(AssertionError, match="no memory of its own"):
        Placement(decision=Decision(ratios=(Ratios(device_checkpoint=0.5, checkpoint=0.5),)))


# Peaks ---------------------------------------------------------------------------------------------------------------


@given(tiered_steps(), options(), st.booleans())
def test_planned_peaks_are_what_is_alive_at_a_time(step, options, late):
    num_layers, num_micro_batches, shape = step
    placement = place(*step, options)
    late = late and placement.has_late
    program = lower(
        StepSpec(num_layers, num_micro_batches, shape=shape, placement=placement, context=StepContext(late=late))
    )[-1]
    _check_peaks(program, placement, late)


def test_peaks_of_updates_alone():
    placement = place(3, 2, options=SMALL)
    program = flush(placement)[-1]
    _check_peaks(program, placement, True)


def _check_peaks(program, placement, late):
    """In host memory there may be gaps between what is alive, and pages that are not filled."""
    alive, planned = _recount(program, placement, late), dict(program.peaks)
    assert alive == peaks_of(program.ops, placement)
    assert {tier: planned[tier] for tier in ("device", "ssd")} == {tier: alive[tier] for tier in ("device", "ssd")}
    assert planned["host"] >= alive["host"]


def _recount(program, placement, late):
    """After each operation, the bytes of all memory that has anything in it; on SSD of all files, which stay."""
    alive = set(placement.homes(late=late))
    most, files = dict.fromkeys(("device", "host", "ssd"), 0), {}
    renamed = {}  # what an alias of host memory is in the memory of
    for op in (None, *program.ops):
        if op is not None:
            alive |= set(op.results)
            alive -= set(op.reads) if op.verb == "free" else set()
            for value in op.results:
                renamed[value] = op.reads[0] if op.verb == "alias" and op.reads[0].tier == "host" else value
        memory = dict(_memory(renamed.get(value, value), placement) for value in alive)
        memory |= files
        files |= {key: nbytes for key, nbytes in memory.items() if key[0] == "ssd"}
        for tier in most:
            most[tier] = max(most[tier], sum(nbytes for (where, _), nbytes in memory.items() if where == tier))
    return most


def _memory(value, placement):
    """The tier and identity of the memory a value is in, and its bytes."""
    unit = placement.by_unit.get(value.unit)
    tier = value.tier or "device"
    if value.kind in ("w", "dw") and not placement.separate and tier == "device":
        tier = "host"
    match value.kind:
        case "x" | "dx":
            return (tier, value), boundaries.at(placement.layout.x_nbytes[value.micro_batch], value.unit)
        case "a":
            return (tier, value), placement.activations.level_of(value).nbytes[value.micro_batch]
        case "side":
            return (tier, value), SIDE_NBYTES
        case "dside":
            return (tier, value), 2 * SIDE_NBYTES
        case "w" if tier == "device" and not value.part:
            staged = sum(part.numel for part in unit.w.values() if part.tier != "device")
            return (tier, ("w", value.unit)), staged * unit.itemsize
        case "w" if tier == "host" and (not value.part or unit.w[value.part].tier == "ssd"):
            zone = sum(part.numel for part in unit.w.values() if part.tier == "ssd")
            return (tier, ("w", value.unit)), zone * unit.itemsize
        case "w":
            return (tier, value), unit.w[value.part].numel * unit.itemsize
        case "s":
            return (tier, value), unit.s[value.part].numel * unit.state_itemsize
        case "dw" if not value.part or (not placement.separate and not unit.trained("early")):
            return (tier, ("dw", value.unit)), unit.num_trained * unit.gradient_itemsize
        case "dw":
            return (tier, value), unit.dw[value.part].numel * unit.gradient_itemsize
    return (tier, value), 0
