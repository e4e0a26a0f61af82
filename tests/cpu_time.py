"""How long something takes by itself, in a process that has run a thousand other tests."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any


def cpu_seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this process for `run`, and what it returns.

    Whatever else the machine does does not count, nor do the objects that other tests have left: the garbage collector
    would walk through all of them again and again, for more than twice the time.
    """
    gc.disable()
    try:
        start = time.process_time()
        found = run()
        return time.process_time() - start, found
    finally:
        gc.enable()
