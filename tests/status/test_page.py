"""The page about a run: its numbers are the record's, it needs nothing from outside, and says what is not known."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
import told

from gs_compile.runtime.storage.folder import date_of
from gs_compile.status import words
from gs_compile.status.file import plain
from gs_compile.status.page import page


@pytest.fixture(autouse=True)
def _goes_on(monkeypatch):
    monkeypatch.setattr(words, "is_alive", lambda status: status.state == "running")


def made(**changes):
    return page(told.status(**changes), told.WRITTEN + 1)


def shown(text):
    """What a reader sees: no tags, styles or data."""
    text = re.sub(r"<(style|script).*?</\1>", "", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text))


def test_its_numbers_are_the_records():
    text = made()
    (data,) = re.findall(r'<script type="application/json" id="status">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data) == plain(told.status())
    seen = shown(text)
    for each in (
        "steps 60 none skipped",
        "tokens a second 32.8 over 59 steps",
        "a step 31.2 s 28 s predicted, measured 11% longer",
        "loss 5.523 gradient norm 1.25",
        "binds ssd_read ssd_read 85%, ssd_write 61%",
        "ssd_read 85% 26.5 s 24 s 44.1 GiB 1.7 GiB/s",
        "ssd_write: 36.0 GiB, predicted 36.0 GiB (optimizer states 28.4 GiB, parameters 7.1 GiB, checkpoints 512.0 MiB)",
        "in use now, working memory too 5.9 GiB 35.5 GiB",
        "/mnt/a: 60% of the bytes, 120.0 GiB free",
        "a second SSD like the first: 41% faster",
        "torch 2.11.0",
    ):
        assert each in seen


def test_the_curve_has_every_point_of_the_history():
    loss, seconds = re.findall(r'<polyline class="is" points="([^"]*)"', made())
    assert len(loss.split()) == told.NUM_STEPS
    assert len(seconds.split()) == told.NUM_STEPS - 1  # that of the first step is not known
    heights = [float(point.partition(",")[2]) for point in loss.split()]
    assert heights == sorted(heights)  # downwards on the page
    assert (heights[0], heights[-1]) == (4.0, 96.0)


def test_a_loss_that_is_not_finite_costs_the_curve_one_point():
    first, second, *others = told.status().history
    loss, _ = re.findall(r'points="([^"]*)"', made(history=(first, second._replace(loss=math.inf), *others)))
    assert len(loss.split()) == told.NUM_STEPS - 1
    assert "nan" not in loss


def test_nothing_comes_from_outside_and_nothing_is_executed():
    text = made()
    assert not re.findall(r"https?:|src=|href=|url\(|@import|onload", text)
    assert set(re.findall(r"<script[^>]*>", text)) == {'<script type="application/json" id="status">'}
    assert "a machine <of two>" not in text
    assert "a machine &lt;of two&gt;" in text
    assert not re.findall(r"@[a-z]+\b(?!media)", text.replace("@media", ""))


def test_it_loads_itself_anew_while_the_run_goes_on():
    assert 'http-equiv="refresh"' in made()
    assert "This run has run for" not in made(state="ended")
    assert 'http-equiv="refresh"' not in made(state="ended")
    assert f'<p class="bad">This run failed at {date_of(told.WRITTEN)}: LaneError: x.' in made(
        state="failed", reason="LaneError: x"
    )


def test_what_is_not_known_is_said_in_words():
    without = tuple(point._replace(loss=math.nan) for point in told.status().history)
    assert "The loss is not known to the backend" in made(history=without, last=replace(told.LAST, loss=math.nan))
    first = replace(told.LAST, number=1, seconds=math.nan)
    text = made(history=told.status().history[:1], last=first, num_steps=0, seconds=0.0, num_tokens=0, lanes={})
    assert "Seconds of a step are known from the second one on" in text
    assert "Known from the second step on" in text
    assert "No step has ended yet" in made(last=None, history=(), num_steps=0, seconds=0.0, lanes={})
    unplanned = replace(told.ABOUT, predicted={}, predicted_seconds=math.nan, plan="", binding=())
    text = made(about=unplanned)
    assert "The plan was made by another rank" in text
    assert "predicted, measured" not in made(about=unplanned, last=replace(told.LAST, predicted_seconds=math.nan))
