"""What anybody may have put in the place of a run is refused by name, at once and in little memory.

Every kind is a change of a sound manifest, or of the files around it: more than a hundred, and a wrong type for each of
the fields.
"""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import asdict
from pathlib import Path

import pytest
from command_line import run
from cpu_work import work
from hypothesis import given, settings
from hypothesis import strategies as st
from malicious import FREE, SOUND, TEXTS, change, text
from stored_run import stored_folders

from gs_compile.runtime.storage.manifest import NAME, decoded, encoded, read

WORK, NBYTES = 100, 256 << 20


@pytest.fixture
def folder(tmp_path):
    (folder,) = stored_folders(tmp_path, "drive")
    (folder / NAME).write_bytes(SOUND)
    (folder / NAME).chmod(0o600)
    return folder


def refusal(folder):
    """The error that `ls` tells of, with little work and in little memory."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = nbytes_of("VmRSS")
    times, result = work(lambda: run("store", "ls", folder.parent))
    nbytes = nbytes_of("VmHWM") - before
    assert (result.exit_code, type(result.exception)) == (5, SystemExit), result.exception
    assert len(result.output) < 3000
    assert times < WORK
    assert nbytes < NBYTES
    return result.stderr


def nbytes_of(key):
    return int(re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) << 10


def test_the_sound_manifest_is_read(folder):
    assert asdict(read(folder)) == asdict(decoded(SOUND))
    assert len(TEXTS) + len(PLACES) >= 100


@pytest.mark.parametrize("kind", TEXTS)
def test_a_malicious_text(folder, kind):
    (folder / NAME).write_bytes(text(kind))
    error = refusal(folder)
    assert error.startswith("ManifestError: ")
    assert f"store gc {folder.parent} --all" in error


def fields(made, path=()):
    """A path to each of the fields, one of each kind of entry."""
    if path[:1] and path[0] in FREE:
        return {".".join(path): made}
    if isinstance(made, dict):
        return {key: value for name, inner in made.items() for key, value in fields(inner, (*path, name)).items()}
    return {".".join(path): made} | (fields(made[0], (*path, "0")) if isinstance(made, list) and made else {})


WRONG = (None, True, -1, 1 << 64, 10**90, 1.5, float("nan"), "x", "", [], [[]], {}, {"": 0}, [None])
MAY_BE_NONE = ("never",)  # of a commit that does not tell


@pytest.mark.parametrize("path", [path for path in fields(json.loads(SOUND)) if path != "user"])
def test_a_field_of_another_type(path):
    sound = fields(json.loads(SOUND))[path]
    for value in WRONG:
        if type(value) is type(sound) and type(value) is not int:
            continue  # it may be sound
        if value is None and path in MAY_BE_NONE:
            continue
        with pytest.raises(ValueError, match=r"\w"):
            decoded(change(path, value))


# Files ----------------------------------------------------------------------------------------------------------------


def instead(make):
    """`make` puts something in the place of the manifest."""

    def put(folder):
        (folder / NAME).unlink()
        make(folder / NAME)

    return put


def of_another_owner(path):
    path.touch(0o600)
    try:
        os.chown(path, 12345, 12345)
    except PermissionError:
        pytest.skip("only root gives files away")


def a_device(path):
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("only root makes devices")


def a_socket(path):
    os.chdir(path.parent)  # its name is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


def a_folder_that_is(make):
    def put(folder):
        real = folder.rename(folder.with_name("real"))
        make(folder, real)

    return put


PLACES = {
    "a folder": instead(lambda path: path.mkdir(0o700)),
    "a pipe": instead(lambda path: os.mkfifo(path, 0o600)),
    "a device": instead(a_device),
    "a socket": instead(a_socket),
    "a link to it": lambda folder: (folder / NAME).rename(folder / "x") and (folder / NAME).symlink_to("x"),
    "a link to nothing": instead(lambda path: path.symlink_to("nowhere")),
    "a link to itself": instead(lambda path: path.symlink_to(NAME)),
    "of another owner": instead(of_another_owner),
    "open to a group": lambda folder: (folder / NAME).chmod(0o640),
    "open to all": lambda folder: (folder / NAME).chmod(0o606),
    "in an open folder": lambda folder: folder.chmod(0o755),
    "a hole of a tebibyte": lambda folder: os.truncate(folder / NAME, 1 << 40),
    "a byte more than is read": lambda folder: os.truncate(folder / NAME, (64 << 20) + 1),
    "a link in the place of the folder": a_folder_that_is(lambda path, real: path.symlink_to(real)),
    "a file in the place of the folder": a_folder_that_is(lambda path, real: path.touch()),
    "a pipe in the place of the folder": a_folder_that_is(lambda path, real: os.mkfifo(path)),
}


@pytest.mark.parametrize("kind", PLACES)
def test_what_is_no_file_of_ours(folder, kind, monkeypatch):
    monkeypatch.chdir(folder.parent)
    PLACES[kind](folder)
    assert re.match("(Manifest|Storage)Error: ", refusal(folder))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/etc/passwd")])
def test_a_lock_that_is_none(folder, make):
    make(folder / ".lock")
    for command in ("verify", "gc"):
        result = run("store", command, folder.parent)
        assert (result.exit_code, type(result.exception)) == (5, SystemExit), result.exception


# Anything -------------------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(fields(json.loads(SOUND)))), VALUES)
def test_any_value_is_read_or_refused(path, value):
    """A value that is read comes back when it is written and read."""
    try:
        found = decoded(change(path, value))
    except ValueError:
        return
    assert encoded(decoded(encoded(found))) == encoded(found)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(SOUND)), st.integers(0, 20), st.binary(max_size=20))
def test_any_bytes_are_read_or_refused(start, length, new):
    try:
        decoded(SOUND[:start] + new + SOUND[start + length :])
    except (ValueError, RecursionError):
        return
