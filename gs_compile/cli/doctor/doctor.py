"""doctor: is this machine fit to train here? Everything that is worth a look before a run, each with what to do.

Nothing is changed, and what is tried is tried in files that are removed again. What imports torch is imported by the
looks that need it: a broken one is a finding, not the end.
"""

from __future__ import annotations

import os
import re
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module, metadata
from pathlib import Path

from gs_compile.cli.doctor.check import Check, checked
from gs_compile.errors import ProfileError, VersionError
from gs_compile.machine import CGROUP, PROC, available_memory, format_bytes, meminfo, usable_cores, usable_memory

SYS = Path("/sys")
LITTLE_NBYTES = 4 << 30  # torch and a layer's activations take this much
OPENMP = re.compile(r"(OMP|GOMP|KMP|MKL)_\w+")
NEWEST_TORCH = (2, 13)  # that the tests have run with
OLD_SECONDS = 90 * 86400.0  # drives age and machines change
PIN_NBYTES = 64 << 20  # more than the usual limit of locked memory


def examine(storage: Sequence[Path]) -> tuple[Check, ...]:
    """All checks, with these directories as storage; where torch is broken, those that can do without."""
    torch = checked("torch", torch_version)
    found = (torch, *(checked(name, look) for name, look in MACHINE.items()))
    return found if torch.state == "bad" else (*found, *_with_torch(storage))


def _with_torch(storage: Sequence[Path]) -> Iterator[Check]:
    from gs_compile.cli.doctor.storage import LOOKS

    for name, look in SOFTWARE.items():
        yield checked(name, look)
    yield checked("machine profile", profile, storage)
    for directory in storage:
        for name, look_at in LOOKS.items():
            yield checked(f"{name} {directory}", look_at, directory)


# Memory and cores -----------------------------------------------------------------------------------------------------


def memory(*, proc: Path = PROC, cgroup: Path = CGROUP) -> Check:
    """The memory that a run may take, and whether a group allows less than the machine has."""
    total, usable = meminfo("MemTotal", proc), usable_memory(proc=proc, cgroup=cgroup)
    available = available_memory(proc=proc, cgroup=cgroup)
    found = f"{format_bytes(available)} free of {format_bytes(usable)}"
    if usable < total:
        found += f", this container's or job's limit; the machine has {format_bytes(total)}"
    return Check(found, "end what else runs here, or ask for a larger limit" if available < LITTLE_NBYTES else "")


def swap(*, proc: Path = PROC) -> Check:
    """Whether memory is being swapped out: what a run keeps in memory on purpose must stay there."""
    total = meminfo("SwapTotal", proc)
    used = total - meminfo("SwapFree", proc)
    advice = "memory is short: set host_memory lower, or `swapoff -a` before a run" if used > total // 10 else ""
    return Check(f"{format_bytes(used)} used of {format_bytes(total)}" if total else "none", advice)


def threads(*, proc: Path = PROC, cgroup: Path = CGROUP) -> Check:
    """Whether the threads that torch computes with use the cores that this process has."""
    count, cores = import_module("torch").get_num_threads(), usable_cores(proc=proc, cgroup=cgroup)
    idle = count < cores // 2  # two logical cores are often one of the hardware
    problem = "they wait for each other" if count > cores else "cores are idle" if idle else ""
    found = f"torch computes with {count} threads on {cores} usable cores"
    return Check(found, f"{problem}: set OMP_NUM_THREADS={cores}" if problem else "")


def openmp(environment: Mapping[str, str] = os.environ) -> Check:
    """Whether threads wait or are bound in a way that the lanes of a step suffer from."""
    settings = {key: value for key, value in sorted(environment.items()) if OPENMP.fullmatch(key)}
    found = " ".join(f"{key}={value}" for key, value in settings.items()) or "nothing is set"
    if settings.get("OMP_WAIT_POLICY", "").lower() == "active":
        return Check(found, "waiting threads take the optimizer's cores: OMP_WAIT_POLICY=passive")
    if settings.get("OMP_PROC_BIND", "false").lower() != "false":
        return Check(found, "the optimizer's threads are bound to the same cores as the model's: unset OMP_PROC_BIND")
    return Check(found)


def numa(*, sys: Path = SYS) -> Check:
    """Whether this process's cores are all near one memory."""
    folders = sorted((sys / "devices/system/node").glob("node[0-9]*"))
    nodes = {folder.name: _cores((folder / "cpulist").read_text().strip()) for folder in folders}
    nodes = {name: cores for name, cores in nodes.items() if cores}  # some have memory alone
    if not nodes:
        return Check("not told by the system")
    mine = [name for name, cores in nodes.items() if cores & os.sched_getaffinity(0)]
    found = f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'}; this process runs on {', '.join(mine)}"
    advice = "bind it to the node of its GPU and drives: numactl --cpunodebind=0 --membind=0, if memory suffices"
    return Check(found, advice if len(mine) > 1 else "")


def _cores(text: str) -> set[int]:
    """The numbers of a list such as "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


# Software -------------------------------------------------------------------------------------------------------------


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


Looks = Mapping[str, Callable[..., Check]]
MACHINE: Looks = {"host memory": memory, "swap": swap, "NUMA": numa, "OpenMP": openmp}
SOFTWARE: Looks = {  # needs torch
    "threads": threads,
    "CUDA": cuda,
    "pinned memory": pinned_memory,
    "capture by Dynamo": capture,
    "compiler": compiler,
    "transformers": transformers,
    "solver": solver,
}
