"""last_commit: find the commit that a former run has left on drives, and the files that belong to it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from gs_compile.errors import LeftoverError, RankError
from gs_compile.runtime.storage import manifest
from gs_compile.runtime.storage.drive import Drive
from gs_compile.runtime.storage.stored import Manifest, StoredFile

Step = tuple[int, int, str]  # its number, the number of its commit, and the run's name on all ranks
Steps = Mapping[Step, bool]  # the steps of one rank; True: committed, False: only prepared
Agree = Callable[[Steps], Sequence[Steps]]  # returns those of all ranks


class Left(NamedTuple):
    """A commit that a run has left in a folder. is_made: it is the last one there; False: it is only prepared."""

    commit: Manifest
    folder: Path
    is_made: bool


def commits_in(folders: Iterable[Path], *, prepared: bool = False) -> list[Left]:
    """The commits in those of the folders that exist; prepared: also those that other ranks may not have made."""
    names = (manifest.NEXT, manifest.NAME) if prepared else (manifest.NAME,)
    return [
        Left(found, folder, name == manifest.NAME)
        for folder in folders
        for name in names
        if folder.is_dir() and (found := manifest.read(folder, name)) is not None
    ]


def newest_of(left: Iterable[Left], agree: Agree | None = None) -> Manifest | None:
    """The newest of these commits; with several ranks the newest that all have; None: there is none."""
    known = {step_of(each.commit): each for each in sorted(left, key=lambda each: (each.is_made, each.commit.number))}
    own = {step: each.is_made for step, each in known.items()}
    step = common_step(agree(own) if agree else [own])
    return None if step is None else known[step].commit


def step_of(commit: Manifest) -> Step:
    """What identifies a commit on all ranks. A step may be committed more than once, by all ranks as often."""
    return (*order(commit), commit.together)


def order(commit: Manifest) -> tuple[int, int]:
    """A key that is greater for the newer commit. A step is committed again if something has changed after it."""
    return commit.step, commit.number


def last_commit(drives: Iterable[Drive], *, resume: bool, agree: Agree | None) -> Manifest | None:
    """The last commit that a run has left on these drives, and on further ones of its own; a drive may lack the newest.

    agree: for several ranks, each of which may have prepared one more; the step that they agree on is committed.
    Raises LeftoverError if there is a commit and `resume` is False, if there are commits of several runs, or if its
    files are elsewhere; also if a commit is only prepared and this process is alone: other ranks may have made it.
    """
    folders = {drive.folder: drive.own for drive in drives}
    left = commits_in(folders, prepared=True)
    if agree is None and (ahead := next((each for each in left if not each.is_made), None)) is not None:
        what = (
            f"a run of several ranks has ended here while it committed step {ahead.commit.step}, and this process runs "
            "alone: start as many ranks as it had (torchrun), choose another storage=, or delete it: greedysnake store "
            f"gc --all {ahead.folder.parent}"
        )
        raise LeftoverError(errno.EEXIST, what, str(ahead.folder))
    left += [each._replace(folder=next(iter(folders))) for each in _beside(left, folders)]
    having = [each.folder for each in left]
    left = [each._replace(commit=located(each.commit, each.folder, having)) for each in left]
    known = {f"run {each.run} at step {each.step} ({each.written})": each.run for each, _, _ in left}
    if len(set(known.values())) > 1:
        what = f"several runs have left commits here: {', '.join(known)}. Name the storage of the one that is to go on"
        raise LeftoverError(errno.EEXIST, what, str(next(iter(folders))))
    if known and not resume:
        raise left_over(", ".join(known), "gs_compile.resume(model, optimizer, storage=...)", next(iter(folders)))
    newest = newest_of(left, agree)
    for commit, folder, is_made in left:
        if not is_made:
            is_next = newest is not None and step_of(commit) == step_of(newest)
            folders[folder].promote() if is_next else folders[folder].withdraw()
    return newest


def left_over(found: str, resumed_by: str, folder: Path) -> LeftoverError:
    """The error for commits in a folder that are not to be resumed; resumed_by: the call that would resume them."""
    what = (
        f'a durable run has left a commit here: {found}. Resume it with {resumed_by} or the option resume="auto", '
        f"leave it and choose another storage=, or delete it: greedysnake store gc --all {folder.parent}"
    )
    return LeftoverError(errno.EEXIST, what, str(folder))


def _beside(left: Iterable[Left], here: Iterable[Path]) -> list[Left]:
    """The commits in further folders of the same runs, on drives that this run may not use."""
    named = {(folder, each.commit.run) for each in left if each.is_made for folder in folders_of(each.commit)}
    found = commits_in(sorted({folder for folder, _ in named}.difference(here)))
    return [each for each in found if (each.folder, each.commit.run) in named]


def common_step(by_rank: Sequence[Steps]) -> Step | None:
    """The last step that all ranks have of one run; None: there is none. What one has committed, all have prepared.

    Raises RankError where they have none in common.
    """
    common = set.intersection(*map(set, by_rank))
    if not common and any(is_committed for each in by_rank for is_committed in each.values()):
        last = ("{} in commit {} of run {}".format(*max(each)) if each else "none" for each in by_rank)
        found = ", ".join(f"rank {rank}: {words}" for rank, words in enumerate(last))
        raise RankError(
            f"the ranks have commits of different steps ({found}): name the storage of one run on all, and start as "
            "many ranks as it had"
        )
    return max(common, default=None)


def located(commit: Manifest, here: Path, having: Sequence[Path]) -> Manifest:
    """A commit that was found in the folder `here`, with the current paths of its folders.

    A folder may be given by a link, and one of them may be in a directory that has been moved. having: the folders that
    have a commit. Raises LeftoverError if the commit's files are not in `here`, although what is there may be its own.
    """
    named = folders_of(commit)
    now = {old: new for old in named for new in having if is_same(old, new)}
    gone = [old for old in named if not any(map(os.path.exists, _paths(commit, old)))]
    others = [new for new in having if new not in now.values()]
    if len(gone) == len(set(others)) == 1:
        now[gone[0]] = others[0]
    if named and here not in now.values():
        what = (
            f"the commit here, of run {commit.run} at step {commit.step}, has its files in "
            f"{', '.join(map(str, named))}: name those directories as storage=; or, if they have been moved, make "
            "links where they were to where they are; nothing was changed"
        )
        raise LeftoverError(errno.ENOENT, what, str(here))
    if all(old == new for old, new in now.items()):
        return commit

    def moved(file: StoredFile) -> StoredFile:
        return replace(file, folder=str(now.get(Path(file.folder), file.folder)))

    return replace(commit, parts=tuple(replace(part, files=tuple(map(moved, part.files))) for part in commit.parts))


def _paths(commit: Manifest, folder: Path) -> Iterator[Path]:
    """The paths of a commit's files in a folder."""
    return (folder / file.name for file in commit.files() if Path(file.folder) == folder)


def is_same(one: Path, other: Path) -> bool:
    """Whether two paths name the same folder."""
    return one == other or (one.is_dir() and other.is_dir() and one.samefile(other))


def folders_of(commit: Manifest) -> list[Path]:
    """The folders that have files of a commit."""
    return list(dict.fromkeys(Path(file.folder) for file in commit.files()))


def names_in(made: Manifest | None, folder: Path) -> frozenset[str]:
    """The names of a commit's files in a folder, and that of its manifest."""
    if made is None:
        return frozenset()
    return frozenset({manifest.NAME, *(file.name for file in made.files() if Path(file.folder) == folder)})
