"""When a step uses what."""

from __future__ import annotations

from gs_compile.planner.lp.stage_graph import outline
from gs_compile.program.ir import StepShape


def test_stages_of_two_layers():
    step = outline(2, StepShape(tied=frozenset({"e", "h"})))
    assert [str(stage) for stage in step.stages] == [
        *("forward e", "forward 0", "forward 1", "backward h", "backward 1", "backward 0", "backward e")
    ]
    assert step.uses == {"e": (0, 6), "t": (0, 3, 6), 0: (1, 5), 1: (2, 4), "h": (3,)}
    assert step.opened["t"] == 3
    assert step.complete == {"h": 3, 1: 4, 0: 5, "e": 6, "t": 6}


def test_what_goes_from_stage_to_stage():
    step = outline(2, StepShape())
    assert [(j.kind, j.layer, j.made, j.reads) for j in step.journeys] == [
        ("x", 0, 0, (1, 5)),
        ("x", 1, 1, (2, 4)),
        ("x", 2, 2, (3,)),
        ("dx", 2, 3, (4,)),
        ("dx", 1, 4, (5,)),
        ("dx", 0, 5, (6,)),
    ]
    checkpoint, last = step.journeys[0], step.journeys[2]
    assert step.is_checkpoint(checkpoint)
    assert not step.is_checkpoint(last)
    assert (checkpoint.leaving(3), last.leaving(3), last.leaving(1)) == (3, 2, 0)
    assert (checkpoint.crossings(1, 3), checkpoint.crossings(5, 3)) == (2, 3)


def test_frozen_layers_have_no_checkpoint():
    step = outline(2, StepShape(frozen=frozenset({"e", 0}), first_grad=1))
    assert [journey.layer for journey in step.journeys if step.is_checkpoint(journey)] == [1]
    assert 0 not in step.complete
