"""One broken program for each law: good text, one change, the complaint."""

from __future__ import annotations

from dataclasses import replace

import expecttest
import pytest
from tiers import Options, place

from gs_compile.errors import ProgramError
from gs_compile.passes.baselines.horizontal import horizontal
from gs_compile.passes.lower import StepSpec, lower
from gs_compile.passes.snake import Snake
from gs_compile.passes.vertical import vertical
from gs_compile.placement.verify import verify
from gs_compile.program.ir import Op, Stage, StepShape, Value
from gs_compile.program.text import parse

GOOD = lower(StepSpec(2, 2, shape=StepShape(has_total=True, has_side=True, side_gradient=True)))[-1].text(fold=False)

BROKEN = {
    "read after free": (
        "dx1_0.device = backward(x1_0.device, ",
        "free(x1_0.device)\ndx1_0.device = backward(x1_0.device, ",
        "dx1_0.device = backward(x1_0.device, dx2_0.device, side_0.device, w1.device, "
        "into=(dw1.device, dside_0.device)): x1_0.device was freed",
    ),
    "freed twice": ("free(x1_0.device)\n", "free(x1_0.device)\nfree(x1_0.device)\n", "x1_0.device was freed"),
    "freed undefined": ("free(x1_0.device)\n", "free(x1_0.host)\n", "x1_0.host is not defined"),
    "read before definition": ("total.device = count(batch_0, batch_1)\n", "", "total.device is not defined"),
    "defined twice": ("dwh.device = zeros()\n", "dwh.device = zeros()\n" * 2, "dwh.device is defined twice"),
    "accumulator not from zeros": ("dw1.device = zeros()\n", "", "dw1.device is not defined"),
    "gradient read too early": (
        "dx1_0.device = backward",
        "free(dw1.device)\ndx1_0.device = backward",
        "dw1.device is read after 1 of 2 micro-batches",
    ),
    "stage left and taken up again": (
        "# backward h ",
        "# forward 1\nfree(x0_0.device)\n# forward 0\nfree(x1_1.device)\n# backward h ",
        "stage forward 0 was left and comes again",
    ),
    "stages out of order": (
        "# forward 0 ",
        "# forward 1\nfree(x0_0.device)\n# forward 0 ",
        "stage forward 0 comes after forward 1",
    ),
    "micro-batch twice": (
        "x1_1.device = forward(x0_1.device, side_1.device, w0.device)\n",
        "x1_0.device = forward(x0_0.device, side_0.device, w0.device)\n",
        "micro-batch 0 a second time in this stage",
    ),
    "micro-batch left out": (
        "x1_1.device = forward(x0_1.device, side_1.device, w0.device)\n",
        "",
        "stage forward 0 has ended without micro-batch 1",
    ),
    "layer out of range": (
        "# backward h ",
        "# forward 2\nfree(total.device)\n# backward h ",
        "layer 2 is not one of 0 .. 1",
    ),
    "boundary out of range": ("free(x1_0.device)", "free(x3_0.device)", "no boundary 3 between 2 layers"),
    "micro-batch out of range": ("free(x1_0.device)", "free(x1_2.device)", "micro-batch 2 is not one of 0 .. 1"),
    "verb in a foreign stage": (
        "x1_0.device = forward(x0_0.device, side_0.device, w0.device)\n",
        "x1_0.device = embed(batch_0, we.device)\n",
        "embed does not belong in stage forward 0",
    ),
    "no micro-batch": ("(x0_0.device, side_0.device, w0.device)", "(w0.device)", "and none is named"),
    "other read than the verb's": (
        "forward(x0_0.device, side_0.device, w0.device)",
        "forward(x0_0.device, side_0.device, w1.device)",
        "forward reads w0.device here, not w1.device",
    ),
    "read of another micro-batch": (
        "forward(x0_0.device, side_0.device, w0.device)",
        "forward(x0_0.device, side_1.device, w0.device)",
        "forward reads w0.device here, not side_1.device",
    ),
    "read missing": ("side_0.device, w0.device)\n", "side_0.device)\n", "forward reads w0.device here, not nothing"),
    "read from another tier": (
        "forward(x0_0.device",
        "forward(x0_0.host",
        "forward reads x0_0.device here, not x0_0.host",
    ),
    "one read too many": (
        "forward(x0_0.device, side_0.device, w0.device)",
        "forward(x0_0.device, side_0.device, w0.device, batch_0)",
        "forward reads no batch_0 here",
    ),
    "other result than the verb's": (
        "dx1_0.device = backward",
        "dx0_0.device = backward",
        "backward defines no dx0_0.device here",
    ),
    "other accumulator than the verb's": (
        "w1.device, into=(dw1.device",
        "w1.device, into=(dw0.device",
        "backward changes no dw0.device here",
    ),
    "count of a part": ("count(batch_0, batch_1)", "count(batch_0)", "count reads every batch in order"),
    "zeros of an activation": ("dwh.device = zeros()", "x0_0.device = zeros()", "one accumulator, dw or dside"),
    "free of two": ("free(x1_0.device)", "free(x1_0.device, x0_0.device)", "free takes one value"),
}

SUMS_ON_SSD = replace(place(2, 2, options=Options()), schedule="horizontal", gradient_ratio=0.0)
HORIZONTAL = lower(StepSpec(2, 2, placement=SUMS_ON_SSD))[-1].text(fold=False)
BROKEN_HORIZONTAL = {
    "sum not fetched": ("dw1.device = prefetch(dw1.host)\n", "", "dw1.host is read after 1 of 2 micro-batches"),
    "sum ends": ("dw1.ssd = offload(dw1.host)\n", "", "dw1.host is read after 1 of 2 micro-batches"),
    "sum updates too early": (
        "dw1.host = offload(dw1.device)\n",
        "dw1a.host = offload(dw1.device)\n",
        "dw1.device is read after 1 of 2 micro-batches",
    ),
    "other micro-batch": (
        "x1_1.device = forward(x0_1.device, w0.device)",
        "x1_0.device = forward(x0_0.device, w0.device)",
        "micro-batch 0 in a stage of another",
    ),
    "stage of all": ("# forward 1 of 1\n", "# forward 1\n", "stage forward 1 is of another order than horizontal"),
    "micro-batch out of range": (
        "# forward 0 of 1\n",
        "# forward e of 2\nfree(x0_1.host)\n# forward 0 of 1\n",
        "micro-batch 2 is not one of 0 .. 1",
    ),
    "back to another micro-batch": (
        "# forward 0 of 1\n",
        "# drain\n# forward h of 0\nfree(x0_1.host)\n# forward 0 of 1\n",
        "stage forward h of 0 comes after backward e of 0",
    ),
    "backward before another's": (
        "# backward h of 1\n",
        "# backward h of 1\nfree(w0a.ssd)\n# backward e of 0\n",
        "stage backward e of 0 was left and comes again",
    ),
}


class TestText(expecttest.TestCase):
    def test_error(self):
        text = str(Snake()(vertical(3, 2))).replace("# backward 2", "free(x1_0.device)\n# backward 2")
        self.assertExpectedInline(
            _complaint(parse(text)),
            """after snake, line 26: dx1_0.device = backward(x1_0.device, dx2_0.device, w1.device, into=dw1.device): x1_0.device was freed""",
        )


@pytest.mark.parametrize("law", BROKEN)
def test_broken(law):
    old, new, complaint = BROKEN[law]
    assert old in GOOD
    assert complaint in _complaint(parse(GOOD.replace(old, new, 1)))


@pytest.mark.parametrize("law", BROKEN_HORIZONTAL)
def test_broken_horizontal(law):
    old, new, complaint = BROKEN_HORIZONTAL[law]
    assert old in HORIZONTAL
    assert complaint in _complaint(parse(HORIZONTAL.replace(old, new, 1)), SUMS_ON_SSD)


def test_the_line_is_that_of_the_operation():
    text = GOOD.replace("free(x1_0.device)", "free(x1_0.host)")
    line = text.splitlines().index("free(x1_0.host)") + 1
    assert _complaint(parse(text)).startswith(f"after free, line {line}: free(x1_0.host): ")


@pytest.mark.parametrize(
    ("stage", "complaint"),
    [
        (Stage("forward", "e"), "after drop: stage forward e is missing"),
        (Stage("forward", 1), "after drop: stage forward 1 is missing"),
        (Stage("forward", "h"), "after drop: stage forward h is missing"),
    ],
    ids=str,
)
def test_stage_missing(stage, complaint):
    program = vertical(2, 1, shape=StepShape(training=False))
    assert complaint == _complaint(program.with_ops(_without(program, stage), made_by="drop"))


def test_the_last_stage_is_finished_too():
    program = vertical(2, 2)
    assert "backward e has ended without micro-batch 1" in _complaint(program.with_ops(program.ops[:-1], "drop"))


def test_unknown_verb():
    program = vertical(2, 1)
    odd = replace(program.ops[0], verb="jump")
    assert "no verb is called jump" in _complaint(program.with_ops((odd, *program.ops[1:]), "odd"))


def test_unknown_kind():
    program = vertical(2, 1)
    odd = Op("free", (Value("q", 1, 0),), Stage("forward", "e"))
    assert "no kind is called q" in _complaint(program.with_ops((odd, *program.ops), "odd"))


def test_good_programs_pass():
    verify(parse(GOOD))


def test_forwards_follow_each_other():
    program = horizontal(1, 2, shape=StepShape(outside=frozenset({"h"})))
    turned = sorted(program.ops, key=lambda op: (op.stage.phase == "backward", -(op.stage.micro_batch or 0)))
    with pytest.raises(ProgramError, match="stage forward e of 0 comes after forward h of 1"):
        verify(program.with_ops(turned, "turn"))


@pytest.mark.parametrize(("number", "stage"), [(0, "forward e of 1"), (1, "forward 0 of 1"), (2, "forward h of 1")])
def test_a_micro_batch_stops_early(number, stage):
    program = horizontal(1, 2)
    ops = [op for op in program.ops if op.stage.micro_batch == 0]
    rest = [op for op in program.ops if op.stage.micro_batch == 1]
    with pytest.raises(ProgramError, match=f"after drop: stage {stage} is missing"):
        verify(program.with_ops(ops + rest[:number], "drop"))


def _without(program, stage):
    """The program without a stage, and without what needs its results."""
    missing = set()
    for op in program.ops:
        if op.stage == stage or missing & set(op.reads):
            missing.update(op.results)
        else:
            yield op


def _complaint(program, placement=None) -> str:
    with pytest.raises(ProgramError) as caught:
        verify(program, placement)
    return str(caught.value)
