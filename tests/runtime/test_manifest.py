"""A manifest is written whole or not at all, and read as what anybody may have written."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import replace
from functools import reduce

import pytest
from stored_run import save, stored_folders, stored_run

from gs_compile.errors import ManifestError, StorageError
from gs_compile.runtime.storage import system
from gs_compile.runtime.storage.manifest import BESIDE, NAME, check, read

CALLS = ("unlink", "open_file", "pwritev", "datasync", "rename", "sync_folder")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path):
    (folder,) = stored_folders(tmp_path, "drive")
    return folder


@pytest.fixture
def manifest(folder):
    return stored_run(folder, on_disk=False)


def test_a_manifest_is_read_as_it_was_written(folder, manifest):
    assert read(folder) is None
    save(folder, manifest)
    assert read(folder) == manifest
    later = replace(manifest, step=4)
    save(folder, later)
    assert read(folder) == later
    assert names(folder) == [NAME]


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_a_manifest_is_the_owners_alone(folder, manifest, umask):
    before = os.umask(umask)
    try:
        save(folder, manifest)
    finally:
        os.umask(before)
    assert stat.S_IMODE((folder / NAME).stat().st_mode) == 0o600


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_commit_that_fails_leaves_the_one_before_it(folder, manifest, call, number, monkeypatch):
    """All but the sync of the folder: then the rename is done, and either commit may be there after a power loss."""
    save(folder, manifest)
    later = replace(manifest, step=4)

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(system, call, fail)
    with pytest.raises(StorageError, match="the commit of step 4 failed") as caught:
        save(folder, later)
    assert (caught.value.errno, caught.value.filename) == (number, str(folder / NAME))
    monkeypatch.undo()
    assert read(folder) == (later if call == "sync_folder" else manifest)
    save(folder, later)
    assert read(folder) == later
    assert names(folder) == [NAME]


def test_a_write_that_is_short_goes_on_and_one_of_nothing_ends(folder, manifest, monkeypatch):
    pwritev = system.pwritev
    monkeypatch.setattr(system, "pwritev", lambda fd, memory, offset: pwritev(fd, memory[:1000], offset))
    save(folder, manifest)
    assert read(folder) == manifest
    monkeypatch.setattr(system, "pwritev", lambda *_: 0)
    with pytest.raises(StorageError, match="nothing was written"):
        save(folder, manifest)
    assert read(folder) == manifest


def test_what_is_renamed_has_been_synced_and_the_folder_after_it(folder, manifest, monkeypatch):
    calls = []
    for name in CALLS:
        call = getattr(system, name)
        monkeypatch.setattr(system, name, lambda *args, name=name, call=call: calls.append(name) or call(*args))
    save(folder, manifest)
    assert calls == ["unlink", "open_file", "pwritev", "datasync", "rename", "sync_folder"]


@pytest.mark.parametrize(
    ("user", "reason"),
    [
        ({"a": [object()]}, "user.a: object: not of JSON"),
        ({"a": {3: 1}}, "user.a: the key 3 is not a string"),
        ("\ud800", "user: surrogates"),
        ({"a": {"\ud800": 1}}, "a key of user.a: surrogates"),
        (reduce(lambda inner, _: [inner], range(200), 0), "user: deeper than 100"),
        (reduce(lambda inner, _: {"a": inner}, range(200), 0), "deeper than 100"),
        ("x" * (64 << 20), r"64\.0 MiB at most"),
        (list(range(1 << 20)), "entries"),
        ({"a": 10**49}, "user.a: int: .* too large"),
        (dict.fromkeys(map(str, range(10_001)), 0), "user: dict: .* too large"),
    ],
)
def test_a_state_that_could_not_be_read_again_is_not_written(folder, manifest, user, reason):
    with pytest.raises(ManifestError, match=f"the state cannot be stored: .*{reason}"):
        save(folder, replace(manifest, user=user))
    assert names(folder) == []


@pytest.mark.parametrize("other", [1, 7])
def test_another_format_names_both_versions(folder, manifest, other):
    save(folder, manifest)
    (folder / NAME).write_text((folder / NAME).read_text().replace('"format":2', f'"format":{other},"new":0'))
    with pytest.raises(ManifestError, match=rf"format {other}, and .* reads format 2: install one that reads that"):
        read(folder)


def test_a_link_in_the_place_of_what_is_written_is_not_followed(folder, manifest, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in (NAME, BESIDE):
        (folder / name).symlink_to(victim)
    with pytest.raises(StorageError, match="symbolic links"):
        read(folder)
    save(folder, manifest)
    assert victim.read_text() == "mine"
    assert read(folder) == manifest


def test_a_folder_under_a_link_is_not_read(folder, manifest, tmp_path):
    save(folder, manifest)
    link = tmp_path / folder.name
    link.symlink_to(folder)
    with pytest.raises(StorageError):
        read(link)


def test_what_is_checked_is_right(manifest):
    check(manifest)
