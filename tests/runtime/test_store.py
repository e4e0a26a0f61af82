from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stored_run import stored_run

from gs_compile.errors import ManifestError, StorageError, StorageFullError, StorageLockedError
from gs_compile.runtime.storage import drive, folder, grid, system
from gs_compile.runtime.storage import store as store_module
from gs_compile.runtime.storage.folder import LOCK
from gs_compile.runtime.storage.manifest import read
from gs_compile.runtime.storage.store import Store, Stripe
from gs_compile.runtime.storage.stored import FOLDER, StoredTensor

MIB = 1 << 20
STRIPED_NBYTES = 2 * MIB + 12_345


@pytest.fixture
def store(tmp_path):
    with Store([tmp_path]) as store:
        yield store


@pytest.fixture(scope="module")
def striped(tmp_path_factory):
    """Two directories, one of three times the bandwidth, and an extent of several rows with what it should hold."""
    directories = [tmp_path_factory.mktemp("slow"), tmp_path_factory.mktemp("fast")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "ROW", 256 << 10)
        patch.setattr(grid, "SMALL_BLOCK", 20 << 10)
        with Store(directories, weights=[1, 3]) as store:
            yield store.allocate("w3", STRIPED_NBYTES), bytearray(STRIPED_NBYTES)


def random_bytes(nbytes, seed=0):
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def open_files():
    return sorted(str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.exists())


def test_several_directories_are_measured_and_one_is_not(measured, tmp_path):
    directories = [tmp_path / "a", tmp_path / "b"]
    with Store(directories) as store:
        assert all(weight > 1e5 for weight in store.weights), "bytes a second"
        assert store.weights[0] != store.weights[1]
        assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > MIB]
    with Store([tmp_path / "a"]) as store:
        assert store.weights == (1.0,)


def test_an_extent_is_zeros_before_it_is_written(store):
    into = torch.ones(MIB, dtype=torch.uint8)
    store.allocate("w3", MIB).read(into).wait()
    assert not into.any()


def test_offsets_are_in_bytes_whatever_the_dtype(store):
    extent = store.allocate("s3", 4096)
    extent.write(torch.arange(100, dtype=torch.float32), offset=8).wait()
    into = torch.empty(2, dtype=torch.float32)
    extent.read(into, offset=8 + 4 * 50).wait()
    assert into.tolist() == [50, 51]


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("offset", [-1, 1, 5000])
def test_a_range_outside_the_extent_is_refused(store, verb, offset):
    extent = store.allocate("w3", 4096)
    with pytest.raises(ValueError, match=rf"{verb} of 4096 bytes at {offset}: w3 has 4096"):
        getattr(extent, verb)(torch.zeros(4096, dtype=torch.uint8), offset)


def test_a_label_is_given_once(store):
    store.allocate("w3", 10)
    with pytest.raises(StorageError, match="creation of w3 failed: File exists"):
        store.allocate("w3", 10)


def test_an_extent_that_is_interrupted_leaves_nothing(tmp_path, monkeypatch):
    """In a notebook the next cell makes it again."""
    with Store([tmp_path / "a", tmp_path / "b"], weights=[1, 1]) as store:
        with monkeypatch.context() as patched:
            patched.setattr(store.drives[1], "create", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                store.allocate("w3", MIB)
        store.allocate("w3", MIB)


def test_closing_leaves_no_file_no_thread_and_no_descriptor(tmp_path):
    (tmp_path / "theirs").write_text("kept")
    threads, files = set(threading.enumerate()), open_files()
    store = Store([tmp_path / "a" / "b", tmp_path], weights=[1, 1])
    extent = store.allocate("w3", 20 * MIB)
    transfers = [extent.write(random_bytes(20 * MIB)).begin(), extent.read(torch.empty(MIB)).begin()]
    store.close()
    store.close()
    assert all(transfer.is_over for transfer in transfers)
    with pytest.raises(RuntimeError, match="after the end of its run"):
        extent.read(torch.empty(1)).wait()
    assert set(threading.enumerate()) == threads
    assert open_files() == files
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["a", "b", "theirs"]


def test_a_file_that_fails_as_it_is_closed_leaves_no_other_open(tmp_path, monkeypatch):
    """As one on a network may, whose last writes have failed."""
    files, real = open_files(), os.close
    store = Store([tmp_path], durable=True)
    first, second = (store.allocate(name, 1) for name in ("w3", "s3"))
    store.drives[0].lasting = {first.files[0].path.name}

    def close(fd):
        real(fd)
        if fd == first.files[0].fd:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", close)
    store.close()
    assert open_files() == files
    assert first.files[0].path.exists()
    assert not second.files[0].path.exists()


def test_a_store_that_is_closed_within_its_own_end_is_closed(tmp_path, monkeypatch):
    """As by garbage that is collected while the interpreter ends. Fault: the process waited for itself."""
    store, close = Store([tmp_path]), drive.Drive.close
    monkeypatch.setattr(drive.Drive, "close", lambda each: (store.close(), close(each)))
    ending = threading.Thread(target=store.close, daemon=True)
    ending.start()
    ending.join(10)
    assert not ending.is_alive()
    assert list(tmp_path.iterdir()) == []


def test_a_store_closes_when_the_interpreter_ends(tmp_path):
    script = f"""
import torch
from gs_compile.runtime.storage.store import Store
extent = Store([{str(tmp_path)!r}]).allocate("w3", 8 << 20)
extent.write(torch.ones(8 << 20, dtype=torch.uint8))
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_close_its_parents_store(store, tmp_path):
    extent = store.allocate("w3", 4096)
    child = os.fork()
    if child == 0:
        try:
            store.close()
            extent.read(torch.empty(1))
        except StorageError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert (tmp_path / FOLDER / "w3").exists()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_hold_its_parents_folder(tmp_path):
    """A worker of a DataLoader lives on for seconds when its parent is killed, and the next run begins at once."""
    reading, writing = os.pipe()
    if (parent := os.fork()) == 0:
        Store([tmp_path])
        if (child := os.fork()) == 0:
            time.sleep(60)
        os.write(writing, str(child).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    try:
        Store([tmp_path]).close()
    finally:
        os.kill(int(os.read(reading, 20)), signal.SIGKILL)


def test_no_store_leaves_a_hook_behind(tmp_path, monkeypatch):
    """Python takes none back, and a process may have many runs."""
    monkeypatch.setattr(os, "register_at_fork", lambda **_: pytest.fail("one more hook"))
    Store([tmp_path]).close()


def test_a_folder_that_goes_as_it_is_taken_is_made_again(tmp_path, monkeypatch):
    """The run before has just ended."""
    real, gone = system.open_folder, []

    def open_folder(path):
        if not gone:
            gone.append(path.rmdir())
        return real(path)

    monkeypatch.setattr(system, "open_folder", open_folder)
    Store([tmp_path]).close()
    assert gone


def test_status_files_have_their_place_beside_the_folder(tmp_path):
    """With status= the same directory as storage= the next run took the one for a folder, and ended in an error."""
    (tmp_path / f"{FOLDER}.json").write_text("{}")
    Store([tmp_path]).close()
    assert [path.name for path in tmp_path.iterdir()] == [f"{FOLDER}.json"]


def test_a_file_that_is_made_as_names_are_synced_is_synced_too(store, monkeypatch):
    """By another thread than the one that commits."""
    (drive,), real, synced = store.drives, system.sync_folder, []

    def sync_folder(fd):
        synced.append(fd)
        if len(synced) == 1:
            store.allocate("w4", 10)
        real(fd)

    monkeypatch.setattr(system, "sync_folder", sync_folder)
    store.allocate("w3", 10)
    numbers = []
    for _ in range(3):
        drive.sync_names()
        numbers.append(len(synced))
    assert numbers[0] < numbers[1] == numbers[2]


def test_a_process_of_this_number_elsewhere_has_a_folder_of_its_own(store, tmp_path):
    """Each container counts its processes anew, and several may share a volume: it is no further model of this one."""
    words = f"pid {os.getpid()}, started just now"
    (tmp_path / FOLDER / LOCK).write_text(words)
    with pytest.raises(StorageLockedError, match=f"another run uses this folder, {words}: wait"):
        Store([tmp_path])


def test_who_looks_at_a_folder_keeps_no_run_from_it(tmp_path, monkeypatch):
    """At the moment in which the run begins it has the lock, too."""
    looks, own = (os.open(tmp_path / LOCK, os.O_RDWR | os.O_CREAT) for _ in range(2))
    waited = []
    fcntl.flock(looks, fcntl.LOCK_SH)
    monkeypatch.setattr(folder, "time", SimpleNamespace(sleep=lambda _: waited.append(os.close(looks))))
    assert folder._is_locked_now(tmp_path, own)
    assert waited
    os.close(own)


def test_a_commit_that_could_not_be_read_is_not_made(tmp_path):
    """What the reader refuses is found with the first commit, and not by the next process."""
    with Store([tmp_path], durable=True) as store:
        made = stored_run(tmp_path / FOLDER, on_disk=False)
        with pytest.raises(ManifestError, match="the commit of step 3 could not be read again: rank: of 1 there is no"):
            store.commit([], lambda: replace(made, rank=3))
        assert not list(tmp_path.glob("*/manifest.json"))
        store.commit([], lambda: made)
        scale = StoredTensor("buffer scale", "float8_e4m3fn", (1,), 0)  # which a script has changed later on
        with pytest.raises(ManifestError, match="the commit of step 4 could not be read again: rest buffer scale has"):
            store.commit([], lambda: replace(made, step=4, rest=(scale,)))
        assert read(tmp_path / FOLDER).step == 3


def test_ranks_share_a_directory(tmp_path, monkeypatch):
    """Fault 18: two ranks on a node collided on one folder."""
    with Store([tmp_path]) as first:
        monkeypatch.setenv("RANK", "1")
        with Store([tmp_path]) as second:
            for store in (first, second):
                store.allocate("w3", 10)
            found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/w3"))
            assert found == [f"{FOLDER}-1/w3", f"{FOLDER}/w3"]
    assert not list(tmp_path.iterdir())


def test_what_others_have_beside_the_folder_stays(tmp_path):
    """A log that a user calls after the folder ended the run, and files of a copy were removed."""
    copy = tmp_path / f"{FOLDER}.bak"
    copy.mkdir(0o700)
    theirs = [tmp_path / f"{FOLDER}.log", copy / "w3"]
    for path in theirs:
        path.write_text("kept")
    Store([tmp_path]).close()
    assert all(path.read_text() == "kept" for path in theirs)


def test_a_name_that_comes_while_others_are_synced_is_synced_next(store, monkeypatch):
    """A seal allocates on the user's thread while the commit before is made on its lane."""
    (drive,) = store.drives
    synced = []

    def sync():
        synced.append(sorted(path.name for path in drive.folder.glob("w*")))
        if len(synced) == 1:
            store.allocate("w4", 10)

    monkeypatch.setattr(drive.own, "sync", sync)
    store.allocate("w3", 10)
    for _ in range(3):
        drive.sync_names()
    assert synced == [["w3"], ["w3", "w4"]]


def test_the_directories_may_be_relative(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Store(["here"]) as store:
        monkeypatch.chdir("/")
        store.reserve(1)
        store.allocate("w3", 10)
    assert not list((tmp_path / "here").iterdir())


def test_of_a_drive_without_room_for_its_share_others_take_the_rest(tmp_path, monkeypatch):
    """The faster one here; before, that was refused when the plan was made and the layers' code was timed."""
    with Store([tmp_path / "a", tmp_path / "b"], weights=[3, 1]) as store:
        fast, slow = store.drives
        slow.device = -1  # a filesystem of its own
        monkeypatch.setattr(drive, "free_storage", {fast.folder: 1 * MIB, slow.folder: 5 * MIB}.get)
        store.reserve(1 * MIB)
        assert store.weights == (3, 1)
        store.reserve(4 * MIB)
        extent, source = store.allocate("w0", 4 * MIB), random_bytes(4 * MIB)
        assert 0.9 * MIB < extent.files[0].grid.nbytes <= MIB
        extent.write(source).wait()
        extent.read(into := torch.zeros_like(source)).wait()
        assert torch.equal(into, source)
        with pytest.raises(StorageFullError, match=r"6\.0 MiB are needed and 5\.0 MiB are free"):
            store.reserve(7 * MIB)


def test_directories_are_measured_where_nobody_says(tmp_path):
    with Store([tmp_path / "a", tmp_path / "b"]) as store:
        assert min(store.weights) > 1e6
        assert [path.name for path in sorted((tmp_path / "a" / FOLDER).iterdir())] == [".lock"]


ENDS = st.sampled_from([set(), {0}, {0, STRIPED_NBYTES}])  # whole extents too


@given(st.data())
def test_striping_is_correct_for_any_ranges(striped, data):
    extent, expected = striped
    cuts = sorted(data.draw(st.sets(st.integers(0, extent.nbytes), min_size=2, max_size=6)) | data.draw(ENDS))
    source = random_bytes(extent.nbytes, seed=data.draw(st.integers(0, 1000)))
    written = list(pairwise(cuts))[:: data.draw(st.integers(1, 2))]
    for transfer in [extent.write(source[begin:end], begin) for begin, end in written]:  # all at once
        transfer.wait()
    for begin, end in written:
        expected[begin:end] = bytes(source[begin:end].numpy())
    begin, end = data.draw(st.sampled_from([*pairwise(cuts), (0, extent.nbytes)]))
    into = torch.empty(end - begin, dtype=torch.uint8)
    extent.read(into, begin).wait()
    assert bytes(into.numpy()) == expected[begin:end]


@given(st.integers(1, 1 << 40), st.lists(st.floats(0.01, 100), min_size=1, max_size=5))
def test_stripes_are_even_whole_pages_in_proportion(nbytes, weights):
    stripe = Stripe.of(nbytes, weights)
    row = sum(stripe.chunks)
    assert nbytes <= row * stripe.num_rows < nbytes + stripe.num_rows * 4096 + 4096
    for chunk, weight in zip(stripe.chunks, weights, strict=True):
        assert chunk % 4096 == 0
        assert abs(chunk - row * weight / sum(weights)) <= 4096


def test_one_request_of_a_small_extent_uses_every_drive():
    assert {piece.drive for piece in Stripe.of(MIB, [1, 1, 2]).pieces(0, MIB)} == {0, 1, 2}


def test_an_extent_of_a_page_is_on_one_of_two_drives(tmp_path):
    with Store([tmp_path / "a", tmp_path / "b"], weights=[1, 1]) as store:
        extent, source = store.allocate("w3", 100), random_bytes(100)
        extent.write(source).wait()
        extent.read(into := torch.empty_like(source)).wait()
        assert torch.equal(into, source)
        assert sorted(path.stat().st_size for path in tmp_path.glob("*/*/w3")) == [0, 4096]
