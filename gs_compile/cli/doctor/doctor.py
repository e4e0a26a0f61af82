"""doctor: is this machine fit to train here? Everything that is worth a look before a run, each with what to do.

Nothing is changed, and what is tried is tried in files that are removed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from gs_compile.cli.doctor import machine, software
from gs_compile.cli.doctor.check import Check, checked

Looks = Mapping[str, Callable[..., Check]]
MACHINE: Looks = {"host memory": machine.memory, "swap": machine.swap, "NUMA": machine.numa, "OpenMP": machine.openmp}
SOFTWARE: Looks = {  # needs torch
    "threads": machine.threads,
    "CUDA": software.cuda,
    "pinned memory": software.pinned_memory,
    "capture by Dynamo": software.capture,
    "compiler": software.compiler,
    "transformers": software.transformers,
    "solver": software.solver,
}


def examine(storage: Sequence[Path]) -> tuple[Check, ...]:
    """All checks, with these directories as storage; where torch is broken, those that can do without."""
    torch = checked("torch", software.torch_version)
    found = (torch, *(checked(name, look) for name, look in MACHINE.items()))
    return found if torch.state == "bad" else (*found, *_with_torch(storage))


def _with_torch(storage: Sequence[Path]) -> Iterator[Check]:
    from gs_compile.cli.doctor.storage import LOOKS

    for name, look in SOFTWARE.items():
        yield checked(name, look)
    yield checked("machine profile", software.profile, storage)
    for directory in storage:
        for name, look_at in LOOKS.items():
            yield checked(f"{name} {directory}", look_at, directory)
