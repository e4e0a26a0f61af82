"""All checks together, and the command that shows them; this machine stays as it was."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from gs_compile.cli.doctor import machine as checks_machine
from gs_compile.cli.doctor import software as checks_software
from gs_compile.cli.doctor.check import Check
from gs_compile.cli.doctor.doctor import examine
from gs_compile.cli.main import app


def test_what_the_system_hides(tmp_path):
    check = checks_machine.swap(proc=tmp_path)
    assert (check.name, check.state) == ("swap", "warn")
    assert check.found.startswith("not told by the system: ")


def test_a_broken_torch_is_found_without_it(monkeypatch):
    broken = Check("torch", "bad", "cannot be imported")
    monkeypatch.setattr(checks_software, "torch_version", lambda: broken)
    assert [check.name for check in examine([])] == ["torch", "host memory", "swap", "NUMA", "OpenMP"]


def test_the_command(tmp_path):
    runner = CliRunner()
    result = runner.invoke(app, ["doctor", "--storage", str(tmp_path), "--json"])
    checks = {check.pop("name"): check for check in json.loads(result.stdout)["checks"]}
    assert result.exit_code == (1 if "bad" in {check["state"] for check in checks.values()} else 0)
    assert checks["capture by Dynamo"]["state"] == "ok"
    assert "measured" in checks["machine profile"]["found"]
    assert checks[f"drive of {tmp_path}"]["found"]
    shown = runner.invoke(app, ["doctor", "--storage", str(tmp_path)])
    assert shown.stdout.splitlines()[0].split() == ["check", "state", "found", "what", "to", "do"]
    assert all(name in shown.stdout for name in checks)
    assert not list(tmp_path.iterdir())


def test_something_bad_is_an_exit_code(tmp_path, monkeypatch):
    bad = Check("drive", "bad", "broken [Errno 5]", "replace it")
    monkeypatch.setattr("gs_compile.cli.doctor.doctor.examine", lambda _: (bad,))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert result.stdout.splitlines()[1].split() == ["drive", "bad", "broken", "[Errno", "5]", "replace", "it"]
