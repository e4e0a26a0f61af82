"""runs: the running runs of this user on this machine, each with an entry in a folder in /tmp.

    /tmp/greedysnake-UID/SPACE-PID-START-MOMENT.json

(Not in a session's folder: a run outlives sessions, and batch jobs have none.) An entry is a link to the run's status
file, or that file itself if the run has no other place for it. It is removed with the run; that of a killed process by
the next look. Containers may share the folder, but have their own pid namespaces: an entry from another one is judged
by its status, if that can be read, and is removed a day after that has ended.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from gs_compile.errors import StatusError
from gs_compile.status.file import is_alive, process_space, process_start, read

LEFT_SECONDS = 86400.0  # for which an entry from another pid namespace stays without an update


def folder() -> Path:
    """The folder of the entries, made if it is missing; OSError if it cannot be made, or others can access it."""
    path = Path(tempfile.gettempdir(), f"greedysnake-{os.geteuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{path} is not this user's alone")
    return path


def entry() -> Path | None:
    """The path of a new entry for a run of this process; None: it cannot have one."""
    with suppress(OSError):
        pid = os.getpid()
        return folder() / f"{process_space()}-{pid}-{process_start(pid)}-{time.monotonic_ns()}.json"
    return None


def link(path: Path, status: Path) -> None:
    """Make an entry a link to a status file."""
    with suppress(OSError):
        path.symlink_to(status.absolute())


def going_on() -> list[Path]:
    """The entries of runs that have a status; those of processes that have ended are removed.

    Raises StatusError if there are none.
    """
    try:
        found = [path for path in sorted(folder().glob("*.json")) if _goes_on(path)]
    except OSError as error:
        raise StatusError(f"runs of this machine cannot be found: {error}") from error
    if not found:
        raise StatusError(
            f"no run of this user is active on this machine, by the entries of {folder()}. To see one that has ended, "
            "give the directory of its storage= if it is durable, or of its option status="
        )
    return found


def _goes_on(path: Path) -> bool:
    """Whether the run of an entry goes on and has a status; an entry without a run is removed."""
    space, pid, start, *_ = *path.stem.split("-"), "", ""
    if space.isdigit() and int(space) != process_space():
        return path.is_file() and _goes_on_elsewhere(path)
    if not pid.isdigit() or str(process_start(int(pid))) != start:
        path.unlink(missing_ok=True)
    return path.is_file()


def _goes_on_elsewhere(path: Path) -> bool:
    """Whether a run of another pid namespace goes on, by its status; one that cannot be read counts as running."""
    try:
        status = read(path)
    except StatusError:
        return True
    goes_on = is_alive(status)
    if not goes_on and time.time() - status.written > LEFT_SECONDS:
        path.unlink(missing_ok=True)
    return goes_on
