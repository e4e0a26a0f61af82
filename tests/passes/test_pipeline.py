"""The stage table of the paper, held against every transfer of a step."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import expecttest
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import Options, after, lowered, options, place, stages, tiered_steps

from gs_compile.passes.lower import flush
from gs_compile.program.ir import FILL, Stage

SMALL = Options(parameter_ratio=0.3, optimizer_ratio=0.3, checkpoint_ratio=0.5, alpha=0.25)

# Verb, kind and tiers, and the stages from the unit's own.
TABLE = {
    "prefetch w ssd host": -2,
    "prefetch w host device": -1,
    "prefetch x ssd host": -1,
    "offload x host ssd": 1,
    "offload dw device host": 1,
    "prefetch s ssd host": 1,
    "empty w": 2,
    "update w": 2,
    "offload w host ssd": 3,
    "offload s host ssd": 3,
    "home w host device": 3,
    "late prefetch w ssd host": -3,
    "late prefetch s ssd host": -3,
    "late empty w": -2,
    "late update w": -2,
    "late offload w host ssd": -1,
    "late offload s host ssd": -1,
    "late home w host device": -1,
}
# What else it is where the device reads host memory itself.
EARLY = ("prefetch s ssd host", "empty w", "update w", "offload w host ssd", "offload s host ssd")
ONE_MEMORY = {"prefetch w ssd host": 1} | dict.fromkeys(EARLY, -1)


class TestText(expecttest.TestCase):
    def test_one_memory(self):
        placement = place(3, 2, options=replace(SMALL, separate=False))
        program = after(lowered((3, 2), placement, late=True), "pipeline")
        self.assertExpectedInline(
            stages(program, "backward 1"),
            """\
# backward 1   micro-batches 1 0
x0_0.host = prefetch(x0_0.ssd)
w0a.host, w0b.host = prefetch(w0a.ssd, w0b.ssd)
s1b.host = prefetch(s1b.ssd)
offload(whb.host, into=whb.ssd)
offload(shb.host, into=shb.ssd)
dw2b.host = offload(dw2.device)
w2a.host = empty()
update(dw2.device, into=(w2a.host, s2a.host, s2b.host))
w1.device = gather(w1a.host, w1b.host, w1c.host)
dw1.device = zeros()
x1_1.device = alias(x1_1.host)
dx1_1.device = backward(x1_1.device, dx2_1.device, w1.device, into=dw1.device)
x1_0.device = alias(x1_0.host)
dx1_0.device = backward(x1_0.device, dx2_0.device, w1.device, into=dw1.device)
norm1.device = norm(dw1.device)
""",
        )


@pytest.mark.parametrize("separate", [True, False])
def test_each_operation_of_a_layer_stands_in_the_stage_of_the_table(separate):
    """In one memory no stage is spent on the way to and from the device."""
    seen = set()
    for chosen in ({}, {"has_master": False}, {"device_parameter": 0.7, "parameter_ratio": 0.0}):
        if separate or "device_parameter" not in chosen:
            placement = place(9, 2, options=replace(SMALL, separate=separate, **chosen))
            seen |= set(_checked(lowered((9, 2), placement, late=True), separate))
    copies = {name for name in TABLE if "device" in name and "dw" not in name}
    assert seen == TABLE.keys() - (set() if separate else copies)


def _checked(snapshots, separate):
    """The rows by which operations of layer 4 stand where they should."""
    before, program = after(snapshots, "offload"), after(snapshots, "pipeline")
    index = {stage: at for at, stage in enumerate(dict.fromkeys(op.stage for op in before.ops if op.stage != FILL))}
    moved = defaultdict(list)
    for op in program.ops:
        moved[replace(op, stage=FILL)].append(index.get(op.stage))
    for op in before.ops:
        at = moved[replace(op, stage=FILL)].pop(0)
        name = ("late " if op.stage == FILL else "") + _name(op)
        if name in TABLE and op.values[0].unit == 4:
            own = index[Stage("forward", 4) if op.stage == FILL else op.stage]
            assert at == own + TABLE[name] + (0 if separate else ONE_MEMORY.get(name, 0)), str(op)
            yield name


@given(tiered_steps(), options(), st.booleans())
def test_parameters_go_to_the_device_in_pieces_beside_the_micro_batches(step, options, late):
    program = lowered(step, place(*step, replace(options, separate=True)), late=late)[-1]
    pieces = defaultdict(list)
    for stage, ops in program.stages():
        position = -1
        for op in ops:
            position += op.micro_batch is not None
            if op.results and op.results[0].piece is not None:
                pieces[op.results[0].unit, stage].append((op.results[0].piece, position))
    assert len(pieces) == sum(op.verb == "gather" and op.reads[0].piece is not None for op in program.ops)
    used = {(op.results[0].unit, op.stage) for op in program.ops if op.verb == "gather"}
    for (unit, stage), found in pieces.items():
        assert [piece for piece, _ in found] == list(range(step[1]))
        if stage != FILL and (unit, stage) not in used:  # piece k before the k-th computation, if its place is free
            assert [place + 1 for _, place in found] == list(range(step[1]))


@given(tiered_steps(), options())
def test_activations_come_one_micro_batch_ahead(step, options):
    program = after(lowered(step, place(*step, replace(options, separate=True))), "pipeline")
    computations = [op for op in program.ops if op.micro_batch is not None]
    number = -1
    for op in program.ops:
        number += op.micro_batch is not None
        value = (*op.results, *op.reads)[0]
        if op.verb == "prefetch" and op.lane == "h2d" and value.kind in ("x", "dx"):
            reader = next(k for k in range(number + 1, len(computations)) if value in computations[k].reads)
            # [1] it comes while the computation before the reader's runs
            assert reader - number == 2 or (reader - number == 1 and _just_left(program, value, op))


def test_the_first_checkpoint_of_a_stage_has_never_left():
    program = after(lowered((3, 2), place(3, 2, options=SMALL)), "pipeline")
    fetched = [str(op.results[0]) for op in program.ops if op.lane == "h2d" and op.stage.phase == "forward"]
    assert [name for name in fetched if name.startswith("x")] == ["x0_1.device", "x1_0.device", "x2_1.device"]


def test_outputs_leave_as_soon_as_they_are_made():
    program = after(lowered((3, 3), place(3, 3, options=SMALL)), "pipeline")
    for before, op in zip(program.ops, program.ops[1:], strict=False):
        if op.lane == "d2h" and op.reads[0].kind in ("x", "dx"):
            assert op.reads[0] in before.results


@given(tiered_steps(), options(), st.booleans())
def test_a_unit_is_not_changed_while_it_is_loaded(step, options, late):
    """All pieces of one load are of one state. (In one memory the whole is its parts, and `verify` has a law.)"""
    program = lowered(step, place(*step, replace(options, separate=True)), late=late)[-1]
    loading = set()
    for op in program.ops:
        if op.verb in ("update", "empty"):
            assert not loading & {value.unit for value in (*op.results, *op.into)}
        elif op.verb == "gather":
            loading.discard(op.results[0].unit)
        elif op.results and op.results[0].piece is not None:
            loading.add(op.results[0].unit)


@pytest.mark.parametrize("separate", [True, False])
def test_states_of_updates_after_the_last_backward_may_be_read_earlier(separate):
    plain, found = ({}, {})
    for ahead, read in ((0, plain), (2, found)):
        program = lowered((4, 2), place(4, 2, options=Options(separate=separate, ahead=ahead)))[-1]
        stages = list(dict.fromkeys(op.stage for op in program.ops))
        states = [op for op in program.ops if op.verb == "prefetch" and op.reads[0].kind == "s"]
        read |= {op.reads[0].unit: stages.index(op.stage) for op in states}
        last = {value.unit for op in program.ops if op.verb == "update" and op.stage == stages[-1] for value in op.into}
    assert {unit: plain[unit] - at for unit, at in found.items()} == {unit: 2 * (unit in last) for unit in plain}
    assert {"e"} <= last < set(plain)


@pytest.mark.parametrize("separate", [True, False])
def test_all_that_is_read_from_ssd_may_be_read_earlier(separate):
    """By as many stages, but where that is before the step, or before what is read has been written or freed."""

    def reads(lookahead):
        program = lowered((8, 2), place(8, 2, options=Options(separate=separate, lookahead=lookahead)))[-1]
        stages = list(dict.fromkeys(op.stage for op in program.ops))
        return [(op.reads, stages.index(op.stage)) for op in program.ops if op.lane == "ssd_read"], len(stages)

    (plain, num_stages), (found, _) = reads(0), reads(2)
    assert sorted(str(values) for values, _ in plain) == sorted(str(values) for values, _ in found)
    backward = {values: at for values, at in plain if num_stages // 2 + 2 < at < num_stages - 1}
    assert {"w", "x", "s"} == {values[0].kind for values in backward}
    earlier = {values: at for values, at in found if values in backward}  # the last: parameters come twice
    assert earlier == {values: at - 2 for values, at in backward.items()}


def test_updates_alone_follow_each_other():
    placement = place(3, 1, options=SMALL)
    program = after(flush(placement), "pipeline")
    updates = [op.into[0].unit for op in program.ops if op.verb == "update"]
    assert updates == ["e", 0, 1, 2, "h"]
    assert flush(placement.decided(ahead=2))[-1].ops == flush(placement)[-1].ops


def _name(op):
    value = (*op.results, *op.into)[0] if op.results or op.into else op.reads[0]
    if op.verb not in ("prefetch", "offload"):
        return f"{op.verb} {value.kind}"
    if op.into and op.verb == "prefetch":
        return f"home {value.kind} {op.reads[0].tier} {value.tier}"
    return f"{op.verb} {value.kind} {op.reads[0].tier} {value.tier}"


def _just_left(program, value, op):
    """Whether it comes back where only the reader is left to wait for."""
    at = program.ops.index(op)
    home = value._replace(tier="host")
    maker = max(k for k in range(at) if home in program.ops[k].results)
    return not any(between.micro_batch is not None for between in program.ops[maker:at])
