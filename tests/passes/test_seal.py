"""Durable steps: what a commit keeps is written when it is made, and a seal stands between two steps."""

from __future__ import annotations

import math
from dataclasses import replace

import expecttest
import pytest
import torch
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import Options, in_order, lowered, options, place, stages, tiered_steps, train

from gs_compile.errors import ProgramError
from gs_compile.passes.baselines.lifetime import Room
from gs_compile.passes.lower import flush
from gs_compile.placement.kinds import nbytes_of
from gs_compile.placement.placement import StepContext
from gs_compile.placement.traffic import traffic
from gs_compile.placement.verify import verify
from gs_compile.planner.step_plan import nbytes_by_home
from gs_compile.program.fx import graph_module
from gs_compile.program.ir import Op
from gs_compile.program.text import parse

LANES = ("h2d", "d2h", "ssd_read", "ssd_write")
ROOM = Room(device_nbytes=10**6, host_nbytes=10**6, bytes_per_second=tuple(dict.fromkeys(LANES, 1e9).items()))


@st.composite
def placements(draw):
    """A step, and where it lives: all homes, alphas, ways to clip, pieces and schedules; one rank or one of two."""
    step, chosen = draw(tiered_steps()), draw(options())
    if draw(st.booleans()):
        chosen = replace(chosen, clip=True, speculative=True, alpha=draw(st.sampled_from((0.0, 0.3, 1.0))))
    chosen = replace(chosen, world=draw(st.sampled_from((1, 1, 2))))
    schedules = ["vertical"] + ["horizontal", "lifetime"] * (chosen.world == 1)
    schedules += ["single"] * (step[0] % 2 == 0 and step[1] == 1)
    schedule = draw(st.sampled_from(schedules))
    room, gradient_ratio = (ROOM if schedule == "lifetime" else None), draw(st.sampled_from((0.0, 1.0)))
    placement = in_order(place(*step, chosen), gradient_ratio, schedule).decided(own=room)
    return step, placement.laid_out(durability=draw(st.sampled_from((1, 3))))


def in_memory(placement, units, *when):
    """By hand: the bytes of what is trained, lives in memory and follows from nothing else."""
    found = 0
    for unit in (unit for unit in placement.units if unit.unit in units):
        for group in unit.trained(*when) if when else ():
            found += sum(part.numel * unit.state_itemsize for part in group.s if part.tier == "host")
            found += sum(part.numel * unit.itemsize for part in group.w if part.tier != "ssd" and not unit.has_master)
    return found


@settings(deadline=None, max_examples=20)
@given(placements(), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_a_durable_step_is_the_step_with_copies_and_a_seal(drawn, late, redo, copies, seals):
    """Well-formed after each pass; nothing else is moved or comes in another order; the bytes are as counted by hand."""
    step, placement = drawn
    late = late and any(value.kind == "dw" for value in placement.homes(late=True, redo=redo))
    bare = placement.laid_out(durability=0)
    made = lowered(step, placement, late=late, redo=redo, copies=copies, seals=seals)
    alone = flush(placement, StepContext(late=late, redo=redo, seals=seals))
    for program in (*made, *alone):
        assert parse(str(program)) == program
        graph_module(program)
    plain = lowered(step, bare, late=late, redo=redo)[-1], flush(bare, StepContext(late=late, redo=redo))[-1]
    for durable, usual in zip((made[-1], alone[-1]), plain, strict=True):
        others = [op for op in durable.ops if op.lane == "memory" or op.kind != "seal"]
        copied = {value for op in durable.ops if op.lane != "memory" and op.kind == "seal" for value in op.reads}
        ends = {Op("free", (value,), op.stage) for value in copied for op in durable.ops}
        found, wanted = ([op for op in ops if op.verb != "commit" and op not in ends] for ops in (others, usual.ops))
        assert found == wanted
        found, wanted = ([op for op in ops if op.verb == "commit" or op in ends] for ops in (others, usual.ops))
        assert sorted(found, key=str) == sorted(wanted, key=str)  # each waits for the copies of what it commits or ends
        assert durable.offsets == usual.offsets
    complete = {value.unit for op in made[-1].ops for value in op.into if value.kind == "dw"}
    early = in_memory(placement, complete, "early") if copies else 0
    waiting = in_memory(placement, placement.by_unit, *placement.waiting(redo=redo)) if late and seals else 0
    written = [traffic(program, placement).get(("ssd_write", "seal"), 0) for program in (made[-1], alone[-1])]
    assert written == [early + waiting, waiting]


@given(placements())
def test_room_for_two_versions_of_all_that_commits_keep(drawn):
    """One more of what lives on SSD, two of what lives in memory, frozen parameters too; a narrow one has none."""
    _, placement = drawn
    parts = [(unit, kind, part) for unit in placement.units for kind in "ws" for part in getattr(unit, kind).values()]
    wanted = 0
    for unit, kind, part in parts:
        nbytes = nbytes_of(placement, unit.value(kind, part))
        is_narrow = kind == "w" and unit.has_master and unit.group_of(unit.value(kind, part)).when != "never"
        wanted += nbytes if part.tier == "ssd" else 0 if is_narrow else 2 * nbytes
    assert nbytes_by_home(placement).get(("seal", "ssd"), 0) == wanted
    assert ("seal", "ssd") not in nbytes_by_home(placement.laid_out(durability=0))


@pytest.mark.parametrize("bound", [math.inf, 30.0, 0.25])
def test_copies_are_of_what_the_step_has_left(bound, monkeypatch):
    """Also of updates that were taken back; and nothing that is learned depends on them."""
    monkeypatch.setattr(toy, "MAX_NORM", bound)

    @settings(deadline=None, max_examples=4)
    @given(drawn=placements().filter(lambda drawn: drawn[1].world == 1))
    def check(drawn):
        step, placement = drawn
        modes = (True, True, False, True)
        found, wanted = (train(*step, each, modes=modes) for each in (placement, placement.laid_out(durability=0)))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)

    check()


SMALL = Options(parameter_ratio=0.3, optimizer_ratio=0.5, checkpoint_ratio=1.0, alpha=0.25)
PLACEMENT = place(2, 1, options=SMALL).laid_out(durability=1)
GOOD = lowered((2, 1), PLACEMENT, late=True, copies=True, seals=True)[-1].text(fold=False)


class TestText(expecttest.TestCase):
    def test_a_durable_step(self):
        shown = parse(GOOD)
        shown = shown.with_ops([op for op in shown.ops if op.lane == "ssd_write"], "free")
        self.assertExpectedInline(
            stages(shown, "forward e", "forward 0", "forward 1", "drain"),
            """\
# forward e   micro-batches
offload(w0c.host, into=w0c.ssd)
offload(s0d.host, into=s0d.ssd)
offload(s0c.host, into=cs0c.ssd)
# forward 0   micro-batches
offload(w1d.host, into=w1d.ssd)
offload(s1d.host, into=s1d.ssd)
offload(s1c.host, into=cs1c.ssd)
# forward 1   micro-batches
offload(whc.host, into=whc.ssd)
offload(shd.host, into=shd.ssd)
offload(shc.host, into=cshc.ssd)
seal()
# drain   micro-batches
offload(w1b.host, into=w1b.ssd)
offload(s1b.host, into=s1b.ssd)
offload(s1a.host, into=cs1a.ssd)
offload(w0b.host, into=w0b.ssd)
offload(s0b.host, into=s0b.ssd)
offload(s0a.host, into=cs0a.ssd)
offload(web.host, into=web.ssd)
offload(seb.host, into=seb.ssd)
offload(sea.host, into=csea.ssd)
""",
        )


SEAL, LATE, EARLY = "seal()\n", "offload(s1c.host, into=cs1c.ssd)\n", "offload(s1a.host, into=cs1a.ssd)\n"
AT_HOME, NEXT = "offload(s1d.host, into=s1d.ssd)\n", "offload(whb.host, into=whb.ssd)\n"
ROLLED_BACK = place(2, 1, options=replace(SMALL, clip=True, speculative=True, alpha=0.0)).laid_out(durability=1)
REDONE = lowered((2, 1), ROLLED_BACK, late=True, redo=True, copies=True, seals=True)[-1].text(fold=False)
SHADOW = "offload(ss1a.host, into=cs1a.ssd)\n"


def refusal(text, placement=PLACEMENT, *, copies=True, seals=True, late=True):
    with pytest.raises(ProgramError) as error:
        verify(parse(text), placement, StepContext(late=late, copies=copies, seals=seals))
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        pytest.param({SEAL: SEAL + SEAL}, "the step before is sealed a second time", id="two seals"),
        pytest.param({SEAL: "seal(s1a.host)\n"}, "seal takes nothing and defines nothing", id="form"),
        pytest.param({LATE: ""}, "cs1c.ssd of the step before is not stored yet", id="late copy left out"),
        pytest.param({LATE: SEAL + LATE, SEAL: ""}, "of the step before is not stored yet", id="seal before a copy"),
        pytest.param({AT_HOME: SEAL + AT_HOME, SEAL: ""}, "of the step before is not stored yet", id="before a store"),
        pytest.param({SEAL: "", NEXT: NEXT + SEAL}, "whb.ssd is stored before the step before is sealed", id="behind"),
        pytest.param({SEAL: SEAL + LATE}, "cs1c.ssd is stored after the step before was sealed without it", id="after"),
        pytest.param({EARLY: ""}, "at the end, cs1a.ssd has not been written", id="early copy left out"),
        pytest.param({EARLY: EARLY + EARLY}, "cs1a.ssd is written twice", id="copy written twice"),
        pytest.param({"offload(s1a.host": "offload(sha.host"}, "takes values of one kind and unit", id="other unit"),
        pytest.param({"(s1a.host, into=cs1a": "(s1a.host, into=cs1c"}, "cs1c.ssd is not of s1a.host", id="other part"),
    ],
)
def test_what_breaks_the_law_of_seals_is_found(changes, complaint):
    text = GOOD
    for old, new in changes.items():
        assert GOOD.count(old) == 1, old
        text = new.join(text.rsplit(old, 1)) if old == SEAL else text.replace(old, new)
    assert complaint in refusal(text)


def test_copies_and_seals_are_in_the_programs_that_say_so():
    assert "csha.ssd is written, and no commit keeps it" in refusal(GOOD, copies=False)
    assert "csec.ssd is written, and no commit keeps it" in refusal(GOOD, seals=False)
    alone = flush(PLACEMENT, StepContext(late=True, seals=True))[-1].text(fold=False)
    assert "at the end, the step before has not been sealed" in refusal(alone.replace(SEAL, ""), copies=False)
    sealed = lowered((2, 1), PLACEMENT, seals=True)[-1].text(fold=False)
    assert "the step before is not to be sealed" in refusal(sealed, late=False, copies=False, seals=False)


def test_a_copy_is_of_the_update_that_it_is_written_after():
    """In a step whose updates may be rolled back, where those of the step before were."""
    assert REDONE.count(SHADOW) == 1
    home = SHADOW.replace("ss1a", "s1a", 1)
    assert "cs1a.ssd is stored after the step before was sealed" in refusal(REDONE.replace(SHADOW, home), ROLLED_BACK)
    late = REDONE.replace(home, SHADOW, 1)
    assert "cs1a.ssd is not of ss1a.host as an update has made it" in refusal(late, ROLLED_BACK)
