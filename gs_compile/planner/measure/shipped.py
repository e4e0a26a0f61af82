"""shipped: the profile of a machine that ships with this package, or is in a file. (This machine's: `machines`.)

Nothing heavy is imported, so that a plan for another machine needs no torch.
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from gs_compile.errors import ProfileError
from gs_compile.machine import is_there
from gs_compile.planner.measure.profile import Profile

SHIPPED = Path(__file__).parent / "machines"
ENVIRONMENT = "GREEDYSNAKE_MACHINE"


def named(machine: str | Path | Profile | None) -> str | Path | Profile | None:
    """The machine that is given, or else the one that the environment names; None: this one, to be measured."""
    return os.environ.get(ENVIRONMENT) or None if machine is None else machine


def known() -> tuple[str, ...]:
    """The names of the machines that ship."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def load(machine: str | Path | Profile) -> Profile:
    """The profile of a name (see `known`) or of a file; a profile is returned as it is.

    Raises `ProfileError` for a name or file that is not a profile's.
    """
    return machine if isinstance(machine, Profile) else Profile.load(_path(machine))


def file_of(machine: str | Path | Profile) -> Path | None:
    """The user's file that a machine is in; None: it ships, or is a profile, or there is no such file."""
    if isinstance(machine, Profile):
        return None
    path = Path(machine).expanduser()
    return path if is_there(path) and not path.is_dir() else None  # of a machine's name may be a folder of results


def _path(machine: str | Path) -> Path:
    """The file of a name, with or without its suffix, or of a path."""
    if (found := file_of(machine)) is not None:
        return found
    path = Path(machine).expanduser()
    name = path.name.removesuffix(".json")
    if path.name == str(path) and name in known():
        return SHIPPED / f"{name}.json"
    if path.name != str(path) or path.suffix == ".json":
        raise ProfileError(f"{path}: there is no such file; machines that ship: {', '.join(known())}")
    close = difflib.get_close_matches(name.lower(), known(), n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ProfileError(f"unknown machine {machine}; {hint}known: {', '.join(known())}, or the path of a profile")
