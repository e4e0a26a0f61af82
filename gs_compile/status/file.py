"""file: the status of a run as a file, which is replaced atomically, and read as untrusted input.

    <storage>/greedysnake-run/.status.json      of a run with data on SSD; removed when it ends, unless it has a commit
    <status>/greedysnake-run.json               in a directory that the option `status` names; it stays

Each rank and each model of a process has its own, by the name of its folder.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gs_compile.errors import StatusError
from gs_compile.machine import PROC
from gs_compile.runtime.storage.folder import NEXT_STATUS, STATUS, folder_in
from gs_compile.runtime.storage.stored import FOLDERS
from gs_compile.status.form import FORMAT, Status

if TYPE_CHECKING:
    from pydantic import TypeAdapter

MOST_NBYTES = 4 << 20
STALE_SECONDS = 5.0  # a run writes once a second; a drive that is busy may take some
UNSEEN_SECONDS = 60.0  # without an update, after which a process that cannot be seen counts as ended
TURN_SECONDS = 2.0  # for which a run waits for another one that begins there, before it begins all the same


# Written --------------------------------------------------------------------------------------------------------------


def text_of(status: Status) -> str:
    """A status as JSON."""
    return json.dumps(plain(status), separators=(",", ":"), allow_nan=False)


def replace(path: Path, text: str) -> None:
    """Replace the text of a file that only this user can access; a reader sees the old text or the new one. Raises
    OSError if that fails.
    """
    beside = path.with_name(NEXT_STATUS if path.name == STATUS else f".{path.name}.next")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "w", encoding="utf-8", errors="backslashreplace") as file:  # a reason is any text
            file.write(text)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def plain(value: Any) -> Any:
    """A value as JSON can hold it: numbers that are not finite are None."""
    if type(value) is float:  # most are, in a long history
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if is_dataclass(value):
        value = vars(value)
    return {key: plain(each) for key, each in value.items()} if isinstance(value, Mapping) else value


@contextmanager
def in_turn(directory: Path) -> Iterator[None]:
    """Make a directory. Inside the block a run looks for a free name in it and takes it, one run after the other."""
    with ExitStack() as opened:
        with suppress(OSError):  # the reporter says that it cannot write there; some networks lock no directories
            directory.mkdir(parents=True, exist_ok=True)
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, fd)
            _lock(fd)
        yield


def _lock(fd: int) -> None:
    until = time.monotonic() + TURN_SECONDS
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.005)


def free_name(directory: Path) -> Path:
    """A file name in a directory that no running run uses."""
    number = 1
    while True:
        path = directory / f"{folder_in(directory, number).name}.json"
        try:
            if not is_alive(read(path)):
                return path
        except StatusError:
            return path
        number += 1


# Read -----------------------------------------------------------------------------------------------------------------


def find(directory: Path) -> list[Path]:
    """The status files in a directory of storage, in a run's folder, or in a directory of the option `status`."""
    if not directory.is_dir():
        raise StatusError(f"{directory} is not a directory")
    inside = sorted(path for path in directory.iterdir() if FOLDERS.fullmatch(path.name.removesuffix(".json")))
    candidates = [directory / STATUS, *(path if path.suffix == ".json" else path / STATUS for path in inside)]
    found = [path for path in candidates if path.is_file()]
    if not found:
        raise StatusError(
            f"{directory} has the status of no run. A run that stores something on SSD writes one into its directory "
            "of storage=, from its first step on, and removes it when it ends. With the option status=, every run "
            "writes one into that directory, where it stays"
        )
    return found


def read(path: Path) -> Status:
    """The status in a file; raises StatusError if there is none, or it cannot be read."""
    try:
        data = _data(path)
    except OSError as error:
        raise StatusError(f"{path}: {error.strerror}") from error
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError):
        raise StatusError(
            f"{path} is torn: it was not written completely, for example because of a power loss"
        ) from None
    number = raw.get("format") if isinstance(raw, dict) else None
    if type(number) is int and number > FORMAT:
        raise StatusError(
            f"{path} has format {number}, and this GreedySnake reads format {FORMAT}: use the version of the run"
        )
    try:
        return _adapter().validate_json(data, strict=True)
    except ValueError as error:
        first = str(error).splitlines()[1] if "\n" in str(error) else str(error)
        raise StatusError(f"{path} is not the status of a run: its entry {first} is missing or wrong") from None


def _data(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # of a pipe: without waiting for a writer
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_NBYTES:
            raise StatusError(f"{path} is not the status of a run: no file, or too large")
        return file.read(MOST_NBYTES)


@cache
def _adapter() -> TypeAdapter[Status]:
    """A validator; made when a status is first read, as pydantic is slow to import."""
    from pydantic import TypeAdapter

    return TypeAdapter(Status)


# Whether it goes on ---------------------------------------------------------------------------------------------------


def process_start(pid: int) -> int:
    """When a process of this machine began, in clock ticks; 0: there is none, or it is not known."""
    try:
        return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def process_space() -> int:
    """The pid namespace of this process: a container has its own; 0: not known."""
    try:
        return (PROC / "self" / "ns" / "pid").stat().st_ino
    except OSError:
        return 0


def is_alive(status: Status) -> bool:
    """Whether the process of a run whose status does not say that it has ended is still alive.

    A process of another pid namespace cannot be seen: it counts as alive as long as it updates its status.
    """
    about = status.about
    if about.process_space not in (0, process_space()):
        return status.state == "running" and time.time() - status.written < UNSEEN_SECONDS
    return status.state == "running" and process_start(about.pid) == about.process_start
