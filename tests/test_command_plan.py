"""The command `plan`: its arguments reach the planner, and its refusals the user."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from standin import stand_in
from typer.testing import CliRunner

from gs_compile.cli import app
from gs_compile.errors import NoFitError
from gs_compile.explain import as_dict, report

CHOSEN = {
    "machine": None, "sequence": 2048, "batch_size": None, "micro_batch_size": None, "num_micro_batches": None,
    "alpha": None, "ratios": None, "clip": False, "host_memory": None, "device_memory": None, "precision": "bf16",
    "wear_years": None, "storage": None,
}  # fmt: skip


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


@pytest.fixture
def asked(monkeypatch):
    """What the planner was asked for; it answers with a plan that is made up."""
    asked = []

    def plan(model, **settings):
        asked.append((model, settings))
        return stand_in()

    monkeypatch.setitem(sys.modules, "gs_compile.planner", SimpleNamespace(plan=plan))
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


def test_a_model_that_does_not_fit(asked, monkeypatch):
    def refuse(*_, **__):
        raise NoFitError("100.0 GiB of host memory are short")

    monkeypatch.setattr(sys.modules["gs_compile.planner"], "plan", refuse)
    result = run("--model", "m", "--json")
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr == "NoFitError: 100.0 GiB of host memory are short\n"
