"""The program that runs where the device reads host memory as it is."""

from __future__ import annotations

from dataclasses import replace

import expecttest
from tiers import Options, place

from gs_compile.passes.lower import StepSpec, lower

SMALL = Options(parameter_ratio=0.3, optimizer_ratio=0.3, checkpoint_ratio=0.5, alpha=0.25)


class TestText(expecttest.TestCase):
    def test_one_memory(self):
        placement = place(3, 2, options=replace(SMALL, separate=False))
        text = str(lower(StepSpec(3, 2, placement=placement, late=True))[-1])
        self.assertExpectedInline(
            text[text.index("# backward 1") : text.index("# backward e")],
            """\
# backward 1   micro-batches 1 0
x0_0.host = prefetch(x0_0.ssd)
free(x0_0.ssd)
w0a.host, w0b.host = prefetch(w0a.ssd, w0b.ssd)
s1b.host = prefetch(s1b.ssd)
offload(whb.host, into=whb.ssd)
free(whb.host)
offload(shb.host, into=shb.ssd)
free(shb.host)
dw2b.host = offload(dw2.device)
w2a.host = empty()
update(dw2.device, into=(w2a.host, s2a.host, s2b.host))
free(dw2.device)
w1.device = gather(w1a.host, w1b.host, w1c.host)
free(w1a.host)
free(w1b.host)
free(w1c.host)
dw1.device = zeros()
x1_1.device = alias(x1_1.host)
free(x1_1.host)
dx1_1.device = backward(x1_1.device, dx2_1.device, w1.device, into=dw1.device)
free(x1_1.device)
free(dx2_1.device)
x1_0.device = alias(x1_0.host)
free(x1_0.host)
dx1_0.device = backward(x1_0.device, dx2_0.device, w1.device, into=dw1.device)
free(x1_0.device)
free(dx2_0.device)
free(w1.device)
norm1.device = norm(dw1.device)
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
