"""The doctor's words of torch, compilers, the solver and CUDA, present or missing."""

from __future__ import annotations

from functools import partial
from importlib.metadata import PackageNotFoundError

import pytest

from gs_compile.cli.doctor import software as checks_software
from gs_compile.cli.doctor.check import Check
from gs_compile.errors import VersionError
from gs_compile.planner.measure.profile import Profile

GiB = 2**30


def fails(error: Exception):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize(
    ("version", "state", "found"),
    [
        (lambda: "2.13.0+cpu", "ok", "2.13.0+cpu"),
        (lambda: "2.14.0a0", "warn", "2.14.0a0"),
        (fails(OSError("libcudart.so: cannot open")), "bad", "cannot be imported: libcudart.so: cannot open"),
    ],
)
def test_torch(version, state, found):
    check = checks_software.torch_version(version)
    assert (check.state, check.found) == (state, found)
    assert bool(check.advice) == (state != "ok")


def test_capture():
    assert checks_software.capture().state == "ok"
    check = checks_software.capture(fails(VersionError("torch 3 moved a hook; install torch==2.13.0")))
    assert check == Check("capture by Dynamo", "bad", "torch 3 moved a hook", "install torch==2.13.0")


def test_compilers():
    assert checks_software.compiler("cpu", lambda _: "inductor") == Check("compiler", "ok", "inductor, for cpu")
    assert checks_software.compiler("cpu", lambda _: "eager").advice == "install g++"
    assert "Triton" in checks_software.compiler("cuda", lambda _: "eager").advice
    assert checks_software.compiler("cuda", lambda _: "eager").state == "warn"


def test_transformers():
    assert checks_software.transformers(lambda _: "5.0") == Check("transformers", "ok", "5.0")
    check = checks_software.transformers(fails(PackageNotFoundError("transformers")))
    assert (check.state, check.found) == ("warn", "not installed")


def test_the_solver():
    assert checks_software.solver().state == "ok"
    assert checks_software.solver(lambda _: None, lambda _: "1") == Check("solver", "ok", "HiGHS 1, by cvxpy 1")
    for missing in (
        checks_software.solver(fails(ImportError("no highspy"))),
        checks_software.solver(lambda _: None, fails(PackageNotFoundError("cvxpy"))),
    ):
        assert (missing.state, missing.advice) == ("bad", "pip install cvxpy highspy")


def test_cuda(tmp_path):
    assert checks_software.cuda(list, proc=tmp_path).state == "ok"
    found = checks_software.cuda(lambda: [("H200", 141 * GiB), ("A100", 80 * GiB)], proc=tmp_path)
    assert found == Check("CUDA", "ok", "H200 with 141.0 GiB, A100 with 80.0 GiB")
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").write_text("NVRM")
    assert checks_software.cuda(list, proc=tmp_path).state == "warn"


def test_pinned_memory():
    look = partial(checks_software.pinned_memory, limit=8 << 20)
    assert look(has_cuda=False).found == "nothing is pinned without CUDA; limit of locked memory 8.0 MiB"
    asked = []
    assert look(has_cuda=True, pin=asked.append).found == "64.0 MiB pinned; limit of locked memory 8.0 MiB"
    assert asked == [64 << 20]
    refused = look(has_cuda=True, pin=fails(RuntimeError("CUDA error: invalid argument\nmore")))
    assert refused.state == "bad"
    assert refused.found == "64.0 MiB cannot be pinned (CUDA error: invalid argument); limit of locked memory 8.0 MiB"
    assert "memlock=-1" in refused.advice
    unlimited = checks_software.pinned_memory(has_cuda=True, limit=-1, pin=asked.append)
    assert unlimited.found == "64.0 MiB pinned; no limit of locked memory"


def test_the_machine_profile(tmp_path):
    path = tmp_path / "profile.json"
    assert checks_software.profile(path) == Check("machine profile", "ok", "not measured yet; greedysnake probe does")
    Profile(
        name="a", device="cpu", host_nbytes=1, ssd_nbytes=1, matmul_flops_per_second={"fp32": 1.0},
        memory_bytes_per_second=1.0, ssd_read_bytes_per_second=1.0, ssd_write_bytes_per_second=1.0,
        ssd_read_mixed_bytes_per_second=1.0, ssd_write_mixed_bytes_per_second=1.0,
        update_elements_per_second=1.0, update_mixed_elements_per_second=1.0,
    ).save(path)  # fmt: skip
    measured = path.stat().st_mtime
    fresh = checks_software.profile(path, measured + 3 * 86400)
    assert (fresh.state, fresh.found) == ("ok", f"measured 3 days ago, {path}")
    old = checks_software.profile(path, measured + 100 * 86400)
    assert (old.state, old.advice) == ("warn", "greedysnake probe --refresh")
    path.write_text("{}")
    broken = checks_software.profile(path)
    assert (broken.state, broken.advice) == ("warn", "greedysnake probe --refresh")
