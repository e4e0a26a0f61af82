"""encoded: encoded matrices of a checkpoint stay on storage, from where the next run reads them.

<directory>/greedysnake-encoded/<key>/    of one source, codec, dtype and version, 0700; made under another name
    index.json                            what it was made of, and the bytes of each matrix
    model.layers.0.mlp.up_proj.weight     the bytes of one encoded matrix, and so on

A folder gets its name when all of it is synced, so one that was left incomplete by a kill is never read, and the next
run removes it. Processes that make the same folder each make their own, and the first to finish names it. If there is
no room nothing is kept, and the run goes on. Files are mapped privately: writes to a parameter do not change them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.utils import cached_file

from gs_compile.options import Frozen
from gs_compile.version import __version__

log = logging.getLogger(__name__)

FOLDER, UNFINISHED, INDEX = "greedysnake-encoded", "unfinished-", "index.json"
PLAIN = (str, int, float, torch.dtype, type(None))


class EncodedFolder:
    """Encoded matrices by the names of their parameters: in an existing folder, or in one that is being made.

    about: what they depend on; None: this is not known, and nothing is kept.
    """

    def __init__(self, directory: Path, about: Mapping[str, Any] | None) -> None:
        self._about = about
        key = hashlib.sha256(json.dumps(self._about, sort_keys=True).encode()).hexdigest()[:16]
        self._all = directory / FOLDER
        self._path = self._all / key
        self._known = _sizes(self._path)  # the bytes of existing matrices
        self._made: dict[str, int] = {}  # the bytes of matrices in the folder that is being made
        self._making: tuple[Path, int] | None = None  # that folder, and a descriptor that holds its lock

    def __enter__(self) -> EncodedFolder:
        if self._about is not None and not self._known:
            try:
                self._all.mkdir(mode=0o700, parents=True, exist_ok=True)
                with self._alone():
                    self._remove_unfinished()
                    path = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=self._all))
                    self._making = path, _locked(path)
            except OSError as error:
                self._give_up(error)
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self._making is not None and error[0] is None and self._made:
                self._finish(*self._making)
        except OSError as refused:
            self._give_up(refused)
        finally:
            self._leave()

    def find(self, name: str) -> Tensor | None:
        """The bytes of a matrix, mapped; None: it has to be encoded."""
        return _mapped(self._path / name, self._known[name]) if name in self._known else None

    def put(self, name: str, stored: Tensor) -> Tensor:
        """Keep the bytes of a matrix. Returns them mapped from the file, or as a copy if they are not kept."""
        if self._making is None:
            return stored.clone()
        path = self._making[0] / name
        try:
            with path.open("wb") as file:
                stored.numpy().tofile(file)
                os.fsync(file.fileno())
        except OSError as error:
            self._give_up(error)
            return stored.clone()
        self._made[name] = stored.nbytes
        return _mapped(path, stored.nbytes)

    def _give_up(self, error: OSError) -> None:
        """Keep nothing for the next run; mapped files last until their tensors end."""
        log.warning("encoded matrices are not kept for the next run, which encodes them again: %s", error)
        self._leave()

    def _leave(self) -> None:
        """Remove the folder that has not got its name."""
        if self._making is not None:
            path, fd = self._making
            self._making = None
            os.close(fd)
            shutil.rmtree(path, ignore_errors=True)

    def _finish(self, path: Path, fd: int) -> None:
        with (path / INDEX).open("w") as file:
            json.dump({"about": self._about, "matrices": self._made}, file, indent=1)
            os.fsync(file.fileno())
        os.fsync(fd)
        with self._alone():
            if _sizes(self._path):
                return  # another process was first
            if self._path.exists():
                shutil.rmtree(self._path)  # files of it have been removed
            path.rename(self._path)
        log.info("encoded matrices are kept in %s for the next run", self._path)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Inside the block, no other process removes or names folders."""
        fd = _locked(self._all, waits=True)
        try:
            yield
        finally:
            os.close(fd)

    def _remove_unfinished(self) -> None:
        """Remove unfinished folders of processes that have ended."""
        for path in self._all.glob(f"{UNFINISHED}*"):
            with suppress(OSError):  # another process is making it
                os.close(_locked(path))
                shutil.rmtree(path)


def _locked(folder: Path, *, waits: bool = False) -> int:
    """A descriptor of a folder that holds its lock; raises OSError if another process has it, unless it `waits`."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BaseException:  # also where the user interrupts it
        os.close(fd)
        raise
    return fd


def _sizes(path: Path) -> dict[str, int]:
    """The bytes of each matrix of a folder; none if the folder is missing, or lacks one of its files."""
    with suppress(OSError, ValueError, KeyError):
        found: dict[str, int] = json.loads((path / INDEX).read_text())["matrices"]
        if all((path / name).stat().st_size == nbytes for name, nbytes in found.items()):
            return found
    return {}


def _mapped(path: Path, nbytes: int) -> Tensor:
    return torch.from_file(str(path), shared=False, size=nbytes, dtype=torch.uint8)


def about(
    model_class: Any, name_or_path: Any, given: Mapping[str, Any], frozen: Frozen | None, skip: Sequence[str]
) -> dict[str, Any] | None:
    """What encoded matrices of a checkpoint depend on; None if that is not known, for example with a given config.

    given: of `from_pretrained`. A folder is identified by its files' sizes and times, a model of the hub by its commit.
    """
    hub = ("revision", "cache_dir", "subfolder", "token", "local_files_only")
    settings = {name: each for name, each in given.items() if name not in hub[3:]}
    if not all(isinstance(each, PLAIN) for each in settings.values()):
        return None
    with suppress(OSError):
        known = {name: given[name] for name in hub if given.get(name) is not None}
        folder = Path(str(cached_file(name_or_path, "config.json", **known))).parent.absolute()
        files = [] if folder.parent.name == "snapshots" else sorted(filter(Path.is_file, folder.iterdir()))
        stats = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in files]
        return {
            "source": str(folder),
            "files": [list(each) for each in stats],
            "model": getattr(model_class, "__qualname__", str(model_class)),
            "settings": {name: str(each) for name, each in sorted(settings.items())},
            "codec": frozen,
            "skipped": sorted(skip),
            "versions": [__version__, torch.__version__, transformers.__version__],
        }
    return None
