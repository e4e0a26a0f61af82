from __future__ import annotations

import ast
import textwrap

import expecttest
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import Options, lowered, options, place, tiered_steps
from toy import steps

from gs_compile.errors import ProgramError
from gs_compile.passes.lower import flush
from gs_compile.passes.snake import snake
from gs_compile.passes.vertical import vertical
from gs_compile.program.ir import StepShape, Value
from gs_compile.program.text import parse, parse_value, timetable


class TestText(expecttest.TestCase):
    def test_folded(self):
        self.assertExpectedInline(
            str(snake(vertical(96, 2, shape=StepShape(training=False)))),
            """\
# gs_compile program 0.1   after snake   96 layers x 2 micro-batches
# forward e   micro-batches 1 0
x0_1.device = embed(batch_1, we.device)
x0_0.device = embed(batch_0, we.device)
# forward 0   micro-batches 0 1
x1_0.device = forward(x0_0.device, w0.device)
x1_1.device = forward(x0_1.device, w0.device)
# forward 1   micro-batches 1 0
x2_1.device = forward(x1_1.device, w1.device)
x2_0.device = forward(x1_0.device, w1.device)
# forward 2 .. 95   repeat forward 0 1
# forward h   micro-batches 0 1
loss_0.device = head(x96_0.device, batch_0, wh.device)
loss_1.device = head(x96_1.device, batch_1, wh.device)
""",
        )

    def test_timetable(self):
        self.assertExpectedInline(
            timetable(lowered((2, 2, StepShape(has_total=True)))[-1]),
            """\
stage       compute             memory
forward e   count
forward e   embed e_1
forward e   embed e_0
forward 0   forward 0_0
forward 0   forward 0_1
forward 1   forward 1_1
forward 1   forward 1_0         zeros dwh.device
backward h  head h_0            free x2_0.device
backward h  head h_1            free x2_1.device; free total.device; zeros dw1.device
backward 1  backward 1_1        free x1_1.device; free dx2_1.device
backward 1  backward 1_0        free x1_0.device; free dx2_0.device; zeros dw0.device
backward 0  backward 0_0        free x0_0.device; free dx1_0.device
backward 0  backward 0_1        free x0_1.device; free dx1_1.device; zeros dwe.device
backward e  embed_backward e_1  free dx0_1.device
backward e  embed_backward e_0  free dx0_0.device
""",
        )


HEADER = "# gs_compile program 0.1   after vertical   3 layers x 2 micro-batches"


MISTAKES = {  # below the header: the complaint
    "\ndw0.device = zeros()": "line 2: dw0.device = zeros(): an operation before the first stage heading",
    "\n# forward 0\nx1_0.device = jump(x0_0.device)": "line 3: x1_0.device = jump(x0_0.device): no verb is called jump",
    "\n# forward 0\nfree(q1_0.device)": "line 3: free(q1_0.device): q1_0.device is not the name of a value",
    "\n# forward 0\nfree(x1_0.device, out=x0_0.device)": "line 3: free(x1_0.device, out=x0_0.device): the only keyword is into=",
    "\n# forward 0\nx1_0.device": "line 3: x1_0.device: not of the form: results = verb(reads, into=...)",
    "\n# forward 0\nfree(x1_0.device": "line 3: free(x1_0.device: '(' was never closed (<unknown>, line 1)",
    "\n# forward 2 .. 5   repeat forward 0 1": "line 2: # forward 2 .. 5   repeat forward 0 1: there is nothing before it to repeat",
}


@pytest.mark.parametrize(("text", "complaint"), MISTAKES.items())
def test_a_mistake_is_shown_with_its_line(text, complaint):
    with pytest.raises(ProgramError) as caught:
        parse(HEADER + text)
    assert caught.value.message == complaint


def test_text_without_a_header():
    with pytest.raises(
        ProgramError, match=r"line 1: a program starts with: # gs_compile program 0.1   after vertical   3 lay"
    ):
        parse("x1_0.device = forward(x0_0.device, w0.device)")


def test_text_of_another_version():
    with pytest.raises(ProgramError, match=r"program of version 0\.2, and this GreedySnake reads version 0\.1"):
        parse(HEADER.replace("0.1", "0.2"))


@given(tiered_steps(), options(), st.booleans(), st.sampled_from(("vertical", "horizontal")))
def test_parse_is_the_inverse(step, options, late, schedule):
    placement = place(*step, options).laid_out(schedule=schedule)
    for program in (*lowered(step), *lowered(step, placement, late=late), *flush(placement)):
        assert parse(str(program)) == program
        assert parse(program.text(fold=False)) == program


def test_programs_on_tiers_fold():
    """All layers of one placement look alike, but for those at the ends of the pipeline."""

    def size(num_layers):
        step = num_layers, 2, StepShape(frozen=frozenset(range(num_layers)))
        placement = place(*step, Options(parameter_ratio=0.5, checkpoint_ratio=1.0, alpha=0.25))
        return len(str(lowered(step, placement, late=True)[-1]).splitlines())

    assert size(96) == size(48)


@given(steps())
def test_text_is_python_one_operation_a_line(step):
    program = lowered(step)[-1]
    text = program.text(fold=False)
    assert len(ast.parse(text).body) == len(program.ops)
    lines = text.splitlines()
    for index, op in enumerate(program.ops):
        assert lines[program.line_of(index) - 1] == str(op)


def test_programs_that_break_every_law_round_trip_too():
    program = vertical(6, 1)
    for ops in (program.ops[::-1], program.ops * 2, program.ops[3:4] * 5, ()):
        odd = program.with_ops(ops, made_by="odd")
        assert parse(str(odd)) == odd


def test_an_unequal_stage_is_not_folded():
    """A gradient arrives from outside for x of layer 5, which layer 4's backward reads: that stage stands alone."""
    program = vertical(12, 1, shape=StepShape(outside=frozenset({5})))
    headings = [line for line in str(program).splitlines() if line.startswith("# backward")]
    assert headings == [
        "# backward h   micro-batches 0",
        "# backward 11   micro-batches 0",
        "# backward 10 .. 5   repeat backward 11",
        "# backward 4   micro-batches 0",
        "# backward 3   micro-batches 0",
        "# backward 2 .. 0   repeat backward 3",
        "# backward e   micro-batches 0",
    ]
    assert parse(str(program)) == program


def test_pasted_text_reads_the_same():
    program = snake(vertical(3, 2))
    assert parse("\n\n" + textwrap.indent(str(program), "    ") + "\n") == program


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x1_0.device", Value("x", 1, 0)),
        ("x12_34.host", Value("x", 12, 34, "host")),
        ("ye_1.device", Value("y", "e", 1)),
        ("dside_3.device", Value("dside", None, 3)),
        ("batch_2", Value("batch", None, 2, None)),
        ("total.device", Value("total")),
        ("w12b.ssd", Value("w", 12, tier="ssd", part="b")),
        ("wtba.host", Value("w", "t", tier="host", part="ba")),
        ("we.device[3]", Value("w", "e", piece=3)),
        ("scale.host", Value("scale", tier="host")),
        ("normt.device", Value("norm", "t")),
    ],
)
def test_a_name_and_its_value(name, value):
    assert value.name == name
    assert parse_value(name) == value
