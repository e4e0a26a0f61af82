"""After a fault the last commit is what there is: it is named, and found on whichever drive has it."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from tiered import adamw, options, outcome, step, tokens

from gs_compile.errors import LaneError, ReleasedParameterError, StorageError
from gs_compile.runtime.storage import system
from gs_compile.runtime.storage.manifest import NAME, read
from gs_compile.runtime.storage.stored import FOLDER

KEEPS_CAPTURES = True
CHANGED = "transformer.h.0.ln_1.weight"


def fail_rename(monkeypatch, folder):
    """From now on the manifest of this folder cannot be replaced."""
    real = system.rename

    def rename(name, to, folder_fd):
        if to == NAME and os.path.samestat(os.fstat(folder_fd), folder.stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(name, to, folder_fd)

    monkeypatch.setattr(system, "rename", rename)


def test_a_commit_that_one_drive_alone_has_is_gone_on_from_by_a_run_on_the_other(harness, monkeypatch, tmp_path):
    """The first drive is a commit behind; what was learned is lost from memory, and the message says what there is."""
    first, second = (tmp_path / name / FOLDER for name in "ab")
    wanted = harness.train(adamw, options(tmp_path / "usual"), num_steps=4)
    durable = {"durability": "step", "resume": "auto"}
    with harness.fresh(adamw, {**options([tmp_path / "a", tmp_path / "b"]), **durable}) as optimizer:
        for number in range(3):
            step(harness.model, optimizer, tokens(number))
        with monkeypatch.context() as patched:
            fail_rename(patched, first)
            with pytest.raises(LaneError, match="the commit of step 3 failed: Input/output error"):
                optimizer.commit()
        with pytest.raises(ReleasedParameterError, match=f"of run {read(first).run} at step 2 in {tmp_path / 'a'}, "):
            harness.model.state_dict()
    assert (read(first).step, read(second).step) == (2, 3)
    with harness.fresh(adamw, {**options(tmp_path / "a"), **durable}) as optimizer:
        step(harness.model, optimizer, tokens(3))
        found = outcome(harness.model, optimizer, wanted.losses, wanted.norms)
    assert not found.differences(wanted)


def test_no_commit_names_files_that_somebody_has_removed(harness, tmp_path):
    """As a job does that removes what is old from a scratch file system."""
    with harness.fresh(adamw, {**options(tmp_path), "durability": "step"}) as optimizer:
        for number in range(2):
            step(harness.model, optimizer, tokens(number))
        for path in (tmp_path / FOLDER).glob("*-s0-*"):
            path.unlink()
        with pytest.raises(LaneError, match=r"another program has removed this file of the run: .*-s0-"):
            optimizer.commit()


def test_a_change_between_steps_that_fails_costs_no_other_values(harness, monkeypatch, tmp_path):
    """The part that has it is copied first, as a commit has its file."""

    def pwritev(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with harness.fresh(adamw, {**options(tmp_path), "durability": "step"}) as optimizer:
        step(harness.model, optimizer, tokens(0))
        optimizer.commit()
        before = {name: values.clone() for name, values in harness.model.state_dict().items()}
        with monkeypatch.context() as patched:
            patched.setattr(system, "pwritev", pwritev)
            with pytest.raises(StorageError, match="write of"), torch.no_grad():
                harness.model.get_parameter(CHANGED).fill_(3.0)
        after = harness.model.state_dict()
        assert [name for name in before if not torch.equal(before[name], after[name])] in ([], [CHANGED])


def test_without_commits_a_fault_says_how_there_would_have_been_one(harness, monkeypatch, tmp_path):
    with harness.fresh(adamw, options(tmp_path)) as optimizer:
        for number in range(2):
            step(harness.model, optimizer, tokens(number))
        optimizer.engine.tiers.close()
        with pytest.raises(ReleasedParameterError, match=r'a close\(\) ended.*the option durability="step"'):
            harness.model.state_dict()
