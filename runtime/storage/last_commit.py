"""last_commit: the commit that a former run has left on drives, and the files that belong to it."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gs_compile.errors import LeftoverError, RankError
from gs_compile.runtime.storage import manifest
from gs_compile.runtime.storage.drive import Drive
from gs_compile.runtime.storage.manifest import Manifest

Steps = Mapping[int, bool]  # of one rank, and whether each is committed, or prepared alone
Agree = Callable[[Steps], Sequence[Steps]]  # gives those of all ranks


def last_commit(drives: Iterable[Drive], *, resume: bool, agree: Agree | None = None) -> Manifest | None:
    """The last commit that a run has left on the drives and on others of its own. One may be a commit behind.

    agree: of several ranks, each of which may have prepared one more; what is agreed on is committed.
    Raises LeftoverError where it is not to be taken up, is of several runs, or has its files elsewhere.
    """
    drives = list(drives)
    found = [(each, drive) for drive in drives if (each := drive.own.committed()) is not None]
    found += [(each, drives[0]) for each in _beside(drives, [each for each, _ in found])]
    ahead = [(each, drive) for drive in drives if agree and (each := drive.own.prepared()) is not None]
    having = [drive.folder for _, drive in (*found, *ahead)]
    found, ahead = ([(located(each, drive.folder, having), drive) for each, drive in kind] for kind in (found, ahead))
    known = {each.step: each for each, _ in (*ahead, *found)}
    words = ", ".join(dict.fromkeys(f"run {each.run} at step {each.step} ({each.written})" for each in known.values()))
    if len({each.run for each, _ in (*found, *ahead)}) > 1:
        what = f"several runs have left commits here: {words}. Name the storage of the one that is to go on"
        raise LeftoverError(errno.EEXIST, what, str(drives[0].folder))
    if known and not resume:
        what = (
            f'a durable run has left a commit here: {words}. Go on from it with the option resume="auto", or delete '
            f"it: greedysnake store gc --all {drives[0].folder.parent}"
        )
        raise LeftoverError(errno.EEXIST, what, str(drives[0].folder))
    committed = {each.step for each, _ in found}
    own = {each: each in committed for each in known}
    step = common_step(agree(own) if agree else [own])
    for each, drive in ahead:
        drive.own.promote() if each.step == step else drive.own.unlink(manifest.NEXT)
    return None if step is None else known[step]


def _beside(drives: Sequence[Drive], found: Sequence[Manifest]) -> list[Manifest]:
    """The manifests in further folders of the same runs, which may be of drives that this run does without."""
    named = {(Path(file.folder), each.run) for each in found for part in each.parts for file in part.files}
    folders = {(folder, run) for folder, run in named if all(drive.folder != folder for drive in drives)}
    read = [(manifest.read(folder), run) for folder, run in sorted(folders) if folder.is_dir()]
    return [each for each, run in read if each is not None and each.run == run]


def common_step(given: Sequence[Steps]) -> int | None:
    """The last step that all ranks have; None: there is none. What one has committed, all have prepared.

    Raises RankError where they have none in common.
    """
    common = set.intersection(*map(set, given))
    if not common and any(is_committed for each in given for is_committed in each.values()):
        found = ", ".join(f"rank {rank}: {max(each, default='none')}" for rank, each in enumerate(given))
        raise RankError(f"the ranks have commits of different steps ({found}): name the storage of one run on all")
    return max(common, default=None)


def located(made: Manifest, here: Path, having: Sequence[Path]) -> Manifest:
    """A commit that was found in the folder `here`, with the paths that its folders have now.

    A folder may be given by a link; one of them may be of a directory that has been moved. having: the folders that
    have a commit. Raises LeftoverError where its files are not here: what is here may be of it all the same.
    """
    named = folders_of(made)
    now = {old: new for old in named for new in having if is_same(old, new)}
    gone, others = [old for old in named if not old.is_dir()], [new for new in having if new not in now.values()]
    if len(gone) == len(set(others)) == 1:
        now[gone[0]] = others[0]
    if named and here not in now.values():
        what = (
            f"the commit here, of run {made.run} at step {made.step}, has its files in {', '.join(map(str, named))}: "
            "name those directories as storage=; or, if they have been moved, make links where they were to where they "
            "are; nothing was changed"
        )
        raise LeftoverError(errno.ENOENT, what, str(here))
    parts = (
        replace(part, files=tuple(replace(each, folder=_now(each.folder, now)) for each in part.files))
        for part in made.parts
    )
    return made if all(old == new for old, new in now.items()) else replace(made, parts=tuple(parts))


def _now(folder: str, now: Mapping[Path, Path]) -> str:
    return str(now.get(Path(folder), folder))


def is_same(one: Path, other: Path) -> bool:
    """Whether two paths are of one folder that is there."""
    return one == other or (one.is_dir() and other.is_dir() and one.samefile(other))


def folders_of(commit: Manifest) -> list[Path]:
    """Those that have files of a commit."""
    return list(dict.fromkeys(Path(file.folder) for file in commit.files()))


def names_in(made: Manifest | None, folder: Path) -> frozenset[str]:
    """The names of a commit's files in a folder, with its own."""
    files = [file for part in made.parts for file in part.files] if made else []
    return frozenset({file.name for file in files if Path(file.folder) == folder} | {manifest.NAME} if made else ())
