"""The command `simulate`: what it says of a simulation, and the files it writes."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
from standin import stand_in
from test_draw import profile, workload
from test_timeline import data_of, simulated
from typer.testing import CliRunner

from gs_compile.cli.main import app


@pytest.fixture
def asked(monkeypatch):
    """The requests to the planner; it answers with a plan that is made up around a real simulation."""
    program, simulation = simulated()
    asked = {}

    def plan(model, schedule, **_):
        asked["plan"] = made = stand_in()
        vars(made).update(
            program=program,
            simulation=simulation,
            seconds=simulation.seconds,
            lanes={lane: (share * simulation.seconds, share) for lane, share in simulation.busy.items()},
            peaks=dict(program.peaks),
            workload=workload(),
            profile=profile(),
            schedule=schedule,
        )
        return made

    monkeypatch.setitem(sys.modules, "gs_compile.planner.plan", SimpleNamespace(plan=plan))
    return asked


def run(*arguments):
    result = CliRunner().invoke(app, ["simulate", "--model", "m", *map(str, arguments)])
    assert (result.exit_code, result.stderr) == (0, ""), result.exception
    return result.stdout


def test_the_report(asked):
    printed = run("--schedule", "horizontal")
    plan = asked["plan"]
    assert plan.schedule == "horizontal"
    headings = [line for line in printed.splitlines() if line.endswith(":")]
    assert headings == [
        "What each lane does in a step:",
        "What the computation waits for:",
        "The critical path, by lane:",
        "Memory at its peak:",
    ]
    waited = printed.partition("What the computation waits for:")[2].partition("The critical")[0]
    assert all(cause in waited for cause, seconds in plan.simulation.bubbles.items() if seconds > 0)


def test_bubbles_and_computation_are_the_step(asked):
    found = json.loads(run("--json"))
    computing = found["lanes"]["compute"]["seconds"]
    assert sum(found["bubbles"].values()) + computing == pytest.approx(found["seconds"], rel=1e-4)
    assert found["simulated"]["peaks"] == asked["plan"].simulation.peaks
    assert sum(found["simulated"]["critical_path"].values()) > 0
    assert found["files"] == {}


def test_files(asked, tmp_path):
    trace, page = tmp_path / "step.json", tmp_path / "step.html"
    found = json.loads(run("--trace", trace, "--html", page, "--json"))
    assert found["files"] == {"trace": str(trace), "timeline": str(page)}
    simulation = asked["plan"].simulation
    assert json.loads(trace.read_text()) == json.loads(json.dumps(simulation.chrome()))
    text = page.read_text()
    assert data_of(text)["lanes"]
    assert "# backward" in text
    assert f"trace: {trace}" in run("--trace", trace)


def test_figures(asked, tmp_path):
    found = json.loads(run("--figures", tmp_path / "new", "--json"))
    assert set(found["files"]) == {"throughput", "traffic", "lanes"}
    for name, path in found["files"].items():
        assert path == str(tmp_path / "new" / f"{name}.svg")
        assert (tmp_path / "new" / f"{name}.svg").read_text().startswith("<?xml")


def test_half_layers_have_no_figures_beside_whole_ones(asked, tmp_path):
    found = json.loads(run("--schedule", "single", "--figures", tmp_path, "--json"))
    assert set(found["files"]) == {"lanes"}
    assert "What to know:\n  The horizontal order is half as fast." in run("--schedule", "single")


def test_a_file_that_cannot_be_written(asked, tmp_path):
    arguments = ["simulate", "--model", "m", "--html", str(tmp_path / "no" / "step.html")]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (5, "")
    assert result.stderr.startswith("FileNotFoundError: ")
