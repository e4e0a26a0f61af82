"""known_workloads: the workloads of named models, in files of the user's cache.

A workload follows from the model's config, from the settings that change its code, and from the versions of everything
that captures and counts it, including this package's own code. A file is named by all this, so it is never out of date,
and the same question is answered without the model, and without torch's compiler.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gs_compile.machine import is_there
from gs_compile.options import default_storage
from gs_compile.placement.workload import Workload

if TYPE_CHECKING:
    from pydantic import TypeAdapter

log = logging.getLogger(__name__)

CACHE = "workloads"  # a folder beside the default storage
MOST = 500  # files, the latest
CODE = Path(__file__).parents[2]  # of this package
PACKAGES = ("torch", "transformers", "peft")  # that capture a named model


class KnownWorkloads:
    """One model's workloads for a request, by micro-batch size and similar. path: of the file; None: none is kept."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    @classmethod
    def of(cls, model: Any, asked: Mapping[str, Any]) -> KnownWorkloads:
        """What is known of a name or a config file. Nothing is kept of other models, nor of ones that the hub may
        change. asked: the settings that change the model's code.
        """
        if not isinstance(model, str | Path):
            return cls()
        path, is_file = config_file(model)
        if not is_file and "/" in str(model):
            return cls()
        config = path.read_text(errors="replace") if is_file else ""  # what is no text is refused as it is read
        facts = json.dumps([str(model), config, dict(asked), _versions()], default=str)
        return cls(default_storage() / CACHE / f"{hashlib.sha256(facts.encode()).hexdigest()[:32]}.json")

    def get_or(self, key: tuple[Any, ...], make: Callable[[], Workload]) -> Workload:
        """The workload of a key, made if it is not known."""
        name = json.dumps(key)
        if name not in self._found:
            self._found[name] = make()
            self._keep()
        return self._found[name]

    @cached_property
    def _found(self) -> dict[str, Workload]:
        try:
            return _format().validate_json(self._path.read_bytes()) if self._path else {}
        except (OSError, ValueError):  # there is none, or it is not ours
            return {}

    def _keep(self) -> None:
        if self._path is None:
            return
        from gs_compile.planner.measure.machines import write_whole  # late: with torch

        try:
            write_whole(self._path, _format().dump_json(self._found).decode())
            files = sorted(self._path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
            for oldest in files[:-MOST]:
                oldest.unlink(missing_ok=True)
        except OSError as error:
            log.warning("the capture could not be stored: %s", error)


def config_file(model: str | Path) -> tuple[Path, bool]:
    """The config file that a model's name is the path of, or of whose folder it is; and whether the file exists."""
    where = Path(model)
    path = where / "config.json" if is_there(where) and where.is_dir() else where
    return path, is_there(path) and path.is_file()


@cache
def _format() -> TypeAdapter[dict[str, Workload]]:
    from pydantic import TypeAdapter

    return TypeAdapter(dict[str, Workload])


@cache
def _versions() -> dict[str, str]:
    """The versions of everything else that a workload depends on; for this package the hash of its code."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = ""
    code = hashlib.sha256()
    for folder, _, names in sorted(os.walk(CODE, followlinks=True)):
        for name in sorted(name for name in names if name.endswith(".py")):
            code.update((Path(folder) / name).read_bytes())
    return versions | {"gs_compile": code.hexdigest()}
