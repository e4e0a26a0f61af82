"""runs: the durable runs in a directory: what each has committed, which process uses it, and which files are garbage.

A run on several directories has a manifest in each, and one may be a commit behind: files that any of them names stay.
Only files with names that the store gives are counted and removed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gs_compile.errors import LeftoverError, StorageError
from gs_compile.machine import format_bytes
from gs_compile.planner.summary import table
from gs_compile.runtime.storage import manifest, system
from gs_compile.runtime.storage.folder import STATUS, Folder, holder, is_made
from gs_compile.runtime.storage.last_commit import folders_of, is_same, located, names_in, order
from gs_compile.runtime.storage.manifest import NAME, NEXT
from gs_compile.runtime.storage.stored import FOLDERS, OURS, Manifest


@dataclass(frozen=True)
class Found:
    """A folder of a run.

    commits: of the run, by the folders that have them, this one first; prepared: further commits that this rank, of
    several, has only prepared; problem: why the folder's own commit cannot be read; user: the process that uses it, in
    words.
    """

    folder: Path
    commits: Mapping[Path, Manifest] = field(default_factory=dict)
    prepared: Mapping[Path, Manifest] = field(default_factory=dict)
    problem: StorageError | None = None
    user: str = ""

    @property
    def commit(self) -> Manifest | None:
        """The newest commit."""
        return max(self.commits.values(), key=order, default=None)

    @property
    def folders(self) -> Set[Path]:
        """The folders that have a commit of the run, and this one."""
        return dict.fromkeys([self.folder, *self.commits, *self.prepared]).keys()

    @property
    def known(self) -> list[Manifest]:
        """The commits from which a rank can resume: its last, and the newest that it has prepared since.

        Raises `problem`.
        """
        if self.problem is not None:
            raise self.problem
        return [max(each.values(), key=order) for each in (self.commits, self.prepared) if each]

    def garbage(self, folder: Path, *, everything: bool = False) -> dict[str, int]:
        """The bytes of the store's files in a folder that no commit names; with `everything`, of all its files there.

        If there is no commit, or one whose files are elsewhere, files with a run's name are not garbage: they may
        belong to a commit.
        """
        own = self.commits.get(self.folder) or self.prepared.get(self.folder)
        is_elsewhere = own is not None and self.folder not in folders_of(own)
        if (self.problem is not None or is_elsewhere) and not everything:
            return {}
        made = _made_in(folder)
        if everything:
            return made
        named = [*self.commits.values(), *self.prepared.values()]
        kept = {NEXT, STATUS}.union(*(names_in(each, folder) for each in named)) if named else set()
        return {name: made[name] for name in made if name not in kept and (named or not _has_run(name))}

    def as_dict(self) -> dict[str, Any]:
        """The run for JSON."""
        commit = self.commit
        facts = ("run", "step", "written", "nbytes", "optimizer", "rank", "world")
        return {
            "folder": str(self.folder),
            **{name: getattr(commit, name, None) for name in facts},
            "parameters": sum(math.prod(each.shape) for each in commit.parameters) if commit else None,
            "garbage": self.garbage(self.folder),
            "used_by": self.user or None,
            "problem": str(self.problem) if self.problem else None,
        }


def found_in(directory: Path) -> list[Found]:
    """The folders of runs in a directory, or the directory itself if it is one; StorageError if it does not exist."""
    directory = directory.absolute()  # "." has no name
    with system.as_storage_error("listing", directory):
        inside = sorted(directory.iterdir())
    paths = [directory] if FOLDERS.fullmatch(directory.name) else inside
    return [look(path) for path in paths if FOLDERS.fullmatch(path.name)]


def look(folder: Path) -> Found:
    """The current contents of a folder."""
    try:
        with system.as_storage_error("opening", folder):
            own, ahead = (_located(manifest.read(folder, name), folder) for name in (NAME, NEXT))
            user = holder(folder)
    except StorageError as error:
        return Found(folder, problem=error)
    made = own or ahead
    named = folders_of(made) if made else []
    folder = next((each for each in named if is_same(each, folder)), folder)  # by the name that its commit has for it
    commits, prepared = {folder: own} if own else {}, {folder: ahead} if ahead else {}
    others = [each for each in named if each != folder] if folder in named else ()  # a copy is of files elsewhere
    for other in others:
        for name, found in ((manifest.NAME, commits), (NEXT, prepared)):
            with contextlib.suppress(StorageError):  # its drive may be missing now
                if made and (each := manifest.read(other, name)) is not None and each.run == made.run:
                    found[other] = each
    return Found(folder, commits, prepared, user=user)


def _located(commit: Manifest | None, folder: Path) -> Manifest | None:
    """A commit with the current path of its folder; unchanged if its files are elsewhere."""
    with contextlib.suppress(LeftoverError):
        return commit and located(commit, folder, [folder])
    return commit


def _made_in(folder: Path) -> dict[str, int]:
    """The files in a folder with names of the store, and their bytes. (A running run may remove them meanwhile.)"""
    found = {}
    with system.as_storage_error("listing", folder), contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if is_made(path):
                    found[path.name] = path.lstat().st_blocks * 512
    return found


def _has_run(name: str) -> bool:
    named = OURS.fullmatch(name)
    return named is not None and named[1] is not None


# Used -----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folders: Iterable[Path]) -> Iterator[dict[Path, Folder]]:
    """Lock these folders inside the block; raises StorageLockedError if a process uses one."""
    with contextlib.ExitStack() as opened:
        taken = {}
        for path in dict.fromkeys(folders):
            with system.as_storage_error("open", path):
                taken[path] = Folder.take(path)
            opened.callback(taken[path].release)
        yield taken


def collect(found: Found, *, everything: bool = False) -> dict[str, int]:
    """Remove the garbage of a run, or the whole run, from all folders that have its commit. Returns the bytes of each
    removed path.
    """
    with locked(found.folders) as taken:
        now = look(found.folder)  # a run may have used it since
        if now.folders == found.folders:
            return _removed(now, taken, everything=everything)
    return collect(now, everything=everything)


def _removed(found: Found, taken: Mapping[Path, Folder], *, everything: bool) -> dict[str, int]:
    """Remove the files; a manifest is removed before the files that it names."""
    if found.problem is not None and not everything:
        raise found.problem
    removed = {}
    for path, folder in taken.items():
        garbage = found.garbage(path, everything=everything)
        for name in sorted(garbage, key=lambda name: name != NAME):
            with system.as_storage_error(f"removal of {name}", path):
                system.unlink(name, folder.fd)
            removed[str(path / name)] = garbage[name]
    return removed


def listing(runs: Sequence[Found]) -> str:
    """A table for people."""
    rows = []
    for each in runs:
        made, facts = each.commit, each.as_dict()
        rank = f", rank {made.rank} of {made.world}" if made and made.world > 1 else ""
        model = f"{facts['parameters']:,} parameters, {made.optimizer}{rank}" if made else ""
        step = (made.run, str(made.step), made.written, format_bytes(made.nbytes), model) if made else ("",) * 5
        garbage = format_bytes(sum(facts["garbage"].values())) if facts["garbage"] else ""
        state = f"in use by {each.user}" if each.user else facts["problem"] or ("" if made else "no commit")
        rows.append((str(each.folder), *step, garbage, state))
    return table(
        ("folder", "run", "step", "written", "size", "model", "garbage", "state"), rows, right=("step", "size")
    )
