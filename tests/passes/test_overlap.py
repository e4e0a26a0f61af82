from __future__ import annotations

from dataclasses import replace

import expecttest
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import RESIDENT, Options, after, lowered, options, place, stages, tiered_steps, train
from toy import LEARNING_RATE, MOMENTUM, TieredToy

from gs_compile.program.ir import FILL, StepShape, Value


class TestText(expecttest.TestCase):
    def test_three_layers(self):
        program = after(lowered((3, 2), place(3, 2, options=SMALL), late=True), "overlap")
        self.assertExpectedInline(
            stages(program, "fill", "forward 1", "backward 1"),
            """\
# fill   micro-batches
update(dweb.device, into=(wec.device, wed.device, sec.device, sed.device))
update(dw0b.device, into=(w0c.device, w0d.device, s0c.device, s0d.device))
update(dw1b.device, into=(w1c.device, w1d.device, s1c.device, s1d.device))
update(dw2b.device, into=(w2c.device, w2d.device, s2c.device, s2d.device))
update(dwhb.device, into=(whc.device, whd.device, shc.device, shd.device))
# forward 1   micro-batches 1 0
w1.device = gather(w1a.device, w1b.device, w1c.device, w1d.device, w1e.device)
x2_1.device = forward(x1_1.device, w1.device)
x2_0.device = forward(x1_0.device, w1.device)
# backward 1   micro-batches 1 0
w1.device = gather(w1a.device, w1b.device, w1c.device, w1d.device, w1e.device)
dw1.device = zeros()
dx1_1.device = backward(x1_1.device, dx2_1.device, w1.device, into=dw1.device)
dx1_0.device = backward(x1_0.device, dx2_0.device, w1.device, into=dw1.device)
norm1.device = norm(dw1.device)
dw1b.device = alias(dw1.device)
update(dw1.device, into=(w1a.device, w1b.device, s1a.device, s1b.device))
""",
        )

    def test_clip(self):
        placement = place(1, 1, options=replace(SMALL, alpha=1.0, clip=True))
        program = after(lowered((1, 1), placement, late=True), "overlap")
        self.assertExpectedInline(
            stages(program, "fill", "backward 0", "drain"),
            """\
# fill   micro-batches
update(dwea.device, scale.device, into=(wea.device, web.device, sea.device, seb.device))
update(dw0a.device, scale.device, into=(w0a.device, w0b.device, s0a.device, s0b.device))
update(dwha.device, scale.device, into=(wha.device, whb.device, sha.device, shb.device))
# backward 0   micro-batches 0
w0.device = gather(w0a.device, w0b.device)
dw0.device = zeros()
dx0_0.device = backward(x0_0.device, dx1_0.device, w0.device, into=dw0.device)
norm0.device = norm(dw0.device)
dw0a.device = alias(dw0.device)
# drain   micro-batches
scale.device = clip(norme.device, norm0.device, normh.device)
""",
        )


SMALL = Options(parameter_ratio=0.5, optimizer_ratio=0.5, checkpoint_ratio=0.5, alpha=0.25)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_equals_training_without_this_package(alpha):
    """float64: the sums of a batch in another order differ by far less than 1e-9."""
    shape = StepShape(sides=frozenset("e"), side_gradients=frozenset("e"))
    placement = place(2, 3, shape, replace(RESIDENT, has_master=False, alpha=alpha))
    toy = TieredToy(2, 3, shape, placement=placement)
    first = toy.home()
    _, found = train(2, 3, shape, placement, "overlap", (True, True, True))
    w = toy.whole(first)
    momentum = {unit: torch.zeros_like(flat) for unit, flat in w.items()}
    for number in range(3):
        toy = TieredToy(2, 3, shape, seed=number, placement=placement)
        for unit in placement.units:
            parts = {part.letter: w[f"w{unit.unit}"][part.start : part.stop] for part in unit.w.values()}
            toy.weights[unit.unit] = toy.gather(Value("w", unit.unit), parts)
        _, gradients = toy.plain()
        for unit in placement.units:
            name = f"w{unit.unit}"
            for group in unit.trained():
                gradient = toy.split(unit.gradient(group), gradients[unit.unit])
                for part, piece in zip(group.w, gradient.split([p.numel for p in group.w]), strict=True):
                    here = slice(part.start, part.stop)
                    momentum[name][here] = MOMENTUM * momentum[name][here] + piece
                    w[name][here] -= LEARNING_RATE * momentum[name][here]
    for name, flat in w.items():
        if name.startswith("w"):
            torch.testing.assert_close(found[name], flat, rtol=1e-9, atol=1e-9)


@given(tiered_steps(), options(), st.booleans())
def test_each_trained_part_is_updated_once(step, options, late):
    placement = place(*step, options)
    program = after(lowered(step, placement, late=late), "overlap")
    updates = [op for op in program.ops if op.verb == "update"]
    early = [] if not step[2].training else [p for unit in placement.units for p in _parts(unit, "early")]
    late_parts = [p for unit in placement.units for p in _parts(unit, "late")] if late else []
    assert sorted(map(str, (v for op in updates if op.stage != FILL for v in op.into))) == sorted(map(str, early))
    assert sorted(map(str, (v for op in updates if op.stage == FILL for v in op.into))) == sorted(map(str, late_parts))


def test_late_updates_come_in_the_order_of_first_use():
    step = 2, 1, StepShape(tied=frozenset("eh"))
    program = after(lowered(step, place(*step, replace(SMALL, alpha=1.0)), late=True), "overlap")
    assert [op.into[0].unit for op in program.ops if op.verb == "update"] == ["e", "t", 0, 1, "h"]


def test_clipping_has_no_early_updates():
    placement = place(2, 1, options=SMALL).laid_out(clip=True).decided(alpha=1.0)  # its units are cut for another alpha
    with pytest.raises(AssertionError, match="wait for the norm"):
        lowered((2, 1), placement)


def test_where_updates_do_not_wait_nothing_is_clipped():
    plain, clipped = (place(2, 1, options=replace(SMALL, clip=clip)) for clip in (False, True))
    assert lowered((2, 1), clipped) == lowered((2, 1), plain)


def _parts(unit, when):
    return [
        unit.value(kind, part, "device")
        for group in unit.trained(when)
        for kind, parts in (("w", group.w), ("s", group.s))
        for part in parts
    ]
