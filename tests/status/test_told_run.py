"""A run that is told of: what its file, bar and page say, that they go with it, and that nothing is left."""

from __future__ import annotations

import io
import logging
import math
import os
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from learner import learner
from tiered import tokens
from told import ABOUT, LAST

import gs_compile
from gs_compile.cli.stored.runs import found_in
from gs_compile.errors import OptionError
from gs_compile.model import reporting as reporting_module
from gs_compile.options import Options
from gs_compile.program.values import DRAIN, FILL
from gs_compile.progress import CLEAR, Line
from gs_compile.runtime.storage.folder import STATUS
from gs_compile.runtime.storage.movers import Transfer
from gs_compile.runtime.storage.stored import FOLDER
from gs_compile.runtime.trace import Trace
from gs_compile.status import file, reporter, runs
from gs_compile.status.record import RunRecord

KEEPS_CAPTURES = True


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(reporter, "SECONDS", 0.02)


@pytest.fixture
def own_machine(tmp_path_factory, monkeypatch):
    """The folder of the runs that go on, with no others."""
    folder = tmp_path_factory.mktemp("machine")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder / f"greedysnake-{os.geteuid()}"


def until(holds, seconds=60.0):
    """Wait until something holds, which a thread sees to."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "greedysnake status"]


def test_the_file_says_what_the_last_step_says_and_goes_with_the_run(tmp_path, own_machine):
    path = tmp_path / FOLDER / STATUS
    with learner(tmp_path) as one:
        one.train(0, 1)
        until(path.exists)
        assert [entry.resolve() for entry in runs.going_on()] == [path]
        until(lambda: file.read(path).last is not None and file.read(path).last.number == 2)
        found, info = file.read(path), one.optimizer.last_step
        assert file.plain(found.last) == file.plain(info)
        assert found.state == "running"
        assert found.step is None
        assert found.num_steps == 1
        assert found.lanes == info.lanes
        assert found.about.num_parameters == sum(parameter.numel() for parameter in one.model.parameters())
        assert found.used["host"] == one.optimizer.engine.tiers.slab.nbytes
        assert found.used["ssd"] == one.optimizer.engine.planning.ssd_nbytes
        assert file.is_alive(found)
        assert threads() == ["greedysnake status"]
    assert threads() == []
    assert not list(tmp_path.iterdir())
    assert not list(own_machine.iterdir())


def test_a_run_in_memory_is_among_those_of_the_machine(tmp_path, own_machine):
    storage = tmp_path / "storage"
    with learner(storage, ratios={"parameter": 1.0, "checkpoint": 1.0, "optimizer": 1.0}) as one:
        one.train(0, 1)
        until(lambda: list(own_machine.glob("*.json")))
        (entry,) = runs.going_on()
        assert not file.read(entry).about.drives
        assert not storage.exists()
    assert not list(own_machine.iterdir())


def test_metrics_have_tokens_and_the_loss_of_the_batch(tmp_path):
    with learner(tmp_path) as one:
        (loss,) = one.train(0)
        found = gs_compile.metrics(one.model)
        assert found["loss"] == pytest.approx(loss, rel=1e-6)
        assert found["tokens"] == tokens(0).numel()
        assert "tokens_per_second" not in found
        one.train(1)
        found = gs_compile.metrics(one.model)
        assert found["tokens_per_second"] == found["tokens"] / found["seconds"]
        assert found["ssd_read_busy"] == found["ssd_read_seconds"] / found["seconds"]


def test_a_step_of_several_backwards_has_all_their_tokens_and_the_mean_of_their_losses(tmp_path):
    with learner(tmp_path, accumulate=True) as one:
        losses = [one.loss(number) for number in range(3)]
        for loss in losses:
            loss.backward()
        one.optimizer.step()
        info = one.optimizer.last_step
        assert info.num_tokens == 3 * tokens(0).numel()
        assert info.loss == pytest.approx(sum(float(loss.detach()) for loss in losses) / 3, rel=1e-6)
        assert math.isnan(info.predicted_seconds)


def test_an_evaluation_is_no_part_of_the_step_that_it_comes_into(tmp_path):
    """Fault: the step was shown to be at the end of its forward."""
    with learner(tmp_path, accumulate=True) as one:
        one.loss(0).backward()
        before = one.optimizer.engine.reporter.record.under_way()
        with torch.no_grad():
            one.loss(1)
        found = one.optimizer.engine.reporter.record.under_way()
        assert (found.stage, found.done, found.total) == (before.stage, before.done, before.total)


def test_what_a_step_has_cost_is_told_of_it_behind_an_evaluation(tmp_path, caplog):
    """Fault: it was told of the evaluation, which moves no gradients."""
    told = []
    for is_evaluated in (False, True):
        caplog.clear()
        with learner(tmp_path, accumulate=True) as one, caplog.at_level("INFO"):
            for number in range(2):
                one.loss(number).backward()
            if is_evaluated:
                with torch.no_grad():
                    one.loss(2)
            one.optimizer.step()
        told.append([each.message for each in caplog.records if each.message.startswith("a step has 2 backwards")])
    assert len(told[0]) == 1
    assert told[0] == told[1]


def test_a_step_under_way_is_shown_with_its_stage(tmp_path):
    with learner(tmp_path) as one:
        one.train(0)
        loss = one.loss(1)
        step = one.optimizer.engine.reporter.record.under_way()
        assert (step.number, step.call, step.stage) == (2, 1, "backward of the head")  # which runs with the forward
        assert 0 < step.done < step.total
        assert step.lanes["ssd_read"].nbytes > 0
        loss.backward()
        assert one.optimizer.engine.reporter.record.under_way().part == 1.0
        one.optimizer.step()
        assert one.optimizer.engine.reporter.record.under_way() is None


def test_a_run_that_fails_leaves_nothing(tmp_path, monkeypatch):
    with learner(tmp_path) as one:
        one.train(0)
        until((tmp_path / FOLDER / STATUS).exists)
        monkeypatch.setattr(Transfer, "wait", lambda self: (_ for _ in ()).throw(OSError(5, "gone")))
        with pytest.raises(gs_compile.GreedySnakeError, match="gone"):
            one.train(1, 2)
    assert threads() == []
    assert not list(tmp_path.iterdir())


def test_a_directory_of_its_own_and_a_page_stay(tmp_path):
    own, page = tmp_path / "status", tmp_path / "run.html"
    with learner(tmp_path / "storage", status=own, report=page) as one:
        one.train(0, 1)
    found = file.read(own / f"{FOLDER}.json")
    assert found.state == "ended"
    assert found.last.number == 2
    assert "Means of 1 steps" in page.read_text()
    assert sorted(path.name for path in tmp_path.rglob("*")) == [f"{FOLDER}.json", "run.html", "status", "storage"]


def test_beside_a_commit_the_status_stays_and_is_no_garbage(tmp_path):
    with learner(tmp_path, durability="step") as one:
        one.train(0, 1)
        one.optimizer.commit()
    assert file.read(tmp_path / FOLDER / STATUS).state == "ended"
    (found,) = found_in(tmp_path)
    assert found.garbage(tmp_path / FOLDER) == {}
    assert STATUS in found.garbage(tmp_path / FOLDER, everything=True)


def test_why_a_run_has_failed(tmp_path, monkeypatch):
    with learner(tmp_path / "storage", status=tmp_path / "status") as one:
        one.train(0)
        monkeypatch.setattr(Transfer, "wait", lambda self: (_ for _ in ()).throw(OSError(5, "gone")))
        with pytest.raises(gs_compile.GreedySnakeError, match="gone"):
            one.train(1, 2)
    found = file.read(tmp_path / "status" / f"{FOLDER}.json")
    assert found.state == "failed"
    assert "gone" in found.reason


def test_a_file_that_cannot_be_written_is_said_once_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(reporter, "SECONDS", 600.0)  # one thread alone tells of a run
    page, nowhere = tmp_path / "none" / "run.html", tmp_path / "a file"
    nowhere.touch()
    with learner(tmp_path / "storage", report=page, status=nowhere) as one, caplog.at_level(logging.WARNING):
        one.train(0, 1)
        one.optimizer.engine.reporter._tick(reporter.PAGE_SECONDS)
        one.optimizer.engine.reporter._tick(reporter.PAGE_SECONDS)
    assert sorted(message for message in caplog.messages if str(tmp_path) in message) == [
        f"{nowhere / FOLDER}.json cannot be written: Not a directory; the run goes on without it",
        f"{page} cannot be written: No such file or directory; the run goes on without it",
    ]


def reporting(tmp_path, **outlets):
    """A reporter of a run that measures nothing."""
    record = RunRecord(ABOUT, Trace(), lambda: ({}, {}))
    return reporter.Reporter(record, reporter.Outlets(status=tmp_path / "status.json", **outlets))


def test_a_status_is_there_as_the_run_begins_and_comes_back_with_its_drive(tmp_path, monkeypatch, caplog):
    """The name of its file is free for others until it is there; a drive that is full now may have room later."""
    monkeypatch.setattr(reporter, "SECONDS", 600.0)
    one = reporting(tmp_path)
    assert file.read(tmp_path / "status.json").last is None
    one.note(LAST)
    with monkeypatch.context() as patched:
        patched.setattr(file, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        one._tick(1)
        one._tick(2)
    one._tick(3)
    assert file.read(tmp_path / "status.json").last == LAST
    one.close()
    assert [each for each in caplog.messages if "No space" in each] == [
        f"{tmp_path / 'status.json'} cannot be written: No space left on device; the run goes on without it"
    ]


def test_a_status_that_cannot_be_removed_hides_no_error(tmp_path, monkeypatch):
    """A file system that has failed takes no more changes: the run ends by what has failed, not by this."""
    one = reporting(tmp_path, keeps=lambda: False, entry=tmp_path / "entry.json")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
        one.close()
    assert threads() == []


def test_an_end_that_is_interrupted_is_made_once_more(tmp_path, monkeypatch):
    one = reporting(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(one._thread, "join", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            one.close()
    one.close()
    assert file.read(tmp_path / "status.json").state == "ended"
    assert threads() == []


def test_a_drive_that_does_not_answer_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(reporting_module, "free_storage", lambda _: (_ for _ in ()).throw(OSError(5, "gone")))
    _, free = reporting_module._measure(SimpleNamespace(nbytes=7), {}, [tmp_path])
    assert free == {}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_comes_in_a_long_step_and_goes_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(reporter, "BAR_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with learner(tmp_path) as one:
        one.train(0)
        loss = one.loss(1)
        until(lambda: re.search("step 2 ━.*(forward|backward) of ", shown.getvalue()))
        loss.backward()
        one.optimizer.step()
        assert shown.getvalue().endswith(CLEAR)
        length = len(shown.getvalue())
        time.sleep(0.1)
        assert len(shown.getvalue()) == length  # between two steps


def test_a_short_step_has_no_bar_and_nothing_is_written_off_a_terminal(tmp_path, monkeypatch):
    monkeypatch.setattr(reporter, "BAR_SECONDS", 600.0)  # however slow the machine is
    monkeypatch.setattr(sys, "stderr", shown := Terminal())
    with learner(tmp_path) as one:
        one.train(0)
        loss = one.loss(1)
        time.sleep(0.1)
        loss.backward()
        one.optimizer.step()
    assert "step 2" not in shown.getvalue()
    monkeypatch.setattr(sys, "stderr", plain := io.StringIO())
    Line().show("words")
    assert plain.getvalue() == ""
    Line(always=True).show("words")
    assert plain.getvalue() == "greedysnake: words\n"


def test_a_step_that_has_begun_is_not_where_the_last_one_ended():
    record = RunRecord(ABOUT, trace := Trace(), lambda: ({}, {}))
    program = SimpleNamespace(ops=[SimpleNamespace(stage=FILL), SimpleNamespace(stage=DRAIN)], trains=True)
    for index in range(2):
        record.begin(number=index + 41)  # of a run that was resumed
        assert record.under_way() is None
        trace.issue(program, index)
        assert (record.under_way().number, record.under_way().done) == (index + 41, index + 1)
        record.note(LAST)


def test_the_history_is_thinned():
    record = RunRecord(ABOUT, Trace(), lambda: ({}, {}))
    for number in range(1, 1001):
        record.note(replace(LAST, number=number))
    found = record.status()
    assert [point.step for point in found.history] == list(range(1, 1001, 8))
    assert found.num_steps == 1000
    assert found.lanes["ssd_read"].nbytes == 1000 * LAST.lanes["ssd_read"].nbytes


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"progress": 1}, "progress must be one of True, False, None; got 1"),
        ({"report": ""}, "report must be a path, or None; got ''"),
        ({"status": ["a"]}, "status must be a path, or None"),
        ({"status": "$NO_SUCH_NAME/x"}, "status cannot be .*: no environment variable of that name is set"),
    ],
)
def test_options_are_checked(option, words):
    with pytest.raises(OptionError, match=words):
        Options.of(option)
