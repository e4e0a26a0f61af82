"""A step with several backwards: what each has made is added to sums that have a home, and updates are late."""

from __future__ import annotations

from dataclasses import replace

import expecttest
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiers import RESIDENT, Options, lowered, options, place, stages, tiered_steps, train

from gs_compile.errors import ProgramError
from gs_compile.passes.lower import flush
from gs_compile.placement.traffic import traffic
from gs_compile.placement.verify import verify
from gs_compile.program.ir import Value

SMALL = Options(alpha=1.0, accumulates=True)


class TestText(expecttest.TestCase):
    def test_one_memory(self):
        placement = place(3, 2, options=replace(SMALL, separate=False))
        self.assertExpectedInline(
            stages(lowered((3, 2), placement, late=True)[-1], "fill", "backward 1"),
            """\
# fill   micro-batches
sea.host = prefetch(sea.ssd)
s0a.host = prefetch(s0a.ssd)
wea.host = empty()
update(dwea.host, into=(wea.host, sea.host))
s1a.host = prefetch(s1a.ssd)
offload(wea.host, into=wea.ssd)
offload(sea.host, into=sea.ssd)
w0a.host = empty()
update(dw0a.host, into=(w0a.host, s0a.host))
# backward 1   micro-batches 1 0
x0_0.host, x0_1.host = prefetch(x0_0.ssd, x0_1.ssd)
w0a.host = prefetch(w0a.ssd)
w1.device = gather(w1a.host, w1b.host)
dw1.device = zeros()
x1_1.device = alias(x1_1.host)
dx1_1.device = backward(x1_1.device, dx2_1.device, w1.device, into=dw1.device)
x1_0.device = alias(x1_0.host)
dx1_0.device = backward(x1_0.device, dx2_0.device, w1.device, into=dw1.device)
norm1.device = norm(dw1.device, into=dw1a.host)
""",
        )

    def test_a_device_and_sums_on_ssd(self):
        placement = place(3, 2, options=replace(SMALL, gradient_ratio=0.0))
        self.assertExpectedInline(
            stages(lowered((3, 2), placement)[-1], "backward h", "backward 1"),
            """\
# backward h   micro-batches 1 0
x2_0.host, x2_1.host = prefetch(x2_0.ssd, x2_1.ssd)
w1a.host, w1b.host = prefetch(w1a.ssd, w1b.ssd)
wh.device = gather(wh.device[0], wh.device[1])
dwh.device = zeros()
x3_0.device = prefetch(x3_0.host)
w2.device[0] = prefetch(w2a.host)
loss_1.device, dx3_1.device = head(x3_1.device, batch_1, wh.device, into=dwh.device)
dx3_1.host = offload(dx3_1.device)
w2.device[1] = prefetch(w2a.host)
x2_0.device = prefetch(x2_0.host)
loss_0.device, dx3_0.device = head(x3_0.device, batch_0, wh.device, into=dwh.device)
dwha.host = prefetch(dwha.ssd)
dwha.device = prefetch(dwha.host)
normh.device = norm(dwh.device, into=dwha.device)
offload(dwha.device, into=dwha.host)
dw2a.host = prefetch(dw2a.ssd)
# backward 1   micro-batches 1 0
x0_0.host, x0_1.host = prefetch(x0_0.ssd, x0_1.ssd)
wea.host = prefetch(wea.ssd)
offload(dw2a.host, into=dw2a.ssd)
w1.device = gather(w1.device[0], w1.device[1])
dw1.device = zeros()
dw1a.device = prefetch(dw1a.host)
dw0a.host = prefetch(dw0a.ssd)
x1_0.device = prefetch(x1_0.host)
dx2_0.device = prefetch(dx2_0.host)
w0.device[0] = prefetch(w0a.host)
dx1_1.device = backward(x1_1.device, dx2_1.device, w1.device, into=dw1.device)
dx1_1.host = offload(dx1_1.device)
w0.device[1] = prefetch(w0a.host)
x0_0.device = prefetch(x0_0.host)
dx1_0.device = backward(x1_0.device, dx2_0.device, w1.device, into=dw1.device)
norm1.device = norm(dw1.device, into=dw1a.device)
offload(dw1a.device, into=dw1a.host)
""",
        )

    def test_ranks(self):
        placement = place(3, 2, options=replace(SMALL, world=2))
        self.assertExpectedInline(
            stages(lowered((3, 2), placement)[-1], "backward 1"),
            """\
# backward 1   micro-batches 1 0
x0_0.host, x0_1.host = prefetch(x0_0.ssd, x0_1.ssd)
wea.host = prefetch(wea.ssd)
w1.device = gather(w1.device[0], w1.device[1], w1.device[2], w1.device[3], w1.device[4])
dw1.device = zeros()
x1_0.device = prefetch(x1_0.host)
dx2_0.device = prefetch(dx2_0.host)
shard0.device[0] = prefetch(w0a.host)
shard0.device[1] = prefetch(w0a.host)
w0.device[0] = all_gather(shard0.device[0])
w0.device[1] = all_gather(shard0.device[1])
dx1_1.device = backward(x1_1.device, dx2_1.device, w1.device, into=dw1.device)
dx1_1.host = offload(dx1_1.device)
shard0.device[2] = prefetch(w0a.host)
shard0.device[3] = prefetch(w0a.host)
w0.device[2] = all_gather(shard0.device[2])
w0.device[3] = all_gather(shard0.device[3])
x0_0.device = prefetch(x0_0.host)
dx1_0.device = backward(x1_0.device, dx2_0.device, w1.device, into=dw1.device)
dshard1.device, norm1.device = reduce_scatter(dw1.device, into=dw1a.host)
""",
        )


@given(tiered_steps(), options(), st.sampled_from((0.0, 0.5, None)), st.booleans())
def test_with_one_backward_a_step_it_learns_what_other_placements_do(step, chosen, gradient_ratio, clip):
    """Bit for bit; with clipping both have late updates."""
    chosen = replace(chosen, alpha=1.0, clip=clip, speculative=False, carried=())
    plain = place(*step, replace(RESIDENT, **{name: getattr(chosen, name) for name in SAME}))
    placement = place(*step, replace(chosen, accumulates=True, gradient_ratio=gradient_ratio))
    wanted, found = train(*step, plain), train(*step, placement)
    assert str(found[0]) == str(wanted[0])
    assert all(torch.equal(found[1][name], value) for name, value in wanted[1].items())


SAME = ("has_master", "is_pair", "has_state", "alpha", "clip")


@pytest.mark.parametrize("separate", [False, True])
def test_sums_move_once_each_way_where_they_are_on_ssd(separate):
    """And come for their update once more."""
    placement = place(3, 2, options=replace(SMALL, separate=separate, gradient_ratio=0.0))
    nbytes = sum(unit.num_trained * unit.gradient_itemsize for unit in placement.units)
    first, later = (traffic(lowered((3, 2), placement, late=late)[-1], placement) for late in (True, False))
    assert (later["ssd_read", "dw"], later["ssd_write", "dw"]) == (nbytes, nbytes)
    assert (first["ssd_read", "dw"], first["ssd_write", "dw"]) == (2 * nbytes, nbytes)
    assert traffic(flush(placement)[-1], placement)["ssd_read", "dw"] == nbytes


def test_nothing_of_the_sums_comes_before_the_users_backward():
    """A loss may wait while the backward of another one changes them."""
    program = lowered((3, 2), place(3, 2, options=replace(SMALL, gradient_ratio=0.0)))[-1]
    last = max(index for index, op in enumerate(program.ops) if op.verb == "head")
    used = [at for at, op in enumerate(program.ops) if any(value.kind == "dw" and value.part for value in op.values)]
    assert min(used) > last


def test_only_sums_of_the_same_unit_are_added_to():
    placement = place(2, 1, options=replace(SMALL, separate=False))
    program = lowered((2, 1), placement)[-1]
    ops = [
        replace(op, into=(Value("dw", 0, tier="host", part="a"),)) if op.verb == "norm" else op for op in program.ops
    ]
    with pytest.raises(
        ProgramError, match="norm takes one gradient, and defines its norm; may change sums of the same"
    ):
        verify(program.with_ops(ops, "free"), placement)
