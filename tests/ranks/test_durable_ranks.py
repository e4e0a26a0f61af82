"""Several ranks commit a step together, or none does; they go on from one that all have."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
import torch
from launch import Fleet
from rank_learner import Learner
from tiered import gpt2

import gs_compile
from gs_compile.runtime.storage import manifest
from gs_compile.runtime.storage.folder import folder_in

LAST = 5


@pytest.fixture(scope="module")
def pair():
    with Fleet(2) as fleet:
        yield fleet


def trains(info, tmp_path, dies_at=None):
    """Steps until the last; a rank is killed after it has prepared the commit of a step, or has made it."""
    torch.manual_seed(info.rank)
    learner = Learner(info, tmp_path / "storage", build=partial(gpt2, dropout=0.1), durability="step")
    run = gs_compile.resume(learner.model, learner.optimizer, storage=tmp_path / "storage")
    if dies_at is not None and info.rank == 1:
        name, step = dies_at
        call = manifest.system.rename

        def rename(old, new, folder_fd):
            if new == name and learner.optimizer.num_steps == step:
                if name == manifest.NEXT:
                    call(old, new, folder_fd)
                os.kill(os.getpid(), signal.SIGKILL)
            call(old, new, folder_fd)

        manifest.system.rename = rename
    learner.train(*range(run.step, LAST))
    values = learner.values()
    committed = manifest.read(folder_in(tmp_path / "storage"))
    return run.step, values, committed.step


@pytest.mark.parametrize(
    ("dies_at", "known"),
    [((manifest.NEXT, 3), {2, 3}), pytest.param((manifest.NAME, 3), {3}, marks=pytest.mark.slow)],
)
def test_ranks_go_on_from_a_step_that_all_have(dies_at, known, pair, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    expected = pair.run(trains, whole)
    killed = pair.outcomes(trains, broken, dies_at=dies_at)
    assert "was killed" in killed[0].failure
    found = pair.run(trains, broken)
    for (start, values, committed), (_, wanted, _) in zip(found, expected, strict=True):
        assert start in known
        assert (start, committed) == (start, LAST)
        assert values.keys() == wanted.keys()
        assert all(torch.equal(values[name], wanted[name]) for name in wanted)
