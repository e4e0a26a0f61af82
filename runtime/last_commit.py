"""last_commit: the commit that a former run has left on drives, and the files that belong to it."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path

from gs_compile.errors import LeftoverError
from gs_compile.runtime import manifest
from gs_compile.runtime.drive import Drive
from gs_compile.runtime.manifest import Manifest


def last_commit(drives: Iterable[Drive], *, resume: bool) -> Manifest | None:
    """The last commit that a run has left on the drives. Each has a manifest, and one may be a commit behind.

    Raises LeftoverError where it is not to be taken up, or is of several runs.
    """
    found = [(each, drive.folder) for drive in drives if (each := drive.own.committed()) is not None]
    if not found:
        return None
    newest, folder = max(found, key=lambda pair: pair[0].step)
    words = ", ".join(dict.fromkeys(f"run {each.run} at step {each.step} ({each.written})" for each, _ in found))
    if len({each.run for each, _ in found}) > 1:
        what = f"several runs have left commits here: {words}. Name the storage of the one that is to go on"
        raise LeftoverError(errno.EEXIST, what, str(folder))
    if not resume:
        what = (
            f'a durable run has left a commit here: {words}. Go on from it with the option resume="auto", or delete '
            f"it: greedysnake store gc --all {folder.parent}"
        )
        raise LeftoverError(errno.EEXIST, what, str(folder))
    return newest


def names_in(made: Manifest | None, folder: Path) -> frozenset[str]:
    """The names of a commit's files in a folder, with its own."""
    files = [file for part in made.parts for file in part.files] if made else []
    return frozenset({file.name for file in files if Path(file.folder) == folder} | {manifest.NAME} if made else ())
