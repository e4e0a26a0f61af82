"""Seconds of code are kept between processes, and taken from there while the machine is as it was."""

from __future__ import annotations

import json

import pytest

from gs_compile.planner.cost import known_times
from gs_compile.planner.cost.known_times import KnownTimes


def never():
    raise AssertionError("it is known")


def test_what_was_measured_is_there_in_the_next_process(tmp_path):
    path = tmp_path / "folder" / "file"
    KnownTimes(path).get_or("code", 2, lambda: [(0.25, 0.5), (1.0, 2.0)])
    again = KnownTimes(path)
    assert again.get("code") == [[0.25, 0.5], [1.0, 2.0]]
    assert again.get_or("code", 2, never) == [[0.25, 0.5], [1.0, 2.0]]
    assert again.get("other") is None
    again.forget()
    again.get_or("other", 1, lambda: [(3.0, 4.0)])
    assert KnownTimes(path).get("code") is None


def test_without_a_file_it_is_known_in_this_process_alone():
    known = KnownTimes()
    known.get_or("code", 1, lambda: [(0.25, 0.5)])
    assert known.get_or("code", 1, never) == [(0.25, 0.5)]


@pytest.mark.parametrize("rows", [[[0.25, None]], [[0.25, -1.0]], [[0.25, float("nan")]]])
def test_what_is_no_time_is_not_kept(tmp_path, rows):
    path = tmp_path / "file"
    KnownTimes(path).get_or("code", 1, lambda: rows)
    assert KnownTimes(path).get("code") is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"code": 1}', '{"code": [1]}', '{"code": [["fast"]]}', '{"code": [[NaN]]}', "\x00"]
)
def test_a_file_of_somebody_else_is_none(tmp_path, text):
    path = tmp_path / "file"
    path.write_text(text)
    assert KnownTimes(path).get("code") is None


def test_another_number_of_rows_is_of_another_code():
    known = KnownTimes()
    known.get_or("code", 1, lambda: [(1.0, 1.0)])
    assert known.get_or("code", 2, lambda: [(2.0, 2.0), (2.0, 2.0)])[0] == (2.0, 2.0)


def test_the_latest_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(known_times, "MOST", 2)
    path = tmp_path / "file"
    for key in "abac":
        KnownTimes(path).get_or(key, 1, lambda: [(1.0, 1.0)])
    assert [*json.loads(path.read_text())] == ["a", "c"]


def test_where_no_file_can_be_the_log_says_so(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    KnownTimes(tmp_path / "file" / "inside").get_or("code", 1, lambda: [(1.0, 1.0)])
    assert "could not be stored" in caplog.text
