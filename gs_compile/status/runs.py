"""runs: the runs of this user that go on on this machine, each with an entry in a folder of the machine's own.

    /tmp/greedysnake-UID/PID-START-MOMENT.json

That is no session's folder: a run outlives sessions, and jobs have none. An entry is a link to the run's status file,
or that file itself where the run has no other place for it. It goes with the run; of a process that was killed, with
the next look.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from gs_compile.errors import StatusError
from gs_compile.status.file import process_start


def folder() -> Path:
    """The folder of the entries, made if it is not there; OSError where it cannot be, or is not this user's alone."""
    path = Path(tempfile.gettempdir(), f"greedysnake-{os.geteuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{path} is not this user's alone")
    return path


def entry() -> Path | None:
    """The entry of a new run of this process, where nothing is yet; None: there is no place for one."""
    with suppress(OSError):
        pid = os.getpid()
        return folder() / f"{pid}-{process_start(pid)}-{time.monotonic_ns()}.json"
    return None


def link(path: Path, status: Path) -> None:
    """Have an entry lead to a status file."""
    with suppress(OSError):
        path.symlink_to(status.absolute())


def going_on() -> list[Path]:
    """The entries of runs that have a status; those of processes that have ended are removed.

    Raises StatusError where there are none.
    """
    try:
        paths = sorted(folder().glob("*.json"))
    except OSError as error:
        raise StatusError(f"runs of this machine cannot be found: {error}") from error
    for path in paths:
        pid, _, rest = path.name.partition("-")
        if not pid.isdigit() or str(process_start(int(pid))) != rest.partition("-")[0]:
            path.unlink(missing_ok=True)
    found = [path for path in paths if path.is_file()]
    if not found:
        raise StatusError(
            "no run of this user is active on this machine. To see one that has ended, give the directory of its "
            "storage= if it is durable, or of its option status="
        )
    return found
