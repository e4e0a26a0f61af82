"""What storage does when the system fails it: the right bytes in the end, or an error that says what and where."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
import warnings
from itertools import count

import pytest
import torch
from tiered import another_run

from gs_compile.errors import SlowStorageWarning, StorageError, StorageFullError, StorageLockedError
from gs_compile.runtime.storage import drive, grid, ssd, system
from gs_compile.runtime.storage.store import Store
from gs_compile.runtime.storage.stored import FOLDER

MIB = 1 << 20
NUM_BLOCKS = 6
CALLS = {"read": "preadv", "write": "pwritev"}


@pytest.fixture
def extent(tmp_path):
    with Store([tmp_path], threads=2) as opened:
        yield opened.allocate("w3", NUM_BLOCKS * MIB)


@pytest.fixture(autouse=True)
def blocks_of_one_mebibyte(monkeypatch):
    monkeypatch.setattr(grid, "BLOCK", MIB)


def page_aligned(nbytes):
    """Memory that is moved without a buffer between, so that system calls and blocks are one to one."""
    memory = torch.zeros(nbytes + ssd.PAGE, dtype=torch.uint8)
    begin = -memory.data_ptr() % ssd.PAGE
    return memory[begin : begin + nbytes]


def noise(nbytes):
    memory = page_aligned(nbytes)
    return memory.random_(0, 256, generator=torch.Generator().manual_seed(0))


def moved(extent):
    """The extent's content after `noise` is written and read."""
    source, into = noise(extent.nbytes), page_aligned(extent.nbytes)
    extent.write(source).wait()
    extent.read(into).wait()
    return torch.equal(into, source)


def fail(monkeypatch, name, error, when=lambda index: True):
    """Let the calls of `name` raise `error` whose index, over all threads, is chosen."""
    real, calls = getattr(system, name), count()

    def call(*arguments):
        if when(next(calls)):
            raise OSError(error, os.strerror(error))
        return real(*arguments)

    monkeypatch.setattr(system, name, call)


def shorten(monkeypatch, name, to):
    real = getattr(system, name)
    monkeypatch.setattr(system, name, lambda fd, memory, offset: real(fd, memory[: to(memory.nbytes)], offset))


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize("index", range(NUM_BLOCKS))
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_a_failed_call_surfaces_at_the_wait(extent, monkeypatch, verb, index, error):
    fail(monkeypatch, CALLS[verb], error, when=lambda call: call == index)
    transfer = getattr(extent, verb)(page_aligned(extent.nbytes))
    with pytest.raises(StorageError, match=rf"{verb} of w3 failed, {MIB} bytes at offset \d+: ") as caught:
        transfer.wait()
    assert transfer.is_over
    assert caught.value.errno == error
    assert caught.value.filename == str(extent.files[0].path)
    assert f"{os.strerror(error)}; {system.REMEDIES[error]}" in str(caught.value)
    assert isinstance(caught.value, StorageFullError) == (error == errno.ENOSPC)
    with pytest.raises(StorageError):
        transfer.wait()
    assert moved(extent)


@pytest.mark.parametrize("verb", CALLS)
def test_a_dead_drive_is_not_asked_for_every_block(extent, monkeypatch, verb):
    calls = count()

    def dead(*_):
        is_first = next(calls) == 0
        while not is_first and transfer._error is None:  # what has begun ends once the first error is known
            time.sleep(0.001)
        raise OSError(errno.EIO, "dead")

    monkeypatch.setattr(system, CALLS[verb], dead)
    transfer = getattr(extent, verb)(page_aligned(extent.nbytes))
    with pytest.raises(StorageError, match="dead"):
        transfer.wait()
    assert next(calls) < NUM_BLOCKS


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize(
    "to", [lambda n: (n + 1) // 2, lambda n: min(n, 5000), lambda n: max(n - 1, 1)], ids=["half", "5000", "less-one"]
)
def test_short_transfers_are_completed(tmp_path, monkeypatch, verb, to):
    """In the page cache: a direct file's kernel does not shorten below a page."""
    fail(monkeypatch, "open_file", errno.EINVAL, when=lambda index: index == 1)
    with pytest.warns(SlowStorageWarning):
        buffered = Store([tmp_path])
    with buffered as opened:
        shorten(monkeypatch, CALLS[verb], to)
        assert moved(opened.allocate("w3", 3 * MIB + 77))


@pytest.mark.parametrize("verb", CALLS)
def test_short_direct_transfers_go_on_at_a_page(extent, monkeypatch, verb):
    real = getattr(system, CALLS[verb])

    def short(fd, memory, offset):
        return min(real(fd, memory, offset), max(ssd.PAGE, memory.nbytes // 2 + 100))

    monkeypatch.setattr(system, CALLS[verb], short)
    assert moved(extent)


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize("moved_nbytes", [0, 100])
def test_a_drive_that_moves_less_than_a_page_is_given_up(extent, monkeypatch, verb, moved_nbytes):
    nothing = "the file ended" if verb == "read" else "nothing was written"
    monkeypatch.setattr(ssd, "MAX_PAUSE_SECONDS", 0)
    monkeypatch.setattr(system, CALLS[verb], lambda fd, memory, offset: moved_nbytes)
    complaint = "less than a page" if moved_nbytes else nothing
    with pytest.raises(StorageError, match=f"{verb} of w3 failed.*{complaint}"):
        getattr(extent, verb)(page_aligned(MIB)).wait()


@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize("error", [errno.EINTR, errno.EAGAIN])
def test_interrupted_transfers_are_completed(extent, monkeypatch, verb, error):
    fail(monkeypatch, CALLS[verb], error, when=lambda index: index % 3 != 2)
    assert moved(extent)


@pytest.mark.parametrize("verb", CALLS)
def test_a_drive_that_never_goes_on_is_given_up(extent, monkeypatch, verb):
    monkeypatch.setattr(ssd, "MAX_PAUSE_SECONDS", 0)
    fail(monkeypatch, CALLS[verb], errno.EAGAIN)
    with pytest.raises(StorageError, match=f"{verb} of w3 failed") as caught:
        getattr(extent, verb)(page_aligned(extent.nbytes)).wait()
    assert caught.value.errno == errno.EAGAIN


def test_a_file_cut_short_by_someone_else_is_an_error(extent):
    os.truncate(extent.files[0].path, MIB)
    with pytest.raises(StorageError, match=r"read of w3 failed.*the file ended"):
        extent.read(page_aligned(extent.nbytes)).wait()


@pytest.mark.parametrize("part", ["preadv", "pwritev"])
def test_an_error_within_a_shared_page_surfaces_and_frees_the_lock(extent, monkeypatch, part):
    with monkeypatch.context() as broken:
        fail(broken, part, errno.EIO)
        with pytest.raises(StorageError, match="w3"):
            extent.write(noise(100), offset=50).wait()
    extent.write(noise(100), offset=50).wait()


def test_a_full_disk_is_found_before_the_first_step(tmp_path, monkeypatch):
    directories = [tmp_path / "a", tmp_path / "b"]
    with Store(directories, weights=[1, 1]) as opened:
        opened.allocate("w0", MIB)
        fail(monkeypatch, "fallocate", errno.ENOSPC, when=lambda index: index == 1)
        with pytest.raises(StorageFullError, match=r"4\.0 MiB are needed and [\d.]+ \w*B are free") as caught:
            opened.allocate("w1", 8 * MIB)
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.filename == str(directories[1] / FOLDER)
        for directory in directories:
            assert sorted(path.name for path in (directory / FOLDER).iterdir()) == [".lock", "w0"]
        opened.allocate("w1", 8 * MIB)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE])
def test_a_folder_that_cannot_be_locked_has_the_remedy_of_its_drive(tmp_path, monkeypatch, error):
    """Fault: of a full disk it was that the path had to be a directory, as it was."""
    fail(monkeypatch, "open_file", error)
    with pytest.raises(StorageError) as caught:
        Store([tmp_path])
    assert str(caught.value).count(system.REMEDIES[error]) == 1
    assert "has to be a directory" not in str(caught.value)
    assert isinstance(caught.value, StorageFullError) == (error in system.FULL)


def test_an_extent_larger_than_the_disk_leaves_nothing(tmp_path):
    with Store([tmp_path]) as opened:
        with pytest.raises(StorageError):
            opened.allocate("w3", 1 << 50)
        assert [path.name for path in (tmp_path / FOLDER).iterdir()] == [".lock"]


def test_a_plan_larger_than_the_disk_is_refused_before_anything_is_allocated(tmp_path, monkeypatch):
    monkeypatch.setattr(drive, "free_storage", lambda folder: 1000)
    with Store([tmp_path / "a", tmp_path / "b"], weights=[1, 1]) as opened:
        opened.reserve(1000)
        with pytest.raises(StorageFullError, match="1002 B are needed and 1000 B are free"):
            opened.reserve(1002)  # both directories are on one filesystem


def test_a_failure_while_opening_gives_every_directory_back(tmp_path, monkeypatch):
    threads = set(threading.enumerate())
    with another_run(tmp_path / "b"), pytest.raises(StorageLockedError):
        Store([tmp_path / "a", tmp_path / "b"])
    with monkeypatch.context() as broken:
        fail(broken, "pwritev", errno.EIO)
        with pytest.raises(StorageError, match="write of"):
            Store([tmp_path / "a"])
    assert set(threading.enumerate()) == threads
    assert not list((tmp_path / "a").iterdir())


def test_a_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("theirs")
    with pytest.raises(StorageError, match="open failed"):
        Store([tmp_path / "file"])


def test_modes_do_not_depend_on_the_umask(tmp_path):
    before = os.umask(0)
    try:
        with Store([tmp_path / "a" / "b"]) as opened:
            opened.allocate("w3", MIB)
            modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    finally:
        os.umask(before)
    assert modes == {path: 0o600 if path.suffix or path.name in ("w3", ".lock") else 0o700 for path in modes}
    assert len(modes) == 5


@pytest.mark.parametrize("trap", ["open to others", "a link"])
def test_a_folder_that_others_may_have_prepared_is_refused(tmp_path, trap):
    if trap == "a link":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / FOLDER).symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / FOLDER).mkdir()
        (tmp_path / FOLDER).chmod(0o777)
    with pytest.raises(StorageError):
        Store([tmp_path])


@pytest.mark.parametrize("refusal", ["open_file", "pwritev"])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_refused_direct_io_is_said_once_and_works(tmp_path, monkeypatch, refusal, number):
    real_open, real_write, direct = system.open_file, system.pwritev, set()

    def opened(name, flags, folder):
        if refusal == "open_file" and flags & os.O_DIRECT:
            raise OSError(number, "no direct I/O")
        fd = real_open(name, flags, folder)
        (direct.add if flags & os.O_DIRECT else direct.discard)(fd)
        return fd

    def written(fd, memory, offset):
        if refusal == "pwritev" and fd in direct:
            raise OSError(number, "no direct I/O")
        return real_write(fd, memory, offset)

    monkeypatch.setattr(system, "open_file", opened)
    monkeypatch.setattr(system, "pwritev", written)
    with pytest.warns(SlowStorageWarning, match=f"{tmp_path} refuses direct I/O") as warned:
        opened_store = Store([tmp_path])
    with opened_store:
        assert moved(opened_store.allocate("w3", 3 * MIB + 77))
        assert moved(opened_store.allocate("w4", 100))
    assert len(warned) == 1
    assert not list(tmp_path.iterdir())
    with pytest.raises(SlowStorageWarning), warnings.catch_warnings(action="error"):
        Store([tmp_path])
    assert not list(tmp_path.iterdir())  # also where warnings are errors
