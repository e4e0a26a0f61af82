from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gs_compile.errors import MemoryBudgetError
from gs_compile.runtime.arena import FREE, GONE, PADDING, Arena
from gs_compile.runtime.memory import PinnedBlocks

KiB4 = 4096


class Transfer:
    """A ticket that is done when somebody says so, or waits for it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.done = False
        self.waits = 0
        self.error = error

    def wait(self) -> None:
        self.waits += 1
        self.done = True
        if self.error:
            raise self.error


class Blocks(PinnedBlocks):
    """Power-of-two blocks of memory that is not pinned."""

    def map(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8).numpy()


def test_a_buffer_is_pages():
    buffer = Arena(None).take(5000, "parameter")
    assert (buffer.nbytes, buffer.purpose) == (2 * KiB4, "parameter")
    assert (buffer.tensor.dtype, buffer.tensor.shape) == (torch.uint8, (2 * KiB4,))
    assert buffer.tensor.data_ptr() % KiB4 == 0
    view = buffer.view(torch.bfloat16, 2500).fill_(1)
    assert view.shape == (2500,)
    assert buffer.tensor[4999] != 0
    assert buffer.tensor[5000] == 0
    with pytest.raises(AssertionError, match=r"2049 of torch.float32 do not fit in 8192 bytes"):
        buffer.view(torch.float32, 2049)


def test_a_buffer_ends_with_its_release():
    buffer = Arena(None).take(1, "gradient")
    buffer.release()
    with pytest.raises(AssertionError, match="buffer of gradient released twice"):
        buffer.release()
    with pytest.raises(AssertionError, match="buffer of gradient used after its release"):
        _ = buffer.tensor


def test_a_lost_buffer_stays_on_the_ledger():
    arena = Arena(KiB4)
    arena.take(KiB4, "lost")
    with pytest.raises(MemoryBudgetError, match=r"mapped now: lost 4\.0 KiB"):
        arena.take(KiB4, "next")


def test_a_free_buffer_of_the_size_is_reused():
    arena = Arena(None)
    first = arena.take(KiB4, "parameter")
    address = first.tensor.data_ptr()
    first.release()
    assert arena.ledger.now[FREE] == KiB4
    assert arena.take(KiB4, "checkpoint").tensor.data_ptr() == address
    assert arena.ledger.total == arena.ledger.peak_total == KiB4
    assert arena.ledger.now == {"parameter": 0, FREE: 0, "checkpoint": KiB4, PADDING: 0}
    assert arena.ledger.peak["parameter"] == KiB4


def test_a_buffer_in_use_is_not_reused_while_there_is_room():
    arena, transfer = Arena(2 * KiB4), Transfer()
    first = arena.take(KiB4, "parameter")
    address = first.tensor.data_ptr()
    first.release([transfer])
    second = arena.take(KiB4, "parameter")
    assert second.tensor.data_ptr() != address
    transfer.done = True
    assert arena.take(KiB4, "parameter").tensor.data_ptr() == address
    assert transfer.waits == 0


def test_the_oldest_pending_buffer_is_waited_for():
    arena, transfers = Arena(2 * KiB4), [Transfer(), Transfer()]
    buffers = [arena.take(KiB4, "parameter") for _ in transfers]
    for buffer, transfer in zip(buffers, transfers, strict=True):
        buffer.release([transfer])
    arena.take(KiB4, "parameter")
    assert [transfer.waits for transfer in transfers] == [1, 0]


def test_free_buffers_of_other_sizes_make_room():
    arena, transfer = Arena(4 * KiB4), Transfer()
    small, pending = arena.take(KiB4, "a"), arena.take(KiB4, "a")
    small.release()
    pending.release([transfer])
    arena.take(3 * KiB4, "b")
    assert arena.ledger.now["b"] == 3 * KiB4
    assert arena.ledger.total == 4 * KiB4
    assert transfer.waits == 0


def test_other_sizes_are_unmapped_after_a_wait():
    arena, transfer = Arena(4 * KiB4), Transfer()
    arena.take(2 * KiB4, "a").release([transfer])
    arena.take(4 * KiB4, "b")
    assert transfer.waits == 1


def test_a_budget_too_small_says_how_much_is_needed():
    arena = Arena(4 * KiB4)
    kept = arena.take(3 * KiB4, "parameter")
    arena.take(KiB4, "gradient").release()
    with pytest.raises(MemoryBudgetError) as caught:
        arena.take(2 * KiB4, "checkpoint")
    assert str(caught.value) == (
        "host memory is too small: 8.0 KiB for checkpoint would make it 20.0 KiB (20480 bytes), "
        "and the budget is 16.0 KiB (16384 bytes); mapped now: parameter 12.0 KiB"
    )
    kept.release()
    assert Arena(20480).take(20480, "all").nbytes == 20480


def test_a_buffer_larger_than_the_budget_unmaps_nothing():
    arena = Arena(2 * KiB4)
    arena.take(KiB4, "a").release()
    with pytest.raises(MemoryBudgetError, match="mapped now: free"):
        arena.take(3 * KiB4, "b")


def test_memory_counts_until_no_tensor_refers_to_it():
    arena = Arena(2 * KiB4)
    buffer = arena.take(KiB4, "a")
    view = buffer.view(torch.float32, 8).fill_(3)
    buffer.release()
    arena.trim()
    assert arena.ledger.now[GONE] == arena.ledger.total == KiB4
    with pytest.raises(MemoryBudgetError, match=r"a tensor still refers to it 4\.0 KiB"):
        arena.take(2 * KiB4, "b")
    assert view.sum() == 24
    del view
    assert arena.ledger.total == 0
    arena.take(2 * KiB4, "b")


def test_what_is_charged_counts_as_what_is_taken():
    arena = Arena(4 * KiB4)
    charge = arena.charge(2 * KiB4 + 1, "checkpoints")
    assert arena.ledger.now["checkpoints"] == arena.ledger.total == 2 * KiB4 + 1
    arena.take(KiB4, "a")
    with pytest.raises(MemoryBudgetError):
        arena.take(KiB4, "a")
    with pytest.raises(MemoryBudgetError):
        arena.charge(KiB4, "checkpoints")
    charge.release()
    arena.take(2 * KiB4, "a")
    assert arena.ledger.peak["checkpoints"] == 2 * KiB4 + 1
    with pytest.raises(AssertionError, match="charge for checkpoints released twice"):
        charge.release()


def test_a_charge_makes_room_and_waits_for_users():
    arena, transfer = Arena(2 * KiB4), Transfer()
    other = arena.take(KiB4, "a")
    arena.take(KiB4, "a").release([transfer])
    other.release()
    arena.charge(2 * KiB4, "checkpoints")
    assert transfer.waits == 1
    assert arena.ledger.total == 2 * KiB4


def test_memory_that_a_thread_holds_a_moment_longer_is_waited_for():
    arena = Arena(2 * KiB4)
    buffer = arena.take(KiB4, "a")
    held = [buffer.tensor]
    buffer.release()
    later = threading.Timer(0.05, held.clear)
    later.start()
    arena.take(2 * KiB4, "b")
    later.join()


def test_trim_waits_for_users_and_unmaps():
    arena, transfer = Arena(None), Transfer()
    kept = arena.take(KiB4, "kept")
    arena.take(2 * KiB4, "a").release([transfer])
    arena.trim()
    assert transfer.waits == 1
    assert arena.ledger.total == kept.nbytes


def test_trim_unmaps_also_when_a_wait_raises():
    arena, other = Arena(None), Transfer()
    arena.take(KiB4, "a").release([Transfer(OSError("disk")), other])
    with pytest.raises(OSError, match="disk"):
        arena.trim()
    assert other.done
    assert arena.ledger.total == 0


def test_after_close_the_rest_goes_as_it_is_released():
    arena = Arena(None)
    kept = arena.take(KiB4, "a")
    arena.take(KiB4, "a").release()
    arena.close()
    assert arena.ledger.total == KiB4
    kept.release()
    assert arena.ledger.total == 0
    with pytest.raises(AssertionError, match="host arena is closed"):
        arena.take(KiB4, "a")


def test_what_a_block_has_beyond_its_buffer_counts():
    arena = Arena(16 * KiB4, memory=Blocks())
    buffer = arena.take(5 * KiB4, "a")
    assert (arena.ledger.now["a"], arena.ledger.now[PADDING], arena.ledger.total) == (5 * KiB4, 3 * KiB4, 8 * KiB4)
    with pytest.raises(MemoryBudgetError, match=r"36\.0 KiB for b would make it"):
        arena.take(9 * KiB4, "b")
    buffer.release()
    assert arena.take(16 * KiB4, "b").nbytes == 16 * KiB4
    assert arena.ledger.now == {"a": 0, FREE: 0, PADDING: 0, GONE: 0, "b": 16 * KiB4}


def test_released_by_another_thread():
    arena = Arena(8 * KiB4)

    def use(buffer):
        buffer.tensor.fill_(1)
        buffer.release()

    for round_number in range(200):
        threads = [threading.Thread(target=use, args=(arena.take(KiB4 * (1 + k), "a"),)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert arena.ledger.total == 6 * KiB4, round_number
    assert arena.ledger.now[FREE] == 6 * KiB4


@settings(deadline=None, max_examples=150)
@given(
    blocks=st.booleans(),
    moves=st.lists(st.tuples(st.sampled_from("take release late done trim".split()), st.integers(0, 9)), max_size=40),
)
def test_the_ledger_is_right_whatever_happens(blocks, moves):
    """In use is what was taken and not released; the budget holds; buffers do not overlap."""
    arena = Arena(16 * KiB4, memory=Blocks() if blocks else None)
    held, transfers = [], []
    for move, number in moves:
        if move == "take":
            try:
                buffer = arena.take(KiB4 * (1 + number), "a")
            except MemoryBudgetError:
                continue
            buffer.tensor.fill_(len(held))
            held.append((buffer, len(held)))
        elif move in ("release", "late") and held:
            buffer, _ = held.pop(number % len(held))
            transfers.append(Transfer())
            buffer.release([transfers[-1]] if move == "late" else [])
        elif move == "done" and transfers:
            transfers.pop(number % len(transfers)).done = True
        elif move == "trim":
            arena.trim()
        in_use = sum(buffer.nbytes for buffer, _ in held)
        assert arena.ledger.now["a"] == in_use
        assert in_use <= arena.ledger.total <= arena.ledger.peak_total <= 16 * KiB4
        assert arena.ledger.total == sum(arena.ledger.now.values())
        assert all((buffer.tensor == mark).all() for buffer, mark in held)
    for buffer, _ in held:
        buffer.release()
    arena.close()
    assert arena.ledger.total == 0


def test_the_ledger_tells_what_is_in_use_from_what_is_kept_for_reuse():
    arena = Arena(None)
    first, second = arena.take(8192, "checkpoint"), arena.take(4096, "state")
    first.release()
    second.release()
    arena.take(4096, "state")
    assert arena.ledger.peak_in_use == arena.ledger.peak_total == 12288
    arena.ledger.restart()
    assert arena.ledger.peak_in_use == 4096
    assert arena.ledger.peak_total == 12288
    arena.take(8192, "checkpoint")
    assert arena.ledger.peak_in_use == arena.ledger.peak_total == 12288


class EndsBetweenTwoLooks:
    """A user who ends between two looks."""

    def __init__(self) -> None:
        self.asked = 0

    @property
    def done(self) -> bool:
        self.asked += 1
        return self.asked > 1

    def wait(self) -> None:
        pass


def test_a_user_who_ends_while_memory_is_looked_for_is_not_missed():
    for takes in (lambda a: a.take(8192, "state"), lambda a: a.charge(8192, "state")):
        arena = Arena(8192)
        arena.take(4096, "checkpoint").release([EndsBetweenTwoLooks()])
        takes(arena)
        assert arena.ledger.total == 8192


def test_who_uses_what_is_free_is_asked_once_for_each_release():
    """In a step of many layers and micro-batches thousands of buffers are free."""
    asked = []

    class Done(Transfer):
        @property
        def done(self):
            asked.append(self)
            return True

        @done.setter
        def done(self, value):
            pass

    arena = Arena(None)
    for buffer in [arena.take(number * KiB4, "a") for number in range(1, 101)]:
        buffer.release([Done()])
    for number in range(101, 201):
        arena.take(number * KiB4, "b")
    assert len(asked) <= 200
    arena.close()
