"""Updates that run before the norm of all gradients is known, and are rolled back if it says so."""

from __future__ import annotations

import math
from dataclasses import replace

import expecttest
import pytest
import torch
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import Options, lowered, options, place, stages, tiered_steps, train

from gs_compile.errors import ProgramError
from gs_compile.passes.lower import flush
from gs_compile.placement.placement import Placement, StepContext
from gs_compile.placement.traffic import traffic
from gs_compile.placement.verify import verify
from gs_compile.program.ir import StepShape
from gs_compile.program.text import parse

NEVER, SOMETIMES, ALWAYS = math.inf, 30.0, 0.25


@st.composite
def speculative(draw: st.DrawFn) -> Options:
    alpha = draw(st.sampled_from((0.0, 0.3, 1.0)))
    return replace(draw(options()), clip=True, speculative=True, alpha=alpha)


STEPS = st.just((2, 2, StepShape(tied=frozenset("eh")))) | tiered_steps()


@pytest.mark.parametrize("made_by", [pytest.param("overlap", marks=pytest.mark.slow), "free"])
def test_what_is_learned_is_what_delayed_updates_learn(made_by, monkeypatch):
    @given(step=STEPS, options=speculative(), bound=st.sampled_from((NEVER, SOMETIMES, ALWAYS)))
    def check(step, options, bound):
        monkeypatch.setattr(toy, "MAX_NORM", bound)
        modes = (True, True, False, True)
        delayed = replace(options, speculative=False, alpha=1.0)
        found, wanted = (train(*step, place(*step, each), made_by, modes) for each in (options, delayed))
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)

    check()


@given(step=STEPS, options=speculative(), late=st.booleans(), redo=st.booleans())
def test_every_program_is_well_formed_and_its_text_reads_back(step, options, late, redo):
    placement = place(*step, options)
    late = late and any(v.kind == "dw" for v in placement.homes(late=True, redo=redo))
    made = lowered(step, placement, late=late, redo=redo)
    for program in (*made, *(flush(placement, StepContext(late=True, redo=redo)) if late else ())):
        assert parse(str(program)) == program


@settings(deadline=None, max_examples=15)
@given(step=STEPS, options=speculative())
def test_speculation_moves_what_early_updates_move(step, options):
    """Other places cost room and no traffic."""
    if not options.separate:
        options = replace(options, alpha=0.0)  # what waits is not copied in one memory
    plain = replace(options, clip=False, speculative=False)
    placements = place(*step, options), place(*step, plain)
    late = bool(options.alpha) and placements[1].has_late
    found, wanted = (traffic(lowered(step, each, late=late, redo=False)[-1], each) for each in placements)
    assert found == wanted


SMALL = Options(parameter_ratio=0.3, optimizer_ratio=0.5, checkpoint_ratio=1.0, clip=True, speculative=True)


class TestText(expecttest.TestCase):
    def test_what_is_left_after_the_backward(self):
        placement = place(3, 1, options=SMALL)
        self.assertExpectedInline(
            stages(lowered((3, 1), placement)[-1], "drain", computation=False),
            """\
# drain   micro-batches
seb.host = prefetch(seb.ssd)
offload(w1b.host, into=w1b.ssd)
offload(s1b.host, into=ss1b.ssd)
w0b.host = empty()
update(dw0a.host, s0a.host, into=(w0a.host, w0b.host, ss0a.host, s0b.host))
dwea.host = offload(dwe.device)
scale.host = clip(norme.device, norm0.device, norm1.device, norm2.device, normh.device)
commit(scale.host, into=(s1a.host, ss1a.host, s1b.ssd, ss1b.ssd))
commit(scale.host, into=(s2a.host, ss2a.host, s2b.ssd, ss2b.ssd))
commit(scale.host, into=(sha.host, ssha.host, shb.ssd, sshb.ssd))
offload(w0b.host, into=w0b.ssd)
offload(s0b.host, into=ss0b.ssd)
web.host = empty()
update(dwea.host, sea.host, into=(wea.host, web.host, ssea.host, seb.host))
commit(scale.host, into=(s0a.host, ss0a.host, s0b.ssd, ss0b.ssd))
offload(web.host, into=web.ssd)
offload(seb.host, into=sseb.ssd)
commit(scale.host, into=(sea.host, ssea.host, seb.ssd, sseb.ssd))
""",
        )

    def test_updates_that_were_taken_back_are_late_ones(self):
        placement = place(1, 1, options=SMALL)
        self.assertExpectedInline(
            stages(lowered((1, 1), placement, late=True, redo=True)[-1], "fill", computation=False),
            """\
# fill   micro-batches
seb.host = prefetch(seb.ssd)
s0b.host = prefetch(s0b.ssd)
web.host = empty()
update(dwea.host, scale.host, into=(wea.host, web.host, sea.host, seb.host))
shb.host = prefetch(shb.ssd)
offload(web.host, into=web.ssd)
offload(seb.host, into=seb.ssd)
w0b.host = empty()
update(dw0a.host, scale.host, into=(w0a.host, w0b.host, s0a.host, s0b.host))
we.device[0] = prefetch(wea.host, web.host)
""",
        )


PLACEMENT = place(3, 1, options=SMALL)
GOOD = lowered((3, 1), PLACEMENT)[-1].text(fold=False)


def broken(old: str, new: str, placement: Placement = PLACEMENT) -> str:
    assert GOOD.count(old) == 1, GOOD
    with pytest.raises(ProgramError) as error:
        verify(parse(GOOD.replace(old, new)), placement)
    return str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        pytest.param("into=ss1b.ssd)", "into=s1b.ssd)", "s1b.ssd could not be rolled back", id="home from a copy"),
        pytest.param("s1a.host, into=(w1a.host, w1b.host, ss1a.host", "into=(w1a.host, w1b.host, s1a.host", "s1a.host could not be rolled back", id="home in memory"),
        pytest.param("offload(s1b.host, into=ss1b.ssd)\n", "", "ss1b.ssd has not been written", id="not written"),
        pytest.param("commit(scale.host, into=(s1a.host, ss1a.host, s1b.ssd, ss1b.ssd))\n", "", "ss1a has not been committed", id="not committed"),
        pytest.param("commit(scale.host, into=(s1a.host, ss1a.host,", "commit(scale.host, into=(s1a.host, ss2a.host,", "commit takes the scale; changes parts and their shadow copies, in pairs", id="form"),
        pytest.param("s1b.host = prefetch(s1b.ssd)", "s1b.host = prefetch(ss1b.ssd)", "ss1b.ssd is read before it is known whether it holds", id="read"),
    ],
)  # fmt: skip
def test_what_breaks_a_law_is_found(old, new, complaint):
    assert complaint in broken(old, new)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        pytest.param("offload(s1b.host, into=ss1b.ssd)\n", "ss1b.ssd is written twice", id="written"),
        pytest.param("commit(scale.host, into=(s1a.host, ss1a.host, s1b.ssd, ss1b.ssd))\n", "ss1a.host is committed twice", id="committed"),
    ],
)  # fmt: skip
def test_nothing_is_done_twice(line, complaint):
    assert complaint in broken(line, line + line)
