"""process: what a process of the command line does without."""

from __future__ import annotations

import gc
import sys

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
