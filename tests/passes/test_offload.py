from __future__ import annotations

from collections import Counter
from dataclasses import replace

import expecttest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import reference
from tiers import X_NBYTES, Options, after, lowered, options, place, stages, tiered_steps
from toy import Toy

from gs_compile.placement.traffic import traffic

SMALL = Options(parameter_ratio=0.3, optimizer_ratio=0.3, checkpoint_ratio=0.5, alpha=0.25)


class TestText(expecttest.TestCase):
    def test_separate_memories(self):
        program = after(lowered((1, 2), place(1, 2, options=SMALL), late=True), "offload")
        self.assertExpectedInline(
            stages(program, "forward e", "backward 0"),
            """\
# forward e   micro-batches 1 0
web.host = prefetch(web.ssd)
we.device[0] = prefetch(wea.host, web.host, wec.host)
we.device[1] = prefetch(wea.host, web.host, wec.host)
we.device = gather(we.device[0], we.device[1])
x0_1.device = embed(batch_1, we.device)
x0_1.host = offload(x0_1.device)
x0_0.device = embed(batch_0, we.device)
x0_0.host = offload(x0_0.device)
x0_0.ssd = offload(x0_0.host)
# backward 0   micro-batches 0 1
x0_0.host = prefetch(x0_0.ssd)
w0b.host, w0c.host = prefetch(w0b.ssd, w0c.ssd)
w0.device[0] = prefetch(w0a.host, w0b.host, w0c.host)
w0.device[1] = prefetch(w0a.host, w0b.host, w0c.host)
w0.device = gather(w0.device[0], w0.device[1])
dw0.device = zeros()
x0_0.device = prefetch(x0_0.host)
dx0_0.device = backward(x0_0.device, dx1_0.device, w0.device, into=dw0.device)
dx0_0.host = offload(dx0_0.device)
x0_1.device = prefetch(x0_1.host)
dx1_1.device = prefetch(dx1_1.host)
dx0_1.device = backward(x0_1.device, dx1_1.device, w0.device, into=dw0.device)
norm0.device = norm(dw0.device)
dw0a.host, dw0b.host = offload(dw0.device)
w0b.host = empty()
s0b.host = prefetch(s0b.ssd)
update(dw0a.host, into=(w0a.host, w0b.host, s0a.host, s0b.host))
offload(w0b.host, into=w0b.ssd)
offload(s0b.host, into=s0b.ssd)
""",
        )

    def test_homes_on_the_device(self):
        """Checkpoint x0_1 stays there, and so do the first tensors of the layer."""
        options = Options(device_parameter=0.7, device_checkpoint=0.5, alpha=0.5)
        program = after(lowered((1, 2), place(1, 2, options=options), late=True), "offload")
        self.assertExpectedInline(
            stages(program, "backward 0"),
            """\
# backward 0   micro-batches 0 1
x0_0.host = prefetch(x0_0.ssd)
w0b.host, w0d.host = prefetch(w0b.ssd, w0d.ssd)
w0.device[0] = prefetch(w0b.host, w0d.host)
w0.device[1] = prefetch(w0b.host, w0d.host)
w0.device = gather(w0.device[0], w0.device[1], w0a.device, w0c.device)
dw0.device = zeros()
x0_0.device = prefetch(x0_0.host)
dx0_0.device = backward(x0_0.device, dx1_0.device, w0.device, into=dw0.device)
dx0_0.host = offload(dx0_0.device)
dx1_1.device = prefetch(dx1_1.host)
dx0_1.device = backward(x0_1.device, dx1_1.device, w0.device, into=dw0.device)
norm0.device = norm(dw0.device)
dw0a.host, dw0b.host = offload(dw0.device)
w0a.host = empty()
w0b.host = empty()
s0a.host = prefetch(s0a.ssd)
update(dw0a.host, into=(w0a.host, w0b.host, s0a.host))
prefetch(w0a.host, into=w0a.device)
offload(w0b.host, into=w0b.ssd)
offload(s0a.host, into=s0a.ssd)
""",
        )


@given(tiered_steps(), options())
def test_one_memory_copies_only_what_is_collected(step, options):
    placement = place(*step, replace(options, separate=False))
    program = lowered(step, placement)[-1]
    assert not any(op.lane == "h2d" for op in program.ops)
    for op in program.ops:
        if op.lane == "d2h":
            assert op.reads[0].kind == "dw" or placement.activations.home(op.reads[0]) == "ssd"


@given(tiered_steps(), options())
def test_checkpoints_alone(step, options):
    """Parameters may be the user's: then activations move, and gradients stay as results."""
    num_layers, num_micro_batches, shape = step
    whole = replace(shape, tied=frozenset(), frozen=shape.frozen - {"t"}, first_grad=_first(num_layers, shape))
    placement = replace(place(num_layers, num_micro_batches, whole, replace(options, clip=False)), units=())
    step = num_layers, num_micro_batches, whole
    toy = Toy(*step)
    resident = reference(lowered(step)[-1], toy, toy.inputs())
    for program in lowered(step, placement)[2:]:
        found = reference(program, toy, toy.inputs())
        torch.testing.assert_close({v: found[v] for v in resident}, resident, rtol=0, atol=0)


def _first(num_layers, shape):
    return next(unit for unit in ("e", *range(num_layers), "h") if unit not in shape.frozen)


@given(tiered_steps(), options(), st.booleans(), st.sampled_from((0.0, 1.0)))
def test_parameters_move_as_often_however_many_micro_batches(step, options, late, checkpoint_ratio):
    """So do states and gradients; of activations, each further micro-batch moves as many. What these numbers are for a
    usual step, end_to_end/test_tiers_traffic.py writes out.
    """
    num_layers, _, shape = step
    ratios = {"checkpoint_ratio": checkpoint_ratio, "last_checkpoint_ratio": None, "device_checkpoint": 0.0}
    options = replace(options, **ratios, shares=())

    def moved(number):
        placement = place(num_layers, number, shape, options)
        return Counter(traffic(lowered((num_layers, number, shape), placement, late=late)[-1], placement))

    two, three, four = map(moved, (2, 3, 4))
    for key in two | three | four:
        assert four[key] - three[key] == three[key] - two[key]
        assert key[1] in ("x", "dx", "side", "dside") or four[key] == two[key]


def test_checkpoints_kept_at_a_boundary():
    """Of three layers and four micro-batches, one a boundary stays: below layers 1 and 2, and at the turn."""
    placement = place(3, 4, options=replace(SMALL, checkpoint_ratio=1.0))
    found = traffic(lowered((3, 4), placement)[-1], placement)
    assert found["d2h", "x"] == (4 * 4 - 1) * X_NBYTES  # x3 of the last micro-batch is read by the head at once
    assert found["h2d", "x"] == (3 * (3 + 4) + 3) * X_NBYTES
    assert found["d2h", "dx"] == found["h2d", "dx"] == 4 * 3 * X_NBYTES  # into layers 2, 1, 0 and the prologue
