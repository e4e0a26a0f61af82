"""waiting: for what the thread that computes stands still, by the lane it waits for and the kind of value."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from gs_compile.runtime.lanes import Lane, Ticket

OWN_THREADS = "greedysnake "  # how the names of the lanes' threads begin: who waits there computes nothing


@contextmanager
def waits() -> Iterator[Counter[str]]:
    """Seconds by cause, such as "ssd_read w", of all waits inside the block; lanes' threads among themselves aside.

    Waits for memory count for the lane whose operation has it.
    """
    found: Counter[str] = Counter()
    submit, wait = Lane.submit, Ticket.wait

    def submit_named(lane: Lane, name: str, *arguments: Any, **named: Any) -> Ticket:
        ticket = submit(lane, name, *arguments, **named)
        ticket.cause = f"{lane.name} {named.get('kind', '')}".strip()  # type: ignore[attr-defined]
        return ticket

    def wait_timed(ticket: Ticket) -> None:
        if threading.current_thread().name.startswith(OWN_THREADS) or ticket.done:
            return wait(ticket)
        start = time.perf_counter()
        try:
            return wait(ticket)
        finally:
            found[getattr(ticket, "cause", "other")] += time.perf_counter() - start

    with patch.object(Lane, "submit", submit_named), patch.object(Ticket, "wait", wait_timed):
        yield found
