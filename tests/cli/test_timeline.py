"""A step as a page: what the page is given is the simulation, and it needs nothing from outside."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
from tiers import Options, place

from gs_compile.cli.report.timeline import KINDS, kind_of, timeline_html
from gs_compile.passes.lower import StepSpec, lower
from gs_compile.placement.placement import StepContext
from gs_compile.placement.traffic import op_nbytes
from gs_compile.planner.simulate.event_loop import LaneRule
from gs_compile.planner.simulate.simulator import simulate
from gs_compile.program.ir import MEMORY_VERBS
from gs_compile.program.text import parse

SECONDS = {"forward": 3e-3, "backward": 9e-3, "update": 4e-3}
MOST_NBYTES = 5_000_000  # of a page


def simulated(num_layers=3, num_micro_batches=2, bytes_per_second=2e7):
    placement = place(num_layers, num_micro_batches, options=Options(alpha=0.25, parameter_ratio=0.3))
    programs = [
        lower(StepSpec(num_layers, num_micro_batches, placement=placement, context=StepContext(late=late)))[-1]
        for late in (False, True)
    ]

    def price(op, program):
        moves = op.verb in ("prefetch", "offload")
        return op_nbytes(op, placement) / bytes_per_second if moves else SECONDS.get(op.verb, 0.0)

    seconds = [[price(op, program) for op in program.ops] for program in programs]
    return programs[-1], simulate(programs, seconds, placement, LaneRule())


def data_of(page):
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def nanoseconds(seconds):
    return round(seconds * 1e9)


@pytest.fixture(scope="module")
def step():
    """A program, its simulation, what the page of it holds, and its spans as the page reads them."""
    program, simulation = simulated()
    data = data_of(timeline_html(simulation, title="a step", texts={}))
    rows = [SimpleNamespace(**dict(zip(data["fields"], row, strict=True))) for row in data["spans"]]
    for row in rows:
        row.lane = data["lanes"][row.lane]["name"]
    return program, simulation, data, rows


def test_a_page_holds_every_operation_that_takes_time(step):
    program, simulation, _, rows = step
    found = {(row.lane, row.start, row.stop, row.nbytes, row.text, row.cause, row.stage) for row in rows}
    assert found == {
        (
            span.lane,
            nanoseconds(span.start_seconds),
            nanoseconds(span.stop_seconds),
            span.nbytes,
            str(span.op),
            span.waited_for,
            str(span.op.stage),
        )
        for span in simulation.spans
    }
    assert len(found) == sum(op.verb not in MEMORY_VERBS for op in program.ops)


def test_what_an_operation_came_after_ended_when_it_began(step):
    *_, rows = step
    pairs = [(row, rows[row.after]) for row in rows if row.after >= 0]
    assert len(pairs) > len(rows) / 2
    for row, before in pairs:
        assert (before.lane, before.stop) == (row.cause.split()[0], row.start)


def test_the_critical_path_is_marked(step):
    _, simulation, _, rows = step
    marked = [(row.text, row.start) for row in rows if row.critical]
    path = [span for span in simulation.critical_path if span in simulation.spans]
    assert sorted(marked) == sorted((str(span.op), nanoseconds(span.start_seconds)) for span in path)
    assert path


def test_texts_are_shown_as_they_are_and_nothing_comes_from_outside(step):
    texts = {"<program>": "# </pre> @note"}
    page = timeline_html(step[1], title="</h1><b> & @data", note="1 < 2 @title", texts=texts)
    assert page.count("<h1>&lt;/h1&gt;&lt;b&gt; &amp; @data</h1>") == 1
    assert "<p>1 &lt; 2 @title</p>" in page
    assert "<summary>&lt;program&gt;</summary><pre># &lt;/pre&gt; @note</pre>" in page
    assert data_of(page) == step[2]
    assert not re.findall(r"https?:|src=|href=|url\(|@import|import\(|fetch\(", re.sub(r'id="data">.*?<', "", page))


def test_the_legend_has_a_name_for_every_kind(step):
    *_, data, rows = step
    assert list(data["kinds"]) == list(KINDS)
    assert {row.kind for row in rows} <= data["kinds"].keys()
    assert (data["kinds"]["a"], data["kinds"]["seal"], data["kinds"]["update"]) == (
        "saved activations",
        "commits",
        "update",
    )


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("w0a.host = prefetch(w0a.ssd)", "w"),
        ("dw0a.host = offload(dw0.device)", "dw"),
        ("side_0.host = offload(side_0.device)", "other"),
        ("x0_0.device = embed(batch_0, we.device)", "forward"),
        ("loss_0.device = head(x3_0.device, batch_0, wh.device)", "forward"),
        ("loss_0.device, dx3_0.device = head(x3_0.device, batch_0, wh.device, into=dwh.device)", "backward"),
        ("dx0_0.device = backward(x0_0.device, dx1_0.device, w0.device, into=dw0.device)", "backward"),
        ("update(dw0a.host, into=(w0a.host, s0a.host))", "update"),
        ("norm0.device = norm(dw0.device)", "other"),
    ],
)
def test_an_operation_has_a_colour(line, kind):
    (op,) = parse(f"# gs_compile program 0.1   after free   3 layers x 1 micro-batches\n# forward 0\n{line}\n").ops
    assert kind_of(op) == kind
    assert kind in KINDS


@pytest.mark.slow
def test_a_large_step_is_a_small_page():
    _, simulation = simulated(96, 16, bytes_per_second=1e9)
    assert len(timeline_html(simulation, title="a step", texts={})) < MOST_NBYTES
