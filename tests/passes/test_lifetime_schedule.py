"""The schedule `lifetime`: what the horizontal order moves away and back stays, as far as there is room."""

from __future__ import annotations

from dataclasses import replace

import expecttest
import torch
from cpu_work import work
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import X_NBYTES, Options, in_order, lowered, options, peaks_of, place, stages, tiered_steps, train

from gs_compile.passes.baselines.lifetime import Room, decided_periods
from gs_compile.passes.lower import StepSpec, lower
from gs_compile.placement.placement import Placement, StepContext
from gs_compile.placement.traffic import traffic
from gs_compile.planner.builder import StepBuilder
from gs_compile.planner.variants import table
from gs_compile.program.ir import StepShape

ALL_SSD = Options(separate=True)
RATES = (("h2d", 8.0), ("d2h", 8.0), ("ssd_read", 2.0), ("ssd_write", 1.0))
WORK = 100  # for a program of 24 layers and 8 micro-batches, which takes 10
ENDLESS = 1 << 40
SHARES = (0.0, 0.3, 0.7, 1.0)  # of the way from the peaks of plain horizontal to those with everything kept


def homes(step, chosen=ALL_SSD, gradient_ratio=0.0, schedule="lifetime") -> Placement:
    return in_order(place(*step, options=chosen), gradient_ratio, schedule)


def within(placement: Placement, device_nbytes: int, host_nbytes: int = ENDLESS) -> Placement:
    return placement.decided(own=Room(device_nbytes=device_nbytes, host_nbytes=host_nbytes, bytes_per_second=RATES))


def peaks(step, placement, late=False) -> dict[str, int]:
    return dict(lowered(step, placement, late=late)[-1].peaks)


def roomy(step, placement: Placement, share: float) -> Placement:
    """With a room somewhere between what plain horizontal takes and what everything takes."""
    least, most = peaks(step, placement), peaks(step, within(placement, ENDLESS))
    device, host = (int(least[tier] + share * max(most[tier] - least[tier], 0)) for tier in ("device", "host"))
    return within(placement, device, host)


class TestText(expecttest.TestCase):
    maxDiff = None

    def test_what_there_is_room_for_stays(self):
        """Checkpoints, some parameters, and all sums but one: the embedding's."""
        program = lowered((1, 2), roomy((1, 2), homes((1, 2)), 0.5))[-1]
        self.assertExpectedInline(
            stages(program, "forward e of 1", "forward 0 of 1", "backward 0 of 1"),
            """\
# forward e of 1
dwe.host = offload(dwe.device)
w0.device[0] = prefetch(w0a.host)
x0_1.device = embed(batch_1, we.device)
# forward 0 of 1
w0.device = gather(w0.device[0])
wh.device[0] = prefetch(wha.host)
x1_1.device = forward(x0_1.device, w0.device)
# backward 0 of 1
sha.host = prefetch(sha.ssd)
dwha.host = offload(dwh.device)
dwe.device = prefetch(dwe.host)
dx0_1.device = backward(x0_1.device, dx1_1.device, w0.device, into=dw0.device)
norm0.device = norm(dw0.device)
""",
        )

    def test_the_table(self):
        found = roomy((2, 2), homes((2, 2)), 0.5)
        self.assertExpectedInline(
            table(found, StepBuilder(sizes=(), layout=found.layout, shape=StepShape())),
            """\
             on      inactive                   times      bytes  stay  bytes that stay  others go to
checkpoints  device  from forward to backward       4    3.9 KiB     4          3.9 KiB
parameters   device  between two uses              10  688.0 KiB     8        560.0 KiB  host
gradients    device  between two micro-batches      4  512.0 KiB     3        384.0 KiB  host
parameters   host    between two uses               2  128.0 KiB     2        128.0 KiB
gradients    host    between two micro-batches      1  128.0 KiB     1        128.0 KiB""",
        )


def decided(step, placement):
    program = next(program for program in lowered(step, placement) if program.made_by == "pipeline")
    return decided_periods(program, placement, late=True)


def test_without_a_room_nothing_stays():
    snapshots = lowered((2, 2), homes((2, 2)))
    names = ["horizontal", "overlap", "offload", "pipeline", "lifetime", "free"]
    assert [program.made_by for program in snapshots] == names
    assert snapshots[-1] == lowered((2, 2), homes((2, 2), schedule="horizontal"))[-1]


def test_a_checkpoint_is_inactive_from_its_forward_to_its_backward():
    (period,) = (p for p in decided((2, 1), within(homes((2, 1)), ENDLESS))[1] if str(p.value) == "x0_0.device")
    assert (str(period.since), str(period.until)) == ("forward 0 of 0", "backward 1 of 0")  # fetched one stage ahead
    assert period.nbytes == X_NBYTES
    assert period.stays


def test_in_one_memory_what_stays_is_not_copied():
    placement = within(homes((2, 2), replace(ALL_SSD, separate=False)), ENDLESS)
    moved = traffic(lowered((2, 2), placement)[-1], placement)
    assert {kind for _, kind in moved} == {"w", "s"}
    once = sum(unit.numel * unit.itemsize for unit in placement.units)
    assert moved["ssd_read", "w"] == once


def test_a_large_program_takes_little_work():
    chosen = Options(parameter_ratio=0.3, optimizer_ratio=0.3, checkpoint_ratio=0.3, alpha=0.25)
    plain = homes((24, 8), chosen, 0.5)
    device_nbytes = (
        4
        * dict(lower(StepSpec(24, 8, placement=plain, context=StepContext(late=True)), verified=False)[-1].peaks)[
            "device"
        ]
    )
    fitting = within(plain, device_nbytes)
    times, _ = work(lambda: lower(StepSpec(24, 8, placement=fitting, context=StepContext(late=True)), verified=False))
    assert times < WORK


@settings(deadline=None, max_examples=12)
@given(
    tiered_steps(),
    options(),
    st.sampled_from((0.0, 0.5, 1.0)),
    st.sampled_from(SHARES),
    st.lists(st.booleans(), min_size=1, max_size=2),
)
def test_keeps_every_bit_of_the_horizontal_step(step, chosen, gradient_ratio, share, modes):
    plain = homes(step, chosen, gradient_ratio)
    expected = train(*step, plain.laid_out(schedule="horizontal"), modes=modes)
    torch.testing.assert_close(train(*step, roomy(step, plain, share), modes=modes), expected, rtol=0, atol=0)


@given(tiered_steps(), options(), st.sampled_from((0.0, 0.5, 1.0)), st.sampled_from(SHARES), st.booleans())
def test_within_its_room_and_no_lane_moves_more(step, chosen, gradient_ratio, share, late):
    plain = homes(step, chosen, gradient_ratio)
    late = late and plain.has_late and step[2].training
    placement = roomy(step, plain, share)
    *_, program = lowered(step, placement, late=late)  # verified
    base = lowered(step, plain, late=late)[-1]
    found, before = (peaks_of(p.ops, of) for p, of in ((program, placement), (base, plain)))
    if plain.separate:
        assert found["device"] <= max(placement.decision.own.device_nbytes, before["device"])
    assert found["host"] <= max(placement.decision.own.host_nbytes, before["host"])
    assert found["ssd"] <= before["ssd"]
    moved, at_first = traffic(program, placement), traffic(base, plain)
    assert moved.keys() <= at_first.keys()
    assert all(nbytes <= at_first[key] for key, nbytes in moved.items())
