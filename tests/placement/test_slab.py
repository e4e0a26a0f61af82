"""Offsets in the slab: nothing that is alive together overlaps, and what lives on stays where it is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import PLAIN, Options, options, place, tiered_steps

from gs_compile.passes.lower import StepSpec, flush, lower
from gs_compile.placement import slab
from gs_compile.placement.kinds import slot_of
from gs_compile.placement.placement import StepContext
from gs_compile.placement.slab import PAGE_NBYTES, conflicts, fixed_offsets, packed
from gs_compile.program.verbs import NORMS


@given(tiered_steps(), options(), st.booleans(), st.sampled_from(("vertical", "horizontal")))
def test_programs_of_a_run_agree_and_nothing_overlaps(step, chosen, speculative, schedule):
    num_layers, num_micro_batches, shape = step
    if chosen.clip and speculative:
        chosen = replace(chosen, speculative=True, alpha=0.5)
    placement = place(*step, chosen).laid_out(schedule=schedule)
    spec = StepSpec(num_layers, num_micro_batches, shape=shape, placement=placement)
    leaves = placement.has_late and shape.training  # an evaluation comes after a flush
    modes = [(False, True), *([(True, True), (True, False)] if leaves else [])]
    programs = [lower(replace(spec, context=StepContext(late=late, redo=redo)))[-1] for late, redo in modes]
    programs += [flush(placement)[-1]] if placement.has_late else []
    fixed, kept = fixed_offsets(placement), {slot_of(placement, value).key for value in placement.carried_values}
    for program in [*programs, *(packed(program, placement) for program in programs)]:
        assert not list(conflicts(program.ops, placement, program.offsets))
        updates = any(op.verb == "update" or op.verb in NORMS for op in program.ops)
        apart = set() if updates else kept  # what runs while these are kept has others beside them
        common = {key: offset for key, offset in (fixed.always | fixed.shared).items() if key not in apart}
        assert common.items() <= program.offsets.items()
        assert all(program.offsets[key] >= fixed.nbytes for key in apart & program.offsets.keys())
        assert all(offset % PAGE_NBYTES == 0 for offset in program.offsets.values())


SPANS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 8)), min_size=1, max_size=4)


@given(st.lists(st.tuples(SPANS, st.integers(1, 5)), max_size=12), st.sampled_from((1, 8, 100)))
def test_each_stands_at_the_lowest_offset_that_is_free_for_as_long_as_it_is_alive(wanted, block):
    """Of one that is alive several times, in all of them; whatever the blocks that time is looked through in."""
    spans = [tuple((first, first + length) for first, length in each) for each, _ in wanted]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(slab, "BLOCK", block)
        offsets = slab._Packing(3, 30).fill({at: (nbytes, spans[at]) for at, (_, nbytes) in enumerate(wanted)})
    for at, (_, nbytes) in enumerate(wanted):
        taken = {
            byte
            for other in range(at)
            if any(a < d and c < b for a, b in spans[at] for c, d in spans[other])
            for byte in range(offsets[other], offsets[other] + wanted[other][1])
        }
        free = (start for start in range(3, 1000) if taken.isdisjoint(range(start, start + nbytes)))
        assert offsets[at] == next(free)


def test_late_updates_alone_are_as_far_apart_as_in_a_step_where_layers_between_have_none():
    """Else the head's parameters come into the memory of the embedding's gradients before these are used."""
    shape = replace(PLAIN, frozen=frozenset({0, 1}), first_grad="e")
    placement = place(3, 1, shape, Options(alpha=1.0, parameter_ratio=1.0, optimizer_ratio=0.0, most_numel=4096))
    assert flush(placement)[-1].ops


def test_two_values_in_one_place_are_found():
    placement = place(2, 2)
    program = lower(StepSpec(2, 2, placement=placement))[-1]
    assert list(conflicts(program.ops, placement, dict.fromkeys(program.offsets, 0)))


def test_what_a_transfer_uses_last_is_given_on_later_where_there_is_room():
    placement = place(8, 2, PLAIN, Options(separate=False))
    program = lower(StepSpec(8, 2, placement=placement))[-1]
    needed = dict(program.peaks)["host"]
    assert program.slab_nbytes == packed(program, placement, needed).slab_nbytes == needed
    roomy = packed(program, placement).slab_nbytes
    assert needed < packed(program, placement, roomy - 1).slab_nbytes < roomy


def test_a_deep_step_is_given_a_lag_too_of_less_than_its_layers():
    placement = place(80, 2, PLAIN, Options(separate=False))
    program = lower(StepSpec(80, 2, placement=placement))[-1]
    needed = dict(program.peaks)["host"]
    assert needed < packed(program, placement, needed * 6 // 5).slab_nbytes <= needed * 6 // 5
