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


@cache
def library() -> dict[str, str]:
    """The source of each module of the library; links are not followed."""
    paths = [path for path in (ROOT / "gs_compile").rglob("*.py") if not {"passes", "runtime"} & set(path.parts)]
    paths += [path for wing in ("passes", "runtime") for path in (ROOT / wing).rglob("*.py")]
    return {module_of(path): path.read_text() for path in sorted(paths)}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "gs_compile" else ("gs_compile", *parts)).removesuffix(".__init__")


def lines_of(folder: str) -> dict[str, int]:
    """The lines of each Python file of a folder that is not of the library."""
    paths = (ROOT / folder).rglob("*.py")
    return {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in paths}


def hold(bound: str, offenders: dict[str, int]) -> None:
    """Compare what is over a bound with what is known to be."""
    known = KNOWN.get(bound, {})
    assert {name: figure for name, figure in offenders.items() if figure > known.get(name, 0)} == {}, bound
    assert known.keys() - offenders.keys() == set(), f"met now, take it out of KNOWN: {bound}"
