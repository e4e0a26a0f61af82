"""The doctor's words of memory, cores and software; the machine is made of files, and stays as it was."""

from __future__ import annotations

import json
import os
import resource
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from gs_compile.capture import inductor
from gs_compile.cli.doctor import doctor
from gs_compile.cli.doctor.check import Check, checked
from gs_compile.cli.main import app
from gs_compile.errors import VersionError
from gs_compile.planner.measure import machines
from gs_compile.runtime import stream

GiB = 2**30


def write(path: Path, text: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
    return path


def fails(error: Exception):
    def fail(*_, **__):
        raise error

    return fail


@pytest.fixture
def proc(tmp_path):
    """A machine of 64 GiB without groups."""
    meminfo(tmp_path / "proc")
    return tmp_path / "proc"


def meminfo(proc: Path, *, available: int = 48, swap: int = 0, swapped: int = 0) -> None:
    entries = {"MemTotal": 64, "MemAvailable": available, "SwapTotal": swap, "SwapFree": swap - swapped}
    write(proc / "meminfo", "\n".join(f"{key}: {size << 20} kB" for key, size in entries.items()))
    write(proc / "self/cgroup", "0::/")


# The machine ----------------------------------------------------------------------------------------------------------


def test_memory(tmp_path, proc):
    group = tmp_path / "cgroup"
    assert doctor.memory(proc=proc, cgroup=group) == Check("48.0 GiB free of 64.0 GiB")
    write(group / "memory.max", 16 * GiB)
    write(group / "memory.current", 6 * GiB)
    limit = "10.0 GiB free of 16.0 GiB, this container's or job's limit; the machine has 64.0 GiB"
    assert doctor.memory(proc=proc, cgroup=group) == Check(limit)
    write(group / "memory.current", 15 * GiB)
    assert doctor.memory(proc=proc, cgroup=group).state == "warn"


@pytest.mark.parametrize(
    ("swap", "swapped", "state", "found"),
    [(0, 0, "ok", "none"), (8, 0, "ok", "0 B used of 8.0 GiB"), (8, 3, "warn", "3.0 GiB used of 8.0 GiB")],
)
def test_swap(proc, swap, swapped, state, found):
    meminfo(proc, swap=swap, swapped=swapped)
    check = doctor.swap(proc=proc)
    assert (check.state, check.found) == (state, found)


@pytest.mark.parametrize(
    ("count", "state", "advice"),
    [(16, "ok", ""), (8, "ok", ""), (7, "warn", "idle: set OMP_NUM_THREADS=16"), (17, "warn", "wait for each other")],
)
def test_threads(tmp_path, proc, monkeypatch, count, state, advice):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    check = doctor.threads(proc=proc, cgroup=tmp_path / "cgroup")
    assert (check.state, check.found) == (state, f"torch computes with {count} threads on 16 usable cores")
    assert advice in check.advice


@pytest.mark.parametrize(
    ("environment", "state", "found"),
    [
        ({"PATH": "/bin"}, "ok", "nothing is set"),
        ({"OMP_NUM_THREADS": "4", "HOME": "/"}, "ok", "OMP_NUM_THREADS=4"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, "warn", "OMP_WAIT_POLICY=ACTIVE"),
        ({"OMP_WAIT_POLICY": "passive"}, "ok", "OMP_WAIT_POLICY=passive"),
        ({"OMP_PROC_BIND": "close"}, "warn", "OMP_PROC_BIND=close"),
        ({"OMP_PROC_BIND": "FALSE"}, "ok", "OMP_PROC_BIND=FALSE"),
    ],
)
def test_openmp(environment, state, found):
    check = doctor.openmp(environment)
    assert (check.state, check.found) == (state, found)


@pytest.mark.parametrize(
    ("cores", "state", "nodes"), [({0, 1, 9}, "ok", "node0"), ({0, 4}, "warn", "node0, node1")], ids=str
)
def test_numa(tmp_path, monkeypatch, cores, state, nodes):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    assert doctor.numa(sys=tmp_path) == Check("not told by the system")
    for number, its_cores in enumerate(("0-3,8-11", "4-7,12-15", "")):  # the last has memory alone
        write(tmp_path / f"devices/system/node/node{number}/cpulist", its_cores)
    check = doctor.numa(sys=tmp_path)
    assert (check.state, check.found) == (state, f"2 nodes; this process runs on {nodes}")


# Software -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "state", "found"),
    [
        (lambda _: SimpleNamespace(__version__="2.13.0+cpu"), "ok", "2.13.0+cpu"),
        (lambda _: SimpleNamespace(__version__="2.14.0a0"), "warn", "2.14.0a0"),
        (fails(OSError("libcudart.so: cannot open")), "bad", "cannot be imported: libcudart.so: cannot open"),
    ],
)
def test_torch(monkeypatch, load, state, found):
    monkeypatch.setattr(doctor, "import_module", load)
    check = doctor.torch_version()
    assert (check.state, check.found, bool(check.advice)) == (state, found, state != "ok")


def test_capture(monkeypatch):
    assert doctor.capture().state == "ok"
    monkeypatch.setattr(doctor, "import_module", fails(VersionError("torch 3 moved a hook; install torch==2.13.0")))
    assert doctor.capture() == Check("torch 3 moved a hook", "install torch==2.13.0", is_bad=True)


@pytest.mark.parametrize(("devices", "name", "advice"), [([], "cpu", "install g++"), ([("H200", 1)], "cuda", "Triton")])
def test_compilers(monkeypatch, devices, name, advice):
    monkeypatch.setattr(stream, "cuda_devices", lambda: devices)
    monkeypatch.setattr(inductor, "best_compiler", lambda device_type: {name: "inductor"}[device_type])
    assert doctor.compiler() == Check(f"inductor, for {name}")
    monkeypatch.setattr(inductor, "best_compiler", lambda _: "eager")
    assert doctor.compiler().state == "warn"
    assert advice in doctor.compiler().advice


def test_what_is_not_installed(monkeypatch):
    assert doctor.transformers().state == doctor.solver().state == "ok"
    monkeypatch.setattr(metadata, "version", fails(metadata.PackageNotFoundError("cvxpy")))
    assert (doctor.transformers().state, doctor.transformers().found) == ("warn", "not installed")
    assert (doctor.solver().state, doctor.solver().advice) == ("bad", "pip install cvxpy highspy")
    monkeypatch.setattr(doctor, "import_module", fails(ImportError("no highspy")))
    assert (doctor.solver().state, doctor.solver().advice) == ("bad", "pip install cvxpy highspy")


def test_cuda(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "cuda_devices", list)
    assert doctor.cuda(proc=tmp_path).state == "ok"
    write(tmp_path / "driver/nvidia/version", "NVRM")
    assert doctor.cuda(proc=tmp_path).state == "warn"
    monkeypatch.setattr(stream, "cuda_devices", lambda: [("H200", 141 * GiB), ("A100", 80 * GiB)])
    assert doctor.cuda(proc=tmp_path) == Check("H200 with 141.0 GiB, A100 with 80.0 GiB")


def test_pinned_memory(monkeypatch):
    pinned, limit = [], "limit of locked memory 8.0 MiB"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, -1))
    monkeypatch.setattr(stream, "pinned_block", pinned.append)
    monkeypatch.setattr(stream, "cuda_devices", list)
    assert doctor.pinned_memory().found == f"nothing is pinned without CUDA; {limit}"
    monkeypatch.setattr(stream, "cuda_devices", lambda: [("H200", 1)])
    assert doctor.pinned_memory().found == f"64.0 MiB pinned; {limit}"
    assert pinned == [64 << 20]
    monkeypatch.setattr(stream, "pinned_block", fails(RuntimeError("CUDA error: invalid argument\nmore")))
    refused = doctor.pinned_memory()
    assert refused.found == f"64.0 MiB cannot be pinned (CUDA error: invalid argument); {limit}"
    assert (refused.state, "memlock=-1" in refused.advice) == ("bad", True)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (-1, -1))
    assert doctor.pinned_memory().found.endswith("no limit of locked memory")


def test_the_machine_profile(tmp_path, monkeypatch):
    path = tmp_path / "profile.json"
    monkeypatch.setattr(machines, "remembered", lambda _: path)
    assert doctor.profile([]) == Check("not measured yet; greedysnake probe does")
    path.write_text((machines.SHIPPED / "laptop.json").read_text())
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 3 * 86400))
    assert doctor.profile([]) == Check(f"measured 3 days ago, {path}")
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 100 * 86400))
    assert (doctor.profile([]).state, doctor.profile([]).advice) == ("warn", "greedysnake probe --refresh")
    path.write_text("{}")
    assert (doctor.profile([]).state, doctor.profile([]).advice) == ("warn", "greedysnake probe --refresh")


# All together ---------------------------------------------------------------------------------------------------------


def test_what_the_system_hides():
    hidden = checked("swap", fails(FileNotFoundError(2, "No such file", "/proc/meminfo")))
    assert (hidden.name, hidden.state) == ("swap", "warn")
    assert hidden.found.startswith("not told by the system: ")


def test_a_broken_torch_is_found_without_it(monkeypatch):
    monkeypatch.setattr(doctor, "import_module", fails(ImportError("no torch")))
    assert [check.name for check in doctor.examine([])] == ["torch", "host memory", "swap", "NUMA", "OpenMP"]


def test_the_command(tmp_path):
    result = CliRunner().invoke(app, ["doctor", "--storage", str(tmp_path), "--json"])
    checks = {check.pop("name"): check for check in json.loads(result.stdout)["checks"]}
    assert result.exit_code == (1 if "bad" in {check["state"] for check in checks.values()} else 0)
    assert checks["capture by Dynamo"]["state"] == "ok"
    assert "measured" in checks["machine profile"]["found"]
    assert checks[f"drive of {tmp_path}"]["found"]
    assert not list(tmp_path.iterdir())


def test_something_bad_is_an_exit_code(monkeypatch):
    bad = Check("broken [Errno 5]", "replace it", is_bad=True, name="drive")
    monkeypatch.setattr("gs_compile.cli.doctor.doctor.examine", lambda _: (bad,))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    heading, row = result.stdout.splitlines()
    assert heading.split() == ["check", "state", "found", "what", "to", "do"]
    assert row.split() == ["drive", "bad", "broken", "[Errno", "5]", "replace", "it"]
