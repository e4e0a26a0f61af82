"""process: what a process of the command line does without, and a second one beside it."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from gs_compile.machine import usable_cores

# What PEFT loads where it finds it, which takes as long as a capture; no plan needs it.
LEFT_OUT = ("bitsandbytes",)


def do_without() -> None:
    """Start no search for circles, and load nothing of `LEFT_OUT`."""
    gc.disable()  # to look for circles among all operations of a large step would take half of a command's time
    sys.modules.update(dict.fromkeys(set(LEFT_OUT) - sys.modules.keys()))  # type: ignore[arg-type]


def do_with_all() -> None:
    """The contrary, for a command that trains."""
    gc.enable()
    for name in LEFT_OUT:
        if sys.modules.get(name, sys) is None:
            del sys.modules[name]


def is_own() -> bool:
    """Whether this process is of a command alone (`do_without`), and of no script or test."""
    return not gc.isenabled()


def may_start() -> bool:
    """Whether a second process would help: there is a core for it."""
    return is_own() and usable_cores() > 1


class Beside(AbstractContextManager["Beside"]):
    """A second process, which loads a module at once and then calls one function of it; it ends with the context."""

    def __init__(self, module: str) -> None:
        context = get_context("spawn")
        self._module, (self._pipe, theirs) = module, context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, module), daemon=True)
        self._process.start()
        theirs.close()

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def call(self, name: str, *arguments: Any, **named: Any) -> Callable[[], Any]:
        """Have a function called there. What is returned waits for its result, or raises its error; where the process
        has ended without one, as where memory is short, it calls the function here.
        """
        with suppress(OSError):  # it has ended as it was loading
            self._pipe.send((name, arguments, named))

        def result() -> Any:
            try:
                found, error = self._pipe.recv()
            except (EOFError, OSError):  # the latter where it has not read what was asked
                return getattr(import_module(self._module), name)(*arguments, **named)
            if error is not None:
                raise error
            return found

        return result


def _serve(pipe: Connection, module: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process says what there is to say
    do_without()
    loaded = import_module(module)
    name, arguments, named = pipe.recv()
    try:
        pipe.send((getattr(loaded, name)(*arguments, **named), None))
    except Exception as error:  # noqa: BLE001 (of any kind: it is raised in the first process)
        pipe.send((None, error))
