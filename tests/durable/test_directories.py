"""A run's directories have other paths now, or not all are named: its files stay, and it goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stored_run import save, stored_folders, stored_run, values

from gs_compile.cli.stored.runs import collect, found_in
from gs_compile.errors import LeftoverError
from gs_compile.model.resume import last_of
from gs_compile.options import Options
from gs_compile.runtime.storage.manifest import NAME, NEXT
from gs_compile.runtime.storage.store import Store
from gs_compile.runtime.storage.stored import FOLDER


def left(parent: Path, *names: str) -> list[Path]:
    """The folders that a durable run has left in directories of these names."""
    folders = stored_folders(parent, *names)
    for folder in folders:
        save(folder, stored_run(*folders))
    return list(folders)


def files(folders):
    return {path for folder in folders for path in folder.iterdir() if not path.name.startswith(".")}


def holds_values(store):
    """Whether all parts are read as they were written."""
    for name, data in values(0).items():
        extent = store.adopt(name)
        extent.read(found := torch.empty(extent.nbytes, dtype=torch.uint8)).wait()
        if found[: len(data)].numpy().tobytes() != data:
            return False
    return True


@pytest.mark.parametrize("how", ["moved", "linked"])
def test_a_directory_of_another_path_has_the_run(tmp_path, how):
    before = files(left(tmp_path, "one", "other"))
    now = [tmp_path / "one", tmp_path / "new"]
    if how == "moved":
        (tmp_path / "other").rename(now[1])
    else:
        now[1].symlink_to(tmp_path / "other")
    with Store(now, durable=True, resume=(), weights=(1, 1)) as store:
        assert holds_values(store)
    assert len(files(path / FOLDER for path in now)) == len(before)
    for directory in now:
        for each in found_in(directory):
            assert not collect(each)
    assert len(files(path / FOLDER for path in now)) == len(before)


def test_a_run_that_was_moved_goes_on_while_another_is_in_its_place(tmp_path):
    (one,) = left(tmp_path, "one")
    (tmp_path / "aside").mkdir()
    one.rename(tmp_path / "aside" / FOLDER)
    one.mkdir(mode=0o700)
    save(one, stored_run(one, run="89abcdef"))
    before = files([one])
    with Store([tmp_path / "aside"], durable=True, resume=()) as store:
        assert holds_values(store)
    assert files([one]) == before


def test_files_of_a_run_that_are_elsewhere_are_told(tmp_path):
    """A copy of a manifest without the files; what is beside it stays."""
    (one,) = left(tmp_path, "one")
    (copy,) = stored_folders(tmp_path, "copy")
    (one / NAME).rename(copy / NAME)
    beside = copy / sorted(one.iterdir())[0].name
    beside.touch(0o600)
    with pytest.raises(LeftoverError, match=str(one)):
        Store([tmp_path / "copy"], durable=True, resume=())
    assert [collect(each) for each in found_in(tmp_path / "copy")] == [{}]
    assert beside.exists()


def test_a_run_that_moves_leaves_nothing_where_it_was(tmp_path):
    (one,) = left(tmp_path, "one")
    with Store([tmp_path / "new"], durable=True, resume=[tmp_path / "one"]) as store:
        assert holds_values(store)
        extents = {part.value: store.allocate(f"{part.value}.0", part.nbytes) for part in store.former.parts}
        made = replace(store.former, step=4, parts=tuple(each.stored(name) for name, each in extents.items()))
        store.commit(list(extents.values()), lambda: made)
        assert not files([one])
    assert not one.exists()
    with Store([tmp_path / "new"], durable=True, resume=()) as store:
        assert store.former == replace(made, number=1)


@pytest.mark.parametrize("turn", [1, -1])
def test_of_two_commits_of_one_step_the_later_counts(tmp_path, turn):
    """Whichever directory has it: a step is committed anew where values were read, and a kill may come between two."""
    folders = stored_folders(tmp_path, "one", "other")
    first = stored_run(*folders, number=6)
    later = replace(first, number=7, states={"scheduler": {"last_epoch": 4}})
    for folder, made in zip(folders[::turn], (first, later), strict=True):
        save(folder, made)
    directories = [folder.parent for folder in folders]
    assert last_of(Options(storage=directories)) == found_in(directories[0])[0].commit == later
    with Store(directories, durable=True, resume=(), weights=(1, 1)) as store:
        assert store.former == later


def test_a_run_that_ends_before_its_first_commit_leaves_directories_that_nobody_named(tmp_path):
    folders = left(tmp_path, "one", "other")
    before = files(folders)
    with Store([tmp_path / "one"], durable=True, resume=()) as store:
        assert holds_values(store)
    assert files(folders) == before


@pytest.mark.parametrize("name", [NAME, NEXT])
def test_a_model_beside_keeps_what_it_has_committed_or_prepared(tmp_path, name):
    folder = tmp_path / f"{FOLDER}.2"
    folder.mkdir(mode=0o700)
    save(folder, stored_run(folder), name)
    before = sorted(path.name for path in folder.iterdir() if path.name != ".lock")
    Store([tmp_path]).close()
    assert sorted(path.name for path in folder.iterdir()) == before


def test_what_a_rank_has_prepared_is_kept_from_a_process_that_runs_alone(tmp_path):
    """Other ranks may have made it, and written over the commit before: all would be lost."""
    (one,) = stored_folders(tmp_path, "one")
    made = stored_run(one)
    save(one, replace(made, world=2))
    save(one, replace(made, world=2, step=4), NEXT)
    before = sorted(path.name for path in one.iterdir())
    with pytest.raises(LeftoverError, match="a run of several ranks has ended here while it committed step 4"):
        Store([tmp_path / "one"], durable=True, resume=())
    assert sorted(path.name for path in one.iterdir() if path.name != ".lock") == before
