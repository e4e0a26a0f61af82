"""manifest: a commit as a file: the run, the step, and where every byte is that it needs, with checksums.

    write    beside the old one, synced, renamed over it, and the folder synced: the old commit holds, or the new one
    read     as untrusted input: its size is bounded, every entry has its type and its range, and all agree

A manifest is JSON: nothing in it is executed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gs_compile.errors import ManifestError
from gs_compile.machine import format_bytes
from gs_compile.runtime.storage import system
from gs_compile.runtime.storage.checked import check
from gs_compile.runtime.storage.stored import (
    FORMAT,
    Manifest,
    StoredFile,
    StoredGroup,
    StoredParameter,
    StoredPart,
    StoredRange,
    StoredTensor,
    StoredUnit,
)

if TYPE_CHECKING:
    from pydantic import TypeAdapter

NAME = "manifest.json"
NEXT = ".manifest.next"  # of one rank, until all ranks have theirs
BESIDE = ".manifest.json"  # while it is written
MAX_NBYTES = 64 << 20
MAX_ENTRIES = 1 << 20  # objects, lists, their elements, escaped letters: each takes up to 200 bytes when it is parsed
_COUNTED = (",", "[", "{", "\\")  # each of these in a text counts as an entry
MAX_DEPTH = 100
MAX_KEYS = 10_000  # of an object
MAX_DIGITS = 50  # of a number: 128 bits have 39
LARGEST = 10 ** (MAX_DIGITS - 1)
MAX_WORDS = 300  # characters of a file's contents that an error shows
AFTER_A_COPY = "if you have copied it here, which may change modes, chmod -R go="


# Written --------------------------------------------------------------------------------------------------------------


def write(
    folder: Path,
    folder_fd: int,
    manifest: Manifest,
    name: str = NAME,
    before_it_counts: Callable[[], None] = lambda: None,
) -> None:
    """Replace the folder's manifest, atomically; it is on the drive when this returns.

    Raises StorageError. Then the folder has its old manifest, or, if the last sync failed, the new one: it may count
    once `before_it_counts` has been called.
    """
    data = np.frombuffer(encoded(manifest), np.uint8)
    try:
        with contextlib.suppress(FileNotFoundError):
            system.unlink(BESIDE, folder_fd)  # of a run that was killed
        fd = system.open_file(BESIDE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder_fd)
        try:
            done = 0
            while done < len(data):
                count = system.pwritev(fd, data[done:], done)
                if not count:
                    raise OSError(errno.EIO, "nothing was written")
                done += count
            system.datasync(fd)
        finally:
            os.close(fd)
        before_it_counts()
        system.rename(BESIDE, name, folder_fd)
        system.sync_folder(folder_fd)
    except OSError as error:
        with contextlib.suppress(OSError):
            system.unlink(BESIDE, folder_fd)
        raise system.failed(f"the commit of step {manifest.step} failed", error, folder / name) from error


def encoded(manifest: Manifest) -> bytes:
    """The text of a manifest. Raises ManifestError if it could not be read again: too large, or not JSON."""
    try:
        for name in ("groups", "states", "user", "plan"):
            check_plain(getattr(manifest, name), name)
        data = _json(manifest)
        _check_size(data)
    except ValueError as error:
        raise ManifestError(errno.EINVAL, f"the state cannot be stored: {error}", NAME) from error
    return data


def refuse_unreadable(manifest: Manifest) -> None:
    """Raise ManifestError if a manifest would be refused when it is read."""
    try:
        decoded(encoded(manifest))
    except (ValueError, RecursionError) as error:
        what = f"the commit of step {manifest.step} could not be read again: {_words(error)}; please report it"
        raise ManifestError(errno.EINVAL, what, NAME) from error


def check_plain(value: object, where: str, depth: int = 0) -> None:
    """Raise a ValueError unless a state consists of dicts with string keys, lists, strings, numbers and None."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{where}: deeper than {MAX_DEPTH}")
    if isinstance(value, dict) and len(value) <= MAX_KEYS:
        for key, each in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where}: the key {key!r} is not a string")
            _check_text(key, f"a key of {where}")
            check_plain(each, f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        if depth == MAX_DEPTH or not _are_plain(value):
            for each in value:
                check_plain(each, where, depth + 1)
    elif isinstance(value, str):
        _check_text(value, where)
    elif not (value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < LARGEST)):
        raise ValueError(f"{where}: {type(value).__name__}: not of JSON, or too large")


def check_room(values: Mapping[str, Any]) -> None:
    """Raise a ValueError, which names the largest state, if states have more entries than a manifest may have."""
    numbers = {name: _num_entries(each) for name, each in values.items()}
    if sum(numbers.values()) > MAX_ENTRIES:
        name = max(numbers, key=lambda each: numbers[each])
        raise ValueError(
            f"{name} has {numbers[name]} entries, and a commit {MAX_ENTRIES} at most: keep what these follow from, as "
            "a seed and a position in the place of an order"
        )


def _num_entries(value: object) -> int:
    """The entries that `_check_size` would count of a value, or some more."""
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(_num_entries, value.values()))
    if isinstance(value, list | tuple):
        return 1 + len(value) + (0 if _are_plain(value) else sum(map(_num_entries, value)))
    return sum(map(json.dumps(value).count, _COUNTED)) if isinstance(value, str) else 0


def refuse_large(facts: Mapping[str, Any], num_parameters: int) -> None:
    """Raise ManifestError if the entries that all commits of a run have are too many for a manifest."""
    try:
        _check_size(_json(facts))
    except ValueError as error:
        what = (
            f"steps of a model of {num_parameters} parameters cannot be durable: {error}. Leave durability out, and "
            "save state dicts"
        )
        raise ManifestError(errno.E2BIG, what, NAME) from None


def _json(value: object) -> bytes:
    return json.dumps(value, default=vars, separators=(",", ":")).encode()


def _check_text(text: str, where: str) -> None:
    """Raise a ValueError for a string with surrogates, which a JSON parser refuses."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: surrogates, as in a file's name that is not in UTF-8, are no text") from None


def _are_plain(values: list[Any] | tuple[Any, ...]) -> bool:
    """Whether all are numbers that a manifest may have. (Fast: loaders' states may have a hundred thousand.)"""
    kinds = set(map(type, values))
    return kinds <= {float} or (kinds <= {int, bool} and min(values) > -LARGEST and max(values) < LARGEST)


def _check_size(data: bytes | bytearray) -> None:
    """Raise a ValueError if parsing could take more memory than a few times `MAX_NBYTES`."""
    if len(data) > MAX_NBYTES:
        raise ValueError(f"{format_bytes(len(data))}, and a manifest has {format_bytes(MAX_NBYTES)} at most")
    if not data.isascii():
        raise ValueError("not ASCII")
    if (number := sum(data.count(each.encode()) for each in _COUNTED)) > MAX_ENTRIES:
        raise ValueError(f"{number} entries, and a manifest has {MAX_ENTRIES} at most")


# Read -----------------------------------------------------------------------------------------------------------------


def read(folder: Path, name: str = NAME) -> Manifest | None:
    """The manifest of a folder, checked; None: there is none.

    Raises ManifestError where it is damaged, of a newer format or not of a run, StorageError where it cannot be read.
    """
    path = folder / name
    with system.as_storage_error("reading", path):
        try:
            data = _data(folder, name)
        except FileNotFoundError:
            return None
    try:
        return decoded(data)
    except (ValueError, RecursionError) as error:
        words = "".join(each if each.isprintable() else " " for each in _words(error)[:MAX_WORDS])
        ways = f"once this file is removed; greedysnake store gc {folder.parent} --all removes the run"
        what = f"{words}; where another directory of the run has its commit too, the run goes on {ways}"
        raise ManifestError(errno.EINVAL, what, str(path)) from None


def decoded(data: bytes | bytearray) -> Manifest:
    """The manifest of a text; a ValueError or RecursionError says what is wrong with it, and in which entry."""
    _check_size(data)
    raw = json.loads(data, object_pairs_hook=_object, parse_int=_number(int), parse_float=_number(float))
    found = raw.get("format") if isinstance(raw, dict) else None
    if type(found) is int and found != FORMAT:
        raise ValueError(f"format {found}, and this GreedySnake reads format {FORMAT}: install one that reads that")
    del raw
    manifest = _adapter().validate_json(data)
    check(manifest)
    return manifest


def _data(folder: Path, name: str) -> bytearray:
    """The bytes of a manifest; only this user may have access to it and to its folder."""
    with contextlib.ExitStack() as opened:
        folder_fd = system.open_folder(folder)
        opened.callback(os.close, folder_fd)
        fd = system.open_file(name, os.O_RDONLY | os.O_NONBLOCK, folder_fd)  # of a pipe: without waiting for a writer
        opened.callback(os.close, fd)
        for each, is_kind in ((folder_fd, stat.S_ISDIR), (fd, stat.S_ISREG)):
            found = os.fstat(each)
            if not is_kind(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                what = (
                    "this is not a file that only its owner can access, so its contents cannot be trusted: "
                    f"{AFTER_A_COPY} {folder}"
                )
                raise ManifestError(errno.EPERM, what, str(folder / name))
        nbytes = min(os.fstat(fd).st_size, MAX_NBYTES + 1)  # of a larger file enough to be refused
        data, done = bytearray(nbytes), 0
        memory = np.frombuffer(data, np.uint8)
        while done < nbytes and (count := system.preadv(fd, memory[done:], done)):
            done += count
        return data


@cache
def _adapter() -> TypeAdapter[Manifest]:
    """A validator that is strict in every entry; made when it is first needed, as pydantic is slow to import."""
    from pydantic import TypeAdapter, with_config

    for each in (StoredFile, StoredPart, StoredRange, StoredGroup, StoredUnit, StoredParameter, StoredTensor, Manifest):
        with_config(strict=True, extra="forbid")(each)
    return TypeAdapter(Manifest)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs) or len(found) > MAX_KEYS:
        first = ", ".join(name for name, _ in pairs[:3])
        raise ValueError(f"an entry stands twice beside {first}, or there are more than {MAX_KEYS}")
    return found


def _number(kind: type[int] | type[float]) -> Callable[[str], int | float]:
    def parse(digits: str) -> int | float:
        if len(digits) > MAX_DIGITS:
            raise ValueError(f"a number of {len(digits)} digits")
        return kind(digits)

    return parse


def _words(error: Exception) -> str:
    """An error in words; of pydantic's errors the first one, with the place of the entry."""
    from pydantic import ValidationError

    if not isinstance(error, ValidationError):
        return f"entries are too deep: {error}" if isinstance(error, RecursionError) else str(error)
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
