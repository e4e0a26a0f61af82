"""doctor: is this machine fit to train here? Everything that is worth a look before a run, each with what to do.

Nothing is changed, and what is tried is tried in files that are removed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from gs_compile.cli.doctor import machine as checks_machine
from gs_compile.cli.doctor import software as checks_software
from gs_compile.cli.doctor.check import Check


def examine(storage: Sequence[Path]) -> tuple[Check, ...]:
    """All checks, with these directories as storage; where torch is broken, those that can do without."""
    torch = checks_software.torch_version()
    machine: tuple[Callable[[], Check], ...] = (
        checks_machine.memory,
        checks_machine.swap,
        checks_machine.numa,
        checks_machine.openmp,
    )
    found = (torch, *map(safely, machine))
    return found if torch.state == "bad" else (*found, *_with_torch(storage))


def _with_torch(storage: Sequence[Path]) -> Iterator[Check]:
    import torch

    from gs_compile.cli.doctor import storage as checks_storage
    from gs_compile.runtime.stream import cuda_devices

    has_cuda = bool(cuda_devices())
    yield safely(partial(checks_machine.threads, torch.get_num_threads()))
    yield checks_software.cuda()
    yield checks_software.pinned_memory(has_cuda=has_cuda)
    yield checks_software.capture()
    yield checks_software.compiler("cuda" if has_cuda else "cpu")
    yield checks_software.transformers()
    yield checks_software.solver()
    yield safely(partial(_machine_profile, storage))
    looks = (
        checks_storage.direct_io,
        checks_storage.run_folder,
        checks_storage.room,
        checks_storage.filesystem,
        checks_storage.drive,
    )
    for directory in storage:
        yield from (safely(partial(look, directory)) for look in looks)


def _machine_profile(storage: Sequence[Path]) -> Check:
    from gs_compile.planner.measure.machines import remembered

    return checks_software.profile(remembered(storage))


def safely(look: Callable[[], Check]) -> Check:
    """What it finds, or that the system does not tell: a sandbox may hide /proc and /sys."""
    try:
        return look()
    except (OSError, ValueError, IndexError) as error:
        name = getattr(look, "func", look).__name__.replace("_", " ").strip()
        return Check(name, "warn", f"not told by the system: {error}")
