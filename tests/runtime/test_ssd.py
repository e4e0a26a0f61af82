from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from contextlib import closing
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gs_compile.errors import CorruptionError, StorageError
from gs_compile.runtime.storage import ssd, system
from gs_compile.runtime.storage.drive import Drive
from gs_compile.runtime.storage.grid import BLOCK, SMALL_BLOCK, Grid
from gs_compile.runtime.storage.movers import Movers, Transfer
from gs_compile.runtime.storage.ssd import PAGE

NBYTES = 5 * SMALL_BLOCK


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def drive(request, tmp_path):
    with closing(Drive(tmp_path, 3)) as drive:
        drive.is_direct = request.param
        yield drive


@pytest.fixture
def file(drive):
    return drive.create("w3", NBYTES)


def aligned(nbytes):
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)[:nbytes]


def noise(nbytes, seed=0):
    memory = aligned(nbytes)
    memory[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return memory


@pytest.mark.parametrize("shift", [0, 1, 64], ids="shift-{}".format)
@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, NBYTES),
        (0, 1),
        (PAGE, PAGE),
        (17, 30),
        (PAGE - 1, 2),
        (PAGE + 5, 2 * PAGE),
        (0, 1_000_003),
        (1, NBYTES - 2),
        (3 * PAGE, 3 * SMALL_BLOCK + 7),
        (NBYTES - 5, 5),
    ],
)
def test_what_is_written_is_read_and_nothing_around_it_changes(file, drive, offset, nbytes, shift):
    before = noise(NBYTES)
    drive.transfer("write", file, before, 0, "w3").wait()
    source = noise(nbytes + shift, seed=1)[shift:]
    drive.transfer("write", file, source, offset, "w3").wait()
    into = aligned(nbytes + shift)[shift:]
    drive.transfer("read", file, into, offset, "w3").wait()
    assert np.array_equal(into, source)
    expected = before.copy()
    expected[offset : offset + nbytes] = source
    assert file.path.read_bytes() == expected.tobytes()


def test_writes_that_share_pages_keep_each_other(file, drive):
    pieces = [noise(1000, seed) for seed in range(50)]
    transfers = [drive.transfer("write", file, piece, 1000 * index, "w3").begin() for index, piece in enumerate(pieces)]
    for transfer in transfers:
        transfer.wait()
    assert file.path.read_bytes()[:50_000] == b"".join(piece.tobytes() for piece in pieces)


def test_aligned_memory_is_moved_without_a_second_copy(file, drive, monkeypatch):
    monkeypatch.setattr(ssd, "_pages", None)
    source = noise(NBYTES)
    drive.transfer("write", file, source, 0, "w3").wait()
    into = aligned(NBYTES)
    drive.transfer("read", file, into, 0, "w3").wait()
    assert np.array_equal(into, source)


@pytest.mark.parametrize("held", ["preadv", "pwritev"])
def test_neither_direction_waits_for_the_other(file, drive, monkeypatch, held):
    other = drive.create("s3", NBYTES)
    gate = threading.Event()
    real = getattr(system, held)

    def blocked(*arguments):
        assert gate.wait(60)
        return real(*arguments)

    monkeypatch.setattr(system, held, blocked)
    reads = [drive.transfer("read", file, aligned(NBYTES), 0, "w3").begin() for _ in range(3)]
    writes = [drive.transfer("write", other, noise(NBYTES), 0, "s3").begin() for _ in range(3)]
    free, stopped = (writes, reads) if held == "preadv" else (reads, writes)
    for transfer in free:
        transfer.wait()
    assert not any(transfer.is_over for transfer in stopped)
    gate.set()
    for transfer in stopped:
        transfer.wait()


@pytest.fixture
def movers():
    with closing(Movers(1, "test")) as made:
        yield made


def test_of_a_transfer_that_fails_what_has_not_begun_is_left_out(movers):
    gate, done = threading.Event(), []

    def fail():
        raise StorageError(errno.EIO, "broken")

    with closing(Movers(1, "other")) as other:
        busy = Transfer([(movers, [partial(gate.wait, 10)])]).begin()
        transfer = Transfer([(movers, [partial(done.append, 1)]), (other, [fail, partial(done.append, 2)])])
        for _ in range(2):
            with pytest.raises(StorageError, match="broken"):
                transfer.wait()
        assert not busy.is_over
        gate.set()
        assert not done
        slow = Transfer([(movers, [partial(time.sleep, 0.1)]), (other, [fail])])
        with pytest.raises(StorageError, match="broken"):
            slow.wait()
        assert slow.is_over  # others may have the memory now


def test_a_wait_that_is_interrupted_ends_when_nothing_moves_any_more(movers, monkeypatch):
    """The caller takes back the memory, which a thread would still be reading from."""
    real, interruptions = Transfer._wait, iter([KeyboardInterrupt])

    def interrupted(transfer):
        for each in interruptions:
            raise each
        real(transfer)

    monkeypatch.setattr(Transfer, "_wait", interrupted)
    transfer = Transfer([(movers, [partial(time.sleep, 0.1)])])
    with pytest.raises(KeyboardInterrupt):
        transfer.wait()
    assert transfer.is_over


def test_a_wait_that_cannot_ask_all_drives_ends_when_nothing_moves_any_more(movers):
    """As the system refuses a thread, or Ctrl-C comes, with one drive at work. Fault: that one went on behind the error."""
    other, done = Movers(1, "other"), []
    other.close()
    moves = [partial(time.sleep, 0.1), partial(done.append, 1)]
    transfer = Transfer([(movers, moves), (other, [partial(done.append, 2)])])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="after the end of its run"):
            transfer.wait()
        assert transfer.is_over
    assert not done


def test_a_lane_that_waits_moves_a_transfer_of_one_block_itself(movers):
    """To wake a thread takes longer than a small tensor; the main thread, which may be interrupted, only waits."""
    found = []
    lane = threading.Thread(target=lambda: Transfer([(movers, [note])]).wait())

    def note():
        found.append(threading.current_thread())

    lane.start()
    lane.join()
    Transfer([(movers, [note])]).wait()
    assert found[0] is lane
    assert found[1] not in (lane, threading.main_thread())


def test_a_thread_that_the_system_refuses_is_not_waited_for(movers, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="new thread"):
                movers.ask(1, print)
    movers.close()


@given(st.integers(1, 100 << 20), st.none() | st.integers(100, 5000).map(PAGE.__mul__), st.data())
def test_a_range_is_cut_at_the_blocks_of_its_file(nbytes, chunk, data):
    grid = Grid.of(nbytes, chunk)
    offset = data.draw(st.integers(0, nbytes))
    end = data.draw(st.integers(offset, nbytes))
    whole, part = list(grid.cut(0, nbytes)), list(grid.cut(offset, end - offset))
    assert [start for start, _ in whole] == [0, *(stop for _, stop in whole[:-1])]
    assert whole[-1][1] == nbytes
    assert all(start % PAGE == 0 and 0 < stop - start <= grid.block <= BLOCK for start, stop in whole)
    for number, (start, stop) in enumerate(whole):
        assert grid.at(start) == grid.at(stop - 1) == (number, start, stop)
    assert len(grid) == len(whole)
    cut = [(max(start, offset), min(stop, end)) for start, stop in whole]
    assert part == [(start, stop) for start, stop in cut if start < stop]
    assert {start for start, _ in whole} >= set(range(0, nbytes, chunk or nbytes))


def left(tmp_path):
    """A file that a run has left, and what the next one is told of it."""
    with closing(Drive(tmp_path, 1)) as drive:
        file = drive.create("s3", 3 * PAGE + 5, 2 * PAGE)
        drive.transfer("write", file, noise(3 * PAGE + 5), 0, "s3").wait()
        drive.lasting = {"s3"}
        return file.path, (file.grid.nbytes, file.grid.chunk, file.sums_text)


def test_a_file_of_an_earlier_run_is_taken_up_with_its_checksums(tmp_path):
    path, told = left(tmp_path)
    into = aligned(3 * PAGE + 5)
    with closing(Drive(tmp_path, 1)) as drive:
        file = drive.adopt("s3", *told)
        assert (file.sums_text, len(file.grid)) == (told[-1], 2)
        drive.transfer("read", file, into, 0, "s3").wait()
        assert np.array_equal(into, noise(3 * PAGE + 5))
        assert not any(path.read_bytes()[3 * PAGE + 5 :])  # nothing else that was in memory
        path.write_bytes(path.read_bytes()[: 2 * PAGE] + bytes(2 * PAGE))
        with pytest.raises(CorruptionError, match=rf"read of s3 found {PAGE + 5} bytes at offset {2 * PAGE}"):
            drive.transfer("read", file, into, 0, "s3").wait()


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_part_of_a_damaged_block_is_refused_and_the_block_stays_as_it_is(file, drive, verb):
    """Whatever part is damaged: what is not would otherwise get a checksum together with what is."""
    drive.transfer("write", file, noise(NBYTES), 0, "w3").wait()
    fd = os.open(file.path, os.O_WRONLY)
    os.pwrite(fd, bytes(10), file.grid.block + 5000)
    os.close(fd)
    before = file.path.read_bytes()
    with pytest.raises(CorruptionError, match=rf"read of w3 found \d+ bytes at offset {file.grid.block} "):
        drive.transfer(verb, file, aligned(100), file.grid.block + 77, "w3").wait()
    assert file.path.read_bytes() == before
    drive.transfer(verb, file, aligned(100), 77, "w3").wait()


TRAPS = {
    "cut short": lambda path: os.truncate(path, PAGE),
    "open to others": lambda path: path.chmod(0o640),
    "a link": lambda path: path.symlink_to(path.rename(path.with_name("elsewhere"))),
    "a second name": lambda path: path.with_name("elsewhere").hardlink_to(path),
    "a pipe": lambda path: path.unlink() or os.mkfifo(path, 0o600),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_a_file_that_may_be_another_is_not_taken_up(tmp_path, trap):
    path, told = left(tmp_path)
    TRAPS[trap](path)
    with closing(Drive(tmp_path, 1)) as drive:
        with pytest.raises(StorageError, match=r"other users can access|links|bytes, and the run|Invalid") as caught:
            drive.adopt("s3", *told)
        assert str(path.parent) in str(caught.value)


@pytest.mark.parametrize("tensor", [torch.ones(4, 4).t(), torch.ones(4, device="meta")], ids=["strided", "meta"])
def test_a_tensor_that_is_not_contiguous_memory_is_refused(tensor):
    with pytest.raises(ValueError, match="contiguous memory"):
        ssd.as_bytes(tensor)
