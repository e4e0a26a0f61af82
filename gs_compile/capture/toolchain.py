"""toolchain: starts inductor's checks of the C++ compiler and the CPU while a model is traced.

Before inductor loads its first CPU code in a process, it prints the compiler's version, compiles and loads small
programs in other processes, one after the other, precompiles its header, and hashes torch's sources: seconds of
waiting. Here a thread does this while Dynamo traces. Nothing else changes: inductor caches the results itself, in the
process and on disk.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import copy_context
from functools import cache
from threading import Thread

import torch

from gs_compile.options import Options

# The smallest code that is compiled and loaded like inductor's CPU kernels.
_KERNEL = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(float* x) {}\n'


def ask_for(device: torch.device, options: Options) -> None:
    """Start the checks, if a model with tensors on `device` may get inductor's code."""
    if device.type == "cpu" and options.expert.compiler != "eager":
        _asking()


def wait() -> None:
    """Return when the checks are done: running them in two threads at once would disturb their state."""
    if _asking.cache_info().currsize:
        _asking().join()


@cache
def _asking() -> Thread:
    """This process's only thread for the checks."""
    thread = Thread(target=copy_context().run, args=(_ask,), name="inductor's toolchain", daemon=True)
    thread.start()
    return thread


def _ask() -> None:
    from torch._inductor.codecache import CppPythonBindingsCodeCache, torch_key

    with suppress(Exception):  # the same error is raised again when code is compiled
        CppPythonBindingsCodeCache.load_pybinding(["float*"], _KERNEL)
        torch_key()
