"""Changes of a program that are drawn at random: harmless, or refused."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from reference import reference
from tiers import TieredToy, lowered, options, place, tiered_steps

from gs_compile.errors import ProgramError
from gs_compile.placement.placement import StepContext
from gs_compile.placement.verify import verify


@settings(deadline=None, max_examples=100)
@given(tiered_steps(), options(), st.booleans(), st.booleans(), st.data())
def test_a_change_is_harmless_or_refused(step, options, late, warm, data):
    """Dropping, doubling or swapping lines of a program never gives other numbers unnoticed."""
    num_layers, _, shape = step
    step = num_layers, 2, shape  # with three, another order of additions rounds otherwise
    placement = place(*step, options)
    late, warm = late and placement.has_late, warm and bool(placement.carried_values) and shape.training
    good = lowered(step, placement, late=late, warm=warm)[-1]
    ops = list(good.ops)
    which = st.integers(0, len(ops) - 1)
    for _ in range(data.draw(st.integers(1, 2))):
        change, a, b = data.draw(st.sampled_from(["drop", "double", "swap"])), data.draw(which), data.draw(which)
        assume(max(a, b) < len(ops))
        if change == "drop":
            del ops[a]
        elif change == "double":
            ops.insert(b, replace(ops[a], stage=ops[b].stage))
        else:
            ops[a], ops[b] = replace(ops[b], stage=ops[a].stage), replace(ops[a], stage=ops[b].stage)
    bad = replace(good.with_ops(ops, "free"), peaks=())
    try:
        verify(bad, placement, StepContext(late=late, warm=warm))
    except ProgramError:
        return
    expected, found = (_outcome(program, step, placement, late=late, warm=warm) for program in (good, bad))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _outcome(program, step, placement, *, late, warm):
    """What a program leaves at home, and gives."""
    toy = TieredToy(*step, placement=placement)
    home = toy.home()
    for unit in placement.units:
        for group in unit.trained("late") if late else ():
            home[unit.gradient(group)] = torch.randn(group.numel, generator=_seeded(), dtype=torch.float64)
            for part in group.w:
                if placement.reclaims(unit, part):
                    del home[unit.value("w", part)]
    for value in placement.carried_values if warm else ():
        home[value] = home[value._replace(tier="ssd")].clone()
    if late and placement.clip:
        home |= {value: torch.tensor(0.5) for value in placement.homes(late=True) if value.kind == "scale"}
    values = home | reference(program, toy, home | toy.given())
    trains = any(op.verb == "norm" for op in program.ops)
    homes = placement.homes(late=placement.has_late and trains, warm=trains)
    results = {value.name: content for value, content in values.items() if value.kind in ("loss", "y")}
    return results | {value.name: values[value] for value in homes}


def _seeded():
    return torch.Generator().manual_seed(0)
