"""What values hold: gradients are what was added, and activations come back as they were."""

from __future__ import annotations

import threading
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from gs_compile.program.ir import Value
from gs_compile.runtime.coordinators import transfer
from gs_compile.runtime.lanes import Ticket
from gs_compile.runtime.storage.movers import Movers, Transfer
from gs_compile.runtime.values import Gradient, Held, ValueTable


@pytest.fixture
def gradient():
    flat = torch.full((7,), torch.nan)
    return Gradient(flat, {0: flat[:2], 1: flat[2:4], 2: flat[5:]})


def ones(number):
    return torch.full((2,), float(number))


def test_gradients_are_summed_in_their_own_type(gradient):
    for _ in range(257):
        gradient.add({0: ones(1).bfloat16()}, ())
    assert gradient.views[0].tolist() == [257, 257]  # which bf16 does not have


@pytest.mark.parametrize("towards", ["host", "ssd"])
def test_checkpoints_move_all_at_once(towards):
    """Each read by itself would wait for the drive's latency, a micro-batch after the other."""
    meeting = threading.Barrier(3, timeout=10)
    with closing(Movers(3, "test")) as movers:

        def move(memory):
            assert memory.is_contiguous()
            return Transfer([(movers, [meeting.wait])])

        there = [SimpleNamespace(read=move, write=move) for _ in range(3)]
        here = [torch.zeros(2, 3).t() for _ in range(3)]  # their memory moves as it lies
        transfer(*((there, here) if towards == "host" else (here, there)))
    assert not meeting.broken


def test_who_is_done_with_memory_is_forgotten():
    """Else each value would hand on the users of all that were in its memory before."""
    done, reading, value = Ticket(), Ticket(), Value("x", 1, 0, "host")
    done.finish()
    allocation, table = SimpleNamespace(end=lambda users: left.extend(users)), ValueTable(Held())
    left: list[Ticket] = []
    table.define(value, None, (done,), allocation=allocation)
    table.users.use(value, reading)
    table.free(value)
    assert left == [reading]
