"""What values hold: memory goes back once, after its last user, and gradients are what was added."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest
import torch

from gs_compile.errors import StorageError
from gs_compile.program.ir import Op, Stage, Value
from gs_compile.runtime.arena import FREE, Arena
from gs_compile.runtime.coordinators import InterLayerTensors, transfer
from gs_compile.runtime.lanes import Ticket
from gs_compile.runtime.values import Flat, Gradient, Hold, Kept, Region

PAGE = 4096


def test_memory_goes_back_with_the_last_share():
    arena = Arena(PAGE)
    hold = Hold(arena.take(PAGE, "parameters"))
    first, second = (Flat(hold.buffer.tensor, (hold.share(),)) for _ in range(2))
    first.release([])
    assert arena.ledger.now["parameters"] == PAGE
    second.release([])
    assert arena.ledger.now["parameters"] == 0
    assert arena.ledger.now[FREE] == PAGE


def test_memory_is_not_given_on_before_the_users_of_every_share_are_done():
    arena = Arena(None)
    hold = Hold(arena.take(PAGE, "parameters"))
    shares = [Flat(hold.buffer.tensor, (hold.share(),)) for _ in range(2)]
    address, reading = hold.buffer.tensor.data_ptr(), Ticket("reading")
    shares[0].release([reading])
    shares[1].release([])
    assert arena.take(PAGE, "gradients").tensor.data_ptr() != address
    reading.finish()
    assert arena.take(PAGE, "gradients").tensor.data_ptr() == address


@pytest.fixture
def gradient():
    flat = torch.full((6,), torch.nan)
    return Gradient(flat, {0: flat[:2], 1: flat[2:4], 2: flat[4:]}, None)


def ones(number):
    return torch.full((2,), float(number))


def test_the_first_gradient_is_kept_and_others_are_added(gradient):
    gradient.add({0: ones(1), 1: ones(2)}, ())
    gradient.add({0: ones(3)}, ())
    gradient.complete()
    assert gradient.flat.tolist() == [4, 4, 2, 2, 0, 0]


def test_only_what_was_added_is_scaled(gradient):
    gradient.add({0: ones(1)}, ())
    gradient.scale(torch.tensor(2.0))
    gradient.complete()
    assert gradient.flat.tolist() == [2, 2, 0, 0, 0, 0]


def test_gradients_are_summed_in_their_own_type(gradient):
    for _ in range(257):
        gradient.add({0: ones(1).bfloat16()}, ())
    assert gradient.views[0].tolist() == [257, 257]  # which bf16 does not have


def test_an_activation_comes_back_as_it_was():
    activation = torch.arange(12.0).view(3, 4).t()
    flat = torch.empty(12)
    kept = Kept(torch.empty_like(activation, device="meta"), flat=flat)
    kept.tensor.copy_(activation)
    assert torch.equal(kept.tensor, activation)
    assert kept.tensor.stride() == activation.stride()


def test_a_charge_ends_with_what_was_kept():
    arena = Arena(PAGE)
    kept = Kept(torch.empty(8, device="meta"), flat=torch.zeros(8), holds=(arena.charge(32, "checkpoints"),))
    assert arena.ledger.now["checkpoints"] == 32
    kept.release([])
    assert arena.ledger.total == 0


@pytest.mark.parametrize("towards", ["host", "ssd"])
def test_checkpoints_move_all_at_once(towards):
    """Each read by itself would wait for the drive's latency, a micro-batch after the other."""
    log = []

    class Extent:
        def read(self, memory, offset):
            assert memory.is_contiguous()
            log.append("asked")
            return self

        write = read

        def wait(self):
            log.append("waited")

        def settle(self):
            log.append("still")

    like = torch.empty((2, 3), device="meta").t()  # its strides are kept, and its memory moves as it lies
    there = [Kept(like, region=Region(Extent(), 0, like.nbytes)) for _ in range(3)]
    here = [Kept(like, flat=torch.zeros(6)) for _ in range(3)]
    values = [[Value("x", 1, j, tier) for j in range(3)] for tier in ("ssd", "host")]
    if towards == "ssd":
        values, there, here = values[::-1], here, there
    verb = "prefetch" if towards == "host" else "offload"
    op = Op(verb, tuple(values[0]), Stage("backward", 1), tuple(values[1]))
    InterLayerTensors(None).carry_out(op, there, here)
    assert log == ["asked"] * 3 + ["waited"] * 3 + ["still"] * 3


def test_after_an_error_nothing_moves_any_more():
    """The buffers go back to the arena then, and others may have them."""
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
    extent = SimpleNamespace(read=lambda memory, offset: Move(next(moves)))
    with pytest.raises(StorageError, match="read failed"):
        transfer([Region(extent, 0, 4)] * 3, [Flat(torch.zeros(1))] * 3)
    assert not moving
