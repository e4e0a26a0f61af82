"""toolchain: what inductor asks of the C++ compiler and the processor once in a process, asked while a model is traced.

Before it loads its first code for a CPU, inductor has the compiler's versions printed and small programs loaded in
processes of their own, one after the other, has the header of all its code read, and reads torch's sources: seconds in
which this process waits for others. Here a thread waits in its place while Dynamo traces. Nothing else differs: what
inductor finds out it keeps itself, in the process and on disk.
"""

from __future__ import annotations

from contextlib import suppress
from contextvars import copy_context
from functools import cache
from threading import Thread

import torch

from gs_compile.options import Options

# The least that is loaded as all of inductor's kernels for a CPU are.
_KERNEL = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(float* x) {}\n'


def ask_for(device: torch.device, options: Options) -> None:
    """Begin to ask, where a model with tensors on `device` may get inductor's code."""
    if device.type == "cpu" and options.expert.compiler != "eager":
        _asking()


def wait() -> None:
    """Return when what was asked is known: who asked the same beside the thread would change what that has in hand."""
    if _asking.cache_info().currsize:
        _asking().join()


@cache
def _asking() -> Thread:
    """The one thread of this process."""
    thread = Thread(target=copy_context().run, args=(_ask,), name="inductor's toolchain", daemon=True)
    thread.start()
    return thread


def _ask() -> None:
    from torch._inductor.codecache import CppPythonBindingsCodeCache, torch_key

    with suppress(Exception):  # which is met again, and told, where code is compiled
        CppPythonBindingsCodeCache.load_pybinding(["float*"], _KERNEL)
        torch_key()
