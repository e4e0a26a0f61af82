"""A profile as it is printed, and where it is saved."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from gs_compile.cli.main import app
from gs_compile.cli.plan import figure, profile_rows
from gs_compile.planner.measure import machines as profiles
from gs_compile.planner.measure.profile import Profile


def run(*arguments):
    return CliRunner().invoke(app, ["probe", *arguments])


@pytest.fixture
def asked(monkeypatch):
    """How the profile of this machine was asked for."""
    asked = []

    def found(machine, storage, *, refresh):
        asked.append((machine, storage, refresh))
        return Profile.load(profiles.SHIPPED / "laptop.json")

    monkeypatch.setattr(profiles, "profile", found)
    return asked


def test_every_figure_has_a_row_with_its_source():
    profile = Profile.load(profiles.SHIPPED / "laptop.json")
    shown = list(profile_rows(profile))
    names = {name.partition(" ")[0] for name, _, _ in shown}
    assert names == {name.removesuffix("_per_second") for name in profile.as_dict()} - {"format", "sources"}
    assert ("host_nbytes", figure("host_nbytes", profile.host_nbytes), profile.sources["host_nbytes"]) in shown
    assert {"matmul_flops fp32", "matmul_flops bf16"} <= {name for name, _, _ in shown}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("host_nbytes", 2**34, "16.0 GiB"),
        ("device_nbytes", 0, "-"),
        ("ssd_read_mixed_bytes_per_second", 1.5e9, "1.5 GB/s"),
        ("matmul_flops_per_second", 312e12, "312 TFLOP/s"),
        ("update_elements_per_second", 0.6549e9, "0.655 billion/s"),
        ("op_seconds", 12e-6, "12 µs"),
        ("compute_mixed_speed", 0.63649, "0.636"),
        ("num_ranks", 4, "4"),
        ("name", "laptop", "laptop"),
    ],
)
def test_units(name, value, text):
    assert figure(name, value) == text


def test_the_command(asked, tmp_path):
    result = run("--storage", str(tmp_path), "--storage", "/b")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "matmul_flops fp32" in result.stdout
    assert asked.pop() == (None, [tmp_path, (tmp_path / "/b")], False)
    assert run("--refresh").exit_code == 0
    assert asked.pop()[-1] is True


def test_json_and_a_file(asked, tmp_path):
    result = run("--json", "--output", str(tmp_path / "mine.json"))
    assert json.loads(result.stdout) == Profile.load(tmp_path / "mine.json").as_dict()
