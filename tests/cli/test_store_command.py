"""The commands `greedysnake store`: what they find, what they refuse, and what they leave alone."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from functools import partial

import command_line
import pytest
from stored_run import RUN, name_of, save, stored_folders, stored_run

from gs_compile.cli.stored import runs
from gs_compile.runtime.storage import system
from gs_compile.runtime.storage.manifest import NAME, NEXT

run, printed = partial(command_line.run, "store"), partial(command_line.printed, "store")


def refused(code, words, *arguments):
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert words in result.stderr
    return result.stdout


def names(*folders):
    return sorted(path.name for folder in folders if folder.exists() for path in folder.iterdir())


def garbage_in(folder):
    """What a killed run leaves."""
    for name in (f"{RUN}-00ff-s0-a.1", "w3-b", ".probe", ".manifest.json"):
        (folder / name).write_bytes(bytes(8192))


def foreign_in(folder):
    """What no run makes; the names."""
    (folder / "notes.txt").write_text("mine")
    (folder / ".notes").write_text("mine")
    (folder / f"{RUN}-00ff-s0-b.1").symlink_to(folder / "notes.txt")
    (folder / f"{RUN}-00ff-w0-b.1").mkdir()
    os.mkfifo(folder / f"{RUN}-00ff-w0-c.1")
    return [".notes", f"{RUN}-00ff-s0-b.1", f"{RUN}-00ff-w0-b.1", f"{RUN}-00ff-w0-c.1", "notes.txt"]


# ls -------------------------------------------------------------------------------------------------------------------


def test_ls_tells_of_every_run(folders, commit, tmp_path):
    rank = folders[0].with_name("greedysnake-run-1.2")
    rank.mkdir(mode=0o700)
    save(rank, replace(commit, run="ffffffff", parts=(), units=(), parameters=(), rest=(), rank=1, world=2))
    garbage_in(folders[0])
    lines = printed("ls", folders[0].parent).splitlines()
    assert lines[1].split() == [
        str(folders[0]), RUN, "3", commit.written, "136.0", "KiB", "14,656", "parameters,", "AdamW", "32.0", "KiB",
    ]  # fmt: skip
    assert "rank 1 of 2" in lines[2]
    first, second = json.loads(printed("ls", folders[0].parent, "--json"))["runs"]
    assert (first["step"], first["nbytes"], first["parameters"], first["problem"]) == (3, 17 * 8192 + 48, 14656, None)
    assert first["used_by"] is None
    assert set(first["garbage"].values()) == {8192}
    assert (second["rank"], second["world"]) == (1, 2)
    assert printed("ls", tmp_path) == f"no runs in {tmp_path}\n"
    assert "listing failed: No such file" in run("ls", tmp_path / "none").stderr


def test_a_folder_of_a_run_by_other_names(folders, commit, tmp_path, monkeypatch):
    """Fault: "." had no runs, and one that is not there none either, which `verify` took for well."""
    monkeypatch.chdir(folders[0])
    assert RUN in printed("ls", ".")
    for command in ("ls", "verify", "gc"):
        refused(5, "listing failed: No such file", command, tmp_path / "greedysnake-run")


def test_ls_looks_at_a_run_in_use_and_changes_nothing(folders, used):
    before = names(*folders)
    assert "in use by pid 1, started just now" in printed("ls", folders[1].parent)
    (row,) = json.loads(printed("ls", folders[1].parent, "--json"))["runs"]
    assert row["used_by"] == "pid 1, started just now"
    assert names(*folders) == before


def test_ls_of_a_run_that_removes_files_meanwhile(folders, commit, monkeypatch):
    garbage_in(folders[0])
    looked, real = [], runs.is_made

    def is_made(path):
        if not looked:
            path.unlink()
        looked.append(path.name)
        return real(path)

    monkeypatch.setattr(runs, "is_made", is_made)
    assert RUN in printed("ls", folders[0].parent)
    assert len(looked) > 1
    monkeypatch.setattr(runs, "look", lambda folder: (shutil.rmtree(folder), runs.Found(folder))[1])
    assert "no commit" in printed("ls", folders[0].parent)


def test_ls_tells_the_newest_commit_of_all_directories(folders, commit):
    save(folders[1], replace(commit, step=4))
    (row,) = json.loads(printed("ls", folders[0].parent, "--json"))["runs"]
    assert row["step"] == 4


def test_ls_tells_of_a_damaged_run_and_of_the_others(folders, commit):
    other = folders[0].with_name("greedysnake-run.2")
    shutil.copytree(folders[0], other)
    (folders[0] / NAME).write_bytes(b"{}")
    assert str(other) in refused(5, "format: Field required", "ls", folders[0].parent)


# gc -------------------------------------------------------------------------------------------------------------------


def test_gc_removes_what_no_commit_names_and_nothing_foreign(folders, commit):
    before = names(*folders)
    foreign = foreign_in(folders[1])
    for folder in folders:
        garbage_in(folder)
    assert printed("gc", folders[0].parent).splitlines()[-1] == "removed 8 files, 64.0 KiB"
    assert names(*folders) == sorted([*before, *foreign])
    printed("gc", folders[0].parent, "--all")
    assert not folders[0].exists()
    assert names(folders[1]) == foreign


def test_gc_keeps_what_a_commit_in_another_directory_names(folders, commit):
    """The one of two manifests that was written first, before the process was killed."""
    name = f"{RUN}-00ff-s0-a.1"
    parts = [
        replace(part, files=tuple(replace(file, name=name) for file in part.files)) if part.value == "s0a" else part
        for part in commit.parts
    ]
    for folder in folders:
        garbage_in(folder)
    save(folders[1], replace(commit, step=4, parts=tuple(parts)))
    printed("gc", folders[0].parent)
    for folder in folders:
        assert {name, f"{RUN}-00ff-s0-a.0"} <= set(names(folder))


def test_gc_keeps_the_commit_that_a_rank_has_prepared(folders, commit):
    """Others may have made it already."""
    name = f"{RUN}-00ff-s0-a.1"
    part = commit.parts[0]
    newer = replace(part, files=(replace(part.files[0], name=name), *part.files[1:]))
    save(folders[0], commit)
    save(folders[0], replace(commit, step=commit.step + 1, parts=(newer, *commit.parts[1:])), NEXT)
    (folders[0] / name).write_bytes(bytes(part.files[0].nbytes))
    before = names(folders[0])
    printed("gc", folders[0].parent)
    assert names(folders[0]) == before
    printed("gc", folders[0].parent, "--all")
    assert not folders[0].exists()


def test_gc_of_a_copy_leaves_the_run_that_it_was_copied_from(folders, commit, tmp_path):
    copy = tmp_path / "copy" / folders[0].name
    copy.parent.mkdir()
    shutil.copytree(folders[0], copy)
    before = names(*folders)
    printed("gc", copy.parent, "--all")
    assert not copy.exists()
    assert names(*folders) == before


def test_gc_that_is_killed_leaves_no_commit_of_files_that_are_gone(folders, commit, monkeypatch):
    unlink, gone = system.unlink, []

    def unlink_some(name, folder_fd):
        if len(gone) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(name, folder_fd)
        gone.append(name)

    monkeypatch.setattr(system, "unlink", unlink_some)
    refused(5, "removal of", "gc", folders[0].parent, "--all")
    assert gone == [NAME]


def test_gc_keeps_what_a_run_has_committed_since_it_was_found(tmp_path):
    (folder,) = stored_folders(tmp_path, "one")
    save(folder, stored_run(folder))
    (found,) = runs.found_in(folder.parent)
    save(folder, stored_run(folder, run="89abcdef"))
    before = names(folder)
    runs.collect(found)
    assert names(folder) == [name for name in before if not name.startswith(RUN)]


def test_gc_keeps_what_a_run_has_committed_to_another_directory_since(folders):
    save(folders[0], stored_run(folders[0]))
    (found,) = runs.found_in(folders[0].parent)
    commit = stored_run(*folders, run="89abcdef")
    for folder in folders:
        save(folder, commit)
    runs.collect(found)
    for folder in folders:
        assert names(folder) == sorted([NAME, *(name_of(part.value, run="89abcdef") for part in commit.parts)])


def test_gc_leaves_the_run_alone_that_another_names_as_its_own(folders, commit):
    save(folders[1], replace(commit, run="ffffffff", parts=(), units=(), parameters=(), rest=()))
    before = names(folders[1])
    printed("gc", folders[0].parent, "--all")
    assert not folders[0].exists()
    assert names(folders[1]) == before


def test_gc_does_not_guess_where_there_is_no_commit(folders, commit):
    for folder in folders:
        (folder / NAME).unlink()
        garbage_in(folder)
    before = names(folders[0])
    assert "no commit" in printed("ls", folders[0].parent)
    printed("gc", folders[0].parent)
    assert names(folders[0]) == [name for name in before if name.startswith(RUN)]
    (folders[0] / NAME).write_bytes(b"[]")
    (folders[0] / NAME).chmod(0o600)
    refused(5, "Input should be an object", "gc", folders[0].parent)
    printed("gc", folders[0].parent, "--all")
    assert not folders[0].exists()


@pytest.mark.parametrize("command", [("gc",), ("gc", "--all")])
def test_a_run_in_use_is_left_alone(folders, used, command):
    before = names(*folders)
    refused(6, "another run uses this folder, pid 1", *command, folders[0].parent)
    assert names(*folders) == before
