from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import expecttest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import reference
from tiers import X_NBYTES, Options, after, lowered, options, place, stages, tiered_steps, with_gradient
from toy import Toy

from gs_compile.passes.snake import snake
from gs_compile.passes.vertical import vertical
from gs_compile.placement.traffic import traffic
from gs_compile.program.ir import Value

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
            assert op.reads[0].kind == "dw" or placement.checkpoint_home(op.reads[0]) == "ssd"


@given(tiered_steps(), options())
def test_checkpoints_alone(step, options):
    """Parameters may be the user's: then activations move, and gradients stay as results."""
    num_layers, num_micro_batches, shape = step
    whole = replace(shape, tied=frozenset(), frozen=shape.frozen - {"t"}, first_grad=_first(num_layers, shape))
    placement = replace(place(num_layers, num_micro_batches, whole, options), units=(), clip=False)
    step = num_layers, num_micro_batches, whole
    toy = Toy(*step)
    resident = reference(lowered(step)[-1], toy, toy.inputs())
    for program in lowered(step, placement)[2:]:
        found = reference(program, toy, toy.inputs())
        torch.testing.assert_close({v: found[v] for v in resident}, resident, rtol=0, atol=0)


def _first(num_layers, shape):
    return next(unit for unit in ("e", *range(num_layers), "h") if unit not in shape.frozen)


@given(tiered_steps(), options(), st.booleans(), st.integers(1, 6))
def test_traffic_of_a_step(step, options, late, num_micro_batches):
    """How often each class of data moves, in the words of the paper."""
    num_layers, _, shape = step
    step = num_layers, num_micro_batches, shape
    placement = place(*step, options)
    found = traffic(lowered(step, placement, late=late)[-1], placement)
    assert found == {key: nbytes for key, nbytes in sorted(_expected(step, options, placement, late).items()) if nbytes}


def test_parameters_are_loaded_twice_however_many_micro_batches():
    def loads(num_micro_batches):
        placement = place(4, num_micro_batches, options=SMALL)
        found = traffic(lowered((4, num_micro_batches), placement)[-1], placement)
        return found["ssd_read", "w"], found["h2d", "w"]

    assert loads(1) == loads(2) == loads(7)


def test_checkpoints_kept_at_a_boundary():
    """Of three layers and four micro-batches, one a boundary stays: below layers 1 and 2, and at the turn."""
    placement = place(3, 4, options=replace(SMALL, checkpoint_ratio=1.0))
    found = traffic(lowered((3, 4), placement)[-1], placement)
    assert found["d2h", "x"] == (4 * 4 - 1) * X_NBYTES  # x3 of the last micro-batch is read by the head at once
    assert found["h2d", "x"] == (3 * (3 + 4) + 3) * X_NBYTES
    assert found["d2h", "dx"] == found["h2d", "dx"] == 4 * 3 * X_NBYTES  # into layers 2, 1, 0 and the prologue


def _expected(step, options, placement, late):
    num_layers, _, shape = step
    by_unit = placement.by_unit
    stages = _stages(step)
    trained = with_gradient(num_layers, shape) if shape.training else frozenset()
    expected = dict.fromkeys([(lane, "w") for lane in ("ssd_read", "ssd_write", "h2d")], 0)

    def nbytes(tier, unit, kind, *when):
        groups = unit.groups if not when else unit.trained(*when)
        size = unit.itemsize if kind == "w" else unit.state_itemsize
        return size * sum(p.numel for g in groups for p in (g.w if kind == "w" else g.s) if p.tier == tier)

    on_ssd = partial(nbytes, "ssd")

    state_read = state_written = gradients = 0
    for unit in by_unit.values():
        first = late and bool(unit.trained("late"))
        expected["ssd_read", "w"] += stages[unit.unit] * on_ssd(unit, "w")
        if first and unit.has_master:  # what the late update has made need not be read
            expected["ssd_read", "w"] -= on_ssd(unit, "w", "late")
        when = (["late"] if first else []) + (["early"] if unit.unit in trained else [])
        for which in when:
            expected["ssd_write", "w"] += on_ssd(unit, "w", which)
            state_read += on_ssd(unit, "s", which)
            state_written += on_ssd(unit, "s", which)
            expected["h2d", "w"] += nbytes("device", unit, "w", which)
        if options.separate:
            sent = unit.numel * unit.itemsize - nbytes("device", unit, "w")
            expected["h2d", "w"] += stages[unit.unit] * sent
        if unit.unit in trained:
            one_memory = unit.trained("late") if unit.trained("early") else ()
            leaves = unit.trained() if options.separate else one_memory
            gradients += unit.gradient_itemsize * sum(group.numel for group in leaves)
    expected |= {("ssd_read", "s"): state_read, ("ssd_write", "s"): state_written, ("d2h", "dw"): gradients}
    return expected | _expected_activations(step, options, placement)


def _expected_activations(step, options, placement):
    num_layers, n, shape = step
    stages = {str(op.stage) for op in vertical(*step[:2], shape=shape).ops}
    recomputed = [i for i in range(num_layers) if f"backward {i}" in stages]
    backward = sum(stage.startswith("backward") for stage in stages)
    all_on_ssd = [Value("x", i, j) for i in recomputed for j in range(n)]
    on_ssd = X_NBYTES * sum(placement.checkpoint_home(value) == "ssd" for value in all_on_ssd)
    expected = {("ssd_write", "x"): on_ssd, ("ssd_read", "x"): on_ssd}
    if not options.separate:
        return expected | {("d2h", "x"): on_ssd}
    head_twice = {"forward h", "backward h"} <= stages
    fetched = (num_layers + 1 + head_twice) * (n - 1) + len(recomputed) * n
    left = (num_layers - len(recomputed)) * (n - 1) + len(recomputed) * n + (n if head_twice and n > 1 else n - 1)
    stay = [value for value in all_on_ssd if placement.checkpoint_home(value) == "device"]
    left -= len(stay)
    fetched -= sum(1 + (value.micro_batch != _still_there(step, value.unit)) for value in stay)
    gradients = max(backward - 1, 0) * (n - 1)
    for lane, x in (("h2d", fetched), ("d2h", left)):
        expected |= {(lane, "x"): x * X_NBYTES, (lane, "dx"): gradients * X_NBYTES}
    return expected


def _still_there(step, layer):
    """The micro-batch that runs first through a layer: its input is still there."""
    program = snake(vertical(*step[:2], shape=step[2]))
    return next(op.micro_batch for op in program.ops if op.verb == "forward" and op.unit == layer)


def _stages(step):
    """How many stages read the parameters of each unit."""
    num_layers, n, shape = step
    reads = {
        (value.unit, op.stage)
        for op in vertical(num_layers, n, shape=shape).ops
        for value in op.reads
        if value.kind == "w"
    }
    return Counter(unit for unit, _ in reads)
