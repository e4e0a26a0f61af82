"""A status file: its format, that a reader sees all of it or the one before, and what is said of one that is damaged."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import told

from gs_compile.errors import StatusError
from gs_compile.runtime import alarm
from gs_compile.status import file
from gs_compile.status.form import FORMAT


def test_a_status_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "status.json"
    told.write(path, told.status(free={}))
    assert file.plain(file.read(path)) == file.plain(told.status(free={}))
    assert math.isnan(file.read(path).history[0].seconds)
    assert file.read(path).last == told.LAST
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_the_file_is_json_of_a_known_format(tmp_path):
    told.write(path := tmp_path / "status.json", told.status())
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert found["format"] == FORMAT == 1
    assert found["last"]["lanes"]["ssd_read"]["nbytes_by_kind"]["w"] == told.LANES["ssd_read"].nbytes_by_kind["w"]
    assert found["history"][0][:2] == [1, None]
    assert len(path.read_bytes()) < 30_000


def test_a_later_entry_does_not_disturb_a_reader(tmp_path):
    path = tmp_path / "status.json"
    path.write_text(json.dumps({**file.plain(told.status()), "mood": "good"}))
    assert file.read(path).num_steps == told.NUM_STEPS - 1


def test_a_reader_never_sees_half_a_file(tmp_path):
    path, over, numbers = tmp_path / "status.json", threading.Event(), set()
    told.write(path, told.status(num_steps=0))

    def write():
        for number in itertools.count(1):
            told.write(path, told.status(num_steps=number))
            if over.is_set():
                return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        while len(numbers) < 20:
            assert writer.is_alive()
            numbers.add(file.read(path).num_steps)
    finally:
        over.set()
        writer.join()


def test_letters_that_are_none_hide_no_error(tmp_path):
    """The page of a run that failed by a file of such a name: writing it raised over the cause."""
    file.replace(path := tmp_path / "page.html", "no file \udcff")
    assert path.read_text() == "no file \\udcff"
    told.write(path, told.status(state="failed", reason=alarm.in_words(OSError("no file \udcff"))))
    assert file.read(path).reason == "OSError: no file \\udcff"


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    told.write(path, told.status(num_steps=1))
    monkeypatch.setattr(os, "fdopen", lambda fd, *_, **__: (_ for _ in ()).throw(OSError(28, "no space")))
    with pytest.raises(OSError, match="no space"):
        told.write(path, told.status(num_steps=2))
    monkeypatch.undo()
    assert file.read(path).num_steps == 1
    assert list(tmp_path.iterdir()) == [path]


def changed(**changes):
    return json.dumps({**file.plain(told.status()), **changes})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is torn: it was not written completely"),
        (changed()[:-100], "is torn"),
        ("[" * 100_000, "is torn"),
        (changed(format=2), "has format 2, and this GreedySnake reads format 1"),
        ("{}", "is not the status of a run"),
        ("7", "is not the status of a run"),
        (changed(num_steps="many"), "its entry num_steps is missing or wrong"),
        (changed(history=[[1, 2.0]]), "its entry history.0"),
        (" " * (5 << 20), "too large"),
    ],
)
def test_a_damaged_file_is_told_in_words(tmp_path, text, words):
    path = tmp_path / "status.json"
    path.write_text(text)
    with pytest.raises(StatusError, match=words) as caught:
        file.read(path)
    assert str(path) in str(caught.value)


def test_no_file_and_no_file_of_its_own(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, words in (("pipe", "no file, or too large"), ("none", "No such file")):
        with pytest.raises(StatusError, match=words):
            file.read(tmp_path / name)


def test_runs_that_begin_at_once_have_names_of_their_own(tmp_path):
    """Two took one name, and each wrote over the other's status."""
    directory = tmp_path / "status"
    alive = replace(told.ABOUT, pid=os.getpid(), process_start=file.process_start(os.getpid()))

    def begin(_):
        with file.in_turn(directory):
            path = file.free_name(directory)
            time.sleep(0.002)
            told.write(path, told.status(about=alive))
        return path

    with ThreadPoolExecutor(8) as runs:
        paths = list(runs.map(begin, range(8)))
    assert len(set(paths)) == 8


def test_a_run_does_not_wait_for_a_turn_that_never_comes(tmp_path, monkeypatch):
    monkeypatch.setattr(file, "TURN_SECONDS", 0.0)
    with file.in_turn(tmp_path), file.in_turn(tmp_path):
        assert file.free_name(tmp_path).parent == tmp_path


def test_files_are_found_by_rank_and_model(tmp_path):
    with pytest.raises(StatusError, match="has the status of no run"):
        file.find(tmp_path)
    with pytest.raises(StatusError, match="is not a directory"):
        file.find(tmp_path / "none")
    for folder in ("greedysnake-run", "greedysnake-run-1.2"):
        (tmp_path / folder).mkdir()
        told.write(tmp_path / folder / file.STATUS, told.status())
    told.write(tmp_path / "greedysnake-run-3.json", told.status())
    (tmp_path / "others.json").write_text("{}")
    names = [str(path.relative_to(tmp_path)) for path in file.find(tmp_path)]
    assert names == ["greedysnake-run/.status.json", "greedysnake-run-1.2/.status.json", "greedysnake-run-3.json"]
    assert file.find(tmp_path / "greedysnake-run") == [tmp_path / "greedysnake-run" / file.STATUS]


def test_a_run_is_alive_as_long_as_its_process_is(tmp_path):
    process = subprocess.Popen(["sleep", "60"])
    try:
        about = replace(told.ABOUT, pid=process.pid, process_start=file.process_start(process.pid))
        assert file.is_alive(told.status(about=about))
        assert not file.is_alive(told.status(about=about, state="ended"))
        assert not file.is_alive(told.status(about=replace(about, process_start=1)))  # another process of that pid
        told.write(tmp_path / "greedysnake-run.json", told.status(about=about))
        assert file.free_name(tmp_path).name == "greedysnake-run.2.json"
    finally:
        process.kill()
        process.wait()
    assert not file.is_alive(told.status(about=about))
    assert file.free_name(tmp_path).name == "greedysnake-run.json"
