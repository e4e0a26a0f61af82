"""doctor: is this machine fit to train here? Everything that is worth a look before a run, each with what to do.

Nothing is changed, and what is tried is tried in files that are removed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from gs_compile.cli.doctor import machine, software
from gs_compile.cli.doctor.check import Check


def examine(storage: Sequence[Path]) -> tuple[Check, ...]:
    """All checks, with these directories as storage; where torch is broken, those that can do without."""
    torch = software.torch_version()
    found = (torch, machine.memory(), machine.swap(), machine.numa(), machine.openmp())
    return found if torch.state == "bad" else (*found, *_with_torch(storage))


def _with_torch(storage: Sequence[Path]) -> Iterator[Check]:
    import torch

    from gs_compile.cli.doctor import storage as checks_storage
    from gs_compile.planner.measure.machines import remembered
    from gs_compile.runtime.stream import cuda_devices

    has_cuda = bool(cuda_devices())
    yield machine.threads(torch.get_num_threads())
    yield software.cuda()
    yield software.pinned_memory(has_cuda=has_cuda)
    yield software.capture()
    yield software.compiler("cuda" if has_cuda else "cpu")
    yield software.transformers()
    yield software.solver()
    yield software.profile(remembered(storage))
    for directory in storage:
        for look in checks_storage.LOOKS:
            yield look(directory)
