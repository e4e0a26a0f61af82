"""The doctor's words of a machine, its software and its storage; the machine is made of files, and stays as it was."""

from __future__ import annotations

import errno
import json
import os
import resource
import sys
from importlib import import_module, metadata, reload
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_line import run
from standin import fails
from stored_run import save, stored_folders, stored_run
from tiered import another_run

from gs_compile.capture import inductor
from gs_compile.cli import doctor
from gs_compile.cli.doctor import Check, checked
from gs_compile.errors import StorageError, VersionError
from gs_compile.planner.measure import machines
from gs_compile.planner.measure.shipped import SHIPPED
from gs_compile.runtime import stream
from gs_compile.runtime.storage import system
from gs_compile.runtime.storage.manifest import NAME
from gs_compile.runtime.storage.stored import FOLDER

GiB = 2**30


def write(path: Path, text: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
    return path


@pytest.fixture
def proc(tmp_path):
    """A machine of 64 GiB without groups."""
    write(tmp_path / "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB")
    write(tmp_path / "proc/self/cgroup", "0::/")
    return tmp_path / "proc"


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


# Software -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("load", "state", "found"),
    [
        (lambda _: SimpleNamespace(__version__="2.13.0+cpu"), "ok", "2.13.0+cpu"),
        (lambda _: SimpleNamespace(__version__="2.16.0a0"), "warn", "2.16.0a0"),
        (fails(OSError("libcudart.so: cannot open")), "bad", "cannot be imported: libcudart.so: cannot open"),
    ],
)
def test_torch(monkeypatch, load, state, found):
    monkeypatch.setattr(doctor, "import_module", load)
    check = doctor.torch_version()
    assert (check.state, check.found, bool(check.advice)) == (state, found, state != "ok")


def test_a_torch_that_the_capture_does_not_know(monkeypatch):
    assert doctor.torch_version().state == "ok"

    def load(name):
        if name != "torch":
            raise VersionError("torch 3 moved a hook; install torch==2.13.0")
        return torch

    monkeypatch.setattr(doctor, "import_module", load)
    assert doctor.torch_version() == Check("torch 3 moved a hook", "install torch==2.13.0", is_bad=True)


def test_another_system_than_linux(monkeypatch):
    """Before what only Linux has is imported."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(doctor, "import_module", lambda name: reload(import_module(name)) if "model" in name else torch)
    found = Check("training needs Linux, and this is win32", "on Windows, install it in WSL2", is_bad=True)
    assert doctor.torch_version() == found


@pytest.mark.parametrize(
    ("policy", "load", "state", "words"),
    [
        ("", 3.0, "warn", "spin while they wait; load 3.0 on 4 cores"),
        ("", 1.0, "ok", "spin while they wait; load 1.0 on 4 cores"),
        ("PASSIVE", 3.0, "ok", "sleep while they wait; load 3.0 on 4 cores"),
    ],
)
def test_threads_that_spin_beside_others(monkeypatch, policy, load, state, words):
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(doctor, "usable_cores", lambda: 4)
    check = doctor.waiting_threads()
    assert (check.state, check.found) == (state, words)
    assert ("OMP_WAIT_POLICY=passive" in check.advice) == (state == "warn")


@pytest.mark.parametrize(("devices", "name", "advice"), [([], "cpu", "install g++"), ([("H200", 1)], "cuda", "Triton")])
def test_compilers(monkeypatch, devices, name, advice):
    monkeypatch.setattr(stream, "accelerators", lambda: devices)
    monkeypatch.setattr(inductor, "best_compiler", lambda device_type: {name: "inductor"}[device_type])
    assert doctor.compiler() == Check(f"inductor, for {name}")
    monkeypatch.setattr(inductor, "best_compiler", lambda _: "eager")
    assert doctor.compiler().state == "warn"
    assert advice in doctor.compiler().advice


def test_a_solver_that_is_not_installed(monkeypatch):
    assert doctor.solver().state == "ok"
    monkeypatch.setattr(metadata, "version", fails(metadata.PackageNotFoundError("cvxpy")))
    assert (doctor.solver().state, doctor.solver().advice) == ("bad", "pip install cvxpy highspy")
    monkeypatch.setattr(doctor, "import_module", fails(ImportError("no highspy")))
    assert (doctor.solver().state, doctor.solver().advice) == ("bad", "pip install cvxpy highspy")


def test_no_cuda(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "accelerators", list)
    assert doctor.cuda(proc=tmp_path) == Check("no device: the CPU computes")
    write(tmp_path / "driver/nvidia/version", "NVRM")
    assert doctor.cuda(proc=tmp_path).state == "warn"


def test_cuda_and_pinned_memory(monkeypatch):
    pinned, limit = [], "limit of locked memory 8.0 MiB"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, -1))
    monkeypatch.setattr(stream, "pinned_block", pinned.append)
    monkeypatch.setattr(stream, "accelerators", lambda: [("H200", 141 * GiB), ("A100", 80 * GiB)])
    devices = "H200 with 141.0 GiB, A100 with 80.0 GiB"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    found = doctor.cuda()
    assert (found.state, "PYTORCH_ALLOC_CONF=expandable_segments:True" in found.advice) == ("warn", True)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:512,expandable_segments:True")
    assert doctor.cuda() == Check(f"{devices}; 64.0 MiB pinned; {limit}")
    assert pinned == 2 * [64 << 20]
    monkeypatch.setattr(stream, "pinned_block", fails(RuntimeError("CUDA error: invalid argument\nmore")))
    refused = doctor.cuda()
    assert refused.found == f"{devices}; 64.0 MiB cannot be pinned (CUDA error: invalid argument); {limit}"
    assert (refused.state, "memlock=-1" in refused.advice) == ("bad", True)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (-1, -1))
    assert doctor.cuda().found.endswith("no limit of locked memory")


def test_the_machine_profile(tmp_path, monkeypatch):
    path = tmp_path / "profile.json"
    monkeypatch.setattr(machines, "remembered", lambda _: path)
    assert doctor.profile([]) == Check("not measured yet: run greedysnake probe")
    path.write_text((SHIPPED / "laptop.json").read_text())
    assert doctor.profile([]) == Check(f"measured today, {path}")
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 3 * 86400))
    assert doctor.profile([]) == Check(f"measured 3 days ago, {path}")
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 100 * 86400))
    assert (doctor.profile([]).state, doctor.profile([]).advice) == ("warn", "greedysnake probe --refresh")
    path.write_text("{}")
    assert (doctor.profile([]).state, doctor.profile([]).advice) == ("warn", "greedysnake probe --refresh")


# Storage --------------------------------------------------------------------------------------------------------------


def test_direct_io_is_tried_and_leaves_nothing(tmp_path):
    check = doctor.direct_io(tmp_path / "not" / "there")
    assert (check.state == "ok") == (check.found == "works")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("refused", "error", "state", "found", "advice"),
    [
        (os.O_DIRECT, OSError(errno.EINVAL, "Invalid argument"), "warn", "through the page cache", "ext4 or xfs"),
        (~0, PermissionError(errno.EACCES, "Permission denied"), "bad", "Permission denied", "--storage"),
        (
            ~0,
            StorageError(errno.EIO, "the drive is gone", "x"),
            "bad",
            "StorageError: [Errno 5] the drive",
            "--storage",
        ),
    ],
    ids=["direct I/O is refused", "nothing can be written", "the drive is broken"],
)
def test_a_directory_that_is_not_fit(tmp_path, monkeypatch, refused, error, state, found, advice):
    def open_file(name, flags, folder_fd):
        if flags & refused:
            raise error
        return os.open(name, flags, 0o600, dir_fd=folder_fd)

    monkeypatch.setattr(system, "open_file", open_file)
    check = doctor.direct_io(tmp_path)
    assert check.state == state
    assert found in check.found
    assert advice in check.advice


def test_a_directory_with_runs(tmp_path):
    folder = tmp_path / FOLDER
    assert doctor.run_folder(tmp_path) == Check("none")
    with another_run(tmp_path):
        check = doctor.run_folder(tmp_path)
    assert (check.state, check.found) == ("warn", f"{folder} is in use")
    folder.mkdir(mode=0o700)
    assert doctor.run_folder(tmp_path) == Check("none")
    write(folder / "w3", "")  # of a run that was killed
    folder.chmod(0o700)
    check = doctor.run_folder(tmp_path)
    assert check.state == "ok"
    assert "a run was killed and left 1 files" in check.found
    (folder / "w3").unlink()
    folder.chmod(0o755)
    check = doctor.run_folder(tmp_path)
    assert check.state == "bad"
    assert "other users can access this folder" in check.found
    assert f"chmod -R go= {folder}, or choose another" in check.found


def test_a_directory_with_a_run_that_cannot_be_written(tmp_path, monkeypatch):
    """Fault: a sandbox was suspected."""
    (tmp_path / FOLDER).mkdir(mode=0o700)
    monkeypatch.setattr(system, "open_file", fails(OSError(errno.EROFS, os.strerror(errno.EROFS))))
    check = checked("runs", doctor.run_folder, tmp_path)
    assert check.state == "bad"
    assert "open failed: Read-only file system; after errors" in check.found


def test_a_directory_with_durable_runs(tmp_path):
    assert doctor.durable_runs(tmp_path / "none") == doctor.durable_runs(tmp_path) == Check("none")
    (folder,) = stored_folders(tmp_path, "drive")
    save(folder, stored_run(folder))
    check = doctor.durable_runs(folder.parent)
    assert check.found == f"run 0123abcd at step 3 of 2026-01-02T03:04:05+00:00 in {FOLDER}, 136.0 KiB"
    assert check.advice == f'resume="auto" resumes it; greedysnake store gc {folder.parent} --all removes it'
    (folder / NAME).write_bytes(b"{}")
    assert doctor.durable_runs(folder.parent) == Check("none")
    check = doctor.run_folder(folder.parent)
    assert (check.found, check.state) == (f"{folder} has a damaged commit", "bad")


# All together ---------------------------------------------------------------------------------------------------------


def test_what_the_system_hides():
    hidden = checked("host memory", fails(FileNotFoundError(2, "No such file", "/proc/meminfo")))
    assert (hidden.name, hidden.state) == ("host memory", "warn")
    assert hidden.found.startswith("the system does not provide this: ")


def test_a_broken_torch_is_found_without_it(monkeypatch):
    monkeypatch.setattr(doctor, "import_module", fails(ImportError("no torch")))
    assert [check.name for check in doctor.examine([])] == ["torch", "host memory"]


def test_the_command(tmp_path):
    result = run("doctor", "--storage", tmp_path, "--json")
    checks = {check.pop("name"): check for check in json.loads(result.stdout)["checks"]}
    assert result.exit_code == (1 if "bad" in {check["state"] for check in checks.values()} else 0)
    assert "measured" in checks["machine profile"]["found"]
    of_storage = [f"{name} in {tmp_path}" for name in ("direct I/O", "runs", "durable runs")]
    assert list(checks) == [
        "torch",
        "host memory",
        "CUDA",
        "threads",
        "compiler",
        "solver",
        "machine profile",
        *of_storage,
    ]
    assert not list(tmp_path.iterdir())


def test_something_bad_is_an_exit_code(monkeypatch):
    bad = Check("broken [Errno 5]", "replace it", is_bad=True, name="drive")
    monkeypatch.setattr("gs_compile.cli.doctor.examine", lambda _: (bad,))
    result = run("doctor")
    assert result.exit_code == 1
    heading, row = result.stdout.splitlines()
    assert heading.split() == ["check", "state", "found", "what", "to", "do"]
    assert row.split() == ["drive", "bad", "broken", "[Errno", "5]", "replace", "it"]
