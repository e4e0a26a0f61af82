"""What is said of a run: the bar inside a step, how it goes on or has ended, what binds, wear."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import told

from gs_compile.program.ir import Stage
from gs_compile.runtime.storage.folder import date_of
from gs_compile.status import words
from gs_compile.status.record import stage_words

WRITTEN = date_of(told.WRITTEN)


def test_the_bar_of_a_step():
    assert words.bar_text(told.UNDER_WAY) == (
        "step 61 ━━━━━━━━━━━━━━────── backward of layer 20, 21 s, about 10 s left, ssd_read 1.2 GiB/s, ssd_write 574.2 MiB/s"
    )
    first = replace(told.UNDER_WAY, number=1, call=2, expected_seconds=math.nan, lanes={})
    assert words.bar_text(first) == "step 1 ━━━━━━━━━━━━━━────── call 2, backward of layer 20, 21 s, about 9 s left"


def test_time_left_is_that_of_a_step_like_the_last_and_never_negative():
    assert told.UNDER_WAY.left_seconds == pytest.approx(31.2 - 21.4)
    longer = replace(told.UNDER_WAY, seconds=40.0)
    assert longer.left_seconds == pytest.approx(40.0 * 0.3 / 0.7)
    assert math.isnan(replace(longer, done=0).left_seconds)


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (Stage("fill"), "reading ahead"),
        (Stage("forward", "e"), "forward of the embedding"),
        (Stage("backward", 3), "backward of layer 3"),
        (Stage("forward", "h"), "forward of the head"),
        (Stage("drain"), "the last updates"),
    ],
)
def test_stages_in_words(stage, text):
    assert stage_words(stage) == text


@pytest.mark.parametrize(
    ("changes", "alive", "age", "text"),
    [
        ({}, True, 1.0, "has run for 31 min 41 s"),
        ({}, True, 8.0, "has written nothing for 8 s: its process is stopped, or its drive does not answer"),
        ({}, False, 1.0, f"was killed: its process is gone, and wrote this at {WRITTEN}"),
        ({"state": "ended"}, False, 7300.0, f"ended at {WRITTEN}"),
        ({"state": "failed", "reason": "LaneError: x"}, True, 90000.0, f"failed at {WRITTEN}: LaneError: x"),
    ],
)
def test_whether_a_run_goes_on(monkeypatch, changes, alive, age, text):
    monkeypatch.setattr(words, "is_alive", lambda status: alive)
    assert words.condition(told.status(**changes), told.WRITTEN + age) == text


def test_what_binds():
    assert words.binding(told.LAST) == "ssd_read, busy for 85% of the step"
    slow = replace(told.LAST, seconds=100.0)
    assert slow.binds == ""
    assert words.binding(slow).startswith("no lane by itself (ssd_read is busy for 26%)")
    assert words.binding(replace(told.LAST, seconds=math.nan)) == "not known before the second step"


def test_prediction_against_measurement():
    assert words.compared(31.2, 28.0) == "28 s predicted, measured 11% longer"
    assert words.compared(21.0, 28.0) == "28 s predicted, measured 25% less"
    assert words.compared(28.05, 28.0) == "28 s predicted, as measured"
    assert words.compared(math.nan, 28.0) == "28 s predicted"
    assert words.compared(1.0, math.nan).startswith("no prediction")


def test_wear_of_the_drives():
    assert words.wear(told.status()) == (
        "2.1 TiB so far; 97.4 TiB written to SSD in a day; the drives are rated for 600.0 TiB, 6.2 days of it"
    )
    assert words.wear(told.status(lanes={})) == "nothing is written to SSD"
    assert words.wear(told.status(num_steps=0, seconds=0.0)) == "not known before the second step"


def test_metrics_are_flat_and_say_what_binds():
    found = told.LAST.metrics()
    assert found["tokens_per_second"] == pytest.approx(1024 / 31.2)
    assert found["predicted_seconds"] == 28.0
    assert found["loss"] == 5.523
    assert found["ssd_read_bytes"] == told.LANES["ssd_read"].nbytes
    busy = {name: value for name, value in found.items() if name.endswith("_busy")}
    assert max(busy, key=lambda name: busy[name]) == "ssd_read_busy"
    assert all(type(value) is float for value in found.values())
    first = replace(told.LAST, seconds=math.nan, loss=math.nan, predicted_seconds=math.nan).metrics()
    assert not {"seconds", "tokens_per_second", "loss", "predicted_seconds", "ssd_read_busy"} & first.keys()
