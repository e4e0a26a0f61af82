"""software: torch, what the capture rests on in it, compilers, the solver, and CUDA where there is any.

What imports torch is imported by the checks that need it: a broken one is a finding, not the end.
"""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path

from gs_compile.cli.doctor.check import Check
from gs_compile.errors import ProfileError, VersionError
from gs_compile.machine import PROC, format_bytes

NEWEST_TORCH = (2, 13)  # that the tests have run with
OLD_SECONDS = 90 * 86400.0  # drives age and machines change
PIN_NBYTES = 64 << 20  # more than the usual limit of locked memory


def torch_version() -> Check:
    """Whether torch can be imported, and is one that the tests have run with."""
    try:
        found = str(import_module("torch").__version__)
    except (ImportError, OSError) as error:  # a shared library that is missing
        return Check(f"cannot be imported: {error}", "reinstall torch: pip install --force-reinstall", is_bad=True)
    is_newer = tuple(int(part) for part in re.findall(r"\d+", found)[:2]) > NEWEST_TORCH
    tested = ".".join(map(str, NEWEST_TORCH))
    return Check(found, f"newer than the tests have seen: install torch=={tested}.* in doubt" if is_newer else "")


def capture() -> Check:
    """Whether torch is new enough, and Dynamo has what the capture rests on."""
    try:
        import_module("gs_compile.capture.dynamo")
    except VersionError as error:
        found, _, advice = str(error).partition("; ")
        return Check(found, advice, is_bad=True)
    return Check("all that it rests on is there")


def compiler() -> Check:
    """The compiler of a layer's code for the device of this machine."""
    from gs_compile.capture.inductor import best_compiler
    from gs_compile.runtime.stream import cuda_devices

    device_type = "cuda" if cuda_devices() else "cpu"
    if best_compiler(device_type) == "inductor":
        return Check(f"inductor, for {device_type}")
    advice = "install g++" if device_type == "cpu" else "install the Triton that belongs to this torch"
    return Check("none that inductor can use: layers will run uncompiled", advice)


def transformers() -> Check:
    """Optional: where most models come from, and what `inspect` and `plan` build from a config."""
    try:
        return Check(metadata.version("transformers"))
    except metadata.PackageNotFoundError:
        return Check("not installed", "for models of HuggingFace: pip install 'greedysnake[hf]'")


def solver() -> Check:
    """Whether the planner can solve: it needs HiGHS, and cvxpy to speak to it."""
    try:
        import_module("highspy")
        return Check(f"HiGHS {metadata.version('highspy')}, by cvxpy {metadata.version('cvxpy')}")
    except (ImportError, OSError) as error:  # PackageNotFoundError is an ImportError
        return Check(f"HiGHS or cvxpy is missing: {error}", "pip install cvxpy highspy", is_bad=True)


def cuda(*, proc: Path = PROC) -> Check:
    """The devices that torch sees: their names and memory."""
    from gs_compile.runtime.stream import cuda_devices

    if found := cuda_devices():
        return Check(", ".join(f"{name} with {format_bytes(nbytes)}" for name, nbytes in found))
    if (proc / "driver/nvidia/version").exists():
        advice = "install a torch that is built for CUDA, or look at CUDA_VISIBLE_DEVICES"
        return Check("NVIDIA's driver is there, but torch sees no device", advice)
    return Check("no device: what it would compute, the CPU does")


def pinned_memory() -> Check:
    """Whether host memory can be pinned for a GPU, beyond the limit of locked memory too."""
    from gs_compile.runtime.stream import cuda_devices, pinned_block

    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = "no limit of locked memory" if limit < 0 else f"limit of locked memory {format_bytes(limit)}"
    if not cuda_devices():
        return Check(f"nothing is pinned without CUDA; {limited}")
    try:
        pinned_block(PIN_NBYTES)
    except RuntimeError as error:
        found = f"{format_bytes(PIN_NBYTES)} cannot be pinned ({str(error).splitlines()[0]}); {limited}"
        return Check(found, "ulimit -l unlimited; for docker, --ulimit memlock=-1", is_bad=True)
    return Check(f"{format_bytes(PIN_NBYTES)} pinned; {limited}")


def profile(storage: Sequence[Path]) -> Check:
    """Whether this machine has been measured with these directories, and lately."""
    from gs_compile.planner.measure.machines import remembered
    from gs_compile.planner.measure.profile import Profile

    path = remembered(storage)
    if not path.exists():
        return Check("not measured yet; greedysnake probe does")
    again = "greedysnake probe --refresh"
    try:
        Profile.load(path)
    except ProfileError as error:
        return Check(str(error), again)
    seconds = time.time() - path.stat().st_mtime
    return Check(f"measured {seconds / 86400:.0f} days ago, {path}", again if seconds > OLD_SECONDS else "")
