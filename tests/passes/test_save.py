"""Saved activations in a step program: where they come from, move and end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import expecttest
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import SAVED_NBYTES, Options, after, lowered, options, place, stages, tiered_steps

from gs_compile.errors import ProgramError
from gs_compile.placement.levels import Level, Share, Shares, items
from gs_compile.placement.traffic import traffic
from gs_compile.placement.verify import verify
from gs_compile.program.ir import Value

SSD = Options(parameter_ratio=1.0, optimizer_ratio=1.0, shares=(Share(1, "ssd", 0.5),))


class TestText(expecttest.TestCase):
    def test_on_ssd_each_micro_batch_moves_by_itself(self):
        program = after(lowered((1, 4), place(1, 4, options=SSD)), "pipeline")
        lines = stages(program, "forward 0", "backward e", "backward h", "backward 0").splitlines()
        self.assertExpectedInline(
            "\n".join(line for line in lines if "a0" in line or "forward" in line),
            """\
# forward 0   micro-batches 0 1 2 3
x1_0.device = forward(x0_0.device, w0.device)
x1_1.device, a0_1.device = forward(x0_1.device, w0.device)
a0_1.host = offload(a0_1.device)
a0_1.ssd = offload(a0_1.host)
x1_2.device = forward(x0_2.device, w0.device)
x1_3.device, a0_3.device = forward(x0_3.device, w0.device)
a0_3.host = offload(a0_3.device)
a0_3.ssd = offload(a0_3.host)
a0_1.host = prefetch(a0_1.ssd)
a0_1.device = prefetch(a0_1.host)
a0_3.host = prefetch(a0_3.ssd)
dx0_1.device = backward(a0_1.device, dx1_1.device, w0.device, into=dw0.device)
a0_3.device = prefetch(a0_3.host)
dx0_3.device = backward(a0_3.device, dx1_3.device, w0.device, into=dw0.device)""",
        )

    def test_in_one_memory(self):
        program = after(lowered((1, 2), place(1, 2, options=replace(SSD, separate=False))), "pipeline")
        lines = stages(program, "forward 0", "backward h", "backward 0").splitlines()
        self.assertExpectedInline(
            "\n".join(line for line in lines if "a0" in line or "forward" in line),
            """\
# forward 0   micro-batches 0 1
x1_0.device = forward(x0_0.device, w0.device)
x1_1.device, a0_1.device = forward(x0_1.device, w0.device)
a0_1.host = offload(a0_1.device)
a0_1.ssd = offload(a0_1.host)
a0_1.host = prefetch(a0_1.ssd)
a0_1.device = alias(a0_1.host)
dx0_1.device = backward(a0_1.device, dx1_1.device, w0.device, into=dw0.device)""",
        )


@given(tiered_steps(), options(), st.booleans())
def test_bytes_are_those_of_the_items(step, options, horizontal):
    """By hand: what is saved goes to its home and comes back once, in place of the layer's input unless it reads that."""
    num_layers, num_micro_batches, shape = step
    placement = place(num_layers, num_micro_batches, shape, options)
    placement = placement.laid_out(schedule="horizontal" if horizontal and shape.training else "vertical")
    program = lowered(step, placement)[-1]
    backwards = {(op.unit, op.micro_batch) for op in program.ops if op.verb == "backward"}
    expected = Counter()
    for unit, micro_batch in backwards:
        share = placement.activations.share_of(Value("a", unit, micro_batch))
        if share is None or share.tier == "device":
            continue
        nbytes = share.level * SAVED_NBYTES
        if options.separate:
            expected["d2h"] += nbytes
            expected["h2d"] += nbytes
        if share.tier == "ssd":
            expected["d2h"] += nbytes * (not options.separate)
            expected["ssd_write"] += nbytes
            expected["ssd_read"] += nbytes
    assert {lane: nbytes for (lane, kind), nbytes in traffic(program, placement).items() if kind == "a"} == expected
    for op in program.ops:
        if op.verb == "backward":
            level = placement.activations.level_of(Value("a", op.unit, op.micro_batch))
            assert [v.kind for v in op.reads[:2] if v.kind in "xa"] == (
                ["x"] if level is None else ["x", "a"] if level.reads_input else ["a"]
            )


@given(st.integers(1, 12), st.integers(1, 6), st.lists(st.floats(0, 0.33), min_size=3, max_size=3))
def test_items_that_stay_are_the_topmost_and_those_that_move_are_spread(num_layers, num_micro_batches, parts):
    tiers = ("device", "host", "ssd")
    shares = [Share(1, tier, part, tier == "device") for tier, part in zip(tiers, parts, strict=True)]
    level = Level((1,) * num_micro_batches, False)
    found = items(shares, [(level,)] * num_layers, num_micro_batches)
    number = num_layers * num_micro_batches
    for share in shares:
        assert list(found.values()).count(share) == int(share.part * number + 1e-9 * number)
    every = [(unit, j) for unit in range(num_layers) for j in range(num_micro_batches)]
    stay = [unit for (unit, _), share in found.items() if share.tier == "device"]
    others = [item for item in every if item not in found or found[item].tier != "device"]
    assert min(stay, default=num_layers) >= max((unit for unit, _ in others), default=0)
    moving = [found[item].tier == "host" if item in found else False for item in others]
    for stop in range(len(others) + 1):
        assert abs(sum(moving[:stop]) - sum(moving) * stop / max(len(others), 1)) < 1 + 1e-6


def test_a_layer_without_levels_saves_its_input_alone():
    levels = [(), (Level((1,), False),), ()]
    assert items([Share(2, "host", 1.0)], levels, 1) == {(1, 0): Share(1, "host", 1.0)}


def test_a_backward_reads_what_its_level_saves():
    placement = place(1, 2, options=SSD)
    program = lowered((1, 2), placement)[-1]
    (ratios,) = placement.decision.ratios
    with pytest.raises(ProgramError, match=r"it reads a, and x is saved for it"):
        verify(program, placement.decided(shares=Shares(), ratios=(replace(ratios, checkpoint=0.5),)))
