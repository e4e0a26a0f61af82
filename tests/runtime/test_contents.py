"""What values hold: gradients are what was added, and activations come back as they were."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest
import torch

from gs_compile.errors import StorageError
from gs_compile.program.ir import Value
from gs_compile.runtime.coordinators import transfer
from gs_compile.runtime.lanes import Ticket
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
    log = []

    class Extent:
        def read(self, memory):
            assert memory.is_contiguous()
            log.append("asked")
            return self

        write = read

        def wait(self):
            log.append("waited")

        def settle(self):
            log.append("still")

    there = [Extent() for _ in range(3)]
    here = [torch.zeros(2, 3).t() for _ in range(3)]  # their memory moves as it lies
    transfer(*((there, here) if towards == "host" else (here, there)))
    assert log == ["asked"] * 3 + ["waited"] * 3 + ["still"] * 3


def test_after_an_error_nothing_moves_any_more():
    """Others may have the memory then."""
    moving = {"first", "second", "third"}

    class Move:
        def __init__(self, name):
            self.name = name

        def wait(self):
            if self.name == "second":
                raise StorageError(errno.EIO, "read failed", "x")
            self.settle()

        def settle(self):
            moving.discard(self.name)

    moves = iter(["first", "second", "third"])
    extent = SimpleNamespace(read=lambda memory: Move(next(moves)))
    with pytest.raises(StorageError, match="read failed"):
        transfer([extent] * 3, [torch.zeros(1)] * 3)
    assert not moving


def test_who_is_done_with_memory_is_forgotten():
    """Else each value would hand on the users of all that were in its memory before."""
    done, reading, value = Ticket(), Ticket(), Value("x", 1, 0, "host")
    done.finish()
    place, table = SimpleNamespace(end=lambda users: left.extend(users)), ValueTable(Held())
    left: list[Ticket] = []
    table.define(value, None, (done,), place=place)
    table.users.use(value, reading)
    table.free(value)
    assert left == [reading]
