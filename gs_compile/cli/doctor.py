"""doctor: check whether this machine is fit for training: what a run needs, and what to do if it is missing.

Nothing is changed; files that checks make are removed again. Checks that need torch import it themselves: a broken
torch is a finding, and does not end the program. The system's own tools say more about drives and file systems.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from importlib import import_module, metadata
from pathlib import Path
from typing import Literal, NamedTuple

from gs_compile.errors import ManifestError, ProfileError, StorageError, StorageLockedError, VersionError
from gs_compile.machine import CGROUP, PROC, available_memory, format_bytes, meminfo, usable_cores, usable_memory

LITTLE_NBYTES = 4 << 30  # torch and a layer's activations take this much
NEWEST_TORCH = (2, 15)  # with which the tests have run
DAY_SECONDS = 86400.0
OLD_SECONDS = 90 * DAY_SECONDS  # drives age and machines change
PIN_NBYTES = 64 << 20  # more than the usual limit of locked memory
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"


class Check(NamedTuple):
    """The result of a check, and what to do if something is wrong; a warning if a run will not fail because of it."""

    found: str
    advice: str = ""
    is_bad: bool = False
    name: str = ""

    @property
    def state(self) -> Literal["ok", "warn", "bad"]:
        """warn: it works, but slower or less than it could; bad: a run will fail."""
        return "bad" if self.is_bad else "warn" if self.advice else "ok"

    def as_dict(self) -> dict[str, str]:
        """For people and for JSON."""
        return {"name": self.name, "state": self.state, "found": self.found, "advice": self.advice}


def examine(storage: Sequence[Path]) -> tuple[Check, ...]:
    """All checks, with these directories as storage; if torch is broken, those that do not need it."""
    found = [checked("torch", torch_version), checked("host memory", memory)]
    return (*found, *(_with_torch(storage) if found[0].state != "bad" else ()))


def checked(name: str, look: Callable[..., Check], *args: object) -> Check:
    """The result of the check `look`, under a name; if the system does not answer, that is a warning."""
    try:
        return look(*args)._replace(name=name)
    except (OSError, ValueError, IndexError) as error:
        return Check(
            f"the system does not provide this: {error}", "a sandbox may hide /proc and /sys: run outside it", name=name
        )


def _with_torch(storage: Sequence[Path]) -> Iterator[Check]:
    yield checked("CUDA", cuda)
    yield checked("threads", waiting_threads)
    yield checked("compiler", compiler)
    yield checked("solver", solver)
    yield checked("machine profile", profile, storage)
    for directory in storage:
        yield checked(f"direct I/O in {directory}", direct_io, directory)
        yield checked(f"runs in {directory}", run_folder, directory)
        yield checked(f"durable runs in {directory}", durable_runs, directory)


# The machine ----------------------------------------------------------------------------------------------------------


def torch_version() -> Check:
    """Whether torch can be imported, has what training needs, and is a version with which the tests have run."""
    try:
        found = str(import_module("torch").__version__)
        import_module("gs_compile.model")
        import_module("gs_compile.capture.dynamo")
    except VersionError as error:
        words, _, advice = error.message.partition("; ")
        return Check(words, advice, is_bad=True)
    except (ImportError, OSError) as error:  # a shared library that is missing
        return Check(f"cannot be imported: {error}", "reinstall it: pip install --force-reinstall torch", is_bad=True)
    is_newer = tuple(int(part) for part in re.findall(r"\d+", found)[:2]) > NEWEST_TORCH
    tested = ".".join(map(str, NEWEST_TORCH))
    return Check(found, f"newer than the tested version: if in doubt, install torch=={tested}.*" if is_newer else "")


def memory(*, proc: Path = PROC, cgroup: Path = CGROUP) -> Check:
    """The memory that a run may take, and whether a group allows less than the machine has."""
    total, usable = meminfo("MemTotal", proc), usable_memory(proc=proc, cgroup=cgroup)
    available = available_memory(proc=proc, cgroup=cgroup)
    found = f"{format_bytes(available)} free of {format_bytes(usable)}"
    if usable < total:
        found += f", this container's or job's limit; the machine has {format_bytes(total)}"
    return Check(found, "end other processes, or ask for a larger limit" if available < LITTLE_NBYTES else "")


def cuda(*, proc: Path = PROC) -> Check:
    """The devices that torch sees, how it takes their memory, and whether the host's is pinned beyond its limit."""
    import resource  # of POSIX alone

    from gs_compile.runtime.stream import accelerators, pinned_block

    devices = ", ".join(f"{name} with {format_bytes(nbytes)}" for name, nbytes in accelerators())
    if not devices:
        if (proc / "driver/nvidia/version").exists():
            advice = "install a torch that is built for CUDA, or check CUDA_VISIBLE_DEVICES"
            return Check("NVIDIA's driver is there, but torch sees no device", advice)
        return Check("no device: the CPU computes")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = "no limit of locked memory" if limit < 0 else f"limit of locked memory {format_bytes(limit)}"
    try:
        pinned_block(PIN_NBYTES)
    except RuntimeError as error:
        found = f"{devices}; {format_bytes(PIN_NBYTES)} cannot be pinned ({str(error).splitlines()[0]}); {limited}"
        return Check(found, "ulimit -l unlimited; for docker, --ulimit memlock=-1", is_bad=True)
    is_expandable = any("expandable_segments:True" in os.environ.get(name, "") for name in ALLOCATOR_SETTINGS)
    advice = f"layers of several sizes leave gaps in a device's memory: export {EXPANDABLE} before a run"
    return Check(f"{devices}; {format_bytes(PIN_NBYTES)} pinned; {limited}", "" if is_expandable else advice)


def waiting_threads() -> Check:
    """Whether torch's threads spin while they wait for each other, although other processes need the cores."""
    is_passive = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    load, cores = os.getloadavg()[0], usable_cores()
    found = f"{'sleep' if is_passive else 'spin'} while they wait; load {load:.1f} on {cores} cores"
    if is_passive or load < max(1.0, cores / 2):
        return Check(found)
    advice = "others work here, and spinning threads slow them down: export OMP_WAIT_POLICY=passive before a run"
    return Check(found, advice)


def compiler() -> Check:
    """The compiler of the layers' code for this machine's device."""
    from gs_compile.capture.inductor import best_compiler
    from gs_compile.runtime.stream import accelerators

    device_type = "cuda" if accelerators() else "cpu"
    if best_compiler(device_type) == "inductor":
        return Check(f"inductor, for {device_type}")
    advice = "install g++" if device_type == "cpu" else "install the Triton that belongs to this torch"
    return Check("none that inductor can use: layers will run uncompiled", advice)


def solver() -> Check:
    """Whether the planner can solve: it needs HiGHS, and cvxpy to speak to it."""
    try:
        import_module("highspy")
        return Check(f"HiGHS {metadata.version('highspy')}, by cvxpy {metadata.version('cvxpy')}")
    except (ImportError, OSError) as error:  # PackageNotFoundError is an ImportError
        return Check(f"HiGHS or cvxpy is missing: {error}", "pip install cvxpy highspy", is_bad=True)


def profile(storage: Sequence[Path]) -> Check:
    """Whether this machine has been measured with these directories, and lately."""
    from gs_compile.planner.measure.machines import remembered
    from gs_compile.planner.measure.profile import Profile

    path = remembered(storage)
    if not path.exists():
        return Check("not measured yet: run greedysnake probe")
    again = "greedysnake probe --refresh"
    try:
        Profile.load(path)
    except ProfileError as error:
        return Check(error.message, again)
    seconds = time.time() - path.stat().st_mtime
    when = f"{seconds / DAY_SECONDS:.0f} days ago" if seconds > DAY_SECONDS else "today"
    return Check(f"measured {when}, {path}", again if seconds > OLD_SECONDS else "")


# A storage directory; for one that is missing, the directory in which it would be made --------------------------------


def direct_io(directory: Path) -> Check:
    """Whether files can be read and written with direct I/O, tried with the run's own code."""
    from gs_compile.planner.measure.probe_drive import existing
    from gs_compile.runtime.storage.drive import Drive

    try:
        with (
            tempfile.TemporaryDirectory(prefix=".greedysnake-doctor-", dir=existing(directory)) as folder,
            warnings.catch_warnings(action="ignore"),
            closing(Drive(Path(folder), threads=1)) as drive,
        ):
            return Check(
                drive.drawback or "works", drive.drawback and "choose a directory on a local drive, ext4 or xfs"
            )
    except OSError as error:  # no permission, no room, a broken drive
        advice = "name a writable directory: --storage"
        return Check(f"{type(error).__name__}: {error}", advice, is_bad=True)


def run_folder(directory: Path) -> Check:
    """Whether a run could begin here now."""
    from gs_compile.runtime.storage import manifest, system
    from gs_compile.runtime.storage.folder import Folder, folder_in, leftovers
    from gs_compile.runtime.storage.last_commit import names_in

    folder = folder_in(directory)
    try:
        if not folder.exists():
            return Check("none")
        with system.as_storage_error("open", folder):
            locked = Folder.lock(folder)
        if locked is None:
            return Check(f"{folder} is in use by this process")
        try:
            found = leftovers(folder, names_in(manifest.read(folder), folder))
        finally:
            locked.release()
    except StorageLockedError:
        return Check(f"{folder} is in use", "one run at a time: give each its own directory")
    except ManifestError:
        return Check(f"{folder} has a damaged commit", f"greedysnake store ls {directory} shows more", is_bad=True)
    except StorageError as error:
        return Check(error.message, "do what this says, or name another directory: --storage", is_bad=True)
    return Check(f"{folder}: {found}; the next run removes them" if found else "none")


def durable_runs(directory: Path) -> Check:
    """The commits that durable runs have left, of all ranks and models."""
    from gs_compile.cli.stored.runs import found_in

    runs = found_in(directory) if directory.is_dir() else []
    words, idle = [], False
    for each in runs:
        if (made := each.commit) is not None:
            state = f"in use by {each.user}" if each.user else format_bytes(made.nbytes)
            words.append(f"run {made.run} at step {made.step} of {made.written} in {each.folder.name}, {state}")
            idle |= not each.user
    advice = f'resume="auto" resumes it; greedysnake store gc {directory} --all removes it' if idle else ""
    return Check("; ".join(words) or "none", advice)
