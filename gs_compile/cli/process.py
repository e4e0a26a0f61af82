"""process: what a process of the command line leaves out to be fast."""

from __future__ import annotations

import gc
import sys

# PEFT loads these if they are installed, which takes as long as a capture; no plan needs them.
LEFT_OUT = ("bitsandbytes",)


def do_without() -> None:
    """Turn garbage collection off, and load nothing of `LEFT_OUT`."""
    gc.disable()  # with all operations of a large step, collections would take half of a command's time
    sys.modules.update(dict.fromkeys(set(LEFT_OUT) - sys.modules.keys()))  # type: ignore[arg-type]


def do_with_all() -> None:
    """The inverse, for a command that trains."""
    gc.enable()
    for name in LEFT_OUT:
        if sys.modules.get(name, sys) is None:
            del sys.modules[name]
