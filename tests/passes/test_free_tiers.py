"""The program that runs, with its data on tiers: the whole of it, and what it leaves."""

from __future__ import annotations

from dataclasses import replace

import expecttest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import Options, options, place, stages, tiered_steps, train

from gs_compile.passes.lower import StepSpec, lower

SMALL = Options(parameter_ratio=0.3, optimizer_ratio=0.3, checkpoint_ratio=0.5, alpha=0.25)


class TestText(expecttest.TestCase):
    def test_on_tiers(self):
        placement = place(3, 2, options=SMALL)
        self.assertExpectedInline(
            stages(lower(StepSpec(3, 2, placement=placement, late=True))[-1], "forward 1", "backward 1", frees=True),
            """\
# forward 1   micro-batches 1 0
whb.host = prefetch(whb.ssd)
offload(w2c.host, into=w2c.ssd)
offload(s2c.host, into=s2c.ssd)
free(s2c.host)
whc.host = empty()
update(dwhb.host, into=(whc.host, shc.host))
free(dwhb.host)
x1_0.ssd = offload(x1_0.host)
w1.device = gather(w1.device[0], w1.device[1])
free(w1.device[0])
free(w1.device[1])
x1_0.device = prefetch(x1_0.host)
free(x1_0.host)
w2.device[0] = prefetch(w2a.host, w2b.host, w2c.host)
x2_1.device = forward(x1_1.device, w1.device)
free(x1_1.device)
x2_1.host = offload(x2_1.device)
free(x2_1.device)
w2.device[1] = prefetch(w2a.host, w2b.host, w2c.host)
free(w2b.host)
free(w2c.host)
x2_0.device = forward(x1_0.device, w1.device)
free(x1_0.device)
free(w1.device)
x2_0.host = offload(x2_0.device)
# backward 1   micro-batches 1 0
x0_0.host = prefetch(x0_0.ssd)
free(x0_0.ssd)
web.host, wec.host = prefetch(web.ssd, wec.ssd)
s2b.host = prefetch(s2b.ssd)
whb.host = empty()
update(dwha.host, into=(wha.host, whb.host, sha.host, shb.host))
free(dwha.host)
dw2a.host, dw2b.host = offload(dw2.device)
free(dw2.device)
w1.device = gather(w1.device[0], w1.device[1])
free(w1.device[0])
free(w1.device[1])
dw1.device = zeros()
x1_0.device = prefetch(x1_0.host)
free(x1_0.host)
dx2_0.device = prefetch(dx2_0.host)
free(dx2_0.host)
w0.device[0] = prefetch(w0a.host, w0b.host, w0c.host)
dx1_1.device = backward(x1_1.device, dx2_1.device, w1.device, into=dw1.device)
free(x1_1.device)
free(dx2_1.device)
dx1_1.host = offload(dx1_1.device)
free(dx1_1.device)
w0.device[1] = prefetch(w0a.host, w0b.host, w0c.host)
free(w0b.host)
free(w0c.host)
x0_0.device = prefetch(x0_0.host)
free(x0_0.host)
dx1_0.device = backward(x1_0.device, dx2_0.device, w1.device, into=dw1.device)
free(x1_0.device)
free(dx2_0.device)
free(w1.device)
norm1.device = norm(dw1.device)
""",
        )

    def test_one_memory(self):
        placement = place(3, 2, options=replace(SMALL, separate=False))
        text = str(lower(StepSpec(3, 2, placement=placement, late=True))[-1])
        self.assertExpectedInline(
            text[text.index("# backward 0") : text.index("# backward e")],
            """\
# backward 0   micro-batches 0 1
web.host, wec.host = prefetch(web.ssd, wec.ssd)
s0b.host = prefetch(s0b.ssd)
offload(w2a.host, into=w2a.ssd)
free(w2a.host)
offload(s2b.host, into=s2b.ssd)
free(s2b.host)
dw1b.host = offload(dw1.device)
w1a.host = empty()
update(dw1.device, into=(w1a.host, s1a.host, s1b.host))
free(dw1.device)
w0.device = gather(w0a.host, w0b.host)
free(w0a.host)
free(w0b.host)
dw0.device = zeros()
x0_0.device = alias(x0_0.host)
free(x0_0.host)
dx0_0.device = backward(x0_0.device, dx1_0.device, w0.device, into=dw0.device)
free(x0_0.device)
free(dx1_0.device)
x0_1.device = alias(x0_1.host)
free(x0_1.host)
dx0_1.device = backward(x0_1.device, dx1_1.device, w0.device, into=dw0.device)
free(x0_1.device)
free(dx1_1.device)
free(w0.device)
norm0.device = norm(dw0.device)
""",
        )


@settings(deadline=None, max_examples=60)
@given(tiered_steps(), options(), st.lists(st.booleans(), min_size=1, max_size=3))
def test_keeps_every_bit_on_tiers(step, options, modes):
    """Several steps, evaluation among them, each from nothing but what the one before has left at home."""
    resident = replace(options, parameter_ratio=1.0, optimizer_ratio=1.0, alpha=1.0 if options.clip else 0.0)
    expected = train(*step, place(*step, resident), "overlap", modes)
    torch.testing.assert_close(train(*step, place(*step, options), "free", modes), expected, rtol=0, atol=0)


@settings(deadline=None, max_examples=60)
@given(tiered_steps(), options(), st.booleans())
def test_only_what_is_at_home_and_results_are_left(step, options, late):
    num_layers, num_micro_batches, shape = step
    placement = place(*step, options)
    late = late and placement.has_late
    program = lower(StepSpec(num_layers, num_micro_batches, shape=shape, placement=placement, late=late))[-1]
    alive = set(placement.homes(late=late))
    for op in program.ops:
        alive |= set(op.results)
        alive -= set(op.reads) if op.verb == "free" else set()
    left = {value for value in alive if value.kind not in ("loss", "y", "norm")}
    assert left == placement.homes(late=placement.has_late and shape.training)
