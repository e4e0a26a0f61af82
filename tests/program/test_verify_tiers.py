"""The laws of data on tiers: good text, one change, the complaint; and changes drawn at random."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiers import Options, TieredToy, options, place, tiered_steps

from gs_compile.errors import ProgramError
from gs_compile.passes.lower import StepSpec, flush, lower
from gs_compile.placement.verify import verify
from gs_compile.program.reference import reference
from gs_compile.program.text import parse

SMALL = Options(parameter_ratio=0.3, optimizer_ratio=0.3, checkpoint_ratio=0.5, alpha=0.25)
PLACEMENT = place(3, 2, options=SMALL)
GOOD = lower(StepSpec(3, 2, placement=PLACEMENT, late=True))[-1].text(fold=False)
CLIPPED = place(3, 2, options=replace(SMALL, alpha=1.0, clip=True))
GOOD_CLIPPED = lower(StepSpec(3, 2, placement=CLIPPED, late=True))[-1].text(fold=False)

BROKEN = {
    "transfer past a tier": (
        "web.host, wec.host = prefetch(web.ssd, wec.ssd)",
        "web.device, wec.device = prefetch(web.ssd, wec.ssd)",
        "prefetch takes values of one kind and unit from ssd to host, or from host to device",
    ),
    "transfer of two kinds": (
        "s2c.host = prefetch(s2c.ssd)",
        "s2c.host = prefetch(w2c.ssd)",
        "prefetch takes values of one kind and unit",
    ),
    "transfer of two units": (
        "s2c.host = prefetch(s2c.ssd)",
        "s2c.host = prefetch(s1c.ssd)",
        "prefetch takes values of one kind and unit",
    ),
    "transfer from two tiers": (
        "web.host, wec.host = prefetch(web.ssd, wec.ssd)",
        "web.host, wec.host = prefetch(web.ssd, wec.host)",
        "prefetch takes values of one kind and unit",
    ),
    "prefetch away from the device": (
        "x1_0.ssd = offload(x1_0.host)",
        "x1_0.ssd = prefetch(x1_0.host)",
        "prefetch takes",
    ),
    "offload towards the device": (
        "x1_0.host = prefetch(x1_0.ssd)",
        "x1_0.host = offload(x1_0.ssd)",
        "offload takes values of one kind and unit from device to host, or from host to ssd",
    ),
    "transfer of nothing": ("s2c.host = prefetch(s2c.ssd)", "s2c.host = prefetch()", "prefetch takes"),
    "gather of another unit": (
        "w1.device = gather(w1.device[0], w1.device[1])",
        "w1.device = gather(w1.device[0], w0.device[1])",
        "gather takes all parts or pieces of one unit's parameters, and defines the whole on the device",
    ),
    "gather of a part": ("w1.device = gather(", "w1a.device = gather(", "gather takes all parts or pieces"),
    "gather of the whole": (
        "w1.device = gather(w1.device[0], w1.device[1])",
        "w1.device = gather(w1.device)",
        "gather takes all parts or pieces",
    ),
    "alias of another": (
        "normh.device = norm",
        "dw2a.host = alias(dwh.device)\nnormh.device = norm",
        "alias takes one",
    ),
    "empty of a state": ("web.host = empty()", "seb.host = empty()", "empty takes nothing, and defines a part"),
    "norm of another unit": ("norm2.device = norm(", "norm1.device = norm(", "norm takes one gradient"),
    "update of another unit": (
        "update(dwea.host, into=(wea.host, ",
        "update(dwea.host, into=(w1a.host, ",
        "update takes a gradient and, where gradients are clipped, the scale",
    ),
    "update without parameters": (
        "update(dw2a.host, into=(w2a.host, w2b.host, s2a.host, s2b.host))",
        "update(dw2a.host, into=(s2a.host, s2b.host))",
        "update takes a gradient",
    ),
    "updated twice": (
        "update(dwhb.host, into=(whc.host, shc.host))\n",
        "update(dwhb.host, into=(whc.host, shc.host))\n" * 2,
        "whc.host is updated twice",
    ),
    "used before its late update": (
        "update(dwhb.host, into=(whc.host, shc.host))\n",
        "wh.device[0] = prefetch(wha.host, whc.host)\nupdate(dwhb.host, into=(whc.host, shc.host))\n",
        "whc.host is used before its late update",
    ),
    "late update left out": (
        "update(dwhb.host, into=(whc.host, shc.host))\n",
        "",
        "whc.host is empty until its update",
    ),
    "update of an early part left out": (
        "update(dwea.host, into=(wea.host, web.host, sea.host, seb.host))\n",
        "",
        "web.host is empty until its update",
    ),
    "gradient sent before it is complete": (
        "dx1_0.device = backward(",
        "dw1a.host, dw1b.host = offload(dw1.device)\ndx1_0.device = backward(",
        "dw1.device is read after 1 of 2 micro-batches",
    ),
    "norm of an incomplete gradient": (
        "dx1_0.device = backward(",
        "norm1.device = norm(dw1.device)\ndx1_0.device = backward(",
        "dw1.device is read after 1 of 2 micro-batches",
    ),
    "not at home at the end": (
        "dw0a.host, dw0b.host = offload(dw0.device)\n",
        "dw0a.host = offload(dw0.device)\n",
        "at the end, dw0b.host is not at home",
    ),
    "home freed": ("norm0.device = norm(", "free(w0a.host)\nnorm0.device = norm(", "w0a.host was freed"),
    "left behind on host": ("free(s2c.host)\n", "", "at the end, s2c.host is left behind"),
    "left behind on ssd": ("free(x1_0.ssd)\n", "", "at the end, x1_0.ssd is left behind"),
    "gradient left behind": ("free(dw1.device)\n", "", "at the end, dw1.device is left behind"),
    "untrue peaks": ("peak device ", "peak device 1", "at the end, the peaks are not (('device', 1"),
    "freed then read": (
        "x1_0.host = prefetch(x1_0.ssd)\n",
        "free(x1_0.ssd)\nx1_0.host = prefetch(x1_0.ssd)\n",
        "x1_0.ssd was freed",
    ),
    "not brought home": ("offload(w2c.host, into=w2c.ssd)\n", "", "w2c.ssd is not what the update has made"),
    "state not brought home": (
        "offload(s2c.host, into=s2c.ssd)\n",
        "",
        "at the end, s2c.ssd is not what the update has made",
    ),
    "read again over what is new": (
        "offload(s2c.host, into=s2c.ssd)\n",
        "s2c.host = prefetch(s2c.ssd)\noffload(s2c.host, into=s2c.ssd)\n",
        "s2c.ssd is not what the update has made",
    ),
    "emptied again": (
        "offload(w2c.host, into=w2c.ssd)\n",
        "w2c.host = empty()\noffload(w2c.host, into=w2c.ssd)\n",
        "w2c.host would lose what the update has made",
    ),
}

BROKEN_CLIPPED = {
    "clip of a part": ("clip(norme.device, ", "clip(dwe.device, ", "clip takes the norms, and defines the scale"),
    "norm not there": ("norm1.device = norm(dw1.device)\n", "", "norm1.device is not defined"),
    "scale not at home": ("scale.host = clip", "scale.device = clip", "at the end, scale.host is not at home"),
}


@pytest.mark.parametrize("law", BROKEN)
def test_broken(law):
    old, new, complaint = BROKEN[law]
    assert old in GOOD
    assert complaint in _complaint(GOOD.replace(old, new, 1), PLACEMENT)


@pytest.mark.parametrize("law", BROKEN_CLIPPED)
def test_broken_with_clipping(law):
    old, new, complaint = BROKEN_CLIPPED[law]
    assert old in GOOD_CLIPPED
    assert complaint in _complaint(GOOD_CLIPPED.replace(old, new, 1), CLIPPED)


def test_changed_while_in_use():
    """In one memory, what the code reads is the parts themselves."""
    placement = place(3, 2, options=replace(SMALL, separate=False))
    text = lower(StepSpec(3, 2, placement=placement, late=True))[-1].text(fold=False)
    old = "dx1_0.device = backward("
    assert "w1a.host changes while w1.device is in use" in _complaint(
        text.replace(old, f"w1a.host = empty()\n{old}", 1), placement
    )


RESIDENT = place(3, 2, options=replace(SMALL, device_parameter=0.7, device_checkpoint=0.25))
GOOD_RESIDENT = lower(StepSpec(3, 2, placement=RESIDENT, late=True))[-1].text(fold=False)
LATE_HOME = "prefetch(w2c.host, into=w2c.device)\nfree(w2c.host)\n"
LATE_UPDATE = "w2c.host = empty()\nw2d.host = empty()\nupdate(dw2b.host, into=(w2c.host, w2d.host, s2c.host))\n"
WITHOUT_C = "w2d.host = empty()\nupdate(dw2b.host, into=(w2d.host, s2c.host))\n"
EARLY_HOME = "prefetch(w2a.host, into=w2a.device)\n"
USED = "x3_0.device = forward("
BROKEN_RESIDENT = {
    "early update not brought home": ([(EARLY_HOME, "")], "at the end, w2a.device is not what the update has made"),
    "late update not brought home": ([(LATE_HOME, "")], "w2c.device is not what the update has made"),
    "used before its late update": (
        [(LATE_HOME, ""), (LATE_UPDATE, WITHOUT_C)],
        "w2c.device is used before its late update",
    ),
    "changed while in use": (
        [(LATE_HOME, LATE_HOME.splitlines()[0] + "\n"), (USED, LATE_HOME + USED)],
        "w2c.device changes while w2.device is in use",
    ),
    "brought home before its update": (
        [(LATE_HOME, ""), (LATE_UPDATE, LATE_UPDATE.replace("\nupdate", "\n" + LATE_HOME + "update"))],
        "w2c.host is used before its late update",
    ),
}


@pytest.mark.parametrize("law", BROKEN_RESIDENT)
def test_broken_on_the_device(law):
    text, (changes, complaint) = GOOD_RESIDENT, BROKEN_RESIDENT[law]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    assert complaint in _complaint(text, RESIDENT)


def test_updates_left_out_together_with_their_memory():
    """Nothing is undefined or empty then, but parts are not what they should be."""
    late = GOOD.replace("whc.host = empty()\nupdate(dwhb.host, into=(whc.host, shc.host))\n", "")
    late = late.replace("offload(whc.host, into=whc.ssd)\n", "").replace("whb.host, whc.host)", "whb.host)", 2)
    assert "whc.host" in _complaint(late, PLACEMENT)
    resident = replace(SMALL, parameter_ratio=1.0, optimizer_ratio=1.0, alpha=0.0)
    text = lower(StepSpec(1, 1, placement=place(1, 1, options=resident)))[-1].text(fold=False)
    dropped = text.replace("update(dw0a.host, into=(w0a.host, s0a.host))\n", "")
    assert dropped != text
    assert "at the end, w0a has not had its update" in _complaint(dropped, place(1, 1, options=resident))
    resident = replace(resident, alpha=1.0, has_master=False)
    text = flush(1, place(1, 1, options=resident))[-1].text(fold=False)
    dropped = text.replace("update(dw0a.host, into=(w0a.host, s0a.host))\n", "")
    assert dropped != text
    assert "at the end, w0a has not had its late update" in _complaint(dropped, place(1, 1, options=resident))


def test_the_good_ones_pass():
    verify(parse(GOOD), PLACEMENT, late=True)
    verify(parse(GOOD_CLIPPED), CLIPPED, late=True)
    with pytest.raises(ProgramError, match="is not defined"):  # without a placement, homes are not known
        verify(parse(GOOD))


@settings(deadline=None, max_examples=300)
@given(tiered_steps(), options(), st.booleans(), st.data())
def test_a_change_is_harmless_or_refused(step, options, late, data):
    """Dropping, doubling or swapping lines of a program never gives other numbers unnoticed."""
    num_layers, _, shape = step
    step = num_layers, 2, shape  # with three, another order of additions rounds otherwise
    placement = place(*step, options)
    late = late and placement.has_late
    good = lower(StepSpec(*step[:2], shape=shape, placement=placement, late=late))[-1]
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
        verify(bad, placement, late=late)
    except ProgramError:
        return
    expected, found = (_outcome(program, step, placement, late) for program in (good, bad))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _outcome(program, step, placement, late):
    """What a program leaves at home, and gives."""
    toy = TieredToy(*step, placement=placement)
    home = toy.home()
    for unit in placement.units:
        for group in unit.trained("late") if late else ():
            home[unit.gradient(group)] = torch.randn(group.numel, generator=_seeded(), dtype=torch.float64)
            for part in group.w:
                if placement.reclaims(unit, part):
                    del home[unit.value("w", part)]
    if late and placement.clip:
        home |= {value: torch.tensor(0.5) for value in placement.homes(late=True) if value.kind == "scale"}
    values = home | reference(program, toy, home | toy.given())
    leaves_late = placement.has_late and any(op.verb == "norm" for op in program.ops)
    homes = placement.homes(late=leaves_late)
    results = {value.name: content for value, content in values.items() if value.kind in ("loss", "y")}
    return results | {value.name: values[value] for value in homes}


def _seeded():
    return torch.Generator().manual_seed(0)


def _complaint(text, placement) -> str:
    with pytest.raises(ProgramError) as caught:
        verify(parse(text), placement, late=True)
    return str(caught.value)
