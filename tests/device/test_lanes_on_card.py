"""A lane of the card by itself: what it leaves under way."""

from __future__ import annotations

import threading
from functools import partial

import card
import pytest
import torch
from carded import Card

from gs_compile.runtime import stream
from gs_compile.runtime.lanes import Failure, Lane
from gs_compile.runtime.slab import map_memory
from gs_compile.runtime.trace import Trace


@pytest.mark.parametrize("patience", [60.0, 0.0])
def test_a_lane_that_is_closed_has_no_copies_under_way(monkeypatch, patience):
    """So what they copy from and to may be unmapped; without patience they are, behind what has not ended."""
    monkeypatch.setattr(stream, "PATIENCE_SECONDS", patience)
    device, promises = Card(torch.device("card", 0)), []
    memory, target = map_memory(64, device), device.empty((64,), torch.uint8)
    lane = Lane("h2d", Failure(), Trace(), device=device, stream=device.new_stream())
    lane.submit("a kernel that waits", lambda: promises.append(card.native().promise(0)))
    ticket = lane.submit("copy", partial(device.copy, target, memory))
    ticket.raise_error()  # both are launched
    if patience:
        threading.Timer(0.2, promises[0].keep).start()
    lane.close()
    assert ticket.done == (patience > 0)
    promises[0].keep()
    device.synchronize()
