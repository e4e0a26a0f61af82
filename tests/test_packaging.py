"""What the wheel holds, and what keeps the two wings importable under one name only."""

from __future__ import annotations

import configparser
import email
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from bounds import ROOT, files

import gs_compile

SETUPTOOLS = 77  # as in pyproject.toml's [build-system]
WINGS = ("passes", "runtime")


def python(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False, timeout=240
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy: setuptools leaves folders behind where it builds."""
    setuptools = pytest.importorskip(
        "setuptools", reason="the wheel is built without the network: pip install '.[test]'"
    )
    if int(setuptools.__version__.split(".")[0]) < SETUPTOOLS:
        pytest.skip(f"needs setuptools>={SETUPTOOLS}: pip install '.[test]'")
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("gs_compile", *WINGS):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    build = python("-c", f"from setuptools import build_meta; build_meta.build_wheel({str(target)!r})", cwd=source)
    assert build.returncode == 0, build.stdout + build.stderr
    (path,) = target.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())
    data = {"gs_compile/py.typed", "gs_compile/cli/report/timeline.html", "gs_compile/status/page.html"}
    machines = ROOT / "gs_compile" / "planner" / "measure" / "machines"
    data |= {str(path.relative_to(ROOT)) for path in machines.iterdir()}
    assert names == files().keys() | data


def test_the_wheel_names_the_backend_and_the_command(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read(name).decode())
    assert dict(entry_points["torch_dynamo_backends"]) == {"greedysnake": "gs_compile.model.backend:greedysnake"}
    assert dict(entry_points["console_scripts"]) == {"greedysnake": "gs_compile.cli.main:main"}


def test_an_installed_wheel_imports_from_anywhere(wheel, tmp_path):
    wheel.extractall(tmp_path / "site")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import gs_compile, gs_compile.passes, gs_compile.runtime\n"
        "print(gs_compile.__file__, gs_compile.passes.__file__, gs_compile.runtime.__file__, sep='\\n')"
    )
    run = python("-c", code, cwd=elsewhere)
    assert run.returncode == 0, run.stderr
    folder = tmp_path / "site" / "gs_compile"
    assert run.stdout.split() == [str(each / "__init__.py") for each in (folder, *(folder / wing for wing in WINGS))]


@pytest.mark.slow
def test_an_installed_wheel_trains(wheel, tmp_path):
    """As `make dist` has it, but that torch and others are those of this environment."""
    made = python("-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    environment = tmp_path / "env" / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")}))
    shutil.copy(ROOT / "tests" / "installed.py", tmp_path)
    install = ["--python", environment, "install", "--no-deps", "--no-index", wheel.filename]
    installed = python("-m", "pip", *install, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))  # not the editable installation, which comes later
    run = subprocess.run(
        [environment, tmp_path / "installed.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "is installed, and trains" in run.stdout


def test_the_metadata_is_whole(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    found = email.message_from_bytes(wheel.read(name))
    for field in ("Summary", "Author", "License-Expression", "Keywords", "Project-URL", "Requires-Python"):
        assert found[field], field
    assert found["Description-Content-Type"] == "text/markdown"
    assert {"hf", "plot", "test", "dev"} <= set(found.get_all("Provides-Extra"))
    oldest = found["Requires-Python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {oldest}" in found.get_all("Classifier")
    readme = (ROOT / "README.md").read_text()
    (torch,) = (each.removeprefix("torch>=") for each in found.get_all("Requires-Dist") if each.startswith("torch>="))
    assert f"torch {torch} or newer" in readme
    assert f"Python {oldest} or newer" in readme


def test_the_image_has_the_tested_versions_and_the_command():
    lines = (ROOT / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (python,) = re.findall(r"^FROM python:([\d.]+)-slim$", lines, re.M)
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]
    assert re.findall(r"torch==\S+", lines) == re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.M)
    assert set(re.findall(r"/src\[(\w+)\]", lines)) <= project["optional-dependencies"].keys()
    assert re.findall(r'^CMD \["(\w+)"', lines, re.M) == list(project["scripts"])
    assert not {"pyproject.toml", "README.md", "LICENSE", *WINGS} & set((ROOT / ".dockerignore").read_text().split())


@pytest.mark.parametrize("wing", WINGS)
def test_a_link_makes_a_wing_importable_under_one_name(wing):
    assert (ROOT / "gs_compile" / wing).readlink() == Path("..") / wing
    run = python("-c", f"import {wing}", cwd=ROOT)
    assert run.returncode == 1
    assert f"ImportError: import gs_compile.{wing}: the bare name `{wing}` is not this package's" in run.stderr


def test_the_oldest_versions_are_those_that_are_tested():
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["hf"]
    bounds = dict(each.split(">=") for each in extra if ">=" in each)
    pins = dict(re.findall(r"^(\w+)==(.+)$", (ROOT / "constraints-oldest.txt").read_text(), re.M))
    assert {name: pins[name] for name in bounds} == {name: f"{bound}.0" for name, bound in bounds.items()}


def test_a_name_that_the_package_has_not():
    """Those that it has come when they are used: test_training_run.py."""
    with pytest.raises(AttributeError, match="no attribute 'inspects'"):
        _ = gs_compile.inspects


def test_a_release_writes_its_version_wherever_one_stands(tmp_path):
    release = runpy.run_path(str(ROOT / ".ci" / "release.py"))
    for name in release["PLACES"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    found = {path.name: text for path, text in release["written"](tmp_path, "7.8.9", "2030-01-02").items()}
    changed = {name: text.count("7.8.9") for name, text in found.items()}
    assert changed == {"pyproject.toml": 1, "version.py": 1, "CITATION.cff": 1, "CHANGELOG.md": 1}
    assert "## 7.8.9 (2030-01-02)\n" in found["CHANGELOG.md"]
    with pytest.raises(ValueError, match="is no version"):
        release["written"](tmp_path, "v1", "2030-01-02")
    (tmp_path / "CHANGELOG.md").write_text(found["CHANGELOG.md"])
    with pytest.raises(ValueError, match="has 0 places for a version"):
        release["written"](tmp_path, "8.0.0", "2030-01-02")


def test_the_version_is_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited == [project["version"]] == [gs_compile.__version__]
