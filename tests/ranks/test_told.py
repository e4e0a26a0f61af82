"""What each of several ranks says of itself: a file of its own, and the loss of all; and what a killed one has said."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from launch import Fleet
from learner import learner
from tiered import adamw, loss_of, options, shared, step, tokens

from gs_compile.runtime.storage.folder import STATUS
from gs_compile.runtime.storage.stored import FOLDER
from gs_compile.status import file, reporter


def tells(info, tmp_path):
    """This rank's own loss, which the script then adds up over ranks in place, and what its status file says."""
    reporter.SECONDS = 600.0  # two threads that write the file at once would be in each other's way
    harness = shared()
    given = {**options(tmp_path / "storage"), "report": tmp_path / "run.html"}
    with harness.fresh(adamw, given) as one:
        loss = loss_of(harness.model, tokens(info.rank))
        own = loss.item()
        dist.all_reduce(loss.detach())
        loss.backward()
        one.step()
        one.engine.reporter._tick(1)
        path, page = one.engine.reporter.outlets[:2]
        found = file.read(path)
        return own, found.last.loss, (found.about.rank, found.about.num_ranks, path.parent.name, page is not None)


def test_each_rank_has_its_file_and_the_first_one_the_page(pair, tmp_path):
    (first, loss, here), (second, other, there) = pair.run(tells, tmp_path)
    assert loss == other == pytest.approx((first + second) / 2, rel=1e-6)
    assert (here, there) == ((0, 2, FOLDER, True), (1, 2, f"{FOLDER}-1", False))
    assert (tmp_path / "run.html").exists()
    assert not list((tmp_path / "storage").iterdir())


def trains(info, tmp_path):
    reporter.SECONDS = 0.02
    harness = shared()
    with harness.fresh(adamw, options(tmp_path / "storage")) as one:
        step(harness.model, one, tokens(0))
        while not (tmp_path / "storage" / FOLDER / STATUS).exists():
            time.sleep(0.01)
        (tmp_path / "trained").touch()
        time.sleep(60)


def test_a_killed_run_is_shown_as_ended_and_the_next_one_removes_its_file(tmp_path):
    storage, path = tmp_path / "storage", tmp_path / "storage" / FOLDER / STATUS
    with Fleet(1, initialize=False) as fleet:
        fleet.begin(trains, tmp_path)
        fleet.wait_for(tmp_path, "trained")
        assert file.is_alive(file.read(path))
        fleet.processes[0].kill()
        fleet.processes[0].join()
    found = file.read(path)
    assert found.state == "running"
    assert not file.is_alive(found)
    with learner(storage) as one:
        one.train(0)
    assert not list(storage.iterdir())
