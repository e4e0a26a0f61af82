"""The library's source, and how a figure is held against its bound while the bound is not met everywhere.

`over_bounds.json` lists what is over a bound, with its figure: a figure may only fall, and an entry that is no longer
needed fails the test.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KNOWN: dict[str, dict[str, int]] = json.loads((ROOT / "tests" / "over_bounds.json").read_text())


def files() -> dict[str, Path]:
    """Every source file of the library by its place in the package; links are not followed."""
    found = {}
    for folder in ("gs_compile", "passes", "runtime"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            place = path.relative_to(ROOT)
            if folder != "gs_compile":
                found[f"gs_compile/{place}"] = path
            elif place.parts[1] not in ("passes", "runtime"):
                found[str(place)] = path
    return found


@cache
def library() -> dict[str, str]:
    """The source of each module of the library by its name."""
    names = {place: place.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for place in files()}
    return {names[place]: path.read_text() for place, path in files().items()}


def lines_of(folder: str) -> dict[str, int]:
    """The lines of each Python file of a folder that is not of the library."""
    paths = (ROOT / folder).rglob("*.py")
    return {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}


def hold(bound: str, offenders: dict[str, int]) -> None:
    """Compare what is over a bound with what is known to be."""
    known = KNOWN.get(bound, {})
    assert {name: figure for name, figure in offenders.items() if figure > known.get(name, 0)} == {}, bound
    assert known.keys() - offenders.keys() == set(), f"met now, take it out of KNOWN: {bound}"
