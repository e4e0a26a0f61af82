"""The command `plan`: its arguments reach the planner, and its refusals the user."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from standin import stand_in
from typer.testing import CliRunner

from gs_compile.cli.main import app
from gs_compile.cli.report.explain import as_dict, report

CHOSEN = {
    "machine": None, "sequence": 2048, "batch_size": None, "micro_batch_size": None, "num_micro_batches": None,
    "alpha": None, "ratios": None, "clip": False, "host_memory": None, "device_memory": None, "precision": "bf16",
    "wear_years": None, "storage": None, "schedule": "vertical",
}  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.fixture
def asked(monkeypatch):
    """The requests to the planner; it answers with a plan that is made up."""
    asked = []

    def plan(model, **settings):
        asked.append((model, settings))
        return stand_in()

    monkeypatch.setitem(sys.modules, "gs_compile.planner.plan", SimpleNamespace(plan=plan))
    return asked


def test_what_is_not_given_is_the_planners_choice(asked):
    result = run("--model", "gpt-65b")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == report(stand_in()) + "\n"
    assert asked == [("gpt-65b", CHOSEN)]


def test_what_is_given_is_kept(asked):
    arguments = (
        "--model llama --machine a100.json --sequence 512 --batch 64 --micro-batch-size 2 --micro-batches 32 "
        "--alpha 0.25 --ratio parameter=0.5 --ratio optimizer=1 --clip --host-memory 64GiB --device-memory 20GiB "
        "--precision model --wear-years 3 --storage /a --storage /b --json"
    )
    result = run(*arguments.split())
    assert json.loads(result.stdout) == json.loads(json.dumps(as_dict(stand_in())))
    settings = {
        "machine": "a100.json", "sequence": 512, "batch_size": 64, "micro_batch_size": 2, "num_micro_batches": 32,
        "alpha": 0.25, "ratios": {"parameter": 0.5, "optimizer": 1.0}, "clip": True, "host_memory": "64GiB",
        "device_memory": "20GiB", "precision": "model", "wear_years": 3.0, "storage": [Path("/a"), Path("/b")],
        "schedule": "vertical",
    }  # fmt: skip
    assert asked == [("llama", settings)]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "Missing option '--model'"),
        (("--model", "m", "--ratio", "parameter"), "--ratio parameter: not a class and a number"),
        (("--model", "m", "--ratio", "parameter=half"), "--ratio parameter=half: not a class and a number"),
        (("--model", "m", "--ratio", "parameters=1"), "did you mean expert.ratios.parameter?"),
        (("--model", "m", "--ratio", "parameter=2"), "expert.ratios.parameter must be a number from 0 to 1"),
        (("--model", "m", "--alpha", "2"), "'--alpha'"),
        (("--model", "m", "--precision", "fp8"), "'--precision'"),
    ],
)
def test_wrong_arguments(asked, arguments, complaint):
    result = run(*arguments)
    assert (result.exit_code, result.stdout, asked) == (2, "", [])
    assert complaint in result.stderr


def test_a_model_from_a_file_on_a_machine_from_a_file(tmp_path):
    """With the real planner."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    (tmp_path / "tiny.json").write_text(
        json.dumps({"model_type": "llama", "num_hidden_layers": 3, "vocab_size": 64} | sizes)
    )
    machine = Path(__file__).parents[1] / "machine.json"
    settings = "--sequence 32 --micro-batch-size 2 --micro-batches 4 --alpha 0.5 --ratio optimizer=0 --json"
    result = run("--model", str(tmp_path / "tiny.json"), "--machine", str(machine), *settings.split())
    assert (result.exit_code, result.stderr) == (0, ""), result.exception
    found = json.loads(result.stdout)
    assert (found["batch_size"], found["alpha"], found["ratios"]["optimizer"]) == (8, 0.5, 0.0)
    assert found["homes"]["states"].keys() == {"ssd"}
    assert found["traffic"]["ssd_read"]["s"] == found["homes"]["states"]["ssd"]
    assert found["tokens_per_second"] == pytest.approx(8 * 32 / found["seconds"], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (("--model", "gtp2"), 2, "PlanError: gtp2 is neither the name of a model"),
        (("--model", "gpt-65b", "--machine", "a1000"), 2, "ProfileError: unknown machine a1000; did you mean a100?"),
        (
            ("--model", "gpt2", "--sequence", "256", "--micro-batch-size", "1", "--host-memory", "300MiB"),
            3,
            "NoFitError",
        ),
    ],
)
def test_what_the_planner_refuses(arguments, code, complaint):
    result = run("--machine", "a100", *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith(complaint)
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_papers_model_on_the_papers_machine():
    result = run("--model", "gpt-65b", "--machine", "a100", "--sequence", "2048", "--json")
    found = json.loads(result.stdout)
    assert found["lanes"]["compute"]["share"] > 0.9  # it saturates
    assert found["peaks"]["host"] <= found["budgets"]["host"]
