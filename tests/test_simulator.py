from __future__ import annotations

from tiers import PLAIN, Options, place

from gs_compile.passes.lower import lower
from gs_compile.runtime.simulator import simulate


def test_everything_in_memory_takes_what_it_computes():
    program = lower(3, 2)[-1]
    seconds = [1.0 if op.lane == "compute" else 0.0 for op in program.ops]
    for inline in (True, False):
        found = simulate([program, program], [seconds, seconds], inline=inline)
        assert found.seconds == sum(seconds)
        assert found.busy == {"compute": 1.0}
        assert found.bubbles == {}


def test_a_step_with_tiers_is_accounted_for():
    placement = place(4, 3, PLAIN, Options())
    program = lower(4, 3, placement=placement)[-1]
    seconds = [0.0 if op.lane == "memory" else 1.0 for op in program.ops]
    found = simulate([program, program], [seconds, seconds], placement=placement)
    assert abs(sum(found.bubbles.values()) + found.busy["compute"] * found.seconds - found.seconds) < 1e-9
