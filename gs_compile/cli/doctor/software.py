"""software: torch, what the capture rests on in it, compilers, the solver, and CUDA where there is any.

torch is imported by the checks that need it: a broken one is a finding, not the end.
"""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path

from gs_compile.cli.doctor.check import Finding, Problem, check
from gs_compile.errors import ProfileError, VersionError
from gs_compile.machine import PROC, format_bytes

NEWEST_TORCH = (2, 13)  # that the tests have run with
OLD_SECONDS = 90 * 86400.0  # drives age and machines change
STREAM = "gs_compile.runtime.stream"  # imports torch: only when a check needs it
PIN_NBYTES = 64 << 20  # more than the usual limit of locked memory


@check("torch")
def torch_version(version: Callable[[], str] | None = None) -> Finding:
    """Whether torch can be imported, and is one that the tests have run with."""
    try:
        found = (version or _torch_version)()
    except (ImportError, OSError) as error:  # a shared library that is missing
        return Problem(f"cannot be imported: {error}", "reinstall torch: pip install --force-reinstall", "bad")
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) > NEWEST_TORCH:
        tested = ".".join(map(str, NEWEST_TORCH))
        return Problem(found, f"newer than the tests have seen: install torch=={tested}.* in doubt")
    return found


@check("capture by Dynamo")
def capture(load: Callable[[str], object] = import_module) -> Finding:
    """Whether torch is new enough, and Dynamo has what the capture rests on."""
    try:
        load("gs_compile.capture.dynamo")
    except VersionError as error:
        found, _, advice = str(error).partition("; ")
        return Problem(found, advice, "bad")
    return "all that it rests on is there"


@check("compiler")
def compiler(device_type: str, best: Callable[[str], str] | None = None) -> Finding:
    """The compiler of a layer's code for a device."""
    if best is None:
        from gs_compile.capture.inductor import best_compiler

        best = best_compiler
    if best(device_type) == "inductor":
        return f"inductor, for {device_type}"
    advice = "install g++" if device_type == "cpu" else "install the Triton that belongs to this torch"
    return Problem("none that inductor can use: layers will run uncompiled", advice)


@check("transformers")
def transformers(version: Callable[[str], str] = metadata.version) -> Finding:
    """Optional: where most models come from, and what `inspect` and `plan` build from a config."""
    try:
        return version("transformers")
    except metadata.PackageNotFoundError:
        advice = "for models of HuggingFace: pip install 'greedysnake[hf]'"
        return Problem("not installed", advice)


@check("solver")
def solver(load: Callable[[str], object] = import_module, version: Callable[[str], str] = metadata.version) -> Finding:
    """Whether the planner can solve: it needs HiGHS, and cvxpy to speak to it."""
    try:
        load("highspy")
        return f"HiGHS {version('highspy')}, by cvxpy {version('cvxpy')}"
    except (ImportError, OSError) as error:  # PackageNotFoundError is an ImportError
        return Problem(f"HiGHS or cvxpy is missing: {error}", "pip install cvxpy highspy", "bad")


@check("CUDA")
def cuda(devices: Callable[[], list[tuple[str, int]]] | None = None, *, proc: Path = PROC) -> Finding:
    """The devices that torch sees: their names and memory."""
    found = (devices or import_module(STREAM).cuda_devices)()
    if found:
        return ", ".join(f"{name} with {format_bytes(nbytes)}" for name, nbytes in found)
    if (proc / "driver/nvidia/version").exists():
        advice = "install a torch that is built for CUDA, or look at CUDA_VISIBLE_DEVICES"
        return Problem("NVIDIA's driver is there, but torch sees no device", advice)
    return "no device: what it would compute, the CPU does"


@check("pinned memory")
def pinned_memory(*, has_cuda: bool, limit: int | None = None, pin: Callable[[int], object] | None = None) -> Finding:
    """Whether host memory can be pinned for a GPU, beyond the `limit` of locked memory too: bytes, or -1 for none."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    limited = "no limit of locked memory" if limit < 0 else f"limit of locked memory {format_bytes(limit)}"
    if not has_cuda:
        return f"nothing is pinned without CUDA; {limited}"
    try:
        (pin or import_module(STREAM).pinned_block)(PIN_NBYTES)
    except RuntimeError as error:
        found = f"{format_bytes(PIN_NBYTES)} cannot be pinned ({str(error).splitlines()[0]}); {limited}"
        return Problem(found, "ulimit -l unlimited; for docker, --ulimit memlock=-1", "bad")
    return f"{format_bytes(PIN_NBYTES)} pinned; {limited}"


@check("machine profile")
def profile(path: Path, now: float | None = None) -> Finding:
    """Whether this machine has been measured, and lately."""
    from gs_compile.planner.measure.profile import Profile

    measure = "greedysnake probe"
    if not path.exists():
        return f"not measured yet; {measure} does"
    try:
        Profile.load(path)
    except ProfileError as error:
        return Problem(str(error), f"{measure} --refresh")
    seconds = (now or time.time()) - path.stat().st_mtime
    found = f"measured {seconds / 86400:.0f} days ago, {path}"
    return Problem(found, f"{measure} --refresh") if seconds > OLD_SECONDS else found


def _torch_version() -> str:
    return str(import_module("torch").__version__)
