"""run: cases one after the other, each in a process of its own that ends after a time."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.common import ROOT
from benchmarks.zoo.case import Case

SECONDS = 300.0
LOADED = "benchmarks.zoo.preload"


def results(cases: Iterable[Case], seconds: float = SECONDS) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Each case with its result as it comes."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    os.environ["GREEDYSNAKE_MACHINE"] = str(ROOT / "tests" / "machine.json")  # nothing is measured
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([LOADED])
    for case in cases:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(case.key, theirs))
        process.start()
        theirs.close()
        yield case, _answer(process, mine, seconds)


def _answer(process: Any, connection: Connection, seconds: float) -> dict[str, Any]:
    """What the process says, or how it has ended."""
    try:
        if connection.poll(seconds):
            return dict(connection.recv())
        return {"result": "failed", "why": f"no result in {seconds:.0f} s"}
    except EOFError:
        process.join()
        return {"result": "failed", "why": f"its process ended with {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def _child(key: str, connection: Connection) -> None:
    """A case, in a process that has begun with `preload`."""
    from benchmarks.zoo.registry import CASES
    from benchmarks.zoo.trial import run

    connection.send(run(CASES[key]))
