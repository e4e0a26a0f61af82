"""Text of a step in which a share of checkpoints and parameters lives on the device; its laws are in test_offload."""

from __future__ import annotations

import expecttest
from tiers import Options, after, place

from gs_compile.passes.lower import StepSpec, lower


class TestText(expecttest.TestCase):
    def test_homes_on_the_device(self):
        """Checkpoint x0_1 stays there, and so do the first tensors of the layer."""
        options = Options(device_parameter=0.7, device_checkpoint=0.5, alpha=0.5)
        program = after(lower(StepSpec(1, 2, placement=place(1, 2, options=options), late=True)), "offload")
        lines = str(program).splitlines()
        self.assertExpectedInline(
            "\n".join(line for line in lines if "w0" in line or "x0" in line),
            """\
w0c.host = empty()
w0d.host = empty()
update(dw0b.host, into=(w0c.host, w0d.host, s0b.host))
prefetch(w0c.host, into=w0c.device)
offload(w0d.host, into=w0d.ssd)
x0_1.device = embed(batch_1, we.device)
x0_0.device = embed(batch_0, we.device)
x0_0.host = offload(x0_0.device)
x0_0.ssd = offload(x0_0.host)
w0b.host = prefetch(w0b.ssd)
w0.device[0] = prefetch(w0b.host, w0d.host)
w0.device[1] = prefetch(w0b.host, w0d.host)
w0.device = gather(w0.device[0], w0.device[1], w0a.device, w0c.device)
x1_0.device = forward(x0_0.device, w0.device)
x1_1.device = forward(x0_1.device, w0.device)
x0_0.host = prefetch(x0_0.ssd)
w0b.host, w0d.host = prefetch(w0b.ssd, w0d.ssd)
w0.device[0] = prefetch(w0b.host, w0d.host)
w0.device[1] = prefetch(w0b.host, w0d.host)
w0.device = gather(w0.device[0], w0.device[1], w0a.device, w0c.device)
dw0.device = zeros()
x0_0.device = prefetch(x0_0.host)
dx0_0.device = backward(x0_0.device, dx1_0.device, w0.device, into=dw0.device)
dx0_0.host = offload(dx0_0.device)
dx0_1.device = backward(x0_1.device, dx1_1.device, w0.device, into=dw0.device)
norm0.device = norm(dw0.device)
dw0a.host, dw0b.host = offload(dw0.device)
w0a.host = empty()
w0b.host = empty()
update(dw0a.host, into=(w0a.host, w0b.host, s0a.host))
prefetch(w0a.host, into=w0a.device)
offload(w0b.host, into=w0b.ssd)
embed_backward(batch_1, dx0_1.device, we.device, into=dwe.device)
dx0_0.device = prefetch(dx0_0.host)
embed_backward(batch_0, dx0_0.device, we.device, into=dwe.device)""",
        )
